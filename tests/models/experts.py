"""Decoders with experts as a custom family, which may set every option: with an expert that no
token chooses, and two experts with equal scores."""

from dataclasses import dataclass

import jax

from jaxscale.config.model import ModelConfig
from jaxscale.models.decoder import Decoder
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import Params, Rows

NEVER, FIRST, SECOND = 3, 0, 1
"""The expert without tokens, and the two that are tied."""

EVERYTHING = {
    "num_layers": 5,
    "dense_layers": 1,
    "num_experts": 8,
    "experts_per_token": 3,
    "expert_d_ff": 24,
    "shared_d_ff": 16,
    "router_scores": "sigmoid",
    "router_normalized": True,
    "router_scale": 2.5,
    "router_groups": 4,
    "router_groups_kept": 3,
    "router_bias": True,
    "balance_rate": 0.01,
    "balance_weight": 0.1,
    "router_z_loss": 0.01,
}
LATENT_ATTENTION = {
    "num_kv_heads": 4,
    "kv_rank": 12,
    "query_rank": 16,
    "rope_head_dim": 4,
    "value_head_dim": 6,
    "rope_scaling": "yarn",
    "rope_factor": 4.0,
    "rope_original_context": 8,
    "rope_mscale": 0.5,
}
PROTOTYPES = {
    "num_layers": 4,
    "expert_pattern": "DE",
    "num_experts": 8,
    "experts_per_token": 2,
    "router": "prototypes",
    "capacity_factor": 1.0,
    "balance": "microbatch",
    "balance_weight": 0.1,
    "router_z_loss": 0.01,
    "router_jitter": 0.3,
    # What gpt-oss has.
    "attention_bias": "all",
    "attention_sinks": True,
    "mlp_bias": True,
    "mlp_limit": 0.5,
    "router_logit_bias": True,
}

EXPERT_CHOICE = {
    "num_layers": 2,
    "num_experts": 4,
    "experts_per_token": 2,
    "router": "expert_choice",
    "capacity_factor": 1.0,
    "balance_weight": 0.0,
}


@dataclass(frozen=True)
class Uneven(Decoder):
    """With routers that are not balanced."""

    def init(self, key: jax.Array, rows: Rows | None = None) -> Params:
        params = super().init(key, rows)
        return {name: uneven(layers) for name, layers in params.items()}


def uneven(layers: Params) -> Params:
    """The layers of a stack, or of a part of one, with two like experts and one without tokens."""
    if not isinstance(layers, dict):
        return layers
    if "router" not in layers:
        return {name: uneven(value) for name, value in layers.items()}
    router = layers["router"].at[:, :, SECOND].set(layers["router"][:, :, FIRST])
    layers = {**layers, "router": router}
    if "router_bias" in layers:
        layers["router_bias"] = layers["router_bias"].at[:, NEVER].add(-1e3)
    return layers


def make(settings: ModelConfig, kernels: Kernels) -> Uneven:
    return Uneven(settings, kernels)
