"""Initial parameters, the same on any layout and back end."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.config import ModelConfig


class Weights:
    """Makes the parameters of one module: shape, scale and placement follow from the axes."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        self.sizes = {
            "embed": config.d_model,
            "heads": config.num_heads,
            "kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "mlp": config.d_ff,
            "vocab": config.padded_vocab_size,
            "positions": config.max_seq_len,
            "token_types": config.token_types,
            "transform": config.d_model,
        }
        self.dtype = jnp.dtype(config.param_dtype)
        # "Small init" (Nguyen and Salazar 2019, arXiv 1910.05895); the outputs into the residual
        # stream shrink with depth as in GPT-2.
        self.std = math.sqrt(2 / (5 * config.d_model))
        self.depth_scale = 1 / math.sqrt(2 * config.num_layers)
        self.keys = nnx.RngStream(key, tag="params")

    def normal(self, *axes: str, residual: bool = False) -> nnx.Param:
        """A matrix; `residual` marks those that write into the residual stream."""
        std = self.std * (self.depth_scale if residual else 1.0)
        value = exact_normal(self.keys(), self.shape(axes), std)
        return nnx.Param(value.astype(self.dtype), axes=axes)

    def ones(self, *axes: str) -> nnx.Param:
        return nnx.Param(jnp.ones(self.shape(axes), self.dtype), axes=axes)

    def zeros(self, *axes: str) -> nnx.Param:
        return nnx.Param(jnp.zeros(self.shape(axes), self.dtype), axes=axes)

    def shape(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self.sizes[axis] for axis in axes)


def exact_normal(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    """Float32 draws from (nearly) a normal distribution, the same bits on any layout and back end.

    The sum of four uniform 16-bit integers, which ends at 3.5 standard deviations, times one
    constant: all exact but for one rounding. `jax.random.normal` goes through a polynomial whose
    last bit depends on how the compiler cuts the array.
    """
    words = jax.random.bits(key, (2, *shape), jnp.uint32)
    total = jnp.sum((words >> 16) + (words & 0xFFFF), axis=0, dtype=jnp.uint32).astype(jnp.int32)
    centred = (total - 2 * 0xFFFF).astype(jnp.float32)
    return centred * jnp.float32(std / math.sqrt(4 * (2**32 - 1) / 12))
