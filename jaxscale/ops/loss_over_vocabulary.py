"""Vocabulary-parallel loss: the head's columns, and the collectives, of each rank.

The columns are sharded over tensor and over the ranks that divide a sequence (context). Columns and
not tokens over context: the float32 gradient of the head, the largest array of a step with a long
context, is then a part on each rank from the first chunk on, and the tokens that are exchanged
instead are fewer bytes than it. Tokens are gathered over tensor once, before the loop over chunks,
which then computes with no collective over tensor except `over_columns`; over context chunk by
chunk, since a whole sequence may be long.

Each rank of a pipeline may also have a slice of each tensor rank's columns (`Slice`), and computes
them at once with the others, for the same tokens. Its gradients are then its terms of sums over
these ranks.

Letters as in `loss.py`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jaxscale.ops.tensor_parallel import Spread


class LossArrays(NamedTuple):
    """The array arguments of `cross_entropy`; or the spec of each."""

    x_BTD: Any
    head: Any
    bias_V: Any
    rows_KD: Any
    targets_BT: Any
    weights_BT: Any


class Slice(NamedTuple):
    """The rank's slice of a head that ranks of a manual mesh axis divide, of equal sizes."""

    axis: str
    columns: int  # of all slices, without the padding after the last; of a rank of tensor


def on_ranks(
    spread: Spread | None,
    local: Callable,
    columns: int,
    *,
    transposed: bool,
    summed: PartitionSpec | None = None,
) -> Callable[[LossArrays], Any]:
    """Runs `local`, which returns (loss, nll) or these and gradients, on each rank's part of the
    arrays.

    Args:
      columns: of a rank of tensor.
      transposed: whether the head is [V, D].
      summed: the spec of the head's gradient; None without gradients.
    """
    if spread is None:
        return local
    everywhere, bias = PartitionSpec(), PartitionSpec(spread.axis)
    tokens, rows = PartitionSpec(None, spread.time), PartitionSpec(None, spread.features)
    head = spread.weight(2, o=1 if transposed else 0)
    own_bias = bias
    if columns % ranks_of(spread.time) == 0:
        own = column_axes(spread)
        head, own_bias = PartitionSpec(spread.features, own), PartitionSpec(own)
        head = PartitionSpec(*reversed(head)) if transposed else head
    results: Any = (everywhere, everywhere)
    if summed is not None:
        results = results, (spread.stream, summed, bias, rows)
    specs = LossArrays(spread.stream, head, own_bias, rows, tokens, tokens)
    return spread.manual(local, (specs,), results)


def head_gradient_spec(spread: Spread | None, scatters: bool) -> PartitionSpec:
    """The spec of the head's gradient, [D, V]."""
    if spread is None:
        return PartitionSpec()
    return PartitionSpec(spread.time, spread.axis) if scatters else spread.weight(2, o=0)


def column_axes(spread: Spread | None) -> tuple[str, ...]:
    """The mesh axes that shard the columns, the slowest first."""
    return tuple(filter(None, (spread.axis, *spread.time))) if spread else ()


def summed_axes(spread: Spread | None, slice_: Slice | None) -> tuple[str, ...]:
    """The mesh axes over which the loss combines its columns."""
    return (*column_axes(spread), *((slice_.axis,) if slice_ else ()))


