"""Saved activations of a layer, by published formulas (after arXiv 2205.05198)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.model.shape import ModelShape

Floats = Any  # a float, or float [N]


class SavedBytes(NamedTuple):
    """Bytes per token that a layer saves, by how tensor ranks split them."""

    stream: Floats  # the residual stream: tensor ranks split its tokens
    inner: Floats  # features of attention and MLP
    whole: Floats = 0.0  # rows of experts, whole on each tensor rank


def layer_bytes(shape: ModelShape, parallelism: Parallelism, remat: str | None = None) -> Floats:
    """Saved activations of one layer and micro-batch."""
    saved, t = saved_bytes(shape, parallelism, remat), np.asarray(parallelism.tensor, float)
    tokens = np.asarray(parallelism.microbatch, float) * shape.seq_len / parallelism.context
    return float_or_array(tokens * (saved.stream / t + saved.inner / t + saved.whole))


def saved_bytes(
    shape: ModelShape, parallelism: Parallelism, remat: str | None = None
) -> SavedBytes:
    """Bytes saved under a remat policy in an average layer, the encoder's spread over the
    decoder's."""
    remat, d = remat or parallelism.remat, shape.d_model
    both = layers_of_stacks(shape)
    if remat == "full" or remat.startswith("offload:"):
        return SavedBytes(both * 2 * d, 0.0)
    if remat.startswith("save:"):
        stream, inner = _named_bytes(shape, parallelism, remat.partition(":")[2].split(","))
        return SavedBytes(both * stream, both * inner)
    if shape.biases:  # LayerNorm, GELU
        return SavedBytes(8 * d, 8 * d + 4 * shape.d_ff)
    # Matmul inputs in 8 bits for low-precision matmuls; the activation's input stays in 16.
    narrow = 2.0 if parallelism.matmul == "bfloat16" else 1.0
    wide = (4 if shape.gated else 2) + narrow
    mixed = shape.expert_layers / shape.layers * shape.top_k * parallelism.imbalance
    stream = (4 + 2 * narrow) * d * both
    inner = (_mixing_bytes(shape) + wide * mlp_width(shape, parallelism)) * both
    if shape.encoder_layers:  # cross attention: keys and values are the encoder's
        keys = 4 * shape.head_dim * shape.kv_heads * shape.encoder_seq_len / shape.seq_len
        stream = stream + (2 + narrow) * d
        inner = inner + shape.heads * (4 * shape.head_dim + 4) + keys
    return SavedBytes(stream, inner, mixed * (2 + narrow) * shape.routed_width * both)


def layers_of_stacks(shape: ModelShape) -> float:
    """Layers of encoder and decoder over the decoder's, weighted by tokens."""
    source = shape.encoder_seq_len / shape.seq_len
    return 1 + shape.encoder_layers / shape.layers * source


def mlp_width(shape: ModelShape, parallelism: Parallelism) -> Floats:
    """Hidden features of a token in the MLP and the experts of an average layer."""
    moe = shape.expert_layers / shape.layers
    dense = (shape.with_mlp - shape.expert_layers) / shape.layers
    routed = shape.top_k * parallelism.imbalance * shape.expert_ff
    return shape.d_ff * dense + (shape.shared_width + routed) * moe


def _named_bytes(
    shape: ModelShape, parallelism: Parallelism, names: Sequence[str]
) -> tuple[float, Floats]:
    """Saved bytes of a policy that names tensors: the layer's input and its residual addition's
    operands; and the named tensors, which tensor ranks split."""
    keys = values = shape.kv_heads * shape.head_dim
    queries = mixed = shape.heads * shape.head_dim
    if rank := shape.latent:
        queries = keys = shape.heads * (rank.nope_dim + rank.rope_dim)
        mixed = values = shape.heads * rank.value_dim
    width = mlp_width(shape, parallelism)
    split = {
        "query": queries,
        "key": keys,
        "value": values,
        "attention": mixed + 2 * shape.heads,
        "mlp_up": width,
        "mlp_gate": width * shape.gated,
    }
    whole = shape.d_model * (1 + ("attention_out" in names))
    return 2.0 * whole, 2.0 * sum(size for name, size in split.items() if name in names)


def _mixing_bytes(shape: ModelShape) -> float:
    """Saved bytes per token of attention in an average layer (queries, keys, values, output,
    log-sum-exp), or of a state-space mixer (outputs of projections, convolution and scan)."""
    elements = shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    if shape.latent:
        rank = shape.latent
        elements = 2 * shape.heads * (rank.nope_dim + rank.rope_dim + rank.value_dim)
        elements += rank.query_rank + rank.kv_rank + rank.rope_dim
    kept = shape.attending * (2 * elements + 4 * shape.heads)
    if shape.mixer:
        inner = shape.mixer.heads * shape.mixer.head_dim
        states = 2 * shape.mixer.groups * shape.mixer.state
        kept += shape.mixer.layers * 2 * (5 * inner + 2 * states)
    return kept / shape.layers


def float_or_array(value: Floats) -> Floats:
    return float(value) if np.ndim(value) == 0 else value
