"""Gradient accumulation: the groups of micro-batches of a step, in order, and the pass of a group.

With layered accumulation all micro-batches of a step are one group, with sequential accumulation
each is a separate group. Groups are iterations of a loop, except the first one if it keeps gathered
weights, and the last one if it reduces the remaining gradients: ZeRO stages 1 and 2 gather during
the first forward pass, and gradients that are not reduced for every group are reduced during the
last backward pass.

The pass of a group is the embedding, the stacks of the model in order, the head, and back
(`layer_loop`).

Letters: G micro-batches of a group.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxscale.batch import Batch
from jaxscale.config.layout import Layout
from jaxscale.models.protocol import (
    Model,
    Stack,
    Stream,
    Sums,
    enter_gradients,
    head_gradients,
    head_params,
    layer_functions,
    return_borrowed,
    split_stream,
    sum_shapes,
    zero_sums,
)
from jaxscale.ops.array_stack import add, at
from jaxscale.ops.matmul import quantised_weight
from jaxscale.ops.split_vjp import split_vjp
from jaxscale.sharding.host_memory import is_on_host
from jaxscale.sharding.resolve import leaf_name
from jaxscale.sharding.zero import Zero
from jaxscale.training.layers.layer_loop import (
    Carry,
    Inputs,
    Passed,
    backward_pass,
    forward_pass,
)
from jaxscale.training.layers.layer_scan import SavedLayers, each
from jaxscale.training.layers.loop_form import LoopForm, make_loop_form
from jaxscale.training.layers.loop_weights import CastOnce, GroupPosition, Loop, only_after
from jaxscale.training.remat import remat_of

Tree = Any
Saved = tuple[SavedLayers | None, ...]
"""The residuals of each stack."""


class Accumulated(NamedTuple):
    """The values that a group of a step passes to the next."""

    sums: Sums
    grads: Tree  # sums of gradients; after the last group they are reduced
    earlier: Tree = None  # sums before the last group, if reduced ones have another shape
    saved: Saved | None = None  # arrays that residuals are written into; None: new arrays


class GroupPass(NamedTuple):
    """Functions of an accumulation group: its loss and gradients, and arrays for its residuals.

    - `run(params, batch, before) -> (weights, after, dvectors)` adds the losses and gradients of a
      group. The weights are for later groups of the step: gathered and kept, or as at rest.
      `dvectors` are the gradients of the group's `Batch.vectors`.
    - `empty(params, batch, sums, start) -> saved`: arrays for the residuals of any group, filled
      with `start`, a scalar 0, once it is computed; None leaves them unfilled.

    The fields of `batch` are [G, ...].
    """

    run: Callable[[Tree, Batch, Accumulated], tuple[Tree, Accumulated, Tree]]
    empty: Callable[[Tree, Batch, Sums, jax.Array | None], Saved]


def make_accumulation(
    model: Model, layout: Layout, zero: Zero, platform: str, *, unroll_loops: bool = False
) -> Callable[[Tree, Batch], tuple[Sums, Tree, Tree]]:
    """`(params, groups) -> (sums, gradient sums, dvectors)` for a rank's part of a batch,
    [groups, G, ...], with reduced gradients; for a `shard_map` in which pipeline, data and fsdp are
    manual. `dvectors`, [groups, G, ...], are the gradients of `groups.vectors`.

    Args:
      unroll_loops: as `make_engine`.
    """
    count = layout.num_groups
    visits = _visits(zero, count)

    def run(params: Tree, groups: Batch) -> tuple[Sums, Tree, Tree]:
        tokens = groups.tokens[0, 0].size // layout.context
        fetches = any(map(is_on_host, jax.tree.leaves(params)))
        form = make_loop_form(layout, zero, platform, tokens, fetches=fetches, unroll=unroll_loops)
        weights = _cast_once(model, layout, zero, params)
        grads = _first_grads(model, zero, form, params, count)
        done = Accumulated(zero_sums(model, zero.loss_dtype), grads)
        parts = []
        for visit, span in visits:
            group_pass = _make_group_pass(model, layout, zero, visit, form)
            some = jax.tree.map(lambda x, span=span: x[span], groups)
            nothing = jnp.zeros(())
            if not visit.first:
                # Without the barrier XLA could start the forward pass of the last group, or fill
                # arrays for its residuals, while those of the group before are still live.
                others = some, done._replace(grads=None), nothing
                grads, (some, done, nothing) = zero.barrier(done.grads, zero.frozen, others)
                done = done._replace(grads=grads)
            if visit.last_of_several and zero.scatters_last:
                grads = zero.zeros(params, zero.axes, finished=True)
                done = done._replace(grads=grads, earlier=done.grads)
            # The first group of ZeRO stages 1 and 2 is not in the loop, and has other residuals:
            # weights that it gathers itself.
            if form.reuses and not (visit.first and zero.keeps):
                # `nothing` is behind the barrier above: the fill waits for the group before.
                start = None if form.unfilled and visit.first else nothing
                saved = done.saved or group_pass.empty(weights, at(some, 0), done.sums, start)
                done = done._replace(saved=saved)
            weights, done, dvectors = _each_group(group_pass, weights, some, done)
            parts.append(dvectors)
        # Without a separate last visit only gradients of vectors remain, reduced here.
        reduced = visits[-1][0].last
        grads = done.grads if reduced else zero.finish(done.grads, zero.axes)
        dvectors = jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts)
        return zero.total(done.sums), grads, dvectors

    return run


def _first_grads(model: Model, zero: Zero, form: LoopForm, params: Tree, count: int) -> Tree:
    """The accumulators of a step of `count` groups, before the first."""
    grads = zero.zeros(params, zero.axes, finished=count == 1)
    if form.unfilled and count == 1 and not (zero.reduces or zero.reduces_over_replicas_at_end):
        # Every layer's gradients are written, and nothing is added (`Loop.writes_once`).
        # XLA for GPUs (jax 0.12) fills and reads the zeros otherwise: a step of Llama 3.2 1B on one
        # H200 moved 573 GB instead of 565.
        grads |= {stack.name: _unfilled(grads[stack.name]) for stack in model.stacks}
    return grads


def _cast_once(model: Model, layout: Layout, zero: Zero, params: Tree) -> Tree:
    """The parameters with the matrices of each layer cast to separate arrays, or quantised, if a
    step does that once (`Layout.casts_once`)."""
    if not layout.casts_once:
        return params

    def matrices(stack: Stack, index: int) -> Tree:
        linear = stack.linear if quantises_once(model, layout) else {}

        def prepared(path: tuple, at_rest: jax.Array, cast: jax.Array) -> Any:
            contracted = linear.get(leaf_name(path))
            if contracted:
                return quantised_weight(cast, contracted)
            # Not vectors: each layer waits for the one before by reading its own. With nothing to
            # wait for, XLA for GPUs computed the weights' gradients late: Llama 3 8B needed
            # 136.3 GiB of an H200 instead of 131.9.
            return cast if cast.ndim > 1 and cast.dtype != at_rest.dtype else None

        at_rest = at(params[stack.name], index)
        weights = zero.gather_part(at_rest, stack.name)
        return jax.tree_util.tree_map_with_path(prepared, at_rest, weights)

    def cast(stack: Stack) -> CastOnce:
        each = (matrices(stack, index) for index in range(stack.num_layers))
        return CastOnce(params[stack.name], tuple(each))

    return {**params, **{stack.name: cast(stack) for stack in model.stacks}}


def quantises_once(model: Model, layout: Layout) -> bool:
    """Whether a step also quantises cast matrices once; not over tensor ranks, each of which
    computes a scale of its part."""
    rounded = model.settings.matmul_dtype == "float8"
    return layout.casts_once and layout.tensor == 1 and rounded


def _unfilled(like: Tree) -> Tree:
    """Uninitialised arrays of these shapes and types."""
    return jax.tree.map(lambda x: jax.lax.empty(x.shape, x.dtype), like)


def _visits(zero: Zero, count: int) -> list[tuple[GroupPosition, slice]]:
    """The loops over a step's groups in order: the position of their groups, and the groups."""
    # The first group and the last one may do collectives that the others do not.
    apart = {1} if zero.keeps else set()
    apart |= {count - 1} if zero.reduces_over_replicas_at_end else set()
    bounds = itertools.pairwise(sorted({0, count, *apart}))
    return [
        (GroupPosition(first=begin == 0, last=end == count == begin + 1), slice(begin, end))
        for begin, end in bounds
    ]


