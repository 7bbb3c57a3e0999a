"""The bytes that a step needs on one device, from the model's shapes and the layout alone.

What stays between steps is exact. What a step holds beside that is the most that one of its phases
needs; each is a sum of parts that have a reason. How many arrays live at a time within one layer
depends on the compiler: those few constants are measured, and `TRANSIENTS` says where. The suite
holds compiled programs to all of it.

Letters: D d_model, Q heads x head_dim, K kv_heads x head_dim, F d_ff, G micro-batches that walk
together.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.config import Config
from jaxscale.planner.memory.at_rest import (
    batch_bytes,
    count_bytes,
    moment_bytes,
    parameter_bytes,
    sides,
)
from jaxscale.planner.memory.layer_loop import (
    LayerLoop,
    elements,
    layer_saved_bytes,
    mlp_weights,
    stream_bytes,
)
from jaxscale.planner.memory.saved_activations import saved_bytes, stash_bytes
from jaxscale.planner.memory.transients import (
    TRANSIENTS,
    Transients,
    carried_bytes,
    hidden_bytes,
    ragged,
    walk_end_bytes,
    working_set_bytes,
)
from jaxscale.planner.model.param_shapes import Ints, maximum, parameters, select
from jaxscale.planner.tables.pipeline_slots import RankBuffers, config_buffers

CHUNK_BYTES, CHUNK_TOKENS = 128 * 2**20, 1024  # of `ops.loss`


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    `arguments` are there all the time; beside them the temporaries are those of the largest phase.
    """

    # Between steps.
    parameters: Ints
    optimizer: Ints  # its state, as far as it is on the device
    batch: Ints  # and the count of steps
    # In every phase but the last.
    gradients: Ints  # accumulators: whole, or the shards that visits leave
    stash: Ints  # what the layers keep for their backward pass, as far as it is on the device
    # While layers are at work.
    layer_weights: Ints  # in the compute type; gathered, those of the next layer too
    zeros: Ints  # that the attention of layers beside the loop starts from
    outer_gradients: Ints  # of embedding and head, until the optimizer takes them
    group: Ints  # what one layer reads and writes for G micro-batches, and its running sums
    working_set: Ints  # activations of a micro-batch and their gradients, at the activation
    layer_gradients: Ints  # of the weights, and what is left of the working set when they are whole
    forward_loop: Ints  # what G micro-batches write to in a forward pass
    # While the head is.
    head: Ints  # logits of a chunk, the matrix where it is gathered, its gradient, the stream
    # At the end.
    reduction: Ints  # sums over replicas, beside what is summed
    update: Ints  # what an optimizer computes from all gradients before it uses them
    moments_copy: Ints  # all through a step: Lion's update and its next moments need the same ones
    # In host memory, where the back end has its own.
    host_optimizer: Ints
    host_stash: Ints
    # In a pipeline, in every phase but the last.
    messages: Ints = 0  # activations and gradients that arrived, and what is under way
    outer_weights: Ints = 0  # embedding and head, gathered, and those of a gathered chunk
    pending: Ints = 0  # gradients of a chunk, before they are reduced
    # What the TPU's compiler adds.
    parameters_copy: Ints = 0  # all through a step, where a gather makes the new ones
    converted: Ints = 0  # parameters of the layers, as they lie, in the compute type
    carried: Ints = 0  # gradients of the layer before, as they came, and as they are reduced
    walk_end: Ints = 0  # gradients that wait together when the first layer is done

    @property
    def arguments(self) -> Ints:
        return self.parameters + self.optimizer + self.batch

    @property
    def phases(self) -> dict[str, Ints]:
        """Temporaries of each phase."""
        return {name: sum(getattr(self, part) for part in parts) for name, parts in PHASES.items()}

    @property
    def end(self) -> Ints:
        """Beside the gradients, when all micro-batches are done."""
        return maximum(self.reduction, self.update)

    @property
    def at_peak(self) -> dict[str, int]:
        """What the peak of one layout is made of, by field; those of nothing left out."""
        phase = max(self.phases, key=lambda name: self.phases[name])
        parts = ("parameters", "optimizer", "batch", *PHASES[phase])
        sizes = {part: int(getattr(self, part)) for part in parts}
        return {part: size for part, size in sizes.items() if size}

    @property
    def temporaries(self) -> Ints:
        return maximum(*self.phases.values())

    @property
    def peak(self) -> Ints:
        return self.arguments + self.temporaries


