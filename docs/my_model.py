"""The model of own_model.md."""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from jaxscale import ModelConfig
from jaxscale.models.block import MLP, Attention, Norm
from jaxscale.models.decoder import Decoder
from jaxscale.models.protocol import STREAM
from jaxscale.models.weights import Weights


@dataclass(frozen=True)
class Settings(ModelConfig):  # its fields are the keys of the config's section "model"
    gate: float = 0.5
    late_weight: float = 2.0


class Block(nnx.Module):
    """Attention and MLP side by side, each through a learned gate."""

    def __init__(self, settings, key):
        weights = Weights(settings, key)
        self.norm = Norm(settings, weights)
        self.attention, self.mlp = Attention(settings, weights), MLP(settings, weights)
        gates = jnp.full(2, settings.gate, settings.param_dtype)
        self.gates = nnx.Param(gates, axes=("branches",))

    def __call__(self, x, batch, kernels, kind=0):
        y, (first, second) = self.norm(x), self.gates[...]
        x += first * self.attention(y, batch, kernels, kind)
        x += second * self.mlp(y, kernels.columns, kernels.rows)
        return kernels.shard(x, STREAM)


@dataclass(frozen=True)
class MyModel(Decoder):
    settings: Settings
    block_type = Block
    rules = {"branches": ()}  # a new axis, replicated on every device
    metrics = ("late_loss",)  # sums that the loss returns; metrics.jsonl has their means

    def loss(self, head, stream, batch):
        late = batch.weights * (batch.positions >= 8)
        heavier = batch.weights + (self.settings.late_weight - 1) * late
        every = super().loss(head, stream, batch)  # the reported loss
        trained = super().loss(head, stream, batch._replace(weights=heavier))
        only_late = super().loss(head, stream, batch._replace(weights=late))
        return {"loss": trained["loss"], "nll": every["nll"], "late_loss": only_late["nll"]}
