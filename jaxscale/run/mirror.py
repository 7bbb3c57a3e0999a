"""What a run writes to its local tier is put at its address, in the background."""

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
"""How often the local tier is looked at for a new checkpoint."""

FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 1.0, 60.0
"""Between attempts of an upload that fails: twice as long each time."""

END_PAUSE_SECONDS = 5.0
"""The longest pause once the run has ended."""

END_SECONDS = 300.0
"""How long uploads that fail are tried again after the end of a run that nobody asked to stop."""

COPY = ".upload"
"""The folder in a local tier for the file that is being put: files of a run change meanwhile."""


class Mirror:
    """Puts what is new in a run's folder at its address, in a thread of its own.

    Training waits for nothing here. Every attempt compares the folder with what is at the address,
    so one that failed is repaired by the next. Of several processes, process 0 has it.
    """

    def __init__(self, store: ObjectStore, workdir: pathlib.Path) -> None:
        self.store, self.workdir = store, workdir
        self._checkpoints: CheckpointWriter  # of `start`
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._given_up = threading.Event()
        self._failure = ""
        self._seen: list[int] | None = None  # the steps here when all was put there
        self._sent: dict[str, tuple[int, int]] = {}  # files by name: bytes, and when they changed
        self._there = set[int]()  # the steps at the address, as far as is known

    def start(self, checkpoints: "CheckpointWriter") -> None:
        """Begins, once it is known where the run resumes."""
        self._checkpoints = checkpoints
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
        self._thread.start()

    def finish(self, stop_seconds: float) -> str:
        """Returns when everything is at the address; "", or in a line what is not, and why.

        Args:
          stop_seconds: how long to try where the run was asked to stop, now or before.
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
                    f"{what}could not be put at {self.store.address} ({why}); all is in "
                    f"{self.workdir}, and the same command puts it there"
                )
        return ""

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._given_up.is_set():
            ending = self._ending.is_set()
            try:
                self._sync(ending)
            except Exception as error:  # whatever it is, training goes on
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
        """One line for each new reason, not for each attempt."""
        if why != self._failure:
            log.warning(
                f"warning: upload to {self.store.address} failed ({why}); training continues, and "
                f"it is tried again in {duration(pause)}"
            )
        self._failure = why

    def _sync(self, ending: bool) -> None:
        """Puts the files and the kept checkpoints, the newest first; then removes others."""
        here = self._checkpoints.steps()
        if here == self._seen and not ending:
            return
        if self._seen is None:  # nobody else writes there
            for step in remote.unfinished_steps(self.store):
                remote.remove_checkpoint(self.store, step)
        problem = None
        try:
            self._send_files()
        except OSError as error:  # such as of a file that cannot be read: checkpoints matter more
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
        """The steps that are still to be put at the address, the newest first."""
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
            f"checkpoint {step}, {human_bytes(size)}, put at {self.store.address} in {seconds}"
        )

    def _send_files(self) -> None:
        """Puts the files of the run that changed, each from a copy."""
        copy = self.workdir / COPY
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for name, path in _files(self.workdir):
            with contextlib.suppress(FileNotFoundError):  # replaced or removed just now
                about = path.stat()
                now = about.st_size, about.st_mtime_ns
                if self._sent.get(name) == now:
                    continue
                shutil.copyfile(path, copy / path.name)
                self.store.upload({name: copy / path.name})
                self._sent[name] = now
        shutil.rmtree(copy, ignore_errors=True)


def _files(workdir: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    """The files of a run that are put at its address, by their names there."""
    for place, folders, names in os.walk(workdir):
        if pathlib.Path(place) == workdir:
            folders[:] = [one for one in folders if one not in local_tier.NOT_SENT]
        folders[:] = [one for one in folders if not one.startswith(".")]
        for name in names:
            hidden = name.startswith(".") or name == local_tier.LAST_SAVED
            if not hidden and not name.endswith((".new", ".fetched")):
                path = pathlib.Path(place, name)
                yield path.relative_to(workdir).as_posix(), path


def _why(error: Exception) -> str:
    """Why an upload failed, with the file or address that the error names."""
    text = str(error) if isinstance(error, OSError) else durable.reason(error)
    return text.splitlines()[0][:300] if text else type(error).__name__


def _steps_text(steps: Sequence[int]) -> str:
    names = ", ".join(map(str, sorted(steps)))
    return f"checkpoint{'s' if len(steps) > 1 else ''} {names}"


@contextlib.contextmanager
def mirrored(workdir: pathlib.Path) -> Iterator[Mirror | None]:
    """A run's folder that is a local tier, up to date with its address, which no other run writes
    to inside; None for any other folder.

    Raises:
      ValueError: another run writes to the address, or what was put there is gone.
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
        log.info(f"{store.address} is the run's folder, and {workdir} its local tier")
        yield Mirror(store, workdir)
