"""Cross entropy that never materialises the logits of all tokens at once.

Shapes: B batch, T time, N tokens (B * T), J chunks, C tokens of one chunk,
D features, V vocabulary, S shards of the sequence.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxscale.ops.sizes import CHUNK_BYTES, CHUNK_TOKENS


class _Static(NamedTuple):
    vocab_size: int
    soft_cap: float
    z_loss: float
    chunk_tokens: int
    accumulation_dtype: DTypeLike
    transposed: bool
    unroll: bool


def cross_entropy(
    x_BTD: Array,
    head: Array,
    targets_BT: Array,
    weights_BT: Array,
    *,
    vocab_size: int,
    bias_V: Array | None = None,
    soft_cap: float = 0.0,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
    accumulation_dtype: DTypeLike = jnp.float32,
    transposed: bool = False,
    shards: int = 1,
    unroll: bool = False,
) -> tuple[Array, Array]:
    """Sums weight * (nll + z_loss * log(Z)^2) over tokens, in nats.

    Under differentiation one pass over chunks of tokens computes the loss and its gradients;
    the backward pass only scales them. Matmuls take inputs in the type of `x_BTD` and
    accumulate in float32 or wider, as does the softmax.

    Args:
      head: [D, V], or [V, D] when `transposed` (an embedding that doubles as the head). Entries
        from `vocab_size` on are padding: never predicted, their gradient is exactly zero. It may
        be wider than `x_BTD`; its gradient is then not rounded to the narrower type.
      targets_BT: token ids below `vocab_size`.
      weights_BT: the weight of each token; data, so no gradient flows to it.
      bias_V: added to the logits, before the soft cap.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap); 0 is none.
      z_loss: weight of log(Z)^2, which keeps the logits near zero (arXiv 2204.02311).
      chunk_tokens: tokens whose logits exist together; None is by `CHUNK_BYTES`.
      accumulation_dtype: of the head's gradient while it is summed over chunks; widened to that
        of the softmax where it is narrower.
      shards: in how many equal parts T is spread over devices. A chunk takes as many tokens from
        each, so that none has to move; the head's gradient is summed over them once, at the end.
      unroll: unrolls the loop over chunks.

    Returns:
      The loss, and the sum of weight * nll alone, through which no gradient flows. Both are
      float32 scalars, or float64 where the inputs are.
    """
    num_tokens, vocab = targets_BT.size // shards, head.shape[0 if transposed else 1]
    static = _Static(
        vocab_size,
        soft_cap,
        z_loss,
        _chunk_size(num_tokens, vocab, chunk_tokens),
        jnp.promote_types(accumulation_dtype, _softmax_dtype(x_BTD)),
        transposed,
        unroll,
    )
    x_SND, targets_SN, weights_SN = (_shards(x, shards) for x in (x_BTD, targets_BT, weights_BT))
    if shards == 1:
        return _loss(static, x_SND[0], head, bias_V, targets_SN[0], weights_SN[0])
    losses_S, nlls_S = jax.vmap(functools.partial(_loss, static), (0, None, None, 0, 0))(
        x_SND, head, bias_V, targets_SN, weights_SN
    )
    return jnp.sum(losses_S), jnp.sum(nlls_S)


def _shards(x_BT: Array, shards: int) -> Array:
    """[B, T, ...] -> [S, B * T / S, ...]: each shard's tokens."""
    x_BST = x_BT.reshape(x_BT.shape[0], shards, -1, *x_BT.shape[2:])
    return jnp.moveaxis(x_BST, 1, 0).reshape(shards, -1, *x_BT.shape[2:])


def logits(
    x_BTD: Array,
    head: Array,
    *,
    vocab_size: int,
    bias_V: Array | None = None,
    soft_cap: float = 0.0,
    transposed: bool = False,
) -> Array:
    """Logits of every token, float32 or wider, [..., vocab_size]; arguments of `cross_entropy`."""
    raw_BTV = _project(x_BTD, head, bias_V, transposed)[..., :vocab_size]
    return soft_cap * jnp.tanh(raw_BTV / soft_cap) if soft_cap else raw_BTV


