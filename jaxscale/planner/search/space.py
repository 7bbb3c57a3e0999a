"""The layouts that a search goes through: what the engine refuses is left out, and counted.

Texts (schedule, remat, what is offloaded, how gradients accumulate) come one by one; all numbers
that go with them are arrays. What is refused is asked of the engine's own checks: the subject's,
`Layout`, and the needs of a schedule.
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

from jaxscale.choices import did_you_mean
from jaxscale.config import Config
from jaxscale.layout import ACCUMULATIONS, MESH_AXES, Layout, kept_passes, parse_schedule
from jaxscale.pipeline.schedules import SCHEDULES
from jaxscale.pipeline.stages import RUNNABLE
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.memory.step import Memory
from jaxscale.planner.model.shape import ModelShape
from jaxscale.planner.search.layout_batch import LayoutBatch
from jaxscale.planner.search.sized_model import SizedModel
from jaxscale.planner.search.trainable_model import TrainableModel
from jaxscale.planner.tables.pipeline_slots import most_slots
from jaxscale.planner.tables.table_makespan import TableSpec
from jaxscale.sharding.rules import divisors, nearest_divisors

CHUNKS = (2, 3, 4, 5, 8)
"""Virtual stages that are tried where a schedule is free in them."""

CPU = "CPU"
"""The name of devices that are this machine's own processors."""

MEMORY_FRACTION = {"gpu": 0.85, "tpu": 0.95, "cpu": 0.6}
"""Of a device's memory, that a plan may fill: 5 per cent are left for what the formulas miss, and
on a GPU 10 for its driver and libraries (`topology.GPU_MEMORY_FRACTION`); a machine does other
things than training."""

HOST_MEMORY_BYTES = 100e9
"""Of a server's memory, for each of its devices: 256 GB on DGX H100, 112 GB on TPU v5p hosts, some
of it needed for what reads the data."""


@dataclass(frozen=True)
class Query:
    """What is asked: a model and its batch, a cluster, and what is not to be changed."""

    model: Config | SizedModel  # a config's layout is not looked at
    cluster: Cluster
    pins: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # fields of a Layout
    memory_bytes: float = 0.0  # of a device; 0 for what the cluster's devices have

    @functools.cached_property
    def planned_model(self) -> TrainableModel | SizedModel:
        """Whom to ask what the model needs and what it refuses."""
        return TrainableModel(self.model) if isinstance(self.model, Config) else self.model

    @property
    def back_end(self) -> str:
        """Whose compiler it is."""
        if self.cluster.name == CPU:
            return "cpu"
        return "tpu" if self.cluster.torus else "gpu"

    @property
    def limit_bytes(self) -> float:
        """What a program may need on a device."""
        return self.memory_bytes or self.cluster.memory_bytes * MEMORY_FRACTION[self.back_end]

    def fits_device(self, needs: Memory) -> Any:
        """Whether a layout, or each of many, has room on a device."""
        return needs.peak <= self.limit_bytes

    def fits_host(self, needs: Memory, layout: Layout | LayoutBatch) -> Any:
        """Whether what moves to host memory has room there."""
        optimizer = needs.host_optimizer if layout.offloads("optimizer") else 0
        return needs.host_stash + optimizer <= HOST_MEMORY_BYTES

    @property
    def shape(self) -> ModelShape:
        """The model's."""
        return self.planned_model.shape


