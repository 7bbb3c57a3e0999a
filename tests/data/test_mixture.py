"""Mixtures keep to their shares at every example, continue where they left off, and report it."""

import dataclasses
import itertools
import json
import pickle
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.batch import Batch
from jaxscale.checkpoints.tiers import Checkpoints
from jaxscale.config import DataConfig, from_dict
from jaxscale.config.model import ModelConfig
from jaxscale.data import mixture
from jaxscale.data.dataset import Dataset, SourceProgress, repeats
from jaxscale.data.loader import batches
from jaxscale.data.mixture import Mixture, fractions, interleave, mix, open_examples
from jaxscale.data.packing import Stream
from jaxscale.run.trainer import open_trainer
from jaxscale.run.training_loop import fit
from tests.data.documents import BYTES, assert_same, make_corpus, numbered, opened

BATCH = 8


@pytest.fixture(scope="module")
def members() -> list[Dataset]:
    sizes = (10, 40, 100)
    found = []
    for size in sizes:
        corpus = dataclasses.replace(numbered(size), fingerprint=f"of {size} documents")
        found.append(dataclasses.replace(opened(corpus), name=f"{size} documents"))
    return found


def mixed(members: list[Dataset], *weights) -> Mixture:
    return mix(members[: len(weights)], weights, lambda step: step * BATCH)


def tally(found: Mixture, indices) -> np.ndarray:
    """[examples, members]: of each example, the one that it is of."""
    which = np.array([found.locate(i)[0] for i in indices])
    return which[:, None] == np.arange(len(found.members))


SHARES = st.lists(st.integers(0, 300), min_size=1, max_size=8).filter(any)


@settings(deadline=None)
@given(SHARES)
def test_every_member_has_its_share_after_any_number_of_examples(shares):
    shares = np.array(shares)
    order = interleave(shares)
    count, num_members = shares.sum(), np.count_nonzero(shares)
    assert np.bincount(order, minlength=len(shares)).tolist() == shares.tolist()
    so_far = np.cumsum(order[:, None] == np.arange(len(shares)), axis=0)
    off = np.abs(so_far - np.arange(1, count + 1)[:, None] * shares / count).max()
    bound = 1 - 1 / (2 * num_members - 2) if num_members > 1 else 0
    assert off <= bound + 1e-9


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (1, 1), (3, 5), (2**0.5, 3**0.5, 1), (5,)])
def test_any_window_is_exact_to_the_rounding_of_an_example(members, weights):
    found = mixed(members, *weights)
    share = np.array(weights) / sum(weights)
    of = tally(found, range(3000))
    so_far = np.concatenate([np.zeros((1, len(share))), np.cumsum(of, axis=0)])
    off = so_far - np.arange(3001)[:, None] * share
    assert np.abs(off).max() < 1
    # Between any two places, from the extremes of what each is off by.
    spread = (off.max(axis=0) - off.min(axis=0)).max()
    assert spread < (2 if len(share) > 2 else 1.001)
    for first, last in itertools.pairwise([0, 1, 7, 100, 999, 3000]):
        assert (
            tally(found, range(first, last)).sum(axis=0).tolist()
            == (so_far[last] - so_far[first]).tolist()
        )


def test_shares_of_every_batch_are_exact_where_they_can_be(members):
    found = mixed(members, 0.5, 0.375, 0.125)
    for step in range(20):
        of = tally(found, range(step * BATCH, (step + 1) * BATCH))
        assert of.sum(axis=0).tolist() == [4, 3, 1]


def test_examples_of_a_member_come_in_its_own_order(members):
    found = mixed(members, 0.7, 0.2, 0.1)
    located = [found.locate(i) for i in range(2000)]
    for k, member in enumerate(members):
        own = [index for which, index in located if which == k]
        assert own == list(range(len(own)))
        i = located.index((k, 5))
        assert_same(found[i], member[5])


def test_stages_begin_at_their_steps_and_go_on_where_members_were(members):
    found = mixed(members, [(0, 1.0), (10, 0.0), (30, 1.0)], [(0, 0.0), (10, 0.75)], [(0, 1.0)])
    bounds = [0, 10 * BATCH, 30 * BATCH, 70 * BATCH]
    expected = [(0.5, 0, 0.5), (0, 3 / 7, 4 / 7), (1 / 2.75, 0.75 / 2.75, 1 / 2.75)]
    for (first, last), share in zip(itertools.pairwise(bounds), expected):
        of = np.cumsum(tally(found, range(first, last)), axis=0)
        off = of - np.arange(1, last - first + 1)[:, None] * np.array(share)
        assert np.abs(off).max() < 1
        assert (of[:, np.array(share) == 0] == 0).all()
    located = [found.locate(i) for i in range(bounds[-1])]
    for k in range(3):
        own = [index for which, index in located if which == k]
        assert own == list(range(len(own)))
    for end in (0, 1, 80, 81, 239, 240, 241, 500):
        seen = [source.seen for source in found.progress(end)]
        assert seen == [sum(which == k for which, _ in located[:end]) for k in range(3)]


