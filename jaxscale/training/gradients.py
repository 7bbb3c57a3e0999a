"""Loss and gradients of a step, summed over micro-batches and replicas."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxscale.batch import Batch
from jaxscale.config.layout import MANUAL_AXES, Layout
from jaxscale.models.forward import forward
from jaxscale.models.protocol import Model, Remat, Sums, head_params, no_remat
from jaxscale.pipeline.executor import buffers, execute, execute_forward
from jaxscale.pipeline.rank import Chunks, Columns
from jaxscale.pipeline.stages import PipelineStages
from jaxscale.sharding.resolve import is_axes, manual_part
from jaxscale.sharding.specs import (
    BATCH_ROWS,
    CHUNKS,
    PER_MANUAL_RANK,
    REPLICATED,
    TABLE_COLUMNS,
    manually,
)
from jaxscale.sharding.zero import Zero
from jaxscale.training.accumulation import make_accumulation
from jaxscale.training.layers.layer_scan import each
from jaxscale.training.remat import remat_of

Tree = Any


def make_gradients(
    model: Model,
    layout: Layout,
    zero: Zero,
    mesh: Mesh,
    stages: PipelineStages | None = None,
    *,
    unroll_loops: bool = False,
) -> Callable[[Tree, Batch], tuple[Sums, Tree, Tree]]:
    """`(params, batch) -> (sums, gradient sums, gradients of batch.vectors)` for a resolved layout.

    Sums are over every weighted token of the global batch, not divided by their number. Gradients
    are in the accumulation type, sharded by ZeRO from stage 1 on; those of vectors have the
    vectors' type and sharding.
    """
    if stages is not None:
        return _pipelined(model, layout, zero, mesh, stages)
    platform = mesh.devices.flat[0].platform
    accumulate = make_accumulation(model, layout, zero, platform, unroll_loops=unroll_loops)

    def local(params: Tree, batch: Batch) -> tuple[Sums, Tree, Tree]:
        groups = split_batch(batch, layout.num_groups, layout.group_size)
        sums, grads, dvectors = accumulate(params, groups)
        return sums, grads, _join_groups(dvectors, 2)

    return _gradients(local, zero, mesh, BATCH_ROWS)


def _pipelined(
    model: Model, layout: Layout, zero: Zero, mesh: Mesh, stages: PipelineStages
) -> Callable[[Tree, Batch], tuple[Sums, Tree, Tree]]:
    """`make_gradients` by the table of a pipeline."""
    remat = _pipelined_remat(layout)
    row_major = mesh.devices.flat[0].platform == "tpu"

    def local(params: Tree, batch: Batch, columns: Columns, chunks: Chunks):
        sums, grads, dvectors = execute(
            model,
            remat,
            zero,
            stages,
            params,
            split_batch(batch, layout.microbatches),
            columns,
            chunks,
            row_major=row_major,
            offload=layout.offloads("activations"),
        )
        return zero.total(sums), grads, _join_groups(dvectors, 1)

    run = _gradients(local, zero, mesh, BATCH_ROWS, TABLE_COLUMNS, CHUNKS)
    return lambda params, batch: run(params, batch, stages.columns, stages.chunks)


def _pipelined_remat(layout: Layout) -> Remat:
    # The table may have operations that recompute the residuals of a chunk.
    if layout.remat_policy.kept_passes is not None:
        return no_remat
    return remat_of(layout.remat_policy)


def pipeline_buffers(
    model: Model,
    layout: Layout,
    zero: Zero,
    mesh: Mesh,
    stages: PipelineStages,
    params: Tree,
    batch: Batch,
) -> dict[str, Tree]:
    """The shapes of a pipeline rank's buffers between ticks, by the names of `executor`; the
    automatic axes shard some of them further.

    Args:
      params, batch: shapes.
    """
    remat = _pipelined_remat(layout)

    def local(params: Tree, batch: Batch, chunks: Chunks) -> dict[str, Tree]:
        groups = split_batch(batch, layout.microbatches)
        carried = buffers(model, remat, zero, stages, params, groups, chunks)
        return jax.tree.map(lambda x: x[None], carried)

    run = _manually(local, zero, mesh, (BATCH_ROWS, CHUNKS), PER_MANUAL_RANK)
    carried = jax.eval_shape(run, params, batch, stages.chunks)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), carried)


def make_loss(
    model: Model, layout: Layout, zero: Zero, mesh: Mesh, stages: PipelineStages | None = None
) -> Callable[[Tree, Batch], jax.Array]:
    """`(params, batch) -> nll_sum`: the forward pass only, for evaluation."""
    if stages is not None:
        return _pipelined_loss(model, layout, zero, mesh, stages)

    def local(params: Tree, batch: Batch) -> jax.Array:
        # Gathered once, as in a train step, or for each micro-batch.
        weights = zero.gather(params, zero.axes) if zero.keeps else params
        held = zero.kept

        def one(nll_sum, batch):
            stream = forward(model, weights, batch, held.gather_part)
            head = held.gather(head_params(model, weights), head_params(model, zero.axes))
            losses = model.loss(head, stream, batch)
            return nll_sum + losses["nll"], None

        groups = split_batch(batch, layout.microbatches)
        return zero.total(each(one, jnp.zeros((), zero.loss_dtype), groups)[0])

    return _manually(local, zero, mesh, (BATCH_ROWS,), REPLICATED)


def _pipelined_loss(
    model: Model, layout: Layout, zero: Zero, mesh: Mesh, stages: PipelineStages
) -> Callable[[Tree, Batch], jax.Array]:
    """`make_loss` by the forward part of a pipeline's table."""

    def local(params: Tree, batch: Batch, columns: Columns, chunks: Chunks) -> jax.Array:
        groups = split_batch(batch, layout.microbatches)
        sums = execute_forward(model, zero, stages, params, groups, columns, chunks)
        return zero.total(sums["nll"])

    run = _manually(local, zero, mesh, (BATCH_ROWS, TABLE_COLUMNS, CHUNKS), REPLICATED)
    return lambda params, batch: run(params, batch, stages.forward_program.columns, stages.chunks)


