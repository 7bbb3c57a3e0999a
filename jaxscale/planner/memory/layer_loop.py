"""The sizes of a step's layer loop, without JAX: see `training.layers`, `sharding.zero`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxscale.config import Config, zero_stage
from jaxscale.config.model import is_own_family
from jaxscale.ops.sizes import HIDING_TOKENS
from jaxscale.planner.memory.at_rest import trained_parameters
from jaxscale.planner.memory.experts import hidden_features, rows_of_token
from jaxscale.planner.memory.saved_values import layer_bytes, values_of
from jaxscale.planner.memory.zero_traffic import reduces_last
from jaxscale.sharding.model_trace import Ints, ParamShape, Rows, StackTrace, itemsize, select
from jaxscale.training.tracing.traces import model_trace


@dataclass(frozen=True)
class LayerLoop:
    """How a step loops over the layers of a stack: see `training.layers` and
    `pipeline.executor`."""

    part: str  # the stack, as in `ParamShape`
    turn: tuple[bool, ...]  # of each layer of the model in one of the stack: whether with experts
    num_layers: int  # of the stack
    length: int  # tokens of a sequence
    width: int  # features of each that layers hand on
    heads: int  # of attention
    is_custom: bool  # whether its layers are those of a custom model
    tokens: Ints  # of a micro-batch on a device, of all tensor ranks together
    rows: Ints  # of the experts of a rank, that tokens of a micro-batch are in; 0: no experts
    source: Ints  # tokens that its cross attention reads, counted likewise; 0 where it has none
    group: Ints  # micro-batches of an accumulation group: one loop over the layers
    single: Any  # whether a step computes each layer's gradients once
    repeats: Any  # whether groups are a loop: see `training.gradients`
    gathers: Any  # whether weights are all-gathered in every pass
    keeps: Any  # whether they are once, and kept
    scatters: Any  # whether gradients are reduce-scattered per visit
    reduces: Any  # whether gradients are reduced per visit, or in the last one
    beside: Any  # whether the last layer is outside the loop
    early: Any  # whether a TPU's reductions of the head end before the layers' gradients
    early_layers: Any  # and those of a layer before the gradients of the one below
    compute: int  # bytes of an element
    accumulated: int  # bytes of an element
    capacity: Ints  # layers of a chunk of the stack, on a rank of a pipeline
    weights: Ints  # elements of a layer, whole over fsdp and context
    gradients: Ints  # elements of those weights that are trained
    unreduced: Ints  # elements of a layer's gradient, which the compiler reduces over context
    sums: Ints  # elements of the gradient accumulators of the whole model
    reduced: Ints  # of the layers' gradients that the last of several visits leaves beside them

    @classmethod
    def of(cls, config: Config, rows: Rows, stack: StackTrace, capacity: Ints = 0) -> "LayerLoop":
        """Of a config whose layout is resolved.

        Args:
          rows: layers of each stack that a device allocates.
          capacity: in a pipeline, those of one chunk of this stack.
        """
        layout, count = config.layout, config.layout.num_groups
        whole = layout.pipeline == 1
        several, stage, single = layout.zero_ranks > 1, layout.zero_stage, (count == 1) & whole
        keeps, gathers = (
            several & rule(stage) for rule in (zero_stage.keeps, zero_stage.gathers_each_pass)
        )
        scatters = several & zero_stage.leaves_shards(stage, single)
        shards = layout.batch_shards * layout.microbatches * layout.context
        data = config.data
        saved, custom = values_of(config, "full").of(stack.name), is_own_family(config.model.family)
        length = saved.length
        crosses = stack.name == "decoder" and config.model.num_encoder_layers
        source = data.seq_len if crosses else 0
        tokens = data.global_batch_size * length // shards
        rows_here, turn = 0, model_trace(config.model).experts_of(stack.name)
        if any(turn):
            known = config.model.num_experts > 0
            each = rows_of_token(config.model, layout, length) if known else saved.rows
            rows_here = tokens * each
        sums = sum(
            count * gradient_elements(config, part, scatters) for part, count in rows.items()
        )
        # With a single visit the gradients of embedding and head need no accumulator.
        sums = sums + select(single, 0, gradient_elements(config, "embed head", scatters))
        # The compiler reduces over context in each visit, whatever the engine does over fsdp.
        late = zero_stage.scatters_last(stage) & np.logical_not(single)
        sums = sums // select(late, layout.context, 1)
        early = (layout.fsdp > 1) & zero_stage.scatters(stage) & whole
        remat, group = layout.remat_policy, layout.microbatches // count
        recomputes = remat.by_names & (not remat.names)
        shards_left = sum(
            count * gradient_elements(config, part, True) for part, count in rows.items()
        )
        gradients = gradient_elements(config, stack.name)
        return cls(
            part=stack.name,
            turn=turn,
            num_layers=stack.num_layers,
            length=length,
            width=saved.width,
            heads=saved.heads if custom else config.model.num_heads,
            is_custom=custom,
            tokens=tokens,
            rows=rows_here,
            source=data.global_batch_size * source // shards,
            group=group,
            single=single,
            repeats=np.asarray(count) - keeps - reduces_last(layout) > 1,
            gathers=gathers,
            keeps=keeps,
            scatters=scatters,
            reduces=scatters | (whole & (layout.batch_shards > 1)),
            beside=(gathers | (keeps & single) | layout.offloads("activations")) & whole,
            early=early,
            early_layers=early & recomputes & (group == 1) & (tokens >= HIDING_TOKENS),
            compute=itemsize(config.model.compute_dtype),
            accumulated=itemsize(config.optimizer.accumulation_dtype),
            capacity=capacity,
            weights=elements(config, stack.name),
            gradients=gradients,
            unreduced=gradients // select(zero_stage.shards_state(stage), layout.context, 1),
            sums=sums,
            reduced=select(late & several & whole, shards_left),
        )

    @property
    def has_experts(self) -> bool:
        """Whether a layer of the stack has some."""
        return any(self.turn)

    @property
    def layers_of_turn(self) -> list["LayerLoop"]:
        """The same for each layer of the model in one of the stack, as if it were the only one."""
        rows = {True: self.rows, False: 0}
        return [replace(self, turn=(one,), rows=rows[one]) for one in self.turn]


def elements(config: Config, parts: str, over_fsdp: Any = False) -> Ints:
    """Parameters of some parts of the model on a device; of a stack those of one layer."""
    return _elements(config, model_trace(config.model).parameters, parts, over_fsdp)


def gradient_elements(config: Config, parts: str, over_fsdp: Any = False) -> Ints:
    """Likewise of the gradients: frozen parameters have none."""
    return _elements(config, trained_parameters(config), parts, over_fsdp)


def _elements(
    config: Config, arrays: Sequence[ParamShape], parts: str, over_fsdp: Any = False
) -> Ints:
    return sum(
        array.shard_size(config.layout, over_fsdp=over_fsdp)
        for array in arrays
        if array.part in parts.split()
    )


def head_elements(config: Config, over_fsdp: Any = False) -> Ints:
    """Parameters that the head reads: a tied one reads the embedding."""
    return _head_elements(config, model_trace(config.model).parameters, over_fsdp)


def head_gradient_elements(config: Config, over_fsdp: Any = False) -> Ints:
    """Of their gradients."""
    return _head_elements(config, trained_parameters(config), over_fsdp)


def _head_elements(config: Config, arrays: Sequence[ParamShape], over_fsdp: Any) -> Ints:
    borrowed = model_trace(config.model).borrowed
    read = [one for one in arrays if one.part == "head" or one.path in borrowed]
    return sum(one.shard_size(config.layout, over_fsdp=over_fsdp) for one in read)


def mlp_weights(config: Config, part: str = "layers") -> Ints:
    """Parameters of a layer's MLP, not sharded over fsdp."""
    return _mlp_weights(config, model_trace(config.model).parameters, part)


