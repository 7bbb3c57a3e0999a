"""The options that change the frequencies of rotary positions for a longer context."""

import math
from dataclasses import dataclass

from jaxscale.choices import check_at_least, check_choice
from jaxscale.config.model.settings import option

SCALINGS = ("none", "linear", "llama3", "yarn", "longrope", "dynamic")
BY_LENGTH = ("longrope", "dynamic")
"""Those that depend on the length of a text."""

_CONTEXT = ("rope_factor", "rope_original_context")
_TURNS = (*_CONTEXT, "rope_low_turns", "rope_high_turns")
_FACTORS = ("rope_attention_factor", "rope_short_factors", "rope_long_factors", "rope_length")
READ_BY = {
    "none": (),
    "linear": ("rope_factor",),
    "llama3": _TURNS,
    "yarn": (*_TURNS, "rope_attention_factor", "rope_truncate", "rope_mscale"),
    "longrope": (*_CONTEXT, *_FACTORS),
    "dynamic": (*_CONTEXT, "rope_length"),
}
"""What each `rope_scaling` reads."""
SCALING = tuple(dict.fromkeys(name for names in READ_BY.values() for name in names))
"""What one of them reads."""
USUAL_TURNS = {"llama3": (1.0, 4.0), "yarn": (1.0, 32.0)}


@dataclass(frozen=True)
class RopeScalingOptions:
    """What `ModelConfig` says of it; `ops.rope.RopeScaling` has the formulas."""

    rope_scaling: str = option("none")
    rope_factor: float = option(1.0)  # of the context
    rope_original_context: int = option(8192)  # before it was extended (all but linear)
    # Features that turn less often in that context are scaled, those that turn more often are not.
    rope_low_turns: float = option(0.0)  # 0 is the usual: 1
    rope_high_turns: float = option(0.0)  # 0 is the usual: 4 for llama3, 32 for yarn
    # Of queries and keys (yarn, longrope); 0 is the usual, which follows from the context.
    rope_attention_factor: float = option(0.0)
    rope_truncate: bool = option(True)  # the two bounds to whole features (yarn)
    # What the frequency of each pair of features is divided by (longrope): up to the original
    # context, and beyond it.
    rope_short_factors: tuple[float, ...] = option(())
    rope_long_factors: tuple[float, ...] = option(())
    # Texts up to this length have the positions of this length (longrope, dynamic); 0 is
    # data.seq_len.
    rope_length: int = option(0)

    def check_rope_scaling(self, rotary_dim: int) -> None:
        """Refuses options that contradict each other.

        Raises:
          ValueError: with the setting to change.
        """
        check_choice("model.rope_scaling", self.rope_scaling, SCALINGS)
        at_least = dict.fromkeys(("rope_low_turns", "rope_high_turns", "rope_attention_factor"), 0)
        at_least |= {"rope_factor": 1, "rope_original_context": 1, "rope_length": 0}
        check_at_least("model", self, **at_least)
        if self.rope_scaling == "none" and self.rope_factor != 1:
            raise ValueError(
                f"model.rope_factor = {self.rope_factor} scales nothing; set model.rope_scaling, "
                "such as 'llama3'"
            )
        low, high = self.rope_turns
        if low >= high:
            raise ValueError(
                f"model.rope_low_turns = {low} must be below model.rope_high_turns = {high}"
            )
        if self.rope_scaling == "dynamic" and rotary_dim < 4:
            raise ValueError(
                f"model.rope_scaling = 'dynamic' needs 4 rotated features of a head or more, and "
                f"here are {rotary_dim}"
            )
        for name in ("rope_short_factors", "rope_long_factors"):
            factors = getattr(self, name)
            pairs = rotary_dim // 2 if self.rope_scaling == "longrope" else 0
            if len(factors) != pairs or not all(factor > 0 for factor in factors):
                raise ValueError(
                    f"model.{name} = {factors} must be {pairs} numbers above 0, one for each pair "
                    f"of rotated features, with model.rope_scaling = {self.rope_scaling!r}"
                )

    @property
    def rope_turns(self) -> tuple[float, float]:
        """Turns in the original context below which features are scaled, and above which not."""
        low, high = USUAL_TURNS.get(self.rope_scaling, (0.0, math.inf))
        return self.rope_low_turns or low, self.rope_high_turns or high
