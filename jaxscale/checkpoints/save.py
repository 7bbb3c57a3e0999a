"""Writes checkpoints in the background, each committed all at once.

A checkpoint is a folder named by its step (`checkpoints/folder.py` writes and reads its files). It
gets that name by one rename, after everything in it is on disk and was opened as a reader would: a
killed save leaves a folder under another name, which is never read and which the next save removes.
The caller's metadata (data state, config, axes) is in the same folder and the same commit. Arrays
that no step changes are written once: a later checkpoint has links to the files of the one before
it (hard links), and is complete without it. Checksums are compared on reading, so that a bit that
flipped on disk is detected.
"""

import contextlib
import json
import logging
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from jaxscale.checkpoints.array_sums import array_sums
from jaxscale.checkpoints.description import FROZEN
from jaxscale.checkpoints.folder import (
    ArrayWriter,
    array_signature,
    array_writer,
    begin_write,
    complete_folder,
    forget_errors,
    frozen_arrays,
    link_files,
    named_arrays,
    remove,
)
from jaxscale.checkpoints.retention import LAST_THREE, Retention
from jaxscale.checkpoints.tiers import Checkpoints
from jaxscale.distributed import processes
from jaxscale.storage import durable

log = logging.getLogger("jaxscale")

LOOK_SECONDS = 5.0
"""Interval at which a waiting process checks how much is written."""


class NotFiniteError(FloatingPointError):
    """A state with non-finite numbers after `step`."""

    def __init__(self, step: int, names: list[str]) -> None:
        super().__init__(
            f"step {step}: {len(names)} arrays of the updated state are not finite, the first "
            f"{names[0]}; stopped, and no state after the last checkpoint is saved. Lower "
            "optimizer.learning_rate, or set optimizer.clip_norm"
        )
        self.step = step


