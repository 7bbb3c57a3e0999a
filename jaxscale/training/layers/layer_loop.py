"""The layer loop: forward and backward pass over a stack for the micro-batches of one group.

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
prefetched with the weights. A layout without collectives and offload prefetches nothing; nor does
the backward pass where `Early` says so.

Layers whose static settings repeat with a period are looped over a period at a time.

Letters: G micro-batches, L layers of a stack.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.batch import Batch
from jaxscale.models.protocol import Stack, Stream, Sums, add_layer_sums
from jaxscale.ops.array_stack import add, add_at, after, at, put
from jaxscale.ops.matmul import is_quantised
from jaxscale.ops.save_in_place import save_in_place
from jaxscale.sharding.zero import Zero
from jaxscale.training.layers.layer_scan import (
    Place,
    Residuals,
    SavedLayers,
    ascend,
    descend,
    each,
    one_layer,
)
from jaxscale.training.layers.loop_form import LoopForm
from jaxscale.training.remat import from_host, to_host

Tree = Any
Index = int | jax.Array


class Visit(NamedTuple):
    """Which of a step's groups visit the layers."""

    first: bool  # among them the first one
    last: bool  # the last one, alone

    @property
    def only(self) -> bool:
        """Whether a step visits each layer once."""
        return self.first and self.last

    @property
    def last_of_several(self) -> bool:
        """Whether gradients of earlier visits are added."""
        return self.last and not self.first


@dataclass(frozen=True)
class Loop:
    """What is fixed before the passes over a stack: the collectives, and a layer's two passes."""

    stack: Stack
    zero: Zero
    visit: Visit
    passes: tuple[tuple[Callable, Callable], ...]  # `split_vjp` of each kind of layer
    form: LoopForm
    is_first: bool  # of the model's stacks

    @property
    def axes(self) -> Tree:
        """The logical axes of one layer's weights."""
        return self.zero.layer_axes(self.stack.name)

    @property
    def frozen(self) -> Tree:
        """Which of them are left as they are; None: none is."""
        return self.zero.frozen and self.zero.frozen[self.stack.name]

    @property
    def prefetches(self) -> bool:
        """Whether a layer needs weights or residuals that take time to arrive."""
        return self.zero.gathers or self.form.offload

    @property
    def prefetches_backward(self) -> bool:
        """Whether it has them when its backward pass begins."""
        return self.prefetches and not self.form.early.gathers_late

    @property
    def ordered(self) -> bool:
        """Whether layers that are written out wait for one another (`after`): where no collectives
        run beside them."""
        return self.form.unroll and all(size == 1 for size in self.zero.sizes.values())

    @property
    def reduces(self) -> bool:
        """Whether a layer's gradients are reduced over ranks, during the layer below."""
        return self.zero.reduces or (self.visit.last and self.zero.reduces_over_replicas_at_end)

    @property
    def writes_once(self) -> bool:
        """Whether a layer's accumulators take its gradients as they are, and no sum."""
        return self.visit.only and not self.reduces


class Prefetched(NamedTuple):
    """What was fetched for a layer during the compute before it; None: read when it begins."""

    weights: Tree = None
    residuals: Residuals | None = None  # [G, ...]


class CastOnce(NamedTuple):
    """The layers of a stack, of which a step casts matrices once (`Layout.casts_once`)."""

    at_rest: Tree  # parameters, [L, ...]
    matrices: tuple[Tree, ...]  # of each layer, cast or quantised; None where neither


class Inputs(NamedTuple):
    """What the passes read from."""

    layers: Tree | CastOnce  # parameters as at rest, or gathered and kept, [L, ...]
    batch: Batch  # [G, ...]
    shared: Stream  # [G, ...]
    # Without prefetched ones; in the forward pass, the arrays that they are written into.
    residuals: SavedLayers | None
    earlier: Tree = None  # gradients of the groups before, if not in the accumulators


