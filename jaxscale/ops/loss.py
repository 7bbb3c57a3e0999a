"""Chunked cross entropy: the logits of all tokens never exist at once.

Shapes: B batch, T time, N tokens (B * T), J chunks, C tokens of one chunk, D features, V vocabulary
(inside the functions of one rank: its columns of the head), K tokens with trained rows.
"""

import functools
import importlib.util
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from etils import epy
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jaxscale.ops.loss_over_vocabulary import (
    Columns,
    LossArrays,
    Slice,
    column_axes,
    columns_of,
    gather_chunks,
    gather_tokens,
    head_gradient_spec,
    on_ranks,
    over_columns,
    own_columns,
    ranks_of,
    scatter_chunk,
    scatter_tokens,
    summed_axes,
    time_ranks,
    whole_columns,
)
from jaxscale.ops.sizes import loss_chunk_tokens
from jaxscale.ops.tensor_parallel import Spread

with epy.lazy_imports():  # half a second, and only a GPU needs it
    from jaxscale.ops import loss_kernel


class LossForm(NamedTuple):
    """The form of the computation, which affects only rounding, speed and memory."""

    chunk_tokens: int | None = None
    """Tokens of a chunk, without tokens of other ranks of context; None is `loss_chunk_tokens`."""

    platform: str = ""
    """Of the devices: on GPUs a chunk has at least as many tokens as features, for the head's
    gradient; on CPUs targets' logits are looked up."""

    trains_head: bool = True
    """Whether the head's gradient is read: otherwise XLA removes it, and chunks are short."""

    accumulation_dtype: DTypeLike = jnp.float32
    """Of the head's gradient, summed over chunks; at least as wide as the softmax."""

    spread: Spread | None = None
    """Sharding of x and the head: x as `spread.stream`, V over `spread.axis`, which divides it, and
    D over `spread.features`, over which logits are summed. The loss divides the columns over
    `spread.time`, too."""

    scatters: bool = False
    """Whether the head's gradient is sharded along D over `spread.time`, as the optimizer's state
    is; else every rank gets all of its columns."""

    unroll: bool = False
    """Whether the loop over chunks is unrolled."""

    slice_: Slice | None = None
    """Of a head with a slice on each rank of a manual mesh axis, `columns` in all. Every rank gets
    the whole loss, and its terms of the gradients of x and rows, which the caller sums."""


PLAIN_FORM = LossForm()


