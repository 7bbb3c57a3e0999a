"""Peak memory of a step on one device, from the model's shapes and the layout alone.

Memory between steps is exact. The temporaries of a step are the terms of its largest phase. The
number of arrays live within one layer depends on the compiler: these few constants are measured,
see `TRANSIENTS`. The suite compares everything with compiled programs.

Letters: D d_model, Q heads x head_dim, K kv_heads x head_dim, F d_ff, G micro-batches of
an accumulation group.
"""

import functools

import numpy as np

from jaxscale.config import Config
from jaxscale.config.layout import Layout
from jaxscale.config.model import ModelConfig, is_own_family
from jaxscale.config.optimizer import OptimizerConfig
from jaxscale.pipeline.buffer_slots import GRADIENT, MEMORY, OFFLOADED
from jaxscale.planner.memory.at_rest import (
    HostState,
    batch_bytes,
    count_bytes,
    host_state,
    moment_bytes,
    parameter_bytes,
    table_bytes,
    vector_bytes,
)
from jaxscale.planner.memory.end_of_step import pruning_bytes, reduction_bytes, update_bytes
from jaxscale.planner.memory.experts import restacked_bytes
from jaxscale.planner.memory.head import head_bytes
from jaxscale.planner.memory.layer_loop import (
    LayerLoop,
    hidden_values,
    message_bytes,
    stream_bytes,
)
from jaxscale.planner.memory.saved_values import layer_saved_bytes, remat_saved_bytes, slot_bytes
from jaxscale.planner.memory.stacks import (
    held_between_bytes,
    larger,
    stacks_outer_gradients,
)
from jaxscale.planner.memory.terms import Memory
from jaxscale.planner.memory.transients import (
    TRANSIENTS,
    Transients,
    biased_attention_bytes,
    carried_bytes,
    end_of_backward_bytes,
    hidden_bytes,
    live_bytes,
    ragged,
    working_set_bytes,
)
from jaxscale.planner.tables.pipeline_slots import RankBuffers, layout_buffers
from jaxscale.sharding.model_trace import Ints, Rows, itemsize, maximum, select
from jaxscale.training.tracing.traces import model_trace

HELD = ("residual_b", "residual_w", "cotangent")
"""A pipeline's buffers of saved activations."""


def step_memory(
    config: Config,
    back_end: str = "cpu",
    *,
    layout: Layout | None = None,
    own_host: bool = False,
    buffers: RankBuffers | None = None,
) -> Memory:
    """Memory of a step: fields are int, or int [N].

    Args:
      back_end: whose `TRANSIENTS` to use.
      layout: resolved; one, or a batch of them, whose fields are arrays; by default the config's.
      own_host: whether offloaded arrays leave device memory. On a CPU they do not.
      buffers: of a pipeline's busiest rank; by default from the schedule's table.

    Raises:
      ValueError: an unknown back end, or no such pipeline exists.
    """
    layout = layout or config.layout
    buffers = buffers or layout_buffers(config.model, config.data, layout)
    custom = is_own_family(config.model.family)
    transients = _transients(back_end, gated=custom or config.model.gated)
    sizes = model_trace(config.model).stacks
    rows = {stack.name: count for stack, count in zip(sizes, buffers.rows)}
    capacity = buffers.capacity or (0,) * len(sizes)
    loops = [
        LayerLoop.of(config, layout, rows, stack, each) for stack, each in zip(sizes, capacity)
    ]
    passes = [
        _stack_memory(config, loops, n, rows, transients, buffers, own_host)
        for n in range(len(loops))
    ]
    return functools.reduce(larger, passes)


