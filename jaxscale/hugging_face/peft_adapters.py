"""PEFT's format of adapters, LoRA here and prompts in `peft_prompts`: a folder with
adapter_config.json and adapter_model.safetensors, without the base model.

The adapter of a weight [outputs, inputs] is two tensors, `lora_A` [rank, inputs] and `lora_B`
[outputs, rank]. If a checkpoint fuses several of our weights into one tensor, PEFT has one adapter
for all of it, which is read as an adapter of each weight with the same `lora_A`. Our adapters of
these weights, each with a separate first matrix, are written as one with the sum of their ranks:
`lora_A` stacks their rows, and `lora_B` is block-diagonal.

Trained tokens (`trainable_token_indices`) have one tensor [tokens, embed] for each table, which
replaces their rows; a table that was extended for them may be stored whole.
"""

import dataclasses
import math
import pathlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxscale.config.model import ModelConfig
from jaxscale.config.model.lora import ADAPTER, is_adapter, to_ranges
from jaxscale.hugging_face.peft_experts import (
    EXPERTS,
    AdapterForm,
    as_parameters,
    is_of_experts,
    is_targeted,
    of_all_experts,
    of_experts,
    of_one_expert,
    parameter_names,
    read_targets,
)
from jaxscale.hugging_face.peft_prompts import is_prompt, prompt_rules, prompt_settings
from jaxscale.hugging_face.safetensors_format import StoredTensor, read_header, read_metadata
from jaxscale.model_families.family import TensorRule
from jaxscale.storage.untrusted import load_json

PEFT_CONFIG, PEFT_TENSORS = "adapter_config.json", "adapter_model.safetensors"

PEFT_PREFIX = "base_model.model."
"""The prefix of a weight's name."""

PARTS = {"a": "lora_A", "b": "lora_B"}
"""Ours -> theirs."""

ROWS, WHOLE_TABLE = ".token_adapter.trainable_tokens_delta", ".token_adapter.base_layer.weight"
"""Suffixes of the names of a table's trained rows, and of the whole table."""

TABLES = ("embed/tokens", "head/output")
"""Parameters whose rows of tokens may be trained."""

TARGETS = "jaxscale.lora_targets"
"""The key of the metadata of our files that lists the parts of fused weights with adapters."""

NOT_READ = frozenset(
    (
        # Which weights have adapters: read from the tensors.
        *("target_modules", "exclude_modules", "layers_pattern"),
        # Used in training only, and provenance.
        *("lora_dropout", "init_lora_weights", "inference_mode", "runtime_config"),
        *("task_type", "base_model_name_or_path", "revision", "peft_version", "auto_mapping"),
        # Storage of the weight, which is known, and details of options that are off.
        *("fan_in_fan_out", "megatron_core", "qalora_group_size"),
    )
)

