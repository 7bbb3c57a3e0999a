"""Local copies of prepared folders at URLs, compared with their digests."""

import logging
import pathlib
import shutil

import numpy as np

from jaxscale.data.tokens.index import Index, content_fingerprint, path_in
from jaxscale.data.tokens.verify import digest_of
from jaxscale.formatting import human_bytes
from jaxscale.storage import durable
from jaxscale.storage.object_store import open_store

log = logging.getLogger("jaxscale")

MOST_OF_FREE = 0.5
"""Share of the free disk space that a copy may take: checkpoints need space, too."""


def copy_folder(folder: str, index: Index, directory: pathlib.Path) -> str:
    """The path of a local copy of a folder's arrays, created or completed if necessary; the URL
    itself, with a log line, if the disk has too little free space.

    Args:
      directory: for copies, by the fingerprints of their content.

    Raises:
      ValueError: a shard differs from its digest.
      StoreError: the store cannot be read.
    """
    target = directory / f"prepared-{index.fingerprint}"
    if target.is_dir():
        return str(target)
    sizes = {name: size for shard in index.shards for name, size in shard.files.items()}
    store, needs = open_store(folder), sum(sizes.values())
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if needs > MOST_OF_FREE * free:
        log.info(
            f"data: {folder} has {human_bytes(needs)}, and {directory} {human_bytes(free)} free: "
            "its shards are read from the store, in part, and not compared with their digests"
        )
        return folder
    unfinished = directory / f"unfinished-{target.name}"
    waiting = f"data: another process copies {folder}; waiting for it"
    with durable.exclusive(directory / ".lock", lambda: log.info(waiting)):
        if target.is_dir():
            return str(target)
        missing = [n for n, size in sizes.items() if not _has(unfinished / n, size)]
        store.download({name: unfinished / name for name in missing}, needs)
        about = "offsets.npy", "hashes.npy"  # smaller than the tokens
        store.download({name: unfinished / name for name in about}, needs)
        _compare(unfinished, folder, index)
        durable.sync_tree(unfinished)
        durable.move(unfinished, target)
    log.info(f"data: {folder}, {human_bytes(needs)}, is copied to {target} and compared")
    return str(target)


def _has(path: pathlib.Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _compare(copy: pathlib.Path, folder: str, index: Index) -> None:
    """Compares all arrays of a copy; removes the ones that differ, so that they are copied again.

    Raises:
      ValueError: names one that differs.
    """
    wanted = {shard.file: shard.digest for shard in index.shards}
    wanted |= {shard.loss_file: shard.loss_digest for shard in index.shards if shard.loss_file}
    wrong = [name for name, digest in wanted.items() if digest and _digest(copy / name) != digest]
    own = _digest(copy / "offsets.npy"), _digest(copy / "hashes.npy")
    if content_fingerprint(index.tokenizer_fingerprint, *own, index.shards) != index.fingerprint:
        wrong = wrong or ["offsets.npy", "hashes.npy"]
    for name in wrong:
        (copy / name).unlink(missing_ok=True)
    if wrong:
        raise ValueError(
            f"{path_in(folder, ' or '.join(wrong[:2]))} changed since it was written, or during "
            "the download: run the same command again, or prepare the text again"
        )


def _digest(path: pathlib.Path) -> str:
    """The digest of the array in a file; "" without a file."""
    try:
        array = np.load(path, mmap_mode="r")
    except (ValueError, OSError, EOFError):
        return ""
    return digest_of(array)
