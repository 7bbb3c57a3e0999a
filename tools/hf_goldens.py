"""Writes tests/goldens/: tiny random models of Hugging Face's transformers, and their logits.

Run it in a separate environment, since the package does not need torch:

    python3.11 -m venv /tmp/goldens
    /tmp/goldens/bin/pip install torch==2.13.0 transformers==5.23.0 peft==0.21.2
    /tmp/goldens/bin/python tools/hf_goldens.py [NAME ...]

A golden is a folder: `config.json` and `model.safetensors` as `save_pretrained` writes them, and
`expected.safetensors` with tokens, attention mask and positions [batch, time], of which the second
row ends and the third begins with padding, and float32 logits [batch, time, vocab] of eager
attention; for an encoder-decoder also tokens and mask of the decoder, which has the logits. Some
have `greedy.json`, the output of `generate` for three prompts, or a folder `peft` with adapters as
PEFT saves them, and `expected.safetensors` of the model with these. Each has the settings of one
line of `CASES`; together the lines of a family vary every setting that its config has and
`jaxscale.model_families` supports. The golden "adamw" is one file, from torch's AdamW.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import sys

try:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    from safetensors.torch import save_file  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    MISSING = error.name  # --help needs no library
else:
    MISSING = ""

GOLDENS = pathlib.Path(__file__).parent.parent / "tests" / "goldens"
BATCH, TIME = 3, 24

SIZES = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FUSED = {key: value for key, value in SIZES.items() if key != "head_dim"} | {"hidden_size": 32}
MOE = SIZES | {"intermediate_size": 16, "num_local_experts": 4}
QWEN_MOE = SIZES | {
    "intermediate_size": 16,
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
DEEPSEEK = {key: value for key, value in SIZES.items() if key != "head_dim"} | {
    "intermediate_size": 16,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 10,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
}
NEOX = {key: value for key, value in FUSED.items() if key != "num_key_value_heads"}
GPT2 = {
    "vocab_size": 67,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5 = {
    "vocab_size": 67,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
}
T5_FIRST = {"feed_forward_proj": "relu", "layer_norm_epsilon": 0.1}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1_000.0,
}
YARN_ALL = YARN | {"beta_fast": 3.0, "beta_slow": 0.25, "truncate": False, "attention_factor": 1.3}
YARN_SCALES = YARN | {"mscale": 0.8, "mscale_all_dim": 0.4}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1_000.0,
    "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 3.5, 6.0],
}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1_000.0}
"""Beyond max_position_embeddings, which is below the length of a batch."""

BERT = {key: value for key, value in NEOX.items() if not key.endswith("_token_id")}
ESM = BERT | {
    "vocab_size": 33,
    "mask_token_id": 32,
    "pad_token_id": 1,
    "position_embedding_type": "rotary",
}
MASKED = ("Bert", "Esm")

CHATS = ("llama_chat",)
"""Goldens with a tokenizer and a chat template."""

GREEDY = {"gemma2": 1.0, "gpt2": 2.0, "mistral": 2.0, "qwen3_moe_sparse": 2.0, "umt5": 2.0}
"""Goldens with greedy texts (soft caps with local and global layers, learned positions, a window
shorter than the prompts, experts in every second layer, an encoder), and the factor of their
parameters that makes them less dull."""

PEFT = {
    "llama": ("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj", {"use_rslora": True}),
    "gpt2": ("attn.c_proj c_fc", {"fan_in_fan_out": True}),
    "gpt2_unscaled": ("c_attn", {"fan_in_fan_out": True}),
    "gpt_neox": ("query_key_value dense_h_to_4h", {}),
    "phi3": ("qkv_proj o_proj gate_up_proj down_proj", {}),
    "t5": ("q wo", {}),
}
"""Goldens with adapters: of these modules, and further options."""

CASES = {
    # Llama
    "llama": ("Llama", SIZES),
    "llama_rope3": ("Llama", SIZES | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama_linear": (
        "Llama",
        SIZES | {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True},
    ),
    "llama_yarn": ("Llama", SIZES | {"rope_parameters": YARN, "rms_norm_eps": 0.1}),
    "llama_yarn_all": ("Llama", SIZES | {"rope_parameters": YARN_ALL, "hidden_act": "gelu"}),
    "llama_yarn_scales": (
        "Llama",
        SIZES | {"rope_parameters": YARN_SCALES, "num_key_value_heads": 1, "hidden_act": "relu"},
    ),
    "llama_longrope": (
        "Llama",
        SIZES
        | {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 16, "factor": 4.0}},
    ),
    "llama_dynamic": (
        "Llama",
        SIZES | {"rope_parameters": DYNAMIC, "max_position_embeddings": 16},
    ),
    "llama_chat": ("Llama", SIZES | {"vocab_size": 300, "tie_word_embeddings": True}),
    # Mistral
    "mistral": ("Mistral", SIZES | {"sliding_window": 5}),
    "mistral_whole": (
        "Mistral",
        SIZES | {"sliding_window": None, "rms_norm_eps": 0.1, "tie_word_embeddings": True},
    ),
    "mistral_yarn": (
        "Mistral",
        SIZES | {"rope_parameters": YARN, "sliding_window": 7, "hidden_act": "gelu_new"},
    ),
    # Mixtral
    "mixtral": ("Mixtral", MOE),
    "mixtral_window": (
        "Mixtral",
        MOE
        | {
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 5,
            "tie_word_embeddings": True,
            "rms_norm_eps": 0.1,
            "hidden_act": "gelu",
            "rope_parameters": YARN,
            "router_aux_loss_coef": 0.02,
        },
    ),
    # Qwen
    "qwen2": ("Qwen2", {**FUSED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_window": (
        "Qwen2",
        FUSED
        | {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "rms_norm_eps": 0.1,
        },
    ),
    "qwen2_yarn": ("Qwen2", FUSED | {"rope_parameters": YARN, "hidden_act": "quick_gelu"}),
    "qwen3": ("Qwen3", SIZES | {"rms_norm_eps": 0.1}),
    "qwen3_window": (
        "Qwen3",
        SIZES
        | {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 0,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
        },
    ),
    # Qwen3-MoE
    "qwen3_moe": ("Qwen3Moe", QWEN_MOE | {"norm_topk_prob": True, "rms_norm_eps": 0.1}),
    "qwen3_moe_dense": (
        "Qwen3Moe",
        QWEN_MOE
        | {
            "num_hidden_layers": 3,
            "mlp_only_layers": [0],
            "num_experts_per_tok": 3,
            "use_sliding_window": True,
            "sliding_window": 5,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "rope_parameters": YARN,
            "router_aux_loss_coef": 0.02,
        },
    ),
    "qwen3_moe_sparse": ("Qwen3Moe", QWEN_MOE | {"num_hidden_layers": 5, "decoder_sparse_step": 2}),
    # DeepSeek-V3
    "deepseek_v3": ("DeepseekV3", DEEPSEEK | {"rope_parameters": YARN_SCALES}),
    "deepseek_v3_direct": (
        "DeepseekV3",
        DEEPSEEK
        | {
            "num_hidden_layers": 3,
            "first_k_dense_replace": 0,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "v_head_dim": 8,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    # gpt-oss
    "gpt_oss": (
        "GptOss",
        MOE | {"rope_parameters": YARN | {"truncate": False}, "sliding_window": 5},
    ),
    "gpt_oss_whole": (
        "GptOss",
        MOE
        | {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 7,
            "num_experts_per_tok": 3,
            "swiglu_limit": 0.3,
            "rms_norm_eps": 0.1,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    # Gemma
    "gemma2": (
        "Gemma2",
        SIZES
        | {
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2_plain": (
        "Gemma2",
        SIZES
        | {
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 7,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 8,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "hidden_activation": "gelu",
            "rms_norm_eps": 0.1,
            "rope_parameters": LINEAR,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        SIZES
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
            "sliding_window": 5,
            "query_pre_attn_scalar": 12,
            "rope_parameters": {
                "full_attention": LINEAR | {"rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "gemma3_plain": (
        "Gemma3Text",
        SIZES
        | {
            "sliding_window": 7,
            "layer_types": ["full_attention", "full_attention"],
            "query_pre_attn_scalar": 8,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 3.0,
            "hidden_activation": "silu",
            "rms_norm_eps": 0.1,
        },
    ),
    # OLMo 2
    "olmo2": ("Olmo2", FUSED | {"rms_norm_eps": 0.1}),
    "olmo2_bias": (
        "Olmo2",
        FUSED
        | {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
            "hidden_act": "gelu",
        },
    ),
    # OLMo 3
    "olmo3": (
        "Olmo3",
        FUSED
        | {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 5,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
            },
        },
    ),
    # Phi-3
    "phi3": ("Phi3", FUSED),
    "phi3_partial": (
        "Phi3",
        FUSED
        | {
            "sliding_window": 5,
            "tie_word_embeddings": True,
            "rms_norm_eps": 0.1,
            "hidden_act": "gelu",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    # Of 24 tokens, beyond the original context and within it.
    "phi3_long": (
        "Phi3",
        FUSED | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    ),
    "phi3_short": (
        "Phi3",
        FUSED
        | {
            "rope_parameters": LONGROPE | {"factor": 4.0, "attention_factor": 1.2},
            "original_max_position_embeddings": 32,
        },
    ),
    # GPT-2
    "gpt2": ("GPT2", GPT2),
    "gpt2_unscaled": (
        "GPT2",
        GPT2
        | {
            "scale_attn_weights": False,
            "n_inner": 40,
            "activation_function": "relu",
            "layer_norm_epsilon": 0.1,
            "tie_word_embeddings": False,
            "reorder_and_upcast_attn": True,
        },
    ),
    # GPT-NeoX
    "gpt_neox": ("GPTNeoX", NEOX),
    "gpt_neox_serial": (
        "GPTNeoX",
        NEOX
        | {
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "layer_norm_eps": 0.1,
            "hidden_act": "gelu_new",
            "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
        },
    ),
    "gpt_neox_linear": (
        "GPTNeoX",
        NEOX | {"rope_parameters": LINEAR | {"partial_rotary_factor": 1.0}},
    ),
    # T5
    "t5": ("T5", T5 | {"tie_word_embeddings": False}),
    "t5_first": ("T5", T5 | T5_FIRST),
    "mt5": ("MT5", T5 | {"num_layers": 3, "num_decoder_layers": 2}),
    "mt5_tied": ("MT5", T5 | T5_FIRST),
    "umt5": ("UMT5", T5),
    "umt5_tied": ("UMT5", T5 | T5_FIRST | {"feed_forward_proj": "gated-silu"}),
    # BERT
    "bert": ("Bert", BERT),
    "bert_types": (
        "Bert",
        BERT | {"type_vocab_size": 3, "hidden_act": "gelu_new", "layer_norm_eps": 0.1},
    ),
    # ESM-2
    "esm": ("Esm", ESM | {"token_dropout": True, "layer_norm_eps": 1e-5}),
    "esm_plain": (
        "Esm",
        ESM | {"emb_layer_norm_before": True, "rope_theta": 100.0, "layer_norm_eps": 0.1},
    ),
}

UNTIED = ("t5", "mt5", "umt5")
"""Goldens with an untied head: transformers 5 always ties the head of a new T5, and reads untied
heads from files."""


def auto_class(config: transformers.PreTrainedConfig) -> type:
    """The model class with a head that predicts tokens."""
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    if config.model_type.capitalize() in MASKED:
        return transformers.AutoModelForMaskedLM
    return transformers.AutoModelForCausalLM


def make_model(kind: str, settings: dict, untied: bool) -> torch.nn.Module:
    """A float32 model with every parameter far from zero, and norms' scales far from one."""
    config = getattr(transformers, f"{kind}Config")(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, attn_implementation="eager")
    if untied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        # As in published files. UMT5 scales the inputs of its head unless this is False.
        model.config.tie_word_embeddings = False
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    return model.float().eval()


