"""Attention within packed documents: a reference implementation and the kernels of each platform.

Shapes: B batch, T query time, S key time, N query heads, K key heads, G query heads per key head
(N = K * G), H head_dim, b buckets of a relative position bias.
"""

import contextlib
import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from etils import epy
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxscale.config.model.settings import SPREAD_ATTENTIONS
from jaxscale.ops.attention import platform_kernels
from jaxscale.ops.attention.blocks import AttentionArrays, Scoring, in_reach
from jaxscale.ops.attention.blockwise import blockwise_attention
from jaxscale.ops.attention.relative_bias import relative_buckets
from jaxscale.ops.sizes import LANES

with epy.lazy_imports():  # half a second each, and only a GPU or a TPU needs it
    from jaxscale.ops.attention import flash, splash

PLATFORM_KERNELS = {"gpu": ("cudnn", "flash"), "tpu": ("splash",)}
"""Platform -> its kernels: "auto" selects the first that honours the run's settings, or
"blockwise" if none does."""

PACKED_KERNELS = PLATFORM_KERNELS | {"gpu": ("flash", "cudnn")}
"""Platform -> its kernels for causal attention within documents that share a row: cuDNN reads a
mask and computes all scores below the diagonal, while flash skips blocks of other documents."""

USES = {
    "soft_cap": "no soft cap of scores",
    "bias": "no relative position bias",
    "cross": "no cross attention",
    "sinks": "no attention sinks",
    "part": "no queries that are a part of a sequence (layout.sequence_chunks above 1)",
}
"""Optional feature of attention -> the words with which an error says that a kernel lacks it."""


def attention(
    *arrays: Any, implementation: str, one_document: bool = False, **settings: Any
) -> Array:
    """Attention within segments; causal self-attention by default.

    Query head n reads key head n // (N / K). Values, and so the output, may have another number of
    features than keys. Segment 0, padding, is an ordinary segment: its outputs are finite and
    affect no other token. A query without visible keys, possible in cross attention, has output
    zero. The softmax is in float32 or wider. The output and the residuals other than the arguments
    have the checkpoint name "attention"; a remat policy recognises "cudnn" by
    `platform_kernels.is_cudnn_forward`.

    Cross attention (`segments_BS`) is not causal and has neither window nor bias. Attention sinks
    (arXiv 2309.17453) are learned logits, as in gpt-oss (arXiv 2508.10925).

    Args:
      arrays: the fields of `blocks.AttentionArrays`.
      implementation: "reference", "blockwise", "cudnn", "flash" or "splash"; see `choose` and
        `check`.
      one_document: whether every row is one document and padding: in causal attention "cudnn" and
        "splash" then read no segments, which changes the outputs of padding.
      **settings: as in `score_settings`.

    Raises:
      ValueError: an unknown implementation, or settings that it or cross attention lacks.
    """
    given = AttentionArrays(*arrays)
    q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BS, bias_bN, sinks_N, begin = given
    scoring = score_settings(
        q_BTNH, k_BSKH, segments_BS, bias_bN, part=begin is not None, **settings
    )
    if sinks_N is not None and given.crosses:
        raise ValueError(
            "sinks_N with segments_BS: cross attention has no attention sinks; leave one out"
        )
    if implementation not in LACKS:
        raise ValueError(
            f"attention implementation {implementation!r} is not known; it can be "
            f"{', '.join(LACKS)}"
        )
    asked = {
        "soft_cap": scoring.soft_cap,
        "bias": bias_bN is not None,
        "cross": given.crosses,
        "sinks": sinks_N is not None,
        "part": begin is not None,
    }
    check_uses(implementation, [use for use, is_asked in asked.items() if is_asked])
    # With one document per row, causal order already hides the padding at the end of the row.
    mask_BT = None if one_document and scoring.causal else segments_BT
    match implementation:
        case "cudnn":
            return platform_kernels.cudnn(q_BTNH, k_BSKH, v_BSKH, mask_BT, scoring)
        case "flash":
            return flash.flash_attention(*given, scoring=scoring)
        case "splash":
            # JAX's kernel for what it has: its speed is known.
            if any(x is not None for x in given[4:]) or q_BTNH.shape[1] % LANES:
                return splash.splash_attention(*given, scoring=scoring)
            return platform_kernels.splash(q_BTNH, k_BSKH, v_BSKH, mask_BT, scoring)
        case "blockwise":
            return blockwise_attention(*given, scoring=scoring)
    return checkpoint_name(_reference(given, scoring), "attention")


