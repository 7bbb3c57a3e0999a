"""The sizes of a step's layer loop, without JAX: see `training.layers`, `sharding.zero`."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxscale.config import Config, zero_stage
from jaxscale.config.layout import Layout
from jaxscale.config.model import by_liveness
from jaxscale.config.model.quantised_base import BLOCKS
from jaxscale.config.remat_policy import parse_remat
from jaxscale.ops.sizes import HIDING_TOKENS
from jaxscale.planner.memory.at_rest import trained_parameters
from jaxscale.planner.memory.experts import hidden_features, rows_of_token
from jaxscale.sharding.model_trace import (
    Ints,
    ParamShape,
    Rows,
    StackSaved,
    StackTrace,
    itemsize,
    select,
    stored_bytes,
)
from jaxscale.training.tracing.traces import model_trace, saved_values


@dataclass(frozen=True)
class Shards:
    """Parameters of a model, or its trained ones, in a layout; sizes are elements on a device, of a
    stack those of one layer. Weights stored quantised are gathered so, and count as elements of the
    compute type with as many bytes."""

    arrays: tuple[ParamShape, ...]
    borrowed: tuple[str, ...]  # by the head: see `ModelTrace`
    layout: Layout
    compute: int  # bytes of an element of the compute type

    def elements(self, parts: str, over_fsdp: Any = False) -> Ints:
        """Elements of some parts of the model."""
        return self._sum(lambda one: one.part in parts.split(), over_fsdp)

    def head_elements(self, over_fsdp: Any = False, *, tied: bool = True) -> Ints:
        """Elements that the head reads on a rank, of a sliced one those of a slice: with `tied`
        the embedding where it is tied."""
        return sum(
            -(-one.shard_size(self.layout, over_fsdp=over_fsdp) // self._slices(one))
            for one in self.arrays
            if one.part == "head" or (tied and one.path in self.borrowed)
        )

    def _slices(self, one: ParamShape) -> Ints:
        return self.layout.head_ranks if "vocab" in one.axes else 1

    def mlp_elements(self, part: str = "layers") -> Ints:
        """Elements of a layer's MLP, not sharded over fsdp."""
        mlp = {"mlp", "expert_mlp", "shared_mlp"}
        return self._sum(lambda one: one.part == part and bool(mlp & {*one.axes}), False)

    def expert_elements(self, part: str) -> Ints:
        """Elements of a layer's experts, not sharded over fsdp."""
        return self._sum(lambda one: one.part == part and "experts" in one.axes, False)

    def _sum(self, chosen: Callable[[ParamShape], bool], over_fsdp: Any) -> Ints:
        return sum(self._gathered(one, over_fsdp) for one in self.arrays if chosen(one))

    def dequantised(self, part: str) -> Ints:
        """Elements of a layer's weights that are stored quantised, as its block reads them."""
        return sum(
            one.shard_size(self.layout, over_fsdp=False)
            for one in self.arrays
            if one.part == part and one.dtype in BLOCKS
        )

    def _gathered(self, one: ParamShape, over_fsdp: Any) -> Ints:
        size = one.shard_size(self.layout, over_fsdp=over_fsdp)
        return stored_bytes(one.dtype, size) // self.compute if one.dtype in BLOCKS else size


