"""Expert-parallel matmuls: dispatch, grouped matmul, combine.

`expert_columns` dispatches tokens and multiplies them by their experts' matrices out of the
residual stream. `expert_rows` multiplies by the matrices back into it and combines each token's
experts. The exchange in the backward pass of each is the other's in the forward pass.

Letters: as in `dispatch`; D features of the residual stream, F hidden features.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxscale.ops.experts.dispatch import Dispatch, DispatchPlan
from jaxscale.ops.experts.exchange import (
    collect_choices,
    collect_tokens,
    num_rows,
    send_choices,
    send_tokens,
)
from jaxscale.ops.experts.grouped_matmul import grouped_matmul, grouped_weight_gradient


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def send_gates(dispatch: Dispatch, gates_BTK: Array, plan: DispatchPlan) -> Array:
    """The gate of each row, [c, R]."""

    def local(gates_BTK: Array, plan: DispatchPlan) -> Array:
        return send_choices(dispatch, gates_BTK, plan)[None]

    specs = (dispatch.stream, dispatch.rows)
    return dispatch.manual(local, specs, dispatch.rows)(gates_BTK, plan)


def _send_gates_forward(dispatch: Dispatch, gates_BTK: Array, plan: DispatchPlan):
    return send_gates(dispatch, gates_BTK, plan), plan


def _send_gates_backward(dispatch: Dispatch, plan: DispatchPlan, dgates_cR: Array):
    def local(dgates_cR: Array, plan: DispatchPlan) -> Array:
        return collect_choices(dispatch, dgates_cR[0], plan)

    specs = (dispatch.rows, dispatch.rows)
    return dispatch.manual(local, specs, dispatch.stream)(dgates_cR, plan), None


send_gates.defvjp(_send_gates_forward, _send_gates_backward)


# Matmuls of received rows.


def expert_columns(
    dispatch: Dispatch,
    x_BTD: Array,
    weights: Sequence[Array],
    plan: DispatchPlan,
    adapters: Sequence[Array] = (),
) -> tuple[Array, ...]:
    """Dispatch and matmuls out of the residual stream: [B, T, D] x [E, D, F] -> [c, R, F] for each
    weight. The received rows are saved for the backward pass.

    Args:
      adapters: first matrices of adapters, [E, D, r], whose results follow those of the weights:
        [c, R, r], whole on each rank of tensor (r is then repeated).
    """
    repeated = tuple(jnp.tile(a_EDr, (1, 1, dispatch.tensor)) for a_EDr in adapters)
    dtypes = (dispatch.dtype,) * len(weights) + ("",) * len(adapters)
    return _expert_columns(dispatch, dtypes, x_BTD, (*weights, *repeated), plan)


def adapted_columns(dispatch: Dispatch, low_cRr: Array, b_ErF: Array, plan: DispatchPlan) -> Array:
    """The term of an adapter to add to `expert_columns`, [c, R, F].

    Args:
      low_cRr: the result of the adapter's first matrix.
    """
    return _without_exchange(dispatch, dispatch.columns, low_cRr, b_ErF, plan)


def expert_bias(dispatch: Dispatch, bias_EF: Array, plan: DispatchPlan) -> Array:
    """The bias of each row's expert, [c, R, F]."""
    return _expert_bias(dispatch, bias_EF[:, None], plan)


