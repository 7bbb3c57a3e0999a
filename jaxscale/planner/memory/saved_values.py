"""Bytes that a layer saves for its backward pass, in a layout: of the values that tracing found."""

from typing import Any

from jaxscale.config import Config
from jaxscale.config.layout import Layout, parse_remat
from jaxscale.ops.sizes import LANES
from jaxscale.planner.model.traces import saved_values
from jaxscale.sharding.model_trace import Ints, SavedValue, SavedValues, maximum, select

SUBLANES = 8
"""Rows of a tile of LANES columns in a TPU's memory."""


def values_of(config: Config, remat: str, *, piped: bool = False) -> SavedValues:
    """What the layers save under a policy; in a pipeline whose table recomputes passes, what they
    save without one."""
    if piped and parse_remat(remat).kept_passes is not None:
        remat = "none"
    data = config.data
    return saved_values(config.model, data.seq_len, data.output_len, remat, piped=piped)


def layer_bytes(config: Config, loop: Any, remat: str) -> Ints:
    """Of a layer of a loop and a micro-batch, under a policy.

    Args:
      loop: a `LayerLoop`.
    """
    layout, values = config.layout, values_of(config, remat).of(loop.part).values
    gathered = select(layout.tensor_rows > 1, layout.tensor_columns, 1)
    per = {
        unit: sum(_bytes(one, layout, gathered) for one in values if one.per == unit)
        for unit in ("sequence", "row")
    }
    return (loop.tokens * per["sequence"] // loop.length + loop.rows * per["row"]) // layout.tensor


def buffer_bytes(config: Config, loop: Any, held: str, *, tiled: bool) -> Ints:
    """Of a layer in a slot of a pipeline's buffer, and a micro-batch: what matmuls gathered over
    columns of tensor is saved whole.

    Args:
      held: of `SavedValue`.
      tiled: whether heads and their features are padded to whole tiles, as in a TPU's memory.
    """
    layout, total = config.layout, {"sequence": 0, "row": 0}
    for one in values_of(config, layout.remat, piped=True).of(loop.part).values:
        if one.held == held:
            each = _tiled_bytes if tiled and one.heads > 1 else _bytes
            total[one.per] = total[one.per] + each(one, layout, layout.tensor_columns)
    tokens = loop.tokens * total["sequence"] // loop.length
    return (tokens + loop.rows * total["row"]) // layout.tensor


def _bytes(value: SavedValue, layout: Layout, gathered: Ints) -> Ints:
    """Of a sequence or a row, of all ranks of tensor together; where it has rows, those repeat what
    lies between matmuls.

    Args:
      gathered: ranks that have what a matmul gathered.
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
