"""Chunk order for context parallelism (zigzag), and the loops over pairs of chunks of `context.py`
and `kernel_attention.py`.

A sequence of 2n chunks is split over n ranks as in `balanced_order`: rank i has chunks i and
2n-1-i, and computes 2n+1 pairs of chunks for any i (Llama 3, arXiv 2407.21783, section 3.3.2);
without causality 4n. The methods differ in how a rank receives keys:

- "ring": ranks send keys to the next rank while computing with the keys received before (arXiv
  2310.01889); in the backward pass their gradients follow. A rank stores two ranks' keys at a time.
- "pairs": a ring in which neighbours exchange keys, with one and then the other neighbour (odd-even
  transposition): keys that start on an even rank go one way, the others the other way. Each rank
  sends and receives as many bytes as in a ring. For an even number of ranks.
- "gather": each rank all-gathers the keys first, and their gradients are reduce-scattered.

All devices of a program must take part in each permutation of a ring, on CPUs and by the
semantics of XLA (openxla/xla#44530), but only the pair in an exchange: a loop whose trip count
differs between ranks of another axis has to use "pairs" or "gather".

Shapes: B batch, T time of a rank, h its two chunks.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxscale.ops.array_stack import add

Tree = Any


def balanced_order(seq_len: int, ranks: int, segments: int = 1) -> np.ndarray:
    """The zigzag order of a sequence's positions: `x[..., order]` has the ranks' parts in order.

    >>> balanced_order(8, 2)
    array([0, 1, 6, 7, 2, 3, 4, 5])

    Args:
      segments: each of which all ranks share; a rank has its parts of all of them in order.
    """
    if ranks == 1:
        return np.arange(seq_len)
    chunks = np.arange(seq_len).reshape(segments, 2 * ranks, -1)
    pairs = np.stack([chunks[:, :ranks], chunks[:, : ranks - 1 : -1]], axis=2)
    return pairs.swapaxes(0, 1).reshape(-1)


class Starts(NamedTuple):
    """Positions in the whole sequence of the first token of each chunk."""

    queries: Array  # [chunks]
    keys: Array  # [chunks]

    @classmethod
    def of_whole(cls, begin: Array | None = None) -> "Starts":
        """Of keys that are whole sequences, and of their queries, or of those from `begin` on."""
        first = jnp.zeros(1, jnp.int32)
        return cls(first if begin is None else begin.reshape(1), first)

    @property
    def offset(self) -> Array:
        """Position of the first query minus that of the first key."""
        return self.queries[0] - self.keys[0]


class Chunks(NamedTuple):
    """The sharding of a sequence, fixed at compile time."""

    axis: str
    method: str
    causal: bool
    chunk: int  # queries of a chunk
    key_chunk: int
    joint: bool = False  # whether one visit has all chunks of a rank's queries and of present keys

    def starts(self, rank: Array, pairs: tuple[Array, Array]) -> Starts:
        """Of the `h`-th chunk of a rank's queries and a chunk of keys by its number."""
        h, key_chunks = pairs
        return Starts(self.chunk * self.number(rank, h), self.key_chunk * key_chunks)

    def number(self, rank: Array, h: Array | int) -> Array:
        """The number in the sequence of a rank's chunk `h`."""
        return jnp.where(h == 0, rank, 2 * jax.lax.axis_size(self.axis) - 1 - rank)

    def split(self, x_BT: Array) -> Array:
        """[B, T, ...] -> [h, B, T / h, ...], the parts of separate visits."""
        return x_BT[None] if self.joint else halves(x_BT)


def visit_pairs(
    chunks: Chunks, keys: Tree, visit: Callable, carry: Tree, sums: Tree
) -> tuple[Tree, Tree]:
    """Calls `visit` for every pair of a chunk of this rank's queries and a chunk of visible keys.

    Args:
      keys: of this rank, each field with a leading [h].
      visit: `(carry, sums, keys, h, c, starts) -> (carry, sums)` for the h-th chunk of queries and
        the c-th chunk of `keys`; if `chunks.joint` h and c are 0, and there are fewer visits: one
        for each rank of a ring or of pairs, or one in all.
      carry: state that stays on this rank.
      sums: zeros, [h, ...], for sums per chunk of keys, over all ranks.

    Returns:
      The carry, and the sums of this rank's keys.
    """
    loop = _gather if chunks.method == "gather" else _ring
    return loop(chunks, keys, visit, carry, sums)


