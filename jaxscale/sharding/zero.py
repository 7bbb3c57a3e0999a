"""The ZeRO stages (arXiv 1910.02054): what each rank of the fsdp axis holds, and the collectives
that follow. For use in a `shard_map` in which pipeline, data, fsdp and expert are manual.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxscale.layout import AUTOMATIC_AXES, MANUAL_AXES
from jaxscale.sharding.resolve import (
    REPLICATED_WEIGHTS,
    WEIGHTS,
    Axes,
    Rules,
    automatic_axes,
    automatic_part,
    constrain,
    constrain_to,
    is_axes,
    resolve,
    weight_dtype,
)
from jaxscale.sharding.specs import mesh_axes_of

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

    Where tensor has rows, each uses a block of consecutive features of every weight. Such blocks,
    and those of context, are of the whole array, and fsdp divides each. As both axes are automatic,
    an array inside the `shard_map` has this dimension `apart`, as [blocks, features of a block]:
    the part over the manual axes alone would be of other features. There are rows or ranks of
    context, never both.

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
    reduction_dtype: jnp.dtype | None = None  # None is the accumulation type
    has_gathered: bool = False  # whether the weights that it is given were gathered, and kept

    @property
    def replicated_rules(self) -> Rules:
        """Of a tree that is replicated over fsdp and context, and of weights in use."""
        return {**self.rules, **REPLICATED_WEIGHTS}

    @property
    def state_rules(self) -> Rules:
        """Of parameters at rest, of the optimizer's state, and of the reduced gradients of a
        step."""
        return self.rules if self.stage >= 1 else self.replicated_rules

    def accumulator_rules(self, *, single_visit: bool) -> Rules:
        """Of gradients while they are summed, in a step that computes each layer's once, or more
        often."""
        return self.state_rules if self.scatters or single_visit else self.replicated_rules

    def layer_axes(self, stack: str) -> Tree:
        """The axes of one layer, a slice of a stack."""
        return jax.tree.map(lambda axes: axes[1:], self.axes[stack], is_leaf=is_axes)

    @property
    def loss_dtype(self) -> jnp.dtype:
        """Of sums over tokens."""
        return jnp.promote_types(self.compute_dtype, jnp.float32)

    @property
    def one(self) -> jax.Array:
        """The gradient of the loss with respect to itself."""
        return jnp.ones((), self.loss_dtype)

    @property
    def gathers(self) -> bool:
        """Whether weights must be gathered before they are used."""
        several = max(self.sizes["fsdp"], self.sizes["context"]) > 1
        return self.stage >= 1 and several and not self.has_gathered

    @property
    def keeps(self) -> bool:
        """Whether weights are kept for the rest of a step when they have been gathered."""
        return self.gathers and self.stage < 3

    @property
    def kept(self) -> "Zero":
        """The same for weights that were gathered and kept."""
        return replace(self, has_gathered=self.has_gathered or self.keeps)

    @property
    def scatters(self) -> bool:
        """Whether every visit leaves shards of gradients."""
        return self.stage >= 2

    @property
    def reduces(self) -> bool:
        """Whether the gradients of every visit are reduced."""
        return self.scatters and self.sizes["fsdp"] > 1

    @property
    def scatters_last(self) -> bool:
        """Whether gradients are whole until the last visit leaves shards."""
        return self.stage == 1 and self.sizes["fsdp"] > 1

    @property
    def remains(self) -> bool:
        """Whether more than vectors remains to be reduced over replicas by the last visit."""
        replicas = max(self.sizes["data"], self.sizes["expert"])
        return replicas > 1 or (self.stage < 2 and self.sizes["fsdp"] > 1)

    def _blocks_over(self, rules: Rules) -> str | None:
        """The automatic axis that has a block of an array each."""
        sharded = (axis for axis in rules["embed"] if axis in AUTOMATIC_AXES)
        return next((axis for axis in sharded if self.sizes.get(axis, 1) > 1), None)

    def apart(self, params: Tree) -> Tree:
        """Parameters as they are inside the `shard_map`."""
        axis = self._blocks_over(self.state_rules)

        def reshaped(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
            return *shape[:dim], self.sizes[axis or ""], -1, *shape[dim + 1 :]

        return _reshaped(self.axes, params, reshaped) if axis else params

    def together(self, grads: Tree) -> Tree:
        """Gradients from inside the `shard_map` as they are outside."""

        def reshaped(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
            return *shape[:dim], -1, *shape[dim + 2 :]

        return (
            _reshaped(self.axes, grads, reshaped) if self._blocks_over(self.state_rules) else grads
        )

    def apart_spec(self, axes: Axes, rules: Rules) -> PartitionSpec:
        """The spec of an array inside the `shard_map`, over all axes."""
        spec, dim = resolve(axes, rules, self.sizes), _sharded_dim(axes)
        block = self._blocks_over(rules)
        if block is None or dim is None:
            return spec
        entry = tuple(axis for axis in mesh_axes_of(spec[dim]) if axis != block)
        return PartitionSpec(*spec[:dim], block, entry or None, *spec[dim + 1 :])

    def gather(self, shards: Tree, axes: Tree) -> Tree:
        """Weights as the model uses them: in the compute type, gathered over fsdp and context."""
        if self.has_gathered:
            return shards

        def one(axes, shard):
            weight = shard.astype(weight_dtype(axes, self.compute_dtype))
            dim = _sharded_dim(axes)
            over = [
                *("context",) * (self.gathers and self.sizes["context"] > 1),
                *("pipeline",) * ("outer_embed" in axes),
                *("fsdp",) * (self.gathers and self.sizes["fsdp"] > 1),
            ]
            if dim is None or not over:
                return weight
            return jax.lax.all_gather(weight, tuple(over), axis=dim, tiled=True)

        given = _Form(self.state_rules, apart=True)
        return self._collectively(one, axes, shards, given, _Form(self.replicated_rules))

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
        given = _Form(self.state_rules)
        return self._collectively(one, axes, grads, given, given._replace(apart=True))

    def finish(self, grads: Tree, axes: Tree) -> Tree:
        """The reductions over replicas that remain for the sum of all visits."""

        def one(axes, grad):
            if self.stage == 1 and "outer_embed" in axes and self.sizes["fsdp"] > 1:
                # In one collective, as it was gathered. One axis after the other, a TPU would lay
                # the parts of a few ranks along 128 lanes, and need the memory of 128 parts.
                grad = self._scattered(grad, ("pipeline", "fsdp"), axes.index("outer_embed"))
                return self._sum_replicas(grad, axes)
            if self.stage == 1:
                grad = self._reduce_scatter(grad, axes)
            if "layers" not in axes:
                grad = self._reduce_over_pipeline(grad, axes)
            return self._sum_replicas(grad, axes)

        form = _Form(self.state_rules, apart=True)
        return self._collectively(one, axes, grads, form, form)

    def zeros(self, params: Tree, axes: Tree, *, finished: bool = False) -> Tree:
        """Accumulators of gradients: shards where visits leave shards, else whole.

        Args:
          params: at rest.
          finished: zeros as the gradients are when no reduction remains.
        """
        more = {"embed": 1, "outer_embed": 1}
        if not finished:
            whole = self.sizes["fsdp"] if self.stage == 1 else 1
            more = {"embed": whole, "outer_embed": whole * self.sizes["pipeline"]}

        def one(axes, param):
            shape, dim = list(param.shape), _sharded_dim(axes)
            if dim is not None:
                shape[dim + (self._blocks_over(self.state_rules) is not None)] *= more[axes[dim]]
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
        if self.stage == 0 or _sharded_dim(axes) is None:
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
    def _sent_dtype(self) -> jnp.dtype:
        given = self.reduction_dtype
        return self.accumulation_dtype if given is None else given

    def _reduced(self, collective: Callable, grad: jax.Array) -> jax.Array:
        """A sum over ranks, in the type for that."""
        grad = grad.astype(self._sent_dtype)
        return collective(grad).astype(self.accumulation_dtype)

    def _reduce_scatter(self, grad: jax.Array, axes: Axes) -> jax.Array:
        dim = _sharded_dim(axes)
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

    def _collectively(
        self, one: Callable, axes: Tree, tree: Tree, given: "_Form", returned: "_Form"
    ) -> Tree:
        """Maps `one(axes, array)` over a tree with every mesh axis manual.

        Otherwise XLA's partitioner would first replicate an operand over the axes that are still
        automatic, before a gather or a scatter over the manual ones; and XLA for CPUs ends the
        process over a sum in 16 bits where an axis is automatic, even one of a single rank.
        """
        apart = [form.apart and self._blocks_over(form.rules) for form in (given, returned)]

        def each(axes, x):
            dim = _sharded_dim(axes)
            if dim is None:
                return one(axes, x)
            # Each rank has one block.
            x = one(axes, jnp.squeeze(x, dim) if apart[0] else x)
            return jnp.expand_dims(x, dim) if apart[1] else x

        def local(tree):
            return jax.tree.map(each, axes, tree, is_leaf=is_axes)

        manual = automatic_axes(self.sizes)
        narrow = self._sent_dtype.itemsize < 4
        if not narrow and all(self.sizes[axis] == 1 for axis in manual):
            return local(tree)
        specs = [
            jax.tree.map(
                lambda axes, form=form: automatic_part(self._spec(axes, form)),
                axes,
                is_leaf=is_axes,
            )
            for form in (given, returned)
        ]
        return jax.shard_map(
            local,
            in_specs=(specs[0],),
            out_specs=specs[1],
            axis_names=set(manual),
            check_vma=False,
        )(tree)

    def _spec(self, axes: Axes, form: "_Form") -> PartitionSpec:
        if form.apart:
            return self.apart_spec(axes, form.rules)
        return resolve(axes, form.rules, self.sizes)


class _Form(NamedTuple):
    """How an array is laid out over the automatic axes."""

    rules: Rules
    apart: bool = False


def _reshaped(axes_tree: Tree, tree: Tree, shape_of: Callable) -> Tree:
    """Arrays with the sharded dimension as `shape_of(shape, dim)` has it."""

    def one(axes, x):
        dim = _sharded_dim(axes)
        return x if dim is None else x.reshape(shape_of(x.shape, dim))

    return jax.tree.map(one, axes_tree, tree, is_leaf=is_axes)


def _sharded_dim(axes: Axes) -> int | None:
    """The dimension that is sharded over fsdp, if the stage shards it."""
    return next((dim for dim, name in enumerate(axes) if name in ("embed", "outer_embed")), None)
