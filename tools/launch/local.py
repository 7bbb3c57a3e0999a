"""Local launcher: runs a command as several processes on this machine.

    python tools/launch/local.py 4 -- python -m jaxscale.train --config configs/tiny.py

Each process gets --coordinator, --num_processes and --process_id; its lines are printed with its
number in front, to the same stream. On a CPU, JAX_NUM_CPU_DEVICES=2 in the environment gives each
process two devices; GPUs are assigned in equal parts with CUDA_VISIBLE_DEVICES. If one process
fails, or at Ctrl-C, the others get SIGTERM, at which training saves. A second Ctrl-C kills.

Returns the status of the process that failed first, or 0.
"""

import argparse
import ctypes
import functools
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

GRACE_SECONDS = 30
"""Time for the others to end by themselves after the first failure."""

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1  # of linux/prctl.h

GLOO = re.compile(
    r"(?=.*(Gloo|Rank|peer|ranks))"
    r"((\[Gloo\]|Rank|is|connected|to|peer|ranks\.?|Expected|number|of|:|\d+)\s*)+"
)
"""Connection messages of JAX's CPU collectives, interleaved between threads."""


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the processes and waits for all of them."""
    parser = argparse.ArgumentParser(
        description="Runs a command as several processes on this machine."
    )
    parser.add_argument("processes", metavar="N", type=int, help="number of processes")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND, as for one process")
    options = parser.parse_args(argv)
    command = options.command[options.command[:1] == ["--"] :]
    if options.processes < 1 or not command:
        parser.error("expected a number from 1 up, then -- and a command")
    os.environ.setdefault("JAXSCALE_TOKEN", secrets.token_hex(16))  # refuses other processes
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    try:
        started = [start(command, i, options.processes, port) for i in range(options.processes)]
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: end(started, signal.SIGTERM))
    printing = [
        threading.Thread(target=show, args=(i, *pipe))
        for i, process in enumerate(started)
        for pipe in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    ]
    for thread in printing:
        thread.start()
    status = wait(started)
    for thread in printing:
        thread.join()
    return status


def start(command: Sequence[str], process_id: int, count: int, port: int) -> subprocess.Popen:
    """Starts one process of `count`, in a separate session: Ctrl-C reaches it through us."""
    flags = (
        f"--coordinator=127.0.0.1:{port}",
        f"--num_processes={count}",
        f"--process_id={process_id}",
    )
    environ = os.environ | {"PYTHONUNBUFFERED": "1"} | gpus(process_id, count)
    return subprocess.Popen(
        [*command, *flags],
        env=environ,
        start_new_session=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=functools.partial(end_with_parent, os.getpid()),
    )


def end_with_parent(parent: int) -> None:
    """In a new process: sends it SIGTERM when its parent ends, even by kill -9 (Linux only)."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(128 + signal.SIGTERM)


def gpus(process_id: int, count: int) -> dict[str, str]:
    """The GPUs of one process, an equal part of this machine's.

    Raises:
      ValueError: the GPUs do not divide over the processes.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        files = [name for name in os.listdir("/dev") if name[:6] == "nvidia" and name[6:].isdigit()]
        visible = ",".join(map(str, range(len(files))))
    names = visible.split(",") if visible else []
    if len(names) % count:
        raise ValueError(
            f"{len(names)} GPUs do not divide over {count} processes; set "
            "CUDA_VISIBLE_DEVICES to the GPUs to use, or to '' for none"
        )
    share = len(names) // count
    mine = names[process_id * share : (process_id + 1) * share]
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)} if names else {}


def show(process_id: int, lines: IO[str], target: IO[str]) -> None:
    """Forwards lines of a process to one of our streams, with its number in front."""
    with lines:
        for line in lines:
            if not GLOO.fullmatch(line):
                print(f"[{process_id}] {line}", end="", file=target, flush=True)


def end(processes: Sequence[subprocess.Popen], number: int) -> None:
    """Signals the running processes; the next signal kills them."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: end(processes, signal.SIGKILL))


def wait(processes: Sequence[subprocess.Popen]) -> int:
    """Waits for all processes, and after a failure ends the others."""
    failed: int | None = None
    deadlines = [(GRACE_SECONDS, signal.SIGTERM), (2 * GRACE_SECONDS, signal.SIGKILL)]
    since = 0.0
    while None in (codes := [process.poll() for process in processes]):
        if failed is None:
            failed = next(filter(None, codes), None)
            since = time.monotonic()
        elif deadlines and time.monotonic() - since > deadlines[0][0]:
            end(processes, deadlines.pop(0)[1])
        time.sleep(0.1)
    code = next(filter(None, [failed, *codes]), 0)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
