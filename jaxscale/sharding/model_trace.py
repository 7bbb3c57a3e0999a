"""What tracing a model finds, for pricing it under any layout without JAX: its parameters with
their logical axes, and its stacks. `training.trace_model` traces.

In all memory formulas the integers of a layout may be int arrays [N], for N layouts at once.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.config.layout import Layout
from jaxscale.config.model.lora import is_adapter
from jaxscale.sharding.rules import WEIGHTS, Axes, spreads_outer

Ints = Any
"""An int, or int [N] for N layouts."""
Rows = Mapping[str, Ints]
"""Layers of each stack, by its name."""


def select(condition: Any, yes: Ints, no: Ints = 0) -> Ints:
    """`yes` where the condition holds, for one layout or many."""
    if isinstance(condition, bool | np.bool_):
        return yes if condition else no
    return np.where(condition, yes, no)


def maximum(*sizes: Ints) -> Ints:
    """The elementwise maximum, for one layout or many."""
    return functools.reduce(
        lambda a, b: max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b),
        sizes,
    )


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


@dataclass(frozen=True)
class ParamShape:
    """One parameter; a layer's is that of one layer, without the stack's dimension."""

    part: str  # "embed", the name of a stack, or "head"
    name: str  # as in a checkpoint: "attention/q"
    axes: Axes
    shape: tuple[int, ...]
    dtype: str = "float32"
    frozen: bool = False  # by the model: no gradient changes it
    own_rules: tuple[tuple[str, tuple[str, ...]], ...] = ()  # of axes of a custom model

    @property
    def path(self) -> str:
        """Its name in the tree of parameters."""
        return f"{self.part}/{self.name}"

    @property
    def in_layers(self) -> bool:
        """Whether every layer of a stack has one."""
        return self.part not in ("embed", "head")

    @property
    def in_adapter(self) -> bool:
        """Whether it is trained beside frozen weights: of a low-rank adapter, or rows of tokens."""
        return is_adapter(self.name)

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def share(self, axis: str, count: int) -> float:
        """The share of its elements that so many entries of an axis are; 1 without the axis."""
        return count / self.shape[self.axes.index(axis)] if axis in self.axes else 1.0

    def shard_size(self, layout: Layout, *, over_fsdp: Any, at_rest: bool = False) -> Ints:
        """Elements on one device, sharded over tensor and, where asked, over fsdp and context.

        Args:
          at_rest: between steps embedding and head are sharded over the pipeline, too, where they
            divide.
        """
        divisor, columns = 1, layout.tensor_columns
        if "embed" in self.axes:
            divisor = select(over_fsdp, layout.zero_ranks, 1) * layout.tensor_rows
        if at_rest and not self.in_layers and "embed" in self.axes:
            width = self.shape[self.axes.index("embed")] // layout.tensor_rows
            spread = spreads_outer(layout.pipeline, layout.zero_ranks, width)
            divisor = divisor * select(spread, layout.pipeline, 1)
        if "experts" in self.axes:
            divisor = divisor * layout.expert
        if any("tensor" in self._rule(axis) for axis in self.axes if axis != "kv_heads"):
            divisor = divisor * columns
        if "kv_heads" in self.axes:
            # Where ranks outnumber the heads, each has all of them.
            heads = self.shape[self.axes.index("kv_heads")]
            divisor = divisor * select(heads < columns, 1, columns)
        return self.size // divisor

    def _rule(self, axis: str) -> tuple[str, ...]:
        return WEIGHTS.get(axis) or dict(self.own_rules).get(axis, ())


@dataclass(frozen=True)
class StackTrace:
    """A stack of like layers (`models.protocol.Stack`)."""

    name: str
    num_layers: int
    period: int = 1
    turn: int = 1  # layers of the model in one of the stack


@dataclass(frozen=True)
class ModelTrace:
    """What tracing a model finds."""

    parameters: tuple[ParamShape, ...]  # of the embedding, of one layer of each stack, of the head
    stacks: tuple[StackTrace, ...]  # in the order in which a step passes them
    borrowed: tuple[str, ...] = ()  # paths of matrices of the embedding that the head reads, too
    adjusts: bool = False  # whether frozen parameters change by another rule than a gradient's

    @property
    def stack_layers(self) -> dict[str, int]:
        """Layers of each stack, by its name."""
        return {stack.name: stack.num_layers for stack in self.stacks}

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, the padding rows of the vocabulary included."""
        return self._count(lambda _: 1)

    def published_params(self, vocab_size: int) -> int:
        """Parameters without the padding rows of the vocabulary, as model cards count."""
        return self._count(lambda array: array.share("vocab", vocab_size))

    def num_active_params(self, experts_per_token: int) -> int:
        """Parameters that one token meets: those of its own experts and of all that is shared."""
        return self._count(lambda array: array.share("experts", experts_per_token))

    def _count(self, share: Callable[[ParamShape], float]) -> int:
        layers = self.stack_layers
        return sum(
            round(share(array) * array.size) * layers.get(array.part, 1)
            for array in self.parameters
        )

    def experts_of(self, stack: str) -> tuple[bool, ...]:
        """For each layer of the model in a layer of a stack, whether it has experts."""
        arrays = [array for array in self.parameters if array.part == stack]
        turn = next(one.turn for one in self.stacks if one.name == stack)
        paths = [f"layer_{i}/" for i in range(turn)] if turn > 1 else [""]
        return tuple(
            any("experts" in array.axes for array in arrays if array.name.startswith(path))
            for path in paths
        )
