"""The options of models that learn to predict more than the next token."""

from dataclasses import dataclass

from jaxscale.choices import check_at_least
from jaxscale.config.model.settings import option

PREDICTION = ("prediction_depth", "prediction_weight")
"""The settings, which a run without modules need not show."""


@dataclass(frozen=True)
class PredictionOptions:
    """What `ModelConfig` says of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section
    2.2). Without, `prediction_depth` is 0."""

    prediction_depth: int = option(0)  # further tokens that a step also predicts, a module each
    prediction_weight: float = option(0.3)  # in the loss, of the mean of their losses

    def check_prediction(self, positions: str, layer_pattern: str, reads_ahead: bool) -> None:
        """Refuses modules for models that they are not defined for.

        Args:
          reads_ahead: whether a token sees later ones.

        Raises:
          ValueError: with the setting to change.
        """
        check_at_least("model", self, prediction_depth=0, prediction_weight=0)
        if not self.prediction_depth:
            return
        reasons = {
            "a token already sees those that are to be predicted": reads_ahead,
            f"model.positions = {positions!r} has a row for each place, not for a token further "
            "on": positions == "learned",
            f"model.layer_pattern = {layer_pattern!r} does not say which layer a module is": bool(
                layer_pattern
            ),
        }
        for reason, holds in reasons.items():
            if holds:
                raise ValueError(
                    f"model.prediction_depth = {self.prediction_depth} is not available: {reason}; "
                    "set model.prediction_depth = 0"
                )
