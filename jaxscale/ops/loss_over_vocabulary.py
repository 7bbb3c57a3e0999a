"""The loss over mesh axes: columns of the head over ranks of tensor, tokens over ranks of time.

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
    """What a loss is of, as `cross_entropy` has them; or the specs of each."""

    x_BTD: Any
    head: Any
    bias_V: Any
    rows_KD: Any
    targets_BT: Any
    weights_BT: Any


def on_ranks(
    spread: Spread | None, local: Callable, *, transposed: bool, summed: PartitionSpec | None = None
) -> Callable[[LossArrays], Any]:
    """`local`, which returns the loss and nll, or these and gradients, on each rank's part of its
    arrays.

    Args:
      transposed: whether the head is [V, D].
      summed: how the gradient of the head is spread; None where there are no gradients.
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
    """How the gradient of the head, [D, V], is spread."""
    if spread is None:
        return PartitionSpec()
    return PartitionSpec(spread.time, spread.axis) if scatters else spread.weight(2, o=0)


def first_id(spread: Spread | None, columns: int) -> Any:
    """The token of this rank's first column of the head."""
    return jax.lax.axis_index(spread.axis) * columns if spread and spread.axis else 0


def over_columns(spread: Spread | None, log_z_C: Array, target_C: Array) -> tuple[Array, Array]:
    """Both over the columns of all ranks. One of nothing but padding has a `log_z_C` of -inf."""
    if not (spread and spread.axis):
        return log_z_C, target_C
    most_C = jax.lax.pmax(log_z_C, spread.axis)
    total_C, target_C = jax.lax.psum((jnp.exp(log_z_C - most_C), target_C), spread.axis)
    return most_C + jnp.log(total_C), target_C


def over_time(spread: Spread | None, sums: Any) -> Any:
    """Sums over this rank's tokens, summed over the ranks that have others."""
    return jax.lax.psum(sums, spread.time) if spread and spread.time else sums


def gather_tokens(spread: Spread | None, x_BTD: Array) -> Array:
    """Every token whose logits this rank has columns of."""
    if not (spread and spread.axis):
        return x_BTD
    return jax.lax.all_gather(x_BTD, spread.axis, axis=1, tiled=True)


def scatter_tokens(spread: Spread | None, x_BTD: Array) -> Array:
    """Sums over ranks, each of which gets its part of T."""
    if not (spread and spread.axis):
        return x_BTD
    return jax.lax.psum_scatter(x_BTD, spread.axis, scatter_dimension=1, tiled=True)
