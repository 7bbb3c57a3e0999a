"""Each objective takes out of a text what its paper says, and keeps documents apart."""

import contextlib
import dataclasses
import itertools
import operator

import jax
import numpy as np
import pytest
from hypothesis import example as also
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.config import OBJECTIVES as NAMES
from jaxscale.config import PAIRED_OBJECTIVES as PAIRED
from jaxscale.config import Config, DataConfig
from jaxscale.config.model import ModelConfig
from jaxscale.config.optimizer import OptimizerConfig
from jaxscale.data import objectives
from jaxscale.data.denoising import T5, Lengths, longest, noise_mask
from jaxscale.data.objectives import find_objective
from jaxscale.data.packing import Vocabulary, Window, pad, stack, uniform
from jaxscale.run.evaluation import device_batches
from jaxscale.run.setup.layout import open_engine
from tests.data.documents import make_corpus, numbered, opened

END = 0
VOCABULARY = Vocabulary(size=1000, boundary=END, model_size=1200)


def make_window(lengths: list[int], *, cut: bool = False) -> Window:
    """Documents of these lengths with distinct ids; `cut` drops the first one's boundary."""
    ids = np.arange(1, sum(lengths) + 2, dtype=np.int32)
    bounds = np.cumsum([0, *lengths])
    ids[bounds[cut:]] = END
    return Window(ids, bounds)


def pieces_of(window: Window) -> list[list[int]]:
    return [window.ids[a:b].tolist() for a, b in zip(window.bounds, window.bounds[1:])]


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@settings(deadline=None)
@also([1], 0, "span_corruption")
@given(LENGTHS, st.integers(0, 2**40), st.sampled_from(NAMES))
def test_segments_and_positions_of_any_objective(lengths, index, name):
    window = make_window(lengths)
    example = find_objective(name, 900).example(window, uniform(0, index), VOCABULARY)
    size = len(example.tokens)
    for field, dtype in zip(example, [np.int32] * 4 + [np.float32]):
        assert field.shape == (size,)
        assert field.dtype == dtype
    # Segments are 1, 2, ... in order, and positions count from 0 in each.
    count = example.segments.max(initial=0)
    assert set(example.segments.tolist()) == set(range(1, count + 1))
    assert (np.diff(example.segments) >= 0).all()
    for segment in range(1, count + 1):
        (places,) = np.nonzero(example.segments == segment)
        assert example.positions[places].tolist() == list(range(len(places)))
        # What is predicted from the left is what comes next in the segment.
        if name != "masked":
            assert (example.targets[places[:-1]] == example.tokens[places[1:]]).all()
    again = find_objective(name, 900).example(window, uniform(0, index), VOCABULARY)
    for left, right in zip(example, again):
        np.testing.assert_array_equal(left, right)
    padded = pad(example, size + 5)
    assert not padded.segments[size:].any()
    assert not padded.weights[size:].any()


def test_the_names_of_a_config_are_the_objectives_there_are():
    assert all(find_objective(name, 64).window for name in NAMES)
    assert all(find_objective(name, 64, 64).window for name in PAIRED)
    with pytest.raises(ValueError, match=r"'span_corrupt'.*did you mean 'span_corruption'"):
        DataConfig(objective="span_corrupt")
    with pytest.raises(ValueError, match=r"'masked' needs bidirectional attention.*causal"):
        Config(data=DataConfig(objective="masked"))


@settings(deadline=None)
@given(LENGTHS, st.booleans(), st.booleans())
def test_across_documents_a_row_is_one_segment_and_otherwise_causal(lengths, cut, marked):
    window = make_window(lengths, cut=cut)
    if marked:
        window = window._replace(counted=np.arange(sum(lengths)) % 3 == 1)
    seq_len = sum(lengths) + 5
    across, causal = (
        pad(find_objective(name, seq_len).example(window, uniform(0, 0), VOCABULARY), seq_len)
        for name in ("causal_across_documents", "causal")
    )
    for name in ("tokens", "targets", "weights"):
        np.testing.assert_array_equal(getattr(across, name), getattr(causal, name))
    place = np.arange(seq_len)
    np.testing.assert_array_equal(across.segments, place < sum(lengths))
    np.testing.assert_array_equal(across.positions, np.where(place < sum(lengths), place, 0))
    assert across.segments.dtype == across.positions.dtype == np.int32
    assert find_objective("causal_across_documents", seq_len).keeps_marks