@dataclass(frozen=True)
class LayerLoop:
    """Sizes of a step's loop over the layers of a stack: see `training.layers` and
    `pipeline.executor`."""

    model: Any  # its settings
    layout: Layout
    parameters: Shards
    trained: Shards
    lengths: tuple[int, int]  # tokens of a sequence that the model reads, and of its output
    part: str  # the stack, as in `ParamShape`
    period: tuple[bool, ...]  # of each layer of a period: whether it has experts
    num_layers: int  # of the stack
    length: int  # tokens of a sequence
    width: int  # features of each in the residual stream
    heads: int  # of attention
    sequences: Ints  # of a micro-batch on a device, of all tensor and context ranks together
    tokens: Ints  # of a micro-batch, or its segment, on a device, of all tensor ranks together
    rows: Ints  # of the experts of a rank, that tokens of a micro-batch are in; 0: no experts
    source: Ints  # tokens that its cross attention reads, as `tokens`; 0: no cross attention
    group: Ints  # micro-batches of an accumulation group: one loop over the layers
    single: Any  # whether a step computes each layer's gradients once
    repeats: Any  # whether groups are a loop: see `training.gradients`
    gathers: Any  # whether weights are all-gathered in every pass
    keeps: Any  # whether they are gathered once, and kept
    scatters: Any  # whether gradients are reduce-scattered per visit
    reduces: Any  # whether gradients are reduced per visit, or in the last one
    last_outside: Any  # whether the last layer is outside the loop
    early: Any  # whether a TPU's reductions of the head end before the layers' gradients
    early_layers: Any  # and those of a layer before the gradients of the one below
    accumulated: int  # bytes of an element
    capacity: Ints  # layers of a chunk of the stack, on a rank of a pipeline
    sums: Ints  # elements of the gradient accumulators of the whole model
    reduced: Ints  # shards of layers' gradients from the last of several visits, next to sums

    @classmethod
    def of(
        cls, config: Config, layout: Layout, rows: Rows, stack: StackTrace, capacity: Ints = 0
    ) -> "LayerLoop":
        """The loop of a config in another layout.

        Args:
          layout: resolved; one, or a batch of them.
          rows: layers of each stack that a device allocates.
          capacity: in a pipeline, layers of one chunk of this stack.
        """
        model, data, count = config.model, config.data, layout.num_groups
        trace, lengths = model_trace(model), (data.seq_len, data.output_len)
        parameters, trained = (
            Shards(arrays, trace.borrowed, layout, itemsize(model.compute_dtype))
            for arrays in (trace.parameters, trained_parameters(model, config.optimizer.groups))
        )
        whole = layout.pipeline == 1
        several, stage, single = layout.zero_ranks > 1, layout.zero_stage, (count == 1) & whole
        keeps, gathers = (
            several & rule(stage) for rule in (zero_stage.keeps, zero_stage.gathers_each_pass)
        )
        scatters = several & zero_stage.leaves_shards(stage, single)
        splits = layout.batch_shards * layout.microbatches
        shards = splits * layout.context * layout.segments
        saved = saved_values(model, *lengths, "full", piped=False).of(stack.name)
        length, custom = saved.length, by_liveness(model)
        crosses = stack.name == "decoder" and model.num_encoder_layers
        source = data.seq_len if crosses else 0
        tokens = data.global_batch_size * length // shards
        rows_here, period = 0, trace.experts_of(stack.name)
        if any(period):
            known = model.num_experts > 0
            each = rows_of_token(model, layout, length) if known else saved.rows
            rows_here = tokens * each
        sums = sum(count * trained.elements(part, scatters) for part, count in rows.items())
        # With a single visit the gradients of embedding and head need no accumulator.
        outer = trained.elements("embed", scatters) + trained.head_elements(scatters, tied=False)
        sums = sums + select(single, 0, outer)
        # The compiler reduces over context in each visit, whatever the engine does over fsdp.
        late = zero_stage.scatters_last(stage) & np.logical_not(single)
        sums = sums // select(late, layout.context, 1)
        early = (layout.fsdp * layout.expert > 1) & zero_stage.scatters(stage) & whole
        remat, group = layout.remat_policy, layout.microbatches // count
        recomputes = remat.by_names & (not remat.names)
        shards_left = sum(count * trained.elements(part, True) for part, count in rows.items())
        return cls(
            *(model, layout, parameters, trained, lengths),
            part=stack.name,
            period=period,
            num_layers=stack.num_layers,
            length=length,
            width=saved.width,
            heads=saved.heads if custom else model.num_heads,
            sequences=data.global_batch_size // splits,
            tokens=tokens,
            rows=rows_here,
            source=data.global_batch_size * source // shards,
            group=group,
            single=single,
            repeats=np.asarray(count) - keeps - zero_stage.reduces_last(layout) > 1,
            gathers=gathers,
            keeps=keeps,
            scatters=scatters,
            reduces=scatters | (whole & (layout.batch_shards > 1)),
            last_outside=(gathers | (keeps & single) | layout.offloads("activations")) & whole,
            early=early,
            early_layers=early & recomputes & (group == 1) & (tokens >= HIDING_TOKENS),
            accumulated=itemsize(config.optimizer.accumulation_dtype),
            capacity=capacity,
            sums=sums,
            reduced=select(late & several & whole, shards_left),
        )

    @property
    def is_custom(self) -> bool:
        """Whether the temporaries of its layers are found by liveness, as a custom model's."""
        return by_liveness(self.model)

    @property
    def compute(self) -> int:
        """Bytes of an element in the compute type."""
        return itemsize(self.model.compute_dtype)

    @functools.cached_property
    def weights(self) -> Ints:
        """Elements of a layer, not sharded by ZeRO."""
        return self.parameters.elements(self.part)

    @functools.cached_property
    def gradients(self) -> Ints:
        """Elements of those weights that are trained."""
        return self.trained.elements(self.part)

    @property
    def context_shards(self) -> Ints:
        """Ranks of context over which gradients are sharded before the step reduces them."""
        return select(zero_stage.shards_state(self.layout.zero_stage), self.layout.context, 1)

    @property
    def unreduced(self) -> Ints:
        """Elements of a layer's gradient, which the compiler reduces over context."""
        return self.over_context(self.gradients)

    def over_context(self, elements: Ints) -> Ints:
        """Elements of gradients, reduced over context."""
        return elements // self.context_shards

    def saved(self, remat: str, *, piped: bool = False) -> StackSaved:
        """Values that a layer saves under a policy; in a pipeline whose table recomputes passes,
        without a policy. With segments some wait in the stack's memory."""
        if piped and parse_remat(remat).kept_passes is not None:
            remat = "none"
        in_parts = piped and bool(np.all(self.layout.segments > 1))
        how: dict[str, bool] = {"piped": piped, "in_parts": in_parts}
        return saved_values(self.model, *self.lengths, remat, **how).of(self.part)

    @property
    def has_experts(self) -> bool:
        """Whether a layer of the stack has experts."""
        return any(self.period)

    @property
    def layers_of_period(self) -> list["LayerLoop"]:
        """A loop for each layer of a period, as if it were the only one."""
        rows = {True: self.rows, False: 0}
        return [replace(self, period=(one,), rows=rows[one]) for one in self.period]


def stream_bytes(loop: LayerLoop) -> Ints:
    """Bytes of the residual stream of a micro-batch."""
    return loop.compute * loop.tokens * loop.width // loop.layout.tensor


def message_bytes(loops: Sequence[LayerLoop]) -> Ints:
    """Bytes that pipeline ranks send each other: the streams of all stacks, and biases that layers
    share."""
    streams = sum(stream_bytes(loop) for loop in loops) * (1 + (loops[0].model.side_width > 0))
    model, layout = loops[0].model, loops[0].layout
    if model.relative_bias != "shared":
        return streams
    heads = model.num_heads // layout.tensor_columns
    return streams + max(loops[0].compute, 4) * model.relative_buckets * heads


def hidden_values(loop: LayerLoop) -> Ints:
    """Hidden values of the MLPs or experts of a layer, for a micro-batch."""
    model = loop.model
    if not loop.has_experts:
        return loop.tokens * model.d_ff
    return loop.tokens * model.shared_d_ff + loop.rows * hidden_features(model)
