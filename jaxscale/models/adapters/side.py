"""Side network next to a frozen model (LoSA, arXiv 2402.02887): nothing is back-propagated through
the model.

A layer of the model with output b_i has a layer of the side network:

    y_0 = 0,    y_i = y_{i-1} + g_i(stop_gradient(b_i) + y_{i-1}),    head(b_L + y_L)

with g_i an MLP over the features of a token, d_model -> side_width -> d_model with GELU, whose
second matrix is initially zero, so that the model is initially unchanged. The paper's mixer over
tokens is not causal and needs texts of one length; here tokens are mixed by the model's own layers
only (our choice for language models), so that packed documents, context parallelism and decoding
without a further cache are exact.

Letters: B batch, T time, D embed.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxscale.batch import Batch
from jaxscale.config.model import ModelConfig
from jaxscale.config.model.lora import SIDE
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import STREAM, Layer, Params, Stack, Stream, Sums
from jaxscale.models.weights import Weights, module_of
from jaxscale.ops.tensor_parallel import linear

SIDE_INPUT = "side_input"
"""Checkpoint name of a side layer's input, saved under every remat policy: to recompute it would be
to repeat the model's layer, which has no backward pass."""


class SideLayer(nnx.Module):
    """The MLP g_i of a layer, in float32 or wider."""

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        weights = Weights(config, key)
        self.down = weights.adapter("embed", "side_width")
        self.up = weights.zeros("side_width", "embed", wide=True)

    def __call__(self, x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
        """The side stream after the layer, from the model's stream after it and the side stream
        before it."""
        inputs_BTD = checkpoint_name(x_BTD + y_BTD, SIDE_INPUT)
        hidden = jax.nn.gelu(linear(inputs_BTD, self.down[...]))
        return y_BTD + linear(hidden, self.up[...])


def with_side(stack: Stack, config: ModelConfig, kernels: Kernels, *, last: bool) -> Stack:
    """A stack of frozen layers with a side network, whose stream is a second carried array.

    The last layer adds the side stream to the model's, so that a head needs no changes.

    Args:
      last: whether the stack's last layer is the model's.
    """

    def enter(embed: Params, stream: Stream, batch: Batch) -> Stream:
        before = {name: x for name, x in stream.items() if name != SIDE}
        entered = jax.lax.stop_gradient(stack.enter(embed, before, batch))
        return {**entered, SIDE: stream.get(SIDE, jnp.zeros_like(entered["x"]))}

    def block(weights: Params, stream: Stream, batch: Batch, layer: Layer) -> tuple[Stream, Sums]:
        frozen, side = split_side(weights)
        before = {name: x for name, x in stream.items() if name != SIDE}
        frozen, before = jax.tree.map(jax.lax.stop_gradient, (frozen, before))
        after, sums = jax.tree.map(jax.lax.stop_gradient, stack.block(frozen, before, batch, layer))
        y_BTD = kernels.shard(side_stream(config, side, after["x"], stream[SIDE]), STREAM)
        if last:
            is_last = layer.index == stack.num_layers - 1
            after["x"] += jnp.where(is_last, y_BTD, jnp.zeros_like(y_BTD))
        return {**after, SIDE: y_BTD}, sums

    carried = {**stack.carried, SIDE: STREAM}
    return dataclasses.replace(stack, enter=enter, block=block, carried=carried)


def split_side(weights: Params) -> tuple[Params, Params | None]:
    """A layer's weights without its side layer's, and these; None without a side network."""
    return {name: one for name, one in weights.items() if name != SIDE}, weights.get(SIDE)


def side_stream(config: ModelConfig, side: Params, x_BTD: Any, y_BTD: Any) -> jax.Array:
    """`SideLayer` with these parameters."""
    return module_of(SideLayer, config, side)(x_BTD, y_BTD)
