"""In-place residuals: a layer writes them directly into the arrays of all layers.

Written at the end of a layer, each residual would be copied from the array that its consumers read.
With matmuls left to cuBLAS, XLA for GPUs makes a matmul write its result into a slice of a larger
array, and read operands from a slice, if the slice's index is the loop counter and nothing else
reads the result (otherwise it multiplies twice). Later operations of the layer therefore read each
residual from the slice, behind a barrier that hides from XLA that the value was just written.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var, jaxpr_as_fun

from jaxscale.ops.array_stack import at, put

Tree = Any
Index = int | jax.Array

CHECKPOINTS = ("remat2", "checkpoint")
"""Names of the primitive of `jax.checkpoint` in different versions of JAX."""


def save_in_place(
    function: Callable[[Tree], tuple[Tree, list[jax.Array]]],
    x: Tree,
    saved: Sequence[jax.Array],
    index: Index,
) -> tuple[Tree, list[jax.Array]]:
    """Runs `function(x) -> (y, residuals)` of one layer and micro-batch, residuals in place.

    Args:
      saved: for each residual an array [layers, 1, ...].
      index: of the layer; a loop counter.

    Returns:
      y, and `saved` with the residuals written.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(x)
    y_tree, num_outputs = jax.tree.structure(shapes[0]), len(jax.tree.leaves(shapes[0]))
    outputs = closed.jaxpr.outvars
    same = dict(_same_values(closed.jaxpr))
    place = {}  # value -> index among the residuals
    for number, residual in enumerate(outputs[num_outputs:]):
        if isinstance(residual, Var):
            place.setdefault(same.get(residual, residual), number)
    values = dict(zip(closed.jaxpr.constvars, closed.consts))
    values |= dict(zip(closed.jaxpr.invars, jax.tree.leaves(x)))
    saved, written = list(saved), set()

    def read(atom: Var | Literal) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation, results in _equations(closed.jaxpr):
        for result, value in zip(results, _evaluate(closed, equation, results, read)):
            number = place.get(result)
            if number is not None:
                saved[number] = put(saved[number], value, index, 0)
                value = at(jax.lax.optimization_barrier(saved[number]), index, 0)
                written.add(number)
            values[result] = value
    for number, residual in enumerate(outputs[num_outputs:]):
        if number not in written:
            saved[number] = put(saved[number], read(residual), index, 0)
    return jax.tree.unflatten(y_tree, map(read, outputs[:num_outputs])), saved


def _equations(jaxpr: Jaxpr) -> Iterator[tuple[Any, list[Var]]]:
    """Equations with the results of each that are read."""
    wanted = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    needed = []
    for equation in reversed(jaxpr.eqns):
        needed.append([result for result in equation.outvars if result in wanted])
        wanted |= {atom for atom in equation.invars if isinstance(atom, Var)}
    return zip(jaxpr.eqns, reversed(needed))


def _evaluate(
    closed: Any, equation: Any, results: list[Var], read: Callable[[Any], Any]
) -> list[Any]:
    """Evaluates one equation of a closed jaxpr as a separate jaxpr, which keeps named scopes."""
    given = list(dict.fromkeys(atom for atom in equation.invars if isinstance(atom, Var)))
    alone = closed.jaxpr.replace(
        constvars=(),
        invars=given,
        outvars=results,
        eqns=[equation],
        effects=equation.effects,
        debug_info=closed.jaxpr.debug_info.with_unknown_names(),
    )
    return jaxpr_as_fun(closed.replace(jaxpr=alone, consts=[]))(*map(read, given))


def _same_values(jaxpr: Jaxpr) -> Iterator[tuple[Var, Var]]:
    """Results equal to an earlier value: (result, value)."""
    same: dict[Var, Var] = {}
    for equation in jaxpr.eqns:
        for result, source in _passed_through(equation):
            if isinstance(source, Var):
                same[result] = same.get(source, source)
    return iter(same.items())


def _passed_through(equation: Any) -> Iterator[tuple[Var, Any]]:
    """Results of an equation equal to one of its operands: (result, operand)."""
    name, params = equation.primitive.name, equation.params
    if name == "name" or (name == "reduce_precision" and _keeps_precision(equation)):
        yield equation.outvars[0], equation.invars[0]
    if name in CHECKPOINTS:
        inner = params["jaxpr"]
        same = dict(_same_values(inner))
        operands = dict(zip(inner.invars, equation.invars))
        for result, value in zip(equation.outvars, inner.outvars):
            if isinstance(value, Var) and same.get(value, value) in operands:
                yield result, operands[same.get(value, value)]


def _keeps_precision(equation: Any) -> bool:
    """Whether a `reduce_precision` keeps the operand's type, as checkpoint policies add to saved
    values."""
    info = jnp.finfo(equation.invars[0].aval.dtype)
    bits = equation.params["exponent_bits"], equation.params["mantissa_bits"]
    return bits == (info.nexp, info.nmant)
