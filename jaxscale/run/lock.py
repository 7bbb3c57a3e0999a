"""Locks: one run at a time in a folder, and at a URL."""

import contextlib
import fcntl
import json
import logging
import os
import pathlib
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any, BinaryIO

from jaxscale.distributed import launcher, processes
from jaxscale.storage.local_tier import LEASE, LOCK, nobody_fetching
from jaxscale.storage.object_store import ObjectStore, StoreError
from jaxscale.storage.untrusted import parse_json

log = logging.getLogger("jaxscale")

LOST_SECONDS = 120.0
"""Network file systems keep the locks of a lost host for a while: NFS 4 for 90 s."""

BEAT_SECONDS = 20.0
"""The period of a lease's heartbeat."""

MOST_BEATS = 4
"""A lease without a heartbeat for this many periods belongs to a dead run."""

RELEASE_SECONDS = 5.0
"""The longest that a process waits at its end for the removal of its lease."""

FIRST_BEAT_SECONDS = 2.0
"""A new run checks its lease after this: of two runs that start at once, the first to write then
finds the lease of the other."""


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
    """Locks a run's folder, made if missing, inside the context; for process 0 only.

    The kernel's lock ends with the process, however that dies; the file remains, with the name of
    its holder. The lock of another host is waited for: a network file system notices a lost host
    late.

    Raises:
      ValueError: another run has the lock.
      OSError: the folder cannot be made or written to.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / LOCK).open("ab", buffering=0) as file:
        _take(file, workdir)
        with contextlib.suppress(OSError):  # on a full disk the holder is not named
            file.truncate(0)
            file.write(json.dumps(_this_run()).encode())
        yield


def _take(file: BinaryIO, workdir: pathlib.Path) -> None:
    """Locks the file of a run's folder."""
    until, said = time.monotonic() + LOST_SECONDS, False
    while True:
        try:
            with nobody_fetching(workdir):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = _holder(workdir / LOCK)
            if _is_here(holder) or time.monotonic() >= until:
                raise ValueError(
                    f"--workdir {workdir} is in use by {_named(holder)}; two runs would overwrite "
                    "each other's files: wait for it, end it, or give another --workdir"
                ) from None
        except OSError as error:
            log.warning(
                f"warning: {workdir} cannot be locked ({error.strerror}); a second run in it would "
                "not be noticed"
            )
            return
        if not said:
            log.info(
                f"{workdir} is in use by {_named(holder)}; waiting up to {LOST_SECONDS:.0f} s, in "
                "case its host was lost"
            )
            said = True
        time.sleep(1)


@contextlib.contextmanager
def leased(store: ObjectStore) -> Iterator[None]:
    """Holds a lease on a URL inside the context: no other run writes there. A URL of a local
    folder, as file:///tmp/run, takes the lock of that folder, as does --workdir /tmp/run.

    Object stores have no locks that end with a process, so the holder renews an object (heartbeat).
    The lease of a killed process on this host is taken over at once. The lease of another host is
    watched for `MOST_BEATS` periods, and taken over without a heartbeat; clocks are not compared. A
    run that finds the lease of another run exits.

    Raises:
      ValueError: another run has the lease.
      StoreError: the store cannot be written to.
      OSError: the folder cannot be written to.
    """
    if store.folder is not None:
        with locked(store.folder):
            yield
        return
    _await_free(store)
    own = _this_run() | {"run": uuid.uuid4().hex}
    ended = threading.Event()
    _renew(store, own, 0)

    def beat() -> None:
        pause, count = FIRST_BEAT_SECONDS, 0
        while not ended.wait(pause):
            pause, count = BEAT_SECONDS, count + 1
            # The uploads report a store that does not answer.
            with contextlib.suppress(StoreError):
                other = _lease(store)
                if other is not None and other.get("run") != own["run"]:
                    processes.leave(
                        f"error: {store.url} was taken over by {_named(other)}; this run "
                        "ends, since two would overwrite each other's checkpoints",
                        1,
                    )
                _renew(store, own, count)

    thread = threading.Thread(target=beat, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(RELEASE_SECONDS)
        # In a thread: a store that does not answer must not keep the process from ending.
        release = threading.Thread(target=_release, args=(store, own), daemon=True)
        release.start()
        release.join(RELEASE_SECONDS)


def _release(store: ObjectStore, own: dict[str, Any]) -> None:
    with contextlib.suppress(StoreError):
        if (_lease(store) or {}).get("run") == own["run"]:
            store.remove([LEASE])


def _await_free(store: ObjectStore) -> None:
    """Returns when no run renews a lease on the URL.

    Raises:
      ValueError: a run renews its lease.
    """
    lease = _lease(store)
    if lease is None or _died_here(lease):
        return
    seconds = MOST_BEATS * BEAT_SECONDS
    log.info(
        f"{store.url} was in use by {_named(lease)}; waiting {seconds:.0f} s for its heartbeat"
    )
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(BEAT_SECONDS / 4)
        now = _lease(store)
        if now is None:
            return
        if now != lease:
            raise ValueError(
                f"--workdir {store.url} is in use by {_named(now)}; two runs would overwrite "
                "each other's checkpoints: wait for it, end it, or give another --workdir"
            )


def _lease(store: ObjectStore) -> dict[str, Any] | None:
    try:
        lease = parse_json(store.read(LEASE) or b"null")
    except ValueError:
        return {}  # corrupt: a heartbeat will show whether its run lives
    return lease if lease is None or isinstance(lease, dict) else {}


def _renew(store: ObjectStore, own: dict[str, Any], count: int) -> None:
    store.write(LEASE, json.dumps(own | {"renewed": count}).encode())


def _died_here(lease: dict[str, Any]) -> bool:
    """Whether a lease is from a process of this host that has ended."""
    pid = lease.get("pid")
    if lease.get("place") != _process_space() or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's process, or not a process id
        return False
    return pid == os.getpid()


def _this_run() -> dict[str, Any]:
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    own = {"host": socket.gethostname(), "pid": os.getpid(), "start": started}
    return own | {"place": _process_space()}


def _is_here(holder: dict[str, Any]) -> bool:
    """Whether a lock's holder is on this host, or its host is unknown."""
    return holder.get("place", _process_space()) == _process_space()


def _process_space() -> list[str]:
    """Identity of the process id namespace: a replaced pod keeps its name on another host, and each
    container counts its processes from 1."""
    space = ""
    with contextlib.suppress(OSError):  # not Linux
        space = os.readlink("/proc/self/ns/pid")
    return [*launcher.host_identity(), space]


def _holder(path: pathlib.Path) -> dict[str, Any]:
    try:
        holder = parse_json(path.read_text())
    except (OSError, ValueError):  # its run has only just started
        return {}
    return holder if isinstance(holder, dict) else {}


def _named(holder: Any) -> str:
    try:
        return f"process {holder['pid']} on {holder['host']}, since {holder['start']}"
    except (KeyError, TypeError):
        return "another run"
