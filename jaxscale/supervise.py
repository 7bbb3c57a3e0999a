"""python -m jaxscale.supervise [--log FILE] [--failures N] [--layouts LAYOUT ...]
       [--wait_seconds S] [--grace_seconds S] -- COMMAND

Starts a command again when it fails, and says why it gave up.
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
"""The status of a command that was asked to stop, and saved (`run.signals`)."""

REFUSED = 2
FINAL = {REFUSED: "it was refused: a restart would not help", 130: "it was ended by hand"}
"""Statuses after which nothing is started again."""

PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGQUIT,
)
"""Signals that the command gets, too; after all but SIGQUIT nothing is started again."""

MOST_WAIT_SECONDS = 60.0
HEALTHY_SECONDS = 600.0
"""An attempt of a command whose folder is not known that lasted this long made progress."""

TRAIN = "jaxscale.train"
"""The command whose folder is known without --workdir."""

TAIL_LINES = 20
LINE_CHARS = 4096
"""Lines are kept in pieces of this size: one may never end."""

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def main(argv: Sequence[str]) -> int:
    """Returns the status of the command's last attempt."""
    argv = list(argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    options, _ = command_line.parse(_parser(), argv[:cut])
    command = argv[cut + 1 :]
    if not command:
        command_line.refuse("expected -- and a command, such as -- python -m jaxscale.train ...")
    with command_line.refusals():
        workdir = _workdir(command)
        if workdir:
            run_folder.check_files(workdir)
    file = options.log or (workdir or pathlib.Path()) / "incidents.jsonl"
    if options.log or file.parent.exists():  # else the folder of a run that may yet be refused
        with command_line.refusals():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.open("a").close()
    command_line.log_to_stdout()
    return _Supervisor(command, workdir, file, options).run()


class _Supervisor:
    """The attempts of a command, one after the other."""

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
        """Until the command succeeds, or nothing speaks for another attempt."""
        with self._passing_on():
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
                    action = f"gave up: {reason}" if reason else f"again in {wait:g} s"
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
        """Runs the command in the first layout that it does not refuse; its status."""
        *others, last = self._layouts
        for layout in others:
            status = self._attempt(layout)
            if status != REFUSED or self._asked.is_set():
                return status
            log.info(f"supervise: refused with {' '.join(layout)}; trying the next")
        return self._attempt(last)

    def _attempt(self, layout: Sequence[str]) -> int:
        """Runs the command once; its status, 128 + the signal for one that was killed.

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
        if self._asked.is_set():  # just before the child was there to be told
            self._child.send_signal(signal.SIGTERM)
        assert self._child.stderr
        reading = threading.Thread(target=self._read, args=(self._child.stderr,), daemon=True)
        reading.start()
        code = self._child.wait()
        reading.join(5)  # a grandchild may hold the pipe
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
        """One line for people, and one for programs."""
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
            if status != REFUSED:  # such as for a mistyped --config, which is to leave no folder
                self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def _kill(self) -> None:
        """Ends a command that was asked to stop, and has not."""
        if self._child is not None and self._child.poll() is None:
            log.info(
                f"supervise: the command has not ended in {duration(self._grace_seconds)}, and is "
                "killed"
            )
            self._child.kill()

    @contextlib.contextmanager
    def _passing_on(self) -> Iterator[None]:
        def pass_on(number: int, frame: Any) -> None:
            if number != signal.SIGQUIT and not self._asked.is_set():
                self._asked.set()
                killer = threading.Timer(self._grace_seconds, self._kill)
                killer.daemon = True
                killer.start()
            if self._child is not None and self._child.poll() is None:
                self._child.send_signal(number)

        before = {number: signal.getsignal(number) for number in PASSED_ON}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, pass_on)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def meaning(status: int) -> str:
    """What a status says besides its number: the signal that ended a command; "" where it says
    none, as the 255 of ssh and the numbers of signals without a name.

    >>> meaning(137), meaning(143), meaning(255), meaning(1)
    ('SIGKILL', 'it was asked to stop', '', '')
    """
    if status == STOPPED:  # also where it stopped for another reason than a signal
        return "it was asked to stop"
    try:
        return signal.Signals(status - 128).name
    except ValueError:
        return ""


def newest_step(workdir: pathlib.Path | None) -> int:
    """Of the checkpoints in a run's folder; 0 when there is none."""
    try:
        return max(local_steps(workdir / CHECKPOINTS) if workdir else [], default=0)
    except OSError:  # as of a disk that does not answer: the command will say it
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
                f"{word!r} of {text!r} is not a setting of a layout; expected NAME=VALUE,... with "
                f"names of {', '.join(known)}"
            )
    return [f"--config.layout.{word}" for word in text.split(",")]


def _workdir(command: Sequence[str]) -> pathlib.Path | None:
    """What the command has after --workdir, else where `train` keeps a run of its --config."""
    if text := _given("--workdir", command):
        return run_folder.folder_of(text)
    config = _given("--config", command) if TRAIN in command else ""
    return run_folder.default_folder(config) if config else None


def _given(flag: str, command: Sequence[str]) -> str:
    """What the command has after a flag, the last time it is there; "" without it."""
    found = ""
    for word, following in zip(command, [*command[1:], ""]):
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def _end_with_parent(parent: int) -> None:
    """In a new process: it gets SIGTERM, and saves, when the supervisor is killed (under Linux)."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(STOPPED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxscale.supervise",
        usage="python -m jaxscale.supervise [--log FILE] [--failures N] [--layouts LAYOUT ...] "
        "[--wait_seconds S] [--grace_seconds S] -- COMMAND",
        description="Starts a command again when it fails; what resumes by itself, as training "
        "does, then continues.",
        epilog="The status is that of the last attempt: 0 complete, 143 asked to stop, 2 refused.",
    )
    add: Callable[..., Any] = parser.add_argument
    add(
        "--log",
        metavar="FILE",
        type=pathlib.Path,
        help="a JSON object a line for each attempt that did not succeed; by default "
        "incidents.jsonl in the run's folder",
    )
    add(
        "--failures",
        metavar="N",
        type=command_line.whole(1, 10**6),
        default=5,
        help="give up after so many in a row without a new checkpoint; default 5",
    )
    add(
        "--layouts",
        metavar="LAYOUT",
        nargs="+",
        type=_layout,
        help="settings such as fsdp=8,tensor=2, added to the command; an attempt that is refused "
        "with one, since devices are missing, is made with the next. To let the planner choose, "
        "train with --config.layout=auto",
    )
    add(
        "--wait_seconds",
        metavar="S",
        type=command_line.real(0, 3600),
        default=1.0,
        help="before a failed command starts again; doubled by each failure, up to a minute; "
        "default 1",
    )
    add(
        "--grace_seconds",
        metavar="S",
        type=command_line.real(0, 1e6),
        default=600.0,
        help="once asked to stop, how long the command may take to save and end before it is "
        "killed; default 600",
    )
    return parser


if __name__ == "__main__":
    command_line.run(main)
