"""Matmuls with weights, in the compute type or with 8-bit operands (float8, int8).

`float8` is e4m3 for activations and weights and e5m2 for gradients of outputs (arXiv 2209.05433),
in all three matmuls of a weight. Each operand is multiplied by a power of two that scales its
largest magnitude to the upper half of the type's range ("current scaling": from the array itself).
A power of two does not change significands: an element rounds independently of the others, unless
it is 2^14 times smaller than the largest (e5m2: 2^29). Layouts scale different arrays together, so
they agree except for such elements.

`int8` has no exponents: each row and column has a separate scale along the contracted dimension,
independent of the layout. A weight's gradient, contracted over tokens, stays in the compute type:
its scales would depend on the layout, and small gradients would round to zero.

`dot_general` takes the 8-bit operands and its result is scaled: XLA folds that scale into the
matmul. It does not recognise a quantised array that is scaled back before the matmul (on Hopper
such a matmul silently stays in bfloat16).

Hopper's tensor cores accumulate float8 matmuls with about 14 bits. XLA makes cuBLAS move such sums
to float32 every few terms, except if both operands have precision DEFAULT, which is faster
(openxla/xla#6599). As in Flax (`flax.linen.fp8_ops`), forward matmuls are DEFAULT and gradients
HIGHEST: a weight's gradient has as many terms as there are tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name as named
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "forward", "input gradient", "weight gradient"
"""The matmuls of a weight w: x w, dy w^T and x^T dy."""

_E4M3, _E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2

OPERANDS: dict[tuple[str, str], tuple[Any, Any]] = {
    ("float8", FORWARD): (_E4M3, _E4M3),
    ("float8", INPUT_GRADIENT): (_E5M2, _E4M3),
    ("float8", WEIGHT_GRADIENT): (_E4M3, _E5M2),
    ("int8", FORWARD): (jnp.int8, jnp.int8),
    ("int8", INPUT_GRADIENT): (jnp.int8, jnp.int8),
}
"""(`model.matmul_dtype`, matmul) -> types of both operands; other matmuls are not quantised."""

FLOAT8_PRECISION = {
    FORWARD: jax.lax.Precision.DEFAULT,
    INPUT_GRADIENT: jax.lax.Precision.HIGHEST,
    WEIGHT_GRADIENT: jax.lax.Precision.HIGHEST,
}
"""The precision of float8 accumulation; operands are not affected."""

WEIGHT_SCALE = "weight_scale"
"""The checkpoint name of a weight's scale. Every remat policy saves this one number: to recompute
it the backward pass would read the weight again."""

_LARGEST_SCALE = 2.0**100
"""The largest scale, for arrays near zero: float32 represents it and its inverse."""


class Scaled(NamedTuple):
    """An array of float8 in place of `values * unit`."""

    values: Array
    unit: Array  # one over the scale, in float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [*c, *o] quantised once, for a step that multiplies by it several times: maximum,
    two float8 arrays and a transpose are computed once.

    Modules use it as a weight: `linear`, `columns` and `rows` accept both. Gradients have the same
    form, in `weight`.
    """

    weight: Array  # in the compute type; no matmul reads it, so the compiler removes it
    forward: Array  # [*o, *c]: Hopper multiplies float8 along the last dimension alone
    backward: Array  # [*c, *o]
    unit: Array  # of both arrays, as in `Scaled`

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def ndim(self) -> int:
        return self.weight.ndim

    def __getitem__(self, key: Any) -> "QuantisedWeight":
        """`weight[...]`, as modules read their parameters."""
        assert key is ..., "a quantised weight is read as a whole"
        return self


def is_quantised(x: Any) -> bool:
    """Whether this is a `QuantisedWeight`, a leaf of a tree of weights."""
    return isinstance(x, QuantisedWeight)


def quantised_weight(weight: Array, contracted: int) -> QuantisedWeight:
    """Quantises a weight [*c, *o] for float8 matmuls, with `contracted` dimensions c."""
    dtype = OPERANDS["float8", FORWARD][1]
    values, unit = scaled_float8(weight, dtype)
    order = (*range(contracted, weight.ndim), *range(contracted))
    return QuantisedWeight(weight, values.transpose(order), values, unit)


