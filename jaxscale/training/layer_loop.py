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
weights and L reductions of layer gradients per group. In ZeRO stages 1 and 2 the first group keeps
the weights that its forward pass gathers, for the rest of the step: L gathers. Reductions that no
stage does for every group are the last one's. Residuals that are offloaded to host memory are
prefetched with the weights. A layout without collectives and offload prefetches nothing.

A model with several stacks goes through them one after the other, and back. Layers whose static
settings repeat with a period are looped over a period at a time.

Letters: G micro-batches, L layers of a stack.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    head_params,
    layer_function,
    return_borrowed,
    split_stream,
    sum_shapes,
)
from jaxscale.ops.split_vjp import split_vjp
from jaxscale.ops.stacked import add, add_at, at, put
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
from jaxscale.training.outer_passes import enter, enter_backward, gather_head, head_pass
from jaxscale.training.remat import from_host, rematerialised, to_host

Tree = Any
Index = int | jax.Array
Saved = tuple[SavedLayers | None, ...]
"""The residuals of each stack."""


class Visit(NamedTuple):
    """Which of a step's groups visit the layers."""

    first: bool  # among them the first one
    last: bool  # the last one, alone

    @property
    def only(self) -> bool:
        """Whether a step visits each layer once."""
        return self.first and self.last


class Accumulated(NamedTuple):
    """What the groups of a step hand on from one to the next."""

    sums: Sums
    grads: Tree  # sums of gradients; after the last group, reduced
    # Those of the groups before the last one, where the reduced ones are arrays of another shape.
    earlier: Tree = None
    saved: Saved | None = None  # arrays that residuals are written into; None: into new ones


class GroupPass(NamedTuple):
    """Loss and gradients of an accumulation group, and the residuals that lie in between.

    - `run(params, batch, before) -> (weights, after)` adds the losses and gradients of a group. The
      weights are those that later groups of a step begin with: gathered and kept, or as at rest.
    - `empty(params, batch, sums, nothing) -> saved`: arrays that the residuals of every group fit,
      for layers that prefetch nothing; filled with `nothing`, a scalar 0, when it is there.

    The fields of `batch` are [G, ...].
    """

    run: Callable[[Tree, Batch, Accumulated], tuple[Tree, Accumulated]]
    empty: Callable[[Tree, Batch, Sums, jax.Array], Saved]


@dataclass(frozen=True)
class _Loop:
    """What is fixed before the passes over a stack: the collectives, and a layer's two passes."""

    stack: Stack
    zero: Zero
    visit: Visit
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

    @property
    def reduces(self) -> bool:
        """Whether a layer's gradients are reduced over ranks, during the layer below."""
        return self.zero.reduces or (self.visit.last and self.zero.remains)


class _Prefetched(NamedTuple):
    """What was fetched for a layer during the compute before it; None: read when it begins."""

    weights: Tree = None
    residuals: Residuals | None = None  # [G, ...]


class _Inputs(NamedTuple):
    """What the passes read from."""

    layers: Tree  # parameters as at rest, or gathered and kept, [L, ...]
    batch: Batch  # [G, ...]
    shared: Stream  # [G, ...]
    # Without prefetched ones; in the forward pass, the arrays that they are written into.
    residuals: SavedLayers | None
    earlier: Tree = None  # gradients of the groups before, if not in the accumulators


class _Passed(NamedTuple):
    """What the forward pass of a stack leaves for its backward pass."""

    layers: Tree  # parameters that it reads weights from, [L, ...]
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
    model: Model, layout: Layout, zero: Zero, visit: Visit, *, unroll_layers: bool = False
) -> GroupPass:
    """The pass over a model's layers, forward and back, for use in a `shard_map` in which pipeline,
    data and fsdp are manual.

    Args:
      visit: that of the groups that it is for.
      unroll_layers: unrolls the loops over layers, for XLA's cost analysis, which counts the body
        of a loop once.
    """
    offload = layout.offloads("activations")
    zero = zero if visit.first else zero.kept

    def make_loop(stack: Stack) -> _Loop:
        layers = [layer_function(stack, kind) for kind in range(stack.period)]
        passes = [split_vjp(rematerialised(layer, layout.remat_policy)) for layer in layers]
        first = stack.name == model.stacks[0].name
        return _Loop(stack, zero, visit, tuple(passes), offload, unroll_layers, first)

    loops = [make_loop(stack) for stack in model.stacks]

    def run(params: Tree, batch: Batch, before: Accumulated) -> tuple[Tree, Accumulated]:
        return _group_pass(model, zero, loops, visit, params, batch, before)

    def empty(params: Tree, batch: Batch, sums: Sums, nothing: jax.Array) -> Saved:
        def forward(params: Tree, batch: Batch, sums: Sums) -> Saved:
            embed = zero.gather(params["embed"], zero.axes["embed"])
            new = (None,) * len(loops)
            passed = _stacks_forward(loops, params, embed, batch, sums, new)[2]
            return tuple(one.residuals for one in passed)

        shapes = jax.eval_shape(forward, params, batch, sums)
        return jax.tree.map(lambda x: jnp.full(x.shape, nothing.astype(x.dtype)), shapes)

    return GroupPass(run, empty)


