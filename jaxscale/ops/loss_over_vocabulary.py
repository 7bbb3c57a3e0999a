"""Vocabulary-parallel loss: collectives of the loss over tensor (columns) and time (tokens).

Letters as in `loss.py`.
"""

from collections.abc import Callable
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


def on_ranks(
    spread: Spread | None, local: Callable, *, transposed: bool, summed: PartitionSpec | None = None
) -> Callable[[LossArrays], Any]:
    """Runs `local`, which returns (loss, nll) or these and gradients, on each rank's part of the
    arrays.

    Args:
      transposed: whether the head is [V, D].
      summed: the spec of the head's gradient; None without gradients.
    """
    if spread is None:
        return local
    everywhere, bias = PartitionSpec(), PartitionSpec(spread.axis)
    tokens, rows = PartitionSpec(None, spread.time), PartitionSpec(None, spread.features)
    head = spread.weight(2, o=1 if transposed else 0)
    results: Any = (everywhere, everywhere)
    if summed is not None:
        results = results, (spread.stream, summed, bias, rows)
    specs = LossArrays(spread.stream, head, bias, rows, tokens, tokens)
    return spread.manual(local, (specs,), results)


def head_gradient_spec(spread: Spread | None, scatters: bool) -> PartitionSpec:
    """The spec of the head's gradient, [D, V]."""
    if spread is None:
        return PartitionSpec()
    return PartitionSpec(spread.time, spread.axis) if scatters else spread.weight(2, o=0)


def first_id(spread: Spread | None, columns: int) -> Any:
    """The token of this rank's first column of the head."""
    return jax.lax.axis_index(spread.axis) * columns if spread and spread.axis else 0


def over_columns(spread: Spread | None, log_z_C: Array, target_C: Array) -> tuple[Array, Array]:
    """Combines log Z and targets' logits over the columns of all ranks."""
    if not (spread and spread.axis):
        return log_z_C, target_C
    # Log-sum-exp relative to the maximum over ranks. A rank with padding columns only has -inf,
    # which counts as exp(-inf) = 0; the target's logit is 0 on all ranks except one.
    most_C = jax.lax.pmax(log_z_C, spread.axis)
    total_C, target_C = jax.lax.psum((jnp.exp(log_z_C - most_C), target_C), spread.axis)
    return most_C + jnp.log(total_C), target_C


def over_time(spread: Spread | None, sums: Any) -> Any:
    """All-reduces sums over tokens to sums over the tokens of all ranks."""
    return jax.lax.psum(sums, spread.time) if spread and spread.time else sums


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
