"""Inspection of a source: counts and lengths of documents, and sample examples."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.config import DataConfig
from jaxscale.config.data_source import Source
from jaxscale.data.dataset import Examples
from jaxscale.data.mixture import open_examples
from jaxscale.data.text.documents import sample_documents
from jaxscale.data.text.text_files import File, find_files
from jaxscale.data.tokens.corpus import Corpus, open_corpus, open_folder
from jaxscale.data.tokens.encode import encode_documents
from jaxscale.data.tokens.image_tokens import without_unread
from jaxscale.data.tokens.index import find_prepared, read_index
from jaxscale.data.tokens.tokenizer import Tokenizer, begin_texts, load_tokenizer, of_folder
from jaxscale.formatting import file_size

SAMPLE_BYTES = 64_000_000
"""Stored bytes above which only a sample of an unprepared source is counted."""

QUANTILES = (0, 10, 50, 90, 99, 100)
_BAR, _SHOWN = 40, 300  # characters


@dataclass(frozen=True, eq=False)
class Survey:
    """Counts of a source, or of a sample of it."""

    name: str
    kind: str  # "shards" or "files"
    num_files: int
    stored_bytes: int
    complete: bool  # whether everything was counted
    num_left_out: int | None  # bad documents; None if not counted
    corpus: Corpus
    tokenizer: Tokenizer

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, [num_documents], the boundary not counted."""
        return np.diff(self.corpus.offsets) - 1

    def numbers(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        corpus, tokenizer = self.corpus, self.tokenizer
        return {
            "name": self.name,
            "kind": self.kind,
            "num_files": self.num_files,
            "stored_bytes": self.stored_bytes,
            "complete": self.complete,
            "num_left_out": self.num_left_out,
            "num_documents": corpus.num_documents,
            "num_tokens": corpus.num_tokens,
            "num_bytes": corpus.num_bytes,
            "bytes_per_token": corpus.num_bytes / corpus.num_tokens,
            "fingerprint": corpus.fingerprint,
            "tokenizer": {
                "name": tokenizer.name,
                "fingerprint": tokenizer.fingerprint,
                "vocab_size": tokenizer.vocab_size,
                "boundary": tokenizer.boundary,
                "mask": tokenizer.mask,
                "sentinels": list(tokenizer.sentinels),
                "special": dict(tokenizer.special),
            },
            "length_quantiles": dict(zip(map(str, QUANTILES), _quantiles(self.lengths))),
            "length_histogram": [
                {"from": low, "to": high, "documents": documents, "tokens": tokens}
                for low, high, documents, tokens in histogram(self.lengths)
            ],
        }


def survey(
    source: Source, tokenizer: str | Tokenizer | None = None, text_begin: str = "tokenizer"
) -> Survey:
    """Counts one entry of `data.source`.

    Args:
      tokenizer: its name; None for the prepared folder's, or "bytes" for an unprepared source.
      text_begin: as `data.text_begin`, if `tokenizer` is a name.

    Raises:
      ValueError: as `open_corpus` and `load_tokenizer`.
    """
    folder, name = find_prepared(source), ", ".join(source.path)
    if folder is not None:
        index = read_index(folder)
        if tokenizer is None:
            tokenizer = of_folder(folder, index)
        elif isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer, [source])
        tokenizer = begin_texts(tokenizer, text_begin)
        corpus = open_folder(folder, tokenizer)
        stored = sum(shard.file_bytes for shard in index.shards)
        return Survey(
            name, "shards", len(index.shards), stored, True, index.num_left_out, corpus, tokenizer
        )
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = begin_texts(load_tokenizer(tokenizer or "bytes", [source]), text_begin)
    files = find_files([source])
    stored = sum(file.num_bytes for file in files)
    complete = stored <= SAMPLE_BYTES
    corpus = open_corpus([source], tokenizer) if complete else _sampled(files, tokenizer)
    return Survey(name, "files", len(files), stored, complete, None, corpus, tokenizer)


