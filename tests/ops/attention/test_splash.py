"""Our kernels for TPUs, interpreted on a CPU, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.ops.attention.attention import attention, score_settings
from jaxscale.ops.attention.splash import _visits, splash_attention
from jaxscale.ops.attention.splash_kernels import (
    COLUMN_BITS,
    FIRST,
    LAST,
    MASKED,
    OPEN,
    blocks_of,
)
from tests.ops.attention.test_attention import arguments, assert_close, parity
from tests.ops.attention.test_context import spread


def splash(*args, block=16, **settings):
    scoring = score_settings(*args[:2], *args[4:6], **settings)
    return splash_attention(*args, scoring=scoring, block=block, interpret=True)


CASES: dict[str, dict] = {
    "sinks, window, capped": {"sinks": 1, "sliding_window": 20, "soft_cap": 0.7},
    "bias beyond its distance": {"buckets": 6, "max_distance": 11, "scale": 0.4, "block": 8},
    "cross": {"key_time": 32, "causal": False},
}


@pytest.mark.proof(but=("cross",))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_kernels_are_the_reference(case):
    """Documents in every way; in cross attention some queries see no key."""
    case = dict(case)
    run = functools.partial(splash, block=case.pop("block", 16))
    assert_close(*parity(case, run, time=48), 1e-12)


SPREAD: dict[str, dict] = {
    "ring-sinks, window, capped": {"ranks": 4, "sinks": 1, "sliding_window": 14, "soft_cap": 0.7},
    "ring-cross": {"ranks": 2, "key_time": 32, "causal": False},
    "gather-causal": {"ranks": 4},
    "gather-bias, both ways": {"ranks": 2, "causal": False, "buckets": 8, "max_distance": 25},
}


@pytest.mark.proof
@pytest.mark.parametrize("name", SPREAD)
def test_a_spread_sequence_is_the_reference(name):
    case = dict(SPREAD[name])
    run = spread(case.pop("ranks"), name.partition("-")[0], block=8, kernel="splash")
    assert_close(*parity(case, run, time=64), 1e-12)


@pytest.mark.proof
def test_bfloat16_is_close_to_float64_and_kept():
    case = {"kv_heads": 1, "causal": False, "sliding_window": 40}
    got, expected = parity(case, splash, 64, jnp.bfloat16)
    assert [value.dtype for value in got] == [jnp.bfloat16] * 4
    assert_close(got, expected, 12 * float(jnp.finfo(jnp.bfloat16).eps))


def listed(seen, whole):
    """Row, column, and whether all keys are seen, of the visits that compute; and of the others."""
    codes, count = jax.jit(_visits)(np.array(seen, bool), np.array(whole, bool))
    codes = np.asarray(codes)[: int(count)]
    flags = [int(code) % 2**COLUMN_BITS for code in codes]
    assert [flag & FIRST > 0 for flag in flags] == [
        i == 0 or blocks_of(codes[i])[0] != blocks_of(codes[i - 1])[0] for i in range(len(codes))
    ]
    ends = [flag & LAST > 0 for flag in flags]
    assert ends == [flag & FIRST > 0 for flag in flags[1:]] + [True]
    return [
        (*map(int, blocks_of(code)), bool(flag & OPEN))
        for code, flag in zip(codes, flags)
        if flag & (OPEN | MASKED)
    ], int(count)


def test_visits_are_the_blocks_that_are_seen_and_one_of_a_row_that_sees_none():
    seen = [[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1]]
    whole = [[0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    found, count = listed(seen, whole)
    assert found == [(0, 0, False), (1, 0, True), (1, 1, False), (3, 2, False)]
    assert count == 5


@pytest.mark.proof
def test_no_array_has_all_scores():
    args = arguments(256, 2, 1, buckets=8, dtype=jnp.float32)
    text = str(jax.make_jaxpr(functools.partial(splash, block=64))(*args))
    assert "256,256" not in text
    plain = functools.partial(attention, implementation="reference")
    assert "256,256" in str(jax.make_jaxpr(plain)(*args))


def test_more_blocks_than_a_list_has_numbers_for_are_refused():
    """Of a long sequence in blocks of 16: their numbers would run into another field's bits."""
    seen = jnp.zeros((1, 8193), bool)
    with pytest.raises(ValueError, match="1 x 8193 blocks, and lists at most 16383 x 8192"):
        _visits(seen, seen)
