"""The checkpoints of a run: written in the background, committed all at once, read onto any layout.

A checkpoint is a folder named by its step (`checkpoints/folder.py` writes and reads its
files). It gets that name by one rename, after everything in it is on disk and was opened as a
reader would: a killed save leaves a folder under another name, which is never read and which the
next save removes. What the caller adds (data state, config, axes) is in the same folder and the
same commit. Arrays that no step changes are written once: a later checkpoint has links to the files
of the one before it, and is whole without that one. Checksums are compared on reading, so that a
bit that flipped on disk does not go unnoticed.
"""

import contextlib
import glob
import json
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, cast

import jax

from jaxscale.checkpoints.array_sums import array_sums
from jaxscale.checkpoints.description import read_description
from jaxscale.checkpoints.differences import array_differences, describe_difference, listing
from jaxscale.checkpoints.folder import (
    ArrayWriter,
    DamagedError,
    UnreadableError,
    array_signature,
    array_writer,
    begin_write,
    complete_folder,
    forget_errors,
    frozen_arrays,
    link_files,
    named_arrays,
    read_arrays,
    read_twice,
    unusable,
)
from jaxscale.distributed import processes
from jaxscale.storage import durable
from jaxscale.storage.local_tier import FROZEN, MARKER, local_steps

LOOK_SECONDS = 5.0
"""Between looks at how much is written, by one who waits for it."""


class NotFiniteError(FloatingPointError):
    """A state with numbers that are not finite, after `step`."""

    def __init__(self, step: int, names: list[str]) -> None:
        super().__init__(
            f"step {step}: {len(names)} arrays of the updated state are not finite, the first "
            f"{names[0]}; stopped, and nothing after the last checkpoint is saved. Lower "
            "optimizer.learning_rate, or set optimizer.clip_norm"
        )
        self.step = step


def best_step(steps: Collection[int], losses: Mapping[int, float]) -> int | None:
    """That of some steps with the lowest loss, of equal ones the first; None where none has one."""
    return min(sorted(losses.keys() & set(steps)), key=losses.__getitem__, default=None)


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


