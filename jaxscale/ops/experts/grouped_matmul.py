"""Grouped matmul: each group of rows (the tokens of an expert) times a separate matrix.

Letters: R rows, E groups, D and F features. The groups follow one another from row 0; rows after
the last group have no group, and their results are undefined.

With 8 bits (`ops.matmul`) each matrix is scaled separately, so that scales do not depend on the
sharding of experts. In `int8` each row has a scale; in `float8` all rows of all groups have one
power of two, as the activations of `linear` do.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax
import jax.numpy as jnp
from etils import epy
from jax import Array
from jax.lax import RaggedDotDimensionNumbers
from jax.typing import DTypeLike

from jaxscale.choices import check_choice
from jaxscale.ops.matmul import (
    FORWARD,
    INPUT_GRADIENT,
    OPERANDS,
    WEIGHT_GRADIENT,
    scaled_float8,
    scaled_int8,
)

with epy.lazy_imports():  # half a second, and only a GPU needs it
    from jaxscale.ops.experts import grouped_kernels

IMPLEMENTATIONS = ("blocks", "ragged_dot", "kernels")
"""`blocks` is a loop over blocks of rows with a dynamic trip count. `ragged_dot` is XLA's
operation, which on CPUs and GPUs (jax 0.12) multiplies every row by the matrix of every group.
`kernels` are Pallas kernels for GPUs (`grouped_kernels.py`)."""

SMALLEST_BLOCK, LARGEST_BLOCK = 8, 1024


def grouped_matmul(
    x_RD: Array,
    w_EDF: Array,
    sizes_E: Array | None,
    implementation: str,
    *,
    expected: int = 0,
    transposed: bool = False,
    dtype: str = "",
    over: str | None = None,
    interpret: bool = False,
) -> Array:
    """[R, D] x [E, D, F] -> [R, F], each row times the matrix of its group.

    Args:
      sizes_E: rows of each group, int32; 0 is allowed. None: equal groups of all rows.
      implementation: of `IMPLEMENTATIONS`.
      expected: mean total of rows in groups, for the size of blocks; 0 is all rows.
      transposed: whether `w_EDF` is [E, F, D], as in a backward pass.
      dtype: `model.matmul_dtype`; "" keeps the operands' types.
      over: a manual mesh axis that shards D, for scales along D.
      interpret: runs kernels on a CPU, slowly.
    """
    check_choice("the grouped matmul", implementation, IMPLEMENTATIONS)
    operands = _quantised(x_RD, w_EDF, sizes_E, transposed, dtype, over)
    if sizes_E is None:
        return _of_equal_groups(operands, transposed)
    expected = expected or len(x_RD)
    if implementation == "blocks":
        return _by_blocks(operands, sizes_E, expected, transposed)
    if implementation == "ragged_dot":
        contracted = 2 if transposed else 1
        y_RF = jax.lax.ragged_dot_general(
            operands.x,
            operands.w,
            sizes_E,
            RaggedDotDimensionNumbers((([1], [contracted]), ([], [])), [0], [0]),
            preferred_element_type=operands.sums,
        )
    else:
        y_RF = grouped_kernels.kernel_rows(
            operands.x,
            operands.w,
            sizes_E,
            expected=expected,
            transposed=transposed,
            result=operands.sums,
            interpret=interpret,
        )
    return _rescaled(operands, y_RF, operands.of_x, _of_rows(operands.of_w, sizes_E, len(x_RD)))


def grouped_weight_gradient(
    x_RD: Array,
    dy_RF: Array,
    sizes_E: Array | None,
    implementation: str,
    *,
    num_groups: int = 0,
    expected: int = 0,
    dtype: str = "",
    interpret: bool = False,
) -> Array:
    """[R, D] x [R, F] -> [E, D, F]: for each group the sum over its rows, accumulated in float32 or
    wider; zeros for an empty group.

    Args:
      num_groups: E, where `sizes_E` is None.
      expected, dtype, interpret: as in `grouped_matmul`.
    """
    check_choice("the grouped matmul", implementation, IMPLEMENTATIONS)
    result, scale = x_RD.dtype, None
    if types := OPERANDS.get((dtype, WEIGHT_GRADIENT)):
        (x_RD, of_x), (dy_RF, of_dy) = (
            scaled_float8(_used_rows(rows, sizes_E), to) for rows, to in zip((x_RD, dy_RF), types)
        )
        scale = (of_x * of_dy).astype(result)
    if sizes_E is None:
        x_ErD, dy_ErF = (rows.reshape(num_groups, -1, rows.shape[1]) for rows in (x_RD, dy_RF))
        dims = (((1,), (1,)), ((0,), (0,)))
        dw_EDF = jax.lax.dot_general(x_ErD, dy_ErF, dims, preferred_element_type=result)
    elif implementation == "ragged_dot":
        dw_EDF = jax.lax.ragged_dot_general(
            x_RD,
            dy_RF,
            sizes_E,
            RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], []),
            preferred_element_type=result,
        )
    elif implementation == "blocks":
        dw_EDF = _weight_gradient_by_blocks(x_RD, dy_RF, sizes_E, expected or len(x_RD), result)
    else:
        dw_EDF = grouped_kernels.kernel_weight_gradient(
            x_RD,
            dy_RF,
            sizes_E,
            expected=expected or len(x_RD),
            result=result,
            interpret=interpret,
        )
    return dw_EDF if scale is None else dw_EDF * scale


class _Operands(NamedTuple):
    """The operands of a grouped matmul, and the scales of its result; None is no scale."""

    x: Array  # [R, D]
    w: Array  # [E, D, F] or [E, F, D]
    of_x: Array | None  # [R, 1], float32 or wider
    of_w: Array | None  # of each column, [E, F], or of each matrix, [E, 1]
    sums: DTypeLike  # the type of the matmul's result
    result: DTypeLike  # the type after scaling


def _quantised(
    x_RD: Array,
    w_EDF: Array,
    sizes_E: Array | None,
    transposed: bool,
    dtype: str,
    over: str | None,
) -> _Operands:
    result = x_RD.dtype
    types = OPERANDS.get((dtype, INPUT_GRADIENT if transposed else FORWARD))
    if types is None:
        return _Operands(x_RD, w_EDF, None, None, result, result)
    if dtype == "float8":
        x_RD, of_x = scaled_float8(_used_rows(x_RD, sizes_E), types[0])
        w_EDF, of_w_E = jax.vmap(lambda w_DF: scaled_float8(w_DF, types[1]))(w_EDF)
        return _Operands(x_RD, w_EDF, None, (of_w_E * of_x)[:, None], result, result)
    x_RD, of_x_R = scaled_int8(x_RD, [1], over)
    w_EDF, of_w_EF = scaled_int8(w_EDF, [2 if transposed else 1], over)
    return _Operands(x_RD, w_EDF, of_x_R[:, None], of_w_EF, jnp.int32, result)


def _used_rows(x_RD: Array, sizes_E: Array | None) -> Array:
    """Sets rows after the last group to zero: they are undefined and must not affect a scale."""
    if sizes_E is None:
        return x_RD
    return jnp.where((jnp.arange(len(x_RD)) < jnp.sum(sizes_E))[:, None], x_RD, 0)


def _rescaled(operands: _Operands, y: Array, of_x: Array | None, of_w: Array | None) -> Array:
    """Scales the result of a matmul of quantised operands; the scales broadcast against it."""
    if of_w is None:
        return y
    if of_x is None:
        return y * of_w.astype(operands.result)
    steps = of_x * of_w
    return (y.astype(steps.dtype) * steps).astype(operands.result)


def _of_rows(of_w_EF: Array | None, sizes_E: Array, rows: int) -> Array | None:
    """Repeats each group's scales for its rows, [R, F] or [R, 1]."""
    if of_w_EF is None:
        return None
    return jnp.repeat(of_w_EF, sizes_E, axis=0, total_repeat_length=rows)


