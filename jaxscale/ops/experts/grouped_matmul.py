"""Matmuls of groups of rows, each group with a matrix of its own: the tokens of each expert.

Letters: R rows, E groups, D and F features. The groups follow one another from row 0 on; rows after
the last group belong to none, and what comes out for them has no meaning.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import RaggedDotDimensionNumbers

from jaxscale.choices import check_choice

IMPLEMENTATIONS = ("blocks", "ragged_dot")
"""`blocks` is a loop over blocks of rows, as many as there are: XLA's CPU back end would multiply
every row by the matrix of every group. `ragged_dot` is XLA's own operation."""

SMALLEST_BLOCK, LARGEST_BLOCK = 8, 1024


def grouped_matmul(
    x_RD: Array,
    w_EDF: Array,
    sizes_E: Array,
    implementation: str,
    *,
    expected: int = 0,
    transposed: bool = False,
) -> Array:
    """[R, D] x [E, D, F] -> [R, F], each row by the matrix of its group.

    Args:
      sizes_E: rows of each group, int32; 0 is allowed.
      implementation: of `IMPLEMENTATIONS`.
      expected: rows that all groups have in the mean, for the size of blocks; 0 is all.
      transposed: whether `w_EDF` is [E, F, D].
    """
    check_choice("the grouped matmul", implementation, IMPLEMENTATIONS)
    if implementation == "ragged_dot":
        contracted = 2 if transposed else 1
        return jax.lax.ragged_dot_general(
            x_RD,
            w_EDF,
            sizes_E,
            RaggedDotDimensionNumbers((([1], [contracted]), ([], [])), [0], [0]),
        )
    return _by_blocks(x_RD, w_EDF, sizes_E, expected or len(x_RD), transposed)


def grouped_weight_gradient(
    x_RD: Array, dy_RF: Array, sizes_E: Array, implementation: str, *, expected: int = 0
) -> Array:
    """[R, D] x [R, F] -> [E, D, F]: for each group the sum over its rows, accumulated in float32 or
    wider; zeros for a group without rows."""
    check_choice("the grouped matmul", implementation, IMPLEMENTATIONS)
    if implementation == "ragged_dot":
        return jax.lax.ragged_dot_general(
            x_RD, dy_RF, sizes_E, RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])
        )
    return _weight_gradient_by_blocks(x_RD, dy_RF, sizes_E, expected or len(x_RD))


def _by_blocks(x_RD: Array, w_EDF: Array, sizes_E: Array, expected: int, transposed: bool) -> Array:
    rows, features = x_RD.shape[0], w_EDF.shape[1 if transposed else 2]
    size = _block_size(expected, len(sizes_E))
    count, place = _blocks(size, sizes_E)
    x_RD = jnp.pad(x_RD, ((0, size), (0, 0)))
    dims = (((1,), (1 if transposed else 0,)), ((), ()))

    def block(number: Array, y_RF: Array) -> Array:
        # The end of a group's last block holds rows of the next group, whose first block comes
        # later and writes them again.
        group, first, _ = place(number)
        x_bD = jax.lax.dynamic_slice_in_dim(x_RD, first, size)
        w_DF = jax.lax.dynamic_index_in_dim(w_EDF, group, keepdims=False)
        y_bF = jax.lax.dot_general(x_bD, w_DF, dims)
        return jax.lax.dynamic_update_slice_in_dim(y_RF, y_bF, first, 0)

    start = jnp.zeros((rows + size, features), x_RD.dtype)
    with _expected_trips(expected, size, len(sizes_E)):
        return jax.lax.fori_loop(0, count, block, start)[:rows]


def _weight_gradient_by_blocks(x_RD: Array, dy_RF: Array, sizes_E: Array, expected: int) -> Array:
    size = _block_size(expected, len(sizes_E))
    count, place = _blocks(size, sizes_E)
    x_RD, dy_RF = (jnp.pad(array, ((0, size), (0, 0))) for array in (x_RD, dy_RF))
    wide = jnp.promote_types(x_RD.dtype, jnp.float32)

    def block(number: Array, dw_EDF: Array) -> Array:
        group, first, left = place(number)
        x_bD, dy_bF = (jax.lax.dynamic_slice_in_dim(a, first, size) for a in (x_RD, dy_RF))
        # Of both: the rows after the last group may hold anything, infinities too.
        mine_b1 = (jnp.arange(size) < left)[:, None]
        x_bD, dy_bF = jnp.where(mine_b1, x_bD, 0), jnp.where(mine_b1, dy_bF, 0)
        dims = (((0,), (0,)), ((), ()))
        dw_DF = jax.lax.dot_general(x_bD, dy_bF, dims, preferred_element_type=wide)
        return dw_EDF.at[group].add(dw_DF)

    start = jnp.zeros((len(sizes_E), x_RD.shape[1], dy_RF.shape[1]), wide)
    with _expected_trips(expected, size, len(sizes_E)):
        return jax.lax.fori_loop(0, count, block, start).astype(x_RD.dtype)


def _blocks(size: int, sizes_E: Array) -> tuple[Array, Callable[[Array], tuple]]:
    """The number of blocks, of which each group has whole ones; and the group of a block, its first
    row, and the rows from there to the group's end."""
    blocks_E = -(-sizes_E // size)
    last_E, ends_E = jnp.cumsum(blocks_E), jnp.cumsum(sizes_E)

    def place(number: Array) -> tuple[Array, Array, Array]:
        group = jnp.searchsorted(last_E, number, side="right")
        before = last_E[group] - blocks_E[group]
        first = ends_E[group] - sizes_E[group] + (number - before) * size
        return group, first, ends_E[group] - first

    return last_E[-1], place


def _block_size(rows: int, groups: int) -> int:
    """A power of two, about a quarter of the mean group: a matmul wants many rows, and the last
    block of a group is half empty on average."""
    quarter = max(rows // groups // 4, 1)
    return min(max(1 << (quarter - 1).bit_length(), SMALLEST_BLOCK), LARGEST_BLOCK)


def _expected_trips(rows: int, size: int, groups: int) -> AbstractContextManager:
    """For `compiled.hlo`, which cannot read the trips of these loops from the program."""
    return jax.named_scope(f"expected_trips_{rows // size + groups // 2}")
