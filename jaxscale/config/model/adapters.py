"""Options of `ModelConfig` for adapters other than LoRA: a side network, and prompt tuning."""

from dataclasses import dataclass

from jaxscale.choices import check_at_least
from jaxscale.config.model.lora import LORA, LoraOptions
from jaxscale.config.model.quantised_base import BASE, BaseOptions

ADAPTERS = (*LORA, "side_width", "prompt_tokens", *BASE)
"""The settings of all adapters."""

KINDS = ("lora_rank", "side_width", "prompt_tokens")
"""The settings of which one is above 0 in a model with adapters."""


@dataclass(frozen=True)
class AdapterOptions(BaseOptions, LoraOptions):
    """The options of adapters, of which a model has at most one kind. All other parameters are then
    frozen."""

    side_width: int = 0  # hidden features of a side network's layers (LoSA); 0: none
    prompt_tokens: int = 0  # trained vectors before each text (prompt tuning); 0: none

    @property
    def adapts(self) -> bool:
        """Whether only adapters are trained."""
        return any(getattr(self, name) for name in KINDS)

    def check_adapters(self, *, has_encoder: bool, causal: bool, prediction_depth: int) -> None:
        """Refuses two kinds of adapters, and models that a kind is not defined for.

        Raises:
          ValueError: with the setting to change.
        """
        check_at_least("model", self, side_width=0, prompt_tokens=0)
        chosen = [f"model.{name} = {value}" for name in KINDS if (value := getattr(self, name))]
        if len(chosen) > 1:
            raise ValueError(
                f"{' and '.join(chosen)} are {len(chosen)} kinds of adapters, and a model has one; "
                "set the others to 0"
            )
        for name in ("side_width", "prompt_tokens"):
            reasons = {
                "an encoder's output enters every layer of its decoder": has_encoder,
                f"model.prediction_depth = {prediction_depth} adds modules that read the frozen "
                "layers; set model.prediction_depth = 0": bool(prediction_depth),
                "attention is not causal, and prompts are for texts that continue": name
                == "prompt_tokens"
                and not causal,
            }
            value = getattr(self, name)
            for reason, applies in reasons.items():
                if value and applies:
                    change = "" if reason.endswith("= 0") else f"; set model.{name} = 0"
                    raise ValueError(f"model.{name} = {value} is not available: {reason}{change}")
