"""M6-T: a GPT whose MLPs are experts in sets, "prototypes", of each of which a token takes one."""

from typing import Any

from jaxscale.model_families.family import EXPERTS, Family, Model


def _to_hf(model: Model) -> dict[str, Any]:
    raise ValueError(
        f"model.family = {model.family!r} has no format at Hugging Face; its checkpoints are runs"
    )


M6_T = Family(
    name="m6_t",
    paper="M6-T: Exploring Sparse Expert Models and Beyond, arXiv 2105.15082",
    settings={
        **EXPERTS,
        "norm_eps": 1e-5,
        "activation": "gelu_tanh",
        "tied_embeddings": True,
        "num_experts": 32,
        "experts_per_token": 2,
        "capacity_factor": 1.25,
        "balance_weight": 0.0,  # the paper's models are better without
    },
    fixed={
        "norm": "layer",
        "positions": "learned",
        "gated": False,
        "attention_bias": "all",
        "router": "prototypes",
    },
    hf_types=(),
    hf_architectures="",
    read_hf=dict,
    write_hf=_to_hf,
    tensors=lambda model: (),
)
