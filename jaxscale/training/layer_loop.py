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

A model with several stacks goes through them one after the other, and back. Layers whose static
settings repeat with a period are looped over a period at a time.

Letters: G micro-batches, L layers of a stack.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.batch import Batch
from jaxscale.layout import Layout
from jaxscale.models.protocol import (
    Model,
    Stack,
    Stream,
    Sums,
    add_layer_sums,
    layer_function,
    return_borrowed,
    split_stream,
    sum_shapes,
)
from jaxscale.ops.split_vjp import split_vjp
from jaxscale.ops.stacked import add, add_at, at
from jaxscale.sharding.zero import Zero
from jaxscale.training.layer_scan import (
    Place,
    Residuals,
    SavedLayers,
    ascend,
    descend,
    each,
    one_layer,
)
from jaxscale.training.outer_passes import enter, enter_backward, head_pass
from jaxscale.training.remat import from_host, rematerialised, to_host

Tree = Any
Index = int | jax.Array
Saved = tuple[SavedLayers | None, ...]
"""The residuals of each stack."""


class GroupPass(NamedTuple):
    """Loss and gradients of an accumulation group, and the residuals that lie in between.

    - `run(params, batch, sums, grads, saved) -> (sums, grads, saved)` adds the losses and gradients
      of a group. Residuals are written into `saved`; where it is None, into new arrays, which are
      not returned.
    - `empty(params, batch, sums) -> saved`: arrays that the residuals of every group fit, for
      layers that prefetch nothing.

    The fields of `batch` are [G, ...].
    """

    run: Callable[[Tree, Batch, Sums, Tree, Saved | None], tuple[Sums, Tree, Saved | None]]
    empty: Callable[[Tree, Batch, Sums], Saved]


@dataclass(frozen=True)
class _Loop:
    """What is fixed before the passes over a stack: the collectives, and a layer's two passes."""

    stack: Stack
    zero: Zero
    passes: tuple[tuple[Callable, Callable], ...]  # `split_vjp` of each kind of layer
    offload: bool  # whether residuals are in host memory between the passes
    unroll: bool
    is_first: bool  # of the model's stacks

    @property
    def axes(self) -> Tree:
        """Of one layer's weights."""
        return self.zero.layer_axes(self.stack.name)

    @property
    def prefetches(self) -> bool:
        """Whether a layer needs weights or residuals that take time to arrive."""
        return self.zero.gathers or self.offload


class _Prefetched(NamedTuple):
    """What was fetched for a layer during the compute before it; None: read when it begins."""

    weights: Tree = None
    residuals: Residuals | None = None  # [G, ...]


class _Inputs(NamedTuple):
    """What the passes read from."""

    layers: Tree  # parameters as they are sharded, [L, ...]
    batch: Batch  # [G, ...]
    shared: Stream  # [G, ...]
    # Without prefetched ones; in the forward pass, the arrays that they are written into.
    residuals: SavedLayers | None


class _Passed(NamedTuple):
    """What the forward pass of a stack leaves for its backward pass."""

    entered: Stream  # before the stack, [G, ...]
    shared: Stream  # [G, ...]
    last_layer: _Prefetched
    residuals: SavedLayers | None


class _Carry(NamedTuple):
    """What the backward pass hands from a layer to the one below."""

    dx: Stream  # [G, ...]
    dshared: Stream  # [G, ...], summed over the layers above
    prefetched: _Prefetched
    unreduced: Tree  # gradients of the layer above, reduced during this one; None: there are none
    grads: Tree  # accumulators, [L, ...]


