"""The rotary positions of a layer."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.config.model import ModelConfig
from jaxscale.config.model.rope_scaling import BY_LENGTH
from jaxscale.ops.rope import RopeScaling, rotary


def rope_settings(config: ModelConfig, kind: int) -> dict[str, Any]:
    """The keywords of `ops.rope.rotary` for a layer of a kind."""
    settings: dict[str, Any] = {"theta": config.theta(kind), "rotary_dim": config.rotary_dim}
    scaling = config.scaling(kind)
    if scaling != "none":
        settings["scaling"] = RopeScaling(
            scaling,
            config.rope_factor,
            config.rope_original_context,
            *config.rope_turns,
            attention_factor=config.rope_attention_factor,
            truncate=config.rope_truncate,
            short_factors=config.rope_short_factors,
            long_factors=config.rope_long_factors,
            length=config.rope_length,
        )
    return settings


def by_length(settings: Any) -> bool:
    """Whether the rotary positions of a text depend on its length."""
    return settings.rope_scaling in BY_LENGTH


def for_width(model: Any, width: int) -> Any:
    """The model with the rotary positions of rows of so many tokens, or of those of its run where
    they are longer, whatever the rows hold."""
    if not by_length(model.settings):
        return model
    length = max(width, model.settings.rope_length)
    return dataclasses.replace(
        model, settings=dataclasses.replace(model.settings, rope_length=length)
    )


def rotary_for(settings: Any, lengths_B: jax.Array | None) -> Callable[..., jax.Array]:
    """`ops.rope.rotary` with the positions of each text by its own length, or by that of its run
    where this is longer.

    Args:
      lengths_B: None is the run's for all texts.
    """
    if lengths_B is None or not by_length(settings):
        return rotary
    return functools.partial(rotary, lengths_B=jnp.maximum(lengths_B, settings.rope_length))
