"""Collective matmul: an all-gather or reduce-scatter as ring steps that overlap matmuls.

An all-gather followed by matmuls, or matmuls followed by a reduce-scatter, cannot overlap. Here
each is one matmul per rank's chunk, overlapping permutations between neighbours in both directions
(Wang et al., "Overlap communication with dependent computation via decomposition in large deep
learning models", ASPLOS 2023). The steps are unrolled, so that XLA's scheduler sees all of them. It
overestimates the time of a permutation, would overlap most matmuls with a single one, and merges
matmuls with the same weights. Each chunk is therefore made to wait for the matmuls of the one
before.

All functions are for one rank, with the axis manual; `multiply` is `ops.matmul.matmul` with a type
and a role. Shapes: B batch, T time, t a rank's part of T, D features of the residual stream, c
contracted dimensions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxscale.ops.matmul import matmul


def gather_matmuls(
    x_BtD: Array,
    weights: Sequence[Array],
    axis: str,
    o: int,
    multiply: Callable[..., Array] = matmul,
) -> tuple[Array, tuple[Array, ...]]:
    """All-gathers x to [B, T, D] and multiplies it by weights with D as dimension `o`."""
    ranks, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    arrived = {1: x_BtD, -1: x_BtD}
    made: list[Array] = []
    gathered: list[Array] = []
    for distance, way in _nearest_first(ranks):
        if distance:
            arrived[way] = _after(made, _shifted(arrived[way], axis, way))
        chunk_BtD = arrived[way]
        made = [multiply(chunk_BtD, weight, ([2], [o])) for weight in weights]
        parts = [chunk_BtD, *made]
        start = (rank - way * distance) % ranks * x_BtD.shape[1]
        gathered = gathered or [_empty_whole(part, ranks) for part in parts]
        gathered = [
            jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis=1)
            for whole, part in zip(gathered, parts)
        ]
    return gathered[0], tuple(gathered[1:])


def matmuls_scatter(
    xs: Sequence[Array],
    weights: Sequence[Array],
    axis: str,
    o: int,
    multiply: Callable[..., Array] = matmul,
) -> Array:
    """Sums matmuls [B, T, *c] x weight over ranks and scatters the result: [B, t, D].

    Partial sums are sent to their rank from both sides. Each rank on the way adds its part, in
    float32 or wider; messages are rounded to the type of the result.

    Args:
      o: the dimension D of the weights; all others are c.
    """
    ranks, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    size, dtype = xs[0].shape[1] // ranks, jnp.result_type(*xs, *weights)
    wide = jnp.promote_types(dtype, jnp.float32)
    arrived: dict[int, Array] = {}
    made: list[Array] = []
    total: Any = None
    for distance, way in reversed(_nearest_first(ranks)):
        start = (rank + way * distance) % ranks * size + _zero_after(made)
        made = []
        for x, weight in zip(xs, weights):
            chunk = jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)
            contracted = [c for c in range(weight.ndim) if c != o]
            made.append(multiply(chunk, weight, (range(2, x.ndim), contracted), result=wide))
        total = sum(made[1:], made[0])
        for came in (arrived.pop(way, None), None if distance else arrived.pop(-way, None)):
            total = total if came is None else total + came.astype(wide)
        if distance:
            arrived[way] = _shifted(total.astype(dtype), axis, way)
    return total.astype(dtype)


def _nearest_first(ranks: int) -> list[tuple[int, int]]:
    """(distance, direction) of the chunks that a rank receives, after its local one.

    >>> _nearest_first(4)
    [(0, 1), (1, 1), (1, -1), (2, 1)]
    """
    both = [(distance, way) for distance in range(1, ranks // 2 + 1) for way in (1, -1)]
    return [(0, 1), *both][:ranks]


def _shifted(x: Array, axis: str, way: int) -> Array:
    """Sends x to the next rank, or with `way` -1 to the previous one."""
    ranks = jax.lax.axis_size(axis)
    return jax.lax.ppermute(x, axis, [(i, (i + way) % ranks) for i in range(ranks)])


def _empty_whole(part: Array, ranks: int) -> Array:
    """An uninitialised array for the parts [B, t, ...] of all ranks."""
    return jax.lax.empty((part.shape[0], ranks * part.shape[1], *part.shape[2:]), part.dtype)


def _zero_after(made: Sequence[Array]) -> Any:
    """Zero with a data dependence on the arrays, since XLA removes optimization barriers before it
    schedules."""
    return sum((x[(0,) * x.ndim] > jnp.inf).astype(jnp.int32) for x in made)


def _after(made: Sequence[Array], x: Array) -> Array:
    """x with a data dependence on the arrays."""
    if not made:
        return x
    first = x[:1, :1, :1]
    return jax.lax.dynamic_update_slice(
        x, jnp.where(_zero_after(made) > 0, jnp.zeros_like(first), first), (0, 0, 0)
    )
