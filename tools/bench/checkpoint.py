"""Benchmark of checkpoints: the stall of a save, and the share of verification in a load.

    python tools/bench/checkpoint.py --gigabytes 2 --repeats 5

A state of parameters and two moments in float32, on JAX's devices, is saved and read again: from
disk, without the page cache, and from the page cache. With --frozen all arrays except one are the
same in each save, as with low-rank adapters. Processor seconds are of the whole process, and more
reliable on a busy machine. Medians of the repeats; the last line is JSON, appended to --json FILE.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
from provenance import provenance

from jaxscale import command_line
from jaxscale.checkpoints import restore, save
from jaxscale.checkpoints.retention import Retention
from jaxscale.storage import durable

ARRAYS = 8
"""Arrays of each of the three parts, about as many as a stack has weights."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the medians."""
    parser = argparse.ArgumentParser(description="Measures saves and loads of a state.")
    parser.add_argument(
        "--gigabytes",
        type=command_line.real(0, 1e6, above=True),
        default=2.0,
        help="of the state; default 2",
    )
    parser.add_argument("--repeats", type=command_line.whole(1, 10**6), default=5)
    parser.add_argument("--frozen", action="store_true", help="all arrays except one never change")
    parser.add_argument(
        "--rehearse", action="store_true", help="20 MB once, in place of --gigabytes and --repeats"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=command_line.output_file,
        help="append the medians as a line of JSON",
    )
    parser.add_argument("--folder", type=pathlib.Path, help="on the disk to measure")
    options = parser.parse_args(argv)
    if options.folder and not options.folder.is_dir():
        parser.error(f"--folder {options.folder} is not a folder; give one that exists")
    if options.rehearse:
        options.gigabytes, options.repeats = 0.02, 1
    state = make_state(options.gigabytes)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="checkpoint_", dir=options.folder))
    rounds = []
    try:
        with contextlib.closing(
            save.CheckpointWriter(folder / "checkpoints", Retention(1))
        ) as checkpoints:
            for number in range(options.repeats + 1):  # the first one compiles
                rounds.append(measure(checkpoints, number, state, options.frozen))
                print(f"{number}: {rounds[-1]}", flush=True)
    finally:
        shutil.rmtree(folder)
    medians = {
        name: round(statistics.median(each[name] for each in rounds[1:]), 4) for name in rounds[0]
    }
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    device = jax.devices()[0].device_kind
    about = {"bytes": num_bytes, "frozen": options.frozen, "device": device}
    record = {**about, "repeats": options.repeats, **medians}
    print(json.dumps(record))
    if options.json:
        with pathlib.Path(options.json).open("a") as lines:
            lines.write(json.dumps({"benchmark": "checkpoint", **provenance(), **record}) + "\n")
    return 0


def make_state(gigabytes: float) -> dict[str, dict[str, jax.Array]]:
    """Random arrays in three parts."""
    rows = max(1, int(gigabytes * 1e9 / (3 * ARRAYS * 4 * 4096)))
    keys = iter(jax.random.split(jax.random.key(0), 3 * ARRAYS))
    return {
        part: {f"w{i}": jax.random.normal(next(keys), (rows, 4096)) for i in range(ARRAYS)}
        for part in ("params", "mu", "nu")
    }


class Spent(NamedTuple):
    """Wall-clock seconds, and processor seconds of this process."""

    wall: float
    processor: float


def measure(
    checkpoints: save.CheckpointWriter, step: int, state: Any, are_frozen: bool
) -> dict[str, float]:
    """Saves and reads a state once: seconds, bytes written, and verification's shares of a load."""
    frozen = {f"{part}/{name}" for part in state for name in state[part]} if are_frozen else set()
    frozen -= {"nu/w0"}
    changed = {
        part: {
            name: x if f"{part}/{name}" in frozen else x * jnp.float32(1 + step / 10_000)
            for name, x in arrays.items()
        }
        for part, arrays in state.items()
    }
    state = jax.block_until_ready(changed)
    finite = ("params", "mu", "nu")
    found, begin, clock = {}, time.perf_counter(), time.time()
    spent = timed(lambda: checkpoints.save(step, state, {}, finite=finite, frozen=frozen))
    found["stall_seconds"], found["stall_processor_seconds"] = spent
    checkpoints.wait()
    found["saved_seconds"] = time.perf_counter() - begin
    if checkpoints.outcome():
        raise SystemExit(checkpoints.outcome())
    about = [path.stat() for path in checkpoints.directory.rglob("*") if path.is_file()]
    found["written_bytes"] = sum(one.st_size for one in about if one.st_mtime >= clock - 1)
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    for where in ("disk", "cache"):
        if where == "disk":
            drop_cache(checkpoints.directory)
        with timed_sums() as sums:
            load = timed(
                lambda: jax.block_until_ready(restore.restore(checkpoints, step, abstract))
            )
        found[f"load_from_{where}_seconds"] = load.wall
        found[f"load_from_{where}_processor_seconds"] = load.processor
        found[f"verified_share_from_{where}"] = sums[0].wall / load.wall
        found[f"verified_processor_share_from_{where}"] = sums[0].processor / load.processor
    return {name: round(value, 4) for name, value in found.items()}


def timed(work: Callable[[], Any]) -> Spent:
    """Times a function."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return Spent(time.perf_counter() - wall, time.process_time() - processor)


@contextlib.contextmanager
def timed_sums() -> Iterator[list[Spent]]:
    """Times each call of `array_sums` in the context."""
    plain = restore.array_sums
    spent: list[Spent] = []

    def measured(arrays: Any, **settings: Any) -> Any:
        jax.block_until_ready(arrays)
        found = {}
        spent.append(timed(lambda: found.update(plain(arrays, **settings))))
        return found

    restore.array_sums = measured
    try:
        yield spent
    finally:
        restore.array_sums = plain


def drop_cache(folder: pathlib.Path) -> None:
    """Drops files from the page cache."""
    durable.sync_tree(folder)
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
