"""Low-rank adapters in the format of PEFT, Hugging Face's library of them: a folder with
adapter_config.json and adapter_model.safetensors, for a model that is somewhere else.

The adapter of a weight [outputs, inputs] is two tensors there, `lora_A` [rank, inputs] and `lora_B`
[outputs, rank].
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxscale.hugging_face.safetensors_format import StoredTensor, read_header
from jaxscale.model_config import ModelConfig
from jaxscale.model_config.low_rank import ADAPTER, is_adapter
from jaxscale.model_families.family import TensorRule

PEFT_CONFIG, PEFT_TENSORS = "adapter_config.json", "adapter_model.safetensors"

PEFT_PREFIX = "base_model.model."
"""Before the name of the weight."""

PARTS = {"a": "lora_A", "b": "lora_B"}
"""Ours -> theirs."""

NOT_READ = frozenset(
    (
        # Which weights have adapters: the tensors say so.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        # Of training alone, and where all of it comes from.
        *("lora_dropout", "init_lora_weights", "inference_mode", "runtime_config"),
        *("task_type", "base_model_name_or_path", "revision", "peft_version", "auto_mapping"),
        # How the weight is stored, which is known; and of options that are off.
        *("fan_in_fan_out", "megatron_core", "qalora_group_size"),
    )
)

KEEP_THE_MODEL = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the weights of the model as they are."""


@dataclass(frozen=True)
class PeftAdapters:
    """A folder of adapters: the settings of ours, and where its tensors are."""

    settings: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def adapter_rules(
    rules: Sequence[TensorRule], names: Collection[str], rank: int
) -> list[TensorRule]:
    """The tensor of each adapter's matrix.

    Args:
      rules: of the model without adapters.
      names: of all parameters.

    Raises:
      ValueError: the weight is a part of a fused tensor.
    """
    weights = {rule.param: rule for rule in rules}
    return [_adapter_rule(weights[_weight(name)], name, rank) for name in names if is_adapter(name)]


def _weight(name: str) -> str:
    """The parameter beside which an adapter's matrix is: "layers/attention/q_lora/a"."""
    return name.rsplit("/", 1)[0].removesuffix(ADAPTER)


def _adapter_rule(weight: TensorRule, name: str, rank: int) -> TensorRule:
    if _is_fused(weight):
        tensor, target = weight.name.format(layer="*"), _target(weight)
        raise ValueError(
            f"{tensor} holds {target!r} and more, and PEFT has one adapter for all of it: write "
            "the model with its adapters merged (--to_hf), or train without "
            f"{target!r} in model.lora_targets"
        )
    outputs, inputs = weight.view if weight.order == (1, 0) else weight.view[::-1]
    part = name[-1]
    tensor = f"{PEFT_PREFIX}{weight.name.removesuffix('.weight')}.{PARTS[part]}.weight"
    view = {"a": (rank, inputs), "b": (outputs, rank)}[part]
    return dataclasses.replace(weight, param=name, name=tensor, view=view, order=(1, 0))


def _target(rule: TensorRule) -> str:
    """As `model.lora_targets` names the weight of a rule."""
    return rule.param.rsplit("/", 1)[-1]


def _is_fused(rule: TensorRule) -> bool:
    return bool(rule.take or rule.shape) or len(rule.view) != 2


