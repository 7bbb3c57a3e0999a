"""Examples are a pure function of seed and index; packing keeps documents apart."""

import dataclasses
import pickle
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.batch import Batch
from jaxscale.config import DataConfig
from jaxscale.data.dataset import Split, open_dataset
from jaxscale.data.loader import batches
from jaxscale.data.tokens.corpus import Corpus
from tests.data.documents import (
    BYTES,
    END,
    assert_same,
    documents_of,
    make_corpus,
    numbered,
    opened,
)

CORPORA = st.lists(st.binary(min_size=1, max_size=30), min_size=2, max_size=12)


@pytest.mark.proof
@settings(deadline=None)
@given(CORPORA, st.integers(2, 40), st.integers(0, 3), st.sampled_from(["train", "heldout"]))
def test_packing(texts, seq_len, seed, split):
    corpus = make_corpus({f"{i}.txt": text for i, text in enumerate(texts)})
    heldout = 0.5
    documents = documents_of(corpus, split, heldout, seed)
    if sum(len(document) + 1 for document in documents) < seq_len:
        with pytest.raises(ValueError, match=r"data\.heldout"):
            opened(corpus, split, seq_len=seq_len, seed=seed, heldout=heldout)
        return
    dataset = opened(corpus, split, seq_len=seq_len, seed=seed, heldout=heldout)
    examples = {dataset.window(i): dataset[i] for i in range(len(dataset))}
    assert sorted(examples) == list(range(len(dataset)))  # each window once

    # Row by row, the documents come back, each token a target exactly once.
    rebuilt: list[list[int]] = []
    for window in sorted(examples):
        example = examples[window]
        for field, dtype in zip(example, [np.int32] * 4 + [np.float32]):
            assert field.shape == (seq_len,)
            assert field.dtype == dtype
        check_row(example)
        for token, target, weight in zip(example.tokens, example.targets, example.weights):
            if weight:
                if token == END:
                    rebuilt.append([])
                rebuilt[-1].append(int(target))
    assert rebuilt == [[*document, END] for document in documents]


def check_row(example: Batch) -> None:
    """What must hold between the fields of one row, whatever the documents."""
    num_real = int(example.weights.sum())
    real = np.arange(len(example.tokens)) < num_real
    np.testing.assert_array_equal(example.weights, real)
    np.testing.assert_array_equal(example.segments > 0, real)  # padding only at the end
    starts = np.append(True, example.tokens[1:] == END)
    np.testing.assert_array_equal(example.segments[real], np.cumsum(starts)[real])
    for segment in range(1, example.segments.max(initial=0) + 1):
        (places,) = np.nonzero(example.segments == segment)
        np.testing.assert_array_equal(example.positions[places], np.arange(len(places)))
        np.testing.assert_array_equal(example.targets[places[:-1]], example.tokens[places[1:]])
    assert not example.positions[~real].any()


def test_every_epoch_visits_every_window_once_in_its_own_order():
    dataset = opened(numbered(40))
    count = len(dataset)
    epochs = [[dataset.window(e * count + i) for i in range(count)] for e in range(4)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(count))
    orders = {tuple(epoch) for epoch in epochs}
    orders |= {
        tuple(opened(numbered(40), seed=seed).window(i) for i in range(count)) for seed in (1, 2)
    }
    assert len(orders) == 6
    assert epochs[0] != sorted(epochs[0])


def test_the_order_of_a_run_is_the_order_of_tomorrow():
    """Pinned: a change here breaks every run that is being continued."""
    dataset = opened(numbered(40))
    assert [dataset.window(i) for i in range(8)] == [35, 10, 61, 3, 25, 41, 53, 12]
    assert dataset[0].tokens.tolist()[:8] == [148, 231, 22, 241, 190, 33, 125, 178]
    assert dataset.example_digest(range(8)) == "a918c0e0"