class _Static(NamedTuple):
    vocab_size: int
    soft_cap: float
    z_loss: float
    transposed: bool
    ids: tuple[int, ...]
    form: LossForm
    columns: int  # of the head on a rank of tensor


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
    transposed: bool = False,
    rows_KD: Array | None = None,
    ids: tuple[int, ...] = (),
    form: LossForm = PLAIN_FORM,
) -> tuple[Array, Array]:
    """Cross entropy: sums weight * (nll + z_loss * log(Z)^2) over tokens, in nats.

    Under differentiation one pass over chunks of tokens computes the loss and its gradients; the
    backward pass only scales them. Matmuls take inputs in the type of `x_BTD` and accumulate in
    float32 or wider, as does the softmax.

    With the head's columns sharded over tensor or context, each rank computes its logits of every
    token (arXiv 1909.08053, section 3). Per chunk, three numbers of each token are reduced over
    ranks: maximum, sum and target's logit. The gradient of x is reduce-scattered in the type of x,
    as between layers; over tensor once, after all chunks.

    Args:
      head: [D, V], or [V, D] when `transposed` (tied embedding). Columns from `vocab_size` on are
        padding: never predicted, with a gradient of exactly zero. The head may be wider than
        `x_BTD`; its gradient is then not rounded to the narrower type.
      targets_BT: token ids below `vocab_size`.
      weights_BT: the weight of each token; data without a gradient.
      bias_V: added to the logits, before the soft cap.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap); 0 disables.
      z_loss: weight of log(Z)^2, which keeps the logits near zero (arXiv 2204.02311).
      rows_KD: added to the head's columns of the tokens `ids`; its gradient is computed without
        that of the head.

    Returns:
      The loss, and the sum of weight * nll without a gradient. Both are float32 scalars, or float64
      if the inputs are.
    """
    if form.chunk_tokens is not None and form.chunk_tokens < 1:
        raise ValueError(f"chunk_tokens = {form.chunk_tokens} must be at least 1, or None")
    form = form._replace(
        accumulation_dtype=jnp.promote_types(form.accumulation_dtype, _softmax_dtype(x_BTD)),
        scatters=form.scatters and bool(form.spread and form.spread.time),
    )
    columns = head.shape[0 if transposed else 1]
    if form.spread and form.spread.axis:
        ranks = ranks_of([form.spread.axis])
        columns //= ranks
        if form.slice_:
            whole = form.slice_._replace(columns=form.slice_.columns // ranks)
            form = form._replace(slice_=whole)
    static = _Static(vocab_size, soft_cap, z_loss, transposed, ids, form, columns)
    return _loss(static, LossArrays(x_BTD, head, bias_V, rows_KD, targets_BT, weights_BT))


def logits(
    x_BTD: Array,
    head: Array,
    *,
    vocab_size: int,
    bias_V: Array | None = None,
    soft_cap: float = 0.0,
    transposed: bool = False,
    rows_KD: Array | None = None,
    ids: tuple[int, ...] = (),
) -> Array:
    """Logits of every token, in float32 or wider, [..., vocab_size]; arguments as in
    `cross_entropy`."""
    added = None if rows_KD is None else (rows_KD, ids)
    raw_BTV = _project(x_BTD, head, bias_V, transposed, added)[..., :vocab_size]
    return soft_cap * jnp.tanh(raw_BTV / soft_cap) if soft_cap else raw_BTV


def _softmax_dtype(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _chunk_size(num_tokens: int, most: int) -> int:
    """Tokens of a chunk, at most `most`, with little padding in the last chunk."""
    num_chunks = -(-num_tokens // most)
    return -(-num_tokens // num_chunks)


def _project(
    x_CD: Array,
    head: Array,
    bias_V: Array | None,
    transposed: bool,
    added: tuple[Array, tuple[int, ...]] | None = None,
    first: Any = 0,
    spread: Spread | None = None,
) -> Array:
    """Logits, accumulated in float32 or wider, and summed over ranks of features.

    Args:
      added: rows [K, D] and the tokens whose columns of the head they add to.
      first: the token of the head's first column.
    """
    contract = "...D,VD->...V" if transposed else "...D,DV->...V"
    raw_CV = jnp.einsum(
        contract, x_CD, head.astype(x_CD.dtype), preferred_element_type=_softmax_dtype(x_CD)
    )
    if added:
        rows_KD, ids = added
        raw_CK = _project(x_CD, rows_KD, None, transposed=True)
        # A one-hot matmul, not a scatter: with XLA:CPU (jax 0.12) a pipeline stage that scatters
        # here does not return.
        raw_CV += _matmul("...K,KV->...V", raw_CK, _is_token(ids, first, raw_CV))
    if spread:
        (raw_CV,) = spread.summed([raw_CV])
    return raw_CV if bias_V is None else raw_CV + bias_V.astype(raw_CV.dtype)


def _is_token(ids: tuple[int, ...], first: Any, like_CV: Array) -> Array:
    """[K, V], one-hot in the column of each token, in the type of the logits."""
    columns_V = first + jnp.arange(like_CV.shape[-1])
    return (jnp.asarray(ids)[:, None] == columns_V).astype(like_CV.dtype)


def _matmul(contract: str, *operands: Array) -> Array:
    """Matmul at the highest precision, accumulated in float32 or wider."""
    dtype = _softmax_dtype(operands[0])
    return jnp.einsum(contract, *operands, precision="highest", preferred_element_type=dtype)


def _chunk_loss(
    static: _Static,
    arrays: LossArrays,
    own: Columns,
    x_CD: Array,
    targets_C: Array,
    weights_C: Array,
):
    """The loss and nll of one chunk, and a function for the gradient of its logits."""
    form = static.form
    added = None if arrays.rows_KD is None else (arrays.rows_KD, static.ids)
    raw_CV = capped_CV = _project(
        x_CD, arrays.head, arrays.bias_V, static.transposed, added, own.first, form.spread
    )
    if static.soft_cap:
        capped_CV = static.soft_cap * jnp.tanh(raw_CV / static.soft_cap)
    axes = summed_axes(form.spread, form.slice_)
    divided = bool(axes)
    number_V = jnp.arange(raw_CV.shape[-1], dtype=targets_C.dtype)
    targets_C -= jnp.asarray(own.first, targets_C.dtype)
    is_real_V = number_V < own.real if own.real is not None else None
    # The targets' logits are gathered on CPUs, where comparing all columns takes longer than the
    # exponentials. Elsewhere the comparison is fused into a pass over the logits. With sharded
    # columns another rank may have the target's.
    looks_up = form.platform == "cpu" and not divided
    is_target_CV = number_V == targets_C[:, None]
    if divided and is_real_V is not None:  # padding has the numbers of another rank's tokens
        is_target_CV &= is_real_V
    places = jnp.arange(targets_C.size), targets_C
    if _has_kernel(static, raw_CV):
        end = raw_CV.shape[-1] if own.real is None else own.real
        log_z_C, target_C = loss_kernel.log_z_and_target(
            raw_CV, targets_C.astype(jnp.int32), end, soft_cap=static.soft_cap
        )
    elif form.platform == "gpu":
        log_z_C, target_C = _reduced_at_once(capped_CV, is_target_CV, is_real_V)
    else:
        log_z_C = jax.nn.logsumexp(capped_CV, axis=-1, where=is_real_V)
        target_C = jnp.sum(jnp.where(is_target_CV, capped_CV, 0), axis=-1)
    if looks_up:
        target_C = capped_CV.at[places].get(mode="promise_in_bounds")
    log_z_C, target_C = over_columns(axes, log_z_C, target_C)
    nll_C = log_z_C - target_C

    def gradient(capped: Array, log_z: Array, weights: Array, is_target: ArrayLike) -> Array:
        grad = jnp.exp(capped - log_z) * (1 + 2 * static.z_loss * log_z) - is_target
        if static.soft_cap:
            grad *= 1 - jnp.square(capped / static.soft_cap)
        return (grad * weights).astype(x_CD.dtype)

    def logits_gradient() -> Array:
        is_target = 0 if looks_up else is_target_CV
        grad_CV = gradient(capped_CV, log_z_C[:, None], weights_C[:, None], is_target)
        if is_real_V is not None:
            grad_CV = jnp.where(is_real_V, grad_CV, 0)
        if not looks_up:
            return grad_CV
        # The target's -1 is scattered in: in the elementwise form XLA would compare all columns.
        of_target_C = gradient(target_C, log_z_C, weights_C, 1)
        return grad_CV.at[places].set(of_target_C, mode="promise_in_bounds", unique_indices=True)

    loss = jnp.sum(weights_C * (nll_C + static.z_loss * jnp.square(log_z_C)))
    return loss, jnp.sum(weights_C * nll_C), logits_gradient


def _has_kernel(static: _Static, raw_CV: Array) -> bool:
    """Whether `loss_kernel.py` reduces these logits: float32 on GPUs, fewer than 2**31, and with no
    automatic mesh axis, since the compiler cannot partition a kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    automatic = [size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes]
    return (
        static.form.platform == "gpu"
        and raw_CV.dtype == jnp.float32
        and raw_CV.size < 2**31
        and math.prod(automatic) == 1
        # JAX (0.11, 0.12) calls Pallas's Triton back end deprecated. Without it XLA reduces.
        and importlib.util.find_spec("jax.experimental.pallas.triton") is not None
    )


def _reduced_at_once(
    logits_CV: Array, is_target_CV: Array, is_real_V: Array | None
) -> tuple[Array, Array]:
    """log Z and the target's logit of each token in one pass over the logits: online softmax, a
    running maximum and the sum of exponentials relative to it (arXiv 1805.02867, section 3)."""

    # XLA for GPUs compiles `logsumexp` to two passes, for the maximum and for the sum.
    def joined(one, other):
        (most, total, target), (most_2, total_2, target_2) = one, other
        new = jnp.maximum(most, most_2)
        # Where both are -inf, as in padding, their difference would be nan.
        scale, scale_2 = (jnp.exp(jnp.where(m == new, 0, m - new)) for m in (most, most_2))
        return new, total * scale + total_2 * scale_2, target + target_2

    real = jnp.ones_like(logits_CV)
    if is_real_V is not None:
        logits_CV, real = jnp.where(is_real_V, logits_CV, -jnp.inf), jnp.where(is_real_V, real, 0)
    zero = jnp.zeros((), logits_CV.dtype)
    terms = logits_CV, real, jnp.where(is_target_CV, logits_CV, 0)
    most_C, total_C, target_C = jax.lax.reduce(terms, (zero - jnp.inf, zero, zero), joined, (1,))
    return most_C + jnp.log(total_C), target_C


def _chunks(form: LossForm, columns: int, *arrays_BT: Array) -> list[Array]:
    """[B, T, ...] -> [chunks, C, ...], x first; the last chunk is padded with zeros, weight zero
    included.

    Args:
      columns: of the head on this rank, for which a chunk has the tokens of all ranks of context.
    """
    long = form.platform == "gpu" and form.trains_head
    features = arrays_BT[0].shape[-1] if long else 0
    most = int(loss_chunk_tokens(columns, features)) // time_ranks(form.spread)
    most = form.chunk_tokens or max(most, 1)
    flat = [array.reshape(-1, *array.shape[2:]) for array in arrays_BT]
    size = _chunk_size(flat[0].shape[0], most)
    missing = -flat[0].shape[0] % size
    return [
        jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)).reshape(
            -1, size, *array.shape[1:]
        )
        for array in flat
    ]


def _narrow(arrays: LossArrays) -> LossArrays:
    """Casts the head to the type of x, for matmuls."""
    return arrays._replace(head=arrays.head.astype(arrays.x_BTD.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(static: _Static, arrays: LossArrays):
    local = functools.partial(_local_loss, static)
    run = on_ranks(static.form.spread, local, static.columns, transposed=static.transposed)
    return run(_narrow(arrays))


def _local_loss(static: _Static, arrays: LossArrays):
    """The loss and nll on one rank."""
    form, dtype = static.form, _softmax_dtype(arrays.x_BTD)
    arrays, own, chunks = _on_this_rank(static, arrays)

    def step(sums, chunk):
        x_CD = gather_chunks(form.spread, chunk[0], axis=0)
        loss, nll, _ = _chunk_loss(static, arrays, own, x_CD, *chunk[1:])
        return (sums[0] + loss, sums[1] + nll), None

    zero = jnp.zeros((), dtype)
    return jax.lax.scan(step, (zero, zero), chunks, unroll=form.unroll)[0]


def _on_this_rank(
    static: _Static, arrays: LossArrays
) -> tuple[LossArrays, Columns, tuple[Array, ...]]:
    """The arrays with this rank's columns, their tokens, and the chunks of x, targets and weights;
    of x without the tokens of other ranks of context."""
    form = static.form
    arrays = own_columns(form.spread, arrays, static.columns, transposed=static.transposed)
    share = arrays.head.shape[0 if static.transposed else 1]
    own = columns_of(form.spread, share, static.columns, static.vocab_size, form.slice_)
    x_BTD = gather_tokens(form.spread, arrays.x_BTD)
    weights_BT = arrays.weights_BT.astype(_softmax_dtype(x_BTD))
    x_JCD, *others_JC = _chunks(form, share, x_BTD, arrays.targets_BT, weights_BT)
    return arrays, own, (x_JCD, *(gather_chunks(form.spread, x, axis=1) for x in others_JC))


def _loss_forward(static: _Static, arrays: LossArrays):
    form = static.form
    summed = head_gradient_spec(form.spread, form.scatters)
    local = functools.partial(_local_gradients, static)
    run = on_ranks(form.spread, local, static.columns, transposed=static.transposed, summed=summed)
    sums, gradients = run(_narrow(arrays))
    trained = arrays.head, arrays.bias_V, arrays.rows_KD
    # The backward pass needs only the types of these; as residuals the arrays would stay alive.
    return sums, (*gradients, jax.tree.map(lambda x: jnp.zeros((), x.dtype), trained))


def _local_gradients(static: _Static, arrays: LossArrays):
    """(loss, nll) and the gradients of x, the head as [D, V], the bias and the rows, on one
    rank."""
    form, x_BTD = static.form, arrays.x_BTD
    shape_BT, dtype = arrays.targets_BT.shape, form.accumulation_dtype
    arrays, own, chunks = _on_this_rank(static, arrays)
    head, bias_V, rows_KD = arrays.head, arrays.bias_V, arrays.rows_KD
    matmul = functools.partial(jnp.einsum, preferred_element_type=_softmax_dtype(x_BTD))
    # x is transposed once for the head's gradient, [D, C] x [C, V]: XLA:CPU's matmul is two to
    # three times slower if it contracts the first dimension of its left operand.
    alone = time_ranks(form.spread) == 1
    chunks = (chunks[0], jnp.swapaxes(chunks[0], 1, 2) if alone else None, *chunks[1:])

    def step(carry, chunk):
        x_CD, x_DC, targets_C, weights_C = chunk
        x_CD = gather_chunks(form.spread, x_CD, axis=0)
        x_DC = x_CD.T if x_DC is None else x_DC
        if form.platform == "gpu":
            # XLA for GPUs may fuse the slice of a larger array into a matmul, whose kernel it then
            # does not autotune: on an H200 the three matmuls took 15 % longer.
            x_CD, x_DC = map(jax.lax.optimization_barrier, (x_CD, x_DC))
        loss_sum, nll_sum, grad_head_DV, grad_bias_V, grad_rows_KD = carry
        loss, nll, logits_gradient = _chunk_loss(static, arrays, own, x_CD, targets_C, weights_C)
        grad_CV = logits_gradient()
        grad_x_CD = matmul("CV,VD->CD" if static.transposed else "CV,DV->CD", grad_CV, head)
        grad_head_DV += matmul("DC,CV->DV", x_DC, grad_CV)
        if bias_V is not None:
            grad_bias_V += jnp.sum(grad_CV.astype(grad_bias_V.dtype), axis=0)
        if rows_KD is not None:
            grad_CK = _matmul("CV,KV->CK", grad_CV, _is_token(static.ids, own.first, grad_CV))
            grad_CK = grad_CK.astype(x_CD.dtype)
            grad_x_CD += matmul("CK,KD->CD", grad_CK, rows_KD.astype(x_CD.dtype))
            grad_rows_KD += matmul("CK,CD->KD", grad_CK, x_CD)
        sums = (loss_sum + loss, nll_sum + nll, grad_head_DV, grad_bias_V, grad_rows_KD)
        return sums, scatter_chunk(form.spread, grad_x_CD.astype(x_CD.dtype))

    zero = jnp.zeros((), _softmax_dtype(x_BTD))
    head_start = jnp.zeros(head.shape[::-1] if static.transposed else head.shape, dtype)
    bias_start, rows_start = (
        None if x is None else jnp.zeros(x.shape, dtype) for x in (bias_V, rows_KD)
    )
    carry, grad_x_JCD = jax.lax.scan(
        step, (zero, zero, head_start, bias_start, rows_start), chunks, unroll=form.unroll
    )
    loss, nll, grad_head_DV, grad_bias_V, grad_rows_KD = carry
    grad_head_DV = whole_columns(form.spread, grad_head_DV, static.columns, scatters=form.scatters)
    if grad_bias_V is not None:
        grad_bias_V = whole_columns(form.spread, grad_bias_V, static.columns, scatters=False)
    if axes := column_axes(form.spread):  # each rank has the contribution of its columns
        grad_rows_KD = jax.lax.psum(grad_rows_KD, axes)
    grad_x_ND = grad_x_JCD.reshape(-1, x_BTD.shape[-1])[: math.prod(shape_BT)]
    grad_x_BTD = scatter_tokens(form.spread, grad_x_ND.reshape(*shape_BT, -1))
    return (loss, nll), (grad_x_BTD, grad_head_DV, grad_bias_V, grad_rows_KD)


def _loss_backward(static: _Static, residuals, cotangents):
    grad_x_BTD, grad_head_DV, *others, (like_head, *likes) = residuals
    scale = cotangents[0]
    grad_head = (grad_head_DV * scale).astype(like_head.dtype)
    if static.transposed:
        # With a single chunk XLA would fold the transpose into the matmul, and XLA:CPU has no
        # bfloat16 to float32 matmul that reads its left operand by columns.
        grad_head = jax.lax.optimization_barrier(grad_head).T
    grad_bias_V, grad_rows_KD = (
        None if like is None else (grad * scale).astype(like.dtype)
        for grad, like in zip(others, likes, strict=True)
    )
    grad_x_BTD = (grad_x_BTD * scale).astype(grad_x_BTD.dtype)
    return (LossArrays(grad_x_BTD, grad_head, grad_bias_V, grad_rows_KD, None, None),)


_loss.defvjp(_loss_forward, _loss_backward)
