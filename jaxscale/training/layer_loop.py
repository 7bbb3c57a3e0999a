"""The layer loop: loss and gradients of the micro-batches of one accumulation group.

Layered gradient accumulation (arXiv 2106.02679): for each layer, for each of the G micro-batches of
the group. A pass over the layers gathers the weights of a layer once, and its gradients are reduced
once, whatever G is. With G = 1 this is the ordinary pass that sequential accumulation repeats for
every micro-batch.

Collectives run during the compute of a neighbouring layer. The weights W of the next layer are
prefetched, and the gradients dW of the previous layer are reduced, while this one computes: F is
its forward pass and B its backward pass, over all G micro-batches. With L = 3:

    gather    W0 | W1 | W2 |    |      | W1 | W0  |     |
    compute      | F0 | F1 | F2 | head | B2 | B1  | B0  |
    reduce       |    |    |    |      |    | dW2 | dW1 | dW0

The last layer's backward pass reuses the weights of its forward pass: 2L - 1 gathers of layer
weights and L reductions of layer gradients per group. Residuals that are offloaded to host memory
are prefetched with the weights. A layout without collectives and offload prefetches nothing.

Letters: G micro-batches, L layers.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.batch import Batch
from jaxscale.layout import Layout
from jaxscale.models.decoder import Decoder
from jaxscale.ops.split_vjp import split_vjp
from jaxscale.ops.stacked import add, add_at, at
from jaxscale.sharding.zero import Zero
from jaxscale.training.remat import from_host, rematerialised, to_host

Tree = Any
Index = int | jax.Array
Sums = tuple[jax.Array, jax.Array]  # of the loss, and of the loss without z-loss
Residuals = list[jax.Array]
Forward = Callable[[Tree, jax.Array, Batch], tuple[jax.Array, Residuals]]
Backward = Callable[[Tree, Batch, Residuals, jax.Array], tuple[Tree, jax.Array]]
GroupPass = Callable[[Tree, Batch, Sums, Tree], tuple[Sums, Tree]]


@dataclass(frozen=True)
class _Loop:
    """What is fixed before a pass: the model, the collectives, and one layer's two passes."""

    model: Decoder
    zero: Zero
    forward: Forward  # of one layer and one micro-batch, under the remat policy
    backward: Backward
    offload: bool  # whether residuals are in host memory between the passes
    unroll: bool

    @property
    def num_layers(self) -> int:
        return self.model.config.num_layers

    @property
    def prefetches(self) -> bool:
        """Whether a layer needs weights or residuals that take time to arrive."""
        return self.zero.gathers or self.offload


class _Prefetched(NamedTuple):
    """What was fetched for a layer during the compute before it; None: read when it begins."""

    weights: Tree = None
    residuals: Residuals | None = None  # [G, ...]


class _Inputs(NamedTuple):
    """What the backward pass of every layer reads from."""

    layers: Tree  # parameters as they are sharded, [L, ...]
    batch: Batch  # [G, ...]
    residuals: Residuals | None  # of the forward pass, [L, G, ...]; without prefetched ones


class _Carry(NamedTuple):
    """What the backward pass hands from a layer to the one below."""

    dx: jax.Array  # [G, ...]
    prefetched: _Prefetched
    unreduced: Tree  # gradients of the layer above, reduced during this one; None: there are none
    grads: Tree  # accumulators, [L, ...]


def make_group_pass(
    model: Decoder, layout: Layout, zero: Zero, *, unroll_layers: bool = False
) -> GroupPass:
    """`(params, batch, sums, grads) -> (sums, grads)`: adds the losses and gradients of a group.

    The fields of `batch` are [G, ...]. For use in a `shard_map` in which pipeline, data and fsdp
    are manual.

    Args:
      unroll_layers: unrolls the loops over layers, for XLA's cost analysis, which counts the body
        of a loop once.
    """
    forward, backward = split_vjp(rematerialised(model, layout.remat_policy))
    offload = layout.offloads("activations")
    return functools.partial(
        _group_pass, _Loop(model, zero, forward, backward, offload, unroll_layers)
    )


