"""Matmuls of a traced layer, and the name by which remat policies save the result of each.

A result is recomputed for the backward pass if an operation reads it and the policy does not save
it. Operations that are linear in an operand do not read it for their gradient; others do.
"""

import collections
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params  # pyright: ignore[reportPrivateImportUsage]

from jaxscale.sharding.model_trace import REPEATED, UNREAD

RECORDED = "recorded/"
"""The prefix of the names of recording kernels' results."""

LINEAR = frozenset(
    (
        *("add", "add_any", "sub", "neg", "reduce_sum", "convert_element_type", "select_n"),
        *("reshape", "squeeze", "transpose", "rev", "broadcast_in_dim", "concatenate", "pad"),
        *("slice", "split", "dynamic_slice", "dynamic_update_slice", "sharding_constraint"),
        *("gather", "scatter-add", "cumsum"),
    )
)
LOOPS = ("scan", "while", "cond")

Readers = frozenset[str]
"""Readers of a value in a backward pass: the names by which policies save the value, "" for no
name, REPEATED for code that every policy recomputes."""


class PlainMatmul(NamedTuple):
    """A matmul that no kernel recorded."""

    rows: float
    inputs: int
    outputs: int
    groups: int  # of rows, each with a separate matrix; 0: one matrix
    saved_as: str  # as in `Matmul`


def plain_matmuls(jaxpr: Any) -> tuple[list[PlainMatmul], dict[str, str]]:
    """The matmuls of a trace, and name -> `Matmul.saved_as` of each recorded result."""
    found = _Found([], {})
    found.search(jaxpr, [True] * len(jaxpr.invars), [Readers()] * len(jaxpr.outvars), "")
    return found.matmuls[::-1], found.saved_as


class _Found(NamedTuple):
    """Findings in a trace, searched from its end to its start."""

    matmuls: list[PlainMatmul]
    saved_as: dict[str, str]

    def search(
        self, jaxpr: Any, inputs: Iterable[bool], outputs: Iterable[Readers], direct: str
    ) -> list[Readers]:
        """Adds the matmuls of a trace; returns the readers of its inputs.

        Args:
          inputs: whether each input may have a gradient.
          outputs: the readers of each output.
          direct: the name for an operation that reads its operands, "" or REPEATED.
        """
        varies, reads = _varying(jaxpr, inputs), collections.defaultdict[Any, Readers](Readers)

        def add(variables: Iterable[Any], readers: Iterable[Iterable[str]]) -> None:
            for one, names in zip(variables, readers):
                if not isinstance(one, Literal):
                    reads[one] |= {*names}

        add(jaxpr.outvars, outputs)
        for eqn in reversed(jaxpr.eqns):
            made, count = [reads[one] for one in eqn.outvars], len(eqn.invars)
            inside = [getattr(one, "jaxpr", one) for one in jaxprs_in_params(eqn.params)]
            if eqn.primitive.name == "name":
                add(eqn.invars, [self._named(eqn.params["name"], made[0], direct)])
            elif _is_linear(eqn, varies):
                add(eqn.invars, [Readers().union(*made)] * count)
            elif _is_call(eqn, inside):
                within = REPEATED if eqn.primitive.name == "remat2" else direct
                given = [_in(varies, one) for one in eqn.invars]
                read = self.search(inside[0], given, made, within)
                add(eqn.invars, [{direct if n == within else n for n in one} for one in read])
            else:
                add(eqn.invars, [{direct}] * count)
                self._add(eqn, inside, _saved_as(made[0]) if made else UNREAD, direct)
        return [reads[one] for one in jaxpr.invars]

    def _named(self, name: str, readers: Readers, direct: str) -> Readers:
        if name.startswith(RECORDED):
            self.saved_as[name] = _saved_as(readers)
        return Readers({direct or name}) if readers else readers

    def _add(self, eqn: Any, inside: Sequence[Any], saved_as: str, direct: str) -> None:
        """Adds the matmuls of one equation: bodies of scans times their length, bodies of other
        loops once, and of branches the one with the most FLOPs."""
        if eqn.primitive.name in ("dot_general", "ragged_dot_general"):
            self.matmuls.append(_plain_matmul(eqn, saved_as))
        bodies = [_Found([], self.saved_as) for _ in inside]
        for body, jaxpr in zip(bodies, inside):
            read = [Readers({direct})] * len(jaxpr.outvars)
            body.search(jaxpr, [True] * len(jaxpr.invars), read, direct)
        if eqn.primitive.name == "cond":
            bodies = [max(bodies, key=_size)]
        times = eqn.params.get("length", 1)
        self.matmuls.extend(
            one._replace(rows=times * one.rows) for body in bodies for one in body.matmuls
        )


def _varying(jaxpr: Any, inputs: Iterable[bool]) -> set[Any]:
    """The values of a trace that may have a gradient."""
    found = {one for one, varies in zip(jaxpr.invars, inputs) if varies and _is_float(one)}
    for eqn in jaxpr.eqns:
        if any(_in(found, one) for one in eqn.invars):
            found |= {one for one in eqn.outvars if _is_float(one)}
    return found


def _in(found: set[Any], variable: Any) -> bool:
    return not isinstance(variable, Literal) and variable in found


def _is_float(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.floating)


def _is_linear(eqn: Any, varies: set[Any]) -> bool:
    """Whether no operand's gradient needs the value of an operand."""
    vary = [_in(varies, one) for one in eqn.invars]
    factors = {"mul": sum(vary), "div": 2 * vary[-1]} if vary else {}
    return factors.get(eqn.primitive.name, 2) < 2 or eqn.primitive.name in LINEAR


def _is_call(eqn: Any, inside: Sequence[Any]) -> bool:
    """Whether an operation calls the jaxpr inside it once."""
    alone = len(inside) == 1 and eqn.primitive.name not in LOOPS
    return alone and len(inside[0].invars) == len(eqn.invars)


def _size(body: _Found) -> float:
    return sum(one.rows * one.inputs * one.outputs for one in body.matmuls)


def _saved_as(readers: Readers) -> str:
    if REPEATED in readers or not readers:
        return REPEATED if readers else UNREAD
    return next(iter(readers)) if len(readers) == 1 else ""


def _plain_matmul(eqn: Any, saved_as: str) -> PlainMatmul:
    left, right, made = (v.aval.shape for v in (*eqn.invars[:2], eqn.outvars[0]))
    if eqn.primitive.name == "ragged_dot_general":
        inputs, groups = left[-1], right[0]
    else:
        (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
        inputs = math.prod(left[dim] for dim in contracted)
        groups = right[0] if len(batch) == 1 and len(right) == 3 else 0
    rows = math.prod(left) // inputs
    return PlainMatmul(rows, inputs, math.prod(made) // rows, groups, saved_as)
