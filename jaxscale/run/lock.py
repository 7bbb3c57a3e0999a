"""One run at a time in a folder."""

import contextlib
import fcntl
import json
import logging
import os
import pathlib
import socket
import time
from collections.abc import Iterator

log = logging.getLogger("jaxscale")

FILE = ".lock"


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
    """Holds a run's folder, made if missing, inside. Of several processes, process 0 holds it.

    The kernel holds the lock, not the file: it ends with the process, however that dies, and the
    file, which says whose it is, stays.

    Raises:
      ValueError: another run holds it.
      OSError: the folder cannot be made or written to.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--workdir {workdir} is in use by {_holder(workdir / FILE)}; two runs would "
                "overwrite each other's files: wait for that one, end it, or give another --workdir"
            ) from None
        except OSError as error:
            log.warning(
                f"warning: {workdir} cannot be locked ({error.strerror}), so a second run in it "
                "would not be noticed"
            )
        file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "start": started}))
        file.flush()
        yield


def _holder(path: pathlib.Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']}, since {holder['start']}"
    except (OSError, ValueError, KeyError, TypeError):  # it has only just begun
        return "another run"
