"""Temporaries of one layer's backward pass, which depend on the compiler."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.ops.sizes import BLOCK_SCORES, LANES
from jaxscale.planner.memory.experts import row_bytes
from jaxscale.planner.memory.layer_loop import (
    LayerLoop,
)
from jaxscale.planner.memory.saved_values import layer_saved_bytes, recomputed_bytes
from jaxscale.sharding.model_trace import Ints, maximum, select


@dataclass(frozen=True)
class Transients:
    """Numbers of a micro-batch's arrays live at the peak of a layer's backward pass, by width: at
    the MLP's activation, with everything saved for attention."""

    stream: int  # [tokens, D]
    queries: int  # [tokens, Q]
    keys: int  # [tokens, K]
    hidden: int  # [tokens, F]
    remade: int  # more of stream, where a policy by names recomputes the norms
    ring: int  # more of keys, with context parallelism
    logits: int  # float32 [chunk, vocabulary], in the head, on a rank that has part of the columns
    zeros: int  # float32 accumulators of queries and keys of attention outside the loop
    sums: int = 0  # float32 [tokens, heads, LANES]: log-sum-exp of an attention kernel
    matmuls: int = 2  # at most so many more of hidden, where the MLP's matmuls are recomputed
    whole: int = 2  # of stream, gathered over tensor
    with_tensor: int = 0  # more of stream: gathered ones are not recomputed inside matmuls
    wide: tuple[int, int, int] = (2, 1, 2)  # of stream, queries, keys: always float32
    late: bool = False  # whole gradients of embedding and head are live during the layers
    ahead: bool = False  # weights of all layers are cast before the loops
    carries: bool = False  # a layer's gradients are carried to the next iteration
    on_use: bool = False  # experts are gathered and reduced in their own layer, and not carried
    tile: int = 1  # rows of a tile in collectives
    queued: bool = False  # a layer's gradients are reduced while the next layer computes
    in_place: bool = False  # whole gradients are summed and reduced where they are
    piped: int = 0  # fewer of hidden in a pipeline whose weights are whole on a rank
    looks_up: bool = False  # all columns on a rank: targets are looked up, one array of logits less
    grouped: str = "blocks"  # the matmul of experts
    pruned: int = 8  # bytes a weight of the layers, in an update that prunes; TPU: not compared
    live: float = 1.0  # per byte that `tracing.liveness` finds in a custom model's layer
    copied: float = 0.0  # of its saved activations, in the loop
    score_blocks: float = 1.0  # of its blocks of attention scores
    attended: float = 0.0  # of its queries, keys and values, as the attention loops keep them
    # At the attention kernel with a position bias: of stream, queries and keys, hidden.
    biased: tuple[float, float, float] = (0, 0, 0)


# `live` and the fields after it, for custom models, are fitted to 44 steps of eight blocks compiled
# for CPUs and H200 (half of them in `tests/planner/memory/test_custom_models.py`), to three for
# v5p.
_TPU: dict[str, Any] = {
    "remade": 0,
    "ring": 6,
    "logits": 3,
    "zeros": 0,
    "sums": 1,
    "wide": (0, 0, 0),
    "whole": 7,
    "with_tensor": 4,
    "late": True,
    "ahead": True,
    "carries": True,
    "on_use": True,
    "tile": 8,
    "grouped": "ragged_dot",
    "live": 0.9,
}
_GPU: dict[str, Any] = {"ring": 6, "logits": 3, "zeros": 0, "matmuls": 1, "whole": 7, "late": True}
# Counted in steps of mT5 (mt5_xxl on 64 A100, mt5_base): with few tokens weights are most of the
# memory.
_GPU |= {"queued": True, "in_place": True, "live": 0.9, "grouped": "kernels", "pruned": 7}
HEADS = ("queries", "keys")
BIASED = (18, 9.2, 2.5)
"""Slopes fitted to six encoders of 4 layers over d_model, heads, head_dim and d_ff (CPU,
float32)."""
_CPU: dict[str, Any] = {"ring": 6, "logits": 3, "zeros": 2, "biased": BIASED}
_CPU |= {"piped": 1, "looks_up": True, "live": 1.2, "copied": 0.4}
_CPU |= {"score_blocks": 4.5, "attended": 1.75, "pruned": 12}
# By type of MLP: "llama" is gated, "gpt" is not.
TRANSIENTS = {
    # Counted in the buffer assignments of XLA's CPU back end (jaxlib 0.12, float32). It
    # transposes matmul operands, copies what it reads from the stash, and allocates the initial
    # zeros of a loop early.
    ("cpu", "llama"): Transients(5, 4, 4, 5, remade=2, **_CPU),
    ("cpu", "gpt"): Transients(5, 4, 4, 3, remade=4, **_CPU),
    # Counted in steps of llama3_8b with 4 layers compiled for 8 H200 (jaxlib 0.12), in seven
    # layouts: 1 and 4 sequences, remat, tensor, layered. The attention kernel saves its
    # log-sum-exp, and the head's gradient is reduced only after the layers.
    ("gpu", "llama"): Transients(5, 4, 4, 3, remade=2, **_GPU),
    ("gpu", "gpt"): Transients(5, 4, 4, 2, remade=4, **_GPU),
    # Counted in the buffer assignments of the TPU's compiler (libtpu 0.0.51, bfloat16), steps of 4
    # layers on v5p:4x4x4: llama2_7b with 4 sequences, gpt_175b with 1 and, 2,048 wide, with 8, and
    # llama2_70b over 4 ranks of tensor; whole streams in all its layers over 8. The flags were
    # observed there, with stage 1 on fewer chips, and in pipelines.
    ("tpu", "llama"): Transients(3, 2, 2, 2, **_TPU),
    ("tpu", "gpt"): Transients(3, 2, 2, 1, **_TPU),
}


