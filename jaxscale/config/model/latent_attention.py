"""Multi-head latent attention (MLA) options of `ModelConfig` (DeepSeek-V2, arXiv 2405.04434)."""

from dataclasses import dataclass

from jaxscale.choices import check_at_least
from jaxscale.config.model.settings import option

LATENT = ("query_rank", "rope_head_dim", "value_head_dim")
"""The settings that are read if `kv_rank` is not 0."""


@dataclass(frozen=True)
class LatentOptions:
    """The options of latent attention. `kv_rank` is 0 without it, and the others then have no
    effect."""

    kv_rank: int = option(0)  # latent features from which keys and values are computed
    query_rank: int = option(0)  # latent features of queries; 0: from the residual stream
    rope_head_dim: int = option(0)  # rotated features of head_dim; heads share their keys
    value_head_dim: int = option(0)  # features of a head's values; 0 is head_dim
    # With scaled positions, scores are multiplied by (1 + rope_mscale * ln(rope_factor) / 10)^2.
    rope_mscale: float = option(0.0)

    def check_latent(
        self, num_heads: int, num_kv_heads: int, head_dim: int, *, plain: bool
    ) -> None:
        """Refuses options that contradict each other.

        Args:
          plain: whether attention has neither norms of queries and keys, nor biases, nor sinks.

        Raises:
          ValueError: with the setting to change.
        """
        names = ("kv_rank", "query_rank", "rope_head_dim", "value_head_dim", "rope_mscale")
        check_at_least("model", self, **dict.fromkeys(names, 0))
        if not self.kv_rank:
            return
        if num_kv_heads != num_heads:
            raise ValueError(
                f"model.num_kv_heads = {num_kv_heads} is not model.num_heads = {num_heads}, as "
                f"latent attention needs; set model.num_kv_heads = {num_heads}"
            )
        if not 0 < self.rope_head_dim < head_dim or self.rope_head_dim % 2:
            raise ValueError(
                f"model.rope_head_dim = {self.rope_head_dim} must be even, above 0, and below "
                f"model.head_dim = {head_dim}, which includes the rotated features"
            )
        if self.value_head_dim > head_dim:
            raise ValueError(
                f"model.value_head_dim = {self.value_head_dim} is more than model.head_dim = "
                f"{head_dim}; set model.value_head_dim = {head_dim} or less"
            )
        if not plain:
            raise ValueError(
                f"model.kv_rank = {self.kv_rank}: latent attention has neither model.qk_norm nor "
                "biases nor sinks; set model.qk_norm = False, model.attention_bias = 'none' and "
                "model.attention_sinks = False"
            )
