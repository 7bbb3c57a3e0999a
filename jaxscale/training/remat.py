"""Rematerialisation: remat policies of a layer, and offloading of residuals to host memory."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from jaxscale.config.layout import Layout
from jaxscale.config.remat_policy import RematPolicy
from jaxscale.models.adapters.side import SIDE_INPUT
from jaxscale.models.experts import CHOICE
from jaxscale.models.kernels import Kernels
from jaxscale.models.protocol import LayerFunction, Remat
from jaxscale.ops.attention.platform_kernels import is_cudnn_forward
from jaxscale.ops.matmul import WEIGHT_SCALE

Tree = Any


def rematerialised(
    layer: LayerFunction, remat: RematPolicy, *, several: bool = False
) -> LayerFunction:
    """A layer under a policy of `Layout.remat`.

    Args:
      several: as in `models.protocol.Remat`.
    """
    if remat.kind in ("none", "save_all_but_attention"):
        return layer
    # Recomputed router scores may round differently and select other experts, so routing is saved
    # under every policy.
    if remat.offloads:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[CHOICE, WEIGHT_SCALE, SIDE_INPUT],
            names_which_can_be_offloaded=list(remat.names),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        policy = jax.checkpoint_policies.save_only_these_names(
            *remat.names, CHOICE, WEIGHT_SCALE, SIDE_INPUT
        )
    if "attention" in remat.names:
        policy = _with_cudnn(policy)
    return _checkpoint(layer, policy, several=several)


def remat_of(policy: RematPolicy) -> Remat:
    """`rematerialised` under a policy."""
    return lambda layer, several: rematerialised(layer, policy, several=several)


def rematerialised_attention(kernels: Kernels, remat: RematPolicy) -> Kernels:
    """The kernels of a model that trains under a policy. With "save_all_but_attention" only the
    attention kernel is recomputed, from saved queries, keys and values (selective recomputation,
    arXiv 2205.05198, section 5)."""
    if remat.kind != "save_all_but_attention":
        return kernels

    def attend(*arrays: jax.Array, **settings: Any) -> jax.Array:
        local = functools.partial(kernels.attend, **settings)
        return _checkpoint(local, jax.checkpoint_policies.nothing_saveable)(*arrays)

    return dataclasses.replace(kernels, attend=attend)


def _with_cudnn(policy: Callable) -> Callable:
    """The policy with the outputs of cuDNN's kernel, which have no names, named "attention"."""
    naming = jax.make_jaxpr(lambda x: checkpoint_name(x, "attention"))(0.0).eqns[0]

    def treat(primitive, *args, **params):
        if is_cudnn_forward(primitive):
            return policy(naming.primitive, *args, **naming.params)
        return policy(primitive, *args, **params)

    return treat


def _checkpoint(function: Callable, policy: Callable, *, several: bool = False) -> Callable:
    # The layer loop separates forward and backward pass with fewer barriers than prevent_cse. With
    # several in one layer these also hold a recomputation back until its gradient is there.
    return jax.checkpoint(function, policy=policy, prevent_cse=several)


def check_host_memory(layout: Layout, mesh: Mesh) -> None:
    """Refuses offloading on a back end without separate host memory.

    Raises:
      ValueError: with the settings to change.
    """
    device = mesh.devices.flat[0]
    offloads = layout.offload != "none" or layout.remat_policy.offloads
    if not (offloads or layout.offload_bytes) or not isinstance(device, jax.Device):
        return
    kinds = {memory.kind for memory in device.addressable_memories()}
    if "pinned_host" in kinds:
        return
    settings, without = [], []
    if layout.offload != "none":
        settings.append(f"layout.offload = {layout.offload!r}")
        without.append("layout.offload = 'none'")
    if layout.offload_bytes:
        settings.append(f"layout.offload_bytes = {layout.offload_bytes}")
        without.append("layout.offload_bytes = 0")
    if layout.remat_policy.offloads:
        settings.append(f"layout.remat = {layout.remat!r}")
        without.append("layout.remat = 'full' or another policy without 'offload:'")
    reason = f"the {device.platform} back end has no pinned host memory, only {sorted(kinds)}"
    if not kinds:  # an absent device
        reason = f"JAX cannot compile offloading for absent {device.platform} devices"
    raise ValueError(f"{', '.join(settings)}: {reason}; set {', and '.join(without)}")
