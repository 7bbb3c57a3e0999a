"""The sizes of a model, with its parameter and FLOP counts.

Sizes alone describe a model to the planner, so models that this package cannot train yet
(state-space mixers) can be planned and compared.

Letters: D d_model, H heads, K kv_heads, E head_dim, F d_ff.
"""

from dataclasses import dataclass, replace
from typing import Any

from jaxscale.config import Config
from jaxscale.config.model import ModelConfig
from jaxscale.planner.model.traces import model_trace


@dataclass(frozen=True)
class LatentAttention:
    """Ranks and head sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    query_rank: int  # 0: queries are made of the stream
    kv_rank: int
    nope_dim: int  # of a head's query and key, without rotary positions
    rope_dim: int  # with rotary positions
    value_dim: int


@dataclass(frozen=True)
class StateSpaceMixer:
    """A state-space mixer in place of attention in some layers (Mamba-2, arXiv 2405.21060)."""

    layers: int
    heads: int
    head_dim: int
    state: int
    groups: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a transformer. `layers` counts decoder layers: all layers unless there is an
    encoder."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    gated: bool
    vocab: int
    tied: bool
    seq_len: int
    causal: bool = True
    window: int = 0  # sliding window in keys; 0 is full attention
    windowed_share: float = 1.0  # share of layers with the window
    biases: bool = False  # LayerNorm and a bias on every matrix
    extra_params: int = 0  # of a decoder layer: other biases, more norms
    extra_head_params: int = 0  # its bias and transform; norms and token types of the embedding
    head_transform: bool = False  # a matrix [d_model, d_model] before the output matrix
    learned_positions: bool = False
    experts: int = 0  # per layer; 0 is a dense model
    top_k: int = 0
    expert_ff: int = 0
    shared_experts: int = 0
    shared_ff: int = 0  # of a shared expert; 0 is expert_ff
    expert_width: int = 0  # width of the routed experts' input; 0 is d_model
    expert_gated: bool = True
    dense_layers: int = 0  # layers without experts, wherever they are
    latent: LatentAttention | None = None
    mixer: StateSpaceMixer | None = None
    attention_layers: int = -1  # layers with attention; -1 is all
    mlp_layers: int = -1  # layers with an MLP or experts; -1 is all
    extra_predictions: int = 0  # multi-token prediction modules, each a layer and a head pass
    head_passes: int = 1  # more where such modules are among the layers
    encoder_layers: int = 0
    encoder_seq_len: int = 0

    @classmethod
    def of(cls, config: Config) -> "ModelShape":
        """The shape of a configuration's model at its sequence length. Modules that predict further
        tokens are layers at its end; what merges their inputs counts as the head's."""
        model = config.model
        windows = [model.window(index) for index in range(model.num_layers)]
        shape = cls(
            layers=model.num_layers + model.prediction_depth,
            head_passes=1 + model.prediction_depth,
            d_model=model.d_model,
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            d_ff=model.d_ff,
            gated=model.gated,
            vocab=model.padded_vocab_size,
            tied=model.tied_embeddings,
            seq_len=config.data.output_len,
            causal=model.causal,
            window=max(windows),
            windowed_share=sum(map(bool, windows)) / len(windows),
            biases=model.norm == "layer",
            learned_positions=model.positions == "learned",
            head_transform=model.head_transform,
            encoder_layers=model.num_encoder_layers,
            encoder_seq_len=config.data.seq_len if model.num_encoder_layers else 0,
            **_expert_sizes(model),
            latent=_latent_sizes(model),
        )
        trace = model_trace(model)
        usual, layers = shape.block_params, trace.stack_layers
        found = sum(array.size * layers.get(array.part, 0) for array in trace.parameters)
        unused = (model.max_seq_len - shape.seq_len) * shape.d_model * shape.learned_positions
        shape = replace(shape, extra_params=(found - usual) // shape.layers)
        return replace(shape, extra_head_params=trace.num_params - unused - shape.num_params)

    @property
    def encoder(self) -> "ModelShape":
        """The encoder's layers as a model of their own, which shares its embedding and has no
        head."""
        if not self.encoder_layers:
            raise ValueError("the model has no encoder")
        lengths = {"layers": self.encoder_layers, "seq_len": self.encoder_seq_len}
        alone = {"causal": False, "encoder_layers": 0, "encoder_seq_len": 0}
        return replace(self, **lengths, **alone)

    # Layers of each kind.

    @property
    def attending(self) -> int:
        """Decoder layers with attention."""
        return self.layers if self.attention_layers < 0 else self.attention_layers

    @property
    def with_mlp(self) -> int:
        """Decoder layers with an MLP or experts."""
        return self.layers if self.mlp_layers < 0 else self.mlp_layers

    @property
    def expert_layers(self) -> int:
        """Decoder layers with experts."""
        return max(0, self.with_mlp - self.dense_layers) if self.experts else 0

    # Parameters.

    @property
    def attention_params(self) -> int:
        """Weights and biases of one attention block."""
        if self.latent:
            rank, heads = self.latent, self.heads
            return (
                self.d_model * rank.query_rank
                + (rank.query_rank or self.d_model) * heads * (rank.nope_dim + rank.rope_dim)
                + self.d_model * (rank.kv_rank + rank.rope_dim)
                + rank.kv_rank * heads * (rank.nope_dim + rank.value_dim)
                + heads * rank.value_dim * self.d_model
            )
        wide = self.head_dim * (self.heads + 2 * self.kv_heads)
        biases = wide + self.d_model if self.biases else 0
        return self.d_model * wide + self.heads * self.head_dim * self.d_model + biases

    @property
    def mlp_params(self) -> int:
        """A dense MLP."""
        biases = self.d_ff + self.d_model if self.biases else 0
        return (3 if self.gated else 2) * self.d_model * self.d_ff + biases

    @property
    def expert_params(self) -> int:
        """One routed expert."""
        return (3 if self.expert_gated else 2) * self.routed_width * self.expert_ff

    @property
    def routed_width(self) -> int:
        """Width of the routed experts' input."""
        return self.expert_width or self.d_model

    @property
    def shared_params(self) -> int:
        """The shared experts of a layer, and the projections to and from the routed ones."""
        matrices = 3 if self.expert_gated else 2
        return self.d_model * (matrices * self.shared_width + 2 * self.expert_width)

    @property
    def shared_width(self) -> int:
        """Hidden width of a layer's shared experts together."""
        return self.shared_experts * (self.shared_ff or self.expert_ff)

    @property
    def routed_params(self) -> int:
        """All routed experts of the model, which the expert axis shards."""
        return self.expert_layers * self.experts * self.expert_params

    @property
    def mixer_params(self) -> int:
        """One state-space mixer: projections in and out, and a convolution of width 4."""
        if not self.mixer:
            return 0
        inner = self.mixer.heads * self.mixer.head_dim
        states = 2 * self.mixer.groups * self.mixer.state
        return (
            self.d_model * (2 * inner + states + self.mixer.heads)
            + inner * self.d_model
            + (4 * (inner + states))
        )

    @property
    def norm_params(self) -> int:
        """The two norms of a layer."""
        return (4 if self.biases else 2) * self.d_model

    @property
    def embedding_params(self) -> int:
        """The table of the vocabulary, and of positions where they are learned."""
        return (self.vocab + self.seq_len * self.learned_positions) * self.d_model

    @property
    def head_params(self) -> int:
        """The final norm, the output matrix where it is not the embedding, and
        `extra_head_params`."""
        matrix = 0 if self.tied else self.vocab * self.d_model
        return self.norm_params // 2 + matrix + self.extra_head_params

    @property
    def block_params(self) -> int:
        """All layers: everything between embedding and head."""
        cross = self.attention_params + self.norm_params // 2 if self.encoder_layers else 0
        moe = self.expert_layers
        router = self.d_model * self.experts
        encoder = self.encoder_layers * (self.attention_params + self.mlp_params + self.norm_params)
        return (
            self.attending * self.attention_params
            + self.layers * (self.norm_params + self.extra_params + cross)
            + (self.with_mlp - moe) * self.mlp_params
            + moe * (router + self.shared_params)
            + self.routed_params
            + (self.mixer.layers * self.mixer_params if self.mixer else 0)
            + encoder
        )

    @property
    def num_params(self) -> int:
        """All parameters."""
        final = self.norm_params // 2 if self.encoder_layers else 0
        return self.block_params + self.embedding_params + self.head_params + final

    @property
    def active_params(self) -> int:
        """Active parameters: those that one token uses."""
        idle = self.expert_layers * (self.experts - self.top_k) * self.expert_params
        return self.num_params - idle

    # FLOPs of one token's forward pass; a multiply-add is two.

    @property
    def mean_keys(self) -> float:
        """Keys per query, averaged over layers; half of a causal sequence."""
        full = self.seq_len / 2 if self.causal else float(self.seq_len)
        if not self.window or self.window >= self.seq_len:
            return full
        seen = self.window * (1 - self.window / (2 * self.seq_len)) if self.causal else self.window
        return self.windowed_share * seen + (1 - self.windowed_share) * full

    def core_flops(self, keys: float | None = None) -> float:
        """Core attention of one layer: two matmuls over `keys` keys (default `mean_keys`)."""
        keys = self.mean_keys if keys is None else keys
        if self.latent:
            parts = self.latent.nope_dim + self.latent.rope_dim + self.latent.value_dim
            return 2.0 * self.heads * parts * keys
        return 4.0 * self.heads * self.head_dim * keys

    @property
    def projection_flops(self) -> float:
        """The projections of one attention block."""
        biases = self.head_dim * (self.heads + 2 * self.kv_heads) + self.d_model
        return 2.0 * (self.attention_params - (biases if self.biases and not self.latent else 0))

    @property
    def mlp_flops(self) -> float:
        """A dense MLP."""
        return 2.0 * (3 if self.gated else 2) * self.d_model * self.d_ff

    @property
    def expert_flops(self) -> float:
        """An MoE layer without dropped tokens: router, routed and shared experts."""
        return 2.0 * (
            self.top_k * self.expert_params + self.shared_params + self.d_model * self.experts
        )

    @property
    def mixer_flops(self) -> float:
        """A state-space mixer: its projections, and the scan in chunks of 128 (SSD)."""
        if not self.mixer:
            return 0.0
        inner = self.mixer.heads * self.mixer.head_dim
        return 2.0 * self.mixer_params + inner * (128 + 4.0 * self.mixer.state)

    @property
    def head_flops(self) -> float:
        """The logits of one token."""
        return 2.0 * self.d_model * (self.vocab + self.d_model * self.head_transform)

    @property
    def block_flops(self) -> float:
        """All layers, the encoder's included, for one token of the decoder's sequence."""
        decoder = self.matmul_flops + self.attending * self.core_flops()
        if self.mixer:
            decoder += self.mixer.layers * (self.mixer_flops - 2.0 * self.mixer_params)
        if not self.encoder_layers:
            return decoder
        ratio = self.encoder_seq_len / self.seq_len
        encoder = (
            ratio
            * self.encoder_layers
            * (self.projection_flops + self.core_flops(self.encoder_seq_len) + self.mlp_flops)
        )
        both = self.projection_flops * (1 + ratio) / 2  # q, out of the decoder; k, v of the encoder
        return decoder + encoder + self.layers * (both + self.core_flops(self.encoder_seq_len))

    @property
    def matmul_flops(self) -> float:
        """Matmuls with weights of the decoder's layers, for one token."""
        return (
            self.attending * self.projection_flops
            + (self.with_mlp - self.expert_layers) * self.mlp_flops
            + self.expert_layers * self.expert_flops
            + (self.mixer.layers * 2.0 * self.mixer_params if self.mixer else 0.0)
        )

    @property
    def layer_forward_flops(self) -> float:
        """An average decoder layer, for one token."""
        return self.block_flops / self.layers

    @property
    def flops_per_token(self) -> float:
        """Of training: forward and backward, without recompute. The numerator of MFU."""
        each = self.head_passes + self.extra_predictions
        extra = self.extra_predictions * self.layer_forward_flops
        return 3 * (self.block_flops + extra + each * self.head_flops)


def _expert_sizes(model: ModelConfig) -> dict[str, Any]:
    if not model.num_experts:
        return {}
    return {
        "experts": model.num_experts,
        "top_k": model.experts_per_token,
        "expert_ff": model.expert_d_ff or model.d_ff,
        "shared_experts": int(model.shared_d_ff > 0),
        "shared_ff": model.shared_d_ff,
        "expert_gated": model.gated,
        "dense_layers": model.num_layers - model.num_expert_layers,
    }


def _latent_sizes(model: ModelConfig) -> LatentAttention | None:
    if not model.kv_rank:
        return None
    turned = model.rope_head_dim
    plain, values = model.head_dim - turned, model.value_dim
    return LatentAttention(model.query_rank, model.kv_rank, plain, turned, values)
