"""Loss and gradients of a step, summed over micro-batches and replicas."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxscale.batch import Batch
from jaxscale.layout import MANUAL_AXES, Layout
from jaxscale.models.forward import forward
from jaxscale.models.protocol import (
    Model,
    Sums,
    head_params,
    zero_sums,
)
from jaxscale.ops.stacked import at
from jaxscale.pipeline.executor import Chunks, Columns, Remat, buffers, execute, execute_forward
from jaxscale.pipeline.stages import PipelineStages
from jaxscale.sharding.resolve import Rules, is_axes, manual_part
from jaxscale.sharding.specs import (
    BATCH_ROWS,
    CHUNKS,
    PER_MANUAL_RANK,
    REPLICATED,
    TABLE_COLUMNS,
)
from jaxscale.sharding.zero import Zero
from jaxscale.training.layer_loop import Accumulated, GroupPass, Visit, make_group_pass
from jaxscale.training.layer_scan import each
from jaxscale.training.remat import rematerialised

Tree = Any


def make_gradients(
    model: Model,
    layout: Layout,
    zero: Zero,
    mesh: Mesh,
    stages: PipelineStages | None = None,
    *,
    unroll_layers: bool = False,
) -> Callable[[Tree, Batch], tuple[Sums, Tree]]:
    """`(params, batch) -> (sums, gradient sums)` for a resolved layout.

    Sums over every weighted token of the global batch, not yet divided by their number. Gradients
    leave in the accumulation type, sharded over fsdp from ZeRO stage 1 on.
    """
    if stages is not None:
        return _pipelined(model, layout, zero, mesh, stages)
    count = 1 if layout.accumulation == "layered" else layout.microbatches
    spans = _group_spans(zero, count)
    # One set of arrays for the residuals of all groups: in each, XLA would fill new ones with zeros
    # and copy them. Not on TPUs, where a step needed more memory and moved as many bytes; nor where
    # layers prefetch, as the scheduler for GPUs then hid fewer gathers.
    offloads = layout.offloads("activations") or layout.remat_policy.offloads
    reuses = not (zero.kept.gathers or offloads) and mesh.devices.flat[0].platform != "tpu"

    def local(params: Tree, batch: Batch) -> tuple[Sums, Tree]:
        groups = split_batch(batch, count, layout.microbatches // count)
        weights, grads = params, zero.zeros(params, zero.axes, finished=count == 1)
        done, visit = Accumulated(zero_sums(model, zero.loss_dtype), grads), None
        for begin, end in spans:
            visit = Visit(first=begin == 0, last=end == count == begin + 1)
            one = make_group_pass(model, layout, zero, visit, unroll_layers=unroll_layers)
            some = jax.tree.map(lambda x, begin=begin, end=end: x[begin:end], groups)
            nothing = jnp.zeros(())
            if begin:
                # Otherwise a compiler could begin with the forward pass of the last group, or with
                # empty arrays for residuals, and hold them beside those of the groups before.
                some, done, nothing = jax.lax.optimization_barrier((some, done, nothing))
            if visit.last and begin and zero.scatters_last:
                grads = zero.zeros(params, zero.axes, finished=True)
                done = done._replace(grads=grads, earlier=done.grads)
            if reuses and count > 1 and not (visit.first and zero.keeps):
                saved = done.saved or one.empty(weights, at(some, 0), done.sums, nothing)
                done = done._replace(saved=saved)
            weights, done = _each_group(one, weights, some, done)
        assert visit is not None, "a step has an accumulation group"
        # What remains otherwise are vectors.
        grads = done.grads if visit.last else zero.finish(done.grads, zero.axes)
        return zero.total(done.sums), grads

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(_manual_specs(zero, zero.state_rules), BATCH_ROWS),
        out_specs=(REPLICATED, _manual_specs(zero, zero.state_rules)),
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )
    return functools.partial(_with_rows, zero, run)


def _group_spans(zero: Zero, count: int) -> list[tuple[int, int]]:
    """The accumulation groups that one loop goes through, from one to the next: the first group is
    apart where it keeps the weights that it gathers, and the last one where it reduces what
    remains."""
    apart = {1} if zero.keeps else set()
    apart |= {count - 1} if zero.remains else set()
    return list(itertools.pairwise(sorted({0, count, *apart})))


def _each_group(
    group_pass: GroupPass, weights: Tree, groups: Batch, done: Accumulated
) -> tuple[Tree, Accumulated]:
    """`GroupPass.run` for groups [N, G, ...]; only a single one's weights may be other ones."""
    if jax.tree.leaves(groups)[0].shape[0] == 1:
        return group_pass.run(weights, at(groups, 0), done)
    return weights, jax.lax.scan(
        lambda done, batch: (group_pass.run(weights, batch, done)[1], None), done, groups
    )[0]