KEEP_THE_MODEL = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the weights of the model as they are."""


@dataclass(frozen=True)
class PeftAdapters:
    """A folder of adapters: our settings for it, and the location of its tensors."""

    settings: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]  # extended tables have the names of the model's
    form: AdapterForm
    stored_vocab: int  # rows of the tables


def adapter_rules(
    rules: Sequence[TensorRule], names: Collection[str], config: ModelConfig, form: AdapterForm
) -> list[TensorRule]:
    """The tensors of the adapters' matrices, and of a table's trained rows.

    Args:
      rules: of the model without adapters.
      names: of all parameters.
    """
    adapters = {name for name in names if is_adapter(name)}
    parameters = as_parameters(rules, config.num_experts)
    weights = [rule for rule in parameters if f"{rule.param}{ADAPTER}/a" in adapters]
    shape = len(config.trained_tokens), config.d_model
    found = [
        TensorRule(f"{table.param}{ADAPTER}/rows", _rows_tensor(table), shape, (0, 1), shape=shape)
        for table in rules
        if f"{table.param}{ADAPTER}/rows" in adapters
    ]
    for group in _by_tensor(weights):
        count = len(group) if form == "ours" else 1
        for number, weight in enumerate(group):
            experts = is_of_experts(weight)
            one = of_one_expert(weight, config.adapted_weights) if experts else weight
            first, second = _rules_of(one, config.lora_rank, number % count, count)
            if experts:
                swapped = form == "swapped"
                found += of_all_experts(first, second, config.num_experts, swapped=swapped)
            else:
                found += [first, second]
    return found + prompt_rules(names, config)


def _by_tensor(weights: Sequence[TensorRule]) -> list[list[TensorRule]]:
    """Rules grouped by the tensor of which they take parts."""
    groups: dict[tuple[str, int], list[TensorRule]] = {}
    for weight in weights:
        groups.setdefault((weight.name, weight.first), []).append(weight)
    return list(groups.values())


def _rules_of(weight: TensorRule, rank: int, number: int, count: int) -> list[TensorRule]:
    """The rules of an adapter's two matrices.

    Args:
      number, count: index among the adapters that share the tensor, and their number.
    """
    take = [*weight.take, *[slice(None)] * (len(weight.view) - len(weight.take))]
    dims = [dim for dim, one in enumerate(take) if isinstance(one, slice)]
    inputs = dims[weight.order[0]]
    outputs = [dim for dim in range(len(take)) if dim != inputs]
    kept = [dim for dim in dims if dim != inputs]
    num_inputs, num_outputs = weight.view[inputs], math.prod(weight.view[dim] for dim in outputs)
    first = dataclasses.replace(
        weight,
        param=f"{weight.param}{ADAPTER}/a",
        name=_adapter_tensor(weight, "a"),
        view=(count, rank, num_inputs),
        take=(number,),
        order=(1, 0),
        shape=(count * rank, num_inputs),
    )
    columns = slice(number * rank, (number + 1) * rank)
    second = dataclasses.replace(
        weight,
        param=f"{weight.param}{ADAPTER}/b",
        name=_adapter_tensor(weight, "b"),
        view=(*(weight.view[dim] for dim in outputs), count * rank),
        take=(*(take[dim] for dim in outputs), columns),
        order=(len(dims) - 1, *(kept.index(dims[one]) for one in weight.order[1:])),
        shape=(num_outputs, count * rank),
    )
    return [first, second]


def _adapter_tensor(weight: TensorRule, part: str) -> str:
    return f"{PEFT_PREFIX}{_module(weight)}.{PARTS[part]}.weight"


def _rows_tensor(table: TensorRule) -> str:
    return f"{PEFT_PREFIX}{_module(table)}{ROWS}"


def _module(rule: TensorRule) -> str:
    return rule.name.removesuffix(".weight")


def _target(rule: TensorRule) -> str:
    """The name of a rule's weight in `model.lora_targets`."""
    return rule.param.rsplit("/", 1)[-1]


def fused_metadata(config: ModelConfig, rules: Sequence[TensorRule]) -> dict[str, str]:
    """The metadata of a file of adapters, from which fused weights can be read back as written.

    Args:
      rules: of the model without adapters.
    """
    targets = config.adapted_weights
    weights = as_parameters(rules, config.num_experts)
    fused = any(rule.take or is_of_experts(rule) for rule in weights if _target(rule) in targets)
    return {TARGETS: ",".join(targets)} if fused else {}


def _further_ranks(config: ModelConfig, rules: Sequence[TensorRule]) -> dict[str, Any]:
    """PEFT's options for modules whose adapter has the summed rank of several of ours."""
    weights = [rule for rule in rules if _target(rule) in config.adapted_weights]
    counts = {
        _module(group[0]).split("{layer}.", 1)[1]: len(group)
        for group in _by_tensor(weights)
        if len(group) > 1
    }
    return {
        "rank_pattern": {name: count * config.lora_rank for name, count in counts.items()},
        "alpha_pattern": {name: count * _alpha(config) for name, count in counts.items()},
    }


def _alpha(config: ModelConfig) -> float:
    alpha = config.lora_alpha
    return int(alpha) if alpha == int(alpha) else alpha