class Checkpoints:
    """The checkpoints of a run, and the thread that writes them in the background.

    Every process of a run makes the same calls; the folder is one that all of them see. Only one
    run may save to it at a time, and any number may read.

    Args:
      directory: holds one folder per checkpoint; made by the first save.
      keep_last: newest checkpoints that are kept.
      keep_every: those whose step is a multiple of this are kept too; 0 means none.
      keep_best: that with the lowest of `losses` is kept too.
      report: gets one line after each commit, and after a save or a deletion that failed.
      newest_file: outside of the folder; gets the step of each commit, so that a folder that was
        lost is noticed.
      host_gb: at least an array; no more is copied to the host, and held with its compressed form
        until it is written, at a time. A state must not change then before `wait` returns. 0 is
        all of it at once.

    Attributes:
      losses: on held-out text, by step; replaced by whoever evaluates.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        keep_best: bool = False,
        report: Callable[[str], None] = print,
        newest_file: pathlib.Path | None = None,
        host_gb: int = 0,
    ) -> None:
        if keep_last < 1 or keep_every < 0:
            raise ValueError(
                f"run.keep_last = {keep_last} must be at least 1 and "
                f"run.keep_every = {keep_every} at least 0"
            )
        self.losses: Mapping[int, float] = {}
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
            raise ValueError(f"{self.directory} is a file, and should be a folder; remove it")
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._keep_best = keep_best
        self._report = report if jax.process_index() == 0 else lambda line: None
        self._host_gb = host_gb
        self._writer: ArrayWriter | None = None  # the first save makes it
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._newest_file = newest_file
        self._looked_at = b""  # the description of the checkpoint whose files were there

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

        Waits first for the save before it. A save that fails, at once or later, is reported, and
        `outcome` says why; the checkpoints before it are as they were.

        Args:
          step: updates made; names the checkpoint.
          state: tree of arrays, in canonical form, in device or host memory.
          metadata: what JSON can hold; the config, under "config", is used in messages.
          finite: the parts of the state, such as "params", that are refused with a number that is
            not finite in an array of 1 or more dimensions.
          frozen: paths of arrays that training leaves as they are. Where the newest checkpoint has
            the same bits of all of them, they are not written again.

        Raises:
          ValueError: the step is already saved, or `metadata` is not JSON.
          NotFiniteError: the state has a number that is not finite; nothing is written.
        """
        self.wait()
        # Process 0 asks for all: one that failed alone would leave the others in a collective.
        if away := processes.from_first("begin of a save", self._clear_place(step)):
            self._fail(step, OSError(away))
            return
        arrays = named_arrays(state)
        sums = array_sums(arrays)
        names = [
            name
            for name, array in arrays.items()
            if name.partition("/")[0] in finite and array.ndim and not sums[name].finite
        ]
        if names:
            raise NotFiniteError(step, names)
        description = {
            "arrays": {
                name: array_signature(array)
                | {"checksum": sums[name].checksum}
                | ({"frozen": True} if name in frozen else {})
                for name, array in arrays.items()
            },
            "metadata": dict(metadata),
        }
        try:
            description = json.loads(json.dumps(description, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"metadata of checkpoint {step} is not JSON: {error}") from error
        # What ends the thread in a way that nobody foresaw is no success.
        self._failure = f"saving checkpoint {step} in {self.directory} did not end"
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

    def _clear_place(self, step: int) -> str:
        """Removes what is in the way of a save; why the folder cannot be listed, "" if it can."""
        try:
            if jax.process_index() == 0 and step in self.steps():
                raise ValueError(f"checkpoint {step} is already in {self.directory}")
            self._remove_leftovers()
        except OSError as error:
            return durable.reason(error)
        return ""

    def _link_frozen(self, step: int, arrays: dict[str, dict[str, Any]]) -> bool:
        """Makes links to the frozen arrays of the newest checkpoint, beside the unfinished one;
        False where they are to be written: its bits are others, or there cannot be links."""
        if jax.process_index() != 0:
            return False
        frozen, newest = frozen_arrays(arrays), None
        try:
            newest = max(self.steps(), default=None)
            if newest is None or frozen_arrays(self._description(newest)["arrays"]) != frozen:
                return False
            link_files(self.directory / str(newest) / FROZEN, self._links(step))
        except (OSError, ValueError) as error:
            self._report(
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
        """Bytes that all processes have written of an unfinished checkpoint; 0 in all processes but
        the first, which would only ask the file system the same."""
        total = 0
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # a file that has another name by now
                for path in self.directory.glob("*.unfinished*/**/*"):
                    total += path.stat().st_size
        return total

    def outcome(self) -> str | None:
        """Why the last save failed, "" if it did not; None while it is being written."""
        return None if self._thread and self._thread.is_alive() else self._failure

    def close(self) -> None:
        """Waits, and stops the writer."""
        try:
            self.wait()
        finally:
            if self._writer:
                self._writer.close()

    def steps(self) -> list[int]:
        """The steps with a committed checkpoint, in order."""
        return local_steps(self.directory)

    def kept(self, steps: Collection[int]) -> set[int]:
        """Those of some steps whose checkpoints are kept."""
        kept = set(sorted(steps)[-self._keep_last :])
        if self._keep_every:
            kept |= {step for step in steps if step % self._keep_every == 0}
        if self._keep_best and (best := best_step(steps, self.losses)) is not None:
            kept.add(best)
        return kept

    def latest(self) -> int | None:
        """The newest committed step, or None.

        Raises:
          ValueError: there is none, and `newest_file` says that there was.
        """
        newest = max(self.steps(), default=None)
        if newest is None and self._newest_file and self._newest_file.is_file():
            newest_saved = self._newest_file.read_bytes().decode(errors="replace").strip()
            raise ValueError(
                f"{self.directory} holds no checkpoint, and step "
                f"{newest_saved or '?'} was saved there: put the folder back, "
                f"or remove {self._newest_file} to begin again from step 0"
            )
        return newest

    def metadata(self, step: int) -> dict[str, Any]:
        """The metadata that `save` was given.

        Raises:
          ValueError: there is no such checkpoint, or it cannot be used.
        """
        return self._description(step)["metadata"]

    def parts(self, step: int) -> set[str]:
        """The parts of a state that a checkpoint holds, such as "params" and "opt_state".

        Raises:
          ValueError: there is no such checkpoint, or it cannot be used.
        """
        return {name.partition("/")[0] for name in self._description(step)["arrays"]}

    def arrays(self, step: int, part: str) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and types of the arrays of a part, such as "params", by their paths in it.

        Raises:
          ValueError: as `parts`.
        """
        arrays = self._description(step)["arrays"].items()
        inside = f"{part}/"
        return {
            name.removeprefix(inside): jax.ShapeDtypeStruct(about["shape"], about["dtype"])
            for name, about in arrays
            if name.startswith(inside)
        }

    def restore(
        self,
        step: int,
        abstract_state: Any,
        *,
        config: Mapping[str, Any] | None = None,
        part: bool = False,
        without: str = "",
    ) -> Any:
        """Reads a checkpoint onto the layout of `abstract_state`, whatever layout saved it.

        Args:
          step: one of `steps()`.
          abstract_state: tree of `jax.ShapeDtypeStruct` with shardings; one without a sharding
            goes to the default device.
          config: the present config, so that an error can name the settings that changed.
          part: whether the checkpoint may hold more arrays than `abstract_state`.
          without: a part of the saved state that is left out.

        Returns:
          A tree like `abstract_state`, every value bit for bit as it was saved.

        Raises:
          ValueError: names, shapes or types differ, or the checkpoint cannot be used.
          UnreadableError: the operating system does not let this process read it.
        """
        saved = self.check_fits(step, abstract_state, config=config, part=part, without=without)
        wanted = named_arrays(abstract_state)
        frozen = frozen_arrays(saved)
        arrays = read_everywhere(
            "read of a checkpoint", lambda: read_arrays(self.directory, step, wanted, frozen)
        )
        sums = array_sums(arrays, finite=False)
        wrong = [name for name in arrays if saved[name]["checksum"] != sums[name].checksum]
        if wrong:
            names = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if wrong[3:] else "")
            raise unusable(
                self.directory, step, ValueError(f"bits of {names} changed since they were saved")
            )
        structure = jax.tree.structure(abstract_state)
        return jax.tree.unflatten(structure, [arrays[name] for name in wanted])

    def check_fits(
        self,
        step: int,
        abstract_state: Any,
        *,
        config: Mapping[str, Any] | None = None,
        part: bool = False,
        without: str = "",
    ) -> dict[str, Any]:
        """What the description of a checkpoint says of its arrays, by their names; none is read.
        The arguments are those of `restore`.

        Raises:
          ValueError: names, shapes or types differ, or the checkpoint cannot be used.
        """
        description = self._description(step)
        wanted = {n: array_signature(leaf) for n, leaf in named_arrays(abstract_state).items()}
        saved = {
            name: about
            for name, about in description["arrays"].items()
            if not without or name.partition("/")[0] != without
        }
        found = array_differences(saved, wanted, part=part)
        if found:
            saved_config = description["metadata"].get("config", {})
            changed = describe_difference(saved_config, config) if config is not None else []
            title = f"checkpoint {step} in {self.directory} does not fit this run"
            raise ValueError(listing(title, found, changed))
        return saved

    @contextlib.contextmanager
    def held(self, step: int) -> Iterator[bool]:
        """Keeps a checkpoint from being deleted while it is read; whether it is still there."""
        with durable.held(self._description_path(step)):
            yield step in self.steps()

    def set_aside(self, step: int) -> pathlib.Path:
        """Renames a checkpoint, which is then no longer listed; the new path."""
        path = self.directory / str(step)
        number = 1
        while (target := path.with_name(f"{step}.damaged{number}")).exists():
            number += 1
        durable.move(path, target)
        return target

    def remove(self, step: int) -> None:
        """Deletes a checkpoint, unless it is being read: then it is left for the next time."""
        path = self.directory / str(step)
        deleted = path.with_suffix(".deleted")
        try:
            with durable.claimed(self._description_path(step)) as free:
                # Under another name first: a deletion that is cut short leaves no half checkpoint.
                if free:
                    path.rename(deleted)
            if free:
                shutil.rmtree(deleted)
        except OSError as error:
            self._report(f"checkpoint {step} is old but could not be deleted: {error}")

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
        self._report(f"checkpoint {step} saved in {time.monotonic() - begin:.1f} s")
        if jax.process_index() == 0:
            try:
                self._remove_old()
            except OSError as error:
                self._report(f"old checkpoints could not be listed: {error}")

    def _finish(self, step: int, description: dict[str, Any], linked: bool) -> None:
        """Completes what was written, and gives it the name of a checkpoint.

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
            with contextlib.suppress(OSError):  # else another attempt finds the step saved
                target.rename(path)
            raise
        if self._newest_file:
            self._note_newest(self._newest_file, step)

    def _note_newest(self, file: pathlib.Path, step: int) -> None:
        """What cannot be written here costs only the notice that the folder was lost."""
        try:
            durable.replace_file(file, f"{step}\n".encode())
        except OSError as error:
            why = durable.reason(error)
            self._report(f"warning: checkpoint {step} is saved, but {file} is not written ({why})")

    def _unfinished(self, step: int) -> pathlib.Path:
        return self.directory / f"{step}.unfinished"

    def _links(self, step: int) -> pathlib.Path:
        return self.directory / f"{step}.{FROZEN}.unfinished"

    def _fail(self, step: int, error: Exception) -> None:
        self._failure = (
            f"saving checkpoint {step} in {self.directory} failed ({durable.reason(error)})"
        )
        with contextlib.suppress(OSError):  # the storage may be away
            saved = self.steps()
            newest = f"the newest one there is {max(saved)}" if saved else "there is none yet"
            self._failure += f"; {newest}"
        self._report(f"warning: {self._failure}")

    def _remove_old(self) -> None:
        steps = self.steps()
        for step in sorted(set(steps) - self.kept(steps)):
            self.remove(step)

    def _remove_leftovers(self) -> None:
        """Removes what killed saves and deletions left; nothing else is writing now."""
        if jax.process_index() == 0 and self.directory.is_dir():
            for path in self.directory.iterdir():
                ended = path.suffix in (".deleted", ".unfinished")
                if ended or ".orbax-checkpoint-tmp" in path.name:
                    shutil.rmtree(path, ignore_errors=True)

    def _description_path(self, step: int) -> pathlib.Path:
        return self.directory / str(step) / MARKER

    def _description(self, step: int) -> dict[str, Any]:
        if step not in self.steps():
            raise ValueError(
                f"there is no checkpoint {step} in {self.directory}; there are {self.steps()}"
            )

        def read() -> dict[str, Any]:
            data = self._description_path(step).read_bytes()
            description = read_description(data)
            # Process 0 looks at the files for all, and once: thousands of processes that look at
            # thousands of files stall a file system. Arrays are compared when they are read.
            if jax.process_index() == 0 and self._looked_at != data:
                if changed := durable.changed_file(
                    self.directory / str(step), description["files"]
                ):
                    raise ValueError(changed)
                self._looked_at = data
            return description

        try:
            return read_twice(read)
        except (OSError, ValueError, MemoryError) as error:
            raise unusable(self.directory, step, error) from error