def enumerate_sizes(
    query: Query, rejected: collections.Counter, words: dict[str, str]
) -> LayoutBatch | None:
    """Sizes of axes, ZeRO stages and micro-batches that the model and its batch allow."""
    rows, model = [], query.planned_model
    for sizes in mesh_shapes(query.cluster.num_devices, query.pins, model.shape.experts):
        mesh: dict[str, Any] = dict(zip(MESH_AXES, sizes))
        for stage in _stages(query.pins, mesh["fsdp"]):
            # With nothing that could be refused beside the sizes.
            layout = Layout(**mesh, zero_stage=stage, context_method="gather")
            reason, said = model.refusal(layout)
            if reason:
                rejected[reason] += 1
                words.setdefault(reason, said)
                continue
            batch = model.sequences // (layout.batch_shards * layout.expert)
            for count in _pinned(query.pins, "microbatches", divisors(batch)):
                if batch % count:
                    rejected[model.unsplit] += 1
                else:
                    rows.append((*sizes, stage, count))
    if not rows:
        return None
    columns = np.array(rows).T
    return LayoutBatch(**dict(zip((*MESH_AXES, "zero_stage", "microbatches"), columns)))


def mesh_shapes(
    num_devices: int, pins: Mapping[str, Any] | None = None, experts: int = 0
) -> Iterator[tuple[int, ...]]:
    """Sizes of the mesh axes, in their order; that of expert divides the experts of a layer."""
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
    """That an axis can have."""
    return divisors(math.gcd(devices, experts or 1) if axis == "expert" else devices)


def _pinned(pins: Mapping[str, Any], name: str, allowed: Sequence) -> Sequence:
    return [pins[name]] if name in pins else allowed


def _stages(pins: Mapping[str, Any], fsdp: int) -> Sequence[int]:
    """With one rank of fsdp all stages are the same."""
    return _pinned(pins, "zero_stage", range(4) if fsdp > 1 else [3])


def enumerate_options(query: Query) -> Iterator[dict[str, Any]]:
    """What is common to arrays of layouts: first without a pipeline, then with one."""
    pins, remats, offloads = query.pins, query.planned_model.remats, query.planned_model.offloads
    if query.back_end == "cpu":
        # It has no host memory of its own.
        remats, offloads = [one for one in remats if not one.startswith("offload:")], ["none"]
    remats, offloads = _pinned(pins, "remat", remats), _pinned(pins, "offload", offloads)
    for remat, offload, accumulation, method in itertools.product(
        remats,
        offloads,
        _pinned(pins, "accumulation", ACCUMULATIONS),
        _pinned(pins, "context_method", ("ring", "gather")),
    ):
        yield {
            "remat": remat,
            "offload": offload,
            "accumulation": accumulation,
            "context_method": method,
            "pipelined": False,
        }
    for (schedule, chunks), remat, offload in itertools.product(_schedules(pins), remats, offloads):
        yield {
            "remat": remat,
            "offload": offload,
            "schedule": schedule,
            "virtual_stages": chunks,
            "accumulation": pins.get("accumulation", "sequential"),
            "context_method": pins.get("context_method", "gather"),
            "pipelined": True,
        }


