"""Prefetched batches of examples, starting at any step.

The state of a stream is the number of its next example, independent of processes and workers.
"""

import contextlib
import functools
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence

import absl.flags
from etils import epy

from jaxscale.batch import Batch
from jaxscale.data.dataset import Examples
from jaxscale.data.packing import stack

with epy.lazy_imports():
    import grain

log = logging.getLogger("jaxscale")

_PREFETCH_BATCHES = 4

LEFT_TO_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that workers ignore."""


def batches(
    dataset: Examples,
    *,
    global_batch_size: int,
    start_step: int = 0,
    first_example: int | None = None,
    rows: slice | Sequence[int] | None = None,
    workers: int = 0,
) -> Generator[Batch]:
    """Batches from `start_step`; fields are [len(rows), seq_len].

    The batch of step s begins with example s * global_batch_size, whatever the rows and workers;
    with `first_example` that is the one with which the batch of `start_step` begins.
    Training batches never end; held-out ones end after the last token. Batches are prefetched in a
    thread, or in `workers` processes; closing the iterator ends them. If a worker is killed, such
    as by the host's out-of-memory killer, another continues with its batch.

    Args:
      rows: the rows of the global batch that this process loads; None is all of them.

    Raises:
      ChildProcessError: workers were killed twice at the same batch.
    """
    chosen = range(global_batch_size)
    if rows is not None:
        chosen = chosen[rows] if isinstance(rows, slice) else tuple(rows)
    stop = 2**62 if dataset.split == "train" else -(-len(dataset) // global_batch_size)
    begins = start_step * global_batch_size
    moved = 0 if first_example is None else first_example - begins
    load = functools.partial(_load, dataset, global_batch_size, moved, tuple(chosen))

    def begin(step: int) -> Generator[Batch]:
        steps = grain.MapDataset.range(min(step, stop), stop).map(load)
        reading = steps.to_iter_dataset(
            grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCH_BATCHES)
        )
        if workers:
            if not absl.flags.FLAGS.is_parsed():  # Grain reads absl flags, which nobody has parsed
                absl.flags.FLAGS.mark_as_parsed()
            reading = reading.mp_prefetch(
                grain.MultiprocessingOptions(num_workers=workers),
                worker_init_fn=functools.partial(_begin_worker, os.getpid()),
            )
        iterator = iter(reading)
        iterator.start_prefetch()
        return _closing(iterator)

    first = begin(start_step)
    return _begun_again(first, begin, start_step) if workers else first


def _begun_again(
    stream: Generator[Batch], begin: Callable[[int], Generator[Batch]], step: int
) -> Generator[Batch]:
    """A stream from a step, restarted when a worker is killed."""
    killed_at = -1
    while True:
        try:
            with contextlib.closing(stream):
                for batch in stream:
                    yield batch
                    step += 1
            return
        except RuntimeError as error:
            status = re.search(r"exit code -(\d+)", str(error))
            if not status:
                raise
            killed, reason = signal.Signals(int(status[1])).name, "perhaps for lack of memory"
            if killed_at == step:
                raise ChildProcessError(
                    f"a data worker was killed ({killed}) twice at the same batch, {reason}; lower "
                    "data.workers"
                ) from error
            killed_at = step
            log.warning(
                f"note: a data worker was killed ({killed}), {reason}; another begins at its batch"
            )
            stream = begin(step)


def _begin_worker(parent: int, worker: int, num_workers: int) -> None:
    """Prepares a worker process: it ends when its parent was killed, and ignores signals, which a
    terminal or launcher sends to all processes of a group while the parent may still need batches
    to stop cleanly."""
    del worker, num_workers
    for number in LEFT_TO_PARENT:
        signal.signal(number, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _closing(iterator: "grain.DatasetIterator[Batch]") -> Generator[Batch]:
    try:
        yield from iterator
    except Exception:
        # After an interrupted wait: Grain would wait 25 s for a worker that hangs.
        for process in multiprocessing.active_children():
            if process.name.startswith("grain"):
                process.kill()
        raise
    finally:
        iterator.close()


def _load(
    dataset: Examples, global_batch_size: int, moved: int, rows: tuple[int, ...], step: int
) -> Batch:
    first = int(step) * global_batch_size + moved
    examples = [dataset[first + row] for row in rows]
    return stack(examples)