def expert_rows(
    dispatch: Dispatch,
    hidden_cRF: Array,
    w_EFD: Array,
    plan: DispatchPlan,
    bias_ED: Array | None = None,
    gates_cR: Array | None = None,
    before_BTD: Array | None = None,
    adapter: tuple[Array, Array] | None = None,
) -> Array:
    """Matmul back into the residual stream and combine: [c, R, F] x [E, F, D] -> [B, T, D], summed
    over a token's experts, each with `bias_ED` times its gate, if given.

    Args:
      adapter: matrices [E, F, r] and [E, r, D] whose matmul is added to the weight.
      before_BTD: combined tokens that must be complete first. XLA's scheduler would start the
        exchanges of both halves at the end, one after the other, with no matmul to overlap.
    """
    hidden, weights = (hidden_cRF,), (w_EFD,)
    if bias_ED is not None and gates_cR is not None:
        # The bias is the weight of one more feature, the gate. Each rank of tensor has such a
        # feature, with its share of the gate.
        shares = dispatch.tensor
        gates_cR1 = (gates_cR / shares)[..., None].astype(hidden_cRF.dtype)
        hidden += (jnp.broadcast_to(gates_cR1, (*gates_cR.shape, shares)),)
        weights += (jnp.broadcast_to(bias_ED[:, None], (len(bias_ED), shares, bias_ED.shape[1])),)
    if adapter is not None:
        # Each rank of tensor has its own part of the sum over F, as r more features.
        a_EFr, b_ErD = adapter
        hidden += (_without_exchange(dispatch, dispatch.back, hidden_cRF, a_EFr, plan),)
        weights += (jnp.tile(b_ErD, (1, dispatch.tensor, 1)),)
    return _expert_rows(dispatch, hidden, weights, plan, jax.lax.stop_gradient(before_BTD))


def _matmul(
    dispatch: Dispatch,
    x_RD: Array,
    w: Array,
    plan: DispatchPlan,
    *,
    transposed: bool = False,
    dtype: str = "",
    over: str | None = None,
) -> Array:
    """Multiplies each row by its expert's matrix, optionally transposed; `over` is the mesh axis
    that shards the contracted features."""
    return grouped_matmul(
        x_RD,
        w,
        None if plan.sizes is None else plan.sizes[0],
        dispatch.matmul,
        expected=plan.num_choices,
        transposed=transposed,
        dtype=dtype,
        over=over,
    )


def _weight_gradient(
    dispatch: Dispatch, x_RD: Array, dy_RF: Array, plan: DispatchPlan, dtype: str = ""
) -> Array:
    """[E, D, F], summed over each expert's rows and over context."""
    dw_EDF = grouped_weight_gradient(
        x_RD,
        dy_RF,
        None if plan.sizes is None else plan.sizes[0],
        dispatch.matmul,
        num_groups=plan.sent.shape[2] if plan.sizes is None else 0,
        expected=plan.num_choices,
        dtype=dtype,
    )
    return jax.lax.psum(dw_EDF, "context") if dispatch.axis("context") else dw_EDF


def _sent(dispatch: Dispatch, x_BTD: Array, plan: DispatchPlan) -> Array:
    """Dispatched tokens in the order of the experts, [c, R, D]."""

    def local(x_BTD: Array, plan: DispatchPlan) -> Array:
        return send_tokens(dispatch, x_BTD, plan)[None]

    return dispatch.manual(local, (dispatch.stream, dispatch.rows), dispatch.rows)(x_BTD, plan)


