"""Errors of checkpoints that cannot be read; what one process finds is raised in all."""

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
"""Reasons for which a file cannot be read that say nothing of what is in it. A disk's error may be
a network's, which passes, or a bad sector: it counts as damage the second time."""

AGAIN_SECONDS = 5.0
"""After which what could not be read for a disk's error is read again."""


class DamagedError(ValueError):
    """A checkpoint that cannot be used, whatever the run; `reason` says why in a few words."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class UnreadableError(OSError):
    """A checkpoint that the operating system does not let this process read: it may be intact."""

    exit_status = 1  # it may do so the next time: a supervisor tries again


def unusable(
    directory: pathlib.Path, step: int, error: Exception
) -> DamagedError | UnreadableError:
    """What to raise of a checkpoint that ended a read with an error."""
    why = durable.reason(error)
    place = f"checkpoint {step} in {directory}"
    if why in NOT_READ or isinstance(error, MemoryError):
        return UnreadableError(f"{place} cannot be read: {why}; it is left as it is")
    before = max((other for other in local_steps(directory) if other < step), default=None)
    advice = (
        "there is none before it"
        if before is None
        else f"the one before it is {before}: remove {directory / str(step)} to resume from it"
    )
    return DamagedError(f"{place} cannot be used ({why}); {advice}", why)


def read_twice[T](read: Callable[[], T]) -> T:
    """What a read returns; one that ends with a disk's error is repeated once, later."""
    try:
        return read()
    except Exception as error:  # Orbax raises bare Exceptions
        if durable.reason(error) != os.strerror(errno.EIO):
            raise
    time.sleep(AGAIN_SECONDS)
    return read()


def read_everywhere[T](topic: str, read: Callable[[], T]) -> T:
    """What is read in every process: all raise when one does, so that none waits for it.

    Args:
      topic: as of `processes.all_reports`.

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
    # Where one cannot read it, what the others read of it does not matter.
    for message, why in sorted(problems, key=lambda each: each[1]):
        if message:
            raise DamagedError(message, why) if why else UnreadableError(message)
    return cast("T", found)


def find_in_first[T](topic: str, find: Callable[[], T]) -> T:
    """What process 0 finds, in every process; what JSON can hold.

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
