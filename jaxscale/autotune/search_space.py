"""The layouts that a search by measuring may try, each as the values of a few settings."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxscale.config import Config
from jaxscale.layout import ACCUMULATIONS, MESH_AXES, REMATS, Layout, kept_passes, parse_schedule
from jaxscale.pipeline.stages import open_stages
from jaxscale.planner.search import space
from jaxscale.planner.search.trainable_model import TrainableModel

Candidate = Mapping[str, Any]
"""Field of a layout -> its value, None where the layout does not read it."""

FIELDS = (
    "pipeline",
    "fsdp",
    "context",
    "tensor",
    "zero_stage",
    "microbatches",
    "accumulation",
    "schedule",
    "virtual_stages",
    "remat",
)
"""The settings that are searched; `data` takes the remaining devices."""

PIPELINES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("zb_h1", 1),
    ("zb_h2", 1),
    ("zb_v", 2),
    ("interleaved", 2),
    ("interleaved", 4),
    ("breadth_first", 2),
    ("breadth_first", 4),
)
"""Schedules and their chunks per rank."""

MOST_MICROBATCHES = 64


def candidate_of(layout: Layout) -> Candidate:
    """The searched settings of a layout; layouts with equal ones run the same program."""
    chosen = {name: getattr(layout, name) for name in FIELDS}
    if layout.fsdp == 1:
        chosen["zero_stage"] = None
    if layout.pipeline > 1 or layout.microbatches == 1:
        chosen["accumulation"] = None
    if layout.pipeline == 1:
        chosen |= {"schedule": None, "virtual_stages": None}
    else:
        chosen["virtual_stages"] = layout.virtual_stages or _fewest_chunks(layout.schedule)
    return chosen


def layout_of(candidate: Candidate, base: Layout, num_devices: int) -> Layout:
    """The layout of a candidate; other fields, and those that are None, are taken from `base`.

    Raises:
      ValueError: `Layout` refuses it.
    """
    others = math.prod(candidate[name] for name in ("pipeline", "fsdp", "context", "tensor"))
    read = {name: value for name, value in candidate.items() if value is not None}
    if candidate["pipeline"] == 1:
        read |= {"schedule": Layout.schedule, "virtual_stages": Layout.virtual_stages}
    if "accumulation" not in read:
        read["accumulation"] = "sequential"
    if candidate["pipeline"] != 1 and candidate["context"] != 1:
        read["context_method"] = "gather"
    return dataclasses.replace(base, data=num_devices // others, **read)


def candidates(
    config: Config, num_devices: int, pins: Mapping[str, Any] | None = None
) -> list[Candidate]:
    """Every candidate that the sizes of model and batch allow, in a fixed order. Pipelines may
    still be refused for their layers, see `refusal`.

    Args:
      pins: fixed settings.
    """
    return [
        candidate
        for mesh in _meshes(num_devices)
        if not _mesh_refusal(config, mesh)
        for candidate in _mesh_candidates(config, mesh)
        if all(candidate[name] in (value, None) for name, value in (pins or {}).items())
    ]


def refusal(config: Config, layout: Layout) -> str:
    """Why a resolved layout cannot run this config, without building anything; "" if it can."""
    try:
        _check_pipeline(config, layout)
    except ValueError as error:
        return str(error)
    return TrainableModel(config).refusal(layout)[1]


def _meshes(num_devices: int) -> Iterator[Layout]:
    """Every factorisation of the devices into pipeline x data x fsdp x context x tensor."""
    for sizes in space.mesh_shapes(num_devices):
        yield Layout(**dict(zip(MESH_AXES, sizes)), context_method="gather")  # pyright: ignore


def _mesh_refusal(config: Config, mesh: Layout) -> str:
    return refusal(config, dataclasses.replace(mesh, pipeline=1, data=1))


def _mesh_candidates(config: Config, mesh: Layout) -> Iterator[Candidate]:
    """The candidates on one mesh."""
    each, rest = divmod(config.data.global_batch_size, mesh.batch_shards)
    microbatches = (
        [] if rest else [n for n in range(1, min(each, MOST_MICROBATCHES) + 1) if each % n == 0]
    )
    stages = (1, 2, 3) if mesh.fsdp > 1 else (None,)
    piped = mesh.pipeline > 1
    schedules = PIPELINES if piped else ((None, None),)
    for count, stage, (schedule, chunks), remat in itertools.product(
        microbatches, stages, schedules, REMATS
    ):
        for accumulation in (None,) if piped or count == 1 else ACCUMULATIONS:
            yield {
                "pipeline": mesh.pipeline,
                "fsdp": mesh.fsdp,
                "context": mesh.context,
                "tensor": mesh.tensor,
                "zero_stage": stage,
                "microbatches": count,
                "accumulation": accumulation,
                "schedule": schedule,
                "virtual_stages": chunks,
                "remat": remat,
            }


def _check_pipeline(config: Config, layout: Layout) -> None:
    if layout.pipeline > 1:
        # Remat policies without recompute operations do not change the table.
        remat = "none" if kept_passes(layout.remat) is None else layout.remat
        _open(
            layout.pipeline,
            layout.schedule,
            layout.virtual_stages,
            layout.microbatches,
            remat,
            config.model.num_layers,
        )


@functools.cache
def _open(
    pipeline: int, schedule: str, chunks: int, microbatches: int, remat: str, num_layers: int
) -> None:
    layout = Layout(
        pipeline=pipeline,
        schedule=schedule,
        virtual_stages=chunks,
        microbatches=microbatches,
        remat=remat,
    )
    open_stages(layout, num_layers)


def _fewest_chunks(schedule: str) -> int:
    name = parse_schedule(schedule)[0]
    return min((chunks for known, chunks in PIPELINES if known == name), default=1)