def _group_pass(
    model: Model,
    zero: Zero,
    loops: Sequence[_Loop],
    visit: Visit,
    params: Tree,
    batch: Batch,
    before: Accumulated,
) -> tuple[Tree, Accumulated]:
    if zero.gathers and not zero.keeps:
        params, batch = _only_after(params, batch)
    embed = zero.gather(params["embed"], zero.axes["embed"])
    into = before.saved or (None,) * len(loops)
    stream, sums, passed = _stacks_forward(loops, params, embed, batch, before.sums, into)
    head = gather_head(model, zero, params, embed)
    sums, dhead, dstream = head_pass(model, zero, head, batch, stream, sums)
    earlier = before.grads if before.earlier is None else before.earlier
    head_axes = head_params(model, zero.axes)
    if visit.last:
        if not visit.only:  # what the head borrows is among the embedding's
            own = {name: dhead[name] for name in earlier["head"]}
            dhead = {**dhead, **add(earlier["head"], own)}
        dhead = zero.finish(dhead, head_axes)
    dembed, stacks = _stacks_backward(loops, embed, batch, dstream, passed, before)
    dembed = zero.reduce(dembed, zero.axes["embed"])
    if visit.last:
        dembed = dembed if visit.only else add(earlier["embed"], dembed)
        dembed = zero.finish(dembed, zero.axes["embed"])
    outer = return_borrowed(model, dembed, dhead)
    if not visit.last:
        outer = {name: add(before.grads[name], grad) for name, grad in outer.items()}
    saved = before.saved and tuple(one.residuals for one in passed)
    after = Accumulated(sums, {**outer, **stacks}, saved=saved)
    if not zero.keeps:
        return params, after
    kept = {loop.stack.name: one.layers for loop, one in zip(loops, passed)}
    own = {name: head[name] for name in params["head"]}
    return {"embed": embed, "head": own, **kept}, after


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
        inputs = _Inputs(layers, batch, shared, saved)
        forward = _forward_pass_with_prefetch if loop.prefetches else _forward_pass
        x, own, kept, last_layer, residuals = forward(loop, inputs, x, own)
        sums, stream = {**sums, **own}, {**x, **shared}
        layers = layers if kept is None else kept
        passed.append(_Passed(layers, entered, shared, last_layer, residuals))
    return stream, sums, passed


def _stacks_backward(
    loops: Sequence[_Loop],
    embed: Tree,
    batch: Batch,
    dstream: Stream,
    passed: list[_Passed],
    before: Accumulated,
) -> tuple[Tree, Tree]:
    """The gradients of the embedding, and the accumulators of each stack's layers with theirs."""
    stacks, dembed = {}, None
    for loop, (layers, entered, shared, last_layer, residuals) in reversed(
        list(zip(loops, passed))
    ):
        name, loop = loop.stack.name, replace(loop, zero=loop.zero.kept)
        if loop.zero.gathers:
            layers, dstream = _only_after(layers, dstream)
        dx, dshared = split_stream(loop.stack, dstream)
        carry = _Carry(dx, loop.zero.widen(dshared), last_layer, None, before.grads[name])
        earlier = None if before.earlier is None else before.earlier[name]
        inputs = _Inputs(layers, batch, shared, residuals, earlier)
        dx, dshared, stacks[name] = _backward_pass(loop, inputs, carry)
        dstream = {**dx, **dshared}
        outer = loop.stack, loop.zero, embed, entered, batch
        dstream, dembed = enter_backward(*outer, dstream, dembed)
    return dembed, stacks


