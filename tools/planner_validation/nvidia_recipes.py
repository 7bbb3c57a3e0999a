"""Settings of NVIDIA's Megatron-Bridge recipes beyond a layout, by model, device and operands.

From `scripts/performance/configs/*/*_workload_base_configs.py` of its repository (October 2025 to
July 2026), for operands `utils/precision.py` there, and the notes on release 0.5.1 (26.06). What a
recipe does not set is as in `trainers.py`. Recomputed modules are named as there: "moe" is a layer
of experts with its all-to-alls, "mla_up_proj" the up-projections of latent queries, keys and
values. Recomputation of norms and activations is left out: it takes a hundredth of a step.
"""

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """A recipe for runs whose model, device and operands begin with these, in any case; "" is
    any."""

    model: str
    device: str = ""
    operands: str = ""
    since: float = 0.0  # release
    traits: tuple[tuple[str, Any], ...] = ()
    recompute_modules: tuple[str, ...] = ()
    fsdp: bool = False  # weights are sharded too, where neither tensor nor pipeline splits them


PLAIN_EXCHANGE = (("merged_dispatch", False), ("fused_experts", False))
"""NCCL's all-to-alls: a token is sent once for each of its experts, and sorted afterwards."""

PLAIN_EXPERTS = (*PLAIN_EXCHANGE, ("plain_experts", True))
"""The same with unfused biases and clamped activation (Megatron's `TEGroupedMLP` fuses only SwiGLU
without biases)."""

MODULES = (("graph", "modules"),)
"""Attention, mixers and routers are captured in CUDA graphs (`cuda_graph_scope`), experts not."""

A2A_OVERLAP = (("overlap_experts", True),)
"""The all-to-alls of one micro-batch overlap with the compute of another ("a2a overlap")."""

STEP = (*A2A_OVERLAP, ("graph", "step"))
"""The same with the whole step captured in a CUDA graph (`cuda_graph_impl` "full_iteration")."""

RECIPES = (  # the last match applies
    Recipe("llama3-70b", fsdp=True),
    Recipe("deepseek-v3", recompute_modules=("mla_up_proj",)),
    Recipe("deepseek-v3", "gb", traits=MODULES, recompute_modules=("mla_up_proj",)),
    Recipe("deepseek-v3", "b300", traits=MODULES, recompute_modules=("mla_up_proj",)),
    Recipe("deepseek-v3", "b200", "mxfp8", 26.04, (*A2A_OVERLAP, *MODULES), ("mla_up_proj",)),
    Recipe("deepseek-v3", "gb200", "mxfp8", 26.06, STEP, ("mla_up_proj",)),
    Recipe("deepseek-v3", "b300", "mxfp8", 26.06, STEP, ("mla_up_proj",)),
    Recipe("deepseek-v3", "gb300", "mxfp8", 26.06, STEP),
    Recipe("kimi-k2", recompute_modules=("mla_up_proj",)),
    Recipe("kimi-k2", "gb300", "mxfp8", 26.06, STEP),
    Recipe("gpt-oss-120b", traits=PLAIN_EXPERTS),
    Recipe("gpt-oss-120b", "gb300", traits=(*PLAIN_EXPERTS, *MODULES)),
    Recipe("gpt-oss-120b", "b300", traits=(("plain_experts", True), *MODULES)),
    Recipe("gpt-oss-120b", "", "mxfp8", 26.06, STEP),
    Recipe("gpt-oss-120b", "b300", "mxfp8", 26.06, (*A2A_OVERLAP, *MODULES)),
    Recipe("qwen3-30b", "b", traits=MODULES),
    Recipe("qwen3-235b", "b", traits=PLAIN_EXCHANGE),
    Recipe("qwen3-235b", "h100", traits=(*PLAIN_EXCHANGE, *A2A_OVERLAP)),
    Recipe("qwen3", "gb", traits=MODULES),
    Recipe("qwen3", "", "mxfp8", 26.06, STEP),
    Recipe("nemotron-3", traits=MODULES),
    Recipe("nemotron-3-nano", "h100", traits=MODULES, recompute_modules=("moe",)),
    Recipe("nemotron-3-super", operands="nvfp4", traits=(*MODULES, ("wide_layers", 14))),
)


def recipe_of(model: str, device: str, operands: str, framework: str) -> Recipe:
    """The recipe of a published run; an empty one where none is named."""
    texts = model.replace("_", "-").lower(), device.lower(), operands.lower()
    release = re.search(r"megatron-bridge.*?(\d\d\.\d\d)", framework.lower())
    found = Recipe(model)
    for known in RECIPES:
        wanted = known.model, known.device, known.operands
        fits = all(text.startswith(start) for text, start in zip(texts, wanted))
        if fits and release and float(release[1]) >= known.since:
            found = known
    return found
