"""What is alive within one layer's backward pass: the part of a step's memory that depends on the
compiler."""

from dataclasses import dataclass

from jaxscale.config import Config
from jaxscale.layout import remat_names
from jaxscale.planner.arrays import Ints, most, where
from jaxscale.planner.kept import by_names
from jaxscale.planner.walk import Walk

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


TRANSIENTS = {
    # Counted in the buffer assignments of XLA's CPU back end (jaxlib 0.12, float32). It turns round
    # what a product reads by columns, copies what it reads out of the stash, and makes the zeros
    # that a loop starts from long before.
    ("cpu", "llama"): Transients(5, 4, 4, 5, remade=2, ring=6, logits=3, zeros=2),
    ("cpu", "gpt"): Transients(5, 4, 4, 3, remade=4, ring=6, logits=3, zeros=2),
    # Not measured yet: as on the CPU.
    ("gpu", "llama"): Transients(5, 4, 4, 5, remade=2, ring=6, logits=3, zeros=2),
    ("gpu", "gpt"): Transients(5, 4, 4, 3, remade=4, ring=6, logits=3, zeros=2),
    ("tpu", "llama"): Transients(5, 4, 4, 5, remade=2, ring=6, logits=3, zeros=2),
    ("tpu", "gpt"): Transients(5, 4, 4, 3, remade=4, ring=6, logits=3, zeros=2),
}
WIDE = {"stream": 2, "queries": 1, "keys": 2}
"""Of the transients, those that are float32 whatever the compute type: in norms, and where
attention sums."""


def hidden_bytes(config: Config, walk: Walk, transients: Transients) -> Ints:
    """Of the working set, what is as wide as the MLP."""
    model, names = config.model, remat_names(config.layout.remat)
    products = ("mlp_up", "mlp_gate") if model.family == "llama" else ("mlp_up",)
    arrays = transients.hidden + sum(name not in names for name in products)
    return walk.compute * walk.tokens * arrays * model.d_ff // config.layout.tensor


def working_set_bytes(config: Config, walk: Walk, transients: Transients) -> Ints:
    """Activations of a micro-batch and their gradients."""
    model, layout = config.model, config.layout
    # With "full", a pipeline makes everything again in operations of their own.
    named = by_names(layout.remat) & ((layout.pipeline == 1) | (layout.remat != "full"))
    width, wider = walk.compute, max(4 - walk.compute, 0)
    sizes = {
        "stream": model.d_model, "queries": model.num_heads * model.head_dim,
        "keys": model.num_kv_heads * model.head_dim,
    }  # fmt: skip
    arrays = {
        "stream": transients.stream + transients.remade * named, "queries": transients.queries,
        "keys": transients.keys + transients.ring * (layout.context > 1),
    }  # fmt: skip
    each = sum(size * (arrays[name] * width + WIDE[name] * wider) for name, size in sizes.items())
    # Over tensor whole in time: what the MLP reads, its gradient, and what attention reads.
    each = each + (2 + named) * width * model.d_model * (layout.tensor - 1)
    return (
        walk.tokens * each // layout.tensor
        + hidden_bytes(config, walk, transients)
        + _scores(config)
    )


def _scores(config: Config) -> Ints:
    """A block of attention's scores (`ops.blocks.block_size`)."""
    layout = config.layout
    sequences = config.data.global_batch_size // (layout.batch_shards * layout.microbatches)
    heads = sequences * config.model.num_heads // layout.tensor
    time = config.data.seq_len // where(layout.context > 1, 2 * layout.context, 1)
    block: Ints = 64
    for size in (128, 256, 512):
        block = where(heads * size**2 <= BLOCK_SCORES, size, block)
    return 4 * heads * -(most(-block, -time) ** 2)
