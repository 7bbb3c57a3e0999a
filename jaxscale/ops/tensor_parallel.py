"""Matmuls with weights, whose gradients are laid out as the weights are.

Shapes: B batch, T time, D features of the residual stream. Letters in comments: a the leading
dimensions of x, c those that are contracted, o the outputs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec


def linear(x: Array, weight: Array, *, contracted: int = 1) -> Array:
    """[*a, *c] x [*c, *o] -> [*a, *o].

    JAX would differentiate a matmul by its right operand as (dy^T x)^T. XLA's CPU back end then
    transposes dy, repeating the elementwise work that produced it, and in bfloat16 falls back to a
    matmul that is ten times slower and sums in bfloat16; x^T dy has none of these costs.

    Args:
      contracted: how many dimensions c has.
    """
    return _linear(contracted, x, weight)


def columns(x_BTD: Array, weights: Sequence[Array]) -> tuple[Array, ...]:
    """Matmuls out of the residual stream: [B, T, D] x [D, *o] -> [B, T, *o] for each weight."""
    return tuple(linear(x_BTD, weight) for weight in weights)


def rows(x_BT: Array, weight: Array) -> Array:
    """A matmul back into the residual stream: [B, T, *c] x [*c, D] -> [B, T, D]."""
    return linear(x_BT, weight, contracted=x_BT.ndim - 2)


def add_bias(x: Array, bias: Array) -> Array:
    """[*a, *o] + [*o], the bias in the type of x.

    The bias's gradient is a sum over every token. It is accumulated in float32 or wider, where the
    derivative of a plain sum would add up in the type of x.
    """
    wide = jnp.broadcast_to(bias.astype(jnp.promote_types(x.dtype, jnp.float32)), x.shape)
    return x + wide.astype(x.dtype)


class Spread(NamedTuple):
    """Weights spread over a mesh axis: the first dimension of o in `columns`, of c in `rows`.

    T of the residual stream is sharded over that axis. The stream is gathered before the matmuls
    out of it, and the result of a matmul back into it is reduce-scattered over ranks (tensor
    parallelism, arXiv 1909.08053, with the sequence parallel parts of arXiv 2205.05198, section
    4.2). For use where some mesh axes are still automatic.
    """

    axis: str
    time: tuple[str, ...]  # mesh axes that T is spread over everywhere
    axes: tuple[str, ...]  # all that are automatic

    @property
    def stream(self) -> PartitionSpec:
        """Of the residual stream."""
        return PartitionSpec(None, (*self.time, self.axis))

    def manual(self, function: Callable, in_specs: tuple, out_specs: PartitionSpec) -> Callable:
        """The function with every mesh axis manual."""
        return jax.shard_map(
            function,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.axes),
            check_vma=False,
        )


# By hand, since the compiler all-reduces the partial results of each matmul separately, three times
# for queries, keys and values, and saves the gathered activations for the backward pass.


def spread_columns(x_BTD: Array, weights: Sequence[Array], spread: Spread) -> tuple[Array, ...]:
    """`columns` with spread weights. Each rank saves its part of T for the backward pass, which
    gathers it again, and sums gradients over the matmuls before it sums them over ranks."""
    return _spread_columns(spread, x_BTD, tuple(weights))


def spread_rows(x_BT: Array, weight: Array, spread: Spread) -> Array:
    """`rows` with spread weights."""
    return _spread_rows(spread, x_BT, weight)


def _matmul(x: Array, y: Array, dims: tuple) -> Array:
    return jax.lax.dot_general(x, y, (dims, ((), ())))


def _weight_gradient(x: Array, dy: Array, leading: int) -> Array:
    """[*a, *c] x [*a, *o] -> [*c, *o], where a has `leading` dimensions."""
    return _matmul(x, dy, (range(leading), range(leading)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(contracted: int, x: Array, weight: Array) -> Array:
    return _matmul(x, weight, (range(x.ndim - contracted, x.ndim), range(contracted)))


def _forward(contracted: int, x: Array, weight: Array):
    return _linear(contracted, x, weight), (x, weight)


def _backward(contracted: int, residuals, dy: Array):
    x, weight = residuals
    leading = x.ndim - contracted
    dx = _matmul(dy, weight, (range(leading, dy.ndim), range(contracted, weight.ndim)))
    return dx, _weight_gradient(x, dy, leading)


_linear.defvjp(_forward, _backward)


def _gathered(spread: Spread, x_BTD: Array) -> Array:
    """The stream, as one rank of `axis` needs it: T whole."""

    def local(x_BTD: Array) -> Array:
        return jax.lax.all_gather(x_BTD, spread.axis, axis=1, tiled=True)

    return spread.manual(local, (spread.stream,), PartitionSpec(None, spread.time))(x_BTD)


def _scattered(spread: Spread, xs: Sequence[Array], weights: Sequence[Array], o: int) -> Array:
    """The sum of matmuls [B, T, *c] x weight, over ranks too, each of which gets its part of T.

    Args:
      o: which dimension of the weights is that of the result; c are all the others.
    """

    def local(xs: Sequence[Array], weights: Sequence[Array]) -> Array:
        products = [
            _matmul(x, weight, (range(2, x.ndim), [c for c in range(weight.ndim) if c != o]))
            for x, weight in zip(xs, weights)
        ]
        return jax.lax.psum_scatter(sum(products), spread.axis, scatter_dimension=1, tiled=True)

    x_spec = PartitionSpec(None, spread.time, spread.axis)
    weight_spec = PartitionSpec(None, spread.axis) if o == 0 else PartitionSpec(spread.axis)
    return spread.manual(local, (x_spec, weight_spec), spread.stream)(xs, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread_columns(spread: Spread, x_BTD: Array, weights: tuple) -> tuple[Array, ...]:
    return columns(_gathered(spread, x_BTD), weights)


def _columns_forward(spread: Spread, x_BTD: Array, weights: tuple):
    return _spread_columns(spread, x_BTD, weights), (x_BTD, weights)


def _columns_backward(spread: Spread, residuals, dys: tuple):
    x_BTD, weights = residuals
    dx_BTD = _scattered(spread, dys, weights, o=0)
    x_BTD = _gathered(spread, x_BTD)
    return dx_BTD, tuple(_weight_gradient(x_BTD, dy, 2) for dy in dys)


_spread_columns.defvjp(_columns_forward, _columns_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread_rows(spread: Spread, x_BT: Array, weight: Array) -> Array:
    return _scattered(spread, [x_BT], [weight], o=weight.ndim - 1)


def _rows_forward(spread: Spread, x_BT: Array, weight: Array):
    return _spread_rows(spread, x_BT, weight), (x_BT, weight)


def _rows_backward(spread: Spread, residuals, dy_BTD: Array):
    x_BT, weight = residuals
    dy_BTD = _gathered(spread, dy_BTD)
    dx_BT = _matmul(dy_BTD, weight, ([2], [weight.ndim - 1]))
    return dx_BT, _weight_gradient(x_BT, dy_BTD, 2)


_spread_rows.defvjp(_rows_forward, _rows_backward)
