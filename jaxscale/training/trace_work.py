"""What a model computes, recorded as it is traced: matmuls with weights, attention, experts.

The recording kernels make zeros in place of results, so that the matmuls that are left in the trace
are those that a model computes by itself, such as a router's.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params  # pyright: ignore[reportPrivateImportUsage]

from jaxscale.config.model import ModelSettings
from jaxscale.models.decoder import plain_kernels
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import Stack, head_params, layer_function
from jaxscale.ops.experts.dispatch import Dispatch
from jaxscale.sharding.model_trace import (
    AttentionCall,
    Matmul,
    ModelTrace,
    ModelWork,
    ParamShape,
    RoutedExperts,
    StackWork,
)
from jaxscale.training.engine import find_model
from jaxscale.training.flops import example_of, gathered_params, layer_arguments
from jaxscale.training.trace_model import trace_model

PROJECTED = {1: ("query",), 2: ("key", "value"), 3: ("query", "key", "value")}
"""What attention's weights make, by how many a call of `columns` has."""
HIDDEN = ("mlp_up", "mlp_gate")


def trace_work(settings: ModelSettings, seq_len: int, output_len: int) -> ModelWork:
    """What a model computes for a sequence.

    Args:
      seq_len: tokens of a sequence; of an encoder's, where there is one.
      output_len: tokens that are predicted.
    """
    recorded: list[Any] = []
    held = trace_model(settings)
    model = find_model(settings)(settings, _recording(recorded))
    batch = example_of(model, seq_len, output_len)
    params, stream, stacks, width = gathered_params(model), {}, [], 0
    for stack, stream, arguments in layer_arguments(model, params, batch):
        trace = functools.partial(_trace_layer, stack, arguments, recorded)
        length, width = carried_tokens(stack, stream, output_len)
        experts = sum(held.experts_of(stack.name))
        stacks.append(_stack_work(stack, length, experts, trace))
    recorded.clear()
    head = jax.make_jaxpr(model.loss)(head_params(model, params), stream, batch)
    transforms = [one for one in _others(head.jaxpr, output_len) if isinstance(one, Matmul)]
    return ModelWork(
        tuple(stacks),
        sum(one.num_layers for one in stacks if one.seq_len == output_len),
        output_len,
        width,
        head_passes=len(recorded),
        transform_flops=sum(one.flops for one in transforms),
        **_held(held, settings.vocab_size),
    )


def _held(trace: ModelTrace, vocab_size: int) -> dict[str, Any]:
    """The parameters of a model's parts, and its rows of the vocabulary."""
    layers, arrays = trace.stack_layers, trace.parameters

    def count(chosen: Iterable[ParamShape]) -> int:
        return sum(one.size * layers.get(one.part, 1) for one in chosen)

    rows = [one.shape[one.axes.index("vocab")] for one in arrays if "vocab" in one.axes]
    return {
        "vocab": max(rows, default=vocab_size),
        "block_params": count(one for one in arrays if one.in_layers),
        "routed_params": count(one for one in arrays if one.in_layers and "experts" in one.axes),
        "embedding_params": count(one for one in arrays if one.part == "embed"),
        "head_params": count(one for one in arrays if one.part == "head"),
        "tied": bool(trace.borrowed),
    }


