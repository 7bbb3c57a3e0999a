"""Grouped matmul as Pallas kernels for GPUs: forward, gradient of rows, gradient of weights.

A program computes one tile of the result, for one group. The grid is static: as many tiles of rows
as groups of any sizes can need. The first tile of a group begins at its first row, so no two
programs write the same element: no atomics, and the order of sums is deterministic. The kernels use
Pallas's Triton back end, for Ampere and later.

Letters: R rows, E groups, D features of the rows, F features of the result; p tiles of rows; r, d,
f rows and features of a tile.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike


class Tiles(NamedTuple):
    """A program's tile of the result, its warps, and the stages of its pipeline of loads."""

    rows: int
    columns: int
    depth_bytes: int  # of both operands along the contracted dimension
    warps: int
    stages: int


AMPERE = Tiles(128, 128, 64, 4, 4)
"""64 KiB of shared memory, where a program has 99 to 163."""
HOPPER = Tiles(128, 256, 128, 8, 3)
"""144 KiB of shared memory, of 227, and two warp groups, each with a `wgmma` of 64 rows."""
DOUBLE = Tiles(64, 64, 128, 4, 3)
"""For float64, whose sums need twice the registers."""

LARGE_SHARED_MEMORY = (9, 10)
"""Major compute capabilities of devices for `HOPPER`."""

SMALLEST_CAPABILITY = 80
"""Ten times the compute capability of Ampere."""

SMALLEST_TILE = 16
"""The smallest dimension of a tile in a Triton matmul."""

PANEL_BYTES, PANEL_TILES = 2**24, (16, 64)
"""The rows that consecutive programs share: bytes, less than half of an A100's L2 cache, and the
fewest and most tiles. With 16 the 132 programs of an H100 read about as many rows as columns."""


