"""A VJP as two functions: forward now, backward once the weights are gathered again.

Reverse-mode differentiation of a scan would save each layer's weights among its residuals. A step
that gathers weights layer by layer must not: here the residuals exclude the arrays that the caller
passes to the backward pass again.
"""

from collections.abc import Callable
from typing import Any

import jax

Tree = Any


def split_vjp(
    function: Callable[[Tree, jax.Array, Tree], jax.Array],
) -> tuple[Callable[..., tuple[jax.Array, list]], Callable[..., tuple[Tree, jax.Array]]]:
    """The forward and the backward pass of `function(weights, x, context) -> y`, as two functions.

    Returns:
      `forward(weights, x, context) -> (y, residuals)`, where `residuals` lists the arrays that
      the backward pass needs besides the weights and the context; and
      `backward(weights, context, residuals, dy) -> (dweights, dx)`. Trace forward before backward.
    """
    structure: list[tuple[Any, list[int | None]]] = []

    def forward(weights: Tree, x: jax.Array, context: Tree) -> tuple[jax.Array, list]:
        y, pullback = jax.vjp(lambda weights, x: function(weights, x, context), weights, x)
        # What vjp returns is a pytree of residuals; those that are the caller's own arrays are
        # recognised by identity, which no transformation of values could do as safely.
        leaves, treedef = jax.tree.flatten(pullback)
        given = jax.tree.leaves((weights, context))
        origin = [next((i for i, g in enumerate(given) if g is leaf), None) for leaf in leaves]
        structure[:] = [(treedef, origin)]
        return y, [leaf for leaf, place in zip(leaves, origin) if place is None]

    def backward(
        weights: Tree, context: Tree, residuals: list, dy: jax.Array
    ) -> tuple[Tree, jax.Array]:
        treedef, origin = structure[0]
        given, rest = jax.tree.leaves((weights, context)), iter(residuals)
        leaves = [next(rest) if place is None else given[place] for place in origin]
        return jax.tree.unflatten(treedef, leaves)(dy)

    return forward, backward
