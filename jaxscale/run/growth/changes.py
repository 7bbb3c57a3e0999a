"""The settings that growth may change, and what each change keeps of a model's function."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxscale import config as configs
from jaxscale.config import Config
from jaxscale.config.model.experts import EXPERTS
from jaxscale.model_families.shipped import find_family

ALLOWED = (
    *("share_layers", "unshare_at", "num_layers", "num_encoder_layers", "vocab_size", "family"),
    *("num_experts", "experts_per_token", "expert_d_ff", "router", "router_scores"),
    *("router_normalized", "router_scale", "router_groups", "router_groups_kept", "router_bias"),
    *("router_jitter", "router_z_loss", "capacity_factor", "balance", "balance_weight"),
    "balance_rate",
)
"""The settings of `--to`."""


def larger_config(config: Config, wanted: Sequence[str]) -> Config:
    """The config with the settings of `--to`, each "model.key=value".

    Raises:
      ValueError: a setting that is not allowed, or a model that is no larger.
    """
    for text in wanted:
        section, _, key = text.partition("=")[0].partition(".")
        if section != "model" or key not in ALLOWED:
            raise ValueError(
                f"--to {text!r} is not allowed; it can be model.KEY=VALUE, with KEY of "
                f"{', '.join(ALLOWED)}"
            )
    larger = _with(config, wanted)
    before, after = config.model, larger.model
    if before.adapts:
        raise ValueError(
            "--to is for a model without adapters; write a model with merged LoRA adapters by "
            "`python -m jaxscale.convert --to_hf`, and grow it after --from_hf"
        )
    if before.num_experts and after.num_experts != before.num_experts:
        raise ValueError(
            f"--to model.num_experts={after.num_experts}: the model has {before.num_experts} "
            "experts; only a dense model gets experts"
        )
    if after.num_experts and after.expert_d_ff not in (0, before.expert_d_ff or before.d_ff):
        raise ValueError(
            f"--to model.expert_d_ff={after.expert_d_ff}: experts are copies of the MLP, with "
            f"model.d_ff = {before.d_ff} features; leave it out"
        )
    if before.share_layers % after.share_layers:
        raise ValueError(
            f"--to model.share_layers={after.share_layers} does not divide the groups of "
            f"model.share_layers = {before.share_layers}"
        )
    for name in ("num_layers", "num_encoder_layers", "vocab_size"):
        if getattr(after, name) < getattr(before, name):
            raise ValueError(
                f"--to model.{name}={getattr(after, name)} is below the run's "
                f"{getattr(before, name)}; a model only grows"
            )
    if _deepens(before, after):
        _check_identity(after)
    if not described(before, after):
        raise ValueError("--to changes nothing: the run has these settings")
    return larger


def _with(config: Config, wanted: Sequence[str]) -> Config:
    """The config with these settings, perhaps of another family with the same values of all others.

    Raises:
      ValueError: the family has another value.
    """
    sections = configs.to_dict(config)
    named = [text.partition("=") for text in wanted]
    if family := next((value for name, _, value in named if name == "model.family"), ""):
        own = find_family(family).settings
        kept = sections["model"].items()
        defaults = config.model.defaults.keys() - {"param_dtype"}
        sections["model"] = {k: v for k, v in kept if k in own or k not in defaults}
    larger = configs.from_dict(sections, wanted)
    before, after = dataclasses.asdict(config.model), dataclasses.asdict(larger.model)
    for name, value in before.items():
        if name not in ALLOWED and after[name] != value and name not in EXPERTS:
            raise ValueError(
                f"--to model.family={family} has model.{name} = {after[name]!r}, and the run "
                f"{value!r}: another model, not a larger one"
            )
    return larger


def _deepens(before: Any, after: Any) -> bool:
    return any(getattr(after, n) > getattr(before, n) for n in ("num_layers", "num_encoder_layers"))


def _check_identity(model: Any) -> None:
    """Refuses more layers where zeros in a layer's last matrices leave it more than its input."""
    last = model.norm_placement != "before" and model.norm == "layer"
    if model.norm_placement == "after_residual" or last:
        raise ValueError(
            f"--to model.num_layers={model.num_layers}: an additional layer returns its input only "
            f"if no norm with a bias follows, and model.norm_placement = {model.norm_placement!r}"
        )
    if model.layer_pattern or model.num_encoder_layers:
        setting = "layer_pattern" if model.layer_pattern else "num_encoder_layers"
        raise ValueError(
            f"--to model.num_layers={model.num_layers} is not available with model.{setting} = "
            f"{getattr(model, setting)!r}"
        )


def described(before: Any, after: Any) -> list[str]:
    """A line for each change: what it keeps of the function."""
    lines = []
    if after.share_layers < before.share_layers:
        parts = before.share_layers // after.share_layers
        lines.append(
            f"each shared layer becomes {parts} with the same weights: the same function, to the "
            f"bit; first moments / {parts}, second moments / {parts**2}"
        )
    if _deepens(before, after):
        lines.append(
            f"{after.num_layers - before.num_layers} more layers, which return their input: the "
            "same function, to the bit; their first moments are 0"
        )
    if after.num_experts > before.num_experts:
        kept = after.router_normalized or after.router_scores == "softmax_of_chosen"
        kept = kept and after.router_scale == 1 and not after.capacity_factor
        lines.append(
            f"each MLP becomes {after.num_experts} experts with its weights: "
            + (
                "the same function, up to rounding, since the gates of a token sum to 1"
                if kept
                else "not the same function, since the gates of a token do not sum to 1 or tokens "
                "are dropped (model.router_normalized=True and model.capacity_factor=0 keep it)"
            )
            + "; their first moments are 0"
        )
    if after.vocab_size > before.vocab_size:
        lines.append(
            f"{after.vocab_size - before.vocab_size} more tokens with the mean row: the old "
            "tokens' logits are the same; a new run from step 0, with a new optimizer state"
        )
    return lines


def keeps_text(before: Any, after: Any) -> bool:
    """Whether the larger run continues with the examples of the run, and its optimizer state."""
    return dataclasses.replace(after, vocab_size=before.vocab_size) == after
