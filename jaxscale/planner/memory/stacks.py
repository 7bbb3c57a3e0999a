"""Memory of an encoder while the decoder computes, and of the decoder while the encoder does: see
`training.layers`."""

import dataclasses
from typing import Any

import numpy as np

from jaxscale.planner.memory.layer_loop import LayerLoop, stream_bytes
from jaxscale.planner.memory.saved_values import layer_saved_bytes
from jaxscale.planner.memory.transients import Transients
from jaxscale.sharding.model_trace import Ints, select


def held_between_bytes(loops: list[LayerLoop]) -> Ints:
    """Bytes of the stacks before the last of `loops`: the output as it leaves the layers and as the
    decoder reads it, with its gradient; and the last layer, whose backward pass reuses its weights
    and whose activations are outside the loop."""
    held: Ints = 0
    for loop in loops[:-1]:
        gradient = max(4 // loop.compute, 1)
        held = held + (2 + gradient) * loop.group * stream_bytes(loop)
        held = held + loop.last_outside * loop.group * layer_saved_bytes(loop)
        held = held + select(loop.gathers, loop.compute * loop.weights)
    return held


def stacks_outer_gradients(loop: LayerLoop, transients: Transients, *, is_last: bool) -> Ints:
    """Gradients of the head during the decoder, and of the embedding, by the decoder's tokens,
    during the encoder: whole, unless they are added to whole accumulators in place. The same for
    layers with experts and the layers before them.

    In a single visit a GPU adds the rows of both stacks to the embedding's together, at the end,
    and the head's are reduced during the layers, or during the MTP modules, whose working set has
    them."""
    wide = max(loop.compute, 4)
    embed = 0 if is_last else wide * loop.trained.elements("embed")
    whole = loop.accumulated * loop.trained.head_elements()
    shard = loop.single * loop.accumulated * loop.trained.head_elements(loop.scatters)
    if not transients.late:
        return shard + embed
    if transients.in_place and loop.model.prediction_depth:
        return shard
    # The head's are reduced while weights are gathered.
    head = whole if is_last else select(loop.gathers, shard, whole)
    in_place = transients.in_place & np.logical_not(loop.scatters | loop.single)
    several = select(in_place, 0, head + embed)
    if transients.in_place and loop.has_experts:
        several = 0  # the head's are reduced before the loop over layers
    return select(transients.in_place & loop.single, shard + whole, several)


def larger(first: Any, second: Any) -> Any:
    """The larger of two `Memory` records; for each of N layouts."""
    more = second.temporaries > first.temporaries
    fields = (field.name for field in dataclasses.fields(first))
    return type(first)(
        **{name: select(more, getattr(second, name), getattr(first, name)) for name in fields}
    )
