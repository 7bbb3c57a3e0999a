"""Bytes that a layer saves for its backward pass in a layout, from its traced values."""

from jaxscale.config.layout import Layout
from jaxscale.ops.sizes import LANES
from jaxscale.pipeline.buffer_slots import GRADIENT, MEMORY
from jaxscale.planner.memory.layer_loop import LayerLoop
from jaxscale.sharding.model_trace import Ints, SavedValue, maximum, select

SUBLANES = 8
"""Rows of a tile of LANES columns in a TPU's memory."""


def remat_saved_bytes(loop: LayerLoop, remat: str) -> Ints:
    """Saved bytes of a layer and a micro-batch under a policy."""
    layout, values = loop.layout, loop.saved(remat).values
    gathered = select(layout.tensor_rows > 1, layout.tensor_columns, 1)
    per = {
        unit: sum(_bytes(one, layout, gathered) for one in values if one.per == unit)
        for unit in ("sequence", "row")
    }
    return (loop.tokens * per["sequence"] // loop.length + loop.rows * per["row"]) // layout.tensor


def layer_saved_bytes(loop: LayerLoop) -> Ints:
    """Saved activations of a layer and a micro-batch."""
    return remat_saved_bytes(loop, loop.layout.remat)


def recomputed_bytes(loop: LayerLoop) -> Ints:
    """Bytes of a layer that its backward pass recomputes."""
    if not loop.layout.remat_policy.by_names:
        return 0
    return remat_saved_bytes(loop, "none") - layer_saved_bytes(loop)


def slot_bytes(loop: LayerLoop, held: str, *, tiled: bool) -> Ints:
    """Bytes of a layer and a micro-batch in a slot of a pipeline's buffer: values that matmuls
    gather over tensor columns are saved whole.

    Args:
      held: of `SavedValue`.
      tiled: whether heads and their features are padded to whole tiles, as in a TPU's memory.
    """
    layout, total = loop.layout, {"sequence": 0, "row": 0}
    for one in loop.saved(layout.remat, piped=True).values:
        if one.held == held:
            each = _tiled_bytes if tiled and one.heads > 1 else _bytes
            total[one.per] = total[one.per] + each(one, layout, layout.tensor_columns)
    # Of whole sequences, not of a segment.
    whole = layout.segments if held in (MEMORY, GRADIENT) else 1
    tokens = loop.tokens * whole * total["sequence"] // loop.length
    return (tokens + loop.rows * total["row"]) // layout.tensor


def _bytes(value: SavedValue, layout: Layout, gathered: Ints) -> Ints:
    """Bytes per sequence or row, all tensor ranks together; where tensor has rows, they repeat the
    values between matmuls.

    Args:
      gathered: ranks that have the values a matmul gathered.
    """
    repeats = {
        "stream": 1,
        "gathered": gathered,
        "features": layout.tensor_rows,
        "whole": layout.tensor,
    }
    return round(value.num_bytes) * repeats[value.spread]


def _tiled_bytes(value: SavedValue, layout: Layout, _: Ints) -> Ints:
    columns = layout.tensor_columns
    heads = columns * -(-maximum(1, value.heads // columns) // SUBLANES) * SUBLANES
    features = -(-value.features // LANES) * LANES
    each = round(value.count * value.entries) * value.element_bytes
    return each * heads * features * layout.tensor_rows
