"""Datasets of packed examples, addressed by a global index.

Example i is a pure function of the seed and i, independent of processes, rows and workers.
"""

import hashlib
import json
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from etils import epy

from jaxscale.batch import Batch
from jaxscale.config import DataConfig
from jaxscale.config.data_source import Source
from jaxscale.data.denoising import Lengths
from jaxscale.data.objectives import Objective, find_objective, nothing, pairs_for_encoder
from jaxscale.data.packing import Stream, Vocabulary, pad, uniform
from jaxscale.data.prompts import prompted_windows, with_prompts
from jaxscale.data.text.text_files import draw
from jaxscale.data.tokens.corpus import Corpus, open_corpus
from jaxscale.data.tokens.tokenizer import Tokenizer
from jaxscale.data.whole_documents import from_to, whole_pairs, whole_rows

with epy.lazy_imports():
    import grain

PACKING = 2
"""A version number, raised whenever the same corpus and settings would give other examples."""

Split = Literal["train", "heldout"]


@runtime_checkable
class Examples(Protocol):
    """Training or held-out examples: a `Dataset`, or a `Mixture` of several.

    `fingerprint` covers everything that determines example i. `token_bytes` [ids] is the number of
    UTF-8 bytes of each id.
    """

    @property
    def split(self) -> Split: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def token_bytes(self) -> np.ndarray: ...
    @property
    def num_tokens(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Batch: ...
    def example_digest(self, indices: Sequence[int]) -> str: ...
    def progress(self, num_examples: int) -> list["SourceProgress"]: ...


@dataclass(frozen=True)
class SourceProgress:
    """The progress of a run through one source."""

    name: str
    seen: int  # examples
    epoch: int  # examples of one epoch

    @property
    def begun(self) -> int:
        """Epochs begun, the current one included."""
        return -(-self.seen // self.epoch)


def repeats(examples: Examples, first: int, last: int) -> list[SourceProgress]:
    """The sources that start a further epoch in examples `first` to `last`, with their progress."""
    before, after = examples.progress(first), examples.progress(last)
    return [now for then, now in zip(before, after) if now.begun > max(then.begun, 1)]


@dataclass(frozen=True, eq=False)
class Dataset:
    """The documents of one split, concatenated, cut into windows, and made into examples.

    `dataset[i]` is one packed example. For training i is any number from 0: each epoch visits every
    window once, in another order. Held-out windows have a fixed order, and examples beyond the last
    are all padding, so that whole batches count each token once.
    """

    name: str
    stream: Stream = field(repr=False)
    split: Split
    seq_len: int  # tokens of an example, padding included; of the encoder's, if there is one
    seed: int
    objective: str
    vocabulary: Vocabulary = field(repr=False)
    token_bytes: np.ndarray = field(repr=False)
    fingerprint: str
    target_len: int = 0  # tokens of the decoder's part, with an encoder
    # Begin and end of each window, int64 [windows, 2], if documents stay whole; None: equal ones.
    rows: np.ndarray | None = field(default=None, repr=False)

    def __len__(self) -> int:
        """Number of windows: the examples of one epoch."""
        if self.rows is not None:
            return len(self.rows)
        beyond = self._objective.shortest - 1  # drops a last window without targets
        return -(-(self.num_tokens - beyond) // self.window_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of the split; for the causal objective each is a target once in an epoch."""
        return self.stream.num_tokens

    @property
    def window_tokens(self) -> int:
        """Tokens of text in one example."""
        return self._objective.window

    @property
    def _objective(self) -> Objective:
        return find_objective(self.objective, self.seq_len, self.target_len)

    def __getitem__(self, index: int, /) -> Batch:
        """Example `index`: a Batch whose fields are [seq_len], or those of a decoder [target_len]
        and the extra arrays of its encoder [seq_len].

        A row that begins inside a document begins at position 0. Random choices of an objective
        depend on `index`, so each epoch masks other tokens.
        """
        if index < 0:
            raise IndexError(f"example {index}; examples are numbered from 0")
        number = self.window(index)
        start, count = number * self.window_tokens, self.window_tokens
        make = self._objective.example
        if self.rows is not None:
            start, stop = self.rows[number].tolist() if number < len(self) else (0, 0)
            count = stop - start
        if self.rows is not None and self.target_len:
            make = pairs_for_encoder
        window = self.stream.window(start, count)
        if len(window.lengths):
            example = make(window, uniform(self.seed, index), self.vocabulary)
            example = with_prompts(example, self.vocabulary)
        else:
            example = nothing(Lengths(self.seq_len, self.target_len))
        return pad(example, self.target_len or self.seq_len, self.seq_len)

    def window(self, index: int) -> int:
        """The number of example `index`'s window in the split."""
        if self.split == "heldout":
            return index
        epoch, index_in_epoch = divmod(index, len(self))
        # A hash, because seed + epoch would repeat the orders of a run with a neighbouring seed.
        seed = int.from_bytes(digest([self.seed, epoch])[:4], "big")
        return grain.experimental.index_shuffle(
            index_in_epoch, max_index=len(self) - 1, seed=seed, rounds=4
        )

    def example_digest(self, indices: Sequence[int]) -> str:
        """A digest of these examples in this order, to compare two runs."""
        windows = [self.window(index) for index in indices]
        return digest([self.fingerprint, windows]).hex()[:8]

    def progress(self, num_examples: int) -> list[SourceProgress]:
        """The progress through the text after `num_examples`."""
        return [SourceProgress(self.name, num_examples, len(self))]


def open_dataset(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    split: Split,
    directory: pathlib.Path | None = None,
    corpus: Corpus | None = None,
    vocab_size: int | None = None,
    entry: int | None = None,
) -> Dataset:
    """The training or the held-out documents of a source, as packed examples.

    Args:
      directory: where tokens are cached; without it they stay in memory.
      corpus: the result of `open_corpus`, to open a second split without reading it again.
      vocab_size: ids of the model; None is as many as the objective needs.
      entry: the index of an entry of `config.source`, to read only this one.

    Raises:
      ValueError: the split is empty, or smaller than one example, or the model has no ids for the
        objective's special tokens; names the setting to change.
    """
    if split == "heldout" and config.heldout == 0:
        raise ValueError(
            "data.heldout = 0 leaves no documents to evaluate on; set data.heldout = 0.05, or "
            "run.eval_every = 0"
        )
    vocabulary = _vocabulary(config, tokenizer, vocab_size)
    corpus = corpus or open_corpus(config.source, tokenizer, directory)
    name = "data.source" if entry is None else entry_name(config, entry)
    first, last = _documents(corpus, entry)
    if first == last:
        raise ValueError(f"{name} has only documents of earlier entries; remove it")
    drawn = draw(corpus.hashes[first:last], config.seed)
    # In this order any prefix of a split is a random sample of it.
    order = np.argsort(drawn, kind="stable")
    chosen = order[(drawn[order] < config.heldout) == (split == "heldout")]
    if not len(chosen):
        raise ValueError(_nothing_chosen(name, split, config.heldout, drawn))
    settings = [config.heldout, *_settings(config, vocabulary), entry]
    dataset = _packed(config, tokenizer, corpus, name, split, first + chosen, vocabulary, settings)
    if dataset.rows is None and dataset.num_tokens < config.seq_len:
        change = "raise data.heldout" if split == "heldout" else "lower data.heldout"
        raise ValueError(
            f"the {split} documents of {name} have {dataset.num_tokens} tokens, fewer than one "
            f"sequence of data.seq_len = {config.seq_len}; add text to data.source, lower "
            f"data.seq_len, or {change} (now {config.heldout})"
        )
    return dataset


def open_validation(
    config: DataConfig,
    source: Source,
    tokenizer: Tokenizer,
    directory: pathlib.Path | None = None,
    *,
    vocab_size: int | None = None,
) -> Dataset:
    """All documents of one entry of `config.validation`, as packed held-out examples; in file order
    unless documents stay whole.

    Args:
      directory: where tokens are cached; without it they stay in memory.
      vocab_size: as in `open_dataset`.

    Raises:
      ValueError: as `open_corpus`, or as `open_dataset` of the objective.
    """
    vocabulary = _vocabulary(config, tokenizer, vocab_size)
    corpus = open_corpus([source], tokenizer, directory)
    settings = _settings(config, vocabulary)
    chosen, name = np.arange(corpus.num_documents), source.listed_in
    return _packed(config, tokenizer, corpus, name, "heldout", chosen, vocabulary, settings)


def _packed(
    config: DataConfig,
    tokenizer: Tokenizer,
    corpus: Corpus,
    name: str,
    split: Split,
    chosen: np.ndarray,
    vocabulary: Vocabulary,
    settings: list[object],
) -> Dataset:
    """A dataset of the documents `chosen` of a corpus, in this order.

    Args:
      settings: everything else that determines the examples.
    """
    objective = find_objective(config.objective, config.seq_len, config.target_len)
    marked, rows = corpus.marked(chosen), None
    pairs = bool(config.target_len) and config.objective == "prefix" and bool(marked.any())
    if pairs and not marked.all():
        raise ValueError(
            f"{name} has both prompts with responses and other texts, of which an encoder reads a "
            "random part; give each a separate entry, in data.source with a weight and "
            "data.heldout = 0 (entries are held out together; data.validation evaluates each)"
        )
    if marked.any() and not objective.keeps_marks and not pairs:
        raise ValueError(
            f"data.objective = {config.objective!r} conflicts with the prompts and responses, or "
            f"messages, of {name}, which choose the loss; set data.objective = "
            f"{'prefix' if config.target_len else 'causal'!r}"
        )
    if pairs:
        chosen, rows = whole_pairs(config, tokenizer, corpus, f"{split}: {name}", chosen)
    elif marked.any():
        prompt = len(vocabulary.prompt)
        chosen, rows = whole_rows(config, corpus, f"{split}: {name}", chosen, marked, prompt)
        settings = [*settings, "whole"]  # an earlier version cut them like text
    lengths = np.diff(corpus.offsets)[chosen]
    if (count := len(vocabulary.prompt)) > config.seq_len // 2:
        raise ValueError(
            f"model.prompt_tokens = {count} leaves less than half of data.seq_len = "
            f"{config.seq_len} to text; raise data.seq_len to {2 * count} or more"
        )
    if vocabulary.prompt and rows is None:
        rows = from_to(prompted_windows(lengths, config.seq_len, len(vocabulary.prompt)))
    offsets = np.append(0, np.cumsum(lengths))
    return Dataset(
        name=name,
        # The boundary that begins a document ends the one before it; that of the first chosen
        # document ends the last.
        stream=Stream(
            corpus,
            corpus.offsets[np.append(chosen, chosen[0])],
            offsets,
            tokenizer.boundary,
            closed=tokenizer.bos is not None,
        ),
        split=split,
        seq_len=config.seq_len,
        seed=config.seed,
        objective=config.objective,
        vocabulary=vocabulary,
        token_bytes=np.pad(
            corpus.token_bytes, (0, vocabulary.model_size - len(corpus.token_bytes))
        ),
        fingerprint=digest([PACKING, corpus.fingerprint, split, *settings]).hex(),
        target_len=config.target_len,
        rows=rows,
    )


def _settings(config: DataConfig, vocabulary: Vocabulary) -> list[object]:
    """The settings that determine the examples of given documents."""
    lengths = [config.seq_len, config.target_len] if config.target_len else config.seq_len
    return [lengths, config.seed, config.objective, vocabulary.settings]


def entry_name(config: DataConfig, entry: int) -> str:
    """The name of an entry of `config.source` in messages."""
    return f"data.source[{entry}] ({', '.join(config.source[entry].path)})"


def digest(values: object) -> bytes:
    """A hash of plain values."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=8).digest()


def _documents(corpus: Corpus, entry: int | None) -> tuple[int, int]:
    """The first document of an entry of the source, and the first after it."""
    if entry is None:
        return 0, corpus.num_documents
    bounds = [*corpus.entries, *[corpus.num_documents] * 2]
    first = min(entry, len(bounds) - 2)  # the last entries may have no documents
    return bounds[first], bounds[first + 1]


def _vocabulary(config: DataConfig, tokenizer: Tokenizer, vocab_size: int | None) -> Vocabulary:
    """The ids of a model's examples; ids beyond the tokenizer's serve as marks that it lacks."""
    objective = find_objective(config.objective, config.seq_len, config.target_len)
    lengths = f"data.seq_len = {config.seq_len}"
    if config.target_len:
        lengths += f", data.target_len = {config.target_len}"
    if not objective.window:
        least = "at least 4" + (" and 4" if config.target_len else "")
        raise ValueError(
            f"{lengths} is too short for data.objective = {config.objective!r}; {least}"
        )
    sentinels = tokenizer.sentinels if objective.num_sentinels else ()
    if sentinels and len(sentinels) < objective.num_sentinels:
        raise ValueError(
            f"data.objective = {config.objective!r} needs {objective.num_sentinels} sentinels with "
            f"{lengths}, and data.tokenizer = {config.tokenizer!r} has {len(sentinels)}; lower "
            "the lengths"
        )
    own_mask = tokenizer.mask if objective.masks else None
    needed = tokenizer.vocab_size + objective.num_modes
    needed += 0 if sentinels else objective.num_sentinels
    needed += objective.masks and own_mask is None
    size = needed if vocab_size is None else vocab_size
    if size < needed:
        raise ValueError(
            f"model.vocab_size = {size} is too small: data.objective = {config.objective!r} needs "
            f"{needed - tokenizer.vocab_size} more ids than the {tokenizer.vocab_size} of "
            f"data.tokenizer = {config.tokenizer!r} with {lengths}; set model.vocab_size = {needed}"
        )
    special = tokenizer.special
    return Vocabulary(
        tokenizer.vocab_size,
        tokenizer.boundary,
        size,
        start=tokenizer.bos if objective.shortest > 1 else None,
        pad=tokenizer.decoder_start if config.target_len else None,
        sentinels=sentinels,
        mask=own_mask,
        special=tuple(sorted(special.values())) if objective.masks else (),
        prompt=tokenizer.prompt,
    )


def _nothing_chosen(name: str, split: Split, heldout: float, drawn: np.ndarray) -> str:
    found = f"data.heldout = {heldout} leaves none of {len(drawn)} documents of {name} for {split}"
    if len(drawn) == 1:
        return (
            f"{found}: a document (a file) is held out whole or not at all; give its entry of "
            "data.source the boundary 'line' or 'paragraph', cut the text into several files, or "
            "set data.heldout = 0, and name the text to evaluate on in data.validation or set "
            "run.eval_every = 0"
        )
    # Documents whose draw is below the share are held out.
    if split == "heldout":
        return f"{found}; {np.min(drawn) + 0.001:.3f} would hold out one, or add documents"
    return f"{found}; below {np.max(drawn):.3f} one remains, or add documents"
