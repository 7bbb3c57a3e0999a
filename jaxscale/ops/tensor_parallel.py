"""Tensor-parallel matmuls (columns, rows), with weights' gradients sharded as the weights.

Shapes: B batch, T time, D features of the residual stream. Letters in comments: a leading
dimensions of x, c contracted dimensions, o outputs.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jaxscale.ops.collective_matmul import gather_matmuls, matmuls_scatter
from jaxscale.ops.matmul import (
    FORWARD,
    INPUT_GRADIENT,
    OPERANDS,
    WEIGHT_GRADIENT,
    QuantisedWeight,
    Scaled,
    by_rows,
    matmul,
    weight_scale,
)
from jaxscale.sharding.specs import manually

Weight = Array | QuantisedWeight
"""[*c, *o]"""


def linear(
    x: Array, weight: Weight, *, contracted: int = 1, dtype: str = "", platform: str = ""
) -> Array:
    """Matmul with a weight, [*a, *c] x [*c, *o] -> [*a, *o].

    JAX differentiates a matmul by its right operand as (dy^T x)^T. XLA's CPU back end then
    transposes dy, repeating the elementwise work that produced it, and in bfloat16 falls back to a
    matmul that is ten times slower and sums in bfloat16. The gradient here is x^T dy.

    Args:
      contracted: the number of contracted dimensions.
      dtype: `model.matmul_dtype`.
      platform: of the devices. On "cpu" the weight's gradient has the form that XLA computes
        fastest, which needs whole dimensions a on each device; on "gpu" float8 weights keep their
        order in memory.
    """
    return _linear(_Matmul(contracted, dtype, platform), x, weight)


def columns(
    x_BTD: Array,
    weights: Sequence[Weight],
    *,
    dtype: str = "",
    platform: str = "",
    side_by_side: bool = False,
) -> tuple[Array, ...]:
    """Matmuls out of the residual stream: [B, T, D] x [D, *o] -> [B, T, *o] for each weight.

    Args:
      side_by_side: whether narrow weights, such as those of queries, keys and values, are
        concatenated in the backward pass. Its two matmuls give all gradients; the gradient of x is
        then not written and read again for each weight.
    """
    how = _Matmul(1, dtype, platform)
    same_type = len({isinstance(weight, QuantisedWeight) for weight in weights}) == 1
    if side_by_side and same_type and _are_narrow(weights):
        return _side_by_side(how, x_BTD, tuple(weights))
    return tuple(_linear(how, x_BTD, weight) for weight in weights)


def rows(x_BT: Array, weight: Weight, *, dtype: str = "", platform: str = "") -> Array:
    """A matmul back into the residual stream: [B, T, *c] x [*c, D] -> [B, T, D]."""
    return linear(x_BT, weight, contracted=x_BT.ndim - 2, dtype=dtype, platform=platform)


def add_bias(x: Array, bias: Array) -> Array:
    """[*a, *o] + [*o], with the bias in the type of x.

    The bias's gradient, a sum over all tokens, is accumulated in float32 or wider; JAX's derivative
    of the addition would accumulate in the type of x.
    """
    wide = jnp.broadcast_to(bias.astype(jnp.promote_types(x.dtype, jnp.float32)), x.shape)
    return x + wide.astype(x.dtype)


class _Matmul(NamedTuple):
    """Static arguments of `linear`."""

    contracted: int
    dtype: str
    platform: str


class Spread(NamedTuple):
    """Tensor parallelism: weights sharded over a mesh axis, along o in `columns`, along c in
    `rows`.

    T of the residual stream is sharded over the same axis. The stream is all-gathered before
    matmuls out of it, and the result of a matmul back into it is reduce-scattered (arXiv
    1909.08053, with sequence parallelism, arXiv 2205.05198, section 4.2). For use where some mesh
    axes are automatic.

    With `features`, D of stream and weights is sharded over a second axis (arXiv 2305.13525), over
    which activations between the two matmuls are replicated. The results of matmuls out of the
    stream are summed over that axis; in the backward pass so are the gradients of inputs of matmuls
    into the stream. The gathered stream is then saved, so that each all-reduce over `axis` in that
    paper is one gather and one scatter here.
    """

    axis: str | None  # None: over `features` only
    time: tuple[str, ...]  # mesh axes that shard T in all arrays
    axes: tuple[str, ...]  # all automatic axes
    features: str | None = None
    ring: bool = False  # whether gathers and scatters are ring steps that overlap matmuls
    recomputes: bool = False  # whether the backward pass begins with a forward pass of the layer
    dtype: str = ""  # `model.matmul_dtype`

    @property
    def saves_gathered(self) -> bool:
        """Whether the gathered stream is saved for the backward pass. In a recomputed layer it is
        available anyway: XLA merges two equal gathers, but not two rings."""
        return self.features is not None or (self.ring and self.recomputes)

    @property
    def stream(self) -> PartitionSpec:
        """The spec of the residual stream."""
        return self._stream(self.axis)

    @property
    def gathered(self) -> PartitionSpec:
        """The spec of the stream gathered over `axis`."""
        return self._stream(None)

    @property
    def hidden(self) -> PartitionSpec:
        """The spec of activations between the two matmuls."""
        return PartitionSpec(None, self.time, self.axis)

    def _stream(self, axis: str | None) -> PartitionSpec:
        time = (*self.time, *filter(None, [axis]))
        return PartitionSpec(None, time, *filter(None, [self.features]))

    def weight(self, ndim: int, o: int) -> PartitionSpec:
        """The spec of a weight with D as dimension `o`, the first or the last."""
        hidden = [self.axis] + [None] * (ndim - 2)
        return PartitionSpec(*([self.features, *hidden] if o == 0 else [*hidden, self.features]))

    def summed(self, xs: Sequence[Array]) -> Sequence[Array]:
        """Sums arrays over `features`."""
        return jax.lax.psum(xs, self.features) if self.features else xs

    def manual(self, function: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """The function with every mesh axis manual."""
        return manually(function, self.axes, in_specs, out_specs)


# Written by hand: XLA's partitioner all-reduces the partial results of each matmul separately,
# three times for queries, keys and values, and saves the gathered activations for the backward
# pass.


def spread_columns(x_BTD: Array, weights: Sequence[Array], spread: Spread) -> tuple[Array, ...]:
    """`columns` with sharded weights. Each rank saves its part of T; the backward pass gathers it
    again, unless features are sharded, too, and sums gradients over matmuls before it reduces them
    over ranks."""
    return _spread_columns(spread, x_BTD, tuple(weights))


def spread_rows(x_BT: Array, weight: Array, spread: Spread) -> Array:
    """`rows` with a sharded weight."""
    return _spread_rows(spread, x_BT, weight)


def _weight_gradient(x: Array, dy: Array, leading: int, dtype: str) -> Array:
    """[*a, *c] x [*a, *o] -> [*c, *o], where a has `leading` dimensions."""
    over = range(leading), range(leading)
    return matmul(x, dy, over, dtype=dtype, role=WEIGHT_GRADIENT)


def _for_cpu(x: Array, dy: Array, leading: int) -> tuple[Array, Array, int]:
    """The arguments of `_weight_gradient` in the form that XLA for CPUs multiplies fastest.

    Without the barrier XLA fuses the transpose of x with the elementwise work that produced it, and
    repeats that work. A float32 matmul can read its left operand by columns if one dimension is
    contracted; in bfloat16 this form would be computed in float32, which is slower.
    """
    x = jax.lax.optimization_barrier(x)
    if x.dtype.itemsize < 4:
        return x, dy, leading
    return x.reshape(-1, *x.shape[leading:]), dy.reshape(-1, *dy.shape[leading:]), 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(how: _Matmul, x: Array, weight: Weight) -> Array:
    return _forward(how, x, weight)[0]


def _forward(how: _Matmul, x: Array, weight: Weight):
    over = range(x.ndim - how.contracted, x.ndim)
    if isinstance(weight, QuantisedWeight):
        given = Scaled(weight.forward, weight.unit)
        dims = over, range(weight.ndim - how.contracted, weight.ndim)
        return matmul(x, given, dims, dtype=how.dtype), (x, weight, None)
    dims, scale = (over, range(how.contracted)), weight_scale(weight, how.dtype)
    as_laid_out = how.platform == "gpu"
    y = matmul(x, weight, dims, dtype=how.dtype, as_laid_out=as_laid_out, of_y=scale)
    return y, (x, weight, scale)


def _backward(how: _Matmul, residuals, dy: Array):
    x, weight, scale = residuals
    leading = x.ndim - how.contracted
    dims = range(leading, dy.ndim), range(how.contracted, weight.ndim)
    quantised = isinstance(weight, QuantisedWeight)
    given = Scaled(weight.backward, weight.unit) if quantised else weight
    dx = matmul(dy, given, dims, dtype=how.dtype, role=INPUT_GRADIENT, of_y=scale)
    if how.platform == "cpu":
        x, dy, leading = _for_cpu(x, dy, leading)
    dweight = _weight_gradient(_by_rows(how, x), dy, leading, how.dtype)
    return dx, _gradient_of(weight, dweight)


_linear.defvjp(_forward, _backward)


def _gradient_of(weight: Weight, grad: Array) -> Weight:
    """The gradient of a weight, in the weight's form."""
    if not isinstance(weight, QuantisedWeight):
        return grad
    others = weight.forward, weight.backward, weight.unit
    return QuantisedWeight(grad, *map(jnp.zeros_like, others))


