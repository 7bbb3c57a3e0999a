"""Flash attention as Pallas kernels for TPUs, in the block structure of JAX's splash attention, for
what that lacks: sinks, position bias, cross attention, and parts of a sequence.

A list made for each call has the pairs of blocks that causal order, window and documents leave
visible; nothing else is read or computed, and no mask is read from memory.

Shapes: B batch, T time of queries, S of keys, N query heads, K key heads, G query heads per key
head (N = K * G), H features of queries and keys, V of values, I blocks of queries, J blocks of
keys, t queries of a block, s keys of a block, L places of a line of biases, b buckets, D distances
of blocks, R and C blocks of a result and of the other side.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxscale.ops.attention import relative_bias, splash_kernels
from jaxscale.ops.attention.blocks import AttentionArrays, Scoring, in_reach, visible_at
from jaxscale.ops.attention.context_chunks import Chunks, Starts
from jaxscale.ops.attention.kernel_attention import AttentionKernel, attend_with_kernel
from jaxscale.ops.attention.platform_kernels import SPLASH_BLOCKS, splash_block
from jaxscale.ops.attention.splash_kernels import (
    COLUMN_BITS,
    FIRST,
    LAST,
    MASKED,
    OPEN,
    ROW_BITS,
    SplashArrays,
    SplashSettings,
)

SEMANTICS = ("parallel", "parallel", "arbitrary", "arbitrary")
"""Rows of the batch and heads may be divided between cores; visits have an order."""


def splash_attention(
    *arrays: Any,
    scoring: Scoring,
    axis: str = "",
    method: str = "",
    block: int = 0,
    interpret: bool = False,
) -> Array:
    """`attention.attention`, or `context.context_attention` over `axis`.

    Its residuals are its arguments, the output and one number per query and head; the last two have
    the checkpoint name "attention". On several devices call it inside a `shard_map` over all mesh
    axes.

    Args:
      arrays: the fields of `AttentionArrays`.
      axis, method: as in `context_attention`; "" for whole sequences.
      block: queries (and keys) of a block; 0 is `platform_kernels.splash_block`.
    """
    given = AttentionArrays(*arrays).widened()
    lengths = [x.shape[1] // (2 if axis else 1) for x in given[:2]]
    settings = SplashSettings(scoring, block or splash_block(math.gcd(*lengths)), interpret)
    kernel = AttentionKernel(splash_output, splash_gradients, settings)
    chunks = Chunks(axis, method, scoring.causal, *lengths, joint=True) if axis else None
    return attend_with_kernel(kernel, chunks, given)


def splash_output(
    settings: SplashSettings,
    given: AttentionArrays,
    starts: Starts,
    before: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """The output, and log(sum(exp(score))), [B, N, T] in float32 or wider; for a query without
    visible keys they are zero and `blocks.HIDDEN`.

    Args:
      before: the results for other keys, with the output in float32 or wider: the kernel starts
        from them, in their memory, so that nothing is left to combine.
    """
    (batch, time, heads, _), features = given.q_BTNH.shape, given.v_BSKH.shape[3]
    block, wide = settings.block, given.wide
    inputs, visits = _inputs(settings, given, starts)
    inputs = inputs._replace(sinks=given.sinks_N)
    if before is not None:
        out_BNTV, log_z_BNI1t = jnp.swapaxes(before[0], 1, 2), _in_rows(before[1], block)
        inputs = inputs._replace(out=out_BNTV, log_z=log_z_BNI1t)
    out_BNTV, log_z_BNI1t = _call(
        splash_kernels.splash_forward,
        settings,
        (batch, heads, visits),
        inputs,
        _specs(settings, given),
        {
            "out": ((batch, heads, time, features), wide if before else given.q_BTNH.dtype),
            "log_z": ((batch, heads, time // block, 1, block), wide),
        },
        [((features, block), wide), ((1, block), wide), ((1, block), wide)],
    )
    return jnp.swapaxes(out_BNTV, 1, 2), log_z_BNI1t.reshape(batch, heads, time)


def splash_gradients(
    settings: SplashSettings,
    given: AttentionArrays,
    starts: Starts,
    grad_BTNH: Array,
    log_z_BNT: Array,
    inner_BNT: Array,
    before: Array | None = None,
) -> tuple[Array | None, ...]:
    """The gradients of queries, keys, values and the table of a bias.

    Args:
      grad_BTNH: of the output.
      log_z_BNT: over all keys of the queries, of which these may be a part.
      inner_BNT: sum(output * grad) over V, with the output of all keys.
      before: the queries' gradient from other keys, in float32 or wider, to which the kernel adds
        in its memory; the gradients then have its type.
    """
    (batch, _, heads, head_dim), (_, _, key_heads, features) = (
        x.shape for x in (given.q_BTNH, given.v_BSKH)
    )
    block, wide = settings.block, given.wide
    out_dtype = given.q_BTNH.dtype if before is None else wide
    results = {
        "grad": jnp.swapaxes(grad_BTNH, 1, 2),
        "log_z": _in_rows(log_z_BNT, block),
        "inner": _in_rows(inner_BNT, block),
    }
    inputs, visits = _inputs(settings, given, starts)
    grad_q_BNTH = None if before is None else jnp.swapaxes(before, 1, 2)
    inputs = inputs._replace(**results, grad_q=grad_q_BNTH)
    of_biases = {}
    if given.bias_bN is not None:
        of_biases["lines"] = ((batch, *inputs.biases.shape[:2], inputs.biases.shape[3]), wide)
    grad_q_BNTH, *lines_BNDL = _call(
        splash_kernels.splash_query_gradients,
        settings,
        (batch, heads, visits),
        inputs,
        _specs(settings, given),
        {"grad_q": (inputs.q.shape, out_dtype), **of_biases},
        [((head_dim, block), wide)],
    )
    inputs, visits = _inputs(settings, given, starts, by_keys=True)
    grad_k_BKSH, grad_v_BKSV = _call(
        splash_kernels.splash_key_gradients,
        settings,
        (batch, key_heads, visits, heads // key_heads),
        inputs._replace(**results),
        _specs(settings, given, by_keys=True),
        {"grad_k": (inputs.k.shape, out_dtype), "grad_v": (inputs.v.shape, out_dtype)},
        [((block, head_dim), wide), ((block, features), wide)],
    )
    grads = (jnp.swapaxes(x, 1, 2) for x in (grad_q_BNTH, grad_k_BKSH, grad_v_BKSV))
    table = None
    for x_BNDL in lines_BNDL:
        lines_ND1L = jnp.sum(x_BNDL, axis=0)[:, :, None]
        (table,) = jax.vjp(functools.partial(_bias_lines, settings), given.bias_bN)[1](lines_ND1L)
    return (*grads, table)


def _inputs(
    settings: SplashSettings, given: AttentionArrays, starts: Starts, by_keys: bool = False
) -> tuple[SplashArrays, Array]:
    """The kernels' inputs, and the most visits of a row of the batch."""
    block, segments_BT = settings.block, given.segments_BT
    segments_BS = segments_BT if given.segments_BS is None else given.segments_BS
    placed = [
        (chunk_starts[:, None] // block + jnp.arange(time // len(chunk_starts) // block)).ravel()
        for chunk_starts, time in zip(starts, (segments_BT.shape[1], segments_BS.shape[1]))
    ]

    def visits_of_row(*segments: Array) -> tuple[Array, Array]:
        segments_I1t, segments_J1s = (x.reshape(-1, 1, block) for x in segments)
        distance_IJ = block * (placed[0][:, None] - placed[1])
        where = (distance_IJ, segments_I1t, segments_J1s, settings.scoring)
        seen_IJ, open_IJ = visible_at(*where), _open(*where)
        return _visits(seen_IJ.T, open_IJ.T) if by_keys else _visits(seen_IJ, open_IJ)

    visits_BC, counts_B = jax.vmap(visits_of_row)(segments_BT, segments_BS)
    q_BNTH, k_BKSH, v_BKSV = (jnp.swapaxes(x, 1, 2) for x in given[:3])
    inputs = SplashArrays(
        visits_BC,
        *(x.astype(jnp.int32) for x in placed),
        q=q_BNTH,
        k=k_BKSH,
        v=v_BKSV,
        segments_t=_in_rows(segments_BT, block),
        segments_s=_in_rows(segments_BS, block),
        biases=None if given.bias_bN is None else _bias_lines(settings, given.bias_bN),
    )
    return inputs, jnp.max(counts_B)


def _in_rows(x_T: Array, block: int) -> Array:
    """[..., T] -> [..., I, 1, t]: a block may then be narrower than a register's lanes."""
    return x_T.reshape(*x_T.shape[:-1], -1, 1, block)


def _visits(seen_RC: Array, open_RC: Array) -> tuple[Array, Array]:
    """The visits to blocks of a result (rows), in their order, and their number. A row that sees
    nothing has one, which writes its zeros."""
    rows, columns = seen_RC.shape
    most_columns, most_rows = 1 << ROW_BITS - COLUMN_BITS, 1 << 31 - ROW_BITS
    if rows >= most_rows or columns > most_columns:
        raise ValueError(
            f"model.attention = 'splash' has {rows} x {columns} blocks, and lists at most "
            f"{most_rows - 1} x {most_columns}: set data.seq_len to a multiple of a larger power "
            f"of two (a block has up to {SPLASH_BLOCKS[0]} tokens), or set model.attention = "
            "'blockwise'"
        )
    blind_R1 = ~jnp.any(seen_RC, axis=1, keepdims=True)
    listed_RC = seen_RC | (blind_R1 & (jnp.arange(columns) == 0))
    codes_RC = jnp.arange(rows)[:, None] << ROW_BITS | jnp.arange(columns) << COLUMN_BITS
    codes_RC |= jnp.where(seen_RC, jnp.where(open_RC, OPEN, MASKED), 0)
    last = jnp.iinfo(jnp.int32).max
    codes = jnp.sort(
        jnp.where(listed_RC, codes_RC, last).astype(jnp.int32), axis=None, stable=False
    )
    count = jnp.sum(listed_RC, dtype=jnp.int32)
    row = codes >> ROW_BITS
    changes = row[1:] != row[:-1]
    first, final = (jnp.insert(changes, at, True) for at in (0, len(changes)))
    codes |= jnp.where(first, FIRST, 0) | jnp.where(final, LAST, 0)
    # Batch rows with fewer visits than others stay at their last one's blocks, and do nothing.
    blocks_only = codes[count - 1] >> COLUMN_BITS << COLUMN_BITS
    return jnp.where(jnp.arange(len(codes)) < count, codes, blocks_only), count


def _open(distance_IJ: Array, segments_IBt: Array, segments_JBs: Array, scoring: Scoring) -> Array:
    """Whether every query of block i sees every key of block j, [I, J]."""
    block = segments_JBs.shape[-1]
    low_IB, high_IB = jnp.min(segments_IBt, axis=-1), jnp.max(segments_IBt, axis=-1)
    low_JB, high_JB = jnp.min(segments_JBs, axis=-1), jnp.max(segments_JBs, axis=-1)
    same_IJB = (low_IB[:, None] == high_JB) & (low_JB == high_IB[:, None])
    open_IJ = jnp.all(same_IJB, axis=-1)
    for edge in (1 - block, block - 1):
        seen_IJ = in_reach(distance_IJ + edge, scoring.window, scoring.causal)
        open_IJ = open_IJ if seen_IJ is None else open_IJ & seen_IJ
    return open_IJ


def _bias_lines(settings: SplashSettings, bias_bN: Array) -> Array:
    """The biases of blocks at each distance, [N, D, 1, L], as in `SplashArrays.biases`."""
    block, most = settings.block, splash_kernels.windows(settings)
    later = splash_kernels.line_width(settings) - block
    line = functools.partial(relative_bias.line, t=block, s=later, **settings.scoring.bucketing)
    distances = block * jnp.arange(-most, most + 1)
    lines_NDL = jax.vmap(lambda distance: line(bias_bN, distance), out_axes=1)(distances)
    # `line` has them at (j - i) % L.
    return jnp.roll(lines_NDL[..., ::-1], 1, axis=-1)[:, :, None]


def _specs(settings: SplashSettings, given: AttentionArrays, by_keys: bool = False) -> dict:
    """The specs of a visit's blocks by the names of `SplashArrays`."""
    block, group = settings.block, given.q_BTNH.shape[2] // given.k_BSKH.shape[2]
    features, most = given.v_BSKH.shape[3], splash_kernels.windows(settings)
    width = splash_kernels.line_width(settings)

    def spec(shape: tuple[int | None, ...], index: Callable) -> pl.BlockSpec:
        def at(*grid_and_tables: Any) -> Any:
            b, head, step, *rest = grid_and_tables
            g, (visits, *tables) = (rest[0], rest[1:]) if by_keys else (None, rest)
            row, column = splash_kernels.blocks_of(visits[b, step])
            if by_keys:
                return index(b, head * group + g, head, column, row, tables)
            return index(b, head, head // group, row, column, tables)

        return pl.BlockSpec(shape, at)

    queries, keys = (
        lambda width: spec((None, None, block, width), lambda b, n, k, i, j, _: (b, n, i, 0)),
        lambda width: spec((None, None, block, width), lambda b, n, k, i, j, _: (b, k, j, 0)),
    )
    numbers = spec((None, None, None, 1, block), lambda b, n, k, i, j, _: (b, n, i, 0, 0))
    of_queries, of_keys = queries(given.q_BTNH.shape[3]), keys(given.q_BTNH.shape[3])
    return {
        "q": of_queries,
        "k": of_keys,
        "v": keys(features),
        "grad_q": of_queries,
        "grad_k": of_keys,
        "grad_v": keys(features),
        "out": queries(features),
        "segments_t": spec((None, None, 1, block), lambda b, n, k, i, j, _: (b, i, 0, 0)),
        "segments_s": spec((None, None, 1, block), lambda b, n, k, i, j, _: (b, j, 0, 0)),
        "biases": spec(
            (None, None, 1, width),
            lambda b, n, k, i, j, of: (
                n,
                splash_kernels.window(settings, of[0], of[1], i, j),
                0,
                0,
            ),
        ),
        "grad": queries(features),
        "log_z": numbers,
        "inner": numbers,
        "lines": spec((None, None, 2 * most + 1, width), lambda b, n, k, i, j, _: (b, n, 0, 0)),
    }


def _call(
    kernel: Callable,
    settings: SplashSettings,
    grid: tuple,
    inputs: SplashArrays,
    specs: dict,
    results: dict[str, tuple],
    scratch: Sequence[tuple],
) -> Any:
    given = {name: x for name, x in inputs._asdict().items() if x is not None}
    tables = [name for name in given if name not in specs]

    def body(*refs: Any) -> None:
        named = dict(zip(given, refs))
        kernel(settings, SplashArrays(**named), *refs[len(given) :])

    whole = "" if settings.scoring.causal else "_whole"
    order = list(given)
    in_place = {order.index(name): i for i, name in enumerate(results) if name in given}
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=grid,
            in_specs=[specs[name] for name in given if name in specs],
            out_specs=[specs[name] for name in results],
            scratch_shapes=[pltpu.VMEM(*shape) for shape in scratch],
        ),
        out_shape=[jax.ShapeDtypeStruct(*shape) for shape in results.values()],
        input_output_aliases=in_place,
        interpret=settings.interpret,
        compiler_params=pltpu.CompilerParams(dimension_semantics=SEMANTICS[: len(grid)]),
        name=kernel.__name__ + whole,
    )(*given.values())
