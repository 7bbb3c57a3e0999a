"""Text comes back from its ids, ids know their bytes, and training a vocabulary is repeatable."""

import functools
import io
import itertools
import json
import pathlib
import sys

import fsspec
import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxscale.data.text.documents import sample_documents
from jaxscale.data.text.text_files import draw, find_files, hash_identity
from jaxscale.data.tokens.corpus import open_corpus
from jaxscale.data.tokens.prepare import prepare
from jaxscale.data.tokens.shards import plan
from jaxscale.data.tokens.tokenizer import Tokenizer, load_tokenizer, save_tokenizer

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
    return load_tokenizer("bpe:290", (str(texts),))


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
    check_round_trip(load_tokenizer("bytes"), texts)


@settings(deadline=None)
@given(texts=TEXTS)
def test_byte_pairs_come_back(byte_pairs, texts):
    check_round_trip(byte_pairs, texts)


def test_the_name_of_a_special_token_in_a_text_is_text(byte_pairs):
    check_round_trip(byte_pairs, ["a<|endoftext|>b", "<|endoftext|>"])


def test_bytes_have_257_ids():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.boundary) == (257, 256)
    assert tokenizer.decode([0xE2, 0x82]) == "�"  # half a character is shown as such


def test_byte_pairs_learn(byte_pairs):
    assert byte_pairs.vocab_size == len(byte_pairs.token_bytes) == 290
    (ids,) = byte_pairs.encode(["the cat sat on the mat"])
    assert len(ids) < 12


def test_training_is_repeatable(texts, byte_pairs):
    assert load_tokenizer("bpe:290", (str(texts),)).fingerprint == byte_pairs.fingerprint


def drawn(identity: str) -> float:
    return draw(np.array([hash_identity(identity)], np.uint64), 0).item()


def test_documents_held_out_are_not_learnt_from(texts, tmp_path):
    share = 0.4
    for path in texts.iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    before = load_tokenizer("bpe:280", (str(tmp_path),), heldout=share)
    held_out = [path for path in tmp_path.iterdir() if drawn(path.name) < share]
    assert 0 < len(held_out) < 10
    for path in held_out:
        path.write_text("zyzzyva " * 200)
    assert (
        load_tokenizer("bpe:280", (str(tmp_path),), heldout=share).fingerprint == before.fingerprint
    )
    assert load_tokenizer("bpe:280", (str(tmp_path),)).fingerprint != before.fingerprint


