"""Kernels of a model: the functions that a layout replaces by distributed versions."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxscale.batch import Batch
from jaxscale.ops.dropout import dropout, jitter
from jaxscale.ops.embedding import lookup
from jaxscale.ops.experts.dispatch import ONE_DEVICE, Dispatch
from jaxscale.ops.loss import cross_entropy
from jaxscale.ops.rope import rotary
from jaxscale.ops.tensor_parallel import columns, linear, rows


def plain_lookup(
    table_VD: jax.Array, indices_BT: jax.Array, rows: str, dtype: DTypeLike
) -> jax.Array:
    """Rows, in `dtype`, of a table that is whole on this device; `rows` names its first axis."""
    del rows
    return lookup(table_VD, indices_BT, dtype)


def plain_dropout(
    x_BTD: jax.Array,
    noise_B: jax.Array,
    layer: jax.Array | int,
    site: int,
    rate: float,
    begin: jax.Array | int = 0,
) -> jax.Array:
    """`ops.dropout.dropout` for tokens in text order, from position `begin`."""
    return dropout(x_BTD, noise_B, layer, site, rate, begin + jnp.arange(x_BTD.shape[1]))


def plain_jitter(
    x_BTD: jax.Array,
    noise_B: jax.Array,
    layer: jax.Array | int,
    site: int,
    width: float,
    begin: jax.Array | int = 0,
) -> jax.Array:
    """`ops.dropout.jitter` for tokens in text order, from position `begin`."""
    return jitter(x_BTD, noise_B, layer, site, width, begin + jnp.arange(x_BTD.shape[1]))


def plain_extend(row_BS: jax.Array, new_BT: jax.Array, begin: jax.Array) -> jax.Array:
    """An array [B, S, ...] of rows with the entries of their tokens from position `begin`."""
    return jax.lax.dynamic_update_slice_in_dim(row_BS, new_BT, begin, axis=1)


@dataclass(frozen=True)
class Kernels:
    """The functions of a model that a layout may replace by others with the same result.

    The defaults run anywhere, with no mesh.

    `attend(q, k, v, segments, **settings)` has the settings of `ops.attention.attention`, per call:
    `sliding_window`, `causal`, `scale`, `soft_cap`, and for cross attention and T5's position bias
    `segments_BS`, `bias_bN` and `max_distance`, and for attention sinks `sinks_N`. If
    `rotary_scales` is set, a model with RoPE should multiply queries and keys by the square root of
    the scale as it rotates them (`factor`) and pass scale 1. The segments are the batch's: where
    `data.objective` makes every row one document, a causal kernel may ignore them.

    `columns` and `rows` are matmuls with weights that may be sharded over tensor; the weight of
    `linear` is whole on each rank.

    `key_heads` repeats key/value heads where ranks of tensor outnumber them. It takes arrays with
    the heads as second-to-last dimension: weights, biases, scales.

    `extend` writes the tokens from position `begin` into an array of their whole rows.

    `dispatch` describes the ranks that share the experts. `sum_over_batch_ranks` is an all-reduce
    over the batch axes.
    """

    attend: Callable[..., jax.Array]
    # XLA's partitioner fails on a gather of operands sharded over an automatic axis while other
    # axes are manual, so a sharded table needs `ops.embedding.spread_lookup`.
    lookup: Callable[[jax.Array, jax.Array, str, DTypeLike], jax.Array] = plain_lookup
    # Left to the partitioner, tensor parallel matmuls all-reduce each partial result separately:
    # three times for queries, keys and values (`ops.tensor_parallel.spread_columns`).
    columns: Callable[[jax.Array, Sequence[jax.Array]], tuple[jax.Array, ...]] = columns
    rows: Callable[[jax.Array, jax.Array], jax.Array] = rows
    linear: Callable[[jax.Array, jax.Array], jax.Array] = linear
    rotary: Callable[..., jax.Array] = rotary
    rotary_scales: bool = False  # with splash, which does not scale scores
    key_heads: Callable[[jax.Array], jax.Array] = lambda x: x
    cross_entropy: Callable[..., tuple[jax.Array, jax.Array]] = cross_entropy
    extend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] = plain_extend
    dropout: Callable[..., jax.Array] = plain_dropout
    jitter: Callable[..., jax.Array] = plain_jitter
    dispatch: Dispatch = ONE_DEVICE
    sum_over_batch_ranks: Callable[[jax.Array], jax.Array] = lambda x: x
    shard: Callable[[jax.Array, tuple[str, ...]], jax.Array] = lambda x, axes: x


KEYS, VALUES = "keys", "values"
"""What attention leaves to later parts of its rows, by names with the number of the attention."""


def kernels_within(
    kernels: Kernels, stream: Mapping[str, jax.Array], batch: Batch
) -> tuple[Kernels, dict[str, jax.Array]]:
    """The kernels for a batch that may be a part of longer rows (`Batch.within`): attention also
    reads the keys and values of earlier parts, from `stream`; noise is by positions in the rows.

    Returns:
      The kernels, and a dictionary, empty for whole rows, to which each call of attention adds its
      row's keys and values, its own written: `Stack.memory`.
    """
    if batch.within == ():
        return kernels, {}
    begin, segments_BS = batch.within
    left: dict[str, jax.Array] = {}

    def attend(
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        segments_BT: jax.Array,
        _: None = None,
        *tables: jax.Array | None,
        **settings: Any,
    ) -> jax.Array:
        number, row = len(left) // 2, []
        for name, new in ((KEYS, k_BTKH), (VALUES, v_BTKH)):
            old = stream[f"{name}_{number}"]
            row += [kernels.extend(old, new.astype(old.dtype), begin)]
            left[f"{name}_{number}"] = row[-1]
        tables = (*tables, None, None)[:2]
        return kernels.attend(q_BTNH, *row, segments_BT, segments_BS, *tables, begin, **settings)

    noise = {
        name: functools.partial(getattr(kernels, name), begin=begin)
        for name in ("dropout", "jitter")
    }
    return dataclasses.replace(kernels, attend=attend, **noise), left