def _by_rows(how: _Matmul, x: Array) -> Array:
    """Constrains x to row-major layout on GPUs. A weight's gradient reads x by columns, and XLA
    would lay out whole streams so, with which a norm's kernel takes 1.8 times as long."""
    return by_rows(x) if how.platform == "gpu" else x


def _are_narrow(weights: Sequence[Weight]) -> bool:
    """Whether to fuse the weights' gradient matmuls. This saves writing and reading a gradient of x
    for all weights except one, and costs at most a read of all outputs' gradients. Not for wide
    weights such as gate and up: XLA would repeat elementwise work shared by their gradients."""
    features, outputs = weights[0].shape[0], sum(map(_outputs, weights))
    return outputs < 2 * (len(weights) - 1) * features


def _outputs(weight: Weight) -> int:
    """Output features of a weight [D, *o]."""
    return math.prod(weight.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _side_by_side(how: _Matmul, x: Array, weights: tuple[Weight, ...]) -> tuple[Array, ...]:
    return _side_by_side_forward(how, x, weights)[0]


def _side_by_side_forward(how: _Matmul, x: Array, weights: tuple[Weight, ...]):
    ys, residuals = zip(*(_forward(how, x, weight) for weight in weights))
    return ys, (x, weights, [scale for _, _, scale in residuals])


def _side_by_side_backward(how: _Matmul, residuals, dys: tuple[Array, ...]):
    x, weights, scales = residuals
    # Without the barrier XLA for GPUs writes the concatenation twice, once for each matmul.
    dy = jax.lax.optimization_barrier(
        jnp.concatenate([dy.reshape(*x.shape[:-1], -1) for dy in dys], -1)
    )
    weight, scale = _joined(how, weights, scales)
    dims = [dy.ndim - 1], [1]
    dx = matmul(dy, weight, dims, dtype=how.dtype, role=INPUT_GRADIENT, of_y=scale)
    dweight = _weight_gradient(_by_rows(how, x), dy, x.ndim - 1, how.dtype)
    ends = itertools.accumulate(map(_outputs, weights[:-1]))
    parts = jnp.split(dweight, list(ends), axis=-1)
    grads = [part.reshape(weight.shape) for part, weight in zip(parts, weights)]
    return dx, tuple(map(_gradient_of, weights, grads))


def _joined(
    how: _Matmul, weights: Sequence[Weight], scales: Sequence[Any]
) -> tuple[Array | Scaled, Array | None]:
    """Concatenated weights [D, *o], all quantised or none, for the gradient of x; and their common
    scale, if they are not quantised yet."""
    plain = [weight for weight in weights if not isinstance(weight, QuantisedWeight)]
    quantised = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
    if plain:
        scale = functools.reduce(jnp.minimum, scales) if how.dtype == "float8" else None
        return _flat(plain), scale
    unit = functools.reduce(jnp.maximum, [weight.unit for weight in quantised])
    # The ratio is a power of two, so rescaling is exact, except for numbers that become 2^14 times
    # smaller than the largest.
    parts = [weight.backward.astype(jnp.float32) * (weight.unit / unit) for weight in quantised]
    return Scaled(_flat(parts).astype(OPERANDS["float8", INPUT_GRADIENT][1]), unit), None


def _flat(weights: Sequence[Array]) -> Array:
    """Concatenates weights [D, *o] along their outputs."""
    return jnp.concatenate([weight.reshape(weight.shape[0], -1) for weight in weights], -1)


_side_by_side.defvjp(_side_by_side_forward, _side_by_side_backward)


def _gathered(spread: Spread, x_BTD: Array) -> Array:
    """The stream gathered over `axis`: T whole."""
    if spread.ring:
        return _gathered_matmuls(spread, x_BTD, (), o=0, role=FORWARD)[0]
    if spread.axis is None:
        return x_BTD

    def local(x_BTD: Array) -> Array:
        return jax.lax.all_gather(x_BTD, spread.axis, axis=1, tiled=True)

    return spread.manual(local, (spread.stream,), spread.gathered)(x_BTD)


def _scattered(
    spread: Spread, xs: Sequence[Array], weights: Sequence[Array], o: int, role: str
) -> Array:
    """The sum of matmuls [B, T, *c] x weight, reduce-scattered over `axis` along T.

    Args:
      o: the output dimension of the weights; all others are c.
    """
    multiply = functools.partial(matmul, dtype=spread.dtype, role=role, over=spread.axis)

    def local(xs: Sequence[Array], weights: Sequence[Array]) -> Array:
        if spread.axis and spread.ring:
            return matmuls_scatter(xs, weights, axis=spread.axis, o=o, multiply=multiply)
        terms = [
            multiply(x, weight, (range(2, x.ndim), [c for c in range(weight.ndim) if c != o]))
            for x, weight in zip(xs, weights)
        ]
        total: Any = sum(terms)
        if spread.axis is None:
            return total
        return jax.lax.psum_scatter(total, spread.axis, scatter_dimension=1, tiled=True)

    specs = [spread.weight(weight.ndim, o) for weight in weights]
    return spread.manual(local, (spread.hidden, specs), spread.stream)(list(xs), list(weights))


def _gathered_matmuls(
    spread: Spread, x_BTD: Array, weights: Sequence[Array], o: int, role: str
) -> tuple[Array, tuple[Array, ...]]:
    """The gathered stream, and its matmuls [B, T, D] x weight, summed over `features`.

    Args:
      o: the dimension D of the weights.
    """
    if spread.axis is None or not spread.ring:
        whole_BTD = _gathered(spread, x_BTD)
        return whole_BTD, _projected(spread, whole_BTD, weights, o, role)
    multiply = functools.partial(matmul, dtype=spread.dtype, role=role)
    local = functools.partial(gather_matmuls, axis=spread.axis, o=o, multiply=multiply)
    specs = (spread.stream, tuple(spread.weight(weight.ndim, o) for weight in weights))
    results = (spread.gathered, (spread.hidden,) * len(weights))
    return spread.manual(local, specs, results)(x_BTD, tuple(weights))


def _projected(
    spread: Spread, x_BTD: Array, weights: Sequence[Array], o: int, role: str
) -> tuple[Array, ...]:
    """Matmuls with a gathered stream, [B, T, D] x weight, summed over `features`.

    Args:
      o: the dimension D of the weights.
    """
    multiply = functools.partial(matmul, dtype=spread.dtype, role=role)

    def local(x_BTD: Array, weights: Sequence[Array]) -> Sequence[Array]:
        over = functools.partial(multiply, over=spread.features)
        return spread.summed([over(x_BTD, weight, ([2], [o])) for weight in weights])

    if spread.features is None:
        return tuple(multiply(x_BTD, weight, ([2], [o])) for weight in weights)
    specs = [spread.weight(weight.ndim, o) for weight in weights]
    return tuple(
        spread.manual(local, (spread.gathered, specs), spread.hidden)(x_BTD, list(weights))
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread_columns(spread: Spread, x_BTD: Array, weights: tuple) -> tuple[Array, ...]:
    return _columns_forward(spread, x_BTD, weights)[0]


def _columns_forward(spread: Spread, x_BTD: Array, weights: tuple):
    whole_BTD, ys = _gathered_matmuls(spread, x_BTD, weights, o=0, role=FORWARD)
    return ys, (whole_BTD if spread.saves_gathered else x_BTD, weights)


def _columns_backward(spread: Spread, residuals, dys: tuple):
    x_BTD, weights = residuals
    dx_BTD = _scattered(spread, dys, weights, o=0, role=INPUT_GRADIENT)
    x_BTD = x_BTD if spread.saves_gathered else _gathered(spread, x_BTD)
    return dx_BTD, tuple(_weight_gradient(x_BTD, dy, 2, spread.dtype) for dy in dys)


_spread_columns.defvjp(_columns_forward, _columns_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread_rows(spread: Spread, x_BT: Array, weight: Array) -> Array:
    return _scattered(spread, [x_BT], [weight], o=weight.ndim - 1, role=FORWARD)


def _rows_forward(spread: Spread, x_BT: Array, weight: Array):
    return _spread_rows(spread, x_BT, weight), (x_BT, weight)


def _rows_backward(spread: Spread, residuals, dy_BTD: Array):
    x_BT, weight = residuals
    o = weight.ndim - 1
    dy_BTD, (dx_BT,) = _gathered_matmuls(spread, dy_BTD, (weight,), o, INPUT_GRADIENT)
    return dx_BT, _weight_gradient(x_BT, dy_BTD, 2, spread.dtype)


_spread_rows.defvjp(_rows_forward, _rows_backward)