def score_settings(
    q_BTNH: Array,
    k_BSKH: Array,
    segments_BS: Array | None = None,
    bias_bN: Array | None = None,
    *,
    sliding_window: int = 0,
    causal: bool = True,
    scale: float | None = None,
    soft_cap: float = 0.0,
    max_distance: int = 128,
    part: bool = False,
) -> Scoring:
    """The scoring settings of one call of attention; layers of a model may differ in them.

    Args:
      sliding_window: number of keys that a causal query sees, itself included; 0 is all. Without
        causality a query sees keys at distances below this, before and after it: a window of r
        tokens each way, as other libraries count it, is r + 1.
      scale: of the scores; None is H**-0.5.
      soft_cap: scores become cap * tanh(score / cap), after scaling; 0 disables.
      max_distance: distances from this on share a bucket of the bias, which is added last.
      part: whether the queries are a part of the keys' sequence.

    Raises:
      ValueError: settings that contradict each other.
    """
    crosses = segments_BS is not None and not part
    if crosses and (causal or sliding_window or bias_bN is not None):
        wrong = "causal order" if causal else "a window" if sliding_window else "a position bias"
        raise ValueError(
            f"cross attention with {wrong}: queries and keys of different sequences have no "
            "distance; call it with causal=False, sliding_window=0 and no bias"
        )
    if segments_BS is None and q_BTNH.shape[1] != k_BSKH.shape[1]:
        raise ValueError(
            f"{q_BTNH.shape[1]} queries and {k_BSKH.shape[1]} keys: cross attention needs the "
            "segments of its keys"
        )
    factor = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    return Scoring(factor, sliding_window, causal, soft_cap, max_distance)


def choose(
    implementation: str,
    platform: str,
    *,
    dtype: DTypeLike,
    head_dim: int,
    seq_len: int,
    value_dim: int = 0,
    generation: str = "",
    uses: Collection[str] = (),
    causal: bool = True,
    one_document: bool = False,
    spread: bool = False,
) -> str:
    """The attention implementation of a run: the one that is set, or a choice for "auto".

    "auto" is the first of the platform's kernels in `PACKED_KERNELS` that `check` accepts
    (`PLATFORM_KERNELS` where attention is not causal or rows are one document), or "blockwise" if
    none is accepted, so that every setting runs on every platform.

    Args:
      seq_len: of queries and keys; the greatest common divisor, if layers differ.
      value_dim: features of a head's values; 0 is `head_dim`.
      generation: of the device, as in `hardware.csv`.
      uses: the keys of `USES` that any layer of the model needs.
      one_document: as in `attention`.
      spread: whether "auto" must be one of `SPREAD_ATTENTIONS`.

    Raises:
      ValueError: the named implementation cannot honour the settings.
    """
    asked: dict[str, Any] = {
        "dtype": dtype,
        "head_dim": head_dim,
        "seq_len": seq_len,
        "value_dim": value_dim,
        "generation": generation,
        "uses": uses,
    }
    if implementation != "auto":
        check(implementation, platform=platform, **asked)
        return implementation
    kernels = PACKED_KERNELS if causal and not one_document else PLATFORM_KERNELS
    for kernel in kernels.get(platform, ()):
        if spread and kernel not in SPREAD_ATTENTIONS:
            continue
        with contextlib.suppress(ValueError):
            check(kernel, platform=platform, **asked)
            return kernel
    return "blockwise"


def check(
    implementation: str,
    *,
    platform: str,
    dtype: DTypeLike,
    head_dim: int,
    seq_len: int,
    value_dim: int = 0,
    generation: str = "",
    uses: Collection[str] = (),
) -> None:
    """Checks that a kernel supports the arguments, which are those of `choose`.

    Raises:
      ValueError: it does not; names the setting to change.
    """
    if implementation in ("reference", "blockwise"):
        return
    limits = {
        "cudnn": functools.partial(
            platform_kernels.cudnn_limits, value_dim=value_dim, generation=generation
        ),
        "flash": platform_kernels.flash_limits,
        "splash": platform_kernels.splash_limits,
    }
    if implementation not in limits:
        raise ValueError(
            f"model.attention = {implementation!r} is not known; it can be auto, {', '.join(LACKS)}"
        )
    broken = limits[implementation](platform, jnp.dtype(dtype), head_dim, seq_len)
    if broken:
        raise ValueError(
            f"model.attention = {implementation!r} {broken}; or set model.attention = 'auto'"
        )
    check_uses(implementation, uses)