def test_a_trained_tokenizer_is_saved_and_found(texts, byte_pairs, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    save_tokenizer(load_tokenizer("bpe:290", (str(texts),), folder), folder)
    assert {path.name for path in folder.iterdir()} == {"tokenizer.json", "tokenizer_record.txt"}
    assert load_tokenizer(str(folder / "tokenizer.json")).fingerprint == byte_pairs.fingerprint
    monkeypatch.setattr("jaxscale.data.tokens.tokenizer.train", None)  # needed no more
    assert load_tokenizer("bpe:290", (str(texts),), folder).fingerprint == byte_pairs.fingerprint
    # A resumed run has this one, wherever its text is, and whether there is a record or not.
    (folder / "tokenizer_record.txt").unlink()
    kept = load_tokenizer("bpe:290", ("gone",), folder, keep=True)
    assert kept.fingerprint == byte_pairs.fingerprint
    with pytest.raises(ValueError, match=r"'bpe:300', but .*tokenizer.json has 290 tokens"):
        load_tokenizer("bpe:300", (str(texts),), folder, keep=True)


@pytest.mark.parametrize("change", ["text", "heldout", "training_bytes", "size", "file", "record"])
def test_a_tokenizer_of_other_text_or_settings_is_not_taken(texts, tmp_path, caplog, change):
    text, folder, size, settings = tmp_path / "a.txt", tmp_path / "run", 280, {}
    text.write_text("some words of another text, " * 50)
    save_tokenizer(load_tokenizer("bpe:280", (str(text), str(texts)), folder), folder)
    match change:
        case "text":
            text.write_text("zyzzyva and abracadabra " * 50)
        case "size":
            size = 290
        case "file":  # put there by somebody, or before a kill
            (folder / "tokenizer.json").write_text("{}")
        case "record":  # as a version from before it left the folder
            (folder / "tokenizer_record.txt").unlink()
        case _:
            settings = {change: 0.3 if change == "heldout" else 400}
    with caplog.at_level("INFO", "jaxscale"):
        found = load_tokenizer(f"bpe:{size}", (str(text), str(texts)), folder, **settings)
    assert "was trained on other text or with other settings; training again" in caplog.text
    expected = load_tokenizer(f"bpe:{size}", (str(text), str(texts)), **settings)
    assert found.fingerprint == expected.fingerprint
    save_tokenizer(found, folder)
    assert (folder / "tokenizer.json").read_bytes() == expected.file
    caplog.clear()
    load_tokenizer(f"bpe:{size}", (str(text), str(texts)), folder, **settings)
    assert not caplog.text


def test_too_little_text_says_how_many_tokens_it_yields(tmp_path):
    (tmp_path / "a.txt").write_text("aa bb aa bb")
    with pytest.raises(ValueError, match=r"only (\d+) tokens; set data.tokenizer = 'bpe:") as error:
        load_tokenizer("bpe:4096", (str(tmp_path),))
    enough = str(error.value).split("'")[-2]
    assert load_tokenizer(enough, (str(tmp_path),)).vocab_size == int(enough.removeprefix("bpe:"))


def test_a_file_of_hugging_face(tmp_path):
    tokenizer = load_tokenizer(word_level(tmp_path / "t.json", "<pad>", "</s>", truncate=2))
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
    check_round_trip(load_tokenizer(str(tmp_path / "t.json")), [" €", "€ €"])


LLAMA3 = "<|begin_of_text|> <|end_of_text|> <|eot_id|>"
# Special tokens, ordinary ones, what tokenizer_config.json calls eos_token, and the boundary.
ENDS = {
    "GPT-2": ("<|endoftext|>", "", "<|endoftext|>", "<|endoftext|>"),
    "Llama 2, T5": ("<pad> </s> <unk>", "", "</s>", "</s>"),
    "Llama 3": (LLAMA3, "", "<|end_of_text|>", "<|end_of_text|>"),
    "Llama 3 Instruct": (LLAMA3, "", "<|eot_id|>", "<|end_of_text|>"),
    "Qwen 2.5 Instruct": ("<|endoftext|> <|im_end|>", "", "<|im_end|>", "<|endoftext|>"),
    "Phi-3": ("<|endoftext|> <|end|>", "</s>", "<|end|>", "<|endoftext|>"),
    "gpt-oss": ("<|endoftext|> <|return|>", "", "<|return|>", "<|endoftext|>"),
    "Gemma": ("<pad> <eos> <bos> <unk>", "<s> </s>", "<eos>", "<eos>"),
    "Gemma without a configuration": ("<pad> <eos>", "</s>", None, "<eos>"),
    "another name": ("<pad> <end>", "", {"content": "<end>"}, "<end>"),
    "another name next to </s>": ("<pad> <end>", "</s>", "<end>", "<end>"),
    "a name that is not special": ("<pad>", "</s> <end>", "<end>", "</s>"),
    "nothing special": ("<pad>", "</s>", None, "</s>"),
}


def end_of(tmp_path, name) -> tuple[Tokenizer, str]:
    """A tokenizer of `ENDS`, and the name of its boundary."""
    special, ordinary, eos, _ = ENDS[name]
    names = [*special.split(), *ordinary.split()]
    vocabulary = {token: i for i, token in enumerate(["a", *names])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(special.split())
    tokenizer.add_tokens(ordinary.split())
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    found = load_tokenizer(str(tmp_path / "tokenizer.json"))
    return found, ["a", *names][found.boundary]


@pytest.mark.parametrize("name", ENDS)
def test_the_boundary_is_a_special_token_before_an_ordinary_one(name, tmp_path):
    assert end_of(tmp_path, name)[1] == ENDS[name][-1]


def test_a_tokenizer_with_another_boundary_has_another_fingerprint(tmp_path):
    """What ends documents is a part of what the ids mean."""
    own, _ = end_of(tmp_path, "another name next to </s>")
    (tmp_path / "tokenizer_config.json").unlink()
    usual = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert own.boundary != usual.boundary
    assert own.fingerprint != usual.fingerprint


def test_a_tokenizer_without_a_boundary_is_refused(tmp_path):
    path = word_level(tmp_path / "t.json", "<pad>")
    with pytest.raises(ValueError, match=r"t.json has no token .*\['<pad>'\].*<\|endoftext\|>"):
        load_tokenizer(path)


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "t.json").write_text('{"model": 1}')
    with pytest.raises(ValueError, match=r"t.json is not a Hugging Face tokenizer.json"):
        load_tokenizer(str(tmp_path / "t.json"))


@pytest.mark.parametrize("name", ["byte", "gone.json", "gpt2", "bpe"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=f"data.tokenizer = '{name}'.*'bytes', 'esm2', 'bpe:4096'"):
        load_tokenizer(name)


@pytest.mark.parametrize("size", ["", "big", "256", "-1", "1.5"])
def test_a_size_that_cannot_be_says_why(size):
    with pytest.raises(ValueError, match=f"data.tokenizer = 'bpe:{size}'.*at least 257"):
        load_tokenizer(f"bpe:{size}", ("text",))


@functools.cache
def sentencepiece_model(kind: str, *, byte_fallback: bool, eos: bool = True) -> bytes:
    data = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # pyright: ignore
        sentence_iterator=iter(["the cat sat on the mat", "hello world, é and more"] * 50),
        model_writer=data,
        vocab_size=320 if byte_fallback else 60,
        model_type=kind,
        byte_fallback=byte_fallback,
        hard_vocab_limit=False,
        minloglevel=2,
        pad_id=3,
        eos_id=2 if eos else -1,
        user_defined_symbols=["<sep>"],
        control_symbols=["<mask>"],
    )
    return data.getvalue()


def write_model(path: pathlib.Path, kind: str = "bpe", **options) -> str:
    path.write_bytes(sentencepiece_model(kind, **{"byte_fallback": True} | options))
    return str(path)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_model(tmp_path, kind):
    tokenizer = load_tokenizer(write_model(tmp_path / "t.model", kind))
    assert tokenizer.file_name == "tokenizer.model"
    special = {"<s>": 1, "</s>": 2, "<pad>": 3}
    assert tokenizer.special.items() > special.items()
    assert (tokenizer.boundary, tokenizer.mask) == (2, tokenizer.special["<mask>"])
    texts = ["the cat sat on the mat", "", "hello 中 world", "a</s>b"]
    encoded = tokenizer.encode(texts)
    for text, ids in zip(texts, encoded, strict=True):
        assert ids.dtype == np.int32
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([2, *ids, 2]) == text
        assert not set(ids.tolist()) & set(special.values())
        # It puts a space before the first word.
        assert tokenizer.token_bytes[ids].sum() == len(text.encode()) + bool(text)
    assert tokenizer.vocab_size == len(tokenizer.token_bytes)
    again = load_tokenizer(write_model(tmp_path / "u.model", kind))
    assert again.fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    ("config", "bos"),
    [
        ({}, None),
        ({"bos_token": "<s>"}, None),
        ({"add_bos_token": True, "bos_token": {"content": "<s>"}}, 1),
        ({"tokenizer_class": "LlamaTokenizerFast"}, 1),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, None),
    ],
)
def test_a_sentencepiece_model_begins_texts_as_its_config_says(config, bos, tmp_path):
    plain = load_tokenizer(write_model(tmp_path / "t.model"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path / "t.model"))
    assert (tokenizer.bos, tokenizer.boundary) == (bos, plain.boundary)
    assert (tokenizer.fingerprint == plain.fingerprint) == (bos is None)


