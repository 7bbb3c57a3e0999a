"""Prompts with responses, and conversations, stay whole in the rows of a decoder."""

import collections
import dataclasses
import itertools
import logging
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.config import DataConfig
from jaxscale.config.data_source import to_sources, to_validation
from jaxscale.data.dataset import open_validation
from jaxscale.data.inspect import examples_of, survey
from jaxscale.data.loader import batches
from jaxscale.data.mixture import open_examples
from jaxscale.data.packing import best_fit
from jaxscale.data.text.text_files import find_files, hash_identity
from jaxscale.data.tokens.corpus import Corpus, open_corpus
from jaxscale.data.tokens.prepare import prepare
from jaxscale.data.tokens.shards import plan
from jaxscale.data.tokens.tokenizer import load_tokenizer
from tests.data.dialogues import write_lines, write_tokenizer
from tests.data.documents import BYTES, END, assert_same, opened

SIZES = st.lists(st.integers(2, 30), min_size=1, max_size=30)


def numbered(marked: list[int], plain: list[int]) -> Corpus:
    """Documents of these sizes, [END, i, i, ...]; those of the first shard have marks."""
    sizes = [*marked, *plain]
    offsets = np.cumsum([0, *sizes])
    tokens = np.repeat(np.arange(len(sizes), dtype=np.uint16), sizes)
    tokens[offsets[:-1]] = END
    hashes = np.array([hash_identity(str(i)) for i in range(len(sizes))], np.uint64)
    marks = np.ones(sum(marked), np.uint8)
    marks[::2] = 0
    shards = tuple(np.split(tokens, [sum(marked)]))
    size, counted = int(offsets[-1]), (marks, None)
    return Corpus(shards, offsets, hashes, BYTES.token_bytes, size, "numbered", (0,), counted)


@pytest.mark.proof
@settings(deadline=None, max_examples=30)
@given(SIZES, st.lists(st.integers(2, 60), max_size=8), st.integers(8, 40))
def test_what_has_marks_is_whole_in_one_row(marked, plain, seq_len):
    corpus = numbered(marked, plain)
    fitting = [i for i, size in enumerate(marked) if size <= seq_len]
    if not fitting and not plain:
        with pytest.raises(ValueError, match=rf"longer than data.seq_len = {seq_len} .*; raise it"):
            opened(corpus, seq_len=seq_len, heldout=0)
        return
    dataset = opened(corpus, seq_len=seq_len, heldout=0)
    examples = {dataset.window(i): dataset[i] for i in range(len(dataset))}
    assert sorted(examples) == list(range(len(dataset)))  # each row once
    whole, tokens = collections.Counter(), collections.Counter()
    for example in examples.values():
        assert example.segments.any()
        for segment in range(1, example.segments.max() + 1):
            piece = example.segments == segment
            both = np.append(example.tokens[piece], example.targets[piece][-1])
            (i,) = set(both.tolist()) - {END}
            size = int(piece.sum())
            tokens[i] += size
            if i < len(marked):
                assert both.tolist() == [END, *[i] * (size - 1), END]
                whole[i] += size == marked[i]
    assert whole == dict.fromkeys(fitting, 1)
    assert tokens == {i: marked[i] for i in fitting} | {
        len(marked) + i: size for i, size in enumerate(plain)
    }
    assert dataset.num_tokens == tokens.total()


@given(SIZES, st.integers(30, 60))
def test_rows_are_filled_and_not_overfilled(sizes, most):
    rows = best_fit(np.array(sizes), most)
    filled = np.bincount(rows, sizes)
    assert filled.max() <= most
    assert (np.sort(filled)[:2].sum() > most) or len(filled) == 1
    assert list(dict.fromkeys(rows.tolist())) == list(range(len(filled)))


def test_rows_of_many_documents_are_full():
    sizes = np.random.default_rng(0).lognormal(4, 0.8, 5000).astype(int).clip(1, 512)
    filled = np.bincount(best_fit(sizes, 512), sizes)
    assert filled.mean() > 0.98 * 512