def matmul(
    x: Array,
    y: Array | Scaled,
    contracted: tuple[Sequence[int], Sequence[int]],
    *,
    dtype: str = "",
    role: str = FORWARD,
    over: str | None = None,
    result: DTypeLike | None = None,
    as_laid_out: bool = False,
    of_y: Array | None = None,
) -> Array:
    """[*a, *c] x [*c, *o] -> [*a, *o], with c at any dimensions, as in `jax.lax.dot_general`.

    Args:
      y: with `dtype` "float8" it may be quantised already.
      contracted: the dimensions c of x and of y.
      dtype: `model.matmul_dtype`; "" keeps the operands' types.
      role: FORWARD, INPUT_GRADIENT or WEIGHT_GRADIENT.
      over: a manual mesh axis that shards c, so that its ranks use the same int8 scales.
      result: the type of the result; None is that of the operands, or of x if y is quantised.
      as_laid_out: whether a float8 y keeps the order of its dimensions in memory. Hopper multiplies
        float8 along the last dimension, for which XLA would transpose y's source: in a loop over
        layers the float32 parameters of all layers at once.
      of_y: the scale of a float8 y, if known.
    """
    dims: Any = (contracted, ((), ()))
    types = OPERANDS.get((dtype, role))
    if types is None:
        assert not isinstance(y, Scaled), f"no float8 in {role!r} of matmul_dtype {dtype!r}"
        return jax.lax.dot_general(x, y, dims, preferred_element_type=result)
    result = jnp.dtype(result or (x.dtype if isinstance(y, Scaled) else jnp.result_type(x, y)))
    if isinstance(y, Scaled) or dtype == "float8":
        x, unit_x = scaled_float8(x, types[0])
        y, unit_y = y if isinstance(y, Scaled) else scaled_float8(y, types[1], of_y)
        if as_laid_out:
            y = by_rows(y)
        scaled = jax.lax.dot_general(
            x, y, dims, precision=FLOAT8_PRECISION[role], preferred_element_type=result
        )
        return scaled * (unit_x * unit_y).astype(result)
    (x, unit_x), (y, unit_y) = (scaled_int8(a, c, over) for a, c in zip((x, y), contracted))
    scaled = jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.int32)
    wide = jnp.promote_types(result, jnp.float32)
    unit_x = unit_x.reshape(*unit_x.shape, *(1,) * unit_y.ndim)
    return (scaled.astype(wide) * (unit_x * unit_y).astype(wide)).astype(result)


def by_rows(x: Array) -> Array:
    """Constrains an array to row-major layout in memory."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def weight_scale(weight: Array, dtype: str) -> Array | None:
    """The scale of a weight in its forward and input gradient matmuls, with the checkpoint name
    WEIGHT_SCALE; None unless `dtype` scales whole arrays."""
    if dtype != "float8":
        return None
    return named(float8_scale(weight, OPERANDS[dtype, FORWARD][1]), WEIGHT_SCALE)


def scaled_float8(x: Array, dtype: Any, scale: Array | None = None) -> Scaled:
    """Quantises an array to float8: the array times its scale, in `dtype`.

    An infinity or NaN anywhere makes the unit infinite or NaN.

    Args:
      scale: `float8_scale(x, dtype)`, if known.
    """
    scale = float8_scale(x, dtype) if scale is None else scale
    return Scaled((x.astype(_wide(x)) * scale).astype(dtype), 1 / scale)


def float8_scale(x: Array, dtype: Any) -> Array:
    """The power of two, in float32, that scales the largest magnitude of an array to the upper half
    of the range of `dtype`."""
    return _power_of_two(float(jnp.finfo(dtype).max) / _largest(x))


def scaled_int8(x: Array, contracted: Sequence[int], over: str | None) -> tuple[Array, Array]:
    """Quantises an array to int8: the array divided by its steps, rounded, and the steps in float32
    or wider. A step is a 127th of the largest magnitude along the contracted dimensions."""
    kept = [dim for dim in range(x.ndim) if dim not in contracted]
    wide = x.astype(_wide(x))
    largest = jnp.max(jnp.abs(wide), axis=tuple(contracted), keepdims=True)
    if over:
        largest = jax.lax.pmax(largest, over)
    step = jnp.where(largest == 0, 1, largest) / 127
    return jnp.round(wide / step).astype(jnp.int8), step.reshape([x.shape[dim] for dim in kept])


def _largest(x: Array) -> Array:
    """The largest magnitude in float32; NaN if any element is."""
    # Maxima of rows first, which XLA for GPUs fuses into the kernel that writes x or one that reads
    # it anyway. Without the barrier it would merge the two reductions.
    rows = jax.lax.optimization_barrier(jnp.max(jnp.abs(x), axis=-1))
    return jnp.max(rows).astype(jnp.float32)


def _power_of_two(x: Array) -> Array:
    """The largest power of two not above a non-negative float32, from its exponent bits: exp2 and
    log2 are not exact on every back end."""
    x = jnp.minimum(x, _LARGEST_SCALE)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
    return jnp.where(jnp.isnan(x), x, jax.lax.bitcast_convert_type(bits, jnp.float32))


def _wide(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)
