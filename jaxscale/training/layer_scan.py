"""Loops over the layers of a stack, up and down: one period of layers in the body of a `lax.scan`.

Layers whose static settings repeat with a period have a body of that many layers; those after the
last whole period, and those that a caller leaves out at either end, are outside the loop. On the
way down each of these layers is a loop of one trip: a compiler that saw several in one region could
compute the gradients of all their weights at the end, and keep what these need until then.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.ops.stacked import at, put

Tree = Any
Residuals = list[jax.Array]

ONE_LAYER = "one_layer"
"""Name, in a compiled program, of the loops of one trip."""


class Place(NamedTuple):
    """Where a layer is in its stack."""

    index: int | jax.Array
    kind: int


class SavedLayers(NamedTuple):
    """Residuals of the layers from the first one on: of the whole periods, for each kind [periods,
    G, ...], and of each layer after them, [G, ...]."""

    periods: tuple[Residuals, ...]
    rest: tuple[Residuals, ...]

    def at(self, place: Place) -> Residuals:
        """Those of one layer, [G, ...]; after the whole periods an index is an integer."""
        period = len(self.periods)
        if isinstance(place.index, int) and self.rest:
            first = jax.tree.leaves(self.periods)[0].shape[0] * period if period else 0
            if place.index >= first:
                return self.rest[place.index - first]
        index = place.index // period if period > 1 else place.index
        return at(self.periods[place.kind], index)


def each(function: Callable, carry: Tree, xs: Tree, unroll: bool = False) -> tuple[Tree, Tree]:
    """`lax.scan`, but without a loop when there is one item: XLA schedules that better."""
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return jax.lax.scan(function, carry, xs, unroll=unroll)
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
) -> tuple[Tree, SavedLayers | None]:
    """`function(carry, place) -> (carry, y)` for the first layers of a stack, in order.

    Args:
      into: arrays that the whole periods' y are written into; None makes new ones, which XLA fills
        with zeros first.
    """
    if num_layers == 0:
        return carry, None
    whole = num_layers // period

    def one_period(carry, number):
        ys = []
        for kind in range(period):
            index = number * period + kind if period > 1 else number
            carry, y = function(carry, Place(index, kind))
            ys.append(y)
        return carry, tuple(ys)

    def write_period(state, number):
        carry, written = state
        carry, ys = one_period(carry, number)
        return (carry, put(written, ys, number)), None

    numbers, ys = jnp.array(range(whole)), ()
    if whole and into:
        (carry, ys), _ = each(write_period, (carry, into.periods), numbers, unroll)
    elif whole:
        carry, ys = each(one_period, carry, numbers, unroll)
    rest = []
    for index in range(whole * period, num_layers):
        carry, y = function(carry, Place(index, index % period))
        rest.append(y)
    return carry, SavedLayers(ys, tuple(rest))


def descend(
    function: Callable, carry: Tree, top: int, bottom: int, period: int, *, unroll: bool = False
) -> Tree:
    """`function(carry, place) -> carry` for the layers from `top` down to `bottom`."""
    first, end = -(-bottom // period), (top + 1) // period  # whole periods in between
    if first >= end:
        first = end = 0

    def layer(carry, place):
        return one_layer(function, carry, place) if period > 1 else function(carry, place)

    def singly(carry, indices):
        for index in indices:
            carry = layer(carry, Place(index, index % period))
        return carry

    def one_period(carry, number):
        for kind in reversed(range(period)):
            index = number * period + kind if period > 1 else number
            carry = layer(carry, Place(index, kind))
        return carry, None

    if first == end:
        return singly(carry, range(top, bottom - 1, -1))
    carry = singly(carry, range(top, end * period - 1, -1))
    numbers = jnp.array(range(end - 1, first - 1, -1))
    carry, _ = each(one_period, carry, numbers, unroll)
    return singly(carry, range(first * period - 1, bottom - 1, -1))


def one_layer(function: Callable, carry: Tree, place: Place) -> Tree:
    """`function(carry, place)`, which leaves the types of `carry` as they are, as a loop of one
    trip."""
    # Of a count that the compiler knows it would make no loop.
    trips = jax.lax.optimization_barrier(jnp.ones((), jnp.int32))
    with jax.named_scope(ONE_LAYER):
        return jax.lax.while_loop(
            lambda state: state[0] < trips,
            lambda state: (state[0] + 1, function(state[1], place)),
            (jnp.zeros((), jnp.int32), carry),
        )[1]
