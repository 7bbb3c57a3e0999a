"""The folder of a checkpoint: arrays, whatever their layout, and the description of them.

Every array is stored whole, under its path in the state, so neither the layout nor the classes that
saved it matter when it is read. Those that training leaves as they are have files of their own,
which a later checkpoint need not write again. The description, with the arrays' checksums and what
the run adds, is in the same folder.
"""

import logging
import os
import pathlib
import shutil
from collections.abc import Collection
from typing import Any

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath, epy

from jaxscale.checkpoints.description import FROZEN, write_description
from jaxscale.checkpoints.differences import array_differences
from jaxscale.checkpoints.errors import read_twice, unusable
from jaxscale.storage import durable
from jaxscale.storage.local_tier import MARKER

with epy.lazy_imports():  # by a run, while its step is compiled
    import orbax.checkpoint as ocp

# Orbax logs each save at length; its errors are raised here, and reported once.
absl.logging.get_absl_logger().addFilter(lambda record: "orbax" not in record.pathname)
# Of several files that cannot be written the first is reported. The others' errors asyncio reports
# when they are forgotten.
logging.getLogger("asyncio").addFilter(lambda record: "never retrieved" not in record.getMessage())

log = logging.getLogger("jaxscale")

ARRAYS = "arrays"
"""The folder of a checkpoint for arrays that training changes."""

MOST_ERRORS = 1000
"""Of one save that failed."""


SHARED_WRITE_BYTES = 2**20
"""The least that each of several devices with the same array writes of it. Orbax cuts the parts out
with a program for each, compiled at the first save: for small arrays that takes longer than to
write them whole."""


type ArrayWriter = ocp.AsyncCheckpointer
"""Writes arrays in the background."""


def named_arrays(state: Any) -> dict[str, Any]:
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


def array_signature(array: Any) -> dict[str, Any]:
    """What the description says of an array, but for its checksum."""
    return {"shape": list(array.shape), "dtype": str(array.dtype)}


def array_writer(host_gb: int) -> ArrayWriter:
    """A writer of arrays of which at most so much may be in host memory, where it is not 0."""
    limits: dict[str, Any] = {
        "save_concurrent_gb": host_gb,
        "save_device_host_concurrent_gb": host_gb,
        "is_prioritized_key_fn": lambda path: False,
    }
    types = ocp.type_handlers
    of_jax = types.ArrayHandler(min_slice_bytes_for_replica_parallel=SHARED_WRITE_BYTES)
    of_numpy = (np.ndarray, types.NumpyHandler()), (np.number, types.ScalarHandler())
    handler: Any = ocp.PyTreeCheckpointHandler(
        type_handler_registry=types.create_type_handler_registry(*of_numpy, (jax.Array, of_jax)),
        **(limits if host_gb else {}),
    )
    # Folders are made before `save` returns: in the background, a failure would hang threads.
    return ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(**{ARRAYS: handler, FROZEN: handler}),
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
    )


def begin_write(
    writer: ArrayWriter, path: pathlib.Path, arrays: dict[str, Any], frozen: Collection[str] = ()
) -> None:
    """Returns as soon as the arrays may be changed or donated.

    Args:
      frozen: those of `arrays` that have files of their own.
    """
    parts = {
        folder: ocp.args.PyTreeSave(part) for folder, part in _by_folder(arrays, frozen).items()
    }
    writer.save(path, args=ocp.args.Composite(**parts))


def _by_folder(arrays: dict[str, Any], frozen: Collection[str]) -> dict[str, dict[str, Any]]:
    """Arrays by the folder of a checkpoint that has their files; without empty folders."""
    folders: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        folders.setdefault(FROZEN if name in frozen else ARRAYS, {})[name] = array
    return folders


