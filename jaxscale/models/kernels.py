"""Kernels of a model: the functions that a layout replaces by distributed versions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

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
    x_BTD: jax.Array, noise_B: jax.Array, layer: jax.Array | int, site: int, rate: float
) -> jax.Array:
    """`ops.dropout.dropout` for tokens in text order."""
    return dropout(x_BTD, noise_B, layer, site, rate, jnp.arange(x_BTD.shape[1]))


def plain_jitter(
    x_BTD: jax.Array, noise_B: jax.Array, layer: jax.Array | int, site: int, width: float
) -> jax.Array:
    """`ops.dropout.jitter` for tokens in text order."""
    return jitter(x_BTD, noise_B, layer, site, width, jnp.arange(x_BTD.shape[1]))


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
    dropout: Callable[..., jax.Array] = plain_dropout
    jitter: Callable[..., jax.Array] = plain_jitter
    dispatch: Dispatch = ONE_DEVICE
    sum_over_batch_ranks: Callable[[jax.Array], jax.Array] = lambda x: x
    shard: Callable[[jax.Array, tuple[str, ...]], jax.Array] = lambda x, axes: x
