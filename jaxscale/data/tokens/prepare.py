"""Writes folders of prepared shards, in one process or several, and resumes after a kill."""

import concurrent.futures
import contextlib
import fcntl
import logging
import multiprocessing
import os
import pathlib
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Any

from jaxscale.data.tokens.index import INDEX, UNFINISHED, Index, path_in, read_index
from jaxscale.data.tokens.shards import (
    Work,
    find_made,
    finish_shards,
    key_of,
    make_shard,
    write_file,
)
from jaxscale.data.tokens.tokenizer import Tokenizer, from_file, load_tokenizer
from jaxscale.run_folder import COPIED_WITH_TOKENIZER, TOKENIZERS

_PROGRESS_SECONDS = 5.0

_log = logging.getLogger("jaxscale")


def prepare(works: Sequence[Work], tokenizer: Tokenizer, *, workers: int = 0) -> Index:
    """Writes the missing shards of a folder, and their index.

    Args:
      works: the result of `plan`.
      workers: number of processes; 0 works in this process.

    Raises:
      ValueError: as `make_shard` and `finish_shards`; or the folder has other shards, another
        process is writing to it, or a worker was killed.
    """
    folder = works[0].folder
    if (folder / INDEX).is_file():
        index = read_index(str(folder))
        if index.key != key_of(works):
            raise ValueError(
                f"{folder} has shards of other text, or by another tokenizer or other settings; "
                "remove it, or write to another folder"
            )
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)  # left by a kill just before the end
        return index
    unfinished = folder / UNFINISHED
    unfinished.mkdir(parents=True, exist_ok=True)
    with _locked(unfinished / "lock", folder):
        for path in unfinished.glob("*.part"):
            path.unlink()
        for name in (*TOKENIZERS, *COPIED_WITH_TOKENIZER):
            if tokenizer.file and name not in tokenizer.files and (folder / name).exists():
                raise ValueError(
                    f"{folder / name} belongs to another tokenizer than {tokenizer.name!r}, and "
                    "would be read as one of its files; remove it, or write to another folder"
                )
        for name, data in tokenizer.files.items():
            write_file(folder / name, data)
        todo = [work for work in works if find_made(work) is None]
        if len(todo) < len(works):
            _log.info("data: %d of %d shards exist already", len(works) - len(todo), len(works))
        progress = ReadProgress(sum(work.num_bytes for work in todo))
        if workers and len(todo) > 1:
            _in_processes(todo, tokenizer, min(workers, len(todo)), progress)
        else:
            for work in todo:
                make_shard(work, tokenizer, progress.add)
        index = finish_shards(works, tokenizer)
    shutil.rmtree(unfinished)
    return index


class ReadProgress:
    """Logs the amount of text read, every few seconds."""

    def __init__(self, total: int) -> None:
        self.total, self.stored, self.text = total, 0, 0
        self._begin = self._reported = time.perf_counter()

    def add(self, stored: int, text: int) -> None:
        """Adds bytes read, as stored and as text, and logs the progress when it is due."""
        self.set(self.stored + stored, self.text + text)

    def set(self, stored: int, text: int) -> None:
        """`add` with the new totals."""
        self.stored, self.text = stored, text
        now = time.perf_counter()
        if now - self._reported >= _PROGRESS_SECONDS:
            self._reported = now
            _log.info("data: %s", self.line(now - self._begin))

    def line(self, seconds: float) -> str:
        """Share, amount, rate, and time left."""
        done = self.stored / max(self.total, 1)
        left = f", {_duration(seconds * (1 - done) / done)} left" if done else ""
        return (
            f"tokenised {self.text / 1e6:,.0f} MB of text ({100 * done:.0f} % of the files), "
            f"{self.text / 1e6 / seconds:.1f} MB/s{left}"
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def _locked(path: pathlib.Path, folder: pathlib.Path) -> Iterator[None]:
    """Excludes other processes; the lock ends with the process that holds it."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"another process is preparing {folder}; wait for it, or end it"
            ) from error
        yield


def _in_processes(
    works: Sequence[Work], tokenizer: Tokenizer, workers: int, progress: ReadProgress
) -> None:
    context = multiprocessing.get_context("spawn")  # a fork copies the locks of other threads
    read = context.Array("q", 2)
    stop = context.Event()
    path = path_in(str(works[0].folder), tokenizer.file_name) if tokenizer.file else ""
    executor = concurrent.futures.ProcessPoolExecutor(
        workers, context, _start_worker, (path, tokenizer.name, read, stop)
    )
    try:
        futures = {executor.submit(_make_in_worker, work) for work in works}
        while futures:
            done, futures = concurrent.futures.wait(futures, timeout=0.5)
            for future in done:
                future.result()
            progress.set(*read)
    except BrokenProcessPool as error:
        raise ValueError(
            "a worker process was killed, perhaps for lack of memory; finished shards are kept: "
            "run the same command again, with fewer --workers"
        ) from error
    finally:
        stop.set()
        executor.shutdown(cancel_futures=True)


class _StoppedError(Exception):
    """The command has ended, and this shard is no longer needed."""


_worker: dict[str, Any] = {}
"""The arguments with which a worker process was started."""


def _start_worker(path: str, name: str, read: Any, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it, and stops the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process for each core is enough
    tokenizer = from_file(path, name) if path else load_tokenizer(name)
    _worker.update(tokenizer=tokenizer, read=read, stop=stop)


def _end_with_parent() -> None:
    """Ends a worker whose parent was killed and could not stop it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _make_in_worker(work: Work) -> None:
    def report(stored: int, text: int) -> None:
        if _worker["stop"].is_set():
            raise _StoppedError
        with _worker["read"].get_lock():
            _worker["read"][0] += stored
            _worker["read"][1] += text

    make_shard(work, _worker["tokenizer"], report)