_ALWAYS = (
    "gradients",
    "stash",
    "zeros",
    "moments_copy",
    "messages",
    "outer_weights",
    "pending",
    "parameters_copy",
    "converted",
)
_LAYER = (*_ALWAYS, "layer_weights", "outer_gradients", "carried")
PHASES = {
    "forward": (*_LAYER, "forward_loop"),
    "head": (*_ALWAYS, "head"),
    "activations of a layer": (*_LAYER, "group", "working_set"),
    "gradients of a layer": (*_LAYER, "group", "layer_gradients"),
    "end of the walk": ("gradients", "moments_copy", "parameters_copy", "walk_end"),
    "end of the step": ("gradients", "outer_gradients", "moments_copy", "parameters_copy", "end"),
}
"""The parts that are alive in each phase of a step, beside the arguments."""


def step_memory(
    config: Config,
    back_end: str = "cpu",
    *,
    own_host: bool = False,
    buffers: RankBuffers | None = None,
) -> Memory:
    """What a step of this configuration needs.

    Args:
      config: its layout resolved.
      back_end: whose `TRANSIENTS` to use.
      own_host: whether what a layout offloads leaves the device. On a CPU it does not.
      buffers: what a rank of a pipeline holds; by default it is found in the real table.

    Raises:
      ValueError: a back end on which nothing was measured, or a pipeline that cannot be.
    """
    buffers = buffers or config_buffers(config)
    model, layout, loop = config.model, config.layout, LayerLoop.of(config, buffers.rows)
    transients = _transients(back_end, model.family)
    moments = moment_bytes(config, buffers.rows)
    host_optimizer = moments if layout.offloads("optimizer") else 0
    stash, host_stash = _stash(config, loop)
    pipelined = layout.pipeline > 1
    attention = (model.num_heads + model.num_kv_heads) * model.head_dim
    at_rest = parameter_bytes(config, buffers.rows)
    return Memory(
        parameters=at_rest,
        optimizer=moments + count_bytes(config) - own_host * host_optimizer,
        batch=batch_bytes(config),
        gradients=loop.accumulated * (loop.sums + _tied_sums(config, loop)),
        stash=select(pipelined, _slots(config, loop, buffers), stash - own_host * host_stash),
        layer_weights=_layer_weights(config, loop, transients, buffers),
        zeros=loop.beside
        * transients.zeros
        * max(loop.compute, 4)
        * loop.tokens
        * attention
        // layout.tensor,
        outer_gradients=_outer_gradients(config, loop, transients),
        group=_group(config, loop),
        working_set=working_set_bytes(config, loop, transients),
        layer_gradients=select(
            pipelined,
            (loop.compute if transients.carries else loop.accumulated) * loop.weights,
            _layer_gradients(config, loop, transients),
        ),
        forward_loop=_forward_loop(config, loop),
        head=_head(config, loop, transients),
        reduction=_reduction(config, loop, buffers.rows),
        update=_update(config),
        moments_copy=moments if config.optimizer.name == "lion" else 0,
        host_optimizer=host_optimizer,
        host_stash=host_stash,
        messages=select(
            pipelined, (buffers.inbox + buffers.input + 2) * stream_bytes(config, loop)
        ),
        outer_weights=select(pipelined, _held_weights(config, loop, buffers)),
        pending=select(pipelined & loop.scatters, _pending(config, loop, buffers)),
        parameters_copy=select(
            transients.copies & (layout.fsdp > 1) & np.isin(layout.zero_stage, (1, 2)), at_rest
        ),
        converted=transients.ahead
        * loop.compute
        * buffers.rows
        * elements(config, "layers", loop.gathers),
        carried=carried_bytes(config, loop, transients),
        walk_end=walk_end_bytes(config, loop, transients),
    )


