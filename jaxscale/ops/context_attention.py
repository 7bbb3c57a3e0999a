"""Attention over a sequence that is spread over a mesh axis: context parallelism.

A sequence of 2n chunks is dealt to n ranks as in `balanced_order`: rank i holds chunks i and
2n-1-i, which together see 2n+1 pairs of chunks whatever i is (Llama 3, arXiv 2407.21783, section
3.3.2); without causality they are 4n. The arithmetic of a pair is that of `attention_blocks.py`;
the two methods differ in how a rank receives the keys:

- "ring": keys are sent from rank to rank during the compute on those received before (arXiv
  2310.01889); in the backward pass their gradients follow. A rank holds two ranks' keys at a time.
- "gather": each rank all-gathers the keys first, and their gradients are reduce-scattered.

On a CPU all devices must take part in each message of a ring: a loop whose trip count differs
between ranks of another axis has to use "gather".

Shapes: as in `attention_blocks.py`, T here a rank's share of the sequence; h its two chunks.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxscale.ops import attention_blocks
from jaxscale.ops.attention_blocks import Keys, Queries, Scoring, Sums

Tree = Any


def balanced_order(seq_len: int, ranks: int) -> np.ndarray:
    """The places of a sequence in the order in which ranks hold them: `x[..., order]` deals them.

    >>> balanced_order(8, 2)
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    if ranks == 1:
        return np.arange(seq_len)
    chunks = np.arange(seq_len).reshape(2 * ranks, -1)
    return np.stack([chunks[:ranks], chunks[: ranks - 1 : -1]], axis=1).reshape(-1)


def context_attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    segments_BT: Array,
    segments_BS: Array | None = None,
    bias_bN: Array | None = None,
    sinks_N: Array | None = None,
    *,
    axis: str,
    method: str,
    scoring: Scoring,
    block: int | None = None,
) -> Array:
    """`attention.attention` where each rank of `axis` passes its share, in `balanced_order`.

    For use where `axis` is manual and has at least two ranks. Order, window and bias go by the
    place in the whole sequence. The residuals of a rank are its arguments, its output and one
    number per query and head; the last two carry the checkpoint name "attention".

    Args:
      axis: the mesh axis.
      method: "ring" or "gather".
      block: queries, and keys, of a block; None is by `attention_blocks.block_size`.
    """
    chunk, key_chunk = q_BTNH.shape[1] // 2, k_BSKH.shape[1] // 2
    block = min(block or attention_blocks.block_size(q_BTNH), max(chunk, key_chunk))
    static = _Static(axis, method, scoring, chunk, key_chunk, block)
    given = (q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BS)
    tables = (attention_blocks.wide(x, q_BTNH) for x in (bias_bN, sinks_N))
    return _attention(static, *given, *tables)


class _Static(NamedTuple):
    axis: str
    method: str
    scoring: Scoring
    chunk: int  # places of a chunk of queries
    key_chunk: int
    block: int

    def offset(self, rank: Array, h: Array | int, key_chunk: Array | int) -> Array:
        """Places from the first key of a chunk of the sequence to a rank's first query of `h`."""
        return self.chunk * (self.number(rank, h) - key_chunk)

    def number(self, rank: Array, h: Array | int) -> Array:
        """Which chunk of the sequence the h-th of a rank is."""
        return jnp.where(h == 0, rank, 2 * jax.lax.axis_size(self.axis) - 1 - rank)


def _walk(
    static: _Static, keys: Keys, visit: Callable, carry: Tree, sums: Tree
) -> tuple[Tree, Tree]:
    """Visits every pair of a chunk of this rank's queries and a chunk of keys that it sees.

    Args:
      keys: of this rank, each field with a leading [h].
      visit: `(carry, sums, keys, h, c, offset) -> (carry, sums)` for the h-th chunk of queries and
        the c-th chunk of `keys`, which lies `offset` places before it.
      carry: what stays on this rank.
      sums: zeros, [h, ...], where visits to a chunk of keys are summed, over all ranks.

    Returns:
      The carry, and the sums of the keys of this rank.
    """
    return {"ring": _ring, "gather": _gather}[static.method](static, keys, visit, carry, sums)


