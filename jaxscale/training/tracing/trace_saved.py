"""Saved activations: arrays that a model's layers save for the backward pass, by abstract tracing.

The layers are traced on one device, whose arrays a layout divides. The arrays of a micro-batch are
recognised by its size, a number that no other dimension has.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from jaxscale.batch import Within
from jaxscale.config.model import ModelSettings, by_liveness
from jaxscale.config.remat_policy import RematPolicy, parse_remat
from jaxscale.models.decoder import plain_kernels
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import LayerFunction, Stack, layer_function
from jaxscale.ops import tensor_parallel
from jaxscale.ops.attention.attention import attention
from jaxscale.ops.experts.dispatch import Dispatch
from jaxscale.ops.split_vjp import split_vjp
from jaxscale.pipeline.backward_split import TracedFunction, shapes_of, split
from jaxscale.pipeline.buffer_slots import GRADIENT, MEMORY
from jaxscale.sharding.model_trace import SavedValue, SavedValues, StackSaved
from jaxscale.sharding.resolve import is_axes
from jaxscale.training.remat import rematerialised, rematerialised_attention
from jaxscale.training.tracing.abstract_model import (
    MakeModel,
    carried_tokens,
    example_of,
    find_model,
    gathered_params,
    layer_arguments,
)
from jaxscale.training.tracing.liveness import peak_bytes
from jaxscale.training.tracing.plain_matmuls import plain_matmuls

GATHERED = "operand of columns"
"""The name of arrays that tensor ranks gather before a matmul."""


def trace_saved(
    settings: ModelSettings,
    seq_len: int,
    output_len: int,
    remat: str,
    piped: bool,
    in_parts: bool = False,
    make: MakeModel | None = None,
) -> SavedValues:
    """The arrays that the layers of each stack save.

    Args:
      seq_len, output_len: as in `trace_work`.
      remat: a policy of `Layout.remat`.
      piped: for the operations of a pipeline, not for a loop over layers.
      in_parts: for sequences that are parts of longer ones (`Batch.within`).
      make: the function that makes the model; None: by `settings.family`.
    """
    policy, given, heads = parse_remat(remat), [], []
    model = (make or find_model(settings))(settings, _saving_kernels(policy, given, heads))
    params = gathered_params(settings, make)
    one = example_of(model, seq_len, output_len)
    sequences = _unused_size((params, one))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((sequences, *x.shape[1:]), x.dtype), one)
    if in_parts:
        rows = jax.ShapeDtypeStruct((sequences, 2 * output_len), jnp.int32)
        batch = batch._replace(within=Within(jax.ShapeDtypeStruct((), jnp.int32), rows))
    found = []
    for stack, stream, arguments in layer_arguments(model, params, batch):
        length, width = carried_tokens(stack, stream, output_len)
        widths = {(*x.shape,) for x in stream.values()}
        axes = jax.tree.leaves(model.axes[stack.name], is_leaf=is_axes)
        experts = any("experts" in names for names in axes)
        kinds = [0] if piped else range(stack.period)
        counts: dict[SavedValue, float] = collections.defaultdict(float)
        rows = 0
        for kind in kinds:
            layer = _layer(stack, kind, policy, given)
            rows = _expert_rows(layer, arguments) if experts else 0
            share = len(range(kind, stack.num_layers, stack.period)) / stack.num_layers
            shape = _Shape(sequences, length, rows, widths)
            for value in _saved(stack, layer, arguments, shape, piped):
                counts[value] += 1.0 if piped else share
        values = tuple(dataclasses.replace(one, count=count) for one, count in counts.items())
        saved = StackSaved(stack.name, length, width, rows / sequences / length, values)
        if make or by_liveness(settings):
            heads.clear()
            live = [_live(_layer(stack, n, policy, given), arguments, shape) for n in kinds]
            backward, ahead = (max(one) for one in zip(*live, strict=True))
            if settings.side_width:  # frozen layers have a forward pass only
                backward = max(backward, ahead)
            count, attended = max(heads, default=(0, 0))
            saved = dataclasses.replace(
                saved, live=backward, live_forward=ahead, heads=count, attended=attended
            )
        found.append(saved)
    extras = sum(x.size * 4 for x in jax.tree.leaves(one.extras))
    ids = tuple(sum(one.extras[name].size for name in table.ids) for table in model.tables.values())
    return SavedValues(tuple(found), extras, ids)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """The sizes by which arrays of a micro-batch are recognised."""

    sequences: int
    length: int  # tokens of a sequence
    rows: int  # of experts
    stream: set[tuple[int, ...]]  # shapes of the stream between layers

    def scales(self, leaf: Any) -> bool:
        """Whether the size of an array is proportional to that of a micro-batch."""
        tokens = self.sequences * self.length
        sizes = {tokens, self.rows} - {0}
        return self.sequences in leaf.shape or any(
            dim % size == 0 for dim in leaf.shape for size in sizes
        )


def _unused_size(tree: Any) -> int:
    """A number of sequences that no dimension of these arrays has."""
    used = {size for leaf in jax.tree.leaves(tree) for size in leaf.shape}
    return next(n for n in itertools.count(3, 2) if n not in used)


def _saving_kernels(policy: RematPolicy, given: list[Any], heads: list[tuple[int, int]]) -> Kernels:
    """Plain kernels, with attention that saves no scores, as in every implementation.

    Args:
      given: arrays that a layer shares with other layers, which are not named.
      heads: a list to which attention adds its number of heads and its features.
    """

    def columns(x: jax.Array, weights: Any) -> tuple[jax.Array, ...]:
        # A policy by names saves the input of the layer, before it is gathered.
        if not policy.by_names and not any(x is one for one in given):
            x = checkpoint_name(x, GATHERED)
        return tensor_parallel.columns(x, weights)

    def attend(q: jax.Array, *arrays: Any, **settings: Any) -> jax.Array:
        heads.append((q.shape[2], sum(math.prod(x.shape[2:]) for x in (q, *arrays[:2]))))
        return attention(q, *arrays, implementation="blockwise", **settings)

    kernels = dataclasses.replace(
        plain_kernels(), attend=attend, columns=columns, dispatch=Dispatch(matmul="ragged_dot")
    )
    return rematerialised_attention(kernels, policy)


def _layer(stack: Stack, kind: int, policy: RematPolicy, given: list[Any]) -> LayerFunction:
    """One layer under a policy."""

    def remat(function: LayerFunction, several: bool) -> LayerFunction:
        def layer(weights: Any, carried: Any, shared: Any, context: Any) -> tuple:
            given[:] = jax.tree.leaves(shared)
            return function(weights, carried, shared, context)

        return rematerialised(layer, policy, several=several)

    return layer_function(stack, kind, remat)


def _expert_rows(layer: LayerFunction, arguments: tuple) -> int:
    """Rows of the experts' matmuls in a layer, for the tokens of a micro-batch."""
    found, _ = plain_matmuls(jax.make_jaxpr(layer)(*arguments).jaxpr)
    return next((int(one.rows) for one in found if one.groups), 0)


