"""What a vocabulary says: the token that ends a document, the one that begins it, the special
tokens that no plain text becomes, and how many bytes of text each token stands for."""

import itertools
from collections.abc import Mapping

import numpy as np
import tokenizers
from tokenizers import pre_tokenizers

from jaxscale.data.tokens.bpe_training import END

BOUNDARIES = (
    END,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "[SEP]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
"""Names that tokenizers give to the end of a document; `find_boundary` takes one."""


def find_boundary(
    known: Mapping[str, int], special: Mapping[str, int], where: str, eos: str | None = None
) -> int:
    """The first special token with a name of `BOUNDARIES`; else the special token `eos`; else the
    first of those names in the whole vocabulary.

    A name comes before `eos`, which is the end of a turn in chat models (Qwen's <|im_end|>), and a
    special token before others: Gemma's </s> is an ordinary one, and its texts end with <eos>.
    """
    chosen = next((name for name in BOUNDARIES if name in special), eos)
    if chosen and chosen in special:
        return special[chosen]
    for name in BOUNDARIES:
        if name in known:
            return known[name]
    raise ValueError(
        f"{where} has no token for the end of a document; it has the special tokens "
        f"{list(special)}, and one of {', '.join(BOUNDARIES)} is needed, or one that the eos_token "
        "of a tokenizer_config.json beside it names"
    )


def find_text_begin(tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The tokens that the tokenizer's post-processor puts before a text."""
    encoding = tokenizer.encode("a")
    marked = zip(encoding.ids, encoding.special_tokens_mask)
    return tuple(i for i, _ in itertools.takewhile(lambda one: one[1], marked))


def find_plain_size(tokenizer: tokenizers.Tokenizer, special: Mapping[str, int]) -> int:
    """One more than the largest id of the model that encodes text, or of a token that was added to
    it and is not special: special ones are made of their names alone, and not in `encode`."""
    own = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_vocab(with_added_tokens=True)
    return 1 + max(i for name, i in added.items() if name in own or name not in special)


def token_bytes_of(tokenizer: tokenizers.Tokenizer, size: int, *, byte_level: bool) -> np.ndarray:
    """UTF-8 bytes that each id stands for, from its written form."""
    lengths = np.zeros(size)
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())  # one character for each of 256 bytes
    added = tokenizer.get_added_tokens_decoder()
    for token, i in tokenizer.get_vocab().items():
        if i in added:
            lengths[i] = 0 if added[i].special else len(token.encode())
        elif byte_level and alphabet.issuperset(token):
            lengths[i] = len(token)
        elif len(token) == 6 and token.startswith("<0x"):  # SentencePiece's byte fallback
            lengths[i] = 1
        else:
            lengths[i] = written_bytes(token)
    return lengths


def written_bytes(token: str) -> int:
    """UTF-8 bytes of the text that a token is written for."""
    # SentencePiece writes a space as ▁; WordPiece marks the parts that continue a word.
    return len(token.removeprefix("##").replace("▁", " ").encode())