def make_batch(vocab_size: int) -> dict[str, torch.Tensor]:
    """Tokens of three rows: whole, padded at the end, padded at the start."""
    torch.manual_seed(1)
    tokens = torch.randint(3, vocab_size, (BATCH, TIME))
    mask = torch.ones_like(tokens)
    mask[1, TIME - 5 :] = 0
    mask[2, :7] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"tokens": tokens, "mask": mask, "positions": positions}


def write(name: str) -> None:
    """Makes the golden of one case."""
    kind, settings = CASES[name]
    model, folder = make_model(kind, settings, name in UNTIED), GOLDENS / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if name in CHATS:
        sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
        from tests.data.dialogues import PLAIN, write_tokenizer  # noqa: PLC0415

        write_tokenizer(folder, PLAIN)
    write_logits(model, folder)
    if name in PEFT:
        write_adapters(model, folder / "peft", *PEFT[name])
    if name in GREEDY:
        write_greedy(model, folder, GREEDY[name])
    size = sum(path.stat().st_size for path in folder.rglob("*"))
    assert size < 250_000, f"{name} takes {size} bytes"
    kinds = json.loads((folder / "config.json").read_text())["model_type"]
    print(f"{name}: {kinds}, {size} bytes")


def make_masked_batch(config: transformers.PretrainedConfig) -> dict[str, torch.Tensor]:
    """The same with mask tokens (the last id), and for BERT with every token type."""
    batch = make_batch(config.vocab_size - 1)
    batch["tokens"][0, ::5] = config.vocab_size - 1
    batch["tokens"][2, 7::4] = config.vocab_size - 1
    if config.model_type == "bert":
        types = torch.arange(TIME) * config.type_vocab_size // TIME
        batch["token_types"] = types.expand(BATCH, TIME).contiguous()
    return batch


