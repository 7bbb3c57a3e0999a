"""Segments of sequences in a search: a pipeline's schedule is replaced by `seq1f1b` and
`seq1f1b_interleaved`, with segments of equal length and of about equal time."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from jaxscale.config.layout import Layout
from jaxscale.pipeline.partition import has_layers
from jaxscale.pipeline_schedules.shipped import SHIPPED
from jaxscale.planner.model.layout_batch import stack_layouts
from jaxscale.planner.search.pipeline_batch import uneven_cost
from jaxscale.planner.search.space import Query

COUNTS = 2, 4, 8
"""Numbers of segments that are tried."""

PARTS = 32
"""Parts of a sequence whose segments have several lengths: each segment has some of them."""

SPLITTING = tuple(one for one in SHIPPED if one.splits_sequences)


def split_sequences(query: Query, layout: Layout) -> Iterator[Layout]:
    """A pipeline's layout with segments, in each form that the engine accepts.

    Args:
      layout: of whole sequences.
    """
    remats = [query.pins["remat"]] if "remat" in query.pins else ["none", "full", layout.remat]
    remats = [one for one in dict.fromkeys(remats) if not one.startswith("keep:")]
    ranks, stacks = layout.pipeline, query.planned_model.stacks
    tried = [
        (schedule, chunks, count)
        for schedule, count in itertools.product(SPLITTING, COUNTS)
        if schedule.serves(
            ranks,
            layout.microbatches,
            chunks := min(schedule.searched_virtual_stages),
            count,
        )
        and has_layers(stacks, ranks * chunks)
    ]
    loads = _loads(query, layout) if tried else (0.0, 0.0)
    for schedule, chunks, count in tried:
        lengths = "", _equal_times(int(query.work.seq_len), *loads, count)
        for remat, lengths_text in itertools.product(remats, dict.fromkeys(lengths)):
            settings = {
                "schedule": schedule.name,
                "virtual_stages": chunks,
                "sequence_chunks": count,
                "segment_lengths": lengths_text,
                "remat": remat,
            }
            try:
                split = dataclasses.replace(layout, **settings)
            except ValueError:  # such as several lengths with a sliced head
                continue
            if not query.planned_model.refusal(split)[0]:
                yield split


def _loads(query: Query, layout: Layout) -> tuple[float, float]:
    """Seconds of a layer's passes, of core attention and of everything else."""
    cost = uneven_cost(query, stack_layouts([layout]))
    attention = sum(float(one[0, 0]) for one in cost.attention)
    every = sum(float(one[0, 0]) for stack in cost.stacks for one in stack.share)
    return attention, every - attention


def _equal_times(tokens: int, attention: float, linear: float, count: int) -> str:
    """`segment_lengths` of segments that take about equal time; "" for equal lengths.

    Core attention of the first x of a sequence takes x^2 of it, everything else x.
    """
    if tokens % PARTS:
        return ""
    wanted = np.arange(count + 1) / count * (linear + attention)
    ends = wanted / linear
    if attention:
        ends = (np.sqrt(linear**2 + 4 * attention * wanted) - linear) / (2 * attention)
    parts = np.diff(np.round(ends * PARTS).astype(int))
    if parts.min() < 1 or parts.min() == parts.max():
        return ""
    return ",".join(str(n * tokens // PARTS) for n in parts.tolist())