def carried_tokens(stack: Stack, stream: Any, output_len: int) -> tuple[int, int]:
    """Tokens of a sequence of a stack, and features of each that layers hand on.

    Args:
      output_len: the tokens of a stack none of whose arrays has an axis of them.
    """
    for name, axes in stack.carried.items():
        if found := {"seq", "residual_seq"} & {*axes}:
            length = stream[name].shape[axes.index(found.pop())]
            return length, stream[name].size // (stream[name].shape[0] * length)
    features = sum(x.size // x.shape[0] for x in stream.values())
    return output_len, max(1, features // output_len)


def _recording(recorded: list[Any]) -> Kernels:
    """Kernels that append a `Matmul`, an `AttentionCall` or the number of rotated features."""

    def columns(x: jax.Array, weights: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        heads = weights[0].ndim > 2
        outputs = tuple((w.shape[1], math.prod(w.shape[2:])) for w in weights)
        names = PROJECTED.get(len(weights), ()) if heads else HIDDEN[: len(weights)]
        recorded.append((x, Matmul(x.shape[-1], outputs, "outputs", names)))
        return tuple(jnp.zeros((*x.shape[:-1], *w.shape[1:]), x.dtype) for w in weights)

    def rows(x: jax.Array, weight: jax.Array) -> jax.Array:
        inputs, heads = math.prod(weight.shape[:-1]), weight.ndim > 2
        name = "attention_out" if heads else "mlp_down"
        tokens = x.shape[: x.ndim - weight.ndim + 1]
        one = Matmul(inputs, ((weight.shape[-1], 1),), "inputs", (name,))
        if recorded and isinstance(before := recorded[-1][1], AttentionCall):
            # A kernel may want values as wide as keys.
            recorded[-1] = None, dataclasses.replace(before, value_features=weight.shape[1])
        recorded.append((tokens, one))
        return jnp.zeros((*tokens, weight.shape[-1]), x.dtype)

    def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
        output = weight.shape[1], math.prod(weight.shape[2:])
        recorded.append((x, Matmul(x.shape[-1], (output,), "", ("compressed",))))
        return jnp.zeros((*x.shape[:-1], *weight.shape[1:]), x.dtype)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *_: Any, **settings: Any) -> jax.Array:
        recorded.append((None, _attention(q, k, v, settings)))
        return jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)

    def cross_entropy(x: jax.Array, *_: Any, **__: Any) -> tuple[jax.Array, jax.Array]:
        recorded.append(x)
        return jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)

    def rotary(x: jax.Array, *_: Any, **__: Any) -> jax.Array:
        recorded.append((None, math.prod(x.shape[2:])))
        return x

    return dataclasses.replace(
        plain_kernels(),
        columns=columns,
        rows=rows,
        linear=linear,
        attend=attend,
        rotary=rotary,
        cross_entropy=cross_entropy,
        # What a capacity would drop is counted, as it is in a model's FLOPs.
        dispatch=Dispatch(matmul="ragged_dot", keeps_all=True),
    )


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, settings: dict[str, Any]) -> AttentionCall:
    length = k.shape[1]
    window = settings.get("sliding_window", 0) or length
    if settings.get("causal", True):
        window = min(window, length)
        keys = (window * (window + 1) / 2 + (length - window) * window) / length
        seen = 2 * keys
    else:  # a window reaches as far forward as back
        keys = seen = min(2 * window - 1, length) if window < length else length
    return AttentionCall(q.shape[2], k.shape[2], q.shape[3], v.shape[3], keys, seen)


def _trace_layer(
    stack: Stack, arguments: tuple, recorded: list[Any], kind: int
) -> tuple[list[Any], Any]:
    """What one layer of a kind records, and what else is in its trace."""
    recorded.clear()
    traced = jax.make_jaxpr(layer_function(stack, kind))(*arguments)
    return list(recorded), traced.jaxpr