def check_uses(implementation: str, uses: Collection[str]) -> None:
    """Checks that a kernel has all features that a layer uses.

    Raises:
      ValueError: it lacks one; names the kernels that have it.
    """
    for use in uses:
        able = [name for name, lacks in LACKS.items() if use not in lacks]
        if implementation not in able:
            raise ValueError(
                f"model.attention = {implementation!r} has {USES[use]}, and a layer of this model "
                f"needs it; set model.attention = 'auto' or one of {', '.join(able)}"
            )


LACKS = {
    "reference": (),
    "blockwise": (),
    "cudnn": ("soft_cap", "bias", "cross", "sinks", "part"),
    "flash": (),
    "splash": (),
}
"""Implementation -> the features of `USES` that it lacks."""


def decode_attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    query_positions_BT: Array,
    key_positions_BS: Array,
    bias_bN: Array | None = None,
    sinks_N: Array | None = None,
    *,
    sliding_window: int = 0,
    scale: float | None = None,
    soft_cap: float = 0.0,
    max_distance: int = 128,
) -> Array:
    """Attention over a key/value cache: a query sees keys at its position and before.

    Args:
      key_positions_BS: position of the key in each slot; -1 is an empty slot.
      bias_bN, sinks_N, sliding_window, scale, soft_cap, max_distance: as in `attention`.

    Returns:
      [B, T, N, H]; zeros for a query that sees no key.
    """
    distance_BTS = query_positions_BT[:, :, None] - key_positions_BS[:, None, :]
    mask_BTS = (distance_BTS >= 0) & (key_positions_BS >= 0)[:, None, :]
    if sliding_window:
        mask_BTS &= distance_BTS < sliding_window
    factor = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    scoring = Scoring(factor, sliding_window, True, soft_cap, max_distance)
    bias = _biases(bias_bN, distance_BTS, scoring)
    return _masked_attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS, bias, sinks_N, scoring)


def _reference(given: AttentionArrays, scoring: Scoring) -> Array:
    q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BS, bias_bN, sinks_N, begin = given
    segments_BS = segments_BT if segments_BS is None else segments_BS
    query_time, key_time = jnp.arange(q_BTNH.shape[1]), jnp.arange(k_BSKH.shape[1])
    query_time = query_time if begin is None else begin + query_time
    distance_TS = query_time[:, None] - key_time[None, :]
    mask_TS = in_reach(distance_TS, scoring.window, scoring.causal)
    mask_BTS = segments_BT[:, :, None] == segments_BS[:, None, :]
    mask_BTS = mask_BTS if mask_TS is None else mask_TS & mask_BTS
    bias = _biases(bias_bN, distance_TS[None], scoring)
    return _masked_attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS, bias, sinks_N, scoring)


def _biases(bias_bN: Array | None, distance_BTS: Array, scoring: Scoring) -> Array | None:
    """[B, N, T, S]."""
    if bias_bN is None:
        return None
    buckets_BTS = relative_buckets(-distance_BTS, bias_bN.shape[0], **scoring.bucketing)
    return jnp.moveaxis(bias_bN[buckets_BTS], 3, 1)


def _masked_attention(
    q_BTNH, k_BSKH, v_BSKV, mask_BTS, bias_BNTS, sinks_N, scoring: Scoring
) -> Array:
    batch, time, num_heads, head_dim = q_BTNH.shape
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    num_kv_heads = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(batch, time, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=wide)
    scores_BKGTS *= scoring.scale
    if scoring.soft_cap:
        scores_BKGTS = scoring.soft_cap * jnp.tanh(scores_BKGTS / scoring.soft_cap)
    if bias_BNTS is not None:
        shape = (bias_BNTS.shape[0], *scores_BKGTS.shape[1:])
        scores_BKGTS += bias_BNTS.astype(wide).reshape(shape)
    mask_B11TS = mask_BTS[:, None, None]
    if sinks_N is None:
        p_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1, where=mask_B11TS)
    else:
        sinks_KG11 = sinks_N.astype(wide).reshape(*scores_BKGTS.shape[1:3], 1, 1)
        sinks_BKGT1 = jnp.broadcast_to(sinks_KG11, (*scores_BKGTS.shape[:-1], 1))
        with_sink = jnp.concatenate((sinks_BKGT1, scores_BKGTS), axis=-1)
        seen = jnp.pad(mask_B11TS, ((0, 0),) * 4 + ((1, 0),), constant_values=True)
        p_BKGTS = jax.nn.softmax(with_sink, axis=-1, where=seen)[..., 1:]
    out_BTKGV = jnp.einsum(
        "BKGTS,BSKV->BTKGV", p_BKGTS.astype(v_BSKV.dtype), v_BSKV, preferred_element_type=wide
    )
    return out_BTKGV.astype(q_BTNH.dtype).reshape(*q_BTNH.shape[:3], -1)