def _forward_pass(
    loop: _Loop, inputs: _Inputs, x: Stream, sums: Sums
) -> tuple[Stream, Sums, Tree, _Prefetched, SavedLayers | None]:
    """Every layer, forward.

    Returns:
      x [G, ...]; the sums; weights that were gathered and are kept, [L, ...], if any; the weights
      and residuals of the last layer, where its backward pass reuses them; and the residuals of the
      other layers, or of all.
    """

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
    return x, sums, None, _Prefetched(), residuals


def _forward_pass_with_prefetch(
    loop: _Loop, inputs: _Inputs, x: Stream, sums: Sums
) -> tuple[Stream, Sums, Tree, _Prefetched, SavedLayers | None]:
    """`_forward_pass` of layers whose weights are gathered, or whose residuals are offloaded."""
    last = loop.stack.num_layers - 1

    def fetch(index: Index, kept: Tree) -> tuple[Tree, Tree]:
        weights = _gather(loop, inputs.layers, index)
        return weights, put(kept, weights, index) if loop.zero.keeps else None

    def layer(carry, place):
        x, sums, weights, kept = carry
        next_weights, kept = fetch(place.index + 1, kept)
        x, sums, residuals = _layer_forward(loop, weights, inputs, x, sums, place)
        residuals = to_host(residuals) if loop.offload else residuals
        return (x, sums, next_weights, kept), residuals

    carry = x, sums, *fetch(0, _room(loop, inputs.layers))
    (x, sums, weights, kept), residuals = ascend(
        layer, carry, last, loop.stack.period, unroll=loop.unroll
    )
    x, sums, last_residuals = _layer_forward(
        loop, weights, inputs, x, sums, Place(last, last % loop.stack.period)
    )
    # This layer's forward and backward pass are in one region: without the barrier the compiler
    # would merge what the backward pass recomputes with the forward pass, and save it.
    last_residuals = jax.lax.optimization_barrier(last_residuals)
    return x, sums, kept, _Prefetched(weights, last_residuals), residuals


def _room(loop: _Loop, layers: Tree) -> Tree:
    """Arrays for the gathered weights of a stack, [L, ...], if they are kept."""
    if not loop.zero.keeps:
        return None
    axes = loop.zero.axes[loop.stack.name]
    return loop.zero.room(jax.eval_shape(lambda x: loop.zero.gather(x, axes), layers), axes)


def _backward_pass(loop: _Loop, inputs: _Inputs, carry: _Carry) -> tuple[Stream, Stream, Tree]:
    """Every layer, backward: the gradients of x and of what is shared, [G, ...], and of the layers,
    [L, ...]."""

    def layer(carry, place):
        return _layer_backward(loop, inputs, carry, place, prefetch=loop.prefetches)

    # The last layer has no gradients above it to reduce, and its residuals may be outside the loop;
    # the first one has nothing to prefetch. Without collectives there is only the loop.
    top, bottom, period = loop.stack.num_layers - 1, 0, loop.stack.period
    if carry.prefetched.residuals is not None or loop.reduces:
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
        grads = _accumulate(loop, inputs, grads, 0, carry.unreduced)
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
        grads = _accumulate(loop, inputs, grads, index + 1, unreduced)
    here = Place(now, place.kind)
    dweights, dx, dshared = _sum_gradients(loop, weights, inputs, residuals, dx, dshared, here)
    if loop.reduces:
        return _Carry(dx, dshared, prefetched, dweights, grads)
    grads = _accumulate(loop, inputs, grads, index, dweights)
    return _Carry(dx, dshared, prefetched, None, grads)


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


def _accumulate(loop: _Loop, inputs: _Inputs, grads: Tree, index: Index, dweights: Tree) -> Tree:
    """Reduces the gradients of one layer and adds them to its accumulators; those of the last
    visit, to what they are when no reduction remains."""
    visit, total = loop.visit, loop.zero.reduce(dweights, loop.axes)
    if not visit.last:
        return add_at(grads, index, total)
    if not visit.only:
        earlier = grads if inputs.earlier is None else inputs.earlier
        total = add(at(earlier, index), total)
    return put(grads, loop.zero.finish(total, loop.axes), index)


def _only_after(weights: Tree, x: Tree) -> tuple[Tree, Tree]:
    """Weights that are not available before x is.

    The compiler sees that gathering the same shards again gives the same weights: it would gather
    once, before the loop over micro-batches or in the forward pass, and keep them whole.
    """
    return jax.lax.optimization_barrier((weights, x))
