"""Optimizers: optax's update rules for stacked parameters, described by logical axes.

Parameters are stacks, [layers, ...], and a side of a matrix may be several dimensions ([layers,
embed, heads, head_dim]). Operations on matrices (Muon's orthogonalisation, Adafactor's rows,
columns and clipping) are per matrix, so stacking changes no result.

The updates of all rules except Lion have about the size of Adam's, so that a learning rate carries
over; Lion needs a third to a tenth of it (arXiv 2302.06675).
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from jaxscale.config.optimizer import (
    FACTORED_SIZE,
    STACKS,
    OptimizerConfig,
    ParamGroup,
    check_groups,
    find_group,
    matrix_dims,
)
from jaxscale.config.width_scaling import rate_factor
from jaxscale.ops.rounding import round_stochastically
from jaxscale.sharding.resolve import is_axes, leaf_name, owner_of
from jaxscale.training.learning_rate import schedule_of
from jaxscale.training.pruning.masks import live_weights

SECOND_MOMENTS = ("nu", "rows", "columns", "whole")
"""Fields of states, here and in optax, with averages of squared gradients."""

MUON_MOMENTUM = 0.95
MUON_COEFFICIENTS = np.float32(3.4445), np.float32(-4.775), np.float32(2.0315)
"""Coefficients of the Newton-Schulz iteration (Jordan et al. 2024). They are part of the state, so
their type must not depend on JAX's default."""
MUON_STEPS = 5
MUON_RMS = 0.2
"""Root mean square of Muon's updates, that of Adam's in practice (arXiv 2502.16982)."""


ByLayer = Callable[[Callable[[jax.Array], jax.Array], jax.Array, tuple[str, ...]], jax.Array]
"""Applies a function of whole matrices to a stack with these logical axes."""


def make(
    config: OptimizerConfig,
    *,
    steps: int,
    axes: Any,
    frozen: Any = None,
    pruned: Collection[str] = (),
    by_layer: ByLayer = lambda function, stack, names: function(stack),
    width_ratio: float = 1.0,
) -> optax.GradientTransformation:
    """The update rule of a run, on global arrays and clipped gradients.

    Weight decay is decoupled and, unless a group sets it, for matrices only: parameters with rows
    and columns by `matrix_dims`, such as both factors of an adapter. Arithmetic is in float32 or
    wider for any type of parameters. Between updates first moments (of AdamW, Lion and Muon) are
    stored in `config.moment_dtype`, and second moments (of AdamW, also for Muon's vectors, and
    Adafactor) in `config.second_moment_dtype`.

    Args:
      config: the rule's settings; `b1` and `b2` are for AdamW (also for Muon's vectors) and Lion.
      steps: length of the learning-rate schedule in updates.
      axes: tree of the parameters with a tuple of logical axes for each.
      frozen: tree of the parameters with whether each is frozen, without moments; None: none is.
      pruned: names of the parameters whose zeros are pruned weights, which sizes leave out.
      by_layer: distributes Muon's matmuls over devices.
      width_ratio: the model's width over `config.mup_base_width`, by which muP scales rates.
    """
    schedule = schedule_of(config, steps)

    def rate(updates: Any) -> Any:
        # Behind a barrier: XLA would fuse the schedule into the update of each parameter.
        return jax.lax.optimization_barrier(schedule(updates))

    adam = functools.partial(optax.scale_by_adam, config.b1, config.b2, config.epsilon)
    directions = {
        "adamw": adam,
        "lion": lambda: optax.scale_by_lion(config.b1, config.b2),
        "adafactor": lambda: _adafactor(axes, pruned),
        "muon": lambda: _muon(axes, adam(), by_layer),
    }
    if config.name not in directions:
        raise ValueError(f"optimizer.name = {config.name!r}; it can be {', '.join(directions)}")
    rule = optax.chain(
        directions[config.name](),
        _by_group(config, axes, width_ratio),
        optax.scale_by_learning_rate(rate),
    )
    if frozen is not None and any(jax.tree.leaves(frozen)):
        labels = jax.tree.map(lambda x: "frozen" if x else "trained", frozen)
        rule = optax.partition({"trained": rule, "frozen": optax.set_to_zero()}, labels)
    dtypes = jnp.dtype(config.moment_dtype), jnp.dtype(config.second_moment_dtype)
    return _at_rest(rule, *dtypes, stochastic=config.moment_rounding == "stochastic")


