"""Saved activations of a layer, by published formulas.

A layer with dropout and an ungated MLP: Korthikanti et al. (arXiv 2205.05198), whose tables 2 and 3
are reproduced to the digit.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.model.shape import ModelShape

Floats = Any  # a float, or float [N]


def layer_bytes(shape: ModelShape, parallelism: Parallelism, remat: str | None = None) -> Floats:
    """Saved activations of one layer and micro-batch.

    >>> gpt = ModelShape(48, 6144, 64, 64, 96, 24576, False, 51200, True, 2048, biases=True)
    >>> from jaxscale.planner.model.parallelism import TrainerTraits
    >>> traits = TrainerTraits(sequence_parallel=False, attention="written", dropout=True)
    >>> megatron = Parallelism(tensor=8, microbatch=4, traits=traits)
    >>> round(48 * layer_bytes(gpt, megatron) / 2**30, 2)
    59.25
    """
    traits, remat = parallelism.traits, remat or parallelism.remat
    t = np.asarray(parallelism.tensor, float)
    tokens = np.asarray(parallelism.microbatch, float) * shape.seq_len / parallelism.context
    streams = t if traits.sequence_parallel else np.ones(())
    d = shape.d_model
    # The encoder's layers are spread over the decoder's.
    source = shape.encoder_seq_len / shape.seq_len
    both = 1 + shape.encoder_layers / shape.layers * source
    if remat == "full" or remat.startswith("offload:"):
        return float_or_array(tokens * both * 2 * d / streams)
    if remat.startswith("save:"):
        names = remat.partition(":")[2].split(",")
        return float_or_array(tokens * both * _named_bytes(shape, parallelism, names, streams))
    scores = 0.0
    if traits.attention == "written" and remat == "none":
        scores = 5.0 * shape.heads * shape.seq_len / t
    if shape.biases:  # LayerNorm, dropout, GELU
        wide = 8 * d + 4 * shape.d_ff  # 24 d where d_ff = 4 d
        stream = (10 if traits.dropout else 8) * d  # with the two dropout masks
        return float_or_array(tokens * (stream / streams + wide / t + scores))
    moe = shape.expert_layers / shape.layers
    dense = (shape.with_mlp - shape.expert_layers) / shape.layers
    # Matmul inputs in 8 bits for low-precision matmuls; the activation's input stays in 16.
    narrow = 2.0 if parallelism.matmul == "bfloat16" else 1.0
    wide = (4 if shape.gated else 2) + narrow + 2 * (shape.gated and not traits.fused)
    shared = shape.shared_width
    # Tensor ranks split the hidden dimension of experts, or fold whole experts.
    mixed = moe * shape.top_k * parallelism.imbalance
    mlp = wide * (shape.d_ff * dense + shared * moe + shape.expert_ff * mixed)
    routed = mixed * (2 + narrow) * shape.routed_width / (t if traits.folded_experts else 1.0)
    each = (
        (4 + 2 * narrow) * d / streams + (_mixing_bytes(shape) + mlp) / t + routed + scores
    ) * both
    if shape.encoder_layers:  # cross attention: keys and values are the encoder's
        queries = shape.heads * (4 * shape.head_dim + 4)
        keys = 4 * shape.head_dim * shape.kv_heads * source
        each = each + (2 + narrow) * d / streams + (queries + keys) / t
    return float_or_array(tokens * each)


def _named_bytes(
    shape: ModelShape, parallelism: Parallelism, names: Sequence[str], streams: Floats
) -> Floats:
    """Saved bytes per token of a policy that names tensors: those tensors and the layer's input."""
    t, moe = np.asarray(parallelism.tensor, float), shape.expert_layers / shape.layers
    keys = values = shape.kv_heads * shape.head_dim
    queries = mixed = shape.heads * shape.head_dim
    if rank := shape.latent:
        queries = keys = shape.heads * (rank.nope_dim + rank.rope_dim)
        mixed = values = shape.heads * rank.value_dim
    dense = (shape.with_mlp - shape.expert_layers) / shape.layers
    routed = shape.top_k * parallelism.imbalance * shape.expert_ff
    width = shape.d_ff * dense + (shape.shared_width + routed) * moe
    split = {
        "query": queries,
        "key": keys,
        "value": values,
        "attention": mixed + 2 * shape.heads,
        "mlp_up": width,
        "mlp_gate": width * shape.gated,
    }
    whole = shape.d_model * (1 + ("attention_out" in names))
    return 2.0 * (whole / streams + sum(size for name, size in split.items() if name in names) / t)


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