def _schedules(pins: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Schedules and the virtual stages that each can have."""
    names = [*RUNNABLE, *(f"{name}:fused" for name in RUNNABLE if not _given(name))]
    for schedule in _pinned(pins, "schedule", names):
        for chunks in _pinned(pins, "virtual_stages", (1, *CHUNKS)):
            name = parse_schedule(schedule)[0]
            # Whether any number of ranks can have so many chunks.
            if all(need.holds(4, 16, chunks, 1) for need in SCHEDULES[name].needs) and not (
                chunks == 1 and name in ("interleaved", "breadth_first")
            ):
                yield schedule, chunks


def _given(name: str) -> bool:
    return SCHEDULES[name].given_backward


def combine(
    query: Query,
    numbers: LayoutBatch | None,
    texts: Mapping[str, Any],
    rejected: collections.Counter,
) -> LayoutBatch | None:
    """The numbers that go with texts; None where there are none."""
    if numbers is None:
        return None
    texts = dict(texts)
    pipelined = texts.pop("pipelined")
    several, context = numbers.microbatches > 1, np.asarray(numbers.context) > 1
    wanted = (np.asarray(numbers.pipeline) > 1) == pipelined
    if not pipelined:
        # With one micro-batch, or whole sequences, a choice would be the same as another.
        wanted &= several | (texts["accumulation"] == query.pins.get("accumulation", "sequential"))
        wanted &= context | (texts["context_method"] == query.pins.get("context_method", "ring"))
    if not wanted.any():
        return None
    try:
        sizes = {"pipeline": 2, "context": 2} if pipelined else {}
        layout = Layout(**sizes, **texts)
        query.planned_model.check_policies(layout)
    except ValueError as error:
        # Settings come before the reason, and what to change after it.
        reason = str(error).partition(";")[0].rpartition(": ")[2]
        rejected[reason] += int(wanted.sum())
        return None
    layouts = dataclasses.replace(numbers.take(wanted), **texts)
    return _runnable(query, layouts, rejected) if pipelined else layouts


def _runnable(
    query: Query, layouts: LayoutBatch, rejected: collections.Counter
) -> LayoutBatch | None:
    """Those whose schedule can serve them."""
    (name, fused, _), v = parse_schedule(layouts.schedule), int(layouts.virtual_stages)
    keys = list(zip(np.asarray(layouts.pipeline).tolist(), layouts.microbatches.tolist()))
    needs = {
        (p, m): all(need.holds(p, m, v, 1) for need in SCHEDULES[name].needs) for p, m in set(keys)
    }
    serves = np.array([needs[key] for key in keys])
    enough = np.asarray(layouts.pipeline) * v <= query.shape.layers
    rejected["the schedule needs other numbers of ranks and micro-batches"] += int((~serves).sum())
    rejected["fewer layers than stages"] += int((serves & ~enough).sum())
    good = serves & enough
    if keep := kept_passes(layouts.remat):
        more = np.array(
            [
                ok and most_slots(TableSpec(name, p, m, v, fused))["residual_w"] > keep
                for ok, (p, m) in zip(good, keys)
            ]
        )
        rejected["no more passes in flight than are to be kept"] += int((good & ~more).sum())
        good = more
    return layouts.take(good) if good.any() else None


def check_pins(query: Query) -> None:
    """Refuses pins that are no field of a layout, no value of it, or no number of devices.

    Raises:
      ValueError: names the nearest.
    """
    known = [field.name for field in dataclasses.fields(Layout)]
    for name in query.pins:
        if name not in known:
            raise ValueError(
                f"--pin {name}: a layout has no such field; there are {', '.join(known)}"
                f"{did_you_mean(name, known)}"
            )
    schedule = query.pins.get("schedule", Layout.schedule)
    if parse_schedule(schedule)[0] not in RUNNABLE:
        raise ValueError(
            f"--pin schedule={schedule}: the planner ranks what this version runs by name: "
            f"{', '.join(RUNNABLE)}"
        )
    if query.pins.get("virtual_stages") == 0:
        raise ValueError("--pin virtual_stages=0: at least 1; leave it out to have it chosen")
    # Only a pipeline can keep some passes.
    some = kept_passes(query.pins.get("remat", "none")) and {"pipeline": 2}
    query.planned_model.check_policies(Layout(**{**(some or {}), **query.pins}))
    experts = query.shape.experts
    if next(iter(mesh_shapes(query.cluster.num_devices, query.pins, experts)), None) is None:
        sizes = " x ".join(
            f"{name} {size}" for name, size in query.pins.items() if isinstance(size, int)
        )
        raise ValueError(
            f"no mesh of {query.cluster.num_devices} devices has {sizes}: the sizes of the axes "
            f"multiply to the number of devices{_nearest(query)}"
        )


def _nearest(query: Query) -> str:
    """Of the pinned axes that do not divide the devices, the nearest sizes that do."""
    devices, found = query.cluster.num_devices, []
    for axis in MESH_AXES:
        size = query.pins.get(axis, 1)
        if devices % size:
            whole = _sizes(axis, devices, query.shape.experts)[-1]
            found.append(f"{axis} = {nearest_divisors(whole, size)}")
    return f"; the nearest: {', '.join(found)}" if found else ""
