"""Abstract trace of a model's parameters and stacks for the planner, without a device or array."""

import functools

import jax

from jaxscale.config.model import ModelSettings
from jaxscale.models.decoder import plain_kernels
from jaxscale.models.protocol import stored_weights
from jaxscale.sharding.model_trace import ModelTrace, ParamShape, StackTrace, TableShape
from jaxscale.sharding.resolve import is_axes, leaf_name
from jaxscale.training.tracing.abstract_model import MakeModel, find_model


@functools.lru_cache(maxsize=64)
def trace_model(settings: ModelSettings, make: MakeModel | None = None) -> ModelTrace:
    """The trace of a model.

    Args:
      make: the function that makes it; None: by `settings.family`.

    Raises:
      ValueError: the family cannot be imported.
    """
    model = (make or find_model(settings))(settings, plain_kernels())
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    axes = jax.tree.leaves(model.axes, is_leaf=is_axes)
    rules = tuple((name, tuple(over)) for name, over in model.rules.items())
    frozen, stored, parameters = set(model.frozen), stored_weights(model), []
    for names, (path, leaf) in zip(axes, jax.tree_util.tree_leaves_with_path(shapes), strict=True):
        part, _, name = leaf_name(path).partition("/")
        first, shape = 0 if part in ("embed", "head") else 1, leaf.shape
        how = stored.get(leaf_name(path))
        if how is not None:
            shape = how.whole_shape(shape)
        parameters.append(
            ParamShape(
                part,
                name,
                names[first:],
                shape[first:],
                how.format if how else str(leaf.dtype),
                f"{part}/{name}" in frozen,
                tuple(rule for rule in rules if rule[0] in names),
                how.dim - first if how else 0,
            )
        )
    stacks = [
        StackTrace(one.name, one.num_layers, one.period, one.model_layers, tuple(one.tensors))
        for one in model.stacks
    ]
    paths = {"/".join(path) for path in model.borrows.values()}
    borrowed = [one.path for one in parameters if one.path in paths and "vocab" in one.axes]
    adjusts = model.adjust is not None
    tables = tuple(
        TableShape(name, one.rows, one.width, settings.param_dtype)
        for name, one in model.tables.items()
    )
    return ModelTrace(
        tuple(parameters), tuple(stacks), tuple(borrowed), adjusts, model.slices_head, tables
    )
