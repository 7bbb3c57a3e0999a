"""Record of a transformer: sizes, options of its blocks, and their checks."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from jaxscale.choices import check_at_least, check_choice, nearest_divisors
from jaxscale.config.model.adapters import AdapterOptions
from jaxscale.config.model.experts import EXPERTS, ExpertOptions
from jaxscale.config.model.latent_attention import LATENT, LatentOptions
from jaxscale.config.model.lora import LORA, OF_ATTENTION, OF_LATENT, OF_MLP
from jaxscale.config.model.ngrams import NGRAMS, NgramOptions
from jaxscale.config.model.prediction import PREDICTION, PredictionOptions
from jaxscale.config.model.quantised_base import BASE
from jaxscale.config.model.rope_scaling import READ_BY, SCALING, RopeScalingOptions
from jaxscale.config.model.settings import ModelSettings, is_own_family, option
from jaxscale.config.model.sharing import SHARING, SharingOptions
from jaxscale.formatting import changed_fields
from jaxscale.model_families.shipped import find_family, refuse_setting

VOCABULARY_MULTIPLE = 128
"""Embedding rows are rounded up to a multiple of this: the vocabulary then divides over any usual
tensor axis, and the parameters do not depend on the layout."""

CHOICES = {
    "norm": ("rms", "layer"),
    "norm_placement": ("before", "after", "both", "after_residual"),
    "activation": ("silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu"),
    "attention_bias": ("none", "qkv", "all"),
    "positions": ("rotary", "learned", "none"),
    "relative_bias": ("none", "shared", "layer"),
}


@dataclass(frozen=True)
class ModelConfig(
    AdapterOptions,
    ExpertOptions,
    LatentOptions,
    NgramOptions,
    PredictionOptions,
    RopeScalingOptions,
    SharingOptions,
    ModelSettings,
):
    """A transformer of a shipped family: a decoder, or an encoder-decoder if `num_encoder_layers`
    is above 0.

    Options left out take the family's value. docs/model_families.md lists the options that each
    family lets a user set.

    Raises:
      ValueError: an option that the family fixes, or options that contradict each other.

    Examples:
      >>> jaxscale.ModelConfig(family="qwen3", num_layers=2, d_model=64).qk_norm
      True
    """

    num_layers: int = 2
    d_model: int = 64
    num_heads: int = 4
    num_kv_heads: int = 4  # grouped-query attention when below num_heads
    head_dim: int = 16
    d_ff: int = 256
    family: str = "llama"
    # Rows of the learned position table, 0 for 2048. For other positions, which have no limit, the
    # longest text of the pretrained model, if any.
    max_seq_len: int = 0

    norm: str = option("rms")  # "layer" subtracts the mean and has a bias
    norm_eps: float = option(1e-5)
    norm_offset: bool = option(False)  # scales are stored minus 1 (Gemma)
    norm_placement: str = option("before")  # of attention and MLP; or "after_residual", as in BERT
    parallel_block: bool = option(False)  # attention and MLP of a layer read the same stream
    activation: str = option("silu")
    gated: bool = option(True)  # activation(gate) * up, not activation(up)
    attention_bias: str = option("none")
    mlp_bias: bool = option(False)
    # activation(gate) * (up + 1), with gate clamped to <= limit and up to [-limit, limit]
    # (gpt-oss); 0 disables.
    mlp_limit: float = option(0.0)
    attention_sinks: bool = option(False)  # one learned sink logit per head (gpt-oss)
    qk_norm: bool = option(False)
    qk_norm_over_heads: bool = option(False)  # its mean is over all heads; each has its own scale
    causal: bool = option(True)  # False: bidirectional attention, for masked objectives

    num_encoder_layers: int = option(0)  # of an encoder, in addition to num_layers of the decoder
    relative_bias: str = option("none")  # attention bias by distance: "shared", or per layer (T5)
    relative_buckets: int = option(32)  # of distances, each with a bias
    relative_max_distance: int = option(128)  # larger distances share a bias

    positions: str = option("rotary")
    rope_theta: float = option(10_000.0)
    local_rope_theta: float = option(0.0)  # of local layers, unscaled; 0: as in global layers
    rope_share: float = option(1.0)  # share of a head's features that are rotated, from the first

    sliding_window: int = option(0)  # keys that a query attends to, itself included; 0 is all
    layer_pattern: str = option("")  # repeats: L local, with the window, G global; "": all local
    attention_scale_dim: float = option(0.0)  # scores are divided by its root; 0 is head_dim
    attention_soft_cap: float = option(0.0)  # cap * tanh(score / cap); 0 means none
    scaled_embedding: bool = option(False)  # multiplied by the square root of d_model
    token_types: int = option(0)  # rows of BERT's segment table; tokens are of type 0 by default
    embedding_norm: bool = option(False)
    # The id whose embedding is zero, with the other embeddings of its text scaled up (ESM-2's mask,
    # in training only); -1: none.
    dropped_token: int = option(-1)
    head_transform: bool = option(False)  # BERT's layer before the output matrix, and its bias
    tied_embeddings: bool = option(False)
    scaled_head: bool = option(False)  # inputs are divided by the root of d_model (T5 1.0)
    logit_soft_cap: float = option(0.0)  # cap * tanh(logits / cap); 0 means none

    z_loss: float = 0.0  # weight of log(Z)^2
    dropout: float = 0.0  # rate, on embeddings and the outputs of attention and MLP
    param_dtype: str = ""  # "": float32, or compute_dtype for weights frozen by adapters

    def __repr__(self) -> str:
        return changed_fields(self, self.defaults)

    def __post_init__(self) -> None:
        self._take_family()
        if not self.param_dtype:
            object.__setattr__(self, "param_dtype", self._usual_param_dtype)
        for name, choices in CHOICES.items():
            check_choice(f"model.{name}", getattr(self, name), choices)
        one = ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff")
        zero = ("max_seq_len", "norm_eps", "local_rope_theta", "sliding_window", "mlp_limit")
        zero += ("attention_scale_dim", "attention_soft_cap", "logit_soft_cap", "token_types")
        zero += ("z_loss", "dropout")
        check_at_least("model", self, **dict.fromkeys(one, 1), **dict.fromkeys(zero, 0))
        least = int(self.relative_bias != "none")
        check_at_least(
            "model", self, num_encoder_layers=least, relative_buckets=4, dropped_token=-1
        )
        super().__post_init__()
        if self.dropout >= 1:
            raise ValueError(f"model.dropout = {self.dropout} must be below 1")
        if self.dropout and self.num_encoder_layers:
            raise ValueError(
                f"model.dropout = {self.dropout} is not available for encoder-decoders "
                f"(model.family = {self.family!r}); set model.dropout = 0"
            )
        self._check_attention()
        self._check_positions()
        self.check_experts(self.num_layers, self.period)
        self.check_lora(self.vocab_size, **self._adapter_kinds)
        self.check_base(
            self.layer_matrices, adapts=self.adapts, has_encoder=bool(self.num_encoder_layers)
        )
        self.check_adapters(
            has_encoder=bool(self.num_encoder_layers),
            causal=self.causal,
            prediction_depth=self.prediction_depth,
        )
        self.check_ngrams(
            adapts=self.adapts,
            has_encoder=bool(self.num_encoder_layers),
            prediction_depth=self.prediction_depth,
        )
        ahead = bool(self.num_encoder_layers) or not self.causal
        self.check_prediction(self.positions, self.layer_pattern, ahead)
        self.check_sharing(*self._shared_layers, adapts=self.adapts)
        if self.norm_placement == "after_residual" and self.parallel_block:
            raise ValueError(
                "model.norm_placement = 'after_residual' with model.parallel_block = True: "
                "attention and MLP read the same stream, and there is no norm between them; set "
                "model.norm_placement = 'before', 'after' or 'both', or model.parallel_block = "
                "False"
            )

    def _take_family(self) -> None:
        """Fills in the options that are left out; refuses options that the family does not have."""
        family = None if is_own_family(self.family) else find_family(self.family)
        for name, value in self._family_defaults().items():
            given = getattr(self, name)
            if given is None:
                object.__setattr__(self, name, value)
            elif family and name not in family.settings and given != value:
                raise ValueError(refuse_setting(family, name))
        if self.positions == "learned" and not self.max_seq_len:
            object.__setattr__(self, "max_seq_len", 2048)

    def _family_defaults(self) -> dict[str, Any]:
        """The family's defaults of the options."""
        plain = {
            one.name: one.metadata["plain"]
            for one in dataclasses.fields(self)
            if "plain" in one.metadata
        }
        if is_own_family(self.family):
            return plain
        family = find_family(self.family)
        own = {**family.fixed, **family.settings}
        return {name: own.get(name, value) for name, value in plain.items()}

    @property
    def _usual_param_dtype(self) -> str:
        """The default type of parameters: weights frozen by adapters need no wider type than
        matmuls read."""
        return self.compute_dtype if self.adapts else "float32"

    def _check_attention(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads = {self.num_heads} is not a multiple of model.num_kv_heads = "
                f"{self.num_kv_heads}; set model.num_kv_heads = "
                f"{nearest_divisors(self.num_heads, self.num_kv_heads)}"
            )
        plain = not (self.qk_norm or self.attention_sinks or self.attention_bias != "none")
        self.check_latent(self.num_heads, self.num_kv_heads, self.head_dim, plain=plain)
        if set(self.layer_pattern) - set("LG"):
            raise ValueError(
                f"model.layer_pattern = {self.layer_pattern!r} has other letters than L (local, "
                "with the sliding window) and G (global); write such as 'LLG'"
            )
        if "L" in self.layer_pattern and not self.sliding_window:
            raise ValueError(
                f"model.layer_pattern = {self.layer_pattern!r} has local layers; set "
                "model.sliding_window, or model.layer_pattern = ''"
            )

    def _check_positions(self) -> None:
        exact = self.relative_buckets // (2 if self.causal else 4)
        if self.relative_bias != "none" and self.relative_max_distance <= exact:
            raise ValueError(
                f"model.relative_max_distance = {self.relative_max_distance} is too small for "
                f"model.relative_buckets = {self.relative_buckets}, of which the first {exact} "
                f"have one distance each; set model.relative_max_distance = {exact + 1} or more, "
                "or fewer buckets"
            )
        if self.rope_theta <= 0:
            raise ValueError(f"model.rope_theta = {self.rope_theta} must be positive")
        if not 0 < self.rope_share <= 1:
            raise ValueError(f"model.rope_share = {self.rope_share} must be above 0 and at most 1")
        if self.positions == "rotary" and (self.rotary_dim % 2 or not self.rotary_dim):
            share = "" if self.rope_share == 1 else f", of which {self.rotary_dim} are rotated,"
            raise ValueError(
                f"model.head_dim = {self.head_dim}{share} is odd; RoPE rotates pairs of features"
            )
        self.check_rope_scaling(self.rotary_dim)

    @property
    def defaults(self) -> dict[str, Any]:
        """Field -> default, where the family or the type of parameters sets it."""
        return {**self._family_defaults(), "param_dtype": self._usual_param_dtype}

    @property
    def unread(self) -> set[str]:
        """The settings that nothing reads: fixed by the family, of options that this model does not
        have, or off by default. A custom model may read any."""
        unread = {"dropout", "expert_pattern", "lora_tokens", "matmul_dtype", *SHARING, *NGRAMS}
        if is_own_family(self.family):
            return unread
        options = {one.name for one in dataclasses.fields(self) if "plain" in one.metadata}
        has = {
            tuple(options - find_family(self.family).settings.keys()): False,
            EXPERTS: self.num_experts,
            ("router_groups_kept",): self.router_groups > 1,
            ("balance",): self.balance_weight,
            LATENT: self.kv_rank,
            LORA: self.lora_rank,
            ("side_width",): self.side_width,
            ("prompt_tokens",): self.prompt_tokens,
            ("param_dtype", *BASE): self.adapts,
            PREDICTION: self.prediction_depth,
            ("relative_buckets", "relative_max_distance"): self.relative_bias != "none",
            ("rope_theta", "rope_share", "local_rope_theta"): self.positions == "rotary",
            tuple({*SCALING} - {*READ_BY[self.rope_scaling]}): False,
            ("max_seq_len",): self.positions == "learned",
        }
        return unread.union(*(names for names, read in has.items() if not read))

    @property
    def position_setting(self) -> str:
        """The setting of the number of learned positions, or ""."""
        return "max_seq_len" if self.positions == "learned" else ""

    # Layers.

    @property
    def attention_uses(self) -> tuple[str, ...]:
        """The features of attention that layers use, of `ops.attention.USES`."""
        asked = {
            "soft_cap": self.attention_soft_cap,
            "bias": self.relative_bias != "none",
            "sinks": self.attention_sinks,
            "cross": self.num_encoder_layers,
        }
        return tuple(use for use, is_asked in asked.items() if is_asked)

    @property
    def period(self) -> int:
        """The period of layers, after which static settings repeat; index % period is the position
        in it."""
        return len(self.layer_pattern) or 1

    def window(self, index: int) -> int:
        """The sliding window of a layer, by its index or position in the period; 0 means none."""
        return 0 if self._is_global(index) else self.sliding_window

    def theta(self, index: int) -> float:
        """The RoPE base of a layer."""
        return self.local_rope_theta if self._own_rope(index) else self.rope_theta

    def scaling(self, index: int) -> str:
        """The RoPE scaling of a layer."""
        return "none" if self._own_rope(index) else self.rope_scaling

    def _own_rope(self, index: int) -> bool:
        return bool(self.local_rope_theta) and not self._is_global(index)

    def _is_global(self, index: int) -> bool:
        return bool(self.layer_pattern) and self.layer_pattern[index % self.period] == "G"

    @property
    def final_norm(self) -> bool:
        """Whether a norm follows the last layer; not if each layer ends with a norm."""
        return self.norm_placement != "after_residual"

    @property
    def adapted_weights(self) -> tuple[str, ...]:
        """The weights of a layer that have a low-rank adapter."""
        return self.adapted(**self._adapter_kinds)

    @property
    def layer_matrices(self) -> tuple[str, ...]:
        """The matrices of a layer that `lora_targets` and `base_targets` may name."""
        kinds = self._adapter_kinds
        return *kinds["attention"], *(OF_MLP if kinds["gated"] else ("up", "down"))

    @property
    def _adapter_kinds(self) -> dict[str, Any]:
        latent = ("q_down", *OF_LATENT) if self.query_rank else OF_LATENT
        return {
            "attention": latent if self.kv_rank else OF_ATTENTION,
            "gated": self.gated,
            "has_experts": self.num_experts > 0,
        }

    @property
    def _shared_layers(self) -> tuple[dict[str, int], dict[str, int]]:
        """The arguments of `check_sharing`."""
        layers = {"num_layers": self.num_layers, "num_encoder_layers": self.num_encoder_layers}
        layers |= {"dense_layers": self.dense_layers} if self.num_experts else {}
        patterns = {"layer_pattern": self.layer_pattern, "expert_pattern": self.expert_pattern}
        return layers, {name: len(text) for name, text in patterns.items() if text}

    @property
    def rotary_dim(self) -> int:
        """Features of a head that are rotated."""
        return self.rope_head_dim if self.kv_rank else int(self.head_dim * self.rope_share)

    @property
    def value_dim(self) -> int:
        """Features of a head's values."""
        return (self.kv_rank and self.value_head_dim) or self.head_dim

    @property
    def attention_scale(self) -> float:
        """The factor of attention scores."""
        usual = (self.attention_scale_dim or self.head_dim) ** -0.5
        return usual * (1 + 0.1 * self.rope_mscale * math.log(self.rope_factor)) ** 2

    # Parameters.

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: vocab_size rounded up; padding rows are never predicted."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def num_expert_layers(self) -> int:
        """The number of layers with experts."""
        return sum(map(self.has_experts, range(self.num_layers)))