def _softmax_dtype(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _chunk_size(num_tokens: int, vocab: int, chunk_tokens: int | None) -> int:
    """Tokens of a chunk, chosen so that the last chunk is as full as the others can be."""
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens = {chunk_tokens} must be at least 1, or None")
    most = chunk_tokens or max(CHUNK_BYTES // (4 * vocab), CHUNK_TOKENS)
    num_chunks = -(-num_tokens // most)
    return -(-num_tokens // num_chunks)


def _project(x_CD: Array, head: Array, bias_V: Array | None, transposed: bool) -> Array:
    """Logits, accumulated in float32 or wider."""
    contract = "...D,VD->...V" if transposed else "...D,DV->...V"
    raw_CV = jnp.einsum(
        contract, x_CD, head.astype(x_CD.dtype), preferred_element_type=_softmax_dtype(x_CD)
    )
    return raw_CV if bias_V is None else raw_CV + bias_V.astype(raw_CV.dtype)


def _chunk_loss(
    static: _Static,
    x_CD: Array,
    head: Array,
    bias_V: Array | None,
    targets_C: Array,
    weights_C: Array,
):
    """One chunk's loss and nll, and a function that returns the gradient for its logits."""
    capped_CV = _project(x_CD, head, bias_V, static.transposed)
    if static.soft_cap:
        capped_CV = static.soft_cap * jnp.tanh(capped_CV / static.soft_cap)
    # The vocabulary may be sharded over an automatic axis, where XLA's partitioner would refuse a
    # gather of the target's logit: compare and sum instead.
    ids_V = jnp.arange(capped_CV.shape[-1], dtype=targets_C.dtype)
    is_real_V, is_target_CV = ids_V < static.vocab_size, ids_V == targets_C[:, None]
    log_z_C = jax.nn.logsumexp(capped_CV, axis=-1, where=is_real_V)
    nll_C = log_z_C - jnp.sum(jnp.where(is_target_CV, capped_CV, 0), axis=-1)

    def logits_gradient() -> Array:
        p_CV = jnp.where(is_real_V, jnp.exp(capped_CV - log_z_C[:, None]), 0)
        grad_CV = p_CV * (1 + 2 * static.z_loss * log_z_C)[:, None] - is_target_CV
        if static.soft_cap:
            grad_CV *= 1 - jnp.square(capped_CV / static.soft_cap)
        return (grad_CV * weights_C[:, None]).astype(x_CD.dtype)

    loss = jnp.sum(weights_C * (nll_C + static.z_loss * jnp.square(log_z_C)))
    return loss, jnp.sum(weights_C * nll_C), logits_gradient


def _chunks(static: _Static, *arrays: Array) -> list[Array]:
    """[N, ...] -> [chunks, C, ...]; the last chunk is padded with zeros, of weight zero."""
    missing = -arrays[0].shape[0] % static.chunk_tokens
    return [
        jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)).reshape(
            -1, static.chunk_tokens, *array.shape[1:]
        )
        for array in arrays
    ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(
    static: _Static,
    x_ND: Array,
    head: Array,
    bias_V: Array | None,
    targets_N: Array,
    weights_N: Array,
):
    head = head.astype(x_ND.dtype)
    weights_N = weights_N.astype(_softmax_dtype(x_ND))

    def step(sums, chunk):
        x_CD, targets_C, weights_C = chunk
        loss, nll, _ = _chunk_loss(static, x_CD, head, bias_V, targets_C, weights_C)
        return (sums[0] + loss, sums[1] + nll), None

    zero = jnp.zeros((), _softmax_dtype(x_ND))
    return jax.lax.scan(
        step, (zero, zero), _chunks(static, x_ND, targets_N, weights_N), unroll=static.unroll
    )[0]


def _loss_forward(
    static: _Static,
    x_ND: Array,
    head: Array,
    bias_V: Array | None,
    targets_N: Array,
    weights_N: Array,
):
    matmul = functools.partial(jnp.einsum, preferred_element_type=_softmax_dtype(x_ND))
    narrow = head.astype(x_ND.dtype)
    weights_N = weights_N.astype(_softmax_dtype(x_ND))
    x_JCD, targets_JC, weights_JC = _chunks(static, x_ND, targets_N, weights_N)
    # The head's gradient is summed as [D, V] with x transposed beforehand: a matmul that contracts
    # the first dimension of its left operand is two to three times slower on a CPU.
    x_JDC = jnp.swapaxes(x_JCD, 1, 2)

    def step(carry, chunk):
        x_CD, x_DC, targets_C, weights_C = chunk
        loss_sum, nll_sum, grad_head_DV, grad_bias_V = carry
        loss, nll, logits_gradient = _chunk_loss(static, x_CD, narrow, bias_V, targets_C, weights_C)
        grad_CV = logits_gradient()
        grad_x_CD = matmul("CV,VD->CD" if static.transposed else "CV,DV->CD", grad_CV, narrow)
        grad_head_DV += matmul("DC,CV->DV", x_DC, grad_CV)
        if bias_V is not None:
            grad_bias_V += jnp.sum(grad_CV.astype(grad_bias_V.dtype), axis=0)
        sums = (loss_sum + loss, nll_sum + nll, grad_head_DV, grad_bias_V)
        return sums, grad_x_CD.astype(x_CD.dtype)

    zero = jnp.zeros((), _softmax_dtype(x_ND))
    shape_DV = head.shape[::-1] if static.transposed else head.shape
    head_start = jnp.zeros(shape_DV, static.accumulation_dtype)
    bias_start = None if bias_V is None else jnp.zeros(bias_V.shape, static.accumulation_dtype)
    (loss, nll, grad_head_DV, grad_bias_V), grad_x_JCD = jax.lax.scan(
        step,
        (zero, zero, head_start, bias_start),
        (x_JCD, x_JDC, targets_JC, weights_JC),
        unroll=static.unroll,
    )
    grad_x_ND = grad_x_JCD.reshape(-1, x_ND.shape[1])[: x_ND.shape[0]]
    like_bias = None if bias_V is None else jnp.zeros((), bias_V.dtype)
    residuals = grad_x_ND, grad_head_DV, grad_bias_V, jnp.zeros((), head.dtype), like_bias
    return (loss, nll), residuals


def _loss_backward(static: _Static, residuals, cotangents):
    grad_x_ND, grad_head_DV, grad_bias_V, like_head, like_bias = residuals
    scale = cotangents[0]
    grad_head = (grad_head_DV * scale).astype(like_head.dtype)
    if static.transposed:
        # XLA would fold this transpose into the matmul of a single chunk, and its CPU back end has
        # no matmul from bfloat16 to float32 that reads its left operand by columns.
        grad_head = jax.lax.optimization_barrier(grad_head).T
    grad_bias = None if like_bias is None else (grad_bias_V * scale).astype(like_bias.dtype)
    return (grad_x_ND * scale).astype(grad_x_ND.dtype), grad_head, grad_bias, None, None


_loss.defvjp(_loss_forward, _loss_backward)
