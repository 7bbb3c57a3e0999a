"""Checkpoints: written in the background, committed all at once, read onto any layout.

A checkpoint is a folder named by its step. It gets that name by one rename, after everything in
it is on disk: a killed save leaves a folder under another name, which is never read and which the
next save removes. Every array is stored whole, under its path in the state, so neither the layout
nor the classes that saved it matter when it is read. The description of the arrays and what the
caller adds (data state, config, axes) are in the same folder and the same commit. Checksums of
both are compared on reading, so that a bit that flipped on disk does not go unnoticed.
"""

import hashlib
import json
import logging
import math
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

FORMAT = 1
LINES = 20
"""Differences that a message lists; it only counts the rest."""

# Orbax logs each save at length; its errors are raised here, and reported once.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


class Checkpoints:
    """The checkpoints of a run, and the thread that writes them in the background.

    Every process of a run makes the same calls; the folder is one that all of them see. Only one
    run may save to it at a time, and any number may read.

    Args:
      directory: holds one folder per checkpoint; made by the first save.
      keep_last: newest checkpoints that are kept.
      keep_every: those whose step is a multiple of this are kept too; 0 is none.
      report: gets one line after each commit, and after a save or a deletion that failed.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        report: Callable[[str], None] = print,
    ) -> None:
        if keep_last < 1 or keep_every < 0:
            raise ValueError(
                f"run.keep_last = {keep_last} must be at least 1 and "
                f"run.keep_every = {keep_every} at least 0"
            )
        self.directory = pathlib.Path(directory).absolute()
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._report = report if jax.process_index() == 0 else lambda line: None
        # Folders are made before `save` returns: in the background, a failure would hang threads.
        self._writer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(),
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._thread: threading.Thread | None = None
        self._failure: RuntimeError | None = None

    def save(self, step: int, state: Any, metadata: Mapping[str, Any]) -> None:
        """Begins a save and returns as soon as `state` may be changed or donated.

        Waits first for the save before it.

        Args:
          step: updates made; names the checkpoint.
          state: tree of arrays, in canonical form, in device or host memory.
          metadata: what JSON can hold; the config, under "config", is used in messages.

        Raises:
          ValueError: the step is already saved, or `metadata` is not JSON.
          RuntimeError: this save, or the one before it, failed.
        """
        self.wait()
        if step in self.steps():
            raise ValueError(f"checkpoint {step} is already in {self.directory}")
        arrays = _named(state)
        sums = _checksums(arrays)
        description = {
            "format": FORMAT,
            "arrays": {n: _signature(a) | {"checksum": sums[n]} for n, a in arrays.items()},
            "metadata": dict(metadata),
        }
        try:
            description = json.loads(json.dumps(description, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"metadata of checkpoint {step} is not JSON: {error}") from error
        description["digest"] = _digest(description)
        self._remove_leftovers()
        begin = time.monotonic()
        try:
            self._writer.save(
                self.directory / str(step),
                args=ocp.args.Composite(
                    arrays=ocp.args.PyTreeSave(arrays), description=ocp.args.JsonSave(description)
                ),
            )
        except Exception as error:
            raise self._failed(step, error) from error
        self._thread = threading.Thread(target=self._commit, args=(step, begin), name="commit")
        self._thread.start()

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
          RuntimeError: the last save failed; the checkpoints before it are as they were.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Waits, and stops the writer."""
        try:
            self.wait()
        finally:
            self._writer.close()

    def steps(self) -> list[int]:
        """The steps with a committed checkpoint, in order."""
        if not self.directory.is_dir():
            return []
        return sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdecimal())

    def latest(self) -> int | None:
        """The newest committed step, or None."""
        return max(self.steps(), default=None)

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

    def restore(
        self,
        step: int,
        abstract_state: Any,
        *,
        config: Mapping[str, Any] | None = None,
        part: bool = False,
    ) -> Any:
        """Reads a checkpoint onto the layout of `abstract_state`, whatever layout saved it.

        Args:
          step: one of `steps()`.
          abstract_state: tree of `jax.ShapeDtypeStruct` with shardings; one without a sharding
            goes to the default device.
          config: the present config, so that an error can name the settings that changed.
          part: whether the checkpoint may hold more arrays than `abstract_state`.

        Returns:
          A tree like `abstract_state`, every value bit for bit as it was saved.

        Raises:
          ValueError: names, shapes or types differ, or the checkpoint cannot be used.
        """
        description = self._description(step)
        wanted = _named(abstract_state)
        wanted_signatures = {name: _signature(leaf) for name, leaf in wanted.items()}
        found = _differences(description["arrays"], wanted_signatures, part=part)
        if found:
            saved_config = description["metadata"].get("config", {})
            changed = describe_difference(saved_config, config) if config is not None else []
            title = f"checkpoint {step} in {self.directory} does not fit this run"
            raise ValueError(_listing(title, found, changed))
        arrays = self._read(step, wanted)
        saved = description["arrays"]
        wrong = [
            n for n, checksum in _checksums(arrays).items() if saved[n]["checksum"] != checksum
        ]
        if wrong:
            names = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if wrong[3:] else "")
            raise self._unusable(step, ValueError(f"bits of {names} changed since they were saved"))
        structure = jax.tree.structure(abstract_state)
        return jax.tree.unflatten(structure, [arrays[name] for name in wanted])

    def _read(self, step: int, wanted: dict[str, Any]) -> dict[str, jax.Array]:
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        restore_args = {
            name: ocp.ArrayRestoreArgs(
                sharding=leaf.sharding or default, global_shape=leaf.shape, dtype=leaf.dtype
            )
            for name, leaf in wanted.items()
        }
        reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        try:
            return reader.restore(
                self.directory / str(step) / "arrays",
                args=ocp.args.PyTreeRestore(
                    item=wanted, restore_args=restore_args, partial_restore=True
                ),
            )
        except jax.errors.JaxRuntimeError:  # such as out of memory: not the checkpoint's fault
            raise
        except Exception as error:  # Orbax raises bare Exceptions
            raise self._unusable(step, error) from error
        finally:
            reader.close()

    def _commit(self, step: int, begin: float) -> None:
        """In the background: waits for the commit, reports it, and removes old checkpoints."""
        try:
            self._writer.wait_until_finished()
        except Exception as error:
            self._failure = self._failed(step, error)
            self._failure.__cause__ = error
            self._report(str(self._failure))  # the next call raises it, perhaps much later
            return
        self._report(f"checkpoint {step} saved in {time.monotonic() - begin:.1f} s")
        if jax.process_index() == 0:
            self._remove_old()

    def _failed(self, step: int, error: Exception) -> RuntimeError:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return RuntimeError(
            f"saving checkpoint {step} in {self.directory} failed ({reason}); "
            f"the newest one there is {self.latest()}"
        )

    def _remove_old(self) -> None:
        steps = self.steps()
        for step in steps[: -self._keep_last]:
            if self._keep_every and step % self._keep_every == 0:
                continue
            path = self.directory / str(step)
            try:
                # Under another name first: a deletion that is cut short leaves no half checkpoint.
                shutil.rmtree(path.rename(path.with_suffix(".deleted")))
            except OSError as error:
                self._report(f"checkpoint {step} is old but could not be deleted: {error}")

    def _remove_leftovers(self) -> None:
        """Removes what killed saves and deletions left; nothing else is writing now."""
        if jax.process_index() == 0 and self.directory.is_dir():
            for path in self.directory.iterdir():
                if path.suffix == ".deleted" or ".orbax-checkpoint-tmp" in path.name:
                    shutil.rmtree(path, ignore_errors=True)

    def _description(self, step: int) -> dict[str, Any]:
        if step not in self.steps():
            raise ValueError(
                f"there is no checkpoint {step} in {self.directory}; there are {self.steps()}"
            )
        try:
            path = self.directory / str(step) / "description" / "metadata"
            description = json.loads(path.read_text())
            if description.pop("digest") != _digest(description):
                raise ValueError("its description changed since it was saved")
            if description["format"] != FORMAT:
                raise ValueError(f"its format is {description['format']}, not {FORMAT}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._unusable(step, error) from error
        return description

    def _unusable(self, step: int, error: Exception) -> ValueError:
        before = max((other for other in self.steps() if other < step), default=None)
        advice = (
            "there is none before it"
            if before is None
            else f"the one before it is {before}: remove {self.directory / str(step)} to "
            "resume from it"
        )
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return ValueError(
            f"checkpoint {step} in {self.directory} cannot be used ({reason}); {advice}"
        )


def describe_difference(saved: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """One line per key that differs between two nested configs, such as "model.d_model = ..."."""
    before, now = _flat(saved), _flat(config)
    lines = []
    for key in sorted(before.keys() | now.keys()):
        if key not in now:
            lines.append(f"{key} = {before[key]!r} when saved, no such key now")
        elif key not in before:
            lines.append(f"{key} = {now[key]!r} now, no such key when saved")
        elif before[key] != now[key]:
            lines.append(f"{key} = {before[key]!r} when saved, {now[key]!r} now")
    return lines


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {prefix: list(tree) if isinstance(tree, tuple) else tree}
    flat = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _named(state: Any) -> dict[str, Any]:
    """The arrays of a tree under their paths, such as "params/layers/attention/q"."""
    arrays = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in arrays:
            raise ValueError(f"two arrays of the state are called {name!r}; rename one")
        arrays[name] = leaf if hasattr(leaf, "dtype") else np.asarray(jnp.asarray(leaf))
        if jnp.issubdtype(arrays[name].dtype, jax.dtypes.prng_key):
            raise ValueError(f"{name} is a typed random key; keep its jax.random.key_data")
    return arrays


def _signature(array: Any) -> dict[str, Any]:
    return {"shape": list(array.shape), "dtype": str(array.dtype)}


def _checksums(arrays: Mapping[str, Any]) -> dict[str, int]:
    """A number per array that depends on every bit of it and not on its layout."""
    # One after the other: arrays that are offloaded to host memory are copied to the device.
    return {name: int(_checksum(array)) for name, array in arrays.items()}


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    """Sum modulo 2^32 of the words, each times an odd number that depends on its position.

    Integer sums are exact in any order, so shards may be added in any; multiplying by an odd number
    is invertible, so a change of a single word always shows.
    """
    # XLA computes only with arrays in device memory.
    array = jax.device_put(array, jax.memory.Space.Device)
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    bits = min(32, 8 * array.dtype.itemsize)
    words = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)
    place = jnp.zeros(words.shape, jnp.uint32)
    for dim in range(words.ndim):
        stride = jnp.uint32(math.prod(words.shape[dim + 1 :]) % 2**32)
        place += stride * jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    return jnp.sum(words * (2 * place + 1), dtype=jnp.uint32)


def _digest(description: Mapping[str, Any]) -> str:
    text = json.dumps(description, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _differences(saved: dict[str, dict], wanted: dict[str, dict], *, part: bool) -> list[str]:
    """One line per array that does not match, the parameters before what is derived from them."""
    lines = []
    for name in sorted(saved.keys() | wanted.keys(), key=lambda name: (name.count("/"), name)):
        if name not in saved:
            lines.append(f"{name}: not in the checkpoint")
        elif name not in wanted:
            if not part:
                lines.append(f"{name}: only in the checkpoint")
        else:
            changes = [
                f"{key} {saved[name][key]} saved, {wanted[name][key]} wanted"
                for key in ("shape", "dtype")
                if saved[name][key] != wanted[name][key]
            ]
            lines += [f"{name}: {'; '.join(changes)}"] if changes else []
    return lines


def _listing(title: str, found: list[str], changed: list[str]) -> str:
    lines = [f"{title}; {len(found)} arrays differ:", *(f"  {line}" for line in found[:LINES])]
    if len(found) > LINES:
        lines.append(f"  and {len(found) - LINES} more")
    if changed:
        lines += ["settings that changed since it was saved:"]
        lines += [f"  config.{line}" for line in changed[:LINES]]
    return "\n".join(lines)