def _ring(
    chunks: Chunks, keys: Tree, visit: Callable, carry: Tree, zeros: Tree
) -> tuple[Tree, Tree]:
    """Ring, or exchanges in pairs: each step has the keys of another rank, by `owners`.

    With another rank's keys and causality, the second chunk of queries sees the first chunk of
    keys. In addition, from a lower rank the first queries see the first keys, and from a higher
    rank the second queries see the second keys: two pairs either way, so no rank waits for another.
    """
    ranks, rank = jax.lax.axis_size(chunks.axis), jax.lax.axis_index(chunks.axis)
    hops = sources(chunks.method, ranks)
    table = jnp.asarray(owners(hops))

    def send(tree: Tree, r: int) -> Tree:
        hop = hops[r % len(hops)]
        return jax.tree.map(functools.partial(_hop, chunks, hop), tree)

    def step(carry: Tree, keys: Tree, r: Array | int, *own: tuple[int, int]) -> tuple[Tree, Tree]:
        owner = table[r, rank]
        if chunks.joint:
            both = jnp.arange(2)
            starts = chunks.starts(rank, (both, chunks.number(owner, both)))
            return visit(carry, zeros, keys, 0, 0, starts)
        if chunks.causal:
            same = jnp.where(owner > rank, 1, 0)
            pairs = (*own, (1, 0), (same, same))
        else:
            pairs = ((0, 0), (0, 1), (1, 0), (1, 1))
        visits = [(h, c, chunks.number(owner, c)) for h, c in pairs]
        return _visit_all(chunks, visit, carry, zeros, keys, visits)

    def steps(carries: tuple[Tree, Tree, Tree], first: int, last: int) -> tuple[Tree, Tree, Tree]:
        """Steps from `first` to before `last`, one of each hop in the body of the loop."""

        def body(carries: tuple[Tree, Tree, Tree], numbers: Array):
            for place in range(len(hops)):
                carry, keys, sums = carries
                # Both overlap this step's compute; the sums are of the step before.
                following, arriving = send(keys, first + place), send(sums, first + place - 1)
                carry, more = step(carry, keys, numbers[place])
                carries = carry, following, add(arriving, more)
            return carries, None

        numbers = jnp.arange(first, last).reshape(-1, len(hops))
        return jax.lax.scan(body, carries, numbers)[0]

    if chunks.joint:
        # One visit for each hop in the program, for which keys are sent one step further than
        # needed: the compiler for TPUs takes seconds for each call of a kernel.
        carry, _, sums = steps((carry, keys, zeros), 0, ranks)
        return carry, send(sums, ranks - 1)
    following = send(keys, 0)
    carry, sums = step(carry, keys, 0, (1, 1))
    carry, keys, sums = steps((carry, following, sums), 1, ranks - 1)
    arriving = send(sums, ranks - 2)
    carry, more = step(carry, keys, ranks - 1)
    return carry, send(add(arriving, more), ranks - 1)


def sources(method: str, ranks: int) -> np.ndarray:
    """The rank from which each rank receives, [hops, ranks]; hops repeat.

    >>> sources("pairs", 4)
    array([[1, 0, 3, 2],
           [3, 2, 1, 0]])

    Args:
      method: "ring" or "pairs".
    """
    rank = np.arange(ranks)
    if method == "ring":
        return (rank[None] - 1) % ranks
    return np.stack([rank ^ 1, (((rank - 1) ^ 1) + 1) % ranks])


