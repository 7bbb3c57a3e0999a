"""Resolves logical axis names to mesh axes and shardings."""

import math
from collections.abc import Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.config.layout import AUTOMATIC_AXES, MANUAL_AXES, TENSOR_ROWS
from jaxscale.sharding.host_memory import from_host
from jaxscale.sharding.rules import (
    ACTIVATIONS,
    LAYER_SHARD_AXES,
    WEIGHTS,
    Axes,
    Rules,
    mesh_axes,
    shards_layers,
    spreads_outer,
    with_whole_kv_heads,
)

WIDE = {"routes", "squares"}
"""Logical axes of arrays that are used in float32 or wider."""


def resolve(
    axes: Axes,
    rules: Rules,
    sizes: Mapping[str, int],
    shape: tuple[int, ...] | None = None,
    *,
    name: str = "an array",
) -> PartitionSpec:
    """Resolves the logical axes of an array to a `PartitionSpec` over mesh axes.

    Args:
      axes: a logical name for each dimension.
      rules: logical name -> mesh axes.
      sizes: mesh axis -> size; absent axes have size 1, and axes of size 1 are left out.
      shape: checked for divisibility if given.
      name: name of the array in errors.

    Raises:
      ValueError: an unknown name, two names on one mesh axis, or a dimension that does not divide.

    Examples:
      >>> rules = {"embed": ("fsdp",), "vocab": ("tensor",)}
      >>> spec = jaxscale.resolve(("vocab", "embed"), rules, {"fsdp": 2, "tensor": 4}, (256, 64))
      >>> spec == jax.P("tensor", "fsdp")
      True
    """
    over = mesh_axes(axes, rules, sizes, shape, name=name)
    return PartitionSpec(*(one if len(one) > 1 else one[0] if one else None for one in over))


def is_axes(node: object) -> bool:
    """Whether a tree node is a tuple of logical names: the leaf of an axes tree."""
    return type(node) is tuple and all(isinstance(item, str) for item in node)


def has_experts(axes: Any) -> bool:
    """Whether a tree of logical axes has arrays of experts."""
    return any("experts" in one for one in jax.tree.leaves(axes, is_leaf=is_axes))


def weight_dtype(axes: Axes, stored: Any, compute_dtype: Any) -> jnp.dtype:
    """The type of a gathered weight: the compute type; for routers float32 or wider, since rounded
    weights would choose other experts, and for arrays whose gradients are sums of squares
    (`training.noise_scale`); quantised bytes, as they are.

    Args:
      stored: the parameter's type.
    """
    if not jnp.issubdtype(stored, jnp.floating):
        return jnp.dtype(stored)
    dtype = jnp.dtype(compute_dtype)
    return dtype if WIDE.isdisjoint(axes) else jnp.promote_types(dtype, jnp.float32)


def weights_in_use(axes_tree: Any, params: Any, compute_dtype: Any) -> Any:
    """The parameters of a tree on the device, in the types in which the model uses them."""
    return jax.tree.map(
        lambda axes, x: from_host(x).astype(weight_dtype(axes, x.dtype, compute_dtype)),
        axes_tree,
        params,
        is_leaf=is_axes,
    )


def spread_outer(axes_tree: Any, sizes: Mapping[str, int], d_model: int) -> Any:
    """Renames axes so that parameters outside the layers are sharded over the pipeline, too, if it
    divides their "embed" dimension."""
    share = d_model // sizes.get(TENSOR_ROWS, 1)
    ranks = sizes["fsdp"] * sizes["expert"] * sizes["context"]
    if not spreads_outer(sizes["pipeline"], ranks, share):
        return axes_tree

    def one(axes: Axes) -> Axes:
        if "layers" in axes:
            return axes
        return tuple("outer_embed" if name == "embed" else name for name in axes)

    return jax.tree.map(one, axes_tree, is_leaf=is_axes)


def whole_kv_heads(axes_tree: Any, abstract: Any, sizes: Mapping[str, int]) -> Any:
    """`rules.with_whole_kv_heads` for a tree of axes.

    Args:
      abstract: the arrays' shapes, in the same tree.
    """
    return jax.tree.map(
        lambda leaf, axes: with_whole_kv_heads(axes, leaf.shape, sizes), abstract, axes_tree
    )


def layer_rules(sizes: Mapping[str, int], rows: int, rules: Rules = WEIGHTS) -> list[Rules]:
    """Rules that shard a stack's layers, with whole matrices, over axes of `LAYER_SHARD_AXES` where
    that saves work: each rule over one more axis.

    Args:
      rows: layers in the stack, over all ranks of the pipeline.
    """
    found, axes = [], ()
    for axis in LAYER_SHARD_AXES:
        ranks = math.prod(sizes[one] for one in axes)
        if shards_layers(rows // sizes["pipeline"], sizes["pipeline"], ranks, sizes[axis]):
            axes = (*axes, axis)
            found.append({**rules, "embed": (TENSOR_ROWS,), "layers": ("pipeline", *axes)})
    return found


def resolve_tree(axes_tree: Any, rules: Rules, mesh: jax.sharding.Mesh, abstract: Any) -> Any:
    """`NamedSharding`s for a tree of arrays (shapes in `abstract`) from its tree of axes.

    The arrays are mapped over, not the axes: an optimizer's state may contain an empty tuple, which
    looks like the axes of a scalar.
    """

    def one(path, leaf, axes):
        spec = resolve(axes, rules, mesh.shape, leaf.shape, name=leaf_name(path))
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, abstract, axes_tree)


def leaf_name(path: tuple) -> str:
    """A readable tree path: layers/attention/q."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def owner_of(path: tuple, params: Container[tuple]) -> tuple | None:
    """The path of the parameter that an array of an optimizer's state is of, with which the array's
    path ends; None for counts and constants.

    Args:
      params: the paths of the parameters.
    """
    return next((path[i:] for i in range(len(path)) if path[i:] in params), None)


def manual_part(spec: PartitionSpec) -> PartitionSpec:
    """The part of a spec that is over manual axes."""
    return _only(spec, MANUAL_AXES)


def automatic_part(spec: PartitionSpec) -> PartitionSpec:
    """The part of a spec that is over automatic axes."""
    return _only(spec, AUTOMATIC_AXES)


def automatic_axes(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The automatic axes of a mesh."""
    return tuple(axis for axis in AUTOMATIC_AXES if axis in sizes)


def _only(spec: PartitionSpec, mesh_axes: tuple[str, ...]) -> PartitionSpec:
    def one(entry):
        names = entry if isinstance(entry, tuple) else (entry,)
        kept = tuple(name for name in names if name in mesh_axes)
        return kept if len(kept) > 1 else kept[0] if kept else None

    return PartitionSpec(*(one(entry) for entry in spec))


def constrain(
    x: jax.Array, axes: Axes, sizes: Mapping[str, int], rules: Rules = ACTIVATIONS
) -> jax.Array:
    """Constrains the sharding of an array over the automatic axes.

    For use inside a `shard_map` over the manual axes.
    """
    return constrain_to(x, automatic_part(resolve(axes, rules, sizes)))


def constrain_to(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """`constrain` to a spec over automatic axes."""
    return jax.lax.with_sharding_constraint(x, spec) if any(spec) else x
