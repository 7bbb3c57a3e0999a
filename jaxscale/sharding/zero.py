"""ZeRO stages (arXiv 1910.02054): sharding of parameters, gradients and optimizer state over fsdp,
expert and context, and the collectives that follow.

For use in a `shard_map` in which pipeline, data, fsdp and expert are manual.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxscale.config import zero_stage
from jaxscale.config.layout import MANUAL_AXES, TENSOR_ROWS
from jaxscale.sharding import blocks
from jaxscale.sharding.blocks import ArrayLayout, blocks_over, map_manually, sharded_dim
from jaxscale.sharding.host_memory import from_host
from jaxscale.sharding.resolve import (
    automatic_part,
    constrain,
    constrain_to,
    is_axes,
    resolve,
    weight_dtype,
)
from jaxscale.sharding.rules import (
    ACTIVATIONS,
    REPLICATED_WEIGHTS,
    WEIGHTS,
    Axes,
    Rules,
    mesh_axes,
)

Tree = Any


@dataclass(frozen=True)
class Zero:
    """A ZeRO stage on a mesh.

    A parameter is sharded along its "embed" dimension, over fsdp, expert and context: ranks of
    context use the same weights for other tokens of the same sequences. A parameter without this
    dimension, a small vector, is replicated and its gradient all-reduced. With a pipeline,
    parameters outside the layers are sharded over its ranks, too, in every stage: "outer_embed".

    The ranks of expert divide the batch, and each has some of the experts. Experts are sharded by
    their number over expert in every stage, and along "embed" over the other axes; their gradients
    are summed over those only.

    With rows of tensor or ranks of context, arrays inside the `shard_map` have the blocked layout
    of `sharding.blocks`.

    From stage 1 on parameters at rest are sharded as the optimizer's state is: they are the float32
    weights of the paper's mixed precision. Stages 1 and 2 gather each layer once a step, in the
    compute type, in the first forward pass, and keep it; stage 3 gathers it for each pass.

    A step computes a layer's gradients in one visit per accumulation group. Stages 2 and 3
    reduce-scatter the gradients of every visit. Other reductions are in the last visit, where they
    overlap the next layer's compute.
    """

    stage: int
    sizes: Mapping[str, int]  # of the mesh axes
    axes: Tree  # the parameters' tree of logical axes
    compute_dtype: jnp.dtype
    accumulation_dtype: jnp.dtype
    # Of weights, a custom model's axes included.
    rules: Rules = field(default_factory=lambda: WEIGHTS)
    # Whether a reduce-scattered matrix has the ranks as a separate dimension. Without it XLA for
    # TPUs with sparse cores (libtpu 0.0.51, v5p and v6e) emits an all-reduce, of twice the bytes,
    # where the other dimension in tiles of 128 does not divide by the sides of the torus, as 11,008
    # on 4 x 4 x 4. Other TPUs (v4, v5e) do not support that reduce-scatter: there it would be an
    # all-reduce with a second buffer, 0.4 GB for Llama 3.2 1B on v5e.
    ranks_as_dimension: bool = False
    waits_for_gathers: bool = False  # whether the compiler overlaps few of them
    reduction_dtype: jnp.dtype | None = None  # None is the accumulation type
    has_gathered: bool = False  # whether the input weights are gathered and kept
    frozen: Tree = None  # tree of bools: whether each parameter is frozen; None is no parameter

    @property
    def replicated_rules(self) -> Rules:
        """The rules of gathered weights and of trees replicated over fsdp, expert and context."""
        return {**self.rules, **REPLICATED_WEIGHTS}

    @property
    def state_rules(self) -> Rules:
        """The rules of parameters at rest, optimizer state and reduced gradients."""
        return self.rules if zero_stage.shards_state(self.stage) else self.replicated_rules

    def accumulator_rules(self, *, single_visit: bool) -> Rules:
        """The rules of gradient accumulators.

        Args:
          single_visit: whether a step computes the gradients of each layer once.
        """
        return self.state_rules if self.scatters or single_visit else self.replicated_rules

    def layer_axes(self, stack: str) -> Tree:
        """The axes of one layer of a stack."""
        return jax.tree.map(lambda axes: axes[1:], self.axes[stack], is_leaf=is_axes)

    @property
    def loss_dtype(self) -> jnp.dtype:
        """The type of sums over tokens."""
        return jnp.promote_types(self.compute_dtype, jnp.float32)

    @property
    def one(self) -> jax.Array:
        """The gradient of the loss with respect to itself."""
        return jnp.ones((), self.loss_dtype)

    @property
    def gathers(self) -> bool:
        """Whether weights are gathered before use."""
        several = self._scattering_ranks * self.sizes["context"] > 1
        return zero_stage.shards_state(self.stage) and several and not self.has_gathered

    @property
    def keeps(self) -> bool:
        """Whether gathered weights are kept for the rest of a step (stages 1 and 2)."""
        return self.gathers and zero_stage.keeps(self.stage)

    @property
    def kept(self) -> "Zero":
        """The stage after weights were gathered, if it keeps them."""
        return replace(self, has_gathered=self.has_gathered or self.keeps)

    @property
    def scatters(self) -> bool:
        """Whether every visit reduce-scatters gradients (stages 2 and 3)."""
        return zero_stage.scatters(self.stage)

    @property
    def reduces(self) -> bool:
        """Whether every visit has reductions of gradients over several ranks."""
        return self.scatters and self._scattering_ranks > 1

    @property
    def scatters_last(self) -> bool:
        """Whether only the last visit reduce-scatters gradients (stage 1)."""
        return zero_stage.scatters_last(self.stage) and self._scattering_ranks > 1

    @property
    def reduces_over_replicas_at_end(self) -> bool:
        """Whether the last visit reduces gradients over replicas, of more than small vectors."""
        return zero_stage.remains(self.stage, self._scattering_ranks, self.sizes["data"])

    @property
    def _scattering_ranks(self) -> int:
        """Ranks of reduce-scatters of gradients without experts."""
        return self.sizes["fsdp"] * self.sizes["expert"]

    def trained(self, grads: Tree, frozen: Tree) -> list[Any]:
        """The gradients of parameters that are not frozen.

        Args:
          grads: of some of the parameters.
          frozen: the same part of `self.frozen`, or None.
        """
        leaves = jax.tree.leaves(grads)
        if frozen is None:
            return leaves
        pairs = zip(leaves, jax.tree.leaves(frozen), strict=True)
        return [x for x, is_frozen in pairs if not is_frozen]

    def barrier(self, grads: Tree, frozen: Tree, others: Tree) -> tuple[Tree, Tree]:
        """`optimization_barrier` of trained gradients and other arrays."""
        # Without frozen gradients: XLA removes unused arrays and their computation, but not if a
        # barrier reads them.
        trained, others = jax.lax.optimization_barrier((self.trained(grads, frozen), others))
        if frozen is None:
            return jax.tree.unflatten(jax.tree.structure(grads), trained), others
        rest = iter(trained)
        return jax.tree.map(lambda x, skip: x if skip else next(rest), grads, frozen), others

    def split_blocks(self, params: Tree) -> Tree:
        """Converts parameters to their layout inside the `shard_map`."""
        return blocks.split_blocks(params, self.axes, self.state_rules, self.sizes)

    def join_blocks(self, grads: Tree) -> Tree:
        """Converts gradients from their layout inside the `shard_map`."""
        return blocks.join_blocks(grads, self.axes, self.state_rules, self.sizes)

    def blocked_spec(self, axes: Axes, rules: Rules) -> PartitionSpec:
        """The spec of an array inside the `shard_map`, over all axes."""
        return blocks.blocked_spec(axes, rules, self.sizes)

    def gather(self, shards: Tree, axes: Tree) -> Tree:
        """All-gathers weights over fsdp, expert and context, in the compute type."""
        if self.has_gathered:
            return shards

        def one(axes, shard):
            weight = from_host(shard)
            weight = weight.astype(weight_dtype(axes, shard.dtype, self.compute_dtype))
            dim = sharded_dim(axes)
            columns = "loss_vocab" in axes
            left = (TENSOR_ROWS, "context") if columns else (TENSOR_ROWS,)
            if dim is None:
                return weight
            over = tuple(axis for axis in self._axes_of(axes)[dim] if axis not in left)
            weight = jax.lax.all_gather(weight, over, axis=dim, tiled=True) if over else weight
            if not columns:
                return weight
            split = axes.index("loss_vocab")
            return jax.lax.all_to_all(weight, "context", split, dim, tiled=True)

        given = ArrayLayout(self.state_rules, blocked=True)
        return self._manually(one, axes, shards, given, ArrayLayout(self.replicated_rules))

    def divide_columns(self, axes: Tree, head: Tree) -> Tree:
        """The axes with which `gather` gives each rank of context its columns of the head, all of
        their features; the loss divides the columns so (`ops.loss_over_vocabulary`)."""
        context = self.sizes["context"]
        if not self.gathers or context == 1:
            return axes

        def one(axes, x):
            if "vocab" not in axes or sharded_dim(axes) is None:
                return axes
            columns = x.shape[-1 if axes[-1] == "vocab" else 0]
            if columns % (self.sizes["tensor"] * context):
                return axes
            return tuple("loss_vocab" if name == "vocab" else name for name in axes)

        return jax.tree.map(one, axes, head, is_leaf=is_axes)

    def gather_part(self, shards: Tree, part: str) -> Tree:
        """`gather` of the parameters outside the layers, or of one layer of a stack."""
        return self.gather(shards, self.axes[part] if part == "embed" else self.layer_axes(part))

    def widen(self, weights: Tree) -> Tree:
        """Casts weights to the type of sums over tokens, so that their gradients, which have the
        type of the weights, are not rounded to the compute type."""
        return jax.tree.map(lambda weight: weight.astype(self.loss_dtype), weights)

    def reduce(self, grads: Tree, axes: Tree) -> Tree:
        """Reduces the gradients of one visit: a reduce-scatter from stage 2 on."""

        def one(axes, grad):
            grad = grad.astype(self.accumulation_dtype)
            return self._reduce_scatter(grad, axes) if self.scatters else grad

        # With this argument layout the partitioner reduce-scatters over context: each of its ranks
        # gets the sum of its features only.
        given = ArrayLayout(self.state_rules)
        return self._manually(one, axes, grads, given, given._replace(blocked=True))

    def finish(self, grads: Tree, axes: Tree) -> Tree:
        """The remaining reductions, of the sum of all visits."""

        def one(axes, grad):
            if self.scatters_last and "outer_embed" in axes:
                # One collective over both axes, as in the gather. With one per axis XLA for TPUs
                # lays the parts of a few ranks along 128 lanes and needs memory for 128 parts.
                over = ("pipeline", *self._scatter_axes(axes))
                grad = self._scattered(grad, over, axes.index("outer_embed"))
                return self._sum_replicas(grad, axes)
            if zero_stage.scatters_last(self.stage):
                grad = self._reduce_scatter(grad, axes)
            if "layers" not in axes:
                grad = self._reduce_over_pipeline(grad, axes)
            return self._sum_replicas(grad, axes)

        form = ArrayLayout(self.state_rules, blocked=True)
        return self._manually(one, axes, grads, form, form)

    def zeros(self, params: Tree, axes: Tree, *, finished: bool = False) -> Tree:
        """Gradient accumulators: shards if every visit reduce-scatters, else whole.

        Args:
          params: at rest.
          finished: whether the zeros have the layout after all reductions.
        """
        is_blocked = blocks_over(self.state_rules, self.sizes) is not None

        def one(axes, param):
            shape, dim = list(param.shape), sharded_dim(axes)
            if dim is not None and not finished:
                over = self._scatter_axes(axes) if self.scatters_last else ()
                over += ("pipeline",) * ("outer_embed" in axes)
                shape[dim + is_blocked] *= math.prod(self.sizes[axis] for axis in over)
            return self._accumulator(shape, self.blocked_spec(axes, self.state_rules))

        return jax.tree.map(one, axes, params, is_leaf=is_axes)

    def empty_weights(self, weights: Tree, axes: Tree) -> Tree:
        """Zeros for gathered weights of these shapes and types."""
        rules = self.replicated_rules
        return jax.tree.map(
            lambda axes, x: constrain(jnp.zeros(x.shape, x.dtype), axes, self.sizes, rules),
            axes,
            weights,
            is_leaf=is_axes,
        )

    def running_sum(self, weights: Tree, axes: Tree, microbatches: Tree) -> Tree | None:
        """Accumulators for gradients of gathered weights over an accumulation group, [G, ...]; None
        for a single micro-batch, whose gradients are reduced directly."""
        single = jax.tree.leaves(microbatches)[0].shape[0] == 1
        return None if single else self.accumulators(weights, axes)

    def accumulators(self, weights: Tree, axes: Tree) -> Tree:
        """Zeros for the gradients of gathered weights."""
        return jax.tree.map(
            lambda axes, x: self._accumulator(x.shape, resolve(axes, self.state_rules, self.sizes)),
            axes,
            weights,
            is_leaf=is_axes,
        )

    def total(self, values: Tree) -> Tree:
        """Sums scalars over all manual axes."""
        over = self._present(MANUAL_AXES)
        return jax.tree.map(lambda value: jax.lax.psum(value, over) if over else value, values)

    def _accumulator(self, shape: Sequence[int], spec: PartitionSpec) -> jax.Array:
        # Without the constraint the partitioner replicates zeros over tensor.
        return constrain_to(jnp.zeros(shape, self.accumulation_dtype), automatic_part(spec))

    def _sum_replicas(self, grad: jax.Array, axes: Axes) -> jax.Array:
        """All-reduce over the axes that no reduce-scatter has summed over."""
        sharded = {axis for over in self._axes_of(axes) for axis in over}
        summed = (axis for axis in ACTIVATIONS["batch"] if axis not in sharded)
        return self._sum(grad, tuple(summed))

    def _axes_of(self, axes: Axes) -> list[tuple[str, ...]]:
        """The mesh axes of each dimension of a parameter at rest."""
        return mesh_axes(axes, self.state_rules, self.sizes)

    def _scatter_axes(self, axes: Axes) -> tuple[str, ...]:
        """The mesh axes of the reduce-scatter of a gradient; the partitioner's, over context, and
        the pipeline's are separate."""
        dim = sharded_dim(axes)
        over = () if dim is None else self._axes_of(axes)[dim]
        return tuple(axis for axis in over if axis in ACTIVATIONS["batch"])

    def _sum(self, grad: jax.Array, mesh_axes: tuple[str, ...]) -> jax.Array:
        over = self._present(mesh_axes)
        return self._reduced(lambda grad: jax.lax.psum(grad, over), grad) if over else grad

    def _present(self, mesh_axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in mesh_axes if self.sizes[axis] > 1)

    def _scattered(self, grad: jax.Array, over: tuple[str, ...], dim: int) -> jax.Array:
        def scatter(grad: jax.Array) -> jax.Array:
            return jax.lax.psum_scatter(grad, over, scatter_dimension=dim, tiled=True)

        return self._reduced(scatter, grad)

    @property
    def sent_dtype(self) -> jnp.dtype:
        """The type in which gradients are reduced over ranks."""
        given = self.reduction_dtype
        return self.accumulation_dtype if given is None else given

    def _reduced(self, collective: Callable, grad: jax.Array) -> jax.Array:
        """Applies a reduction in `sent_dtype`."""
        grad = grad.astype(self.sent_dtype)
        return collective(grad).astype(self.accumulation_dtype)

    def _reduce_scatter(self, grad: jax.Array, axes: Axes) -> jax.Array:
        dim, over = sharded_dim(axes), self._scatter_axes(axes)
        if dim is None or not over:
            return grad
        if "outer_embed" not in axes:
            return self._scatter_sum(grad, over, dim)
        # Each rank takes its part of every pipeline rank's part. The order changes before, not in
        # the collective: of an embedding's [vocabulary, pipeline, features] XLA for TPUs makes
        # [features, vocabulary, pipeline] and pads the last dimension to 128 (libtpu 0.0.52; 125
        # GiB for Llama 3 8B with pipeline 2 x fsdp 2).
        ranks = math.prod(self.sizes[axis] for axis in over)
        before, after = grad.shape[:dim], grad.shape[dim + 1 :]
        parts = grad.reshape(*before, self.sizes["pipeline"], ranks, -1, *after)
        parts = jnp.swapaxes(parts, dim, dim + 1)
        return self._scatter_sum(parts.reshape(grad.shape), over, dim)

    def _scatter_sum(self, grad: jax.Array, over: tuple[str, ...], dim: int) -> jax.Array:
        # Matrices only: of larger arrays XLA for TPUs lays the ranks inside another dimension.
        if not self.ranks_as_dimension or grad.ndim != 2:
            return self._scattered(grad, over, dim)
        parts = jnp.moveaxis(grad, dim, 0)
        ranks = math.prod(self.sizes[axis] for axis in over)
        parts = parts.reshape(ranks, -1, *parts.shape[1:])
        parts = self._reduced(lambda parts: jax.lax.psum_scatter(parts, over), parts)
        return jnp.moveaxis(parts, 0, dim)

    def _reduce_over_pipeline(self, grad: jax.Array, axes: Axes) -> jax.Array:
        if "outer_embed" not in axes:
            return self._sum(grad, ("pipeline",))
        return self._scattered(grad, ("pipeline",), axes.index("outer_embed"))

    def _manually(
        self, one: Callable, axes: Tree, tree: Tree, given: ArrayLayout, returned: ArrayLayout
    ) -> Tree:
        """`blocks.map_manually`."""
        # XLA for CPUs aborts at a 16-bit all-reduce while an axis is automatic (`map_manually`).
        narrow = self.sent_dtype.itemsize < 4
        return map_manually(one, axes, tree, given, returned, self.sizes, always=narrow)