@pytest.mark.proof
def test_a_prefix_has_any_length_and_no_loss():
    window = make_window([40, 1, 9])
    shares = np.zeros(40)
    for i in range(4000):
        example = objectives.prefix(window, uniform(7, i), VOCABULARY)
        causal = objectives.causal(window, uniform(7, i), VOCABULARY)
        for name in ("tokens", "targets", "segments", "positions"):
            np.testing.assert_array_equal(getattr(example, name), getattr(causal, name))
        for segment in (1, 2, 3):
            weights = example.weights[example.segments == segment]
            assert (np.diff(weights) >= 0).all()  # the loss begins once, and continues
            assert weights[-1] == 1  # the end of every piece is predicted
        shares[int(40 - example.weights[:40].sum())] += 1 / 4000
    np.testing.assert_allclose(shares, 1 / 40, atol=4 * np.sqrt(1 / 40 / 4000))


def restored(inputs: list[int], targets: list[int]) -> list[int]:
    """The text of a piece from both halves of its corruption."""
    spans: dict[int, list[int]] = {}
    for token in targets:
        if token >= VOCABULARY.size:
            assert token not in spans
            spans[token] = []
            last = token
        else:
            spans[last].append(token)
    assert list(spans) == [VOCABULARY.sentinel(i) for i in range(len(spans))]
    return [t for token in inputs for t in (spans.pop(token) if token in spans else [token])]


@settings(deadline=None)
@given(LENGTHS, st.booleans(), st.integers(0, 2**40))
def test_corrupted_spans_give_the_text_back(lengths, cut, index):
    window = make_window(lengths, cut=cut)
    inputs, targets = objectives.corrupt_window(window, uniform(1, index), VOCABULARY)
    for i, piece in enumerate(pieces_of(window)):
        left, right = inputs.ids[inputs.pieces == i], targets.ids[targets.pieces == i]
        assert restored(left.tolist(), right.tolist()) == piece
        assert END not in right
        assert left[0] == piece[0]  # text comes first


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 2**40))
def test_a_decoder_reads_inputs_then_targets(lengths, index):
    window = make_window(lengths)
    inputs, targets = objectives.corrupt_window(window, uniform(1, index), VOCABULARY)
    example = objectives.span_corruption(window, uniform(1, index), VOCABULARY)
    with_spans = [i for i in range(len(lengths)) if i in targets.pieces]
    assert example.segments.max(initial=0) == len(with_spans)
    for segment, i in enumerate(with_spans, 1):
        chosen = example.segments == segment
        left, right = inputs.ids[inputs.pieces == i], targets.ids[targets.pieces == i]
        sequence = [*left, *right, END]
        assert example.tokens[chosen].tolist() == sequence[:-1]
        assert example.targets[chosen].tolist() == sequence[1:]
        # The first sentinel is given; all that follows is predicted.
        assert example.weights[chosen].tolist() == [0] * len(left) + [1] * len(right)


@pytest.mark.parametrize("seq_len", [4, 5, 16, 100, 256, 511, 2048, 8192])
def test_windows_of_span_corruption_fill_a_row_whatever_their_documents(seq_len):
    size = find_objective("span_corruption", seq_len).window
    rng = np.random.default_rng(seq_len)
    vocabulary = Vocabulary(10_000, END, 11_000)
    row = objectives.span_corruption(make_window([size]), uniform(0, 0), vocabulary)
    assert seq_len - 2 <= len(row.tokens) <= seq_len
    marks = {token for token in row.tokens.tolist() if token >= vocabulary.size}
    assert len(marks) == find_objective("span_corruption", seq_len).num_sentinels
    for mean in (1, 3, 10, 40, 1000):
        cuts = np.flatnonzero(rng.random(size - 1) < 1 / mean) + 1
        window = make_window(np.diff([0, *cuts, size]).tolist())
        row = objectives.span_corruption(window, uniform(0, 0), vocabulary)
        assert len(row.tokens) <= seq_len


def test_span_lengths_are_those_of_t5():
    # Published: 512 tokens of input take 568 tokens of text, with targets of 114.
    assert longest((T5,), Lengths(512, 114)) == 568
    assert longest((T5,), Lengths(512, 113)) < 568
    window = make_window([568])
    inputs, targets = objectives.corrupt_window(window, uniform(0, 0), VOCABULARY)
    assert (len(inputs.ids) + 1, len(targets.ids) + 1) == (512, 114)