def write_logits(model: torch.nn.Module, folder: pathlib.Path) -> None:
    """Writes tokens and the model's logits to `expected.safetensors`."""
    masked = type(model).__name__.startswith(MASKED)
    batch = make_masked_batch(model.config) if masked else make_batch(model.config.vocab_size)
    given = {"input_ids": batch["tokens"], "attention_mask": batch["mask"]}
    if "token_types" in batch:
        given["token_type_ids"] = batch["token_types"]
    if model.config.is_encoder_decoder:
        del batch["positions"]
        batch["decoder_tokens"] = batch["tokens"].flip(0, 1)[:, 2:].contiguous()
        batch["decoder_mask"] = batch["mask"].roll(1, 0)[:, 2:].contiguous()
        given["decoder_input_ids"] = batch["decoder_tokens"]
        given["decoder_attention_mask"] = batch["decoder_mask"]
    else:
        given["position_ids"] = batch["positions"]
    with torch.no_grad():
        logits = model(**given).logits
    arrays = {key: value.to(torch.int32) for key, value in batch.items()}
    save_file({**arrays, "logits": logits.contiguous()}, folder / "expected.safetensors")


def write_adapters(
    model: torch.nn.Module, folder: pathlib.Path, targets: str, options: dict
) -> None:
    """Writes adapters of the modules `targets`, and the logits with them."""
    # Imported here: --logits needs no adapters.
    import peft  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    config = peft.LoraConfig(r=3, lora_alpha=8, target_modules=targets.split(), **options)
    torch.manual_seed(4)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink()
    write_logits(adapted.base_model.model.eval(), folder)
    adapted.unload()


