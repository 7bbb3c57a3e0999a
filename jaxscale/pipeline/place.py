"""Layers on the ranks of a pipeline: from the canonical order of a state to its own, and back."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.sharding import Axes, is_axes, leaf_name

Tree = Any


@dataclass(frozen=True, eq=False)
class Placement:
    """How a run stacks its layers, in every array of a state that has a "layers" dimension.

    What is canonical is [layers, ...] whatever the layout: so states are made, saved, and handed
    to others. Where the two forms differ they are never mistaken for each other, since only the
    run's is spread over `pipeline` along its layers: both functions take either.
    """

    rows: np.ndarray  # the layer in each row of a stack; -1 for none
    axes: Tree  # logical axes of every array
    abstract: Tree  # shapes, types and shardings in the run

    @property
    def trivial(self) -> bool:
        """Whether the run's form is the canonical one."""
        return np.array_equal(self.rows, np.arange(len(self.rows)))

    @property
    def canonical(self) -> Tree:
        """Shapes, types and shardings of the canonical form."""
        return self.abstract if self.trivial else self._map(self._canonical, self.abstract)

    def part(self, name: str) -> "Placement":
        """That of a part of the state alone, such as "params"."""
        parts = {key: getattr(getattr(self, key), name) for key in ("axes", "abstract")}
        return dataclasses.replace(self, **parts)

    def to_canonical(self, state: Tree, *, on_host: bool = False, donate: bool = False) -> Tree:
        """The canonical form of a state that has either form.

        One array at a time is put in order, so that the devices hold little beside the state.

        Args:
          on_host: leaves what was put in order in host memory, where there is some: for saving.
          donate: deletes each array of `state` that was put in order.
        """
        if self.trivial or not self._in_the_runs_form(state):
            return state
        layers = np.flatnonzero(self.rows >= 0)
        wanted = self.canonical
        if on_host:
            wanted = self._map(_in_host_memory, wanted)
        reorder = functools.partial(_reorder, layers[np.argsort(self.rows[layers])], donate)
        return self._map(reorder, state, self.abstract, wanted)

    def from_canonical(self, state: Tree, *, donate: bool = False) -> Tree:
        """The form of the run of a state that has either form.

        Args:
          donate: as in `to_canonical`.

        Raises:
          ValueError: an array's shape is that of neither form.
        """
        if self.trivial or self._in_the_runs_form(state):
            return state
        given = self.canonical
        jax.tree_util.tree_map_with_path(_check_shape, state, given)
        reorder = functools.partial(_reorder, self.rows, donate)
        return self._map(reorder, state, given, self.abstract)

    def _in_the_runs_form(self, state: Tree) -> bool:
        """Whether its layers are spread over the ranks."""

        def one(axes: Axes, leaf: Any) -> bool:
            if "layers" not in axes or not isinstance(leaf, jax.Array):
                return False
            dim = axes.index("layers")
            return leaf.sharding.shard_shape(leaf.shape)[dim] < leaf.shape[dim]

        return any(jax.tree.leaves(self._map(one, state)))

    def _canonical(self, axes: Axes, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if "layers" not in axes:
            return leaf
        dim, size = axes.index("layers"), int(self.rows.max()) + 1
        shape = (*leaf.shape[:dim], size, *leaf.shape[dim + 1 :])
        sharding = _across(leaf.sharding, axes, shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    def _map(self, function: Any, *trees: Tree) -> Tree:
        return jax.tree.map(function, self.axes, *trees, is_leaf=is_axes)


def _across(sharding: Any, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
    """The ranks of a pipeline share another dimension than the layers, so that each has a part of
    every layer: that of the model's width, as ranks of fsdp do, or one that divides. Where none
    does, they have it all."""
    assert isinstance(sharding, NamedSharding)
    ranks = sharding.mesh.shape["pipeline"]
    spec = [_names(entry) for entry in sharding.spec]
    spec += [()] * (len(shape) - len(spec))
    spec = [tuple(name for name in names if name != "pipeline") for names in spec]
    sizes = sharding.update(spec=PartitionSpec(*spec)).shard_shape(shape)
    free = [d for d, size in enumerate(sizes) if axes[d] != "layers" and size % ranks == 0]
    if free:
        chosen = min(free, key=lambda d: (axes[d] != "embed", len(spec[d])))
        spec[chosen] += ("pipeline",)
    return sharding.update(spec=PartitionSpec(*spec))


def _names(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()


def _in_host_memory(axes: Axes, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    device = next(iter(leaf.sharding.addressable_devices))
    if "layers" not in axes or "pinned_host" not in {m.kind for m in device.addressable_memories()}:
        return leaf
    host = leaf.sharding.with_memory_kind("pinned_host")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host)


def _check_shape(path: tuple, leaf: Any, wanted: jax.ShapeDtypeStruct) -> None:
    if np.shape(leaf) != wanted.shape:
        raise ValueError(
            f"{leaf_name(path)} has shape {np.shape(leaf)}, and {wanted.shape} in canonical form; "
            "pass a state as the engine's functions, `fit` or a checkpoint give it"
        )


def _reorder(
    rows: np.ndarray,
    donate: bool,
    axes: Axes,
    array: Any,
    given: jax.ShapeDtypeStruct,
    wanted: jax.ShapeDtypeStruct,
) -> Any:
    """The rows of an array in another order, zeros where one is -1."""
    if "layers" not in axes:
        return array if isinstance(array, jax.Array) else jax.device_put(array, wanted.sharding)
    # Only what is in device memory can be computed with.
    before, after = (leaf.sharding.with_memory_kind("device") for leaf in (given, wanted))
    placed = jax.device_put(array, before)
    taken = _take(placed, tuple(rows.tolist()), axes.index("layers"), before, after)
    # Waiting, or the devices would hold a second state: arrays are allocated when asked for.
    taken = jax.block_until_ready(jax.device_put(taken, wanted.sharding))
    if donate and isinstance(array, jax.Array):
        array.delete()
    return taken


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _take(
    array: jax.Array, rows: tuple[int, ...], dim: int, before: NamedSharding, after: NamedSharding
) -> jax.Array:
    """Taken where a rank has its part of every layer, or all of it: ranks exchange their parts
    before, or after. By hand: the compiler would have all ranks gather the whole array, and its
    partitioner ends the process over some that are spread over two axes."""
    index = np.array(rows)
    there = np.expand_dims(index >= 0, tuple(d for d in range(array.ndim) if d != dim))

    def local(x: jax.Array) -> jax.Array:
        split, join = _pipeline_dim(before), _pipeline_dim(after)
        if split == dim:
            x = _exchange(x, join, dim)
        x = jnp.where(there, jnp.take(x, np.maximum(index, 0), axis=dim), jnp.zeros((), x.dtype))
        if join == dim:
            x = _exchange(x, dim, split)
        return x

    return jax.shard_map(
        local, mesh=before.mesh, in_specs=before.spec, out_specs=after.spec, check_vma=False
    )(array)


def _exchange(x: jax.Array, split: int | None, join: int | None) -> jax.Array:
    """Spread over the pipeline along `split` instead of `join`; None is whole on every rank."""
    if split is None:
        assert join is not None, "layers are spread in one of the two forms"
        return jax.lax.all_gather(x, "pipeline", axis=join, tiled=True)
    if join is None:
        size = x.shape[split] // jax.lax.axis_size("pipeline")
        begin = size * jax.lax.axis_index("pipeline")
        return jax.lax.dynamic_slice_in_dim(x, begin, size, split)
    return jax.lax.all_to_all(x, "pipeline", split, join, tiled=True)


def _pipeline_dim(sharding: NamedSharding) -> int | None:
    return next((d for d, e in enumerate(sharding.spec) if "pipeline" in _names(e)), None)
