"""The update of a state with arrays in host memory, one parameter after the other."""

import collections
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jaxscale.pipeline.backward_split import TracedFunction
from jaxscale.sharding.host_memory import from_host, is_on_host, to_host
from jaxscale.training.layers.layer_scan import ONE_LAYER
from jaxscale.training.optimizer import owner_and_moment

Tree = Any
Update = Callable[[Tree, Tree], tuple[Tree, Tree]]


def update_in_turn(
    update: Update, ready: jax.Array, params: Tree, opt_state: Tree
) -> tuple[Tree, Tree]:
    """`update(params, opt_state)`, which computes with arrays on the device, for trees of which
    some arrays are in host memory, and stay there.

    The arrays of a parameter are copied to the device when those of the one before are copied back:
    XLA for TPUs (libtpu 0.0.52) would copy all to the device before it updates the first, and all
    back after the last. The operations are those of `update`, each once. Parameters that it does
    not change stay where they are.

    Args:
      ready: an array that the first copies wait for.
    """
    given = params, opt_state
    leaves, structure = jax.tree.flatten(given)
    if not any(map(is_on_host, leaves)):
        return update(params, opt_state)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    traced = TracedFunction.of(update, *shapes)
    variables = list(itertools.chain(*traced.inputs))
    read = itertools.chain.from_iterable(eqn.invars for eqn in traced.eqns)
    shared = {v for v in read if isinstance(v, Var) and getattr(v.aval, "ndim", 1) == 0}
    known = dict(zip(variables, leaves))
    done, waited = list(leaves), [ready]
    for group in _groups(params, given, leaves):
        wanted = [traced.outputs[i] for i in group]
        if all(traced.outputs[i] is variables[i] for i in group):
            continue
        moved = [variables[i] for i in group if is_on_host(leaves[i])]
        if moved:
            known |= zip(moved, _fetch([known[v] for v in moved], waited))
        scalars = [v for v in known if v.aval.ndim == 0]
        eqns = traced.needed(wanted, scalars)
        made = [v for eqn in eqns for v in eqn.outvars if v in shared]
        atoms = itertools.chain(wanted, *(eqn.invars for eqn in eqns))
        used = {v for v in atoms if isinstance(v, Var)}
        here = {v: from_host(x) for v, x in known.items() if v in used}
        new = traced.run(eqns, [list(here)], [list(here.values())], [*wanted, *made])
        known |= zip(made, new[len(wanted) :])
        for i, x in zip(group, new):
            done[i] = to_host(x) if is_on_host(leaves[i]) else x
        waited = [done[i] for i in group]
    return jax.tree.unflatten(structure, done)


def _groups(params: Tree, given: tuple[Tree, Tree], leaves: list) -> list[list[int]]:
    """The leaves of each parameter that has some in host memory, and last those of all others."""
    owned: dict[str, list[int]] = collections.defaultdict(list)
    for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(given)):
        owner = owner_and_moment(path, params)
        owned[owner[0] if owner else ""].append(i)
    moved = [group for group in owned.values() if any(is_on_host(leaves[i]) for i in group)]
    rest = {*range(len(leaves))}.difference(*moved)
    return [*moved, sorted(rest)]


def _fetch(arrays: list, ready: list) -> list:
    """Copies arrays to the device when others are computed."""
    # In a loop, which carries the others: XLA removes barriers before it orders operations. Its
    # count is behind a barrier, since XLA removes a loop with a known count of 1.
    trips = jax.lax.optimization_barrier(jnp.ones((), jnp.int32))

    def copied(state: tuple) -> tuple:
        count, _, ready = state
        new, ready = jax.lax.optimization_barrier((from_host(arrays), ready))
        return count + 1, new, ready

    empty = [jnp.zeros(x.shape, x.dtype) for x in arrays]
    with jax.named_scope(ONE_LAYER):
        state = jnp.zeros((), jnp.int32), empty, ready
        return jax.lax.while_loop(lambda state: state[0] < trips, copied, state)[1]