def _ring(
    static: _Static, keys: Keys, visit: Callable, carry: Tree, zeros: Tree
) -> tuple[Tree, Tree]:
    """At step r rank i holds the keys of rank i - r.

    With the keys of another rank, a causal second chunk of queries sees the first chunk of keys.
    From a lower rank the first queries see the first keys too, from a higher one the second queries
    the second keys: one more pair either way, so that no rank waits for another.
    """
    ranks, rank = jax.lax.axis_size(static.axis), jax.lax.axis_index(static.axis)
    onward = [(i, (i + 1) % ranks) for i in range(ranks)]

    def send(tree: Tree) -> Tree:
        return jax.tree.map(lambda x: jax.lax.ppermute(x, static.axis, onward), tree)

    def step(carry: Tree, keys: Keys, r: Array | int, *own: tuple[int, int]) -> tuple[Tree, Tree]:
        owner = (rank - r) % ranks
        if static.scoring.causal:
            same = jnp.where(owner > rank, 1, 0)
            pairs = (*own, (1, 0), (same, same))
        else:
            pairs = ((0, 0), (0, 1), (1, 0), (1, 1))
        table = [(h, c, static.offset(rank, h, static.number(owner, c))) for h, c in pairs]
        return _visit_all(visit, carry, zeros, keys, table)

    def between(carries: tuple[Tree, Keys, Tree], r: Array) -> tuple[tuple[Tree, Keys, Tree], None]:
        carry, keys, sums = carries
        following, arriving = send(keys), send(sums)  # overlap this step's compute
        carry, more = step(carry, keys, r)
        return (carry, following, _add(arriving, more)), None

    following = send(keys)
    carry, sums = step(carry, keys, 0, (1, 1))
    (carry, keys, sums), _ = jax.lax.scan(
        between, (carry, following, sums), jnp.arange(1, ranks - 1)
    )
    arriving = send(sums)
    carry, more = step(carry, keys, ranks - 1)
    return carry, send(_add(arriving, more))


def _gather(
    static: _Static, keys: Keys, visit: Callable, carry: Tree, zeros: Tree
) -> tuple[Tree, Tree]:
    """All pairs of the first chunk of queries, then those of the second: as many on every rank."""
    ranks, rank = jax.lax.axis_size(static.axis), jax.lax.axis_index(static.axis)

    def gathered(x: Array) -> Array:
        x = jax.lax.all_gather(x, static.axis)
        return jnp.concatenate([x[:, 0], x[::-1, 1]])

    def summed(x: Array) -> Array:
        x = jnp.stack([x[:ranks], x[: ranks - 1 : -1]], axis=1)
        return jax.lax.psum_scatter(x, static.axis)

    table, causal = [], static.scoring.causal
    for pair in range(2 * ranks + 1 if causal else 4 * ranks):
        h = jnp.where(pair <= rank, 0, 1) if causal else pair // (2 * ranks)
        c = pair - h * (rank + 1) if causal else pair % (2 * ranks)
        table.append((h, c, static.offset(rank, h, c)))
    zeros = jax.tree.map(lambda x: jnp.zeros((2 * ranks, *x.shape[1:]), x.dtype), zeros)
    carry, sums = _visit_all(visit, carry, zeros, jax.tree.map(gathered, keys), table)
    return carry, jax.tree.map(summed, sums)


def _visit_all(
    visit: Callable, carry: Tree, sums: Tree, keys: Keys, table: list[tuple[Array | int, ...]]
) -> tuple[Tree, Tree]:
    columns = tuple(
        jnp.stack([jnp.asarray(x, jnp.int32) for x in column]) for column in zip(*table)
    )
    return jax.lax.scan(
        lambda carries, pair: (visit(*carries, keys, *pair), None), (carry, sums), columns
    )[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, *given: Array | None) -> Array:
    return _forward(static, *given)[0]


