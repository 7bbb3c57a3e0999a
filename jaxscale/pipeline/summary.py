"""Printed summary of a run's pipeline, and advice against a large bubble. NumPy only."""

import dataclasses
from collections.abc import Iterator

from jaxscale.config.layout import Layout
from jaxscale.pipeline.stages import PipelineStages, open_stages

MUCH_IDLE = 1 / 3
"""Bubble (idle fraction of a step) above which a run warns."""


def table_rows(stages: PipelineStages) -> list[tuple[str, str]]:
    """(name, value) for a printed table."""
    order, slots = stages.table.order, stages.program.slots
    chunks = f" of {order.virtual_stages} chunks" if order.virtual_stages > 1 else ""
    chunks += f", {order.sequence_chunks} segments" if order.sequence_chunks > 1 else ""
    head = ("head", f"1/{order.ranks} of the vocabulary on each rank")
    used = ", ".join(f"{name} {count}" for name, count in slots.items() if count)
    return [
        ("schedule", f"{order.name}: {order.ranks} ranks{chunks}, {stages.table.ticks} ticks"),
        ("layers of each stage", ", ".join(map(str, stages.layers))),
        *[head] * stages.slices_head,
        ("idle", f"{idle(stages):.1%} of a step, in lockstep ticks"),
        ("slots", used),
    ]


def idle(stages: PipelineStages) -> float:
    """The bubble: the ranks' idle fraction of a step, with uneven stages and the head."""
    return stages.simulated.lockstep_idle_fraction


def advice(layout: Layout, stages: PipelineStages, sequences: int) -> str:
    """A warning about a bubble above a third of a step, with remedies; else "".

    Args:
      sequences: of a step, which the micro-batches must divide.
    """
    now = idle(stages)
    if now <= MUCH_IDLE:
        return ""
    better = []
    for change in _changes(layout, sequences):
        try:
            other = open_stages(
                dataclasses.replace(layout, **change), stages.stacks, stages.head_cost
            )
        except ValueError:
            continue
        if (share := idle(other)) < 0.9 * now:
            names = " and ".join(f"layout.{key} = {value!r}" for key, value in change.items())
            better.append((share, f"{names} ({share:.0%})"))
    ways = ", or ".join(text for _, text in sorted(better)[:3])
    hint = f"less with {ways}" if ways else "fewer ranks in layout.pipeline would help"
    return f"warning: the pipeline idles {now:.0%} of a step; {hint}"


def _changes(layout: Layout, sequences: int) -> Iterator[dict[str, int | str]]:
    for factor in (2, 4):
        if sequences % (factor * layout.microbatches * layout.batch_shards) == 0:
            yield {"microbatches": factor * layout.microbatches}
    for schedule in ("1f1b", "zb_h1"):
        yield {"schedule": schedule, "virtual_stages": 0}
    yield {"schedule": "zb_v", "virtual_stages": 2}
    for chunks in (2, 4):
        yield {"schedule": "interleaved", "virtual_stages": chunks}