def survey_config(data: DataConfig, vocab_size: int) -> tuple[list[Survey], Examples | None]:
    """Surveys of the entries of a configuration, and the training examples of a run.

    The examples are None if an entry is too large to be tokenised for an inspection.
    """
    tokenizer = load_tokenizer(data.tokenizer, data.source, heldout=data.heldout, seed=data.seed)
    tokenizer = without_unread(tokenizer, vocab_size)
    tokenizer = begin_texts(tokenizer, data.text_begin)
    surveys = [survey(source, tokenizer) for source in data.source]
    if not all(one.complete for one in surveys):
        return surveys, None
    corpus = open_corpus(data.source, tokenizer)
    return surveys, open_examples(data, tokenizer, corpus, split="train", vocab_size=vocab_size)


def examples_of(one: Survey) -> Examples:
    """Packed examples of one entry, all of its documents for training."""
    corpus, seq_len = one.corpus, min(256, max(one.corpus.num_tokens, 2))
    if corpus.counted:  # marked documents stay whole
        seq_len = max(seq_len, int(np.diff(corpus.offsets).max()))
    data = DataConfig(heldout=0, seq_len=seq_len)
    return open_examples(
        data, one.tokenizer, corpus, split="train", vocab_size=one.tokenizer.vocab_size
    )


def describe_data(one: Survey) -> str:
    """The counts and the histogram as text."""
    corpus, tokenizer = one.corpus, one.tokenizer
    of = "" if one.complete else ", of which a sample is counted here"
    quantiles = zip(QUANTILES, _quantiles(one.lengths))
    special = ", ".join(f"{name} {i}" for name, i in list(tokenizer.special.items())[:8])
    more = len(tokenizer.special) - 8
    rows = [
        ("stored", f"{one.num_files:,} {one.kind}, {file_size(one.stored_bytes)}{of}"),
        (
            "documents",
            f"{corpus.num_documents:,}"
            + (f" ({one.num_left_out:,} bad ones left out)" if one.num_left_out else ""),
        ),
        ("text", file_size(corpus.num_bytes)),
        (
            "tokens",
            f"{corpus.num_tokens:,} ({corpus.num_bytes / corpus.num_tokens:.2f} bytes a token)",
        ),
        (
            "tokenizer",
            f"{tokenizer.name}: {tokenizer.vocab_size:,} ids, a document begins with "
            f"{_shown(tokenizer, [tokenizer.start])} = {tokenizer.start}",
        ),
        ("special", special + (f" and {more} more" if more > 0 else "")),
        ("mask", "none" if tokenizer.mask is None else str(tokenizer.mask)),
        ("sentinels", f"{len(tokenizer.sentinels)}" if tokenizer.sentinels else "none"),
        ("fingerprint", corpus.fingerprint),
        ("length", ", ".join(f"{q} %: {length:,}" for q, length in quantiles)),
    ]
    lines = [one.name, *(f"  {name:<12} {text}" for name, text in rows), ""]
    lines.append(f"  {'tokens in a document':<21} {'documents':>12} {'tokens':>16}")
    bins = histogram(one.lengths)
    most = max(documents for _, _, documents, _ in bins)
    for low, high, documents, tokens in bins:
        bar = "#" * -(-_BAR * documents // most)
        lines.append(f"  {low:>9,} to {high:>8,} {documents:>12,} {tokens:>16,} {bar}")
    return "\n".join(lines)


def describe_examples(examples: Examples, tokenizer: Tokenizer, count: int) -> list[list[dict]]:
    """The first examples, a record for each segment."""
    described = []
    for i in range(count):
        row = examples[i]
        parts = []
        for segment in range(1, int(row.segments.max(initial=0)) + 1):
            places = np.flatnonzero(row.segments == segment)
            parts.append(
                {
                    "segment": segment,
                    "first_position": int(row.positions[places[0]]),
                    "tokens": len(places),
                    "predicted": int(np.count_nonzero(row.weights[places])),
                    "text": _shown(tokenizer, row.tokens[places].tolist()),
                }
            )
        described.append(parts)
    return described


def print_examples(described: Sequence[Sequence[dict]]) -> str:
    """The records of `describe_examples` as text."""
    lines = []
    for i, parts in enumerate(described):
        lines.append(f"example {i}")
        for part in parts:
            text = json.dumps(part["text"], ensure_ascii=False)[1:-1]
            if len(text) > _SHOWN:
                text = f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"
            lines.append(
                f"  segment {part['segment']}: {part['tokens']} tokens, {part['predicted']} "
                f"predicted: {text}"
            )
    return "\n".join(lines)


def mixture_of(examples: Examples, num_examples: int) -> list[dict[str, Any]]:
    """The examples and epochs of each entry in a run of `num_examples`."""
    return [
        {
            "name": source.name,
            "examples": source.seen,
            "share": source.seen / num_examples,
            "examples_in_an_epoch": source.epoch,
            "epochs": source.seen / source.epoch,
        }
        for source in examples.progress(num_examples)
    ]


def print_mixture(mixture: Sequence[dict[str, Any]], steps: int) -> str:
    """The records of `mixture_of` as text."""
    lines = [f"what a run of {steps:,} steps reads"]
    lines += [
        f"  {one['name']}: {one['examples']:,} examples, {100 * one['share']:.1f} % of all, "
        f"{one['epochs']:.2f} epochs"
        for one in mixture
    ]
    return "\n".join(lines)


def histogram(lengths: np.ndarray) -> list[tuple[int, int, int, int]]:
    """(shortest, longest, documents, tokens) of documents between powers of two."""
    powers = np.frexp(lengths)[1]  # 0 for 0, 1 for 1, 2 for 2 and 3, ...
    bins = []
    for power in range(int(powers.min()), int(powers.max()) + 1):
        own = lengths[powers == power]
        low, high = (0, 0) if power == 0 else (2 ** (power - 1), 2**power - 1)
        bins.append((low, high, len(own), int(own.sum())))
    return bins


def png(path: str, surveys: Sequence[Survey]) -> None:
    """Draws the histograms of lengths: the share of the documents, and of the tokens."""
    # Slow to import, and only a figure needs it.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 1 + 2.6 * len(surveys)), layout="constrained", dpi=150)
    for panel, one in zip(figure.subplots(len(surveys), squeeze=False)[:, 0], surveys):
        bins = np.array(histogram(one.lengths), np.float64)
        places = np.arange(len(bins))
        for shift, column, label in ((-0.2, 2, "documents"), (0.2, 3, "tokens")):
            shares = 100 * bins[:, column] / max(bins[:, column].sum(), 1)
            panel.bar(places + shift, shares, 0.4, label=label)
        panel.set_xticks(places, [f"{low:,.0f}" for low in bins[:, 0]], rotation=45, fontsize=8)
        panel.set(title=one.name, ylabel="%", xlabel="tokens in a document, at least")
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False)
    figure.savefig(path, format="png")


