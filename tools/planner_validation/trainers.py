"""How published trainers differ from ours: facts of the software, by its name and version.

A trait comes from a trainer's documentation or code and is never a fitted number. The modelled
traits were chosen while looking at the errors on published runs.
"""

from dataclasses import replace

from tools.planner_validation.trainer_layout import Trainer

MEGATRON_2021 = Trainer(
    lockstep=False,  # each rank continues as soon as its message has arrived
    sequence_parallel=False,  # came with arXiv 2205.05198
    attention="written",
    fused=False,  # bias + GELU, bias + dropout + add and softmax are fused, nothing else
    eager=True,
    loss="plain",
    dropout=True,
    overlap_gradients=False,  # one all-reduce after the last micro-batch
    overlap_parameters=False,
    attention_seen=False,
    gradient_bytes=2,  # fp16, as the gradients are
    context_bytes=1.65e9,  # 1,573 MiB on A100 (BigScience's chronicle): all kernels are loaded
    reduce_each=False,
)
MEGATRON_DEEPSPEED = replace(
    MEGATRON_2021,
    bucket_bytes=2e9,  # 5e8 elements each for gathers and reductions, its default
)
MEGATRON_CORE = replace(
    MEGATRON_2021,
    attention="fused",
    context_bytes=1.0e9,  # kernels are loaded on first use (from CUDA 11.7)
    fused=True,  # Transformer Engine
    launch_seconds=16e-6,  # whose modules spend about 100 us of Python on a matmul and its casts
    loss="fused",
    dropout=False,
    attention_seen=True,
    sequence_parallel=True,
    overlap_gradients=True,
    overlap_parameters=True,
    overlap_tensor=True,  # userbuffers in the NVIDIA recipes
    overlap_pipeline=True,
    folded_experts=True,
    grouped_experts=False,
    merged_dispatch=True,  # DeepEP and similar kernels
    imbalance=1.0,  # benchmarks force the router to balance
)
MEGATRON_CORE_2606 = replace(MEGATRON_CORE, fused_experts=True)
TORCH_FSDP = Trainer(
    lockstep=False,
    eager=True,
    fused=False,
    loss="fused",
    sequence_parallel=False,
    gradient_bytes=4,
    folded_experts=True,
    imbalance=1.0,
)
XLA = Trainer(
    accumulates=False,
    gradient_bytes=2,
    imbalance=1.0,
)
PYTORCH_3D = replace(
    MEGATRON_CORE,
    attention="flash2",
    fused=False,
    loss="plain",
    overlap_tensor=False,
    overlap_gradients=True,
    overlap_parameters=False,
    overlap_pipeline=False,
    gradient_bytes=4,
)

BY_FRAMEWORK = {  # the longest matching prefix of a framework's name applies
    "megatron-lm": MEGATRON_2021,
    "megatron-deepspeed": MEGATRON_DEEPSPEED,
    "gpt-neox": MEGATRON_DEEPSPEED,
    # Module by module, with at most `stage3_max_live_parameters` gathered (its default).
    "deepspeed": replace(
        MEGATRON_2021,
        overlap_gradients=True,
        overlap_parameters=True,
        reduce_each=True,
        gather_params=1e9,
    ),
    "megatron-bridge": MEGATRON_CORE,
    # Since 26.06: all-to-alls that also sort (HybridEP); see also `nvidia_recipes.py`.
    "megatron-bridge 26.06": MEGATRON_CORE_2606,
    "megatron-bridge 26.08": MEGATRON_CORE_2606,
    "nemo": MEGATRON_CORE,
    "nemo automodel": replace(TORCH_FSDP, fused=True, gradient_bytes=2, merged_dispatch=True),
    "llm-foundry": replace(TORCH_FSDP, attention="flash1"),  # MPT's Triton kernel, for ALiBi
    "meta": replace(
        MEGATRON_2021,
        attention="flash2",
        attention_seen=True,
        overlap_gradients=True,
        overlap_parameters=True,
    ),
    "maxtext": XLA,
    "axlearn": XLA,
    "paxml": replace(XLA, attention="written"),
    "t5x": replace(XLA, gradient_bytes=4),
    "nanotron": PYTORCH_3D,
    "fast-llm": replace(PYTORCH_3D, fused=True, loss="fused"),
    "mist": replace(MEGATRON_2021, attention="flash2", attention_seen=True),
    "hai-llm": replace(MEGATRON_CORE, overlap_experts=True),
    "axonn": replace(
        MEGATRON_2021, attention="flash2", overlap_gradients=True, overlap_tensor=True
    ),
}

SELECTIVE = ("selective", "selective recompute only", "selective(attention core)", "sp+selective")
"""Names of selective recomputation in Megatron, its descendants and nanotron: only attention's core
is recomputed (arXiv 2205.05198). Other trainers use the word for other policies."""

SELECTIVE_TRAINERS = ("megatron", "gpt-neox", "nemo", "nanotron", "")

MAXTEXT_NAMES = {
    "query_proj": "query",
    "key_proj": "key",
    "value_proj": "value",
    "context": "attention",
    "out_proj": "attention_out",
    "mlpwi_0": "mlp_gate",
    "mlpwi_1": "mlp_up",
}
_QKV = ("query_proj", "key_proj", "value_proj")
_MINIMAL = (*_QKV, "out_proj", "mlpwi_0", "mlpwi_1")
MAXTEXT_POLICIES = {
    "minimal": ("save", _MINIMAL),
    "minimal_with_context": ("save", (*_MINIMAL, "context")),
    "minimal_flash": ("save", (*_MINIMAL, "context")),  # its name until 2025
    "minimal_offloaded": ("offload", _MINIMAL),
    "save_dot_with_context_except_mlp": ("save", (*_QKV, "context", "out_proj")),
    "save_dot_except_mlpwi": ("save", (*_QKV, "out_proj")),
    "save_dot_except_mlp": ("save", (*_QKV, "out_proj")),
    "save_qkv_proj": ("save", _QKV),
    "qkv_proj_offloaded": ("offload", _QKV),
    "save_out_proj": ("save", ("out_proj",)),
}
"""MaxText's `remat_policy`: the activations of a layer that are saved or offloaded, by the names in
its `get_remat_policy` (`layers/decoders.py`). The output of a layer's last matmul, "mlpwo", is left
out: no backward pass needs it."""


def policy_of(word: str, framework: str) -> str | None:
    """Our policy for a trainer's word for recomputation.

    "" is a run that does not give one. None is returned for a word that the trainer is not known
    to have.
    """
    word, framework = word.lower(), framework.lower()
    if word in ("", "none", "sp only", "unknown(selective/none)"):
        return "none"
    if word in ("full", "full recompute"):
        return "full"
    trainers = tuple(name for name in SELECTIVE_TRAINERS if name)
    own = framework.startswith(trainers) or not framework
    if word in SELECTIVE and own and not framework.startswith("nemo automodel"):
        return "save_all_but_attention"
    if framework.startswith("maxtext") and word in MAXTEXT_POLICIES:
        kind, names = MAXTEXT_POLICIES[word]
        return f"{kind}:{','.join(MAXTEXT_NAMES[name] for name in names)}"
    return None


def traits_of(framework: str) -> Trainer | None:
    """The traits of a trainer by name and version, any case; None if it is not known."""
    name = framework.lower()
    found = [known for known in BY_FRAMEWORK if name.startswith(known)]
    return BY_FRAMEWORK[max(found, key=len)] if found else None
