"""Loops over the layers of a chunk, and over those of two chunks at once.

For an overlapped pair of operations one loop has a layer of the forward pass and a layer of the
backward pass in its body, so that a collective of one can overlap the matmuls of the other; XLA
does not overlap two loops.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.ops.array_stack import after
from jaxscale.pipeline.layers.stack_part import StackPart
from jaxscale.pipeline.rank import Rank, Row, State, when
from jaxscale.pipeline.stages import KIND, LAYERS, PAIR_ALONE, PAIRED_LAYERS

Tree = Any
One = Callable[..., Tree]  # (index, kind, carry) -> carry, of a layer
WRITTEN = ("input", "residual_b", "residual_w")
"""The columns with the slots that a forward pass writes for each layer."""


def each_layer(
    rank: Rank, row: Row, part: StackPart, one: One, carry: Tree, downward: bool = False
) -> Tree:
    """`one` for each layer of the row's chunk, if it is of this stack."""
    loop = _Loop.of(rank, row, part, one, downward)
    with jax.named_scope(rank.scope(LAYERS, part)):
        return jax.lax.fori_loop(0, loop.periods, loop.body, carry)


def each_pair(
    rank: Rank,
    rows: Sequence[Row],
    part: StackPart,
    forward: tuple[One, Tree],
    backward: tuple[One, tuple],
) -> tuple[State, Tree, tuple]:
    """`each_layer` of a forward pass and, downward, of a backward pass, in one loop.

    Args:
      rows: of both operations.
      forward: for a layer, and its carry without the state.
      backward: the same, and the state with its carry.

    Returns:
      The state and both carries.
    """
    (one, x), (one_back, (state, *others)) = forward, backward
    ahead = _Loop.of(rank, rows[0], part, one, downward=False)
    back = _Loop.of(rank, rows[1], part, one_back, downward=True)

    def step_ahead(i, carry, row=rows[0]):
        state, x, others = carry
        with_row = ahead._replace(one=functools.partial(one, row=row))
        state, x = with_row.body(i, (state, x))
        return state, x, others

    def step_back(i, carry):
        state, x, others = carry
        state, *others = back.body(i, (state, *others))
        return state, x, others

    def both(i, carry):
        # Neither pass waits for the other, but what the forward pass writes to buffers is written
        # after the backward pass, which reads them. XLA, which does not know that the slots differ,
        # copies a buffer in each layer if its reads might come after its writes.
        state, x, others = step_back(i, carry)
        ended = after(0, (others, _results(state, part)))
        row = {**rows[0], **{name: rows[0][name] + ended for name in WRITTEN}}
        return step_ahead(i, (state, x, others), row)

    carry, least = (state, x, others), jnp.minimum(ahead.periods, back.periods)
    with jax.named_scope(PAIRED_LAYERS):
        carry = jax.lax.fori_loop(0, least, both, carry)
    if len(set(rank.stages.layers)) > 1:
        for loop, step in ((ahead, step_ahead), (back, step_back)):
            with jax.named_scope(PAIR_ALONE):
                carry = jax.lax.fori_loop(least, loop.periods, step, carry)
    return carry


def _results(state: State, part: StackPart) -> Tree:
    """What a layer's backward pass has added to or written."""
    sums = state.grads if state.pending is None else state.pending
    return sums[part.name], state.buffers["cotangent"]


class _Loop(NamedTuple):
    """A loop over the layers of a chunk, in periods of the stack's settings."""

    one: One
    count: jax.Array  # layers
    period: int
    is_whole: bool  # whether every chunk has whole periods
    downward: bool

    @classmethod
    def of(cls, rank: Rank, row: Row, part: StackPart, one: One, downward: bool) -> "_Loop":
        count = rank.chunks["count"][row["chunk"]]
        if len(rank.stages.stacks) > 1:  # an evaluation may omit the last stacks
            count = jnp.where(rank.chunks["stack"][row["chunk"]] == part.number, count, 0)
        is_whole = rank.stages.whole_periods(part.number)
        return cls(one, count, part.stack.period, is_whole, downward)

    @property
    def periods(self) -> jax.Array:
        return self.count if self.period == 1 else -(-self.count // self.period)

    def body(self, i: jax.Array, carry: Tree) -> Tree:
        if self.period == 1:
            return self.one(self.count - 1 - i if self.downward else i, 0, carry)
        number, kinds = (self.periods - 1 - i if self.downward else i), range(self.period)
        for kind in reversed(kinds) if self.downward else kinds:
            index = number * self.period + kind
            if self.is_whole:
                carry = self.one(index, kind, carry)
            else:
                body = functools.partial(self.one, index, kind)
                carry = when(index < self.count, body, carry, KIND)
        return carry