def _sampled(files: Sequence[File], tokenizer: Tokenizer) -> Corpus:
    """A corpus of documents sampled from all files."""
    render = tokenizer.template.render_with_loss if tokenizer.template else None
    documents = list(sample_documents(files, SAMPLE_BYTES, render=render))
    tokens, lengths, _, num_bytes = encode_documents(documents, tokenizer, marked=False)
    written = tokenizer.token_bytes[tokens].sum()
    return Corpus(
        shards=(tokens.astype(np.uint32),),
        offsets=np.cumsum([0, *lengths]),
        hashes=np.array([document.hash for document in documents], np.uint64),
        token_bytes=tokenizer.token_bytes * (num_bytes / max(written, 1)),
        num_bytes=num_bytes,
        fingerprint="of a sample",
    )


def _quantiles(lengths: np.ndarray) -> list[int]:
    return np.percentile(lengths, QUANTILES, method="nearest").astype(int).tolist()


def _shown(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text, with special tokens written as their names."""
    names = {i: name for name, i in tokenizer.special.items()} | {
        tokenizer.boundary: next(
            (name for name, i in tokenizer.special.items() if i == tokenizer.boundary), "<end>"
        )
    }
    parts = []
    for special, group in itertools.groupby(ids, lambda i: i in names or i >= tokenizer.vocab_size):
        if special:
            parts += [names.get(i, f"<{i}>") for i in group]
        else:
            parts.append(tokenizer.decode(list(group)))
    return "".join(parts)
