"""Takes the disk away from a training run in its middle, gives it back, and compares the end.

    python tools/chaos/disk.py

Four runs, each on a small file system of its own, in a mount namespace that ends with the command.
From the second checkpoint on the disk is full, or read-only: for a while, until two saves have
failed; or for good, and then the same command is given again once the disk is mended. What is held
against a run: a traceback, more lines than one for each failed save, one for its end and two for
each file of metrics, a status other than 0 (for a while) or 1 (for good), a checkpoint that was
reported and is lost, and a last state that is not that of a run on a good disk to the bit. The last
line is JSON.

Needs root; without, or where mounting is not allowed, it says so and ends with 0. A disk that is
read-only for a while is so for what is opened then: Linux keeps no file that is open for writing
from being written. One that is so for good is an ext4 that met an error, which refuses that, too.
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
"""Of each file system; a checkpoint has one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 when anything is held against a run."""
    parser = argparse.ArgumentParser(description="Takes the disk away from a training run.")
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
    """A file takes all that is left, and goes again."""
    call("mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "none", disk)
    return disturb(disk, steps, lambda: fill(disk), lambda: (disk / "filler").unlink(), faults)


def read_only_for_a_while(disk: pathlib.Path, steps: int, faults: Faults) -> dict:
    """Another mount of the file system lies above it, read-only."""
    call("mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "none", disk)

    def take() -> None:
        call("mount", "--bind", disk, disk)
        call("mount", "-o", "remount,bind,ro", disk)

    return disturb(disk, steps, take, lambda: call("umount", disk), faults)


def full_for_good(disk: pathlib.Path, steps: int, faults: Faults) -> dict:
    """Until the run has ended."""
    call("mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "none", disk)
    first = disturb(disk, steps, lambda: fill(disk), None, faults)
    (disk / "filler").unlink()
    return again(disk, steps, first, faults)


def read_only_for_good(disk: pathlib.Path, steps: int, faults: Faults) -> dict:
    """An ext4 that met an error: it stays read-only until it is mounted anew."""
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
    """A run whose disk is taken away after its second checkpoint, and given back after two failed
    saves, or never; what it came to."""
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
    """The same command, on the disk that was mended."""
    (process,) = start(disk / "run", 1, steps)
    text = output(process, faults)
    resumed = re.search(r"resuming at step (\d+)", text)
    if process.returncode or not resumed or int(resumed[1]) < 40:
        faults.append(f"{disk.name}, again: status {process.returncode}: {text[-2000:]}")
    return first | {"resumed_at": int(resumed[1]) if resumed else 0}


def fill(disk: pathlib.Path) -> None:
    """Leaves no byte of a file system."""
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def await_failures(process: Attempt, count: int) -> None:
    """Returns once so many saves have failed, or the run has ended."""
    while process.poll() is None and len(re.findall(r"saving .* failed", process.text())) < count:
        time.sleep(0.02)


def call(*words: str | pathlib.Path) -> None:
    subprocess.run([str(word) for word in words], check=True)


if __name__ == "__main__":
    sys.exit(main())
