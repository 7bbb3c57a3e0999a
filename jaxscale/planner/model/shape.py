"""The sizes of a model, with its parameter and FLOP counts.

Sizes alone describe a model to the planner, so models that this package cannot train yet
(state-space mixers) can be planned and compared.

Letters: D d_model, H heads, K kv_heads, E head_dim, F d_ff.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxscale.sharding.model_trace import (
    UNREAD,
    AttentionCall,
    Matmul,
    ModelWork,
    RoutedExperts,
    StackWork,
)


@dataclass(frozen=True)
class LatentAttention:
    """Ranks and head sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    query_rank: int  # 0: queries are projected from the stream
    kv_rank: int
    nope_dim: int  # of a head's query and key, without rotary positions
    rope_dim: int  # with rotary positions
    value_dim: int


@dataclass(frozen=True)
class StateSpaceMixer:
    """A state-space mixer that replaces attention in some layers (Mamba-2, arXiv 2405.21060)."""

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
    extra_predictions: int = 0  # multi-token prediction (MTP) modules, each a layer and a head pass
    head_passes: int = 1  # more where such modules are among the layers
    encoder_layers: int = 0
    encoder_seq_len: int = 0

    # Layers by type.

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
        """Parameters that one token uses."""
        idle = self.expert_layers * (self.experts - self.top_k) * self.expert_params
        return self.num_params - idle

    @property
    def mean_keys(self) -> float:
        """Keys per query, averaged over layers; half of a causal sequence."""
        full = self.seq_len / 2 if self.causal else float(self.seq_len)
        if not self.window or self.window >= self.seq_len:
            return full
        seen = self.window * (1 - self.window / (2 * self.seq_len)) if self.causal else self.window
        return self.windowed_share * seen + (1 - self.windowed_share) * full

    # Inputs of the cost formulas.

    @property
    def work(self) -> ModelWork:
        """The work of an average layer, and the parameters of the model."""
        stacks = (self._decoder_work,)
        if self.encoder_layers:
            stacks += (self._encoder_work,)
        return ModelWork(
            stacks,
            self.layers,
            self.seq_len,
            self.d_model,
            self.vocab,
            block_params=self.block_params,
            routed_params=self.routed_params,
            embedding_params=self.embedding_params,
            head_params=self.head_params,
            tied=self.tied,
            logit_flops=2.0 * self.head_passes * self.d_model * self.vocab,
            head_passes=self.head_passes,
            transform_flops=2.0 * self.d_model**2 * self.head_transform,
            extra_predictions=self.extra_predictions,
        )

    @property
    def _encoder_work(self) -> StackWork:
        lengths = {"layers": self.encoder_layers, "seq_len": self.encoder_seq_len}
        alone = replace(self, **lengths, causal=False, encoder_layers=0, encoder_seq_len=0)
        return replace(alone._decoder_work, name="encoder")

    @property
    def _decoder_work(self) -> StackWork:
        layers, d, gate = self.layers, self.d_model, 1 + self.gated
        moe, dense = self.expert_layers / layers, (self.with_mlp - self.expert_layers) / layers
        shared, opens = self.shared_width, 1 + self.expert_gated
        heads, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        hidden = self.d_ff * dense + shared * moe
        opened = (opens if self.experts else gate) * hidden
        cross = self.encoder_layers > 0
        sizes = self.experts, self.top_k, self.routed_width, self.expert_ff, self.expert_gated
        experts = RoutedExperts(*sizes, moe, router_width=d if self.expert_width else 0)
        return StackWork(
            "layers",
            layers,
            self.seq_len,
            tuple(self._matmuls()),
            tuple(self._attention()),
            (experts,) * (moe > 0),
            branches=3 if cross else 2,
            sent=(self.attending + self.with_mlp + (self.mixer.layers if self.mixer else 0))
            / layers
            + cross,
            rotated=0 if self.learned_positions else heads + keys,
            opened=opened,
            hidden=hidden,
            read=2 * d + heads + hidden,
            made=2 * d + heads + 2 * keys + opened,
            **self._scan(),
        )

    def _matmuls(self) -> Iterator[Matmul]:
        layers, d, heads = self.layers, self.d_model, self.heads
        attending = self.attending / layers
        projected = ((heads, self.head_dim), *((self.kv_heads, self.head_dim),) * 2)
        back = Matmul(
            heads * self.head_dim, ((d, 1),), "inputs", ("attention_out",), share=attending
        )
        if self.latent:
            rank = self.latent
            down = ((rank.query_rank + rank.kv_rank + rank.rope_dim, 1),)
            queries = ((heads, rank.nope_dim + rank.rope_dim),)
            yield Matmul(d, down, "", ("compressed",), share=attending)
            yield Matmul(rank.query_rank or d, queries, "outputs", ("query",), share=attending)
            opened = ((heads, rank.nope_dim), (heads, rank.value_dim))
            yield Matmul(rank.kv_rank, opened, "outputs", ("key", "value"), share=attending)
            yield replace(back, inputs=heads * rank.value_dim)
        else:
            yield Matmul(d, projected, "outputs", ("query", "key", "value"), share=attending)
            yield back
        if dense := (self.with_mlp - self.expert_layers) / layers:
            yield from _mlp(d, self.d_ff, self.gated, dense)
        if self.expert_layers:
            moe = self.expert_layers / layers
            if self.shared_experts:
                yield from _mlp(d, self.shared_width, self.expert_gated, moe, SHARED_NAMES)
            if self.expert_width:
                yield Matmul(d, ((self.expert_width, 1),), "", share=moe)
                yield Matmul(self.expert_width, ((d, 1),), "", share=moe)
        if self.mixer:
            inner, share = self.mixer.heads * self.mixer.head_dim, self.mixer.layers / layers
            entry = 2 * inner + 2 * self.mixer.groups * self.mixer.state + self.mixer.heads
            yield Matmul(d, ((entry, 1),), "outputs", share=share)
            yield Matmul(inner, ((d, 1),), "inputs", share=share)
        if self.encoder_layers:
            source = self.encoder_seq_len / self.seq_len
            yield Matmul(d, projected[:1], "outputs", ("query",))
            yield Matmul(d, projected[1:], "outputs", ("key", "value"), source)
            yield Matmul(heads * self.head_dim, ((d, 1),), "inputs", ("attention_out",))

    def _attention(self) -> Iterator[AttentionCall]:
        features, values = self.head_dim, self.head_dim
        if self.latent:
            features = self.latent.nope_dim + self.latent.rope_dim
            values = self.latent.value_dim
        keys = self.mean_keys
        length = 2 * keys if self.causal else keys
        kv_heads = self.heads if self.latent else self.kv_heads
        own = AttentionCall(self.heads, kv_heads, features, values, keys, length)
        yield replace(own, share=self.attending / self.layers)
        if source := self.encoder_seq_len:
            yield replace(own, keys=source, length=source, source_len=source)

    def _scan(self) -> dict[str, float]:
        """FLOPs and bytes of state-space mixers: convolution, scan with its 32-bit states, and
        gated norm."""
        if not self.mixer:
            return {}
        inner, share = self.mixer.heads * self.mixer.head_dim, self.mixer.layers / self.layers
        states = 2 * self.mixer.groups * self.mixer.state
        convolution = 4 * (inner + states)
        scan = 2 * (2 * inner + states) + 3 * 4 * inner * self.mixer.state / SCAN_CHUNK
        return {
            "scan_flops": share * inner * (SCAN_CHUNK + 4.0 * self.mixer.state),
            "scan_bytes": share * (convolution + scan + 6 * inner),
        }


MLP_NAMES = ("mlp_up", "mlp_gate", "mlp_down")
SHARED_NAMES = ("shared_up", "shared_gate", "shared_down")
SCAN_CHUNK = 128
"""Chunk length of a state-space scan, whose states are written (Mamba-2's SSD kernels)."""


def _mlp(
    width: int, hidden: int, gated: bool, share: float, names: tuple[str, ...] = MLP_NAMES
) -> Iterator[Matmul]:
    """The matmuls of an MLP."""
    count = 1 + gated
    outputs, saved_as = ((hidden, 1),) * count, MLP_NAMES[:count]
    yield Matmul(width, outputs, "outputs", names[:count], share=share, saved_as=saved_as)
    yield Matmul(hidden, ((width, 1),), "inputs", names[2:], share=share, saved_as=(UNREAD,))
