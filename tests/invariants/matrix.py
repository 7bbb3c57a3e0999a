"""The layouts that are proven: of a decoder, every factorisation of eight devices and every pair of
settings; of each other kind of model, every pair of settings on eight devices."""

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

from jaxscale.pipeline_schedules.schedule import Schedule

Choice = dict[str, Any]

NUM_DEVICES = 8
MODEL_BATCH = 8
MODEL_LAYERS = 8  # of a model that every mesh is proven for
AXES = ("data", "fsdp", "context", "tensor")
ACCUMULATIONS = (("sequential", 1), ("sequential", 2), ("layered", 2))
REMATS = (
    "none",
    "full",
    "save_matmuls",
    "save_all_but_attention",
    "save:query,attention,mlp_up",
    "offload:key,value,mlp_gate",
)
KINDS_OF_REMAT = ("none", "full", *REMATS[-2:])
"""What is not named as a set of tensors is such a set: the suite has one of each kind."""
SCHEDULES = ("1f1b", "interleaved", "zb_v")
MODEL_REMATS = ("none", "full", "save_matmuls")
SCHEDULE_REMATS = ("none", "full", "keep:1")
OFFLOADS = ("none", "optimizer", "activations", "optimizer,activations")
METHODS = ("ring", "gather")
FEWEST = 13
"""The seed of 300 that makes the fewest pairwise layouts."""


def factorisations(axes: tuple[str, ...] = AXES) -> list[Choice]:
    """All ordered ways to write eight as a product of axis sizes."""
    sizes = [size for size in range(1, NUM_DEVICES + 1) if NUM_DEVICES % size == 0]
    return [
        dict(zip(axes, chosen))
        for chosen in itertools.product(sizes, repeat=len(axes))
        if math.prod(chosen) == NUM_DEVICES
    ]


def every_layout(remats: tuple[str, ...] = REMATS) -> Iterator[Choice]:
    """The whole product."""
    for axes in factorisations():
        for settings in itertools.product(
            _stages(axes), ACCUMULATIONS, remats, OFFLOADS, _methods(axes), _rows(axes)
        ):
            yield _layout(axes, *settings)


def pairwise_layouts(remats: tuple[str, ...] = REMATS) -> list[Choice]:
    """Every factorisation; and every two settings, whether an axis divides being one, together in
    some layout. First comes what has the most pairs."""
    rng, chosen, everything = random.Random(FEWEST), [], list(every_layout(remats))
    pairs, all_axes = [_pairs(layout) for layout in everything], factorisations()
    missing = set().union(*pairs)
    ranked = list(range(len(everything)))
    rng.shuffle(ranked)
    rng.shuffle(all_axes)

    def choose(candidates: list[int]) -> None:
        best = max(candidates, key=lambda place: len(pairs[place] & missing))
        chosen.append(everything[best])
        missing.difference_update(pairs[best])

    for axes in all_axes:
        choose([place for place in ranked if axes.items() <= everything[place].items()])
    while missing:
        choose(ranked)
    return _most_pairs_first(chosen)


def _most_pairs_first(layouts: list[Choice]) -> list[Choice]:
    """Each one adds the most pairs to those before it."""
    ordered, left, seen = list[Choice](), list(layouts), set[tuple]()
    while left:
        best = max(left, key=lambda layout: len(_pairs(layout) - seen))
        left.remove(best)
        ordered.append(best)
        seen |= _pairs(best)
    return ordered


def sample(layouts: Iterable[Choice], count: int = 24) -> list[Choice]:
    """Of the whole product, which takes `tools/matrix.py --whole` hours; always the same ones."""
    return random.Random(1).sample(list(layouts), count)


def model_axes(*more: str) -> list[Choice]:
    """Three axes of two devices each, of which one may be that of a pipeline, or one of `more`."""
    names = "pipeline", *AXES, *more
    return [
        {axis: 2 if axis in several else 1 for axis in names}
        for several in itertools.combinations(names, 3)
    ]


def every_mesh(*axes: str) -> list[Choice]:
    """All ordered ways to write eight as a product of these sizes."""
    return [{"context": 1, **sizes} for sizes in factorisations(axes)]