def open_adapters(
    directory: pathlib.Path, model: ModelConfig, rules: Sequence[TensorRule]
) -> PeftAdapters:
    """Opens a folder; reads no values.

    Args:
      model, rules: that they are for.

    Raises:
      FileNotFoundError: it holds no adapters.
      ValueError: they are of another kind, or of another model; says why.
    """
    path = directory / PEFT_CONFIG
    for name in (PEFT_CONFIG, PEFT_TENSORS):
        if not (directory / name).is_file():
            raise FileNotFoundError(
                f"{directory} holds no adapters of PEFT: no {name}, which save_pretrained writes"
            )
    try:
        peft = json.loads(path.read_text())
        rank, alpha = peft["r"], peft["lora_alpha"]
        numbers = type(rank) is int and rank > 0 and type(alpha) in (int, float) and alpha > 0
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the config of low-rank adapters: {error!r}") from error
    if peft.get("peft_type") != "LORA" or not numbers:
        raise ValueError(
            f"{path}: peft_type = {peft.get('peft_type')!r}, r = {rank!r}, lora_alpha = {alpha!r}; "
            "it must be 'LORA', with a rank and an alpha above 0"
        )
    _refuse_others(peft, path)
    tensors = read_header(directory / PEFT_TENSORS)
    every = dataclasses.replace(model, lora_rank=rank).adapted_weights
    adapted = {_target(rule) for rule in rules if _has_adapter(tensors, rule)}
    targets = [name for name in every if name in adapted]
    if not targets:
        raise ValueError(
            f"{directory / PEFT_TENSORS} has no adapter of a weight of this model, such as "
            f"{next(iter(tensors), 'no tensor at all')}"
        )
    settings = {
        "lora_rank": rank,
        # Rank-stabilised adapters are times alpha over the square root of the rank.
        "lora_alpha": float(alpha * math.sqrt(rank) if peft.get("use_rslora") else alpha),
        "lora_targets": "" if len(targets) == len(every) else ",".join(targets),
    }
    return PeftAdapters(settings, tensors)


def _refuse_others(peft: Mapping[str, Any], path: pathlib.Path) -> None:
    """Refuses options that the adapters here do not have."""
    init = peft.get("init_lora_weights")
    if init not in KEEP_THE_MODEL:
        raise ValueError(
            f"{path}: init_lora_weights = {init!r} changes the weights of the model, too; convert "
            "the adapters to plain ones (save_pretrained with path_initial_model_for_weight_"
            "conversion of PEFT)"
        )
    if peft.get("bias", "none") != "none":
        raise ValueError(f"{path}: bias = {peft['bias']!r}; adapters of weights alone are read")
    known = {"peft_type", "r", "lora_alpha", "use_rslora", "bias", *NOT_READ}
    for name, value in peft.items():
        if name not in known and value:
            raise ValueError(f"{path}: {name} = {value!r} is not supported")


def _has_adapter(tensors: Collection[str], rule: TensorRule) -> bool:
    """Whether the weight of a rule has one among these tensors, in the first layer of its stack."""
    if _is_fused(rule) or "{expert}" in rule.name:
        return False
    name = _adapter_rule(rule, f"{rule.param}{ADAPTER}/a", 1).name
    return name.format(layer=rule.first) in tensors


def adapter_config(
    config: ModelConfig,
    rules: Sequence[TensorRule],
    tensors: Collection[str],
    adapters: Collection[str],
    base: str | None,
) -> dict[str, Any]:
    """The adapter_config.json of a model's adapters.

    Args:
      rules: of the model without adapters.
      tensors: names of the model's, without adapters.
      adapters: names of the adapters'.
      base: where the model is, if that is known.
    """
    adapted = {name.removeprefix(PEFT_PREFIX).rsplit(".", 2)[0] for name in adapters}
    others = {name.removesuffix(".weight") for name in tensors} - adapted
    ends = {name.rsplit(".", 1)[1] for name in adapted}
    # PEFT gives an adapter to every module whose name ends so.
    distinct = ends.isdisjoint(name.rsplit(".", 1)[-1] for name in others)
    weights = [rule for rule in rules if _target(rule) in config.adapted_weights]
    kind = "SEQ_2_SEQ_LM" if config.num_encoder_layers else "CAUSAL_LM" if config.causal else None
    alpha = config.lora_alpha
    return {
        "peft_type": "LORA",
        "task_type": kind,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": config.lora_rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(ends if distinct else adapted),
        # A Conv1D, which stores its weight as [inputs, outputs].
        "fan_in_fan_out": any(rule.order == (0, 1) for rule in weights),
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
    }
