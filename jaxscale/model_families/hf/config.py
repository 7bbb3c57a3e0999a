"""Reads and writes the parts of a Hugging Face config.json that families share. Keys and defaults
are those of transformers 5."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxscale.choices import check_choice
from jaxscale.model_families.family import HfConfig, HfKey, Model

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "quick_gelu": "quick_gelu",
}
"""Their name of an activation -> ours; of several names for one function the first is written."""

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def _context(hf: HfConfig) -> int:
    """The longest text in tokens, from which some types of RoPE scaling begin."""
    return hf.read("max_position_embeddings", 2048)


def sizes_from_hf(hf: HfConfig) -> dict[str, Any]:
    """The sizes of a model, from Llama's keys."""
    d_model, heads = hf.read("hidden_size"), hf.read("num_attention_heads")
    hf.expect("is_encoder_decoder", False)
    return {
        "vocab_size": hf.read("vocab_size"),
        "d_model": d_model,
        "d_ff": hf.read("intermediate_size"),
        "num_layers": hf.read("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": hf.read("num_key_value_heads", None) or heads,
        "head_dim": hf.read("head_dim", None) or d_model // heads,
        "max_seq_len": _context(hf),
    }


def with_context(model: Model, seq_len: int) -> Model:
    """The model with the `max_seq_len` for its config.json, which servers take for a limit: at
    least the training length, unless it affects the logits.

    Args:
      seq_len: the training length; 0 if the model was not trained.
    """
    if model.positions == "learned":
        return model
    if model.rope_scaling == "dynamic":  # scaling begins at this length
        longest = model.rope_original_context
    elif model.rope_scaling in ("yarn", "longrope"):  # their factor may be derived from it
        longest = model.max_seq_len
        if not longest or seq_len > longest:  # unset, or the context was extended
            longest = max(longest, round(model.rope_factor * model.rope_original_context))
    else:
        longest = max(model.max_seq_len, seq_len) or 2048
    return dataclasses.replace(model, max_seq_len=longest)


def sizes_to_hf(model: Model) -> dict[str, Any]:
    """The inverse of `sizes_from_hf`; the model is one of `with_context`."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_seq_len,
    }


def plain_sizes_to_hf(model: Model) -> dict[str, Any]:
    """`sizes_to_hf` for formats without a number of key/value heads and without a head's size."""
    size = model.d_model // model.num_heads
    refuse_options(model, num_kv_heads=model.num_heads, head_dim=size)
    sizes = sizes_to_hf(model)
    del sizes["num_key_value_heads"], sizes["head_dim"]
    return sizes


def llama_from_hf(hf: HfConfig) -> dict[str, Any]:
    """Sizes and RoPE settings, from Llama's keys."""
    return {**rope_from_hf(hf), **sizes_from_hf(hf)}


def llama_to_hf(model: Model) -> dict[str, Any]:
    """The inverse of `llama_from_hf`."""
    return {**sizes_to_hf(model), **rope_to_hf(model)}


def optional_key(theirs: str, ours: str, default: Any = None, off: float = 0) -> HfKey:
    """A key that is null when our setting is off."""
    return HfKey(theirs, ours, default, lambda value: value or off, lambda value: value or None)


def activation_key(theirs: str, default: str) -> HfKey:
    """The key of the activation, where null means the default."""
    return HfKey(
        theirs,
        "activation",
        default,
        lambda name: our_activation(theirs, name or default),
        their_activation,
    )


def our_activation(key: str, name: str) -> str:
    """Our name of an activation in config.json.

    Raises:
      ValueError: the activation is not supported; names the key.
    """
    check_choice(f"config.json: {key}", name, ACTIVATIONS)
    return ACTIVATIONS[name]


def their_activation(name: str) -> str:
    """The name of our activation in config.json."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == name)


ATTENTION_BIAS = HfKey(
    "attention_bias",
    "attention_bias",
    False,
    lambda biased: "all" if biased else "none",
    lambda where: where == "all",
)

LLAMA_KEYS = (
    activation_key("hidden_act", "silu"),
    HfKey("rms_norm_eps", "norm_eps", 1e-6),
    HfKey("tie_word_embeddings", "tied_embeddings", False),
)


ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
"""Type of RoPE scaling -> keys without a default."""


def rope_given(hf: HfConfig) -> dict[str, Any]:
    """The RoPE keys of config.json, in the form of transformers 4 (`rope_scaling`) or 5
    (`rope_parameters`)."""
    newer = hf.read("rope_parameters", None)
    return dict(hf.read("rope_scaling", None) or newer or {})


def rope_from_hf(
    hf: HfConfig, theta: float = 10_000.0, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The RoPE settings of a config.json.

    Args:
      theta: the default base.
      given: replaces `rope_given`.
    """
    given = rope_given(hf) if given is None else given
    return _rope_settings(given, hf.read("rope_theta", theta), _context(hf))


def _rope_settings(given: Mapping[str, Any], theta: float, context: int) -> dict[str, Any]:
    """Our settings for one dictionary of RoPE keys.

    Args:
      theta: the base, if the dictionary does not have it.
      context: max_position_embeddings of the model.

    Raises:
      ValueError: an unknown type of scaling, an unknown key, or a missing one.
    """
    left = dict(given)
    kind = left.pop("rope_type", None) or left.pop("type", None) or "default"
    left.pop("type", None)
    ours = {"rope_theta": left.pop("rope_theta", theta)}
    if kind not in _ROPE_SCALINGS:
        raise ValueError(
            f"config.json has rope_type = {kind!r}; it can be default, linear, llama3, yarn, "
            "longrope or dynamic"
        )
    for key in ROPE_NEEDS.get(kind, ()):
        if left.get(key) is None:
            raise ValueError(f"config.json has rope_type = {kind!r}, which needs {key!r}")
    if kind != "default":
        factor = left.pop("factor", None)
        more = _ROPE_SCALINGS[kind](left, context, factor)
        ours |= {"rope_scaling": kind, "rope_factor": factor, **more}
    if left.pop("partial_rotary_factor", 1.0) != 1:
        raise ValueError("config.json has partial_rotary_factor, and the model rotates whole heads")
    if left:
        key, value = next(iter(left.items()))
        raise ValueError(f"config.json has {key} = {value!r} for rope_type = {kind!r}: unknown key")
    return ours


def _context_and_factor(left: dict, context: int, factor: float | None) -> dict[str, Any]:
    original = left.pop("original_max_position_embeddings", None) or context
    factor = factor or max(context / original, 1.0)
    return {"rope_original_context": original, "rope_factor": factor}


def _llama3(left: dict, context: int, factor: float | None) -> dict[str, Any]:
    return {
        **_context_and_factor(left, context, factor),
        "rope_low_turns": left.pop("low_freq_factor"),
        "rope_high_turns": left.pop("high_freq_factor"),
    }


def _yarn(left: dict, context: int, factor: float | None) -> dict[str, Any]:
    ours = _context_and_factor(left, context, factor)
    scales = left.pop("mscale", None), left.pop("mscale_all_dim", None)
    attention = left.pop("attention_factor", None)
    if attention is None and all(scales):
        above, below = (1 + 0.1 * scale * math.log(ours["rope_factor"]) for scale in scales)
        attention = above / below
    return {
        **ours,
        "rope_low_turns": left.pop("beta_slow", None) or 1.0,
        "rope_high_turns": left.pop("beta_fast", None) or 32.0,
        "rope_truncate": left.pop("truncate", True),
        "rope_attention_factor": attention or 0.0,
    }


def _longrope(left: dict, context: int, factor: float | None) -> dict[str, Any]:
    return {
        **_context_and_factor(left, context, factor),
        "rope_short_factors": tuple(map(float, left.pop("short_factor"))),
        "rope_long_factors": tuple(map(float, left.pop("long_factor"))),
        "rope_attention_factor": left.pop("attention_factor", None) or 0.0,
    }


_ROPE_SCALINGS: dict[str, Callable[[dict, int, float | None], dict[str, Any]]] = {
    "default": lambda left, context, factor: {},
    "linear": lambda left, context, factor: {},
    "dynamic": lambda left, context, factor: {"rope_original_context": context},
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""rope_type -> a function that takes its keys out of a dictionary and returns our settings."""


def ropes_by_layer_from_hf(
    hf: HfConfig, theta: float, local_theta: float | None = None
) -> dict[str, Any]:
    """The RoPE settings of models whose local layers have separate ones, which are never scaled:
    in the form of transformers 4, where `rope_scaling` is for global layers, or 5 (a dictionary
    for each type of layer).

    Args:
      theta, local_theta: the default bases; None for that of global layers.

    Raises:
      ValueError: as `_rope_settings`; or RoPE of local layers is scaled.
    """
    both = hf.read("rope_parameters", None) or {}
    both = {GLOBAL: both, LOCAL: both} if "rope_type" in both else both
    far = hf.read("rope_scaling", None) or both.get(GLOBAL) or {}
    ours = _rope_settings(far, hf.read("rope_theta", theta), _context(hf))
    near = both.get(LOCAL) or {}
    local = _rope_settings(near, local_theta or ours["rope_theta"], _context(hf))
    if "rope_scaling" in local:
        raise ValueError(
            f"config.json has rope_type = {local['rope_scaling']!r} for local layers; RoPE can be "
            "scaled in global layers only"
        )
    return {**ours, "local_rope_theta": local["rope_theta"]}


def rope_to_hf(model: Model) -> dict[str, Any]:
    """The inverse of `rope_from_hf`, in the form that every version reads."""
    scaling: dict[str, Any] = {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling in ("llama3", "yarn", "longrope"):
        scaling["original_max_position_embeddings"] = model.rope_original_context
    low, high = model.rope_turns
    if model.rope_scaling == "llama3":
        scaling |= {"low_freq_factor": low, "high_freq_factor": high}
    if model.rope_scaling == "yarn":
        scaling |= {"beta_slow": low, "beta_fast": high, "truncate": model.rope_truncate}
    if model.rope_attention_factor:
        scaling["attention_factor"] = model.rope_attention_factor
    if model.rope_scaling == "longrope":
        scaling["short_factor"] = list(model.rope_short_factors)
        scaling["long_factor"] = list(model.rope_long_factors)
    if model.rope_scaling == "dynamic":
        refuse_options(model, rope_original_context=model.max_seq_len)
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_scaling == "none" else scaling,
    }


def experts_from_hf(hf: HfConfig, experts: int, per_token: int, layers: int) -> dict[str, Any]:
    """The settings of experts that all formats have.

    Transformers adds an auxiliary loss only with output_router_logits, whatever its weight. It is
    computed over the tokens of all layers together, and larger than ours by the experts per token.

    Args:
      experts, per_token: the defaults.
      layers: number of layers with experts, over which our loss is summed.
    """
    weight = hf.read("router_aux_loss_coef", 0.001)
    has_loss = hf.read("output_router_logits", False)
    other = hf.read("num_experts", experts)
    choices = hf.read("num_experts_per_tok", per_token)
    return {
        "num_experts": hf.read("num_local_experts", other),
        "experts_per_token": choices,
        "balance_weight": weight * choices / layers if has_loss else 0.0,
    }


def experts_to_hf(model: Model, number: str = "num_local_experts") -> dict[str, Any]:
    """The inverse of `experts_from_hf`. The weight of the auxiliary loss matches ours if the reader
    enables it.

    Args:
      number: the key of the number of experts.
    """
    weight = model.balance_weight * model.num_expert_layers / model.experts_per_token
    return {
        number: model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "router_aux_loss_coef": weight,
    }


def windows_from_hf(hf: HfConfig, num_layers: int) -> dict[str, Any]:
    """Window and layer pattern of a Qwen, which has windows in layers from max_window_layers."""
    window = hf.read("sliding_window", None)
    window = window if hf.read("use_sliding_window", False) else None
    first = hf.read("max_window_layers", 28)
    types = hf.read("layer_types", None)
    types = types or [LOCAL if window and i >= first else GLOBAL for i in range(num_layers)]
    pattern = pattern_of(types)
    return {"sliding_window": window, "layer_pattern": pattern} if window else {}


def local_layers_from_hf(
    hf: HfConfig, num_layers: int, window: int | None, period: int
) -> dict[str, Any]:
    """Window and layer pattern; without "layer_types" the last layer of each period is global."""
    types = hf.read("layer_types", None)
    types = types or [LOCAL if (i + 1) % period else GLOBAL for i in range(num_layers)]
    return {"sliding_window": window or 0, "layer_pattern": pattern_of(types) if window else ""}


def local_layers_to_hf(model: Model) -> dict[str, Any]:
    """The inverse of `local_layers_from_hf`."""
    return {"sliding_window": model.sliding_window or None, "layer_types": layer_types(model)}


def pattern_of(layer_types: list[str]) -> str:
    """The shortest `layer_pattern` that repeats to these layers; "" if all are local.

    >>> pattern_of([LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL])
    'LG'

    Raises:
      ValueError: a layer of another type.
    """
    for kind in layer_types:
        if kind not in (LOCAL, GLOBAL):
            raise ValueError(
                f"config.json has {kind!r} in layer_types; it can be {LOCAL}, {GLOBAL}"
            )
    letters = "".join("L" if kind == LOCAL else "G" for kind in layer_types)
    if "G" not in letters:
        return ""
    repeats = (letters[:n] for n in range(1, len(letters) + 1))
    return next(one for one in repeats if (one * len(letters)).startswith(letters))


def layer_types(model: Model) -> list[str]:
    """The type of every layer."""
    return [LOCAL if model.window(i) else GLOBAL for i in range(model.num_layers)]


def refuse_options(model: Model, **usual: Any) -> None:
    """Refuses values of options that the family has but its Hugging Face format cannot express.

    Raises:
      ValueError: names the first option that differs from `usual`.
    """
    for name, value in usual.items():
        if getattr(model, name) != value:
            raise ValueError(
                f"model.{name} = {getattr(model, name)!r} cannot be written in Hugging Face's "
                f"format of {model.family} models, which needs {value!r}"
            )
