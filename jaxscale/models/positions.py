"""RoPE settings of a layer."""

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
    """The keyword arguments of `ops.rope.rotary` for layers with index % period == kind."""
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
    """Whether RoPE frequencies depend on the length of the text."""
    return settings.rope_scaling in BY_LENGTH


def for_width(model: Any, width: int) -> Any:
    """The model with RoPE frequencies for rows of `width` tokens, or for its run's `rope_length` if
    that is longer."""
    if not by_length(model.settings):
        return model
    length = max(width, model.settings.rope_length)
    return dataclasses.replace(
        model, settings=dataclasses.replace(model.settings, rope_length=length)
    )


def rotary_for(settings: Any, lengths_B: jax.Array | None) -> Callable[..., jax.Array]:
    """`ops.rope.rotary` with frequencies by the length of each text, at least the run's.

    Args:
      lengths_B: None uses the run's `rope_length` for all texts.
    """
    if lengths_B is None or not by_length(settings):
        return rotary
    return functools.partial(rotary, lengths_B=jnp.maximum(lengths_B, settings.rope_length))