@pytest.mark.proof
def test_statistics_of_span_corruption():
    size, count = 568, 2000
    noise_at, lengths, gaps = np.zeros(size), [], []
    for i in range(count):
        noise = noise_mask(np.array([size]), *T5.allot(np.array([size])), uniform(3, i))
        assert noise.sum() == 85  # 15 %, exactly
        edges = np.flatnonzero(np.diff(noise.astype(int), prepend=0, append=0))
        assert len(edges) == 2 * 28
        lengths += (edges[1::2] - edges[::2]).tolist()
        gaps += np.diff([0, *edges])[::2].tolist()
        noise_at += noise
    assert np.mean(lengths) == pytest.approx(85 / 28)
    assert np.mean(gaps) == pytest.approx((size - 85) / 28)
    # Cutting 85 at random into 28: a span has length n with probability C(84 - n, 26) / C(84, 27).
    share = 27 / 84  # n = 1
    for n in (1, 2, 3, 4):
        assert np.mean(np.array(lengths) == n) == pytest.approx(share, abs=0.01)
        share *= (84 - n - 26) / (84 - n)
    # No position is preferred, except the ends: T5 begins with text and ends with noise.
    np.testing.assert_allclose(
        noise_at[44:-44].reshape(6, 80).mean(axis=1) / count, 0.147, atol=0.006
    )
    assert noise_at[0] == 0
    assert noise_at[-1] == count