def every_model_layout(all_axes: Iterable[Choice]) -> Iterator[Choice]:
    """Every setting of each mesh."""
    for axes in all_axes:
        rows = MODEL_BATCH // (axes["data"] * axes["fsdp"] * axes.get("expert", 1))
        for stage, remat in itertools.product(_stages(axes), MODEL_REMATS):
            if axes["pipeline"] == 1:
                ways = ACCUMULATIONS[1:] if rows > 1 else ACCUMULATIONS[:1]
                for accumulation, method in itertools.product(ways, _methods(axes)):
                    yield _layout(axes, stage, accumulation, remat, "none", method)
                continue
            ranks = axes["pipeline"]
            microbatches = min(4 if ranks == 2 else 8, rows)
            schedules = SCHEDULES if 2 * ranks <= MODEL_LAYERS else SCHEDULES[:1]
            for schedule in schedules:
                if schedule == "zb_v" and microbatches < 2 * ranks - 1:
                    continue
                accumulation = ("sequential", microbatches)
                method = "gather" if axes["context"] > 1 else "ring"
                layout = _layout(axes, stage, accumulation, remat, "none", method)
                yield {**layout, "schedule": schedule}


def pairwise_model_layouts(all_axes: Iterable[Choice], *, every: bool = False) -> list[Choice]:
    """Every two settings, the size of an axis being one, together in some layout.

    Args:
      every: each of the meshes is in some layout, too.
    """
    everything, chosen = list(every_model_layout(all_axes)), []
    random.Random(0).shuffle(everything)
    missing = set().union(*map(_pairs, everything))

    def choose(candidates: list[Choice]) -> None:
        gains = [len(_pairs(layout) & missing) for layout in candidates]
        chosen.append(candidates[gains.index(max(gains))])
        missing.difference_update(_pairs(chosen[-1]))

    for axes in all_axes if every else ():
        choose([layout for layout in everything if axes.items() <= layout.items()])
    while missing:
        choose(everything)
    return chosen


def schedule_layouts(schedule: Schedule) -> list[Choice]:
    """Of a pipeline of four ranks, with every other axis of two, and fsdp in every ZeRO stage."""
    others = [(axis, 3) for axis in ("data", "context", "tensor", "expert")]
    others += [("fsdp", stage) for stage in range(4)]
    segments = 2 if schedule.splits_sequences else 1
    return [
        {"schedule": schedule.name, "pipeline": 4, axis: 2, "zero_stage": stage}
        | {"microbatches": 8, "virtual_stages": schedule.virtual_stages}
        | {"sequence_chunks": segments, "remat": SCHEDULE_REMATS[number % 3]}
        | ({"context_method": "gather"} if axis == "context" else {})
        for number, (axis, stage) in enumerate(others)
    ]


def name(layout: Choice) -> str:
    """For a test's identity: what is not as usual."""
    shown = {key: value for key, value in layout.items() if value not in (1, "none")}
    return "-".join(f"{key}={value}" for key, value in shown.items())


def _layout(axes, stage, accumulation, remat, offload, method, rows=None) -> Choice:
    return {
        **axes,
        **({"tensor_rows": rows} if rows else {}),
        "zero_stage": stage,
        "accumulation": accumulation[0],
        "microbatches": accumulation[1],
        "remat": remat,
        "offload": offload,
        "context_method": method,
    }


def _stages(axes: Choice) -> tuple[int, ...]:
    """Without fsdp and expert, the stages are one and the same."""
    return (0, 1, 2, 3) if axes["fsdp"] * axes.get("expert", 1) > 1 else (3,)


def _methods(axes: Choice) -> tuple[str, ...]:
    return METHODS if axes["context"] > 1 else ("ring",)


def _rows(axes: Choice) -> tuple[int, ...]:
    """Of tensor: as many as columns or twice as many, where it has some."""
    rows = 4 if axes["tensor"] == 8 else 2
    return (1, rows) if axes["tensor"] > 1 and axes["context"] == 1 else (1,)


def _pairs(layout: Choice) -> set[tuple]:
    settings = {**layout, "accumulation": (layout["accumulation"], layout["microbatches"])}
    del settings["microbatches"]
    if "schedule" in settings:
        settings["accumulation"] = settings.pop("schedule")
    if layout["fsdp"] * layout.get("expert", 1) == 1:
        del settings["zero_stage"]
    if layout["context"] == 1:
        del settings["context_method"]
    if settings.pop("tensor_rows", None) and layout["tensor"] > 1:
        settings["tensor_rows"] = layout["tensor_rows"] > 1
    settings |= {axis: layout[axis] > 1 for axis in (*AXES, "expert") if axis in layout}
    return set(itertools.combinations(sorted(settings.items()), 2))
