"""Search space of a measured search: layouts as values of a few settings."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxscale.choices import divisors
from jaxscale.config import Config
from jaxscale.config.layout import ACCUMULATIONS, MESH_AXES, RING, Layout, unread_settings
from jaxscale.config.remat_policy import REMATS
from jaxscale.config.schedule_spec import parse_schedule
from jaxscale.pipeline_schedules.shipped import SEARCHED, find_schedule, is_foreign
from jaxscale.planner.search import space
from jaxscale.planner.search.trainable_model import TrainableModel

Candidate = Mapping[str, Any]
"""Field of a layout -> its value, None if the layout does not read it."""

FIELDS = (
    "pipeline",
    "fsdp",
    "expert",
    "context",
    "tensor",
    "tensor_rows",
    "zero_stage",
    "microbatches",
    "accumulation",
    "schedule",
    "virtual_stages",
    "remat",
)
"""The settings that are searched; `data` takes the remaining devices."""

VIRTUAL_STAGES = (1, 2, 4)
"""The numbers of virtual stages that are measured, if a schedule allows them."""

MOST_MICROBATCHES = 64


def candidate_of(layout: Layout) -> Candidate:
    """The searched settings of a layout; layouts with equal settings run the same program."""
    chosen = {name: getattr(layout, name) for name in FIELDS}
    if layout.zero_ranks == 1:
        chosen["zero_stage"] = None
    if layout.pipeline > 1 or layout.microbatches == 1:
        chosen["accumulation"] = None
    if layout.pipeline == 1:
        chosen |= {"schedule": None, "virtual_stages": None}
    else:
        chosen["virtual_stages"] = layout.virtual_stages or _virtual_stages(layout)
    return chosen


def layout_of(candidate: Candidate, base: Layout, num_devices: int) -> Layout:
    """The layout of a candidate; other fields, and fields that are None, are from `base`, except
    fields that the candidate does not read or that are refused with it.

    Raises:
      ValueError: `Layout` refuses it.
    """
    others = math.prod(candidate[name] for name in MESH_AXES if name != "data")
    unread = unread_settings(candidate)
    names = [field.name for field in dataclasses.fields(Layout)]
    settings: dict[str, Any] = {
        name: getattr(Layout if name in unread else base, name) for name in names
    }
    settings |= {name: value for name, value in candidate.items() if value is not None}
    settings["data"] = num_devices // others
    if candidate["pipeline"] != 1:
        settings["accumulation"] = "sequential"
        settings["context_method"] = _context_method(base, candidate)
        settings["offload"] = "optimizer" if base.offloads("optimizer") else "none"
    return Layout(**settings)


def _context_method(base: Layout, sizes: Mapping[str, Any]) -> str:
    """The context method of `base`, or "gather" on a mesh without a ring."""
    mesh = {name: sizes[name] for name in ("pipeline", "context")}
    ranks = Layout(**mesh, sequence_chunks=base.sequence_chunks, context_method="gather")
    no_ring = base.context_method == RING and not ranks.allows_ring
    return "gather" if no_ring else base.context_method


def candidates(
    config: Config, num_devices: int, pins: Mapping[str, Any] | None = None
) -> list[Candidate]:
    """Every candidate that the sizes of model and batch allow, in a fixed order. `refusal` may
    refuse pipelines for their layers.

    Args:
      pins: fixed settings.
    """
    pins = pins or {}
    schedules = _schedules(pins.get("schedule", config.layout.schedule))
    return [
        candidate
        for mesh in _meshes(config, num_devices)
        if not refusal(config, dataclasses.replace(mesh, pipeline=1, data=1))
        for candidate in _mesh_candidates(config, mesh, schedules)
        if all(candidate[name] in (value, None) for name, value in pins.items())
    ]


def refusal(config: Config, layout: Layout) -> str:
    """The reason why a resolved layout cannot run this config, without compiling; "" if it can."""
    model = TrainableModel(config)
    return space.pipeline_refusal(model, layout) or model.refusal(layout)[1]


def _schedules(wanted: str) -> list[tuple[str, int]]:
    """The schedules to try, each with its virtual stages, fewest first: the package's, and the
    wanted one if it is custom."""
    name = parse_schedule(wanted).name
    names = [*SEARCHED, *([name] if is_foreign(name) else [])]
    searched = {name: find_schedule(name).searched_virtual_stages for name in names}
    return [
        (name, chunks)
        for name in sorted(names, key=searched.__getitem__)
        for chunks in searched[name]
        if chunks in VIRTUAL_STAGES
    ]


def _meshes(config: Config, num_devices: int) -> Iterator[Layout]:
    """Every factorisation of the devices into the axes of the mesh, and of tensor into rows and
    columns; expert divides the model's experts."""
    model, experts = TrainableModel(config), config.model.num_experts
    for sizes in space.mesh_shapes(num_devices, experts=experts):
        mesh: dict[str, Any] = dict(zip(MESH_AXES, sizes))
        method = _context_method(config.layout, mesh)
        for across in space.grid_rows(model, mesh):
            yield Layout(**mesh, tensor_rows=across, context_method=method)


def _mesh_candidates(
    config: Config, mesh: Layout, schedules: Sequence[tuple[str, int]]
) -> Iterator[Candidate]:
    """The candidates on one mesh."""
    each, rest = divmod(config.data.global_batch_size, mesh.batch_shards)
    microbatches = [] if rest else [n for n in divisors(each) if n <= MOST_MICROBATCHES]
    stages = (1, 2, 3) if mesh.zero_ranks > 1 else (None,)
    piped = mesh.pipeline > 1
    sizes = {name: getattr(mesh, name) for name in (*MESH_AXES, "tensor_rows") if name != "data"}
    pipelines = schedules if piped else ((None, None),)
    for count, stage, (schedule, chunks), remat in itertools.product(
        microbatches, stages, pipelines, REMATS
    ):
        for accumulation in (None,) if piped or count == 1 else ACCUMULATIONS:
            yield {
                **sizes,
                "zero_stage": stage,
                "microbatches": count,
                "accumulation": accumulation,
                "schedule": schedule,
                "virtual_stages": chunks,
                "remat": remat,
            }


def _virtual_stages(layout: Layout) -> int:
    name = layout.schedule_spec.name
    return 1 if name.endswith(".csv") else find_schedule(name).virtual_stages
