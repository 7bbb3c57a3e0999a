"""Shapes of a model's parameters and of its layers' inputs, without a device or an array."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.batch import Batch
from jaxscale.config import Config
from jaxscale.config.model import ModelSettings, find_make, is_own_family
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.models.encoder_decoder import EncoderDecoder
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import Model, Stack, split_stream
from jaxscale.ops.storage.quantised_storage import unpack_weights
from jaxscale.sharding.resolve import weights_in_use

Tree = Any
MakeModel = Callable[[Any, Kernels], Model]


def find_model(settings: ModelSettings) -> MakeModel:
    """The function that makes the model of `model.family`."""
    if is_own_family(settings.family):
        return find_make(settings.family)
    make: Any = EncoderDecoder if settings.num_encoder_layers else Decoder
    return make


def example(config: Config, model: Model) -> Batch:
    """The shapes of one example of a run."""
    return example_of(model, config.data.seq_len, config.data.output_len)


def example_of(model: Model, seq_len: int, output_len: int) -> Batch:
    """The shapes of one example.

    Args:
      seq_len: tokens of a sequence; for encoder-decoders, of the encoder.
      output_len: tokens that are predicted.
    """
    ints = jax.ShapeDtypeStruct((1, output_len), np.int32)
    floats = jax.ShapeDtypeStruct((1, output_len), np.float32)
    extras = {
        name: jax.ShapeDtypeStruct((1, length), dtype)
        for name, (length, dtype) in model.extras(seq_len).items()
    }
    vectors = vector_shapes(model, extras)
    return Batch(ints, ints, ints, ints, floats, extras or (), vectors=vectors)


def vector_shapes(model: Model, extras: Any) -> Tree:
    """The shapes of `Batch.vectors`, from those of `Batch.extras`."""
    dtype = jnp.dtype(model.settings.param_dtype)
    return {
        name: jax.ShapeDtypeStruct((*extras[name].shape, table.width), dtype)
        for table in model.tables.values()
        for name in table.ids
    } or ()


@functools.lru_cache(maxsize=64)
def gathered_params(settings: ModelSettings, make: MakeModel | None = None) -> Tree:
    """The shapes of a model's parameters as layers read them, in the compute type.

    Args:
      make: the function that makes the model; None: by `settings.family`.
    """
    model = (make or find_model(settings))(settings, plain_kernels())
    return jax.eval_shape(
        lambda: weights_in_use(
            model.axes, model.init(jax.random.key(0)), model.settings.compute_dtype
        )
    )


def layer_arguments(
    model: Model, params: Tree, batch: Batch
) -> Iterator[tuple[Stack, Tree, tuple[Tree, Tree, Tree, Tree]]]:
    """For each stack: the stack, the shapes of its stream, and of its `layer_function`'s
    arguments."""
    stream = {}
    context = batch._replace(vectors=()), jax.ShapeDtypeStruct((), np.int32)
    for stack in model.stacks:
        stream = jax.eval_shape(stack.enter, params["embed"], stream, batch)
        weights = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params[stack.name]
        )
        weights = jax.eval_shape(lambda w, s=stack: unpack_weights(w, s.stored), weights)
        x, shared = split_stream(stack, stream)
        if batch.within != ():
            rows = batch.within.segments.shape
            x |= {
                n: jax.ShapeDtypeStruct((*rows, *s.shape), s.dtype)
                for n, s in stack.memory().items()
            }
        yield stack, stream, (weights, x, shared, context)


def carried_tokens(stack: Stack, stream: Any, output_len: int) -> tuple[int, int]:
    """Tokens of a sequence in a stack, and features of a token in its stream.

    Args:
      output_len: the tokens of a stack whose arrays have no sequence axis.
    """
    for name, axes in stack.carried.items():
        if found := {"seq", "residual_seq"} & {*axes}:
            length = stream[name].shape[axes.index(found.pop())]
            return length, stream[name].size // (stream[name].shape[0] * length)
    features = sum(x.size // x.shape[0] for x in stream.values())
    return output_len, max(1, features // output_len)