def _collected(
    dispatch: Dispatch,
    hidden: Sequence[Array],
    weights: Sequence[Array],
    plan: DispatchPlan,
    dtypes: Sequence[str],
    transposed: bool = False,
    before_BTD: Array | None = None,
) -> Array:
    """The sum of matmuls [c, R, F] x weight, each in its `dtypes`, combined to [B, T, D]."""

    def local(
        hidden: Sequence[Array],
        weights: Sequence[Array],
        plan: DispatchPlan,
        before_BTD: Array | None,
    ) -> Array:
        over = dispatch.axis("tensor")
        results = [
            _matmul(dispatch, x_cRF[0], w, plan, transposed=transposed, dtype=dtype, over=over)
            for x_cRF, w, dtype in zip(hidden, weights, dtypes)
        ]
        return collect_tokens(dispatch, sum(results[1:], results[0]), plan, before_BTD)

    of_weights = dispatch.columns if transposed else dispatch.back
    specs = (dispatch.hidden, of_weights, dispatch.rows, dispatch.stream)
    return dispatch.manual(local, specs, dispatch.stream)(
        tuple(hidden), tuple(weights), plan, before_BTD
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _expert_columns(
    dispatch: Dispatch, dtypes: tuple[str, ...], x_BTD: Array, weights: tuple, plan: DispatchPlan
):
    return _columns_forward(dispatch, dtypes, x_BTD, weights, plan)[0]


def _columns_forward(
    dispatch: Dispatch, dtypes: tuple[str, ...], x_BTD: Array, weights: tuple, plan: DispatchPlan
):
    rows_cRD = _sent(dispatch, x_BTD, plan)

    def local(rows_cRD: Array, weights: tuple, plan: DispatchPlan) -> tuple[Array, ...]:
        multiply = functools.partial(_matmul, dispatch, rows_cRD[0])
        return tuple(multiply(w, plan, dtype=dtype)[None] for w, dtype in zip(weights, dtypes))

    specs = (dispatch.rows, dispatch.columns, dispatch.rows)
    hidden = dispatch.manual(local, specs, dispatch.hidden)(rows_cRD, weights, plan)
    return hidden, (rows_cRD, weights, plan)


def _columns_backward(dispatch: Dispatch, dtypes: tuple[str, ...], residuals, dhidden: tuple):
    rows_cRD, weights, plan = residuals
    dx_BTD = _collected(dispatch, dhidden, weights, plan, dtypes, transposed=True)

    def local(rows_cRD: Array, dhidden: tuple, plan: DispatchPlan) -> tuple[Array, ...]:
        return tuple(
            _weight_gradient(dispatch, rows_cRD[0], dy_cRF[0], plan, dtype)
            for dy_cRF, dtype in zip(dhidden, dtypes)
        )

    specs = (dispatch.rows, dispatch.hidden, dispatch.rows)
    dweights = dispatch.manual(local, specs, dispatch.columns)(rows_cRD, dhidden, plan)
    return dx_BTD, dweights, None


_expert_columns.defvjp(_columns_forward, _columns_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expert_bias(dispatch: Dispatch, bias_E1F: Array, plan: DispatchPlan) -> Array:
    def local(bias_E1F: Array, plan: DispatchPlan) -> Array:
        return _matmul(dispatch, _ones(dispatch, plan, bias_E1F.dtype), bias_E1F, plan)[None]

    specs = (dispatch.columns, dispatch.rows)
    return dispatch.manual(local, specs, dispatch.hidden)(bias_E1F, plan)


def _bias_forward(dispatch: Dispatch, bias_E1F: Array, plan: DispatchPlan):
    return _expert_bias(dispatch, bias_E1F, plan), plan


def _bias_backward(dispatch: Dispatch, plan: DispatchPlan, dy_cRF: Array):
    def local(dy_cRF: Array, plan: DispatchPlan) -> Array:
        return _weight_gradient(dispatch, _ones(dispatch, plan, dy_cRF.dtype), dy_cRF[0], plan)

    specs = (dispatch.hidden, dispatch.rows)
    return dispatch.manual(local, specs, dispatch.columns)(dy_cRF, plan), None


_expert_bias.defvjp(_bias_forward, _bias_backward)


def _ones(dispatch: Dispatch, plan: DispatchPlan, dtype: DTypeLike) -> Array:
    """A feature of ones, [R, 1]."""
    return jnp.ones((num_rows(dispatch, plan), 1), dtype)


def _types_back(dispatch: Dispatch) -> tuple[str, str, str]:
    """The matmul types of the weight, and of bias and adapter, as far as there are any."""
    return dispatch.dtype, "", ""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expert_rows(
    dispatch: Dispatch,
    hidden: tuple,
    weights: tuple,
    plan: DispatchPlan,
    before_BTD: Array | None,
) -> Array:
    dtypes = _types_back(dispatch)
    return _collected(dispatch, hidden, weights, plan, dtypes, before_BTD=before_BTD)


def _rows_forward(
    dispatch: Dispatch,
    hidden: tuple,
    weights: tuple,
    plan: DispatchPlan,
    before_BTD: Array | None,
):
    return _expert_rows(dispatch, hidden, weights, plan, before_BTD), (hidden, weights, plan)


def _rows_backward(dispatch: Dispatch, residuals, dy_BTD: Array):
    hidden, weights, plan = residuals
    dy_cRD = _sent(dispatch, dy_BTD, plan)

    def into_hidden(dy_cRD: Array, weights: tuple, plan: DispatchPlan) -> tuple[Array, ...]:
        multiply = functools.partial(_matmul, dispatch, dy_cRD[0], transposed=True)
        return tuple(
            multiply(w, plan, dtype=dtype)[None] for w, dtype in zip(weights, _types_back(dispatch))
        )

    def into_weights(hidden: tuple, dy_cRD: Array, plan: DispatchPlan) -> tuple[Array, ...]:
        return tuple(
            _weight_gradient(dispatch, x_cRF[0], dy_cRD[0], plan, dtype)
            for x_cRF, dtype in zip(hidden, _types_back(dispatch))
        )

    rows, columns, back = dispatch.rows, dispatch.hidden, dispatch.back
    dweights = dispatch.manual(into_weights, (columns, rows, rows), back)(hidden, dy_cRD, plan)
    if dispatch.weights_first:
        # The hidden features end here: XLA for TPUs would hold them next to their gradients.
        dy_cRD, dweights = jax.lax.optimization_barrier((dy_cRD, dweights))
    dhidden = dispatch.manual(into_hidden, (rows, back, rows), columns)(dy_cRD, weights, plan)
    return dhidden, dweights, None, None


_expert_rows.defvjp(_rows_forward, _rows_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _without_exchange(
    dispatch: Dispatch, of_weight: Any, x_cRF: Array, w_EFG: Array, plan: DispatchPlan
) -> Array:
    """Matmul of rows that stay with their experts, [c, R, F] x [E, F, G] -> [c, R, G].

    Args:
      of_weight: `Dispatch.columns`, of rows that each rank of tensor has whole, or `Dispatch.back`,
        where each rank of tensor keeps its part of the sum.
    """

    def local(x_cRF: Array, w_EFG: Array, plan: DispatchPlan) -> Array:
        return _matmul(dispatch, x_cRF[0], w_EFG, plan)[None]

    specs = (dispatch.hidden, of_weight, dispatch.rows)
    return dispatch.manual(local, specs, dispatch.hidden)(x_cRF, w_EFG, plan)


def _local_forward(
    dispatch: Dispatch, of_weight: Any, x_cRF: Array, w_EFG: Array, plan: DispatchPlan
):
    return _without_exchange(dispatch, of_weight, x_cRF, w_EFG, plan), (x_cRF, w_EFG, plan)


def _local_backward(dispatch: Dispatch, of_weight: Any, residuals, dy_cRG: Array):
    x_cRF, w_EFG, plan = residuals

    def into_rows(dy_cRG: Array, w_EFG: Array, plan: DispatchPlan) -> Array:
        return _matmul(dispatch, dy_cRG[0], w_EFG, plan, transposed=True)[None]

    def into_weight(x_cRF: Array, dy_cRG: Array, plan: DispatchPlan) -> Array:
        return _weight_gradient(dispatch, x_cRF[0], dy_cRG[0], plan)

    rows, hidden = dispatch.rows, dispatch.hidden
    dx_cRF = dispatch.manual(into_rows, (hidden, of_weight, rows), hidden)(dy_cRG, w_EFG, plan)
    dw_EFG = dispatch.manual(into_weight, (hidden, hidden, rows), of_weight)(x_cRF, dy_cRG, plan)
    return dx_cRF, dw_EFG, None


_without_exchange.defvjp(_local_forward, _local_backward)
