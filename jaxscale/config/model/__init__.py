"""Records of a model's settings.

Nothing here imports JAX: a mistyped key must be refused in a fraction of a second.
"""

from jaxscale.config.model.model import ModelConfig
from jaxscale.config.model.own_family import settings_record
from jaxscale.config.model.settings import (
    DTYPES,
    ModelSettings,
    by_liveness,
    find_make,
    is_own_family,
)

__all__ = [
    "DTYPES",
    "ModelConfig",
    "ModelSettings",
    "by_liveness",
    "find_make",
    "is_own_family",
    "settings_record",
]