class Passed(NamedTuple):
    """What the forward pass over a stack leaves."""

    x: Stream  # [G, ...]
    sums: Sums
    layers: Tree | CastOnce  # what the backward pass reads weights from, [L, ...]
    last_layer: Prefetched  # where its backward pass reuses what its forward pass had
    residuals: SavedLayers | None  # of the other layers, or of all


class Carry(NamedTuple):
    """What the backward pass hands from a layer to the one below."""

    dx: Stream  # [G, ...]
    dshared: Stream  # [G, ...], summed over the layers above
    prefetched: Prefetched
    unreduced: Tree  # gradients of the layer above, reduced during this one; None: there are none
    grads: Tree  # accumulators, [L, ...]
    ready: Tree = None  # of an unrolled layer above: 0, once its weights' gradients are computed


def forward_pass(loop: Loop, inputs: Inputs, x: Stream, sums: Sums) -> Passed:
    """Every layer, forward.

    Args:
      x: the stream that enters the stack, [G, ...].
    """
    if loop.prefetches:
        return _forward_pass_with_prefetch(loop, inputs, x, sums)

    def layer(carry, place, *into):
        x, sums = carry
        index = after(place.index, x) if loop.ordered else place.index
        weights = _gather(loop, inputs.layers, place.index, index)
        x, sums, residuals = _layer_forward(loop, weights, inputs, x, sums, place, *into)
        return (x, sums), residuals

    (x, sums), residuals = ascend(
        layer,
        (x, sums),
        loop.stack.num_layers,
        loop.stack.period,
        unroll=loop.form.unroll,
        into=inputs.residuals,
        in_place=loop.form.in_place,
    )
    return Passed(x, sums, inputs.layers, Prefetched(), residuals)


def _forward_pass_with_prefetch(loop: Loop, inputs: Inputs, x: Stream, sums: Sums) -> Passed:
    last = loop.stack.num_layers - 1

    def fetch(index: Index, kept: Tree) -> tuple[Tree, Tree]:
        weights = _gather(loop, inputs.layers, index)
        return weights, put(kept, weights, index) if loop.zero.keeps else None

    def layer(carry, place):
        x, sums, weights, kept = carry
        next_weights, kept = fetch(place.index + 1, kept)
        x, sums, residuals = _layer_forward(loop, weights, inputs, x, sums, place)
        residuals = to_host(residuals) if loop.form.offload else residuals
        return (x, sums, next_weights, kept), residuals

    carry = x, sums, *fetch(0, _room(loop, inputs.layers))
    (x, sums, weights, kept), residuals = ascend(
        layer, carry, last, loop.stack.period, unroll=loop.form.unroll, into=inputs.residuals
    )
    x, sums, last_residuals = _layer_forward(
        loop, weights, inputs, x, sums, Place(last, last % loop.stack.period)
    )
    # This layer's forward and backward pass are in one region: without the barrier the compiler
    # would merge what the backward pass recomputes with the forward pass, and save it.
    last_residuals = jax.lax.optimization_barrier(last_residuals)
    layers = kept if loop.zero.keeps else inputs.layers
    return Passed(x, sums, layers, Prefetched(weights, last_residuals), residuals)


def _room(loop: Loop, layers: Tree) -> Tree:
    """Arrays for the gathered weights of a stack, [L, ...], if they are kept."""
    if not loop.zero.keeps:
        return None
    axes = loop.zero.axes[loop.stack.name]
    return loop.zero.empty_weights(
        jax.eval_shape(lambda x: loop.zero.gather(x, axes), layers), axes
    )


def backward_pass(loop: Loop, inputs: Inputs, carry: Carry) -> tuple[Stream, Stream, Tree]:
    """Every layer, backward: the gradients of x and of what is shared, [G, ...], and of the layers,
    [L, ...]."""

    def layer(carry, place):
        return _layer_backward(loop, inputs, carry, place, prefetch=loop.prefetches_backward)

    # The last layer has no gradients above it to reduce, and its residuals may be outside the loop;
    # the first one has nothing to prefetch. Without collectives there is only the loop.
    top, bottom, period = loop.stack.num_layers - 1, 0, loop.stack.period
    if carry.prefetched.residuals is not None or loop.reduces:
        prefetch = loop.prefetches_backward and top > 0
        carry = _layer_backward(loop, inputs, carry, Place(top, top % period), prefetch=prefetch)
        top -= 1
    if loop.prefetches_backward and top >= 0:
        bottom = 1
    carry = descend(layer, carry, top, bottom, loop.stack.period, unroll=loop.form.unroll)
    if bottom:
        carry = _bottom_backward(loop, inputs, carry)
    grads = carry.grads
    if carry.unreduced is not None:
        grads = _accumulate(loop, inputs, grads, 0, carry.unreduced)
    return carry.dx, carry.dshared, grads


