"""Multi-token prediction (MTP) options of `ModelConfig`."""

from dataclasses import dataclass

from jaxscale.choices import check_at_least
from jaxscale.config.model.settings import option

PREDICTION = ("prediction_depth", "prediction_weight")
"""The settings of MTP modules, not written for a model without them."""


@dataclass(frozen=True)
class PredictionOptions:
    """The options of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2); without
    it `prediction_depth` is 0."""

    prediction_depth: int = option(0)  # further tokens predicted in training, a module each
    prediction_weight: float = option(0.3)  # in the loss, of the mean of their losses

    def check_prediction(self, positions: str, layer_pattern: str, reads_ahead: bool) -> None:
        """Refuses MTP modules for models that they are not defined for.

        Args:
          reads_ahead: whether a token attends to later tokens.

        Raises:
          ValueError: with the setting to change.
        """
        check_at_least("model", self, prediction_depth=0, prediction_weight=0)
        if not self.prediction_depth:
            return
        reasons = {
            "attention is not causal, so a token sees the tokens to predict": reads_ahead,
            f"model.positions = {positions!r} has no row for later tokens": positions == "learned",
            f"model.layer_pattern = {layer_pattern!r} does not define a module's layer": bool(
                layer_pattern
            ),
        }
        for reason, applies in reasons.items():
            if applies:
                raise ValueError(
                    f"model.prediction_depth = {self.prediction_depth} is not available: {reason}; "
                    "set model.prediction_depth = 0"
                )
