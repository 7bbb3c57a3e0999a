"""Bytes of a layer's gathered weights and reduced gradients on one device."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxscale.sharding.resolve import is_axes, weight_dtype
from jaxscale.sharding.rules import Axes, Rules, mesh_axes
from jaxscale.sharding.zero import Zero

Tree = Any


class LayerBytes(NamedTuple):
    """Bytes of all arrays of one layer."""

    gathered: int  # weights gathered over fsdp, expert and context, in the compute type
    reduced: int  # reduced gradients: whole arrays, or shards from ZeRO stage 1 on


def largest_layer(zero: Zero, params: Tree) -> LayerBytes:
    """The largest `LayerBytes` of any stack's layer, each with all of its `Stack.model_layers`.

    Args:
      params: shapes of the parameters, in canonical form.
    """

    def elements(axes: Axes, leaf: Any, rules: Rules) -> int:
        over = mesh_axes(axes, rules, zero.sizes)
        ranks = (zero.sizes[axis] for entry in over[1:] for axis in entry)
        return math.prod(leaf.shape[1:]) // math.prod(ranks)

    def gathered(axes: Axes, leaf: Any) -> int:
        whole = elements(axes, leaf, zero.replicated_rules)
        if not zero.gathers or whole == elements(axes, leaf, zero.state_rules):
            return 0
        return weight_dtype(axes, leaf.dtype, zero.compute_dtype).itemsize * whole

    def reduced(axes: Axes, leaf: Any) -> int:
        return zero.sent_dtype.itemsize * elements(axes, leaf, zero.state_rules)

    def most(num_bytes: Callable[[Axes, Any], int]) -> int:
        stacks = (name for name in params if name not in ("embed", "head"))
        trees = (
            jax.tree.map(num_bytes, zero.axes[name], params[name], is_leaf=is_axes)
            for name in stacks
        )
        return max(sum(jax.tree.leaves(tree)) for tree in trees)

    return LayerBytes(most(gathered), most(reduced))