def test_a_sentencepiece_model_makes_a_corpus(tmp_path, texts):
    tokenizer = load_tokenizer(write_model(tmp_path / "t.model"))
    corpus = open_corpus([str(texts)], tokenizer, tmp_path / "run")
    assert corpus.token_bytes[corpus.tokens].sum() == pytest.approx(corpus.num_bytes, rel=1e-12)
    (folder,) = filter(pathlib.Path.is_dir, (tmp_path / "run").iterdir())
    assert load_tokenizer(str(folder / "tokenizer.model")).fingerprint == tokenizer.fingerprint


def test_a_sentencepiece_model_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    path = write_model(tmp_path / "t.model", eos=False)
    with pytest.raises(ValueError, match=r"t.model has no token for the end.*'<s>'"):
        load_tokenizer(path)
    (tmp_path / "u.model").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"u.model is not a SentencePiece model"):
        load_tokenizer(str(tmp_path / "u.model"))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ValueError, match=r"t.model needs the package sentencepiece; install"):
        load_tokenizer(path)


def test_special_tokens_are_explicit(tmp_path):
    names = ["</s>", "<extra_id_1>", "<extra_id_0>", "[MASK]", "<extra_id_3>"]
    tokenizer = load_tokenizer(word_level(tmp_path / "t.json", *names))
    assert tokenizer.special == {name: i for i, name in enumerate(names, 4)}
    assert (tokenizer.boundary, tokenizer.mask) == (4, 7)
    assert tokenizer.sentinels == (6, 5)  # in their order, up to the first missing one
    plain = load_tokenizer("bytes")
    assert (plain.special, plain.mask, plain.sentinels) == ({"<|endoftext|>": 256}, None, ())


