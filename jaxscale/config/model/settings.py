"""Settings of any model, shipped or custom, that the engine reads."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxscale.choices import check_at_least, check_choice

DTYPES = ("float64", "float32", "bfloat16")
MATMUL_DTYPES = ("", "float8", "int8")
ATTENTIONS = ("auto", "reference", "blockwise", "cudnn", "flash", "splash")
EXPERTS_CHOOSE = ("expert_choice", "balanced")
"""Routers whose experts choose tokens, among all of a sequence."""
SPREAD_ATTENTIONS = ("blockwise", "flash", "splash")
"""Kernels that support sequences sharded over several ranks; "auto" selects one."""


def option(plain: Any) -> Any:
    """A field with the family's default; `plain`, the value of Llama, is the default of families
    that do not set it."""
    return field(default=None, metadata={"plain": plain})


@dataclass(frozen=True)
class ModelSettings:
    """Base record of a custom model's settings: the fields that the engine reads of any model.

    Fields that the custom model's record adds are further keys of the config's section "model". The
    attributes without a type are not settings but the values of a model without the option; a
    record with the option overrides them with a field or a property.

    Attributes:
      family: "my_package.my_model:make".
      vocab_size: rows of the embedding, before padding.
      head_dim: features of an attention head, on which the choice of kernel depends.
      attention: attention kernel; "auto" chooses one for the device.
      compute_dtype: type of activations and of weights in use.
      param_dtype: type of the parameters.
      matmul_dtype: type of the operands of the layers' matmuls; "" is `compute_dtype`.
      init_from: run, or folder of a Hugging Face model, with the initial weights.

    Examples:
      >>> @dataclass(frozen=True)
      ... class Settings(jaxscale.ModelSettings):
      ...     width: int = 64
      >>> Settings(family="my_package.my_model:make").width
      64
    """

    family: str = ""
    vocab_size: int = 257
    head_dim: int = 64
    attention: str = "auto"
    compute_dtype: str = "bfloat16"
    param_dtype: str = "float32"
    matmul_dtype: str = ""
    init_from: str = ""

    causal = True  # False: bidirectional attention
    num_encoder_layers = 0
    num_experts = 0
    router = ""
    attention_soft_cap = 0.0
    position_setting = ""  # the setting of the number of learned positions
    max_seq_len = 0  # the longest text of the model, if known
    rope_scaling = "none"
    lora_rank = 0
    prompt_tokens = 0  # virtual tokens before each text
    side_width = 0  # of a side network, next to layers without a backward pass
    adapts = False  # whether only adapters are trained
    base_dtype = ""  # the format of frozen weights that are stored quantised
    prediction_depth = 0
    relative_bias = "none"
    capacity_factor = 0.0
    balance_weight = 0.0
    dense_layers = 0
    kv_rank = 0
    value_dim = 0  # features of a head's values; 0 is head_dim
    router_groups = 1
    router_groups_kept = 1
    dropped_token = -1  # the id whose embedding is zero
    share_layers = 1  # consecutive layers with one layer's weights
    unshare_at = 0

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
    def experts_choose(self) -> bool:
        """Whether experts choose tokens, not tokens experts."""
        return self.router in EXPERTS_CHOOSE

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


def by_liveness(settings: ModelSettings) -> bool:
    """Whether the planner finds the temporaries of the model's layers by liveness analysis: custom
    layers, frozen ones next to a side network, and groups that share weights have no constants of a
    compiler."""
    alone = settings.side_width == 0 and settings.share_layers == 1
    return is_own_family(settings.family) or not alone


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