def _saved(
    stack: Stack, layer: LayerFunction, arguments: tuple, shape: _Shape, piped: bool
) -> Iterator[SavedValue]:
    if piped:
        memory = tuple(arguments[1].keys() & stack.memory().keys())
        for name in memory:
            *heads, features = stack.memory()[name].shape
            size, count = stack.memory()[name].dtype.itemsize, math.prod(heads)
            for held in (MEMORY, GRADIENT):
                yield SavedValue(held, "sequence", "features", count, features, shape.length, size)
        parts = split(layer, *arguments, memory=memory)
        yield from _values("residual_b", parts.residuals_b, parts.names_b, shape)
        yield from _values("residual_w", parts.residuals_w, parts.names_w, shape)
        yield from _values("cotangent", parts.saved, (), shape)
        return
    forward, _ = split_vjp(layer)
    program = TracedFunction.of(lambda *given: forward(*given)[2], *arguments)
    # XLA recomputes values that depend on weights only, such as a broadcast scale, at their use.
    varies = program.dependent(itertools.chain(*program.inputs[1:]))
    found = (v for v in program.outputs if not isinstance(v, Literal) and v in varies)
    kept = list(dict.fromkeys(found))
    yield from _values("", shapes_of(kept), [program.names.get(v, "") for v in kept], shape)


def _live(layer: LayerFunction, arguments: tuple, shape: _Shape) -> tuple[float, float]:
    """Peak live bytes per sequence in a layer's backward pass, and in its forward pass."""
    forward, backward = split_vjp(layer)
    y, _, kept = jax.eval_shape(forward, *arguments)
    weights, _, shared, context = arguments
    programs = (
        TracedFunction.of(backward, weights, shared, context, kept, y),
        TracedFunction.of(layer, *arguments),
    )
    again, ahead = (
        peak_bytes(one.eqns, one.outputs, shape.scales) / shape.sequences for one in programs
    )
    return again, ahead


def _values(
    held: str, leaves: Iterable[Any], names: Iterable[str], shape: _Shape
) -> Iterator[SavedValue]:
    for leaf, name in itertools.zip_longest(leaves, names, fillvalue=""):
        if value := _value(held, leaf, name, shape):
            yield value


def _value(held: str, leaf: Any, name: str, shape: _Shape) -> SavedValue | None:
    """A saved array, or None for a constant that does not depend on the micro-batch."""
    size = 4 if jnp.issubdtype(leaf.dtype, jnp.integer) else leaf.dtype.itemsize
    dims, rows = leaf.shape, shape.rows
    if rows and dims[:1] == (1,) and rows in dims:
        features = math.prod(dims) // rows
        whole = features in {1, *(dim[-1] for dim in shape.stream)}
        spread = "whole" if whole else "features"
        return SavedValue(held, "row", spread, 1, features, 1.0, size)
    if not shape.scales(leaf):
        return None
    if dims in shape.stream:
        spread = "gathered" if name == GATHERED else "stream"
        return SavedValue(held, "sequence", spread, 1, dims[-1], math.prod(dims[1:-1]), size)
    heads, features = dims[-2:] if len(dims) == 4 and dims[0] == shape.sequences else (1, dims[-1])
    entries = math.prod(dims) / shape.sequences / heads / features
    return SavedValue(held, "sequence", "features", heads, features, entries, size)
