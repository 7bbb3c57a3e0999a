"""What remat repeats of a shape is what it repeats of a config's model."""

import pytest

from jaxscale.config import load
from jaxscale.planner.model.named_models import NAMED
from jaxscale.planner.model.remat_flops import core_flops, mlp_flops, recomputed_flops
from jaxscale.planner.model.shape import ModelShape

POLICIES = (
    "none",
    "full",
    "save_all_but_attention",
    "save:query,key,value,attention,attention_out",
)


@pytest.mark.parametrize("name", ["llama2_7b", "llama3_8b", "gpt_22b", "deepseek_v3"])
@pytest.mark.parametrize("remat", POLICIES)
def test_both_kinds_count_the_same(name, remat):
    """A shape's queries see half of the sequence, a model's the half and themselves; a shape's
    vocabulary has its padding."""
    config = load(name)
    shape, seq_len = ModelShape.of(config), config.data.seq_len
    hardware = shape.flops_per_token + recomputed_flops(shape, remat)
    wanted = config.model.hardware_flops_per_token(seq_len, remat=remat)
    assert hardware == pytest.approx(wanted, rel=3e-4)
    assert shape.flops_per_token == pytest.approx(config.model.flops_per_token(seq_len), rel=3e-4)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "mt5-xxl", "nemotron-3-super"])
def test_no_policy_repeats_more_than_a_forward_pass(name):
    shape = NAMED[name]
    none, full, attention, names = (recomputed_flops(shape, remat) for remat in POLICIES)
    assert none == 0 < min(attention, names)
    assert max(attention, names, attention + names) < full < shape.block_flops
    assert core_flops(shape) == attention
    every, last = mlp_flops(shape)
    assert full == pytest.approx(shape.block_flops - last)
    assert every > last


def test_experts_repeat_what_a_token_meets():
    """Two of three matrices of the two experts of a token, and the router."""
    shape = NAMED["mixtral-8x7b"]
    each = 2 * 2 * 4096 * 14336 * 2 + 2 * 4096 * 8
    assert recomputed_flops(shape, POLICIES[3]) == pytest.approx(32 * each)


def test_other_policies_are_not_known():
    with pytest.raises(ValueError, match="remat = 'save_matmuls' has no formula"):
        recomputed_flops(NAMED["mixtral-8x7b"], "save_matmuls")