def kernel_rows(
    x_RD: Array,
    w_EDF: Array,
    sizes_E: Array,
    *,
    expected: int,
    transposed: bool,
    result: DTypeLike,
    interpret: bool = False,
) -> Array:
    """[R, D] x [E, D, F] -> [R, F], each row times the matrix of its group; zeros in rows after the
    last group.

    Args:
      expected: mean total of rows in groups, for the height of tiles and the count of FLOPs.
      transposed: whether `w_EDF` is [E, F, D].
      result: the type of the result.
      interpret: runs on a CPU, slowly.
    """
    x_RD, w_EDF = _with_offsets(x_RD), _with_offsets(w_EDF)
    (rows, depth), columns = x_RD.shape, w_EDF.shape[1 if transposed else 2]
    # A quarter of the mean group, whose last tile is half empty on average.
    wanted = (expected // len(sizes_E) // 4, columns)
    tiles = _tiles(_operand_type(x_RD), wanted, interpret)
    places_p3 = tile_places(sizes_E, rows, tiles.rows)
    row_bytes = depth * x_RD.dtype.itemsize
    order = row_order(len(places_p3), pl.cdiv(columns, tiles.columns), tiles.rows * row_bytes)
    return pl.pallas_call(
        functools.partial(grouped_rows, tiles, order, transposed),
        grid=(order.rows * order.columns,),
        out_shape=jax.ShapeDtypeStruct((rows, columns), result),
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        name=f"grouped_rows_{expected}",
    )(places_p3, x_RD, w_EDF)


def kernel_weight_gradient(
    x_RD: Array,
    dy_RF: Array,
    sizes_E: Array,
    *,
    expected: int,
    result: DTypeLike,
    interpret: bool = False,
) -> Array:
    """[R, D] x [R, F] -> [E, D, F]: for each group the sum over its rows; zeros for an empty group.

    Args:
      expected, result, interpret: as in `kernel_rows`.
    """
    x_RD, dy_RF = _with_offsets(x_RD), _with_offsets(dy_RF)
    shape = (len(sizes_E), x_RD.shape[1], dy_RF.shape[1])
    tiles = _tiles(_operand_type(x_RD), shape[1:], interpret)
    ends_E = jnp.cumsum(sizes_E)
    ranges_E2 = jnp.stack((ends_E - sizes_E, ends_E), axis=1).astype(jnp.int32)
    grid = (pl.cdiv(shape[1], tiles.rows), pl.cdiv(shape[2], tiles.columns))
    return pl.pallas_call(
        functools.partial(grouped_weights, tiles, ProgramOrder(*grid, PANEL_TILES[0])),
        grid=(len(sizes_E) * math.prod(grid),),
        out_shape=jax.ShapeDtypeStruct(shape, result),
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        name=f"grouped_weights_{expected}",
    )(ranges_E2, x_RD, dy_RF)


def tile_places(sizes_E: Array, rows: int, height: int) -> Array:
    """Group, first row and end of rows of each tile, [p, 3] int32. Rows after the last group are a
    group E; tiles after the last one have no rows."""
    groups = len(sizes_E)
    sizes = jnp.append(sizes_E, rows - jnp.sum(sizes_E))
    ends, tiles = jnp.cumsum(sizes), -(-sizes // height)
    last = jnp.cumsum(tiles)
    # Each of E + 1 groups may need a tile for a single row.
    number_p = jnp.arange((rows + (groups + 1) * (height - 1)) // height)
    group_p = jnp.minimum(jnp.sum(last <= number_p[:, None], axis=1), groups)
    before_p = (last - tiles)[group_p]
    first_p = (ends - sizes)[group_p] + (number_p - before_p) * height
    return jnp.stack((group_p, jnp.minimum(first_p, rows), ends[group_p]), 1).astype(jnp.int32)


class ProgramOrder(NamedTuple):
    """The order of programs: down `panel` tiles of rows, then the next column of the same rows,
    which are then read from the L2 cache."""

    rows: int  # tiles
    columns: int
    panel: int

    def place(self, number: Array) -> tuple[Array, Array]:
        """The tile of rows and the tile of columns of a program."""
        size = self.panel * self.columns
        first = number // size * self.panel
        height = jnp.minimum(self.rows - first, self.panel)
        return first + number % size % height, number % size // height


def row_order(rows: int, columns: int, tile_bytes: int) -> ProgramOrder:
    """The order of `kernel_rows`, for so many tiles, of rows of so many bytes."""
    few, many = PANEL_TILES
    return ProgramOrder(rows, columns, min(max(PANEL_BYTES // tile_bytes, few), many))


def grouped_rows(
    tiles: Tiles, order: ProgramOrder, transposed: bool, places_ref, x_ref, w_ref, y_ref
) -> None:
    """A tile of rows times a tile of columns of their group's matrix."""
    place, column = order.place(pl.program_id(0))
    group, first, end = (places_ref[place, i] for i in range(3))
    compute, groups = _operand_type(x_ref), w_ref.shape[0]
    depth = tiles.depth_bytes // compute.itemsize
    rows = _Part(first, tiles.rows, end)
    columns = _Part(column * tiles.columns, tiles.columns, y_ref.shape[1])
    matrix = jnp.minimum(group, groups - 1)
    dims = (((1,), (1 if transposed else 0,)), ((), ()))

    def visit(step: Array, sums_rf: Array) -> Array:
        features = _Part(step * depth, depth, x_ref.shape[1])
        x_rd = _load(x_ref, rows, features).astype(compute)
        w = _load(w_ref, *((columns, features) if transposed else (features, columns)), matrix)
        return sums_rf + jax.lax.dot_general(
            x_rd, w.astype(compute), dims, preferred_element_type=sums_rf.dtype
        )

    # The rows after the last group are zero, and read nothing.
    steps = pl.cdiv(x_ref.shape[1], depth) * (group < groups).astype(jnp.int32)
    zeros_rf = jnp.zeros((tiles.rows, tiles.columns), _sum_type(y_ref))
    _store(jax.lax.fori_loop(0, steps, visit, zeros_rf), y_ref, rows, columns)


def grouped_weights(tiles: Tiles, order: ProgramOrder, ranges_ref, x_ref, dy_ref, dw_ref) -> None:
    """A tile of the gradient of one group's matrix."""
    group = pl.program_id(0) // (order.rows * order.columns)
    row, column = order.place(pl.program_id(0) % (order.rows * order.columns))
    first, end = ranges_ref[group, 0], ranges_ref[group, 1]
    compute = _operand_type(x_ref)
    depth = tiles.depth_bytes // compute.itemsize
    inputs = _Part(row * tiles.rows, tiles.rows, dw_ref.shape[1])
    columns = _Part(column * tiles.columns, tiles.columns, dw_ref.shape[2])

    def visit(step: Array, sums_df: Array) -> Array:
        # Both are masked: rows of the next group, or undefined ones: 0 * inf is nan.
        rows = _Part(first + step * depth, depth, end)
        x_rd, dy_rf = (
            _load(ref, rows, part).astype(compute)
            for ref, part in ((x_ref, inputs), (dy_ref, columns))
        )
        dims = (((0,), (0,)), ((), ()))
        return sums_df + jax.lax.dot_general(
            x_rd, dy_rf, dims, preferred_element_type=sums_df.dtype
        )

    zeros_df = jnp.zeros((tiles.rows, tiles.columns), _sum_type(dw_ref))
    sums_df = jax.lax.fori_loop(0, (end - first + depth - 1) // depth, visit, zeros_df)
    _store(sums_df, dw_ref, inputs, columns, group)


class _Part(NamedTuple):
    """Indices of a tile along one dimension, of which those from `end` on are masked."""

    first: Array
    size: int
    end: Array | int


def _load(ref, rows: _Part, columns: _Part, *group: Array) -> Array:
    """A tile, zeros where it is masked; of a group's matrix, if given."""
    mask = _mask(rows, columns)
    at = ref.at[*group, pl.ds(rows.first, rows.size), pl.ds(columns.first, columns.size)]
    # Without a mask Triton takes no `other`, and an integer zero is no float8.
    other = None if mask is None else jnp.zeros((), ref.dtype)
    return triton.load(at, mask=mask, other=other)


def _store(values: Array, ref, rows: _Part, columns: _Part, *group: Array) -> None:
    at = ref.at[*group, pl.ds(rows.first, rows.size), pl.ds(columns.first, columns.size)]
    triton.store(at, values.astype(ref.dtype), mask=_mask(rows, columns))


def _mask(rows: _Part, columns: _Part) -> Array | None:
    """The mask of a tile; None where all is inside."""
    shape, mask = (rows.size, columns.size), None
    for dim, part in enumerate((rows, columns)):
        # Without a mask along the columns a thread loads 16 bytes at once.
        if isinstance(part.end, int) and part.end % part.size == 0:
            continue
        at = part.first + jnp.arange(part.size, dtype=jnp.int32)
        inside = jnp.broadcast_to(jnp.expand_dims(at < part.end, 1 - dim), shape)
        mask = inside if mask is None else mask & inside
    return mask


def _tiles(compute: jnp.dtype, wanted: tuple[int, int], interpret: bool) -> Tiles:
    """The tiles for a device, for a result whose tiles need no more rows and columns than `wanted`.

    Args:
      compute: the type of the operands.
    """
    tiles = DOUBLE if compute.itemsize == 8 else AMPERE
    if not interpret and compute.itemsize < 8:
        # Of the mesh in use, whose devices may be absent.
        capability = triton.get_gpu_info().compute_capability
        if capability < SMALLEST_CAPABILITY:
            raise ValueError(
                f"the experts' matmuls need a GPU of compute capability {SMALLEST_CAPABILITY / 10} "
                f"or later, and this one has {capability / 10}; set model.capacity_factor"
            )
        tiles = HOPPER if capability // 10 in LARGE_SHARED_MEMORY else AMPERE
    rows, columns = (
        min(size, pl.next_power_of_2(max(number, SMALLEST_TILE)))
        for size, number in zip(tiles, wanted)
    )
    # 128 columns where the last tile of 256 would be half empty.
    half = columns > AMPERE.columns and 0 < wanted[1] % columns <= AMPERE.columns
    return tiles._replace(rows=rows, columns=columns // 2 if half else columns)


def _operand_type(x) -> jnp.dtype:
    """The type in which rows, an array or a ref, are multiplied: bfloat16 for float8, exactly."""
    # Pallas (jax 0.12) has Triton sum float8 in float32 alone, for which it uses no `wgmma`; and it
    # refuses e4m3 times e5m2.
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1
    return jnp.dtype(jnp.bfloat16) if narrow else x.dtype


def _sum_type(result) -> jnp.dtype:
    """The type of sums, float32 or wider: of the result, if that is an integer."""
    if jnp.issubdtype(result.dtype, jnp.integer):
        return result.dtype
    return jnp.promote_types(result.dtype, jnp.float32)


def _with_offsets(x: Array) -> Array:
    """The array; in bfloat16 if its offsets would be negative in Pallas (jax 0.12), which has 32
    bits for them in arrays of up to 2**32 bytes."""
    is_wrong = x.dtype.itemsize == 1 and 2**31 < x.size <= 2**32
    return x.astype(jnp.bfloat16) if is_wrong else x
