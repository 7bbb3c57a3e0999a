"""Options of `ModelConfig` for frozen weights stored quantised (QLoRA, arXiv 2305.14314)."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxscale.choices import check_choice


class QuantisedBlock(NamedTuple):
    """Sizes of a format's block, of consecutive weights with one scale."""

    weights: int
    num_bytes: int  # codes and scale


BLOCKS = {
    "nf4": QuantisedBlock(64, 36),
    "mxfp4": QuantisedBlock(32, 17),
    "float8": QuantisedBlock(32, 33),
}
"""The formats of `base_dtype` (`ops.storage.quantised_storage`)."""

BASE = ("base_dtype", "base_targets")
"""The settings here, not written for a model without adapters."""


@dataclass(frozen=True)
class BaseOptions:
    """The options of the weights that adapters freeze."""

    base_dtype: str = ""  # storage of frozen matrices: nf4, mxfp4, float8; "": param_dtype
    base_targets: str = ""  # weights of a layer stored so, as in lora_targets; "": all matrices

    def check_base(self, targets: tuple[str, ...], *, adapts: bool, has_encoder: bool) -> None:
        """Refuses an unknown format or weight, and quantised weights that would be trained.

        Args:
          targets: the matrices of the model's layers.

        Raises:
          ValueError: with the setting to change.
        """
        check_choice("model.base_dtype", self.base_dtype, ("", *BLOCKS))
        if self.base_targets and not self.base_dtype:
            raise ValueError(
                f"model.base_targets = {self.base_targets!r} with model.base_dtype = '' (no "
                "quantised weights); set model.base_dtype, such as 'nf4'"
            )
        for name in _names(self.base_targets):
            check_choice("model.base_targets", name, targets)
        if not self.base_dtype:
            return
        if not adapts:
            raise ValueError(
                f"model.base_dtype = {self.base_dtype!r} stores frozen weights, and without "
                "adapters all weights are trained; set model.lora_rank, such as 16, or "
                "model.base_dtype = ''"
            )
        if has_encoder:
            raise ValueError(
                f"model.base_dtype = {self.base_dtype!r} is not available for encoder-decoders; "
                "set model.base_dtype = ''"
            )

    def is_stored(self, weight: str) -> bool:
        """Whether a matrix of a layer, by its name such as "q", is stored in `base_dtype`."""
        return bool(self.base_dtype) and (
            not self.base_targets or weight in _names(self.base_targets)
        )


def _names(targets: str) -> list[str]:
    return [name.strip() for name in targets.split(",")] if targets else []