def test_fractions_are_the_weights():
    assert fractions([0.7, 0.2, 0.1]).tolist() == [7, 2, 1]
    assert fractions([1 / 3, 0, 2 / 3]).tolist() == [1, 0, 2]
    assert fractions([250, 750]).tolist() == [1, 3]
    assert fractions([1e-9, 0]).tolist() == [1, 0]
    assert fractions([0.0001, 0.3, 0.6]).tolist() == [1, 3000, 6000]
    rng = np.random.default_rng(0)
    for size, precision in [(2, 1e-8), (3, 1e-6), (8, 1e-3)]:
        for _ in range(3):
            weights = rng.uniform(0.1, 1, size)
            shares = fractions(weights.tolist())
            assert shares.sum() <= mixture.LONGEST_CYCLE
            relative = shares / shares.sum() / (weights / weights.sum()) - 1
            assert np.abs(relative).max() < precision


def test_weights_that_cannot_be_honoured_are_refused(members):
    with pytest.raises(ValueError, match=r"\(1.0, 1e-06\).* is 1e-06 of their sum.*1 / 65,536"):
        mixed(members, 1.0, 1e-6)
    with pytest.raises(ValueError, match=r"from step 10 every weight of data.source is 0"):
        mixed(members, [(0, 1.0), (10, 0.0)], 0.0)


def test_an_example_far_away_is_immediate(members):
    start = time.process_time()  # whatever else the machine does
    found = mixed(members, [(0, 2**0.5), (10**8, 1.0)], 3**0.5, 0.1)
    member, own = found.locate(10**9)
    example = found[10**9]
    assert time.process_time() - start < 1
    assert_same(example, members[member][own])
    share = np.array([1.0, 3**0.5, 0.1])
    early = np.array([p.seen for p in found.progress(8 * 10**8)])
    late = np.array([p.seen for p in found.progress(10**9)])
    np.testing.assert_allclose((late - early) / 2e8, share / share.sum(), rtol=1e-5)
    with pytest.raises(IndexError, match="example -1"):
        found[-1]


