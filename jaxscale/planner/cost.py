"""Seconds of a step, by what they are spent on: closed forms over arrays of layouts.

Terms are what the busiest rank of the pipeline does, its waiting for others is the bubble, and
collectives count as far as computation does not hide them.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxscale.planner import ticks
from jaxscale.planner.choice import Choice
from jaxscale.planner.compute import memory_seconds
from jaxscale.planner.layer import Layer, Work, layer_work
from jaxscale.planner.machine import Cluster
from jaxscale.planner.network import axis_levels
from jaxscale.planner.shape import Shape
from jaxscale.planner.traffic import (
    LayerTraffic,
    StateTraffic,
    layer_traffic,
    local_params,
    state_traffic,
)

Floats = Any  # a float, or float [N]

CROWDING = 0.126
"""Of the shorter of computation and a collective at work beside it, that the two lose to each
other on a GPU, whose cores also drive its links (measured by Galvatron's profiler, 1.126). TPUs
move data beside their cores."""

OPTIMIZER_BYTES = 32
"""Of a parameter, that Adam reads and writes: gradient 4, master and two moments 24, and the
parameter in 16 bits with its cast."""

ACCUMULATE_BYTES = 10
"""Of a parameter, that adding a micro-batch's 16-bit gradient to the 32-bit sum reads and
writes."""

JITTER = 0.004
"""Relative deviation of one device's step time; the slowest of N is sqrt(2 ln N) of them behind
(b.8: 1 to 3 per cent at 1k devices and more)."""

END_SECONDS = {True: 8e-3, False: 1e-3}
"""Of a step that belong to no layer: the sums of losses and norms, the optimizer's kernels, the
loader. Eager trainers wait for the host several times a step (loss scale, norm, timers)."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step by term, floats or float [N]; `hidden` are beside others, not in the sum.

    `costs` are those of a rank's share for one micro-batch, by operation F, B, W and R, each
    float [..., virtual stages of the whole pipeline].
    """

    matmul: Floats
    attention: Floats
    elementwise: Floats
    waiting: Floats  # for the host to launch kernels
    recompute: Floats
    tensor: Floats
    context: Floats
    expert: Floats
    pipeline: Floats  # messages
    fsdp: Floats
    data: Floats
    bubble: Floats
    optimizer: Floats
    offload: Floats
    stragglers: Floats
    end: Floats
    hidden: dict[str, Floats] = field(default_factory=dict)

    @property
    def terms(self) -> dict[str, Floats]:
        """All that adds up to the step, by name."""
        return {name: value for name, value in vars(self).items() if name != "hidden"}

    @property
    def step_seconds(self) -> Floats:
        total = sum(self.terms.values())
        return float(total) if np.ndim(total) == 0 else total


@dataclass(frozen=True)
class _Pass:
    """A mean layer's pass with its communication, for one micro-batch."""

    work: Work
    tensor: Floats = 0.0
    context: Floats = 0.0
    expert: Floats = 0.0

    @property
    def seconds(self) -> Floats:
        return self.work.seconds + self.tensor + self.context + self.expert


def cost(shape: Shape, cluster: Cluster, choice: Choice, *, waits: bool = True) -> Seconds:
    """What a step takes.

    Args:
      choice: one layout or arrays of them; not checked for what a model or cluster can do.
      waits: False leaves out what ranks of a pipeline wait for each other: the step takes no less,
        and no table is needed to say so.

    Returns:
      Terms whose sum is the step.
    """
    levels = axis_levels(cluster, choice)
    layer, sent = layer_work(shape, cluster, choice), layer_traffic(shape, choice, levels)
    passes, hidden = _passes(choice, layer, sent, _crowding(cluster))
    stages = _Stages.of(shape, choice)
    pipe = _pipeline(choice, passes, layer, sent, stages, waits)
    state = state_traffic(shape, choice, levels)
    fsdp, data, more = _state_seconds(shape, cluster, choice, passes, layer, stages, state)
    hidden |= more
    m, layers = np.asarray(choice.microbatches, float), stages.busiest
    work = passes["forward"].work + passes["input"].work + passes["weights"].work
    head = (layer.head_forward + layer.head_backward) * pipe.head_here
    again = passes["recompute"]
    optimizer = _optimizer_seconds(shape, cluster, choice)
    host = _offload_seconds(shape, cluster, choice, passes, stages)
    accumulate = _accumulate_seconds(shape, cluster, choice)

    def communication(name: str) -> Floats:
        return m * layers * sum(getattr(one, name) for one in passes.values())

    terms = {
        "matmul": m * (layers * work.matmul + head.matmul),
        "attention": m * (layers * work.attention + head.attention),
        "elementwise": m * (layers * work.elementwise + head.elementwise) + accumulate,
        "waiting": m * (layers * work.waiting + head.waiting),
        "recompute": m * layers * again.work.seconds,
        "tensor": communication("tensor"),
        "context": communication("context"),
        "expert": communication("expert"),
        "pipeline": pipe.messages,
        "fsdp": fsdp,
        "data": data,
        "bubble": pipe.bubble,
        "optimizer": optimizer,
        "offload": host,
        "end": np.asarray(END_SECONDS[choice.traits.eager and not choice.traits.graph]),
    }
    count = np.asarray(choice.num_devices, float)
    late = JITTER * np.sqrt(2 * np.log(np.maximum(count, 1)))
    return Seconds(**terms, stragglers=late * sum(terms.values()), hidden=hidden)


def rank_costs(shape: Shape, cluster: Cluster, choice: Choice) -> ticks.Costs:
    """What the operations of a pipeline cost, as `ticks.makespan` wants them.

    Returns:
      Float [..., virtual stages] each, in seconds of a rank's whole share of the model.
    """
    levels = axis_levels(cluster, choice)
    layer, sent = layer_work(shape, cluster, choice), layer_traffic(shape, choice, levels)
    passes, _ = _passes(choice, layer, sent, _crowding(cluster))
    message = sent.message if choice.traits.lockstep else 0.0
    return _costs(_Stages.of(shape, choice), choice, passes, layer, message)


def _crowding(cluster: Cluster) -> float:
    return CROWDING if cluster.chip.cores else 0.0


def _passes(
    choice: Choice, layer: Layer, sent: LayerTraffic, slow: float
) -> tuple[dict[str, _Pass], dict]:
    """The four operations on a mean layer; what is hidden in them, for a whole step."""
    traits = choice.traits
    m = np.asarray(choice.microbatches, float)

    def beside(seconds: Floats, work: Floats, wanted: bool) -> Floats:
        return np.maximum(0.0, seconds - work) if wanted else seconds

    ring = choice.context_method == "ring"
    t = np.asarray(choice.tensor, float)

    def in_pieces(seconds: Floats, work: Floats) -> Floats:
        """A product and its collective in t pieces: the first of them has nothing beside it."""
        if not traits.overlap_tensor:
            return seconds
        first = seconds / t
        late = np.maximum(first, seconds - work)
        return late + slow * np.minimum(seconds - late, work)

    exposed = {
        "tensor": [
            in_pieces(s, w.matmul) for s, w in zip(sent.tensor, (layer.forward, layer.backward))
        ],
        "context": [
            beside(s, w.attention, ring)
            for s, w in zip(sent.context, (layer.forward, layer.backward))
        ],
        "expert": [
            beside(s, w.seconds, traits.overlap_experts)
            for s, w in zip(sent.expert, (layer.forward, layer.backward))
        ],
    }
    full = choice.remat_share if choice.remat == "full" else 0.0
    again = layer.recompute * choice.remat_share
    passes = {
        "forward": _Pass(layer.forward, *(exposed[name][0] for name in exposed)),
        "input": _Pass(layer.backward_input, *(exposed[name][1] for name in exposed)),
        "weights": _Pass(layer.backward_weights),
        "recompute": _Pass(again, *(full * exposed[name][0] for name in exposed)),
    }
    hidden = {
        name: m * sum(s - e for s, e in zip(getattr(sent, name), exposed[name])) for name in exposed
    }
    return passes, hidden


@dataclass(frozen=True)
class _Stages:
    """How many layers the ranks of a pipeline have."""

    busiest: Floats  # of a rank in the middle
    last: Floats  # of the rank that has the head, too
    total: int

    @classmethod
    def of(cls, shape: Shape, choice: Choice) -> "_Stages":
        p, v = np.asarray(choice.pipeline), np.asarray(choice.virtual_stages)
        ends = 2 * choice.traits.balanced_ends
        most = np.ceil((shape.layers + ends * (p > 1)) / (p * v)) * v
        if choice.traits.balanced_ends:
            last = np.where(p > 1, most - 1, shape.layers)
        else:
            last = np.where(p > 1, np.maximum(0, shape.layers - (p - 1) * most), shape.layers)
            last = np.where(shape.layers % (p * v) == 0, most, last)
        return cls(np.where(p > 1, most, float(shape.layers)), last, shape.layers)


@dataclass(frozen=True)
class _Pipe:
    bubble: Floats
    messages: Floats
    head_here: Floats  # 1 where the busiest rank has the head


CLOSED_FORMS = ("gpipe", "1f1b", "interleaved", "breadth_first")
"""Schedules whose time follows from their depth where no rank waits for another's tick."""


def _pipeline(choice, passes, layer, sent, stages, waits: bool) -> _Pipe:
    """What a pipeline adds to the busiest rank's own work."""
    p, v = np.asarray(choice.pipeline), np.asarray(choice.virtual_stages, float)
    m = np.asarray(choice.microbatches, float)
    one = sum(each.seconds for each in passes.values())
    head = layer.head_forward.seconds + layer.head_backward.seconds
    middle, last = stages.busiest * one, stages.last * one + head
    head_here = np.where((p == 1) | (last >= middle), 1.0, 0.0)
    busiest = np.where(p > 1, np.maximum(middle, last), last)
    if np.all(p == 1) or not waits:
        return _Pipe(0.0, 0.0, head_here)
    each = 0.0 if choice.traits.overlap_pipeline else 2 * sent.message * v
    if choice.traits.lockstep or choice.schedule not in CLOSED_FORMS:
        total = _played(choice, _costs(stages, choice, passes, layer, sent.message))
        total = np.where(p > 1, total, m * busiest)
        return _Pipe(np.maximum(0.0, total - m * busiest), np.zeros(()), head_here)
    # As soon as possible: the busiest rank works all the time, once the others have filled it.
    other = np.where(head_here == 1, middle, one * stages.total / p)
    turns = (p - 1) / v
    if choice.schedule == "breadth_first":  # ranks wait for a chunk's micro-batches to come round
        turns = turns + np.maximum(0.0, p - m) * (v - 1) / v
    fill = turns * (other + 2 * sent.message * v)
    return _Pipe(np.where(p > 1, fill, 0.0), np.where(p > 1, m * each, 0.0), head_here)


def _costs(stages: _Stages, choice: Choice, passes, layer: Layer, message: Floats) -> ticks.Costs:
    """Layers are dealt evenly to virtual stages; the last has the head, too.

    Every operation of the executor ends with an exchange of messages.
    """
    count = int(np.max(np.asarray(choice.pipeline) * choice.virtual_stages))
    share = stages.total / np.asarray(choice.pipeline)  # of a rank

    def by_stage(name: str, head: Floats) -> np.ndarray:
        v = np.asarray(choice.virtual_stages)
        each = np.asarray(share * passes[name].seconds, float)
        each = np.where(each > 0, each + message * v, 0.0)
        costs = np.repeat(each[..., None], count, axis=-1)
        costs[..., -1] = costs[..., -1] + v * head
        return costs

    return ticks.Costs(
        f=by_stage("forward", layer.head_forward.seconds),
        b=by_stage("input", layer.head_backward.seconds / 2),
        w=by_stage("weights", layer.head_backward.seconds / 2),
        r=by_stage("recompute", 0.0),
    )


def _played(choice: Choice, costs: ticks.Costs) -> np.ndarray:
    """The makespan of each layout's own table."""
    columns = [choice.pipeline, choice.microbatches, choice.virtual_stages]
    shape = np.broadcast_shapes(*(np.shape(c) for c in columns), costs.f.shape[:-1])
    keys = np.stack([np.broadcast_to(c, shape).ravel() for c in columns], axis=-1).astype(int)
    total = np.zeros(keys.shape[0])
    flat = [np.broadcast_to(c, (*shape, c.shape[-1])).reshape(len(keys), -1) for c in costs]
    for key in np.unique(keys, axis=0):
        p, m, v = (int(k) for k in key)
        if p == 1:
            continue
        rows = np.flatnonzero((keys == key).all(axis=1))
        # The head is the last entry, however many stages another layout of the arrays has.
        mine = [np.concatenate([c[rows, : p * v - 1], c[rows, -1:]], axis=-1) for c in flat]
        total[rows] = ticks.makespan(
            choice.schedule, p, m, v, ticks.Costs(*mine),
            fused=choice.fused, lockstep=choice.traits.lockstep,
        )  # fmt: skip
    return total.reshape(shape)


def _state_seconds(shape, cluster, choice, passes, layer, stages, state: StateTraffic):
    """Exposed seconds over fsdp and over data, and what is hidden of them."""
    traits = choice.traits
    zero, m = np.asarray(choice.zero_stage), np.asarray(choice.microbatches, float)
    p, v = np.asarray(choice.pipeline), np.asarray(choice.virtual_stages, float)
    # A pipeline keeps the weights of its only chunk, and gathers others when it turns to them.
    turns = np.where(v > 1, m / np.maximum(1, np.minimum(m, p)), 1.0)
    if choice.schedule == "breadth_first":
        turns = np.ones_like(turns)
    walks = np.where(p > 1, turns, 1.0 if choice.accumulation == "layered" else m)
    forward = stages.busiest * passes["forward"].seconds * m / walks
    backward = (
        stages.busiest
        * m
        / walks
        * (passes["input"].seconds + passes["weights"].seconds + passes["recompute"].seconds)
    )
    head = (layer.head_forward.seconds + layer.head_backward.seconds) * m / walks
    slow = _crowding(cluster)

    def beside(sent: Floats, work: Floats, wanted: bool, first: Floats) -> tuple[Floats, Floats]:
        """Exposed, crowding included, and hidden."""
        if not wanted:
            return sent, 0.0 * sent
        late = np.maximum(np.minimum(sent, first), sent - work)
        return late + slow * np.minimum(sent - late, work), sent - late

    third = zero == 3
    count = np.maximum(1.0, stages.busiest)
    once = state.gather / count  # a layer's: the first of a pass has nothing to hide behind
    on = beside(state.gather + state.gather_outer, forward + head, traits.overlap_parameters,
                once + state.gather_outer)  # fmt: skip
    scatters = (zero >= 2) if traits.reduce_each else np.zeros_like(third)
    gathers = third * (0.0 if traits.keep_gathered else 1.0)
    back_sent = gathers * state.gather + scatters * state.scatter
    back = beside(back_sent, backward, traits.overlap_gradients, state.scatter / count)
    fsdp = walks * (third * on[0] + back[0])
    hidden = walks * (third * on[1] + back[1])
    # Once a step, beside the last walk's backward pass.
    last = backward / np.where(p > 1, np.maximum(m / walks, 1), 1.0)
    left = ~np.asarray(scatters, bool)
    at_end = np.where(zero == 0, state.whole, left * state.scatter + state.replicas)
    ended = beside(at_end, last, traits.overlap_gradients, at_end / count)
    updated = ((zero == 1) | (zero == 2)) * state.update
    one_pass = forward * walks / m
    fresh = beside(updated, one_pass, traits.overlap_parameters, updated / count)
    return fsdp, ended[0] + fresh[0] + state.ends, {"fsdp": hidden, "data": ended[1] + fresh[1]}


def _optimizer_seconds(shape: Shape, cluster: Cluster, choice: Choice) -> Floats:
    layers, outer = local_params(shape, choice)
    if choice.traits.frozen:
        return np.zeros(())
    ranks = np.where(np.asarray(choice.zero_stage) > 0, choice.fsdp, 1)
    return memory_seconds(cluster, OPTIMIZER_BYTES * (layers + outer) / ranks)


def _accumulate_seconds(shape: Shape, cluster: Cluster, choice: Choice) -> Floats:
    """Sums over micro-batches."""
    layers, outer = local_params(shape, choice)
    m = np.asarray(choice.microbatches, float)
    m = np.where((m > 1) & (not choice.traits.frozen), m, 0.0)
    return m * memory_seconds(cluster, ACCUMULATE_BYTES * (layers + outer))


def _offload_seconds(shape, cluster, choice, passes, stages) -> Floats:
    """What goes to host memory and back, beyond what computation hides."""
    if choice.offload == "none" and not choice.remat.startswith("offload:"):
        return np.zeros(())
    host = cluster.chip.host_bytes_per_second
    layers, outer = local_params(shape, choice)
    seconds = np.zeros(())
    if "optimizer" in choice.offload:
        ranks = np.where(np.asarray(choice.zero_stage) > 0, choice.fsdp, 1)
        seconds = seconds + 12.0 * (layers + outer) / ranks / host
    if "activations" in choice.offload or choice.remat.startswith("offload:"):
        tokens = np.asarray(choice.microbatch) * shape.seq_len / choice.context
        moved = tokens * kept_bytes(shape, choice.remat) / choice.tensor
        m, each = np.asarray(choice.microbatches, float), moved / host
        for name in ("forward", "input"):
            seconds = seconds + m * stages.busiest * np.maximum(0, each - passes[name].seconds)
    return seconds


def kept_bytes(shape: Shape, remat: str) -> float:
    """Bytes of a token that a layer keeps under a policy, over the ranks of tensor together."""
    heads, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    wide = shape.d_ff
    if shape.expert_layers:
        wide = shape.expert_ff * (shape.top_k + shape.shared_experts) + shape.d_model
    sizes = {
        "query": heads, "key": keys, "value": keys, "attention": heads,
        "attention_out": shape.d_model, "mlp_up": wide, "mlp_gate": wide * shape.gated,
    }  # fmt: skip
    if ":" in remat:
        return 2.0 * (
            shape.d_model * remat.startswith("save")
            + sum(sizes[name.strip()] for name in remat.partition(":")[2].split(","))
        )
    kept = 0.0 if remat == "full" else sum(sizes.values()) + 2 * shape.d_model
    return 2.0 * (shape.d_model + kept)