def _each_group(
    group_pass: GroupPass, weights: Tree, groups: Batch, done: Accumulated
) -> tuple[Tree, Accumulated, Tree]:
    """`GroupPass.run` for groups [N, G, ...]; only a single group may return other weights."""
    if jax.tree.leaves(groups)[0].shape[0] == 1:
        weights, done, dvectors = group_pass.run(weights, at(groups, 0), done)
        return weights, done, jax.tree.map(lambda x: x[None], dvectors)
    return weights, *jax.lax.scan(
        lambda done, batch: group_pass.run(weights, batch, done)[1:], done, groups
    )


def _make_group_pass(
    model: Model,
    layout: Layout,
    zero: Zero,
    visit: GroupPosition,
    form: LoopForm,
) -> GroupPass:
    zero = zero if visit.first else zero.kept

    def make_loop(stack: Stack) -> Loop:
        layers = layer_functions(stack, remat_of(layout.remat_policy))
        passes = [split_vjp(layer) for layer in layers]
        first = stack.name == model.stacks[0].name
        return Loop(stack, zero, visit, passes=tuple(passes), form=form, is_first=first)

    loops = [make_loop(stack) for stack in model.stacks]

    def run(params: Tree, batch: Batch, before: Accumulated) -> tuple[Tree, Accumulated, Tree]:
        return _group_pass(model, zero, loops, visit, form, params, batch, before)

    def empty(params: Tree, batch: Batch, sums: Sums, start: jax.Array | None) -> Saved:
        def forward(params: Tree, batch: Batch, sums: Sums) -> Saved:
            embed = zero.gather(params["embed"], zero.axes["embed"])
            # Traced only for the shapes of its residuals.
            new = (None,) * len(loops)
            entered = _stacks_forward(loops, params, embed, batch, sums, new)[2]
            return tuple(one.passed.residuals for one in entered)

        shapes = jax.eval_shape(forward, params, batch, sums)
        if start is None:
            return _unfilled(shapes)
        return jax.tree.map(lambda x: jnp.full(x.shape, start.astype(x.dtype)), shapes)

    return GroupPass(run, empty)


