"""Platform attention kernels: cuDNN and `flash.py` on NVIDIA GPUs, Pallas splash on TPUs.

Shapes: as in `attention.py`.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from jaxscale.ops.attention.blocks import Scoring
from jaxscale.ops.sizes import LANES

LATENT_HEADS = (192, 128)
"""Features of keys and of values with which cuDNN (9.10) has multi-head latent attention."""

LATENT_GENERATIONS = ("sm90", "sm100", "sm103")

FLASH_BLOCKS = (64, 32, 16)
"""Candidates for the queries (and keys) of a block."""

FLASH_WIDTHS = (16, 32, 64, 128, 256)
"""Features of Triton's tiles; other heads have zeros after theirs."""

FLASH_ELEMENTS = 64 * 128
"""The maximum number of elements of a block of queries."""

SPLASH_BLOCKS = (512, 384, 256, LANES, 64, 32, 16)
"""Candidates for the queries (and keys) of a block on TPUs; JAX's kernel takes multiples of `LANES`
only."""


def cudnn(q_BTNH, k_BSKH, v_BSKH, segments_BT: Array | None, scoring: Scoring) -> Array:
    """cuDNN's flash attention; with causality, blocks above the diagonal are skipped.

    Documents and the window are enforced by an additive mask of B * T * T * 2 bytes, which
    `maskless` recomputes for the backward pass. Without documents there is no mask, and the window
    is the kernel's.

    On several devices call it inside a `shard_map` over all mesh axes.

    Args:
      segments_BT: None for causal attention with one document per row.
    """
    mask_B1TS = window = None
    # The window is part of the mask, since not every version of cuDNN combines its sliding window
    # with a mask. cuDNN's packed layout would need no mask, but a bound on the documents of a row.
    if segments_BT is not None:
        mask_B1TS = _document_mask(segments_BT, scoring)[:, None]
    elif 0 < scoring.window < q_BTNH.shape[1]:
        window = (scoring.window - 1, 0)  # keys before and after the query's position
    if v_BSKH.shape[-1] != k_BSKH.shape[-1]:
        # The public function (jax 0.12) refuses values of another size than the keys'. Imported
        # here: nothing else depends on a private module.
        from jax._src.cudnn import fused_attention_stablehlo as stablehlo  # noqa: PLC0415

        out_BTNV = stablehlo.dot_product_attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            mask=mask_B1TS,
            scale=scoring.scale,
            mask_type=getattr(stablehlo.MaskType, "CAUSAL" if scoring.causal else "NO_MASK"),
            sliding_window_length=scoring.window if window else None,
        )
        return cast(Array, out_BTNV)
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=mask_B1TS,
        # None where equal: JAX's default differs in the last bit of a float64, and cuDNN reads the
        # scale as float32, so that the two can round to different numbers.
        scale=None if scoring.scale == q_BTNH.shape[-1] ** -0.5 else scoring.scale,
        is_causal=scoring.causal,
        local_window_size=window,
        implementation="cudnn",
    )


def _document_mask(segments_BT: Array, scoring: Scoring) -> Array:
    """The visibility mask of documents and window, [B, T, S]."""
    mask_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    if scoring.window:
        time = jnp.arange(segments_BT.shape[1])
        distance_TS = time[:, None] - time
        mask_BTS &= (distance_TS if scoring.causal else jnp.abs(distance_TS)) < scoring.window
    return mask_BTS


def maskless(attend: Callable[..., Array]) -> Callable[..., Array]:
    """Wraps `cudnn`, or a caller of it, so that the mask is recomputed and not saved; the kernel's
    output and log(sum(exp(scores))) are saved.

    Not for a layer under a remat policy, which recomputes the mask anyway: with one
    `jax.checkpoint` inside another, the output would be saved twice.
    """

    def without_mask(*arrays: Array | None, **settings: Any) -> Array:
        # Settings are fixed at compile time; checkpointed arguments would be traced.
        kernel = functools.partial(attend, **settings)
        return jax.checkpoint(kernel, policy=is_cudnn_forward, prevent_cse=False)(*arrays)

    return without_mask


def is_cudnn_forward(primitive, *_, **__) -> bool:
    """A remat policy that saves the results of cuDNN's kernel."""
    # By the primitive: JAX's differentiation rule of the kernel gives its results no names.
    return primitive.name.startswith("dot_product_attention_fwd")


