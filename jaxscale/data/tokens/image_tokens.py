"""Tokenizers with tokens beyond a model's vocabulary.

Gemma 3's tokenizer has a placeholder for images, `<image_soft_token>`, whose id is the first beyond
the embedding of text-only models. A text is encoded to it only if a chat template or a conversation
writes its name.
"""

import dataclasses

from jaxscale.data.tokens.tokenizer import Encoded, Tokenizer


def without_unread(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """The tokenizer without special tokens beyond the `vocab_size` ids of a model.

    It is returned unchanged if the model lacks an id of plain text, or of a token that begins,
    ends, pads or masks a text or is a sentinel.

    The `encode_chat` of the result raises ValueError for a text with a removed token.
    """
    special = tokenizer.special
    needed = {tokenizer.boundary, tokenizer.bos, tokenizer.pad, tokenizer.mask}
    needed |= {*tokenizer.sentinels, *tokenizer.begin(1), tokenizer.text_size - 1}
    beyond = {name: i for name, i in special.items() if i >= vocab_size}
    if not beyond or any(i is not None and i >= vocab_size for i in needed):
        return tokenizer
    names, encode = {i: name for name, i in beyond.items()}, tokenizer.encode_chat

    def encode_chat(text: str) -> Encoded:
        assert encode is not None, "only a tokenizer.json has tokens other than text"
        encoded = encode(text)
        for i, start in zip(encoded.ids.tolist(), encoded.starts.tolist()):
            if i in names:
                raise ValueError(
                    f"a text has the special token {names[i]!r} (in "
                    f"{text[max(start - 20, 0) : start + 40]!r}), whose id {i} is beyond "
                    f"model.vocab_size = {vocab_size}; remove it from the text, or from "
                    f"the chat template of data.tokenizer = {tokenizer.name!r}"
                )
        return encoded

    return dataclasses.replace(
        tokenizer,
        vocab_size=vocab_size,
        token_bytes=tokenizer.token_bytes[:vocab_size],
        special={name: i for name, i in special.items() if name not in beyond},
        ends=tuple(end for end in tokenizer.ends if end < vocab_size),
        encode_chat=encode_chat,
    )
