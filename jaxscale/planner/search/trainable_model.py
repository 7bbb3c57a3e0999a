"""A model that this version trains, given by a config: the engine's own checks and exact memory.

`SizedModel` is the counterpart for a model given by its sizes alone, with the same interface.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

from jaxscale.config import Config, zero_stage
from jaxscale.config.layout import OFFLOADS, Layout
from jaxscale.config.model import is_own_family
from jaxscale.config.model.quantised_base import BLOCKS
from jaxscale.config.remat_policy import parse_remat
from jaxscale.pipeline.partition import StackLayers
from jaxscale.planner.memory.at_rest import host_state, host_totals
from jaxscale.planner.memory.step import step_memory
from jaxscale.planner.memory.terms import Memory
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.search import sized_model
from jaxscale.planner.search.muon_matrices import muon_matrices
from jaxscale.planner.tables.pipeline_slots import RankBuffers, stack_layers
from jaxscale.sharding.layout_checks import (
    check_divides,
    check_overlap,
    check_pipeline_gather,
    check_ring,
    check_sequence,
    check_sequence_chunks,
    check_sliced_head,
    check_spread_attention,
    check_table_rows,
    check_table_sequences,
    check_tensor_rows,
    check_ulysses,
)
from jaxscale.sharding.model_trace import Ints, ModelWork, itemsize
from jaxscale.sharding.rules import (
    REPLICATED_WEIGHTS,
    WEIGHTS,
    check_blocks,
    mesh_axes,
    with_whole_kv_heads,
)
from jaxscale.training.tracing.traces import model_trace, model_work

REMATS = (
    "none",
    "full",
    "save_matmuls",
    "save_all_but_attention",
    "save:query,key,value,attention",
    "save:query,key,value",
    "save:query,key,value,attention,attention_out",
    "offload:query,key,value,attention_out",
)
"""Policies that the search tries; lists of names allow many more."""

NO_SPREAD = "model.attention attends within one device"

ENCODER_NOTE = (
    "Seconds of an encoder with a decoder are not validated: no measured step was compared. Their "
    "memory was compared with compiled steps on GPUs, without tensor ranks and layered "
    "accumulation; --prove compiles the plans shown."
)
"""Caveat of a plan for an encoder-decoder."""

EXPERT_NOTE = (
    "Seconds of a model with experts are not validated: no measured step of ours was compared. "
    "Their memory was compared with compiled steps on GPUs, without context ranks; --prove "
    "compiles the plans shown."
)

CUSTOM_NOTE = (
    "Temporaries of a custom model's layers are predicted by liveness, and its seconds are not "
    "validated; --prove compiles the plans shown."
)

FROZEN_NOTE = (
    "Seconds, MFU and HFU count the weight gradients of parameters that optimizer.groups freeze, "
    "which a step leaves out."
)

ADAPTER_NOTE = (
    "MFU and HFU leave out of that the weight gradients of the frozen weights, which a step does "
    "not compute."
)

SPARSE_NOTE = (
    "Seconds are of a step that prunes, each optimizer.sparsity_every of them; MFU counts pruned "
    "weights, with which matmuls still compute."
)

SIDE_NOTE = (
    "MFU and HFU count a forward pass, and the backward pass of the side network and through the "
    "head. Temporaries are predicted by liveness, and seconds are not validated; --prove compiles "
    "the plans shown."
)


@dataclass(frozen=True)
class TrainableModel:
    """A config's model and batch."""

    config: Config  # its layout is ignored

    batch_reason = "data.global_batch_size does not split"

    @property
    def note(self) -> str:
        """Caveats that are printed with the plan."""
        notes = [ENCODER_NOTE] * self._has_encoder
        notes += [EXPERT_NOTE] * (not notes and self.config.model.num_experts > 0)
        notes += [CUSTOM_NOTE] * is_own_family(self.config.model.family)
        notes += [SIDE_NOTE if self.work.side else ADAPTER_NOTE] * self.work.adapted
        notes += [SPARSE_NOTE] * self.config.optimizer.prunes
        notes += [FROZEN_NOTE] * any(group.frozen for group in self.config.optimizer.groups)
        return " ".join(notes)

    @property
    def _has_encoder(self) -> bool:
        return self.work.source_len > 0

    @property
    def _excludes(self) -> Mapping[str, str]:
        """Axes that have no formula, and why."""
        return {"context": sized_model.NO_CROSS_CONTEXT} if self._has_encoder else {}

    def parallelism(self, layout: Layout) -> Parallelism:
        """A layout, or a batch of them, as the cost formulas read it."""
        model = self.config.model
        muon, rows = self.config.optimizer.name == "muon", model_trace(model).stack_layers
        on_host = host_state(model, self.config.optimizer, layout, rows)
        return Parallelism.of(
            layout,
            self.sequences,
            matmul="fp8" if model.matmul_dtype else "bfloat16",
            casts_weights=itemsize(model.param_dtype) > itemsize(model.compute_dtype),
            gradient_bytes=itemsize(self.config.optimizer.reduced_in),
            frozen=model.adapts,
            pruning_reads=self.config.optimizer.pruning_reads,
            router_groups=model.router_groups,
            router_groups_kept=model.router_groups_kept,
            host_moments=on_host.moments,
            host_weights=sum(on_host.weights.values()),
            whole_matrices=muon_matrices(model, self.config.optimizer.groups) if muon else (),
        )

    @functools.cached_property
    def work(self) -> ModelWork:
        """The model's work, as the cost formulas read it."""
        data = self.config.data
        return model_work(self.config.model, data.seq_len, data.output_len)

    @property
    def causal(self) -> bool:
        """Whether tokens attend to those before them only."""
        return self.config.model.causal

    @property
    def num_active_params(self) -> int:
        """Parameters that one token uses."""
        choices = [one.choices for stack in self.work.stacks for one in stack.experts]
        trace = model_trace(self.config.model)
        return trace.num_active_params(choices[0]) if choices else trace.num_params

    @property
    def num_params(self) -> int:
        return model_trace(self.config.model).num_params

    @property
    def sequences(self) -> int:
        """Per step."""
        return self.config.data.global_batch_size

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, an encoder's and its decoder's together."""
        return self.config.data.tokens_per_step

    @property
    def run_tokens(self) -> float:
        """Tokens of the whole run."""
        data = self.config.data
        return data.examples_of(self.config.run.steps) * (data.seq_len + data.target_len)

    @functools.cached_property
    def head_cost(self) -> float:
        """FLOPs of the head over a layer's."""
        return self.work.head_cost(sum(stack.num_layers for stack in self.stacks))

    @functools.cached_property
    def stacks(self) -> tuple[StackLayers, ...]:
        """The layers that a pipeline divides."""
        return stack_layers(self.config.model)

    @property
    def has_tensor_rows(self) -> bool:
        """Whether rows of tensor are tried."""
        model = self.config.model
        plain = not (self._has_encoder or model.num_experts or model.kv_rank)
        return plain and not is_own_family(model.family)

    @property
    def remats(self) -> tuple[str, ...]:
        """Policies to try; with a side network there is nothing to recompute."""
        if self.config.model.side_width:
            return ("none",)
        if self._has_encoder:
            return sized_model.REMATS
        named = {name for stack in model_trace(self.config.model).stacks for name in stack.tensors}
        return tuple(one for one in REMATS if named.issuperset(parse_remat(one).names))

    @property
    def offloads(self) -> tuple[str, ...]:
        """Offload policies to try."""
        return sized_model.OFFLOADS if self._has_encoder else OFFLOADS

    @property
    def flops_per_token(self) -> float:
        """Training FLOPs per token, without recompute, attention over visible keys only."""
        return self.work.training_flops * self.sequences / self.step_tokens

    def hardware_flops_per_token(self, remat: str, recomputed: float) -> float:
        """Training FLOPs per token, with recompute; `recomputed` is the share of a pipeline's
        passes that R operations recompute."""
        return self.work.hardware_flops(remat, recomputed) * self.sequences / self.step_tokens

    def with_layout(self, layout: Layout) -> Config:
        """The config of a run with a layout.

        Raises:
          ValueError: the model does not support the layout's remat policy or axes.
        """
        return dataclasses.replace(self.config, layout=layout)

    def check_policies(self, layout: Layout) -> None:
        """Refuses a remat policy or an axis that the model does not support.

        Raises:
          ValueError: the engine's message, or that there is no formula.
        """
        if said := self._unknown(layout):
            raise ValueError(said)
        self._check_head(layout)
        self.with_layout(Layout(pipeline=layout.pipeline, expert=layout.expert, remat=layout.remat))

    def _check_head(self, layout: Layout) -> None:
        slices_head = model_trace(self.config.model).slices_head
        check_sliced_head(layout, self.config.model, slices_head=slices_head)

    def refusal(self, layout: Layout) -> tuple[str, str]:
        """Why the engine refuses a layout, as a short reason and its message; "" where it does
        not. Also why it has no formula."""
        if said := self._unknown(layout):
            return said.partition(": ")[2].partition(";")[0], said
        try:
            config = self.with_layout(layout)
        except ValueError as error:
            return "not available in this version", str(error)
        layout, model, data = config.layout, config.model, config.data
        batch = data.global_batch_size
        rows = {table.name: table.rows for table in model_trace(model).tables}
        checks = {
            self.batch_reason: functools.partial(check_divides, layout, batch),
            sized_model.NO_HALVES: functools.partial(check_overlap, layout, batch),
            sized_model.NO_SHARDS: functools.partial(check_pipeline_gather, layout),
            sized_model.NO_RING: functools.partial(check_ring, layout),
            NO_SPREAD: functools.partial(check_spread_attention, layout, model.attention),
            sized_model.NO_HEADS: functools.partial(check_ulysses, layout, model),
            "data.seq_len does not split": functools.partial(check_sequence, layout, data),
            "needs whole sequences": functools.partial(check_sequence_chunks, layout, model),
            "tables need whole sequences": functools.partial(check_table_sequences, layout, rows),
            "rows of a table do not divide": functools.partial(check_table_rows, layout, rows),
            "not available in this version": functools.partial(check_tensor_rows, layout, model),
            sized_model.NO_SLICES: functools.partial(self._check_head, layout),
            "a dimension of the model does not divide": functools.partial(check_parameters, config),
        }
        for reason, check in checks.items():
            try:
                check()
            except ValueError as error:
                return reason, str(error)
        return "", ""

    def _unknown(self, layout: Layout) -> str:
        """Refusal of a setting that has no formula; "" where all have one."""
        for axis, reason in self._excludes.items():
            if getattr(layout, axis) > 1:
                size = getattr(layout, axis)
                return f"layout.{axis} = {size}: {reason}; set layout.{axis} = 1"
        if not self._has_encoder:
            return ""
        for name, known in (("remat", self.remats), ("offload", self.offloads)):
            if name == "remat" and layout.remat_policy.kept_passes:
                continue  # "full" for some passes
            if getattr(layout, name) not in known:
                return (
                    f"layout.{name} = {getattr(layout, name)!r}: there is no formula for its FLOPs "
                    f"in an encoder-decoder; it can be {', '.join(known)}"
                )
        return ""

    def host_totals(self, layouts: Layout) -> list[Ints]:
        """The values of `layout.offload_bytes` that are whole arrays, each an int or int [N]."""
        rows = model_trace(self.config.model).stack_layers
        return host_totals(self.config.model, self.config.optimizer, layouts, rows)

    def memory(self, layouts: Layout, buffers: RankBuffers | None, back_end: str) -> Memory:
        """Memory of a device; fields are int, or int [N].

        Args:
          buffers: of a pipeline's busiest rank; None without a pipeline.
        """
        buffers = buffers or RankBuffers.whole(self.config.model)
        return step_memory(self.config, back_end, layout=layouts, own_host=True, buffers=buffers)


def check_parameters(config: Config) -> None:
    """Refuses axes over which a parameter does not divide, as the engine does when it shards them.

    Raises:
      ValueError: names the dimension and the nearest size of the axis.
    """
    layout = config.layout
    rules = WEIGHTS if zero_stage.shards_state(layout.zero_stage) else REPLICATED_WEIGHTS
    for array in model_trace(config.model).parameters:
        axes = with_whole_kv_heads(array.axes, array.shape, layout.sizes)
        known = {**rules, **dict(array.own_rules)}
        mesh_axes(axes, known, layout.sizes, array.shape, name=array.path)
        if array.dtype in BLOCKS:
            size, dim = array.shape[array.block_dim], array.block_dim
            check_blocks(axes, known, layout.sizes, size, dim, array.dtype, array.path)
