"""Tokenised once, kept, and made again when anything that decides it changes."""

import concurrent.futures
import dataclasses
import errno
import logging
import os
import pathlib
import pickle

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from jaxscale.data.text.text_files import hash_identity
from jaxscale.data.tokens.corpus import Corpus, open_corpus
from jaxscale.data.tokens.tokenizer import load_tokenizer


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.txt").write_text(f"document {i} is é" * (i + 1))
    return folder


def source(folder):
    return (str(folder),)


def test_documents_follow_each_other_behind_boundaries(texts):
    tokenizer = load_tokenizer("bytes")
    corpus = open_corpus(source(texts), tokenizer)
    assert corpus.num_documents == 5
    for i in range(5):
        name = f"{i}.txt"
        assert corpus.hashes[i] == hash_identity(name)
        ids = corpus.tokens[corpus.offsets[i] : corpus.offsets[i + 1]]
        assert ids[0] == tokenizer.boundary
        assert tokenizer.decode(ids[1:]) == (texts / name).read_text()
    assert corpus.num_bytes == sum(path.stat().st_size for path in texts.iterdir())
    assert corpus.token_bytes[corpus.tokens].sum() == corpus.num_bytes


def test_what_is_kept_is_what_was_made(texts, tmp_path, caplog):
    tokenizer = load_tokenizer("bytes")
    made = open_corpus(source(texts), tokenizer)
    first = open_corpus(source(texts), tokenizer, tmp_path / "run")
    caplog.clear()
    with caplog.at_level(logging.INFO, "jaxscale"):
        again = open_corpus(source(texts), tokenizer, tmp_path / "run")
    assert "tokenis" not in caplog.text
    assert "data: 5 documents, 240 B, 245 tokens (0.98 bytes a token)" in caplog.text
    for corpus in (first, again):
        assert isinstance(corpus.offsets, np.memmap)
        np.testing.assert_array_equal(corpus.tokens, made.tokens)
        np.testing.assert_array_equal(corpus.offsets, made.offsets)
        np.testing.assert_array_equal(corpus.token_bytes, made.token_bytes)
        assert corpus.fingerprint == made.fingerprint
        np.testing.assert_array_equal(corpus.hashes, made.hashes)
    assert not list((tmp_path / "run").glob("unfinished-*"))


@pytest.mark.parametrize("change", ["content", "time", "new file", "tokenizer"])
def test_a_change_is_noticed_and_said(texts, tmp_path, caplog, change):
    tokenizer = load_tokenizer("bytes")
    before = open_corpus(source(texts), tokenizer, tmp_path / "run")
    if change == "content":
        (texts / "1.txt").write_text("another text")
    elif change == "time":
        os.utime(texts / "1.txt", (1, 1))
    elif change == "new file":
        (texts / "9.txt").write_text("nine")
    else:
        tokenizer = load_tokenizer("bpe:258", source(texts))
    with caplog.at_level(logging.INFO, "jaxscale"):
        after = open_corpus(source(texts), tokenizer, tmp_path / "run")
    assert "the files or the tokenizer changed; tokenising again" in caplog.text
    # A new date alone is looked into, and found to be the same data.
    assert (after.fingerprint == before.fingerprint) == (change == "time")


def test_the_fingerprint_is_of_the_content_not_the_place(texts, tmp_path):
    tokenizer = load_tokenizer("bytes")
    before = open_corpus(source(texts), tokenizer).fingerprint
    moved = texts.rename(tmp_path / "moved")
    assert open_corpus(source(moved), tokenizer).fingerprint == before
    (moved / "0.txt").rename(moved / "a.txt")
    assert open_corpus(source(moved), tokenizer).fingerprint != before


def test_a_writer_that_died_does_no_harm(texts, tmp_path):
    tokenizer = load_tokenizer("bytes")
    expected = open_corpus(source(texts), tokenizer).tokens
    open_corpus(source(texts), tokenizer, tmp_path / "run")
    (folder,) = (tmp_path / "run").glob("tokens-*")
    half = folder.rename(folder.with_name(f"unfinished-{folder.name}-1"))
    (half / "tokens.npy").write_bytes(b"half")
    after = open_corpus(source(texts), tokenizer, tmp_path / "run")
    np.testing.assert_array_equal(after.tokens, expected)
    # And leaves no folder behind.
    assert [path.name for path in (tmp_path / "run").glob("[!.]*")] == [folder.name]


def test_what_a_killed_run_tokenised_is_used(texts, tmp_path):
    tokenizer = load_tokenizer("bytes")

    def stop(documents):
        raise KeyboardInterrupt

    killed = dataclasses.replace(tokenizer, encode=stop)
    with pytest.raises(KeyboardInterrupt):
        open_corpus(source(texts), killed, tmp_path / "run")
    (left,) = (tmp_path / "run").glob("unfinished-*")
    (left / ".unfinished" / "made").touch()
    open_corpus(source(texts), tokenizer, tmp_path / "run")
    (folder,) = (tmp_path / "run").glob("[!.]*")
    assert folder.name == left.name.removeprefix("unfinished-")


