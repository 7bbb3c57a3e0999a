"""What a model is to the step, the pipeline, the checkpoint and the planner.

A model is a sequence of *stacks* of like layers over a *stream*. Each stack begins with `enter`:
the first one's is the embedding, a later one's is what happens between two stacks. A head turns the
last stack's stream into sums of losses. All are pure functions of gathered weights and of one
micro-batch; none of them mentions a mesh axis.

Parameters have one canonical form, `{"embed": ..., <stack's name>: [layers, ...], "head": ...}`; a
model with one stack calls it "layers".
"""

import abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.batch import Batch
from jaxscale.ops.array_stack import add, add_at

Params = Any  # nested dictionaries of arrays
Stream = dict[str, jax.Array]
"""Float arrays of one micro-batch that go from layer to layer, and from rank to rank."""
Sums = dict[str, jax.Array]
"""Sums over examples, in float32 or wider, by name. Only "loss" is differentiated."""
Axes = tuple[str, ...]
Rows = Mapping[str, np.ndarray]
"""For each stack the layer in each of its rows, -1 for rows of zeros."""

STREAM: Axes = ("batch", "residual_seq", "embed")
"""Logical axes of a residual stream."""


class Layer(NamedTuple):
    """Which layer of a stack a block computes."""

    index: Any  # int32 scalar, traced
    kind: int  # index % period, static


@dataclass(frozen=True)
class Stack:
    """Consecutive layers whose parameters have the same shapes.

    - `enter(embed, stream, batch) -> stream`: from the parameters "embed" and the stream of the
      stack before ({} for the first) to the stream of this one.
    - `block(weights, stream, batch, layer) -> (carried, sums)`: one layer. It returns new values of
      all `carried` arrays, and the sums that `sums` names.

    Settings of a layer that are static, such as a window, may repeat with a `period`: a loop over
    layers has one period in its body.
    """

    name: str
    num_layers: int
    enter: Callable[[Params, Stream, Batch], Stream]
    block: Callable[[Params, Stream, Batch, Layer], tuple[Stream, Sums]]
    carried: Mapping[str, Axes] = field(default_factory=lambda: {"x": STREAM})
    shared: Mapping[str, Axes] = field(default_factory=dict)
    """Arrays that every layer reads and none replaces, such as an encoder's output: they are kept
    once for all layers, and their gradients are summed over them."""
    sums: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the sums of a layer. "loss", a scalar, is added to the loss over all layers (it
    must be a sum over tokens as the head's is: an auxiliary loss is its coefficient times a mean
    times the tokens counted); the others are reported as [num_layers, ...]."""
    period: int = 1
    turn: int = 1
    """Layers of the model, of several kinds, that are one of the stack."""
    linear: Mapping[str, int] = field(default_factory=dict)
    """Weights that nothing but `Kernels.columns`, `rows` and `linear` reads, by their paths in the
    block's, such as "mlp/up", and how many of their first dimensions are contracted: a step may
    quantise them before its micro-batches, and then the block is given a
    `ops.matmul.QuantisedWeight` in their place."""
    tensors: tuple[str, ...] = ()
    """Names that the block gives to its activations (`checkpoint_name`), for `layout.remat`."""


class Model(abc.ABC):
    """The base of a model that `make(settings, kernels)` returns, with defaults for what few models
    have; hashable, since a model is static under jit."""

    settings: Any
    """A frozen record that extends `ModelSettings`."""

    borrows: Mapping[str, tuple[str, ...]] = {}
    """Parameters of the embedding that the head uses too: name in `head` -> path, such as
    {"tied": ("embed", "tokens")}. Their gradients are added to the embedding's."""

    frozen: tuple[str, ...] = ()
    """Names of parameters that no step changes, such as "layers/attention/base"."""

    metrics: tuple[str, ...] = ()
    """Names of the sums that `loss` returns besides "loss" and "nll"."""

    rules: Mapping[str, tuple[str, ...]] = {}
    """The mesh axes of logical axes of its own: ("tensor",), or () for whole."""

    draws_noise: bool = False
    """Whether its layers read `Batch.noise`, as dropout does: a step makes it, an evaluation
    leaves it ()."""

    num_classes: int | None = None
    """Classes that the head chooses from; None is the vocabulary."""

    can_decode: bool = False
    """Whether tokens can be drawn one after the other."""

    adjust: Callable[[Params, Sums], Params] | None = None
    """Follows the update of a step, for parameters that change by another rule than a gradient's,
    which `frozen` should name: params, sums of the whole step -> params. The sums of layers are in
    the order of the parameters' rows. With None what `frozen` names stays as it is, and checkpoints
    share its files."""

    report: Callable[[Sums], Sums] | None = None
    """From the sums of its layers to numbers for each layer, [layers] each, whose means become
    metrics by these names; with None the sums are reported as they are."""

    @property
    def evaluated(self) -> "Model":
        """The model without stacks that only training passes through, its last ones: of the same
        parameters, and with a head that takes the stream of the stack before."""
        return self

    @property
    @abc.abstractmethod
    def stacks(self) -> tuple[Stack, ...]:
        """In the order in which the stream passes them."""

    @property
    @abc.abstractmethod
    def axes(self) -> Params:
        """The tree of parameters in canonical form, with a tuple of logical axes for each array."""

    @abc.abstractmethod
    def init(self, key: jax.Array, rows: Rows | None = None) -> Params:
        """Fresh parameters, which depend on the key alone; None stacks all layers in order."""

    @abc.abstractmethod
    def loss(self, head: Params, stream: Stream, batch: Batch) -> Sums:
        """Sums over weighted tokens: "loss", which is minimised, "nll", the negative log-likelihood
        in nats, and those of `metrics`."""

    def extras(self, seq_len: int) -> Mapping[str, tuple[int, Any]]:
        """The arrays of `Batch.extras` that the model reads, for sequences of a length: name ->
        (length, type)."""
        return {}

    def prepare(self, batch: Batch) -> Batch:
        """A batch on the host with those `extras` that are made of other tokens' fields: on the
        mesh neighbours may lie on different ranks."""
        return batch


