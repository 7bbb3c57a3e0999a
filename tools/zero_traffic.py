"""ZeRO traffic: a step's collectives of state over `data`, `fsdp`, `expert` and `context`, from
shapes and layout only.

Counts follow ZeRO (arXiv 1910.02054) and layered gradient accumulation (arXiv 2106.02679); the
suite compares them with compiled programs, array by array. Not included: collectives over `tensor`,
collectives over `context` of attention and of gradients, which the compiler inserts, and reductions
of scalars.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxscale.config import Config, zero_stage
from jaxscale.config.layout import Layout
from jaxscale.sharding.model_trace import ParamShape, itemsize
from jaxscale.training.tracing.traces import model_trace

Sent = tuple[ParamShape, int]
"""An array and the number of layers sent as one."""


@dataclass(frozen=True)
class ZeroTraffic:
    """Collectives of a step with one purpose."""

    what: str  # the purpose
    kind: str  # of `compiled.collectives.KINDS`
    axes: tuple[str, ...]
    arrays: int  # per step, each repetition counted
    num_bytes: int  # of the whole arrays: gathered, or before the scatter


def step_traffic(config: Config) -> list[ZeroTraffic]:
    """Every collective of state over data, fsdp, expert and context, except reductions over context
    only, and without axes of size 1.

    Args:
      config: its layout resolved.
    """
    return [*_traffic(config, of_experts=False), *_traffic(config, of_experts=True)]


def _traffic(config: Config, *, of_experts: bool) -> list[ZeroTraffic]:
    """`step_traffic` of experts, or of all other parameters; each rank of expert has others."""
    model, layout = config.model, config.layout
    stage, layers = layout.zero_stage, model.num_layers
    compute, reduced = itemsize(model.compute_dtype), itemsize(config.optimizer.reduced_in)
    arrays = [one for one in model_trace(model).parameters if ("experts" in one.axes) == of_experts]
    # A tied head reads the embedding and has a separate gradient of it.
    tied = [(array, 1) for array in arrays if model.tied_embeddings and array.name == "tokens"]
    outer = [(array, 1) for array in arrays if array.part != "layers"]
    once = outer + tied
    layer = [array for array in arrays if array.part == "layers"]
    stacks = [(array, layers if array.part == "layers" else 1) for array in arrays]

    def over_embed(sent: list[Sent], wanted: bool = True) -> list[Sent]:
        return [item for item in sent if ("embed" in item[0].axes) == wanted]

    count, scattered = layout.num_groups, ("fsdp",) if of_experts else ("fsdp", "expert")
    zero, ranks = (*scattered, "context"), layout.zero_ranks // (layout.expert if of_experts else 1)
    visits = [(array, 1) for array in layer for _ in range(layers)] + once
    left = visits if count == 1 or zero_stage.reduces_last(layout) else stacks
    rows: list[tuple[Any, ...]] = [
        ("whole gradients", "all-reduce", ("data", *scattered), left, 1, reduced, 1)
    ]
    if zero_stage.shards_state(stage):
        # If gathered weights are kept, a tied head uses the gathered embedding.
        kept = not zero_stage.gathers_each_pass(stage)
        passes = [(array, 1) for array in layer for _ in range(layers if kept else 2 * layers - 1)]
        times, read, head = (1, outer, []) if kept else (count, once, [])
        if layout.context > 1 and not kept:
            # The head's columns are divided over context, after the gather.
            read, head = (outer, tied) if tied else _without_head(outer)
        reduces = count if zero_stage.scatters(stage) else 1
        made, parts = over_embed(visits), layout.context
        whole = over_embed(left, wanted=False)
        rows = [
            ("weights of layers", "all-gather", zero, over_embed(passes), times, compute, 1),
            ("weights of the rest", "all-gather", zero, over_embed(read), times, compute, 1),
            ("the head's", "all-gather", scattered, head, times, compute, layout.context),
            ("gradients", "reduce-scatter", scattered, made, reduces, reduced, parts),
            ("gradient shards", "all-reduce", ("data",), over_embed(left), 1, reduced, ranks),
            ("whole gradients", "all-reduce", ("data", *scattered), whole, 1, reduced, 1),
        ]
    found = [_collective(layout, *row) for row in rows]
    return [one for one in found if one.axes and one.arrays]


def _without_head(outer: list[Sent]) -> tuple[list[Sent], list[Sent]]:
    """All arrays without the matrix of an untied head, and that."""
    head = [item for item in outer if item[0].part == "head" and "vocab" in item[0].axes]
    return [item for item in outer if item not in head], head


def _collective(
    layout: Layout,
    what: str,
    kind: str,
    axes: Sequence[str],
    sent: list[Sent],
    times: int,
    width: int,
    parts: int,
) -> ZeroTraffic:
    axes = tuple(axis for axis in axes if layout.sizes[axis] > 1)
    sizes = [repeats * one.shard_size(layout, over_fsdp=False) // parts for one, repeats in sent]
    return ZeroTraffic(what, kind, axes, len(sent) * times, sum(sizes) * times * width)
