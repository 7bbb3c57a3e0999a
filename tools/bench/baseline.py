"""Baseline of `train.py`: the same decoder in plain Flax NNX and optax, one device, no sharding.

Whole logits, attention by `jax.nn.dot_product_attention`, every residual saved. Of this project it
uses only the sizes in a config.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from measure import Case, serve

from jaxscale.batch import Batch
from jaxscale.config import Config
from jaxscale.config.model import ModelConfig
from jaxscale.data.synthetic import synthetic_batch


class State(NamedTuple):
    """Parameters and optimizer state."""

    params: Any
    opt_state: Any


class Block(nnx.Module):
    """Attention and SwiGLU."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        types = {"dtype": config.compute_dtype, "param_dtype": config.param_dtype, "rngs": rngs}
        linear = functools.partial(nnx.Linear, use_bias=False, **types)
        heads, kv_heads = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        self.attention_norm = nnx.RMSNorm(config.d_model, epsilon=1e-5, **types)
        self.q = linear(config.d_model, heads)
        self.k = linear(config.d_model, kv_heads)
        self.v = linear(config.d_model, kv_heads)
        self.out = linear(heads, config.d_model)
        self.mlp_norm = nnx.RMSNorm(config.d_model, epsilon=1e-5, **types)
        self.gate = linear(config.d_model, config.d_ff)
        self.up = linear(config.d_model, config.d_ff)
        self.down = linear(config.d_ff, config.d_model)
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.attention_norm(x)
        q, k, v = (
            project(y).reshape(*y.shape[:2], -1, self.head_dim)
            for project in (self.q, self.k, self.v)
        )
        q, k = rotary(q, self.rope_theta), rotary(k, self.rope_theta)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x += self.out(attended.reshape(*y.shape[:2], -1))
        y = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


def rotary(x: jax.Array, theta: float) -> jax.Array:
    """RoPE of [batch, time, heads, head_dim]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Model(nnx.Module):
    """The decoder, with layers in a Python list or stacked for `nnx.scan`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, scanned: bool):
        types = {"dtype": config.compute_dtype, "param_dtype": config.param_dtype, "rngs": rngs}
        self.embed = nnx.Embed(config.padded_vocab_size, config.d_model, **types)
        if scanned:
            stack = nnx.vmap(lambda rngs: Block(config, rngs))
            self.layers: Any = stack(rngs.split(config.num_layers))
        else:
            self.layers = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.d_model, epsilon=1e-5, **types)
        self.head = nnx.Linear(config.d_model, config.padded_vocab_size, use_bias=False, **types)
        self.scanned, self.vocab_size = scanned, config.vocab_size

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Float32 logits."""
        x = self.embed(tokens)
        if self.scanned:
            apply = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            x = apply(x, self.layers)
        else:
            for block in self.layers:
                x = block(x)
        return self.head(self.norm(x))[..., : self.vocab_size].astype(jnp.float32)


SIZES = (
    "num_layers",
    "d_model",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "d_ff",
    "vocab_size",
    "max_seq_len",
    "rope_theta",
    "attention",
    "compute_dtype",
    "param_dtype",
)
"""The supported model options."""


def build(config: Config, variant: str) -> Case:
    """The train step; `variant` is "scan" or "loop", over the layers.

    Raises:
      ValueError: an unsupported option.
    """
    model, optimizer = config.model, config.optimizer
    plain = ModelConfig(**{name: getattr(model, name) for name in SIZES})
    if plain != model or optimizer.name != "adamw":
        raise ValueError(
            "the plain baseline supports the default model options and adamw only; unset others"
        )
    rate = optax.cosine_decay_schedule(optimizer.learning_rate, config.run.steps, 0.1)
    update_rule = optax.chain(
        optax.clip_by_global_norm(optimizer.clip_norm),
        optax.adamw(rate, optimizer.b1, optimizer.b2, weight_decay=optimizer.weight_decay),
    )

    def new_model(key: jax.Array) -> Model:
        return Model(model, nnx.Rngs(key), scanned=variant == "scan")

    graph = nnx.graphdef(nnx.eval_shape(lambda: new_model(jax.random.key(0))))

    @jax.jit
    def init(key: jax.Array) -> State:
        params = nnx.state(new_model(key), nnx.Param)
        return State(params, update_rule.init(params))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        def loss_of(params):
            logits = nnx.merge(graph, params)(batch.tokens)
            labels = batch.targets
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        updates, opt_state = update_rule.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), loss

    batch = jax.device_put(synthetic_batch(config))
    return Case(init, step, jax.eval_shape(init, jax.random.key(0)), batch)


if __name__ == "__main__":
    serve(build)
