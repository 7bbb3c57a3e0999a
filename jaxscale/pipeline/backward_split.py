"""Splits a block's backward pass for zero-bubble pipelines: B is the gradient of the input, W the
gradient of the weights (arXiv 2401.10241).

Models need no changes: the split is made in the jaxpr of a traced layer. B has the equations that
the input's gradient needs, W the rest. Values that B computes and W reads are saved in between.

F saves residuals in two parts: one last read by B, one that W reads, too. Weights are never
saved, since the backward pass has them, nor are values that do not depend on the input, nor what
the layer leaves to later segments (`Stack.memory`), which waits in a separate buffer.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    jaxpr_as_fun,
    jaxprs_in_params,
)
from jax.interpreters import partial_eval

from jaxscale.ops.split_vjp import split_vjp

Tree = Any
Shapes = list[jax.ShapeDtypeStruct]

CALLS = ("jit", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call")
"""Primitives of calls, which are inlined."""

MATMUL_PRIMITIVES = ("dot_general", "ragged_dot_general", "conv_general_dilated", "scatter-add")
"""Primitives that belong to W and are not recomputed; so do equations with a jaxpr, such as
loops."""


@dataclass(frozen=True)
class Split:
    """The operations of a layer, `function(weights, x, shared, context) -> ((y, loss), sums)`, with
    y shaped as x (see `models.protocol.layer_function`).

    - `forward(weights, x, shared, context) -> ((y, loss), sums, residuals_b, residuals_w)`
    - `input_gradient(weights, shared, context, residuals_b, residuals_w, dy, memory={})
      -> (dx, dshared, saved)`: B; `memory` are the entries of x that are memory, as the last
      segment left them
    - `weight_gradient(shared, context, residuals_w, saved) -> dweights`: W

    `residuals_b`, `residuals_w` and `saved` are lists of arrays, of the shapes given here;
    `names_b` and `names_w` are the checkpoint names of the residuals, "" without one.
    """

    forward: Callable[..., tuple[Tree, Tree, list, list]]
    input_gradient: Callable[..., tuple[Tree, Tree, list]]
    weight_gradient: Callable[..., Tree]
    residuals_b: Shapes
    residuals_w: Shapes
    saved: Shapes
    names_b: tuple[str, ...] = ()
    names_w: tuple[str, ...] = ()


def split(
    function: Callable,
    weights: Tree,
    x: Tree,
    shared: Tree,
    context: Tree,
    memory: Collection[str] = (),
) -> Split:
    """Traces a layer for these argument shapes and splits its backward pass.

    Args:
      memory: the names of x's entries that are the stack's memory.
    """
    forward, kept, names, backward = _passes(function, weights, x, shared, context, memory)
    again = {name: x[name] for name in memory}
    program = TracedFunction.of(backward, weights, shared, context, again, kept, x)
    weights_in, shared_in, context_in, memory_in, kept_in, dy = program.inputs
    dweights = program.outputs[: len(weights_in)]
    gradients = program.outputs[len(weights_in) :]  # of x and of shared arrays
    b_wanted, w_eqns = _divide(program, dweights, gradients)
    w_reads = _given(w_eqns, dweights)
    b_eqns = program.needed(b_wanted)
    made = [*dy, *(v for eqn in b_eqns for v in eqn.outvars)]
    saved = [v for v in made if v in w_reads]
    b_reads = _given(b_eqns, b_wanted)
    to_w = [i for i, v in enumerate(kept_in) if v in w_reads]
    to_b = [i for i, v in enumerate(kept_in) if v in b_reads and i not in to_w]
    structures = [jax.tree.structure(tree) for tree in (weights, (x, shared))]

    def split_forward(weights: Tree, x: Tree, shared: Tree, context: Tree) -> tuple:
        y, sums, kept = forward(weights, x, shared, context)
        return y, sums, [kept[i] for i in to_b], [kept[i] for i in to_w]

    def input_gradient(
        weights: Tree,
        shared: Tree,
        context: Tree,
        residuals_b: list,
        residuals_w: list,
        dy_: Tree,
        memory_: Mapping[str, jax.Array] = MappingProxyType({}),
    ) -> tuple[Tree, Tree, list]:
        kept_vars = [kept_in[i] for i in (*to_b, *to_w)]
        given = [weights_in, shared_in, context_in, memory_in, kept_vars, dy]
        values = [weights, shared, context, dict(memory_), [*residuals_b, *residuals_w], dy_]
        found = program.run(b_eqns, given, values, [*gradients, *saved])
        dx, dshared = jax.tree.unflatten(structures[1], found[: len(gradients)])
        return dx, dshared, found[len(gradients) :]

    def weight_gradient(shared: Tree, context: Tree, residuals_w: list, saved_: list) -> Tree:
        given = [shared_in, context_in, [kept_in[i] for i in to_w], saved]
        leaves = program.run(w_eqns, given, [shared, context, residuals_w, saved_], dweights)
        return jax.tree.unflatten(structures[0], leaves)

    return Split(
        split_forward,
        input_gradient,
        weight_gradient,
        shapes_of(kept_in[i] for i in to_b),
        shapes_of(kept_in[i] for i in to_w),
        shapes_of(saved),
        tuple(names[i] for i in to_b),
        tuple(names[i] for i in to_w),
    )


def forward_only(function: Callable) -> Split:
    """A layer's forward pass without residuals, for evaluation."""

    def forward(weights: Tree, x: Tree, shared: Tree, context: Tree) -> tuple:
        return *function(weights, x, shared, context), [], []

    def refuse(*_: Any) -> Any:
        raise AssertionError("a forward pass that saves no residuals has no backward pass")

    return Split(forward, refuse, refuse, [], [], [])