def _stack_work(
    stack: Stack, length: int, expert_layers: int, trace: Callable[[int], tuple[list, Any]]
) -> StackWork:
    found: dict[Any, float] = collections.defaultdict(float)
    rotated = 0.0
    for kind in range(stack.period):
        share = len(range(kind, stack.num_layers, stack.period)) / stack.num_layers / stack.turn
        events, jaxpr = trace(kind)
        for one in (*_joined(events, length), *_others(jaxpr, length, expert_layers)):
            if isinstance(one, int):
                rotated += share * one
            else:
                found[one] += share
    each = [dataclasses.replace(one, share=share) for one, share in found.items()]
    matmuls = tuple(one for one in each if isinstance(one, Matmul))
    experts = tuple(one for one in each if isinstance(one, RoutedExperts))

    def total(over: str, features: Callable[[Matmul], int], *names: str) -> float:
        chosen = [one for one in matmuls if over in ("", one.over)]
        chosen = [one for one in chosen if not names or {*names} & {*one.names}]
        return sum(features(one) * one.tokens * one.share for one in chosen)

    attended = total("inputs", lambda _: 1, "attention_out")
    fed = total("inputs", lambda _: 1, "mlp_down")
    # Experts and a shared one are one branch.
    fed = max(fed, min(1.0, fed + sum(one.share for one in experts)))
    return StackWork(
        stack.name,
        stack.num_layers * stack.turn,
        length,
        matmuls,
        tuple(one for one in each if isinstance(one, AttentionCall)),
        experts,
        branches=attended + fed,
        sent=attended + fed,
        rotated=rotated,
        opened=total("outputs", lambda one: one.features, *HIDDEN),
        hidden=total("inputs", lambda one: one.inputs, "mlp_down"),
        read=total("", lambda one: one.inputs),
        made=total("", lambda one: one.features),
    )


def _joined(events: Iterable[tuple[Any, Any]], length: int) -> Iterator[Any]:
    """The events, matmuls of the same array that no rank of tensor divides as one."""
    whole: dict[int, Matmul] = {}
    for x, one in events:
        if not isinstance(one, Matmul):
            yield one
            continue
        tokens = math.prod(x if isinstance(x, tuple) else x.shape[:-1]) / length
        one = dataclasses.replace(one, tokens=tokens)
        if one.over or not hasattr(x, "shape"):
            yield one
        elif id(x) in whole:
            before = whole[id(x)]
            whole[id(x)] = dataclasses.replace(before, outputs=before.outputs + one.outputs)
        else:
            whole[id(x)] = one
    yield from whole.values()


def _others(jaxpr: Any, length: int, expert_layers: int = 0) -> Iterator[Any]:
    """Matmuls of a trace that no kernel recorded.

    Args:
      expert_layers: of those traced, the layers with experts.
    """
    plain: list[tuple[int, int, int]] = []
    grouped: list[tuple[int, int, int, int]] = []
    walk_matmuls(jaxpr, plain, grouped)
    for _ in range(expert_layers):  # which are alike
        rows, width, count, hidden = grouped[0]
        gated = len(grouped) == 3 * expert_layers
        yield RoutedExperts(count, round(rows / length), width, hidden, gated)
    for tokens, inputs, outputs in plain:
        if expert_layers and outputs == grouped[0][2]:
            continue  # the router's
        # Plain JAX, which the compiler partitions as the stream is.
        yield Matmul(inputs, ((outputs, 1),), "tokens", tokens=tokens / length)


def walk_matmuls(
    jaxpr: Any, plain: list[tuple[int, int, int]], grouped: list[tuple[int, int, int, int]]
) -> None:
    """Adds (rows, inputs, outputs) of each matmul; and (rows, inputs, groups, outputs) of each in
    which groups of rows have a matrix of their own.

    Args:
      jaxpr: or anything that has equations.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "ragged_dot_general"):
            left, right, made = (v.aval.shape for v in (*eqn.invars[:2], eqn.outvars[0]))
            if eqn.primitive.name == "ragged_dot_general" or _is_batched(eqn, right):
                grouped.append((math.prod(left[:-1]), left[-1], right[0], made[-1]))
            else:
                (contracted, _), _ = eqn.params["dimension_numbers"]
                inputs = math.prod(left[dim] for dim in contracted)
                rows = math.prod(left) // inputs
                plain.append((rows, inputs, math.prod(made) // rows))
        for inside in jaxprs_in_params(eqn.params):
            walk_matmuls(getattr(inside, "jaxpr", inside), plain, grouped)


def _is_batched(eqn: Any, right: tuple[int, ...]) -> bool:
    """Whether a matmul has as many rows for each of several matrices."""
    _, (batch, _) = eqn.params["dimension_numbers"]
    return len(batch) == 1 and len(right) == 3
