"""Parameter initialisation, bitwise the same on any layout and back end."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.config.model import ModelConfig
from jaxscale.config.width_scaling import initial_factor
from jaxscale.ops.random_bits import random_bits

ADAPTERS = 2**32 - 1
"""Folded into a module's key for the adapters' keys; no parameter's number is as large."""


class Weights:
    """Makes the parameters of one module: shape, scale and sharding follow from the logical axes.

    Args:
      branches: residual branches in all layers of the stack; None is two per layer.
      sizes: of custom axes.
    """

    def __init__(
        self, config: ModelConfig, key: jax.Array, *, branches: int | None = None, **sizes: int
    ):
        self.sizes = {
            **sizes,
            "embed": config.d_model,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "mlp": config.d_ff,
            "vocab": config.padded_vocab_size,
            "positions": config.max_seq_len,
            "buckets": config.relative_buckets,
            "token_types": config.token_types,
            "transform": config.d_model,
            "experts": config.num_experts,
            "expert_mlp": config.expert_d_ff or config.d_ff,
            "shared_mlp": config.shared_d_ff,
            "routes": config.num_experts,
            "query_rank": config.query_rank,
            "kv_rank": config.kv_rank,
            "lora_rank": config.lora_rank,
            "lora_tokens": len(config.trained_tokens),
            "side_width": config.side_width,
            "prompt_tokens": config.prompt_tokens,
            "plain_dim": config.head_dim - config.rope_head_dim,
            "value_dim": config.value_dim,
            "halves": 2,
            "pairs": config.rope_head_dim // 2,
        }
        self.dtype = jnp.dtype(config.param_dtype)
        # "Small init" (Nguyen and Salazar 2019, arXiv 1910.05895); the outputs into the residual
        # stream shrink with depth as in GPT-2.
        self.std = math.sqrt(2 / (5 * config.d_model))
        self.depth_scale = 1 / math.sqrt(branches or 2 * config.num_layers)
        self.keys = nnx.RngStream(key, tag="params")
        if config.adapts:
            # Separate keys, so that a model has the same weights with and without adapters.
            self.adapter_keys = nnx.RngStream(jax.random.fold_in(key, ADAPTERS), tag="params")

    def normal(
        self, *axes: str, residual: bool = False, scale: float = 1.0, inputs: int = 0
    ) -> nnx.Param:
        """A matrix.

        Args:
          residual: whether the matrix writes into the residual stream.
          inputs: the size of "embed" where the matrix does not read the stream.
        """
        shape = self._shape(axes, inputs)
        if inputs:
            scale *= math.sqrt(self.sizes["embed"] / inputs)
        std = self.std * (self.depth_scale if residual else 1.0) * scale
        value = exact_normal(self.keys(), shape, std)
        return nnx.Param(value.astype(self.dtype), axes=axes)

    def adapter(self, *axes: str, inputs: int = 0, each: int = 0) -> nnx.Param:
        """The first matrix of a low-rank adapter, in float32 or wider.

        Args:
          inputs: as in `normal`.
          each: the number of leading dimensions that count separate matrices.
        """
        shape = self._shape(axes, inputs)
        std = math.sqrt(2 / (5 * math.prod(shape[each:-1])))
        value = exact_normal(self.adapter_keys(), shape, std)
        return nnx.Param(value.astype(jnp.promote_types(self.dtype, jnp.float32)), axes=axes)

    def ones(self, *axes: str) -> nnx.Param:
        return nnx.Param(jnp.ones(self.shape(axes), self.dtype), axes=axes)

    def zeros(self, *axes: str, wide: bool = False) -> nnx.Param:
        """Zeros.

        Args:
          wide: in float32 or wider, whatever `param_dtype` is.
        """
        dtype = jnp.promote_types(self.dtype, jnp.float32) if wide else self.dtype
        return nnx.Param(jnp.zeros(self.shape(axes), dtype), axes=axes)

    def shape(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return self._shape(axes, 0)

    def _shape(self, axes: tuple[str, ...], inputs: int) -> tuple[int, ...]:
        sizes = {**self.sizes, "embed": inputs or self.sizes["embed"]}
        return tuple(sizes[axis] for axis in axes)


def exact_normal(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    """Nearly normal float32 numbers, with the same bits on any layout and back end.

    The sum of four uniform 16-bit integers (at most 3.5 standard deviations) times one constant:
    exact except for one rounding. `jax.random.normal` evaluates a polynomial whose last bit depends
    on how the compiler partitions the array.
    """
    first, second = ((words >> 16) + (words & 0xFFFF) for words in random_bits(key, 2, shape))
    centred = ((first + second).astype(jnp.int32) - 2 * 0xFFFF).astype(jnp.float32)
    return centred * jnp.float32(std / math.sqrt(4 * (2**32 - 1) / 12))


def scale_initial(params: Any, axes: Any, ratio: float) -> Any:
    """Initial parameters times the factors of muP, rounded to their own type.

    Args:
      axes: tree of the parameters with the logical axes of each.
      ratio: the model's width over `optimizer.mup_base_width`; 1 changes nothing.
    """

    def scaled(names: tuple[str, ...], x: jax.Array) -> jax.Array:
        factor = initial_factor(names, ratio)
        return x if factor == 1 else (x * jnp.float32(factor)).astype(x.dtype)

    if ratio == 1:
        return params
    return jax.tree.map(scaled, axes, params, is_leaf=lambda node: type(node) is tuple)


Make = Callable[..., nnx.Module]
"""`make(config, key) -> module`."""


def params_of(module: nnx.Module) -> Any:
    """The parameters of a module, as a tree of arrays."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def module_of(make: Make, config: ModelConfig, params: Any) -> Any:
    """The module with these parameters."""
    return nnx.merge(_graph(make, config)[0], params)


def axes_of(make: Make, config: ModelConfig) -> Any:
    """The tree of a module's parameters with the tuple of logical axes in place of each array.

    Raises:
      ValueError: a parameter does not name each of its dimensions.
    """

    def axes(path: tuple, param: Any) -> tuple[str, ...]:
        found, shape = param.get_metadata().get("axes"), param.get_value().shape
        name = "/".join(str(getattr(key, "key", key)) for key in path)
        if not jnp.issubdtype(param.get_value().dtype, jnp.floating):
            raise ValueError(
                f"parameter {name} is {param.get_value().dtype}, which has no gradient; make it of "
                "settings.param_dtype"
            )
        if not isinstance(found, tuple) or len(found) != len(shape):
            raise ValueError(
                f"parameter {name} of shape {shape} has axes = {found!r}; name each dimension: "
                'nnx.Param(array, axes=("embed", ...))'
            )
        return found

    state = _graph(make, config)[1]
    return nnx.to_pure_dict(
        jax.tree_util.tree_map_with_path(
            axes, state, is_leaf=lambda node: isinstance(node, nnx.Variable)
        )
    )


def stack_params(
    make: Callable[[jax.Array], nnx.Module], keys: jax.Array, rows: np.ndarray | None
) -> Any:
    """The parameters of a stack of layers, [layers, ...] each.

    Args:
      make: from a layer's key.
      keys: of every layer.
      rows: the layer in each row, -1 for a row of zeros; None is all layers in order.
    """
    many = jax.vmap(lambda key: params_of(make(key)))
    if rows is None:
        return many(keys)
    return jax.tree.map(
        lambda x: jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)) >= 0, x, 0), many(keys[rows])
    )


def stack_axes(make: Make, config: ModelConfig) -> Any:
    """`axes_of` for a stack of layers."""
    return jax.tree.map(
        lambda axes: ("layers", *axes),
        axes_of(make, config),
        is_leaf=lambda node: type(node) is tuple,
    )


@functools.lru_cache(maxsize=64)
def _graph(make: Make, config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """A module's structure, and its parameters without their values."""
    module = nnx.eval_shape(lambda: make(config, jax.random.key(0)))
    for path, value in nnx.iter_graph(module):
        name = f"{type(module).__name__}.{'.'.join(map(str, path))}"
        if isinstance(value, nnx.Variable) and not isinstance(value, nnx.Param):
            raise ValueError(
                f"{name} is an nnx.{type(value).__name__}; use nnx.Param only: other variables are "
                "not kept between steps, and dropout is set by model.dropout"
            )
        if isinstance(value, jax.Array | np.ndarray):
            raise ValueError(
                f"{name} is an array; make a parameter nnx.Param(array, axes=...), and a constant "
                "where it is used"
            )
    return nnx.split(module, nnx.Param)
