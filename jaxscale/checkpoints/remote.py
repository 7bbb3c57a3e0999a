"""Remote checkpoints: upload, download and removal at a run's URL.

A remote checkpoint is the objects of its folder. Its description, which lists all others with their
sizes, is uploaded last and removed first: without it there is no checkpoint.
"""

import pathlib
import shutil

from jaxscale.checkpoints.description import FROZEN, read_description
from jaxscale.storage import durable
from jaxscale.storage.local_tier import CHECKPOINTS, MARKER, check_free, stored_steps
from jaxscale.storage.object_store import ObjectStore, StoreError

FETCHED = ".fetched"
"""The file that marks a local checkpoint as downloaded, so that it can be downloaded again."""


def send_checkpoint(store: ObjectStore, folder: pathlib.Path, step: int) -> int:
    """Uploads a checkpoint, its description last; returns the bytes that were sent. A file that it
    shares with a checkpoint in the store is copied inside the store.

    Args:
      folder: of the local checkpoints.

    Raises:
      StoreError: the upload is incomplete; the store then has no checkpoint of this step.
    """
    prefix, place = f"{CHECKPOINTS}/{step}", folder / str(step)
    paths = [path for path in place.rglob("*") if path.is_file() and path.name != FETCHED]
    files = {f"{prefix}/{path.relative_to(place).as_posix()}": path for path in paths}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    marker = {f"{prefix}/{MARKER}": files.pop(f"{prefix}/{MARKER}")}
    copies = _stored_twins(store, folder, step)
    for name, twin in copies.items():
        store.copy(twin, name)
    store.upload({name: path for name, path in files.items() if name not in copies})
    there = store.sizes(prefix)
    for name in files:
        if there.get(name) != sizes[name]:
            raise StoreError(
                f"{store.url}/{name}: {there.get(name, 0)} bytes arrived of {sizes[name]}"
            )
    store.upload(marker)
    return sum(sizes.values()) - sum(sizes[name] for name in copies)


def _stored_twins(store: ObjectStore, folder: pathlib.Path, step: int) -> dict[str, str]:
    """Object of a checkpoint to upload -> the same object of a stored one, where both are hard
    links to one local file."""
    twins: dict[str, str] = {}
    frozen = [path for path in (folder / str(step) / FROZEN).rglob("*") if path.is_file()]
    others = stored_steps(store) if frozen else []
    for other in others:
        sizes = store.sizes(f"{CHECKPOINTS}/{other}")
        for path in frozen:
            name = path.relative_to(folder / str(step)).as_posix()
            stored, twin = f"{CHECKPOINTS}/{other}/{name}", folder / str(other) / name
            shared = twin.is_file() and twin.samefile(path)
            if shared and sizes.get(stored) == path.stat().st_size:
                twins[f"{CHECKPOINTS}/{step}/{name}"] = stored
    return twins


def fetch_checkpoint(store: ObjectStore, folder: pathlib.Path, step: int) -> pathlib.Path:
    """Downloads a checkpoint into a folder under another name, which is returned.

    Raises:
      ValueError: the one in the store is corrupt; a short reason.
      StoreError: the store cannot be read, or the local disk has too little free space.
    """
    prefix, path = f"{CHECKPOINTS}/{step}", folder / f"{step}.unfinished"
    data = store.read(f"{prefix}/{MARKER}")
    files = read_description(data or b"")["files"]
    sizes = store.sizes(prefix)
    for name, (size, _) in files.items():
        if sizes.get(f"{prefix}/{name}") != size:
            raise ValueError(f"{name} has {sizes.get(f'{prefix}/{name}', 0)} bytes, not {size}")
    folder.mkdir(parents=True, exist_ok=True)
    needs = sum(size for size, _ in files.values())
    check_free(folder, needs, f"checkpoint {step}")
    shutil.rmtree(path, ignore_errors=True)
    store.download({f"{prefix}/{name}": path / name for name in files}, needs)
    if changed := durable.changed_file(path, files):
        raise ValueError(changed.removeprefix(f"{path}/"))
    (path / MARKER).parent.mkdir(exist_ok=True)
    (path / MARKER).write_bytes(data or b"")
    (path / FETCHED).touch()
    durable.sync_tree(path)
    return path


def remove_checkpoint(store: ObjectStore, step: int) -> None:
    """Removes a checkpoint, or the rest of an interrupted upload."""
    names = store.sizes(f"{CHECKPOINTS}/{step}")
    marker = f"{CHECKPOINTS}/{step}/{MARKER}"
    if marker in names:
        store.remove([marker])
    store.remove(name for name in names if name != marker)


def set_aside_stored(store: ObjectStore, step: int) -> str:
    """Renames a corrupt checkpoint, so that it no longer counts as one; returns the new name."""
    names, number = store.sizes(CHECKPOINTS), 1
    while any(name.startswith(f"{CHECKPOINTS}/{step}.damaged{number}/") for name in names):
        number += 1
    prefix, target = f"{CHECKPOINTS}/{step}/", f"{CHECKPOINTS}/{step}.damaged{number}/"
    for name in names:
        if name.startswith(prefix):
            store.copy(name, target + name.removeprefix(prefix))
    remove_checkpoint(store, step)
    return f"{store.url}/{target.rstrip('/')}"


def unfinished_steps(store: ObjectStore) -> list[int]:
    """The steps with parts left by an interrupted upload or removal."""
    parts = {name.split("/")[1] for name in store.sizes(CHECKPOINTS)}
    return sorted({int(part) for part in parts if part.isdecimal()} - set(stored_steps(store)))
