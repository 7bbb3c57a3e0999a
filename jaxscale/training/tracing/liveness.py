"""Liveness analysis: peak memory of the values of a traced program."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Literal, jaxprs_in_params  # pyright: ignore[reportPrivateImportUsage]

VIEWS = ("reshape", "squeeze", "expand_dims", "convert_element_type", "stop_gradient", "copy")
"""Operations whose result is assumed to share the memory of their operand."""
FILLED = ("broadcast_in_dim", "iota")
"""Operations whose result is fused into its readers, and in memory only as the input of a loop."""


def peak_bytes(eqns: Sequence[Any], outputs: Sequence[Any], counts: Callable[[Any], bool]) -> float:
    """The most bytes that are live at once of results of equations, in their order; for a loop only
    its results.

    Args:
      counts: whether a shape is counted.
    """
    made, last = _lifetimes(eqns, outputs)
    change = [0.0] * (len(eqns) + 2)
    for v, index in made.items():
        if v in last and counts(v.aval):
            size = math.prod(v.aval.shape) * v.aval.dtype.itemsize
            change[index] += size
            change[last[v] + 1] -= size
    return max(itertools.accumulate(change, initial=0.0))


def _lifetimes(
    eqns: Sequence[Any], outputs: Sequence[Any]
) -> tuple[dict[Any, int], dict[Any, int]]:
    """The equation that makes each value, except views, and the last equation that reads it."""
    views: dict[Any, Any] = {}

    def read_from(atoms: Sequence[Any]) -> list[Any]:
        return [views.get(atom, atom) for atom in atoms if not isinstance(atom, Literal)]

    last, made = {}, {}
    filled: dict[Any, int] = {}
    for index, eqn in enumerate(eqns):
        read = read_from(eqn.invars)
        last |= dict.fromkeys(read, index)
        if any(True for _ in jaxprs_in_params(eqn.params)):
            made |= {v: filled[v] for v in read if v in filled}
        name, (first, *_) = eqn.primitive.name, eqn.outvars
        if name in VIEWS and read and first.aval.size == read[0].aval.size:
            views[first] = read[0]
        elif name in FILLED:
            filled[first] = index
        else:
            made |= dict.fromkeys(eqn.outvars, index)
    return made, last | dict.fromkeys(read_from(outputs), len(eqns))
