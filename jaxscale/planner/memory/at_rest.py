"""Memory between steps, to the byte: parameters, optimizer state, batch."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxscale.config import DataConfig, zero_stage
from jaxscale.config.layout import Layout
from jaxscale.config.model import ModelConfig, ModelSettings
from jaxscale.config.optimizer import (
    FACTORED_SIZE,
    OptimizerConfig,
    ParamGroup,
    check_groups,
    find_group,
    matrix_dims,
)
from jaxscale.sharding.host_arrays import StateArray, choose_host_arrays
from jaxscale.sharding.model_trace import (
    Ints,
    ParamShape,
    Rows,
    TableShape,
    itemsize,
    maximum,
    select,
    stored_bytes,
)
from jaxscale.training.tracing.traces import model_trace, saved_values

BATCH_BYTES = 5 * 4  # per token: the fields of `Batch`
POSITION_BYTES = 4  # per token, of these and of an encoder's
COUNT_BYTES = 4  # an int32 scalar
COUNTS = {"adamw": 2, "lion": 2, "adafactor": 2, "muon": 3}
"""Scalars of an optimizer's state: its step counts (Muon uses AdamW for vectors), and the
learning-rate schedule's."""
MUON_COEFFICIENTS = 3 * 4  # float32, in its state


def whole_state_bytes(model: ModelSettings, optimizer: OptimizerConfig) -> Ints:
    """Parameters, moments and tables of the whole model, as a checkpoint has them."""
    whole, rows = Layout(data=1), model_trace(model).stack_layers
    tables = sum(map(_rows_bytes, model_trace(model).tables))
    return (
        parameter_bytes(model, whole, rows) + moment_bytes(model, optimizer, whole, rows) + tables
    )


def unchanged_bytes(model: ModelSettings, groups: tuple[ParamGroup, ...]) -> Ints:
    """Parameters that no step changes, whose files checkpoints share."""
    trace = model_trace(model)
    unchanged = [
        array
        for array in trace.parameters
        if find_group(array.path, groups).frozen or (array.frozen and not trace.adjusts)
    ]
    return _bytes_of(unchanged, Layout(data=1), trace.stack_layers)


def parameter_bytes(model: ModelSettings, layout: Layout, rows: Rows) -> Ints:
    """Parameters, sharded by ZeRO from stage 1.

    Args:
      rows: layers of each stack that a device allocates.
    """
    return _bytes_of(model_trace(model).parameters, layout, rows)


def _bytes_of(arrays: Iterable[ParamShape], layout: Layout, rows: Rows) -> Ints:
    stage = layout.zero_stage
    return sum(
        _repeats(array, rows)
        * stored_bytes(
            array.dtype,
            array.shard_size(layout, over_fsdp=zero_stage.shards_state(stage), at_rest=True),
        )
        for array in _stacks(arrays)
    )


def moment_bytes(
    model: ModelSettings, optimizer: OptimizerConfig, layout: Layout, rows: Rows
) -> Ints:
    """Optimizer moments, sharded by ZeRO from stage 1; `rows` as above. Frozen parameters
    have no moments."""
    stage, widths = layout.zero_stage, (optimizer.moment_dtype, optimizer.second_moment_dtype)
    return sum(
        itemsize(width)
        * _repeats(moment, rows)
        * moment.shard_size(layout, over_fsdp=zero_stage.shards_state(stage), at_rest=True)
        for array in _stacks(trained_parameters(model, optimizer.groups))
        for width, moments in zip(widths, _moments(optimizer.name, array), strict=True)
        for moment in moments
    )


def table_bytes(
    model: ModelSettings, optimizer: OptimizerConfig, data: DataConfig, layout: Layout
) -> Ints:
    """A device's part of the embedding tables: rows, Adagrad's number for each, and gradients that
    are not applied yet."""
    waiting = optimizer.table_staleness * sum(
        size + COUNT_BYTES * count
        for count, size in zip(*_looked_up(model, data, layout), strict=True)
    )
    return sum(map(_rows_bytes, model_trace(model).tables)) // layout.num_devices + waiting


