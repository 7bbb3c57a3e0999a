"""Logical axis names to mesh axes: the one function that joins mathematics and layout."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.layout import AUTOMATIC_AXES, MANUAL_AXES

Axes = tuple[str, ...]
Rules = Mapping[str, tuple[str, ...]]

# What a dimension is -> the mesh axes it is spread over. Weights and activations differ: a weight's
# embed dimension is what ZeRO shards, an activation's is whole on every device.
WEIGHTS: Rules = {
    "layers": ("pipeline",),
    "embed": ("fsdp",),
    # Of what is not in a layer, which every rank of the pipeline would else have whole.
    "outer_embed": ("pipeline", "fsdp"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "positions": (),
}
ACTIVATIONS: Rules = {
    "batch": ("data", "fsdp"),
    "seq": ("context",),
    # Between the products of attention and MLP, which need all of a rank's tokens, the ranks of
    # tensor share out the tokens (sequence parallelism, arXiv 2205.05198, section 4.2).
    "residual_seq": ("context", "tensor"),
    "embed": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}
SETTINGS = {
    "embed": "model.d_model",
    "heads": "model.num_heads",
    "kv_heads": "model.num_kv_heads",
    "mlp": "model.d_ff",
    "layers": "model.num_layers",
}
"""What sets the size of a dimension, where a setting does."""

REPLICATED_WEIGHTS: Rules = {**WEIGHTS, "embed": (), "outer_embed": ("pipeline",)}
"""For the ZeRO stages that leave a tree whole on every rank of the fsdp axis."""


def resolve(
    axes: Axes, rules: Rules, sizes: Mapping[str, int], shape: tuple[int, ...] | None = None,
    *, name: str = "an array",
) -> PartitionSpec:  # fmt: skip
    """The mesh axes of each dimension; mesh axes of size 1 are left out.

    Args:
      axes: a logical name for each dimension.
      rules: logical name -> mesh axes.
      sizes: mesh axis -> size.
      shape: checked for divisibility when given.
      name: what the errors call the array.

    Raises:
      ValueError: an unknown name, two names on one mesh axis, or a dimension that does not divide.
    """
    spec, owner = [], {}
    for dim, logical in enumerate(axes):
        if logical not in rules:
            raise ValueError(
                f"{name}: logical axis {logical!r} has no rule; known: {', '.join(sorted(rules))}"
            )
        mesh_axes = tuple(axis for axis in rules[logical] if sizes[axis] > 1)
        for axis in mesh_axes:
            if axis in owner:
                raise ValueError(
                    f"{name}: {owner[axis]!r} and {logical!r} both map to mesh axis {axis!r}"
                )
            owner[axis] = logical
            if shape and shape[dim] % sizes[axis]:
                setting = SETTINGS.get(logical, f"dimension {logical!r}")
                raise ValueError(
                    f"{name}: {setting} = {shape[dim]} does not divide over layout.{axis} = "
                    f"{sizes[axis]}; the nearest that does is layout.{axis} = "
                    f"{nearest_divisors(shape[dim], sizes[axis])}"
                )
        spec.append(mesh_axes if len(mesh_axes) > 1 else mesh_axes[0] if mesh_axes else None)
    return PartitionSpec(*spec)


def nearest_divisors(size: int, parts: int) -> str:
    """The numbers nearest to `parts`, below and above, into which `size` divides: "2 or 4"."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    below = [n for n in divisors if n < parts][-1:]
    return " or ".join(map(str, below + [n for n in divisors if n > parts][:1]))


def is_axes(node: object) -> bool:
    """Whether a tree node is a tuple of logical names: the leaf of an axes tree."""
    return type(node) is tuple and all(isinstance(item, str) for item in node)


def spread_outer(axes_tree: Any, sizes: Mapping[str, int], d_model: int) -> Any:
    """A tree of axes in which what is outside the layers is spread over the pipeline too, where
    its "embed" dimension divides."""
    if sizes["pipeline"] == 1 or d_model % (sizes["pipeline"] * sizes["fsdp"]):
        return axes_tree

    def one(axes: Axes) -> Axes:
        if "layers" in axes:
            return axes
        return tuple("outer_embed" if name == "embed" else name for name in axes)

    return jax.tree.map(one, axes_tree, is_leaf=is_axes)


def resolve_tree(axes_tree: Any, rules: Rules, mesh: jax.sharding.Mesh, abstract: Any) -> Any:
    """`NamedSharding`s for a tree of arrays (shapes in `abstract`) from its tree of axes."""

    def one(path, axes, leaf):
        spec = resolve(axes, rules, mesh.shape, leaf.shape, name=leaf_name(path))
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, axes_tree, abstract, is_leaf=is_axes)


def leaf_name(path: tuple) -> str:
    """A tree path as people write it: layers/attention/q."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def manual_part(spec: PartitionSpec) -> PartitionSpec:
    """What a spec says of the axes we handle by hand."""
    return _only(spec, MANUAL_AXES)


def automatic_part(spec: PartitionSpec) -> PartitionSpec:
    """What a spec says of the axes that the compiler handles."""
    return _only(spec, AUTOMATIC_AXES)


def _only(spec: PartitionSpec, mesh_axes: tuple[str, ...]) -> PartitionSpec:
    def one(entry):
        names = entry if isinstance(entry, tuple) else (entry,)
        kept = tuple(name for name in names if name in mesh_axes)
        return kept if len(kept) > 1 else kept[0] if kept else None

    return PartitionSpec(*(one(entry) for entry in spec))


def constrain(
    x: jax.Array, axes: Axes, sizes: Mapping[str, int], rules: Rules = ACTIVATIONS
) -> jax.Array:
    """Asks the compiler to spread an array over the axes that it handles.

    For use where the axes we handle by hand are already manual.
    """
    spec = automatic_part(resolve(axes, rules, sizes))
    return jax.lax.with_sharding_constraint(x, spec) if any(spec) else x