def _group_pass(
    loop: _Loop, params: Tree, batch: Batch, sums: Sums, grads: Tree
) -> tuple[Sums, Tree]:
    model, zero = loop.model, loop.zero
    if zero.gathers:
        params, batch = _only_after(params, batch)
    embed = zero.gather(params["embed"], zero.axes["embed"])
    _, x = each(lambda _, batch: (None, model.embed(embed, batch)), None, batch)
    x, last_layer, residuals = _forward_pass(loop, params["layers"], batch, x)
    sums, dhead, dx = _head_pass(model, zero, params, batch, x, sums)
    layers = params["layers"]
    if zero.gathers:
        layers, dx = _only_after(layers, dx)
    carry = _Carry(dx, last_layer, None, grads["layers"])
    dx, layer_grads = _backward_pass(loop, _Inputs(layers, batch, residuals), carry)
    outer = model.outer_grads(_embed_backward(model, zero, embed, batch, dx), dhead)
    outer = {name: add(grads[name], grad) for name, grad in outer.items()}
    return sums, {**outer, "layers": layer_grads}


def _forward_pass(
    loop: _Loop, layers: Tree, batch: Batch, x: jax.Array
) -> tuple[jax.Array, _Prefetched, Residuals | None]:
    """Every layer, forward.

    Returns:
      x [G, ...]; the weights and residuals of the last layer, where its backward pass reuses them;
      and the residuals of the other layers, [L - 1, G, ...], or of all.
    """
    if loop.prefetches:
        return _forward_pass_with_prefetch(loop, layers, batch, x)

    def layer(x, index):
        return _layer_forward(loop, _gather(loop, layers, index), batch, x)

    x, residuals = over(layer, x, range(loop.num_layers), loop.unroll)
    return x, _Prefetched(), residuals


def _forward_pass_with_prefetch(
    loop: _Loop, layers: Tree, batch: Batch, x: jax.Array
) -> tuple[jax.Array, _Prefetched, Residuals | None]:
    def layer(carry, index):
        x, weights = carry
        next_weights = _gather(loop, layers, index + 1)
        x, residuals = _layer_forward(loop, weights, batch, x)
        return (x, next_weights), to_host(residuals) if loop.offload else residuals

    carry = x, _gather(loop, layers, 0)
    (x, weights), residuals = over(layer, carry, range(loop.num_layers - 1), loop.unroll)
    x, last_residuals = _layer_forward(loop, weights, batch, x)
    # This layer's forward and backward pass are in one region: without the barrier the compiler
    # would merge what the backward pass recomputes with the forward pass, and save it.
    return x, _Prefetched(weights, jax.lax.optimization_barrier(last_residuals)), residuals


def _backward_pass(loop: _Loop, inputs: _Inputs, carry: _Carry) -> tuple[jax.Array, Tree]:
    """Every layer, backward: the gradients of x, [G, ...], and of the layers, [L, ...]."""

    def layer(carry, index):
        return _layer_backward(loop, inputs, carry, index, prefetch=loop.prefetches), None

    # The last layer has no gradients above it to reduce, and the first one nothing to prefetch:
    # they are outside the loop. Without collectives there is only the loop.
    middle, first = list(range(loop.num_layers - 1, -1, -1)), None
    if loop.prefetches or loop.zero.reduces:
        last = middle.pop(0)
        prefetch = loop.prefetches and last > 0
        carry = _layer_backward(loop, inputs, carry, last, prefetch=prefetch)
    if loop.prefetches and middle:
        first = middle.pop()
    carry, _ = over(layer, carry, middle, loop.unroll)
    if first is not None:
        carry = _layer_backward(loop, inputs, carry, first, prefetch=False)
    if carry.unreduced is None:
        return carry.dx, carry.grads
    return carry.dx, _reduce_into(loop, carry.grads, 0, carry.unreduced)


def _layer_forward(
    loop: _Loop, weights: Tree, batch: Batch, x: jax.Array
) -> tuple[jax.Array, Residuals]:
    """One layer, forward, for each micro-batch: x and the residuals, [G, ...]."""
    return each(lambda _, xs: (None, loop.forward(weights, *xs)), None, (x, batch))[1]


