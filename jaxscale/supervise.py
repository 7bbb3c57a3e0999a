"""Restarts a command on failure, with a failure budget.

python -m jaxscale.supervise [--log FILE] [--failures N] [--layouts LAYOUT ...]
       [--wait_seconds S] [--grace_seconds S] -- COMMAND
"""

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import functools
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from jaxscale import command_line, run_folder
from jaxscale.config.layout import Layout
from jaxscale.formatting import duration
from jaxscale.storage.local_tier import CHECKPOINTS, local_steps

log = logging.getLogger("jaxscale")

STOPPED = 143
"""The exit status of a command that saved and stopped after a signal (`run.signals`)."""

REFUSED = 2
FINAL = {REFUSED: "it was refused: a restart would not help", 130: "it was interrupted (Ctrl-C)"}
"""Exit statuses without a restart -> the reason."""

FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGQUIT,
)
"""Signals that are forwarded to the command; after all except SIGQUIT it is not restarted."""

MOST_WAIT_SECONDS = 60.0
HEALTHY_SECONDS = 600.0
"""Without a known folder, an attempt that lasts this long counts as progress."""

TRAIN = "jaxscale.train"
"""The command that has a default folder."""

TAIL_LINES = 20
LINE_CHARS = 4096
"""Lines are kept in pieces of at most this many characters: a line may be endless."""

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def main(argv: Sequence[str]) -> int:
    """Returns the exit status of the command's last attempt."""
    argv = list(argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    options, _ = command_line.parse(_parser(), argv[:cut])
    command = argv[cut + 1 :]
    if not command:
        command_line.refuse("no command; add it after --, as -- python -m jaxscale.train ...")
    with command_line.refusals():
        workdir = _workdir(command)
        if workdir:
            run_folder.check_files(workdir)
    file = options.log or (workdir or pathlib.Path()) / "incidents.jsonl"
    if options.log or file.parent.exists():  # else a run's folder, and the run may be refused
        with command_line.refusals():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.open("a").close()
    command_line.log_to_stdout()
    return _Supervisor(command, workdir, file, options).run()


class _Supervisor:
    """Runs the attempts of a command in order."""

    def __init__(
        self,
        command: list[str],
        workdir: pathlib.Path | None,
        file: pathlib.Path,
        options: argparse.Namespace,
    ) -> None:
        self._command, self._workdir, self._file = command, workdir, file
        self._failures, self._wait_seconds = options.failures, options.wait_seconds
        self._grace_seconds = options.grace_seconds
        self._layouts: list[list[str]] = options.layouts or [[]]
        self._child: subprocess.Popen | None = None
        self._asked = threading.Event()  # to stop
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)

    def run(self) -> int:
        """Restarts the command until it succeeds, or there is a reason to stop; its last status."""
        with self._forwarding():
            failed = 0
            for attempt in range(1, sys.maxsize):
                before, begin = newest_step(self._workdir), time.monotonic()
                status = self._attempt_each()
                after, seconds = newest_step(self._workdir), time.monotonic() - begin
                progress = after > before if self._workdir else seconds > HEALTHY_SECONDS
                failed = 0 if progress else failed + 1
                backoff = min(MOST_WAIT_SECONDS, self._wait_seconds * 2 ** max(0, failed - 1))
                wait = 0.0 if status == STOPPED and progress else backoff
                reason = self._reason_to_end(status, failed)
                if status:
                    action = f"gave up: {reason}" if reason else f"restart in {wait:g} s"
                    self._report(attempt, status, seconds, (before, after), action)
                if reason or not status:
                    return status
                if self._asked.wait(wait):
                    return STOPPED
            raise AssertionError

    def _reason_to_end(self, status: int, failed: int) -> str:
        if self._asked.is_set():
            return "the supervisor was asked to stop"
        if failed >= self._failures:
            progress = "a new checkpoint" if self._workdir else f"lasting {HEALTHY_SECONDS:.0f} s"
            return f"{failed} attempts in a row failed without {progress}"
        return FINAL.get(status, "")

    def _attempt_each(self) -> int:
        """Runs the command with the first layout that it does not refuse; its exit status."""
        *others, last = self._layouts
        for layout in others:
            status = self._attempt(layout)
            if status != REFUSED or self._asked.is_set():
                return status
            log.info(f"supervise: refused with {' '.join(layout)}; trying the next")
        return self._attempt(last)

    def _attempt(self, layout: Sequence[str]) -> int:
        """Runs the command once; its exit status, or 128 + the signal that killed it.

        Args:
          layout: settings that are added to the command.
        """
        self._tail.clear()
        try:
            self._child = subprocess.Popen(
                [*self._command, *layout],
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                preexec_fn=functools.partial(_end_with_parent, os.getpid()),
            )
        except OSError as error:
            command_line.refuse(f"{self._command[0]}: {error.strerror}")
        if self._asked.is_set():  # the signal came before the child existed
            self._child.send_signal(signal.SIGTERM)
        assert self._child.stderr
        reading = threading.Thread(target=self._read, args=(self._child.stderr,), daemon=True)
        reading.start()
        code = self._child.wait()
        reading.join(5)  # a grandchild may keep the pipe open
        return code if code >= 0 else 128 - code

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in iter(functools.partial(lines.readline, LINE_CHARS), ""):
                self._tail.append(line.rstrip("\n"))
                with contextlib.suppress(OSError):
                    sys.stderr.write(line)
                    sys.stderr.flush()

    def _report(
        self, attempt: int, status: int, seconds: float, steps: tuple[int, int], action: str
    ) -> None:
        """Logs an attempt, and appends its record to the file of incidents."""
        name = f" ({said})" if (said := meaning(status)) else ""
        log.info(f"supervise: attempt {attempt} ended with {status}{name}; {action}")
        record = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "attempt": attempt,
            "status": status,
            "seconds": round(seconds, 3),
            "checkpoint_before": steps[0],
            "checkpoint_after": steps[1],
            "action": action,
            "stderr": list(self._tail),
        }
        with contextlib.suppress(OSError):
            if status != REFUSED:  # a mistyped --config must not leave a folder
                self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def _kill(self) -> None:
        """Kills a command that has not stopped within the grace period."""
        if self._child is not None and self._child.poll() is None:
            log.info(
                f"supervise: the command did not stop within {duration(self._grace_seconds)}; "
                "killing it"
            )
            self._child.kill()

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        def forward(number: int, frame: Any) -> None:
            if number != signal.SIGQUIT and not self._asked.is_set():
                self._asked.set()
                killer = threading.Timer(self._grace_seconds, self._kill)
                killer.daemon = True
                killer.start()
            if self._child is not None and self._child.poll() is None:
                self._child.send_signal(number)

        before = {number: signal.getsignal(number) for number in FORWARDED}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, forward)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def meaning(status: int) -> str:
    """The meaning of an exit status: a request to stop, or the signal that killed the command; ""
    for others, such as ssh's 255 and signals without a name.

    >>> meaning(137), meaning(143), meaning(255), meaning(1)
    ('SIGKILL', 'it was asked to stop', '', '')
    """
    if status == STOPPED:  # also for requests other than a signal
        return "it was asked to stop"
    try:
        return signal.Signals(status - 128).name
    except ValueError:
        return ""


