"""Packing of whole documents into rows: prompts with responses, and conversations."""

import logging

import numpy as np

from jaxscale.config import DataConfig
from jaxscale.data.packing import best_fit, pack_whole
from jaxscale.data.prompts import prompted_windows
from jaxscale.data.tokens.corpus import Corpus
from jaxscale.data.tokens.tokenizer import Tokenizer

BLOCK = 2**14
"""Documents whose marks are read at a time."""

log = logging.getLogger("jaxscale")


def whole_rows(
    config: DataConfig,
    corpus: Corpus,
    name: str,
    chosen: np.ndarray,
    marked: np.ndarray,
    prompt: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """The documents `chosen` in the order of their rows, without marked ones longer than a row; and
    the begin and end of each row, [rows, 2]: whole documents if marked, else a window.

    Args:
      prompt: virtual tokens before each document of a row.

    Raises:
      ValueError: no document is left.
    """
    lengths, without = np.diff(corpus.offsets)[chosen], " without its prompt" * (prompt > 0)
    fits = lengths + prompt <= config.seq_len
    if long := int(np.sum(marked & ~fits)):
        why = (
            f"{long:,} of {np.sum(marked):,} prompts with responses, or conversations, are longer "
            f"than data.seq_len = {config.seq_len} (the longest has "
            f"{lengths[marked].max():,} tokens{without})"
        )
        if long == len(chosen):
            raise ValueError(f"{name}: {why}; raise it")
        log.info(f"data: {name}: {why}, and are left out")
    row = best_fit(lengths[marked & fits] + prompt, config.seq_len)
    whole = np.cumsum([0, *np.bincount(row, lengths[marked & fits])]).astype(np.int64)
    windows = whole[-1] + _windows(lengths[~marked], config.seq_len, prompt)
    begins = np.concatenate([whole[:-1], windows])
    windows = windows[:-1]
    # Both types in their shares, so that the first rows are a sample of all.
    places = [(np.arange(count) + 0.5) / count for count in (len(whole) - 1, len(windows))]
    order = np.argsort(np.concatenate(places), kind="stable")
    together = chosen[marked & fits][np.argsort(row, kind="stable")]
    return np.concatenate([together, chosen[~marked]]), from_to(begins)[order]


def _windows(lengths: np.ndarray, seq_len: int, prompt: int) -> np.ndarray:
    """The begin of each window of consecutive documents, and the end of the last."""
    if prompt:
        return prompted_windows(lengths, seq_len, prompt)
    return np.append(np.arange(0, lengths.sum(), seq_len), lengths.sum())


def whole_pairs(
    config: DataConfig, tokenizer: Tokenizer, corpus: Corpus, name: str, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The documents whose prompt fits whole in the encoder and whose response in the decoder; and
    the begin and end of each row, [rows, 2].

    Raises:
      ValueError: there is none, or a document is not a prompt with its response.
    """
    first, last, closed = int(chosen.min()), int(chosen.max()) + 1, tokenizer.bos is not None
    prompts = np.zeros(last - first, np.int64)
    for begin in range(first, last, BLOCK):  # of marks in memory
        offsets = corpus.offsets[begin : min(begin + BLOCK, last) + 1]
        counted = corpus.read_counted(int(offsets[0]), int(offsets[-1]))
        found = np.add.reduceat(~counted, offsets[:-1] - offsets[0], dtype=np.int64) - closed
        prompts[begin - first :][: len(found)] = found
        ends = np.cumsum(np.diff(offsets)) - 1 - closed
        falls = np.flatnonzero(counted[:-1] & ~counted[1:])  # where a part with loss ends
        begin_token = int(corpus.read(int(offsets[0]), int(offsets[0]) + 1)[0])
        if begin_token != tokenizer.start or np.setdiff1d(falls, ends).size:
            raise ValueError(
                f"{name} has conversations, and an encoder with its decoder learns from prompts "
                "with one response each; prepare the text with --prompt and --response"
            )
    prompts = prompts[chosen - first]
    responses = np.diff(corpus.offsets)[chosen] - 1 - closed - prompts
    sizes = np.stack([prompts + 1, responses + 1], axis=1)
    fits = (sizes <= (config.seq_len, config.target_len)).all(axis=1) & (responses > 0)
    why = f"do not fit in data.seq_len = {config.seq_len} and data.target_len = {config.target_len}"
    if not fits.any():
        raise ValueError(f"{name}: all {len(fits)} prompts and responses {why}; raise them")
    if not fits.all():
        log.info(f"data: {name}: {np.sum(~fits):,} of {len(fits):,} pairs {why}, and are left out")
    begins = pack_whole(sizes[fits], (config.seq_len, config.target_len))
    begins = np.append(0, np.cumsum(np.diff(corpus.offsets)[chosen[fits]]))[begins]
    return chosen[fits], from_to(begins)


def from_to(begins: np.ndarray) -> np.ndarray:
    """Begin and end of each row, [rows, 2], from all begins and the last end."""
    return np.stack([begins[:-1], begins[1:]], axis=1)