class _Entered(NamedTuple):
    """A stack after its forward pass."""

    before: Stream  # the stream before the stack, [G, ...]
    shared: Stream  # [G, ...]
    passed: Passed


def _group_pass(
    model: Model,
    zero: Zero,
    loops: Sequence[Loop],
    visit: GroupPosition,
    form: LoopForm,
    params: Tree,
    batch: Batch,
    before: Accumulated,
) -> tuple[Tree, Accumulated, Tree]:
    # In stage 3 every group gathers again; a loop-invariant gather would be moved out of the loop.
    if zero.gathers and not zero.keeps:
        params, batch = only_after(params, batch)
    embed = zero.gather(params["embed"], zero.axes["embed"])
    into = before.saved or (None,) * len(loops)
    stream, sums, entered = _stacks_forward(loops, params, embed, batch, before.sums, into)
    head = _gather_head(model, zero, params, embed)
    sums, dhead, dstream = _head_pass(model, zero, head, batch, stream, sums, form.early.head)
    earlier = before.grads if before.earlier is None else before.earlier
    dhead = _finish(zero, visit, earlier["head"], dhead, head_params(model, zero.axes))
    dembed, dvectors, stacks = _stacks_backward(loops, embed, batch, dstream, entered, before)
    axes = zero.axes["embed"]
    dembed = _finish(zero, visit, earlier["embed"], zero.reduce(dembed, axes), axes)
    outer = return_borrowed(model, dembed, dhead)
    if not visit.last:
        outer = {name: add(before.grads[name], grad) for name, grad in outer.items()}
    saved = before.saved and tuple(one.passed.residuals for one in entered)
    after = Accumulated(sums, {**outer, **stacks}, saved=saved)
    if not zero.keeps:
        return params, after, dvectors
    layers = {loop.stack.name: one.passed.layers for loop, one in zip(loops, entered)}
    own = {name: head[name] for name in params["head"]}
    return {"embed": embed, "head": own, **layers}, after, dvectors


def _finish(zero: Zero, visit: GroupPosition, earlier: Tree, grads: Tree, axes: Tree) -> Tree:
    """The gradients of embedding or head; at the last visit of a step their reduced sums."""
    if visit.last_of_several:  # tied weights of the head are summed with the embedding's
        grads = {**grads, **add(earlier, {name: grads[name] for name in earlier})}
    return zero.finish(grads, axes) if visit.last else grads


def _stacks_forward(
    loops: Sequence[Loop],
    params: Tree,
    embed: Tree,
    batch: Batch,
    sums: Sums,
    into: Sequence[SavedLayers | None],
) -> tuple[Stream, Sums, list[_Entered]]:
    """The last stack's stream [G, ...], the sums, and the inputs of each stack's backward pass."""
    stream, entered = {}, []
    for loop, saved in zip(loops, into):
        x, shared = split_stream(loop.stack, _enter(loop.stack, embed, stream, batch))
        own = {name: sums[name] for name in sum_shapes(loop.stack)}
        inputs = Inputs(params[loop.stack.name], _of_layers(batch), shared, saved)
        passed = forward_pass(loop, inputs, x, own)
        entered.append(_Entered(stream, shared, passed))
        sums, stream = {**sums, **passed.sums}, {**passed.x, **shared}
    return stream, sums, entered


