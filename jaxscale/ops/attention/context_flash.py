"""Context parallelism with the flash kernels of `flash.py`, for GPUs: one call for each pair of
chunks.

Shapes: as in `flash.py`, T a rank's part of the sequence.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxscale.ops.attention import flash
from jaxscale.ops.attention.blocks import AttentionArrays, Scoring
from jaxscale.ops.attention.context_chunks import Chunks, Starts
from jaxscale.ops.attention.flash_kernels import Settings
from jaxscale.ops.attention.kernel_attention import AttentionKernel, attend_with_kernel
from jaxscale.ops.attention.platform_kernels import flash_block


def context_flash(
    *arrays: Any, axis: str, method: str, scoring: Scoring, interpret: bool = False
) -> Array:
    """`context.context_attention`, without cross attention and bias."""
    given = AttentionArrays(*arrays).widened()
    assert given.segments_BS is given.bias_bN is None, "refused by `attention.check`"
    chunk = given.q_BTNH.shape[1] // 2
    block = flash_block(chunk, given.q_BTNH.shape[3])
    settings = Settings(scoring, block, interpret, of_pair=True)
    chunks = Chunks(axis, method, scoring.causal, chunk, chunk)
    return attend_with_kernel(AttentionKernel(_output, _gradients, settings), chunks, given)


def _output(
    settings: Settings, given: AttentionArrays, starts: Starts, before: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Results are combined, weighted by their shares of the softmax."""
    out_BTNH, log_z_BNT = before
    more_BTNH, more_BNT = flash.flash_output(
        settings,
        *given[:5],  # pyright: ignore[reportArgumentType]
        offset=starts.offset,
        out_dtype=given.wide,
    )
    new_BNT = jnp.logaddexp(log_z_BNT, more_BNT)
    old_share, share = (
        jnp.swapaxes(jnp.exp(part_BNT - new_BNT), 1, 2)[..., None]
        for part_BNT in (log_z_BNT, more_BNT)
    )
    return out_BTNH * old_share + more_BTNH * share, new_BNT


def _gradients(
    settings: Settings, given: AttentionArrays, starts: Starts, *results_and_before: Array
) -> tuple:
    """With None for the table of a bias."""
    *results, before = results_and_before
    tokens = (*given[:5], *results)
    q_BTNH, *others = flash.flash_gradients(
        settings,
        *tokens,
        offset=starts.offset,
        out_dtype=given.wide,  # pyright: ignore[reportArgumentType]
    )
    return (before + q_BTNH, *others, None)