def mlp_gradients(config: Config, part: str) -> Ints:
    """Of their gradients."""
    return _mlp_weights(config, trained_parameters(config), part)


def _mlp_weights(config: Config, arrays: Sequence[ParamShape], part: str) -> Ints:
    return sum(
        array.shard_size(config.layout, over_fsdp=False)
        for array in arrays
        if array.part == part and {"mlp", "expert_mlp", "shared_mlp"} & set(array.axes)
    )


def stream_bytes(config: Config, loop: LayerLoop) -> Ints:
    """The residual stream of a micro-batch."""
    return loop.compute * loop.tokens * loop.width // config.layout.tensor


def message_bytes(config: Config, loops: Sequence[LayerLoop]) -> Ints:
    """What ranks of a pipeline send each other: the streams of all stacks, and biases that layers
    share."""
    streams = sum(stream_bytes(config, loop) for loop in loops)
    if config.model.relative_bias != "shared":
        return streams
    heads = config.model.num_heads // config.layout.tensor_columns
    return streams + max(loops[0].compute, 4) * config.model.relative_buckets * heads


def hidden_values(config: Config, loop: LayerLoop) -> Ints:
    """Of the MLPs or experts of a layer, for a micro-batch."""
    model = config.model
    if not loop.has_experts:
        return loop.tokens * model.d_ff
    return loop.tokens * model.shared_d_ff + loop.rows * hidden_features(model)


def layer_saved_bytes(config: Config, loop: LayerLoop) -> Ints:
    """Saved activations of a layer and a micro-batch."""
    return layer_bytes(config, loop, config.layout.remat)


def recomputed_bytes(config: Config, loop: LayerLoop) -> Ints:
    """Of a layer, what its backward pass recomputes."""
    if not config.layout.remat_policy.by_names:
        return 0
    return layer_bytes(config, loop, "none") - layer_saved_bytes(config, loop)
