"""Model protocol: the interface of a model to the step, the pipeline, checkpoints and the planner.

A model is a sequence of *stacks* of equal layers over a *stream*. Each stack begins with `enter`:
the embedding in the first stack, a transition between two stacks in later ones. A head computes
sums of losses from the last stack's stream. All are pure functions of gathered weights and one
micro-batch, and do not mention mesh axes.

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
from jaxscale.ops.storage.quantised_storage import Stored, StoredWeights, in_stack

Params = Any  # nested dictionaries of arrays
Stream = dict[str, jax.Array]
"""Float arrays of one micro-batch that layers, and pipeline ranks, pass to the next."""
Sums = dict[str, jax.Array]
"""Sums over examples, in float32 or wider, by name. Only "loss" is differentiated."""
Axes = tuple[str, ...]
Rows = Mapping[str, np.ndarray]
"""Stack name -> the layer in each row of its arrays, -1 for rows of zeros."""

STREAM: Axes = ("batch", "residual_seq", "embed")
"""Logical axes of a residual stream."""


class Layer(NamedTuple):
    """The position of a layer in its stack."""

    index: Any  # int32 scalar, traced
    kind: int  # index % period, static


@dataclass(frozen=True)
class Stack:
    """Consecutive layers whose parameters have the same shapes.

    - `enter(embed, stream, batch) -> stream`: from the parameters "embed" and the stream of the
      stack before ({} for the first) to the stream of this one.
    - `block(weights, stream, batch, layer) -> (carried, sums)`: one layer. It returns new values of
      all `carried` arrays, and the sums named in `sums`.

    Static settings of a layer, such as a window, may repeat with a `period`: the body of a loop
    over layers is one period.
    """

    name: str
    num_layers: int
    enter: Callable[[Params, Stream, Batch], Stream]
    block: Callable[[Params, Stream, Batch, Layer], tuple[Stream, Sums]]
    carried: Mapping[str, Axes] = field(default_factory=lambda: {"x": STREAM})
    shared: Mapping[str, Axes] = field(default_factory=dict)
    """Arrays that every layer reads and none replaces, such as an encoder's output: stored once for
    all layers, their gradients summed over the layers."""
    sums: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the sums of a layer. "loss", a scalar, is added to the loss over all layers. Like
    the head's it must be a sum over tokens: an auxiliary loss is its coefficient times a mean times
    the tokens counted. The others are reported as [num_layers, ...]."""
    period: int = 1
    repeats: int = 1
    """How often a layer applies `block`, one time after another with the same weights. `block`
    sees the indices and kinds of a stack with `repeats` times as many layers."""
    model_layers: int = 1
    """Layers of the model in one layer of the stack, such as a dense and an MoE layer."""
    linear: Mapping[str, int] = field(default_factory=dict)
    """Weights read only by `Kernels.columns`, `rows` and `linear`: path in the block, such as
    "mlp/up" -> number of contracted leading dimensions. A step may quantise them once, before its
    micro-batches, and then passes `ops.matmul.QuantisedWeight`s to the block."""
    stored: StoredWeights = field(default_factory=dict)
    """Weights whose parameters are quantised bytes, which `frozen` names: path in the block -> how.
    `block` reads them as floating-point arrays: the layer loop dequantises them
    (`unpack_weights`)."""
    memory: Callable[[], Mapping[str, jax.ShapeDtypeStruct]] = dict
    """What a layer leaves to later parts of its rows, such as keys and values: the shapes for one
    token, by names that `carried` lacks. With `Batch.within` the block finds arrays [batch, row
    length, ...] in its stream, and returns them with its tokens' entries written and all others
    unchanged: the backward pass of a part reads them as the last part left them. {} if rows cannot
    be split."""
    tensors: tuple[str, ...] = ()
    """Checkpoint names of the block's activations, for `layout.remat`."""


@dataclass(frozen=True)
class EmbeddingTable:
    """An embedding table that may be larger than a device's memory (Persia, arXiv 2111.05897).

    Its rows are sharded over all devices, whatever the layout. A step looks up the rows of the ids
    in a batch, and updates these rows only, by row-wise Adagrad. It is no part of the parameters:
    neither the optimizer nor ZeRO knows it.
    """

    rows: int  # below 2^31
    width: int
    ids: tuple[str, ...]
    """The arrays of `Batch.extras` with its ids, int32 [batch, length]; -1 is no row. `Stack.enter`
    finds the rows under the same names in `Batch.vectors`, zeros for no row."""
    scale: float = 0.0  # standard deviation of the initial rows


