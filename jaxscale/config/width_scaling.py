"""Maximal update parametrisation (muP): learning rates and initial weights by width, so that the
best learning rate of a narrow model is that of a wide one.

Table 3 of arXiv 2203.03466, which has no multipliers in the forward pass: a model trained with it
is an ordinary one. A parameter's factors follow from its logical axes: which sides of the matrix
grow with the width. With `optimizer.mup_base_width` equal to the width all factors are 1.
"""

import math
from collections.abc import Iterable, Sequence

from jaxscale.config.model import ModelConfig
from jaxscale.config.model.settings import ModelSettings
from jaxscale.config.optimizer import STACKS, OptimizerConfig, matrix_dims

GROWING = (
    *("embed", "heads", "kv_heads", "query_rank", "kv_rank"),
    *("mlp", "expert_mlp", "shared_mlp", "transform"),
)
"""Logical axes that grow with the width: a wider model has more heads, not larger ones."""

LOOKED_UP = ("vocab", "positions", "token_types", "buckets")
"""Logical axes of a table's rows: an id selects one, so a table's fan-in is 1 at every width."""

FIXED = (*LOOKED_UP, "routes", "head_dim", "plain_dim", "value_dim", "halves", "pairs")
"""Logical axes of a matrix that stay as they are, in addition to `STACKS`."""

MULTIPLIERS = ("scaled_embedding", "scaled_head")
"""Model settings that multiply by a power of d_model in the forward pass."""


def width_ratio(optimizer: OptimizerConfig, model: ModelSettings) -> float:
    """The model's width over `mup_base_width`; 1 without it.

    >>> width_ratio(OptimizerConfig(mup_base_width=64), ModelConfig(d_model=256))
    4.0
    """
    base = optimizer.mup_base_width
    return model.d_model / base if base and isinstance(model, ModelConfig) else 1.0


def rate_factor(axes: Sequence[str], rule: str, ratio: float) -> float:
    """The factor of a parameter's learning rate.

    AdamW, Adafactor (without scaling by parameters' sizes) and Lion have updates whose elements do
    not shrink with the width: 1 / ratio where the fan-in grows. Muon's updates of the layers'
    matrices have a spectral norm of sqrt(max(fan-in, fan-out)) (times `MUON_RMS`), and a wider
    layer needs sqrt(fan-out / fan-in): 1 / sqrt(ratio) where both grow.

    Args:
      axes: the logical axes of a parameter.
      rule: `optimizer.name`.
      ratio: of widths.

    >>> rate_factor(("layers", "embed", "mlp"), "adamw", 4.0)
    0.25
    >>> rate_factor(("vocab", "embed"), "adamw", 4.0)
    1.0
    """
    inputs, outputs = _growing_sides(axes)
    if not inputs:
        return 1.0
    orthogonal = rule == "muon" and "layers" in axes
    return 1 / (math.sqrt(ratio) if orthogonal and outputs else ratio)


def initial_factor(axes: Sequence[str], ratio: float) -> float:
    """The factor of a parameter's initial values, whose standard deviation without muP is in
    proportion to d_model^-1/2 for every matrix and table.

    Hidden matrices keep it; those with a fixed fan-out, such as the output matrix and routers, get
    d_model^-1; tables, whose fan-in is fixed, one that is independent of the width.

    >>> initial_factor(("embed", "vocab"), 4.0), initial_factor(("vocab", "embed"), 4.0)
    (0.5, 2.0)
    """
    inputs, outputs = _growing_sides(axes)
    if matrix_dims(axes) is None and not _is_table(axes):
        return 1.0  # zeros or ones
    if inputs:
        return 1.0 if outputs else 1 / math.sqrt(ratio)
    return math.sqrt(ratio)


def check_width_scaling(optimizer: OptimizerConfig, model: ModelSettings) -> None:
    """Refuses models to which the table's form without multipliers does not apply.

    Raises:
      ValueError: names the setting to change.
    """
    if not optimizer.mup_base_width:
        return
    text = f"optimizer.mup_base_width = {optimizer.mup_base_width}"
    if not isinstance(model, ModelConfig):
        raise ValueError(
            f"{text} is the base of model.d_model, and the record of model.family = "
            f"{model.family!r} does not extend ModelConfig; set optimizer.mup_base_width = 0"
        )
    if model.adapts:
        raise ValueError(
            f"{text} scales the rates of all weights, and adapters freeze them; set "
            "optimizer.mup_base_width = 0"
        )
    if model.tied_embeddings:
        raise ValueError(
            f"{text} gives the embedding and the output matrix separate rates and initial values, "
            "and model.tied_embeddings = True makes them one; set model.tied_embeddings = False, "
            "or optimizer.mup_base_width = 0"
        )
    for name in MULTIPLIERS:
        if getattr(model, name):
            raise ValueError(
                f"{text} is muP without multipliers, and model.{name} = True (model.family = "
                f"{model.family!r}) multiplies by a power of d_model; set "
                "optimizer.mup_base_width = 0"
            )


def check_growing_axes(params: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Refuses matrices with custom axes, of which it is not known whether they grow.

    Args:
      params: name and logical axes of each parameter.

    Raises:
      ValueError: names the parameter and the axis.
    """
    known = {*GROWING, *FIXED, *STACKS}
    for name, axes in params:
        if matrix_dims(axes) and (others := [one for one in axes if one not in known]):
            raise ValueError(
                f"{name} has the custom logical axis {others[0]!r}, which may or may not grow with "
                "the width; set optimizer.mup_base_width = 0"
            )


def _growing_sides(axes: Sequence[str]) -> tuple[bool, bool]:
    """Whether a parameter's fan-in and fan-out grow with the width."""
    dims = matrix_dims(axes)
    if dims is None or _is_table(axes):
        return False, True
    rows, columns = ([axes[i] in GROWING for i in side] for side in dims)
    return any(rows), any(columns)


def _is_table(axes: Sequence[str]) -> bool:
    return next((one for one in axes if one not in STACKS), "") in LOOKED_UP
