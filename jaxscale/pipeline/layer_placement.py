"""Layers on the ranks of a pipeline: from the canonical order of a state to its own, and back."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.sharding.resolve import Axes, is_axes

Tree = Any


@dataclass(frozen=True, eq=False)
class LayerPlacement:
    """How a run stacks its layers, in every array of a state that has a "layers" dimension.

    What is canonical is [layers, ...] whatever the layout: so states are made, and saved.
    """

    layer_of_row: np.ndarray  # the layer in each row of a stack; -1 for none
    axes: Tree  # logical axes of every array
    abstract: Tree  # shapes, types and shardings in the run

    @property
    def trivial(self) -> bool:
        """Whether the run's form is the canonical one."""
        return np.array_equal(self.layer_of_row, np.arange(len(self.layer_of_row)))

    @property
    def canonical(self) -> Tree:
        """Shapes, types and shardings of the canonical form."""
        return self.abstract if self.trivial else self._map(self._canonical, self.abstract)

    def part(self, name: str) -> "LayerPlacement":
        """That of a part of the state alone, such as "params"."""
        parts = {key: getattr(getattr(self, key), name) for key in ("axes", "abstract")}
        return dataclasses.replace(self, **parts)

    def to_canonical(self, state: Tree) -> Tree:
        """The canonical form of a run's state. One array at a time is taken apart; on the way it
        may be whole on every rank of the pipeline."""
        if self.trivial:
            return state
        layers = np.flatnonzero(self.layer_of_row >= 0)
        order = layers[np.argsort(self.layer_of_row[layers])]
        return self._map(functools.partial(_reorder, order), state, self.canonical)

    def from_canonical(self, state: Tree) -> Tree:
        """The form of the run."""
        if self.trivial:
            return state
        return self._map(functools.partial(_reorder, self.layer_of_row), state, self.abstract)

    def _canonical(self, axes: Axes, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if "layers" not in axes:
            return leaf
        dim, size, sharding = axes.index("layers"), int(self.layer_of_row.max()) + 1, leaf.sharding
        assert isinstance(sharding, NamedSharding)
        shape = (*leaf.shape[:dim], size, *leaf.shape[dim + 1 :])
        ranks = sharding.mesh.shape["pipeline"]
        if size % ranks:
            # Spread over another dimension, so that no rank has it whole.
            spec = [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
            spec[dim] = None
            free = [
                d for d, e in enumerate(spec) if e is None and d != dim and not shape[d] % ranks
            ]
            if free:
                spec[free[0]] = "pipeline"
            sharding = sharding.update(spec=PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    def _map(self, function: Any, *trees: Tree) -> Tree:
        return jax.tree.map(function, self.axes, *trees, is_leaf=is_axes)


def _reorder(rows: np.ndarray, axes: Axes, array: jax.Array, wanted: jax.ShapeDtypeStruct) -> Any:
    """The rows of an array in another order, zeros where one is -1."""
    if "layers" not in axes:
        return array
    # Only what is in device memory can be computed with.
    array = jax.device_put(array, array.sharding.with_memory_kind("device"))
    sharding = wanted.sharding.with_memory_kind("device")
    taken = _take(array, tuple(rows.tolist()), axes.index("layers"), sharding)
    return jax.device_put(taken, wanted.sharding)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _take(array: jax.Array, rows: tuple[int, ...], dim: int, sharding: NamedSharding) -> jax.Array:
    index = np.array(rows)
    there = np.expand_dims(index >= 0, tuple(d for d in range(array.ndim) if d != dim))
    taken = jnp.where(there, jnp.take(array, np.maximum(index, 0), axis=dim), 0)
    return jax.lax.with_sharding_constraint(taken.astype(array.dtype), sharding)