def hidden_bytes(loop: LayerLoop, transients: Transients) -> Ints:
    """Part of the working set as wide as the MLP."""
    if loop.is_custom:
        return 0
    model, layout = loop.model, loop.layout
    matmuls = ("mlp_up", "mlp_gate") if model.gated else ("mlp_up",)
    recomputed = sum(name not in layout.remat_policy.names for name in matmuls)
    arrays = transients.hidden + min(recomputed, transients.matmuls)
    arrays = arrays - transients.piped * ((layout.pipeline > 1) & (layout.tensor == 1))
    wide = model.shared_d_ff if loop.has_experts else model.d_ff
    return loop.compute * loop.tokens * arrays * wide // layout.tensor_columns


def working_set_bytes(loop: LayerLoop, transients: Transients) -> Ints:
    """Activations of a micro-batch and their gradients. In a period of several layers, of the
    largest layer, with the recomputed values of the layers before it."""
    if loop.model.side_width:  # the peak is in a forward pass, whose kernels save nothing
        return live_bytes(loop, transients)
    if loop.is_custom:
        # The last layer's, outside the loop, are not in the stash.
        share = select(loop.last_outside, 1.0, select(loop.layout.pipeline == 1, transients.copied))
        copied = share * layer_saved_bytes(loop)
        more = copied + transients.score_blocks * _scores(loop)
        more = more + _spread_streams(loop, transients)
        return live_bytes(loop, transients) + np.asarray(more).astype(int)[()]
    found, before = [], 0
    recomputed = recomputed_bytes(loop) // len(loop.period)
    for one in loop.layers_of_period:
        found.append(_layer_working_set(one, transients) + before)
        before = before + recomputed
    return maximum(*found)


def _spread_streams(loop: LayerLoop, transients: Transients) -> Ints:
    """Bytes of a custom model's attention blocks, and of streams whole on each tensor rank."""
    layout = loop.layout
    attended = loop.saved("full").attended
    whole = (transients.whole + 1) * loop.width * (layout.tensor_columns - 1)
    each = transients.attended * attended + whole
    return loop.compute * loop.tokens * each // layout.tensor


def live_bytes(loop: LayerLoop, transients: Transients, *, forward: bool = False) -> Ints:
    """Live bytes of a pass over a custom model's layer for a micro-batch, by liveness analysis."""

    def of(piped: bool) -> Ints:
        saved = loop.saved(loop.layout.remat, piped=piped)
        each = round(transients.live * (saved.live_forward if forward else saved.live))
        return loop.tokens * each // loop.length // loop.layout.tensor

    piped = np.asarray(loop.layout.pipeline) > 1
    if not piped.any():
        return of(False)
    return of(True) if piped.all() else select(piped, of(True), of(False))