def _passes(
    function: Callable,
    weights: Tree,
    x: Tree,
    shared: Tree,
    context: Tree,
    memory: Collection[str],
):
    """`forward(weights, x, shared, context) -> ((y, loss), sums, kept)`, the shapes and names of
    the residuals `kept`, and `backward(weights, shared, context, memory, kept, dy)
    -> (dweights, dx, dshared)`. Residuals that depend on neither x nor shared arrays are
    recomputed."""
    vjp_forward, vjp_backward = split_vjp(function)
    program = TracedFunction.of(vjp_forward, weights, x, shared, context)
    weights_in, x_in, shared_in, context_in = program.inputs
    results = jax.eval_shape(function, weights, x, shared, context)
    structure, (_, loss) = jax.tree.structure(results), results[0]
    made, leaves = (
        program.outputs[: structure.num_leaves],
        program.outputs[structure.num_leaves :],
    )
    from_x = program.dependent([*x_in, *shared_in])
    # Memory, as the layer found and as it left it: the same entries, for the backward pass.
    names_x = sorted(x) if memory else []
    in_memory = {
        variables[names_x.index(name)]: name for name in memory for variables in (x_in, made)
    }
    kept = [v for v in dict.fromkeys(_variables(leaves)) if v in from_x and v not in in_memory]
    recomputed = [leaf for leaf in leaves if isinstance(leaf, Literal) or leaf not in from_x]

    def forward(weights: Tree, x: Tree, shared: Tree, context: Tree) -> tuple[Tree, Tree, list]:
        wanted = [*made, *kept]
        values = program.run(
            program.needed(wanted), program.inputs, [weights, x, shared, context], wanted
        )
        y, sums = jax.tree.unflatten(structure, values[: len(made)])
        return y, sums, values[len(made) :]

    def backward(
        weights: Tree, shared: Tree, context: Tree, memory_: Tree, kept_: list, dy: Tree
    ) -> tuple:
        eqns, given = program.needed(recomputed), [weights_in, shared_in, context_in]
        values = iter(program.run(eqns, given, [weights, shared, context], recomputed))
        known = dict(zip(kept, kept_)) | {v: memory_[name] for v, name in in_memory.items()}
        residuals = [
            next(values) if isinstance(leaf, Literal) or leaf not in from_x else known[leaf]
            for leaf in leaves
        ]
        seed = None if loss is None else jnp.ones((), loss.dtype)
        return vjp_backward(weights, shared, context, residuals, (dy, seed))

    names = [program.names.get(v, "") for v in kept]
    return forward, shapes_of(kept), names, backward


def _divide(
    program: "TracedFunction", dweights: list, gradients: list
) -> tuple[list, list[JaxprEqn]]:
    """The outputs of B, and the equations of W."""
    weights_in, shared_in, context_in, memory_in, kept_in, dy = program.inputs
    # Elementwise functions of residuals are cheaper to recompute in W than to save.
    cheap = {*shared_in, *context_in, *kept_in}
    for eqn in program.eqns:
        if not _is_matmul(eqn) and all(v in cheap for v in _variables(eqn.invars)):
            cheap |= set(eqn.outvars)

    def rest(b_wanted: list, wanted: list) -> list[JaxprEqn]:
        made = {v for eqn in program.needed(b_wanted) for v in eqn.outvars}
        return program.needed(wanted, available=(made | set(dy)) - cheap)

    # B also computes the gradients of scales and biases: they are sums of values that B has, which
    # would need more memory if they were saved for W.
    b_wanted = [*gradients]
    b_wanted += [v for v in dweights if not any(map(_is_matmul, rest(gradients, [v])))]
    while True:
        w_eqns = rest(b_wanted, dweights)
        again = {*weights_in, *memory_in}  # W has neither
        reading = [e for e in w_eqns if not again.isdisjoint(_variables(e.invars))]
        if not reading:
            return b_wanted, w_eqns
        b_wanted += [v for eqn in reading for v in eqn.outvars]


