"""Prompt tuning in the format of PEFT: adapter_config.json of type PROMPT_TUNING, and the tensor
`prompt_embeddings` [num_virtual_tokens, d_model]."""

import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from jaxscale.config.model import ModelConfig
from jaxscale.hugging_face.safetensors_format import StoredTensor
from jaxscale.model_families.family import TensorRule
from jaxscale.storage.untrusted import load_json

PROMPT_TUNING = "PROMPT_TUNING"
EMBEDDINGS = "prompt_embeddings"
"""The name of the tensor."""

PARAM = "embed/prompt/rows"
"""Our parameter."""

KNOWN = frozenset(
    (
        *("peft_type", "num_virtual_tokens", "num_transformer_submodules", "token_dim"),
        *("num_layers", "num_attention_heads"),
        # The initial values, and provenance: the values are in the tensor.
        *("prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path"),
        *("tokenizer_kwargs", "task_type", "base_model_name_or_path", "revision"),
        *("inference_mode", "peft_version", "auto_mapping"),
    )
)


def is_prompt(path: pathlib.Path) -> bool:
    """Whether an adapter_config.json is of prompt tuning."""
    peft = load_json(path)
    return isinstance(peft, dict) and peft.get("peft_type") == PROMPT_TUNING


def prompt_settings(
    path: pathlib.Path, model: ModelConfig, tensors: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    """Our settings for a folder with a prompt.

    Args:
      path: its adapter_config.json.
      model: the base model.
      tensors: of the folder.

    Raises:
      ValueError: it is not a prompt for this model; says why.
    """
    peft: dict[str, Any] = load_json(path)
    count, copies = peft.get("num_virtual_tokens"), peft.get("num_transformer_submodules") or 1
    if type(count) is not int or not 0 < count < 2**31 or copies != 1:
        raise ValueError(
            f"{path}: num_virtual_tokens = {count!r}, num_transformer_submodules = {copies!r}; "
            "they must be a number above 0, and 1"
        )
    for name, value in peft.items():
        if name not in KNOWN and value:
            raise ValueError(f"{path}: {name} = {value!r} is not supported")
    if EMBEDDINGS not in tensors:
        raise ValueError(
            f"{path.parent} has no tensor {EMBEDDINGS!r}, but {', '.join(tensors) or 'none'}"
        )
    check_scale(model, str(path))
    return {"prompt_tokens": count}


def check_scale(model: ModelConfig, what: str) -> None:
    """Refuses models that scale embeddings.

    Raises:
      ValueError: with the reason.
    """
    if model.scaled_embedding:
        raise ValueError(
            f"{what}: model.family = {model.family!r} scales the embeddings of tokens, and "
            "transformers scales those of PEFT's prompt in some versions only; there is no common "
            "format"
        )


def prompt_rules(names: Collection[str], config: ModelConfig) -> list[TensorRule]:
    """The tensor of the prompt, if the model has one.

    Args:
      names: of all parameters.
    """
    shape = config.prompt_tokens, config.d_model
    return [TensorRule(PARAM, EMBEDDINGS, shape, (0, 1), shape=shape)] if PARAM in names else []


def prompt_config(config: ModelConfig, base: str | None) -> dict[str, Any]:
    """The adapter_config.json of a model's prompt.

    Args:
      base: name or folder of the base model, if known.
    """
    return {
        "peft_type": PROMPT_TUNING,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "num_virtual_tokens": config.prompt_tokens,
        "token_dim": config.d_model,
        "num_transformer_submodules": 1,
        "num_attention_heads": config.num_heads,
        "num_layers": config.num_layers,
        "prompt_tuning_init": "RANDOM",
    }