def _with_rows(zero: Zero, run: Callable, params: Tree, *others: Any) -> tuple[Sums, Tree]:
    sums, grads = run(zero.apart(params), *others)
    return sums, zero.together(grads)


def _pipelined(
    model: Model, layout: Layout, zero: Zero, mesh: Mesh, stages: PipelineStages
) -> Callable[[Tree, Batch], tuple[Sums, Tree]]:
    """`make_gradients`, by the table of a pipeline."""
    remat = _pipelined_remat(layout)
    row_major = mesh.devices.flat[0].platform == "tpu"

    def local(params: Tree, batch: Batch, columns: Columns, chunks: Chunks):
        sums, grads = execute(
            model,
            remat,
            zero,
            stages,
            params,
            split_batch(batch, layout.microbatches),
            columns,
            chunks,
            row_major=row_major,
        )
        return zero.total(sums), zero.finish(grads, zero.axes)

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(_manual_specs(zero, zero.state_rules), BATCH_ROWS, TABLE_COLUMNS, CHUNKS),
        out_specs=(REPLICATED, _manual_specs(zero, zero.state_rules)),
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )
    return lambda params, batch: _with_rows(
        zero, run, params, batch, stages.program.columns, stages.chunks
    )


def _pipelined_remat(layout: Layout) -> Remat:
    # The table may have operations that recompute the residuals of a chunk.
    if layout.remat_policy.kept_passes is not None:
        return lambda layer: layer
    return functools.partial(rematerialised, remat=layout.remat_policy)


def pipeline_buffers(
    model: Model,
    layout: Layout,
    zero: Zero,
    mesh: Mesh,
    stages: PipelineStages,
    params: Tree,
    batch: Batch,
) -> dict[str, Tree]:
    """The shapes of what a rank of a pipeline carries between ticks, by the names of `executor`;
    the automatic axes shard some of them further.

    Args:
      params, batch: shapes.
    """
    remat = _pipelined_remat(layout)

    def local(params: Tree, batch: Batch, chunks: Chunks) -> dict[str, Tree]:
        groups = split_batch(batch, layout.microbatches)
        carried = buffers(model, remat, zero, stages, params, groups, chunks)
        return jax.tree.map(lambda x: x[None], carried)

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(_manual_specs(zero, zero.state_rules), BATCH_ROWS, CHUNKS),
        out_specs=PER_MANUAL_RANK,
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )
    carried = jax.eval_shape(
        lambda params, *others: run(zero.apart(params), *others), params, batch, stages.chunks
    )
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), carried)


def make_loss(
    model: Model, layout: Layout, zero: Zero, mesh: Mesh, stages: PipelineStages | None = None
) -> Callable[[Tree, Batch], jax.Array]:
    """`(params, batch) -> nll_sum`: the forward pass alone, for evaluation."""
    if stages is not None:
        return _pipelined_loss(model, layout, zero, mesh, stages)

    def local(params: Tree, batch: Batch) -> jax.Array:
        def one(nll_sum, batch):
            stream = forward(model, params, batch, zero.gather_part)
            head = zero.gather(head_params(model, params), head_params(model, zero.axes))
            losses = model.loss(head, stream, batch)
            return nll_sum + losses["nll"], None

        groups = split_batch(batch, layout.microbatches)
        return zero.total(each(one, jnp.zeros((), zero.loss_dtype), groups)[0])

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(_manual_specs(zero, zero.state_rules), BATCH_ROWS),
        out_specs=REPLICATED,
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )
    return lambda params, batch: run(zero.apart(params), batch)


def _pipelined_loss(
    model: Model, layout: Layout, zero: Zero, mesh: Mesh, stages: PipelineStages
) -> Callable[[Tree, Batch], jax.Array]:
    """`make_loss`, by the forward part of a pipeline's table."""

    def local(params: Tree, batch: Batch, columns: Columns, chunks: Chunks) -> jax.Array:
        groups = split_batch(batch, layout.microbatches)
        sums = execute_forward(model, zero, stages, params, groups, columns, chunks)
        return zero.total(sums["nll"])

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(_manual_specs(zero, zero.state_rules), BATCH_ROWS, TABLE_COLUMNS, CHUNKS),
        out_specs=REPLICATED,
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )
    return lambda params, batch: run(
        zero.apart(params), batch, stages.forward_program.columns, stages.chunks
    )


def _manual_specs(zero: Zero, rules: Rules) -> Tree:
    return jax.tree.map(
        lambda axes: manual_part(zero.apart_spec(axes, rules)), zero.axes, is_leaf=is_axes
    )


def split_batch(batch: Batch, *groups: int) -> Batch:
    """Splits the rows of a batch into leading dimensions: [b, T] to [*groups, b / ..., T]."""
    return jax.tree.map(
        lambda x: x.reshape(*groups, x.shape[0] // math.prod(groups), *x.shape[1:]), batch
    )
