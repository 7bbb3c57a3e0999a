"""Background upload of a run's local tier to its URL."""

import contextlib
import logging
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxscale.checkpoints import remote
from jaxscale.formatting import duration, human_bytes
from jaxscale.run import signals
from jaxscale.run.lock import leased
from jaxscale.storage import durable, local_tier
from jaxscale.storage.object_store import ObjectStore

if TYPE_CHECKING:  # it imports JAX, which takes seconds
    from jaxscale.checkpoints.save import CheckpointWriter

log = logging.getLogger("jaxscale")

POLL_SECONDS = 0.5
"""The period of looking for a new checkpoint in the local tier."""

FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 1.0, 60.0
"""The pause between attempts of a failing upload, doubled each time."""

END_PAUSE_SECONDS = 5.0
"""The longest pause once the run has ended."""

END_SECONDS = 300.0
"""The time for which failing uploads are retried after the end of a run, unless asked to stop."""

COPY = ".upload"
"""The folder in a local tier for a copy of the file being uploaded, which a run may change."""


class Mirror:
    """Uploads new files and checkpoints of a run's folder to its URL, in a thread.

    Training never waits for it. Every attempt compares the folder with the URL, so a failed upload
    is repaired by the next one. Only process 0 has it.
    """

    def __init__(self, store: ObjectStore, workdir: pathlib.Path) -> None:
        self.store, self.workdir = store, workdir
        self._checkpoints: CheckpointWriter  # of `start`
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._given_up = threading.Event()
        self._failure = ""
        self._seen: list[int] | None = None  # the local steps when all was last uploaded
        self._sent: dict[str, tuple[int, int]] = {}  # file -> bytes and time of change
        self._there = set[int]()  # the known steps at the URL

    def start(self, checkpoints: "CheckpointWriter") -> None:
        """Starts the thread, once it is known where the run resumes."""
        self._checkpoints = checkpoints
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
        self._thread.start()

    def finish(self, stop_seconds: float) -> str:
        """Waits until everything is uploaded; returns "", or a line on what is missing and why.

        Args:
          stop_seconds: the longest wait if the run is asked to stop, now or before.
        """
        if self._thread is None:
            return ""
        self._ending.set()
        begin, asked = time.monotonic(), None
        while self._thread.is_alive():
            self._thread.join(0.1)
            now = time.monotonic()
            asked = asked or (now if signals.requested() else None)
            late = asked is not None and now - asked >= stop_seconds
            if late or (self._failure and now - begin >= END_SECONDS):
                self._given_up.set()
                missing = self._missing(self._checkpoints.steps())
                what = f"{_steps_text(missing)} " if missing else "the newest metrics "
                why = self._failure or f"not done in {duration(stop_seconds)}"
                return (
                    f"{what}could not be uploaded to {self.store.url} ({why}); all is in "
                    f"{self.workdir}, and the same command uploads it"
                )
        return ""

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._given_up.is_set():
            ending = self._ending.is_set()
            try:
                self._sync(ending)
            except Exception as error:  # whatever it is, training continues
                self._report(_why(error), pause)
                if ending:
                    time.sleep(min(pause, END_PAUSE_SECONDS))
                else:
                    self._ending.wait(pause)
                pause = min(2 * pause, MOST_PAUSE_SECONDS)
                continue
            self._failure, pause = "", FIRST_PAUSE_SECONDS
            if ending:
                return
            self._ending.wait(POLL_SECONDS)

    def _report(self, why: str, pause: float) -> None:
        """Logs a line for each new reason, not for each attempt."""
        if why != self._failure:
            log.warning(
                f"warning: upload to {self.store.url} failed ({why}); training continues, and "
                f"the next attempt is in {duration(pause)}"
            )
        self._failure = why

    def _sync(self, ending: bool) -> None:
        """Uploads the files and the kept checkpoints, newest first; then removes other steps."""
        here = self._checkpoints.steps()
        if here == self._seen and not ending:
            return
        if self._seen is None:  # by the lease no other run writes there
            for step in remote.unfinished_steps(self.store):
                remote.remove_checkpoint(self.store, step)
        problem = None
        try:
            self._send_files()
        except OSError as error:  # such as an unreadable file: checkpoints are more important
            problem = error
        self._there = set(local_tier.stored_steps(self.store))
        for step in self._missing(here):
            self._send_checkpoint(step)
        for step in self._there - self._checkpoints.kept({*here, *self._there}):
            remote.remove_checkpoint(self.store, step)
        if problem:
            raise problem
        self._seen = here

    def _missing(self, here: Sequence[int]) -> list[int]:
        """The steps that are not yet uploaded, newest first."""
        wanted = self._checkpoints.kept({*here, *self._there})
        return sorted(wanted & set(here) - self._there, reverse=True)

    def _send_checkpoint(self, step: int) -> None:
        begin = time.monotonic()
        with self._checkpoints.held(step) as still_here:
            if not still_here:
                return
            size = remote.send_checkpoint(self.store, self._checkpoints.directory, step)
        seconds = duration(time.monotonic() - begin)
        self._there = self._there | {step}  # replaced, since another thread reads it
        (self.workdir / local_tier.SENT).touch()
        self.store.write(local_tier.LAST_SAVED, f"{max(self._there)}\n".encode())
        log.info(
            f"checkpoint {step}, {human_bytes(size)}, uploaded to {self.store.url} in {seconds}"
        )

    def _send_files(self) -> None:
        """Uploads the changed files of the run, each from a copy."""
        copy = self.workdir / COPY
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for name, path in _files(self.workdir):
            with contextlib.suppress(FileNotFoundError):  # replaced or removed in between
                about = path.stat()
                now = about.st_size, about.st_mtime_ns
                if self._sent.get(name) == now:
                    continue
                shutil.copyfile(path, copy / path.name)
                self.store.upload({name: copy / path.name})
                self._sent[name] = now
        shutil.rmtree(copy, ignore_errors=True)


def _files(workdir: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    """The files of a run to upload, with their names at its URL."""
    for parent, folders, names in os.walk(workdir):
        if pathlib.Path(parent) == workdir:
            folders[:] = [one for one in folders if one not in local_tier.NOT_SENT]
        folders[:] = [one for one in folders if not one.startswith(".")]
        for name in names:
            hidden = name.startswith(".") or name == local_tier.LAST_SAVED
            if not hidden and not name.endswith((".new", ".fetched")):
                path = pathlib.Path(parent, name)
                yield path.relative_to(workdir).as_posix(), path


def _why(error: Exception) -> str:
    """The reason of a failed upload, with the file or URL that the error names."""
    text = str(error) if isinstance(error, OSError) else durable.reason(error)
    return text.splitlines()[0][:300] if text else type(error).__name__


def _steps_text(steps: Sequence[int]) -> str:
    names = ", ".join(map(str, sorted(steps)))
    return f"checkpoint{'s' if len(steps) > 1 else ''} {names}"


@contextlib.contextmanager
def mirrored(workdir: pathlib.Path) -> Iterator[Mirror | None]:
    """Leases the URL of a local tier inside the context, after downloading newer files from it;
    None for any other folder.

    Raises:
      ValueError: another run writes to the URL, or earlier uploads are missing.
      StoreError: it cannot be read and written.
    """
    store = local_tier.store_of(workdir)
    if store is None:
        yield None
        return
    with leased(store):
        local_tier.check_not_emptied(store, workdir)
        with local_tier.fetching(workdir, training=True):
            local_tier.fetch_files(store, workdir, nested=True)
        log.info(f"{store.url} is the run's folder, and {workdir} its local tier")
        yield Mirror(store, workdir)
