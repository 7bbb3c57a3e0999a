"""Trained vectors before each text (prompt tuning, arXiv 2104.08691; in CPM-2, arXiv 2106.10715).

They are the embeddings of virtual tokens, whose ids follow the vocabulary: `data.prompts` puts them
before each document, and generation before each prompt.

Letters: B batch, T time, D embed.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxscale.config.model import ModelConfig
from jaxscale.models.weights import Weights


class Prompt(nnx.Module):
    """The vectors [prompt_tokens, embed], in float32 or wider; initially rows of the embedding."""

    def __init__(self, config: ModelConfig, weights: Weights, table: nnx.Param) -> None:
        wide = jnp.promote_types(weights.dtype, jnp.float32)
        rows = table[...][initial_ids(config)].astype(wide)
        self.rows = nnx.Param(rows, axes=("prompt_tokens", "embed"))
        self.first = config.vocab_size

    def __call__(
        self,
        tokens_BT: jax.Array,
        lookup: Callable[[jax.Array, jax.Array, str, DTypeLike], jax.Array],
        embed: Callable[[jax.Array], jax.Array],
        dtype: DTypeLike,
    ) -> jax.Array:
        """Embeddings [batch, time, embed] of virtual tokens, and of others by `embed`.

        Args:
          lookup: `Kernels.lookup`.
          embed: of token ids of the vocabulary.
        """
        virtual_BT = tokens_BT >= self.first
        x_BTD = embed(jnp.where(virtual_BT, 0, tokens_BT))
        places_BT = jnp.where(virtual_BT, tokens_BT - self.first, 0)
        rows_BTD = lookup(self.rows[...], places_BT, "prompt_tokens", dtype)
        return jnp.where(virtual_BT[..., None], rows_BTD, x_BTD)


def prompt_of(config: ModelConfig, weights: Weights, table: nnx.Param) -> Prompt | None:
    """`Prompt`, or None without `prompt_tokens`."""
    return Prompt(config, weights, table) if config.prompt_tokens else None


def initial_ids(config: ModelConfig) -> np.ndarray:
    """The tokens whose embeddings are the initial vectors: evenly over the vocabulary."""
    return np.linspace(0, config.vocab_size - 1, config.prompt_tokens).round().astype(np.int32)


def with_initial_prompt(config: ModelConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters whose prompt is made of rows of the embedding, as in a new model; unchanged
    without `prompt_tokens`.

    Args:
      params: on any layout.
    """
    if not config.prompt_tokens:
        return dict(params)
    old = params["embed"]["prompt"]["rows"]
    take = jax.jit(
        lambda table: table[initial_ids(config)].astype(old.dtype), out_shardings=old.sharding
    )
    rows = take(params["embed"]["tokens"])
    return {**params, "embed": {**params["embed"], "prompt": {"rows": rows}}}
