"""Attention over a spread sequence: against the reference, its balance, its messages."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxscale.ops.attention import blocks
from jaxscale.ops.attention.attention import attention, score_settings
from jaxscale.ops.attention.context import context_attention
from jaxscale.ops.attention.context_chunks import balanced_order, owners, sources
from jaxscale.ops.attention.flash import flash_attention
from jaxscale.ops.attention.splash import splash_attention
from jaxscale.ops.attention.ulysses import ulysses_attention
from tests.ops.attention.test_attention import (
    arguments,
    assert_close,
    differentiated,
    parity,
    with_gradients,
)
from tests.ops.programs import equations

METHODS = ("ring", "pairs", "gather")
ULYSSES = "ulysses"


def spread(ranks, method, *, block=None, kernel="blockwise"):
    """`context_attention`, or a platform's kernels on a CPU, as a function of whole sequences in
    their own order."""
    kernel = functools.partial(
        {
            "blockwise": functools.partial(context_attention, block=block),
            "flash": functools.partial(flash_attention, interpret=True),
            "splash": functools.partial(splash_attention, block=block, interpret=True),
        }[kernel],
        method=method,
    )
    mesh = jax.make_mesh(
        (ranks,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks]
    )
    time = P(None, "context")

    def attend(*args, **settings):
        if method == ULYSSES:
            within = functools.partial(attention, implementation="blockwise", **settings)
            local = functools.partial(ulysses_attention, axis="context", attend=within)
        else:
            scoring = score_settings(*args[:2], *args[4:6], **settings)
            local = functools.partial(kernel, axis="context", scoring=scoring)
        *tokens, bias, sinks = (*args, None, None, None)[:7]
        specs = (*[time] * 5, P(), P())
        run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=time, check_vma=False)
        orders = [None if x is None else balanced_order(x.shape[1], ranks) for x in tokens]
        reordered = [None if x is None else x[:, order] for x, order in zip(tokens, orders)]
        return run(*reordered, bias, sinks)[:, np.argsort(orders[0])]

    return attend


@pytest.mark.parametrize(("seq_len", "ranks"), [(8, 1), (7, 1), (8, 2), (24, 4), (48, 8)])
def test_the_balanced_order_gives_each_rank_an_early_and_a_late_chunk(seq_len, ranks):
    order = balanced_order(seq_len, ranks)
    np.testing.assert_array_equal(np.sort(order), np.arange(seq_len))
    np.testing.assert_array_equal(np.argsort(order)[order], np.arange(seq_len))
    shares = order.reshape(ranks, -1)
    # Query p sees p + 1 keys: those of a rank see as many as those of any other.
    assert len(set((shares + 1).sum(axis=1))) == 1
    np.testing.assert_array_equal(shares, np.sort(shares, axis=1))


CASES: dict[str, dict] = {
    "eight ranks, window of some chunks": {"ranks": 8, "sliding_window": 10},
    "window less than a chunk, capped": {"ranks": 4, "sliding_window": 3, "soft_cap": 0.7},
    "broken blocks": {"ranks": 2, "block": 5, "scale": 0.4},
    "both ways, bias": {"ranks": 2, "block": 7, "causal": False, "buckets": 8, "max_distance": 25},
    "both ways, window": {"ranks": 4, "causal": False, "sliding_window": 17},
    "bias": {"ranks": 4, "buckets": 6, "max_distance": 15},
    "sinks": {"ranks": 2, "block": 5, "sinks": 1, "sliding_window": 9},
    "cross": {"ranks": 2, "block": 5, "causal": False, "key_time": 32},
}


BY_ALL = ("eight ranks, window of some chunks", "both ways, bias", "sinks")
"""The others by one method each, in turn: pairs of chunks do not depend on the case."""


@pytest.mark.proof(but=("cross-gather", "broken blocks-pairs"))
@pytest.mark.parametrize(
    ("name", "method"),
    [
        (name, method)
        for number, name in enumerate(CASES)
        for method in (METHODS if name in BY_ALL else METHODS[2 * number % 3 :][:1])
    ],
)
def test_a_spread_sequence_is_the_reference(name, method):
    case = dict(CASES[name])
    run = spread(case.pop("ranks"), method, block=case.pop("block", None))
    assert_close(*parity(case, run, time=48), 1e-12)


@pytest.mark.proof(but=("cross",))
@pytest.mark.parametrize(
    ("ranks", "case"),
    [
        (4, {"buckets": 6, "max_distance": 15, "kv_heads": 1}),
        (2, {"sinks": 1, "sliding_window": 9}),
        (2, {"causal": False, "key_time": 32}),
    ],
    ids=["one key head for four ranks", "sinks and a window", "cross"],
)
def test_whole_sequences_for_some_heads_are_the_reference(ranks, case):
    assert_close(*parity(case, spread(ranks, ULYSSES), time=48), 1e-12)


@pytest.mark.proof
def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(
        ValueError, match=r"4 heads and 2 key/value heads do not divide over 8 ranks"
    ):
        spread(8, ULYSSES)(*arguments(48, 4, 2))


@pytest.mark.proof
@pytest.mark.parametrize(
    ("method", "time", "case"),
    [
        ("ring", 192, {"sinks": 1, "sliding_window": 50, "soft_cap": 0.7}),
        ("gather", 64, {"buckets": 8, "max_distance": 25, "value_dim": 16}),
        ("ring", 64, {"causal": False, "key_time": 128}),
    ],
    ids=["sinks, window, capped", "bias, wide values", "cross"],
)
def test_the_kernels_for_gpus_are_the_reference(method, time, case):
    """Chunks of several blocks; a document may end in any."""
    assert_close(*parity(case, spread(2, method, kernel="flash"), time=time), 1e-12)


@pytest.mark.proof
def test_the_kernels_for_gpus_are_close_in_bfloat16():
    case = {"kv_heads": 1, "causal": False}
    got, expected = parity(case, spread(2, "gather", kernel="flash"), time=64, dtype=jnp.bfloat16)
    assert [value.dtype for value in got] == [jnp.bfloat16] * 4
    assert_close(got, expected, 12 * float(jnp.finfo(jnp.bfloat16).eps))


@pytest.mark.proof
@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_is_close_to_float64_and_kept(method):
    case = {"kv_heads": 1, "causal": False, "buckets": 8, "max_distance": 25}
    got, expected = parity(case, spread(2, method), time=48, dtype=jnp.bfloat16)
    assert [value.dtype for value in got] == [jnp.bfloat16] * 5
    # The last is the table's gradient, a sum of about 4 x 48 x 48 / 8 terms of rounded scores.
    assert_close(got[:4], expected[:4], 12 * float(jnp.finfo(jnp.bfloat16).eps))
    assert_close(got[4:], expected[4:], 0.1)


@pytest.mark.proof
@pytest.mark.parametrize("method", METHODS)
def test_every_rank_computes_the_same_number_of_blocks(method, monkeypatch):
    """Counted where it happens: each rank reports each block that it computes."""
    ranks, chunk, block = 4, 6, 2
    counts = collections.Counter()

    def counting(mask):
        def count(*args):
            jax.debug.callback(
                lambda rank: counts.update([int(rank)]), jax.lax.axis_index("context")
            )
            return mask(*args)

        return count

    monkeypatch.setattr(blocks, "_mask", counting(blocks._mask))
    args = arguments(2 * ranks * chunk, 2, 1, packing="one", batch=1)
    run = spread(ranks, method, block=block)
    jax.block_until_ready(with_gradients(run)(*args))
    jax.effects_barrier()
    in_chunk = chunk // block
    below, on_diagonal = 2 * ranks - 1, 2
    once = below * in_chunk**2 + on_diagonal * in_chunk * (in_chunk + 1) // 2
    assert counts == dict.fromkeys(range(ranks), 2 * once)  # forward, and backward


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_in_pairs_every_rank_meets_every_other_once(ranks):
    hops, places = sources("pairs", ranks), np.arange(ranks)
    for hop in hops:
        np.testing.assert_array_equal(hop[hop], places)  # each sends to its source,
        assert set((hop - places) % ranks) == {1, ranks - 1}  # a neighbour
    table = owners(hops)
    np.testing.assert_array_equal(np.sort(table, axis=0), np.tile(places[:, None], ranks))
    # One more hop, and gradients are where their keys came from.
    np.testing.assert_array_equal(table[-1][hops[-1]], places)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("method", "ranks"), [("ring", 2), ("ring", 4), ("pairs", 2), ("pairs", 4)]
)
def test_the_ring_sends_keys_to_neighbours_alone(method, ranks):
    """As many times in either form: a gather of a pair receives what the neighbour has."""
    args = arguments(48, 4, 2)
    run = spread(ranks, method)
    forms = {"ring": "ppermute", "pairs": "all_gather"}

    def sent(function):
        counts = collections.Counter()
        for equation, times in equations(jax.make_jaxpr(function)(*args).jaxpr):
            name = equation.primitive.name
            assert name not in ("all_to_all", "psum", "psum_scatter", "cond"), name
            if name in forms.values():
                assert name == forms[method]
                links = equation.params.get("perm") or equation.params["axis_index_groups"]
                assert all((b - a) % ranks in (1, ranks - 1) for a, b in links)
                assert method == "pairs" or links == tuple(
                    (i, (i + 1) % ranks) for i in range(ranks)
                )
                counts["times"] += times
        return counts["times"]

    forward = 3 * (ranks - 1)  # keys, values and segments
    assert sent(run) == forward
    # Again in the backward pass, where two gradients are sent around the whole ring.
    assert sent(differentiated(run)) == 2 * forward + 2 * ranks
