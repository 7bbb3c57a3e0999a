"""Memory of the head, forward and backward, a chunk of tokens at a time: see `ops.loss`."""

from typing import Any

import numpy as np

from jaxscale.ops.sizes import loss_chunk_tokens
from jaxscale.planner.memory.layer_loop import LayerLoop, stream_bytes
from jaxscale.planner.memory.transients import Transients
from jaxscale.sharding.model_trace import Ints, maximum, select
from jaxscale.training.tracing.traces import model_trace


def head_bytes(loop: LayerLoop, transients: Transients) -> Ints:
    """Logits of a chunk, the output matrix with its gradient, and the stream."""
    layout = loop.layout
    # Ranks of context divide the columns, for the tokens of all of them.
    ranks = layout.tensor_columns * layout.head_ranks * layout.context
    vocab = -(-model_trace(loop.model).vocab_rows // ranks)
    matrix = loop.parameters.head_elements()
    gradient = loop.trained.head_elements() // layout.context
    long = transients.in_place and not loop.model.adapts  # as in `ops.loss`
    features = loop.width if long else 0
    each = loss_chunk_tokens(vocab, features) // layout.context
    chunks = -(-loop.tokens // np.maximum(each, 1))
    logits = loop.tokens * layout.context * vocab // chunks
    together = loop.group > 1
    # Input, normalised, transposed, and its gradient; gathered over tensor.
    stream = 5 * loop.compute * loop.tokens * loop.width // layout.tensor_rows
    stream = stream + select(together, 2 * loop.group * stream_bytes(loop))
    group_sum = select(together, loop.accumulated * gradient)
    if transients.in_place:
        # In each of several passes XLA keeps the zeros from which both the loop over chunks and the
        # embedding's gradient start, unless the two are tied.
        again = loop.scatters & loop.repeats & (layout.pipeline == 1)
        again = again & (chunks > 1) & (not loop.parameters.borrowed)
        zeros = loop.trained.elements("embed") // layout.context
        zeros = select(again, loop.accumulated * zeros)
        piped = layout.pipeline > 1
        fused = _fused_bytes(loop, chunks, logits, matrix, gradient, piped)
        return fused + zeros + group_sum + stream
    wide = max(loop.compute, 4)
    matrices = wide * gradient + loop.gathers * loop.compute * matrix
    arrays = transients.logits - (transients.looks_up & (layout.tensor_columns == 1))
    return arrays * wide * logits + matrices + group_sum + stream


def _fused_bytes(
    loop: LayerLoop, chunks: Ints, logits: Ints, matrix: Ints, gradient: Ints, piped: Any
) -> Ints:
    """The head on a GPU, where one fusion reads a chunk's float32 logits and writes their gradient
    in the compute type: both, the output matrix in that type, and its gradient, to which a matmul
    adds in place. With one chunk the gradient is allocated after the float32 logits are freed; in a
    single visit also transposed, unless the compiler reduces it over context. The matrix may be
    among the weights gathered and kept, as in a pipeline, where a micro-batch has a gradient
    separate from the sums, or be the parameter itself.

    Args:
      chunks, logits: their number, and the elements of one.
      matrix, gradient: elements of the output matrix, and of its gradient.
      piped: whether there is a pipeline.
    """
    wide, narrow = loop.accumulated * gradient, loop.compute * matrix
    as_it_is = (loop.model.param_dtype == loop.model.compute_dtype) & np.logical_not(loop.gathers)
    narrow = select(piped | loop.keeps | as_it_is, 0, narrow)
    both = (max(loop.compute, 4) + loop.compute) * logits + narrow
    own = loop.scatters | piped
    several = both + select(own | loop.single, wide, 0)
    transposed = loop.single & (loop.unreduced == loop.gradients)
    written = select(transposed, 2, select(own | loop.single, 1, 0)) * wide
    most = select(chunks == 1, maximum(both, written + loop.compute * logits), several)
    # A pipeline rank copies gradients before it reduce-scatters them.
    return maximum(most, select(loop.scatters & piped, 2 * wide, 0))
