"""Loss kernel in Pallas for GPUs: log Z and the target's logit of each token from one pass over
float32 logits.

A program reads one row of logits, 16 bytes per instruction, and computes one exponential per logit.
XLA's reduction with three results takes 2.5 times as long as one read of the logits (llama32_1b on
an H200). On several devices call it where every mesh axis is manual, or of size 1. Triton back end,
for Ampere and later.

Shapes: C tokens of a chunk, V vocabulary (the columns of the head on a rank), v columns of a block.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton


class LogitBlock(NamedTuple):
    """Columns of a block and warps of 32 threads of a program. A thread has one maximum and one sum
    for each of its logits in a block."""

    columns: int
    warps: int


BLOCK = LogitBlock(4096, 8)
"""On an H200 2,048 x 128,256 logits take 263 us; 270 us with 2,048 columns, 364 us with 8,192
(`tools/bench/loss.py`)."""


def log_z_and_target(
    logits_CV: Array,
    targets_C: Array,
    end: Array | int,
    *,
    soft_cap: float = 0.0,
    block: LogitBlock = BLOCK,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """log(sum(exp(logit))) over the columns before `end`, and the logit of column `targets_C`, 0
    where that is not before `end`. Without columns, or with -inf only, log Z is -inf; with any nan
    or +inf it is nan.

    Args:
      end: the first column of the padding.
      soft_cap: as in `loss.cross_entropy`; 0 disables.
    """
    rows, columns = logits_CV.shape
    # Triton needs a power of two, and the block must not be wider than a row.
    width = min(block.columns, 2 ** (columns.bit_length() - 1))
    number = pl.BlockSpec((None,), lambda i: (i,))
    log_z_C, target_C = pl.pallas_call(
        functools.partial(_row, width, soft_cap),
        grid=(rows,),
        in_specs=[
            pl.BlockSpec((None, columns), lambda i: (i, 0)),
            number,
            pl.BlockSpec((1,), lambda i: (0,)),
        ],
        out_specs=[number, number],
        out_shape=[jax.ShapeDtypeStruct((rows,), logits_CV.dtype)] * 2,
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=block.warps, num_stages=2),
        name="log_z_and_target",
    )(logits_CV, targets_C, jnp.asarray(end, jnp.int32).reshape(1))
    return log_z_C, target_C


def _row(
    width: int, soft_cap: float, logits_ref, column_ref, end_ref, log_z_ref, target_ref
) -> None:
    """One token. Each lane of a block has a separate maximum and sum, joined at the end: threads do
    not synchronise in between."""
    column, end = column_ref[...], end_ref[0]

    def capped(x: Array) -> Array:
        return soft_cap * jnp.tanh(x / soft_cap) if soft_cap else x

    def joined(sums: tuple[Array, Array], x_v: Array) -> tuple[Array, Array]:
        high_v, total_v = sums
        # Relative to the new maximum, one of the two exponentials is 1, so one call suffices. The
        # difference carries a nan into the sum; a GPU's maximum instruction drops it.
        other_v = _exp(-jnp.abs(x_v - high_v))
        total_v = jnp.where(x_v > high_v, total_v * other_v + 1, total_v + other_v)
        return jnp.maximum(high_v, x_v), total_v

    def visit(j: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        return joined(sums, capped(logits_ref[pl.ds(j * width, width)]))

    # Not -inf: the difference to a logit of -inf would be nan.
    zero_v = jnp.zeros(width, log_z_ref.dtype)
    begin = zero_v + jnp.finfo(zero_v.dtype).min, zero_v
    whole = end // width
    sums = jax.lax.fori_loop(0, whole, visit, begin)
    is_real_v = whole * width + jnp.arange(width, dtype=end.dtype) < end
    last_v = triton.load(logits_ref.at[pl.ds(whole * width, width)], mask=is_real_v, other=0)
    high_v, total_v = joined(sums, jnp.where(is_real_v, capped(last_v), -jnp.inf))
    high = jnp.max(high_v)
    log_z_ref[...] = high + jnp.log(jnp.sum(total_v * _exp(high_v - high)))
    is_here = (column >= 0) & (column < end)
    target_ref[...] = jnp.where(is_here, capped(logits_ref[jnp.where(is_here, column, 0)]), 0)


def _exp(x: Array) -> Array:
    """exp(x) as a power of two."""
    # GPUs have an instruction for powers of two; exp is several instructions.
    return jnp.exp2(x * math.log2(math.e))
