"""Preflight checks: hosts, clocks, network, storage bandwidth, free space."""

import contextlib
import os
import pathlib
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxscale.config import Config, RunConfig
from jaxscale.config.layout import Layout, resolve_sizes
from jaxscale.config.model import ModelConfig
from jaxscale.distributed import processes
from jaxscale.formatting import gigabytes
from jaxscale.hardware import find_chip, host_memory_bytes
from jaxscale.planner.auto_layout import devices_here
from jaxscale.planner.cost.collectives import axis_levels, reduce_seconds
from jaxscale.planner.memory.at_rest import unchanged_bytes, whole_state_bytes
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.sharding.mesh import make_mesh
from jaxscale.sharding.specs import REPLICATED
from jaxscale.storage.local_tier import store_of
from jaxscale.storage.object_store import StoreError

CLOCK_SECONDS = 1.0
"""The largest difference of clocks: more makes logs of several hosts useless, and certificates
invalid."""

SLOW_BYTES_PER_SECOND = 50e6
"""The slowest storage: below it every checkpoint of a billion parameters takes minutes."""

SLOW_COLLECTIVE = 5
"""The ratio of measured to expected time from which a sum is slow: one call is measured, with its
start."""

PROBE_BYTES = 1 << 26
STORE_BYTES = 1 << 23
COLLECTIVE_BYTES = 1 << 22


@dataclass(frozen=True)
class Finding:
    """The result of a check: the measurement, and advice ("" if it is good)."""

    check: str
    measured: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.check}: {self.measured}" + (f"; {self.advice}" if self.advice else "")


def examine_run(config: Config, workdir: pathlib.Path) -> list[Finding]:
    """Does all checks for a run of this config in this folder, in every process."""
    counted = isinstance(config.model, ModelConfig)  # a shipped family, with formulas
    whole, once = 0, 0
    if counted:
        whole = whole_state_bytes(config.model, config.optimizer)
        once = unchanged_bytes(config.model, config.optimizer.groups)
    return [
        *_hosts(),
        *_collectives(config.layout, config.data.global_batch_size),
        *_storage(workdir, config.run, whole, once),
        *_object_store(workdir),
        _host_memory(whole),
    ]


def _hosts() -> Iterator[Finding]:
    hosts = sorted(set(processes.all_reports("hosts", socket.gethostname())))
    lost = []
    for host in hosts:
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            lost.append(host)
    lost = sorted({host for each in processes.all_reports("unresolved", lost) for host in each})
    advice = f"no IP address for {', '.join(lost)}: add them to DNS or /etc/hosts" if lost else ""
    yield Finding("hosts", f"{len(hosts)} ({', '.join(hosts[:4])})", advice)
    clocks = processes.all_reports("clocks", time.time())  # all processes have just synchronised
    skew = max(clocks) - min(clocks)
    late = "set the clocks by NTP" if skew > CLOCK_SECONDS else ""
    yield Finding("clocks", f"at most {skew:.2f} s apart", late)
    yield Finding("devices", f"{jax.device_count()}, {jax.local_device_count()} per process")


