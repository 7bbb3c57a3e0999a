"""Temporaries at the end of a step: the last gradient reductions, and the optimizer's update."""

import math

import numpy as np

from jaxscale.config import zero_stage
from jaxscale.planner.memory.at_rest import sides
from jaxscale.planner.memory.layer_loop import LayerLoop, Shards
from jaxscale.planner.memory.transients import Transients
from jaxscale.sharding.model_trace import Ints, ParamShape, Rows, maximum, select
from jaxscale.sharding.rules import layer_ranks
from jaxscale.training.tracing.traces import model_trace


def reduction_bytes(loop: LayerLoop, transients: Transients, rows: Rows) -> Ints:
    """Outputs of reductions over replicas."""
    layout, stage = loop.layout, loop.layout.zero_stage
    shards = zero_stage.shards_state(stage)

    def largest(rows: Rows) -> Ints:
        return maximum(
            *(
                rows.get(array.part, 1) * array.shard_size(layout, over_fsdp=shards)
                for array in loop.trained.arrays
            )
        )

    # Inputs and outputs of the reductions of the last layer, embedding and head; where whole
    # gradients are summed in place, two of the largest are in flight.
    last = loop.gradients + loop.trained.elements("embed head")
    if transients.in_place:
        last = select(loop.single, last, largest({}))
    once = select(loop.reduces & np.logical_not(shards), 2 * loop.accumulated * last)
    # In a pipeline, the stacks that are not reduced per visit.
    left = zero_stage.remains(stage, layout.zero_ranks, layout.data)
    parts = {**rows, "embed head": 1}
    sums = [count * loop.trained.elements(part, shards) for part, count in parts.items()]
    stacks = loop.accumulated * sum(sums)
    if transients.in_place:
        stacks = 2 * loop.accumulated * largest(rows)
    return select(layout.pipeline == 1, once, select(left, stacks))


def update_bytes(optimizer: str, loop: LayerLoop, rows: Rows) -> Ints:
    """Temporaries of the optimizer; AdamW and Lion are elementwise and have none."""
    layout, wide = loop.layout, 4
    if optimizer == "adafactor":
        # All squared gradients, before the means over rows and columns.
        over_fsdp = zero_stage.shards_state(layout.zero_stage)
        counts = model_trace(loop.model).stack_layers
        return wide * sum(
            counts.get(array.part, 1) * array.shard_size(layout, over_fsdp=over_fsdp)
            for array in loop.trained.arrays
        )
    if optimizer == "muon":
        return wide * sum(
            _orthogonalised(loop.trained, part, count) for part, count in rows.items()
        )
    return 0


def pruning_bytes(loop: LayerLoop, transients: Transients, rows: Rows) -> Ints:
    """Temporaries of an update that prunes: of each weight of the layers its update, its magnitude
    as an integer, and masks: of live weights, those below the threshold, and ties."""
    shards = zero_stage.shards_state(loop.layout.zero_stage)
    weights = sum(count * loop.trained.elements(part, shards) for part, count in rows.items())
    return transients.pruned * weights


def _matrices(array: ParamShape, expert_ranks: Ints) -> Ints:
    """Matrices of a layer on a device: one, or one for each of its experts."""
    if "experts" not in array.axes:
        return 1
    return array.shape[array.axes.index("experts")] // expert_ranks


def _orthogonalised(trained: Shards, part: str, rows: Ints) -> Ints:
    """Elements of a stack's matrices that a rank orthogonalises (see `sharding.layer_rules`): input
    and output of a Newton-Schulz iteration, and two of the size of the largest Gram matrix. Without
    sharded state the results of all layers are gathered, in addition to the gradients."""
    layout = trained.layout
    matrices = [one for one in trained.arrays if one.part == part and sides(one)]
    if not matrices:
        return 0
    squares = [
        min(math.prod(side) for side in sides(one)) ** 2 * _matrices(one, layout.expert)
        for one in matrices
    ]
    sizes = [array.shard_size(layout, over_fsdp=False) for array in matrices]
    counts = [-(-rows // layer_ranks(rows, layout, "experts" in one.axes)) for one in matrices]
    mine = 2 * sum(n * size for n, size in zip(counts, sizes))
    mine = mine + 2 * maximum(*(n * square for n, square in zip(counts, squares)))
    whole, ranks = sum(sizes), layer_ranks(rows, layout, False)
    shards = zero_stage.shards_state(layout.zero_stage) & (np.asarray(layout.zero_ranks) > 1)
    # Where XLA partitions the iteration over shards: every matrix, and its Gram matrix.
    alone = rows * (2 * whole + sum(squares))
    sharded = mine + select((ranks > 1) & np.logical_not(shards), rows * whole)
    return select(shards & (ranks == 1), alone, sharded)
