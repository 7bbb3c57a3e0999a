"""Errors of corrupt and unreadable checkpoints; an error in one process is raised in all."""

import errno
import os
import pathlib
import time
from collections.abc import Callable
from typing import cast

import jax

from jaxscale.distributed import processes
from jaxscale.storage import durable
from jaxscale.storage.local_tier import local_steps

NOT_READ = frozenset(
    os.strerror(code) for code in (errno.EACCES, errno.EPERM, *durable.MAY_PASS - {errno.EIO})
)
"""Errors of the operating system after which a file may be intact. EIO may be a transient error of
a network file system, or a bad sector: it counts as damage the second time."""

AGAIN_SECONDS = 5.0
"""Wait before a read that failed with EIO is repeated."""


class DamagedError(ValueError):
    """A corrupt checkpoint, which no run can use; `reason` is a short text."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class UnreadableError(OSError):
    """A checkpoint that the operating system does not let this process read: it may be intact."""

    exit_status = 1  # it may be transient, so a supervisor tries again


def unusable(
    directory: pathlib.Path, step: int, error: Exception
) -> DamagedError | UnreadableError:
    """The error to raise for a checkpoint whose read failed."""
    why = durable.reason(error)
    name = f"checkpoint {step} in {directory}"
    if why in NOT_READ or isinstance(error, MemoryError):
        return UnreadableError(f"{name} cannot be read: {why}; it is left as it is")
    before = max((other for other in local_steps(directory) if other < step), default=None)
    advice = (
        "there is none before it"
        if before is None
        else f"remove {directory / str(step)} to resume from checkpoint {before}"
    )
    return DamagedError(f"{name} cannot be used ({why}); {advice}", why)


def read_twice[T](read: Callable[[], T]) -> T:
    """The result of a read, which is repeated once after EIO."""
    try:
        return read()
    except Exception as error:  # Orbax raises bare Exceptions
        if durable.reason(error) != os.strerror(errno.EIO):
            raise
    time.sleep(AGAIN_SECONDS)
    return read()


def read_everywhere[T](topic: str, read: Callable[[], T]) -> T:
    """The result of a read in every process; all raise when one does, so that none waits for it.

    Args:
      topic: as in `processes.all_reports`.

    Raises:
      DamagedError, UnreadableError: as `read` does, in this process or in another one.
    """
    found, problem = None, ["", ""]
    try:
        found = read()
    except (DamagedError, UnreadableError) as error:
        if processes.alone():
            raise
        problem = [str(error), error.reason if isinstance(error, DamagedError) else ""]
    problems = processes.all_reports(topic, problem)
    # A process that cannot read it (reason "") takes precedence over corruption in another.
    for message, why in sorted(problems, key=lambda each: each[1]):
        if message:
            raise DamagedError(message, why) if why else UnreadableError(message)
    return cast("T", found)


def find_in_first[T](topic: str, find: Callable[[], T]) -> T:
    """The result of `find` in process 0, a JSON value, in every process.

    Raises:
      DamagedError: as `find` does in process 0.
    """
    found, problem = None, None
    if jax.process_index() == 0:
        try:
            found = find()
        except DamagedError as error:
            problem = [str(error), error.reason]
    found, problem = processes.from_first(topic, [found, problem])
    if problem:
        raise DamagedError(*problem)
    return cast("T", found)