def _collectives(layout: Layout, batch: int) -> Iterator[Finding]:
    """A sum of 4 MiB over each axis of the mesh, timed at its second run, with the expected time on
    devices that the planner knows."""
    layout = resolve_sizes(layout, jax.device_count())
    mesh, device = make_mesh(layout), jax.devices()[0]
    expected = expected_seconds(layout, batch, device.device_kind, device.platform)
    array = jnp.ones(COLLECTIVE_BYTES // 4, jnp.float32)
    for axis, size in layout.sizes.items():
        if size == 1:
            continue
        total = jax.jit(
            jax.shard_map(
                lambda x, axis=axis: jax.lax.psum(x, axis),
                mesh=mesh,
                in_specs=REPLICATED,
                out_specs=REPLICATED,
            )
        )
        right = float(total(array)[0]) == size
        begin = time.perf_counter()
        jax.block_until_ready(total(array))
        seconds = time.perf_counter() - begin
        measured = f"4 MiB in {1e3 * seconds:.2f} ms, {COLLECTIVE_BYTES / seconds / 1e9:.2f} GB/s"
        advice = "" if right else "the sum is wrong: exclude the hosts of this axis, one by one"
        if should := expected.get(axis):
            measured += f", and {1e3 * should:.2f} ms by the planner"
            if right and seconds > SLOW_COLLECTIVE * should:
                advice = "slow: find the slow host or link of this axis, such as with nccl-tests"
        yield Finding(f"sum over {axis} {size}", measured, advice)


def expected_seconds(
    layout: Layout, global_batch_size: int, device_kind: str, platform: str
) -> dict[str, float]:
    """Axis -> expected time of a preflight's sum, by the planner's model of links; empty on CPUs
    and unknown devices."""
    if platform == "cpu" or find_chip(device_kind) is None:
        return {}
    cluster = devices_here(device_kind, platform, layout.num_devices)
    levels = axis_levels(cluster, Parallelism.of(layout, global_batch_size))
    return {
        axis: float(reduce_seconds(levels[axis], COLLECTIVE_BYTES))
        for axis, size in layout.sizes.items()
        if size > 1 and axis in levels
    }


def _storage(workdir: pathlib.Path, run: RunConfig, whole: float, once: float) -> Iterator[Finding]:
    """Writes and reads 64 MiB in the run's folder.

    Args:
      whole: bytes of a checkpoint.
      once: bytes of it that several checkpoints share.
    """
    probe = workdir / f".preflight_{jax.process_index()}"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        with probe.open("wb") as file:
            file.write(os.urandom(1 << 20) * (PROBE_BYTES >> 20))
            file.flush()
            os.fsync(file.fileno())
        speed = PROBE_BYTES / (time.perf_counter() - begin)
        error = ""
    except OSError as failure:
        speed, error = 0.0, str(failure)
    with contextlib.suppress(OSError):
        probe.unlink()
    slowest = min(processes.all_reports("storage", speed))
    advice = "" if slowest > SLOW_BYTES_PER_SECOND else "saves will be slow: use faster storage"
    yield Finding(
        "storage",
        f"{slowest / 1e6:.0f} MB/s written" if slowest else f"cannot be written: {error}",
        advice if slowest else "give another --workdir",
    )
    if not error:
        free = shutil.disk_usage(workdir).free
        kept = run.keep_last + run.keep_best + 1  # 1: written before an old one is removed
        if run.keep_every:
            kept += run.steps // run.keep_every
        needs = kept * (whole - once) + once
        yield Finding(
            "disk",
            f"{gigabytes(free)} free, {kept} checkpoints take {gigabytes(needs)}",
            "" if needs <= free else "free space, lower run.keep_last, or raise run.keep_every",
        )


def _object_store(workdir: pathlib.Path) -> Iterator[Finding]:
    """Uploads, reads and removes 8 MiB at the run's URL, if any."""
    store = store_of(workdir)
    if store is None or jax.process_index() != 0:
        return
    data, name = os.urandom(STORE_BYTES), "preflight"
    try:
        begin = time.perf_counter()
        store.write(name, data)
        seconds = time.perf_counter() - begin
        same = store.read(name) == data
        store.remove([name])
    except StoreError as error:
        advice = "check the URL, credentials, and permissions to write and delete"
        yield Finding("object store", str(error), advice)
        return
    yield Finding(
        "object store",
        f"{store.url}: {STORE_BYTES / seconds / 1e6:.0f} MB/s uploaded",
        "" if same else "the object read differs from the upload: do not train there",
    )


def _host_memory(state_bytes: float) -> Finding:
    """Host memory for a save, which copies a share of the state to each host."""
    memory, share = host_memory_bytes(), state_bytes / jax.process_count()
    return Finding(
        "host memory",
        f"{gigabytes(memory)}, a save copies {gigabytes(share)}",
        "" if 2 * share < memory else "train on more hosts, or with smaller moments",
    )