def _layer_working_set(loop: LayerLoop, transients: Transients) -> Ints:
    model, layout = loop.model, loop.layout
    # A pipeline may recompute in R operations instead.
    by_table = layout.remat_policy.kept_passes is not None
    named = layout.remat_policy.by_names & ((layout.pipeline == 1) | (not by_table))
    width, wider = loop.compute, max(4 - loop.compute, 0)
    sizes = {
        "stream": model.d_model,
        # Tensor rows repeat these.
        "queries": model.num_heads * model.head_dim * layout.tensor_rows,
        "keys": model.num_kv_heads * model.head_dim * layout.tensor_rows,
    }
    arrays = {
        "stream": transients.stream
        + transients.remade * named
        + transients.with_tensor * (layout.tensor > 1),
        "queries": transients.queries,
        "keys": transients.keys + transients.ring * (layout.context > 1),
    }
    wide = dict(zip(sizes, transients.wide))
    each = sum(size * (arrays[name] * width + wide[name] * wider) for name, size in sizes.items())
    each = each + transients.sums * 4 * LANES * model.num_heads * layout.tensor_rows
    # The input of the MLP, its gradient, and the input of attention; on a GPU also transposed.
    each = each + (transients.whole + named) * width * model.d_model * (layout.tensor_columns - 1)
    hidden = hidden_bytes(loop, transients)
    if transients.in_place and model.relative_bias != "none":
        # Counted in steps of mT5 with `blockwise`; with `flash` mt5_xxl has 1.2 % less. Attention
        # starts after the MLP, during which only its queries, keys, values and output are live.
        ours = sum(sizes[name] * (arrays[name] * width + wide[name] * wider) for name in HEADS)
        ours = ours - 2 * width * sum(sizes[name] for name in HEADS)
        hidden = maximum(hidden - loop.tokens * ours // layout.tensor, 0)
    return (
        loop.tokens * each // layout.tensor
        + cross_bytes(loop)
        + hidden
        + _scores(loop)
        + _rows(loop, transients)
    )


def _rows(loop: LayerLoop, transients: Transients) -> Ints:
    """Bytes of the rows of experts."""
    if not loop.has_experts:
        return 0
    head = loop.accumulated * loop.trained.head_elements()
    return row_bytes(loop, head, transients.grouped)


def biased_attention_bytes(loop: LayerLoop, transients: Transients) -> Ints:
    """Activations of a micro-batch and their gradients at the attention kernel, where a position
    bias makes it keep more blocks than the MLP has hidden values."""
    model, layout = loop.model, loop.layout
    stream, heads, hidden = transients.biased
    if model.relative_bias == "none" or not stream:
        return 0
    keys = model.num_kv_heads * model.head_dim
    wide = model.num_heads * model.head_dim + keys
    each = int(stream * model.d_model + heads * wide + hidden * model.d_ff)
    # As in the working set: the ring's keys, and the gathered input of attention.
    each = each + transients.ring * keys * (layout.context > 1)
    each = each + transients.whole * model.d_model * (layout.tensor_columns - 1)
    return loop.compute * loop.tokens * each // layout.tensor + cross_bytes(loop)


def cross_bytes(loop: LayerLoop) -> Ints:
    """Bytes of cross attention in a layer's working set."""
    if loop.part != "decoder":
        return 0
    model, width = loop.model, loop.compute
    here = 2 * model.d_model + 2 * model.num_heads * model.head_dim
    there = 2 * model.num_kv_heads * model.head_dim
    return width * (loop.tokens * here + loop.source * there) // loop.layout.tensor


def _scores(loop: LayerLoop) -> Ints:
    """A block of attention scores (`ops.attention.blocks.block_size`)."""
    layout = loop.layout
    heads = loop.sequences * loop.heads // layout.tensor_columns
    time = loop.length // select(layout.context > 1, 2 * layout.context, 1)
    block: Ints = 64
    for size in (128, 256, 512):
        block = select(heads * size**2 <= BLOCK_SCORES, size, block)
    return 4 * heads * maximum(-block, -time) ** 2  # the smaller of the two


def ragged(loop: LayerLoop, transients: Transients) -> Any:
    """Whether shards are not whole tiles: an all-gather then pads rows, and a reduce-scatter
    materialises whole gradients. Observed for gpt_175b with 4 layers on v5p:8x8x16, 12 rows a
    chip."""
    return loop.width % (transients.tile * loop.layout.zero_ranks) != 0


def carried_bytes(loop: LayerLoop, transients: Transients) -> Ints:
    """Gradients of the previous layer during a layer's backward pass: as the loop carries them, and
    as they are reduced. Where rows of experts dominate, without a capacity, the peak comes later:
    counted in steps of Mixtral, Qwen3-MoE and DeepSeek-V3 for v5p."""
    if loop.has_experts and not loop.model.capacity_factor:
        return 0
    carries = _carries(loop, transients)
    widened = select(loop.early_layers, 0, loop.accumulated)
    on_use = transients.on_use * loop.over_context(loop.trained.expert_elements(loop.part))
    return select(carries, (loop.compute + widened) * (loop.unreduced - on_use))


def end_of_backward_bytes(loop: LayerLoop, transients: Transients) -> Ints:
    """Gradients at the end of the loop: with no compute left to overlap, reductions queue up."""
    embed = loop.over_context(loop.trained.elements("embed"))
    outer = embed + select(loop.early, 0, loop.over_context(loop.trained.elements("head")))
    layers = select(loop.gathers, 2, 1)
    # Attention's are never ragged: heads are a separate dimension.
    mlp = loop.trained.mlp_elements(loop.part)
    results = select(ragged(loop, transients), outer + layers * mlp)
    # The embedding's also before the cast. And the loop's carry leaves fragments too small for a
    # whole matrix: 8 GB for gpt_175b.
    queued = loop.gradients - transients.on_use * loop.trained.expert_elements(loop.part)
    narrow = embed + select(loop.gathers, 2 * queued)
    # Gradients of the two matrices out of the stream, before the compiler reduces over context.
    gated = loop.is_custom or loop.model.gated
    matrices = mlp * (1 + gated) // (2 + gated)
    crossing = select(loop.unreduced != loop.gradients, matrices)
    wide = layers * loop.over_context(queued) + crossing + outer + results
    return select(_carries(loop, transients), loop.accumulated * wide + loop.compute * narrow)


def _carries(loop: LayerLoop, transients: Transients) -> Any:
    return transients.carries & loop.reduces & (loop.group == 1) & (loop.layout.pipeline == 1)
