"""Work of a model, recorded while it is traced: matmuls with weights, attention, experts.

The recording kernels return zeros in place of results. The remaining matmuls of the trace are the
model's direct ones, such as a router's. Each result has a unique name, by which the trace shows its
readers.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

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
from jaxscale.training.tracing.abstract_model import (
    MakeModel,
    carried_tokens,
    example_of,
    find_model,
    gathered_params,
    layer_arguments,
)
from jaxscale.training.tracing.plain_matmuls import RECORDED, PlainMatmul, plain_matmuls
from jaxscale.training.tracing.trace_model import trace_model

PROJECTED = {1: ("query",), 2: ("key", "value"), 3: ("query", "key", "value")}
"""Number of weights in a call of `columns` -> the names of attention's projections."""
HIDDEN = ("mlp_up", "mlp_gate")


def trace_work(
    settings: ModelSettings, seq_len: int, output_len: int, make: MakeModel | None = None
) -> ModelWork:
    """The work of a model for a sequence.

    Args:
      seq_len: tokens of a sequence; for encoder-decoders, of the encoder.
      output_len: tokens that are predicted.
      make: the function that makes the model; None: by `settings.family`.
    """
    recorded: list[Any] = []
    held = trace_model(settings, make)
    model = (make or find_model(settings))(settings, _recording(recorded))
    batch = example_of(model, seq_len, output_len)
    params, stream, stacks, width = gathered_params(settings, make), {}, [], 0
    for stack, stream, arguments in layer_arguments(model, params, batch):
        trace = functools.partial(_trace_layer, stack, arguments, recorded)
        length, width = carried_tokens(stack, stream, output_len)
        experts = sum(held.experts_of(stack.name))
        stacks.append(_stack_work(stack, length, experts, trace))
    recorded.clear()
    head = jax.make_jaxpr(model.loss)(head_params(model, params), stream, batch)
    others, _ = plain_matmuls(head.jaxpr)
    parts = [*_joined(recorded, output_len), *_others(others, output_len, 0)]
    logits = [one for one in parts if isinstance(one, float)]
    layers = sum(one.num_layers for one in stacks if one.seq_len == output_len)
    return ModelWork(
        tuple(stacks),
        layers or stacks[-1].num_layers,
        output_len,
        width,
        logit_flops=sum(logits) / output_len,
        head_passes=len(logits),
        transform_flops=sum(one.flops for one in parts if not isinstance(one, int | float)),
        adapted=settings.adapts,
        side=settings.side_width > 0,
        **_held(held, settings.vocab_size),
    )


def _held(trace: ModelTrace, vocab_size: int) -> dict[str, Any]:
    """The number of parameters of a model's parts, and the rows of its vocabulary, or its entries
    if no parameter has an axis "vocab"."""
    layers, arrays = trace.stack_layers, trace.parameters

    def count(chosen: Callable[[ParamShape], bool]) -> int:
        return sum(one.size * layers.get(one.part, 1) for one in arrays if chosen(one))

    return {
        "vocab": trace.vocab_rows or vocab_size,
        "block_params": count(lambda one: one.in_layers),
        "routed_params": count(lambda one: one.in_layers and "experts" in one.axes),
        "embedding_params": count(lambda one: one.part == "embed"),
        "head_params": count(lambda one: one.part == "head"),
        "tied": bool(trace.borrowed),
    }


def _recording(recorded: list[Any]) -> Kernels:
    """Kernels that append their work to a list: a `Matmul` or an `AttentionCall` with its input,
    the number of rotated features, or the FLOPs of logits."""

    def result(event: Any, shapes: Sequence[Any], dtype: Any, *inputs: jax.Array) -> tuple:
        call = f"{RECORDED}{len(recorded)}/"
        recorded.append(event)
        zeros = [jnp.zeros(shape, dtype) for shape in shapes]
        # The barrier makes the result depend on the inputs, as a matmul's does.
        _, made = jax.lax.optimization_barrier((inputs, zeros))
        return tuple(checkpoint_name(one, f"{call}{i}") for i, one in enumerate(made))

    def columns(x: jax.Array, weights: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        heads = weights[0].ndim > 2
        outputs = tuple((w.shape[1], math.prod(w.shape[2:])) for w in weights)
        names = PROJECTED.get(len(weights), ()) if heads else HIDDEN[: len(weights)]
        matmul = Matmul(x.shape[-1], outputs, "outputs", names)
        return result((x, matmul), [(*x.shape[:-1], *w.shape[1:]) for w in weights], x.dtype, x)

    def rows(x: jax.Array, weight: jax.Array) -> jax.Array:
        inputs, heads = math.prod(weight.shape[:-1]), weight.ndim > 2
        name = "attention_out" if heads else "mlp_down"
        tokens = x.shape[: x.ndim - weight.ndim + 1]
        one = Matmul(inputs, ((weight.shape[-1], 1),), "inputs", (name,))
        if recorded and isinstance(before := recorded[-1][1], AttentionCall):
            # Attention kernels may pad values to the width of keys: the true width is here.
            recorded[-1] = None, dataclasses.replace(before, value_features=weight.shape[1])
        return result((tokens, one), [(*tokens, weight.shape[-1])], x.dtype, x)[0]

    def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
        output = weight.shape[1], math.prod(weight.shape[2:])
        matmul = Matmul(x.shape[-1], (output,), "", ("compressed",))
        return result((x, matmul), [(*x.shape[:-1], *weight.shape[1:])], x.dtype, x)[0]

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, *others: Any, **settings: Any
    ) -> jax.Array:
        crosses = [*others, None, None][1] is not None or settings.get("segments_BS") is not None
        call = _attention(q, k, v, settings, k.shape[1] if crosses else 0)
        return result((None, call), [(*q.shape[:-1], v.shape[-1])], q.dtype, q, k, v)[0]

    def cross_entropy(x: jax.Array, *_: Any, vocab_size: int, **__: Any) -> tuple:
        recorded.append((None, 2.0 * x.size * vocab_size))
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
        # Tokens that a capacity would drop are counted, as in a model's FLOPs.
        dispatch=Dispatch(matmul="ragged_dot", keeps_all=True),
    )