class Model(abc.ABC):
    """Base class of the models that `make(settings, kernels)` returns, with defaults for optional
    members; hashable, since a model is static under jit."""

    settings: Any
    """A frozen record that extends `ModelSettings`."""

    borrows: Mapping[str, tuple[str, ...]] = {}
    """Parameters of the embedding that the head uses too: name in `head` -> path, such as
    {"tied": ("embed", "tokens")}. Their gradients are added to the embedding's."""

    frozen: tuple[str, ...] = ()
    """Names of parameters that no gradient changes, such as "layers/attention/base"."""

    tables: Mapping[str, EmbeddingTable] = {}
    """Embedding tables outside the parameters."""

    metrics: tuple[str, ...] = ()
    """Names of the sums that `loss` returns in addition to "loss" and "nll"."""

    rules: Mapping[str, tuple[str, ...]] = {}
    """Mesh axes of the model's additional logical axes: ("tensor",), or () for replicated."""

    draws_noise: bool = False
    """Whether layers read `Batch.noise`, as dropout does; it is () in an evaluation."""

    num_classes: int | None = None
    """The number of classes that the head scores; None is the vocabulary."""

    can_decode: bool = False
    """Whether the model can generate tokens."""

    slices_head: bool = False
    """Whether `loss` may be given a slice of the columns, the logical axis "vocab", of each of the
    head's parameters that has some: it reads them in one call of `Kernels.cross_entropy` only."""

    adjust: Callable[[Params, Sums], Params] | None = None
    """Update without gradients, (params, sums of the step) -> params, after the optimizer's, for
    parameters that `frozen` names. The sums of layers are in the order of the parameters' rows.
    With None frozen parameters are constant, and checkpoints share their files."""

    report: Callable[[Sums], Sums] | None = None
    """Metrics from the sums of layers: [layers] each, averaged and logged by these names; with None
    the sums are logged as they are."""

    @property
    def evaluated(self) -> "Model":
        """The model without its last, training-only stacks: the same parameters, and a head that
        reads the stream of the stack before."""
        return self

    @property
    @abc.abstractmethod
    def stacks(self) -> tuple[Stack, ...]:
        """The stacks in the order of the forward pass."""

    @property
    @abc.abstractmethod
    def axes(self) -> Params:
        """The tree of parameters in canonical form, with a tuple of logical axes for each array."""

    @abc.abstractmethod
    def init(self, key: jax.Array, rows: Rows | None = None) -> Params:
        """Initial parameters, which depend on the key only; `rows` None stacks layers in order."""

    @abc.abstractmethod
    def loss(self, head: Params, stream: Stream, batch: Batch) -> Sums:
        """Sums over weighted tokens: "loss", which is minimised, "nll", the negative log-likelihood
        in nats, and the sums named in `metrics`."""

    def extras(self, seq_len: int) -> Mapping[str, tuple[int, Any]]:
        """The arrays of `Batch.extras` that the model reads: name -> (length, type)."""
        return {}

    def prepare(self, batch: Batch) -> Batch:
        """Adds `extras` computed from neighbouring tokens to a batch on the host: on the mesh,
        neighbours may be on different ranks."""
        return batch


def head_params(model: Model, params: Params) -> Params:
    """The `head` argument of `Model.loss`, from the tree of parameters or of axes."""
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


def stored_weights(model: Model) -> dict[str, Stored]:
    """How the model's parameters that are quantised are stored: path, "layers/mlp/up" -> how."""
    return {
        f"{stack.name}/{name}": one
        for stack in model.stacks
        for name, one in in_stack(stack.stored).items()
    }


def add_at_path(tree: Params, path: tuple[str, ...], more: jax.Array) -> Params:
    """Adds `more` to the array at a path, in that array's type."""
    key, *rest = path
    old = tree[key]
    return {**tree, key: add_at_path(old, tuple(rest), more) if rest else add(old, more)}


def sum_shapes(stack: Stack) -> dict[str, tuple[int, ...]]:
    """Shapes of a stack's sums by their names in a step: "loss" (), and for "load" the name
    "layers/load", [num_layers, ...]."""
    return {
        name if name == "loss" else f"{stack.name}/{name}": (
            () if name == "loss" else (stack.num_layers, *shape)
        )
        for name, shape in stack.sums.items()
    }


def zero_sums(model: Model, dtype: Any) -> Sums:
    """Zeros for the sums of a step."""
    shapes = {"loss": (), "nll": (), **dict.fromkeys(model.metrics, ())}
    for stack in model.stacks:
        shapes |= sum_shapes(stack)
    return {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}


LayerFunction = Callable[[Params, Stream, Stream, tuple[Batch, Any]], tuple[tuple, Sums]]
Remat = Callable[[LayerFunction, bool], LayerFunction]
"""Applies a remat policy to one application of a block; the flag is whether the layer has several,
whose recomputations must wait for each other's backward passes."""


def no_remat(function: LayerFunction, several: bool) -> LayerFunction:
    """Saves all residuals."""
    del several
    return function


def layer_function(stack: Stack, kind: int = 0, remat: Remat = no_remat) -> LayerFunction:
    """`(weights, carried, shared, (batch, index)) -> ((carried, loss), sums)`: one layer of a kind.

    The loss is None if the stack's layers have no loss.

    Args:
      remat: applies a policy to each of the layer's `repeats`.

    Raises:
      ValueError: the block returns other arrays or sums than its stack declares.
    """
    if stack.repeats == 1:
        return remat(_application(stack, kind), False)
    kinds = range(kind * stack.repeats, (kind + 1) * stack.repeats)
    each = [remat(_application(stack, kind), True) for kind in kinds]

    def layer(weights: Params, carried: Stream, shared: Stream, context: tuple) -> tuple:
        batch, index = context
        losses, found = [], []
        for number, apply in enumerate(each):
            if number:
                weights, carried = _one_after_another(weights, carried)
            place = batch, index * stack.repeats + number
            (carried, loss), sums = apply(weights, carried, shared, place)
            losses.append(loss)
            found.append(sums)
        loss = None if losses[0] is None else sum(losses[1:], losses[0])
        return (carried, loss), jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *found)

    return layer


