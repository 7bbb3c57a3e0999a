"""The rotary positions of a layer."""

from typing import Any

from jaxscale.config import ModelConfig
from jaxscale.ops.rope import RopeScaling


def rope_settings(config: ModelConfig, kind: int) -> dict[str, Any]:
    """The keywords of `ops.rope.rotary` for a layer of a kind."""
    settings: dict[str, Any] = {"theta": config.theta(kind), "rotary_dim": config.rotary_dim}
    if (scaling := config.scaling(kind)) != "none":
        settings["scaling"] = RopeScaling(
            scaling,
            config.rope_factor,
            config.rope_original_context,
            *config.rope_turns,
            attention_factor=config.rope_attention_factor,
            truncate=config.rope_truncate,
        )
    return settings
