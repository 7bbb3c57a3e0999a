"""Mixture-of-experts (MoE) layers: a router, and MLPs of which each token uses a few.

Letters: B batch, T time, D embed, F hidden features of an expert, K choices of a token, E experts,
R rows that arrived at the experts of this rank, c ranks of context.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name as named

from jaxscale.batch import Batch
from jaxscale.config.model import ModelConfig
from jaxscale.models.adapters.lora import LowRank, adapter_of
from jaxscale.models.block import MLP, Block, activate
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import Sums
from jaxscale.models.weights import Weights
from jaxscale.ops.experts import dispatch as travel
from jaxscale.ops.experts import expert_matmuls, routing
from jaxscale.ops.experts.dispatch import Dispatch
from jaxscale.ops.experts.plan import plan_dispatch
from jaxscale.ops.experts.routing import Router
from jaxscale.ops.tensor_parallel import add_bias

CHOICE = "expert_choice"
"""The checkpoint name, for remat policies, of the router's choices."""


class Experts(nnx.Module):
    """Routed experts, each weighted by its gate, plus the shared expert."""

    # Dimensions up to the last contracted one, the first of which counts experts.
    expert_weights: ClassVar = {"up": 2, "gate": 2, "down": 2}

    def __init__(self, config: ModelConfig, weights: Weights):
        self.config = config
        self.router = weights.normal("embed", "routes")
        # In bfloat16 steps of `balance_rate` (0.001) would be lost in rounding.
        self.router_bias = weights.zeros("routes", wide=True) if config.router_bias else None
        self.logit_bias = weights.zeros("routes") if config.router_logit_bias else None
        self.up = weights.normal("experts", "embed", "expert_mlp")
        self.down = weights.normal("experts", "expert_mlp", "embed", residual=True)
        self.gate = weights.normal("experts", "embed", "expert_mlp") if config.gated else None

        def adapter(name: str, *axes: str) -> LowRank | None:
            return adapter_of(name, config, weights, "experts", *axes, each=1)

        self.up_lora = adapter("up", "embed", "expert_mlp")
        self.gate_lora = adapter("gate", "embed", "expert_mlp")
        self.down_lora = adapter("down", "expert_mlp", "embed")
        if config.mlp_bias:
            self.up_bias = weights.zeros("experts", "expert_mlp")
            self.gate_bias = weights.zeros("experts", "expert_mlp") if config.gated else None
            self.down_bias = weights.zeros("experts", "embed")
        self.shared = MLP(config, weights, "shared_mlp") if config.shared_d_ff else None

    def feed(
        self,
        x_BTD: jax.Array,
        batch: Batch,
        kernels: Kernels,
        jitter: Callable[[jax.Array], jax.Array] = lambda x: x,
    ) -> tuple[jax.Array, Sums]:
        """The experts' output, and the sums of `expert_sums`; `jitter` is applied to the router's
        input."""
        config = self.config
        valid_BT = batch.segments != 0
        # The experts' weights are gathered before their input is routed: during attention. XLA for
        # TPUs (libtpu 0.0.52) runs collectives and gathers of token rows on the sparse cores, in
        # one order, and starts an all-gather no earlier than the dispatch before its use.
        weights = self._matrices()
        routed_BTD = _after(x_BTD, weights) if kernels.dispatch.weights_first else x_BTD
        routed = self._route(jitter(routed_BTD), valid_BT, kernels.dispatch)
        y_BTD, plans = self._through_experts(routed_BTD, weights, routed, kernels.dispatch)
        if self.shared is not None:
            y_BTD += self.shared(x_BTD, kernels.columns, kernels.rows)
        with jax.named_scope("router"):
            counts_BE = routing.choice_counts(routed.experts, config.num_experts)
            sums = {"load": jnp.sum(counts_BE, axis=0)}
            if drops(config):
                sums["dropped"] = jnp.sum(sums["load"]) - sum(map(travel.num_kept, plans))
            if config.has_balance_loss:
                counts_BE = self._counts_to_balance(routed, counts_BE, valid_BT, kernels.dispatch)
                sums["loss"] = self._loss(routed, counts_BE, batch, kernels)
        return y_BTD, sums

    def decode(self, x_BTD: jax.Array, kernels: Kernels) -> jax.Array:
        """The experts' output for tokens without padding; no token is dropped."""
        dispatch = Dispatch(matmul=kernels.dispatch.matmul, keeps_all=True)
        routed = self._route(x_BTD, jnp.ones(x_BTD.shape[:2], bool), dispatch)
        y_BTD, _ = self._through_experts(x_BTD, self._matrices(), routed, dispatch)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)

    def _matrices(self) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """The matrices out of the residual stream, and the one back."""
        columns = (self.up[...],) if self.gate is None else (self.up[...], self.gate[...])
        return columns, self.down[...]

    def _route(self, x_BTD: jax.Array, valid_BT: jax.Array, dispatch: Dispatch) -> "Routed":
        """The router: each token's experts and gates; no expert for padding."""
        router = router_of(self.config)
        with jax.named_scope("router"):
            logits_BTE = routing.router_logits(x_BTD, self.router[...])
            if self.logit_bias is not None:
                logits_BTE = add_bias(logits_BTE, self.logit_bias[...])
            scores_BTE = routing.router_scores(logits_BTE, router)
            ranked_BTE = logits_BTE if router.scores == "softmax_of_chosen" else scores_BTE
            bias_E = None if self.router_bias is None else self.router_bias[...]
            ranked_BTE = jax.lax.stop_gradient(ranked_BTE)
            experts_BTK = self._choose(ranked_BTE, valid_BT, dispatch, router, bias_E)
            experts_BTK = named(experts_BTK, CHOICE)
            gates_BTK = routing.expert_gates(logits_BTE, scores_BTE, experts_BTK, router)
        return Routed(logits_BTE, scores_BTE, experts_BTK, gates_BTK)

    def _choose(
        self,
        ranked_BTE: jax.Array,
        valid_BT: jax.Array,
        dispatch: Dispatch,
        router: Router,
        bias_E: jax.Array | None,
    ) -> jax.Array:
        """The experts of each token, [B, T, K]; -1 is no expert."""
        if self.config.experts_choose:
            capacity = self._capacity(ranked_BTE.shape[1])
            ranked_BTE = jnp.where(valid_BT[..., None], ranked_BTE, -jnp.inf)

            def chosen(scores_BTE: jax.Array) -> jax.Array:
                if router.kind == "balanced":
                    scores_BTE = routing.balanced_scores(scores_BTE)
                return routing.chosen_by_experts(scores_BTE, capacity)

            return travel.over_sequences(dispatch, chosen, ranked_BTE)
        # top_k with every axis manual: the partitioner would all-gather the tokens first.
        choose = dispatch.manual(
            lambda scores_BTE, bias_E: routing.choose_experts(scores_BTE, router, bias_E),
            (dispatch.stream, dispatch.whole),
            dispatch.stream,
        )
        return jnp.where(valid_BT[..., None], choose(ranked_BTE, bias_E), -1)

    def _through_experts(
        self, x_BTD: jax.Array, weights: tuple, routed: "Routed", dispatch: Dispatch
    ) -> tuple[jax.Array, list[travel.DispatchPlan]]:
        """The routed experts' output, and the dispatch plans. With `overlap_experts` the two
        halves of the sequences are independent: the all-to-all of one can overlap the matmuls of
        the other."""
        parts = [dispatch.parts(array) for array in (x_BTD, routed.experts, routed.gates)]
        plans = [self._plan(experts_BTK, dispatch) for experts_BTK in parts[1]]
        added: list[jax.Array] = []
        for x_BTD, gates_BTK, plan in zip(parts[0], parts[2], plans):
            before_BTD = added[-1] if added else None
            added.append(self._through(x_BTD, weights, gates_BTK, plan, dispatch, before_BTD))
        return jnp.concatenate(added) if len(added) > 1 else added[0], plans

    def _plan(self, experts_BTK: jax.Array, dispatch: Dispatch) -> travel.DispatchPlan:
        config = self.config
        capacity = self._capacity(experts_BTK.shape[1])
        if dispatch.keeps_all and not config.experts_choose:
            capacity = 0
        groups = config.router_groups, config.router_groups_kept
        return plan_dispatch(dispatch, experts_BTK, config.num_experts, capacity, groups)

    def _capacity(self, seq_len: int) -> int:
        """Tokens of a sequence that an expert accepts; 0 is no limit."""
        config = self.config
        each = config.experts_per_token
        return travel.capacity_of(config.capacity_factor, seq_len, each, config.num_experts)

    def _through(
        self,
        x_BTD: jax.Array,
        weights: tuple,
        gates_BTK: jax.Array,
        plan: travel.DispatchPlan,
        dispatch: Dispatch,
        before_BTD: jax.Array | None,
    ) -> jax.Array:
        config, (columns, back) = self.config, weights
        hidden_cRF = self._hidden(dispatch, x_BTD, columns, plan)
        biases: tuple[jax.Array, ...] = ()
        if config.mlp_bias:
            own = (self.down_bias, self.up_bias, self.gate_bias)
            biases = tuple(bias[...] for bias in own if bias is not None)
        gates_cR = expert_matmuls.send_gates(dispatch, gates_BTK, plan)

        def down(
            weight_EFD: jax.Array,
            gates_cR: jax.Array,
            biases: tuple,
            before_BTD: jax.Array | None,
            adapter: tuple[jax.Array, jax.Array] | None,
            *hidden_cRF: jax.Array,
        ):
            if biases:
                added = (
                    expert_matmuls.expert_bias(dispatch, bias_EF, plan) for bias_EF in biases[1:]
                )
                hidden_cRF = tuple(map(jnp.add, hidden_cRF, added))
            active = activate(config, *hidden_cRF)
            # The gate scales the hidden features, not the output: its gradient then needs no saved
            # output of the experts.
            active = (active.astype(gates_cR.dtype) * gates_cR[..., None]).astype(active.dtype)
            bias_ED = biases[0] if biases else None
            return expert_matmuls.expert_rows(
                dispatch, active, weight_EFD, plan, bias_ED, gates_cR, before_BTD, adapter
            )

        # As in an MLP, the activation is recomputed for the backward pass.
        down = jax.checkpoint(down, prevent_cse=False)
        adapter = None if self.down_lora is None else _scaled(self.down_lora)
        return down(back, gates_cR, biases, before_BTD, adapter, *hidden_cRF)

    def _hidden(
        self,
        dispatch: Dispatch,
        x_BTD: jax.Array,
        columns: tuple[jax.Array, ...],
        plan: travel.DispatchPlan,
    ) -> tuple[jax.Array, ...]:
        """Hidden features of received rows before biases and activation, adapters included."""
        adapters = {
            i: one for i, one in enumerate((self.up_lora, self.gate_lora)) if one is not None
        }
        firsts = [one.a[...] for one in adapters.values()]
        hidden_cRF = [*expert_matmuls.expert_columns(dispatch, x_BTD, columns, plan, firsts)]
        for (i, one), low_cRr in zip(adapters.items(), hidden_cRF[len(columns) :]):
            b_ErF = _scaled(one)[1]
            hidden_cRF[i] += expert_matmuls.adapted_columns(dispatch, low_cRr, b_ErF, plan)
        return tuple(map(named, hidden_cRF[: len(columns)], ("mlp_up", "mlp_gate")))

    def _counts_to_balance(
        self, routed: "Routed", counts_BE: jax.Array, valid_BT: jax.Array, dispatch: Dispatch
    ) -> jax.Array:
        """Tokens of each row with each expert among their best scores, [B, E]: equal to the chosen
        `counts_BE` without router bias and groups."""
        config = self.config
        if not config.balance_weight or (self.router_bias is None and config.router_groups == 1):
            return counts_BE
        router, scores_BTE = router_of(config), jax.lax.stop_gradient(routed.scores)
        best_BTK = self._choose(scores_BTE, valid_BT, dispatch, router.by_scores_alone, None)
        return routing.choice_counts(best_BTK, config.num_experts)

    def _loss(
        self, routed: "Routed", counts_BE: jax.Array, batch: Batch, kernels: Kernels
    ) -> jax.Array:
        """The auxiliary losses (load balance, router z), summed over weighted tokens."""
        config, loss = self.config, jnp.zeros((), routed.scores.dtype)
        if config.balance_weight:
            if config.balance == "microbatch":
                counts_BE = kernels.sum_over_batch_ranks(jnp.sum(counts_BE, axis=0, keepdims=True))
            uneven_B = routing.load_balance(routed.scores, batch.segments != 0, counts_BE)
            loss += config.balance_weight * jnp.sum(uneven_B * jnp.sum(batch.weights, axis=1))
        if config.router_z_loss:
            squares_BT = routing.router_z(routed.logits, router_of(config))
            loss += config.router_z_loss * jnp.sum(squares_BT * batch.weights)
        return loss


