"""The options that a train step is compiled with."""

import logging
import re

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale.hardware import xla_flags

log = logging.getLogger("jaxscale")


def step_options(mesh: Mesh) -> dict[str, bool | int]:
    """The flags of `hardware.py` for a mesh's devices, without those that this XLA does not know.

    XLA renames and drops flags between versions, and refuses a program for one that it does not
    know. An empty program finds out which; what is left out is logged.
    """
    device = mesh.devices.flat[0]
    options = {flag.name: flag.value for flag in xla_flags(device.platform, device.device_kind)}
    if not options:
        return {}
    empty = jax.jit(
        lambda: jnp.zeros(()), out_shardings=NamedSharding(mesh, PartitionSpec())
    ).lower()
    while options:
        try:
            empty.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            unknown = re.search(r"No such compile option: '(\w+)'", str(error))
            if unknown is None or unknown[1] not in options:
                raise
            log.warning(
                "this version of XLA does not know %s: the step is compiled without it; without "
                "it a step may be slower, and its results are the same",
                unknown[1],
            )
            del options[unknown[1]]
        else:
            break
    return options
