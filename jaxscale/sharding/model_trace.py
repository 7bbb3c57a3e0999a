"""Model traces: records from which the planner prices a model under any layout, without JAX.

Parameters with logical axes and stacks come from `training.tracing.trace_model`; matmuls, attention
and experts from `training.tracing.trace_work`; saved values from `training.tracing.trace_saved`.

In memory formulas the integers of a layout may be int arrays [N], for N layouts at once.
"""

import functools
import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxscale.config.layout import Layout
from jaxscale.config.model.quantised_base import BLOCKS
from jaxscale.config.remat_policy import parse_remat
from jaxscale.sharding.rules import WEIGHTS, Axes, spreads_outer

Ints = Any
"""An int, or int [N] for N layouts."""
Rows = Mapping[str, Ints]
"""Layers of each stack, by its name."""


def select(condition: Any, yes: Ints, no: Ints = 0) -> Ints:
    """`yes` where the condition is true, else `no`, for one layout or many."""
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


def stored_bytes(dtype: str, elements: Ints) -> Ints:
    """Bytes of parameters at rest, of a type or of a format of `model.base_dtype`."""
    if block := BLOCKS.get(dtype):
        return elements // block.weights * block.num_bytes
    return itemsize(dtype) * elements


@dataclass(frozen=True)
class ParamShape:
    """One parameter; of layers, that of one layer, without the stack's dimension."""

    part: str  # "embed", the name of a stack, or "head"
    name: str  # as in a checkpoint: "attention/q"
    axes: Axes
    shape: tuple[int, ...]
    dtype: str = "float32"  # at rest, or a format of `model.base_dtype`
    frozen: bool = False  # by the model: no gradient
    own_rules: tuple[tuple[str, tuple[str, ...]], ...] = ()  # of axes of a custom model
    block_dim: int = 0  # of the blocks of such a format

    @property
    def path(self) -> str:
        """The path in the tree of parameters."""
        return f"{self.part}/{self.name}"

    @property
    def in_layers(self) -> bool:
        """Whether it is a parameter of a stack's layers."""
        return self.part not in ("embed", "head")

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def shard_size(self, layout: Layout, *, over_fsdp: Any, at_rest: bool = False) -> Ints:
        """Elements on one device, sharded over tensor, those of experts over expert, and where
        asked, as by ZeRO, over fsdp, expert and context.

        Args:
          at_rest: whether embedding and head are sharded over the pipeline, too, as between steps.
        """
        divisor, columns = layout.expert if "experts" in self.axes else 1, layout.tensor_columns
        if "embed" in self.axes:
            divisor = select(over_fsdp, layout.zero_ranks, divisor) * layout.tensor_rows
        if at_rest and not self.in_layers and "embed" in self.axes:
            width = self.shape[self.axes.index("embed")] // layout.tensor_rows
            spread = spreads_outer(layout.pipeline, layout.zero_ranks, width)
            divisor = divisor * select(spread, layout.pipeline, 1)
        if any("tensor" in self._rule(axis) for axis in self.axes if axis != "kv_heads"):
            divisor = divisor * columns
        if "kv_heads" in self.axes:
            # Where ranks of tensor outnumber the heads, each has all of them.
            heads = self.shape[self.axes.index("kv_heads")]
            divisor = divisor * select(heads < columns, 1, columns)
        return self.size // divisor

    def _rule(self, axis: str) -> tuple[str, ...]:
        return WEIGHTS.get(axis) or dict(self.own_rules).get(axis, ())


@dataclass(frozen=True)
class StackTrace:
    """A stack of equal layers (`models.protocol.Stack`)."""

    name: str
    num_layers: int
    period: int = 1
    model_layers: int = 1  # of the model, in one layer of the stack
    tensors: tuple[str, ...] = ()  # names of its activations, for remat policies


@dataclass(frozen=True)
class TableShape:
    """An embedding table outside the parameters, with rows sharded over all devices."""

    name: str
    rows: int
    width: int
    dtype: str


