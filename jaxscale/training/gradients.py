"""Loss and gradients of a step, summed over micro-batches and replicas."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxscale.batch import Batch
from jaxscale.layout import MANUAL_AXES, Layout
from jaxscale.models.decoder import Decoder
from jaxscale.pipeline.executor import Columns, Counts, buffers, execute, execute_forward
from jaxscale.pipeline.stages import PipelineStages
from jaxscale.sharding.resolve import Rules, is_axes, manual_part, resolve
from jaxscale.sharding.specs import (
    BATCH_ROWS,
    LAYER_COUNTS,
    PER_MANUAL_RANK,
    REPLICATED,
    TABLE_COLUMNS,
)
from jaxscale.sharding.zero import Zero
from jaxscale.training.layer_loop import each, make_group_pass
from jaxscale.training.remat import rematerialised

Tree = Any


def make_gradients(
    model: Decoder,
    layout: Layout,
    zero: Zero,
    mesh: Mesh,
    stages: PipelineStages | None = None,
    *,
    unroll_layers: bool = False,
) -> Callable[[Tree, Batch], tuple[tuple[jax.Array, jax.Array], Tree]]:
    """`(params, batch) -> ((loss_sum, nll_sum), gradient sums)` for a resolved layout.

    Sums over every weighted token of the global batch, not yet divided by their number. Gradients
    leave in the accumulation type, sharded over fsdp from ZeRO stage 1 on.
    """
    if stages is not None:
        return _pipelined(model, layout, zero, mesh, stages)
    group_pass = make_group_pass(model, layout, zero, unroll_layers=unroll_layers)
    group = 1 if layout.accumulation == "sequential" else layout.microbatches

    def local(params: Tree, batch: Batch) -> tuple[tuple[jax.Array, jax.Array], Tree]:
        groups = split_batch(batch, layout.microbatches // group, group)
        sums = (jnp.zeros((), zero.loss_dtype),) * 2
        carry = (sums, zero.zeros(params, zero.axes))
        carry, _ = each(
            lambda carry, batch: (group_pass(params, batch, *carry), None), carry, groups
        )
        return zero.total(carry[0]), zero.finish(carry[1])

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(_manual_specs(zero, zero.param_rules), BATCH_ROWS),
        out_specs=(REPLICATED, _manual_specs(zero, zero.update_rules)),
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )


def _pipelined(
    model: Decoder, layout: Layout, zero: Zero, mesh: Mesh, stages: PipelineStages
) -> Callable[[Tree, Batch], tuple[tuple[jax.Array, jax.Array], Tree]]:
    """`make_gradients`, by the table of a pipeline."""
    block = _pipelined_block(model, layout)
    row_major = mesh.devices.flat[0].platform == "tpu"

    def local(params: Tree, batch: Batch, columns: Columns, counts: Counts):
        sums, grads = execute(
            model,
            block,
            zero,
            stages,
            params,
            split_batch(batch, layout.microbatches),
            columns,
            counts,
            row_major=row_major,
        )
        return zero.total(sums), zero.finish(grads)

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(_manual_specs(zero, zero.param_rules), BATCH_ROWS, TABLE_COLUMNS, LAYER_COUNTS),
        out_specs=(REPLICATED, _manual_specs(zero, zero.update_rules)),
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )
    return lambda params, batch: run(params, batch, stages.program.columns, stages.counts)


def _pipelined_block(model: Decoder, layout: Layout) -> Callable:
    # The table may have operations that recompute the residuals of a chunk.
    by_table = layout.remat_policy.kept_passes is not None
    return model.block if by_table else rematerialised(model, layout.remat_policy)


def pipeline_buffers(
    model: Decoder,
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
    block = _pipelined_block(model, layout)

    def local(params: Tree, batch: Batch, counts: Counts) -> dict[str, Tree]:
        groups = split_batch(batch, layout.microbatches)
        carried = buffers(model, block, zero, stages, params, groups, counts)
        return jax.tree.map(lambda x: x[None], carried)

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(_manual_specs(zero, zero.param_rules), BATCH_ROWS, LAYER_COUNTS),
        out_specs=PER_MANUAL_RANK,
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )
    carried = jax.eval_shape(run, params, batch, stages.counts)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), carried)


def make_loss(
    model: Decoder, layout: Layout, zero: Zero, mesh: Mesh, stages: PipelineStages | None = None
) -> Callable[[Tree, Batch], jax.Array]:
    """`(params, batch) -> nll_sum`: the forward pass alone, for evaluation."""
    if stages is not None:
        return _pipelined_loss(model, layout, zero, mesh, stages)

    def local(params: Tree, batch: Batch) -> jax.Array:
        def one(nll_sum, batch):
            def layer(x, shards):
                return model.block(zero.gather(shards, zero.layer_axes), x, batch), None

            x = model.embed(zero.gather(params["embed"], zero.axes["embed"]), batch)
            x, _ = jax.lax.scan(layer, x, params["layers"])
            head = zero.gather(model.head_params(params), model.head_params(zero.axes))
            return nll_sum + model.loss(head, x, batch)[1], None

        groups = split_batch(batch, layout.microbatches)
        return zero.total(each(one, jnp.zeros((), zero.loss_dtype), groups)[0])

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(_manual_specs(zero, zero.param_rules), BATCH_ROWS),
        out_specs=REPLICATED,
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )


def _pipelined_loss(
    model: Decoder, layout: Layout, zero: Zero, mesh: Mesh, stages: PipelineStages
) -> Callable[[Tree, Batch], jax.Array]:
    """`make_loss`, by the forward part of a pipeline's table."""

    def local(params: Tree, batch: Batch, columns: Columns, counts: Counts) -> jax.Array:
        groups = split_batch(batch, layout.microbatches)
        return zero.total(execute_forward(model, zero, stages, params, groups, columns, counts)[1])

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(_manual_specs(zero, zero.param_rules), BATCH_ROWS, TABLE_COLUMNS, LAYER_COUNTS),
        out_specs=REPLICATED,
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )
    return lambda params, batch: run(params, batch, stages.forward_program.columns, stages.counts)


def _manual_specs(zero: Zero, rules: Rules) -> Tree:
    return jax.tree.map(
        lambda axes: manual_part(resolve(axes, rules, zero.sizes)), zero.axes, is_leaf=is_axes
    )


def split_batch(batch: Batch, *groups: int) -> Batch:
    """Splits the rows of a batch into leading dimensions: [b, T] to [*groups, b / ..., T]."""
    return Batch(
        *(x.reshape(*groups, x.shape[0] // math.prod(groups), *x.shape[1:]) for x in batch)
    )
