"""The options that a train step is compiled with."""

import logging
import re

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale.hardware import DETERMINISTIC, xla_flags

log = logging.getLogger("jaxscale")


def step_options(mesh: Mesh, *, deterministic: bool = False) -> dict[str, bool | int]:
    """The flags of `hardware.py` for a mesh's devices, without those that this XLA does not know.

    XLA renames and drops flags between versions, and refuses a program for one that it does not
    know. An empty program finds out which; what is left out is logged.

    Args:
      deterministic: with what makes a step compute the same bits every time it runs.

    Raises:
      ValueError: that is asked for and cannot be had.
    """
    device = mesh.devices.flat[0]
    options = {flag.name: flag.value for flag in xla_flags(device.platform, device.device_kind)}
    needed = {}
    if deterministic:
        if device.platform in ("gpu", "cuda") and device not in jax.devices():
            raise ValueError(
                "run.deterministic = True: the compiler for absent GPUs finds no matmul kernels in "
                "that mode; compile with run.deterministic = False, which needs about the same"
            )
        flags = DETERMINISTIC.get("gpu" if device.platform == "cuda" else device.platform)
        if flags is None:
            raise ValueError(
                f"run.deterministic = True: of the {device.platform} back end it is not known what "
                f"makes it deterministic, only of {', '.join(DETERMINISTIC)}; set it to False"
            )
        needed = {flag.name: flag.value for flag in flags}
    options |= needed
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
            if unknown[1] in needed:
                raise ValueError(
                    f"run.deterministic = True: this version of XLA does not know {unknown[1]}, "
                    "without which a step may differ from run to run; set it to False, or install "
                    "another version of jaxlib"
                ) from error
            log.warning(
                "this version of XLA does not know %s: the step is compiled without it; without "
                "it a step may be slower, and its results are the same",
                unknown[1],
            )
            del options[unknown[1]]
        else:
            break
    return options