def _gradients(
    local: Callable[..., tuple[Sums, Tree, Tree]], zero: Zero, mesh: Mesh, *others: Tree
) -> Callable[..., tuple[Sums, Tree, Tree]]:
    """`_manually` for a function that returns sums over all ranks, and gradients of parameters and
    of the batch's vectors."""
    run = _manually(local, zero, mesh, others, (REPLICATED, _param_specs(zero), BATCH_ROWS))

    def gradients(params: Tree, *arguments: Tree) -> tuple[Sums, Tree, Tree]:
        sums, grads, dvectors = run(params, *arguments)
        return sums, zero.join_blocks(grads), dvectors

    return gradients


def _manually(
    local: Callable, zero: Zero, mesh: Mesh, others: tuple[Tree, ...], returned: Tree
) -> Callable:
    """A function that calls `local` on every rank of the manual axes, with the rank's part of the
    parameters, their blocks split, and of the other arguments.

    Args:
      others: the specs of the arguments after the parameters.
      returned: the specs of the results.
    """
    run = manually(local, MANUAL_AXES, (_param_specs(zero), *others), returned, mesh)
    return lambda params, *arguments: run(zero.split_blocks(params), *arguments)


def _param_specs(zero: Zero) -> Tree:
    """The specs over the manual axes of parameters inside the `shard_map`, and of their
    gradients."""
    return jax.tree.map(
        lambda axes: manual_part(zero.blocked_spec(axes, zero.state_rules)),
        zero.axes,
        is_leaf=is_axes,
    )


def split_batch(batch: Batch, *groups: int) -> Batch:
    """Splits the rows of a batch into leading dimensions: [b, T] to [*groups, b / ..., T].

    The first of M micro-batches has rows 0, M, 2 M and so on: each micro-batch has the same rows of
    the global batch for any number of ranks, as a loss over a micro-batch needs.
    """

    def split(x: jax.Array) -> jax.Array:
        count = math.prod(groups)
        rows = x.reshape(x.shape[0] // count, count, *x.shape[1:])
        return rows.swapaxes(0, 1).reshape(*groups, *rows.shape[:1], *x.shape[1:])

    return jax.tree.map(split, batch)


def _join_groups(tree: Tree, dims: int) -> Tree:
    """The inverse of `split_batch` for arrays whose first `dims` dimensions are groups."""

    def join(x: jax.Array) -> jax.Array:
        rows = x.reshape(math.prod(x.shape[:dims]), *x.shape[dims:]).swapaxes(0, 1)
        return rows.reshape(-1, *rows.shape[2:])

    return jax.tree.map(join, tree)
