"""log Z and the target's logit of each token from one pass over float32 logits: a Pallas kernel
for GPUs, written for Triton.

A program reads one row of logits, 16 bytes with an instruction, and computes one exponential of
each. XLA's reduction with three results takes 2.5 times as long as reading the logits once does
(llama32_1b on an H200). Like every Pallas kernel it knows nothing of meshes: on several devices
call it where every axis is manual, or of size 1. For Ampere and later.

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
    """What a program reads at a time, and its warps of 32 threads. A thread holds as many maxima
    and sums as it has logits of a block."""

    columns: int
    warps: int


BLOCK = LogitBlock(4096, 8)
"""On an H200 2,048 x 128,256 logits take 263 us; with 2,048 columns 270, with 8,192 columns 364
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
    where that is not among them. Of no columns, or of -inf alone, log Z is -inf; with a nan or +inf
    among them it is nan.

    Args:
      end: the first column of the padding.
      soft_cap: as in `loss.cross_entropy`; 0 means none.
    """
    rows, columns = logits_CV.shape
    # A power of two, as Triton needs, and no wider than a row.
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
    """One token. Each lane of a block has a maximum and a sum of its own, which are joined at the
    end: threads do not wait for each other in between."""
    column, end = column_ref[...], end_ref[0]

    def capped(x: Array) -> Array:
        return soft_cap * jnp.tanh(x / soft_cap) if soft_cap else x

    def joined(sums: tuple[Array, Array], x_v: Array) -> tuple[Array, Array]:
        high_v, total_v = sums
        # Relative to the new maximum the exponential of one of the two is 1. Their distance takes
        # a nan into the sum: a GPU's maximum would pass it over.
        other_v = _exp(-jnp.abs(x_v - high_v))
        total_v = jnp.where(x_v > high_v, total_v * other_v + 1, total_v + other_v)
        return jnp.maximum(high_v, x_v), total_v

    def visit(j: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        return joined(sums, capped(logits_ref[pl.ds(j * width, width)]))

    # Not -inf, from which the distance of a logit of -inf would be nan.
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
    """One instruction of a GPU raises 2 to a power, a row of them e."""
    return jnp.exp2(x * math.log2(math.e))
