"""Which recipe of NVIDIA's a published run follows."""

import pytest

from tools.planner_validation.nvidia_recipes import RECIPES, recipe_of
from tools.planner_validation.trainer_layout import Trainer


@pytest.mark.parametrize(
    ("run", "overlaps", "recomputed"),
    [
        (("deepseek-v3", "GB300", "MXFP8", "Megatron-Bridge 26.06.01"), True, ()),
        (("deepseek-v3", "GB300", "MXFP8", "Megatron-Bridge 26.04"), False, ("mla_up_proj",)),
        (("DeepSeek-V3", "B200", "MXFP8", "Megatron-Bridge 26.04.01"), True, ("mla_up_proj",)),
        (("qwen3-235b-a22b", "H100", "FP8", "Megatron-Bridge 26.02"), True, ()),
        (("Nemotron_3_Nano", "H100", "FP8", "Megatron-Bridge 26.02.01"), False, ("moe",)),
        (("deepseek-v3", "H800", "fp8", "HAI-LLM"), False, ()),
        (("llama3-70b", "GB200", "MXFP8", "Megatron-Bridge 26.06"), False, ()),
    ],
)
def test_model_device_operands_and_release_choose(run, overlaps, recomputed):
    found = recipe_of(*run)
    assert dict(found.traits).get("overlap_experts", False) == overlaps
    assert found.recompute_modules == recomputed


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda one: f"{one.model} {one.device}")
def test_recipes_name_traits_and_modules_that_exist(recipe):
    assert set(dict(recipe.traits)) <= set(Trainer.__dataclass_fields__)
    assert set(recipe.recompute_modules) <= {"moe", "mla_up_proj"}