def test_an_example_far_away_is_immediate():
    corpus = numbered(2000, size=500)
    dataset = opened(corpus)
    assert dataset[0].tokens.any()  # imports what it needs
    start = time.process_time()  # whatever else the machine does
    example = dataset[10**9]
    assert time.process_time() - start < 1
    check_row(example)
    first = next(batches(dataset, global_batch_size=8, start_step=10**9 // 8))
    np.testing.assert_array_equal(first.tokens[0], example.tokens)
    with pytest.raises(IndexError, match="example -1"):
        dataset[-1]


def test_a_dataset_on_disk_travels_as_a_path(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 10_000)
    config = DataConfig(source=(str(tmp_path / "a.txt"),), heldout=0)
    dataset = open_dataset(config, BYTES, split="train", directory=tmp_path)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 6_000
    assert_same(pickle.loads(pickled)[3], dataset[3])


def split_of(corpus: Corpus, split: Split, **settings) -> set[int]:
    """Where the documents of a split begin in the corpus."""
    return set(opened(corpus, split, **settings).stream.starts[:-1].tolist())


@settings(deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.3, 0.5, 0.7]))
def test_splits_are_disjoint_and_complete(seed, heldout):
    corpus = numbered(60)
    train = split_of(corpus, "train", seed=seed, heldout=heldout)
    held_out = split_of(corpus, "heldout", seed=seed, heldout=heldout)
    assert not train & held_out
    assert train | held_out == set(corpus.offsets[:-1].tolist())


def test_the_split_of_a_document_is_stable_when_documents_are_added():
    few = {f"{i}.txt": bytes([i]) * 20 for i in range(0, 60, 2)}
    many = few | {f"{i}.txt": bytes([i]) * 20 for i in range(1, 60, 2)}
    many = dict(sorted(many.items()))

    def held_out(texts):
        corpus = make_corpus(texts)
        names = dict(zip(corpus.offsets.tolist(), texts))
        return {names[start] for start in split_of(corpus, "heldout")}

    assert held_out(few) == held_out(many) & set(few)
    assert held_out(few)


def test_digests_and_fingerprints_tell_runs_apart():
    corpus = numbered(40)
    dataset = opened(corpus)
    assert dataset.example_digest(range(8)) == opened(corpus).example_digest(range(8))
    assert dataset.example_digest(range(8)) != dataset.example_digest(range(8, 16))
    others = [
        opened(corpus, "heldout"),
        opened(corpus, seed=1),
        opened(corpus, heldout=0.3),
        opened(corpus, seq_len=17),
        opened(corpus, objective="causal_across_documents"),
        opened(dataclasses.replace(corpus, fingerprint="other")),
    ]
    assert len({d.fingerprint for d in (dataset, *others)}) == 7
    assert len({d.example_digest(range(8)) for d in (dataset, *others)}) == 7


def test_a_split_that_is_too_small_says_which_setting_to_change():
    corpus = numbered(40)
    with pytest.raises(ValueError, match=r"data.heldout = 0 .*run.eval_every = 0"):
        opened(corpus, "heldout", heldout=0)
    with pytest.raises(ValueError, match=r"train documents .* data.seq_len = 9999; add text"):
        opened(corpus, seq_len=9999)
    with pytest.raises(ValueError, match=r"heldout documents .* raise data.heldout \(now 0.2\)"):
        opened(corpus, "heldout", seq_len=1000)
    with pytest.raises(ValueError, match=r"held out whole .*several files.* in data.validation"):
        opened(numbered(1), "heldout", heldout=1e-9)


def test_a_share_that_leaves_a_split_empty_names_one_that_does_not():
    corpus = numbered(10)
    with pytest.raises(
        ValueError, match=r"none of 10 documents of data.source for heldout; ([0-9.]+)"
    ) as error:
        opened(corpus, "heldout", heldout=1e-9, seq_len=2)
    enough = float(str(error.value).split("; ")[1].split()[0])
    assert len(split_of(corpus, "heldout", heldout=enough, seq_len=2)) == 1
    with pytest.raises(
        ValueError, match=r"none of 10 documents of data.source for train; below ([0-9.]+)"
    ):
        opened(corpus, "train", heldout=0.9999, seq_len=2)
