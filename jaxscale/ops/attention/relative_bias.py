"""T5's relative position bias: a learned number for each head and bucket of distances, added to
attention scores (arXiv 1910.10683, section 2.1).

A bias depends only on the distance of a key from its query. The biases of a block of scores are
therefore a line with one number per diagonal, and the block's gradients are summed along diagonals.

Shapes: N query heads, t queries of a block, s keys of a block, L = t + s, b buckets.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array


def relative_buckets(
    relative: Array, num_buckets: int, *, causal: bool, max_distance: int = 128
) -> Array:
    """T5's bucket of each relative position (key minus query), in int32.

    Half of the buckets have one distance each. The others grow logarithmically up to
    `max_distance`; the last one has all larger distances. Without `causal` the second half of all
    buckets is for keys after the query; with it, keys after the query are in bucket 0.

    Raises:
      ValueError: as `first_distances`.
    """
    own = num_buckets if causal else num_buckets // 2
    distance = jnp.maximum(-relative, 0) if causal else jnp.abs(relative)
    first = first_distances(num_buckets, causal=causal, max_distance=max_distance)
    bucket = jnp.sum(distance[..., None] >= first[1:], axis=-1, dtype=jnp.int32)
    return bucket if causal else bucket + jnp.where(relative > 0, own, 0)


def first_distances(num_buckets: int, *, causal: bool, max_distance: int) -> np.ndarray:
    """The smallest distance in each bucket of one direction.

    The logarithm is NumPy's in float32, so that buckets are the same on every platform.

    Raises:
      ValueError: too few buckets, or a maximal distance within the exact buckets.
    """
    own = num_buckets if causal else num_buckets // 2
    exact = own // 2
    if exact < 1 or max_distance <= exact:
        least = 2 if causal else 4
        raise ValueError(
            f"a relative position bias of {num_buckets} buckets up to distance {max_distance} "
            f"needs at least {least} buckets and a distance above {max(exact, 1)}"
        )
    distance = np.arange(exact, max_distance + 1, dtype=np.float32)
    grown = np.log(distance / np.float32(exact)) / np.float32(math.log(max_distance / exact))
    buckets = np.minimum(exact + (grown * np.float32(own - exact)).astype(np.int32), own - 1)
    logarithmic = exact + np.searchsorted(buckets, np.arange(exact, own))
    return np.concatenate([np.arange(exact), logarithmic]).astype(np.int32)


def in_order(num_buckets: int, *, causal: bool, max_distance: int) -> tuple[np.ndarray, np.ndarray]:
    """The buckets in the order of their relative positions, and the first position of each.

    Without `causal` one bucket is left out: that of keys after the query at distance 0.

    Raises:
      ValueError: as `first_distances`.
    """
    first = first_distances(num_buckets, causal=causal, max_distance=max_distance)
    before = np.arange(len(first))
    after = before[1:1] if causal else before[1:]
    # A bucket of keys before the query ends at its first distance. That of the furthest keys begins
    # nowhere; one before its last position is enough.
    begin = -np.append(first[1:] - 1, first[-1] + 1)[::-1]
    return np.concatenate((before[::-1], len(first) + after)), np.append(begin, first[after])


def bucket_line(first: np.ndarray) -> np.ndarray:
    """The number, in order, of the bucket of each relative position from -l to l: beyond l nothing
    changes.

    Args:
      first: of `in_order`.
    """
    furthest = -first[0] - 1
    positions = np.arange(-furthest, furthest + 1)
    return (np.searchsorted(first, positions, side="right") - 1).astype(np.int32)


def line(
    table_bN: Array, distance: Array | int, t: int, s: int, *, causal: bool, max_distance: int
) -> Array:
    """The biases of a block of scores, [N, L]: that of query i and key j is at (j - i) % L.

    Args:
      distance: position of the block's first query minus that of its first key.
    """
    hot_Lb = _one_hot(table_bN, distance, t, s, causal, max_distance)
    return jnp.einsum("Lb,bN->NL", hot_Lb, table_bN, precision="highest")


def line_gradient(
    grad_NL: Array,
    table_bN: Array,
    distance: Array | int,
    t: int,
    s: int,
    *,
    causal: bool,
    max_distance: int,
) -> Array:
    """The gradient of the table, [b, N], from that of `line`."""
    hot_Lb = _one_hot(table_bN, distance, t, s, causal, max_distance)
    return jnp.einsum("Lb,NL->bN", hot_Lb, grad_NL, precision="highest")


def spread_line(line_NL: Array, t: int, s: int) -> Array:
    """Expands the line to a block of scores, [N, t, s]."""
    num_heads, length = line_NL.shape
    # Reshaping the repeated line to rows of length - 1 shifts each row by one.
    flat = jnp.tile(line_NL, (1, t))[:, : t * (length - 1)]
    return flat.reshape(num_heads, t, length - 1)[:, :, :s]


def sum_diagonals(block_Nts: Array) -> Array:
    """Sums a block along its diagonals, [N, L]: the transpose of `spread_line`."""
    num_heads, t, s = block_Nts.shape
    length = t + s
    rows = jnp.pad(block_Nts, ((0, 0), (0, 0), (0, length - 1 - s))).reshape(num_heads, -1)
    rows = jnp.pad(rows, ((0, 0), (0, t))).reshape(num_heads, t, length)
    return jnp.sum(rows, axis=1)


def _one_hot(table_bN: Array, distance, t: int, s: int, causal: bool, max_distance: int) -> Array:
    index_L = jnp.arange(t + s)
    relative_L = jnp.where(index_L < s, index_L, index_L - (t + s)) - distance
    num_buckets = table_bN.shape[0]
    bucket_L = relative_buckets(relative_L, num_buckets, causal=causal, max_distance=max_distance)
    return (bucket_L[:, None] == jnp.arange(num_buckets)).astype(table_bN.dtype)
