"""Seconds of state in a step: gathers and reductions, the update, and host offload."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.config import zero_stage
from jaxscale.config.layout import SLICED
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.cost.communication import LocalParams, StateTraffic
from jaxscale.planner.cost.kernels import memory_seconds
from jaxscale.planner.cost.layer import LayerCompute
from jaxscale.planner.cost.passes import LayerPass, contention
from jaxscale.planner.cost.pipeline import StageLayers
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.tables.state_ticks import TickCollectives
from jaxscale.planner.tables.table_makespan import count_copies
from jaxscale.sharding.model_trace import ModelWork, StackWork
from jaxscale.sharding.rules import layer_ranks

Floats = Any  # a float, or float [N]

OPTIMIZER_BYTES = 32
"""Bytes per parameter that Adam reads and writes: gradient 4, master weights and two moments 24,
and the 16-bit parameter with its cast."""

WIDE_RATE = 0.5
"""Rate of matmuls of float32 operands over that of bfloat16, on a GPU: TF32 has 156 of 312 TFLOP/s
on A100 and 494.7 of 989.4 on H100 (NVIDIA's datasheets). A TPU rounds such operands to bfloat16."""

ACCUMULATE_BYTES = 10
"""Bytes per parameter of adding a 16-bit gradient of a micro-batch to the 32-bit accumulator."""

CAST_BYTES = 6
"""Bytes per parameter of casting a 32-bit weight to 16 bits."""

MOMENT_BYTES = 8
"""Bytes per parameter of Adam's moments in float32."""

UPDATE_TRANSFERS = 1.5
"""Seconds of the transfers of an offloaded optimizer's state over those in one direction: the two
directions overlap in part. In `training.update_in_turn` one follows the other."""

WAITS_FOR_SCATTER = ("tpu3", "tpu4", "tpu5e")
"""Generations on which reduce-scatters are not overlapped: XLA fuses only all-gathers with compute
there (flags of MaxText's scripts for v5e). On later ones sparse cores drive both."""


def state_seconds(
    cluster: Cluster,
    parallelism: Parallelism,
    passes: dict[str, LayerPass],
    layer: LayerCompute,
    stages: StageLayers,
    state: StateTraffic,
) -> tuple[Floats, Floats, dict[str, Floats]]:
    """Exposed seconds over the axes of ZeRO, "fsdp", and over data; and the overlapped seconds.
    Those within the ticks of pipelines are `tick_collectives`."""
    p, m = np.asarray(parallelism.pipeline), np.asarray(parallelism.microbatches, float)
    piped = p > 1
    sweeps = np.where(piped, m, 1.0 if parallelism.accumulation == "layered" else m)
    fsdp, data, hidden = overlapped_state_seconds(
        cluster, parallelism, passes, layer, stages, state, sweeps
    )
    if not np.any(piped):
        return fsdp, data, hidden
    # Outside the ticks, where there is no compute to hide behind.
    zero, chunks = np.asarray(parallelism.zero_stage), _chunks(parallelism)
    by_layer = parallelism.pipeline_gather == "layer"
    at_once = (chunks == 1) & (not by_layer)
    around = zero_stage.gathers_each_pass(zero) * (state.gather_outer + at_once * state.gather)
    around = around + zero_stage.scatters(zero) * at_once * state.scatter_layers
    last = zero_stage.scatters_last(zero) * state.scatter + state.replicas
    ends = np.where(zero_stage.shards_state(zero), last, state.whole)
    ends = ends + zero_stage.keeps(zero) * state.update + state.ends
    fsdp = np.where(piped, around + by_layer * fsdp, fsdp)
    kept = np.where(piped & (not by_layer), 0.0, hidden["fsdp"])
    return fsdp, np.where(piped, ends, data), {"fsdp": kept, "data": ~piped * hidden["data"]}


def tick_collectives(parallelism: Parallelism, state: StateTraffic) -> TickCollectives:
    """Gathers and reductions of pipeline ranks within ticks: of one chunk at a time, if a rank has
    several, and of the gradients of embedding and head with every micro-batch."""
    zero, chunks = np.asarray(parallelism.zero_stage), np.asarray(parallelism.virtual_stages)
    piped = np.asarray(parallelism.pipeline) > 1
    by_chunk = piped & (_chunks(parallelism) > 1) & (parallelism.pipeline_gather == "chunk")
    ends, sliced = piped * zero_stage.scatters(zero), parallelism.head == SLICED
    return TickCollectives(
        gather=by_chunk * zero_stage.gathers_each_pass(zero) * state.gather / chunks,
        reduce=by_chunk * zero_stage.scatters(zero) * state.scatter_layers / chunks,
        outer=ends * (not sliced) * state.scatter_outer,
        embedding=ends * sliced * state.scatter_embedding,
        head_slice=ends * sliced * state.scatter_slice,
    )


def _chunks(parallelism: Parallelism) -> np.ndarray:
    """Chunks of a rank, of both directions together."""
    if np.all(np.asarray(parallelism.pipeline) == 1):
        return np.ones((), int)
    return np.asarray(parallelism.virtual_stages) * count_copies(parallelism.schedule)[0]


@dataclass(frozen=True)
class Placement:
    """When collectives of state run. The defaults are our engine's; the trainers that
    `tools/planner_validation` scores have others."""

    overlap_gradients: bool = True  # reduced during the backward pass
    overlap_parameters: bool = True  # all-gathered during compute
    keep_gathered: bool = False  # ZeRO-3 keeps weights gathered from forward to backward
    reduce_each: bool = True  # ZeRO-2 and 3 reduce per micro-batch, not per step


def overlapped_state_seconds(
    cluster: Cluster,
    parallelism: Parallelism,
    passes: dict[str, LayerPass],
    layer: LayerCompute,
    stages: StageLayers,
    state: StateTraffic,
    sweeps: Floats,
    placement: Placement = Placement(),
) -> tuple[Floats, Floats, dict[str, Floats]]:
    """`state_seconds` where there is compute to hide behind: without a pipeline, and over fsdp in
    pipelines that gather by layer, in the layers of every operation.

    Args:
      sweeps: passes of a step over its layers, each of which gathers their weights.
    """
    zero, m = np.asarray(parallelism.zero_stage), np.asarray(parallelism.microbatches, float)
    p, by_layer = np.asarray(parallelism.pipeline), parallelism.pipeline_gather == "layer"
    forward = stages.busiest * passes["forward"].seconds * m / sweeps
    back = sum(passes[name].seconds for name in ("input", "weights", "recompute"))
    backward = stages.busiest * back * m / sweeps
    head = (layer.head_forward.seconds + layer.head_backward.seconds) * m / sweeps
    slow = contention(cluster)

    def overlap(sent: Floats, work: Floats, wanted: bool, first: Floats) -> tuple[Floats, Floats]:
        """Exposed seconds, contention included, and overlapped ones."""
        if not wanted:
            return sent, 0.0 * sent
        # Exposed: the first transfer, which precedes all compute, or what exceeds the compute.
        late = np.maximum(np.minimum(sent, first), sent - work)
        return late + slow * np.minimum(sent - late, work), sent - late

    third = zero_stage.gathers_each_pass(zero)
    outer, scatter = state.gather_outer, state.scatter
    if by_layer:  # without embedding and head: see `state_seconds`
        outer, scatter = np.where(p > 1, 0.0, outer), np.where(p > 1, state.scatter_layers, scatter)
    count = np.maximum(1.0, stages.busiest)
    once = state.gather / count  # of a layer; the first one of a pass is not overlapped
    on = overlap(
        state.gather + outer,
        forward + head,
        placement.overlap_parameters,
        once + outer,
    )
    scatters = zero_stage.scatters(zero) if placement.reduce_each else np.zeros_like(third)
    gathers = third * (0.0 if placement.keep_gathered else 1.0)
    if by_layer and parallelism.remat == "full":
        gathers = gathers + third * (p > 1)  # recompute is a separate operation
    back_sent = gathers * state.gather + scatters * scatter
    off = overlap(back_sent, backward, placement.overlap_gradients, scatter / count)
    if cluster.chip.generation in WAITS_FOR_SCATTER:
        off = overlap(gathers * state.gather, backward, placement.overlap_parameters, 0.0 * once)
        off = off[0] + scatters * scatter, off[1]
    fsdp = sweeps * (third * on[0] + off[0])
    hidden = sweeps * (third * on[1] + off[1])
    # Once per step, overlapped with the last backward pass.
    last = backward / np.where(p > 1, np.maximum(m / sweeps, 1), 1.0)
    left = ~np.asarray(scatters, bool)
    last_sums = left * state.scatter + state.replicas
    at_end = np.where(zero_stage.shards_state(zero), last_sums, state.whole)
    ended = overlap(at_end, last, placement.overlap_gradients, at_end / count)
    updated = zero_stage.keeps(zero) * state.update
    one_pass = forward * sweeps / m
    fresh = overlap(updated, one_pass, placement.overlap_parameters, updated / count)
    return fsdp, ended[0] + fresh[0] + state.ends, {"fsdp": hidden, "data": ended[1] + fresh[1]}


def update_flops(parallelism: Parallelism) -> Floats:
    """FLOPs of a device's matmuls in the update of whole matrices: of the layers that
    `training.state_placement` assigns to it (`sharding.rules.layer_ranks`). In some pipelines
    layers cannot be assigned to ranks, which are then assumed to repeat them."""
    total = np.zeros(())
    for one in parallelism.whole_matrices:
        rows = -(-one.layers // np.asarray(parallelism.pipeline))
        ranks = layer_ranks(rows, parallelism, one.of_experts)
        flops = one.shared_flops / np.asarray(parallelism.tensor) + one.repeated_flops
        owners = np.asarray(parallelism.expert) if one.of_experts else 1
        total = total + -(-rows // ranks) * flops / owners
    return total


def optimizer_seconds(params: LocalParams, cluster: Cluster, parallelism: Parallelism) -> Floats:
    if parallelism.frozen:
        return np.zeros(())
    mine = params.shards(parallelism, zero_stage.shards_state(parallelism.zero_stage))
    peak = cluster.peak_flops() * cluster.chip.matmul_fraction
    matmuls = update_flops(parallelism) / (peak * (WIDE_RATE if cluster.chip.cores else 1.0))
    # Pruning counts weights below thresholds, one reading of all for each bit of a threshold.
    moved = OPTIMIZER_BYTES * mine.total + 4 * parallelism.pruning_reads * mine.layers
    return memory_seconds(cluster, moved) + matmuls


def accumulate_seconds(params: LocalParams, cluster: Cluster, parallelism: Parallelism) -> Floats:
    """Gradient accumulation over micro-batches: of shards, where they are reduced in each."""
    m = np.asarray(parallelism.microbatches, float)
    m = np.where((m > 1) & (not parallelism.frozen), m, 0.0)
    by_layer = parallelism.pipeline_gather == "layer"
    reduced = np.where(
        np.asarray(parallelism.pipeline) > 1, by_layer, parallelism.accumulation == "sequential"
    )
    mine = params.shards(parallelism, reduced & zero_stage.scatters(parallelism.zero_stage))
    return m * memory_seconds(cluster, ACCUMULATE_BYTES * mine.total)


def weight_cast_seconds(params: LocalParams, cluster: Cluster, parallelism: Parallelism) -> Floats:
    """Casts of weights to the compute type: once a step where they are kept, else in every pass
    over the layers."""
    if not parallelism.casts_weights:
        return np.zeros(())
    zero = np.asarray(parallelism.zero_stage)
    kept = zero_stage.keeps(zero) & (np.asarray(parallelism.zero_ranks) > 1)
    by_layer = parallelism.pipeline_gather == "layer"
    kept = kept | ((np.asarray(parallelism.pipeline) > 1) & (not by_layer))
    layered = parallelism.accumulation == "layered"
    visits = np.where(kept | layered, 1.0, np.asarray(parallelism.microbatches, float))
    once = kept | parallelism.casts_once
    mine = params.shards(parallelism, zero_stage.shards_state(zero))
    elements = np.where(once, 1.0, 2.0 * visits) * mine.layers + visits * mine.outer
    return memory_seconds(cluster, CAST_BYTES * elements)


def offload_seconds(
    work: ModelWork,
    params: LocalParams,
    cluster: Cluster,
    parallelism: Parallelism,
    passes: dict[str, LayerPass],
    stages: StageLayers,
) -> Floats:
    """Exposed transfers to host memory and back."""
    by_policy = parallelism.offload != "none" or parallelism.remat.startswith("offload:")
    if not by_policy and not np.any(parallelism.offload_bytes):
        return np.zeros(())
    host = cluster.chip.host_bytes_per_second
    held = np.asarray(parallelism.host_moments) + parallelism.host_weights
    seconds = 2 * held / host
    seconds = seconds + _fetch_seconds(cluster, parallelism, passes, stages)
    if "optimizer" in parallelism.offload:
        mine = params.shards(parallelism, zero_stage.shards_state(parallelism.zero_stage))
        seconds = seconds + UPDATE_TRANSFERS * MOMENT_BYTES * mine.total / host
    if "activations" in parallelism.offload or parallelism.remat.startswith("offload:"):
        tokens = np.asarray(parallelism.microbatch) * work.seq_len / parallelism.context
        moved = tokens * offloaded_bytes(work, parallelism.remat) / parallelism.tensor
        m, each = np.asarray(parallelism.microbatches, float), moved / host
        for name in ("forward", "input"):
            late = np.maximum(0, each - passes[name].seconds)
            seconds = seconds + m * stages.busiest * late
    return seconds


def _fetch_seconds(
    cluster: Cluster,
    parallelism: Parallelism,
    passes: dict[str, LayerPass],
    stages: StageLayers,
) -> Floats:
    """Exposed transfers of layers' weights from host memory: those of a pass's first layer, and of
    the others what exceeds the compute of a layer. Kept weights are fetched in one pass."""
    layers, groups = np.maximum(1.0, stages.busiest), np.asarray(parallelism.num_groups, float)
    each = np.asarray(parallelism.host_weights) / layers / cluster.chip.host_bytes_per_second
    group = np.asarray(parallelism.microbatches, float) / groups
    forward = group * passes["forward"].seconds
    backward = group * sum(passes[name].seconds for name in ("input", "weights", "recompute"))
    kept = zero_stage.keeps(parallelism.zero_stage) & (np.asarray(parallelism.zero_ranks) > 1)
    late = each + (layers - 1) * np.maximum(0.0, each - forward)
    later = (layers - 1) * np.maximum(0.0, each - backward)
    return np.where(kept, late, groups * (late + later))


def offloaded_bytes(work: ModelWork, remat: str) -> float:
    """Bytes per token that an average layer saves under a policy, all tensor ranks together."""
    policy, _, listed = remat.partition(":")
    names = {name.strip() for name in listed.split(",") if name and policy != "keep"}
    everything, total = not names and remat != "full", 0.0
    for stack in work.stacks:
        sizes = saved_features(stack)
        kept = sum(size for name, size in sizes.items() if everything or name in names)
        # The layer's input; where everything is saved, also the inputs of its norms.
        kept += work.width * (3 if everything else 1)
        total += work.share(stack) * work.tokens(stack) * kept
    return 2.0 * total


def saved_features(stack: StackWork) -> dict[str, float]:
    """Features per token of the named values of an average layer of a stack."""
    sizes: dict[str, float] = {"attention": 0.0}
    for one in stack.matmuls:
        for name, (units, each) in zip(one.names, one.outputs):
            sizes[name] = sizes.get(name, 0.0) + units * each * one.tokens * one.share
    for one in stack.attention:
        sizes["attention"] += one.heads * one.value_features * one.share
    for one in stack.experts:
        for name in ("mlp_up", "mlp_gate")[: 1 + one.gated]:
            sizes[name] = sizes.get(name, 0.0) + one.choices * one.hidden * one.share
    return {name: size for name, size in sizes.items() if name not in ("mlp_down", "compressed")}
