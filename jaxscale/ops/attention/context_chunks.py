"""Chunk order for context parallelism (zigzag), and the loops over pairs of chunks of `context.py`
and `context_flash.py`.

A sequence of 2n chunks is split over n ranks as in `balanced_order`: rank i has chunks i and
2n-1-i, and computes 2n+1 pairs of chunks for any i (Llama 3, arXiv 2407.21783, section 3.3.2);
without causality 4n. The methods differ in how a rank receives keys:

- "ring": ranks send keys to the next rank while computing with the keys received before (arXiv
  2310.01889); in the backward pass their gradients follow. A rank stores two ranks' keys at a time.
- "gather": each rank all-gathers the keys first, and their gradients are reduce-scattered.

On a CPU all devices must take part in each message of a ring: a loop whose trip count differs
between ranks of another axis has to use "gather".

Shapes: B batch, T time of a rank, h its two chunks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxscale.ops.array_stack import add

Tree = Any


def balanced_order(seq_len: int, ranks: int) -> np.ndarray:
    """The zigzag order of a sequence's positions: `x[..., order]` has the ranks' parts in order.

    >>> balanced_order(8, 2)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    if ranks == 1:
        return np.arange(seq_len)
    chunks = np.arange(seq_len).reshape(2 * ranks, -1)
    return np.stack([chunks[:ranks], chunks[: ranks - 1 : -1]], axis=1).reshape(-1)


class Chunks(NamedTuple):
    """The sharding of a sequence, fixed at compile time."""

    axis: str
    method: str
    causal: bool
    chunk: int  # queries of a chunk

    def offset(self, rank: Array, h: Array | int, key_chunk: Array | int) -> Array:
        """Position of a rank's first query in chunk `h` minus that of `key_chunk`'s first key."""
        return self.chunk * (self.number(rank, h) - key_chunk)

    def number(self, rank: Array, h: Array | int) -> Array:
        """The number in the sequence of a rank's chunk `h`."""
        return jnp.where(h == 0, rank, 2 * jax.lax.axis_size(self.axis) - 1 - rank)


def visit_pairs(
    chunks: Chunks, keys: Tree, visit: Callable, carry: Tree, sums: Tree
) -> tuple[Tree, Tree]:
    """Calls `visit` for every pair of a chunk of this rank's queries and a chunk of visible keys.

    Args:
      keys: of this rank, each field with a leading [h].
      visit: `(carry, sums, keys, h, c, offset) -> (carry, sums)` for the h-th chunk of queries and
        the c-th chunk of `keys`, which is `offset` positions before it.
      carry: state that stays on this rank.
      sums: zeros, [h, ...], for sums per chunk of keys, over all ranks.

    Returns:
      The carry, and the sums of this rank's keys.
    """
    return {"ring": _ring, "gather": _gather}[chunks.method](chunks, keys, visit, carry, sums)


def _ring(
    chunks: Chunks, keys: Tree, visit: Callable, carry: Tree, zeros: Tree
) -> tuple[Tree, Tree]:
    """Ring: at step r rank i has the keys of rank i - r.

    With another rank's keys and causality, the second chunk of queries sees the first chunk of
    keys. In addition, from a lower rank the first queries see the first keys, and from a higher
    rank the second queries see the second keys: two pairs either way, so no rank waits for another.
    """
    ranks, rank = jax.lax.axis_size(chunks.axis), jax.lax.axis_index(chunks.axis)
    onward = [(i, (i + 1) % ranks) for i in range(ranks)]

    def send(tree: Tree) -> Tree:
        return jax.tree.map(lambda x: jax.lax.ppermute(x, chunks.axis, onward), tree)

    def step(carry: Tree, keys: Tree, r: Array | int, *own: tuple[int, int]) -> tuple[Tree, Tree]:
        owner = (rank - r) % ranks
        if chunks.causal:
            same = jnp.where(owner > rank, 1, 0)
            pairs = (*own, (1, 0), (same, same))
        else:
            pairs = ((0, 0), (0, 1), (1, 0), (1, 1))
        table = [(h, c, chunks.offset(rank, h, chunks.number(owner, c))) for h, c in pairs]
        return _visit_all(visit, carry, zeros, keys, table)

    def between(carries: tuple[Tree, Tree, Tree], r: Array) -> tuple[tuple[Tree, Tree, Tree], None]:
        carry, keys, sums = carries
        following, arriving = send(keys), send(sums)  # overlap this step's compute
        carry, more = step(carry, keys, r)
        return (carry, following, add(arriving, more)), None

    following = send(keys)
    carry, sums = step(carry, keys, 0, (1, 1))
    (carry, keys, sums), _ = jax.lax.scan(
        between, (carry, following, sums), jnp.arange(1, ranks - 1)
    )
    arriving = send(sums)
    carry, more = step(carry, keys, ranks - 1)
    return carry, send(add(arriving, more))


def _gather(
    chunks: Chunks, keys: Tree, visit: Callable, carry: Tree, zeros: Tree
) -> tuple[Tree, Tree]:
    """Gather: pairs of the first chunk of queries, then of the second; as many on each rank."""
    ranks, rank = jax.lax.axis_size(chunks.axis), jax.lax.axis_index(chunks.axis)

    def gathered(x: Array) -> Array:
        x = jax.lax.all_gather(x, chunks.axis)
        return jnp.concatenate([x[:, 0], x[::-1, 1]])

    def summed(x: Array) -> Array:
        x = jnp.stack([x[:ranks], x[: ranks - 1 : -1]], axis=1)
        return jax.lax.psum_scatter(x, chunks.axis)

    table, causal = [], chunks.causal
    for pair in range(2 * ranks + 1 if causal else 4 * ranks):
        h = jnp.where(pair <= rank, 0, 1) if causal else pair // (2 * ranks)
        c = pair - h * (rank + 1) if causal else pair % (2 * ranks)
        table.append((h, c, chunks.offset(rank, h, c)))
    zeros = jax.tree.map(lambda x: jnp.zeros((2 * ranks, *x.shape[1:]), x.dtype), zeros)
    carry, sums = _visit_all(visit, carry, zeros, jax.tree.map(gathered, keys), table)
    return carry, jax.tree.map(summed, sums)


def _visit_all(
    visit: Callable, carry: Tree, sums: Tree, keys: Tree, table: list[tuple[Array | int, ...]]
) -> tuple[Tree, Tree]:
    columns = tuple(
        jnp.stack([jnp.asarray(x, jnp.int32) for x in column]) for column in zip(*table)
    )
    return jax.lax.scan(
        lambda carries, pair: (visit(*carries, keys, *pair), None), (carry, sums), columns
    )[0]


def halves(x_BT: Array) -> Array:
    """[B, T, ...] -> [h, B, T / 2, ...]."""
    return jnp.stack(jnp.split(x_BT, 2, axis=1))
