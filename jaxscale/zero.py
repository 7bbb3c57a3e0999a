"""The ZeRO stages (arXiv 1910.02054): what each rank of the fsdp axis holds, and the collectives
that follow. For use in a `shard_map` in which pipeline, data and fsdp are manual.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.layout import AUTOMATIC_AXES
from jaxscale.sharding import (
    REPLICATED_WEIGHTS,
    WEIGHTS,
    Axes,
    Rules,
    automatic_part,
    constrain,
    is_axes,
    resolve,
)

Tree = Any


@dataclass(frozen=True)
class Zero:
    """A stage on a mesh.

    A parameter is sharded along its "embed" dimension. One that has none stays whole on every
    rank, and its gradient is summed over the axis; those are small vectors.
    """

    stage: int
    sizes: Mapping[str, int]  # of the mesh axes
    axes: Tree  # the parameters' tree of logical axes
    compute_dtype: jnp.dtype
    accumulation_dtype: jnp.dtype

    @property
    def param_rules(self) -> Rules:
        """Of parameters at rest."""
        return WEIGHTS if self.stage >= 3 else REPLICATED_WEIGHTS

    @property
    def update_rules(self) -> Rules:
        """Of what an optimizer sees: gradients as a step leaves them, moments, and the parameters
        while they are updated."""
        return WEIGHTS if self.stage >= 1 else REPLICATED_WEIGHTS

    @property
    def layer_axes(self) -> Tree:
        """The axes of one layer, a slice of the stack."""
        return jax.tree.map(lambda axes: axes[1:], self.axes["layers"], is_leaf=is_axes)

    @property
    def gathers(self) -> bool:
        """Whether weights must be gathered before they are used."""
        return self.stage == 3 and self.sizes["fsdp"] > 1

    def gather(self, shards: Tree, axes: Tree) -> Tree:
        """Weights as the model uses them: in the compute type, whole over fsdp."""

        def one(axes, shard):
            weight = shard.astype(self.compute_dtype)
            if not self.gathers or "embed" not in axes:
                return weight
            return jax.lax.all_gather(weight, "fsdp", axis=axes.index("embed"), tiled=True)

        return self._collectively(one, axes, shards)

    def scatter(self, grads: Tree, axes: Tree) -> Tree:
        """Gradients of one visit: from stage 2 on, summed over fsdp into shards."""

        def one(axes, grad):
            grad = grad.astype(self.accumulation_dtype)
            return self._reduce_scatter(grad, axes) if self.stage >= 2 else grad

        return self._collectively(one, axes, grads)

    def finish(self, grads: Tree) -> Tree:
        """The sums over replicas that are left at the end of a step."""

        def one(axes, grad):
            if self.stage == 1:
                grad = self._reduce_scatter(grad, axes)
            scattered = self.stage >= 1 and "embed" in axes
            return self._sum(grad, ("data",) if scattered else ("data", "fsdp"))

        return self._collectively(one, self.axes, grads)

    def zeros(self, params: Tree) -> Tree:
        """Accumulators of gradients: whole for stages 0 and 1, shards for 2 and 3."""

        def one(axes, param):
            shape = list(param.shape)
            if self.stage == 2 and "embed" in axes:
                shape[axes.index("embed")] //= self.sizes["fsdp"]
            # Without the constraint the compiler would keep them whole on every rank of tensor.
            return constrain(jnp.zeros(shape, self.accumulation_dtype), axes, self.sizes, WEIGHTS)

        return jax.tree.map(one, self.axes, params, is_leaf=is_axes)

    def running_sum(self, weights: Tree, microbatches: jax.Array) -> Tree | None:
        """Where to sum the gradients of whole weights over micro-batches that walk together,
        [G, ...]; None for a single one, whose gradients need no summing before they are scattered.
        """
        if microbatches.shape[0] == 1:
            return None
        return jax.tree.map(lambda x: jnp.zeros(x.shape, self.accumulation_dtype), weights)

    def total(self, values: Tree) -> Tree:
        """Scalars, summed over every replica."""
        return jax.tree.map(lambda value: self._sum(value, ("data", "fsdp")), values)

    def _sum(self, x: jax.Array, mesh_axes: tuple[str, ...]) -> jax.Array:
        mesh_axes = tuple(axis for axis in mesh_axes if self.sizes[axis] > 1)
        return jax.lax.psum(x, mesh_axes) if mesh_axes else x

    def _reduce_scatter(self, grad: jax.Array, axes: Axes) -> jax.Array:
        if self.sizes["fsdp"] == 1 or "embed" not in axes:
            return grad
        dim = axes.index("embed")
        return jax.lax.psum_scatter(grad, "fsdp", scatter_dimension=dim, tiled=True)

    def _collectively(self, one: Callable, axes: Tree, tree: Tree) -> Tree:
        """Maps `one(axes, array)` over a tree with every mesh axis manual.

        XLA's partitioner would first make an operand whole over the axes that are still automatic
        before a gather or a scatter over ours.
        """

        def local(tree):
            return jax.tree.map(one, axes, tree, is_leaf=is_axes)

        if all(self.sizes[axis] == 1 for axis in AUTOMATIC_AXES):
            return local(tree)
        specs = jax.tree.map(
            lambda axes: automatic_part(resolve(axes, WEIGHTS, self.sizes)), axes, is_leaf=is_axes
        )
        return jax.shard_map(
            local, in_specs=(specs,), out_specs=specs, axis_names=set(AUTOMATIC_AXES),
            check_vma=False,
        )(tree)  # fmt: skip
