"""Search space: all layouts of a model on a cluster that the engine accepts, in batches.

String settings (schedule, remat, offload, accumulation) are enumerated one by one; the integer
settings combined with them are arrays. Layouts are refused by the engine's own checks (the model's,
`Layout`'s, and the requirements of a schedule), and counted by reason.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.choices import did_you_mean, divisors, nearest_divisors
from jaxscale.config import Config
from jaxscale.config.layout import (
    ACCUMULATIONS,
    LAST,
    MESH_AXES,
    OVERLAPS,
    PIPELINE_GATHERS,
    RING,
    SLICED,
    Layout,
)
from jaxscale.config.remat_policy import parse_remat
from jaxscale.config.schedule_spec import AUTO, parse_lengths, parse_schedule
from jaxscale.hardware import GPU_MEMORY_FRACTION, check_matmul_units, gpu_memory_fraction
from jaxscale.pipeline.partition import StackLayers, has_layers
from jaxscale.pipeline.stages import open_stages
from jaxscale.pipeline_schedules.shipped import NAMES, SHIPPED, find_schedule, is_foreign
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.memory.at_rest import check_param_groups
from jaxscale.planner.memory.terms import Memory
from jaxscale.planner.model.layout_batch import LayoutBatch
from jaxscale.planner.search.sized_model import NO_HALVES, NO_RING, SizedModel
from jaxscale.planner.search.trainable_model import TrainableModel
from jaxscale.planner.tables.pipeline_slots import most_slots
from jaxscale.planner.tables.table_makespan import TableSpec
from jaxscale.sharding.model_trace import ModelWork

CPU = "CPU"
"""Name of a cluster of virtual devices on this machine's CPU."""

FORMULA_MARGIN = 0.05
"""Share of device memory that a plan leaves for errors of the formulas."""

MEMORY_FRACTION = {
    "gpu": GPU_MEMORY_FRACTION - FORMULA_MARGIN,
    "tpu": 1 - FORMULA_MARGIN,
    "cpu": 0.6,
}
"""Share of device memory that a plan may use; on a CPU other processes run, too."""

HOST_MEMORY_BYTES = 100e9
"""Host memory assumed for each device: 256 GB on DGX H100, 112 GB on TPU v5p hosts, part of which
the input pipeline needs."""


def back_end_of(cluster: Cluster) -> str:
    """XLA back end of a cluster: "gpu", "tpu" or "cpu"."""
    if cluster.name == CPU:
        return "cpu"
    return "tpu" if cluster.torus else "gpu"


def fraction_here(back_end: str) -> float:
    """Share of the memory of a device here that a plan may use: of a GPU, less than JAX takes.

    Raises:
      ValueError: the environment names no share of a GPU's memory.
    """
    if back_end == "gpu":
        return gpu_memory_fraction() - FORMULA_MARGIN
    return MEMORY_FRACTION[back_end]