def frozen_arrays(arrays: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those of the arrays in a description that training leaves as they are."""
    return {name: about for name, about in arrays.items() if about.get("frozen")}


def link_files(source: pathlib.Path, target: pathlib.Path) -> None:
    """Makes a folder whose files are links to those of another.

    Raises:
      OSError: the file system has no links, or cannot make these.
    """
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except shutil.Error as error:  # of all files: the reason of the first says enough
        raise OSError(error.args[0][0][2]) from error


def forget_errors(writer: ArrayWriter) -> None:
    """After a write that failed: the writer keeps an error for each file, and would raise the next
    one of them in each later write, and when it is closed."""
    for _ in range(MOST_ERRORS):
        try:
            writer.wait_until_finished()
            return
        except Exception:
            continue


def complete_folder(path: pathlib.Path, description: dict[str, Any]) -> None:
    """Opens the arrays that were written as a reader would, adds the description, and returns when
    all is on disk.

    Raises:
      ValueError: what was written cannot be read.
    """
    saved = _open_arrays(path / ARRAYS)
    if frozen_arrays(description["arrays"]):
        saved |= _open_arrays(path / FROZEN)
    if differences := array_differences(saved, description["arrays"], part=False):
        raise ValueError(f"what was written cannot be read: {differences[0]}")
    description["files"] = durable.describe_files(path)
    (path / MARKER).parent.mkdir()
    (path / MARKER).write_text(write_description(description))
    durable.sync_tree(path)


def _open_arrays(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The signatures of the arrays in a folder, opened as a reader opens them; none is read."""
    handler = ocp.PyTreeCheckpointHandler()
    try:
        found = handler.metadata(epath.Path(path)).tree
        return {name: array_signature(array) for name, array in found.items()}
    finally:
        handler.close()


def read_arrays(
    directory: pathlib.Path, step: int, wanted: dict[str, Any], frozen: Collection[str]
) -> dict[str, jax.Array]:
    """Arrays of a checkpoint, each with the sharding and type of its `jax.ShapeDtypeStruct`.

    Args:
      frozen: those that have files of their own.

    Raises:
      DamagedError: they cannot be used.
      UnreadableError: the operating system does not let this process read them.
    """
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    reader = ocp.PyTreeCheckpointHandler()  # an `ocp.Checkpointer` waits for all processes

    def read(folder: str, part: dict[str, Any]) -> dict[str, jax.Array]:
        restore_args = {
            name: ocp.ArrayRestoreArgs(
                sharding=leaf.sharding or default, global_shape=leaf.shape, dtype=leaf.dtype
            )
            for name, leaf in part.items()
        }
        item = ocp.args.PyTreeRestore(item=part, restore_args=restore_args, partial_restore=True)
        path = epath.Path(directory / str(step) / folder)
        return read_twice(lambda: reader.restore(path, args=item))

    try:
        found: dict[str, jax.Array] = {}
        for folder, part in _by_folder(wanted, frozen).items():
            found |= read(folder, part)
        return found
    except jax.errors.JaxRuntimeError:  # such as out of memory: not the checkpoint's fault
        raise
    except Exception as error:  # Orbax raises bare Exceptions
        raise unusable(directory, step, error) from error
    finally:
        reader.close()


def set_aside(path: pathlib.Path) -> pathlib.Path:
    """Renames the folder of a checkpoint, which is then none; the new path."""
    number = 1
    while (target := path.with_name(f"{path.name}.damaged{number}")).exists():
        number += 1
    durable.move(path, target)
    return target


def remove(path: pathlib.Path) -> None:
    """Deletes a checkpoint, unless it is being read: then it is left for the next time. A line is
    logged where it cannot be deleted."""
    deleted = path.with_suffix(".deleted")
    try:
        with durable.claimed(path / MARKER) as free:
            # Under another name first: a deletion that is cut short leaves no half checkpoint.
            if free:
                path.rename(deleted)
        if free:
            shutil.rmtree(deleted)
    except OSError as error:
        log.info(f"checkpoint {path.name} is old but could not be deleted: {error}")
