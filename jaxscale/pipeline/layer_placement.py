"""Layer placement on pipeline ranks: converts a state between canonical and run order."""

import dataclasses
import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxscale.models.protocol import Rows
from jaxscale.sharding.resolve import leaf_name
from jaxscale.sharding.rules import Axes
from jaxscale.sharding.specs import across_pipeline, mesh_axes_of

Tree = Any


@dataclass(frozen=True, eq=False)
class LayerPlacement:
    """The order of layers in a run, for every array of a state with a "layers" dimension.

    The canonical form, in which states are initialised, saved and returned, is [layers, ...] for
    every layout. If the run's form differs, it is recognised by its sharding: only it is sharded
    over `pipeline` along the layers. So both functions accept either form. Arrays on the host, or
    on the devices of another mesh, are placed on this run's.
    """

    layer_of_row: Rows  # for each stack of the model the layer in each row; -1 is none
    axes: Tree  # logical axes of every array
    abstract: Tree  # shapes, types and shardings in the run

    @property
    def trivial(self) -> bool:
        """Whether the run's form is the canonical one."""
        return all(np.array_equal(r, np.arange(len(r))) for r in self.layer_of_row.values())

    @property
    def canonical(self) -> Tree:
        """Shapes, types and shardings of the canonical form."""
        if self.trivial:
            return self.abstract
        return jax.tree_util.tree_map_with_path(self._canonical, self.abstract, self.axes)

    def part(self, name: str) -> "LayerPlacement":
        """The placement of one part of the state, such as "params"."""
        parts = {key: getattr(getattr(self, key), name) for key in ("axes", "abstract")}
        return dataclasses.replace(self, **parts)

    def to_canonical(self, state: Tree, *, on_host: bool = False, donate: bool = False) -> Tree:
        """Converts a state in either form to the canonical form.

        Arrays are reordered one at a time, to limit the devices' memory.

        Args:
          on_host: leaves reordered arrays in host memory, if the devices support it: for saving.
          donate: deletes each array of `state` that was reordered.

        Raises:
          ValueError: the state is in the form of another run, with a pipeline.
        """
        if not self._in_the_runs_form(state):
            return jax.tree.map(_placed, state, self.canonical)
        if self.trivial:
            return state
        wanted = self.canonical
        if on_host:
            wanted = jax.tree.map(_in_host_memory, wanted, self.axes)
        rows = {name: _inverse(layers) for name, layers in self.layer_of_row.items()}
        return self._reorder(rows, donate, state, self.abstract, wanted)

    def from_canonical(self, state: Tree, *, donate: bool = False) -> Tree:
        """Converts a state in either form to the run's form.

        Args:
          donate: as in `to_canonical`.

        Raises:
          ValueError: an array has the shape of neither form, or the state is in the form of another
            run's pipeline.
        """
        if self._in_the_runs_form(state):
            return state
        if self.trivial:
            return jax.tree.map(_placed, state, self.abstract)
        given = self.canonical
        jax.tree_util.tree_map_with_path(_check_shape, state, given)
        return self._reorder(self.layer_of_row, donate, state, given, self.abstract)

    def _in_the_runs_form(self, state: Tree) -> bool:
        """Whether its layers are sharded over the ranks."""

        def one(leaf: Any, axes: Axes, wanted: jax.ShapeDtypeStruct) -> bool:
            if "layers" not in axes or not isinstance(leaf, jax.Array):
                return False
            dim = axes.index("layers")
            if leaf.sharding.shard_shape(leaf.shape)[dim] == leaf.shape[dim]:
                return False
            if not _on_mesh(leaf, wanted):
                raise ValueError(
                    "the layers are sharded over another engine's pipeline, in its order; pass "
                    "jax.device_get(THAT_ENGINE.placement.to_canonical(STATE)), or its params"
                )
            return True

        return any(jax.tree.leaves(jax.tree.map(one, state, self.axes, self.abstract)))

    def _reorder(self, rows: Rows, donate: bool, *trees: Tree) -> Tree:
        def one(path: tuple, leaf: Any, axes: Axes, *leaves: Any) -> Any:
            chosen = rows[stack_of(path, rows)] if "layers" in axes else None
            return _reorder(chosen, donate, axes, leaf, *leaves)

        return jax.tree_util.tree_map_with_path(one, trees[0], self.axes, *trees[1:])

    def _canonical(
        self, path: tuple, leaf: jax.ShapeDtypeStruct, axes: Axes
    ) -> jax.ShapeDtypeStruct:
        if "layers" not in axes:
            return leaf
        layers = self.layer_of_row[stack_of(path, self.layer_of_row)]
        dim, size = axes.index("layers"), int(layers.max()) + 1
        shape = (*leaf.shape[:dim], size, *leaf.shape[dim + 1 :])
        sharding = across_pipeline(leaf.sharding, axes, shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)


