"""Options of experts that contradict each other are refused, with the setting to change."""

import re

import pytest

from jaxscale.config.model import ModelConfig
from jaxscale.training.tracing.traces import model_trace

OWN = {"family": "tests.models.experts:make", "num_layers": 4, "num_experts": 8}
SHIPPED = {"family": "mixtral", "num_layers": 4}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (SHIPPED | {"num_experts": -1}, "model.num_experts = -1 is too small"),
        (SHIPPED | {"shared_d_ff": 8}, "model.shared_d_ff is not a setting of model.family = 'mix"),
        (OWN | {"experts_per_token": 0}, "model.experts_per_token = 0 is too small; at least 1"),
        (OWN | {"experts_per_token": 9}, "9 is more than model.num_experts = 8; set model.experts"),
        (OWN | {"expert_d_ff": -1}, "model.expert_d_ff = -1 is too small"),
        (OWN | {"shared_d_ff": -1}, "model.shared_d_ff = -1 is too small"),
        (OWN | {"dense_layers": -1}, "model.dense_layers = -1 is too small"),
        (
            OWN | {"dense_layers": 4},
            "leaves no layer with experts of model.num_layers = 4; set mod",
        ),
        (
            OWN | {"dense_layers": 1, "layer_pattern": "LG", "sliding_window": 4},
            "1 is not a multiple of the 2 layers of model.layer_pattern; set model.dense_layers",
        ),
        (
            OWN | {"expert_pattern": "DX"},
            "model.expert_pattern = 'DX' is of letters D (dense) and E",
        ),
        (OWN | {"expert_pattern": "DD"}, "at least one of them E, such as 'DE'"),
        (
            OWN | {"expert_pattern": "DDE"},
            "does not divide the 4 layers after model.dense_layers = 0; set model.num_layers = 3",
        ),
        (
            OWN | {"expert_pattern": "DDDDE"},
            "the 4 layers after model.dense_layers = 0; set model.num_layers = 5",
        ),
        (
            OWN | {"expert_pattern": "DE", "layer_pattern": "LG", "sliding_window": 4},
            "model.expert_pattern = 'DE' with model.layer_pattern is not available; set one of",
        ),
        (SHIPPED | {"expert_pattern": "DE"}, "model.expert_pattern is not a setting of model.fami"),
        (OWN | {"router": "top-k"}, "model.router = 'top-k' is not known; it can be top_k"),
        (OWN | {"router_scores": "tanh"}, "model.router_scores = 'tanh' is not known; it can be"),
        (OWN | {"balance": "batch"}, "model.balance = 'batch' is not known; it can be sequence, m"),
        (OWN | {"balance_weight": -0.1}, "model.balance_weight = -0.1 is too small"),
        (
            OWN | {"balance_rate": 0.1},
            "a bias that the router does not have; set model.router_bias",
        ),
        (OWN | {"router_z_loss": -1.0}, "model.router_z_loss = -1.0 is too small"),
        (OWN | {"router_jitter": 1.5}, "model.router_jitter = 1.5 must be at most 1"),
        (OWN | {"capacity_factor": -1.0}, "model.capacity_factor = -1.0 is too small"),
        (
            OWN | {"router": "prototypes", "experts_per_token": 3},
            "cannot be split evenly into model.experts_per_token = 3 prototypes; set",
        ),
        (
            OWN | {"router": "prototypes", "router_scores": "sigmoid"},
            "has a softmax in each prototype and no groups; set model.router_scores = 'softmax'",
        ),
        (
            OWN | {"router": "expert_choice"},
            "model.capacity_factor = 0 with model.router = 'expert_choice', which needs",
        ),
        (
            OWN | {"router": "expert_choice", "capacity_factor": 1.0, "balance_weight": 0.1},
            "model.balance_weight = 0.1 with model.router = 'expert_choice', whose experts have eq",
        ),
        (OWN | {"router_groups": 0}, "model.router_groups = 0 is too small; at least 1"),
        (
            OWN | {"router_groups": 3},
            "model.router_groups = 3; set model.router_groups = 2 or 4",
        ),
        (
            OWN | {"router_groups": 8, "router_groups_kept": 4},
            "have one expert each, and groups are chosen by their two best; set model.router_gr",
        ),
        (
            OWN | {"router_groups": 4, "router_groups_kept": 5},
            "model.router_groups_kept = 5 of model.router_groups = 4",
        ),
        (
            OWN | {"router_groups": 4, "router_groups_kept": 1, "experts_per_token": 3},
            "for model.experts_per_token = 3; set model.router_groups_kept from 2 to 4",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(settings, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        ModelConfig(**settings)


def test_a_token_meets_its_own_experts_and_what_is_shared():
    """Mixtral 8x7B: 46.7 billion parameters, of which a token meets 12.9."""
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "vocab_size": 32000}
    model = ModelConfig(family="mixtral", num_layers=32, d_model=4096, d_ff=14336, **sizes)
    trace = model_trace(model)
    assert (trace.num_params, trace.num_active_params(2)) == (46_702_792_704, 12_879_925_248)


def test_layers_with_and_without_experts_take_turns():
    """Qwen3-30B-A3B with experts in every second layer has half of their parameters less."""
    sizes = {"num_heads": 32, "num_kv_heads": 4, "head_dim": 128, "vocab_size": 151936}
    sizes |= {"num_layers": 48, "d_model": 2048, "d_ff": 6144, "expert_d_ff": 768}
    whole, half = (ModelConfig(family="qwen3_moe", **sizes, expert_pattern=p) for p in ("", "DE"))
    layer = 128 * (3 * 2048 * 768 + 2048) - 3 * 2048 * 6144
    assert model_trace(whole).num_params - model_trace(half).num_params == 24 * layer
    assert [half.has_experts(i) for i in range(4)] == [False, True, False, True]
