"""LoRA of experts in PEFT's format: `target_parameters` of adapter_config.json.

A layer of transformers' model has one parameter for gate and up of all experts, and one for down,
whatever the tensors of its checkpoint. The adapter of a parameter is two tensors, `lora_A` [experts
* rank, inputs], expert by expert, and `lora_B` [outputs, rank * experts], whose columns have the
experts as the inner dimension (`ParamWrapper` of peft/tuners/lora/layer.py). Earlier versions, and
some pairs of versions of PEFT and transformers, have swapped inputs and outputs: there `lora_A` is
over the outputs.
"""

import dataclasses
import pathlib
import re
from collections.abc import Collection, Sequence
from typing import Any, Literal

from jaxscale.config.model.lora import OF_MLP
from jaxscale.model_families.family import TensorRule
from jaxscale.model_families.hf.tensors import LAYER

AdapterForm = Literal["ours", "shared", "swapped"]
"""Of the tensors of adapters: parts of a fused weight have separate first matrices (ours), or share
it (PEFT's), and the inputs of experts may be swapped with their outputs."""

EXPERTS = ".experts."
"""In the name of a parameter of all experts."""

FUSED, LAST = "gate_up_proj", "down_proj"
"""The parameters of experts, in the order in which PEFT wraps them: the last is the outer one."""


def as_parameters(rules: Sequence[TensorRule], num_experts: int) -> list[TensorRule]:
    """Rules of a checkpoint, those of experts as transformers 5 fuses them: gate before up, each
    [outputs, inputs]."""
    return [_fused(rule, num_experts) if "{expert}" in rule.name else rule for rule in rules]


def _fused(rule: TensorRule, num_experts: int) -> TensorRule:
    part = _part(rule)
    prefix, (outputs, inputs) = f"{LAYER}.mlp{EXPERTS}", rule.view
    if part == "down":
        view = (num_experts, outputs, inputs)
        return dataclasses.replace(rule, name=prefix + LAST, view=view, order=(0, 2, 1))
    return dataclasses.replace(
        rule,
        name=prefix + FUSED,
        view=(num_experts, 2, outputs, inputs),
        take=(slice(None), ("gate", "up").index(part)),
        order=(0, 2, 1),
        shape=(num_experts, 2 * outputs, inputs),
    )


def is_of_experts(rule: TensorRule) -> bool:
    """Whether a rule of `as_parameters` is of a matrix of all experts."""
    return EXPERTS in rule.name and _part(rule) in OF_MLP


def _part(rule: TensorRule) -> str:
    return rule.param.rsplit("/", 1)[-1]


def of_experts(rules: Sequence[TensorRule], targets: Collection[str]) -> list[TensorRule]:
    """Those of `as_parameters` that are of all experts, and of our `targets`."""
    return [rule for rule in rules if is_of_experts(rule) and _part(rule) in targets]


def parameter_names(rules: Sequence[TensorRule]) -> list[str]:
    """The parameters of rules as PEFT names them: each once, for all layers."""
    return [*dict.fromkeys(rule.name.split("{layer}.", 1)[1] for rule in rules)]


def read_targets(given: Any, rules: Sequence[TensorRule], path: pathlib.Path) -> list[str]:
    """The value of `target_parameters`.

    Args:
      rules: of `as_parameters`.
      path: of the file, for messages.

    Raises:
      ValueError: it names something other than matrices of experts.
    """
    experts = of_experts(rules, OF_MLP)
    targets = given if isinstance(given, list) else [given]
    for target in targets:
        if not any(is_targeted(rule, str(target)) for rule in experts):
            allowed = " and ".join(parameter_names(experts))
            raise ValueError(
                f"{path}: target_parameters = {given!r}; {target!r} is not supported: it can name "
                f"{allowed or 'nothing in a model without experts'}"
            )
    return targets


def is_targeted(rule: TensorRule, target: str) -> bool:
    """Whether an item of `target_parameters` names a rule's parameter, in any layer."""
    return f".{rule.name}".endswith("." + re.sub(r"\.\d+\.", ".{layer}.", target))


def of_one_expert(weight: TensorRule, targets: Collection[str]) -> TensorRule:
    """The rule of an expert's matrix, with the name of PEFT's wrapper of the parameter.

    Args:
      targets: our names of the weights with adapters. Of two parameters of a module PEFT wraps the
        wrapper of the first.
    """
    module, parameter = weight.name.rsplit(".", 1)
    nested = ".base_layer" if parameter == FUSED and "down" in targets else ""
    order = tuple(dim - 1 for dim in weight.order[1:])
    view, take = weight.view[1:], weight.take[1:]
    return dataclasses.replace(
        weight, name=module + nested, view=view, take=take, order=order, shape=()
    )


def of_all_experts(
    first: TensorRule, second: TensorRule, num_experts: int, *, swapped: bool
) -> list[TensorRule]:
    """The rules of the two matrices of every expert, from those of one."""
    rank = first.view[1]
    (rows, inputs), (outputs, columns), whole = first.shape, second.shape, slice(None)
    if swapped:
        return [
            dataclasses.replace(
                first,
                name=second.name,
                view=(inputs, rank, num_experts),
                take=(),
                order=(2, 0, 1),
                shape=(inputs, rank * num_experts),
            ),
            dataclasses.replace(
                second,
                name=first.name,
                view=(num_experts, rank, *second.view[:-1]),
                take=(whole, whole, *second.take[:-1]),
                order=(0, 1, *(dim + 2 for dim in second.order[1:])),
                shape=(num_experts * rank, outputs),
            ),
        ]
    return [
        dataclasses.replace(
            first,
            view=(num_experts, *first.view),
            take=(whole, *first.take),
            order=(0, *(dim + 1 for dim in first.order)),
            shape=(num_experts * rows, inputs),
        ),
        dataclasses.replace(
            second,
            view=(*second.view, num_experts),
            order=(len(second.order), *second.order),
            shape=(outputs, columns * num_experts),
        ),
    ]