def _bottom_backward(loop: Loop, inputs: Inputs, carry: Carry) -> Carry:
    """The first layer of a stack, outside the loop, backward. Where another stack's last layer
    follows, which is also outside of its loop, a loop of one trip keeps the two apart."""

    def layer(carry: Carry, place: Place) -> Carry:
        after = _layer_backward(loop, inputs, carry, place, prefetch=False)
        return after._replace(prefetched=carry.prefetched)

    place = Place(0, 0)
    return layer(carry, place) if loop.is_first else one_layer(layer, carry, place)


def _layer_forward(
    loop: Loop,
    weights: Tree,
    inputs: Inputs,
    x: Stream,
    sums: Sums,
    place: Place,
    into: tuple[Residuals, Index] | None = None,
) -> tuple[Stream, Sums, Residuals]:
    """One layer, forward, for each micro-batch: x, the sums, and the residuals, [G, ...], or the
    arrays `into` which they are written, with the layer's place in them."""
    forward, _ = loop.passes[place.kind]
    # A value as in a loop: a constant would become part of the one backward pass that all layers of
    # a kind have.
    index = jax.lax.optimization_barrier(jnp.asarray(place.index, jnp.int32))

    def one(x: Stream, shared: Stream, batch: Batch) -> tuple[tuple, Residuals]:
        (x, loss), others, residuals = forward(weights, x, shared, (batch, index))
        return (x, loss, others), residuals

    if into:
        only, *rest = jax.tree.map(lambda x: x[0], (x, inputs.shared, inputs.batch))
        (x, loss, others), residuals = save_in_place(lambda x: one(x, *rest), only, *into)
        sums = add_layer_sums(loop.stack, sums, place.index, loss, others)
        return jax.tree.map(lambda x: x[None], x), sums, residuals

    def microbatch(sums, xs):
        (x, loss, others), residuals = one(*xs)
        return add_layer_sums(loop.stack, sums, place.index, loss, others), (x, residuals)

    sums, (x, residuals) = each(microbatch, sums, (x, inputs.shared, inputs.batch))
    return x, sums, residuals


def _layer_backward(
    loop: Loop, inputs: Inputs, carry: Carry, place: Place, *, prefetch: bool
) -> Carry:
    """One layer, backward, for each micro-batch, during the collectives of its neighbours.

    Args:
      prefetch: whether to fetch what the layer below needs.
    """
    _, dshared, (weights, residuals), unreduced, grads, ready = carry
    index = place.index
    # A layer begins when its dx is available: otherwise the compiler would start to recompute a
    # layer that is outside the loop during the head, or keep what its forward pass made of what is
    # shared.
    residuals, dx, shared, now = jax.lax.optimization_barrier(
        (residuals, carry.dx, inputs.shared, jnp.asarray(index, jnp.int32))
    )
    if loop.ordered:
        now = after(now, dx) if ready is None else after(now + ready, dx)
    inputs = inputs._replace(shared=shared)
    weights = _gather(loop, inputs.layers, index, now) if weights is None else weights
    if residuals is None:
        assert inputs.residuals is not None, "residuals are saved or prefetched"
        counted = loop.stack.period > 1 or loop.form.in_place or loop.form.unroll
        here = Place(index if counted else now, place.kind)
        residuals = inputs.residuals.at(here)
        if loop.ordered:  # as for the last layer, in `_forward_pass_with_prefetch`
            residuals, now = jax.lax.optimization_barrier((residuals, now))
    prefetched = _prefetch(loop, inputs, place) if prefetch else Prefetched()
    if unreduced is not None:
        grads = _accumulate(loop, inputs, grads, index + 1, unreduced)
        if loop.form.early.layers:
            # The layer is recomputed meanwhile, which does not need dx.
            grads, dx = loop.zero.barrier(grads, loop.frozen, dx)
    here = Place(now, place.kind)
    dweights, dx, dshared = _sum_gradients(loop, weights, inputs, residuals, dx, dshared, here)
    # The compiler would compute the gradients of many layers' weights later, and hold what they are
    # of.
    ready = after(0, loop.zero.trained(dweights, loop.frozen)) if loop.ordered else None
    if loop.reduces:
        return Carry(dx, dshared, prefetched, dweights, grads, ready)
    grads = _accumulate(loop, inputs, grads, index, dweights)
    return Carry(dx, dshared, prefetched, None, grads, ready)