def frozen_params(groups: Sequence[ParamGroup], axes: Any, names: Sequence[str] = ()) -> Any:
    """Tree of the parameters with whether each is frozen.

    Args:
      groups: of `config.optimizer`.
      axes: tree of the parameters with a tuple of logical axes for each.
      names: parameters that the model declares frozen.

    Raises:
      ValueError: a group changes nothing, a name matches no parameter, or every parameter is
        frozen.
    """
    known = [leaf_name(path) for path, _ in _leaves(axes, is_leaf=is_axes)]
    if unknown := set(names) - set(known):
        raise ValueError(
            f"the model's frozen {sorted(unknown)} are not among its parameters: {known}"
        )

    def frozen(path: tuple, _: Any) -> bool:
        return leaf_name(path) in names or find_group(leaf_name(path), groups).frozen

    check_groups(groups, known, names)
    return jax.tree_util.tree_map_with_path(frozen, axes, is_leaf=is_axes)


def state_axes(
    optimizer: optax.GradientTransformation,
    abstract_params: Any,
    axes: Any,
    report: Callable[..., None] = lambda name, shape, param_shape, in_layers: None,
) -> Any:
    """The logical axes of every leaf of the optimizer's state, as a tree of its structure.

    A moment has the axes of its parameter, Adafactor's rows and columns the axes that are not
    averaged; counts, constants and placeholders have none. Map over it with `is_leaf=is_axes`.

    Args:
      optimizer: from `make`, or custom.
      abstract_params: tree of `jax.ShapeDtypeStruct`.
      axes: tree of the parameters with a tuple of logical axes for each.
      report: called for each array that is replicated because its shape is not its parameter's:
        with its name and shape, the parameter's shape, and whether the parameter is of the layers.
    """
    names = dict(_leaves(axes, is_leaf=is_axes))
    shapes = {path: leaf.shape for path, leaf in _leaves(abstract_params)}

    def axes_of(path: tuple, leaf: jax.ShapeDtypeStruct) -> tuple[str, ...]:
        owner = owner_of(path, shapes)
        if owner is None or leaf.shape == (1,) != shapes[owner]:
            return ()
        left = _kept(names[owner], _field(path, owner))
        if leaf.shape != tuple(shapes[owner][i] for i in left):
            report(leaf_name(path), leaf.shape, shapes[owner], "layers" in names[owner])
            return ()
        return tuple(names[owner][i] for i in left)

    state = jax.eval_shape(optimizer.init, abstract_params)
    return jax.tree_util.tree_map_with_path(axes_of, state)


def lost_updates(trained: Iterable[Any]) -> str:
    """A line about bfloat16 parameters, whose rounding loses small updates, or "".

    Args:
      trained: the parameters that are not frozen.
    """
    if all(leaf.dtype != jnp.bfloat16 for leaf in trained):
        return ""
    return (
        "model.param_dtype = 'bfloat16': rounding loses updates of less than 2^-9 of a parameter, "
        "most of them at small learning rates; set model.param_dtype = 'float32', and "
        "model.compute_dtype = 'bfloat16' to compute in bfloat16"
    )


def moment_power(path: tuple, params: Any) -> int:
    """How a leaf of a `TrainState` scales with gradients: 1 for a first moment, 2 for a second one,
    0 for a parameter or a count.

    Args:
      path: of the leaf in the state.
      params: tree of the parameters.
    """
    if getattr(path[0], "name", "") != "opt_state":
        return 0
    owner = owner_of(path, {path for path, _ in _leaves(params)})
    if owner is None:
        return 0
    return 2 if _field(path, owner) in SECOND_MOMENTS else 1


def owner_and_moment(path: tuple, params: Any) -> tuple[str, str] | None:
    """The name of the parameter that a leaf of an optimizer's state is a moment of, and the
    moment's field, such as "mu"; None for a count.

    Args:
      path: of the leaf in the state.
      params: tree of the parameters.
    """
    owner = owner_of(path, {path for path, _ in _leaves(params)})
    return None if owner is None else (leaf_name(owner), _field(path, owner))


def is_schedule(node: Any) -> bool:
    """Whether a node of the optimizer's state is the position in the learning-rate schedule."""
    return isinstance(node, optax.ScaleByScheduleState)