def _scaled(adapter: LowRank) -> tuple[jax.Array, jax.Array]:
    """An adapter's matrices, whose matmul is added to the weight."""
    return adapter.a[...], adapter.scale * adapter.b[...]


@jax.custom_vjp
def _after(x_BTD: jax.Array, weights: Any) -> jax.Array:
    """x, available no earlier than the weights."""
    # In the forward pass alone: a barrier in the backward pass would also compute the gradients of
    # frozen weights. And of x alone: new arrays of weights would be saved (`ops.split_vjp`).
    return jax.lax.optimization_barrier((x_BTD, weights))[0]


_after.defvjp(lambda *arrays: (_after(*arrays), None), lambda _, grad: (grad, None))


class Routed(NamedTuple):
    """A router's results, in float32 or wider."""

    logits: jax.Array  # [B, T, E]
    scores: jax.Array  # [B, T, E]
    experts: jax.Array  # [B, T, K] int32, -1 for padding
    gates: jax.Array  # [B, T, K]


class ExpertBlock(Block):
    """A transformer block with experts in place of the MLP."""

    mlp_type = Experts


def router_of(config: ModelConfig) -> Router:
    """The router of a model's layers."""
    return Router(
        config.experts_per_token,
        config.router_scores,
        config.router,
        config.router_normalized,
        config.router_scale,
        config.router_groups,
        config.router_groups_kept,
    )