def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, settings: dict[str, Any], source_len: int
) -> AttentionCall:
    length = k.shape[1]
    window = settings.get("sliding_window", 0) or length
    if settings.get("causal", True):
        window = min(window, length)
        keys = (window * (window + 1) / 2 + (length - window) * window) / length
        seen = 2 * keys
    else:  # a window extends equally in both directions
        keys = seen = min(2 * window - 1, length) if window < length else length
    heads = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
    return AttentionCall(*heads, keys, seen, source_len=source_len)


def _trace_layer(
    stack: Stack, arguments: tuple, recorded: list[Any], kind: int
) -> tuple[list[Any], list[PlainMatmul]]:
    """The recorded work of one layer of a kind, and the other matmuls of its trace."""
    recorded.clear()
    others, saved_as = plain_matmuls(jax.make_jaxpr(layer_function(stack, kind))(*arguments).jaxpr)
    events = list(recorded)
    for i, (x, one) in enumerate(events):
        if isinstance(one, Matmul):
            names = (saved_as[f"{RECORDED}{i}/{j}"] for j in range(len(one.outputs)))
            events[i] = x, dataclasses.replace(one, saved_as=tuple(names))
    return events, others


def _shares(
    stack: Stack, length: int, expert_layers: int, trace: Callable[[int], tuple[list, list]]
) -> tuple[list[Any], float]:
    """The work of a stack's layers, each item with the share of layers that do it, and the mean
    number of rotated features of a layer."""
    found: dict[Any, float] = collections.defaultdict(float)
    rotated = 0.0
    for kind in range(stack.period):
        share = (
            len(range(kind, stack.num_layers, stack.period)) / stack.num_layers / stack.model_layers
        )
        events, others = trace(kind)
        for one in (*_joined(events, length), *_others(others, length, expert_layers)):
            if isinstance(one, int):
                rotated += share * one
            else:
                found[one] += share
    return [dataclasses.replace(one, share=share) for one, share in found.items()], rotated


def _stack_work(
    stack: Stack, length: int, expert_layers: int, trace: Callable[[int], tuple[list, list]]
) -> StackWork:
    each, rotated = _shares(stack, length, expert_layers, trace)

    def of(record: type) -> tuple[Any, ...]:
        return tuple(one for one in each if isinstance(one, record))

    matmuls, experts = of(Matmul), of(RoutedExperts)

    def total(over: str, features: Callable[[Matmul], int], *names: str) -> float:
        chosen = [one for one in matmuls if over in ("", one.over)]
        chosen = [one for one in chosen if not names or {*names} & {*one.names}]
        return sum(features(one) * one.tokens * one.share for one in chosen)

    attended = total("inputs", lambda _: 1, "attention_out")
    fed = total("inputs", lambda _: 1, "mlp_down")
    # Experts and a shared expert are one branch.
    fed = max(fed, min(1.0, fed + sum(one.share for one in experts)))
    return StackWork(
        stack.name,
        stack.num_layers * stack.model_layers,
        length,
        matmuls,
        of(AttentionCall),
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
    """The events; matmuls of one array that tensor does not divide are joined into one."""
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
            whole[id(x)] = dataclasses.replace(
                before,
                outputs=before.outputs + one.outputs,
                saved_as=before.saved_as + one.saved_as,
            )
        else:
            whole[id(x)] = one
    yield from whole.values()


def _others(
    found: Iterable[PlainMatmul], length: int, expert_layers: int
) -> Iterator[Matmul | RoutedExperts]:
    """Matmuls of a trace that no kernel recorded.

    Args:
      expert_layers: of those traced, the layers with experts.
    """
    grouped = [one for one in found if one.groups] if expert_layers else []
    # The matrices of an expert have one size; those of its adapters are smaller.
    whole = max((one.inputs * one.outputs for one in grouped), default=0)
    grouped = [one for one in grouped if one.inputs * one.outputs == whole]
    for _ in range(expert_layers if grouped else 0):  # all have the same sizes
        first, gated = grouped[0], len(grouped) == 3 * expert_layers
        sizes = first.groups, round(first.rows / length), first.inputs, first.outputs
        yield RoutedExperts(*sizes, gated, read=grouped[-1].saved_as == "")
    for one in found:
        if one in grouped or (grouped and not one.groups and one.outputs == grouped[0].groups):
            continue  # an expert's, or the router's
        # Plain JAX matmuls, which XLA partitions like the stream.
        output, tokens = (one.outputs, 1), one.rows / length
        yield Matmul(one.inputs, (output,), "tokens", tokens=tokens, saved_as=(one.saved_as,))