def make_group_pass(
    model: Model, layout: Layout, zero: Zero, *, unroll_layers: bool = False
) -> GroupPass:
    """The pass over a model's layers, forward and back, for use in a `shard_map` in which pipeline,
    data and fsdp are manual.

    Args:
      unroll_layers: unrolls the loops over layers, for XLA's cost analysis, which counts the body
        of a loop once.
    """
    offload = layout.offloads("activations")

    def make_loop(stack: Stack) -> _Loop:
        layers = [layer_function(stack, kind) for kind in range(stack.period)]
        passes = [split_vjp(rematerialised(layer, layout.remat_policy)) for layer in layers]
        first = stack.name == model.stacks[0].name
        return _Loop(stack, zero, tuple(passes), offload, unroll_layers, first)

    loops = [make_loop(stack) for stack in model.stacks]

    def run(
        params: Tree, batch: Batch, sums: Sums, grads: Tree, saved: Saved | None
    ) -> tuple[Sums, Tree, Saved | None]:
        into = saved or (None,) * len(loops)
        sums, grads, written = _group_pass(model, zero, loops, params, batch, sums, grads, into)
        return sums, grads, saved and written

    def empty(params: Tree, batch: Batch, sums: Sums) -> Saved:
        def forward(params: Tree, batch: Batch, sums: Sums) -> Saved:
            embed = zero.gather(params["embed"], zero.axes["embed"])
            new = (None,) * len(loops)
            passed = _stacks_forward(loops, params, embed, batch, sums, new)[2]
            return tuple(one.residuals for one in passed)

        shapes = jax.eval_shape(forward, params, batch, sums)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    return GroupPass(run, empty)


def _group_pass(
    model: Model,
    zero: Zero,
    loops: Sequence[_Loop],
    params: Tree,
    batch: Batch,
    sums: Sums,
    grads: Tree,
    into: Sequence[SavedLayers | None],
) -> tuple[Sums, Tree, Saved]:
    if zero.gathers:
        params, batch = _only_after(params, batch)
    embed = zero.gather(params["embed"], zero.axes["embed"])
    stream, sums, passed = _stacks_forward(loops, params, embed, batch, sums, into)
    sums, dhead, dstream = head_pass(model, zero, params, batch, stream, sums)
    dembed, stacks = _stacks_backward(loops, params, embed, batch, dstream, passed, grads)
    outer = return_borrowed(model, zero.reduce(dembed, zero.axes["embed"]), dhead)
    outer = {name: add(grads[name], grad) for name, grad in outer.items()}
    return sums, {**outer, **stacks}, tuple(one.residuals for one in passed)


def _stacks_forward(
    loops: Sequence[_Loop],
    params: Tree,
    embed: Tree,
    batch: Batch,
    sums: Sums,
    into: Sequence[SavedLayers | None],
) -> tuple[Stream, Sums, list[_Passed]]:
    """The last stack's stream [G, ...], the sums, and what each stack's backward pass needs."""
    stream, passed = {}, []
    for loop, saved in zip(loops, into):
        entered, layers = stream, params[loop.stack.name]
        x, shared = split_stream(loop.stack, enter(loop.stack, embed, stream, batch))
        own = {name: sums[name] for name in sum_shapes(loop.stack)}
        x, own, last_layer, residuals = _forward_pass(
            loop, _Inputs(layers, batch, shared, saved), x, own
        )
        sums, stream = {**sums, **own}, {**x, **shared}
        passed.append(_Passed(entered, shared, last_layer, residuals))
    return stream, sums, passed


def _stacks_backward(
    loops: Sequence[_Loop],
    params: Tree,
    embed: Tree,
    batch: Batch,
    dstream: Stream,
    passed: list[_Passed],
    grads: Tree,
) -> tuple[Tree, Tree]:
    """The gradients of the embedding, and those of each stack's layers added to `grads`."""
    stacks, dembed = {}, None
    for loop, (entered, shared, last_layer, residuals) in reversed(list(zip(loops, passed))):
        name = loop.stack.name
        layers = params[name]
        if loop.zero.gathers:
            layers, dstream = _only_after(layers, dstream)
        dx, dshared = split_stream(loop.stack, dstream)
        carry = _Carry(dx, loop.zero.widen(dshared), last_layer, None, grads[name])
        inputs = _Inputs(layers, batch, shared, residuals)
        dx, dshared, stacks[name] = _backward_pass(loop, inputs, carry)
        dstream = {**dx, **dshared}
        outer = loop.stack, loop.zero, embed, entered, batch
        dstream, dembed = enter_backward(*outer, dstream, dembed)
    return dembed, stacks


