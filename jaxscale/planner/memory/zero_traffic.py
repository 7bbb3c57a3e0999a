"""Collectives of state in a step over `data`, `fsdp` and `context`, from the model's shapes and the
layout alone.

Counts follow ZeRO (arXiv 1910.02054) and layered gradient accumulation (arXiv 2106.02679); the
suite compares them with compiled programs, array by array. Collectives over `tensor`, those of
attention and of gradients over `context`, which the compiler writes, and reductions of scalars are
not included.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxscale.config import Config, zero_stage
from jaxscale.config.layout import Layout
from jaxscale.sharding.model_trace import ParamShape, itemsize
from jaxscale.training.tracing.traces import model_trace


@dataclass(frozen=True)
class ZeroTraffic:
    """Collectives of a step that serve one purpose."""

    what: str
    kind: str  # of `compiled.collectives.KINDS`
    axes: tuple[str, ...]
    arrays: int  # per step, each repetition counted
    num_bytes: int  # of the whole arrays: gathered, or before the scatter


def reduces_last(layout: Layout) -> Any:
    """Whether the last of several visits reduces what the others do not."""
    return zero_stage.remains(layout.zero_stage, layout.fsdp, layout.data * layout.expert)


def step_traffic(config: Config) -> list[ZeroTraffic]:
    """Every collective of state over data, fsdp and context but the reductions over context alone;
    those over axes of size 1 do not exist.

    Args:
      config: its layout resolved.
    """
    model, layout = config.model, config.layout
    stage, layers = layout.zero_stage, model.num_layers
    compute, reduced = itemsize(model.compute_dtype), itemsize(config.optimizer.reduced_in)
    arrays = model_trace(model).parameters
    # A tied head reads the embedding and has its own gradient of it.
    tied = [array for array in arrays if model.tied_embeddings and array.name == "tokens"]
    outer = [(array, 1) for array in arrays if array.part != "layers"]
    once = outer + [(array, 1) for array in tied]
    layer = [array for array in arrays if array.part == "layers"]
    stacks = [(array, layers if array.part == "layers" else 1) for array in arrays]

    zero = ["fsdp", "context"]
    count = layout.num_groups
    found = []

    def add(what, kind, axes, sent: Iterable[tuple[ParamShape, int]], times, width, *, parts=1):
        axes = tuple(axis for axis in axes if getattr(layout, axis) > 1)
        sent = list(sent)
        if not axes or not sent:
            return
        sizes = [
            repeats * array.shard_size(layout, over_fsdp=False) // parts for array, repeats in sent
        ]
        found.append(ZeroTraffic(what, kind, axes, len(sent) * times, sum(sizes) * times * width))

    def over_embed(sent, wanted=True):
        return [item for item in sent if ("embed" in item[0].axes) == wanted]

    visits = [(array, 1) for array in layer for _ in range(layers)] + once
    shards, scatters = zero_stage.shards_state(stage), zero_stage.scatters(stage)
    if shards:
        # A tied head is the embedding where what is gathered is kept.
        kept = not zero_stage.gathers_each_pass(stage)
        passes = [(array, 1) for array in layer for _ in range(layers if kept else 2 * layers - 1)]
        times = 1 if kept else count
        read = outer if kept else once
        add("weights of layers", "all-gather", zero, over_embed(passes), times, compute)
        add("weights of embedding and head", "all-gather", zero, over_embed(read), times, compute)
        add(
            "gradients of each visit" if scatters else "gradients of the last visit",
            "reduce-scatter",
            ["fsdp"],
            over_embed(visits),
            count if scatters else 1,
            reduced,
            parts=layout.context,
        )
    left = visits if count == 1 or reduces_last(layout) else stacks
    if shards:
        add(
            "gradient shards",
            "all-reduce",
            ["data"],
            over_embed(left),
            1,
            reduced,
            parts=layout.zero_ranks,
        )
        left = over_embed(left, wanted=False)
    add("whole gradients", "all-reduce", ["data", "fsdp"], left, 1, reduced)
    return found