def vector_bytes(model: ModelSettings, data: DataConfig, layout: Layout) -> Ints:
    """A device's rows of tables that a step has looked up; with several micro-batches also the
    gradients of the earlier ones, and without a pipeline the rows in their order."""
    several = layout.microbatches > 1
    copies = 1 + several + (several & (layout.pipeline == 1))
    return copies * sum(_looked_up(model, data, layout)[1])


def _rows_bytes(table: TableShape) -> int:
    return table.rows * (itemsize(table.dtype) * table.width + max(4, itemsize(table.dtype)))


def _looked_up(model: ModelSettings, data: DataConfig, layout: Layout) -> tuple[list, list]:
    """Ids of each table in a device's part of the batch, and bytes of their rows."""
    tables = model_trace(model).tables
    if not tables:
        return [], []
    saved = saved_values(model, data.seq_len, data.output_len, "full", piped=False)
    shards = layout.batch_shards * layout.context
    counts = [data.global_batch_size * ids // shards for ids in saved.table_ids]
    sizes = [n * one.width * itemsize(one.dtype) for n, one in zip(counts, tables, strict=True)]
    return counts, sizes


def planned_arrays(
    model: ModelSettings, optimizer: OptimizerConfig, layout: Layout, rows: Rows
) -> list[StateArray]:
    """The parameters and moments of a state, as `training.state_placement.state_arrays` finds
    them."""
    trace, shards = model_trace(model), zero_stage.shards_state(layout.zero_stage)
    found = []

    def add(path: str, moment: str, array: ParamShape, dtype: str) -> None:
        layers = trace.stack_layers.get(array.part, 1) if array.axes[0] == "layers" else 1
        size = array.shard_size(layout, over_fsdp=shards, at_rest=True)
        whole = stored_bytes(dtype, layers * array.size)
        mine = stored_bytes(dtype, _repeats(array, rows) * size)
        found.append(StateArray(path, moment, array.axes, whole, mine))

    for array in _stacks(trace.parameters):
        add(array.path, "", array, array.dtype)
    widths = ("mu", optimizer.moment_dtype), ("nu", optimizer.second_moment_dtype)
    for array in _stacks(trained_parameters(model, optimizer.groups)):
        moments = _moments(optimizer.name, array)
        for (name, width), several in zip(widths, moments, strict=True):
            for moment in several:
                add(array.path, name, moment, width)
    return found


@dataclass(frozen=True)
class HostState:
    """Bytes of a device's state in host memory by `layout.offload_bytes`."""

    moments: Ints
    weights: Mapping[str, Ints]  # of each stack
    largest: Ints  # of one parameter and its moments


def host_state(
    model: ModelSettings, optimizer: OptimizerConfig, layout: Layout, rows: Rows
) -> HostState:
    """The part of a state in host memory; `rows` as above."""
    moments, weights = 0, dict.fromkeys(rows, 0)
    if not np.any(layout.offload_bytes):
        return HostState(moments, weights, 0)
    each: dict[str, Ints] = {}
    arrays = planned_arrays(model, optimizer, layout, rows)
    for one, is_moved in choose_host_arrays(arrays, layout.offload_bytes):
        here = select(is_moved, one.device_bytes)
        each[one.path] = each.get(one.path, 0) + here
        if one.moment:
            moments = moments + here
        else:
            weights[one.part] = weights[one.part] + here
    return HostState(moments, weights, maximum(*each.values()))


def host_totals(
    model: ModelSettings, optimizer: OptimizerConfig, layout: Layout, rows: Rows
) -> list[Ints]:
    """Bytes of the first array that can be in host memory, of the first two, and so on: the values
    of `layout.offload_bytes` that are whole arrays."""
    arrays = choose_host_arrays(planned_arrays(model, optimizer, layout, rows), 0)
    return list(itertools.accumulate(one.device_bytes for one, _ in arrays))


def count_bytes(optimizer: str) -> int:
    """Scalars of an optimizer's state."""
    return COUNT_BYTES * COUNTS[optimizer] + (MUON_COEFFICIENTS if optimizer == "muon" else 0)


def batch_bytes(model: ModelConfig, data: DataConfig, layout: Layout) -> Ints:
    """A device's shard of the batch, and the step counter."""
    shards = layout.batch_shards * layout.context
    tokens = data.global_batch_size * data.output_len // shards
    saved = saved_values(model, data.seq_len, data.output_len, "full", piped=False)
    extras = data.global_batch_size * saved.extra_bytes // shards
    found = BATCH_BYTES * tokens + extras + COUNT_BYTES
    if not model.num_encoder_layers:
        return found
    source = data.global_batch_size * data.seq_len // shards
    # The compiler drops positions, which only barriers read: before the layer loop gathers weights,
    # and between accumulation groups where only the first gathers or only the last reduces.
    several, stage = layout.zero_ranks > 1, layout.zero_stage
    gathers = several & zero_stage.shards_state(stage)
    separate = (gathers | zero_stage.reduces_last(layout)) & (layout.num_groups > 1)
    each = several & zero_stage.gathers_each_pass(stage)
    read = (each | separate) & (layout.pipeline == 1)
    return found - select(read, 0, POSITION_BYTES * (tokens + source))


def check_param_groups(model: ModelSettings, groups: tuple[ParamGroup, ...]) -> None:
    """Refuses parameter groups that a run would refuse.

    Raises:
      ValueError: a group changes nothing, or every parameter is frozen.
    """
    arrays = model_trace(model).parameters
    moved = [array.path for array in arrays if array.frozen]
    check_groups(groups, sorted(array.path for array in arrays), moved)


@functools.lru_cache(maxsize=64)
def trained_parameters(
    model: ModelSettings, groups: tuple[ParamGroup, ...]
) -> tuple[ParamShape, ...]:
    """Parameters that neither an optimizer group nor the model freezes. The model freezes routers'
    biases, and with adapters all other weights."""
    return tuple(
        array
        for array in model_trace(model).parameters
        if not (array.frozen or find_group(array.path, groups).frozen)
    )


def _stacks(arrays: Iterable[ParamShape]) -> list[ParamShape]:
    """The parameters, each of a layer with the stack's dimension, of size 1."""
    return [
        dataclasses.replace(array, axes=("layers", *array.axes), shape=(1, *array.shape))
        if array.in_layers
        else array
        for array in arrays
    ]


def _repeats(array: ParamShape, rows: Rows) -> Ints:
    return rows.get(array.part, 1) if array.axes[0] == "layers" else 1


def _moments(name: str, array: ParamShape) -> tuple[list[ParamShape], list[ParamShape]]:
    """First and second moments that an optimizer keeps of a parameter."""
    if name == "lion" or (name == "muon" and array.in_layers and sides(array)):
        return [array], []
    if name != "adafactor":
        return [array], [array]
    placeholder = dataclasses.replace(array, axes=("one",), shape=(1,))
    if not sides(array) or min(map(math.prod, sides(array))) < FACTORED_SIZE:
        return [], [array, placeholder, placeholder]
    # Factored: means over columns and over rows.
    means = [_without(array, dims) for dims in matrix_dims(array.axes) or ()]
    return [], [*means, placeholder]


def sides(array: ParamShape) -> list[list[int]]:
    """Sizes of a matrix's rows and columns; [] for a vector. Each expert has a separate matrix."""
    return [[array.shape[dim] for dim in dims] for dims in matrix_dims(array.axes) or ()]


def _without(array: ParamShape, dims: Sequence[int]) -> ParamShape:
    left = [dim for dim in range(len(array.shape)) if dim not in dims]
    axes, shape = (tuple(values[dim] for dim in left) for values in (array.axes, array.shape))
    return dataclasses.replace(array, axes=axes, shape=shape)