def test_a_synthetic_index_of_a_billion_examples(members):
    """No table grows with the text: the billionth example of one that has as many, at once."""
    (small, *_) = members
    size = 16 * 10**9
    vast = dataclasses.replace(
        small, stream=Stream(Endless(size), np.array([0, 0]), np.array([0, size]), 256)
    )
    start = time.process_time()
    assert len(vast) == 10**9
    far = vast[10**9]
    batch = next(batches(vast, global_batch_size=4, start_step=10**9 // 4))
    assert time.process_time() - start < 2
    assert_same(far, Batch(*(v[0] for v in batch[:5])))


class Endless:
    """A corpus of one document whose tokens are their places."""

    counted = ()  # every token carries loss

    def __init__(self, size: int):
        self.num_tokens = size

    def read_each(self, places: list[tuple[int, int]]) -> list[np.ndarray]:
        return [np.arange(start, stop) % 256 for start, stop in places]


def test_a_member_that_begins_again_is_named(members):
    found = mixed(members, 3, 1)
    small, large = (len(member) for member in members[:2])
    named = [
        (step, source.name, source.begun)
        for step in range(200)
        for source in repeats(found, step * BATCH, (step + 1) * BATCH)
    ]
    located = [found.locate(i) for i in range(200 * BATCH)]
    expected = []
    for epoch in range(1, 200 * BATCH // small + 1):
        for k, size in enumerate((small, large)):
            if (k, epoch * size) in located:
                step = located.index((k, epoch * size)) // BATCH
                expected.append((step, members[k].name, epoch + 1))
    assert sorted(named) == sorted(expected)
    assert len(named) > 5
    alone = members[0]
    assert repeats(alone, 0, small) == []
    assert repeats(alone, small - 1, small + 1) == [SourceProgress(alone.name, small + 1, small)]


def test_digests_and_fingerprints_tell_mixtures_apart(members):
    found = [
        mixed(members, 1, 1),
        mixed(members, 1, 2),
        mixed(members, 1, 1, 1),
        mixed(members, [(0, 1.0), (9, 2.0)], 1),
        mixed(members, [(0, 1.0), (8, 2.0)], 1),
        mixed(members[1:], 1, 1),
        mix(members[:2], [[(0, 1.0), (9, 2.0)], 1], lambda step: 9 * step),
    ]
    assert len({m.fingerprint for m in found}) == len(found)
    assert len({m.example_digest(range(8)) for m in found}) == len(found)
    same = mixed(members, 10, 10)
    assert same.fingerprint == found[0].fingerprint
    assert same.example_digest(range(8)) == found[0].example_digest(range(8))


def config_of(*weights) -> DataConfig:
    source = [{"path": f"{i}"} | ({"weight": w} if w is not None else {}) for i, w in weights]
    return DataConfig(source=source, seq_len=16, heldout=0.2, global_batch_size=BATCH)


@pytest.mark.proof
def test_entries_of_a_source_are_members():
    corpus = dataclasses.replace(
        make_corpus({f"{i}": bytes([i]) * 40 for i in range(60)}), entries=(0, 20, 50)
    )
    config = config_of(("a", 1), ("b", 2), ("c", 1))
    train = open_examples(config, BYTES, corpus, split="train", vocab_size=257)
    assert isinstance(train, Mixture)
    ranges = [range(20), range(20, 50), range(50, 60)]
    for i in range(200):
        tokens = set(train[i].tokens[train[i].segments > 0].tolist()) - {256}
        assert tokens <= set(ranges[train.locate(i)[0]])
    assert [source.name for source in train.progress(1)] == [
        f"data.source[{i}] ({name})" for i, name in enumerate("abc")
    ]
    # Held-out text is one, and the same as without weights; training text is without it.
    plain = config_of(("a", None), ("b", None), ("c", None))
    heldout = [
        open_examples(c, BYTES, corpus, split="heldout", vocab_size=257) for c in (config, plain)
    ]
    hidden = set()
    for i in range(len(heldout[0])):
        assert_same(heldout[0][i], heldout[1][i])
        hidden |= set(heldout[0][i].tokens[heldout[0][i].segments > 0].tolist())
    seen = {t for i in range(300) for t in train[i].tokens[train[i].segments > 0].tolist()}
    assert hidden & seen == {256}
    assert hidden | seen == {256, *range(60)}


def test_entries_without_weights_are_one_text():
    corpus = dataclasses.replace(numbered(40), entries=(0, 20))
    config = config_of(("a", None), ("b", None))
    train = open_examples(config, BYTES, corpus, split="train", vocab_size=257)
    for i in (0, 7):
        assert_same(train[i], opened(numbered(40))[i])


def test_entries_that_cannot_be_mixed_are_named():
    corpus = dataclasses.replace(numbered(40), entries=(0, 20))
    with pytest.raises(ValueError, match=r"source\[1\] \(b\) has no weight, and other entries"):
        open_examples(
            config_of(("a", 1), ("b", None)), BYTES, corpus, split="train", vocab_size=257
        )
    with pytest.raises(ValueError, match=r"data.source\[2\] \(c\) has only documents of earlier"):
        open_examples(
            config_of(("a", 1), ("b", 1), ("c", 1)), BYTES, corpus, split="train", vocab_size=257
        )


def test_a_mixture_travels_to_workers_whole(members):
    found = mixed(members, 2, 1)
    again = pickle.loads(pickle.dumps(found))
    assert again.fingerprint == found.fingerprint
    for i in (0, 5, 10**6):
        assert_same(again[i], found[i])


@pytest.mark.proof
def test_a_run_of_a_mixture_says_what_it_sees(tmp_path, caplog):
    for name, count in (("prose", 12), ("code", 3)):
        (tmp_path / name).mkdir()
        for i in range(count):
            (tmp_path / name / f"{i}.txt").write_text(f"{name} number {i} " * 12)
    source = [
        {"path": str(tmp_path / "prose"), "weight": 3},
        {"path": str(tmp_path / "code"), "weight": [[0, 0.0], [2, 1.0]]},
    ]
    model = ModelConfig(num_layers=1, d_model=32, head_dim=8, d_ff=32, vocab_size=280)
    config = from_dict(
        {
            "model": dataclasses.asdict(model),
            "data": {
                "source": source,
                "seq_len": 64,
                "heldout": 0.2,
                "objective": "span_corruption",
            },
            "run": {"steps": 8},
        }
    )
    workdir = tmp_path / "run"
    with caplog.at_level("INFO", "jaxscale"):
        trainer = open_trainer(config, workdir)
        assert trainer
        train = trainer.text.train
        fit(trainer, trackers=())
    assert isinstance(train, Mixture)
    prose, code = train.members
    assert f"{prose.name} has {len(prose)} examples by data.tokenizer = bytes" in caplog.text
    seen = train.progress(8 * 8)[1].seen
    assert seen == 12  # six steps of eight, a quarter
    assert f"reads them {seen / len(code):.2f} times" in caplog.text
    again = [line for line in caplog.messages if f"{code.name}: starting epoch 2" in line]
    assert len(again) == 1
    assert int(again[0].split()[1].rstrip(":")) > 2
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    for line in lines[:8]:
        step = line["step"]
        assert line["examples"] == train.example_digest(range(8 * step - 8, 8 * step))
        assert line["data_seconds"] >= 0
    state = Checkpoints(workdir / "checkpoints").metadata(8)["data"]
    # All there is to know of a stream, however many processes read it.
    assert state == {
        "fingerprint": train.fingerprint,
        "next_example": 64,
        "passed_over": [],
        "tokenizer": "bytes",
    }
