"""Text comes back from its ids, ids know their bytes, and training a vocabulary is repeatable."""

import pathlib

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxscale.data.sources import draw, hash_identity
from jaxscale.data.tokenizer import Tokenizer, load

TEXTS = st.lists(st.text(), max_size=4)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder of ten small documents with a vocabulary to learn."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"the cat number {i} sat on the mat with the hat\n" * 20)
    return folder


@pytest.fixture(scope="module")
def byte_pairs(texts) -> Tokenizer:
    return load("bpe:290", (str(texts),))


def word_level(path: pathlib.Path, *special: str, truncate: int = 0) -> str:
    """Writes a tokenizer.json that is not byte-level and normalises its text."""
    words = ["[UNK]", "the", "cat", "▁sat", *special]
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    if truncate:
        tokenizer.enable_truncation(truncate)
        tokenizer.enable_padding(length=truncate)
    tokenizer.save(str(path))
    return str(path)


def check_round_trip(tokenizer: Tokenizer, texts: list[str]) -> None:
    encoded = tokenizer.encode(texts)
    for text, ids in zip(texts, encoded, strict=True):
        assert ids.dtype == np.int32
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([tokenizer.boundary, *ids, tokenizer.boundary]) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        assert tokenizer.boundary not in ids
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


@settings(deadline=None)
@given(TEXTS)
def test_bytes_come_back(texts):
    check_round_trip(load("bytes"), texts)


@settings(deadline=None)
@given(texts=TEXTS)
def test_byte_pairs_come_back(byte_pairs, texts):
    check_round_trip(byte_pairs, texts)


def test_the_name_of_a_special_token_in_a_text_is_text(byte_pairs):
    check_round_trip(byte_pairs, ["a<|endoftext|>b", "<|endoftext|>"])


def test_bytes_have_257_ids():
    tokenizer = load("bytes")
    assert (tokenizer.vocab_size, tokenizer.boundary) == (257, 256)
    assert tokenizer.decode([0xE2, 0x82]) == "�"  # half a character is shown as such


def test_byte_pairs_learn(byte_pairs):
    assert byte_pairs.vocab_size == len(byte_pairs.token_bytes) == 290
    (ids,) = byte_pairs.encode(["the cat sat on the mat"])
    assert len(ids) < 12


def test_training_is_repeatable(texts, byte_pairs):
    assert load("bpe:290", (str(texts),)).fingerprint == byte_pairs.fingerprint


def drawn(identity: str) -> float:
    return draw(np.array([hash_identity(identity)], np.uint64), 0).item()


def test_documents_held_out_are_not_learnt_from(texts, tmp_path):
    share = 0.4
    for path in texts.iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    before = load("bpe:280", (str(tmp_path),), heldout=share)
    held_out = [path for path in tmp_path.iterdir() if drawn(path.name) < share]
    assert 0 < len(held_out) < 10
    for path in held_out:
        path.write_text("zyzzyva " * 200)
    assert load("bpe:280", (str(tmp_path),), heldout=share).fingerprint == before.fingerprint
    assert load("bpe:280", (str(tmp_path),)).fingerprint != before.fingerprint


def test_a_trained_tokenizer_is_kept_and_found(texts, byte_pairs, tmp_path):
    folder = tmp_path / "run"
    assert load("bpe:290", (str(texts),), folder).fingerprint == byte_pairs.fingerprint
    assert [path.name for path in folder.iterdir()] == ["tokenizer.json"]
    assert load("bpe:290", ("gone",), folder).fingerprint == byte_pairs.fingerprint
    assert load(str(folder / "tokenizer.json")).fingerprint == byte_pairs.fingerprint
    with pytest.raises(ValueError, match=r"'bpe:300', but .*tokenizer.json has 290 tokens"):
        load("bpe:300", (str(texts),), folder)


def test_too_little_text_says_how_many_tokens_it_yields(tmp_path):
    (tmp_path / "a.txt").write_text("aa bb aa bb")
    with pytest.raises(ValueError, match=r"only (\d+) tokens; set data.tokenizer = 'bpe:") as error:
        load("bpe:4096", (str(tmp_path),))
    enough = str(error.value).split("'")[-2]
    assert load(enough, (str(tmp_path),)).vocab_size == int(enough.removeprefix("bpe:"))


def test_a_file_of_hugging_face(tmp_path):
    tokenizer = load(word_level(tmp_path / "t.json", "<pad>", "</s>", truncate=2))
    assert (tokenizer.vocab_size, tokenizer.boundary) == (6, 5)
    assert tokenizer.token_bytes.tolist() == [5, 3, 3, 4, 0, 0]
    # All of the text: what the file says of truncation and padding is for inference.
    assert [ids.tolist() for ids in tokenizer.encode(["The cat the the", "cat"])] == [
        [1, 2, 1, 1],
        [2],
    ]


def test_byte_fallback_counts_one_byte(tmp_path):
    vocabulary = {"</s>": 0, "<unk>": 1, "▁": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(["</s>", "<unk>"])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(tmp_path / "t.json"))
    check_round_trip(load(str(tmp_path / "t.json")), [" €", "€ €"])


def test_a_tokenizer_without_a_boundary_is_refused(tmp_path):
    path = word_level(tmp_path / "t.json", "<pad>")
    with pytest.raises(ValueError, match=r"t.json has no token .*\['<pad>'\].*<\|endoftext\|>"):
        load(path)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "t.json").write_text('{"model": 1}')
    with pytest.raises(ValueError, match=r"t.json is not a Hugging Face tokenizer.json"):
        load(str(tmp_path / "t.json"))


@pytest.mark.parametrize("name", ["byte", "gone.json", "gpt2", "bpe"])
def test_an_unknown_name_says_what_there_is(name):
    with pytest.raises(ValueError, match=f"data.tokenizer = '{name}'.*'bytes', 'bpe:4096'"):
        load(name)


@pytest.mark.parametrize("size", ["", "big", "256", "-1", "1.5"])
def test_a_size_that_cannot_be_says_why(size):
    with pytest.raises(ValueError, match=f"data.tokenizer = 'bpe:{size}'.*at least 257"):
        load(f"bpe:{size}", ("text",))