def write_greedy(model: torch.nn.Module, folder: pathlib.Path, scale: float) -> None:
    """Writes `greedy.json`: prompts of several lengths and the greedy ids of `generate`, with every
    parameter times `scale`; no choice is close."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    torch.manual_seed(3)
    lengths, longest = (3, 9, 14), 14
    prompts = [torch.randint(3, model.config.vocab_size, (length,)) for length in lengths]
    rows = torch.stack([torch.nn.functional.pad(ids, (longest - len(ids), 0)) for ids in prompts])
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    ends = 1 if model.config.is_encoder_decoder else 2
    found = model.generate(
        rows,
        attention_mask=mask.long(),
        max_new_tokens=16,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
        use_cache=not model.config.is_encoder_decoder,  # its cache has the encoder's layer count
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(found.logits).topk(2).values
    gap = (best[..., 0] - best[..., 1]).min().item()
    assert gap > 1e-3, f"{folder.name}: two tokens are {gap} apart"
    start = 1 if model.config.is_encoder_decoder else longest
    texts = [ids[start:].tolist() for ids in found.sequences]
    texts = [ids[: ids.index(ends)] if ends in ids else ids for ids in texts]
    greedy = {"scale": scale, "prompts": [ids.tolist() for ids in prompts], "texts": texts}
    (folder / "greedy.json").write_text(json.dumps(greedy) + "\n")


def write_adamw() -> None:
    """Ten AdamW updates by torch of a matrix with weight decay, and of a vector without, at a tenth
    of the rate: the parameters before and after each [11, ...], and the gradients [10, ...]."""
    torch.manual_seed(0)
    params = {"matrix": torch.randn(16, 24), "vector": torch.randn(24)}
    grads = {
        name: torch.randn(10, *x.shape) * 10 ** torch.linspace(-3, 1, 10).reshape(-1, *[1] * x.ndim)
        for name, x in params.items()
    }
    settings = {"lr": 0.01, "betas": (0.8, 0.97), "eps": 1e-5, "weight_decay": 0.3}
    groups = [
        {"params": [params["matrix"]]},
        {"params": [params["vector"]], "weight_decay": 0.0, "lr": 0.001},
    ]
    adamw, passed = (
        torch.optim.AdamW(groups, **settings),
        {name: [x.clone()] for name, x in params.items()},
    )
    for step in range(10):
        for name, x in params.items():
            x.grad = grads[name][step]
        adamw.step()
        for name, x in params.items():
            passed[name].append(x.clone())
    arrays = {f"params/{name}": torch.stack(steps) for name, steps in passed.items()}
    arrays |= {f"grads/{name}": x for name, x in grads.items()}
    save_file(arrays, GOLDENS / "adamw.safetensors")


def main() -> None:
    """Writes the goldens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these cases", metavar="NAME")
    parser.add_argument(
        "--logits",
        metavar="DIR",
        type=pathlib.Path,
        help="write the logits of the model in this folder, such as one that "
        "jaxscale.convert --to_hf wrote, there, and no goldens",
    )
    options = parser.parse_args()
    known = (*CASES, "adamw")
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no case is called {', '.join(unknown)}; there are {', '.join(known)}")
    if options.logits and not (options.logits / "config.json").is_file():
        parser.error(f"--logits {options.logits} holds no model (no config.json)")
    if MISSING:
        parser.error(
            f"{MISSING} is not installed here; the first lines of {__file__} make an environment "
            "that has it"
        )
    if options.logits:
        config = transformers.AutoConfig.from_pretrained(options.logits)
        model = auto_class(config).from_pretrained(
            options.logits, attn_implementation="eager", dtype=torch.float32
        )
        write_logits(model.eval(), options.logits)
        return
    for name in options.names or known:
        if name == "adamw":
            write_adamw()
        else:
            write(name)


if __name__ == "__main__":
    main()
