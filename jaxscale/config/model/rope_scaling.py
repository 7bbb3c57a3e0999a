"""RoPE scaling options of `ModelConfig`: frequencies for a longer context."""

import math
from dataclasses import dataclass

from jaxscale.choices import check_at_least, check_choice
from jaxscale.config.model.settings import option

SCALINGS = ("none", "linear", "llama3", "yarn", "longrope", "dynamic")
BY_LENGTH = ("longrope", "dynamic")
"""The scalings that depend on the length of a text."""

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
"""`rope_scaling` -> the settings that it reads."""
SCALING = tuple(dict.fromkeys(name for names in READ_BY.values() for name in names))
"""All settings of RoPE scaling."""
USUAL_TURNS = {"llama3": (1.0, 4.0), "yarn": (1.0, 32.0)}


@dataclass(frozen=True)
class RopeScalingOptions:
    """The options of RoPE scaling; `ops.rope.RopeScaling` has the formulas."""

    rope_scaling: str = option("none")
    rope_factor: float = option(1.0)  # of the context's extension
    rope_original_context: int = option(8192)  # before the extension (all except linear)
    # Rotations in the original context: features below the first bound are scaled, features above
    # the second are not.
    rope_low_turns: float = option(0.0)  # 0: 1
    rope_high_turns: float = option(0.0)  # 0: 4 for llama3, 32 for yarn
    # Factor of queries and keys (yarn, longrope); 0: by the paper's formula, from the context.
    rope_attention_factor: float = option(0.0)
    rope_truncate: bool = option(True)  # round the two bounds to whole features (yarn)
    # Divisors of the frequency of each pair of features (longrope): up to the original context, and
    # beyond it.
    rope_short_factors: tuple[float, ...] = option(())
    rope_long_factors: tuple[float, ...] = option(())
    # Texts up to this length are scaled as texts of this length (longrope, dynamic); 0 is
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
                f"model.rope_scaling = 'dynamic' with {rotary_dim} rotated features of a head; at "
                "least 4: raise model.head_dim or model.rope_share"
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
        """Rotations in the original context below which features are scaled, and above which
        not."""
        low, high = USUAL_TURNS.get(self.rope_scaling, (0.0, math.inf))
        return self.rope_low_turns or low, self.rope_high_turns or high