@dataclass(frozen=True)
class TracedFunction:
    """A traced function with inlined calls."""

    eqns: list[JaxprEqn]
    inputs: list[list]  # for each argument, the variables of its leaves
    outputs: list
    constants: dict
    names: dict  # variable -> checkpoint name

    @classmethod
    def of(cls, function: Callable, *args: Tree) -> "TracedFunction":
        """Traces `function(*args)`."""
        traced = jax.make_jaxpr(function)(*args)
        flat = jax.make_jaxpr(lambda *leaves: _inline(traced, leaves))(*jax.tree.leaves(args))
        variables = iter(flat.jaxpr.invars)
        inputs = [[next(variables) for _ in jax.tree.leaves(arg)] for arg in args]
        constants = dict(zip(flat.jaxpr.constvars, flat.consts))
        eqns, outputs, names = _without_names(flat.jaxpr)
        return cls(eqns, inputs, outputs, constants, names)

    def needed(self, wanted: Iterable, available: Iterable = ()) -> list[JaxprEqn]:
        """The equations that compute some variables; equations with a jaxpr without unused parts.

        Args:
          available: variables that need not be computed.
        """
        available = set(available)
        missing, found = set(_variables(wanted)) - available, []
        for eqn in reversed(self.eqns):
            used = [v in missing for v in eqn.outvars]
            if not any(used):
                continue
            if not all(used):
                eqn = _part(eqn, used)
            missing -= set(eqn.outvars)
            missing |= set(_variables(eqn.invars)) - available
            found.append(eqn)
        return found[::-1]

    def dependent(self, variables: Iterable) -> set:
        """All variables that depend on any of these."""
        found = set(variables)
        for eqn in self.eqns:
            if not found.isdisjoint(_variables(eqn.invars)):
                found |= set(eqn.outvars)
        return found

    def run(
        self, eqns: list[JaxprEqn], given: Sequence[list], values: Sequence[Tree], wanted: list
    ) -> list:
        """Evaluates equations: the values of `wanted`, from those of `given`."""
        known = dict(self.constants)
        for variables, value in zip(given, values, strict=True):
            known |= dict(zip(variables, jax.tree.leaves(value), strict=True))
        return _evaluate(eqns, known, wanted)


def _without_names(jaxpr: Jaxpr) -> tuple[list[JaxprEqn], list, dict]:
    """The equations and outputs without `checkpoint_name`'s copies, so that no value is saved
    twice; and the names."""
    named, names, eqns = {}, {}, []

    def first(atoms: Iterable) -> list:
        return [a if isinstance(a, Literal) else named.get(a, a) for a in atoms]

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            (named[eqn.outvars[0]],) = first(eqn.invars)
            names[named[eqn.outvars[0]]] = eqn.params["name"]
        else:
            eqns.append(eqn.replace(invars=first(eqn.invars)))
    return eqns, first(jaxpr.outvars), names


def _inline(traced: Any, args: Sequence) -> list:
    """Evaluates a traced function; tracing this inlines its calls."""
    known = dict(zip((*traced.jaxpr.constvars, *traced.jaxpr.invars), (*traced.consts, *args)))
    for eqn in traced.jaxpr.eqns:
        if eqn.primitive.name in CALLS:
            (inner,) = jaxprs_in_params(eqn.params)
            if not hasattr(inner, "consts"):
                inner = ClosedJaxpr(inner, ())
            with jax.named_scope(str(eqn.source_info.name_stack)):
                outs = _inline(inner, [_read(known, v) for v in eqn.invars])
        else:
            outs = _evaluate([eqn], known, eqn.outvars)
        known |= dict(zip(eqn.outvars, outs))
    return [_read(known, v) for v in traced.jaxpr.outvars]


def _evaluate(eqns: list[JaxprEqn], known: Mapping, wanted: Sequence) -> list:
    jaxpr = _jaxpr(eqns, wanted)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*(known[v] for v in jaxpr.invars))


def _part(eqn: JaxprEqn, used: Sequence[bool]) -> JaxprEqn:
    """An equation without unused results: dead code elimination in its jaxpr."""
    wanted = [v for v, is_used in zip(eqn.outvars, used) if is_used]
    (part,) = partial_eval.dce_jaxpr(_jaxpr([eqn], wanted), [True] * len(wanted))[0].eqns
    return part


def _jaxpr(eqns: list[JaxprEqn], wanted: Sequence) -> Jaxpr:
    info = DebugInfo("pipeline", "split", None, None)
    return Jaxpr((), _given(eqns, wanted), wanted, eqns, debug_info=info)


def _read(known: Mapping, atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else known[atom]


def _is_matmul(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in MATMUL_PRIMITIVES or any(
        True for _ in jaxprs_in_params(eqn.params)
    )


def _variables(atoms: Iterable) -> Iterable:
    return (atom for atom in atoms if not isinstance(atom, Literal))


def _given(eqns: Iterable[JaxprEqn], wanted: Iterable) -> list:
    """The free variables of equations: read and not computed by them."""
    made = {v for eqn in eqns for v in eqn.outvars}
    read = itertools.chain(*(eqn.invars for eqn in eqns), wanted)
    return [v for v in dict.fromkeys(_variables(read)) if v not in made]


def shapes_of(variables: Iterable) -> Shapes:
    """The shapes and types of variables."""
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
