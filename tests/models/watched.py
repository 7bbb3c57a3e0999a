"""A decoder that says which experts each token of a step went to."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.batch import Batch
from jaxscale.models.decoder import Decoder
from jaxscale.models.experts import ExpertBlock, Experts, expert_sums
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import Layer, Params, Stack, Stream, Sums
from jaxscale.models.stacks import Part

ROWS, LENGTH = 16, 128
"""Of a batch."""


class WatchedExperts(Experts):
    """With a sum more, "choices" [ROWS * LENGTH, experts]: 1 for a token's experts."""

    def feed(
        self,
        x_BTD: jax.Array,
        batch: Batch,
        kernels: Kernels,
        jitter: Callable[[jax.Array], jax.Array] = lambda x: x,
    ) -> tuple[jax.Array, Sums]:
        y_BTD, sums = super().feed(x_BTD, batch, kernels, jitter)
        # The same operations on the same values: the compiler does them once.
        experts_BTK = self._route(x_BTD, batch.segments != 0, kernels.dispatch).experts
        every_E, every_N = jnp.arange(self.config.num_experts), jnp.arange(ROWS * LENGTH)
        chosen_BTE = jnp.any(experts_BTK[..., None] == every_E, axis=2).astype(jnp.float32)
        # Compared, not scattered: the tokens of a sequence may lie on several ranks.
        here_BTN = (dict(batch.extras)["number"][..., None] == every_N).astype(jnp.float32)
        return y_BTD, {**sums, "choices": jnp.einsum("btn,bte->ne", here_BTN, chosen_BTE)}


class WatchedBlock(ExpertBlock):
    """A layer with such experts."""

    mlp_type = WatchedExperts


@dataclass(frozen=True)
class Watched(Decoder):
    """A decoder of such layers, whose batches have the numbers of their tokens."""

    @property
    def report(self) -> None:
        """Sums are reported as they are."""

    def extras(self, seq_len: int) -> Mapping[str, tuple[int, Any]]:
        return {"number": (seq_len, np.int32)}

    def _stack(self, part: Part) -> Stack:
        def block(weights: Params, stream: Stream, batch: Batch, layer: Layer) -> tuple:
            found = self._module(WatchedBlock, weights)
            x, sums = found.layer(stream["x"], batch, self.kernels, layer.kind)
            return {"x": x}, sums

        sums = {**expert_sums(self.settings), "choices": (ROWS * LENGTH, self.settings.num_experts)}
        return dataclasses.replace(super()._stack(part), block=block, sums=sums)
