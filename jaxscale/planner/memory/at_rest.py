"""Memory between steps, to the byte: parameters, optimizer state, batch."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

from jaxscale.config import Config, zero_stage
from jaxscale.config.layout import Layout
from jaxscale.config.model import ModelSettings
from jaxscale.config.optimizer import (
    FACTORED_SIZE,
    ParamGroup,
    check_groups,
    find_group,
    matrix_dims,
)
from jaxscale.planner.memory.saved_values import values_of
from jaxscale.planner.memory.zero_traffic import reduces_last
from jaxscale.sharding.model_trace import Ints, ParamShape, Rows, itemsize, select
from jaxscale.training.tracing.traces import model_trace

BATCH_BYTES = 5 * 4  # per token: the fields of `Batch`
FURTHER_BYTES = 2 * 4  # per token and module that predicts further ones
SOURCE_BYTES = 3 * 4  # per token of an encoder: those of `Batch.extras`
POSITION_BYTES = 4  # per token, of these
COUNT_BYTES = 4  # an int32 scalar
COUNTS = {"adamw": 2, "lion": 2, "adafactor": 2, "muon": 3}
"""Scalars of an optimizer's state: step counts of its own (Muon uses AdamW for vectors), and of the
learning-rate schedule."""
MUON_COEFFICIENTS = 3 * 4  # float32, in its state


def whole_state_bytes(config: Config) -> Ints:
    """Parameters and moments of the whole model, as a checkpoint has them."""
    whole = dataclasses.replace(config, layout=Layout(data=1))
    rows = model_trace(config.model).stack_layers
    return parameter_bytes(whole, rows) + moment_bytes(whole, rows)


def unchanged_bytes(config: Config) -> Ints:
    """Of these, the parameters that no step changes, whose files checkpoints share."""
    whole = dataclasses.replace(config, layout=Layout(data=1))
    model, groups = config.model, config.optimizer.groups
    trace = model_trace(model)
    unchanged = [
        array
        for array in trace.parameters
        if find_group(array.path, groups).frozen or (array.frozen and not trace.adjusts)
    ]
    return _bytes_of(unchanged, whole, model_trace(model).stack_layers)


def parameter_bytes(config: Config, rows: Rows) -> Ints:
    """The parameters, sharded over fsdp from ZeRO stage 1.

    Args:
      rows: layers of each stack that a device allocates.
    """
    return _bytes_of(model_trace(config.model).parameters, config, rows)


def _bytes_of(arrays: Iterable[ParamShape], config: Config, rows: Rows) -> Ints:
    layout, stage = config.layout, config.layout.zero_stage
    return sum(
        itemsize(array.dtype)
        * _repeats(array, rows)
        * array.shard_size(layout, over_fsdp=zero_stage.shards_state(stage), at_rest=True)
        for array in _stacks(arrays)
    )


def moment_bytes(config: Config, rows: Rows) -> Ints:
    """The optimizer's moments, sharded over fsdp from ZeRO stage 1; `rows` as above. Frozen
    parameters have none."""
    layout, optimizer = config.layout, config.optimizer
    stage, widths = layout.zero_stage, (optimizer.moment_dtype, optimizer.second_moment_dtype)
    return sum(
        itemsize(width)
        * _repeats(moment, rows)
        * moment.shard_size(layout, over_fsdp=zero_stage.shards_state(stage), at_rest=True)
        for array in _stacks(trained_parameters(config))
        for width, moments in zip(widths, _moments(optimizer.name, array), strict=True)
        for moment in moments
    )


def count_bytes(config: Config) -> int:
    """The rest of the optimizer's state."""
    name = config.optimizer.name
    return COUNT_BYTES * COUNTS[name] + (MUON_COEFFICIENTS if name == "muon" else 0)


def batch_bytes(config: Config) -> Ints:
    """A device's shard of the batch, and the step counter."""
    layout, data = config.layout, config.data
    shards = layout.batch_shards * layout.context
    tokens = data.global_batch_size * data.output_len // shards
    found = (BATCH_BYTES + FURTHER_BYTES * config.model.prediction_depth) * tokens + COUNT_BYTES
    if not config.model.num_encoder_layers:
        return found + data.global_batch_size * values_of(config, "full").extra_bytes // shards
    source = data.global_batch_size * data.seq_len // shards
    # Nothing reads positions but barriers: before the layer loop gathers weights, and between
    # accumulation groups of which the first gathers, or the last reduces, what others do not.
    several, stage = layout.zero_ranks > 1, layout.zero_stage
    gathers = several & zero_stage.shards_state(stage)
    apart = (gathers | reduces_last(layout)) & (layout.num_groups > 1)
    each = several & zero_stage.gathers_each_pass(stage)
    read = (each | apart) & (layout.pipeline == 1)
    return found + SOURCE_BYTES * source - select(read, 0, POSITION_BYTES * (tokens + source))


def check_param_groups(config: Config) -> None:
    """Refuses groups of the optimizer that a run would refuse.

    Raises:
      ValueError: one changes nothing, or all is frozen.
    """
    arrays = model_trace(config.model).parameters
    moved = [array.path for array in arrays if array.frozen]
    check_groups(config.optimizer.groups, sorted(array.path for array in arrays), moved)


def trained_parameters(config: Config) -> tuple[ParamShape, ...]:
    """Those that no group of the optimizer freezes, nor the model itself: the biases of routers,
    and with adapters all others."""
    return _trained(config.model, config.optimizer.groups)


@functools.lru_cache(maxsize=64)
def _trained(model: ModelSettings, groups: tuple[ParamGroup, ...]) -> tuple[ParamShape, ...]:
    return tuple(
        array
        for array in model_trace(model).parameters
        if not (array.frozen or find_group(array.path, groups).frozen)
    )


def _stacks(arrays: Iterable[ParamShape]) -> list[ParamShape]:
    """Those of the layers with the stack's dimension, of size 1."""
    return [
        dataclasses.replace(array, axes=("layers", *array.axes), shape=(1, *array.shape))
        if array.in_layers
        else array
        for array in arrays
    ]


def _repeats(array: ParamShape, rows: Rows) -> Ints:
    return rows.get(array.part, 1) if array.axes[0] == "layers" else 1


def _moments(name: str, array: ParamShape) -> tuple[list[ParamShape], list[ParamShape]]:
    """The first and the second moments that an optimizer keeps of a parameter."""
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
    """The sizes of a matrix's rows and columns; [] of a vector. Each expert has a matrix of its
    own."""
    return [[array.shape[dim] for dim in dims] for dims in matrix_dims(array.axes) or ()]


def _without(array: ParamShape, dims: Sequence[int]) -> ParamShape:
    left = [dim for dim in range(len(array.shape)) if dim not in dims]
    axes, shape = (tuple(values[dim] for dim in left) for values in (array.axes, array.shape))
    return dataclasses.replace(array, axes=axes, shape=shape)