def _by_group(
    config: OptimizerConfig, axes: Any, width_ratio: float
) -> optax.GradientTransformation:
    """Scales by muP, adds each parameter's weight decay, and scales by its group's share of the
    learning rate. muP does not scale the decay: at every width weights are averages over the same
    number of updates (arXiv 2405.13698, 2510.19093)."""

    def coefficients(path: tuple, names: tuple[str, ...]) -> tuple[float, float, float]:
        group = find_group(leaf_name(path), config.groups)
        default = 0.0 if matrix_dims(names) is None else config.weight_decay
        decay = default if group.weight_decay is None else group.weight_decay
        return rate_factor(names, config.name, width_ratio), decay, group.learning_rate_scale

    def one(factors: tuple[float, float, float], update: Any, param: Any) -> Any:
        if _is_masked(update):
            return update
        of_width, decay, scale = factors
        update = update if of_width == 1 else of_width * update
        update = update + decay * param if decay else update
        return update if scale == 1 else scale * update

    by_param = jax.tree_util.tree_map_with_path(coefficients, axes, is_leaf=is_axes)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        done = jax.tree.map(one, by_param, updates, params, is_leaf=lambda x: isinstance(x, tuple))
        return done, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _at_rest(
    inner: optax.GradientTransformation, first: jnp.dtype, second: jnp.dtype, *, stochastic: bool
) -> optax.GradientTransformation:
    """`inner` computed in float32 or wider, with its moments stored in these types.

    Args:
      stochastic: whether moments are rounded to bfloat16 stochastically.
    """
    wide = jnp.promote_types(jnp.promote_types(first, second), jnp.float32)

    def widen(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, wide)), tree)

    def moments(state: Any, params: Any, first: jnp.dtype, second: jnp.dtype) -> Any:
        paths = {path for path, _ in _leaves(params)}

        def convert(path: tuple, leaf: jax.Array) -> jax.Array:
            owner = owner_of(path, paths)
            if owner is None:
                return leaf
            dtype = second if _field(path, owner) in SECOND_MOMENTS else first
            if stochastic and dtype == jnp.bfloat16 != leaf.dtype:
                # The number of updates; the rule's and the schedule's counts are equal.
                count = optax.tree.get_all_with_path(state, "count")[0][1]
                return round_stochastically(leaf, count)
            return leaf.astype(dtype)

        return jax.tree_util.tree_map_with_path(convert, state)

    def init(params: Any) -> Any:
        return moments(inner.init(widen(params)), params, first, second)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        wider = moments(state, updates, wide, wide)
        updates, state = inner.update(widen(updates), wider, widen(params))
        return updates, moments(state, updates, first, second)

    return optax.GradientTransformation(init, update)


def _muon(
    axes: Any, rest: optax.GradientTransformation, by_layer: ByLayer
) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the matrices of the layers, `rest` for other parameters.

    The state is optax's. The update is implemented here, because matrices that are sharded over
    devices must be gathered once, before the first of the fifteen matmuls.
    """

    def of_layers(names: tuple[str, ...]) -> bool:
        return "layers" in names and matrix_dims(names) is not None

    def numbers(names: tuple[str, ...]) -> Any:
        if not of_layers(names):
            return optax.MaskedNode()
        rows, columns = matrix_dims(names) or ((), ())
        return optax.contrib.MuonDimensionNumbers(reduction_axis=rows, output_axis=columns)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        corrected, count = optax.tree.bias_correction, optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, MUON_MOMENTUM, 1)
        ahead = jax.tree.map(
            lambda m, g: MUON_MOMENTUM * m + (1 - MUON_MOMENTUM) * g,
            corrected(mu, MUON_MOMENTUM, optax.safe_increment(count)),
            corrected(updates, MUON_MOMENTUM, count),
        )

        def direction(stack: jax.Array, names: tuple[str, ...]) -> jax.Array:
            return by_layer(lambda x: _orthogonal(x, names, state.ns_coeffs), stack, names)

        return _map_with_axes(direction, ahead, axes), state._replace(count=count, mu=mu)

    rule = optax.contrib.scale_by_muon(
        MUON_COEFFICIENTS,
        weight_dimension_numbers=_map_axes(numbers, axes),
    )
    # Chained for the structure of the state in checkpoints.
    muon = optax.chain(optax.GradientTransformation(rule.init, update), optax.identity())
    labels = _map_axes(lambda names: "muon" if of_layers(names) else "rest", axes)
    return optax.partition({"muon": muon, "rest": rest}, labels)


def _orthogonal(stack: jax.Array, names: tuple[str, ...], coefficients: jax.Array) -> jax.Array:
    """Orthogonalises each matrix approximately, by five Newton-Schulz steps, with the root mean
    square `MUON_RMS` (arXiv 2502.16982)."""
    rows, columns = matrix_dims(names) or ((), ())
    many = tuple(i for i in range(stack.ndim) if i not in (*rows, *columns))
    order = (*many, *rows, *columns)
    moved = stack.transpose(order)
    sides = [math.prod(stack.shape[i] for i in side) for side in (rows, columns)]
    x = moved.reshape(*(stack.shape[i] for i in many), *sides)
    tall = sides[0] > sides[1]
    x = x.mT if tall else x
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)
    a, b, c = coefficients.astype(x.dtype)
    for _ in range(MUON_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    x = (x.mT if tall else x) * (MUON_RMS * math.sqrt(max(sides)))
    return x.reshape(moved.shape).transpose(np.argsort(order))


class FactoredState(NamedTuple):
    """Adafactor's second moments: of rows and columns, or whole; unused ones are placeholders."""

    count: jax.Array
    rows: Any
    columns: Any
    whole: Any


