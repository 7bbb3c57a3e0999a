"""Disk failure test: a full or read-only disk during a training run, and its recovery.

    python tools/chaos/disk.py

Four runs, each on a separate small file system, in a mount namespace that ends with the command.
After the second checkpoint the disk is full or read-only: for a while, until two saves have failed,
or for good, and then the same command runs again on the repaired disk. Faults: a traceback; more
lines than one for each failed save, one for the run's end and two for each file of metrics; a
status other than 0 (for a while) or 1 (for good); the loss of a reported checkpoint; a last state
that differs in any bit from that of a run on a good disk. The last line is JSON.

Needs root and mounts; without them it prints so and returns 0. A disk that is read-only for a while
affects only files opened then: Linux allows writes to files that are already open. For good, it is
an ext4 after an error, which refuses those, too.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from kills import Attempt, Faults, await_line, output, run, start, state

MEGABYTES = 48
"""Size of each file system; a checkpoint has 1 MB."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a run has faults."""
    parser = argparse.ArgumentParser(description="Makes the disk of a training run fail.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    options = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        os.unshare(os.CLONE_NEWNS)
        call("mount", "--make-rprivate", "/")
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"skipped: file systems cannot be mounted here ({error})")
        return 0
    folder = pathlib.Path(tempfile.mkdtemp(prefix="chaos_"))
    faults, found = Faults(), {}
    run(folder / "good", 1, options.steps)
    good = state(str(folder / "good"), options.steps)
    for name in options.cases:
        disk = folder / name
        disk.mkdir()
        found[name] = CASES[name](disk, options.steps, faults)
        print(f"{name}: {found[name]}", flush=True)
        try:
            if state(str(disk / "run"), options.steps) != good:
                faults.append(f"{name}: the last state is not that of the run on a good disk")
        except OSError as error:
            faults.append(f"{name}: {error}")
        call("umount", disk)
    shutil.rmtree(folder)
    print(json.dumps({**vars(options), **found, "faults": list(faults)}))
    return int(bool(faults))


def full_for_a_while(disk: pathlib.Path, steps: int, faults: Faults) -> dict:
    """A file fills the disk, and is removed later."""
    call("mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "none", disk)
    return disturb(disk, steps, lambda: fill(disk), lambda: (disk / "filler").unlink(), faults)


def read_only_for_a_while(disk: pathlib.Path, steps: int, faults: Faults) -> dict:
    """A read-only mount hides the file system for a while."""
    call("mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "none", disk)

    def take() -> None:
        call("mount", "--bind", disk, disk)
        call("mount", "-o", "remount,bind,ro", disk)

    return disturb(disk, steps, take, lambda: call("umount", disk), faults)


def full_for_good(disk: pathlib.Path, steps: int, faults: Faults) -> dict:
    """A file fills the disk until the run has ended."""
    call("mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "none", disk)
    first = disturb(disk, steps, lambda: fill(disk), None, faults)
    (disk / "filler").unlink()
    return again(disk, steps, first, faults)


def read_only_for_good(disk: pathlib.Path, steps: int, faults: Faults) -> dict:
    """An ext4 after an error, read-only until it is mounted again."""
    image = disk.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(MEGABYTES << 20)
    call("mkfs.ext4", "-q", image)
    call("mount", "-o", "loop", image, disk)
    first = disturb(disk, steps, lambda: call("mount", "-o", "remount,abort", disk), None, faults)
    call("umount", disk)
    call("mount", "-o", "loop", image, disk)
    return again(disk, steps, first, faults)


CASES = {
    each.__name__: each
    for each in (full_for_a_while, read_only_for_a_while, full_for_good, read_only_for_good)
}


def disturb(
    disk: pathlib.Path,
    steps: int,
    take: Callable[[], object],
    give: Callable[[], object] | None,
    faults: Faults,
) -> dict:
    """A run whose disk fails after its second checkpoint, and is repaired after two failed saves,
    or never; its outcome."""
    (process,) = start(disk / "run", 1, steps)
    await_line([process], "checkpoint 40 saved")
    take()
    if give:
        await_failures(process, 2)
        give()
    text = output(process, faults)
    status = process.returncode
    warnings = [line for line in text.splitlines() if line.startswith(("warning:", "error:"))]
    failures = [line for line in warnings if re.search(r"saving checkpoint \d+", line)]
    if status != (0 if give else 1):
        faults.append(f"{disk.name}: status {status}: {text[-2000:]}")
    if "Traceback" in text or len(failures) < 2 or len(warnings) > len(failures) + 4:
        faults.append(f"{disk.name}: {text[-4000:]}")
    return {"status": status, "failed_saves": len(failures), "last": (warnings or [""])[-1]}


def again(disk: pathlib.Path, steps: int, first: dict, faults: Faults) -> dict:
    """The same command on the repaired disk."""
    (process,) = start(disk / "run", 1, steps)
    text = output(process, faults)
    resumed = re.search(r"resuming at step (\d+)", text)
    if process.returncode or not resumed or int(resumed[1]) < 40:
        faults.append(f"{disk.name}, again: status {process.returncode}: {text[-2000:]}")
    return first | {"resumed_at": int(resumed[1]) if resumed else 0}


def fill(disk: pathlib.Path) -> None:
    """Fills a file system completely."""
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def await_failures(process: Attempt, count: int) -> None:
    """Waits until `count` saves have failed, or the run has ended."""
    while process.poll() is None and len(re.findall(r"saving .* failed", process.text())) < count:
        time.sleep(0.02)


def call(*words: str | pathlib.Path) -> None:
    subprocess.run([str(word) for word in words], check=True)


if __name__ == "__main__":
    sys.exit(main())
