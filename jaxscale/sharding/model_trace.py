"""What tracing a model finds, for pricing it under any layout without JAX: its parameters with
their logical axes and its stacks (`training.tracing.trace_model`), and its matmuls, attention and
experts (`training.tracing.trace_work`).

In all memory formulas the integers of a layout may be int arrays [N], for N layouts at once.
"""

import functools
import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxscale.config.layout import Layout, parse_remat
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
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

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
    tensors: tuple[str, ...] = ()  # names of its activations, for remat policies


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
        layers = self.stack_layers
        return sum(array.size * layers.get(array.part, 1) for array in self.parameters)

    def num_active_params(self, experts_per_token: int) -> int:
        """Parameters that one token meets: those of its own experts and of all that is shared."""
        chosen = {"experts": experts_per_token}
        active = tuple(
            replace(array, shape=tuple(map(chosen.get, array.axes, array.shape)))
            for array in self.parameters
        )
        return replace(self, parameters=active).num_params

    @property
    def vocab_rows(self) -> int:
        """Rows of the vocabulary, padding included; 0 without one."""
        rows = [
            array.shape[array.axes.index("vocab")]
            for array in self.parameters
            if "vocab" in array.axes
        ]
        return max(rows, default=0)

    def experts_of(self, stack: str) -> tuple[bool, ...]:
        """For each layer of the model in a layer of a stack, whether it has experts."""
        arrays = [array for array in self.parameters if array.part == stack]
        turn = next(one.turn for one in self.stacks if one.name == stack)
        paths = [f"layer_{i}/" for i in range(turn)] if turn > 1 else [""]
        return tuple(
            any("experts" in array.axes for array in arrays if array.name.startswith(path))
            for path in paths
        )


UNREAD = "unread"
"""In place of the name of a result: no backward pass reads it."""
REPEATED = "repeated"
"""The same: it is recomputed under every remat policy."""


@dataclass(frozen=True)
class Matmul:
    """A matmul with weights, as the layers of a stack have it."""

    inputs: int  # contracted features
    outputs: tuple[tuple[int, int], ...]  # of each weight: heads or features, and features of each
    over: str = ""  # what ranks of tensor divide: "outputs", "inputs", "tokens" or nothing
    names: tuple[str, ...] = ()  # of `layout.BLOCK_TENSORS`, of what each weight makes
    tokens: float = 1.0  # rows for each token of the stack's sequence
    share: float = 1.0  # of the stack's layers
    # Of what each weight makes, the name by which remat policies save it: "" has none, and () are
    # `names`.
    saved_as: tuple[str, ...] = ()

    @property
    def of_shared(self) -> bool:
        """Whether it is that of a shared expert."""
        return any(name.startswith("shared") for name in self.names)

    @property
    def features(self) -> int:
        """Of all outputs."""
        return sum(units * each for units, each in self.outputs)

    @property
    def flops(self) -> float:
        """For a token, in a mean layer of the stack."""
        return 2.0 * self.inputs * self.features * self.tokens * self.share


@dataclass(frozen=True)
class AttentionCall:
    """A call of `Kernels.attend`, as the layers of a stack have it."""

    heads: int
    kv_heads: int
    features: int  # of a query and of a key
    value_features: int
    keys: float  # that a query attends to, on average
    length: float  # of a sequence in which it does: of keys, or twice a causal mean
    share: float = 1.0  # of the stack's layers
    source_len: int = 0  # of another sequence, whose tokens are the keys

    @property
    def flops(self) -> float:
        """For a token, in a mean layer of the stack."""
        return 2.0 * self.heads * (self.features + self.value_features) * self.keys * self.share


@dataclass(frozen=True)
class RoutedExperts:
    """The experts that a router chooses from, as the layers of a stack have them."""

    count: int
    choices: int  # of a token
    width: int  # of what they read
    hidden: int
    gated: bool
    share: float = 1.0  # of the stack's layers
    read: bool = False  # by a backward pass, what they add to the stream
    router_width: int = 0  # of what the router reads; 0 is `width`

    @property
    def router_flops(self) -> float:
        """For a token, in a mean layer of the stack."""
        return 2.0 * (self.router_width or self.width) * self.count * self.share

    @property
    def flops(self) -> float:
        """The same with its experts."""
        each = 2.0 * (2 + self.gated) * self.width * self.hidden
        return self.choices * each * self.share + self.router_flops


