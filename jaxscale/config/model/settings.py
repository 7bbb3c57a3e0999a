"""Settings of any model, shipped or custom, that the engine reads."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxscale.choices import check_at_least, check_choice

DTYPES = ("float64", "float32", "bfloat16")
MATMUL_DTYPES = ("", "float8", "int8")
ATTENTIONS = ("auto", "reference", "blockwise", "cudnn", "flash", "splash")
SPREAD_ATTENTIONS = ("blockwise", "flash")
"""Kernels that support sequences sharded over several ranks; "auto" selects one."""


def option(plain: Any) -> Any:
    """A field with the family's default; `plain`, the value of Llama, is the default of families
    that do not set it."""
    return field(default=None, metadata={"plain": plain})


@dataclass(frozen=True)
class ModelSettings:
    """What the engine reads of any model's settings. The record of a custom model extends it with
    fields of its own; they are the keys of the config's section "model".

    The attributes without a type are no settings: they are the values of a model that does not have
    the option. A record that has it overrides them with a field or a property.
    """

    family: str = ""  # "my_package.my_model:make"
    vocab_size: int = 257
    head_dim: int = 64  # of attention, which kernels depend on
    attention: str = "auto"
    compute_dtype: str = "bfloat16"
    param_dtype: str = "float32"
    matmul_dtype: str = ""  # of the operands of layers' matmuls; "" is compute_dtype
    init_from: str = ""  # a run, or a Hugging Face model of a shipped family, to start from

    causal = True  # False: bidirectional attention
    num_encoder_layers = 0
    num_experts = 0
    router = ""
    attention_soft_cap = 0.0
    position_setting = ""  # the setting of the number of learned positions
    max_seq_len = 0  # the longest text of the model, if known
    rope_scaling = "none"
    lora_rank = 0
    prediction_depth = 0
    relative_bias = "none"
    capacity_factor = 0.0
    dense_layers = 0
    kv_rank = 0
    dropped_token = -1  # the id whose embedding is zero

    def __post_init__(self) -> None:
        check_choice("model.attention", self.attention, ATTENTIONS)
        check_choice("model.compute_dtype", self.compute_dtype, DTYPES)
        check_choice("model.param_dtype", self.param_dtype, DTYPES)
        check_choice("model.matmul_dtype", self.matmul_dtype, MATMUL_DTYPES)
        check_at_least("model", self, vocab_size=2, head_dim=1)

    @property
    def max_positions(self) -> int | None:
        """The number of learned positions, or None."""
        return getattr(self, self.position_setting) if self.position_setting else None

    @property
    def attention_uses(self) -> tuple[str, ...]:
        """The features of attention that layers use, of `ops.attention.USES`."""
        return ("soft_cap",) if self.attention_soft_cap else ()

    @property
    def unread(self) -> set[str]:
        """The settings that nothing reads, or that are off by default."""
        return {"matmul_dtype"}

    @property
    def defaults(self) -> dict[str, Any]:
        """Field -> default, where it differs from the class's."""
        return {}


def is_own_family(family: str) -> bool:
    """Whether `model.family` is "module:function", from outside the package."""
    module, colon, function = family.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), function))


def find_make(family: str) -> Callable[[Any, Any], Any]:
    """The function `make(settings, kernels)` of a custom model, from its module.

    It is looked up each time: a notebook cell may redefine it.

    Raises:
      ValueError: it cannot be imported.
    """
    module, _, function = family.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"model.family = {family!r} cannot be imported: {error}; the folder of {module}.py "
            "must be in PYTHONPATH"
        ) from None