def head_params(model: Model, params: Params) -> Params:
    """The `head` of `Model.loss`, from the parameters or from their tree of axes."""
    return {**params["head"], **{name: _find(params, p) for name, p in model.borrows.items()}}


def return_borrowed(model: Model, embed: Params, head: Params) -> Params:
    """Gradients of `embed` and of `head_params`, as {"embed": ..., "head": ...}."""
    grads = {"embed": embed, "head": dict(head)}
    for name, path in model.borrows.items():
        borrowed = grads["head"].pop(name)
        grads = add_at_path(grads, path, borrowed)
    return grads


def _find(tree: Params, path: tuple[str, ...]) -> Params:
    for key in path:
        tree = tree[key]
    return tree


def add_at_path(tree: Params, path: tuple[str, ...], more: jax.Array) -> Params:
    """The tree with `more` added to the array at a path, in that array's type."""
    key, *rest = path
    old = tree[key]
    return {**tree, key: add_at_path(old, tuple(rest), more) if rest else add(old, more)}


def sum_shapes(stack: Stack) -> dict[str, tuple[int, ...]]:
    """The sums of a whole stack by their names in a step: "loss", and "layers/load" for its "load",
    [num_layers, ...]."""
    return {
        name if name == "loss" else f"{stack.name}/{name}": (
            () if name == "loss" else (stack.num_layers, *shape)
        )
        for name, shape in stack.sums.items()
    }


def zero_sums(model: Model, dtype: Any) -> Sums:
    """The sums of a step, of nothing yet."""
    shapes = {"loss": (), "nll": (), **dict.fromkeys(model.metrics, ())}
    for stack in model.stacks:
        shapes |= sum_shapes(stack)
    return {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}


LayerFunction = Callable[[Params, Stream, Stream, tuple[Batch, Any]], tuple[tuple, Sums]]


def layer_function(stack: Stack, kind: int = 0) -> LayerFunction:
    """`(weights, carried, shared, (batch, index)) -> ((carried, loss), sums)`: one layer of a kind.

    The loss is None, and has no gradient, where the layers of the stack have none.

    Raises:
      ValueError: the block returns other arrays or sums than its stack names.
    """

    def layer(weights: Params, carried: Stream, shared: Stream, context: tuple) -> tuple:
        batch, index = context
        stream, sums = stack.block(weights, {**carried, **shared}, batch, Layer(index, kind))
        _check_names(f"the block of stack {stack.name!r} returns", stream, stack.carried)
        _check_names(f"the block of stack {stack.name!r} returns the sums", sums, stack.sums)
        _check_carried(stack, stream, carried)
        return (stream, sums.get("loss")), {n: s for n, s in sums.items() if n != "loss"}

    return layer


