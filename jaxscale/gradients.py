"""Loss and gradients of a step: the walks over micro-batches and layers.

Letters in comments: m micro-batches of a step, G those that walk together, L layers.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxscale.batch import Batch
from jaxscale.layout import MANUAL_AXES, Layout
from jaxscale.models.decoder import Decoder
from jaxscale.residuals import split_vjp
from jaxscale.sharding import Rules, is_axes, manual_part, resolve
from jaxscale.zero import Zero

Tree = Any

REMAT_POLICIES = {"full": jax.checkpoint_policies.nothing_saveable}
"""What a rematerialised layer keeps; "none" keeps everything and is not rematerialised."""

BATCH_SPEC = PartitionSpec(("data", "fsdp"))


def make_gradients(
    model: Decoder, layout: Layout, zero: Zero, mesh: Mesh
) -> Callable[[Tree, Batch], tuple[tuple[jax.Array, jax.Array], Tree]]:
    """`(params, batch) -> ((loss_sum, nll_sum), gradient sums)` for a resolved layout.

    Sums over every weighted token of the global batch, not yet divided by their number. Gradients
    leave in the accumulation type, sharded over fsdp from ZeRO stage 1 on.
    """
    walk = make_walk(model, layout, zero)
    group = 1 if layout.accumulation == "sequential" else layout.microbatches

    def local(params: Tree, batch: Batch) -> tuple[tuple[jax.Array, jax.Array], Tree]:
        groups = split_batch(batch, layout.microbatches // group, group)
        sums = (jnp.zeros((), _loss_dtype(zero)),) * 2
        carry = (sums, zero.zeros(params))
        carry, _ = each(lambda carry, batch: (walk(params, batch, *carry), None), carry, groups)
        return zero.total(carry[0]), zero.finish(carry[1])

    return jax.shard_map(
        local, mesh=mesh,
        in_specs=(_manual_specs(zero, zero.param_rules), BATCH_SPEC),
        out_specs=(PartitionSpec(), _manual_specs(zero, zero.update_rules)),
        axis_names=set(MANUAL_AXES), check_vma=False,
    )  # fmt: skip


def make_loss(
    model: Decoder, layout: Layout, zero: Zero, mesh: Mesh
) -> Callable[[Tree, Batch], jax.Array]:
    """`(params, batch) -> nll_sum`: the forward pass alone, for evaluation."""

    def local(params: Tree, batch: Batch) -> jax.Array:
        def one(nll_sum, batch):
            def layer(x, shards):
                return model.block(zero.gather(shards, zero.layer_axes), x, batch), None

            x = model.embed(zero.gather(params["embed"], zero.axes["embed"]), batch)
            x, _ = jax.lax.scan(layer, x, params["layers"])
            head = zero.gather(model.head_params(params), model.head_params(zero.axes))
            return nll_sum + model.loss(head, x, batch)[1], None

        groups = split_batch(batch, layout.microbatches)
        return zero.total(each(one, jnp.zeros((), _loss_dtype(zero)), groups)[0])

    return jax.shard_map(
        local, mesh=mesh,
        in_specs=(_manual_specs(zero, zero.param_rules), BATCH_SPEC),
        out_specs=PartitionSpec(), axis_names=set(MANUAL_AXES), check_vma=False,
    )  # fmt: skip


def _manual_specs(zero: Zero, rules: Rules) -> Tree:
    return jax.tree.map(
        lambda axes: manual_part(resolve(axes, rules, zero.sizes)), zero.axes, is_leaf=is_axes
    )


def _loss_dtype(zero: Zero) -> jnp.dtype:
    return jnp.promote_types(zero.compute_dtype, jnp.float32)


def split_batch(batch: Batch, *groups: int) -> Batch:
    """Splits the rows of a batch into leading dimensions: [b, T] to [*groups, b / ..., T]."""
    return Batch(
        *(x.reshape(*groups, x.shape[0] // math.prod(groups), *x.shape[1:]) for x in batch)
    )


def each(function: Callable, carry: Tree, xs: Tree) -> tuple[Tree, Tree]:
    """`lax.scan`, but without a loop when there is one item: XLA schedules that better."""
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return jax.lax.scan(function, carry, xs)
    carry, y = function(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], y)


def make_walk(model: Decoder, layout: Layout, zero: Zero) -> Callable:
    """`(params, batch, sums, grads) -> (sums, grads)` for G micro-batches that walk together.

    For each layer, for each of the G micro-batches: the weights of a layer are gathered once a
    pass and its gradients scattered once, whatever G is (arXiv 2106.02679). The next layer's
    weights are gathered while this layer computes.
    """
    num_layers, prefetch = model.config.num_layers, zero.gathers
    block = model.block
    if layout.remat != "none":
        block = jax.checkpoint(block, policy=REMAT_POLICIES[layout.remat], prevent_cse=False)
    forward, backward = split_vjp(block)

    def walk(params: Tree, batch: Batch, sums: Tree, grads: Tree) -> tuple[Tree, Tree]:
        def fetch(index):
            layer = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), params["layers"]
            )
            return zero.gather(layer, zero.layer_axes)

        def weights_of(held, index, following):
            """This layer's weights, and what to hold for the next."""
            if not prefetch:
                return fetch(index), None
            return held, fetch(jnp.clip(following, 0, num_layers - 1))

        def forward_layer(carry, index):
            x, held = carry
            weights, held = weights_of(held, index, index + 1)
            _, (x, kept) = each(lambda _, xs: (None, forward(weights, *xs)), None, (x, batch))
            return (x, held), kept

        def backward_layer(carry, index_and_kept):
            dx, held, grads = carry
            index, kept = index_and_kept
            weights, held = weights_of(held, index, index - 1)

            def one(total, xs):
                batch, kept, dx = xs
                dweights, dx = backward(weights, batch, kept, dx)
                return add(total, dweights), dx

            total, dx = each(one, zero.running_sum(weights, dx), (batch, kept, dx))
            return (dx, held, add_at(grads, index, zero.scatter(total, zero.layer_axes))), None

        embed = zero.gather(params["embed"], zero.axes["embed"])
        _, x = each(lambda _, batch: (None, model.embed(embed, batch)), None, batch)
        layers = jnp.arange(num_layers)
        held = fetch(0) if prefetch else None
        (x, held), kept = jax.lax.scan(forward_layer, (x, held), layers)
        sums, dhead, dx = _head_pass(model, zero, params, batch, x, sums)
        (dx, _, layer_grads), _ = jax.lax.scan(
            backward_layer, (dx, held, grads["layers"]), (layers, kept), reverse=True
        )
        outer = model.outer_grads(_embed_backward(model, zero, embed, batch, dx), dhead)
        outer = {name: add(grads[name], grad) for name, grad in outer.items()}
        return sums, {**outer, "layers": layer_grads}

    return walk


