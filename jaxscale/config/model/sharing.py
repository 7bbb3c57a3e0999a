"""Options of `ModelConfig` for layers that share their weights (M6-10T, arXiv 2110.03888)."""

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

from jaxscale.choices import check_at_least, nearest_divisors

SHARING = ("share_layers", "unshare_at", "unshare_clip")
"""The settings of shared weights, not written for a model without them."""

Shared = TypeVar("Shared", bound="SharingOptions")


@dataclass(frozen=True)
class SharingOptions:
    """The options of shared weights. Without them `share_layers` is 1."""

    share_layers: int = 1  # consecutive layers that share one layer's weights
    unshare_at: int = 0  # the step after which each layer gets its own copy; 0: never
    unshare_clip: bool = False  # optimizer.clip_norm is then divided by the root of share_layers

    def check_sharing(
        self, layers: dict[str, int], periods: dict[str, int], *, adapts: bool
    ) -> None:
        """Refuses groups that are not whole, and adapters of shared weights.

        Args:
          layers: the settings of numbers of layers, such as {"num_layers": 12}.
          periods: the settings of patterns, with their lengths.
          adapts: whether only adapters are trained.

        Raises:
          ValueError: with the setting to change.
        """
        check_at_least("model", self, share_layers=1, unshare_at=0)
        group = self.share_layers
        if group == 1:
            return
        if adapts:
            raise ValueError(
                f"model.share_layers = {group} with adapters is not available; give the layers "
                "their own weights first, by `python -m jaxscale.grow --to model.share_layers=1`"
            )
        for name, count in layers.items():
            if count % group:
                raise ValueError(
                    f"model.share_layers = {group} does not divide model.{name} = {count}; set "
                    f"model.share_layers = {nearest_divisors(count, group)}"
                )
        for name, period in periods.items():
            if group % period:
                raise ValueError(
                    f"model.share_layers = {group} is not a multiple of the {period} layers of "
                    f"model.{name}; set model.share_layers = {-(-group // period) * period}"
                )

    def unshared(self: Shared) -> Shared:
        """The model in which every layer has its own weights."""
        return dataclasses.replace(self, share_layers=1)
