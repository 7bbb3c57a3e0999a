"""Maps parameters to tensors of a checkpoint, and checks that none is missing or left over."""

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxscale.config.model.lora import is_adapter
from jaxscale.hugging_face.safetensors_format import DTYPES, StoredTensor
from jaxscale.hugging_face.tensor_blocks import same_values, taken_shape
from jaxscale.model_families.family import TensorRule
from jaxscale.sharding.resolve import is_axes, leaf_name
from jaxscale.sharding.rules import Axes

LINES = 10
"""Names that a message lists; further ones are only counted."""


@dataclass(frozen=True)
class ParameterTensors:
    """The tensors of a parameter: one per layer (and expert) of a stack; otherwise a single one."""

    name: str  # of the parameter
    rule: TensorRule
    tensors: tuple[str, ...]  # names, those of a layer's experts together
    copies: tuple[tuple[str, str], ...]  # a tensor, and an optional one that must be equal
    parts: tuple[int, ...]  # number of layers, and of experts, with a tensor each
    written: tuple[str, ...] = ()  # copies of its tensor that are written as well

    def tensor(self, *place: int) -> str:
        """The tensor of a layer, or of a layer and expert."""
        return self.tensors[int(np.ravel_multi_index(place, self.parts)) if place else 0]


def parameter_tensors(
    rules: Sequence[TensorRule], axes: Any, shapes: Any, vocab_size: int
) -> tuple[ParameterTensors, ...]:
    """The tensors of every parameter of a model, in the order of its rules.

    Args:
      axes: the tree of logical axes of the parameters.
      shapes: the tree of their shapes, in canonical form.

    Raises:
      ValueError: a parameter has no rule, a rule has no parameter, or their shapes differ: a fault
        of the family's file, not of a checkpoint.
    """
    pairs = jax.tree_util.tree_map_with_path(
        lambda path, names, leaf: _Parameter(leaf_name(path), names, leaf.shape),
        axes,
        shapes,
        is_leaf=is_axes,
    )
    found = jax.tree.leaves(pairs, is_leaf=lambda node: isinstance(node, _Parameter))
    parameters = {one.name: one for one in found}
    by_param: dict[str, list[TensorRule]] = {}
    for rule in rules:
        by_param.setdefault(rule.param, []).append(rule)
    if odd := sorted(parameters.keys() ^ by_param.keys()):
        raise ValueError(f"rules and parameters of the family differ: {', '.join(odd)}")
    _check_whole(rules)
    return tuple(
        _tensors_of(parameters[name], found, vocab_size) for name, found in by_param.items()
    )


@dataclass(frozen=True)
class _Parameter:
    name: str
    axes: Axes
    shape: tuple[int, ...]


def _tensors_of(
    parameter: _Parameter, rules: Sequence[TensorRule], vocab_size: int
) -> ParameterTensors:
    dims = ("layers" in parameter.axes) + ("{expert}" in rules[0].name)
    assert parameter.axes[:dims] == ("layers", "experts")[:dims], parameter
    axes, shape, parts = parameter.axes[dims:], parameter.shape[dims:], parameter.shape[:dims]
    wanted = tuple(vocab_size if axis == "vocab" else size for axis, size in zip(axes, shape))
    split = [_split(rule, wanted) for rule in rules]
    first, *others = [_names(rule, parts) for rule in rules]
    copies = tuple((name, copy) for names in others for name, copy in zip(first, names))
    written = tuple(name for rule in rules if rule.is_copy for name in _names(rule, parts))
    return ParameterTensors(parameter.name, split[0], tuple(first), copies, parts, written)


def _names(rule: TensorRule, parts: tuple[int, ...]) -> list[str]:
    """The tensors of all layers, and of all experts of each."""
    layers, experts = (*parts, 1, 1)[:2]
    return [
        rule.name.format(layer=rule.first + rule.stride * layer, expert=expert)
        for layer in range(layers)
        for expert in range(experts)
    ]