def _stack_memory(
    config: Config,
    loops: list[LayerLoop],
    number: int,
    rows: Rows,
    transients: Transients,
    buffers: RankBuffers,
    own_host: bool,
) -> Memory:
    """Memory of a step whose phases are of one stack.

    Args:
      loops: of all stacks.
      number: of this one.
    """
    model, optimizer, loop = config.model, config.optimizer, loops[number]
    layout = loop.layout
    # While the layers of one stack compute, the stacks after it are done; but a pipeline rank has
    # buffers for the chunks of every stack.
    before, is_last = loops[: number + 1], number == len(loops) - 1
    moments = moment_bytes(model, optimizer, layout, rows)
    on_host = host_state(model, optimizer, layout, rows)
    host_optimizer = moments if layout.offloads("optimizer") else on_host.moments
    host_weights = sum(on_host.weights.values())
    pipelined, width = layout.pipeline > 1, itemsize(model.param_dtype)
    in_loop, slots = zip(*map(_stash, before)), _slots(loops, buffers, transients)
    stash, host_stash = (select(pipelined, *both) for both in zip(slots, map(sum, in_loop)))
    message = message_bytes(loops)
    gradients = loop.accumulated * (loop.sums + _tied_sums(loop))
    return Memory(
        parameters=parameter_bytes(model, layout, rows) - own_host * host_weights,
        optimizer=moments + count_bytes(optimizer.name) - own_host * host_optimizer,
        batch=batch_bytes(model, config.data, layout),
        tables=table_bytes(model, optimizer, config.data, layout),
        vectors=vector_bytes(model, config.data, layout),
        gradients=gradients,
        stash=stash - own_host * host_stash,
        layer_weights=_layer_weights(loop, loops, buffers, transients),
        zeros=_zeros(model, loop, transients),
        outer_gradients=_outer_gradients(loop, transients)
        if len(rows) == 1
        else select(pipelined, 0, stacks_outer_gradients(loop, transients, is_last=is_last)),
        group=_group(loop),
        working_set=working_set_bytes(loop, transients),
        attention=biased_attention_bytes(loop, transients),
        layer_gradients=select(
            pipelined,
            (loop.compute if transients.carries else loop.accumulated) * loop.gradients,
            _layer_gradients(loop, transients),
        ),
        forward_loop=_forward_loop(loop, transients),
        head=head_bytes(loop, transients) if is_last else 0,
        # A single visit adds nothing to them before the layers' backward pass.
        head_sums=select(loop.single & transients.in_place, 0, gradients),
        end=_end(optimizer, loop, transients, rows),
        # Before and after its update (`training.update_in_turn`).
        updated=2 * own_host * on_host.largest,
        moments_copy=moments if optimizer.name == "lion" else 0,
        host_optimizer=host_optimizer,
        host_stash=host_stash,
        host_weights=host_weights,
        fetched=own_host * _fetched(loop, on_host),
        messages=select(pipelined, _messages(layout, buffers) * message),
        paired_forward=select(pipelined, _paired_forward(loop, buffers, transients)),
        received=select(pipelined & (len(loops) > 1), buffers.residual_w * message),
        outer_weights=select(pipelined, _held_weights(loop, buffers)),
        pending=select(pipelined & loop.scatters, _pending(loop, loops, buffers)),
        mirrored_weights=_mirrored_weights(loop, rows, buffers),
        mirrored_gradients=_mirrored_gradients(loop, rows, buffers),
        reduced_gradients=loop.accumulated * loop.reduced,
        kept_weights=loop.compute
        * select(
            loop.keeps,
            _kept(loop, rows),
            _cast_once(loop, rows) * (not transients.ahead),
        ),
        # A pipeline gathers the weights that it keeps all at once.
        converted=select(loop.keeps & pipelined, 0, transients.ahead)
        * (_converted(loop, rows) - loop.compute * (own_host * host_weights // width)),
        carried=carried_bytes(loop, transients) + own_host * _waiting(loop, on_host, transients),
        walk_end=end_of_backward_bytes(loop, transients),
        restacked=restacked_bytes(loop, rows[loop.part])
        if transients.in_place and loop.has_experts
        else 0,
        between_stacks=select(pipelined, 0, held_between_bytes(before)),
    )


def _zeros(model: ModelConfig, loop: LayerLoop, transients: Transients) -> Ints:
    """Accumulators of attention's gradients of queries and keys, outside the loop over layers."""
    if loop.is_custom:
        return 0
    return (
        loop.last_outside
        * transients.zeros
        * max(loop.compute, 4)
        * loop.tokens
        * (model.num_heads + model.num_kv_heads)
        * model.head_dim
        // loop.layout.tensor_columns
    )


def _end(optimizer: OptimizerConfig, loop: LayerLoop, transients: Transients, rows: Rows) -> Ints:
    """Temporaries of reductions at the end of a step, or of the update after them."""
    pruning = optimizer.prunes * pruning_bytes(loop, transients, rows)
    update = update_bytes(optimizer.name, loop, rows) + pruning
    return maximum(reduction_bytes(loop, transients, rows), update)


def _converted(loop: LayerLoop, rows: Rows) -> Ints:
    """A device's weights of all layers, in the compute type."""
    whole = loop.gathers | loop.keeps
    found = (count * loop.parameters.elements(part, whole) for part, count in rows.items())
    return loop.compute * sum(found)


def _transients(back_end: str, *, gated: bool) -> Transients:
    known = sorted({name for name, _ in TRANSIENTS})
    if back_end not in known:
        raise ValueError(f"back end {back_end!r} has no memory model; there are {', '.join(known)}")
    return TRANSIENTS[back_end, "llama" if gated else "gpt"]


def _layer_weights(
    loop: LayerLoop, loops: list[LayerLoop], buffers: RankBuffers, transients: Transients
) -> Ints:
    """Gathered weights of the current layer and of a prefetched one; in a pipeline of a chunk of
    each stack, or of the current layer; with pairs two of them. And the current layer's that are
    stored quantised, as its block reads them."""
    held = sum(one.capacity * one.weights for one in loops)
    if loop.layout.pipeline_gather == "layer":
        held = loop.weights
    held = buffers.lanes * held
    layers = min(loop.num_layers, 2)  # a single layer prefetches nothing
    ahead = loop.weights - transients.on_use * loop.parameters.expert_elements(loop.part)
    gathered = select(loop.layout.pipeline > 1, held, loop.weights + (layers - 1) * ahead)
    # An all-gather of shards that are not whole tiles pads every row with an empty one.
    gathered = gathered + select(ragged(loop, transients), loop.parameters.mlp_elements(loop.part))
    used = loop.compute * loop.parameters.dequantised(loop.part)
    local = 0 if transients.ahead else loop.weights
    return used + loop.compute * select(loop.gathers, gathered, local)


def _fetched(loop: LayerLoop, on_host: HostState) -> Ints:
    """Shards of two layers that are copied from host memory."""
    return 2 * on_host.weights[loop.part] // loop.num_layers


def _waiting(loop: LayerLoop, on_host: HostState, transients: Transients) -> Ints:
    """Gradients of one more layer before their reduction: XLA for TPUs (libtpu 0.0.52) reduces
    them a layer later if the layers' weights come from host memory."""
    fetches = np.asarray(on_host.weights[loop.part]) > 0
    return select(fetches & transients.carries, loop.accumulated * loop.gradients)


def _kept(loop: LayerLoop, rows: Rows) -> Ints:
    """Weights gathered once per step; a pipeline's weights outside the layers are counted
    elsewhere. An untied embedding is not read again in a single visit."""
    layers = sum(count * loop.parameters.elements(part) for part, count in rows.items())
    again = loop.parameters.elements("embed head") - loop.parameters.head_elements()
    # Of the head a rank of context uses its columns, and the compiler frees the others.
    head = loop.parameters.head_elements() // loop.layout.context
    outer = head + select(loop.single, 0, again)
    return layers + select(loop.layout.pipeline == 1, outer)


def _mirrored_weights(loop: LayerLoop, rows: Rows, buffers: RankBuffers) -> Ints:
    """In the compute type, weights of a rank's layers in both directions; where they are gathered
    and kept, those of the second direction, since `_kept` has the others."""
    whole, shards = (
        sum(count * loop.parameters.elements(part, over) for part, count in rows.items())
        for over in (False, True)
    )
    both = select(loop.keeps, whole, 2 * select(loop.gathers, shards, whole))
    return loop.compute * select(np.asarray(buffers.directions) > 1, both)


def _mirrored_gradients(loop: LayerLoop, rows: Rows, buffers: RankBuffers) -> Ints:
    layers = sum(count * loop.trained.elements(p, loop.scatters) for p, count in rows.items())
    return loop.accumulated * (np.asarray(buffers.directions) - 1) * layers


def _cast_once(loop: LayerLoop, rows: Rows) -> Ints:
    """Layers' weights that are cast once per step (vectors are too few to matter), or quantised
    once to two arrays of half the bytes."""
    quantised = (loop.model.matmul_dtype == "float8") & (loop.layout.tensor == 1)
    casts = quantised | (loop.model.compute_dtype != loop.model.param_dtype)
    layers = sum(count * loop.parameters.elements(part) for part, count in rows.items())
    return select(loop.layout.casts_once, layers * casts)


def _slots(
    loops: list[LayerLoop], buffers: RankBuffers, transients: Transients
) -> tuple[Ints, Ints]:
    """Saved activations of a rank's chunks between operations, and the part in host memory: each
    slot stores a chunk of every stack."""
    total, on_host, tiled = 0, 0, transients.tile > 1
    layout = loops[0].layout
    if not np.any(layout.pipeline > 1):
        return 0, 0
    for loop in loops:
        for held in (*HELD, MEMORY, GRADIENT):
            slots = getattr(buffers, held)
            stored = slots * loop.capacity * slot_bytes(loop, held, tiled=tiled)
            total = total + stored
            if layout.offloads("activations") and held in OFFLOADED:
                on_host = on_host + stored
    return total, on_host


def _messages(layout: Layout, buffers: RankBuffers) -> Ints:
    """Messages that wait, and those made and received in a tick: of each lane, or of a part of a
    segment and all parts of the longest."""
    most = max(layout.segment_parts, default=1)
    return buffers.inbox + buffers.input + 2 * buffers.lanes * most + (most > 1)


def _paired_forward(loop: LayerLoop, buffers: RankBuffers, transients: Transients) -> Ints:
    if not np.any(np.asarray(buffers.lanes) > 1):
        return 0
    tiled = transients.tile > 1
    layer = sum(slot_bytes(loop, held, tiled=tiled) for held in HELD[:2])
    return (np.asarray(buffers.lanes) - 1) * layer


def _held_weights(loop: LayerLoop, buffers: RankBuffers) -> Ints:
    """Gathered weights of embedding and head, and of the next chunk where a rank has several."""
    outer = loop.parameters.elements("embed") + loop.parameters.head_elements()
    several = (buffers.chunks > 1) & (loop.layout.pipeline_gather == "chunk")
    next_chunk = select(loop.gathers & several, loop.capacity * loop.weights)
    return loop.compute * (outer + next_chunk)


def _pending(loop: LayerLoop, loops: list[LayerLoop], buffers: RankBuffers) -> Ints:
    """Gradients of a chunk of each stack before their reduce-scatter, and of one after it. A
    rank's only chunk is reduced after the last tick, a single layer at once."""
    if loop.layout.pipeline_gather == "layer":
        return 0
    whole = sum(one.capacity * one.gradients for one in loops)
    shards = loop.trained.elements(loop.part, True)
    reduced = select(buffers.chunks > 1, loop.capacity * shards)
    return loop.accumulated * (whole + reduced)


def _tied_sums(loop: LayerLoop) -> Ints:
    """A pipeline accumulates the gradients of a tied head separately from the embedding's."""
    own = loop.trained.head_elements(loop.scatters, tied=False)
    tied = loop.trained.head_elements(loop.scatters) - own
    return select(loop.layout.pipeline > 1, tied)


def _stash(loop: LayerLoop) -> tuple[Ints, Ints]:
    """Saved activations of all layers, and the part in host memory. Those of a layer outside the
    loop are freed before the loop runs backward."""
    layout, layers = loop.layout, loop.num_layers - loop.last_outside
    stash = layers * loop.group * layer_saved_bytes(loop)
    if layout.offloads("activations"):
        return stash, stash
    if not layout.remat_policy.offloads:
        return stash, 0
    stays = remat_saved_bytes(loop, "full")
    return stash, stash - layers * loop.group * stays


def _outer_gradients(loop: LayerLoop, transients: Transients) -> Ints:
    """Gradients of head and embedding; with several passes over the layers both are among the
    accumulators. `late` ones are live whole, before reduction."""
    head = loop.accumulated * loop.trained.head_elements(loop.scatters)
    whole = loop.accumulated * (loop.trained.head_elements() // loop.context_shards)
    embed = loop.trained.elements("embed") // loop.context_shards
    if not transients.late:
        return select(loop.single, head + max(loop.compute, 4) * embed)
    # On a TPU, whose loop carries gradients, the head's are reduced earlier.
    whole = select(loop.early & transients.carries, 0, whole)
    several = select(loop.layout.pipeline == 1, whole + loop.accumulated * embed)
    return select(loop.single, head + whole, several)


def _group(loop: LayerLoop) -> Ints:
    # Saved activations of one layer, and stream gradients: in, out, and (outside the loop) next.
    activations = layer_saved_bytes(loop) + (2 + loop.last_outside) * stream_bytes(loop)
    # Gradient accumulators of the layer, and of the last one outside the loop; attention's
    # weights, which the CPU back end transposes in every micro-batch.
    sums = loop.accumulated * loop.gradients * (1 + loop.last_outside)
    transposed = loop.compute * (loop.weights - loop.parameters.mlp_elements(loop.part))
    return select(loop.group == 1, 0, loop.group * activations + sums + transposed)


def _layer_gradients(loop: LayerLoop, transients: Transients) -> Ints:
    # Gradients to be reduced are live until all of them are computed.
    waiting = select(loop.reduces & (not transients.carries), loop.accumulated * loop.unreduced)
    waiting = waiting * (1 + transients.queued)
    # The MLP's weights are freed by then; gathered ones stay in the loop's carry.
    done = select(loop.gathers, 0, loop.compute * loop.parameters.mlp_elements(loop.part))
    alone = waiting - done + 4 * stream_bytes(loop)
    rest = working_set_bytes(loop, transients) - hidden_bytes(loop, transients)
    sums = loop.accumulated * loop.trained.mlp_elements(loop.part)
    return select(loop.group == 1, alone, sums + rest)


def _forward_loop(loop: LayerLoop, transients: Transients) -> Ints:
    # Saved activations of a layer before they are copied to the stash, and space for the last
    # layer's; the stream in and out, and its zero gradients.
    activations = (1 + loop.last_outside) * layer_saved_bytes(loop) + 5 * stream_bytes(loop)
    if loop.is_custom:
        hidden = live_bytes(loop, transients, forward=True)
    else:
        hidden = 3 * loop.compute * hidden_values(loop) // loop.layout.tensor_columns
    return select(loop.group == 1, 0, loop.group * activations + hidden)
