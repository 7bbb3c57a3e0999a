"""What is measured before a large run: the hosts, the network, the storage, the room."""

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
"""Clocks that differ by more make logs of several hosts useless, and certificates invalid."""

SLOW_BYTES_PER_SECOND = 50e6
"""Storage below this makes every checkpoint of a billion parameters take minutes."""

SLOW_COLLECTIVE = 5
"""A sum is called slow that takes this many times as long as it should: one call is measured, and
starting it counts."""

PROBE_BYTES = 1 << 26
STORE_BYTES = 1 << 23
COLLECTIVE_BYTES = 1 << 22


@dataclass(frozen=True)
class Finding:
    """One check: what was measured, and what to do about it ("" when it is good)."""

    check: str
    measured: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.check}: {self.measured}" + (f"; {self.advice}" if self.advice else "")


def examine_run(config: Config, workdir: pathlib.Path) -> list[Finding]:
    """All checks, for a run of this config in this folder; every process makes the same call."""
    counted = isinstance(config.model, ModelConfig)  # there are formulas
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
    advice = f"no address for {', '.join(lost)}: add them to DNS or /etc/hosts" if lost else ""
    yield Finding("hosts", f"{len(hosts)} ({', '.join(hosts[:4])})", advice)
    clocks = processes.all_reports("clocks", time.time())  # all have just spoken to each other
    apart = max(clocks) - min(clocks)
    late = "set the clocks by NTP" if apart > CLOCK_SECONDS else ""
    yield Finding("clocks", f"at most {apart:.2f} s apart", late)
    yield Finding("devices", f"{jax.device_count()}, {jax.local_device_count()} per process")


def _collectives(layout: Layout, batch: int) -> Iterator[Finding]:
    """A sum of 4 MiB over each axis of the mesh, the second time it runs, beside what it should
    take on devices that the planner knows."""
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
        advice = "" if right else "the sum is wrong: leave out the hosts of this axis, one by one"
        if should := expected.get(axis):
            measured += f", and {1e3 * should:.2f} ms by the planner"
            if right and seconds > SLOW_COLLECTIVE * should:
                advice = (
                    "slow: look for a host or a link of this axis that is, such as with nccl-tests"
                )
        yield Finding(f"sum over {axis} {size}", measured, advice)


def expected_seconds(
    layout: Layout, global_batch_size: int, device_kind: str, platform: str
) -> dict[str, float]:
    """What the sums of a preflight should take by axis, by the planner's model of links; empty on
    CPUs and on devices that it does not know."""
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
      once: those of them that several checkpoints have once.
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
        kept = run.keep_last + run.keep_best + 1  # the new one is whole before an old one goes
        if run.keep_every:
            kept += run.steps // run.keep_every
        needs = kept * (whole - once) + once
        yield Finding(
            "disk",
            f"{gigabytes(free)} free, {kept} checkpoints take {gigabytes(needs)}",
            "" if needs <= free else "make room, or lower run.keep_last or raise run.keep_every",
        )


def _object_store(workdir: pathlib.Path) -> Iterator[Finding]:
    """Puts, reads and removes 8 MiB at the run's address, if it has one."""
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
        advice = "check the address, credentials, and the right to write and delete there"
        yield Finding("object store", str(error), advice)
        return
    yield Finding(
        "object store",
        f"{store.address}: {STORE_BYTES / seconds / 1e6:.0f} MB/s put",
        "" if same else "what was read is not what was put: do not train there",
    )


def _host_memory(state_bytes: float) -> Finding:
    """A save copies the state to the hosts, each its share."""
    memory, share = host_memory_bytes(), state_bytes / jax.process_count()
    return Finding(
        "host memory",
        f"{gigabytes(memory)}, a save copies {gigabytes(share)}",
        "" if 2 * share < memory else "train on more hosts, or with smaller moments",
    )
