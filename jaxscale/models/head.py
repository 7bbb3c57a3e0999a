"""Output head: final norm, optional transform, projection to the vocabulary.

Letters: B batch, T time, D embed.
"""

import jax
from flax import nnx

from jaxscale.config.model import ModelConfig
from jaxscale.models.adapters.lora import rows_of
from jaxscale.models.block import ACTIVATIONS, Norm
from jaxscale.models.weights import Weights
from jaxscale.ops.tensor_parallel import add_bias


class Head(nnx.Module):
    """Final norm and projection to the vocabulary; a tied head uses the embedding's table. As
    BERT's, it may first transform the stream, and have a bias."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        weights = Weights(config, key)
        own_norm = config.final_norm and not config.prediction_depth
        self.norm = Norm(config, weights) if own_norm else None
        self.output = None if config.tied_embeddings else weights.normal("embed", "vocab")
        self.output_lora = None if config.tied_embeddings else rows_of(config, weights)
        self.activation = config.activation
        if config.head_transform:
            self.transform = weights.normal("embed", "transform")
            self.transform_bias = weights.zeros("embed")
            self.transform_norm = Norm(config, weights)
            self.output_bias = weights.zeros("vocab")
        else:
            self.transform = self.output_bias = None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """The input of the output matrix."""
        x_BTD = x_BTD if self.norm is None else self.norm(x_BTD)
        if self.transform is None:
            return x_BTD
        y_BTD = add_bias(x_BTD @ self.transform[...].astype(x_BTD.dtype), self.transform_bias[...])
        return self.transform_norm(ACTIVATIONS[self.activation](y_BTD))


def make_norm(config: ModelConfig, key: jax.Array) -> Norm:
    """A norm over d_model."""
    return Norm(config, Weights(config, key))
