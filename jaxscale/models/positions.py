"""The rotary positions of a layer."""

import dataclasses
from typing import Any

from jaxscale.model_config import ModelConfig
from jaxscale.model_config.rope_scaling import BY_LENGTH
from jaxscale.ops.rope import RopeScaling


def rope_settings(config: ModelConfig, kind: int) -> dict[str, Any]:
    """The keywords of `ops.rope.rotary` for a layer of a kind."""
    settings: dict[str, Any] = {"theta": config.theta(kind), "rotary_dim": config.rotary_dim}
    scaling = config.scaling(kind)
    if scaling not in ("none", "dynamic"):  # which is in theta
        settings["scaling"] = RopeScaling(
            scaling,
            config.rope_factor,
            config.rope_original_context,
            *config.rope_turns,
            attention_factor=config.rope_attention_factor,
            truncate=config.rope_truncate,
            factors=config.rope_factors if scaling == "longrope" else (),
        )
    return settings


def for_length(model: Any, length: int) -> Any:
    """The model with the rotary positions of sequences of a length, or of those of its run where
    they are longer."""
    settings = model.settings
    if getattr(settings, "rope_scaling", "none") not in BY_LENGTH:
        return model
    length = max(length, settings.rope_length)
    return dataclasses.replace(model, settings=dataclasses.replace(settings, rope_length=length))
