"""Checks of names and numbers; errors suggest the nearest allowed value."""

import difflib
import math
import numbers
from collections.abc import Collection, Iterable

OTHER_NAMES = {
    "data.source": ("data", "dataset", "path", "data_path", "train_file"),
    "data.validation": ("validation_file", "eval_dataset", "eval_data"),
    "data.global_batch_size": ("batch_size", "batch", "train_batch_size"),
    "data.seq_len": ("seq_length", "sequence_length", "max_length", "max_seq_length", "block_size"),
    "model.d_model": ("hidden_size", "embed_dim", "n_embd", "dim"),
    "model.d_ff": ("intermediate_size", "ffn_hidden_size", "mlp_dim"),
    "model.num_layers": ("num_hidden_layers", "n_layers", "n_layer"),
    "model.num_heads": ("num_attention_heads", "n_heads", "n_head"),
    "model.num_kv_heads": ("num_key_value_heads", "n_kv_heads"),
    "model.num_experts": ("num_local_experts", "n_routed_experts"),
    "model.experts_per_token": ("top_k", "topk", "num_experts_per_tok", "moe_router_topk"),
    "model.expert_d_ff": ("moe_intermediate_size", "moe_ffn_hidden_size"),
    "model.shared_d_ff": ("n_shared_experts", "num_shared_experts", "shared_experts"),
    "model.balance_weight": ("router_aux_loss_coef", "moe_aux_loss_coeff", "aux_loss"),
    "model.init_from": ("model_name_or_path", "pretrained", "load_from", "load_parameters_path"),
    "model.lora_rank": ("lora", "lora_r", "lora_dim"),
    "model.lora_tokens": ("trainable_token_indices", "new_tokens"),
    "model.base_dtype": ("qlora", "load_in_4bit", "quantization", "bnb_4bit_quant_type"),
    "model.prompt_tokens": ("num_virtual_tokens", "soft_prompt", "prompt_tuning"),
    "model.side_width": ("side_network", "losa"),
    "model.lora_targets": ("lora_target_modules", "target_modules"),
    "model.compute_dtype": ("dtype", "precision", "bf16"),
    "optimizer.name": ("optimizer",),
    "optimizer.learning_rate": ("lr", "max_lr", "peak_lr"),
    "optimizer.schedule": ("lr_schedule", "lr_scheduler_type"),
    "optimizer.warmup_steps": ("warmup", "warmup_ratio", "num_warmup_steps"),
    "optimizer.final_learning_rate": ("min_lr", "final_lr", "min_lr_ratio"),
    "optimizer.clip_norm": ("max_grad_norm", "grad_clip", "clip"),
    "layout.data": ("dp", "data_parallel"),
    "layout.tensor": ("tp", "tensor_parallel"),
    "layout.pipeline": ("pp", "pipeline_parallel"),
    "layout.context": ("cp", "context_parallel", "sequence_parallel"),
    "layout.expert": ("ep", "expert_parallel"),
    "layout.microbatches": ("grad_accum", "gradient_accumulation_steps", "num_microbatches"),
    "run.steps": ("max_steps", "train_steps", "num_steps", "max_iters"),
    "run.epochs": ("num_epochs", "num_train_epochs"),
    "run.keep_last": ("save_total_limit", "max_to_keep"),
    "run.keep_best": ("load_best_model_at_end", "save_best"),
    "run.checkpoint_every": ("save_every", "save_steps", "save_interval"),
    "run.eval_every": ("eval_steps", "eval_interval"),
}
"""Setting -> its names in other trainers."""


def nearest(got: object, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known names most similar to `got` in any case, at most `count` of them.

    Args:
      cutoff: the least similarity, from 0 (anything) to 1 (equal), of `difflib`.
    """
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(got).lower(), names, n=count, cutoff=cutoff)
    return [names[name] for name in near]


def did_you_mean(got: object, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> str:
    """The end of an error message, or "" where no known name is similar to `got`.

    >>> did_you_mean("adam", ("adamw", "lion"))
    "; did you mean 'adamw'?"
    >>> did_you_mean("sgd", ("adamw", "lion"))
    ''
    """
    near = nearest(got, known, count, cutoff)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def settings_called(key: str, settings: Iterable[str]) -> list[str]:
    """The settings, each "section.key", with this key, here or in other trainers.

    >>> settings_called("lr", ["optimizer.learning_rate", "run.steps"])
    ['optimizer.learning_rate']
    """
    key = key.lower().replace("-", "_")
    return [
        setting
        for setting in settings
        if setting.partition(".")[2] == key or key in OTHER_NAMES.get(setting, ())
    ]


def nearest_settings(got: str, settings: Collection[str]) -> list[str]:
    """The settings that a name, "key" or "section.key", may mean; mostly one.

    >>> nearest_settings("mesh.fsdp", ["layout.fsdp", "layout.tensor"])
    ['layout.fsdp']
    >>> nearest_settings("layout.tesnor", ["layout.fsdp", "layout.tensor"])
    ['layout.tensor']
    """
    section, _, key = got.rpartition(".")
    if called := settings_called(key, settings):
        return called
    here = [setting.partition(".")[2] for setting in settings if setting.startswith(f"{section}.")]
    if near := nearest(key, here):
        return [f"{section}.{near[0]}"]
    near = nearest(key, {setting.partition(".")[2] for setting in settings})
    return settings_called(near[0], settings) if near else []


def check_choice(name: str, got: object, allowed: Iterable[str], *, equals: str = " = ") -> None:
    """Refuses a value that is not allowed.

    Args:
      name: the setting, as the user writes it.
      equals: text between the name and the value.

    Raises:
      ValueError: `got` is not in `allowed`; names the nearest.
    """
    allowed = tuple(allowed)
    if got not in allowed:
        raise ValueError(
            f"{name}{equals}{got!r} is not known; it can be "
            f"{', '.join(choice or "''" for choice in allowed)}"
            f"{did_you_mean(got, allowed)}"
        )


def check_kind(name: str, got: object, kind: type | tuple[type, ...], advice: str) -> None:
    """Refuses an argument of the wrong type, which would otherwise fail far from the call.

    Args:
      advice: the argument to pass.

    Raises:
      ValueError: `got` is not of this type.
    """
    if not isinstance(got, kind):
        raise ValueError(f"{name} is of type {type(got).__name__}; {advice}")


def check_count(name: str, got: object, least: int) -> None:
    """Refuses an argument that is not a whole number of at least `least`."""
    if check_whole(name, got) < least:
        raise ValueError(f"{name} = {got} is too small; at least {least}")


def check_whole(name: str, got: object) -> int:
    """Refuses an argument that is not a whole number."""
    if isinstance(got, bool) or not isinstance(got, numbers.Integral):
        raise ValueError(f"{name} = {got!r} is not a whole number")
    return int(got)


def check_at_least(section: str, record: object, **least: float) -> None:
    """Refuses a record with a field below its lower bound."""
    for name, bound in least.items():
        if not getattr(record, name) >= bound:
            raise ValueError(
                f"{section}.{name} = {getattr(record, name)} is too small; at least {bound}"
            )


def nearest_divisors(size: int, parts: int) -> str:
    """The divisors of `size` nearest to `parts`, below and above: "2 or 4"."""
    found = divisors(size)
    below = [n for n in found if n < parts][-1:]
    return " or ".join(map(str, below + [n for n in found if n > parts][:1]))


def divisors(number: int) -> list[int]:
    """All divisors of a number, in order."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})
