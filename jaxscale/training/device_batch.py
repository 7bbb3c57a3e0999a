"""Host batches to device arrays: checks, order of the context ranks, transfer."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxscale.batch import Batch, ShardedBatch
from jaxscale.config import Config, DataConfig
from jaxscale.config.layout import Layout
from jaxscale.models.protocol import Model
from jaxscale.ops.attention.context_chunks import balanced_order
from jaxscale.sharding.layout_checks import check_divides, check_sequence


def shard_batch(
    batch: Batch,
    config: Config,
    sharding: NamedSharding,
    global_batch_size: int | None,
    model: Model,
) -> ShardedBatch:
    """`Engine.shard`, for a config's layout and the sharding of its batches.

    Args:
      model: has `prepare`, `num_classes` of the targets, and `tables`.
    """
    _check_fields(batch)
    _check_values(batch, config.model)
    batch = model.prepare(batch)
    _check_targets(batch, config.model.vocab_size, model.num_classes)
    _check_table_ids(batch, model)
    if config.data.one_document:
        _check_one_document(batch.segments, config.data.objective)
    rows, seq_len = batch.tokens.shape
    held = range(rows)
    if global_batch_size is not None:
        held, rows = local_rows(sharding, global_batch_size), global_batch_size
        if len(held) != len(batch.tokens):
            raise ValueError(
                f"the batch has {len(batch.tokens)} rows, and this process's devices take "
                f"{len(held)} of global_batch_size = {rows}; load the rows of engine.local_rows"
            )
    _check_shape(config.layout, config.data, rows, seq_len)
    for name, field in dict(batch.extras).items():
        try:
            _check_shape(config.layout, config.data, rows, field.shape[1])
        except ValueError as error:
            raise ValueError(f"batch.extras[{name!r}], as any sequence: {error}") from None
    every_row = np.arange(rows)
    local = {row: i for i, row in enumerate(held)}

    def on_devices(field: np.ndarray) -> jax.Array:
        order = balanced_order(field.shape[1], config.layout.context, config.layout.segments)

        def part(index):
            return field[[local[row] for row in every_row[index[0]]]][:, order[index[1]]]

        return jax.make_array_from_callback((rows, field.shape[1]), sharding, part)

    return ShardedBatch(*jax.tree.map(on_devices, batch))


def check_rows(layout: Layout, data: DataConfig, rows: int) -> None:
    """Refuses a number of rows that does not divide over the layout.

    Raises:
      ValueError: with the nearest number that does.
    """
    _check_shape(layout, data, rows, data.seq_len)


@functools.cache
def local_rows(sharding: NamedSharding, global_batch_size: int) -> tuple[int, ...]:
    """The rows of a batch on this process's devices, in order."""
    shape = (global_batch_size, sharding.mesh.shape["context"])
    indices = sharding.addressable_devices_indices_map(shape).values()
    every_row = np.arange(global_batch_size)
    return tuple(sorted({int(row) for index in indices if index for row in every_row[index[0]]}))


def unpack_sharded(batch: Batch) -> Batch:
    """The fields of a sharded batch, checked when a step is traced.

    Raises:
      ValueError: the batch was not returned by `Engine.shard`.
    """
    if not isinstance(batch, ShardedBatch):
        raise ValueError(
            f"the batch is a {type(batch).__name__}; a step needs the order of the context ranks: "
            "pass engine.shard(batch)"
        )
    return Batch(*batch)


def _check_fields(batch: Any) -> None:
    if isinstance(batch, ShardedBatch):
        raise ValueError("the batch is already a ShardedBatch: pass it to engine.step")
    if not isinstance(batch, Batch):
        raise ValueError(f"the batch is a {type(batch).__name__}; pass a jaxscale.Batch")
    fields = batch._asdict()
    extras = fields.pop("extras")
    for name in ("noise", "within", "vectors"):
        if fields.pop(name) != ():
            raise ValueError(f"batch.{name} is given; leave it out: each step makes its own")
    if extras != () and not isinstance(extras, dict):
        raise ValueError(f"batch.extras is a {_type(extras)}; pass a dictionary of arrays")
    for name, field in fields.items():
        _check_array(name, field, ("float32",) if name == "weights" else ("int32",))
        if field.shape != batch.tokens.shape:
            raise ValueError(
                f"batch.{name} has shape {field.shape}, and batch.tokens {batch.tokens.shape}; "
                "every field is [batch, seq]"
            )
    for name, field in dict(extras).items():
        _check_array(f"extras[{name!r}]", field, ("int32", "float32"))
        if len(field) != len(batch.tokens):
            raise ValueError(
                f"batch.extras[{name!r}] has shape {field.shape}, and batch.tokens "
                f"{batch.tokens.shape}; it is [batch, any length]"
            )


