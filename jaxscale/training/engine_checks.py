"""Checks of `make_engine`'s arguments and settings."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxscale.choices import check_kind
from jaxscale.config import CONFIG_ADVICE, Config
from jaxscale.config.layout import Layout
from jaxscale.config.optimizer import OptimizerConfig, ParamGroup
from jaxscale.config.schedule_spec import AUTO
from jaxscale.config.width_scaling import check_growing_axes
from jaxscale.models.protocol import Model, stored_weights
from jaxscale.sharding import layout_checks
from jaxscale.sharding.resolve import is_axes, leaf_name
from jaxscale.sharding.rules import check_blocks
from jaxscale.sharding.zero import Zero
from jaxscale.training.kernels import check_matmul_device
from jaxscale.training.pruning.matrices import check_counts_updates
from jaxscale.training.remat import check_host_memory


def check_engine_arguments(config: Any, mesh: Any, model: Any, optimizer: Any, rules: Any) -> None:
    """Refuses arguments of wrong types, and a mesh of another layout.

    Raises:
      ValueError: with the argument to pass.
    """
    check_kind("config", config, Config, CONFIG_ADVICE)
    check_kind("mesh", mesh, Mesh, "pass jaxscale.make_mesh(config.layout)")
    if dict(mesh.shape) != config.layout.sizes:
        raise ValueError(
            f"the mesh has the sizes {dict(mesh.shape)}, and config.layout {config.layout.sizes}; "
            "pass jaxscale.make_mesh(config.layout)"
        )
    if model is not None and not callable(model):
        raise ValueError(
            f"model is of type {type(model).__name__}; pass a function of settings and kernels, "
            "such as a class that extends Decoder, or set model.family"
        )
    if optimizer is not None:
        advice = "pass an optax.GradientTransformation, or set optimizer.name"
        check_kind("optimizer", optimizer, optax.GradientTransformation, advice)
    if rules is not None:
        check_kind("rules", rules, dict, 'pass a dictionary, such as {"rank": ("tensor",)}')


def check_own_optimizer(
    config: OptimizerConfig, optimizer: optax.GradientTransformation, params: Any
) -> None:
    """Refuses a custom optimizer that a step cannot call, and settings that it would not read.

    Args:
      params: the parameters' shapes.

    Raises:
      ValueError: with the change to make.
    """
    for i, group in enumerate(config.groups):
        if not group.frozen and group != ParamGroup(group.params, sparsity=group.sparsity):
            raise ValueError(
                f"optimizer.groups[{i}] = {group.params!r} sets a rate or a decay, which optimizer="
                " defines itself: use optax.partition in it, and leave this entry out; only "
                "frozen = True and sparsity are for any optimizer"
            )
    try:
        jax.eval_shape(optimizer.update, params, jax.eval_shape(optimizer.init, params), params)
    except TypeError as error:
        raise ValueError(
            "optimizer= cannot be called with gradients, its state and the parameters only, as a "
            f"step does: {error}"
        ) from error
    if config.mup_base_width:
        raise ValueError(
            f"optimizer.mup_base_width = {config.mup_base_width} scales the rates of "
            "config.optimizer's rule, which optimizer= replaces; set optimizer.mup_base_width = 0"
        )
    if config.prunes:
        check_counts_updates(optimizer, params)


def check_engine_settings(config: Config, mesh: Mesh) -> None:
    """Refuses settings for which no model can be built.

    Raises:
      ValueError: with the setting to change.
    """
    for name, such in (("remat", "a policy, such as 'full'"), ("head", "'last' or 'sliced'")):
        if getattr(config.layout, name) == AUTO:
            raise ValueError(
                f"layout.{name} = 'auto' is chosen when a run starts, and by jaxscale.open_engine; "
                f"here set {such}"
            )
    layout, model, data = config.layout, config.model, config.data
    layout_checks.check_divides(layout, data.global_batch_size)
    layout_checks.check_matmuls(layout, model.matmul_dtype)
    layout_checks.check_overlap(layout, data.global_batch_size)
    layout_checks.check_nodes(layout, model)
    check_nodes_of_devices(layout, mesh)
    layout_checks.check_pipeline_gather(layout)
    layout_checks.check_ring(layout)
    layout_checks.check_sequence(layout, data)
    layout_checks.check_sequence_chunks(layout, model)
    layout_checks.check_tensor_rows(layout, model)
    layout_checks.check_ulysses(layout, model)
    _check_types({"model": model, "optimizer": config.optimizer})
    check_host_memory(layout, mesh)
    check_matmul_device(model.matmul_dtype, mesh.devices.flat[0])


def check_nodes_of_devices(layout: Layout, mesh: Mesh) -> None:
    """Refuses `expert_nodes` whose parts of the ranks of expert are not each in one node of GPUs.

    Raises:
      ValueError: names the setting to change.
    """
    if layout.expert_nodes == 1 or mesh.devices.flat[0].platform != "gpu":
        return
    ranks = np.moveaxis(mesh.devices, mesh.axis_names.index("expert"), -1)
    parts = ranks.reshape(-1, layout.expert // layout.expert_nodes)
    node = np.vectorize(lambda device: getattr(device, "slice_index", device.process_index))
    if any(len(set(part)) > 1 for part in node(parts)):
        raise ValueError(
            f"layout.expert_nodes = {layout.expert_nodes} leaves {parts.shape[1]} ranks of "
            f"layout.expert = {layout.expert} to a node, and such ranks are on several nodes here; "
            f"set layout.expert_nodes = {2 * layout.expert_nodes} or more, or 1"
        )


def check_axes(config: Config, model: Model) -> None:
    """Refuses expert ranks without experts, and muP with axes that it does not know.

    Raises:
      ValueError: names the setting to change.
    """
    expert = config.layout.expert
    if expert > 1 and "experts" not in jax.tree.leaves(model.axes):
        raise ValueError(
            f"layout.expert = {expert}, but no parameter of model.family = "
            f"{model.settings.family!r} has the logical axis 'experts'; set layout.expert = 1"
        )
    if config.optimizer.mup_base_width:
        named = jax.tree_util.tree_leaves_with_path(model.axes, is_leaf=is_axes)
        check_growing_axes((leaf_name(path), axes) for path, axes in named)


def check_stored(model: Model, zero: Zero, shapes: Any) -> None:
    """Refuses blocks of quantised weights that would be on two ranks.

    Args:
      shapes: of the parameters.

    Raises:
      ValueError: names the weight and the settings to change.
    """
    stored = stored_weights(model)
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        if (how := stored.get(name := leaf_name(path))) is None:
            continue
        part, _, inner = name.partition("/")
        axes = functools.reduce(lambda tree, key: tree[key], inner.split("/"), zero.axes[part])
        size = how.whole_shape(leaf.shape)[how.dim]
        check_blocks(axes, zero.state_rules, zero.sizes, size, how.dim, how.format, name)


def _check_types(sections: Mapping[str, Any]) -> None:
    """Refuses float64 if JAX would silently compute in float32.

    Raises:
      ValueError: with the variable to set.
    """
    wide = {
        f"{section}.{name}"
        for section, settings in sections.items()
        for name, value in vars(settings).items()
        if value == "float64"
    }
    if wide and not jax.config.jax_enable_x64:
        raise ValueError(
            f"{', '.join(sorted(wide))} = 'float64' needs JAX_ENABLE_X64=1 in the environment"
        )
