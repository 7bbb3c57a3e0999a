"""The local tier of a remote run folder: names of its files, and their download.

A run whose --workdir is a URL (s3://, gs://) works in a folder of this machine, its local tier,
which stores the URL. Files written there are uploaded to the remote run directory later
(`run.mirror`). Checkpoints are in `checkpoints.remote`.
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
"""The environment variable of the folder for local tiers; by default in the user's cache."""

ORIGIN = ".address"
"""The file in a local tier that stores the URL."""

LOCK, FETCHING = ".lock", ".fetching"
"""Lock files in a local tier: of the run that trains, and of a process that downloads files."""

SENT = ".sent"
"""The file in a local tier that marks that a checkpoint was uploaded."""

LEASE = "lease.json"
"""The object that names the run that writes to a URL, with its heartbeat."""

CHECKPOINTS = "checkpoints"
MARKER = "description/metadata"
"""The file of a checkpoint that lists the others."""

LAST_SAVED = "last_saved"
"""The file with the newest saved step; at a URL, the newest uploaded step."""

NOT_SENT = (CHECKPOINTS, "tokens", "validation")
"""Folders of a run that `run.mirror` does not upload as they are: checkpoints are uploaded in a
fixed order, and tokens are made again from the text."""


def local_tier(url: str) -> pathlib.Path:
    """The folder on this machine for a run at a URL, created if missing.

    Raises:
      ValueError: the URL cannot be opened, is a pattern, or is ambiguous.
      OSError: the folder cannot be created.
    """
    store = open_store(url)
    url, names = store.url, store.root.strip("/").split("/")
    real = [name for name in names if name not in ("", ".", "..")]
    # s3fs lists bucket//run as bucket/run, and has other objects there.
    if store.folder is None and names != real:
        raise ValueError(
            f"{url} has an empty name, '.' or '..' between two slashes, which stores read in "
            f"two ways; did you mean {url.partition('://')[0]}://{'/'.join(real)}?"
        )
    if glob.has_magic(url):  # removing one object would remove all that match
        raise ValueError(
            f"{url} has one of * ? [, which stores take for a pattern: give another --workdir"
        )
    named = os.environ.get(VARIABLE)
    name = re.sub(r"[^\w.-]+", "_", url)[-80:]
    digest = hashlib.blake2b(url.encode(), digest_size=4).hexdigest()
    try:
        tiers = pathlib.Path(named).expanduser() if named else user_cache() / "runs"
    except RuntimeError as error:  # of pathlib: a user without a home
        raise ValueError(f"no folder for local tiers: {error}; set {VARIABLE}") from error
    folder = tiers.absolute() / f"{name}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / ORIGIN).is_file():
        partial = folder / f"{ORIGIN}.{uuid.uuid4().hex}"  # processes of a host start at once
        partial.write_text(f"{url}\n")
        durable.move(partial, folder / ORIGIN)
    return folder


def store_of(workdir: pathlib.Path) -> ObjectStore | None:
    """The remote store of a local tier; None for any other folder of a run."""
    origin = workdir / ORIGIN
    return open_store(origin.read_text().strip()) if origin.is_file() else None


def is_in_local_tier(folder: pathlib.Path) -> bool:
    """Whether a folder is inside a local tier."""
    return any((parent / ORIGIN).is_file() for parent in folder.absolute().parents)


@contextlib.contextmanager
def fetching(workdir: pathlib.Path, *, training: bool = False) -> Iterator[ObjectStore | None]:
    """The store from which to update a folder, for one process at a time. None if there is no
    remote tier, or if a run trains in the folder, so that the store has nothing newer.

    Args:
      training: whether the caller is the run that trains.
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
    """Excludes other processes that download files into a local tier; waits for one that does. A
    run takes its own lock inside: a reader has it during a download, and the run would be refused.
    """
    store = store_of(workdir)
    if store is None:
        yield
        return
    waiting = f"another process downloads {store.url}; waiting for it"
    with durable.exclusive(workdir / FETCHING, lambda: log.info(waiting)):
        yield


def check_not_emptied(store: ObjectStore, workdir: pathlib.Path) -> None:
    """Refuses a local tier whose checkpoints were uploaded and are missing from the store now.

    Raises:
      ValueError: the user has to choose between a new run and a new upload.
    """
    steps = local_steps(workdir / CHECKPOINTS)
    if steps and (workdir / SENT).is_file() and not stored_steps(store):
        raise ValueError(
            f"{store.url} has no checkpoint any more, and its local tier {workdir} has step "
            f"{steps[-1]}: remove that folder to begin again, or {workdir / SENT} to upload it"
        )


def fetch_files(store: ObjectStore, workdir: pathlib.Path, *, nested: bool = False) -> None:
    """Downloads the files of a run except its checkpoints: all of them if the store has a newer
    checkpoint or the folder is empty, else the missing ones.

    Args:
      nested: also files in folders, such as TensorBoard's; readers do not need them.

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
    partial = {name: path.with_name(f"{path.name}.fetched") for name, path in wanted.items()}
    store.download(partial, sum(sizes[name] for name in wanted))
    for name, path in wanted.items():
        os.replace(partial[name], path)


def local_steps(folder: pathlib.Path) -> list[int]:
    """The steps with a checkpoint in a folder, in order."""
    try:
        paths = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # other errors do not mean an empty folder
        return []
    names = (path.name for path in paths if path.is_dir())
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def stored_steps(store: ObjectStore) -> list[int]:
    """The steps with a checkpoint in a store, in order."""
    return _steps(store.sizes(CHECKPOINTS))


def _steps(names: Mapping[str, Any]) -> list[int]:
    found = (re.fullmatch(rf"{CHECKPOINTS}/(\d+)/{MARKER}", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def check_free(folder: pathlib.Path, num_bytes: float, what: str) -> None:
    """Raises a StoreError if the disk of a local tier has less free space than `num_bytes`."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise StoreError(
            f"{what}: {human_bytes(num_bytes)}, and the local tier {folder} has "
            f"{human_bytes(free)} free; free space, or set {VARIABLE} to a folder of a larger disk"
        )