def _of_equal_groups(operands: _Operands, transposed: bool) -> Array:
    groups = len(operands.w)
    x_ErD = operands.x.reshape(groups, -1, operands.x.shape[1])
    dims = (((2,), (2 if transposed else 1,)), ((0,), (0,)))
    y_ErF = jax.lax.dot_general(x_ErD, operands.w, dims, preferred_element_type=operands.sums)
    of_x, of_w = operands.of_x, operands.of_w
    of_x = None if of_x is None else of_x.reshape(groups, -1, 1)
    of_w = None if of_w is None else of_w[:, None]
    return _rescaled(operands, y_ErF, of_x, of_w).reshape(-1, y_ErF.shape[2])


def _by_blocks(operands: _Operands, sizes_E: Array, expected: int, transposed: bool) -> Array:
    w_EDF, of_w_EF = operands.w, operands.of_w
    rows, features = len(operands.x), w_EDF.shape[1 if transposed else 2]
    size = _block_size(expected, len(sizes_E))
    count, place = _blocks(size, sizes_E)
    padding = ((0, size), (0, 0))
    x_RD, of_x_R1 = jax.tree.map(lambda array: jnp.pad(array, padding), (operands.x, operands.of_x))
    dims = (((1,), (1 if transposed else 0,)), ((), ()))

    def block(number: Array, y_RF: Array) -> Array:
        # A group's last block may extend into the next group, whose first block comes later and
        # overwrites those rows.
        group, first, _ = place(number)
        x_bD, of_x_b1 = jax.tree.map(
            lambda array: jax.lax.dynamic_slice_in_dim(array, first, size), (x_RD, of_x_R1)
        )
        w_DF, of_w_F = jax.tree.map(
            lambda array: jax.lax.dynamic_index_in_dim(array, group, keepdims=False),
            (w_EDF, of_w_EF),
        )
        y_bF = jax.lax.dot_general(x_bD, w_DF, dims, preferred_element_type=operands.sums)
        y_bF = _rescaled(operands, y_bF, of_x_b1, of_w_F)
        return jax.lax.dynamic_update_slice_in_dim(y_RF, y_bF, first, 0)

    start = jnp.zeros((rows + size, features), operands.result)
    with _expected_trips(expected, size, len(sizes_E)):
        return jax.lax.fori_loop(0, count, block, start)[:rows]


