"""Local and remote checkpoints of a run (its folder and its URL), and the newest intact of both."""

import contextlib
import glob
import logging
import math
import pathlib
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxscale.checkpoints.description import check_metadata, read_description
from jaxscale.checkpoints.errors import (
    DamagedError,
    find_in_first,
    read_everywhere,
    read_twice,
    unusable,
)
from jaxscale.checkpoints.folder import remove, set_aside
from jaxscale.checkpoints.remote import FETCHED, fetch_checkpoint, set_aside_stored
from jaxscale.distributed import processes
from jaxscale.formatting import duration
from jaxscale.storage import durable
from jaxscale.storage.local_tier import MARKER, fetching, local_steps, store_of, stored_steps
from jaxscale.storage.object_store import ObjectStore, StoreError

log = logging.getLogger("jaxscale")

ATTEMPTS = 5
"""Download attempts of a reader, while the run that trains removes checkpoints."""


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that looks intact, and the corrupt ones after it."""

    step: int  # 0: none
    metadata: dict[str, Any] = field(default_factory=dict)
    damaged: dict[int, str] = field(default_factory=dict)  # newer steps, with the reason


class Checkpoints:
    """The checkpoints of a run; `CheckpointWriter` also saves.

    Every process of a run makes the same calls on a shared folder. Any number of runs may read.

    Args:
      directory: contains one folder per checkpoint.
      newest_file: outside of the folder; stores the newest saved step, so that the loss of the
        folder is detected.
    """

    def __init__(
        self, directory: str | pathlib.Path, *, newest_file: pathlib.Path | None = None
    ) -> None:
        self.directory = pathlib.Path(directory).absolute()
        if glob.has_magic(str(self.directory)):  # Orbax would take them for a pattern
            raise ValueError(
                f"checkpoints cannot be below {self.directory}, a path with one of * ? [; choose "
                "another --workdir, or rename the folder"
            )
        if any("\ud800" <= letter <= "\udfff" for letter in str(self.directory)):
            raise ValueError(
                f"checkpoints cannot be below {self.directory}, which is not UTF-8: choose another "
                "--workdir or, where its name is, a locale of UTF-8, such as LC_ALL=C.UTF-8"
            )
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"{self.directory} is a file and should be a folder; remove it")
        self._newest_file = newest_file
        self._looked_at = b""  # the description of the checkpoint whose files were checked last

    def steps(self) -> list[int]:
        """The steps with a committed local checkpoint, in order."""
        return local_steps(self.directory)

    def latest(self) -> int | None:
        """The newest local step, or None.

        Raises:
          ValueError: there is none, but `newest_file` has one.
        """
        newest = max(self.steps(), default=None)
        if newest is None and self._newest_file and self._newest_file.is_file():
            newest_saved = self._newest_file.read_bytes().decode(errors="replace").strip()
            raise ValueError(
                f"{self.directory} has no checkpoint, and step "
                f"{newest_saved or '?'} was saved there: restore the folder, "
                f"or remove {self._newest_file} to begin again from step 0"
            )
        return newest

    def all_steps(self) -> list[int]:
        """The steps with a checkpoint in either tier, in order."""
        return sorted({*self.steps(), *self._stored()})

    def metadata(self, step: int) -> dict[str, Any]:
        """The metadata that a run added to the description of a local checkpoint.

        Raises:
          ValueError: there is no such checkpoint, it cannot be used, or no run wrote it.
        """
        metadata = self.description(step)["metadata"]
        try:
            check_metadata(metadata)
        except ValueError as error:
            place = self.directory / str(step)
            raise ValueError(f"{place} is not a checkpoint of a run: {error}") from error
        return metadata

    def arrays(self, step: int, part: str) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and types of the arrays of a part, such as "params", by path; empty if the
        checkpoint has no such part.

        Raises:
          ValueError: there is no such checkpoint, or it cannot be used.
        """
        return {
            name.removeprefix(f"{part}/"): jax.ShapeDtypeStruct(about["shape"], about["dtype"])
            for name, about in self.description(step)["arrays"].items()
            if name.startswith(f"{part}/")
        }

    def description(self, step: int) -> dict[str, Any]:
        """The description of a local checkpoint, after a check of its files' sizes and digests.

        Raises:
          ValueError: there is no such checkpoint.
          DamagedError, UnreadableError: it cannot be used, or read.
        """
        place = self.directory / str(step)
        if step not in self.steps():
            raise ValueError(
                f"there is no checkpoint {step} in {self.directory}; there are {self.steps()}"
            )

        def read() -> dict[str, Any]:
            data = (place / MARKER).read_bytes()
            description = read_description(data)
            # Process 0 checks the files for all, and once: thousands of processes that check
            # thousands of files stall a file system. Arrays are compared when they are read.
            if jax.process_index() == 0 and self._looked_at != data:
                if changed := durable.changed_file(place, description["files"]):
                    raise ValueError(changed)
                self._looked_at = data
            return description

        try:
            return read_twice(read)
        except (OSError, ValueError, MemoryError) as error:
            raise unusable(self.directory, step, error) from error

    @contextlib.contextmanager
    def held(self, step: int) -> Iterator[bool]:
        """Locks a checkpoint against deletion while it is read; False if it is already deleted."""
        with durable.held(self.directory / str(step) / MARKER):
            yield step in self.steps()

    def newest_intact(self, below: float = math.inf, *, refuse_damaged: bool = False) -> Found:
        """The newest checkpoint with an intact description and all its files, downloaded if it is
        intact only in the store. Arrays are checked when they are read.

        Args:
          below: only steps before this one.

        Raises:
          DamagedError: there are checkpoints and none is intact; or with `refuse_damaged`, the
            newest is corrupt.
        """

        def search() -> tuple[int, list[tuple[int, str]]]:
            step, damaged = self._search(below, refuse_damaged)
            for error in damaged.values():
                if not step:
                    raise error
            return step, [(number, error.reason) for number, error in damaged.items()]

        step, damaged = find_in_first("newest checkpoint", search)
        metadata = {}
        if step:
            metadata = read_everywhere("metadata of a checkpoint", lambda: self.metadata(step))
        return Found(step, metadata, dict(damaged))

    def _search(
        self, below: float = math.inf, refuse_damaged: bool = False
    ) -> tuple[int, dict[int, DamagedError]]:
        """The newest intact step, or 0, and the errors of newer ones; for one process."""
        damaged = {}
        if not self._stored():
            self.latest()  # refuses a folder that was lost
        for step in reversed([step for step in self.all_steps() if step < below]):
            try:
                if refuse_damaged and step in self.steps():
                    self.description(step)
                self._make_intact(step)
                return step, damaged
            except DamagedError as error:
                if refuse_damaged:
                    raise
                damaged[step] = error
        return 0, damaged

    def replace(self, step: int, problem: DamagedError) -> None:
        """Replaces a checkpoint with corrupt arrays by the one in the store.

        Raises:
          DamagedError: `problem`, if it is not in the store.
        """
        done = jax.process_index() == 0 and self._fetched(step, problem)
        if not processes.from_first("checkpoint fetched", done):
            raise problem

    def set_aside(self, damaged: Mapping[int, str], intact: int) -> None:
        """Renames corrupt checkpoints in both tiers, with a warning for each.

        Args:
          damaged: step -> reason.
          intact: the step from which the run resumes.
        """
        for step, why in sorted(damaged.items()) if jax.process_index() == 0 else ():
            names = [str(set_aside(self.directory / str(step)))] if step in self.steps() else []
            if (store := self._store()) and step in stored_steps(store):
                names.append(set_aside_stored(store, step))
            log.warning(
                f"warning: checkpoint {step} is corrupt ({why}); moved to {' and '.join(names)}; "
                f"the newest intact one is {intact}"
            )

    @contextlib.contextmanager
    def reading(self, wanted: int | None = None) -> Generator[int | None]:
        """For a reader: the step of a checkpoint, by default the newest intact one of both tiers,
        or None. It is local and locked against deletion inside the context.

        Raises:
          ValueError: there is no checkpoint `wanted`.
          StoreError: the store cannot be read.
        """
        self.fetch(wanted)
        while True:
            steps = self.steps()
            if wanted is not None and wanted not in steps:
                raise ValueError(
                    f"--step {wanted}: {self.directory} has no checkpoint {wanted}; it has "
                    f"{', '.join(map(str, steps)) or 'none'}"
                )
            step = self.latest() if wanted is None else wanted
            step = processes.from_first("checkpoint", step)
            with self.held(step or 0) as there:
                gone = step is not None and not there
                if not any(processes.all_reports("checkpoint", gone)):
                    yield step
                    processes.all_reports("checkpoint read", None)
                    return

    def fetch(self, wanted: int | None = None) -> None:
        """For a reader: downloads a checkpoint that is intact only in the store, by default the
        newest, unless a run trains here. Removes copies of checkpoints that the store removed."""
        with fetching(self.directory.parent) as store:
            if store is None:
                return
            if wanted is not None:
                if wanted in self.all_steps():
                    self._make_intact(wanted)
                return
            for attempt in range(1, ATTEMPTS + 1):
                stored = stored_steps(store)
                try:
                    for error in self._search()[1].values():
                        log.warning(f"warning: {error}")
                    break
                except StoreError:
                    if attempt == ATTEMPTS or stored == stored_steps(store):
                        raise
            for step in self.steps() if max(self.steps(), default=0) in stored else ():
                # A checkpoint that was not downloaded (`FETCHED`) may be waiting for its upload.
                if step not in stored and (self.directory / str(step) / FETCHED).exists():
                    remove(self.directory / str(step))

    def _store(self) -> ObjectStore | None:
        return store_of(self.directory.parent)

    def _stored(self) -> list[int]:
        """The steps with a checkpoint in the run's store, if it has one."""
        return stored_steps(store) if (store := self._store()) else []

    def _make_intact(self, step: int) -> None:
        """Downloads a checkpoint that is missing here, or looks corrupt. Its arrays are compared
        when they are read.

        Raises:
          DamagedError: it is not intact in either tier.
        """
        problem = None
        if step in self.steps():
            try:
                self.description(step)
                return
            except DamagedError as error:
                problem = error
        if not self._fetched(step, problem):
            assert problem
            raise problem

    def _fetched(self, step: int, problem: DamagedError | None) -> bool:
        """Downloads a checkpoint from the run's store, in place of a corrupt local one; False if
        there is none to download.

        Args:
          problem: the error of the local one; None if there is none.

        Raises:
          DamagedError: the one in the store is corrupt, and there is no local one.
        """
        store, begin = self._store(), time.monotonic()
        if store is None or step not in stored_steps(store):
            return False
        try:
            path = fetch_checkpoint(store, self.directory, step)
        except ValueError as error:
            message = f"checkpoint {step} at {store.url} cannot be used ({error})"
            if problem is None:
                raise DamagedError(message, str(error)) from error
            log.warning(f"warning: {message}")
            return False
        why = "not here"
        if problem and step in self.steps():
            aside = set_aside(self.directory / str(step))
            why = f"corrupt here ({problem.reason}; moved to {aside})"
        durable.move(path, self.directory / str(step))
        seconds = duration(time.monotonic() - begin)
        log.info(f"checkpoint {step} is {why}; downloaded from {store.url} in {seconds}")
        return True
