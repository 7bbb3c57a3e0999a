"""The ZeRO stages (arXiv 1910.02054): what each rank of the fsdp axis holds, and the collectives
that follow. For use in a `shard_map` in which pipeline, data, fsdp and expert are manual.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxscale.config import zero_stage
from jaxscale.config.layout import MANUAL_AXES
from jaxscale.sharding import blocks
from jaxscale.sharding.blocks import Form, blocks_over, map_manually, sharded_dim
from jaxscale.sharding.resolve import (
    automatic_part,
    constrain,
    constrain_to,
    is_axes,
    resolve,
    weight_dtype,
)
from jaxscale.sharding.rules import REPLICATED_WEIGHTS, WEIGHTS, Axes, Rules

Tree = Any


@dataclass(frozen=True)
class Zero:
    """A stage on a mesh.

    A parameter is sharded along its "embed" dimension, over fsdp and context: the ranks of context
    use the same weights, for other tokens of the same sequences. One that has none stays whole on
    every rank, and its gradient is summed over the axes; those are small vectors. With a pipeline,
    the parameters outside the layers are sharded over its ranks too, whatever the stage:
    "outer_embed".

    The ranks of expert share the batch, and each has experts of its own: their gradients are summed
    over the other axes only, those of all other parameters over this one too.

    Where tensor has rows, or there are ranks of context, arrays inside the `shard_map` have the
    sharded dimension apart (`blocks`).

    From stage 1 on the parameters at rest are shards, as the optimizer's state is: they are the
    float32 weights of the paper's mixed precision. Stages 1 and 2 gather each layer once a step, in
    the compute type, in the first forward pass, and keep it; stage 3 gathers it for each pass.

    A step computes a layer's gradients in one visit for each accumulation group. Stages 2 and 3
    reduce-scatter those of every visit. The reductions that remain are the last visit's, so that
    they overlap the next layer's compute.
    """

    stage: int
    sizes: Mapping[str, int]  # of the mesh axes
    axes: Tree  # the parameters' tree of logical axes
    compute_dtype: jnp.dtype
    accumulation_dtype: jnp.dtype
    # Of weights, with a model's own logical axes.
    rules: Rules = field(default_factory=lambda: WEIGHTS)
    # Of a matrix that is reduce-scattered the ranks are a dimension of their own. XLA for TPUs with
    # sparse cores otherwise makes an all-reduce, of twice the bytes, where the other dimension in
    # tiles of 128 does not divide by the sides of the torus, as 11,008 on 4 x 4 x 4. Other TPUs
    # have no such reduce-scatter, and would need a second buffer for the all-reduce.
    ranks_apart: bool = False
    waits_for_gathers: bool = False  # whether the compiler overlaps few of them
    reduction_dtype: jnp.dtype | None = None  # None is the accumulation type
    has_gathered: bool = False  # whether the weights that it is given were gathered, and kept
    frozen: Tree = None  # the parameters' tree with whether each is; None: none is

    @property
    def replicated_rules(self) -> Rules:
        """The rules of a tree that is replicated over fsdp and context, and of weights in use."""
        return {**self.rules, **REPLICATED_WEIGHTS}

    @property
    def state_rules(self) -> Rules:
        """The rules of parameters at rest, of the optimizer's state, and of a step's reduced
        gradients."""
        return self.rules if zero_stage.shards_state(self.stage) else self.replicated_rules

    def accumulator_rules(self, *, single_visit: bool) -> Rules:
        """The rules of gradients while they are summed.

        Args:
          single_visit: whether a step computes the gradients of each layer once.
        """
        return self.state_rules if self.scatters or single_visit else self.replicated_rules

    def layer_axes(self, stack: str) -> Tree:
        """The axes of one layer, a slice of a stack."""
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
        """Whether weights must be gathered before they are used."""
        several = max(self.sizes["fsdp"], self.sizes["context"]) > 1
        return zero_stage.shards_state(self.stage) and several and not self.has_gathered

    @property
    def keeps(self) -> bool:
        """Whether weights are kept for the rest of a step when they have been gathered."""
        return self.gathers and zero_stage.keeps(self.stage)

    @property
    def kept(self) -> "Zero":
        """The stage as it is once the weights were gathered and kept, if it keeps them."""
        return replace(self, has_gathered=self.has_gathered or self.keeps)

    @property
    def scatters(self) -> bool:
        """Whether every visit leaves shards of gradients."""
        return zero_stage.scatters(self.stage)

    @property
    def reduces(self) -> bool:
        """Whether the gradients of every visit are reduced."""
        return self.scatters and self.sizes["fsdp"] > 1

    @property
    def scatters_last(self) -> bool:
        """Whether gradients are whole until the last visit leaves shards."""
        return zero_stage.scatters_last(self.stage) and self.sizes["fsdp"] > 1

    @property
    def remains(self) -> bool:
        """Whether more than vectors remains to be reduced over replicas by the last visit."""
        replicas = self.sizes["data"] * self.sizes["expert"]
        return zero_stage.remains(self.stage, self.sizes["fsdp"], replicas)

    def trained(self, grads: Tree, frozen: Tree) -> list[Any]:
        """The gradients that a step reads. Others are dropped by the compiler, with what computes
        them, unless a barrier holds them.

        Args:
          grads: of some of the parameters.
          frozen: of the same; None where `frozen` is.
        """
        leaves = jax.tree.leaves(grads)
        if frozen is None:
            return leaves
        return [x for x, still in zip(leaves, jax.tree.leaves(frozen), strict=True) if not still]

    def hold(self, grads: Tree, frozen: Tree, others: Tree) -> tuple[Tree, Tree]:
        """`optimization_barrier` of gradients, as in `trained`, and others."""
        trained, others = jax.lax.optimization_barrier((self.trained(grads, frozen), others))
        if frozen is None:
            return jax.tree.unflatten(jax.tree.structure(grads), trained), others
        held = iter(trained)
        return jax.tree.map(lambda x, still: x if still else next(held), grads, frozen), others

    def split_blocks(self, params: Tree) -> Tree:
        """Parameters as they are inside the `shard_map`."""
        return blocks.split_blocks(params, self.axes, self.state_rules, self.sizes)

    def join_blocks(self, grads: Tree) -> Tree:
        """Gradients from inside the `shard_map` as they are outside."""
        return blocks.join_blocks(grads, self.axes, self.state_rules, self.sizes)

    def apart_spec(self, axes: Axes, rules: Rules) -> PartitionSpec:
        """The spec of an array inside the `shard_map`, over all axes."""
        return blocks.apart_spec(axes, rules, self.sizes)

    def gather(self, shards: Tree, axes: Tree) -> Tree:
        """Weights as the model uses them: in the compute type, gathered over fsdp and context."""
        if self.has_gathered:
            return shards

        def one(axes, shard):
            weight = shard.astype(weight_dtype(axes, self.compute_dtype))
            dim = sharded_dim(axes)
            over = [
                *("context",) * (self.gathers and self.sizes["context"] > 1),
                *("pipeline",) * ("outer_embed" in axes),
                *("fsdp",) * (self.gathers and self.sizes["fsdp"] > 1),
            ]
            if dim is None or not over:
                return weight
            return jax.lax.all_gather(weight, tuple(over), axis=dim, tiled=True)

        given = Form(self.state_rules, apart=True)
        return self._manually(one, axes, shards, given, Form(self.replicated_rules))

    def gather_part(self, shards: Tree, part: str) -> Tree:
        """`gather` of the parameters outside the layers, or of one layer of a stack."""
        return self.gather(shards, self.axes[part] if part == "embed" else self.layer_axes(part))

    def widen(self, weights: Tree) -> Tree:
        """The same weights in the type of sums over tokens, for gradients that are such sums: a
        gradient has the type of its argument, so these are not rounded to the compute type."""
        return jax.tree.map(lambda weight: weight.astype(self.loss_dtype), weights)

    def reduce(self, grads: Tree, axes: Tree) -> Tree:
        """Reduces the gradients of one visit: to shards from stage 2 on."""

        def one(axes, grad):
            grad = grad.astype(self.accumulation_dtype)
            return self._reduce_scatter(grad, axes) if self.scatters else grad

        # Given so that each rank of context is given the sum of its features alone.
        given = Form(self.state_rules)
        return self._manually(one, axes, grads, given, given._replace(apart=True))

    def finish(self, grads: Tree, axes: Tree) -> Tree:
        """The reductions over replicas that remain for the sum of all visits."""

        def one(axes, grad):
            if self.scatters_last and "outer_embed" in axes:
                # In one collective, as it was gathered. One axis after the other, a TPU would lay
                # the parts of a few ranks along 128 lanes, and need the memory of 128 parts.
                grad = self._scattered(grad, ("pipeline", "fsdp"), axes.index("outer_embed"))
                return self._sum_replicas(grad, axes)
            if zero_stage.scatters_last(self.stage):
                grad = self._reduce_scatter(grad, axes)
            if "layers" not in axes:
                grad = self._reduce_over_pipeline(grad, axes)
            return self._sum_replicas(grad, axes)

        form = Form(self.state_rules, apart=True)
        return self._manually(one, axes, grads, form, form)

    def zeros(self, params: Tree, axes: Tree, *, finished: bool = False) -> Tree:
        """Accumulators of gradients: shards where visits leave shards, else whole.

        Args:
          params: at rest.
          finished: zeros as the gradients are when no reduction remains.
        """
        is_apart = blocks_over(self.state_rules, self.sizes) is not None
        more = {"embed": 1, "outer_embed": 1}
        if not finished:
            whole = self.sizes["fsdp"] if self.scatters_last else 1
            more = {"embed": whole, "outer_embed": whole * self.sizes["pipeline"]}

        def one(axes, param):
            shape, dim = list(param.shape), sharded_dim(axes)
            if dim is not None:
                shape[dim + is_apart] *= more[axes[dim]]
            return self._accumulator(shape, self.apart_spec(axes, self.state_rules))

        return jax.tree.map(one, axes, params, is_leaf=is_axes)

    def room(self, weights: Tree, axes: Tree) -> Tree:
        """Arrays for gathered weights, of these shapes and types."""
        rules = self.replicated_rules
        return jax.tree.map(
            lambda axes, x: constrain(jnp.zeros(x.shape, x.dtype), axes, self.sizes, rules),
            axes,
            weights,
            is_leaf=is_axes,
        )

    def running_sum(self, weights: Tree, axes: Tree, microbatches: Tree) -> Tree | None:
        """Accumulators for the gradients of whole weights over an accumulation group, [G, ...];
        None for a single micro-batch, whose gradients need no summing before they are reduced.
        """
        single = jax.tree.leaves(microbatches)[0].shape[0] == 1
        return None if single else self.accumulators(weights, axes)

    def accumulators(self, weights: Tree, axes: Tree) -> Tree:
        """Zeros for the gradients of whole weights."""
        return jax.tree.map(
            lambda axes, x: self._accumulator(x.shape, resolve(axes, self.state_rules, self.sizes)),
            axes,
            weights,
            is_leaf=is_axes,
        )

    def total(self, values: Tree) -> Tree:
        """Scalars, summed over every replica, and over the pipeline."""
        over = self._present(MANUAL_AXES)
        return jax.tree.map(lambda value: jax.lax.psum(value, over) if over else value, values)

    def _accumulator(self, shape: Sequence[int], spec: PartitionSpec) -> jax.Array:
        # Without the constraint the compiler would replicate it over the ranks of tensor.
        return constrain_to(jnp.zeros(shape, self.accumulation_dtype), automatic_part(spec))

    def _sum_replicas(self, grad: jax.Array, axes: Axes) -> jax.Array:
        """The sum over the axes that no reduce-scatter has summed over."""
        summed = ["data"]
        if not zero_stage.shards_state(self.stage) or sharded_dim(axes) is None:
            summed.append("fsdp")
        if "experts" not in axes:
            summed.append("expert")
        return self._sum(grad, tuple(summed))

    def _sum(self, grad: jax.Array, mesh_axes: tuple[str, ...]) -> jax.Array:
        over = self._present(mesh_axes)
        return self._reduced(lambda grad: jax.lax.psum(grad, over), grad) if over else grad

    def _present(self, mesh_axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in mesh_axes if self.sizes[axis] > 1)

    def _scattered(self, grad: jax.Array, over: str | tuple[str, ...], dim: int) -> jax.Array:
        def scatter(grad: jax.Array) -> jax.Array:
            return jax.lax.psum_scatter(grad, over, scatter_dimension=dim, tiled=True)

        return self._reduced(scatter, grad)

    @property
    def sent_dtype(self) -> jnp.dtype:
        """The type of gradients in reductions over ranks."""
        given = self.reduction_dtype
        return self.accumulation_dtype if given is None else given

    def _reduced(self, collective: Callable, grad: jax.Array) -> jax.Array:
        """A sum over ranks, in the type for that."""
        grad = grad.astype(self.sent_dtype)
        return collective(grad).astype(self.accumulation_dtype)

    def _reduce_scatter(self, grad: jax.Array, axes: Axes) -> jax.Array:
        dim = sharded_dim(axes)
        if self.sizes["fsdp"] == 1 or dim is None:
            return grad
        if "outer_embed" not in axes:
            return self._scatter_sum(grad, dim)
        # Each rank of fsdp takes its part of every pipeline rank's part.
        before, after = grad.shape[:dim], grad.shape[dim + 1 :]
        parts = grad.reshape(*before, self.sizes["pipeline"], -1, *after)
        parts = self._scatter_sum(parts, dim + 1)
        return parts.reshape(*before, -1, *after)

    def _scatter_sum(self, grad: jax.Array, dim: int) -> jax.Array:
        # In arrays of more dimensions XLA would lay the ranks inside another one.
        if not self.ranks_apart or grad.ndim != 2:
            return self._scattered(grad, "fsdp", dim)
        parts = jnp.moveaxis(grad, dim, 0)
        parts = parts.reshape(self.sizes["fsdp"], -1, *parts.shape[1:])
        parts = self._reduced(lambda parts: jax.lax.psum_scatter(parts, "fsdp"), parts)
        return jnp.moveaxis(parts, 0, dim)

    def _reduce_over_pipeline(self, grad: jax.Array, axes: Axes) -> jax.Array:
        if "outer_embed" not in axes:
            return self._sum(grad, ("pipeline",))
        return self._scattered(grad, "pipeline", axes.index("outer_embed"))

    def _manually(self, one: Callable, axes: Tree, tree: Tree, given: Form, returned: Form) -> Tree:
        """`blocks.map_manually`."""
        narrow = self.sent_dtype.itemsize < 4
        return map_manually(one, axes, tree, given, returned, self.sizes, always=narrow)
