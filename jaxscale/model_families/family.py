"""Model families: the record that configs, checkpoints and the planner read, and the reader of a
Hugging Face config.json.

A family is a choice of options of one general decoder, `jaxscale.config.model.ModelConfig`: the
options that a user may set, and the values of the others.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

Model = Any
"""A `ModelConfig`, which imports these records and so cannot be imported here."""

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
"""The settings of RoPE, with their usual defaults."""

EXPERTS: Mapping[str, Any] = {
    "capacity_factor": 0.0,
    "balance": "sequence",
    "balance_weight": 0.001,
    "router_z_loss": 0.0,
}
"""The settings of experts that only affect training; every family with experts has them."""


REQUIRED = object()

UNUSED = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "_num_labels",
    "architectures",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "auto_map",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "directionality",
    "do_sample",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "finetuning_task",
    "gradient_checkpointing",
    "hidden_dropout",
    "hidden_dropout_prob",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "max_length",
    "max_sequence_length",
    "model_type",
    "n_special",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "pad_token_id",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "predict_special_tokens",
    "pretraining_tp",
    "problem_type",
    "resid_pdrop",
    "return_dict",
    "scalable_attention",
    "sep_token_id",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "temperature",
    "tokenizer_class",
    "top_p",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
)
"""Keys of config.json without effect on the logits: dropout, initial values, special tokens,
sampling, provenance, keys for other programs, and a pooler, which is not read."""


@dataclass(frozen=True)
class HfConfig:
    """A config.json with a record of the keys that were read. Reading removes nothing, so the order
    of readers does not matter; a key that no reader has read is refused, so that no setting is
    dropped silently."""

    keys: Mapping[str, Any]
    known: set[str] = field(default_factory=lambda: set(UNUSED))  # keys that were read

    def read(self, key: str, default: Any = REQUIRED) -> Any:
        """The value of a key.

        Raises:
          ValueError: it is missing and has no default.
        """
        self.known.add(key)
        if key not in self.keys and default is REQUIRED:
            raise ValueError(
                f"config.json has no {key!r}, which a {self.keys.get('model_type')} model needs"
            )
        return self.keys.get(key, default)

    def expect(self, key: str, *allowed: Any) -> None:
        """Reads a key that may only have supported values.

        Raises:
          ValueError: it has another value.
        """
        if (got := self.read(key, allowed[0])) not in allowed:
            raise ValueError(
                f"config.json has {key} = {got!r}; for {self.keys.get('model_type')} it can be "
                f"{' or '.join(repr(one) for one in allowed)}"
            )

    def ignore(self, *keys: str) -> None:
        """Marks keys as read that do not affect the logits of this family."""
        self.known.update(keys)

    def refuse_unknown(self) -> None:
        """Raises ValueError for the first key that no reader has read."""
        for key in (key for key in self.keys if key not in self.known):
            raise ValueError(
                f"config.json has {key} = {self.keys[key]!r}, which is not known for "
                f"{self.keys.get('model_type')} models; remove it from config.json if it does not "
                "affect the logits"
            )


@dataclass(frozen=True)
class HfKey:
    """A key of config.json for one of our settings."""

    theirs: str
    ours: str
    default: Any = REQUIRED  # when the key is missing
    read: Callable[[Any], Any] = lambda value: value  # config.json's value -> ours
    write: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class TensorRule:
    """One parameter, or one part of a fused tensor, in a Hugging Face checkpoint.

    ours = tensor.reshape(view)[take].transpose(order).reshape(shape of ours), then zero rows up to
    the padded vocabulary. The last reshape only splits dims.

    If several rules have the same parameter (a tied head), the tensors of the first rule and of
    rules with `is_copy` are written. The others may be missing when read; a tensor that is present
    must equal the first.
    """

    param: str  # our path, "layers/attention/q"; in a stack one tensor per layer
    name: str  # "model.layers.{layer}.self_attn.q_proj.weight"; {expert}: also one per expert
    view: tuple[int, ...]
    order: tuple[int, ...]
    take: tuple[int | slice, ...] = ()  # of a fused tensor; several rules then share one name
    shape: tuple[int, ...] = ()  # of the tensor itself, if it differs from `view`
    first: int = 0  # layers of the model before the stack
    stride: int = 1  # layers of the model per layer of the stack
    wide: bool = False  # float32, whatever the type of the others
    is_copy: bool = False  # a second tensor with the same values, which is also written


@dataclass(frozen=True)
class Family:
    """A model family.

    `settings` are the options that a user may set, with the family's defaults, in addition to the
    sizes that every family has. `fixed` are the options that define it. Options in neither are as
    in a plain Llama.
    """

    name: str
    paper: str
    settings: Mapping[str, Any]
    fixed: Mapping[str, Any]

    # The Hugging Face format.
    hf_types: tuple[str, ...]  # model_type of config.json, the first is written; () without one
    hf_architectures: str
    read_hf: Callable[[HfConfig], dict[str, Any]]  # config.json -> settings other than `hf_keys`
    write_hf: Callable[[Model], dict[str, Any]]  # and back
    tensors: Callable[[Model], tuple[TensorRule, ...]]
    hf_keys: tuple[HfKey, ...] = ()
    # Keys with a single value, or one of several, in every model of the family.
    hf_expected: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Defaults of keys that config.json may leave out, if they differ from those of all families.
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    hf_prefix: str = "model."  # of names; checkpoints of a model without a head omit it
    hf_renamed: Mapping[str, str] = field(default_factory=dict)  # older suffix -> current one
    # Globs of tensors without parameters: constants that follow from the settings, and tables that
    # no code reads.
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    # Globs of trained tensors of other objectives, which are reported; {layers}: number of layers.
    left_out: tuple[str, ...] = ()
    # An equivalent model with the same logits and its parameters (in canonical form), if the format
    # cannot express this one.
    hf_form: Callable[[Model, Any], tuple[Model, Any]] = lambda model, params: (model, params)
    untied: str = ""  # the tensor of an untied head, if config.json does not tell

    def from_hf(self, hf: Mapping[str, Any], tensors: Collection[str] = ()) -> dict[str, Any]:
        """The arguments of `ModelConfig` for a config.json and the names of its tensors.

        Raises:
          ValueError: an unknown key, or a value that is not supported; names it.
        """
        head = {"tied_embeddings": self.untied not in tensors} if self.untied else {}
        settings = self.settings_of(HfConfig({**self.hf_defaults, **hf}))
        return {"family": self.name, **settings, **head}

    def settings_of(self, config: HfConfig) -> dict[str, Any]:
        """The settings of a config.json; raises as `from_hf`."""
        settings = self.read_hf(config)
        for key in self.hf_keys:
            settings[key.ours] = key.read(config.read(key.theirs, key.default))
        for name, allowed in self.hf_expected.items():
            config.expect(name, *allowed)
        config.refuse_unknown()
        return settings

    def to_hf(self, model: Model) -> dict[str, Any]:
        """The config.json of a model, without its special tokens.

        Raises:
          ValueError: an option that the format cannot express; names it.
        """
        if self.settings.get("num_experts") and not model.num_experts:
            raise ValueError(
                "model.num_experts = 0 cannot be written in Hugging Face's format of "
                f"{self.name} models, whose layers have experts"
            )
        written = self.write_hf(model)
        return {
            "architectures": [self.hf_architectures],
            "model_type": self.hf_types[0],
            **written,
            **{key.theirs: key.write(getattr(model, key.ours)) for key in self.hf_keys},
        }
