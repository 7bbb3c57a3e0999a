"""Causal self attention over packed documents: one reference, and the kernel of each platform.

Shapes: B batch, T query time, S key time (equal to T in training), N query heads, K key heads,
G query heads per key head (N = K * G), H head_dim.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxscale.ops import attention_kernels
from jaxscale.ops.blockwise import blockwise_attention

PLATFORM_KERNELS = {"cpu": "blockwise", "gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}
"""What "auto" selects if the kernel honours the run's settings; otherwise it is "blockwise"."""


def attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    segments_BT: Array,
    *,
    implementation: str,
    sliding_window: int = 0,
    causal: bool = True,
    scale: float | None = None,
    soft_cap: float = 0.0,
) -> Array:
    """Causal self attention in which tokens see only their own segment.

    Query head n reads key head n // (N / K). Segment 0, padding, is a segment like any other: its
    outputs are finite and affect no other token. Scores are scaled by H**-0.5; the softmax is in
    float32, or in the input's type where that is wider. The output and the residuals other
    than the arguments carry the checkpoint name "attention", except with "cudnn", whose results a
    remat policy recognises by `attention_kernels.is_cudnn_forward`.

    Args:
      implementation: "reference", "blockwise", "cudnn" or "splash"; see `choose` and `check`.
      sliding_window: how many keys a query sees, itself included; 0 is all.
      causal: whether a query sees no later keys.
      scale: of the scores; None is H**-0.5.
      soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 is none.
    """
    scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    usual = causal and not soft_cap and scale == q_BTNH.shape[-1] ** -0.5
    if implementation != "reference" and not usual:
        raise ValueError(
            f"attention implementation {implementation!r} has no bidirectional attention, scale or "
            "soft cap; set model.attention = 'reference'"
        )
    match implementation:
        case "reference":
            out_BTNH = _reference(
                q_BTNH, k_BSKH, v_BSKH, segments_BT, sliding_window, causal, scale, soft_cap
            )
            return checkpoint_name(out_BTNH, "attention")
        case "blockwise":
            return blockwise_attention(
                q_BTNH, k_BSKH, v_BSKH, segments_BT, sliding_window=sliding_window
            )
        case "cudnn":
            return attention_kernels.cudnn(q_BTNH, k_BSKH, v_BSKH, segments_BT, sliding_window)
        case "splash":
            return attention_kernels.splash(q_BTNH, k_BSKH, v_BSKH, segments_BT, sliding_window)
    raise ValueError(
        f"attention implementation {implementation!r} is not known; it can be "
        "reference, blockwise, cudnn or splash"
    )


def choose(
    implementation: str, platform: str, *, dtype: DTypeLike, head_dim: int, seq_len: int
) -> str:
    """The name of the implementation that a run uses; only "auto" leaves a choice.

    "auto" is the platform's kernel in `PLATFORM_KERNELS` where `check` accepts it, and
    "blockwise" otherwise, so that every setting runs on every platform.

    Raises:
      ValueError: the named implementation cannot honour the settings.
    """
    if implementation != "auto":
        check(implementation, platform=platform, dtype=dtype, head_dim=head_dim, seq_len=seq_len)
        return implementation
    kernel = PLATFORM_KERNELS.get(platform, "blockwise")
    try:
        check(kernel, platform=platform, dtype=dtype, head_dim=head_dim, seq_len=seq_len)
    except ValueError:
        return "blockwise"
    return kernel


def check(
    implementation: str,
    *,
    platform: str,
    dtype: DTypeLike,
    head_dim: int,
    seq_len: int,
) -> None:
    """Raises ValueError, naming the setting to change, if a kernel cannot honour the arguments."""
    if implementation in ("reference", "blockwise"):
        return
    limits = {"cudnn": attention_kernels.cudnn_limits, "splash": attention_kernels.splash_limits}
    if implementation not in limits:
        raise ValueError(
            f"model.attention = {implementation!r} is not known; it can be auto, reference, "
            "blockwise, cudnn or splash"
        )
    broken = limits[implementation](platform, jnp.dtype(dtype), head_dim, seq_len)
    if broken:
        raise ValueError(
            f"model.attention = {implementation!r} {broken}; or set model.attention = 'auto'"
        )


def decode_attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    query_positions_BT: Array,
    key_positions_BS: Array,
    *,
    sliding_window: int = 0,
    scale: float | None = None,
    soft_cap: float = 0.0,
) -> Array:
    """Attention over a cache: a query sees the keys at its own position and before.

    Args:
      key_positions_BS: position of the key in each slot; -1 marks an empty slot.
      sliding_window, scale, soft_cap: as in `attention`.

    Returns:
      [B, T, N, H]; zeros for a query that sees no key.
    """
    distance_BTS = query_positions_BT[:, :, None] - key_positions_BS[:, None, :]
    mask_BTS = (distance_BTS >= 0) & (key_positions_BS >= 0)[:, None, :]
    if sliding_window:
        mask_BTS &= distance_BTS < sliding_window
    scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    return _masked_attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale, soft_cap)


def _reference(
    q_BTNH, k_BSKH, v_BSKH, segments_BT, sliding_window: int, causal: bool, scale, soft_cap
) -> Array:
    time = jnp.arange(q_BTNH.shape[1])
    distance_TS = time[:, None] - time[None, :]
    if not causal:
        distance_TS = jnp.abs(distance_TS)
    mask_TS = distance_TS >= 0
    if sliding_window:
        mask_TS &= distance_TS < sliding_window
    mask_BTS = mask_TS & (segments_BT[:, :, None] == segments_BT[:, None, :])
    return _masked_attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale, soft_cap)


def _masked_attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale: float, soft_cap: float) -> Array:
    batch, time, num_heads, head_dim = q_BTNH.shape
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    num_kv_heads = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(batch, time, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=wide)
    scores_BKGTS *= scale
    if soft_cap:
        scores_BKGTS = soft_cap * jnp.tanh(scores_BKGTS / soft_cap)
    p_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1, where=mask_BTS[:, None, None])
    out_BTKGH = jnp.einsum(
        "BKGTS,BSKH->BTKGH", p_BKGTS.astype(v_BSKH.dtype), v_BSKH, preferred_element_type=wide
    )
    return out_BTKGH.astype(q_BTNH.dtype).reshape(q_BTNH.shape)