def _forward(
    static: _Static, q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BS, bias_bN, sinks_N
) -> tuple[Array, Array]:
    """The output, and log(sum(exp(score))) as [h, I, B, K, G, t]."""
    queries, keys = _in_blocks(static, q_BTNH, k_BSKH, v_BSKH, segments_BT, segments_BS)

    def visit(softmax, sums, keys, h, c, offset):
        seen = _at(softmax, h), _at(queries, h), _at(keys, c), bias_bN
        return _put(
            softmax, h, attention_blocks.attend(*seen, offset=offset, scoring=static.scoring)
        ), sums

    softmax, _ = _walk(static, keys, visit, attention_blocks.start(queries.q, sinks_N), ())
    out_hIBKGtH, log_z_hIBKGt = attention_blocks.finish_softmax(
        softmax, q_BTNH.dtype, blind=segments_BS is not None
    )
    out_BTNH = _joined(attention_blocks.from_query_blocks, out_hIBKGtH, static.chunk)
    return out_BTNH, log_z_hIBKGt


def _forward_rule(static: _Static, *given: Array | None):
    results = _forward(static, *given)
    out_BTNH, log_z_hIBKGt = checkpoint_name(results, "attention")
    return out_BTNH, (*given, out_BTNH, log_z_hIBKGt)


def _backward_rule(static: _Static, residuals, grad_BTNH: Array):
    *tokens, bias_bN, sinks_N, out_BTNH, log_z_hIBKGt = residuals
    q_BTNH, k_BSKH, v_BSKH, *_ = tokens
    queries, keys = _in_blocks(static, *tokens)
    output = jax.vmap(
        lambda *halves: attention_blocks.output(
            *halves, num_kv_heads=k_BSKH.shape[2], block=static.block
        )
    )(_halves(out_BTNH), _halves(grad_BTNH), log_z_hIBKGt)

    def visit(sums, key_sums, keys, h, c, offset):
        more, *key_more = attention_blocks.gradients(
            Sums(_at(sums.q, h), sums.bias),
            _at(queries, h),
            _at(output, h),
            _at(keys, c),
            bias_bN,
            offset=offset,
            scoring=static.scoring,
            dtype=wide,
        )
        sums = Sums(_put(sums.q, h, more.q), more.bias)
        return sums, _put(key_sums, c, _add(_at(key_sums, c), tuple(key_more)))

    wide = log_z_hIBKGt.dtype
    sums = attention_blocks.no_sums(queries, bias_bN, wide)
    zeros = tuple(jnp.zeros(x.shape, wide) for x in (keys.k, keys.v))
    sums, grads = _walk(static, keys, visit, sums, zeros)
    grad_k_BSKH, grad_v_BSKH = (
        _joined(attention_blocks.from_key_blocks, grad, static.key_chunk) for grad in grads
    )
    grad_q_BTNH = _joined(attention_blocks.from_query_blocks, sums.q, static.chunk)
    return (
        grad_q_BTNH.astype(q_BTNH.dtype),
        grad_k_BSKH.astype(k_BSKH.dtype),
        grad_v_BSKH.astype(v_BSKH.dtype),
        None,
        None,
        sums.bias,
        attention_blocks.sink_gradient(sinks_N, output),
    )


_attention.defvjp(_forward_rule, _backward_rule)


def _in_blocks(static: _Static, *tokens: Array | None) -> tuple[Queries, Keys]:
    """`attention_blocks.in_blocks` of each of a rank's two chunks, with a leading [h]."""
    return jax.vmap(lambda *halves: attention_blocks.in_blocks(*halves, block=static.block))(
        *(None if x is None else _halves(x) for x in tokens)
    )


def _halves(x_BT: Array) -> Array:
    """[B, T, ...] -> [h, B, T / 2, ...]."""
    return jnp.stack(jnp.split(x_BT, 2, axis=1))


def _joined(from_blocks: Callable, x_h: Array, chunk: int) -> Array:
    """[h, blocks, ...] -> [B, T, ...]."""
    return jnp.concatenate([from_blocks(x, chunk) for x in x_h], axis=1)


def _at(tree: Tree, index: Array) -> Tree:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def _put(tree: Tree, index: Array, part: Tree) -> Tree:
    return jax.tree.map(
        lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, index, 0), tree, part
    )


def _add(one: Tree, other: Tree) -> Tree:
    return jax.tree.map(jnp.add, one, other)
