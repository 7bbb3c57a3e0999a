"""The arithmetic of attention in blocks: what is left out, and keys that come in several parts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.ops.attention import blocks
from jaxscale.ops.attention.blocks import Scoring
from tests.ops.attention.test_attention import arguments, assert_close


@pytest.mark.parametrize("offset", [0, 8, 32])
def test_blocks_that_nobody_sees_are_left_out_and_no_others(offset):
    """Queries and keys are two stretches of 64 places, `offset` places apart, of one sequence."""
    rng = np.random.default_rng(1)
    ordered = np.sort(rng.integers(0, 9, size=(1, 96)))
    mixed = rng.integers(0, 6, size=(2, 96))
    cases = itertools.product(
        ((ordered, 0), (ordered, 9), (ordered, 12), (mixed, 17)), (True, False)
    )
    for (segments, window), causal in cases:
        here = {"query": slice(offset, offset + 64), "key": slice(0, 64)}
        split = {
            name: jnp.asarray(segments[:, places].reshape(-1, 8, 8).swapaxes(0, 1))
            for name, places in here.items()
        }
        visible = np.asarray(
            blocks.visible(
                split["query"], split["key"], offset=offset, scoring=Scoring(1.0, window, causal)
            )
        )
        time = np.arange(96)
        distance = time[:, None] - time
        mask = np.abs(distance) < (window or 96)
        mask &= (distance >= 0) | (not causal)
        mask = (mask & (segments[:, :, None] == segments[:, None, :])).any(0)
        needed = mask[here["query"], here["key"]].reshape(8, 8, 8, 8).any((1, 3))
        assert not np.any(needed & ~visible)
        if segments is ordered:
            # Neighbouring documents may share a pair of blocks; nothing else is in excess.
            assert visible.sum() <= needed.sum() + (1 if causal else 2)
            assert visible.sum() < (36 if causal else 64)


@pytest.mark.proof(but=("7",))
@pytest.mark.parametrize("window", [0, 7])
def test_keys_may_come_in_parts_and_in_any_order(window):
    """Queries see their own stretch last, and keys beyond them not at all."""
    q, k, v, segments = arguments(24, 4, 2)
    scoring = Scoring(8**-0.5, window)

    def in_parts(q, k, v, segments):
        # Two stretches of 12, in blocks of 5: the last block of each is not full.
        parts = [
            blocks.in_blocks(
                blocks.AttentionArrays(*(x[:, s : s + 12] for x in (q, k, v, segments))), 5
            )
            for s in (0, 12)
        ]
        out = []
        for i, (queries, _) in enumerate(parts):
            softmax = blocks.start(queries.q, v.shape[-1])
            for j in (1 - i, i):
                softmax = blocks.attend(
                    softmax, queries, parts[j][1], offset=12 * (i - j), scoring=scoring
                )
            out.append(blocks.from_query_blocks(blocks.finish_softmax(softmax, q.dtype)[0], 12))
        return jnp.concatenate(out, axis=1)

    def at_once(q, k, v, segments):
        queries, keys = blocks.in_blocks(blocks.AttentionArrays(q, k, v, segments), 24)
        softmax = blocks.attend(
            blocks.start(queries.q, v.shape[-1]), queries, keys, offset=0, scoring=scoring
        )
        return blocks.from_query_blocks(blocks.finish_softmax(softmax, q.dtype)[0], 24)

    got, expected = (jax.jit(function)(q, k, v, segments) for function in (in_parts, at_once))
    assert_close([got], [expected], 1e-13)
