"""The layer loop: forward and backward pass over a stack for the micro-batches of one group.

Layered gradient accumulation (arXiv 2106.02679): for each layer, for each of the G micro-batches of
the group. A pass over the layers gathers the weights of a layer once, and reduces its gradients
once, for any G. With G = 1 this is the ordinary pass that sequential accumulation repeats for every
micro-batch.

Collectives run during the compute of a neighbouring layer. The weights W of the next layer are
prefetched, and the gradients dW of the previous layer are reduced, while this one computes: F is
its forward pass and B its backward pass, over all G micro-batches. With L = 3:

    gather    W0 | W1 | W2 |    |      | W1 | W0  |     |
    compute      | F0 | F1 | F2 | head | B2 | B1  | B0  |
    reduce       |    |    |    |      |    | dW2 | dW1 | dW0

The last layer's backward pass reuses the weights of its forward pass: 2L - 1 gathers of layer
weights and L reductions of layer gradients per group. In ZeRO stages 1 and 2 the first group keeps
the weights that its forward pass gathers, for the rest of the step: L gathers. Reductions that are
not done for every group are done by the last one. Experts are gathered, and their gradients
reduced, as often, but during their own layer (`loop_weights`). Residuals offloaded to host memory
are prefetched with the weights. A layout without collectives and offload prefetches nothing; nor
does the backward pass with `ReductionTiming.defer_gathers`.

Layers whose static settings repeat with a period are looped over a period at a time.

Letters: G micro-batches, L layers of a stack.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.batch import Batch
from jaxscale.models.protocol import Stream, Sums, add_layer_sums
from jaxscale.ops.array_stack import add, add_at, after, at, put
from jaxscale.ops.matmul import is_quantised
from jaxscale.ops.save_in_place import save_in_place
from jaxscale.ops.storage.quantised_storage import stored_gradients, unpack_weights
from jaxscale.sharding.host_memory import from_host, to_host
from jaxscale.training.layers.layer_scan import (
    LayerPosition,
    Residuals,
    SavedLayers,
    ascend,
    descend,
    each,
    one_layer,
)
from jaxscale.training.layers.loop_weights import (
    CastOnce,
    Fetched,
    Loop,
    empty_layers,
    gather_layer,
    joined,
    missing,
    prefetch_layer,
)

Tree = Any
Index = int | jax.Array


class Prefetched(NamedTuple):
    """Arrays fetched for a layer during the compute before it; None: read when it begins."""

    weights: Fetched = Fetched()
    residuals: Residuals | None = None  # [G, ...]


class Inputs(NamedTuple):
    """The inputs of the passes over a stack."""

    layers: Tree | CastOnce  # parameters as at rest, or gathered and kept, [L, ...]
    batch: Batch  # [G, ...]
    shared: Stream  # [G, ...]
    # Without prefetched ones; in the forward pass, the arrays that they are written into.
    residuals: SavedLayers | None
    earlier: Tree = None  # gradients of the groups before, if not in the accumulators


class Passed(NamedTuple):
    """The results of the forward pass over a stack."""

    x: Stream  # [G, ...]
    sums: Sums
    layers: Tree | CastOnce  # the weights for the backward pass, [L, ...]
    last_layer: Prefetched  # of the last layer's forward pass, reused by its backward pass
    residuals: SavedLayers | None  # of the other layers, or of all


class Carry(NamedTuple):
    """The values that the backward pass of a layer passes to the layer below."""

    dx: Stream  # [G, ...]
    dshared: Stream  # [G, ...], summed over the layers above
    prefetched: Prefetched
    unreduced: Tree  # gradients of the layer above, reduced during this one; None: no such
    grads: Tree  # accumulators, [L, ...]
    ready: Tree = None  # of an unrolled layer above: 0, once its weights' gradients are computed


def forward_pass(loop: Loop, inputs: Inputs, x: Stream, sums: Sums) -> Passed:
    """The forward pass of all layers.

    Args:
      x: the stream that enters the stack, [G, ...].
    """
    if loop.prefetches:
        return _forward_pass_with_prefetch(loop, inputs, x, sums)

    def layer(carry, position, *into):
        x, sums = carry
        index = after(position.index, x) if loop.ordered else position.index
        weights = gather_layer(loop, inputs.layers, position.index, index)
        x, sums, residuals = _layer_forward(loop, weights, inputs, x, sums, position, *into)
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

    def fetch(index: Index, kept: Tree) -> tuple[Fetched, Tree]:
        fetched = prefetch_layer(loop, inputs.layers, index)
        return fetched, put(kept, fetched.weights, index) if loop.zero.keeps else None

    def layer(carry, position):
        x, sums, fetched, kept = carry
        weights, x = _gather_rest(loop, inputs, fetched, x, position.index)
        fetched, kept = fetch(position.index + 1, kept)
        x, sums, residuals = _layer_forward(loop, weights, inputs, x, sums, position)
        residuals = to_host(residuals) if loop.form.offload else residuals
        return (x, sums, fetched, kept), residuals

    carry = x, sums, *fetch(0, empty_layers(loop, inputs.layers))
    (x, sums, fetched, kept), residuals = ascend(
        layer, carry, last, loop.stack.period, unroll=loop.form.unroll, into=inputs.residuals
    )
    weights, x = _gather_rest(loop, inputs, fetched, x, last)
    x, sums, last_residuals = _layer_forward(
        loop, weights, inputs, x, sums, LayerPosition(last, last % loop.stack.period)
    )
    # This layer's forward and backward pass are outside the loops, in one region: without the
    # barrier XLA would merge the recomputed operations with the forward pass (CSE), and save them.
    last_residuals = jax.lax.optimization_barrier(last_residuals)
    layers = kept if loop.zero.keeps else inputs.layers
    return Passed(x, sums, layers, Prefetched(Fetched(weights), last_residuals), residuals)


def _gather_rest(
    loop: Loop, inputs: Inputs, fetched: Fetched, x: Stream, index: Index
) -> tuple[Tree, Stream]:
    """The weights of a layer, whose experts are gathered when x is available; and x."""
    if not jax.tree.leaves(missing(fetched.weights, inputs.layers)):
        return fetched.weights, x
    # Behind a barrier: with a constant index XLA could gather before the loop ends.
    now, x = jax.lax.optimization_barrier((jnp.asarray(index, jnp.int32), x))
    return gather_layer(loop, inputs.layers, index, now, fetched), x


def backward_pass(loop: Loop, inputs: Inputs, carry: Carry) -> tuple[Stream, Stream, Tree]:
    """The backward pass of all layers: the gradients of x and of the shared arrays, [G, ...], and
    of the layers, [L, ...]."""

    def layer(carry, position):
        return _layer_backward(loop, inputs, carry, position, prefetch=loop.prefetches_backward)

    # The last layer has no gradients above it to reduce, and its residuals may be outside the loop;
    # the first layer has nothing to prefetch. Without collectives there is only the loop.
    top, bottom, period = loop.stack.num_layers - 1, 0, loop.stack.period
    if carry.prefetched.residuals is not None or loop.reduces:
        prefetch = loop.prefetches_backward and top > 0
        above = LayerPosition(top, top % period)
        carry = _layer_backward(loop, inputs, carry, above, prefetch=prefetch)
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
    """The backward pass of a stack's first layer, outside the loop. If another stack's last layer
    follows, which is also outside its loop, a loop of one trip separates the two."""

    def layer(carry: Carry, position: LayerPosition) -> Carry:
        after = _layer_backward(loop, inputs, carry, position, prefetch=False)
        return after._replace(prefetched=carry.prefetched)

    bottom = LayerPosition(0, 0)
    return layer(carry, bottom) if loop.is_first else one_layer(layer, carry, bottom)


def _layer_forward(
    loop: Loop,
    weights: Tree,
    inputs: Inputs,
    x: Stream,
    sums: Sums,
    position: LayerPosition,
    into: tuple[Residuals, Index] | None = None,
) -> tuple[Stream, Sums, Residuals]:
    """The forward pass of one layer for each micro-batch: x, the sums, and the residuals, [G, ...],
    or the arrays that they are written to.

    Args:
      into: the arrays for residuals, and the layer's index in them.
    """
    forward, _ = loop.passes[position.kind]
    weights = unpack_weights(weights, loop.stack.stored)
    # A traced value, as in a loop: a constant index of a layer outside the loop would become a
    # constant of the backward pass that all layers of this kind share.
    index = jax.lax.optimization_barrier(jnp.asarray(position.index, jnp.int32))

    def one(x: Stream, shared: Stream, batch: Batch) -> tuple[tuple, Residuals]:
        (x, loss), others, residuals = forward(weights, x, shared, (batch, index))
        return (x, loss, others), residuals

    if into:
        only, *rest = jax.tree.map(lambda x: x[0], (x, inputs.shared, inputs.batch))
        (x, loss, others), residuals = save_in_place(lambda x: one(x, *rest), only, *into)
        sums = add_layer_sums(loop.stack, sums, position.index, loss, others)
        return jax.tree.map(lambda x: x[None], x), sums, residuals

    def microbatch(sums, xs):
        (x, loss, others), residuals = one(*xs)
        return add_layer_sums(loop.stack, sums, position.index, loss, others), (x, residuals)

    sums, (x, residuals) = each(microbatch, sums, (x, inputs.shared, inputs.batch))
    return x, sums, residuals


def _layer_backward(
    loop: Loop, inputs: Inputs, carry: Carry, position: LayerPosition, *, prefetch: bool
) -> Carry:
    """The backward pass of one layer for each micro-batch, overlapping with the collectives of its
    neighbours.

    Args:
      prefetch: whether to fetch the weights and residuals of the layer below.
    """
    _, dshared, (fetched, residuals), unreduced, grads, ready = carry
    index = position.index
    # A layer starts when its dx is available. Without the barrier XLA would start to recompute a
    # layer outside the loop during the head, or keep its forward pass's results from shared arrays.
    residuals, dx, shared, now = jax.lax.optimization_barrier(
        (residuals, carry.dx, inputs.shared, jnp.asarray(index, jnp.int32))
    )
    if loop.ordered:
        now = after(now, dx) if ready is None else after(now + ready, dx)
    inputs = inputs._replace(shared=shared)
    weights = gather_layer(loop, inputs.layers, index, now, fetched)
    if residuals is None:
        assert inputs.residuals is not None, "residuals are saved or prefetched"
        counted = loop.stack.period > 1 or loop.form.in_place or loop.form.unroll
        here = LayerPosition(index if counted else now, position.kind)
        residuals = inputs.residuals.at(here)
        if loop.ordered:  # as for the last layer, in `_forward_pass_with_prefetch`
            residuals, now = jax.lax.optimization_barrier((residuals, now))
    prefetched = _prefetch(loop, inputs, position) if prefetch else Prefetched()
    if unreduced is not None:
        grads = _accumulate(loop, inputs, grads, index + 1, unreduced)
        if loop.form.early.layers:
            # Overlaps with recomputing the layer, which does not need dx.
            grads, dx = loop.zero.barrier(grads, loop.frozen, dx)
    here = LayerPosition(now, position.kind)
    dweights, dx, dshared = _sum_gradients(loop, weights, inputs, residuals, dx, dshared, here)
    # The next layer waits for this one's weight gradients. XLA for GPUs would compute
    # them late and keep their operands: for 23 layers of Llama 3 8B, 124.1 GiB instead of 119.4.
    ready = after(0, loop.zero.trained(dweights, loop.frozen)) if loop.ordered else None
    if loop.reduces:
        grads = _accumulate_each(loop, inputs, grads, index, loop.on_use_part(dweights))
        return Carry(dx, dshared, prefetched, loop.prefetched_part(dweights), grads, ready)
    grads = _accumulate(loop, inputs, grads, index, dweights)
    return Carry(dx, dshared, prefetched, None, grads, ready)


def _sum_gradients(
    loop: Loop,
    weights: Tree,
    inputs: Inputs,
    residuals: Residuals,
    dx: Stream,
    dshared: Stream,
    position: LayerPosition,
) -> tuple[Tree, Stream, Stream]:
    """The gradients of one layer's weights, summed over micro-batches, the gradients of x, and
    `dshared` plus those of the shared arrays, [G, ...]."""
    _, backward = loop.passes[position.kind]
    weights = unpack_weights(weights, loop.stack.stored)
    seed = loop.zero.one if "loss" in loop.stack.sums else None

    def microbatch(total, xs):
        batch, shared, residuals, dx, dshared = xs
        context = batch, position.index
        dweights, dx, more = backward(weights, shared, context, residuals, (dx, seed))
        dweights = jax.tree.map(
            lambda x: x.weight if is_quantised(x) else x, dweights, is_leaf=is_quantised
        )
        return add(total, dweights), (dx, add(dshared, more))

    total = loop.zero.running_sum(weights, loop.axes, inputs.batch)
    xs = inputs.batch, inputs.shared, residuals, dx, dshared
    total, (dx, dshared) = each(microbatch, total, xs)
    return stored_gradients(total, loop.stack.stored), dx, dshared


def _prefetch(loop: Loop, inputs: Inputs, above: LayerPosition) -> Prefetched:
    """The weights and residuals of the layer below this one."""
    period = loop.stack.period
    below = LayerPosition(above.index - 1, (above.kind - 1) % period)
    weights = prefetch_layer(loop, inputs.layers, below.index, backward=True)
    if not loop.form.offload:
        return Prefetched(weights)
    assert inputs.residuals is not None, "offloaded residuals are saved"
    return Prefetched(weights, from_host(inputs.residuals.at(below)))


def _accumulate_each(loop: Loop, inputs: Inputs, grads: Tree, index: Index, dweights: Tree) -> Tree:
    """`_accumulate` of one weight after the other: XLA for TPUs would hold all of them, whole, in
    the type of the reduction."""
    leaves, structure = jax.tree.flatten(dweights)
    for i, leaf in enumerate(leaves):
        nothing = [None] * len(leaves)
        one = structure.unflatten([*nothing[:i], leaf, *nothing[i + 1 :]])
        grads = _accumulate(loop, inputs, grads, index, one)
        if rest := leaves[i + 1 :]:
            grads, leaves[i + 1 :] = loop.zero.barrier(grads, loop.frozen, rest)
    return grads


def _accumulate(loop: Loop, inputs: Inputs, grads: Tree, index: Index, dweights: Tree) -> Tree:
    """Reduces the gradients of one layer and adds them to its accumulators; at the last visit the
    sums are fully reduced. Where `dweights` is None the accumulators do not change."""
    given = jax.tree.leaves(dweights)
    if not given:
        return grads
    rest = missing(dweights, grads)
    before, axes = (missing(rest, tree) for tree in (grads, loop.axes))
    earlier = before if inputs.earlier is None else missing(rest, inputs.earlier)
    return joined(_added(loop, inputs, before, earlier, index, dweights, axes), rest)


def _added(
    loop: Loop,
    inputs: Inputs,
    grads: Tree,
    earlier: Tree,
    index: Index,
    dweights: Tree,
    axes: Tree,
) -> Tree:
    if loop.form.hides_index and isinstance(index, int):
        index = after(index, inputs.batch.tokens)
    visit, total = loop.visit, loop.zero.reduce(dweights, axes)
    if visit.last and not visit.only:
        total = loop.zero.finish(add(at(earlier, index), total), axes)
        return put(grads, total, index)
    total = loop.zero.finish(total, axes) if visit.last else total
    if loop.writes_once:
        total = jax.tree.map(lambda x, grad: grad.astype(x.dtype), grads, total)
        return put(grads, total, index)
    # An only visit that reduces adds to zeros: XLA for GPUs overlaps no reduce-scatter whose result
    # is written without a sum.
    return add_at(grads, index, total)