@dataclass(frozen=True)
class StackWork:
    """What the layers of a stack compute, forward: a mean layer, for a token of its sequence."""

    name: str
    num_layers: int  # of the model
    seq_len: int
    matmuls: tuple[Matmul, ...]
    attention: tuple[AttentionCall, ...]
    experts: tuple[RoutedExperts, ...] = ()
    branches: float = 0.0  # what adds to the residual stream: attention, an MLP
    sent: float = 0.0  # of them, those whose input and output ranks of tensor exchange
    rotated: float = 0.0  # features of queries and keys with rotary positions
    opened: float = 0.0  # features out of an MLP's first matrices, without routed experts
    hidden: float = 0.0  # and into its last one
    read: float = 0.0  # inputs of matmuls
    made: float = 0.0  # their outputs
    scan_flops: float = 0.0  # of state-space mixers
    scan_bytes: float = 0.0

    @property
    def flops(self) -> float:
        """Of a mean layer, for a token."""
        return self.matmul_flops + self.scan_flops + sum(one.flops for one in self.attention)

    @property
    def matmul_flops(self) -> float:
        """The same without attention's own matmuls, and without scans."""
        return sum(one.flops for one in (*self.matmuls, *self.experts))

    def recomputed(self, remat: str) -> float:
        """FLOPs of a mean layer and a token that a policy of `Layout.remat` repeats."""
        policy = parse_remat(remat)
        core = 0.0 if "attention" in policy.names else sum(one.flops for one in self.attention)
        return core + self.recomputed_matmuls(policy.names if policy.by_names else None)

    def recomputed_matmuls(self, names: Collection[str] | None) -> float:
        """FLOPs of matmuls whose results a policy by names does not save; those of experts are up,
        gate and down.

        Args:
          names: None is a policy that saves what it can.
        """
        found = 0.0
        for one in self.matmuls:
            saved_as = itertools.chain(one.saved_as or one.names, itertools.repeat(""))
            for (units, each), name in zip(one.outputs, saved_as):
                unsaved = names is not None and name not in names and name != UNREAD
                found += one.flops * units * each / one.features * (unsaved or name == REPEATED)
        if names is None:
            return found
        for one in self.experts:
            matrices = ("mlp_up", "mlp_gate")[: 1 + one.gated]
            unsaved = sum(name not in names for name in matrices) + one.read
            inside = one.flops - one.router_flops
            found += one.router_flops + inside * unsaved / (len(matrices) + 1)
        return found


