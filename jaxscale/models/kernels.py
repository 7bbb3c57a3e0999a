"""The functions of a model that a layout may replace."""

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
    """Rows, in `dtype`, of a table that this device holds whole; `rows` names its first axis."""
    del rows
    return lookup(table_VD, indices_BT, dtype)


def plain_dropout(
    x_BTD: jax.Array, noise_B: jax.Array, layer: jax.Array | int, site: int, rate: float
) -> jax.Array:
    """`ops.dropout.dropout` where tokens are in the order of the text."""
    return dropout(x_BTD, noise_B, layer, site, rate, jnp.arange(x_BTD.shape[1]))


def plain_jitter(
    x_BTD: jax.Array, noise_B: jax.Array, layer: jax.Array | int, site: int, width: float
) -> jax.Array:
    """`ops.dropout.jitter` where tokens are in the order of the text."""
    return jitter(x_BTD, noise_B, layer, site, width, jnp.arange(x_BTD.shape[1]))


@dataclass(frozen=True)
class Kernels:
    """The functions of a model that a layout may replace by others with the same result.

    The defaults run anywhere, with no mesh.

    `attend(q, k, v, segments, **settings)` has the settings of `ops.attention.attention`, per call:
    `sliding_window`, `causal`, `scale`, `soft_cap`, and for cross attention and T5's position bias
    `segments_BS`, `bias_bN` and `max_distance`, and for attention sinks `sinks_N`. Where
    `rotary_scales`, a model that rotates queries and keys should multiply each by the root of the
    scale there (`factor`) and pass scale 1. The segments are the batch's: where `data.objective`
    makes every row one document, a kernel of causal attention may not read them.

    `columns` and `rows` are matmuls with weights that may be spread over ranks of tensor, `linear`
    is one with a weight that each rank has whole.

    `key_heads` takes what has key/value heads as its last dimension but one: weights, biases,
    scales. It repeats heads where ranks of tensor outnumber them.

    `dispatch` says over which ranks tokens find their experts. `all_rows` sums over all rows of a
    micro-batch what each rank has summed over its own.
    """

    attend: Callable[..., jax.Array]
    lookup: Callable[[jax.Array, jax.Array, str, DTypeLike], jax.Array] = plain_lookup
    columns: Callable[[jax.Array, Sequence[jax.Array]], tuple[jax.Array, ...]] = columns
    rows: Callable[[jax.Array, jax.Array], jax.Array] = rows
    linear: Callable[[jax.Array, jax.Array], jax.Array] = linear
    rotary: Callable[..., jax.Array] = rotary
    rotary_scales: bool = False
    key_heads: Callable[[jax.Array], jax.Array] = lambda x: x
    cross_entropy: Callable[..., tuple[jax.Array, jax.Array]] = cross_entropy
    dropout: Callable[..., jax.Array] = plain_dropout
    jitter: Callable[..., jax.Array] = plain_jitter
    dispatch: Dispatch = ONE_DEVICE
    all_rows: Callable[[jax.Array], jax.Array] = lambda x: x
    shard: Callable[[jax.Array, tuple[str, ...]], jax.Array] = lambda x, axes: x
