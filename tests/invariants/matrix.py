"""The layouts that the suite proves: every factorisation of eight devices, and every pair of
settings."""

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

Choice = dict[str, Any]

NUM_DEVICES = 8
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
OFFLOADS = ("none", "optimizer", "activations", "optimizer,activations")
METHODS = ("ring", "gather")


def factorisations(axes: tuple[str, ...] = AXES) -> list[Choice]:
    """All ordered ways to write eight as a product of axis sizes."""
    sizes = [size for size in range(1, NUM_DEVICES + 1) if NUM_DEVICES % size == 0]
    return [
        dict(zip(axes, chosen))
        for chosen in itertools.product(sizes, repeat=len(axes))
        if math.prod(chosen) == NUM_DEVICES
    ]


def every_layout() -> Iterator[Choice]:
    """The whole product."""
    for axes in factorisations():
        for settings in itertools.product(
            _stages(axes), ACCUMULATIONS, REMATS, OFFLOADS, _methods(axes)
        ):
            yield _layout(axes, *settings)


def pairwise_layouts() -> list[Choice]:
    """Every factorisation with every ZeRO stage that it can tell apart; and every two settings,
    the size of an axis being one, together in some layout."""
    rng, missing, chosen = random.Random(0), set(), []
    for layout in every_layout():
        missing |= _pairs(layout)

    def best(candidates: list[Choice]) -> Choice:
        gains = [len(_pairs(layout) & missing) for layout in candidates]
        return candidates[gains.index(max(gains))]

    for axes in factorisations():
        for stage in _stages(axes):
            rest = list(itertools.product(ACCUMULATIONS, REMATS, OFFLOADS, _methods(axes)))
            rng.shuffle(rest)
            chosen.append(best([_layout(axes, stage, *settings) for settings in rest]))
            missing -= _pairs(chosen[-1])
    if missing:
        everything = list(every_layout())
        while missing:
            chosen.append(best(everything))
            missing -= _pairs(chosen[-1])
    return chosen


def sample(layouts: Iterable[Choice], count: int = 96) -> list[Choice]:
    """Of the whole product, which takes `tools/matrix.py --whole` hours; always the same ones."""
    return random.Random(1).sample(list(layouts), count)


def name(layout: Choice) -> str:
    """For a test's identity: what is not as usual."""
    shown = {key: value for key, value in layout.items() if value not in (1, "none")}
    return "-".join(f"{key}={value}" for key, value in shown.items())


def _layout(axes, stage, accumulation, remat, offload, method) -> Choice:
    return {
        **axes,
        "zero_stage": stage,
        "accumulation": accumulation[0],
        "microbatches": accumulation[1],
        "remat": remat,
        "offload": offload,
        "context_method": method,
    }


def _stages(axes: Choice) -> tuple[int, ...]:
    """Without fsdp, the stages are one and the same."""
    return (0, 1, 2, 3) if axes["fsdp"] > 1 else (3,)


def _methods(axes: Choice) -> tuple[str, ...]:
    return METHODS if axes["context"] > 1 else ("ring",)


def _pairs(layout: Choice) -> set[tuple]:
    settings = {**layout, "accumulation": (layout["accumulation"], layout["microbatches"])}
    del settings["microbatches"]
    if layout["fsdp"] == 1:
        del settings["zero_stage"]
    if layout["context"] == 1:
        del settings["context_method"]
    return set(itertools.combinations(sorted(settings.items()), 2))