def _describe(
    step: int,
    arrays: Mapping[str, jax.Array],
    metadata: Mapping[str, Any],
    finite: tuple[str, ...],
    frozen: Collection[str],
) -> dict[str, Any]:
    """The description of a checkpoint, a JSON object; the other arguments are those of `save`."""
    sums = array_sums(arrays)
    asked = (name for name in arrays if name.partition("/")[0] in finite and arrays[name].ndim)
    if names := [name for name in asked if not sums[name].finite]:
        raise NotFiniteError(step, names)
    described = {
        name: array_signature(array)
        | {"checksum": sums[name].checksum}
        | ({"frozen": True} if name in frozen else {})
        for name, array in arrays.items()
    }
    try:
        text = json.dumps({"arrays": described, "metadata": dict(metadata)}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata of checkpoint {step} is not JSON: {error}") from error
    return json.loads(text)


class CheckpointWriter(Checkpoints):
    """The checkpoints of a run that saves, and the thread that writes them. Only one run may save
    to a folder at a time. A line is logged after each commit, and after a failure.

    Args:
      directory: as in `Checkpoints`; created by the first save.
      retention: the checkpoints to keep after a commit.
      newest_file: as in `Checkpoints`; gets the step of each commit.
      host_gb: the most that is copied to host memory at a time, with its compressed form, but at
        least one array; the state must then not change before `wait` returns. 0 copies all at
        once.

    Attributes:
      losses: on held-out text, by step; set by the evaluation.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        retention: Retention = LAST_THREE,
        *,
        newest_file: pathlib.Path | None = None,
        host_gb: int = 0,
    ) -> None:
        super().__init__(directory, newest_file=newest_file)
        self.losses: Mapping[int, float] = {}
        self._retention = retention
        self._host_gb = host_gb
        self._writer: ArrayWriter | None = None  # the first save makes it
        self._thread: threading.Thread | None = None
        self._failure = ""

    def save(
        self,
        step: int,
        state: Any,
        metadata: Mapping[str, Any],
        *,
        finite: tuple[str, ...] = (),
        frozen: Collection[str] = (),
    ) -> None:
        """Begins a save and returns as soon as `state` may be changed or donated.

        Waits first for the previous save. A save that fails, at once or later, is logged, and
        `outcome` returns the reason; earlier checkpoints are unchanged.

        Args:
          step: updates made; names the checkpoint.
          state: tree of arrays, in canonical form, in device or host memory.
          metadata: a JSON object; the config, under "config", is used in messages.
          finite: the parts of the state, such as "params", that are refused when an array of 1 or
            more dimensions has a non-finite number.
          frozen: paths of arrays that training does not change. If the newest checkpoint has the
            same bits of all of them, they are not written again.

        Raises:
          ValueError: the step is already saved, or `metadata` is not JSON.
          NotFiniteError: the state has a non-finite number; nothing is written.
        """
        self.wait()
        # Process 0 decides for all: one that failed alone would leave the others in a collective.
        if away := processes.from_first("begin of a save", self._clear_leftovers(step)):
            self._fail(step, OSError(away))
            return
        arrays = named_arrays(state)
        description = _describe(step, arrays, metadata, finite, frozen)
        # Replaced on commit: an unforeseen end of the thread must not count as success.
        self._failure = f"saving checkpoint {step} in {self.directory} did not finish"
        begin = time.monotonic()
        linked = bool(frozen) and processes.from_first(
            "links of a save", self._link_frozen(step, description["arrays"])
        )
        if linked:
            arrays = {name: array for name, array in arrays.items() if name not in frozen}
        try:
            self._writer = self._writer or array_writer(self._host_gb)
            begin_write(self._writer, self._unfinished(step), arrays, frozen)
        except Exception as error:
            if self._writer:
                forget_errors(self._writer)
            self._fail(step, error)
            return
        arguments = (step, description, linked, begin)
        self._thread = threading.Thread(target=self._commit, args=arguments, name="commit")
        try:
            self._thread.start()
        except RuntimeError:  # there is no memory for a thread
            self._thread = None
            self._commit(*arguments)

    def _clear_leftovers(self, step: int) -> str:
        """Removes files that killed saves and deletions left; nothing else is writing now. Returns
        why the folder cannot be listed, "" if it can."""
        if jax.process_index() != 0:
            return ""
        try:
            if step in self.steps():
                raise ValueError(f"checkpoint {step} is already in {self.directory}")
            for path in self.directory.iterdir() if self.directory.is_dir() else ():
                ended = path.suffix in (".deleted", ".unfinished")
                if ended or ".orbax-checkpoint-tmp" in path.name:
                    shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            return durable.reason(error)
        return ""

    def _link_frozen(self, step: int, arrays: dict[str, dict[str, Any]]) -> bool:
        """Links the frozen arrays of the newest checkpoint into a folder next to the unfinished
        one; False if they have to be written, since their bits differ or links fail."""
        if jax.process_index() != 0:
            return False
        frozen, newest = frozen_arrays(arrays), None
        try:
            newest = max(self.steps(), default=None)
            if newest is None or frozen_arrays(self.description(newest)["arrays"]) != frozen:
                return False
            link_files(self.directory / str(newest) / FROZEN, self._links(step))
        except (OSError, ValueError) as error:
            log.info(
                f"checkpoint {step}: frozen arrays are written again, since they cannot be linked "
                f"to those of checkpoint {newest} ({durable.reason(error)})"
            )
            shutil.rmtree(self._links(step), ignore_errors=True)
            return False
        return True

    def wait(self, growing: Callable[[], object] = lambda: None) -> None:
        """Returns when nothing is being written.

        Args:
          growing: called by process 0 every `LOOK_SECONDS` in which more was written.
        """
        if self._thread is None:
            return
        size = self._unfinished_bytes()
        while self._thread.is_alive():
            self._thread.join(LOOK_SECONDS)
            before, size = size, self._unfinished_bytes()
            if size != before:
                growing()
        self._thread = None

    def _unfinished_bytes(self) -> int:
        """Bytes that all processes have written of an unfinished checkpoint; 0 in processes other
        than the first, to spare the file system the same requests."""
        total = 0
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # a file that has another name by now
                for path in self.directory.glob("*.unfinished*/**/*"):
                    total += path.stat().st_size
        return total

    def outcome(self) -> str | None:
        """The reason why the last save failed, "" if it did not; None while it is being written."""
        return None if self._thread and self._thread.is_alive() else self._failure

    def kept(self, steps: Collection[int]) -> set[int]:
        """The steps among `steps` whose checkpoints are kept."""
        return self._retention.kept(steps, self.losses)

    def close(self) -> None:
        """Waits, and stops the writer."""
        try:
            self.wait()
        finally:
            if self._writer:
                self._writer.close()

    def _commit(self, step: int, description: dict[str, Any], linked: bool, begin: float) -> None:
        """In the background: waits for the arrays, gives the checkpoint its name, and removes old
        ones."""
        assert self._writer, "a save has begun"
        try:
            self._writer.wait_until_finished()
            if jax.process_index() == 0:
                self._finish(step, description, linked)
        except Exception as error:
            forget_errors(self._writer)
            self._fail(step, error)
            return
        self._failure = ""
        log.info(f"checkpoint {step} saved in {time.monotonic() - begin:.1f} s")
        if jax.process_index() == 0:
            try:
                self._remove_old()
            except OSError as error:
                log.info(f"old checkpoints could not be listed: {error}")

    def _finish(self, step: int, description: dict[str, Any], linked: bool) -> None:
        """Completes the written files, and gives the folder the name of a checkpoint.

        Raises:
          ValueError: it cannot be read.
        """
        path = self._unfinished(step)
        if linked:
            self._links(step).rename(path / FROZEN)
        complete_folder(path, description)
        target = self.directory / str(step)
        try:
            durable.move(path, target)
        except OSError:
            with contextlib.suppress(OSError):  # else another attempt finds the step taken
                target.rename(path)
            raise
        if file := self._newest_file:
            try:
                durable.replace_file(file, f"{step}\n".encode())
            except OSError as error:  # only the detection of a lost folder suffers
                why = durable.reason(error)
                log.info(f"warning: checkpoint {step} is saved, but {file} is not written ({why})")

    def _unfinished(self, step: int) -> pathlib.Path:
        return self.directory / f"{step}.unfinished"

    def _links(self, step: int) -> pathlib.Path:
        return self.directory / f"{step}.{FROZEN}.unfinished"

    def _fail(self, step: int, error: Exception) -> None:
        self._failure = (
            f"saving checkpoint {step} in {self.directory} failed ({durable.reason(error)})"
        )
        with contextlib.suppress(OSError):  # the storage may be disconnected
            saved = self.steps()
            newest = f"the newest one there is {max(saved)}" if saved else "there is none yet"
            self._failure += f"; {newest}"
        log.info(f"warning: {self._failure}")

    def _remove_old(self) -> None:
        steps = self.steps()
        for step in sorted(set(steps) - self.kept(steps)):
            remove(self.directory / str(step))
