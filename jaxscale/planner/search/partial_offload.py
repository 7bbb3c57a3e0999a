"""The least `layout.offload_bytes` with which layouts fit on a device."""

import dataclasses

import numpy as np

from jaxscale.planner.model.layout_batch import LayoutBatch
from jaxscale.planner.search.space import Query

ROUNDS = 3
"""The layers' shards that are copied to the device need memory, too: after the first choice some
layouts may need another array or two in host memory."""


def least_offload(query: Query, layouts: LayoutBatch) -> LayoutBatch:
    """Layouts without a pipeline, with the fewest arrays of their state in host memory with which
    each fits; all of them where none does."""
    model, count = query.planned_model, len(layouts)
    totals = model.host_totals(layouts)
    if not totals:
        return layouts
    steps = np.stack([np.broadcast_to(one, (count,)) for one in (0, *totals)])
    moved = np.zeros(count, int)
    for _ in range(ROUNDS):
        filled = dataclasses.replace(layouts, offload_bytes=moved)
        over = model.memory(filled, None, query.back_end).peak - query.limit_bytes
        wanted = moved + np.maximum(np.broadcast_to(over, (count,)), 0)
        index = np.minimum((steps < wanted).sum(0), len(totals))
        moved = np.take_along_axis(steps, index[None], 0)[0]
    return dataclasses.replace(layouts, offload_bytes=moved)
