"""Groups of consecutive layers that share one layer's weights (M6-10T, arXiv 2110.03888).

The parameters of a stack then have a row for each group.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.models.protocol import Model, Params, Rows, Stack


def share_layers(stack: Stack, group: int) -> Stack:
    """The stack with one layer for each group of layers, which applies the block to each of them.

    A remat policy holds for each application. Segments of sequences are not supported: the stack
    has no `memory`.

    Args:
      group: layers of the model that share weights, a multiple of `stack.model_layers` and of the
        model's layers in a period of the stack.
    """
    if group == 1:
        return stack
    repeats = group // stack.model_layers
    return dataclasses.replace(
        stack,
        num_layers=stack.num_layers // repeats,
        repeats=repeats,
        period=1,
        model_layers=group,
        memory=dict,
    )


def first_layers(stack: Stack, rows: Rows | None) -> np.ndarray | None:
    """The row of the stack's parameters as `Model.init` takes it for the unshared stack: the first
    layer of each group, whose key the group's weights are drawn from.

    Args:
      stack: from `share_layers`.
      rows: of `Model.init`.
    """
    groups = np.arange(stack.num_layers) if rows is None else rows[stack.name]
    if stack.repeats == 1:
        return None if rows is None else groups
    return np.where(groups >= 0, groups * stack.repeats, -1)


def unshared_params(model: Model, params: Params) -> Params:
    """The parameters of the equivalent model in which no layers share weights, in canonical form.

    Args:
      model: with shared layers.
    """

    def of_each_layer(stack: Stack) -> Params:
        return jax.tree.map(lambda x: jnp.repeat(x, stack.repeats, axis=0), params[stack.name])

    return {**params, **{stack.name: of_each_layer(stack) for stack in model.stacks}}