def _check_carried(stack: Stack, got: Stream, carried: Stream) -> None:
    for name, given in carried.items():
        found = getattr(got[name], "shape", None), getattr(got[name], "dtype", type(got[name]))
        if found != (given.shape, given.dtype):
            raise ValueError(
                f"the block of stack {stack.name!r} is given {name!r} of shape {given.shape} and "
                f"type {given.dtype}, and returns shape {found[0]} and type {found[1]}; they are "
                "the same"
            )


def split_stream(stack: Stack, stream: Stream) -> tuple[Stream, Stream]:
    """The arrays that the layers replace, and those that they only read.

    Raises:
      ValueError: `enter` returned other arrays than the stack names.
    """
    _check_names(
        f"`enter` of stack {stack.name!r} returns", stream, (*stack.carried, *stack.shared)
    )
    return {n: stream[n] for n in stack.carried}, {n: stream[n] for n in stack.shared}


def _check_names(what: str, got: Iterable[str], wanted: Iterable[str]) -> None:
    if set(got) != set(wanted):
        raise ValueError(f"{what} {sorted(got)}; the stack names {sorted(wanted)}")


def _check_losses(model: Model, sums: Any) -> None:
    """Refuses other sums than the model names, and those that are no scalars: silently they
    would be trained, or reported, as other numbers."""
    name, wanted = f"{type(model).__name__}.loss", {"loss", "nll", *model.metrics}
    if not isinstance(sums, dict):
        raise ValueError(f"{name} returns a {type(sums).__name__}; it returns sums by name")
    if set(sums) != wanted:
        raise ValueError(
            f"{name} returns the sums {sorted(sums)}; with those of its `metrics` they are "
            f"{sorted(wanted)}"
        )
    for key, value in sums.items():
        if jnp.shape(value) or jnp.result_type(value) not in (jnp.float32, jnp.float64):
            raise ValueError(
                f"{name} returns {key!r} of shape {jnp.shape(value)} and type "
                f"{jnp.result_type(value)}; it is a sum over tokens, a scalar in float32 or wider"
            )


def layer_functions(stack: Stack) -> list[LayerFunction]:
    """The `layer_function` of each kind of layer in a period."""
    return [layer_function(stack, kind) for kind in range(stack.period)]


def enter_gradients(
    stack: Stack, embed: Params, before: Stream, batch: Batch, dstream: Stream
) -> tuple[Params, Stream]:
    """The gradients of the embedding and of the stream before a stack, from that of what enters.

    The forward pass of the vjp is a lookup whose result is not used: XLA drops it.
    """
    entered, pullback = jax.vjp(lambda embed, x: stack.enter(embed, x, batch), embed, before)
    return pullback(jax.tree.map(lambda d, x: d.astype(x.dtype), dstream, entered))


def head_gradients(
    model: Model, head: Params, stream: Stream, batch: Batch
) -> tuple[Sums, Params, Stream]:
    """The loss sums of a micro-batch, and their gradients with respect to head and stream.

    Raises:
      ValueError: the model returns other sums than it names, or ones that are not scalars in
        float32 or wider.
    """

    def loss(head: Params, stream: Stream) -> Sums:
        sums = model.loss(head, stream, batch)
        _check_losses(model, sums)
        return sums

    losses, pullback = jax.vjp(loss, head, stream)
    seeds = {n: jnp.ones_like(s) if n == "loss" else jnp.zeros_like(s) for n, s in losses.items()}
    return losses, *pullback(seeds)


def add_layer_sums(
    stack: Stack, sums: Sums, index: Any, loss: jax.Array | None, others: Sums
) -> Sums:
    """Adds the sums of one layer to a stack's, which have the names of `sum_shapes`."""
    added = {} if loss is None else {"loss": add(sums["loss"], loss)}
    for name, value in others.items():
        key = f"{stack.name}/{name}"
        added[key] = add_at(sums[key], index, value)
    return {**sums, **added}