def drops(config: ModelConfig) -> bool:
    """Whether tokens may be dropped; expert-choice routing drops none."""
    return config.capacity_factor > 0 and not config.experts_choose


def expert_sums(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of an MoE layer's sums: tokens per expert ("load"), dropped choices, auxiliary
    losses."""
    shapes: dict[str, tuple[int, ...]] = {"load": (config.num_experts,)}
    if drops(config):
        shapes["dropped"] = ()
    if config.has_balance_loss:
        shapes["loss"] = ()
    return shapes


def expert_metrics(sums: Sums) -> Sums:
    """Load metrics of each MoE layer: the coefficient of variation of tokens per expert (0 is
    even), the fraction of experts without tokens, and the fraction of dropped choices.

    Args:
      sums: of `expert_sums`, of all layers of each stack, by names such as "layers/load".
    """

    def every(quantity: str) -> list[jax.Array]:
        return [x for name, x in sums.items() if name.endswith(f"/{quantity}")]

    load_LE = jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in every("load")])
    mean_L = jnp.maximum(jnp.mean(load_LE, axis=-1), 1e-9)
    found = {
        "expert_load_cv": jnp.std(load_LE, axis=-1) / mean_L,
        "dead_experts": jnp.mean(load_LE == 0, axis=-1, dtype=load_LE.dtype),
    }
    if dropped := every("dropped"):
        chosen_L = jnp.maximum(jnp.sum(load_LE, axis=-1), 1)
        found["dropped_choices"] = jnp.concatenate([x.reshape(-1) for x in dropped]) / chosen_L
    return found