@pytest.mark.proof
def test_a_writer_that_was_second_waits_for_what_the_first_makes(texts, tmp_path):
    tokenizer = load_tokenizer("bytes")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        second = []

        def encode_while_another_waits(documents):
            second.append(pool.submit(open_corpus, source(texts), tokenizer, tmp_path / "run"))
            with pytest.raises(concurrent.futures.TimeoutError):
                second[0].result(timeout=0.2)
            return tokenizer.encode(documents)

        slow = dataclasses.replace(tokenizer, encode=encode_while_another_waits)
        corpus = open_corpus(source(texts), slow, tmp_path / "run")
        expected = open_corpus(source(texts), tokenizer).tokens
        np.testing.assert_array_equal(corpus.tokens, expected)
        np.testing.assert_array_equal(second[0].result().tokens, expected)
    assert len(list((tmp_path / "run").glob("[!.]*"))) == 1


def test_tokens_that_are_there_are_read_where_nothing_can_be_written(texts, tmp_path):
    tokenizer, run = load_tokenizer("bytes"), tmp_path / "run"
    made = open_corpus(source(texts), tokenizer, run)
    (run / ".lock").unlink()
    (run / ".lock").mkdir()  # cannot be opened, not even by root
    assert open_corpus(source(texts), tokenizer, run).fingerprint == made.fingerprint
    (texts / "0.txt").write_text("other")
    with pytest.raises(IsADirectoryError):
        open_corpus(source(texts), tokenizer, run)


@pytest.mark.parametrize("name", ["exclusive", "pathlib.Path.mkdir"])
def test_text_is_tokenised_in_memory_where_nothing_can_be_written(
    texts, tmp_path, monkeypatch, caplog, name
):
    def refuse(path, *rest, **more):
        if run in (path, path.parent):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        mkdir(path, *rest, **more)

    mkdir = pathlib.Path.mkdir
    tokenizer, run = load_tokenizer("bytes"), tmp_path / "run"
    expected = open_corpus(source(texts), tokenizer)
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "jaxscale"):
        patch.setattr(f"jaxscale.data.tokens.corpus.{name}", refuse)
        found = open_corpus(source(texts), tokenizer, run)
    assert found.fingerprint == expected.fingerprint
    assert "run is read-only (Permission denied); tokenising in memory" in caplog.text
    assert not list(run.glob("tokens-*"))


def test_bytes_add_up_for_a_tokenizer_that_changes_text(texts, tmp_path):
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({"[UNK]": 0, "document": 1, "is": 2, "</s>": 3}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "t.json"))
    corpus = open_corpus(source(texts), load_tokenizer(str(tmp_path / "t.json")))
    assert corpus.token_bytes[corpus.tokens].sum() == pytest.approx(corpus.num_bytes, rel=1e-12)
    assert corpus.token_bytes[3] == 0


@pytest.mark.proof
def test_a_vocabulary_beyond_16_bits_keeps_its_ids(texts, tmp_path):
    vocabulary = {f"w{i}": i for i in range(70_000)} | {"</s>": 70_000, "document": 70_001}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "t.json"))
    corpus = open_corpus(source(texts), load_tokenizer(str(tmp_path / "t.json")))
    assert corpus.tokens[:2].tolist() == [70_000, 70_001]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_tokens_are_read_across_shards(sizes, data):
    tokens = np.arange(sum(sizes), dtype=np.uint16)
    shards = tuple(np.split(tokens, np.cumsum(sizes)[:-1]))
    corpus = Corpus(shards, np.array([0, len(tokens)]), np.zeros(1, np.uint64), tokens, 1, "")
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(tokens))] * 2)))
    np.testing.assert_array_equal(corpus.read(start, stop), tokens[start:stop])
    # Every other shard has marks, and each token is a document.
    has_marks = [i % 2 == 0 for i in range(len(sizes))]
    counted = tuple(np.ones(size, np.uint8) if has else None for size, has in zip(sizes, has_marks))
    marked = dataclasses.replace(corpus, counted=counted, offsets=np.arange(len(tokens) + 1))
    expected = np.repeat(has_marks, sizes)[start:stop]
    np.testing.assert_array_equal(marked.marked(np.arange(start, stop)), expected)
    assert not corpus.marked(np.arange(1)).any()
    with pytest.raises(IndexError, match=f"of {len(tokens)}"):
        corpus.read(start, len(tokens) + 1)


def test_a_corpus_on_disk_travels_as_paths(texts, tmp_path):
    for i in range(200):
        (texts / f"more{i}.txt").write_text("some text " * 100)
    corpus = open_corpus(source(texts), load_tokenizer("bytes"), tmp_path / "run")
    pickled = pickle.dumps(corpus)
    assert len(pickled) < 4_000  # half of it is the bytes of each token
    again = pickle.loads(pickled)
    assert again.fingerprint == corpus.fingerprint
    np.testing.assert_array_equal(again.read(5, 50), corpus.read(5, 50))
    np.testing.assert_array_equal(again.offsets, corpus.offsets)
