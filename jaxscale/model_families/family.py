"""The record of a model family: all that configs, checkpoints and the planner know of it.

A family is a way of using the options of one general decoder, `jaxscale.model_config.ModelConfig`:
which of them a user may set, and the values of the others.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

Model = Any
"""A `ModelConfig`, which is made with these records and so cannot be named here."""

ROPE: Mapping[str, Any] = {
    "rope_theta": 10_000.0,
    "rope_scaling": "none",
    "rope_factor": 1.0,
    "rope_original_context": 8192,
    "rope_low_turns": 0.0,
    "rope_high_turns": 0.0,
    "rope_attention_factor": 0.0,
    "rope_truncate": True,
    "rope_short_factors": (),
    "rope_long_factors": (),
    "rope_length": 0,
}
"""The settings of rotary positions, with their usual defaults."""

EXPERTS: Mapping[str, Any] = {
    "capacity_factor": 0.0,
    "balance": "sequence",
    "balance_weight": 0.001,
    "router_z_loss": 0.0,
}
"""The settings of experts that change training alone, so that every family with experts has them.
"""


@dataclass(frozen=True)
class TensorRule:
    """One parameter, or one part of a fused tensor, in a Hugging Face checkpoint.

    ours = tensor.reshape(view)[take].transpose(order).reshape(shape of ours), then zero rows up to
    the padded vocabulary. The last reshape only splits dims.

    Of several rules for one parameter (a tied head) the first names the tensor that is written, and
    each that `is_copy`; those of the others may be missing, and must be equal to it where they are
    present.
    """

    param: str  # path of ours, "layers/attention/q"; of a stack: one tensor per layer
    name: str  # "model.layers.{layer}.self_attn.q_proj.weight"; {expert}: one per expert too
    view: tuple[int, ...]
    order: tuple[int, ...]
    take: tuple[int | slice, ...] = ()  # of a fused tensor; several rules then share one name
    shape: tuple[int, ...] = ()  # of the tensor itself, where it is not that of `view`
    first: int = 0  # layers of the model before those of the stack
    stride: int = 1  # layers of the model for one of the stack
    wide: bool = False  # in float32, whatever the type of the others is
    is_copy: bool = False  # a second tensor with the values of another, which is written too


@dataclass(frozen=True)
class Family:
    """A model family.

    `settings` are the options that a user may set, with the family's defaults, beside the sizes
    that every family has. `fixed` are the options that define it. Options in neither are as in a
    plain Llama.
    """

    name: str
    paper: str
    settings: Mapping[str, Any]
    fixed: Mapping[str, Any]

    # Its form at Hugging Face.
    hf_types: tuple[str, ...]  # model_type of config.json; the first is written; () if it has none
    hf_architectures: str
    read_hf: Callable[[Mapping[str, Any]], dict[str, Any]]  # config.json -> settings
    write_hf: Callable[[Model], dict[str, Any]]  # and back
    tensors: Callable[[Model], tuple[TensorRule, ...]]
    hf_prefix: str = "model."  # of names; checkpoints of a model without its head leave it out
    hf_renamed: Mapping[str, str] = field(default_factory=dict)  # older ends of names -> theirs now
    # Globs of tensors without parameters; {layers} is the number of layers.
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    # Another model with the same logits, and its parameters in place of these (in canonical form),
    # where the format has no room for this one.
    hf_form: Callable[[Model, Any], tuple[Model, Any]] = lambda model, params: (model, params)
    untied: str = ""  # the tensor of a head of its own, where config.json does not say if it is one

    def from_hf(self, hf: Mapping[str, Any], tensors: Collection[str] = ()) -> dict[str, Any]:
        """The arguments of `ModelConfig` for a config.json, and the names of the tensors beside it.

        Raises:
          ValueError: an unknown key, or a value that is not supported; names it.
        """
        head = {"tied_embeddings": self.untied not in tensors} if self.untied else {}
        return {"family": self.name, **self.read_hf(hf), **head}

    def to_hf(self, model: Model) -> dict[str, Any]:
        """The config.json of a model, without its special tokens.

        Raises:
          ValueError: an option that the format does not have; names it.
        """
        if self.settings.get("num_experts") and not model.num_experts:
            raise ValueError(
                "model.num_experts = 0 cannot be written in Hugging Face's format of "
                f"{self.name} models, whose layers have experts"
            )
        written = self.write_hf(model)
        kind = {"architectures": [self.hf_architectures], "model_type": self.hf_types[0]}
        return {**kind, **written}