def _transients(back_end: str, family: str) -> Transients:
    known = sorted({name for name, _ in TRANSIENTS})
    if back_end not in known:
        raise ValueError(
            f"no memory was measured on the {back_end!r} back end; there are {', '.join(known)}"
        )
    return TRANSIENTS[back_end, family]


def _layer_weights(
    config: Config, loop: LayerLoop, transients: Transients, buffers: RankBuffers
) -> Ints:
    """In use, and on their way."""
    gathered = loop.weights * select(config.layout.pipeline > 1, buffers.capacity, 2)
    # A gather of shards that end within a tile makes pairs of rows, of which one is empty.
    gathered = gathered + select(ragged(config, transients), mlp_weights(config))
    return loop.compute * select(loop.gathers, gathered, 0 if transients.ahead else loop.weights)


def _slots(config: Config, loop: LayerLoop, buffers: RankBuffers) -> Ints:
    """What the chunks of a rank keep between operations."""
    each = stash_bytes(config.model, config.layout.remat)
    kept = sum(getattr(buffers, name) * size for name, size in each.items())
    return buffers.capacity * loop.tokens * kept // config.layout.tensor


def _held_weights(config: Config, loop: LayerLoop, buffers: RankBuffers) -> Ints:
    """The next chunk's are gathered beside those of the last."""
    outer = elements(config, "embed") + _head_elements(config)
    return loop.compute * (outer + select(loop.gathers, buffers.capacity * loop.weights))


def _pending(config: Config, loop: LayerLoop, buffers: RankBuffers) -> Ints:
    """A chunk's gradients, whole, and the shards that become of them."""
    chunk = buffers.capacity * (loop.weights + elements(config, "layers", True))
    return loop.accumulated * chunk


def _tied_sums(config: Config, loop: LayerLoop) -> Ints:
    """A pipeline sums the gradients of a tied head apart from those of the embedding."""
    tied = _head_elements(config, loop.scatters) - elements(config, "head", loop.scatters)
    return select(config.layout.pipeline > 1, tied)


def _head_elements(config: Config, over_fsdp: Any = False) -> Ints:
    """Of what the head reads: a tied one borrows the embedding, with a gradient of its own."""
    return elements(config, "head", over_fsdp) + sum(
        array.shard_size(config.layout, over_fsdp=over_fsdp)
        for array in parameters(config.model)
        if config.model.tied_embeddings and array.name == "tokens"
    )


def _stash(config: Config, loop: LayerLoop) -> tuple[Ints, Ints]:
    """What the layers keep, and how much of it waits in host memory. With layers beside the loop,
    what the last one kept is used up when the others begin to go back."""
    layout, layers = config.layout, config.model.num_layers - loop.beside
    stash = layers * loop.group * layer_saved_bytes(config, loop)
    if layout.offloads("activations"):
        return stash, stash
    if not layout.remat.startswith("offload:"):
        return stash, 0
    stays = loop.tokens * saved_bytes(config.model, "full") // layout.tensor
    return stash, stash - layers * loop.group * stays


def _outer_gradients(config: Config, loop: LayerLoop, transients: Transients) -> Ints:
    """The head's, and what the embedding's are summed into; with several walks both are among the
    accumulators. Where they are `late` they are there whole, before they are reduced."""
    head = loop.accumulated * _head_elements(config, loop.scatters)
    whole = loop.accumulated * _head_elements(config)
    embed = elements(config, "embed")
    if not transients.late:
        return select(loop.single, head + loop.compute * embed)
    several = select(config.layout.pipeline == 1, whole + loop.accumulated * embed)
    return select(loop.single, head + whole, several)


def _group(config: Config, loop: LayerLoop) -> Ints:
    # What one layer kept, and gradients of the stream: in, out, and (beside the loop) the next's.
    activations = layer_saved_bytes(config, loop) + (2 + loop.beside) * stream_bytes(config, loop)
    # Running sums of the layer, and beside the loop of the last one; attention's weights, which
    # the CPU turns round in every micro-batch.
    sums = loop.accumulated * loop.weights * (1 + loop.beside)
    turned = loop.compute * (loop.weights - mlp_weights(config))
    return select(loop.group == 1, 0, loop.group * activations + sums + turned)