def newest_step(workdir: pathlib.Path | None) -> int:
    """The newest checkpoint's step in a run's folder, or 0."""
    try:
        return max(local_steps(workdir / CHECKPOINTS) if workdir else [], default=0)
    except OSError:  # such as an unresponsive disk, which the command will report
        return 0


def _layout(text: str) -> list[str]:
    """The type of --layouts: "fsdp=8,tensor=2" as settings of a command.

    Raises:
      argparse.ArgumentTypeError: it is not a list of a layout's settings.
    """
    known = [field.name for field in dataclasses.fields(Layout)]
    for word in text.split(","):
        name, equals, value = word.partition("=")
        if name not in known or not equals or not value:
            raise argparse.ArgumentTypeError(
                f"{word!r} of {text!r} is not a setting of a layout; give NAME=VALUE,... with "
                f"names of {', '.join(known)}"
            )
    return [f"--config.layout.{word}" for word in text.split(",")]


def _workdir(command: Sequence[str]) -> pathlib.Path | None:
    """The --workdir of the command, or the default folder of `train` for its --config."""
    if text := _given("--workdir", command):
        return run_folder.folder_of(text)
    config = _given("--config", command) if TRAIN in command else ""
    return run_folder.default_folder(config) if config else None


def _given(flag: str, command: Sequence[str]) -> str:
    """The last value of a flag in the command, or ""."""
    found = ""
    for word, following in zip(command, [*command[1:], ""]):
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def _end_with_parent(parent: int) -> None:
    """Has a new process get SIGTERM, and save, when the supervisor is killed (Linux only)."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(STOPPED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxscale.supervise",
        usage="python -m jaxscale.supervise [--log FILE] [--failures N] [--layouts LAYOUT ...] "
        "[--wait_seconds S] [--grace_seconds S] -- COMMAND",
        description="Restarts a command on failure; a command that resumes, such as training, then "
        "continues.",
        epilog="The exit status is that of the last attempt: 0 complete, 143 asked to stop, 2 "
        "refused.",
    )
    add: Callable[..., Any] = parser.add_argument
    add(
        "--log",
        metavar="FILE",
        type=pathlib.Path,
        help="file for a JSON line for each failed attempt; default incidents.jsonl in the run's "
        "folder",
    )
    add(
        "--failures",
        metavar="N",
        type=command_line.whole(1, 10**6),
        default=5,
        help="give up after N failures in a row without a new checkpoint; default 5",
    )
    add(
        "--layouts",
        metavar="LAYOUT",
        nargs="+",
        type=_layout,
        help="layouts, such as fsdp=8,tensor=2, to add to the command; one that is refused, for "
        "lack of devices, is followed by the next. To let the planner choose, train with "
        "--config.layout=auto",
    )
    add(
        "--wait_seconds",
        metavar="S",
        type=command_line.real(0, 3600),
        default=1.0,
        help="seconds before a restart, doubled by each failure up to a minute; default 1",
    )
    add(
        "--grace_seconds",
        metavar="S",
        type=command_line.real(0, 1e6),
        default=600.0,
        help="seconds that the command may take to save and stop before it is killed; default 600",
    )
    return parser


if __name__ == "__main__":
    command_line.run(main)