def _head_pass(
    model: Decoder, zero: Zero, params: Tree, batch: Batch, x: jax.Array, sums: Tree
) -> tuple[Tree, Tree, jax.Array]:
    """Where a walk turns: the losses added to `sums`, and the gradients of the head and of x."""
    axes = model.head_params(zero.axes)
    head = zero.gather(model.head_params(params), axes)

    def one(carry, xs):
        sums, total = carry
        x, batch = xs
        losses, pullback = jax.vjp(lambda head, x: model.loss(head, x, batch), head, x)
        dhead, dx = pullback((jnp.ones_like(losses[0]), jnp.zeros_like(losses[1])))
        return (add(sums, losses), add(total, dhead)), dx

    (sums, total), dx = each(one, (sums, zero.running_sum(head, x)), (x, batch))
    return sums, zero.scatter(total, axes), dx


def _embed_backward(model: Decoder, zero: Zero, embed: Tree, batch: Batch, dx: jax.Array) -> Tree:
    """The gradients of the embedding."""

    def one(total, xs):
        batch, dx = xs
        # The forward pass that this repeats is a lookup whose result nobody uses: it is dropped.
        _, pullback = jax.vjp(lambda embed: model.embed(embed, batch), embed)
        return add(total, pullback(dx)[0]), None

    total, _ = each(one, zero.running_sum(embed, dx), (batch, dx))
    return zero.scatter(total, zero.axes["embed"])


def add(total: Tree, grads: Tree) -> Tree:
    """A running sum in the type of `total`; None is an empty one."""
    if total is None:
        return grads
    return jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), total, grads)


def add_at(total: Tree, index: jax.Array, grads: Tree) -> Tree:
    """Adds one layer's gradients to the stack, in place."""
    return jax.tree.map(lambda total, grad: total.at[index].add(grad), total, grads)
