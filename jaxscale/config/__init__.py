"""Configuration of a run: records of settings, and the reader of files and overrides.

Nothing here imports JAX: a mistyped key must be refused in a fraction of a second.
"""

from jaxscale.config.read_config import (
    from_dict,
    is_before_text_begin,
    load,
    read_sections,
    read_settings,
    shipped_configs,
    to_dict,
)
from jaxscale.config.records import (
    CONFIG_ADVICE,
    OBJECTIVES,
    PAIRED_OBJECTIVES,
    TEXT_BEGINS,
    Config,
    DataConfig,
    RunConfig,
    check_seed,
)
from jaxscale.config.values import leaves

__all__ = [
    "CONFIG_ADVICE",
    "OBJECTIVES",
    "PAIRED_OBJECTIVES",
    "TEXT_BEGINS",
    "Config",
    "DataConfig",
    "RunConfig",
    "check_seed",
    "from_dict",
    "is_before_text_begin",
    "leaves",
    "load",
    "read_sections",
    "read_settings",
    "shipped_configs",
    "to_dict",
]
