"""Loops over the layers of a stack, up and down: one period of layers in the body of a `lax.scan`.

Layers after the last whole period, layers that a caller excludes at either end, and all layers if
unrolled are outside the loop. On the way down each layer of a longer period is a loop of one trip:
a compiler that saw them in one region could compute the gradients of all their weights at the end,
and keep the operands until then.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.ops.array_stack import at, put

Tree = Any
Residuals = list[jax.Array]

ONE_LAYER = "one_layer"
"""Name scope, in a compiled program, of the loops of one trip."""


class LayerPosition(NamedTuple):
    """Position of a layer in its stack."""

    index: int | jax.Array
    kind: int  # position in the period


class SavedLayers(NamedTuple):
    """Residuals of the layers from the first on: for each kind in whole periods [periods, G, ...],
    and for each layer after them [G, ...]."""

    periods: tuple[Residuals, ...]
    rest: tuple[Residuals, ...]

    def at(self, layer: LayerPosition) -> Residuals:
        """The residuals of one layer, [G, ...]; after whole periods an index is an integer."""
        period = len(self.periods)
        if isinstance(layer.index, int) and self.rest:
            first = jax.tree.leaves(self.periods)[0].shape[0] * period if period else 0
            if layer.index >= first:
                return self.rest[layer.index - first]
        index = layer.index // period if period > 1 else layer.index
        return at(self.periods[layer.kind], index)


def each(function: Callable, carry: Tree, xs: Tree) -> tuple[Tree, Tree]:
    """`lax.scan`, without a loop for a single item, which XLA schedules better."""
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return jax.lax.scan(function, carry, xs)
    carry, y = function(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], y)


def ascend(
    function: Callable,
    carry: Tree,
    num_layers: int,
    period: int,
    *,
    unroll: bool = False,
    into: SavedLayers | None = None,
    in_place: bool = False,
) -> tuple[Tree, SavedLayers | None]:
    """`function(carry, position) -> (carry, y)` for the first layers of a stack, in order.

    Args:
      unroll: makes no loop; y of each layer are separate arrays.
      into: arrays that the whole periods' y are written to; None makes new ones, which XLA fills
        with zeros first.
      in_place: whether the function writes to them: it is called with `(written, number)`, the
        arrays of the layer's kind and the index in them, and returns them as y.
    """
    if num_layers == 0:
        return carry, None
    whole, in_place = 0 if unroll else num_layers // period, in_place and into is not None

    def one_period(carry, number, *written):
        ys = []
        for kind in range(period):
            index = number * period + kind if period > 1 else number
            given = ((written[0][kind], number),) if in_place else ()
            carry, y = function(carry, LayerPosition(index, kind), *given)
            ys.append(y)
        return carry, tuple(ys)

    def write_period(state, number):
        carry, written = state
        if in_place:
            return one_period(carry, number, written), None
        carry, ys = one_period(carry, number)
        return (carry, put(written, ys, number)), None

    ys = ()
    if whole and into:
        (carry, ys), _ = _count(write_period, (carry, into.periods), range(whole))
    elif whole:
        carry, ys = _count(one_period, carry, range(whole))
    rest = []
    for index in range(whole * period, num_layers):
        carry, y = function(carry, LayerPosition(index, index % period))
        rest.append(y)
    return carry, SavedLayers(ys, tuple(rest))


def descend(
    function: Callable, carry: Tree, top: int, bottom: int, period: int, *, unroll: bool = False
) -> Tree:
    """`function(carry, position) -> carry` for the layers from `top` down to `bottom`."""
    first, end = -(-bottom // period), (top + 1) // period  # whole periods in between
    if unroll or first >= end:
        first = end = 0

    def layer(carry, position):
        return one_layer(function, carry, position) if period > 1 else function(carry, position)

    def singly(carry, indices):
        for index in indices:
            carry = layer(carry, LayerPosition(index, index % period))
        return carry

    def one_period(carry, number):
        for kind in reversed(range(period)):
            index = number * period + kind if period > 1 else number
            carry = layer(carry, LayerPosition(index, kind))
        return carry, None

    if first == end:
        return singly(carry, range(top, bottom - 1, -1))
    carry = singly(carry, range(top, end * period - 1, -1))
    carry, _ = _count(one_period, carry, range(end - 1, first - 1, -1))
    return singly(carry, range(first * period - 1, bottom - 1, -1))


def _count(function: Callable, carry: Tree, numbers: range) -> tuple[Tree, Tree]:
    """`each` for numbers, counted instead of read from an array: XLA knows the value of a loop's
    counter in each trip, and so the offset of an entry of a stack."""
    first = jnp.asarray(numbers[0], jnp.int32)
    if len(numbers) == 1:
        carry, y = function(carry, first)
        return carry, jax.tree.map(lambda x: x[None], y)

    def counted(state, _):
        number, carry = state
        carry, y = function(carry, number)
        return (number + numbers.step, carry), y

    (_, carry), ys = jax.lax.scan(counted, (first, carry), None, length=len(numbers))
    return carry, ys


def one_layer(function: Callable, carry: Tree, position: LayerPosition) -> Tree:
    """`function(carry, position)`, which preserves the types of `carry`, as a loop of one trip."""
    # Behind a barrier: XLA removes a loop with a known count of 1.
    trips = jax.lax.optimization_barrier(jnp.ones((), jnp.int32))
    with jax.named_scope(ONE_LAYER):
        return jax.lax.while_loop(
            lambda state: state[0] < trips,
            lambda state: (state[0] + 1, function(state[1], position)),
            (jnp.zeros((), jnp.int32), carry),
        )[1]