def _sum_gradients(
    loop: Loop,
    weights: Tree,
    inputs: Inputs,
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
        dweights = jax.tree.map(
            lambda x: x.weight if is_quantised(x) else x, dweights, is_leaf=is_quantised
        )
        return add(total, dweights), (dx, add(dshared, more))

    total = loop.zero.running_sum(weights, loop.axes, inputs.batch)
    xs = inputs.batch, inputs.shared, residuals, dx, dshared
    total, (dx, dshared) = each(microbatch, total, xs)
    return total, dx, dshared


def _gather(loop: Loop, layers: Tree | CastOnce, index: Index, now: Index | None = None) -> Tree:
    """The weights of one layer, whole over fsdp.

    Args:
      now: the index, known when the parameters may be read; None: they may be at any time.
    """
    if not isinstance(layers, CastOnce):
        return loop.zero.gather(at(layers, index if now is None else now), loop.axes)
    # Matrices are there from the start: a layer waits for the one before by its vectors alone.
    others, matrices = _gather(loop, layers.at_rest, index, now), layers.matrices[index]
    return jax.tree.map(
        lambda x, other: other if x is None else x,
        matrices,
        others,
        is_leaf=lambda x: x is None or is_quantised(x),
    )


def _prefetch(loop: Loop, inputs: Inputs, above: Place) -> Prefetched:
    """What the layer below this one needs."""
    period = loop.stack.period
    below = Place(above.index - 1, (above.kind - 1) % period)
    weights = _gather(loop, inputs.layers, below.index)
    if not loop.form.offload:
        return Prefetched(weights)
    assert inputs.residuals is not None, "offloaded residuals are saved"
    return Prefetched(weights, from_host(inputs.residuals.at(below)))


def _accumulate(loop: Loop, inputs: Inputs, grads: Tree, index: Index, dweights: Tree) -> Tree:
    """Reduces the gradients of one layer and adds them to its accumulators; those of the last
    visit, to what they are when no reduction remains."""
    if loop.form.hides_index and isinstance(index, int):
        index = after(index, inputs.batch.tokens)
    visit, total = loop.visit, loop.zero.reduce(dweights, loop.axes)
    if visit.last and not visit.only:
        earlier = grads if inputs.earlier is None else inputs.earlier
        total = loop.zero.finish(add(at(earlier, index), total), loop.axes)
        return put(grads, total, index)
    total = loop.zero.finish(total, loop.axes) if visit.last else total
    if loop.writes_once:
        total = jax.tree.map(lambda x, grad: grad.astype(x.dtype), grads, total)
        return put(grads, total, index)
    # An only visit that reduces adds to zeros: where XLA for GPUs puts what a reduce-scatter
    # leaves, without a sum, it hides none of them.
    return add_at(grads, index, total)


def only_after(weights: Tree, x: Tree) -> tuple[Tree, Tree]:
    """Weights that are not available before x is.

    The compiler sees that gathering the same shards again gives the same weights: it would gather
    once, before the loop over micro-batches or in the forward pass, and keep them whole.
    """
    return jax.lax.optimization_barrier((weights, x))
