"""A tiny random Llama as transformers writes it, in files made by the library of the format."""

import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import models, pre_tokenizers

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 130,  # 126 padding rows
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tensors(config: dict[str, Any], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Random values under the names of a Llama."""
    rng = np.random.default_rng(0)
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    k = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "input_layernorm": (d,),
        "self_attn.q_proj": (q, d),
        "self_attn.k_proj": (k, d),
        "self_attn.v_proj": (k, d),
        "self_attn.o_proj": (d, q),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (f, d),
        "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
    }
    shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, d)
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return {
        name: (0.3 * rng.normal(size=shape) + (len(shape) == 1)).astype(dtype)
        for name, shape in shapes.items()
    }


def save(
    directory: pathlib.Path,
    values: dict[str, np.ndarray] | None = None,
    *,
    dtype: Any = np.float32,
    **changes: Any,
) -> pathlib.Path:
    """A model's folder: config.json, tensors in two files with an index, tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    values = tensors(config, dtype) if values is None else values
    (directory / "config.json").write_text(json.dumps(config))
    names = sorted(values)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, half in halves.items():
        save_file({name: values[name] for name in half}, directory / file, {"format": "pt"})
    index = {"weight_map": {name: file for file, half in halves.items() for name in half}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    vocabulary = {"</s>": 0, **{chr(33 + i): i for i in range(1, 100)}}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return directory


def bits(values: dict[str, Any]) -> dict[str, bytes]:
    """Values that are equal only if every bit is."""
    return {name: (str(x.dtype), x.shape, np.asarray(x).tobytes()) for name, x in values.items()}


BFLOAT16 = ml_dtypes.bfloat16
