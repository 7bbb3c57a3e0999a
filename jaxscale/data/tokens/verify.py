"""Whether the tokens on disk are those that were written.

Sizes and the small arrays of a folder are compared whenever it is opened. The shards are read for
it once a run: at once as far as that takes a second or two, the rest in the background, while
training goes on. Those at an address are compared where they are copied, and not otherwise.
"""

import concurrent.futures
import hashlib
import threading
from collections.abc import Sequence

import numpy as np

from jaxscale.data.tokens.npy_files import ArrayFile
from jaxscale.storage.object_store import is_remote

AT_ONCE_BYTES = 10**9
"""Read before a run begins: a second or two."""

_PART = 2**22  # elements


def digest_of(array: np.ndarray | ArrayFile) -> str:
    """The digest of an array, read in parts, as `ArrayWriter` has it."""
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
            f"{shard.path} changed since it was written: put the whole file back, or prepare the "
            "text again"
        )


def check_shards(shards: Sequence[ArrayFile]) -> "concurrent.futures.Future[None]":
    """Checks local shards: the first `AT_ONCE_BYTES` now, the others in a thread that ends with
    the process.

    Returns:
      What raises a ValueError once a damaged one was found, or an OSError once one could not be
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
