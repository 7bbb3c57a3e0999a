"""Encodes documents as ids, with their first and last tokens and the marks of loss."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.data.text.documents import Document
from jaxscale.data.tokens.tokenizer import Tokenizer


class EncodedDocuments(NamedTuple):
    """Concatenated documents.

    `counted` is 1 at a token whose successor in the document carries loss: it is the weight of the
    position at which the model predicts.
    """

    ids: np.ndarray  # [tokens]
    lengths: list[int]  # of each document
    counted: np.ndarray | None  # uint8 [tokens]; None: all but the last token of a closed document
    num_bytes: int  # of the text, special tokens left out


def encode_documents(
    documents: Sequence[Document], tokenizer: Tokenizer, *, marked: bool
) -> EncodedDocuments:
    """Encodes each as [start, tokens...], closed by the boundary if the start is another token.

    A prompt and its response are encoded by `encode_pairs`, and begin like a prompt for generation,
    unless an encoder reads them. A conversation is exactly the text that its template renders,
    without a token before or after it.

    Args:
      marked: whether to compute `counted`; required if a document has loss on parts of it.
    """
    texts = [document.text for document in documents if document.loss is None]
    encoded = iter(tokenizer.encode(texts))
    exchanges = [d for d in documents if d.loss and not d.chat]
    apart = [document.apart for document in exchanges]
    pairs = iter(encode_pairs(tokenizer, list(map(_pair, exchanges)), apart))
    whole: list[Sequence[int] | np.ndarray] = []
    lengths, counted, num_bytes = [], [], 0
    for document in documents:
        num_bytes += document.num_bytes
        if document.chat:
            ids, own, special_bytes = _encode_chat(document, tokenizer)
            whole.append(ids)
            lengths.append(len(ids))
            counted.append(own)
            num_bytes -= special_bytes
            continue
        pieces = (next(encoded),) if document.loss is None else next(pairs)
        continued = document.loss is not None and not document.apart
        begin = tokenizer.begin(len(pieces[0])) if continued else (tokenizer.start,)
        end = [] if begin == (tokenizer.boundary,) else [tokenizer.boundary]
        whole += [begin, *pieces, end]
        lengths.append(len(begin) + sum(map(len, pieces)) + len(end))
        if marked:
            given = 0 if document.loss is None else len(begin) - 1 + len(pieces[0])
            counts = given, lengths[-1] - given - len(end), len(end)
            counted.append(np.repeat(np.array([0, 1, 0], np.uint8), counts))
    flat = np.concatenate([np.asarray(ids, np.int32) for ids in whole])
    return EncodedDocuments(flat, lengths, np.concatenate(counted) if marked else None, num_bytes)


def encode_pairs(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], apart: Sequence[bool] = ()
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids of texts and of their continuations, as a model generates these.

    The ids of the first text are those of the text alone. The ids of the second come from both
    texts encoded together if that does not change the first, and otherwise from the second alone.

    Args:
      apart: for each pair, whether the second is always encoded alone; by default it is not.
    """
    firsts = tokenizer.encode([first for first, _ in pairs])
    wholes = tokenizer.encode([first + second for first, second in pairs])
    alone = tokenizer.encode([second for _, second in pairs])
    encoded = []
    for first, whole, second, own in zip(firsts, wholes, alone, apart or [False] * len(pairs)):
        if not own and np.array_equal(whole[: len(first)], first) and len(whole) > len(first):
            second = whole[len(first) :]
        encoded.append((first, second))
    return encoded


def _pair(document: Document) -> tuple[str, str]:
    assert document.loss is not None, "of a prompt with a response"
    ((begin, _),) = document.loss
    return document.text[:begin], document.text[begin:]


def _encode_chat(document: Document, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray, int]:
    """Ids, `counted`, and the bytes of the text that are names of special tokens.

    Tokens count from the first to the last with a character of a span, as in the masks of
    transformers' `apply_chat_template`.
    """
    assert tokenizer.encode_chat is not None, "checked when the shards are planned"
    assert document.loss is not None, "a template was given"
    ids, starts, stops = tokenizer.encode_chat(document.text)
    predicted = np.zeros(len(ids) + 1, np.uint8)  # nothing follows the last token
    for begin, end in document.loss:
        first = np.searchsorted(stops, begin, side="right")
        predicted[first : np.searchsorted(starts, end, side="left")] = 1
    special = np.isin(ids, list(tokenizer.special.values()))
    names = zip(starts[special].tolist(), stops[special].tolist())
    special_bytes = sum(len(document.text[begin:end].encode()) for begin, end in names)
    return ids, predicted[1:], special_bytes