def _split(rule: TensorRule, wanted: tuple[int, ...]) -> TensorRule:
    """The rule with its view's dims split as the parameter's, so that no last reshape is needed.

    Raises:
      ValueError: the rule does not give the wanted shape.
    """
    shape = taken_shape(rule)
    fault = ValueError(f"the rule of {rule.name} gives {shape}, and {rule.param} is {wanted}")
    factors: dict[int, tuple[int, ...]] = {}  # by dim of what is taken
    left = list(wanted)
    for dim, size in zip(rule.order, shape):
        factors[dim] = (left.pop(0) if left else 0,)
        while left and math.prod(factors[dim]) < size:
            factors[dim] += (left.pop(0),)
        if math.prod(factors[dim]) != size:
            raise fault
    if left:
        raise fault
    view, take, places = [], [], []
    taken = [*rule.take, *[slice(None)] * (len(rule.view) - len(rule.take))]
    for size, one in zip(rule.view, taken):
        if isinstance(one, int):
            view, take = [*view, size], [*take, one]
            continue
        sizes = factors[len(places)]
        inner, rows = math.prod(sizes[1:]), range(size)[one]
        if size % inner or rows.start % inner or rows.step != 1:
            raise fault
        first = len(places) and places[-1][-1] + 1
        places.append(range(first, first + len(sizes)))
        view += [size // inner, *sizes[1:]]
        take += [slice(rows.start // inner, rows.stop // inner), *[slice(None)] * (len(sizes) - 1)]
    order = tuple(place for dim in rule.order for place in places[dim])
    return dataclasses.replace(
        rule, view=tuple(view), order=order, take=tuple(take), shape=shape_of(rule)
    )


def shape_of(rule: TensorRule) -> tuple[int, ...]:
    """The shape of a rule's tensor."""
    return rule.shape or rule.view


def _check_whole(rules: Sequence[TensorRule]) -> None:
    """Refuses rules that cover only a part of a tensor: the rest would be dropped silently. Not for
    adapters: those of fused weights share a matrix, or have zeros between them."""
    rules = [rule for rule in rules if not is_adapter(rule.param)]
    taken: dict[tuple[str, int], int] = {}
    for rule in rules:
        key = rule.name, rule.first
        taken[key] = taken.get(key, 0) + math.prod(taken_shape(rule))
    for rule in rules:
        size, total = math.prod(shape_of(rule)), taken[rule.name, rule.first]
        if not size == math.prod(rule.view) == total:
            raise ValueError(
                f"the rules of {rule.name} take {total} of the {size} values of its "
                f"shape {shape_of(rule)}"
            )


def _unfit(
    found: Mapping[str, StoredTensor],
    required: Mapping[str, tuple[int, ...]],
    others: Sequence[str],
) -> list[str]:
    """A line for each tensor that is missing, unknown, or of another shape or type.

    Args:
      others: patterns of tensors that are not read.
    """
    there = {name: (found[name], shape) for name, shape in required.items() if name in found}
    return [
        *(f"{name} {required[name]}: missing" for name in required if name not in there),
        *(
            f"{name} {found[name].shape}: unknown"
            for name in found
            if name not in required
            and not any(fnmatch.fnmatchcase(name, pattern) for pattern in others)
        ),
        *(
            f"{name}: shape {one.shape}, and {shape} by config.json"
            for name, (one, shape) in there.items()
            if one.shape != shape
        ),
        *(
            f"{name}: type {one.dtype}; parameters can be {', '.join(DTYPES)}"
            for name, (one, _) in there.items()
            if one.dtype not in DTYPES
        ),
    ]


def check_tensors(
    found: Mapping[str, StoredTensor],
    parameters: Sequence[ParameterTensors],
    ignored: Sequence[str],
    where: object,
) -> None:
    """Refuses a checkpoint with missing or unknown tensors, or with other shapes or types.

    Args:
      ignored: patterns of tensors without parameters.
      where: the folder, for messages.

    Raises:
      ValueError: names them.
    """
    required = {name: one.rule.shape for one in parameters for name in one.tensors}
    copies = {copy: name for one in parameters for name, copy in one.copies}
    lines = _unfit(found, required, (*copies, *ignored))
    if not lines:
        lines = [
            f"{copy}: differs from {name}, to which it is tied"
            for copy, name in copies.items()
            if copy in found and not same_values(found[copy], found[name])
        ]
    if lines:
        more = [f"and {len(lines) - LINES} more"] if len(lines) > LINES else []
        raise ValueError(
            f"{where}: {len(lines)} tensors do not fit the model of its config.json:\n  "
            + "\n  ".join([*lines[:LINES], *more])
        )
