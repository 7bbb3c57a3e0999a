"""The matrices that a run prunes, by rule and by `optimizer.groups`."""

import math
from dataclasses import dataclass
from typing import Any

import jax

from jaxscale.config.optimizer import (
    STACKS,
    OptimizerConfig,
    find_group,
    matrix_dims,
    prunes_by_rule,
)
from jaxscale.sharding.resolve import is_axes, leaf_name

LARGEST = 2**31
"""Weights of a matrix are counted in 32 bits."""


@dataclass(frozen=True)
class PrunedMatrix:
    """A parameter that is pruned: a matrix, or a stack of matrices, each with as many zeros."""

    dims: tuple[int, ...]  # of one matrix
    size: int  # weights of one matrix
    num_pruned: int  # of them, at the end
    count: int  # matrices in the stack
    layers_dim: int | None  # the dimension of layers, if it has one
    group_dim: int  # the last contracted dimension, in which groups of a pattern N:M lie


def pruned_matrices(
    config: OptimizerConfig, axes: Any, shapes: Any, frozen: Any
) -> dict[str, PrunedMatrix]:
    """The parameters that a run prunes, by name; {} if it is dense.

    A group's `sparsity` counts for the matrices that match it. Without one, the matrices of the
    layers get `config.sparsity`; routers, adapters, embeddings, heads and frozen parameters stay
    dense.

    Args:
      axes, shapes, frozen: trees of the parameters, with logical axes, shapes, and whether each is
        frozen.

    Raises:
      ValueError: nothing would be pruned, or a group sets the sparsity of a parameter that cannot
        be.
    """
    if not config.prunes:
        return {}
    flat = jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_axes)[0]
    leaves = zip(flat, jax.tree.leaves(shapes), jax.tree.leaves(frozen), strict=True)
    found = {}
    for (path, names), leaf, fixed in leaves:
        name = leaf_name(path)
        own = find_group(name, config.groups).sparsity
        share = config.sparsity * prunes_by_rule(names) if own is None else own
        if own and (fixed or matrix_dims(names) is None):
            why = "the model freezes it" if fixed else "it is a vector"
            raise ValueError(
                f"optimizer.groups: sparsity = {own} for {name}, and {why}; write a pattern that "
                "matches matrices only"
            )
        if share and not fixed:
            sides = matrix_dims(names)
            assert sides, "a rule or a check above chose a matrix"
            found[name] = _matrix(name, names, leaf.shape, share, *sides)
    if not found:
        raise ValueError(
            f"optimizer.sparsity = {config.sparsity} prunes nothing: no matrix of the layers is "
            "trained; set it to 0, or train them"
        )
    return found


def check_pattern_shards(
    config: OptimizerConfig, matrices: dict[str, PrunedMatrix], params: Any
) -> None:
    """Refuses groups of a pattern N:M that would straddle shards.

    Args:
      params: shapes and shardings.

    Raises:
      ValueError: with the sizes.
    """
    if not config.kept_of:
        return
    group = config.kept_of[1]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        matrix = matrices.get(leaf_name(path))
        if matrix is None:
            continue
        size = leaf.sharding.shard_shape(leaf.shape)[matrix.group_dim]
        if size % group:
            raise ValueError(
                f"optimizer.sparsity_pattern = {config.sparsity_pattern!r}: a shard of "
                f"{leaf_name(path)} has {size} of its {leaf.shape[matrix.group_dim]} inputs, which "
                f"does not divide into groups of {group}; change the pattern, or the model's size, "
                "or shard it over fewer devices"
            )


def check_counts_updates(optimizer: Any, params: Any) -> None:
    """Refuses a custom optimizer whose state does not count updates.

    Args:
      params: the parameters' shapes.

    Raises:
      ValueError: with the change to make.
    """
    state = jax.eval_shape(optimizer.init, params)
    paths = jax.tree_util.tree_leaves_with_path(state)
    if not any(getattr(path[-1], "name", "") == "count" for path, _ in paths if path):
        raise ValueError(
            "optimizer.sparsity needs the number of updates, and the state of optimizer= has no "
            "field 'count'; chain optax.scale_by_schedule(lambda count: 1.0) to it"
        )


def _matrix(
    name: str,
    names: tuple[str, ...],
    shape: tuple[int, ...],
    share: float,
    rows: tuple[int, ...],
    columns: tuple[int, ...],
) -> PrunedMatrix:
    dims = tuple(i for i, axis in enumerate(names) if axis not in STACKS)
    size = math.prod(shape[i] for i in dims)
    if size >= LARGEST:
        raise ValueError(
            f"optimizer.sparsity: {name} has {size:,} weights, and pruning counts up to "
            f"{LARGEST - 1:,} of a matrix; leave it dense by an entry of optimizer.groups with "
            "sparsity = 0"
        )
    layers = names.index("layers") if "layers" in names else None
    # The layers' matrices are stored with their inputs first; a table's or head's side of "embed"
    # is the contracted one.
    inputs = rows if layers is not None or names[columns[-1]] != "embed" else columns
    return PrunedMatrix(
        dims=dims,
        size=size,
        num_pruned=min(round(share * size), size - 1),
        count=math.prod(shape) // size,
        layers_dim=layers,
        group_dim=inputs[-1],
    )
