"""Layout of a run over devices: mesh axes, schedule, remat, and the checks without devices."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxscale.choices import (
    check_at_least,
    check_choice,
    check_kind,
    check_whole,
    nearest_divisors,
)
from jaxscale.config import zero_stage
from jaxscale.config.remat_policy import RematPolicy, parse_remat
from jaxscale.config.schedule_spec import AUTO, ScheduleSpec, parse_lengths, parse_schedule
from jaxscale.formatting import changed_fields

MESH_AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
"""In order from the slowest links to the fastest."""

TENSOR_ROWS = "tensor_rows"
"""With `layout.tensor_rows` > 1 the axis tensor of a mesh becomes two: this one, and "tensor" with
the columns. This one is before context, which then has one rank: XLA requires nested manual axes in
the order of the mesh, and in kernels this is the outer one (`training.kernels`)."""

MANUAL_AXES = ("pipeline", "data", "fsdp", "expert")
"""Axes of `shard_map`, whose collectives are explicit in the code."""

AUTOMATIC_AXES = (TENSOR_ROWS, "context", "tensor")
"""Axes whose collectives XLA inserts, from sharding constraints."""

ACCUMULATIONS = ("sequential", "layered")
PIPELINE_GATHERS = ("chunk", "layer")
LAST, SLICED = HEADS = ("last", "sliced")
"""Ranks of a pipeline that compute the head: those of the last stage, or all, a slice each."""

RING = "ring"
ULYSSES = "ulysses"
"""The context method with attention within a rank, by any kernel."""

CONTEXT_METHODS = (RING, "gather", ULYSSES)
OFFLOADS = ("none", "optimizer", "activations", "optimizer,activations")


READ_WITH = {
    "pipeline": (
        "schedule",
        "virtual_stages",
        "sequence_chunks",
        "segment_lengths",
        "pipeline_gather",
        "head",
    ),
    "expert": ("expert_nodes", "overlap_experts"),
    "context": ("context_method",),
    "tensor": ("tensor_rows", "overlap_tensor"),
    "microbatches": ("accumulation",),
}
"""Setting -> the settings that are read only if it is above 1."""

EXCLUDES = (
    ("expert", "tensor_rows"),
    ("context", "tensor_rows"),
    ("pipeline", "overlap_tensor"),
    ("pipeline", "unroll_layers"),
    ("expert", "unroll_layers"),
    ("tensor_rows", "overlap_tensor"),
)
"""Pairs of settings: the second is refused if the first is above 1."""

MOST_PARTS = 64
"""Parts of a sequence whose segments differ in length: each has columns in a pipeline's program."""

OVERLAPS = ("overlap_experts", "overlap_tensor")
"""Settings that split work into parts, to overlap communication with compute."""