def test_the_first_rows_are_of_both_kinds():
    dataset = opened(numbered([8] * 100, [32] * 25), "heldout", seq_len=16, heldout=0.9)
    kinds = [bool((dataset[i].weights[:8] == 0).any()) for i in range(len(dataset))]
    share = np.mean(kinds)
    assert 0 < share < 1
    assert abs(np.mean(kinds[: len(kinds) // 4]) - share) < 0.1


def test_a_run_that_began_with_cut_ones_is_told_apart():
    corpus = numbered([8] * 20, [])
    plain = dataclasses.replace(corpus, counted=())
    assert opened(corpus).fingerprint != opened(plain).fingerprint
    # Pinned: a change here breaks every run that is being continued.
    assert opened(corpus).example_digest(range(8)) == "26a2f18f"


@pytest.fixture
def sources(tmp_path) -> list[dict]:
    """Conversations, pairs, and plain text."""
    texts = [f"number {i} " + "and so on " * (3 * i % 15) for i in range(30)]
    chat = [
        {"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": t[:9]}]}
        for t in texts
    ]
    pairs = [{"q": f"what {i} ?", "a": f"it is {i}"} for i in range(30)]
    (tmp_path / "text.txt").write_text(f"{'x' * 150}\n" * 20)
    return [
        {"path": str(write_lines(tmp_path / "chat.jsonl", chat)), "messages": "messages"},
        {"path": str(write_lines(tmp_path / "pairs.jsonl", pairs)), "prompt": "q", "response": "a"},
        {"path": str(tmp_path / "text.txt"), "boundary": "line"},
    ]


def pieces_of(examples) -> list[tuple[int, ...]]:
    """The documents, or parts of them, in the rows of an epoch."""
    rows = [examples[i] for i in range(len(examples))]
    return [
        tuple(row.tokens[row.segments == segment].tolist())
        for row in rows
        for segment in range(1, row.segments.max() + 1)
    ]


@pytest.mark.proof
@pytest.mark.parametrize("weights", [(None,) * 3, (1, 1, 2)])
@pytest.mark.parametrize("prepared", [False, True])
def test_conversations_and_pairs_with_text(sources, weights, prepared, tmp_path, caplog):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t"))
    if prepared:
        for i, source in enumerate(sources):
            works = plan(find_files(to_sources([source])), tokenizer, tmp_path / str(i))
            prepare(works, tokenizer)
            sources[i] = {"path": str(tmp_path / str(i))}
    listed = [source | {"weight": weight} for source, weight in zip(sources, weights)]
    config = DataConfig(source=to_sources(listed), seq_len=64, heldout=0.2)
    corpus = open_corpus(config.source, tokenizer)
    caplog.set_level(logging.INFO)
    train, heldout = (
        open_examples(config, tokenizer, corpus, split=split, vocab_size=300)
        for split in ("train", "heldout")
    )
    said = [message for message in caplog.messages if "longer than data.seq_len = 64 " in message]
    assert len(said) == 2
    documents = [corpus.read(*place).tolist() for place in itertools.pairwise(corpus.offsets)]
    whole = {tuple(d) for d in documents if len(d) <= 64 and "x" not in tokenizer.decode(d)}
    assert len(whole) < 60, "some are too long"
    found = collections.Counter()
    for part in (heldout, *getattr(train, "members", [train])):
        found.update(pieces_of(part))
    of_text = [piece for piece in found if piece not in whole]
    assert {tokenizer.decode(np.array(piece)) for piece in of_text} <= {"x" * n for n in range(151)}
    assert {n for piece, n in found.items() if piece in whole} == {1}
    assert found.keys() >= whole

    again = pickle.loads(pickle.dumps(train))  # as workers get it
    resumed = next(batches(train, global_batch_size=4, start_step=5))
    for i in range(4):
        assert_same(again[20 + i], train[20 + i])
        np.testing.assert_array_equal(resumed.tokens[i], train[20 + i].tokens)


def test_a_validation_set_and_an_inspection_have_them_whole(sources, tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "t"))
    (source,) = to_validation([sources[0] | {"name": "chat"}])
    one = survey(source, tokenizer)
    places = itertools.pairwise(one.corpus.offsets)
    documents = {tuple(one.corpus.read(*place).tolist()) for place in places}
    config = DataConfig(validation=(source,), seq_len=256)
    assert set(pieces_of(open_validation(config, source, tokenizer))) == documents
    long = numbered([300, 500], [])
    shown = examples_of(dataclasses.replace(one, corpus=long, tokenizer=BYTES))
    assert sorted(map(len, pieces_of(shown))) == [300, 500]