def _forward_pass(
    loop: _Loop, inputs: _Inputs, x: Stream, sums: Sums
) -> tuple[Stream, Sums, _Prefetched, SavedLayers | None]:
    """Every layer, forward.

    Returns:
      x [G, ...]; the sums; the weights and residuals of the last layer, where its backward pass
      reuses them; and the residuals of the other layers, or of all.
    """
    if loop.prefetches:
        return _forward_pass_with_prefetch(loop, inputs, x, sums)

    def layer(carry, place):
        x, sums = carry
        x, sums, residuals = _layer_forward(
            loop, _gather(loop, inputs.layers, place.index), inputs, x, sums, place
        )
        return (x, sums), residuals

    (x, sums), residuals = ascend(
        layer,
        (x, sums),
        loop.stack.num_layers,
        loop.stack.period,
        unroll=loop.unroll,
        into=inputs.residuals,
    )
    return x, sums, _Prefetched(), residuals


def _forward_pass_with_prefetch(
    loop: _Loop, inputs: _Inputs, x: Stream, sums: Sums
) -> tuple[Stream, Sums, _Prefetched, SavedLayers | None]:
    last = loop.stack.num_layers - 1

    def layer(carry, place):
        x, sums, weights = carry
        next_weights = _gather(loop, inputs.layers, place.index + 1)
        x, sums, residuals = _layer_forward(loop, weights, inputs, x, sums, place)
        return (x, sums, next_weights), to_host(residuals) if loop.offload else residuals

    carry = x, sums, _gather(loop, inputs.layers, 0)
    (x, sums, weights), residuals = ascend(
        layer, carry, last, loop.stack.period, unroll=loop.unroll
    )
    x, sums, last_residuals = _layer_forward(
        loop, weights, inputs, x, sums, Place(last, last % loop.stack.period)
    )
    # This layer's forward and backward pass are in one region: without the barrier the compiler
    # would merge what the backward pass recomputes with the forward pass, and save it.
    last_residuals = jax.lax.optimization_barrier(last_residuals)
    return x, sums, _Prefetched(weights, last_residuals), residuals


def _backward_pass(loop: _Loop, inputs: _Inputs, carry: _Carry) -> tuple[Stream, Stream, Tree]:
    """Every layer, backward: the gradients of x and of what is shared, [G, ...], and of the layers,
    [L, ...]."""

    def layer(carry, place):
        return _layer_backward(loop, inputs, carry, place, prefetch=loop.prefetches)

    # The last layer has no gradients above it to reduce, and the first one nothing to prefetch:
    # they are outside the loop. Without collectives there is only the loop.
    top, bottom, period = loop.stack.num_layers - 1, 0, loop.stack.period
    if loop.prefetches or loop.zero.reduces:
        prefetch = loop.prefetches and top > 0
        carry = _layer_backward(loop, inputs, carry, Place(top, top % period), prefetch=prefetch)
        top -= 1
    if loop.prefetches and top >= 0:
        bottom = 1
    carry = descend(layer, carry, top, bottom, loop.stack.period, unroll=loop.unroll)
    if bottom:
        carry = _bottom_backward(loop, inputs, carry)
    grads = carry.grads
    if carry.unreduced is not None:
        grads = _reduce_into(loop, grads, 0, carry.unreduced)
    return carry.dx, carry.dshared, grads


def _bottom_backward(loop: _Loop, inputs: _Inputs, carry: _Carry) -> _Carry:
    """The first layer of a stack, outside the loop, backward. Where another stack's last layer
    follows, which is also outside of its loop, a loop of one trip keeps the two apart."""

    def layer(carry: _Carry, place: Place) -> _Carry:
        after = _layer_backward(loop, inputs, carry, place, prefetch=False)
        return after._replace(prefetched=carry.prefetched)

    place = Place(0, 0)
    return layer(carry, place) if loop.is_first else one_layer(layer, carry, place)


def _layer_forward(
    loop: _Loop, weights: Tree, inputs: _Inputs, x: Stream, sums: Sums, place: Place
) -> tuple[Stream, Sums, Residuals]:
    """One layer, forward, for each micro-batch: x, the sums, and the residuals, [G, ...]."""
    forward, _ = loop.passes[place.kind]
    # A value as in a loop: a constant would become part of the one backward pass that all layers of
    # a kind have.
    index = jax.lax.optimization_barrier(jnp.asarray(place.index, jnp.int32))

    def microbatch(sums, xs):
        x, shared, batch = xs
        (x, loss), others, residuals = forward(weights, x, shared, (batch, index))
        return add_layer_sums(loop.stack, sums, place.index, loss, others), (x, residuals)

    sums, (x, residuals) = each(microbatch, sums, (x, inputs.shared, inputs.batch))
    return x, sums, residuals