@dataclass(frozen=True)
class Layout:
    """Parallelism of a run: sizes of the mesh axes, and how a step is executed on them.

    One axis may be -1: it takes the remaining devices. docs/layouts.md describes each setting.

    Attributes:
      pipeline: pipeline ranks.
      data: replicas (data parallelism); data x fsdp is hybrid sharding.
      fsdp: ranks that `zero_stage` shards over, together with those of `expert` and `context`.
      expert: expert-parallel ranks.
      context: ranks that share each sequence.
      tensor: tensor-parallel ranks.
      tensor_rows: divides `tensor` into rows x columns: a rank has d_model / rows features of the
        residual stream, and a row's ranks share the hidden dimension between two matmuls (arXiv
        2305.13525). 1 shards each weight by its hidden dimension only.
      expert_nodes: nodes of the ranks of expert. Above 1 a token crosses the network once to each
        node with some of its experts, and the links inside the node to each of their ranks.
      zero_stage: 0 shards nothing, 1 the parameters at rest and the optimizer's state, 2 also
        gradients, 3 also the weights in use (ZeRO, arXiv 1910.02054).
      microbatches: micro-batches of a step; their gradients are summed.
      accumulation: "sequential", or without a pipeline "layered" (arXiv 2106.02679).
      schedule: pipeline schedule; parsed as `schedule_spec`.
      virtual_stages: chunks of a pipeline rank; 0 is the fewest that the schedule can have.
      sequence_chunks: segments of each sequence, which follow each other through a pipeline.
      segment_lengths: tokens of each segment, such as "3072,2048,2048,1024"; "" is equal lengths.
      pipeline_gather: "chunk" keeps the gathered weights and the summed gradients of a chunk;
        "layer" gathers and reduces those of one layer at a time: less memory, more traffic.
      head: "last" computes the head, loss and gradients, on the rank of the last stage; "sliced" on
        all pipeline ranks at once, each with its slice of the vocabulary (arXiv 2411.05288);
        "auto" the planner's faster.
      context_method: how keys reach queries of other ranks: "ring" (in a pipeline an even number
        of ranks, which exchange in pairs), "gather", or "ulysses" (all-to-alls to whole sequences
        of some of the heads).
      overlap_experts: exchanges the tokens of half of the sequences at a time, so that all-to-alls
        overlap with matmuls.
      overlap_tensor: splits the gathers and scatters over `tensor` into ring steps that overlap
        with matmuls.
      unroll_layers: unrolls the loop over layers. With a `zero_stage` below 3, weights that no rank
        gathers are then cast to the compute type once a step.
      remat: residuals that a layer saves for its backward pass; parsed as `remat_policy`. "keep:4"
        in a pipeline: a rank saves all residuals of up to four passes through a chunk at a time,
        and recomputes the others.
      offload: "optimizer" and "activations" in host memory; in a pipeline these are what layers
        save between the operations of a pass.
      offload_bytes: bytes of a device's state in host memory between steps, rounded up to whole
        arrays: moments, then weights of the layers, experts first (`sharding.host_arrays`). The
        layer loop prefetches such weights a layer at a time.

    Raises:
      ValueError: settings that contradict each other; names the one to change.

    Examples:
      >>> layout = jaxscale.Layout(data=2, fsdp=4, remat="full")
      >>> layout.num_devices
      8
    """

    pipeline: int = 1
    data: int = -1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    tensor_rows: int = 1
    expert_nodes: int = 1
    zero_stage: int = 3
    microbatches: int = 1
    accumulation: str = "sequential"
    schedule: str = "1f1b"
    virtual_stages: int = 0
    sequence_chunks: int = 1
    segment_lengths: str = ""
    pipeline_gather: str = "chunk"
    head: str = LAST
    context_method: str = "ring"
    overlap_experts: bool = False
    overlap_tensor: bool = False
    unroll_layers: bool = False
    remat: str = "none"
    offload: str = "none"
    offload_bytes: int = 0

    def __repr__(self) -> str:
        return changed_fields(self)

    def __post_init__(self) -> None:
        self._check_types()
        self._check_axes()
        self._check_tensor_rows()
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"layout.zero_stage = {self.zero_stage}; it can be 0, 1, 2 or 3")
        check_at_least(
            "layout", self, microbatches=1, expert_nodes=1, sequence_chunks=1, offload_bytes=0
        )
        if self.expert > 0 and self.expert % self.expert_nodes:
            nearest = nearest_divisors(self.expert, self.expert_nodes)
            raise ValueError(
                f"layout.expert_nodes = {self.expert_nodes} does not divide layout.expert = "
                f"{self.expert}; the nearest that does is layout.expert_nodes = {nearest}"
            )
        check_choice("layout.accumulation", self.accumulation, ACCUMULATIONS)
        check_choice("layout.pipeline_gather", self.pipeline_gather, PIPELINE_GATHERS)
        check_choice("layout.head", self.head, (*HEADS, AUTO))
        check_choice("layout.context_method", self.context_method, CONTEXT_METHODS)
        check_choice("layout.offload", self.offload, OFFLOADS)
        self._check_offload_bytes()
        parse_schedule(self.schedule)  # raises, as parse_remat does
        self._check_segment_lengths()
        parse_remat(self.remat)
        if self.virtual_stages < 0:
            raise ValueError(
                f"layout.virtual_stages = {self.virtual_stages}; at least 1, or 0 for the fewest "
                "of the schedule"
            )
        for axis in ("pipeline", "expert"):
            if self.unroll_layers and (size := getattr(self, axis)) > 1:
                raise ValueError(
                    f"layout.unroll_layers = True with layout.{axis} = {size} is not available in "
                    "this version; set layout.unroll_layers = False"
                )
        if self.pipeline > 1:
            self._check_pipeline()
        elif self.pipeline == 1 and self.remat_policy.kept_passes:
            raise ValueError(
                f"layout.remat = {self.remat!r} is for a pipeline, and layout.pipeline = 1; set "
                "layout.remat = 'full', or save:TENSOR,... for some tensors of each layer"
            )

    def _check_axes(self) -> None:
        for axis in MESH_AXES:
            size = getattr(self, axis)
            if size < 1 and size != -1:
                raise ValueError(
                    f"layout.{axis} = {size}; at least 1, or -1 for the remaining devices"
                )
        free = [axis for axis in MESH_AXES if getattr(self, axis) == -1]
        if len(free) > 1:
            raise ValueError(
                f"layout.{free[0]} and layout.{free[1]} are both -1; only one axis can take the "
                "remaining devices"
            )

    def _check_types(self) -> None:
        """Refuses values of other types, such as 8 / 2 for a size."""
        for field in dataclasses.fields(self):
            name, value = f"layout.{field.name}", getattr(self, field.name)
            if isinstance(field.default, bool):
                check_kind(name, value, bool, "give True or False")
            elif isinstance(field.default, str):
                check_kind(name, value, str, f"give text, such as {field.default!r}")
            else:
                check_whole(name, value)

    def _check_offload_bytes(self) -> None:
        """Refuses settings that exclude arrays of the state in host memory."""
        if not self.offload_bytes:
            return
        given = f"layout.offload_bytes = {self.offload_bytes}"
        if self.offloads("optimizer"):
            raise ValueError(
                f"{given} with layout.offload = {self.offload!r}: it moves moments first; set "
                "layout.offload = 'none' or 'activations', or layout.offload_bytes = 0"
            )
        for setting, value, instead in (
            ("pipeline", self.pipeline if self.pipeline > 1 else 0, 1),
            ("unroll_layers", self.unroll_layers, False),
        ):
            if value:
                raise ValueError(
                    f"{given} with layout.{setting} = {value} is not available in this version; "
                    f"set layout.{setting} = {instead}, or layout.offload_bytes = 0"
                )

    def _check_segment_lengths(self) -> None:
        """Refuses lengths of another number of segments, and lengths without a common part."""
        lengths, name = parse_lengths(self.segment_lengths), "layout.segment_lengths"
        if not lengths:
            return
        if len(lengths) != self.sequence_chunks:
            raise ValueError(
                f"{name} = {self.segment_lengths!r} has {len(lengths)} lengths for "
                f"layout.sequence_chunks = {self.sequence_chunks}; give as many as there are "
                "segments, or '' for equal lengths"
            )
        if self.slices_head:
            raise ValueError(
                f"{name} = {self.segment_lengths!r} with layout.head = 'sliced' is not available "
                "in this version; set layout.head = 'last', or layout.segment_lengths = ''"
            )
        if sum(self.segment_parts) > MOST_PARTS:
            raise ValueError(
                f"{name} = {self.segment_lengths!r}: their largest common divisor is "
                f"{math.gcd(*lengths)}, in {sum(self.segment_parts)} parts of which a sequence "
                f"would be computed; at most {MOST_PARTS}: set multiples of a larger number"
            )

    def _check_tensor_rows(self) -> None:
        """Refuses rows that do not divide tensor, and settings that exclude rows."""
        rows = self.tensor_rows
        check_at_least("layout", self, tensor_rows=1)
        if self.tensor > 0 and self.tensor % rows:
            raise ValueError(
                f"layout.tensor_rows = {rows} does not divide layout.tensor = {self.tensor}; the "
                f"nearest that does is layout.tensor_rows = {nearest_divisors(self.tensor, rows)}"
            )
        if rows == 1:
            return
        if self.overlap_tensor:
            raise ValueError(
                f"layout.overlap_tensor = True with layout.tensor_rows = {rows} is not available "
                "in this version; set layout.overlap_tensor = False, or layout.tensor_rows = 1"
            )
        for axis, why in (
            ("context", "ranks of context need whole heads of each token"),
            ("expert", "experts have their columns over tensor alone"),
        ):
            if getattr(self, axis) != 1:
                raise ValueError(
                    f"layout.tensor_rows = {rows} with layout.{axis} = {getattr(self, axis)} is "
                    f"not available in this version ({why}); set layout.{axis} = 1, or "
                    "layout.tensor_rows = 1"
                )

    def _check_pipeline(self) -> None:
        """Refuses settings that a pipeline does not support."""
        if self.accumulation == "layered":
            raise ValueError(
                f"layout.accumulation = 'layered' with layout.pipeline = {self.pipeline}: the "
                "schedule defines the order of layers and micro-batches; set "
                "layout.accumulation = 'sequential' and layout.schedule = 'breadth_first', the "
                "same idea over ranks"
            )
        if self.sequence_chunks > 1 and self.context > 1 and self.context_method != "gather":
            raise ValueError(
                f"layout.context_method = {self.context_method!r} with layout.sequence_chunks = "
                f"{self.sequence_chunks} is not available in this version: it needs whole "
                "sequences; set layout.context_method = 'gather', or layout.sequence_chunks = 1"
            )
        if self.context > 1 and self.context % 2 and self.context_method == RING:
            raise ValueError(
                f"layout.context_method = 'ring' with layout.pipeline = {self.pipeline} needs an "
                "even number of ranks, which exchange in pairs, and layout.context = "
                f"{self.context}; set an even layout.context, or layout.context_method = 'gather' "
                "or 'ulysses'"
            )
        if self.overlap_tensor:
            # All devices must take part in each permutation of its ring, and pipeline ranks are at
            # different operations.
            raise ValueError(
                f"layout.overlap_tensor = True with layout.pipeline = {self.pipeline} is not "
                "available in this version; set layout.overlap_tensor = False"
            )
        if self.remat_policy.offloads:
            raise ValueError(
                f"layout.remat = {self.remat!r} with layout.pipeline = {self.pipeline} is not "
                "available in this version; set layout.offload = 'activations', which moves all "
                "saved activations, or layout.remat = 'full' or another policy without 'offload:'"
            )
        if self.offloads("activations") and self.remat_policy.kept_passes == 0:
            raise ValueError(
                f"layout.offload = {self.offload!r}, layout.remat = 'full' with layout.pipeline = "
                f"{self.pipeline}: a rank saves only the inputs of its stages, which stay on the "
                "device; set layout.remat = 'none' or 'keep:2', or layout.offload = 'none'"
            )

    @property
    def schedule_spec(self) -> "ScheduleSpec":
        """`schedule`, parsed."""
        return parse_schedule(self.schedule)

    @property
    def remat_policy(self) -> "RematPolicy":
        """`remat`, parsed."""
        return parse_remat(self.remat)

    @property
    def segments(self) -> int:
        """Parts of a sequence that are computed one after the other in a pipeline, all of one
        length: its segments or, with `segment_lengths`, parts of these."""
        parts = sum(self.segment_parts) or self.sequence_chunks
        return 1 + (self.pipeline > 1) * (parts - 1)

    @property
    def segment_parts(self) -> tuple[int, ...]:
        """The parts of each segment, in the largest length that divides all `segment_lengths`; ()
        for segments of one length, each a part."""
        lengths = parse_lengths(self.segment_lengths)
        return tuple(length // math.gcd(*lengths) for length in lengths)

    @property
    def head_ranks(self) -> int:
        """Pipeline ranks that share the head's columns."""
        return self.pipeline if self.head == SLICED else 1

    @property
    def slices_head(self) -> bool:
        """Whether each pipeline rank computes a slice of the head."""
        return self.head_ranks > 1

    @property
    def num_groups(self) -> int:
        """Accumulation groups: the forward and backward passes over the layers in a step without a
        pipeline."""
        return 1 if self.accumulation == "layered" else self.microbatches

    @property
    def group_size(self) -> int:
        """Micro-batches of an accumulation group."""
        return self.microbatches // self.num_groups

    @property
    def single_visit(self) -> bool:
        """Whether a step computes the gradients of each layer once."""
        return self.pipeline == 1 and self.num_groups == 1

    @property
    def least_devices(self) -> int:
        """The product of the fixed sizes, which divides the number of devices."""
        return math.prod(size for size in self.settings.values() if size != -1)

    @property
    def auto(self) -> bool:
        """Whether the planner has yet to choose this layout."""
        return self.schedule == AUTO

    @property
    def undecided(self) -> tuple[str, ...]:
        """The settings that the planner has yet to choose in this layout."""
        return tuple(name for name in ("remat", "head") if getattr(self, name) == AUTO)

    @property
    def unread(self) -> set[str]:
        """The settings that nothing reads, such as those of an axis of size 1."""
        return unread_settings(vars(self))

    @property
    def settings(self) -> dict[str, int]:
        """Axis -> size as set, in mesh order."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> size in the mesh of a resolved layout, in mesh order. Rows of tensor are a
        separate axis, and "tensor" has the columns."""
        if self.tensor_rows == 1:
            return self.settings
        sizes = {**self.settings, TENSOR_ROWS: self.tensor_rows, "tensor": self.tensor_columns}
        return {axis: sizes[axis] for axis in (*MANUAL_AXES, *AUTOMATIC_AXES)}

    @property
    def tensor_columns(self) -> int:
        """Tensor ranks in a row."""
        return self.tensor // self.tensor_rows

    @property
    def axes_text(self) -> str:
        """The axes above 1 as text: "fsdp 8 x tensor 4 (2 rows x 2 columns)"."""
        used = [f"{axis} {size}" for axis, size in self.settings.items() if size != 1]
        if self.tensor_rows > 1:
            used[-1] += f" ({self.tensor_rows} rows x {self.tensor_columns} columns)"
        return " x ".join(used)

    @property
    def num_devices(self) -> int:
        """Devices of a resolved layout."""
        return math.prod(self.settings.values())

    def offloads(self, what: str) -> bool:
        """Whether "optimizer" or "activations" are stored in host memory."""
        return what in self.offload.split(",")

    @property
    def offloads_residuals(self) -> bool:
        """Whether residuals, all or the tensors in `remat`, are stored in host memory."""
        return self.offloads("activations") or self.remat_policy.offloads

    @property
    def zero_ranks(self) -> int:
        """Ranks that a ZeRO stage shards over: fsdp x expert x context."""
        return self.fsdp * self.expert * self.context

    @property
    def allows_ring(self) -> bool:
        """Whether ranks of context can have a ring: any number of them, in a pipeline an even one,
        and whole sequences."""
        pairs = (self.context % 2 == 0) & (self.segments == 1)
        return (self.pipeline == 1) | (self.context == 1) | pairs

    @property
    def casts_once(self) -> bool:
        """Whether a step casts the matrices of its layers to the compute type once.

        Not for gathered weights, whose copies the ZeRO stage decides, and not in a loop over
        layers, which would copy the cast weights of each layer.
        """
        kept = zero_stage.keeps(self.zero_stage) & (self.zero_ranks == 1)
        return self.unroll_layers & (zero_stage.replicates(self.zero_stage) | kept)

    @property
    def batch_shards(self) -> int:
        """Shards of the global batch: data x fsdp x expert."""
        return self.data * self.fsdp * self.expert


def unread_settings(sizes: Mapping[str, Any]) -> set[str]:
    """The settings that are not read, or are refused, with these values of the others."""
    unread = {name for key, names in READ_WITH.items() if sizes[key] == 1 for name in names}
    return unread | {name for key, name in EXCLUDES if sizes[key] != 1}


def resolve_sizes(layout: Layout, num_devices: int) -> Layout:
    """Replaces -1 by the number of remaining devices.

    Raises:
      ValueError: the sizes do not multiply to `num_devices`, or the planner has yet to choose them.
    """
    if layout.auto:
        raise ValueError(
            "layout = 'auto' is chosen when a run starts; here set a layout, such as that of "
            "python -m jaxscale.plan --write FILE"
        )
    free = [axis for axis, size in layout.settings.items() if size == -1]
    fixed = layout.least_devices
    named = " x ".join(f"{axis} {size}" for axis, size in layout.settings.items() if size > 1)
    there = f"there {'is' if num_devices == 1 else 'are'} {num_devices}"
    if free:
        if num_devices % fixed:
            raise ValueError(
                f"the layout ({named}) needs a multiple of {fixed} devices and {there}; change one "
                "of the sizes"
            )
        return dataclasses.replace(layout, **{free[0]: num_devices // fixed})
    if fixed != num_devices:
        raise ValueError(
            f"the layout ({named or 'every axis 1'}) needs {fixed} devices and {there}; change a "
            "size, or set layout.data = -1 to use them all"
        )
    return layout
