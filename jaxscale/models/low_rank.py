"""Low-rank adapters (LoRA, arXiv 2106.09685): what is trained in place of the weights of a model.

Letters: a the leading dimensions, c those that a matmul contracts, o those of its result, r rank.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.model_config import ModelConfig
from jaxscale.model_config.low_rank import ADAPTER, is_adapter
from jaxscale.models.weights import Weights
from jaxscale.ops.tensor_parallel import linear
from jaxscale.sharding.resolve import is_axes, leaf_name


class LowRank(nnx.Module):
    """The adapter of a weight [*c, *o]: two matrices, [*c, r] and [r, *o], whose product times
    `lora_alpha` over `lora_rank` is added to it. The second is zero at first, and with it the sum.

    Args:
      axes: of the weight.
      contracted: how many of them are c.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, *axes: str, contracted: int = 1
    ) -> None:
        self.a = weights.adapter(*axes[:contracted], "lora_rank")
        self.b = weights.zeros("lora_rank", *axes[contracted:], wide=True)
        self.contracted, self.scale = contracted, config.lora_alpha / config.lora_rank

    def __call__(self, x: jax.Array, heads: Callable = lambda b: b) -> jax.Array:
        """[*a, *c] -> [*a, *o], to be added to the result of the weight's matmul.

        Args:
          heads: `Kernels.key_heads`, for a weight of key/value heads.
        """
        return self.product(x, self.a[...], heads(self.b[...]))

    def product(self, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        """The same with given matrices."""
        return linear(self.scale * linear(x, a, contracted=self.contracted), b)


def adapter_of(
    name: str, config: ModelConfig, weights: Weights, *axes: str, contracted: int = 1
) -> LowRank | None:
    """The adapter of a weight, as `LowRank`, where `lora_targets` names it."""
    if name not in config.adapted_weights:
        return None
    return LowRank(config, weights, *axes, contracted=contracted)


def frozen_names(axes: Any) -> tuple[str, ...]:
    """The names of all parameters that are not an adapter's.

    Args:
      axes: `Model.axes`.
    """
    paths = jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_axes)[0]
    names = [leaf_name(path) for path, _ in paths]
    return tuple(name for name in names if not is_adapter(name))


def without_adapters(params: Mapping[str, Any]) -> dict[str, Any]:
    """A tree, of parameters or of their axes, without those of adapters."""
    return {
        name: without_adapters(leaf) if isinstance(leaf, Mapping) else leaf
        for name, leaf in params.items()
        if not name.endswith(ADAPTER)
    }


def with_adapters(params: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """A tree without adapters, with those of another one."""
    joined = dict(params)
    for name, leaf in others.items():
        if name.endswith(ADAPTER):
            joined[name] = leaf
        elif isinstance(leaf, Mapping):
            joined[name] = with_adapters(params[name], leaf)
    return joined


def only_adapters(params: Mapping[str, Any]) -> dict[str, Any]:
    """The adapters of a tree, at their places."""
    return {
        name: leaf if name.endswith(ADAPTER) else only_adapters(leaf)
        for name, leaf in params.items()
        if name.endswith(ADAPTER) or isinstance(leaf, Mapping)
    }


def merge_adapters(config: ModelConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the model without adapters that computes the same: what they add is added
    to their weights, in float32 or wider. Gives up the weights that are given.

    Args:
      config: of the model with adapters.
      params: in canonical form, on any layout.
    """
    merged = dict(params)
    for name, leaf in params.items():
        if name.endswith(ADAPTER):
            weight = name.removesuffix(ADAPTER)
            scale = config.lora_alpha / config.lora_rank
            merged[weight] = _merged(params[weight], leaf["a"], leaf["b"], scale)
            del merged[name]
        elif isinstance(leaf, Mapping):
            merged[name] = merge_adapters(config, leaf)
    return merged


def _merged(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    @functools.partial(jax.jit, donate_argnums=0, out_shardings=weight.sharding)
    def merge(weight: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        wide = jnp.promote_types(weight.dtype, jnp.float32)
        one = functools.partial(jnp.tensordot, axes=1, precision="highest")
        added = jax.vmap(one)(a.astype(wide), b.astype(wide))  # of every layer
        return (weight.astype(wide) + scale * added).astype(weight.dtype)

    return merge(weight, a, b)
