"""Packed examples by global index, and batches of them from any step on.

Example i of a data set is a pure function of the seed and i: nothing about processes, rows or
workers enters, so the state of a data stream is the number of the next example.
"""

import functools
import hashlib
import json
import logging
import os
import pathlib
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import absl.flags
import grain
import numpy as np

from jaxscale.batch import Batch
from jaxscale.config import DataConfig
from jaxscale.data.corpus import Corpus, open_corpus
from jaxscale.data.sources import draw
from jaxscale.data.tokenizer import Tokenizer

PACKING = 1
"""Raised when the same corpus and settings would give other examples."""

_PREFETCH_BATCHES = 4

_log = logging.getLogger("jaxscale")

Split = Literal["train", "heldout"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """The documents of one split, concatenated and cut into windows of `seq_len` tokens.

    `dataset[i]` is one packed example. For training i is any number from 0: each epoch visits
    every window once, in an order of its own. Held-out windows come in a fixed order, and
    examples beyond the last are all padding, so that whole batches count each token once.
    """

    tokens: np.ndarray  # of the whole corpus
    # Where each document of the split begins, in `tokens` and in the split's own stream; both
    # [num_documents + 1]. The last entry closes the stream: it points at a boundary.
    starts: np.ndarray
    offsets: np.ndarray
    token_bytes: np.ndarray  # [vocab_size], UTF-8 bytes that each id stands for
    split: Split
    seq_len: int
    seed: int
    fingerprint: str  # of everything that decides what example i is

    def __len__(self) -> int:
        """Windows: examples of one epoch."""
        return -(-self.num_tokens // self.seq_len)

    @property
    def num_tokens(self) -> int:
        """Tokens of the split; each is a target once in an epoch."""
        return int(self.offsets[-1])

    def __getitem__(self, index: int) -> Batch:
        """Example `index`: a Batch whose fields are [seq_len].

        A row cut from the middle of a document begins at position 0. Every real token counts in
        the loss: the target of a document's last token is the boundary that ends it.
        """
        if index < 0:
            raise IndexError(f"example {index}; examples are numbered from 0")
        start = self.window(index) * self.seq_len
        # One place more than there are rows: the target of the last. Beyond the end of the
        # stream every place is the boundary that closes it.
        places = np.minimum(start + np.arange(self.seq_len + 1), self.num_tokens)
        documents = np.searchsorted(self.offsets, places, side="right") - 1
        begins = self.offsets[documents]
        ids = self.tokens[self.starts[documents] + places - begins].astype(np.int32)
        real = places[:-1] < self.num_tokens
        segments = documents - documents[0] + 1
        positions = places - np.maximum(begins, start)
        return Batch(
            tokens=ids[:-1],
            targets=ids[1:],
            segments=np.where(real, segments[:-1], 0).astype(np.int32),
            positions=np.where(real, positions[:-1], 0).astype(np.int32),
            weights=real.astype(np.float32),
        )

    def window(self, index: int) -> int:
        """Which window of the split example `index` is."""
        if self.split == "heldout":
            return index
        epoch, index_in_epoch = divmod(index, len(self))
        # Seeds of neighbouring runs and epochs must not meet, as seed + epoch would.
        seed = int.from_bytes(_hash([self.seed, epoch])[:4], "big")
        return grain.experimental.index_shuffle(
            index_in_epoch, max_index=len(self) - 1, seed=seed, rounds=4
        )

    def example_digest(self, indices: Sequence[int]) -> str:
        """A short name for these examples in this order: equal where two runs see the same."""
        windows = [self.window(index) for index in indices]
        return _hash([self.fingerprint, windows]).hex()[:8]

    def __getstate__(self) -> dict:
        # A worker process maps the file again instead of receiving a copy of it.
        if isinstance(self.tokens, np.memmap):
            return self.__dict__ | {"tokens": str(self.tokens.filename)}
        return self.__dict__

    def __setstate__(self, state: dict) -> None:
        if isinstance(state["tokens"], str):
            state["tokens"] = np.load(state["tokens"], mmap_mode="r")
        self.__dict__.update(state)


def open_dataset(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    split: Split,
    directory: pathlib.Path | None = None,
    corpus: Corpus | None = None,
) -> Dataset:
    """The training or the held-out documents of a source, as packed examples.

    Args:
      directory: where tokens are kept and found again; without it they stay in memory.
      corpus: what `open_corpus` gave, to open a second split of it at no cost.

    Raises:
      ValueError: the split is empty, or smaller than one example; says which setting to change.
    """
    if split == "heldout" and config.heldout == 0:
        raise ValueError(
            "data.heldout = 0 leaves no documents to evaluate on; set data.heldout = 0.05, or "
            "run.eval_every = 0"
        )
    corpus = corpus or open_corpus(config.source, tokenizer, directory)
    drawn = draw(corpus.hashes, config.seed)
    if split == "train":
        chosen = np.argsort(drawn, kind="stable")
        chosen = chosen[drawn[chosen] >= config.heldout]
    else:
        chosen = np.flatnonzero(drawn < config.heldout)
    if not len(chosen):
        raise ValueError(_nothing_chosen(split, config.heldout, drawn))
    offsets = np.append(0, np.cumsum(np.diff(corpus.offsets)[chosen]))
    if offsets[-1] < config.seq_len:
        change = "raise data.heldout" if split == "heldout" else "lower data.heldout"
        raise ValueError(
            f"the {split} documents of data.source hold {offsets[-1]} tokens, fewer than one "
            f"sequence of data.seq_len = {config.seq_len}; add text to data.source, lower "
            f"data.seq_len, or {change} (now {config.heldout})"
        )
    settings = [PACKING, corpus.fingerprint, split, config.heldout, config.seq_len, config.seed]
    return Dataset(
        tokens=corpus.tokens,
        starts=corpus.offsets[np.append(chosen, 0)],  # every document begins with a boundary
        offsets=offsets,
        token_bytes=corpus.token_bytes,
        split=split,
        seq_len=config.seq_len,
        seed=config.seed,
        fingerprint=_hash(settings).hex(),
    )


def batches(
    dataset: Dataset,
    *,
    global_batch_size: int,
    start_step: int = 0,
    rows: slice | Sequence[int] | None = None,
    workers: int = 0,
) -> Generator[Batch]:
    """Batches from `start_step` on; fields are [len(rows), seq_len].

    Step s holds examples s * global_batch_size and on, whatever the rows and workers. Training
    batches never end; held-out ones end after the last token. Reading runs ahead in a thread, or
    in `workers` processes; closing the iterator ends them.

    Args:
      rows: the rows of the global batch that this process loads; None is all of them.
    """
    chosen = range(global_batch_size)
    if rows is not None:
        chosen = chosen[rows] if isinstance(rows, slice) else tuple(rows)
    stop = 2**62 if dataset.split == "train" else -(-len(dataset) // global_batch_size)
    load = functools.partial(_load, dataset, global_batch_size, tuple(chosen))
    steps = grain.MapDataset.range(min(start_step, stop), stop).map(load)
    reading = steps.to_iter_dataset(
        grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCH_BATCHES)
    )
    if workers:
        if not absl.flags.FLAGS.is_parsed():  # Grain reads flags of its own, and needs no values
            absl.flags.FLAGS.mark_as_parsed()
        reading = reading.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=workers),
            worker_init_fn=functools.partial(_end_with_parent, os.getpid()),
        )
    iterator = iter(reading)
    iterator.start_prefetch()
    return _closing(iterator)


def _end_with_parent(parent: int, worker: int, num_workers: int) -> None:
    """Makes a worker process end when its parent was killed and could not close it."""
    del worker, num_workers

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _closing(iterator: grain.DatasetIterator[Batch]) -> Generator[Batch]:
    try:
        yield from iterator
    finally:
        iterator.close()


def _load(dataset: Dataset, global_batch_size: int, rows: tuple[int, ...], step: int) -> Batch:
    first = int(step) * global_batch_size
    examples = [dataset[first + row] for row in rows]
    return Batch(*(np.stack(field) for field in zip(*examples)))


def _nothing_chosen(split: Split, heldout: float, drawn: np.ndarray) -> str:
    found = f"data.heldout = {heldout} leaves none of {len(drawn)} documents for {split}"
    if len(drawn) == 1:
        return (
            f"{found}: a document (a file) is held out whole or not at all; cut the text into "
            "several files, or set data.heldout = 0 and run.eval_every = 0"
        )
    # Documents that draw less than the share are held out.
    if split == "heldout":
        return f"{found}; {np.min(drawn) + 0.001:.3f} is enough for one, or add documents"
    return f"{found}; below {np.max(drawn):.3f} one is left, or add documents"


def _hash(values: object) -> bytes:
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=8).digest()
