"""Properties of a vocabulary: the tokens that end and begin a document, the special tokens that are
not in plain text, and the bytes of text of each token."""

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
"""Names of the token at the end of a document, in the order of `find_boundary`."""


def find_boundary(
    known: Mapping[str, int], special: Mapping[str, int], where: str, eos: str | None = None
) -> int:
    """The first special token with a name of `BOUNDARIES`; else the special token `eos`; else the
    first of these names in the whole vocabulary.

    A name precedes `eos`, which in chat models ends a message (Qwen's <|im_end|>), and a special
    token precedes others: Gemma's </s> is an ordinary token, and its texts end with <eos>.
    """
    chosen = next((name for name in BOUNDARIES if name in special), eos)
    if chosen and chosen in special:
        return special[chosen]
    for name in BOUNDARIES:
        if name in known:
            return known[name]
    raise ValueError(
        f"{where} has no token for the end of a document; it has the special tokens "
        f"{list(special)}, and needs one of {', '.join(BOUNDARIES)}, or an eos_token in "
        "tokenizer_config.json"
    )


def find_text_begin(tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The tokens that the tokenizer's post-processor puts before a text."""
    encoding = tokenizer.encode("a")
    marked = zip(encoding.ids, encoding.special_tokens_mask)
    return tuple(i for i, _ in itertools.takewhile(lambda one: one[1], marked))


def find_plain_size(tokenizer: tokenizers.Tokenizer, special: Mapping[str, int]) -> int:
    """One more than the largest id of plain text: of the model that encodes text, and of added
    tokens that are not special. Special tokens only come from their names, not from `encode`."""
    own = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_vocab(with_added_tokens=True)
    return 1 + max(i for name, i in added.items() if name in own or name not in special)


def token_bytes_of(tokenizer: tokenizers.Tokenizer, size: int, *, byte_level: bool) -> np.ndarray:
    """UTF-8 bytes of text of each id, from its written form."""
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
    """UTF-8 bytes of the text of a token, from its written form."""
    # SentencePiece writes a space as ▁; WordPiece marks tokens that continue a word.
    return len(token.removeprefix("##").replace("▁", " ").encode())
