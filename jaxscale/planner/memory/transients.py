"""What is alive within one layer's backward pass: the part of a step's memory that depends on the
compiler."""

from dataclasses import dataclass
from typing import Any

from jaxscale.config import Config
from jaxscale.layout import by_names, kept_passes, remat_names
from jaxscale.planner.memory.layer_loop import LayerLoop, elements, mlp_weights
from jaxscale.planner.model.param_shapes import Ints, maximum, select

BLOCK_SCORES = 2**19  # of `ops.blocks`


@dataclass(frozen=True)
class Transients:
    """Arrays of a micro-batch that are alive while a layer goes backward, by their width: where
    they are the most, at the activation of the MLP, while all that attention needs waits."""

    stream: int  # [tokens, D]
    queries: int  # [tokens, Q]
    keys: int  # [tokens, K]
    hidden: int  # [tokens, F]
    remade: int  # more of the stream, where a policy by names makes the norms again
    ring: int  # more of the keys, where several devices share a sequence
    logits: int  # float32 [chunk, vocabulary], in the head
    zeros: int  # float32 of queries and of keys: attention beside the loop sums into them
    sums: int = 0  # float32 [tokens, heads, LANES]: what a kernel leaves of attention's scores
    products: int = 2  # at most so many more of hidden, where the MLP's products are made again
    whole: int = 2  # of the stream, whole in time, where ranks of tensor share it out
    apart: int = 0  # more of the stream there: whole ones are no longer made again in products
    wide: tuple[int, int, int] = (2, 1, 2)  # of stream, queries, keys: float32, whatever computes
    late: bool = False  # embedding's and head's gradients wait, whole, while layers are at work
    ahead: bool = False  # weights of all layers are converted before the loops over them
    carries: bool = False  # gradients of a layer wait in the compute type for the next layer's turn
    copies: bool = False  # what a gather replaces at a step's end is copied at its start
    tile: int = 1  # rows of a shard that collectives take together


LANES = 128  # of a TPU
_TPU: dict[str, Any] = {
    "remade": 0,
    "ring": 6,
    "logits": 3,
    "zeros": 0,
    "sums": 1,
    "wide": (0, 0, 0),
    "whole": 3,
    "apart": 4,
    "late": True,
    "ahead": True,
    "carries": True,
    "copies": True,
    "tile": 8,
}
_GPU: dict[str, Any] = {"ring": 6, "logits": 3, "zeros": 0, "products": 1, "whole": 7, "late": True}
TRANSIENTS = {
    # Counted in the buffer assignments of XLA's CPU back end (jaxlib 0.12, float32). It turns round
    # what a product reads by columns, copies what it reads out of the stash, and makes the zeros
    # that a loop starts from long before.
    ("cpu", "llama"): Transients(5, 4, 4, 5, remade=2, ring=6, logits=3, zeros=2),
    ("cpu", "gpt"): Transients(5, 4, 4, 3, remade=4, ring=6, logits=3, zeros=2),
    # Counted in steps of llama3_8b with 4 layers compiled for 8 H200 (jaxlib 0.12), by seven
    # layouts: 1 and 4 sequences, remat, tensor, layered. Attention is a kernel that keeps its sums,
    # and the scheduler starts to reduce the head's gradient only below the layers.
    ("gpu", "llama"): Transients(5, 4, 4, 3, remade=2, **_GPU),
    ("gpu", "gpt"): Transients(5, 4, 4, 2, remade=4, **_GPU),
    # Counted in the buffer assignments of the TPU's compiler (libtpu 0.0.51, bfloat16), steps of 4
    # layers on v5p:4x4x4: llama2_7b with 4 sequences, gpt_175b with 1 and, 2,048 wide, with 8, and
    # llama2_70b over 4 ranks of tensor. There, and with stage 1 on fewer chips and in pipelines,
    # the rest was seen, too.
    ("tpu", "llama"): Transients(3, 2, 2, 2, **_TPU),
    ("tpu", "gpt"): Transients(3, 2, 2, 1, **_TPU),
}


