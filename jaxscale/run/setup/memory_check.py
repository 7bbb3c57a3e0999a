"""Memory check: refuses, before compilation, a run that does not fit its devices."""

import jax
import jax.numpy as jnp

from jaxscale.config import Config
from jaxscale.config.model import ModelConfig
from jaxscale.formatting import gigabytes
from jaxscale.hardware import (
    GPU_MEMORY_FRACTION,
    GPU_MEMORY_VARIABLES,
    find_chip,
    gpu_memory_fraction,
    host_memory_bytes,
)
from jaxscale.planner.memory.at_rest import whole_state_bytes
from jaxscale.planner.memory.device_limit import check_device_limit
from jaxscale.planner.search.space import MEMORY_FRACTION, fraction_here
from jaxscale.training.engine import Engine
from jaxscale.training.state_placement import state_bytes


def check_run_fits_host(config: Config) -> None:
    """Refuses a run on CPUs whose state or batch exceeds the host's memory: the host would kill it
    silently.

    Raises:
      ValueError: names the settings.
    """
    if jax.default_backend() != "cpu" or not isinstance(config.model, ModelConfig):
        return
    limit, processes_here = host_memory_bytes(), jax.process_count()
    state = whole_state_bytes(config.model, config.optimizer)
    # Tokens, positions, segments and weights.
    batch = config.data.tokens_per_step * 4 * jnp.dtype(jnp.int32).itemsize
    for name, needs, settings in (
        ("parameters and optimizer state", state, "model.num_layers or model.d_model"),
        ("a batch", batch, "data.global_batch_size or data.seq_len"),
    ):
        if needs / processes_here > limit:
            raise ValueError(
                f"{name} of the run need {gigabytes(needs)}, and this host has "
                f"{gigabytes(limit)} of memory: lower {settings}, or train on more hosts"
            )


def check_memory(engine: Engine) -> None:
    """Refuses, before compilation, a step whose predicted memory exceeds these devices', if known.

    Raises:
      ValueError: with the number of micro-batches that fits.
    """
    device = engine.mesh.devices.flat[0]
    back_end = device.platform
    if back_end == "cpu":
        limit = host_memory_bytes() / jax.local_device_count()
        name = "this host's memory, which its devices share"
    else:
        chip = find_chip(device.device_kind)
        if not chip or back_end not in MEMORY_FRACTION:
            return
        limit, name = chip.memory_bytes * fraction_here(back_end), chip.name
        if back_end == "gpu" and (taken := gpu_memory_fraction()) < GPU_MEMORY_FRACTION:
            name += (
                f" (of which JAX takes {taken:.0%}: {GPU_MEMORY_VARIABLES[0]} in the environment)"
            )
    if (needs := state_bytes(engine.abstract_state)) > limit:
        raise ValueError(
            f"parameters and optimizer state alone need {gigabytes(needs)} on each device, and "
            f"a program may use {gigabytes(limit)} of {name}: raise layout.fsdp with "
            "layout.zero_stage = 3, layout.tensor or layout.pipeline"
        )
    check_device_limit(engine.config, back_end, limit, name)
