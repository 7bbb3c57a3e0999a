"""Sparse training by magnitude pruning (arXiv 1710.01878, 2309.08520), around a step's parts.

A pruned weight is a parameter of zero; no other mask is kept. Its gradient is left out before norms
and clipping, its moments are zero, and it stays zero. So evaluation, sampling and exports need
nothing, and a checkpoint has the form of a dense run's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxscale.config.optimizer import OptimizerConfig
from jaxscale.models.protocol import Rows
from jaxscale.sharding.resolve import leaf_name, owner_of
from jaxscale.training.pruning.masks import (
    KEY_BITS,
    all_but_lowest,
    largest_of_groups,
    live_weights,
    magnitude_keys,
)
from jaxscale.training.pruning.matrices import PrunedMatrix

Tree = Any


def prunes_at(config: OptimizerConfig, count: Any) -> jax.Array:
    """Whether the update with the number `count`, from 1, prunes."""
    done, steps = count - config.sparsity_begin, config.sparsity_steps or 1
    every = (done % config.sparsity_every == 0) | (done == steps)
    return every & (done > 0) & (done <= steps)


def num_pruned_at(config: OptimizerConfig, final: int, count: Any) -> jax.Array:
    """int32, the zeros of a matrix after the update with the number `count`, by the cubic schedule
    of arXiv 1710.01878; `final` of them at the end.

    Nothing is added before it is rounded, so that no fusion of operations changes the number.
    """
    steps = config.sparsity_steps or 1
    left = steps - jnp.clip(count - config.sparsity_begin, 0, steps)
    share = left.astype(jnp.float32) / steps
    dense = jnp.ceil(jnp.float32(final) * (share * share * share)).astype(jnp.int32)
    return jnp.where(left < steps, jnp.maximum(final - dense, 0), 0)


@dataclass(frozen=True)
class Pruning:
    """The pruning of a run, as wrappers of the step's parts; without matrices each wrapper returns
    its argument."""

    config: OptimizerConfig
    matrices: Mapping[str, PrunedMatrix]  # by the parameter's name
    layer_of_row: Rows  # for each stack of the model the layer in each row; -1 is none

    def gradients(self, gradients: Callable) -> Callable:
        """`gradients` without those of pruned weights."""
        if not self.matrices:
            return gradients

        def of_live(params: Tree, *arguments: Any) -> tuple:
            sums, grads, *others = gradients(params, *arguments)
            return sums, self._where_live(params, grads), *others

        return of_live

    def optimizer(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """`optimizer` with updates that prune, and moments of zero for pruned weights. Its state
        must have a count of updates."""
        if not self.matrices:
            return optimizer

        def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
            # Behind a barrier: XLA would compute the moments again after the counts, for which
            # gradients and old moments would stay live.
            after = optimizer.update(updates, state, params)
            updates, state = jax.lax.optimization_barrier(after)
            count = optax.tree.get_all_with_path(state, "count")[0][1]
            moved = self._where_live(params, optax.apply_updates(params, updates))
            kept = self._kept(moved, count)

            def one(name: str, update: jax.Array, param: jax.Array, new: jax.Array) -> jax.Array:
                live = kept[name] & (new != 0)
                return jnp.where(live, update, -param.astype(update.dtype))

            updates = self._map(one, updates, params, moved)
            pruned = optax.apply_updates(params, updates)
            return updates, self._pruned_moments(state, pruned)

        return optax.GradientTransformation(optimizer.init, update)

    def step(self, step: Callable) -> Callable:
        """`step` with the metric `sparsity`, of all pruned matrices and of each layer."""
        if not self.matrices:
            return step

        def measured(state: Any, batch: Any) -> tuple[Any, Any]:
            state, metrics = step(state, batch)
            share, by_layer = self._sparsity(state.params)
            others = {**metrics.others, "sparsity": share}
            by_layer = {**metrics.by_layer, **by_layer}
            return state, metrics._replace(others=others, by_layer=by_layer)

        return measured

    def _kept(self, params: Tree, count: jax.Array) -> dict[str, jax.Array]:
        """Masks of the weights that are not pruned at the update of this number, from 1."""
        config, found = self.config, self._of(params)
        keys, wanted = [], []
        for name, matrix in self.matrices.items():
            key = magnitude_keys(found[name])
            if config.kept_of:
                # Above all others until the pattern is reached.
                survive = largest_of_groups(key, matrix.group_dim, *config.kept_of)
                key |= survive.astype(jnp.uint32) << KEY_BITS
            keys.append(key)
            wanted.append(num_pruned_at(config, matrix.num_pruned, count))
        bits = KEY_BITS + (config.kept_of is not None)
        dims = [matrix.dims for matrix in self.matrices.values()]
        kept = all_but_lowest(keys, wanted, dims, prunes_at(config, count), bits)
        return dict(zip(self.matrices, kept))

    def _sparsity(self, params: Tree) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The share of zeros of all pruned matrices, and for those of layers that of each layer."""
        found = self._of(params)
        zeros, weights, by_layer = [], 0, {}
        for name, matrix in self.matrices.items():
            x, dim = found[name], matrix.layers_dim
            others = tuple(i for i in range(x.ndim) if i != dim)
            count = jnp.sum(x == 0, others, dtype=jnp.uint32, keepdims=dim is None)
            count = count.reshape(-1).astype(jnp.float32)
            stack = name.partition("/")[0]
            size = x.size // count.size
            if dim is not None and stack in self.layer_of_row:
                count = count[_row_of_layer(self.layer_of_row[stack])]
                by_layer.setdefault(stack, []).append((count, size))
            zeros.append(jnp.sum(count))
            weights += size * count.size
        shares = [sum(n for n, _ in each) / sum(s for _, s in each) for each in by_layer.values()]
        by_layer = {"sparsity": jnp.concatenate(shares)} if shares else {}
        return jnp.sum(jnp.stack(zeros)) / weights, by_layer

    def _where_live(self, params: Tree, tree: Tree) -> Tree:
        """A tree of the parameters' shapes, with zeros for pruned weights."""
        return self._map(self._live, params, tree, keep=1)

    def _live(self, name: str, param: jax.Array, x: jax.Array) -> jax.Array:
        live = live_weights(param, self.matrices[name].dims)
        return jnp.where(live, x, jnp.zeros((), x.dtype))

    def _pruned_moments(self, state: Any, params: Tree) -> Any:
        """The optimizer's state with zeros in the moments of pruned weights. Averages over rows and
        columns, as Adafactor's, have none of a weight."""
        found = dict(jax.tree_util.tree_leaves_with_path(params))

        def one(path: tuple, leaf: jax.Array) -> jax.Array:
            owner = owner_of(path, found)
            name = leaf_name(owner) if owner else ""
            if not owner or name not in self.matrices or leaf.shape != found[owner].shape:
                return leaf
            return self._live(name, found[owner], leaf)

        return jax.tree_util.tree_map_with_path(one, state)

    def _map(self, function: Callable, *trees: Tree, keep: int = 0) -> Tree:
        """Maps a function of a name and leaves over pruned matrices; of other parameters the leaf
        of the tree with the number `keep`."""

        def one(path: tuple, *leaves: Any) -> Any:
            name = leaf_name(path)
            return function(name, *leaves) if name in self.matrices else leaves[keep]

        return jax.tree_util.tree_map_with_path(one, *trees)

    def _of(self, params: Tree) -> dict[str, jax.Array]:
        """The pruned matrices of a tree, by name."""
        named = ((leaf_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(params))
        return {name: x for name, x in named if name in self.matrices}


def _row_of_layer(layer_of_row: np.ndarray) -> np.ndarray:
    rows = np.flatnonzero(layer_of_row >= 0)
    return rows[np.argsort(layer_of_row[rows])]
