"""Verifies checksums of prepared shards.

Sizes and the small arrays of a folder are compared whenever it is opened. Local shards are read and
compared once a run: the first ones, for a second or two, before training, the others in the
background while it runs. Shards at a URL are compared only if they are copied.
"""

import concurrent.futures
import hashlib
import threading
from collections.abc import Sequence

import numpy as np

from jaxscale.data.tokens.npy_files import ArrayFile
from jaxscale.storage.object_store import is_remote

AT_ONCE_BYTES = 10**9
"""Bytes that are read before a run begins, in a second or two."""

_PART = 2**22  # elements


def digest_of(array: np.ndarray | ArrayFile) -> str:
    """The digest of an array, read in parts; equal to `ArrayWriter`'s."""
    found = hashlib.blake2b(digest_size=8)
    for first in range(0, len(array), _PART):
        found.update(memoryview(array[first : first + _PART]).cast("B"))
    return found.hexdigest()


def check_shard(shard: ArrayFile) -> None:
    """Reads a shard and compares it with its digest.

    Raises:
      ValueError: it changed since it was written, or cannot be read.
    """
    if shard.digest and digest_of(shard) != shard.digest:
        raise ValueError(
            f"{shard.path} changed since it was written: restore the whole file, or prepare the "
            "text again"
        )


def check_shards(shards: Sequence[ArrayFile]) -> "concurrent.futures.Future[None]":
    """Checks local shards: the first `AT_ONCE_BYTES` now, the others in a daemon thread.

    Returns:
      A future that raises a ValueError for a damaged shard, or an OSError for one that cannot be
      read.

    Raises:
      ValueError: as `check_shard`.
    """
    later, num_bytes = [], 0
    for shard in shards:
        if is_remote(shard.path):
            continue
        num_bytes += shard.num_bytes
        if num_bytes > AT_ONCE_BYTES:
            later.append(shard)
        else:
            check_shard(shard)
    outcome: concurrent.futures.Future[None] = concurrent.futures.Future()

    def check() -> None:
        try:
            for shard in later:
                check_shard(shard)
        except (ValueError, OSError) as error:
            outcome.set_exception(error)

    if later:
        threading.Thread(target=check, name="verification", daemon=True).start()
    return outcome