def _weight_gradient_by_blocks(
    x_RD: Array, dy_RF: Array, sizes_E: Array, expected: int, result: DTypeLike
) -> Array:
    size = _block_size(expected, len(sizes_E))
    count, place = _blocks(size, sizes_E)
    x_RD, dy_RF = (jnp.pad(array, ((0, size), (0, 0))) for array in (x_RD, dy_RF))
    wide = jnp.promote_types(result, jnp.float32)

    def block(number: Array, dw_EDF: Array) -> Array:
        group, first, left = place(number)
        x_bD, dy_bF = (jax.lax.dynamic_slice_in_dim(a, first, size) for a in (x_RD, dy_RF))
        # Both are masked: rows after the last group may be infinite, and 0 * inf is nan.
        mine_b1 = (jnp.arange(size) < left)[:, None]
        x_bD, dy_bF = (jnp.where(mine_b1, a, jnp.zeros((), a.dtype)) for a in (x_bD, dy_bF))
        dims = (((0,), (0,)), ((), ()))
        dw_DF = jax.lax.dot_general(x_bD, dy_bF, dims, preferred_element_type=wide)
        return dw_EDF.at[group].add(dw_DF)

    start = jnp.zeros((len(sizes_E), x_RD.shape[1], dy_RF.shape[1]), wide)
    with _expected_trips(expected, size, len(sizes_E)):
        return jax.lax.fori_loop(0, count, block, start).astype(result)


def _blocks(size: int, sizes_E: Array) -> tuple[Array, Callable[[Array], tuple]]:
    """The number of blocks (no block is shared by groups), and a function from a block's number to
    its group, its first row and the rows left in the group."""
    blocks_E = -(-sizes_E // size)
    last_E, ends_E = jnp.cumsum(blocks_E), jnp.cumsum(sizes_E)

    def place(number: Array) -> tuple[Array, Array, Array]:
        group = jnp.searchsorted(last_E, number, side="right")
        before = last_E[group] - blocks_E[group]
        first = ends_E[group] - sizes_E[group] + (number - before) * size
        return group, first, ends_E[group] - first

    return last_E[-1], place


def _block_size(rows: int, groups: int) -> int:
    """A power of two, about a quarter of the mean group: large enough for an efficient matmul,
    small since a group's last block is half empty on average."""
    quarter = max(rows // groups // 4, 1)
    return min(max(1 << (quarter - 1).bit_length(), SMALLEST_BLOCK), LARGEST_BLOCK)


def _expected_trips(rows: int, size: int, groups: int) -> AbstractContextManager:
    """A scope with the expected trip count, which `compiled.hlo` cannot read from the program."""
    return jax.named_scope(f"expected_trips_{rows // size + groups // 2}")
