"""The folder of one checkpoint on disk: its arrays (Orbax) and their description.

Every array is stored whole, under its path in the state, so neither the layout nor the classes that
saved it matter when it is read. Frozen arrays have separate files, which a later checkpoint need
not write again. The description, with the arrays' checksums and the run's metadata, is in the same
folder.
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

with epy.lazy_imports():  # imported by a run while its step compiles
    import orbax.checkpoint as ocp

# Orbax logs each save at length; its errors are raised here, and reported once.
absl.logging.get_absl_logger().addFilter(lambda record: "orbax" not in record.pathname)
# Of several files that cannot be written the first is reported. Asyncio logs the errors of the
# others when they are garbage-collected.
logging.getLogger("asyncio").addFilter(lambda record: "never retrieved" not in record.getMessage())

log = logging.getLogger("jaxscale")

ARRAYS = "arrays"
"""The folder of a checkpoint for arrays that training changes."""

MOST_ERRORS = 1000
"""The most errors that are cleared after a failed save."""


SHARED_WRITE_BYTES = 2**20
"""The smallest part that each of several devices with the same array writes. Orbax cuts out each
part with a program, compiled at the first save: for a small array that takes longer than writing it
whole."""


type ArrayWriter = ocp.AsyncCheckpointer
"""Writes arrays in the background."""


def named_arrays(state: Any) -> dict[str, Any]:
    """The arrays of a tree by path, such as "params/layers/attention/q"."""
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
    """The entry of an array in the description, without its checksum."""
    return {"shape": list(array.shape), "dtype": str(array.dtype)}


def array_writer(host_gb: int) -> ArrayWriter:
    """A writer that copies at most `host_gb` to host memory at a time; 0 sets no limit."""
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
      frozen: the names in `arrays` that have separate files.
    """
    parts = {
        folder: ocp.args.PyTreeSave(part) for folder, part in _by_folder(arrays, frozen).items()
    }
    writer.save(path, args=ocp.args.Composite(**parts))


def _by_folder(arrays: dict[str, Any], frozen: Collection[str]) -> dict[str, dict[str, Any]]:
    """Arrays by the folder of a checkpoint with their files; without empty folders."""
    folders: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        folders.setdefault(FROZEN if name in frozen else ARRAYS, {})[name] = array
    return folders


def frozen_arrays(arrays: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The frozen arrays of a description, which training does not change."""
    return {name: about for name, about in arrays.items() if about.get("frozen")}


def link_files(source: pathlib.Path, target: pathlib.Path) -> None:
    """Creates a folder whose files are hard links to the files of another.

    Raises:
      OSError: the file system has no links, or cannot make these.
    """
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except shutil.Error as error:  # lists all files; the first reason is enough
        raise OSError(error.args[0][0][2]) from error


def forget_errors(writer: ArrayWriter) -> None:
    """Clears the writer's errors after a failed write: Orbax keeps one for each file, and raises
    the next of them in each later write and on closing."""
    for _ in range(MOST_ERRORS):
        try:
            writer.wait_until_finished()
            return
        except Exception:
            continue


def complete_folder(path: pathlib.Path, description: dict[str, Any]) -> None:
    """Opens the written arrays as a reader would, adds the description, and returns when all is on
    disk.

    Raises:
      ValueError: the written arrays cannot be read.
    """
    saved = _open_arrays(path / ARRAYS)
    if frozen_arrays(description["arrays"]):
        saved |= _open_arrays(path / FROZEN)
    if differences := array_differences(saved, description["arrays"], part=False):
        raise ValueError(f"the written arrays cannot be read: {differences[0]}")
    description["files"] = durable.describe_files(path)
    (path / MARKER).parent.mkdir()
    (path / MARKER).write_text(write_description(description))
    durable.sync_tree(path)


def _open_arrays(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The shapes and types of the arrays in a folder, opened as a reader would; none is read."""
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
      frozen: names of arrays with separate files.

    Raises:
      DamagedError: they cannot be used.
      UnreadableError: the operating system does not let this process read them.
    """
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    reader = ocp.PyTreeCheckpointHandler()  # `ocp.Checkpointer` would wait for all processes

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
    """Renames the folder of a checkpoint, so that it no longer counts as one; returns the path."""
    number = 1
    while (target := path.with_name(f"{path.name}.damaged{number}")).exists():
        number += 1
    durable.move(path, target)
    return target


def remove(path: pathlib.Path) -> None:
    """Deletes a checkpoint, or leaves it for the next time while it is being read. A failure is
    logged."""
    deleted = path.with_suffix(".deleted")
    try:
        with durable.claimed(path / MARKER) as free:
            # Renamed first, so that an interrupted deletion leaves no partial checkpoint.
            if free:
                path.rename(deleted)
        if free:
            shutil.rmtree(deleted)
    except OSError as error:
        log.info(f"checkpoint {path.name} is no longer kept but could not be deleted: {error}")