def _layer_gradients(config: Config, loop: LayerLoop, transients: Transients) -> Ints:
    # Where they are to be reduced they wait until all are there.
    waiting = select(loop.reduces & (not transients.carries), loop.accumulated * loop.weights)
    # By then the MLP's weights are done with; gathered ones stay for the loop to hand over.
    done = select(loop.gathers, 0, loop.compute * mlp_weights(config))
    alone = waiting - done + 4 * stream_bytes(config, loop)
    rest = working_set_bytes(config, loop, transients) - hidden_bytes(config, loop, transients)
    return select(loop.group == 1, alone, loop.accumulated * mlp_weights(config) + rest)


def _forward_loop(config: Config, loop: LayerLoop) -> Ints:
    # What a layer keeps, before it is in the stash, and the room for the last layer's; the stream,
    # in and out, and the zeros of its gradients.
    activations = (1 + loop.beside) * layer_saved_bytes(config, loop) + 5 * stream_bytes(
        config, loop
    )
    hidden = 3 * loop.compute * loop.tokens * config.model.d_ff // config.layout.tensor
    return select(loop.group == 1, 0, loop.group * activations + hidden)


def _head(config: Config, loop: LayerLoop, transients: Transients) -> Ints:
    model, layout = config.model, config.layout
    vocab, matrix = model.padded_vocab_size, _head_elements(config)
    tokens = loop.tokens * layout.context
    chunks = -(-tokens // maximum(CHUNK_BYTES // (4 * vocab), CHUNK_TOKENS))
    logits = transients.logits * max(loop.compute, 4) * loop.tokens * vocab // chunks
    matrices = max(loop.compute, 4) * matrix + loop.gathers * loop.compute * matrix
    # As it comes, normed, turned round, its gradient; gathered over the ranks of tensor.
    stream = 5 * loop.compute * loop.tokens * model.d_model
    together = loop.group > 1
    matrices = matrices + select(together, loop.accumulated * matrix)
    stream = stream + select(together, 2 * loop.group * stream_bytes(config, loop))
    return logits // layout.tensor + matrices + stream


def _reduction(config: Config, loop: LayerLoop, rows: Ints) -> Ints:
    layout, stage = config.layout, config.layout.zero_stage
    # The last layer's, and those of embedding and head, as they go in and as they come out.
    last = loop.weights + elements(config, "embed head")
    once = select(loop.reduces & np.logical_not(loop.scatters), 2 * loop.accumulated * last)
    # The stacks that visits did not reduce.
    left = (layout.data > 1) | ((layout.fsdp > 1) & (stage <= 1))
    layers = rows * elements(config, "layers", stage >= 1)
    stacks = loop.accumulated * (layers + elements(config, "embed head", stage >= 1))
    return select(loop.single, once, select(left, stacks))


def _update(config: Config) -> Ints:
    """AdamW and Lion go from gradients to parameters element by element."""
    layout, wide = config.layout, 4
    arrays, layers = parameters(config.model), config.model.num_layers
    if config.optimizer.name == "adafactor":
        # Their squares, all of them, before the means of rows and columns.
        over_fsdp = layout.zero_stage >= 1
        layer = elements(config, "layers", over_fsdp)
        return wide * (layers * layer + elements(config, "embed head", over_fsdp))
    if config.optimizer.name == "muon":
        # Every matrix of the layers whole, as it goes into a step of Newton-Schulz and as it comes
        # out, and one product with itself.
        matrices = [array for array in arrays if array.part == "layers" and sides(array)]
        squares = sum(min(math.prod(s) for s in sides(array)) ** 2 for array in matrices)
        whole = sum(array.shard_size(layout, over_fsdp=False) for array in matrices)
        return wide * layers * (2 * whole + squares)
    return 0