def open_adapters(
    directory: pathlib.Path, model: ModelConfig, rules: Sequence[TensorRule]
) -> PeftAdapters:
    """Opens a folder; reads no values.

    Args:
      model, rules: of the base model.

    Raises:
      FileNotFoundError: the folder contains no adapters.
      ValueError: they are of another type, or for another model; says why.
    """
    for name in (PEFT_CONFIG, PEFT_TENSORS):
        if not (directory / name).is_file():
            raise FileNotFoundError(
                f"{directory} contains no PEFT adapters: no {name}, which save_pretrained writes"
            )
    path = directory / PEFT_CONFIG
    if is_prompt(path):
        tensors = read_header(directory / PEFT_TENSORS)
        settings = prompt_settings(path, model, tensors)
        return PeftAdapters(settings, tensors, "ours", stored_vocab=model.vocab_size)
    peft = _read_config(path)
    rank, alpha = peft["r"], peft["lora_alpha"]
    _refuse_layers(peft, path, model.num_layers)
    tensors = read_header(directory / PEFT_TENSORS)
    ours = read_metadata(directory / PEFT_TENSORS).get(TARGETS)
    weights = as_parameters(rules, model.num_experts)
    targets = read_targets(peft.get("target_parameters") or [], weights, path)
    every, usual = model.layer_matrices, dataclasses.replace(model, lora_rank=rank).adapted_weights
    adapted = {_target(rule) for rule in weights if _has_adapter(tensors, targets, rule)}
    adapted &= {*every} if ours is None else {*every} & {*ours.split(",")}
    if not adapted:
        raise ValueError(
            f"{directory / PEFT_TENSORS} has no adapter of a weight of this model, such as "
            f"{next(iter(tensors), 'no tensor at all')}"
        )
    settings = {
        "lora_rank": rank,
        # rsLoRA scales by alpha over the square root of the rank.
        "lora_alpha": float(alpha * math.sqrt(rank) if peft.get("use_rslora") else alpha),
        "lora_targets": "" if adapted == {*usual} else ",".join(sorted(adapted, key=every.index)),
    }
    config = dataclasses.replace(model, **settings)
    written = _further_ranks(config, weights)
    _refuse_others(peft, path, {} if ours is None else written)
    tables = _whole_tables(tensors, rules)
    stored = min([one.shape[0] for one in tables.values()], default=model.vocab_size)
    settings |= _token_settings(peft, path, model, rules, tensors, stored)
    rest = {name: one for name, one in tensors.items() if not name.endswith(WHOLE_TABLE)}
    form = _stored_form(tensors, path, weights, config) if ours is None else "ours"
    return PeftAdapters(settings, {**rest, **tables}, form, stored)


def _stored_form(
    tensors: Mapping[str, StoredTensor],
    path: pathlib.Path,
    weights: Sequence[TensorRule],
    config: ModelConfig,
) -> AdapterForm:
    """Whether inputs and outputs of experts are swapped, which only the shapes tell: it depends on
    the versions of both PEFT and transformers that wrote the tensors.

    Raises:
      ValueError: every adapted matrix is square.
    """
    experts = of_experts(weights, config.adapted_weights)
    names = [f"{rule.param}{ADAPTER}/a" for rule in experts]

    def fits(form: AdapterForm) -> bool:
        found = [
            (tensors.get(rule.name.format(layer=rule.first)), rule.shape)
            for rule in adapter_rules(weights, names, config, form)
        ]
        return all(one and one.shape == shape for one, shape in found)

    if not names or not fits("swapped"):
        return "shared"
    if fits("shared"):
        raise ValueError(
            f"{path}: target_parameters = {parameter_names(experts)} are square matrices, "
            "of which PEFT's versions have stored the adapters with inputs and outputs in either "
            "order; merge them into the model (PEFT's merge_and_unload), and convert that"
        )
    return "swapped"


def _read_config(path: pathlib.Path) -> dict[str, Any]:
    """The config of LoRA adapters, with a rank and an alpha.

    Raises:
      ValueError: it is another file, or of another type of adapters.
    """
    peft = load_json(path)
    if not isinstance(peft, dict):
        raise ValueError(f"{path} is not the config of LoRA adapters: it is not a JSON object")
    kind: Any = peft.get("peft_type")
    rank: Any = peft.get("r")
    alpha: Any = peft.get("lora_alpha")
    has_rank = type(rank) is int and 0 < rank < 2**31
    has_alpha = type(alpha) in (int, float) and 0 < alpha < 1e300
    if kind != "LORA" or not has_rank or not has_alpha:
        raise ValueError(
            f"{path}: peft_type = {kind!r}, r = {rank!r}, lora_alpha = {alpha!r}; it must be "
            "'LORA', with a rank and an alpha above 0"
        )
    return peft


def _refuse_layers(peft: Mapping[str, Any], path: pathlib.Path, num_layers: int) -> None:
    """Refuses adapters of some layers only: here every layer has them."""
    layers = peft.get("layers_to_transform")
    if layers is not None and set(layers if isinstance(layers, list) else [layers]) != {
        *range(num_layers)
    }:
        raise ValueError(
            f"{path}: layers_to_transform = {layers!r}; adapters of all {num_layers} layers are "
            "supported; merge these into the model (PEFT's merge_and_unload), and convert that"
        )


def _whole_tables(
    tensors: Mapping[str, StoredTensor], rules: Sequence[TensorRule]
) -> dict[str, StoredTensor]:
    """The embedding tables that are stored whole, by the model's names."""
    names = {rule: f"{PEFT_PREFIX}{_module(rule)}{WHOLE_TABLE}" for rule in rules}
    return {
        _module(rule) + ".weight": tensors[name]
        for rule, name in names.items()
        if rule.param in TABLES and name in tensors
    }


