"""A run's folder in two tiers: here, where everything is written first, and at an address.

A run whose --workdir is an address works in a folder of this machine, its local tier, which knows
the address. What is written there is put at the address later (`run.mirror`); here is what lies
there, under which names, and how it comes back; but for checkpoints (`checkpoints.remote`).
"""

import contextlib
import glob
import hashlib
import logging
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from jaxscale.formatting import human_bytes
from jaxscale.storage import durable
from jaxscale.storage.object_store import ObjectStore, StoreError, open_store
from jaxscale.storage.untrusted import safe_name
from jaxscale.storage.user_cache import user_cache

log = logging.getLogger("jaxscale")

VARIABLE = "JAXSCALE_LOCAL_TIER"
"""Of the environment: the folder for local tiers instead of the user's cache."""

ORIGIN = ".address"
"""The file in a local tier that has the address."""

LOCK, FETCHING = ".lock", ".fetching"
"""Files in a local tier: a run holds the first, who brings files from the address the second."""

SENT = ".sent"
"""The file in a local tier from which a checkpoint was put at the address."""

LEASE = "lease.json"
"""The object of the run that writes to an address."""

CHECKPOINTS = "checkpoints"
MARKER = "description/metadata"
"""The file of a checkpoint that describes the others."""

LAST_SAVED = "last_saved"
"""The file with the newest step that was saved; at an address, that was put there."""

NOT_SENT = (CHECKPOINTS, "tokens", "validation")
"""Folders of a run whose files are not put at its address as they are: checkpoints have an order
of their own, and tokens are made again from the text."""


def local_tier(address: str) -> pathlib.Path:
    """The folder of this machine for a run at an address, made if missing.

    Raises:
      ValueError: the address cannot be opened, is a pattern, or is written so that it may be two
        places.
      OSError: the folder cannot be made.
    """
    store = open_store(address)
    address, names = store.address, store.root.strip("/").split("/")
    real = [name for name in names if name not in ("", ".", "..")]
    # s3fs lists bucket//run as bucket/run, and has other objects there.
    if store.folder is None and names != real:
        raise ValueError(
            f"{address} has an empty name, '.' or '..' between two slashes, which stores read in "
            f"two ways; did you mean {address.partition('://')[0]}://{'/'.join(real)}?"
        )
    if glob.has_magic(address):  # to remove an object would remove all that match, of other runs
        raise ValueError(
            f"{address} has one of * ? [, which stores take for a pattern: give another --workdir"
        )
    named = os.environ.get(VARIABLE)
    name = re.sub(r"[^\w.-]+", "_", address)[-80:]
    digest = hashlib.blake2b(address.encode(), digest_size=4).hexdigest()
    try:
        tiers = pathlib.Path(named).expanduser() if named else user_cache() / "runs"
    except RuntimeError as error:  # of pathlib: a user without a home
        raise ValueError(f"set {VARIABLE}, the folder for local tiers: {error}") from error
    folder = tiers.absolute() / f"{name}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / ORIGIN).is_file():
        beside = folder / f"{ORIGIN}.{uuid.uuid4().hex}"  # processes of a host start at once
        beside.write_text(f"{address}\n")
        durable.move(beside, folder / ORIGIN)
    return folder


def store_of(workdir: pathlib.Path) -> ObjectStore | None:
    """The address that a run's folder is the local tier of, if it is one."""
    origin = workdir / ORIGIN
    return open_store(origin.read_text().strip()) if origin.is_file() else None


def is_in_local_tier(folder: pathlib.Path) -> bool:
    """Whether a folder of a run is in the local tier of an address."""
    return any((parent / ORIGIN).is_file() for parent in folder.absolute().parents)


@contextlib.contextmanager
def fetching(workdir: pathlib.Path, *, training: bool = False) -> Iterator[ObjectStore | None]:
    """The store to bring a folder up to date from, one process at a time. None where there is no
    other tier, or where a run is training in the folder, so that nothing is newer.

    Args:
      training: whether the caller is that run.
    """
    store = store_of(workdir)
    if store is None:
        yield None
        return
    with nobody_fetching(workdir):
        if not training:
            with durable.claimed(workdir / LOCK) as free:
                store = store if free else None
        yield store


@contextlib.contextmanager
def nobody_fetching(workdir: pathlib.Path) -> Iterator[None]:
    """No other process brings files from a local tier's address inside; waits for one that does. A
    reader holds the run's lock meanwhile, so a run takes that inside: it would be refused."""
    store = store_of(workdir)
    if store is None:
        yield
        return
    waiting = f"another process fetches {store.address}; waiting for it"
    with durable.exclusive(workdir / FETCHING, lambda: log.info(waiting)):
        yield


def check_not_emptied(store: ObjectStore, workdir: pathlib.Path) -> None:
    """Refuses a local tier whose checkpoints were at its address, and are not there any more.

    Raises:
      ValueError: whether to begin again, or to put them there again, is not known.
    """
    steps = local_steps(workdir / CHECKPOINTS)
    if steps and (workdir / SENT).is_file() and not stored_steps(store):
        raise ValueError(
            f"{store.address} holds no checkpoint any more, and its local tier {workdir} holds "
            f"{steps[-1]}: remove that folder to begin again, or {workdir / SENT} to put them there"
        )


def fetch_files(store: ObjectStore, workdir: pathlib.Path, *, nested: bool = False) -> None:
    """Brings the files of a run but its checkpoints: all of them where the store has a newer
    checkpoint, or nothing is here; else those that are missing.

    Args:
      nested: those in folders, too, such as TensorBoard's; readers do not need them.

    Raises:
      StoreError: the store cannot be read.
    """
    sizes = store.sizes()
    newer = max(_steps(sizes), default=-1) > max(local_steps(workdir / CHECKPOINTS), default=-1)
    everything = newer or not (workdir / "config.json").is_file()
    wanted = {}
    for name in sizes:
        top, _, rest = name.partition("/")
        if top in (LEASE, *NOT_SENT) or (rest and not nested) or name.startswith("."):
            continue
        path = workdir / safe_name(name)
        if everything or not path.exists():
            wanted[name] = path
    beside = {name: path.with_name(f"{path.name}.fetched") for name, path in wanted.items()}
    store.download(beside, sum(sizes[name] for name in wanted))
    for name, path in wanted.items():
        os.replace(beside[name], path)


def local_steps(folder: pathlib.Path) -> list[int]:
    """The steps whose checkpoint is in a folder, in order."""
    try:
        paths = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # others say nothing of what is there
        return []
    names = (path.name for path in paths if path.is_dir())
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def stored_steps(store: ObjectStore) -> list[int]:
    """The steps whose checkpoint is in a store, in order."""
    return _steps(store.sizes(CHECKPOINTS))


def _steps(names: Mapping[str, Any]) -> list[int]:
    found = (re.fullmatch(rf"{CHECKPOINTS}/(\d+)/{MARKER}", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def check_free(folder: pathlib.Path, num_bytes: float, what: str) -> None:
    """Raises a StoreError where the disk of a local tier has no room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise StoreError(
            f"{what}: {human_bytes(num_bytes)}, and the local tier {folder} has "
            f"{human_bytes(free)} free; make room, or set {VARIABLE} to a folder of a larger disk"
        )
