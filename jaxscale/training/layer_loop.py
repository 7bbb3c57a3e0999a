"""One walk through the layers and back: the loss and gradients of micro-batches that go together.

For each layer, for each of the G micro-batches: the weights of a layer are gathered once a pass and
its gradients reduced once, whatever G is (layered gradient accumulation, arXiv 2106.02679). With
G = 1 it is the ordinary pass that sequential accumulation repeats.

No layer waits for its own collectives. While one computes, the weights of the next arrive and the
gradients of the one before leave: 2L - 1 gathers, since the last layer turns with the weights that
it has, and L reductions of layer weights a walk.

Letters: G micro-batches, L layers.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.batch import Batch
from jaxscale.layout import Layout
from jaxscale.models.decoder import Decoder
from jaxscale.ops.split_vjp import split_vjp
from jaxscale.sharding.zero import Zero
from jaxscale.training.remat import from_host, rematerialised, to_host

Tree = Any
Index = int | jax.Array


class _Ready(NamedTuple):
    """What the layer to come finds ready; what is None it fetches itself."""

    weights: Tree = None
    kept: Tree = None  # what its forward pass kept for it


class _Back(NamedTuple):
    """What goes from layer to layer on the way back."""

    dx: jax.Array  # [G, ...]
    ready: _Ready
    pending: Tree  # gradients of the layer before, not reduced yet; None where there are none
    grads: Tree  # accumulators, [L, ...]


def make_walk(
    model: Decoder, layout: Layout, zero: Zero, *, unroll_layers: bool = False
) -> Callable:
    """`(params, batch, sums, grads) -> (sums, grads)` for a batch whose fields are [G, ...].

    `unroll_layers` writes the loops over layers out, for what reads a program and counts the body
    of a loop once.
    """
    last, offloads = model.config.num_layers - 1, layout.offloads("activations")
    prefetches = zero.gathers or offloads
    forward, backward = split_vjp(rematerialised(model, layout.remat_policy))

    def walk(params: Tree, batch: Batch, sums: Tree, grads: Tree) -> tuple[Tree, Tree]:
        def fetch(index: Index) -> Tree:
            return zero.gather(at(layers, index), zero.layer_axes)

        def reduce_into(grads: Tree, index: Index, total: Tree) -> Tree:
            return add_at(grads, index, zero.reduce(total, zero.layer_axes))

        def up(weights: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
            """One layer, forward: the stream and what it kept, [G, ...] each."""
            return each(lambda _, xs: (None, forward(weights, *xs)), None, (x, batch))[1]

        def up_all(x: jax.Array) -> tuple[jax.Array, _Ready, Tree]:
            """Also what the last layer turns with, and what the others kept."""
            if not prefetches:
                x, stash = over(
                    lambda x, index: up(fetch(index), x), x, range(last + 1), unroll_layers
                )
                return x, _Ready(), stash

            def one(carry, index):
                x, weights = carry
                following = fetch(index + 1)
                x, kept = up(weights, x)
                return (x, following), to_host(kept) if offloads else kept

            (x, weights), stash = over(one, (x, fetch(0)), range(last), unroll_layers)
            x, kept = up(weights, x)
            # Here alone the forward and the backward pass of a layer are in one region, where the
            # compiler would keep what the backward pass is to make again.
            return x, _Ready(weights, jax.lax.optimization_barrier(kept)), stash

        def down(state: _Back, index: Index, make_ready: Callable[[Index], _Ready]) -> _Back:
            """One layer, backward."""
            _, ready, pending, grads = state
            # Nothing of a layer begins before its dx is there: the compiler would else make again
            # what a layer beside the loop did not keep while the head still computes.
            kept, dx, here = jax.lax.optimization_barrier(
                (ready.kept, state.dx, jnp.asarray(index, jnp.int32))
            )
            weights = fetch(here) if ready.weights is None else ready.weights
            kept = at(stash, here) if kept is None else kept
            ready = make_ready(index - 1)
            if pending is not None:
                grads = reduce_into(grads, index + 1, pending)

            def one(total, xs):
                batch, kept, dx = xs
                dweights, dx = backward(weights, batch, kept, dx)
                return add(total, dweights), dx

            total = zero.running_sum(weights, zero.layer_axes, dx)
            total, dx = each(one, total, (batch, kept, dx))
            if zero.reduces:
                return _Back(dx, ready, total, grads)
            return _Back(dx, ready, None, reduce_into(grads, index, total))

        def ahead(index: Index) -> _Ready:
            if not prefetches:
                return _Ready()
            return _Ready(fetch(index), from_host(at(stash, index)) if offloads else None)

        def nothing(index: Index) -> _Ready:
            return _Ready()

        def down_all(state: _Back) -> tuple[jax.Array, Tree]:
            def one(state, index):
                return down(state, index, ahead), None

            # The top layer has no gradients to reduce but its own, and the bottom one nothing to
            # fetch: beside the loop, they do without. Without collectives there is only the loop.
            middle = list(range(last, -1, -1))
            if prefetches or zero.reduces:
                state = down(state, middle.pop(0), ahead if middle else nothing)
            bottom = middle.pop() if prefetches and middle else None
            state, _ = over(one, state, middle, unroll_layers)
            if bottom is not None:
                state = down(state, bottom, nothing)
            if state.pending is None:
                return state.dx, state.grads
            return state.dx, reduce_into(state.grads, 0, state.pending)

        if zero.gathers:
            params, batch = _bound(params, batch)
        layers = params["layers"]
        embed = zero.gather(params["embed"], zero.axes["embed"])
        _, x = each(lambda _, batch: (None, model.embed(embed, batch)), None, batch)
        x, ready, stash = up_all(x)
        sums, dhead, dx = _head_pass(model, zero, params, batch, x, sums)
        if zero.gathers:
            layers, dx = _bound(layers, dx)
        dx, layer_grads = down_all(_Back(dx, ready, None, grads["layers"]))
        outer = model.outer_grads(_embed_backward(model, zero, embed, batch, dx), dhead)
        outer = {name: add(grads[name], grad) for name, grad in outer.items()}
        return sums, {**outer, "layers": layer_grads}

    return walk


def _bound(weights: Tree, to: Tree) -> tuple[Tree, Tree]:
    """Weights that are there only once `to` is.

    The compiler sees that gathering the same shards again gives the same weights: it would gather
    once, before the loop over micro-batches or in the forward pass, and keep them whole.
    """
    return jax.lax.optimization_barrier((weights, to))


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

    (sums, total), dx = each(one, (sums, zero.running_sum(head, axes, x)), (x, batch))
    return sums, zero.reduce(total, axes), dx


def _embed_backward(model: Decoder, zero: Zero, embed: Tree, batch: Batch, dx: jax.Array) -> Tree:
    """The gradients of the embedding."""

    def one(total, xs):
        batch, dx = xs
        # The forward pass that this repeats is a lookup whose result nobody uses: it is dropped.
        _, pullback = jax.vjp(lambda embed: model.embed(embed, batch), embed)
        return add(total, pullback(dx)[0]), None

    axes = zero.axes["embed"]
    total, _ = each(one, zero.running_sum(embed, axes, dx), (batch, dx))
    return zero.reduce(total, axes)


def each(function: Callable, carry: Tree, xs: Tree, unroll: bool = False) -> tuple[Tree, Tree]:
    """`lax.scan`, but without a loop when there is one item: XLA schedules that better."""
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return jax.lax.scan(function, carry, xs, unroll=unroll)
    carry, y = function(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], y)


def over(function: Callable, carry: Tree, layers: Sequence[int], unroll: bool) -> tuple[Tree, Tree]:
    """`each` of some layers by index; without any, nothing is done and nothing stacked."""
    if not layers:
        return carry, None
    return each(function, carry, jnp.array(layers), unroll)


def at(stack: Tree, index: Index) -> Tree:
    """One layer of a stack."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stack)


def add(total: Tree, grads: Tree) -> Tree:
    """A running sum in the type of `total`; None is an empty one."""
    if total is None:
        return grads
    return jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), total, grads)


def add_at(total: Tree, index: Index, grads: Tree) -> Tree:
    """Adds one layer's gradients to the stack, in place."""
    return jax.tree.map(lambda total, grad: total.at[index].add(grad), total, grads)
