"""Sharding of decoding: parameters, rows of a batch, and their cache."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxscale.config.layout import TENSOR_ROWS
from jaxscale.sharding.resolve import (
    ACTIVATIONS,
    WEIGHTS,
    Axes,
    is_axes,
    resolve,
    resolve_tree,
    whole_kv_heads,
)
from jaxscale.training.engine import Engine

Place = Callable[[Any, Any], Any]
"""Shards a tree of arrays by their logical axes, the same for all, or a tree of axes."""


def without_pipeline_or_context(engine: Engine, params: Any) -> tuple[Any, Mesh]:
    """The parameters in canonical form, and a mesh of the same devices without the axes pipeline
    and context, whose ranks shard every layer as fsdp ranks do.

    With a pipeline every rank would fetch each layer from its pipeline rank, and XLA's partitioner
    crashes on some arrays that are sharded over both axes; context ranks would have no tokens.
    """
    params = engine.placement.part("params").to_canonical(params)
    sizes, names = engine.layout.sizes, engine.mesh.axis_names
    if sizes["pipeline"] == sizes["context"] == 1:
        return params, engine.mesh
    # Weights are divided by context before fsdp.
    devices = np.moveaxis(engine.mesh.devices, names.index("context"), names.index("fsdp"))
    sizes["fsdp"], sizes["context"] = sizes["context"] * sizes["fsdp"], 1
    rules = engine.zero.state_rules
    if sizes["pipeline"] > 1:
        ranks, sizes["pipeline"] = sizes["pipeline"] * sizes["data"], 1
        shards = sizes.get(TENSOR_ROWS, 1) * ranks * sizes["fsdp"] * sizes["expert"]
        if engine.config.model.d_model % shards == 0:
            sizes["data"], sizes["fsdp"], rules = 1, ranks * sizes["fsdp"], WEIGHTS
        else:
            sizes["data"] = ranks
    mesh = Mesh(
        devices.reshape([sizes[axis] for axis in names]), names, axis_types=engine.mesh.axis_types
    )
    axes = whole_kv_heads(engine.model.axes, params, mesh.shape)
    shardings = resolve_tree(axes, rules, mesh, params)
    return jax.device_put(params, shardings), mesh


def row_placement(mesh: Mesh, batch: int) -> Place:
    """Shards arrays by logical axes: heads over tensor, slots of a cache over context, and rows if
    they divide."""
    replicas = math.prod(mesh.shape[axis] for axis in ACTIVATIONS["batch"])
    rules = {**ACTIVATIONS, "layers": (), "vocab": (), "whole_kv_heads": ()}
    # Tokens of a row that are read together are not sharded; slots of the cache are.
    rules |= {"slots": ACTIVATIONS["seq"], "seq": (), "residual_seq": ()}
    if batch % replicas:
        rules["batch"] = ()

    def constrain(axes: Axes, leaf: jax.Array) -> jax.Array:
        spec = resolve(whole_kv_heads(axes, leaf, mesh.shape), rules, mesh.shape)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    def place(tree: Any, axes: Any) -> Any:
        def part(axes: Axes, leaves: Any) -> Any:
            return jax.tree.map(functools.partial(constrain, axes), leaves)

        return jax.tree.map(part, axes, tree, is_leaf=is_axes)

    return place
