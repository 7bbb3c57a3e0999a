"""The head on all ranks of a pipeline at once, each with a slice of the vocabulary (vocabulary
parallelism, arXiv 2411.05288).

At the start of a tick with a backward pass of the last stage, every rank gets that stage's output,
computes the loss and the gradients of its slice, and the rank of the stage gets the sum of the
gradients of the output in its place in the inbox. Which micro-batch that is, and on which rank, is
the same on all ranks (`buffer_slots.head_columns`), so that each of them reaches the collectives.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.models.protocol import Stream, head_gradients, head_params
from jaxscale.ops.array_stack import add, at, put
from jaxscale.pipeline.buffer_slots import HEAD_COLUMNS, HEAD_RANK
from jaxscale.pipeline.passes.chunk import rewrite_message
from jaxscale.pipeline.rank import Rank, Row, State, when
from jaxscale.pipeline.stages import HEAD
from jaxscale.sharding.resolve import automatic_axes, automatic_part, resolve
from jaxscale.sharding.rules import ACTIVATIONS
from jaxscale.sharding.specs import manually

Tree = Any


def run_sliced_heads(rank: Rank, state: State, cells: Row) -> State:
    """The heads of a tick: of one micro-batch, with two directions of up to two.

    Args:
      cells: of the tick, [lanes] each.
    """
    for lane in range(len(cells[HEAD_RANK])):
        microbatch, segment, home, slot = (cells[name][lane] for name in HEAD_COLUMNS)
        row = {"microbatch": microbatch, "segment": segment, "home": home, "inbox": slot}
        state = when(home >= 0, functools.partial(_sliced_head, rank, row), state, HEAD)
    return state


def _sliced_head(rank: Rank, row: Row, state: State) -> State:
    """The head of one micro-batch, or of its segment."""
    mine = jax.lax.axis_index("pipeline") == row["home"]
    last, inbox = rank.parts[-1], state.buffers["inbox"]
    # On other ranks the slot may be of another value, or not exist.
    slot = jnp.where(mine, row["inbox"], rank.program.slots["inbox"])
    output = rank.own_stream(last, at(inbox, slot))
    output = _over_pipeline(rank, jax.tree.map(lambda x: jnp.where(mine, x, 0), output))
    losses, dhead, dstream = head_gradients(
        rank.model, rank.zero.widen(rank.head), output, rank.batch_of(row)
    )
    dhead = rank.zero.reduce(dhead, head_params(rank.model, rank.zero.axes))
    dstream = rank.full_stream(_over_pipeline(rank, dstream))
    counted = {name: jnp.where(mine, loss, 0) for name, loss in losses.items()}
    sums = {**state.sums, **add({name: state.sums[name] for name in counted}, counted)}
    state = state._replace(
        buffers={**state.buffers, "inbox": put(inbox, dstream, slot)},
        sums=sums,
        grads={**state.grads, "head": add(state.grads["head"], dhead)},
    )
    return rewrite_message(state, row["home"] >= 0)


def _over_pipeline(rank: Rank, stream: Stream) -> Stream:
    """The sums of a stream's arrays over the ranks."""
    sizes = rank.zero.sizes
    rules = {**rank.zero.rules, **ACTIVATIONS}
    specs = {name: automatic_part(resolve(rank.stream_axes(name), rules, sizes)) for name in stream}

    def summed(stream: Stream) -> Stream:
        return jax.tree.map(lambda x: jax.lax.psum(x, "pipeline"), stream)

    # By hand over the automatic axes, too: XLA for CPUs aborts at a 16-bit all-reduce while an
    # axis is automatic.
    return manually(summed, automatic_axes(sizes), (specs,), specs)(stream)