def splash(
    q_BTNH,
    k_BSKH,
    v_BSKH,
    segments_BT: Array | None,
    scoring: Scoring,
    *,
    interpret: bool = False,
) -> Array:
    """Pallas splash attention; blocks hidden by causality or the window are not computed.

    The kernel does not scale scores, so queries are multiplied by the scale first. Unless it is a
    power of two (for heads of 128 it is not) this rounds bfloat16 queries a second time: an error
    of 0.0017 in a score of size 1, compared with 0.0023 from the rounding of queries and keys. A
    model with RoPE should scale as it rotates, before that rounding, and pass scale 1.

    Like every Pallas kernel it needs all mesh axes manual: call it inside a `shard_map` over all of
    them, of size 1 or not.

    Args:
      segments_BT: as in `cudnn`.
    """
    # Imported here: half a second, and only a TPU needs it.
    from jax.experimental.pallas.ops.tpu import splash_attention  # noqa: PLC0415

    _, time, num_heads, _ = q_BTNH.shape
    if scoring.window or scoring.causal:
        before = scoring.window - 1 if scoring.window else None
        after = 0 if scoring.causal else before
        mask = splash_attention.LocalMask((time, time), (before, after), offset=0)
    else:
        mask = splash_attention.FullMask((time, time))
    block = splash_block(time)
    kernel = splash_attention.make_splash_mha_single_device(
        splash_attention.MultiHeadMask([mask] * num_heads),
        block_sizes=splash_attention.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        attn_logits_soft_cap=scoring.soft_cap or None,
        residual_checkpoint_name="attention",
        interpret=interpret,
    )
    q_BNTH, k_BKSH, v_BKSH = (jnp.swapaxes(x, 1, 2) for x in (q_BTNH, k_BSKH, v_BSKH))
    segments = None
    if segments_BT is not None:
        segments = splash_attention.SegmentIds(segments_BT, segments_BT)
    if scoring.scale != 1:
        q_BNTH = (q_BNTH.astype(jnp.float32) * scoring.scale).astype(q_BNTH.dtype)
    out_BNTH = jax.vmap(kernel)(q_BNTH, k_BKSH, v_BKSH, segments)
    return jnp.swapaxes(cast(Array, out_BNTH), 1, 2)


def cudnn_limits(
    platform: str, dtype, head_dim: int, seq_len: int, *, value_dim: int = 0, generation: str = ""
) -> str:
    """The setting that `cudnn` does not support, and its remedy; "" if it supports all. The last
    arguments are those of `attention.choose`."""
    if platform != "gpu":
        return f"needs an NVIDIA GPU and the platform is {platform}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"computes in bfloat16 and model.compute_dtype = {dtype.name!r}; change either"
    if value_dim not in (0, head_dim):
        if (head_dim, value_dim) != LATENT_HEADS or generation not in LATENT_GENERATIONS:
            return (
                f"has values of another size than keys for {LATENT_HEADS} features on GPUs of "
                f"{', '.join(LATENT_GENERATIONS)}, and model.head_dim = {head_dim}, "
                f"model.value_head_dim = {value_dim} on {generation or 'an unknown GPU'}; "
                "change either"
            )
    elif head_dim % 8 or head_dim > 128:
        return (
            "needs model.head_dim to be a multiple of 8 and at most 128, and it is "
            f"{head_dim}; change either"
        )
    if seq_len % 2:
        return f"needs an even data.seq_len, and it is {seq_len}; change either"
    return ""


def flash_width(size: int) -> int:
    """The width of a tile of `flash.py` for `size` numbers."""
    return next(width for width in FLASH_WIDTHS if size <= width)


def flash_block(time: int, head_dim: int) -> int:
    """Queries (and keys) of a block of `flash.py`: the largest block with sums in registers that
    divides the sequence; 0 if none does."""
    sizes = (size for size in FLASH_BLOCKS if size * flash_width(head_dim) <= FLASH_ELEMENTS)
    return next((size for size in sizes if time % size == 0), 0)


def flash_limits(platform: str, dtype, head_dim: int, seq_len: int) -> str:
    """The setting that `flash.py` does not support, and its remedy; "" if it supports all."""
    if platform != "gpu":
        return f"needs an NVIDIA GPU and the platform is {platform}"
    # JAX 0.11 and 0.12 have the back end and call it deprecated; a later version may drop it.
    if importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return "needs Pallas's back end for Triton, which this version of JAX no longer has"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"computes in bfloat16 and model.compute_dtype = {dtype.name!r}; change either"
    if head_dim > FLASH_WIDTHS[-1]:
        return (
            f"needs model.head_dim to be at most {FLASH_WIDTHS[-1]}, and it is {head_dim}; "
            "change either"
        )
    if not flash_block(seq_len, head_dim):
        return _indivisible(FLASH_BLOCKS[-1], seq_len)
    return ""


def splash_block(time: int) -> int:
    """Queries (and keys) of a block of splash attention; 0 if none divides the sequence."""
    return next((size for size in SPLASH_BLOCKS if time % size == 0), 0)


def splash_limits(platform: str, dtype, head_dim: int, seq_len: int) -> str:
    """The setting that `splash` does not support, and its remedy; "" if it supports all."""
    if platform != "tpu":
        return f"needs a TPU and the platform is {platform}"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return (
            f"computes in bfloat16 or float32 and model.compute_dtype = {dtype.name!r}; "
            "change either"
        )
    if not splash_block(seq_len):
        return _indivisible(SPLASH_BLOCKS[-1], seq_len)
    return ""


def _indivisible(least: int, time: int) -> str:
    return (
        f"needs data.seq_len (and data.target_len) to be a multiple of {least} (of {2 * least} x "
        f"layout.context if that is above 1), and would attend to {time} tokens at a time; change "
        "either"
    )