@jax.custom_vjp
def _one_after_another(weights: Params, carried: Stream) -> tuple[Params, Stream]:
    """The arguments. In the backward pass the weights' gradients so far are computed before the
    stream's is used: otherwise XLA may compute those of all applications at the end."""
    return weights, carried


_one_after_another.defvjp(
    lambda weights, carried: ((weights, carried), None),
    lambda _, grads: jax.lax.optimization_barrier(grads),
)


def _application(stack: Stack, kind: int) -> LayerFunction:
    """`layer_function` of a single application of the block."""

    def apply(weights: Params, carried: Stream, shared: Stream, context: tuple) -> tuple:
        batch, index = context
        stream, sums = stack.block(weights, {**carried, **shared}, batch, Layer(index, kind))
        _check_names(f"the block of stack {stack.name!r} returns", stream, carried)
        _check_names(f"the block of stack {stack.name!r} returns the sums", sums, stack.sums)
        _check_carried(stack, stream, carried)
        return (stream, sums.get("loss")), {n: s for n, s in sums.items() if n != "loss"}

    return apply


def _check_carried(stack: Stack, got: Stream, carried: Stream) -> None:
    for name, given in carried.items():
        found = getattr(got[name], "shape", None), getattr(got[name], "dtype", type(got[name]))
        if found != (given.shape, given.dtype):
            raise ValueError(
                f"the block of stack {stack.name!r} returns {name!r} of shape {found[0]} and type "
                f"{found[1]}, and was given shape {given.shape} and type {given.dtype}; return the "
                "same shape and type"
            )


def split_stream(stack: Stack, stream: Stream) -> tuple[Stream, Stream]:
    """Splits a stream into the arrays that layers replace and the arrays that they only read.

    Raises:
      ValueError: `enter` returned other arrays than the stack declares.
    """
    _check_names(
        f"`enter` of stack {stack.name!r} returns", stream, (*stack.carried, *stack.shared)
    )
    return {n: stream[n] for n in stack.carried}, {n: stream[n] for n in stack.shared}


def _check_names(subject: str, got: Iterable[str], wanted: Iterable[str]) -> None:
    if set(got) != set(wanted):
        raise ValueError(f"{subject} {sorted(got)}; the stack declares {sorted(wanted)}")


def _check_losses(model: Model, sums: Any) -> None:
    """Refuses undeclared sums and sums that are not scalars: they would silently change the loss
    or the metrics."""
    name, wanted = f"{type(model).__name__}.loss", {"loss", "nll", *model.metrics}
    if not isinstance(sums, dict):
        raise ValueError(f"{name} returns a {type(sums).__name__}; return a dict of sums by name")
    if set(sums) != wanted:
        raise ValueError(
            f"{name} returns the sums {sorted(sums)}; with its `metrics` they must be "
            f"{sorted(wanted)}"
        )
    for key, value in sums.items():
        if jnp.shape(value) or jnp.result_type(value) not in (jnp.float32, jnp.float64):
            raise ValueError(
                f"{name} returns {key!r} of shape {jnp.shape(value)} and type "
                f"{jnp.result_type(value)}; return a sum over tokens, a scalar in float32 or wider"
            )


def layer_functions(stack: Stack, remat: Remat = no_remat) -> list[LayerFunction]:
    """The `layer_function` of each position in the stack's period."""
    return [layer_function(stack, kind, remat) for kind in range(stack.period)]


def enter_gradients(
    stack: Stack, embed: Params, before: Stream, batch: Batch, dstream: Stream
) -> tuple[Params, Stream, Any]:
    """Backward pass of `Stack.enter`: gradients of the embedding, of the stream before, and of
    `batch.vectors`.

    The forward pass of the vjp is a lookup with an unused result, which XLA removes.
    """

    def enter(embed: Params, before: Stream, vectors: Any) -> Stream:
        return stack.enter(embed, before, batch._replace(vectors=vectors))

    entered, pullback = jax.vjp(enter, embed, before, batch.vectors)
    return pullback(jax.tree.map(lambda d, x: d.astype(x.dtype), dstream, entered))


def head_gradients(
    model: Model, head: Params, stream: Stream, batch: Batch
) -> tuple[Sums, Params, Stream]:
    """The loss sums of a micro-batch, and their gradients with respect to head and stream.

    Raises:
      ValueError: the model returns sums that it does not declare, or that are not scalars in
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
    """Adds the sums of one layer to those of its stack, named as in `sum_shapes`."""
    added = {} if loss is None else {"loss": add(sums["loss"], loss)}
    for name, value in others.items():
        key = f"{stack.name}/{name}"
        added[key] = add_at(sums[key], index, value)
    return {**sums, **added}