def test_byte_pairs_of_a_prepared_folder_are_its_own(texts, byte_pairs, tmp_path):
    files = find_files([str(texts)])
    prepare(plan(files, byte_pairs, tmp_path / "out"), byte_pairs)
    source = (str(tmp_path / "out"),)
    other = load_tokenizer("bpe:290", (__file__,))
    save_tokenizer(other, tmp_path / "run")  # of an earlier attempt
    own = load_tokenizer("bpe:290", source, tmp_path / "run")
    assert own.fingerprint == byte_pairs.fingerprint != other.fingerprint
    assert open_corpus(source, own).num_documents == 10
    with pytest.raises(ValueError, match=r"'bpe:300', but .*out was prepared with 'bpe:290'; set"):
        load_tokenizer("bpe:300", source)


def test_a_tokenizer_is_read_from_an_object_store(byte_pairs):
    store = fsspec.filesystem("memory")
    store.pipe("/tokenizers/t.json", byte_pairs.file)
    try:
        assert load_tokenizer("memory://tokenizers/t.json").fingerprint == byte_pairs.fingerprint
    finally:
        store.rm("/tokenizers", recursive=True)
    with pytest.raises(ValueError, match=r"t.json cannot be read"):
        load_tokenizer("memory://tokenizers/t.json")


@pytest.mark.proof
def test_training_text_comes_from_all_over(tmp_path):
    """Of one long file, pieces from many places are learnt from, and not its beginning alone."""
    lines = [f"zone{i // 1000:03d} {i}\n" for i in range(40_000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    files = find_files([{"path": str(tmp_path / "a.txt"), "boundary": "line"}])
    sample = [d.text for d in sample_documents(files, 60_000, heldout=0.5)]
    assert 55_000 < sum(map(len, sample)) < 65_000
    assert len({text.split()[0] for text in sample}) > 10
    assert [d.text for d in sample_documents(files, 60_000, heldout=0.5)] == sample
    places = dict(zip(lines, itertools.accumulate(map(len, lines), initial=0)))
    assert all(drawn(f"a.txt#{places[text + chr(10)]}") >= 0.5 for text in sample)
    assert len(list(sample_documents(files, 10**9))) == 40_000
