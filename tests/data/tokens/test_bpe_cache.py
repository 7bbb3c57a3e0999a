"""Encoding words once gives the ids of the library, for every pattern that it is used for."""

import functools

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers

from jaxscale.data.tokens import bpe_cache
from jaxscale.data.tokens.bpe_cache import PATTERNS, Words, can_pretokenize

PIECES = [
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "\x0b",
    "\x0c",
    "\x1c",
    "\x85",
    "\xa0",
    "\u2003",
    "\u3000",
    "\u200b",
    "\ufeff",
    "\x00",
    "\x7f",
    "'",
    "'s",
    "'LL",
    "a",
    "Z",
    "the",
    "don't",
    "0",
    "1234567",
    ".",
    "...",
    "):\n",
    "_",
    "-",
    "/",
    "é",
    "e\u0301",
    "\u017f",
    "\u0301",
    "中文",
    "½",
    "٣",
    "😀",
    "ﬁ",
    "<|endoftext|>",
    "ab cd",
    "x\n  y",
    "a\n\n b",
    "a 1",
    "; \n\t}",
]
TEXTS = st.lists(
    st.one_of(st.lists(st.sampled_from(PIECES)).map("".join), st.text()), min_size=1, max_size=4
)


@functools.cache
def library(number: int) -> tokenizers.Tokenizer:
    """A small tokenizer with the pattern of that number; -1 is the one of GPT-2."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if number >= 0:
        split = pre_tokenizers.Split(tokenizers.Regex(PATTERNS[number]), "isolated")
        bare = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, bare])
        made.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Long tokens of all kinds of characters, so that a word cut in two shows in its ids.
    texts = [left + right + left for left in PIECES for right in PIECES]
    made.train_from_iterator([text.replace("<|endoftext|>", "") for text in texts] * 3, trainer)
    made.encode_special_tokens = True
    return made


def encode(number: int, texts: list[str]) -> list[list[int]]:
    return [e.ids for e in library(number).encode_batch_fast(texts, add_special_tokens=False)]


@functools.cache
def remembering(number: int) -> Words:
    return Words(functools.partial(encode, number))


@pytest.mark.proof
@pytest.mark.parametrize("number", range(-1, len(PATTERNS)))
@settings(deadline=None, max_examples=300)
@given(texts=TEXTS)
@example(texts=["a ", "b"])
@example(texts=["", " ", "", "x", ""])
@example(texts=[""])
@example(texts=["a\n\nb", ")\n", "b"])
def test_ids_are_those_of_the_library(number, texts):
    got = remembering(number)(texts)
    assert [ids.tolist() for ids in got] == encode(number, texts)
    assert all(ids.dtype == np.int32 for ids in got)


@pytest.mark.parametrize("number", range(-1, len(PATTERNS)))
def test_a_long_text_is_taken_page_by_page(number, monkeypatch):
    monkeypatch.setattr(bpe_cache, "_LONG", 20)
    texts = [" ".join(PIECES), "short", "the cat sat, 12 cats " * 9, "x" * 50, "", "a b" * 40]
    assert [ids.tolist() for ids in remembering(number)(texts)] == encode(number, texts)
    assert len(list(bpe_cache._pages(texts[2]))) > 5


@pytest.mark.parametrize("number", range(-1, len(PATTERNS)))
def test_text_is_cut_finely_and_a_word_is_encoded_once(number):
    asked = []

    def counted(texts):
        asked.extend(texts)
        return encode(number, texts)

    remember = Words(counted)
    text = "def main(args):\n    return the_answer, to.every(question)\n" * 50
    remember([text])
    assert len(asked) < 20
    remember([text])
    assert len(asked) < 20


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(bpe_cache, "_MAX_BYTES", 50)
    remember = Words(functools.partial(encode, -1))
    for i in range(20):
        text = f"words {i} and {i * i} more"
        assert remember([text])[0].tolist() == encode(-1, [text])[0]
        assert len(remember._codes) < 30


@pytest.mark.parametrize("number", range(-1, len(PATTERNS)))
def test_the_patterns_are_recognised(number):
    assert can_pretokenize(library(number).to_str())


def changed(**parts) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str(library(-1).to_str())
    for name, part in parts.items():
        setattr(made, name, part)
    return made


@pytest.mark.parametrize(
    "other",
    [
        changed(normalizer=normalizers.NFKC()),
        changed(normalizer=normalizers.Replace("a b", "c")),
        changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
        changed(pre_tokenizer=pre_tokenizers.Whitespace()),
        changed(model=models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
    ],
    ids=lambda made: str(made.pre_tokenizer)[:40] + type(made.normalizer).__name__,
)
def test_other_tokenizers_are_left_to_the_library(other):
    assert not can_pretokenize(other.to_str())


def test_a_token_that_was_added_may_reach_over_a_cut():
    made = changed()
    made.add_tokens(["a b"])
    assert not can_pretokenize(made.to_str())