def _check_values(batch: Batch, model: Any) -> None:
    """Refuses values out of range, which a gather on a device would clip silently."""
    vocabulary, at_most = model.vocab_size, f"below model.vocab_size = {model.vocab_size}"
    if virtual := model.prompt_tokens:
        vocabulary, at_most = vocabulary + virtual, f"{at_most} + model.prompt_tokens = {virtual}"
    _check_range("tokens", batch.tokens, vocabulary, at_most)
    if model.max_positions is None:
        _check_range("positions", batch.positions, 2**31, "of 32 bits")
    else:
        at_most = f"below model.{model.position_setting} = {model.max_positions}"
        _check_range("positions", batch.positions, model.max_positions, at_most)
    if not np.isfinite(batch.weights).all():
        raise ValueError("batch.weights are not all finite; 0 leaves a token out of the loss")


def _check_targets(batch: Batch, vocab_size: int, num_classes: int | None) -> None:
    """Refuses targets that are not one of the head's classes, by default the vocabulary."""
    targets, end = np.where(batch.weights != 0, batch.targets, 0), num_classes or vocab_size
    at_most = f"below model.vocab_size = {vocab_size}"
    if end != vocab_size:
        at_most = f"below the {end} classes of the model's head (num_classes)"
    _check_range("targets with weights", targets, end, at_most)


def _check_table_ids(batch: Batch, model: Model) -> None:
    """Refuses ids of rows that a table does not have, which a lookup would take as none."""
    for name, table in model.tables.items():
        for field in table.ids:
            ids = dict(batch.extras).get(field)
            if ids is None:
                raise ValueError(f"batch.extras has no {field!r}, the ids of table {name!r}")
            if ids.size and not -1 <= ids.min() <= ids.max() < table.rows:
                raise ValueError(
                    f"batch.extras[{field!r}] are from {ids.min()} to {ids.max()}; table {name!r} "
                    f"has {table.rows} rows: at least -1, which is none, and at most "
                    f"{table.rows - 1}"
                )


def _check_one_document(segments: np.ndarray, objective: str) -> None:
    """Refuses rows of several documents, which attention kernels would not separate."""
    lengths = np.count_nonzero(segments == 1, axis=1)
    wrong = (segments != (np.arange(segments.shape[1]) < lengths[:, None])).any(axis=1)
    if wrong.any():
        raise ValueError(
            f"data.objective = {objective!r} takes rows of one document, segments 1 ... 1, then "
            f"padding, 0 ... 0, and row {wrong.argmax()} of batch.segments is not; pass such rows, "
            "or set data.objective = 'causal', which separates documents"
        )


def _check_range(name: str, field: np.ndarray, end: int, at_most: str) -> None:
    if field.size and not 0 <= field.min() <= field.max() < end:
        raise ValueError(
            f"batch.{name} are from {field.min()} to {field.max()}; they must be at least 0 and "
            f"{at_most}"
        )


def _check_array(name: str, field: Any, wanted: tuple[str, ...]) -> None:
    allowed = " or ".join(wanted)
    if not isinstance(field, np.ndarray):
        raise ValueError(f"batch.{name} is a {_type(field)}; pass a NumPy array of {allowed}")
    if field.dtype not in wanted:
        raise ValueError(f"batch.{name} is {field.dtype}; pass {allowed}")
    if field.ndim != 2:
        raise ValueError(f"batch.{name} has shape {field.shape}; it is [batch, seq]")


def _type(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__name__}"


def _check_shape(layout: Layout, data: DataConfig, rows: int, seq_len: int) -> None:
    """Refuses a shape, unless it is the config's, that does not divide over the layout."""
    if (rows, seq_len) != (data.global_batch_size, data.seq_len):
        check_divides(layout, rows)
        check_sequence(layout, dataclasses.replace(data, global_batch_size=rows, seq_len=seq_len))