@dataclass(frozen=True)
class Query:
    """A planning problem: a model and its batch, a cluster, and settings that are fixed."""

    model: Config | SizedModel  # a config's layout is ignored
    cluster: Cluster
    pins: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # fixed fields of a Layout
    memory_bytes: float = 0.0  # limit per device; 0 for that of the hardware
    fills_host: bool = False  # whether the search chooses `layout.offload_bytes`

    @functools.cached_property
    def planned_model(self) -> TrainableModel | SizedModel:
        """The model with its checks and its memory.

        Raises:
          ValueError: no run would train it.
        """
        if isinstance(self.model, Config):
            self._check_matmuls(self.model.model.matmul_dtype)
            check_param_groups(self.model.model, self.model.optimizer.groups)
        return TrainableModel(self.model) if isinstance(self.model, Config) else self.model

    def _check_matmuls(self, dtype: str) -> None:
        if dtype == "int8":
            raise ValueError(
                "model.matmul_dtype = 'int8': there are no formulas for matmuls of which a third "
                "stays in model.compute_dtype; plan with model.matmul_dtype = '' and compile the "
                "layout with python -m jaxscale.aot"
            )
        if dtype and self.cluster.name != CPU:
            check_matmul_units(dtype, self.cluster.chip.generation, self.cluster.name)

    @property
    def back_end(self) -> str:
        """XLA back end: "gpu", "tpu" or "cpu"."""
        return back_end_of(self.cluster)

    @property
    def limit_bytes(self) -> float:
        """Memory that a plan may use on a device."""
        return self.memory_bytes or self.cluster.memory_bytes * MEMORY_FRACTION[self.back_end]

    def fits_device(self, needs: Memory) -> Any:
        """Whether one layout, or each of a batch, fits in device memory."""
        return needs.peak <= self.limit_bytes

    def fits_host(self, needs: Memory) -> Any:
        """Whether the offloaded arrays fit in host memory."""
        return needs.on_host <= HOST_MEMORY_BYTES

    @property
    def can_fill_host(self) -> bool:
        """Whether a search may choose `layout.offload_bytes`."""
        pins = self.pins
        separate = self.back_end != "cpu" and self.cluster.chip.host_bytes_per_second > 0
        given = "offload_bytes" in pins or "optimizer" in pins.get("offload", "")
        return separate and not given and pins.get("pipeline", 1) == 1

    @property
    def work(self) -> ModelWork:
        """The model's work, as the cost formulas read it."""
        return self.planned_model.work


def _cannot_overlap(layout: Layout, microbatch: int) -> str:
    """Why a layout's overlaps have nothing to overlap; "" where they have."""
    if layout.overlap_experts and (microbatch == 1 or layout.expert == 1):
        return NO_HALVES
    return NO_RING if layout.overlap_tensor and layout.tensor == 1 else ""


