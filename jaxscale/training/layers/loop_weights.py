"""The weights of a layer in the layer loop: when they are gathered, and their gradients reduced.

Most weights are prefetched during the compute of the layer before, and their gradients are reduced
during the compute of the layer below. Experts are gathered on use: during the attention of the same
layer, whose backward pass overlaps with the reductions of their gradients. They are most of a
layer's bytes, and the loop would carry the next layer's weights and the gradients of the layer
above, whole, through the matmuls of the experts. Parts of a tree of weights have None for the other
entries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxscale.models.protocol import Stack
from jaxscale.ops.array_stack import at
from jaxscale.ops.matmul import is_quantised
from jaxscale.sharding.host_memory import from_host, is_on_host
from jaxscale.sharding.resolve import has_experts, is_axes
from jaxscale.sharding.zero import Zero
from jaxscale.training.layers.loop_form import LoopForm

Tree = Any
Index = int | jax.Array


class GroupPosition(NamedTuple):
    """Position in a step of the groups that visit the layers in one loop."""

    first: bool  # the first group is among them
    last: bool  # they are the last group only

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
    """Static part of the passes over a stack: the collectives, and a layer's two passes."""

    stack: Stack
    zero: Zero
    visit: GroupPosition
    passes: tuple[tuple[Callable, Callable], ...]  # `split_vjp` of each layer of a period
    form: LoopForm
    is_first: bool  # of the model's stacks

    @property
    def axes(self) -> Tree:
        """The logical axes of one layer's weights."""
        return self.zero.layer_axes(self.stack.name)

    @property
    def frozen(self) -> Tree:
        """Whether each of them is frozen; None: none is."""
        return self.zero.frozen and self.zero.frozen[self.stack.name]

    @property
    def prefetches(self) -> bool:
        """Whether a layer needs weights or residuals from other ranks or the host."""
        return self.zero.gathers or self.form.offload or self.fetches

    @property
    def fetches(self) -> bool:
        """Whether a layer needs weights from host memory: gathered ones that are kept are on the
        device."""
        return self.form.fetches and not self.zero.has_gathered

    @property
    def prefetches_backward(self) -> bool:
        """Whether they are prefetched for its backward pass."""
        return self.prefetches and (self.fetches or not self.form.early.defer_gathers)

    @property
    def ordered(self) -> bool:
        """Whether unrolled layers wait for one another (`after`): if there are no collectives to
        overlap."""
        return self.form.unroll and all(size == 1 for size in self.zero.sizes.values())

    @property
    def reduces(self) -> bool:
        """Whether a layer's gradients are reduced over ranks, during the layer below."""
        return self.zero.reduces or (self.visit.last and self.zero.reduces_over_replicas_at_end)

    def prefetched_part(self, tree: Tree) -> Tree:
        """The entries of a tree of one layer's weights that neighbouring layers overlap."""
        return self._selected(tree, experts=False)

    def on_use_part(self, tree: Tree) -> Tree:
        """The entries of weights that are gathered on use: experts."""
        return self._selected(tree, experts=True)

    def _selected(self, tree: Tree, *, experts: bool) -> Tree:
        # Their small vectors, as biases, too: a second rule would save nothing.
        on_use = self.form.experts_on_use
        return jax.tree.map(
            lambda axes, x: x if (on_use and has_experts(axes)) == experts else None,
            self.axes,
            tree,
            is_leaf=is_axes,
        )

    @property
    def writes_once(self) -> bool:
        """Whether a layer's gradients are written to its accumulators, without a sum."""
        return self.visit.only and not self.reduces


class CastOnce(NamedTuple):
    """The layers of a stack with matrices that a step casts once (`Layout.casts_once`)."""

    at_rest: Tree  # parameters, [L, ...]
    matrices: tuple[Tree, ...]  # of each layer, cast or quantised; None for other parameters


def empty_layers(loop: Loop, layers: Tree) -> Tree:
    """Arrays for the gathered weights of a stack, [L, ...], if they are kept."""
    if not loop.zero.keeps:
        return None
    axes = loop.zero.axes[loop.stack.name]
    return loop.zero.empty_weights(
        jax.eval_shape(lambda x: loop.zero.gather(x, axes), layers), axes
    )


class Fetched(NamedTuple):
    """The weights of a layer that are fetched during the compute before it."""

    weights: Tree = None  # gathered; None: gathered on use
    shards: Tree = None  # of weights gathered on use, those copied from host memory; or None


NOTHING = Fetched()


def prefetch_layer(loop: Loop, layers: Tree, index: Index, *, backward: bool = False) -> Fetched:
    """The weights of one layer that are fetched during the layer before it, forward or backward."""
    if loop.zero.keeps or not loop.zero.gathers:
        return Fetched(gather_layer(loop, layers, index))
    # Weights that are kept for the step are all prefetched: on use they would save no memory.
    some, axes = loop.prefetched_part(layers), loop.prefetched_part(loop.axes)
    if backward and loop.form.early.defer_gathers:
        some = axes = None
    weights = None if some is None else loop.zero.gather(at(some, index), axes)
    rest = jax.tree.map(lambda x: x if is_on_host(x) else None, missing(weights, layers))
    return Fetched(weights, from_host(at(rest, index)))


def gather_layer(
    loop: Loop,
    layers: Tree | CastOnce,
    index: Index,
    now: Index | None = None,
    fetched: Fetched = NOTHING,
) -> Tree:
    """The weights of one layer, gathered.

    Args:
      now: the index, as a value that depends on the arrays to wait for; None: no wait.
      fetched: the weights that are gathered, or on the device, already.
    """
    if not isinstance(layers, CastOnce):
        ready, (layers, axes) = (
            fetched.weights,
            (missing(fetched.weights, tree) for tree in (layers, loop.axes)),
        )
        if not jax.tree.leaves(layers):
            return ready
        rest = missing(fetched.shards, layers)
        shards = joined(fetched.shards, from_host(at(rest, index if now is None else now)))
        if loop.form.experts_on_use and loop.zero.gathers:
            # XLA would move the cast before the slice and out of the loop: all layers' shards in
            # the compute type, 1.4 GB for Mixtral 8x7B over 64 devices.
            shards = jax.lax.optimization_barrier(shards)
        return joined(ready, loop.zero.gather(shards, axes))
    # Matrices are cast before the first layer: a layer waits for the one before by its vectors.
    others, matrices = gather_layer(loop, layers.at_rest, index, now), layers.matrices[index]
    return jax.tree.map(
        lambda x, other: other if x is None else x,
        matrices,
        others,
        is_leaf=lambda x: x is None or is_quantised(x),
    )


def missing(some: Tree, tree: Tree) -> Tree:
    """The entries of a tree where `some` is None; None for the others."""
    return jax.tree.map(lambda x, y: y if x is None else None, some, tree, is_leaf=_is_none)


def joined(some: Tree, others: Tree) -> Tree:
    """`some`, with the entries of `others` where it is None."""
    return jax.tree.map(lambda x, y: y if x is None else x, some, others, is_leaf=_is_none)


def _is_none(node: object) -> bool:
    return node is None


def only_after(weights: Tree, x: Tree) -> tuple[Tree, Tree]:
    """Weights that are not available before x.

    XLA sees that gathering the same shards again gives the same weights (CSE, loop-invariant code
    motion): it would gather once, before the loop over micro-batches or in the forward pass, and
    keep whole weights.
    """
    return jax.lax.optimization_barrier((weights, x))