def stack_of(path: tuple, stacks: Collection[str]) -> str:
    """The stack of an array of a state: the key of its parameters in the path."""
    keys = [str(getattr(key, "key", "")) for key in path]
    return next(key for key in keys if key in stacks)


def _inverse(layer_of_row: np.ndarray) -> np.ndarray:
    """The row of each layer."""
    rows = np.flatnonzero(layer_of_row >= 0)
    return rows[np.argsort(layer_of_row[rows])]


def _in_host_memory(leaf: jax.ShapeDtypeStruct, axes: Axes) -> jax.ShapeDtypeStruct:
    device = next(iter(leaf.sharding.addressable_devices))
    if "layers" not in axes or "pinned_host" not in {m.kind for m in device.addressable_memories()}:
        return leaf
    host = leaf.sharding.with_memory_kind("pinned_host")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host)


def _on_mesh(array: Any, wanted: jax.ShapeDtypeStruct) -> bool:
    assert isinstance(wanted.sharding, NamedSharding)
    sharding = array.sharding if isinstance(array, jax.Array) else None
    return isinstance(sharding, NamedSharding) and sharding.mesh == wanted.sharding.mesh


def _placed(array: Any, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """Places an array on the wanted mesh, unless it is on it."""
    return array if _on_mesh(array, wanted) else jax.device_put(array, wanted.sharding)


def _check_shape(path: tuple, leaf: Any, wanted: jax.ShapeDtypeStruct) -> None:
    if np.shape(leaf) != wanted.shape:
        raise ValueError(
            f"{leaf_name(path)} has shape {np.shape(leaf)}; in canonical form it is "
            f"{wanted.shape}: pass a state from the engine's functions, `fit` or a checkpoint"
        )


def _reorder(
    rows: np.ndarray | None,
    donate: bool,
    axes: Axes,
    array: Any,
    given: jax.ShapeDtypeStruct,
    wanted: jax.ShapeDtypeStruct,
) -> Any:
    """Reorders the rows of an array; rows of -1 are zeros."""
    if rows is None:
        return _placed(array, wanted)
    # XLA's kernels read device memory only, so arrays on the host are moved first.
    before, after = (leaf.sharding.with_memory_kind("device") for leaf in (given, wanted))
    placed = jax.device_put(array, before)
    taken = _take(placed, tuple(rows.tolist()), axes.index("layers"), before, after)
    # Wait for each array: JAX allocates results at dispatch, so without this the devices would
    # store a second state.
    taken = jax.block_until_ready(jax.device_put(taken, wanted.sharding))
    if donate and isinstance(array, jax.Array):
        array.delete()
    return taken


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _take(
    array: jax.Array, rows: tuple[int, ...], dim: int, before: NamedSharding, after: NamedSharding
) -> jax.Array:
    """Takes rows of an array in the form in which a rank has a part of every layer, with an
    all-to-all before or after."""
    # By hand: XLA's partitioner would all-gather the whole array on every rank, and crashes on some
    # arrays that are sharded over two axes.
    index = np.array(rows)
    is_layer = np.expand_dims(index >= 0, tuple(d for d in range(array.ndim) if d != dim))

    def local(x: jax.Array) -> jax.Array:
        split, join = _pipeline_dim(before), _pipeline_dim(after)
        if split == dim:
            x = _exchange(x, join, dim)
        x = jnp.where(is_layer, jnp.take(x, np.maximum(index, 0), axis=dim), jnp.zeros((), x.dtype))
        if join == dim:
            x = _exchange(x, dim, split)
        return x

    return jax.shard_map(
        local, mesh=before.mesh, in_specs=before.spec, out_specs=after.spec, check_vma=False
    )(array)


def _exchange(x: jax.Array, split: int | None, join: int | None) -> jax.Array:
    """Reshards over the pipeline from `join` to `split`; None is replicated."""
    if split is None:
        assert join is not None, "layers are sharded in one of the two forms"
        return jax.lax.all_gather(x, "pipeline", axis=join, tiled=True)
    if join is None:
        size = x.shape[split] // jax.lax.axis_size("pipeline")
        begin = size * jax.lax.axis_index("pipeline")
        return jax.lax.dynamic_slice_in_dim(x, begin, size, split)
    return jax.lax.all_to_all(x, "pipeline", split, join, tiled=True)


def _pipeline_dim(sharding: NamedSharding) -> int | None:
    return next((d for d, e in enumerate(sharding.spec) if "pipeline" in mesh_axes_of(e)), None)