@pytest.mark.parametrize("mean", [8, 20, 100])
def test_short_documents_have_their_share_of_spans(mean):
    rng = np.random.default_rng(0)
    noise = spans = total = 0
    for _ in range(100):
        lengths = rng.integers(2, 2 * mean - 1, 2000 // mean)
        of_piece, of_spans = objectives.allot_spans(lengths)
        assert (of_spans <= of_piece).all()
        assert ((of_piece == 0) == (of_spans == 0)).all()
        assert (lengths - of_piece >= np.maximum(of_spans, 1)).all()
        noise, spans, total = noise + of_piece.sum(), spans + of_spans.sum(), total + lengths.sum()
    assert noise / total == pytest.approx(0.15, abs=0.005)
    assert noise / spans == pytest.approx(3, abs=0.1)


@settings(deadline=None)
@given(LENGTHS)
def test_there_is_always_something_to_predict(lengths):
    noise, spans = objectives.allot_spans(np.array(lengths))
    assert noise.any() == spans.any() == (max(lengths) > 1)


@pytest.mark.parametrize("tail", [1, 2])
def test_a_last_window_with_nothing_to_predict_is_left_out(tail):
    size = find_objective("span_corruption", 64).window
    corpus = make_corpus({"a": b"x" * (3 * size + tail - 1)})
    dataset = opened(corpus, seq_len=64, objective="span_corruption", heldout=0)
    assert len(dataset) == 2 + tail
    assert all(dataset[i].weights.any() for i in range(len(dataset)))
    assert len(opened(corpus, seq_len=size, heldout=0)) == 4


def test_statistics_of_masking():
    window = make_window([300, 500, 200])
    chosen, fates, replacements = np.zeros(1000), np.zeros(3), []
    for i in range(2000):
        example = objectives.masked(window, uniform(5, i), VOCABULARY)
        np.testing.assert_array_equal(example.targets, window.ids[:-1])  # at their own place
        counted = example.weights > 0
        assert counted.sum() == round(0.15 * 997)
        same = example.tokens == example.targets
        assert same[~counted].all()
        masks = example.tokens == VOCABULARY.model_size - 1
        random = counted & ~masks & ~same
        replacements += example.tokens[random].tolist()
        fates += [masks.sum(), random.sum(), (counted & same).sum()]
        chosen += counted / 2000
    assert not chosen[[0, 300, 800]].any()  # boundaries
    np.testing.assert_allclose(np.delete(chosen, [0, 300, 800]), 0.15, atol=0.045)
    # A random token is the old one in a thousandth of the cases.
    np.testing.assert_allclose(fates / fates.sum(), [0.8, 0.1, 0.1], atol=0.004)
    assert min(replacements) == 1
    assert max(replacements) == VOCABULARY.size - 1
    assert np.mean(replacements) == pytest.approx(500, rel=0.01)


def test_random_numbers_belong_to_seed_and_index():
    """Pinned: a change here changes the examples of every run that is being continued."""
    assert uniform(0, 0)(2).tolist() == [0.011546754286331562, 0.24154919656271812]
    draws = {tuple(uniform(s, i)(3)) for s in (0, 1) for i in (0, 1, 2**40, 10**15)}
    assert len(draws) == 8
    numbers = np.concatenate([uniform(0, i)(100) for i in range(1000)])
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    np.testing.assert_allclose(np.histogram(numbers, 10, (0, 1))[0] / 1e5, 0.1, atol=0.005)


@pytest.mark.parametrize("name", NAMES)
def test_a_dataset_of_each_objective(name):
    dataset = opened(numbered(60, 60), seq_len=64, objective=name)
    objective = find_objective(name, 64)
    marks = objective.num_sentinels + objective.num_modes + objective.masks
    assert dataset.vocabulary.model_size == 257 + marks
    assert len(dataset.token_bytes) == dataset.vocabulary.model_size
    assert not dataset.token_bytes[256:].any()
    count = len(dataset)
    first, second = ([dataset[e * count + i] for i in range(count)] for e in (0, 1))
    for example in first:
        assert example.tokens.shape == (64,)
        assert 0 < example.weights.sum() <= 64
        assert max(example.tokens.max(), example.targets.max()) < dataset.vocabulary.model_size
    # Another epoch hides other tokens of the same windows.
    by_window = {dataset.window(count + i): example for i, example in enumerate(second)}
    changed = [
        any(map(operator.ne, example.tokens, by_window[dataset.window(i)].tokens))
        or any(map(operator.ne, example.weights, by_window[dataset.window(i)].weights))
        for i, example in enumerate(first)
    ]
    # (A denoiser of UL2 with one span leaves nothing to chance.)
    exact = dict.fromkeys(("causal", "causal_across_documents"), (0, 0))
    expected = {**exact, "ul2": (0.8, 1)}.get(name, (0.9, 1))
    assert expected[0] <= np.mean(changed) <= expected[1]


def test_too_few_ids_say_how_many_are_needed():
    with pytest.raises(ValueError, match=r"needs 6 more ids than the 257.*model.vocab_size = 263"):
        opened(numbered(60, 60), seq_len=128, objective="span_corruption", vocab_size=257)
    with pytest.raises(ValueError, match=r"needs 1 more ids than .* set model.vocab_size = 258"):
        opened(numbered(60, 60), seq_len=128, objective="masked", vocab_size=257)
    with pytest.raises(ValueError, match=r"data.seq_len = 3 is too short .*at least 4"):
        opened(numbered(60, 60), seq_len=3, objective="span_corruption")


@pytest.fixture(scope="module")
def trained():
    """A tiny config, its engine, and the documents of two sentences that it can learn."""
    model = ModelConfig(
        num_layers=1, d_model=32, head_dim=8, d_ff=64, vocab_size=280, compute_dtype="float32"
    )
    data = DataConfig(seq_len=64, global_batch_size=8, heldout=0)
    config = Config(model=model, data=data, optimizer=OptimizerConfig(learning_rate=1e-2))
    sentences = [b"the quick brown fox jumps over the lazy dog. ", b"0123456789 " * 4]
    corpus = make_corpus({f"{i}": sentences[i % 2] * (1 + i % 5) for i in range(40)})
    return *open_engine(config), corpus


@pytest.mark.proof
@pytest.mark.parametrize("name", [name for name in NAMES if name != "masked"])
def test_a_decoder_learns_from_each_objective(trained, name):
    config, engine, corpus = trained
    settings = dataclasses.asdict(config.data) | {"objective": name, "source": config.data.source}
    dataset = opened(corpus, vocab_size=280, **settings)
    state, losses = engine.init(jax.random.key(0)), []
    with contextlib.closing(device_batches(engine, dataset, 8)) as stream:
        for step, batch in enumerate(itertools.islice(stream, 25)):
            state, out = engine.step(state, batch)
            losses.append(float(out.loss))
            counted = sum(dataset[8 * step + row].weights.sum() for row in range(8))
            assert float(out.loss_tokens) == counted
    assert losses[0] == pytest.approx(np.log(280), rel=0.1)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.proof
def test_a_document_sees_those_before_it_across_documents_alone(trained):
    """Of the second document of each row, the loss after two first ones."""
    _, engine, _ = trained
    params, num_bytes = engine.init(jax.random.key(0)).params, np.ones(280, np.float32)

    def loss(make, first):
        window = make_window([24, 40])
        window.ids[1:24] = first
        example = make(window, uniform(0, 0), VOCABULARY)
        example = example._replace(weights=example.weights * (np.arange(64) >= 24))
        batch = engine.shard(stack([example] * 8))
        return float(engine.evaluate(params, batch, num_bytes).nll)

    assert loss(objectives.causal, 5) == loss(objectives.causal, 7)
    across = [loss(objectives.causal_across_documents, first) for first in (5, 7)]
    assert abs(across[0] - across[1]) > 1e-3