def ranks_of(axes: Sequence[str]) -> int:
    """The number of ranks of some mesh axes, manual or automatic."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes)


def time_ranks(spread: Spread | None) -> int:
    """The number of ranks that divide a sequence."""
    return ranks_of(spread.time) if spread else 1


def own_columns(
    spread: Spread | None, arrays: LossArrays, columns: int, *, transposed: bool
) -> LossArrays:
    """This rank's columns of the head and the bias, with zeros after them where context does not
    divide them: they are then sharded over tensor only before."""
    ranks = time_ranks(spread)
    if columns % ranks == 0:
        return arrays
    assert spread is not None

    def part(x: Array | None, dim: int) -> Array | None:
        if x is None:
            return None
        share = -(-x.shape[dim] // ranks)
        missing = [(0, share * ranks - x.shape[dim] if d == dim else 0) for d in range(x.ndim)]
        start = jax.lax.axis_index(spread.time) * share
        return jax.lax.dynamic_slice_in_dim(jnp.pad(x, missing), start, share, axis=dim)

    head = part(arrays.head, 0 if transposed else 1)
    return arrays._replace(head=head, bias_V=part(arrays.bias_V, 0))


def whole_columns(spread: Spread | None, x: Array, columns: int, *, scatters: bool) -> Array:
    """The columns, the last dimension, of all ranks of context; with `scatters` of this rank's part
    of the first dimension.

    Args:
      columns: of a rank of tensor, without the zeros of `own_columns`.
    """
    if time_ranks(spread) == 1:
        return x
    assert spread is not None
    last = x.ndim - 1
    if scatters:
        x = jax.lax.all_to_all(x, spread.time, split_axis=0, concat_axis=last, tiled=True)
    else:
        x = jax.lax.all_gather(x, spread.time, axis=last, tiled=True)
    return x[..., :columns]


class Columns(NamedTuple):
    """This rank's columns of the head."""

    first: Any  # the token of the first one
    real: Any  # their number without padding; None: no rank has padding


def columns_of(
    spread: Spread | None, share: int, columns: int, vocab_size: int, slice_: Slice | None = None
) -> Columns:
    """The columns of this rank: `share` of the `columns`, or with a slice of the columns in it,
    that its rank of tensor has."""
    over_tensor, ranks = spread.axis if spread else None, time_ranks(spread)
    whole = slice_.columns if slice_ else columns
    inside = jax.lax.axis_index(spread.time) * share if spread and ranks > 1 else 0
    before = inside + (jax.lax.axis_index(slice_.axis) * columns if slice_ else 0)
    first, total = before, whole
    if over_tensor:
        first += jax.lax.axis_index(over_tensor) * whole
        total *= jax.lax.axis_size(over_tensor)
    sliced = columns * ranks_of([slice_.axis]) if slice_ else whole
    if total <= vocab_size and share * ranks == columns and sliced == whole:
        return Columns(first, None)
    least = jnp.minimum(jnp.minimum(vocab_size - first, whole - before), columns - inside)
    return Columns(first, jnp.clip(least, 0, share))


def over_columns(axes: tuple[str, ...], log_z_C: Array, target_C: Array) -> tuple[Array, Array]:
    """Combines log Z and targets' logits over the columns of all ranks of some mesh axes."""
    if not axes:
        return log_z_C, target_C
    # Log-sum-exp relative to the maximum over ranks. A rank with padding columns only has -inf,
    # which counts as exp(-inf) = 0; the target's logit is 0 on all ranks except one.
    most_C = jax.lax.pmax(log_z_C, axes)
    total_C, target_C = jax.lax.psum((jnp.exp(log_z_C - most_C), target_C), axes)
    return most_C + jnp.log(total_C), target_C


def gather_chunks(spread: Spread | None, x: Array, axis: int) -> Array:
    """All-gathers the tokens of chunks over the ranks that divide a sequence."""
    if time_ranks(spread) == 1:
        return x
    assert spread is not None
    return jax.lax.all_gather(x, spread.time, axis=axis, tiled=True)


def scatter_chunk(spread: Spread | None, x_CD: Array) -> Array:
    """Reduce-scatters the tokens of a chunk over these ranks."""
    if time_ranks(spread) == 1:
        return x_CD
    assert spread is not None
    return jax.lax.psum_scatter(x_CD, spread.time, scatter_dimension=0, tiled=True)


def gather_tokens(spread: Spread | None, x_BTD: Array) -> Array:
    """All-gathers tokens over the ranks that divide the vocabulary."""
    if not (spread and spread.axis):
        return x_BTD
    # Before the loop over chunks: one collective for all of them, which then compute without any
    # but the sums of `over_columns`.
    return jax.lax.all_gather(x_BTD, spread.axis, axis=1, tiled=True)


def scatter_tokens(spread: Spread | None, x_BTD: Array) -> Array:
    """Reduce-scatters over the ranks that divide the vocabulary, along T."""
    if not (spread and spread.axis):
        return x_BTD
    return jax.lax.psum_scatter(x_BTD, spread.axis, scatter_dimension=1, tiled=True)