def enumerate_sizes(
    query: Query, rejected: collections.Counter, messages: dict[str, str]
) -> LayoutBatch | None:
    """Axis sizes, ZeRO stages and micro-batches that the model and its batch allow; None where
    there are none. Refusals are counted in `rejected`, with one message for each reason in
    `messages`."""
    rows, model = [], query.planned_model
    given = {name: query.pins.get(name, False) for name in (*OVERLAPS, "unroll_layers")}
    given |= {name: query.pins.get(name, 1) for name in ("sequence_chunks", "expert_nodes")}
    given["segment_lengths"] = query.pins.get("segment_lengths", "")
    method = query.pins.get("context_method", "gather")  # which accepts every mesh that "ring" does
    for sizes in mesh_shapes(query.cluster.num_devices, query.pins, model.work.num_experts):
        mesh: dict[str, Any] = dict(zip(MESH_AXES, sizes))
        for stage, across in itertools.product(
            _stages(query.pins, mesh["fsdp"] * mesh["expert"] * mesh["context"]),
            _pinned(query.pins, "tensor_rows", grid_rows(model, mesh)),
        ):
            # No other setting that could be refused.
            settings = {**mesh, "tensor_rows": across, "zero_stage": stage, **given}
            try:
                layout = Layout(**settings, context_method=method)
            except ValueError as error:
                reason, message = "not available in this version", str(error)
            else:
                reason, message = model.refusal(layout)
            if reason:
                rejected[reason] += 1
                messages.setdefault(reason, message)
                continue
            batch = model.sequences // layout.batch_shards
            for count in _pinned(query.pins, "microbatches", divisors(batch)):
                if batch % count:
                    rejected[model.batch_reason] += 1
                elif reason := _cannot_overlap(layout, batch // count):
                    rejected[reason] += 1
                else:
                    rows.append((*sizes, across, stage, count))
    if not rows:
        return None
    columns = np.array(rows).T
    names = *MESH_AXES, "tensor_rows", "zero_stage", "microbatches"
    return LayoutBatch(**dict(zip(names, columns)), **given)


def grid_rows(model: TrainableModel | SizedModel, sizes: Mapping[str, int]) -> list[int]:
    """Numbers of tensor rows to try: no more than columns, since the values between two matmuls,
    which all rows repeat and add up, are wider than the stream.

    Args:
      sizes: of the mesh axes.
    """
    alone = sizes["context"] == sizes["expert"] == 1
    if not (alone and model.has_tensor_rows) or model.work.num_experts:
        return [1]
    return [n for n in divisors(sizes["tensor"]) if n * n <= sizes["tensor"]]


def mesh_shapes(
    num_devices: int, pins: Mapping[str, Any] | None = None, experts: int = 0
) -> Iterator[tuple[int, ...]]:
    """Sizes of the mesh axes, in mesh order; that of expert divides the number of experts."""
    pins = pins or {}

    def rest(axes: Sequence[str], devices: int) -> Iterator[tuple[int, ...]]:
        if not axes:
            if devices == 1:
                yield ()
            return
        for size in _pinned(pins, axes[0], _sizes(axes[0], devices, experts)):
            if size >= 1 and devices % size == 0:
                yield from ((size, *more) for more in rest(axes[1:], devices // size))

    yield from rest(MESH_AXES, num_devices)


def _sizes(axis: str, devices: int, experts: int) -> list[int]:
    """Sizes that an axis can have."""
    return divisors(math.gcd(devices, experts or 1) if axis == "expert" else devices)


def _pinned(pins: Mapping[str, Any], name: str, allowed: Sequence) -> Sequence:
    return [pins[name]] if name in pins else allowed


def _stages(pins: Mapping[str, Any], ranks: int) -> Sequence[int]:
    """ZeRO stages to try: with one rank of fsdp, expert and context all are equivalent."""
    return _pinned(pins, "zero_stage", range(4) if ranks > 1 else [3])


def enumerate_options(query: Query) -> Iterator[dict[str, Any]]:
    """String settings of a batch of layouts, and "pipelined": first without a pipeline, then with
    one; options that differ in the schedule alone are consecutive."""
    pins, remats, offloads = query.pins, query.planned_model.remats, query.planned_model.offloads
    if query.back_end == "cpu" or not query.cluster.chip.host_bytes_per_second:
        # No separate host memory, or the rate of its link is not known.
        remats, offloads = [one for one in remats if not one.startswith("offload:")], ["none"]
    remats, offloads = _pinned(pins, "remat", remats), _pinned(pins, "offload", offloads)
    methods = _pinned(pins, "context_method", (RING, "gather"))
    pinned = {"offload_bytes": pins.get("offload_bytes", 0)}
    for remat, offload, accumulation, method in itertools.product(
        remats, offloads, _pinned(pins, "accumulation", ACCUMULATIONS), methods
    ):
        yield {
            "remat": remat,
            "offload": offload,
            **pinned,
            "accumulation": accumulation,
            "context_method": method,
            "pipelined": False,
        }
    gathers = _pinned(pins, "pipeline_gather", PIPELINE_GATHERS)
    for remat, offload, gather, method, (schedule, chunks) in itertools.product(
        remats, offloads, gathers, methods, tuple(_schedules(pins))
    ):
        yield {
            "remat": remat,
            "offload": offload,
            **pinned,
            "schedule": schedule,
            "virtual_stages": chunks,
            "pipeline_gather": gather,
            # Slices of the head are tried in the fastest of these only (`sliced_heads`).
            "head": pins.get("head", LAST),
            "accumulation": pins.get("accumulation", "sequential"),
            "context_method": method,
            "pipelined": True,
        }


def _schedules(pins: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Schedules, each with the numbers of virtual stages that are tried."""
    splits = pins.get("sequence_chunks", 1) > 1
    runs = [one for one in SHIPPED if one.splits_sequences == splits]
    fused = (f"{schedule.name}:fused" for schedule in runs if not schedule.splits_backward)
    for text in _pinned(pins, "schedule", [*(schedule.name for schedule in runs), *fused]):
        schedule = find_schedule(parse_schedule(text).name)
        for chunks in _pinned(pins, "virtual_stages", schedule.searched_virtual_stages):
            if chunks >= min(schedule.searched_virtual_stages) and schedule.allows(chunks):
                yield text, chunks


def combine(
    query: Query,
    sizes: LayoutBatch | None,
    options: Mapping[str, Any],
    rejected: collections.Counter,
) -> LayoutBatch | None:
    """Layouts that combine integer and string settings; None where there are none."""
    if sizes is None:
        return None
    options = dict(options)
    pipelined = options.pop("pipelined")
    several, context = sizes.microbatches > 1, np.asarray(sizes.context) > 1
    wanted = (np.asarray(sizes.pipeline) > 1) == pipelined
    # With whole sequences, or one micro-batch, these settings make no difference.
    wanted &= context | (options["context_method"] == query.pins.get("context_method", RING))
    if options["context_method"] == RING:
        wanted &= sizes.allows_ring
    if not pipelined:
        wanted &= several | (
            options["accumulation"] == query.pins.get("accumulation", "sequential")
        )
    elif options["pipeline_gather"] == "layer":
        # Elsewhere there is nothing to gather or to scatter.
        wanted &= (np.asarray(sizes.zero_ranks) > 1) & (np.asarray(sizes.zero_stage) > 1)
    if not wanted.any():
        return None
    try:
        axes = {"pipeline": 2, "context": 1 + int((context & wanted).any())} if pipelined else {}
        layout = Layout(**axes, **options)
        query.planned_model.check_policies(layout)
    except ValueError as error:
        # The message is "settings: reason; what to change".
        reason = str(error).partition(";")[0].rpartition(": ")[2]
        rejected[reason] += int(wanted.sum())
        return None
    layouts = dataclasses.replace(sizes.take(wanted), **options)
    return _runnable(query, layouts, rejected) if pipelined else layouts


def _runnable(
    query: Query, layouts: LayoutBatch, rejected: collections.Counter
) -> LayoutBatch | None:
    """Layouts whose schedule supports their ranks, micro-batches and layers."""
    spec, v, k = layouts.schedule_spec, int(layouts.virtual_stages), layouts.sequence_chunks
    schedule = find_schedule(spec.name)
    # Layouts that differ in other axes have the same pipeline: each is checked once.
    ranks, base = np.asarray(layouts.pipeline), int(np.max(layouts.microbatches)) + 1
    keys, index, count = np.unique(
        ranks * base + layouts.microbatches, return_inverse=True, return_counts=True
    )
    pipelines, stacks = [divmod(key, base) for key in keys.tolist()], query.planned_model.stacks
    serves = np.array([schedule.serves(p, m, v, k) for p, m in pipelines])
    enough = np.array([has_layers(stacks, p * v) for p, _ in pipelines])
    rejected["the schedule does not support the ranks and micro-batches"] += int(
        count[~serves].sum()
    )
    rejected["fewer layers than pipeline stages"] += int(count[serves & ~enough].sum())
    good = serves & enough
    if keep := layouts.remat_policy.kept_passes:
        parts = layouts.segment_parts
        more = np.array(
            [
                ok
                and most_slots(TableSpec(spec.name, p, m, v, spec.fused, None, k, parts))[
                    "residual_w"
                ]
                > keep
                for ok, (p, m) in zip(good, pipelines)
            ]
        )
        rejected["keeps at least as many passes as are in flight"] += int(count[good & ~more].sum())
        good = more
    good = good[index]
    return layouts.take(good) if good.any() else None


def pipeline_refusal(model: TrainableModel | SizedModel, layout: Layout) -> str:
    """Why a resolved layout has no pipeline of the layers; "" where it has one, or needs none."""
    if layout.pipeline == 1:
        return ""
    # Remat policies without recompute operations do not change the table.
    remat = "none" if layout.remat_policy.kept_passes is None else layout.remat
    read = {name: getattr(layout, name) for name in ("pipeline", "schedule", "virtual_stages")}
    pipeline = Layout(**read, microbatches=layout.microbatches, remat=remat)
    return _stages_refusal(pipeline, model.stacks)


@functools.cache
def _stages_refusal(layout: Layout, stacks: tuple[StackLayers, ...]) -> str:
    try:
        open_stages(layout, stacks)
    except ValueError as error:
        return str(error)
    return ""


def check_fields(pins: Mapping[str, Any], flag: str) -> None:
    """Refuses settings that are invalid for every model and cluster.

    Args:
      flag: where the settings were given, as "--pin".

    Raises:
      ValueError: a setting names no field of a layout (the nearest is named), or has a value that
        it cannot have.
    """
    known = [field.name for field in dataclasses.fields(Layout)]
    for name, value in pins.items():
        if name not in known:
            raise ValueError(
                f"{flag} {name} is not a field of a layout; there are {', '.join(known)}"
                f"{did_you_mean(name, known)}"
            )
        if name in MESH_AXES and value == -1:
            raise ValueError(f"{flag} {name}=-1: leave it out for the planner to choose")
        Layout(**_required_sizes(name, value), **{name: value})
    schedule = pins.get("schedule", Layout.schedule)
    name = parse_schedule(schedule).name
    if name not in NAMES and not is_foreign(name):
        raise ValueError(
            f"{flag} schedule={schedule}: the planner ranks {', '.join(NAMES)}, and custom "
            "schedules as module:RECORD"
        )
    find_schedule(name)
    if pins.get("virtual_stages") == 0:
        raise ValueError(
            f"{flag} virtual_stages=0: at least 1; leave it out for the planner to choose"
        )
    for setting in ("remat", "head"):
        if pins.get(setting) == AUTO:
            raise ValueError(f"{flag} {setting}=auto: leave it out for the planner to choose")


def _required_sizes(name: str, value: Any) -> dict[str, Any]:
    """Axis sizes that a layout needs for a setting."""
    if name == "remat" and isinstance(value, str) and parse_remat(value).kept_passes:
        return {"pipeline": 2}  # partial recompute exists in pipelines only
    if name == "head" and value == SLICED:
        return {"pipeline": 2}
    if name == "segment_lengths" and isinstance(value, str):
        return {"sequence_chunks": len(parse_lengths(value)) or 1}
    axis = {"tensor_rows": "tensor", "expert_nodes": "expert"}.get(name)
    return {axis: value} if axis and isinstance(value, int) and value > 0 else {}


def check_pins(query: Query) -> None:
    """Refuses pins of unknown fields, of invalid values, or that fit no number of devices.

    Raises:
      ValueError: names the nearest.
    """
    check_fields(query.pins, "--pin")
    offload, remat = (str(query.pins.get(name, "none")) for name in ("offload", "remat"))
    moved = offload != "none" or remat.startswith("offload:") or query.pins.get("offload_bytes")
    if moved and not query.cluster.chip.host_bytes_per_second:
        raise ValueError(
            f"--pin offload={offload} remat={remat} offload_bytes="
            f"{query.pins.get('offload_bytes', 0)}: {query.cluster.name} has no rate of the link "
            "to the host; give host_gb_per_second in the file of the device"
        )
    required = (_required_sizes(name, value) for name, value in query.pins.items())
    query.planned_model.check_policies(Layout(**collections.ChainMap(dict(query.pins), *required)))
    sequences, count = query.planned_model.sequences, query.pins.get("microbatches", 1)
    if sequences % count:
        raise ValueError(
            f"--pin microbatches={count}: a step's {sequences} sequences do not divide into as "
            f"many micro-batches; the nearest: {nearest_divisors(sequences, count)}"
        )
    experts = query.work.num_experts
    if next(iter(mesh_shapes(query.cluster.num_devices, query.pins, experts)), None) is None:
        sizes = " x ".join(
            f"{name} {size}" for name, size in query.pins.items() if isinstance(size, int)
        )
        raise ValueError(
            f"no mesh of {query.cluster.num_devices} devices has {sizes}: the sizes of the axes "
            f"multiply to the number of devices{_nearest(query)}"
        )


def _nearest(query: Query) -> str:
    """For pinned axes that do not divide the devices, the nearest sizes that do."""
    devices, found = query.cluster.num_devices, []
    for axis in MESH_AXES:
        size = query.pins.get(axis, 1)
        if devices % size:
            whole = _sizes(axis, devices, query.work.num_experts)[-1]
            found.append(f"{axis} = {nearest_divisors(whole, size)}")
    return f"; the nearest: {', '.join(found)}" if found else ""