@dataclass(frozen=True)
class ModelWork:
    """What a model computes and holds, as the planner prices it."""

    stacks: tuple[StackWork, ...]
    layers: int  # over which the work of all stacks is averaged: those of the output sequence
    seq_len: int  # of the output sequence
    width: int  # of the residual stream
    vocab: int  # padding rows included
    block_params: int
    routed_params: int  # of them, those of routed experts
    embedding_params: int
    head_params: int
    tied: bool
    logit_flops: float = 0.0  # of a token, forward, in all passes of the head; without padding
    head_passes: int = 1
    transform_flops: float = 0.0  # of the head's other matmuls, for a token
    extra_predictions: int = 0  # further layers with a head pass each, on the head's rank
    adapted: bool = False  # whether all but low-rank adapters is frozen

    def share(self, stack: StackWork) -> float:
        """Layers of a stack for each of `layers`."""
        return stack.num_layers / self.layers

    def tokens(self, stack: StackWork) -> float:
        """Tokens of a stack for each of the output sequence."""
        return stack.seq_len / self.seq_len

    def alone(self, stack: StackWork) -> "ModelWork":
        """One stack as a model of its own, with the parameters of the whole."""
        return replace(self, stacks=(stack,), layers=stack.num_layers, seq_len=stack.seq_len)

    @property
    def head_flops(self) -> float:
        """Of the head for a sequence, forward."""
        return self.seq_len * (self.logit_flops + self.transform_flops)

    @property
    def layer_flops(self) -> float:
        """Of all layers for a sequence, forward."""
        return sum(one.num_layers * one.seq_len * one.flops for one in self.stacks)

    @property
    def sequence_flops(self) -> float:
        """Of a sequence, forward, with the layers and head passes of further predictions."""
        layers = 1 + self.extra_predictions / self.layers
        passes = 1 + self.extra_predictions / max(1, self.head_passes)
        return layers * self.layer_flops + passes * self.head_flops

    @property
    def training_flops(self) -> float:
        """Of a sequence, forward and backward: the numerator of MFU.

        Two per multiply-add, in matmuls and in attention over the keys that a query attends to:
        norms, activations, softmax and lookups are left out. Both gradients of a matmul cost as
        much as it does; a frozen weight of a model with adapters has none.
        """
        frozen = self.head_flops if self.adapted else 0.0
        for one in self.stacks if self.adapted else ():
            trained = sum(each.flops for each in one.matmuls if each.over == "tokens")
            frozen += one.num_layers * one.seq_len * (one.matmul_flops - trained)
        return 3 * self.sequence_flops - frozen

    def hardware_flops(self, remat: str, recomputed: float = 0.0) -> float:
        """`training_flops` plus recompute: the numerator of HFU.

        Args:
          remat: the layout's policy, which repeats what it does not save.
          recomputed: the share of a pipeline's passes that R operations recompute, each as whole
            layers.
        """
        return self.training_flops + (recomputed * self.layer_flops or self.recomputed_flops(remat))

    def recomputed_flops(self, remat: str) -> float:
        """FLOPs of a sequence that a remat policy repeats: of what it does not save, but for
        results that no backward pass needs, such as of the last matmul of an MLP."""
        return sum(one.num_layers * one.seq_len * one.recomputed(remat) for one in self.stacks)

    def head_cost(self, layers: int) -> float:
        """FLOPs of the head over those of a mean layer; layers are split into stages by it.

        Args:
          layers: of all stacks, each of several of the model's where its `turn` is more than 1.
        """
        return self.head_flops * layers / self.layer_flops

    @property
    def num_experts(self) -> int:
        """Of a layer; 0 without."""
        return max((one.count for stack in self.stacks for one in stack.experts), default=0)

    @property
    def source_len(self) -> int:
        """Tokens of the sequences that other stacks read, such as an encoder's; 0 where there are
        none."""
        read = [call.source_len for one in self.stacks for call in one.attention]
        others = [one.seq_len for one in self.stacks if one.seq_len != self.seq_len]
        return max((*read, *others), default=0)


@dataclass(frozen=True)
class SavedValue:
    """Arrays of a layer that one pass saves for another: of one device, which a layout divides."""

    held: str  # in the layers' loop "", of a pipeline "residual_b", "residual_w" or "cotangent"
    per: str  # "sequence", or "row" of experts
    spread: str
    """What ranks of tensor have of it: "stream" each a part, "gathered" the same, and whole for a
    matmul, "features" each some of the features, "whole" each all."""
    heads: int
    features: int  # of a head, or of a token
    entries: float  # for each sequence or row
    element_bytes: int
    count: float = 1.0  # of a mean layer

    @property
    def num_bytes(self) -> float:
        """Of a sequence or a row, of all ranks of tensor together, where none repeats any."""
        return self.count * self.entries * self.heads * self.features * self.element_bytes


@dataclass(frozen=True)
class StackSaved:
    """What a mean layer of a stack saves."""

    name: str
    length: int  # tokens of a sequence
    width: int  # features of each that layers hand on
    rows: float  # of its experts, for a token, with all experts on a rank
    values: tuple[SavedValue, ...]
    live: float = 0.0
    """Of custom models, bytes that the backward pass of a layer computes and has at once, for a
    sequence."""
    live_forward: float = 0.0
    heads: int = 0  # of attention, in such a layer
    attended: int = 0  # features of its queries, keys and values together


@dataclass(frozen=True)
class SavedValues:
    """What the layers of a model save, under one remat policy."""

    stacks: tuple[StackSaved, ...]
    extra_bytes: int = 0  # of a sequence's `Batch.extras`

    def of(self, stack: str) -> StackSaved:
        """Those of a stack."""
        return next(one for one in self.stacks if one.name == stack)