def owners(hops: np.ndarray) -> np.ndarray:
    """The rank whose keys each rank has in each step, [steps, ranks].

    >>> owners(sources("pairs", 4))
    array([[0, 1, 2, 3],
           [1, 0, 3, 2],
           [2, 3, 0, 1],
           [3, 2, 1, 0]])

    Args:
      hops: by `sources`.
    """
    ranks = hops.shape[1]
    table = [np.arange(ranks)]
    for r in range(ranks - 1):
        table.append(table[-1][hops[r % len(hops)]])
    return np.stack(table)


def _hop(chunks: Chunks, hop: np.ndarray, x: Array) -> Array:
    """`x` of the rank that `hop` names."""
    if chunks.method == "ring":
        onward = sorted((int(source), rank) for rank, source in enumerate(hop))
        return jax.lax.ppermute(x, chunks.axis, onward)
    pairs = [[rank, int(other)] for rank, other in enumerate(hop) if rank < other]
    pairs.sort(key=lambda pair: pair[1] - pair[0])  # the first and the last rank at the end
    both = jax.lax.all_gather(x, chunks.axis, axis_index_groups=pairs)
    place = jnp.asarray(np.arange(len(hop)) < hop, jnp.int32)  # of the other rank
    return both[place[jax.lax.axis_index(chunks.axis)]]


def _gather(
    chunks: Chunks, keys: Tree, visit: Callable, carry: Tree, zeros: Tree
) -> tuple[Tree, Tree]:
    """Gather: pairs of the first chunk of queries, then of the second; as many on each rank."""
    if chunks.joint:
        return _gather_jointly(chunks, keys, visit, carry, zeros)
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
        table.append((h, c, c))
    zeros = jax.tree.map(lambda x: jnp.zeros((2 * ranks, *x.shape[1:]), x.dtype), zeros)
    keys = jax.tree.map(gathered, keys)
    carry, sums = _visit_all(chunks, visit, carry, zeros, keys, table)
    return carry, jax.tree.map(summed, sums)


def _gather_jointly(
    chunks: Chunks, keys: Tree, visit: Callable, carry: Tree, zeros: Tree
) -> tuple[Tree, Tree]:
    """Gather with one visit: chunks of keys stay in the order of the ranks."""
    ranks, rank = jax.lax.axis_size(chunks.axis), jax.lax.axis_index(chunks.axis)
    numbers = jnp.stack([chunks.number(jnp.arange(ranks), h) for h in range(2)], axis=1)
    starts = chunks.starts(rank, (jnp.arange(2), numbers.ravel()))
    gather = functools.partial(jax.lax.all_gather, axis_name=chunks.axis, axis=2, tiled=True)
    zeros = jax.tree.map(lambda x: jnp.concatenate([x] * ranks, axis=2), zeros)
    carry, sums = visit(carry, zeros, jax.tree.map(gather, keys), 0, 0, starts)
    scatter = functools.partial(
        jax.lax.psum_scatter, axis_name=chunks.axis, scatter_dimension=2, tiled=True
    )
    return carry, jax.tree.map(scatter, sums)


def _visit_all(
    chunks: Chunks,
    visit: Callable,
    carry: Tree,
    sums: Tree,
    keys: Tree,
    table: list[tuple[Array | int, ...]],
) -> tuple[Tree, Tree]:
    """Visits h, c and the number of the chunk of keys of each row of the table."""
    rank = jax.lax.axis_index(chunks.axis)
    columns = tuple(
        jnp.stack([jnp.asarray(x, jnp.int32) for x in column]) for column in zip(*table)
    )

    def one(carries: tuple[Tree, Tree], pair: tuple[Array, ...]) -> tuple[tuple[Tree, Tree], None]:
        h, c, number = pair
        starts = chunks.starts(rank, (h[None], number[None]))
        return visit(*carries, keys, h, c, starts), None

    return jax.lax.scan(one, (carry, sums), columns)[0]


def halves(x_BT: Array) -> Array:
    """[B, T, ...] -> [h, B, T / 2, ...]."""
    return jnp.stack(jnp.split(x_BT, 2, axis=1))
