"""VJP split into two functions: forward, and backward with weights gathered again.

Reverse-mode differentiation of a scan saves each layer's weights among its residuals. A step that
gathers weights layer by layer must not save them: here the residuals exclude the arrays that the
caller passes to the backward pass again.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Tree = Any


def split_vjp(
    function: Callable[[Tree, Tree, Tree, Tree], tuple[Tree, Tree]],
) -> tuple[Callable[..., tuple[Tree, Tree, list]], Callable[..., tuple[Tree, Tree, Tree]]]:
    """Forward and backward pass of `function(weights, x, shared, context) -> (y, sums)` as two
    functions; the sums have no gradient.

    Returns:
      `forward(weights, x, shared, context) -> (y, sums, residuals)`, with the list of arrays that
      the backward pass needs in addition to weights, shared, context and constants; and
      `backward(weights, shared, context, residuals, dy) -> (dweights, dx, dshared)`. Trace forward
      before backward.
    """
    structure: list[tuple[Any, list[int | None], list[np.ndarray]]] = []

    def forward(weights: Tree, x: Tree, shared: Tree, context: Tree) -> tuple[Tree, Tree, list]:
        y, pullback, sums = jax.vjp(
            lambda weights, x, shared: function(weights, x, shared, context),
            weights,
            x,
            shared,
            has_aux=True,
        )
        # The pullback is a pytree of residuals. Identity, and no comparison of values, tells which
        # of its leaves are the caller's arrays.
        leaves, treedef = jax.tree.flatten(pullback)
        # NumPy arrays are constants of the function, such as RoPE's frequencies. If saved for each
        # layer, they would hide from XLA that values computed from them and the context are the
        # same in all layers.
        constants = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
        given = [*jax.tree.leaves((weights, shared, context)), *constants]
        origin = [next((i for i, g in enumerate(given) if g is leaf), None) for leaf in leaves]
        assert not structure or structure[0][1] == origin, "traces of one layer differ in residuals"
        structure[:] = [(treedef, origin, constants)]
        return y, sums, [leaf for leaf, place in zip(leaves, origin) if place is None]

    def backward(
        weights: Tree, shared: Tree, context: Tree, residuals: list, dy: Tree
    ) -> tuple[Tree, Tree, Tree]:
        treedef, origin, constants = structure[0]
        given, rest = [*jax.tree.leaves((weights, shared, context)), *constants], iter(residuals)
        leaves = [next(rest) if place is None else given[place] for place in origin]
        return jax.tree.unflatten(treedef, leaves)(dy)

    return forward, backward