def _layer_backward(
    loop: _Loop, inputs: _Inputs, carry: _Carry, place: Place, *, prefetch: bool
) -> _Carry:
    """One layer, backward, for each micro-batch, during the collectives of its neighbours.

    Args:
      prefetch: whether to fetch what the layer below needs.
    """
    _, dshared, (weights, residuals), unreduced, grads = carry
    index = place.index
    # A layer begins when its dx is available: otherwise the compiler would start to recompute a
    # layer that is outside the loop during the head, or keep what its forward pass made of what is
    # shared.
    residuals, dx, shared, now = jax.lax.optimization_barrier(
        (residuals, carry.dx, inputs.shared, jnp.asarray(index, jnp.int32))
    )
    inputs = inputs._replace(shared=shared)
    weights = _gather(loop, inputs.layers, now) if weights is None else weights
    if residuals is None:
        assert inputs.residuals is not None, "residuals are saved or prefetched"
        here = Place(index if loop.stack.period > 1 else now, place.kind)
        residuals = inputs.residuals.at(here)
    prefetched = _prefetch(loop, inputs, place) if prefetch else _Prefetched()
    if unreduced is not None:
        grads = _reduce_into(loop, grads, index + 1, unreduced)
    here = Place(now, place.kind)
    dweights, dx, dshared = _sum_gradients(loop, weights, inputs, residuals, dx, dshared, here)
    if loop.zero.reduces:
        return _Carry(dx, dshared, prefetched, dweights, grads)
    return _Carry(dx, dshared, prefetched, None, _reduce_into(loop, grads, index, dweights))


def _sum_gradients(
    loop: _Loop,
    weights: Tree,
    inputs: _Inputs,
    residuals: Residuals,
    dx: Stream,
    dshared: Stream,
    place: Place,
) -> tuple[Tree, Stream, Stream]:
    """The gradients of one layer's weights, summed over micro-batches, of x, and those of what is
    shared, added to `dshared`, [G, ...]."""
    _, backward = loop.passes[place.kind]
    seed = loop.zero.one if "loss" in loop.stack.sums else None

    def microbatch(total, xs):
        batch, shared, residuals, dx, dshared = xs
        context = batch, place.index
        dweights, dx, more = backward(weights, shared, context, residuals, (dx, seed))
        return add(total, dweights), (dx, add(dshared, more))

    total = loop.zero.running_sum(weights, loop.axes, inputs.batch)
    xs = inputs.batch, inputs.shared, residuals, dx, dshared
    total, (dx, dshared) = each(microbatch, total, xs)
    return total, dx, dshared


def _gather(loop: _Loop, layers: Tree, index: Index) -> Tree:
    """The weights of one layer, whole over fsdp."""
    return loop.zero.gather(at(layers, index), loop.axes)


def _prefetch(loop: _Loop, inputs: _Inputs, above: Place) -> _Prefetched:
    """What the layer below this one needs."""
    period = loop.stack.period
    below = Place(above.index - 1, (above.kind - 1) % period)
    weights = _gather(loop, inputs.layers, below.index)
    if not loop.offload:
        return _Prefetched(weights)
    assert inputs.residuals is not None, "offloaded residuals are saved"
    return _Prefetched(weights, from_host(inputs.residuals.at(below)))


def _reduce_into(loop: _Loop, grads: Tree, index: Index, dweights: Tree) -> Tree:
    """Reduces the gradients of one layer and adds them to its accumulators."""
    return add_at(grads, index, loop.zero.reduce(dweights, loop.axes))


def _only_after(weights: Tree, x: Tree) -> tuple[Tree, Tree]:
    """Weights that are not available before x is.

    The compiler sees that gathering the same shards again gives the same weights: it would gather
    once, before the loop over micro-batches or in the forward pass, and keep them whole.
    """
    return jax.lax.optimization_barrier((weights, x))