def _adafactor(axes: Any, pruned: Collection[str]) -> optax.GradientTransformation:
    """Adafactor (arXiv 1804.04235) per matrix, with update clipping at 1 and no momentum.

    Without the scaling by the parameters' size, as in arXiv 2106.04560 (section 3.4), so that
    learning rates are comparable with Adam's. optax's Adafactor would factor across layers and
    heads.

    Args:
      pruned: as in `make`; their updates are clipped by the size of those of live weights.
    """
    fields = ("rows", "columns", "whole")

    def init(params: Any) -> FactoredState:
        def moment(field: str, param: jax.Array, names: tuple[str, ...]) -> jax.Array:
            if (field == "whole") == _factored(param.shape, names):
                return jnp.zeros((1,), param.dtype)
            return jnp.zeros([param.shape[i] for i in _kept(names, field)], param.dtype)

        trees = [
            _map_with_axes(lambda p, names, field=field: moment(field, p, names), params, axes)
            for field in fields
        ]
        return FactoredState(jnp.zeros((), jnp.int32), *trees)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        decay = 1 - (state.count + 1.0) ** -0.8
        leaves, structure = jax.tree.flatten(updates, is_leaf=_is_masked)
        names = jax.tree.leaves(axes, is_leaf=is_axes)
        owned = jax.tree.leaves(params, is_leaf=_is_masked)
        masks = [
            live_weights(param, _each(name)) if leaf_name(path) in pruned else None
            for (path, _), param, name in zip(
                _leaves(updates, is_leaf=_is_masked), owned, names, strict=True
            )
        ]
        moments = (jax.tree.leaves(getattr(state, field), is_leaf=_is_masked) for field in fields)
        done = [
            arrays
            if _is_masked(arrays[0])
            else _factored_update(*arrays, decay=decay, names=name, live=mask)
            for *arrays, name, mask in zip(leaves, *moments, names, masks, strict=True)
        ]
        trees = [jax.tree.unflatten(structure, column) for column in zip(*done, strict=True)]
        return trees[0], FactoredState(jnp.asarray(state.count + 1), *trees[1:])

    return optax.GradientTransformation(init, update)


def _factored_update(
    gradient: jax.Array,
    rows: jax.Array,
    columns: jax.Array,
    whole: jax.Array,
    *,
    decay: jax.Array,
    names: tuple[str, ...],
    live: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One array's update and its new moments.

    Args:
      live: whether each weight is not pruned; None: all are.
    """
    decay = decay.astype(gradient.dtype)
    square = jnp.square(gradient) + 1e-30
    if _factored(gradient.shape, names):
        row_dims, column_dims = matrix_dims(names) or ((), ())
        rows = decay * rows + (1 - decay) * square.mean(column_dims)
        columns = decay * columns + (1 - decay) * square.mean(row_dims)
        tall = jnp.expand_dims(rows, column_dims)
        scale = (tall / tall.mean(row_dims, keepdims=True)) ** -0.5
        update = gradient * scale * jnp.expand_dims(columns, row_dims) ** -0.5
    else:
        whole = decay * whole + (1 - decay) * square
        update = gradient * whole**-0.5
    size = jnp.sqrt(jnp.mean(jnp.square(update), _each(names), keepdims=True, where=live))
    return update / jnp.maximum(size, 1), rows, columns, whole


def _each(names: tuple[str, ...]) -> tuple[int, ...]:
    """The dimensions of one parameter of a stack."""
    return tuple(i for i, name in enumerate(names) if name not in STACKS)


def _factored(shape: tuple[int, ...], names: tuple[str, ...]) -> bool:
    """Whether Adafactor's second moments of this parameter are rows and columns."""
    sides = matrix_dims(names) or ()
    sizes = [math.prod(shape[i] for i in side) for side in sides]
    return bool(sizes) and min(sizes) >= FACTORED_SIZE


def _kept(names: tuple[str, ...], field: str) -> tuple[int, ...]:
    """The dimensions of a parameter that a moment called `field` has."""
    rows, columns = matrix_dims(names) or ((), ())
    reduced = {"rows": columns, "columns": rows}.get(field, ())
    return tuple(i for i in range(len(names)) if i not in reduced)


def _map_axes(function: Callable, axes: Any) -> Any:
    return jax.tree.map(function, axes, is_leaf=is_axes)


def _map_with_axes(function: Callable, tree: Any, axes: Any) -> Any:
    """Maps (leaf, its axes), except leaves that are masked."""
    return jax.tree.map(
        lambda names, leaf: leaf if _is_masked(leaf) else function(leaf, names),
        axes,
        tree,
        is_leaf=is_axes,
    )


def _is_masked(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)


def _leaves(tree: Any, is_leaf: Callable | None = None) -> list[tuple[tuple, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf)[0]


def _field(path: tuple, owner: tuple) -> str:
    """The field of a parameter's moment: the name before the parameter's path."""
    return getattr(path[len(path) - len(owner) - 1], "name", "")
