"""One run at a time in a folder, and at an address."""

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
"""A network's file system keeps the locks of a host that was lost for a while: NFS 4 for 90 s."""

BEAT_SECONDS = 20.0
"""A run at an address renews its lease this often."""

MOST_BEATS = 4
"""A lease that is not renewed in so many times is that of a run that died."""

RELEASE_SECONDS = 5.0
"""How long a process that ends waits until its lease is removed."""

FIRST_BEAT_SECONDS = 2.0
"""A new run looks this soon whether its lease is still its own: of two that begin at once, the one
that wrote first then finds the other's."""


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
    """Holds a run's folder, made if missing, inside. Of several processes, process 0 holds it.

    The kernel holds the lock, not the file: it ends with the process, however that dies, and the
    file, which says whose it is, stays. One of another host is waited for: where that was lost, the
    file system has still to notice.

    Raises:
      ValueError: another run holds it.
      OSError: the folder cannot be made or written to.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / LOCK).open("ab", buffering=0) as file:
        _take(file, workdir)
        with contextlib.suppress(OSError):  # on a full disk others are not told whose it is
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
            if holder.get("place", _place()) == _place() or time.monotonic() >= until:
                raise ValueError(
                    f"--workdir {workdir} is in use by {_named(holder)}; two runs would overwrite "
                    "each other's files: wait for that one, end it, or give another --workdir"
                ) from None
        except OSError as error:
            log.warning(
                f"warning: {workdir} cannot be locked ({error.strerror}), so a second run in it "
                "would not be noticed"
            )
            return
        if not said:
            log.info(
                f"{workdir} is in use by {_named(holder)}; waiting up to {LOST_SECONDS:.0f} s, in "
                "case that host was lost"
            )
            said = True
        time.sleep(1)


@contextlib.contextmanager
def leased(store: ObjectStore) -> Iterator[None]:
    """Holds an address inside: no other run writes there. One that is a folder of this machine, as
    file:///tmp/run, has the lock of that folder, which a run with --workdir /tmp/run holds, too.

    Object stores have no locks that end with a process, so the holder renews an object there. One
    of a process that was killed on this host is taken over at once. That of another host is watched
    for as long as `MOST_BEATS` renewals take, and taken over when none comes: nobody's clock is
    compared. A run that finds the lease of another one in place of its own ends at once.

    Raises:
      ValueError: another run holds it.
      StoreError: the store cannot be written to.
      OSError: the folder cannot.
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
            # A store that does not answer for a while is the uploads' to report.
            with contextlib.suppress(StoreError):
                other = _lease(store)
                if other is not None and other.get("run") != own["run"]:
                    processes.leave(
                        f"error: {store.address} was taken over by {_named(other)}, and this run "
                        "ends: two would overwrite each other's checkpoints",
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
        # A store that does not answer keeps no process from ending.
        release = threading.Thread(target=_release, args=(store, own), daemon=True)
        release.start()
        release.join(RELEASE_SECONDS)


def _release(store: ObjectStore, own: dict[str, Any]) -> None:
    with contextlib.suppress(StoreError):
        if (_lease(store) or {}).get("run") == own["run"]:
            store.remove([LEASE])


def _await_free(store: ObjectStore) -> None:
    """Returns when no run renews its lease of an address.

    Raises:
      ValueError: one does.
    """
    lease = _lease(store)
    if lease is None or _died_here(lease):
        return
    seconds = MOST_BEATS * BEAT_SECONDS
    log.info(
        f"{store.address} was in use by {_named(lease)}; waiting {seconds:.0f} s for a sign of life"
    )
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(BEAT_SECONDS / 4)
        now = _lease(store)
        if now is None:
            return
        if now != lease:
            raise ValueError(
                f"--workdir {store.address} is in use by {_named(now)}; two runs would overwrite "
                "each other's checkpoints: wait for that one, end it, or give another --workdir"
            )


def _lease(store: ObjectStore) -> dict[str, Any] | None:
    try:
        lease = parse_json(store.read(LEASE) or b"null")
    except ValueError:
        return {}  # damaged: whose it is will show
    return lease if lease is None or isinstance(lease, dict) else {}


def _renew(store: ObjectStore, own: dict[str, Any], count: int) -> None:
    store.write(LEASE, json.dumps(own | {"renewed": count}).encode())


def _died_here(lease: dict[str, Any]) -> bool:
    """Whether a lease is of a process of this host that has ended."""
    pid = lease.get("pid")
    if lease.get("place") != _place() or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's, or no process id at all
        return False
    return pid == os.getpid()


def _this_run() -> dict[str, Any]:
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    own = {"host": socket.gethostname(), "pid": os.getpid(), "start": started}
    return own | {"place": _place()}


def _place() -> list[str]:
    """Where process ids are those of this process: a pod that takes the place of another has its
    name, on another host, and each container counts its processes from 1."""
    space = ""
    with contextlib.suppress(OSError):  # not Linux
        space = os.readlink("/proc/self/ns/pid")
    return [*launcher.host_identity(), space]


def _holder(path: pathlib.Path) -> dict[str, Any]:
    try:
        holder = parse_json(path.read_text())
    except (OSError, ValueError):  # it has only just begun
        return {}
    return holder if isinstance(holder, dict) else {}


def _named(holder: Any) -> str:
    try:
        return f"process {holder['pid']} on {holder['host']}, since {holder['start']}"
    except (KeyError, TypeError):
        return "another run"