def hidden_bytes(config: Config, loop: LayerLoop, transients: Transients) -> Ints:
    """Of the working set, what is as wide as the MLP."""
    model, names = config.model, remat_names(config.layout.remat)
    products = ("mlp_up", "mlp_gate") if model.family == "llama" else ("mlp_up",)
    again = sum(name not in names for name in products)
    arrays = transients.hidden + min(again, transients.products)
    return loop.compute * loop.tokens * arrays * model.d_ff // config.layout.tensor


def working_set_bytes(config: Config, loop: LayerLoop, transients: Transients) -> Ints:
    """Activations of a micro-batch and their gradients."""
    model, layout = config.model, config.layout
    # What a pipeline makes again it may make in operations of their own.
    by_table = kept_passes(layout.remat) is not None
    named = by_names(layout.remat) & ((layout.pipeline == 1) | (not by_table))
    width, wider = loop.compute, max(4 - loop.compute, 0)
    sizes = {
        "stream": model.d_model,
        "queries": model.num_heads * model.head_dim,
        "keys": model.num_kv_heads * model.head_dim,
    }
    arrays = {
        "stream": transients.stream
        + transients.remade * named
        + transients.apart * (layout.tensor > 1),
        "queries": transients.queries,
        "keys": transients.keys + transients.ring * (layout.context > 1),
    }
    wide = dict(zip(sizes, transients.wide))
    each = sum(size * (arrays[name] * width + wide[name] * wider) for name, size in sizes.items())
    each = each + transients.sums * 4 * LANES * model.num_heads
    # What the MLP reads, its gradient, and what attention reads; a GPU has them turned round, too.
    each = each + (transients.whole + named) * width * model.d_model * (layout.tensor - 1)
    return (
        loop.tokens * each // layout.tensor
        + hidden_bytes(config, loop, transients)
        + _scores(config)
    )


def _scores(config: Config) -> Ints:
    """A block of attention's scores (`ops.blocks.block_size`)."""
    layout = config.layout
    sequences = config.data.global_batch_size // (layout.batch_shards * layout.microbatches)
    heads = sequences * config.model.num_heads // layout.tensor
    time = config.data.seq_len // select(layout.context > 1, 2 * layout.context, 1)
    block: Ints = 64
    for size in (128, 256, 512):
        block = select(heads * size**2 <= BLOCK_SCORES, size, block)
    return 4 * heads * maximum(-block, -time) ** 2  # of the smaller one


def ragged(config: Config, transients: Transients) -> Any:
    """Whether shards end within a tile: a gather then pairs rows with empty ones, and a reduction
    leaves whole gradients. As in gpt_175b of 4 layers on v5p:8x8x16, 12 rows a chip."""
    return config.model.d_model % (transients.tile * config.layout.fsdp) != 0


def carried_bytes(config: Config, loop: LayerLoop, transients: Transients) -> Ints:
    """Gradients of the layer before, while a layer goes backward: as the loop carries them, and as
    they are reduced."""
    carries = _carries(config, loop, transients)
    return select(carries, (loop.compute + loop.accumulated) * loop.weights)


def walk_end_bytes(config: Config, loop: LayerLoop, transients: Transients) -> Ints:
    """Gradients when the first layer is done: with nothing left to compute, reductions wait for
    each other."""
    outer, embed = elements(config, "embed head"), elements(config, "embed")
    layers = select(loop.gathers, 2, 1)
    # Those of attention are never ragged, for heads lie apart.
    results = select(ragged(config, transients), outer + layers * mlp_weights(config))
    # Those of the embedding also as they come. And what the loop carried leaves places in which a
    # whole matrix does not fit: 8 GB of gpt_175b's.
    narrow = embed + select(loop.gathers, 2 * loop.weights)
    wide = layers * loop.weights + outer + results
    return select(
        _carries(config, loop, transients), loop.accumulated * wide + loop.compute * narrow
    )


def _carries(config: Config, loop: LayerLoop, transients: Transients) -> Any:
    return transients.carries & loop.reduces & (loop.group == 1) & (config.layout.pipeline == 1)
