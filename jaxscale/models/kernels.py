"""The functions of a model that a layout may replace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax.typing import DTypeLike

from jaxscale.ops.embedding import lookup
from jaxscale.ops.loss import cross_entropy
from jaxscale.ops.rope import rotary
from jaxscale.ops.tensor_parallel import columns, rows


def plain_lookup(
    table_VD: jax.Array, indices_BT: jax.Array, rows: str, dtype: DTypeLike
) -> jax.Array:
    """Rows, in `dtype`, of a table that this device holds whole; `rows` names its first axis."""
    del rows
    return lookup(table_VD, indices_BT, dtype)


@dataclass(frozen=True)
class Kernels:
    """The functions of a model that a layout may replace by others with the same result.

    The defaults run anywhere, with no mesh. `attend` is called with queries, keys, values, segments
    and the keywords sliding_window, causal, scale and soft_cap of `ops.attention.attention`.
    """

    attend: Callable[..., jax.Array]
    lookup: Callable[[jax.Array, jax.Array, str, DTypeLike], jax.Array] = plain_lookup
    columns: Callable[[jax.Array, Sequence[jax.Array]], tuple[jax.Array, ...]] = columns
    rows: Callable[[jax.Array, jax.Array], jax.Array] = rows
    rotary: Callable[..., jax.Array] = rotary
    cross_entropy: Callable[..., tuple[jax.Array, jax.Array]] = cross_entropy
    shard: Callable[[jax.Array, tuple[str, ...]], jax.Array] = lambda x, axes: x