def _token_settings(
    peft: Mapping[str, Any],
    path: pathlib.Path,
    model: ModelConfig,
    rules: Sequence[TensorRule],
    tensors: Collection[str],
    stored: int,
) -> dict[str, Any]:
    """The settings of trained tokens: `lora_tokens`, and `vocab_size` if they are new.

    Args:
      stored: tokens of the tables.

    Raises:
      ValueError: the head has other tokens than the embedding, or new tokens have no rows.
    """
    given = peft.get("trainable_token_indices") or {}
    by_table = list(given.values()) if isinstance(given, dict) else [given]
    ids = next(iter(by_table), [])
    if not ids:
        return {"vocab_size": stored}
    tables = {rule.param: rule for rule in reversed(rules) if rule.param in TABLES}
    missing = [_module(one) for one in tables.values() if _rows_tensor(one) not in tensors]
    if missing or any(one != ids for one in by_table):
        raise ValueError(
            f"{path}: trainable_token_indices = {given!r}; give embedding and head the same "
            f"tokens: {', '.join(map(_module, tables.values()))}"
        )
    size = max(stored, max(ids) + 1)
    if left := sorted({*range(stored, size)} - {*ids}):
        raise ValueError(
            f"{path}: trainable_token_indices = {given!r}, and the model has {stored} tokens: "
            f"token {left[0]} has no row; save the adapters with the resized embedding"
        )
    return {"vocab_size": size, "lora_tokens": to_ranges(ids)}


def _refuse_others(peft: Mapping[str, Any], path: pathlib.Path, written: Mapping[str, Any]) -> None:
    """Refuses options that our adapters do not have.

    Args:
      written: options with their values in a folder that we would write.
    """
    init = peft.get("init_lora_weights")
    if init not in KEEP_THE_MODEL:
        raise ValueError(
            f"{path}: init_lora_weights = {init!r} changes the weights of the model, too; convert "
            "the adapters to plain ones (save_pretrained with path_initial_model_for_weight_"
            "conversion of PEFT)"
        )
    if peft.get("bias", "none") != "none":
        raise ValueError(f"{path}: bias = {peft['bias']!r}; only 'none' is supported")
    known = {"peft_type", "r", "lora_alpha", "use_rslora", "bias", *NOT_READ}
    # Read elsewhere.
    known |= {"layers_to_transform", "target_parameters", "trainable_token_indices"}
    for name, value in peft.items():
        if name not in known and value and value != written.get(name):
            raise ValueError(f"{path}: {name} = {value!r} is not supported")


def _has_adapter(tensors: Collection[str], targets: Sequence[str], rule: TensorRule) -> bool:
    """Whether a rule's weight has an adapter, in the first layer of its stack.

    Args:
      targets: as of `read_targets`.
    """
    if is_of_experts(rule):
        return any(is_targeted(rule, target) for target in targets)
    return _adapter_tensor(rule, "a").format(layer=rule.first) in tensors


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
      tensors: names of the model's tensors, without adapters.
      adapters: names of the adapters' tensors.
      base: name or folder of the base model, if known.
    """
    matrices = [name for name in adapters if not name.endswith(ROWS) and EXPERTS not in name]
    adapted = {name.removeprefix(PEFT_PREFIX).rsplit(".", 2)[0] for name in matrices}
    others = {name.removesuffix(".weight") for name in tensors} - adapted
    ends = {name.rsplit(".", 1)[1] for name in adapted}
    # PEFT adds an adapter to every module whose name has this suffix.
    distinct = ends.isdisjoint(name.rsplit(".", 1)[-1] for name in others)
    parameters = as_parameters(rules, config.num_experts)
    weights = [rule for rule in parameters if _target(rule) in config.adapted_weights]
    targets = parameter_names(of_experts(parameters, config.adapted_weights))
    kind = "SEQ_2_SEQ_LM" if config.num_encoder_layers else "CAUSAL_LM" if config.causal else None
    tables = [_module(rule).rsplit(".", 1)[-1] for rule in rules if _rows_tensor(rule) in adapters]
    tokens = {name: list(config.trained_tokens) for name in tables}
    return {
        "peft_type": "LORA",
        "task_type": kind,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": config.lora_rank,
        "lora_alpha": _alpha(config),
        **_further_ranks(config, parameters),
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(ends if distinct else adapted) or None,
        **({"target_parameters": targets} if targets else {}),
        # Conv1D modules store the weight as [inputs, outputs].
        "fan_in_fan_out": any(rule.order == (0, 1) for rule in weights),
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "trainable_token_indices": tokens or None,
    }