def _layer_backward(
    loop: _Loop, inputs: _Inputs, carry: _Carry, index: Index, *, prefetch: bool
) -> _Carry:
    """One layer, backward, for each micro-batch, during the collectives of its neighbours.

    Args:
      prefetch: whether to fetch what the layer below needs.
    """
    _, (weights, residuals), unreduced, grads = carry
    # A layer begins when its dx is available: otherwise the compiler would start to recompute a
    # layer that is outside the loop during the head.
    residuals, dx, now = jax.lax.optimization_barrier(
        (residuals, carry.dx, jnp.asarray(index, jnp.int32))
    )
    weights = _gather(loop, inputs.layers, now) if weights is None else weights
    residuals = at(inputs.residuals, now) if residuals is None else residuals
    prefetched = _prefetch(loop, inputs, index - 1) if prefetch else _Prefetched()
    if unreduced is not None:
        grads = _reduce_into(loop, grads, index + 1, unreduced)
    dweights, dx = _sum_gradients(loop, weights, inputs.batch, residuals, dx)
    if loop.zero.reduces:
        return _Carry(dx, prefetched, dweights, grads)
    return _Carry(dx, prefetched, None, _reduce_into(loop, grads, index, dweights))


def _sum_gradients(
    loop: _Loop, weights: Tree, batch: Batch, residuals: Residuals, dx: jax.Array
) -> tuple[Tree, jax.Array]:
    """The gradients of one layer's weights, summed over micro-batches, and of x, [G, ...]."""

    def microbatch(total, xs):
        batch, residuals, dx = xs
        dweights, dx = loop.backward(weights, batch, residuals, dx)
        return add(total, dweights), dx

    total = loop.zero.running_sum(weights, loop.zero.layer_axes, dx)
    return each(microbatch, total, (batch, residuals, dx))


def _gather(loop: _Loop, layers: Tree, index: Index) -> Tree:
    """The weights of one layer, whole over fsdp."""
    return loop.zero.gather(at(layers, index), loop.zero.layer_axes)


def _prefetch(loop: _Loop, inputs: _Inputs, index: Index) -> _Prefetched:
    weights = _gather(loop, inputs.layers, index)
    return _Prefetched(weights, from_host(at(inputs.residuals, index)) if loop.offload else None)


def _reduce_into(loop: _Loop, grads: Tree, index: Index, dweights: Tree) -> Tree:
    """Reduces the gradients of one layer and adds them to its accumulators."""
    return add_at(grads, index, loop.zero.reduce(dweights, loop.zero.layer_axes))


def _only_after(weights: Tree, x: Tree) -> tuple[Tree, Tree]:
    """Weights that are not available before x is.

    The compiler sees that gathering the same shards again gives the same weights: it would gather
    once, before the loop over micro-batches or in the forward pass, and keep them whole.
    """
    return jax.lax.optimization_barrier((weights, x))


def _head_pass(
    model: Decoder, zero: Zero, params: Tree, batch: Batch, x: jax.Array, sums: Tree
) -> tuple[Tree, Tree, jax.Array]:
    """The head, forward and backward: adds the losses to `sums`; the gradients of head and x."""
    axes = model.head_params(zero.axes)
    head = zero.gather(model.head_params(params), axes)

    def one(carry, xs):
        sums, total = carry
        x, batch = xs
        losses, pullback = jax.vjp(lambda head, x: model.loss(head, x, batch), zero.widen(head), x)
        dhead, dx = pullback((jnp.ones_like(losses[0]), jnp.zeros_like(losses[1])))
        return (add(sums, losses), add(total, dhead)), dx

    (sums, total), dx = each(one, (sums, zero.running_sum(head, axes, x)), (x, batch))
    return sums, zero.reduce(total, axes), dx


def _embed_backward(model: Decoder, zero: Zero, embed: Tree, batch: Batch, dx: jax.Array) -> Tree:
    """The gradients of the embedding."""

    def one(total, xs):
        batch, dx = xs
        # The forward pass of this vjp is a lookup whose result is not used: XLA drops it.
        _, pullback = jax.vjp(lambda embed: model.embed(embed, batch), zero.widen(embed))
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
    """`each` over some layers by index; without any, the carry and None."""
    if not layers:
        return carry, None
    return each(function, carry, jnp.array(layers), unroll)
