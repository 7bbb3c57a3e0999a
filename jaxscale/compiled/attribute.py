"""Attributes the largest buffers of a compiled step to modules and to settings that shrink them."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

from jaxscale.compiled import hlo
from jaxscale.compiled.live_buffers import Buffer
from jaxscale.sharding.resolve import leaf_name
from jaxscale.training.engine import Engine

MODULES = ("attention", "mlp", "head", "embed", "optimizer")
"""Named scopes of the model and the step."""

SAVED = "saved activations"
SHRINKS = {
    "parameters": "zero_stage = 1, fsdp, tensor, pipeline",
    "optimizer state": "zero_stage = 1, fsdp, offload = 'optimizer'",
    "batch": "data.global_batch_size",
    "tables": "more devices",
    "weights in use": "zero_stage = 3, tensor, pipeline",
    "gradients": "zero_stage = 2, fsdp, tensor, pipeline",
    SAVED: "remat = 'full', microbatches, offload = 'activations', context",
    "temporaries": "microbatches, context, tensor",
}
"""Type of a buffer -> settings that shrink it."""

SHRINKS_IN_PIPELINES = {
    **SHRINKS,
    "weights in use": "zero_stage = 3, tensor, pipeline, virtual_stages",
    SAVED: "remat = 'full', microbatches, schedule = '1f1b', context",
}
"""The same for a layout with a pipeline."""

PIPELINE_BUFFERS = {
    "weights": "weights in use",
    "weights of two directions": "weights in use",
    "gradients": "gradients",
}
"""Names of `pipeline_buffers` -> keys of SHRINKS; all others are SAVED."""


@dataclass(frozen=True)
class BufferUse:
    """Equal buffers that are live at the peak: their type, number and module."""

    num_bytes: float  # of all together
    count: int
    shape: str
    what: str  # a key of SHRINKS
    module: str  # of MODULES; "" if unknown
    smaller_with: str  # settings that shrink them


def attribute_buffers(buffers: Sequence[Buffer], engine: Engine) -> list[BufferUse]:
    """Groups of equal buffers, largest first."""
    shrinks = _settings(engine)
    weights, kept = dict(_weights(engine)), dict(_pipeline(engine))
    groups: dict[tuple[str, str, str], list[Buffer]] = {}
    for buffer in buffers:
        (dtype, dims), *_ = hlo.arrays(buffer.shape)
        size = math.prod(dims)
        what = _what(buffer, engine, size in weights, kept.get((dtype, size), ""))
        module = find_module(buffer.op_name)
        if not module and what in ("parameters", "weights in use", "gradients"):
            module = weights.get(size, "")
        groups.setdefault((buffer.shape, what, module), []).append(buffer)
    uses = [
        BufferUse(sum(one.num_bytes for one in group), len(group), *key, shrinks[key[1]])
        for key, group in groups.items()
    ]
    return sorted(uses, key=lambda use: -use.num_bytes)


def _settings(engine: Engine) -> dict[str, str]:
    """SHRINKS without the settings that the layout already has."""
    layout = engine.layout
    done = {
        **{f"zero_stage = {stage}": layout.zero_stage >= stage for stage in (1, 2, 3)},
        "remat = 'full'": layout.remat == "full",
        "offload = 'optimizer'": layout.offloads("optimizer"),
        "offload = 'activations'": layout.offloads("activations"),
        "schedule = '1f1b'": layout.schedule == "1f1b",
    }
    shrinks = SHRINKS_IN_PIPELINES if engine.stages else SHRINKS
    return {
        what: ", ".join(one for one in settings.split(", ") if not done.get(one))
        for what, settings in shrinks.items()
    }


def find_module(op_name: str) -> str:
    """The module in the scope of a traced operation, or ""."""
    words = re.findall(r"\w+", op_name)
    return next((word for word in reversed(words) if word in MODULES), "")


def _what(buffer: Buffer, engine: Engine, is_weight: bool, in_pipeline: str) -> str:
    """The type of a buffer, a key of SHRINKS.

    Args:
      is_weight: whether it has the size of a parameter, a layer of one, or a shard of either.
      in_pipeline: the type of pipeline buffers with its dtype and size.
    """
    if buffer.argument:
        kinds = {
            "state.params": "parameters",
            "state.opt_state": "optimizer state",
            "state.tables": "tables",
        }
        return next((kinds[k] for k in kinds if buffer.op_name.startswith(k)), "batch")
    (dtype, dims), *_ = hlo.arrays(buffer.shape)
    kept = engine.zero.keeps or engine.layout.casts_once
    depths = {stack.num_layers for stack in engine.model.stacks}
    stacked = len(dims) > 2 and not depths.isdisjoint((dims[0], dims[0] + 1))
    found = (
        ("weights in use", "all_gather" in buffer.op_name),
        ("optimizer state", find_module(buffer.op_name) == "optimizer"),
        (in_pipeline, in_pipeline),
        ("gradients", is_weight and dtype == "f32"),
        ("weights in use", is_weight and kept),
        (SAVED, stacked and not engine.stages),
    )
    return next((what for what, holds in found if holds), "temporaries")


def _weights(engine: Engine) -> Iterator[tuple[int, str]]:
    """Number of elements (of a parameter, a layer or chunk of it, or a shard) -> its module."""
    tensor = engine.layout.tensor
    chunk = engine.stages.capacity() if engine.stages else 1
    for path, leaf in jax.tree_util.tree_leaves_with_path(engine.abstract_state.params):
        module = find_module(leaf_name(path).replace("_norm", ""))
        for size in (leaf.size, math.prod(leaf.sharding.shard_shape(leaf.shape))):
            for part in (size, size // tensor):
                yield part, module
                yield part // leaf.shape[0], module
                yield part // leaf.shape[0] * chunk, module


def _pipeline(engine: Engine) -> Iterator[tuple[tuple[str, int], str]]:
    """Dtype and elements of a pipeline rank's buffers between ticks -> a key of SHRINKS."""
    if engine.stages is None:
        return
    kept = engine.pipeline_buffers()
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
    for name, tree in kept.items():
        for leaf in jax.tree.leaves(tree):
            for size in (leaf.size, leaf.size // engine.layout.tensor):
                yield (short.get(str(leaf.dtype), ""), size), PIPELINE_BUFFERS.get(name, SAVED)