def _stacks_backward(
    loops: Sequence[Loop],
    embed: Tree,
    batch: Batch,
    dstream: Stream,
    entered: list[_Entered],
    before: Accumulated,
) -> tuple[Tree, Tree, Tree]:
    """The gradients of the embedding and of `batch.vectors`, and each stack's accumulators with its
    layers' gradients."""
    stacks, dembed, dvectors = {}, None, None
    for loop, (stream, shared, passed) in reversed(list(zip(loops, entered))):
        name, layers, loop = loop.stack.name, passed.layers, replace(loop, zero=loop.zero.kept)
        # Otherwise XLA would reuse the weights fetched in the forward pass, and keep all layers'.
        if loop.zero.gathers or loop.fetches:
            layers, dstream = only_after(layers, dstream)
        dx, dshared = split_stream(loop.stack, dstream)
        widened = loop.zero.widen(dshared)
        carry = Carry(dx, widened, passed.last_layer, None, before.grads[name])
        earlier = None if before.earlier is None else before.earlier[name]
        inputs = Inputs(layers, _of_layers(batch), shared, passed.residuals, earlier)
        dx, dshared, stacks[name] = backward_pass(loop, inputs, carry)
        dstream = {**dx, **dshared}
        dstream, dembed, more = _enter_backward(
            loop.stack, loop.zero, embed, stream, batch, dstream, dembed
        )
        dvectors = add(dvectors, more)
    return dembed, dvectors, stacks


def _of_layers(batch: Batch) -> Batch:
    """The batch without the arrays that only `Stack.enter` reads: only there they are
    differentiated."""
    return batch._replace(vectors=())


def _enter(stack: Stack, embed: Tree, stream: Stream, batch: Batch) -> Stream:
    """The stream that enters a stack, [G, ...]."""
    return each(lambda _, xs: (None, stack.enter(embed, *xs)), None, (stream, batch))[1]


def _enter_backward(
    stack: Stack,
    zero: Zero,
    embed: Tree,
    stream: Stream,
    batch: Batch,
    dstream: Stream,
    total: Tree,
) -> tuple[Stream, Tree, Tree]:
    """The gradients of the stream before a stack, `total` plus those of the embedding, and those of
    `batch.vectors`."""

    def one(total, xs):
        dembed, dstream, dvectors = enter_gradients(stack, zero.widen(embed), *xs)
        return add(total, dembed), (dstream, dvectors)

    if total is None:
        total = zero.running_sum(embed, zero.axes["embed"], batch)
    total, (dstream, dvectors) = each(one, total, (stream, batch, dstream))
    return dstream, total, dvectors


def _gather_head(model: Model, zero: Zero, params: Tree, embed: Tree) -> Tree:
    """The weights of the head, gathered. Weights tied to the embedding are gathered again, or taken
    from `embed` if gathered weights are kept."""
    if zero.keeps:
        head = zero.gather(params["head"], zero.axes["head"])
        return head_params(model, {"embed": embed, "head": head})
    at_rest, axes = (head_params(model, tree) for tree in (params, zero.axes))
    return zero.gather(at_rest, zero.divide_columns(axes, at_rest))


def _head_pass(
    model: Model, zero: Zero, head: Tree, batch: Batch, stream: Stream, sums: Sums, early: bool
) -> tuple[Sums, Tree, Stream]:
    """The head, forward and backward: `sums` plus the losses, and the gradients of head and stream.

    Args:
      early: whether the head's gradients are reduced before the layers' backward passes.
    """
    axes = head_params(model, zero.axes)

    def one(carry, xs):
        sums, total = carry
        stream, batch = xs
        losses, dhead, dstream = head_gradients(model, zero.widen(head), stream, batch)
        return ({**sums, **add({n: sums[n] for n in losses}, losses)}, add(total, dhead)), dstream

    carry = sums, zero.running_sum(head, axes, batch)
    (sums, total), dstream = each(one, carry, (stream, _of_layers(batch)))
    dhead = zero.reduce(total, axes)
    if early:
        dhead, dstream = zero.barrier(
            dhead, zero.frozen and head_params(model, zero.frozen), dstream
        )
    return sums, dhead, dstream