@dataclass(frozen=True)
class ModelTrace:
    """The parameters and stacks of a traced model."""

    parameters: tuple[ParamShape, ...]  # of the embedding, of one layer of each stack, of the head
    stacks: tuple[StackTrace, ...]  # in the order of the forward pass
    borrowed: tuple[str, ...] = ()  # paths of matrices of the embedding that the head reads, too
    adjusts: bool = False  # whether frozen parameters change by `Model.adjust`
    slices_head: bool = False  # as `Model.slices_head`
    tables: tuple[TableShape, ...] = ()

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
        """Parameters used by one token: those of its experts, and all others."""
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
        """Whether each of the model's layers in a layer of the stack has experts."""
        arrays = [array for array in self.parameters if array.part == stack]
        count = next(one.model_layers for one in self.stacks if one.name == stack)
        prefixes = {array.name.partition("/")[0] for array in arrays}
        own = [f"layer_{i}" for i in range(count) if f"layer_{i}" in prefixes]
        paths = [f"{name}/" for name in own] or [""]
        found = tuple(
            any("experts" in array.axes for array in arrays if array.name.startswith(path))
            for path in paths
        )
        return found * (count // len(paths))


UNREAD = "unread"
"""In place of a result's checkpoint name: no backward pass reads the result."""
REPEATED = "repeated"
"""In place of a result's checkpoint name: every remat policy recomputes the result."""


@dataclass(frozen=True)
class Matmul:
    """A matmul with weights in the layers of a stack."""

    inputs: int  # contracted features
    outputs: tuple[tuple[int, int], ...]  # of each weight: heads or features, and features of each
    over: str = ""  # the dimension divided over tensor: "outputs", "inputs", "tokens" or none
    names: tuple[str, ...] = ()  # of `layout.BLOCK_TENSORS`, one for each weight's result
    tokens: float = 1.0  # rows for each token of the stack's sequence
    share: float = 1.0  # of the stack's layers
    # Checkpoint names by which remat policies save each weight's result, "" without one; () means
    # `names`.
    saved_as: tuple[str, ...] = ()

    @property
    def of_shared(self) -> bool:
        """Whether the matmul is a shared expert's."""
        return any(name.startswith("shared") for name in self.names)

    @property
    def features(self) -> int:
        """Features of all outputs."""
        return sum(units * each for units, each in self.outputs)

    @property
    def flops(self) -> float:
        """FLOPs per token, in a mean layer of the stack."""
        return 2.0 * self.inputs * self.features * self.tokens * self.share


@dataclass(frozen=True)
class AttentionCall:
    """A call of `Kernels.attend` in the layers of a stack."""

    heads: int
    kv_heads: int
    features: int  # of a query and of a key
    value_features: int
    keys: float  # attended by a query, on average
    length: float  # of the sequence of keys, or twice a causal mean
    share: float = 1.0  # of the stack's layers
    source_len: int = 0  # of the other sequence, in cross attention

    @property
    def flops(self) -> float:
        """FLOPs per token, in a mean layer of the stack."""
        return 2.0 * self.heads * (self.features + self.value_features) * self.keys * self.share


@dataclass(frozen=True)
class RoutedExperts:
    """The routed experts in the layers of a stack."""

    count: int
    choices: int  # of a token
    width: int  # input features
    hidden: int
    gated: bool
    share: float = 1.0  # of the stack's layers
    read: bool = False  # whether a backward pass reads the experts' output
    router_width: int = 0  # the router's input features; 0 is `width`

    @property
    def router_flops(self) -> float:
        """The router's FLOPs per token, in a mean layer of the stack."""
        return 2.0 * (self.router_width or self.width) * self.count * self.share

    @property
    def flops(self) -> float:
        """FLOPs of router and chosen experts per token, in a mean layer of the stack."""
        each = 2.0 * (2 + self.gated) * self.width * self.hidden
        return self.choices * each * self.share + self.router_flops


@dataclass(frozen=True)
class StackWork:
    """The forward pass of a stack's mean layer, per token of its sequence."""

    name: str
    num_layers: int  # of the model
    seq_len: int
    matmuls: tuple[Matmul, ...]
    attention: tuple[AttentionCall, ...]
    experts: tuple[RoutedExperts, ...] = ()
    branches: float = 0.0  # residual branches: attention, MLP
    sent: float = 0.0  # branches whose input is gathered and output scattered over tensor
    rotated: float = 0.0  # features of queries and keys with RoPE
    opened: float = 0.0  # output features of an MLP's first matrices, without routed experts
    hidden: float = 0.0  # input features of its last one
    read: float = 0.0  # input features of matmuls
    made: float = 0.0  # output features of matmuls
    scan_flops: float = 0.0  # of state-space mixers
    scan_bytes: float = 0.0

    @property
    def flops(self) -> float:
        """FLOPs of a mean layer, per token."""
        return self.matmul_flops + self.scan_flops + sum(one.flops for one in self.attention)

    @property
    def side(self) -> "StackWork":
        """The side network's part of the matmuls, those over tokens."""
        side = tuple(one for one in self.matmuls if one.over == "tokens")
        return replace(self, matmuls=side, experts=(), attention=())

    @property
    def matmul_flops(self) -> float:
        """`flops` without attention over keys and without scans."""
        return sum(one.flops for one in (*self.matmuls, *self.experts))

    def recomputed(self, remat: str) -> float:
        """FLOPs of a mean layer, per token, recomputed under a policy of `Layout.remat`."""
        policy = parse_remat(remat)
        core = 0.0 if "attention" in policy.names else sum(one.flops for one in self.attention)
        return core + self.recomputed_matmuls(policy.names if policy.by_names else None)

    def recomputed_matmuls(self, names: Collection[str] | None) -> float:
        """FLOPs of matmuls recomputed under a policy by names; experts have up, gate and down.

        Args:
          names: saved results; None saves all with names.
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
    """A model's compute and parameter counts, for the planner."""

    stacks: tuple[StackWork, ...]
    layers: int  # layers of the output sequence, over which the work of all stacks is averaged
    seq_len: int  # of the output sequence
    width: int  # of the residual stream
    vocab: int  # padding rows included
    block_params: int
    routed_params: int  # the routed experts' part of `block_params`
    embedding_params: int
    head_params: int
    tied: bool
    logit_flops: float = 0.0  # per token, forward, in all passes of the head; without padding
    head_passes: int = 1
    transform_flops: float = 0.0  # of the head's other matmuls, per token
    extra_predictions: int = 0  # MTP layers with a head pass each, on the head's rank
    adapted: bool = False  # whether all parameters except adapters are frozen
    side: bool = False  # whether of the layers only a side network has a backward pass

    def share(self, stack: StackWork) -> float:
        """The ratio of a stack's layers to `layers`."""
        return stack.num_layers / self.layers

    def tokens(self, stack: StackWork) -> float:
        """The ratio of a stack's sequence length to the output's."""
        return stack.seq_len / self.seq_len

    def alone(self, stack: StackWork) -> "ModelWork":
        """One stack as a separate model, with the parameter counts of the whole."""
        return replace(self, stacks=(stack,), layers=stack.num_layers, seq_len=stack.seq_len)

    @property
    def head_flops(self) -> float:
        """FLOPs of the head per sequence, forward."""
        return self.seq_len * (self.logit_flops + self.transform_flops)

    @property
    def layer_flops(self) -> float:
        """FLOPs of all layers per sequence, forward."""
        return sum(one.num_layers * one.seq_len * one.flops for one in self.stacks)

    @property
    def sequence_flops(self) -> float:
        """FLOPs per sequence, forward, MTP included."""
        layers = 1 + self.extra_predictions / self.layers
        passes = 1 + self.extra_predictions / max(1, self.head_passes)
        return layers * self.layer_flops + passes * self.head_flops

    @property
    def training_flops(self) -> float:
        """FLOPs per sequence, forward and backward: the numerator of MFU.

        Two per multiply-add, in matmuls and in attention over the attended keys. Norms,
        activations, softmax and lookups are not counted. Each of a matmul's two gradients costs as
        much as the matmul; a frozen weight of a model with adapters has no gradient, and nor has
        the input of one next to a side network, except the head's.
        """
        if self.side:
            return self.sequence_flops + self.head_flops + 2 * self._side_flops
        frozen = self.head_flops if self.adapted else 0.0
        for one in self.stacks if self.adapted else ():
            trained = sum(each.flops for each in one.matmuls if each.over == "tokens")
            frozen += one.num_layers * one.seq_len * (one.matmul_flops - trained)
        return 3 * self.sequence_flops - frozen

    @property
    def _side_flops(self) -> float:
        """FLOPs of the side network's matmuls per sequence, forward."""
        return sum(one.num_layers * one.seq_len * one.side.matmul_flops for one in self.stacks)

    def hardware_flops(self, remat: str, recomputed: float = 0.0) -> float:
        """`training_flops` plus recompute: the numerator of HFU.

        Args:
          remat: the layout's policy.
          recomputed: the fraction of a pipeline's passes that R operations recompute in full.
        """
        return self.training_flops + (recomputed * self.layer_flops or self.recomputed_flops(remat))

    def recomputed_flops(self, remat: str) -> float:
        """FLOPs per sequence recomputed under a remat policy, without results that no backward pass
        needs, such as that of an MLP's last matmul. With a side network they are those of the
        first of its two matrices."""
        if self.side:
            return self._side_flops / 2 * (parse_remat(remat).by_names or remat == "save_matmuls")
        return sum(one.num_layers * one.seq_len * one.recomputed(remat) for one in self.stacks)

    def head_cost(self, layers: int) -> float:
        """FLOPs of the head relative to a mean layer, by which layers are split into stages.

        Args:
          layers: of all stacks; one may be several of the model's (`StackTrace.model_layers`).
        """
        return self.head_flops * layers / self.layer_flops

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0 for a dense model."""
        return max((one.count for stack in self.stacks for one in stack.experts), default=0)

    @property
    def source_len(self) -> int:
        """The length of other sequences that stacks read, such as an encoder's; 0 without one."""
        read = [call.source_len for one in self.stacks for call in one.attention]
        others = [one.seq_len for one in self.stacks if one.seq_len != self.seq_len]
        return max((*read, *others), default=0)


@dataclass(frozen=True)
class SavedValue:
    """An array of a layer saved by one pass for another, before a layout divides it."""

    held: str  # "" in the layers' loop; in a pipeline the name of a buffer, such as "residual_b"
    per: str  # "sequence", or "row" of experts
    spread: str
    """Sharding over tensor: "stream" by tokens, "gathered" by tokens and gathered for a matmul,
    "features" by features, "whole" replicated."""
    heads: int
    features: int  # of a head, or of a token
    entries: float  # for each sequence or row
    element_bytes: int
    count: float = 1.0  # of a mean layer

    @property
    def num_bytes(self) -> float:
        """Bytes per sequence or row, summed over ranks of tensor without replication."""
        return self.count * self.entries * self.heads * self.features * self.element_bytes


@dataclass(frozen=True)
class StackSaved:
    """Values saved by a mean layer of a stack."""

    name: str
    length: int  # tokens of a sequence
    width: int  # features of the stream
    rows: float  # of experts, per token, with all experts on a rank
    values: tuple[SavedValue, ...]
    live: float = 0.0
    """For custom models, the peak bytes of values computed in a layer's backward pass, per
    sequence."""
    live_forward: float = 0.0
    heads: int = 0  # of attention, in such a layer
    attended: int = 0  # features of its queries, keys and values together


@dataclass(frozen=True)
class SavedValues:
    """Values saved by the layers of a model under one remat policy."""

    stacks: tuple[StackSaved, ...]
    extra_bytes: int = 0  # of a sequence's `Batch.extras`
    table_ids: tuple[int, ...] = ()  # of a sequence, for each table

    def of(self, stack: str) -> StackSaved:
        """The saved values of a stack."""
        return next(one for one in self.stacks if one.name == stack)
