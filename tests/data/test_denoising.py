"""Denoisers cut out what their papers say, and encoders and decoders see the same pieces."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.config import PAIRED_OBJECTIVES, DataConfig
from jaxscale.data.dataset import open_dataset
from jaxscale.data.denoising import T5, UL2, Denoiser, Lengths, longest, sizes_of
from jaxscale.data.loader import batches
from jaxscale.data.objectives import find_objective
from jaxscale.data.packing import Vocabulary, Window, stack, uniform
from jaxscale.data.tokens.tokenizer import load_tokenizer
from tests.data.documents import BYTES, assert_same, make_corpus, numbered, opened

END, PAD = 0, 1
VOCABULARY = Vocabulary(size=1000, boundary=END, model_size=1300, pad=PAD)


def make_window(lengths: list[int], *, cut: bool = False) -> Window:
    """Documents of these lengths with distinct ids; `cut` drops the first one's boundary."""
    ids = np.arange(2, sum(lengths) + 3, dtype=np.int32)
    bounds = np.cumsum([0, *lengths])
    ids[bounds[cut:]] = END
    return Window(ids, bounds)


def texts_of(window: Window) -> list[list[int]]:
    pieces = (window.ids[a:b] for a, b in zip(window.bounds, window.bounds[1:]))
    return [[i for i in piece.tolist() if i != END] for piece in pieces]


def segments_of(tokens, segments) -> list[list[int]]:
    return [tokens[segments == i].tolist() for i in range(1, segments.max(initial=0) + 1)]


def restored(inputs: list[int], targets: list[int]) -> list[int]:
    """A text from both halves of its corruption, whose sentinels are in order in both."""
    spans: dict[int, list[int]] = {}
    for token in targets:
        if token >= VOCABULARY.size:
            assert token == VOCABULARY.sentinel(len(spans))
            last = spans.setdefault(token, [])
        else:
            last.append(token)
    found = [t for token in inputs for t in (spans.pop(token) if token in spans else [token])]
    assert not spans
    return found


LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=9)


@settings(deadline=None)
@given(LENGTHS, st.booleans(), st.integers(0, 2**40), st.sampled_from(PAIRED_OBJECTIVES))
def test_an_encoder_and_its_decoder_have_the_text(lengths, cut, index, name):
    window = make_window(lengths, cut=cut)
    example = find_objective(name, 64, 48).example(window, uniform(3, index), VOCABULARY)
    read, segments = (example.extras[f"encoder_{key}"] for key in ("tokens", "segments"))
    assert len(read) <= 64 or name == "prefix"  # whose window is never as large as this one
    assert len(example.tokens) <= 48 or name == "prefix"
    encoders = segments_of(read, segments)
    decoders = segments_of(example.targets, example.segments)
    assert len(encoders) == len(decoders)
    texts = iter(texts_of(window))
    for left, right in zip(encoders, decoders):
        assert left.pop() == right.pop() == END
        if name == "ul2":
            assert 1000 <= left.pop(0) < 1003
        whole = left + right if name == "prefix" else restored(left, right)
        assert left
        assert right
        # The texts in order, cut at most at the end of what fits.
        assert any(text[: len(whole)] == whole for text in texts)
    # The decoder reads its targets one later, and every one counts.
    shifted = np.roll(example.targets, 1)
    shifted[example.positions == 0] = PAD
    np.testing.assert_array_equal(example.tokens, shifted)
    assert (example.weights == 1).all()
    for positions, own in (
        (example.positions, example.segments),
        (example.extras["encoder_positions"], segments),
    ):
        for i in range(1, own.max(initial=0) + 1):
            assert positions[own == i].tolist() == list(range((own == i).sum()))


def test_one_text_fills_both_lengths_as_in_t5():
    objective = find_objective("span_corruption", 512, 114)
    assert objective.window == 568
    example = objective.example(make_window([568], cut=True), uniform(0, 0), VOCABULARY)
    assert (len(example.extras["encoder_tokens"]), len(example.tokens)) == (512, 114)
    assert longest((T5,), Lengths(1024, 229)) == 1137  # of the configurations with 1,024 inputs


@pytest.mark.parametrize(("mean", "fills"), [(2000, 0.98), (300, 0.95), (60, 0.78)])
def test_rows_are_full_whatever_the_documents(mean, fills):
    rng = np.random.default_rng(0)
    corpus = make_corpus({f"{i}": rng.bytes(int(rng.integers(2, 2 * mean))) for i in range(400)})
    dataset = opened(corpus, seq_len=256, target_len=60, objective="span_corruption", heldout=0)
    rows = stack([dataset[i] for i in range(40)])
    assert rows.tokens.shape == (40, 60)
    assert rows.extras["encoder_tokens"].shape == (40, 256)
    shares = [np.mean(rows.extras["encoder_segments"] > 0), np.mean(rows.segments > 0)]
    assert max(shares) > 0.97 * fills
    assert min(shares) > fills - 0.1


@pytest.mark.parametrize(
    ("denoiser", "noise", "spans"),
    [*zip(UL2, (77, 77, 128, 256, 256, 77, 256), (26, 10, 1, 85, 32, 1, 4))],
)
def test_the_denoisers_of_ul2_are_those_of_table_1(denoiser, noise, spans):
    found = denoiser.allot(np.array([512, 1, 2, 3]))
    assert [each[0] for each in found] == [noise, spans]
    assert [each[1] for each in found] == [0, 0]
    assert (found[1][2:] == 1).all()
    assert (found[0][2:] >= 1).all()


@pytest.mark.proof
def test_ul2_mixes_its_denoisers_in_equal_shares():
    objective, counts = find_objective("ul2", 512, 512), np.zeros(len(UL2))
    window = make_window([objective.window], cut=True)
    kinds = {
        (d.mode, *(int(x[0]) for x in d.allot(np.array([objective.window])))): i
        for i, d in enumerate(UL2)
    }
    assert len(kinds) == 7
    for i in range(1500):
        example = objective.example(window, uniform(1, i), VOCABULARY)
        read = example.extras["encoder_tokens"]
        spans = int((read >= 1003).sum())
        noise = len(example.targets) - 1 - spans
        counts[kinds[int(read[0]) - 1000, noise, spans]] += 1 / 1500
    np.testing.assert_allclose(counts, 1 / 7, atol=4 * np.sqrt(6 / 49 / 1500))


def test_ul2_for_a_decoder_alone():
    objective = find_objective("ul2", 300)
    for i in range(30):
        example = objective.example(make_window([80, 90, 60]), uniform(1, i), VOCABULARY)
        assert 200 < len(example.tokens) <= 300
        for ids, predicted, weights in zip(
            segments_of(example.tokens, example.segments),
            segments_of(example.targets, example.segments),
            segments_of(example.weights, example.segments),
        ):
            begin, mode, *rest = ids
            assert (begin, predicted[-1]) == (END, END)
            assert 1000 <= mode < 1003
            given = weights.index(1)  # the first sentinel of the second part is given
            assert rest[given - 2] == VOCABULARY.sentinel(0) == ids[given]
            assert weights == [0] * given + [1] * (len(ids) - given)
            found = restored(ids[2:given], [*ids[given:], *predicted[-1:]][:-1])
            assert found == list(range(found[0], found[0] + len(found)))


def test_sizes_say_how_long_an_example_is():
    for name, lengths in (("ul2", Lengths(200, 100)), ("span_corruption", Lengths(90, 30))):
        objective = find_objective(name, *lengths)
        denoisers = UL2 if name == "ul2" else (T5,)
        texts = np.array([objective.window])
        sizes = np.stack([sizes_of(texts, one, lengths)[:, 0] for one in denoisers])
        assert (sizes <= lengths).all()
        more = np.stack([sizes_of(texts + 1, one, lengths)[:, 0] for one in denoisers])
        assert (more > lengths).any()
    assert longest((Denoiser(0.5, 1.0),), Lengths(2, 100)) == 0


def test_a_run_of_pairs_resumes_and_evaluates():
    dataset = opened(numbered(60, 60), seq_len=64, target_len=24, objective="span_corruption")
    whole = batches(dataset, global_batch_size=4)
    seen = [next(whole) for _ in range(4)]
    assert seen[0].tokens.shape == (4, 24)
    assert seen[0].extras["encoder_tokens"].shape == (4, 64)
    assert_same(next(batches(dataset, global_batch_size=4, start_step=3)), seen[3])
    heldout = opened(
        numbered(60, 60), "heldout", seq_len=64, target_len=24, objective="span_corruption"
    )
    beyond = heldout[len(heldout) + 3]
    assert not beyond.weights.any()
    assert_same(beyond, beyond._replace(extras={k: 0 * v for k, v in beyond.extras.items()}))
    other = opened(numbered(60, 60), seq_len=64, target_len=25, objective="span_corruption")
    assert other.fingerprint != dataset.fingerprint


def test_what_a_config_refuses():
    with pytest.raises(ValueError, match=r"data.target_len = 8 .*'masked' does not train; set"):
        DataConfig(target_len=8, objective="masked")
    with pytest.raises(ValueError, match=r"data.target_len = 2 is too short .*'span_corruption'"):
        opened(numbered(60, 60), seq_len=16, target_len=2, objective="span_corruption")
    with pytest.raises(
        ValueError, match=r"needs \d+ more ids than the 257 .* data.target_len = 24"
    ):
        opened(numbered(60, 60), vocab_size=257, seq_len=64, target_len=24, objective="ul2")


def test_esm2_has_the_published_vocabulary():
    tokenizer = load_tokenizer("esm2")
    (ids,) = tokenizer.encode(["MKTVRQERLKSIVRILERSKEPVSGAQLAEELSVSRQVIVQDIAYLRSLGYNIVATPRGYVLAGG"])
    # What the tokenizer of the published models gives for the protein of their example.
    assert ids[:12].tolist() == [20, 15, 11, 7, 10, 16, 9, 10, 4, 15, 8, 12]
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.boundary, tokenizer.mask) == (
        33,
        0,
        2,
        32,
    )
    assert tokenizer.special["<pad>"] == 1
    assert tokenizer.encode(["XBUZO.-jé*"])[0].tolist() == [*range(24, 31), 3, 3, 3]
    assert tokenizer.decode([0, 20, 15, 2]) == "MK"
    assert tokenizer.encode(["mk"])[0].tolist() == [20, 15]


def test_proteins_are_masked_between_their_ends(tmp_path):
    file = tmp_path / "a.fasta"
    file.write_text("".join(f">p{i}\n{'MKTVRQERLK' * (1 + i % 3)}\nGG\n" for i in range(30)))
    tokenizer = load_tokenizer("esm2")
    config = DataConfig(source=(str(file),), objective="masked", seq_len=64, heldout=0)
    dataset = open_dataset(config, tokenizer, split="train", vocab_size=33)
    rows = stack([dataset[i] for i in range(len(dataset))])
    counted = rows.weights > 0
    assert counted.sum() == sum(round(0.15 * n) for n in (rows.targets > 3).sum(axis=1))
    assert not np.isin(rows.targets[counted], [0, 1, 2]).any()
    assert (rows.tokens[counted] == 32).mean() == pytest.approx(0.8, abs=0.1)
    changed = rows.tokens[counted & (rows.tokens != 32)]
    assert ((changed >= 4) & (changed <= 30)).all()
    starts = rows.positions[(rows.segments > 0) & (rows.tokens == 0)]
    assert (starts == 0).all()
    ends = (rows.tokens == 2) & (rows.segments > 0)
    assert ends.sum() == 30
    assert (rows.targets[~counted] == rows.tokens[~counted]).all()


def test_sentinels_of_the_tokenizer_come_first():
    own = VOCABULARY._replace(sentinels=tuple(range(999, 899, -1)))
    objective = find_objective("span_corruption", 64, 24)
    window = make_window([objective.window])
    found = objective.example(window, uniform(0, 0), own)
    plain = objective.example(window, uniform(0, 0), VOCABULARY)
    marks = plain.targets >= 1000
    np.testing.assert_array_equal(found.targets[~marks], plain.targets[~marks])
    np.testing.assert_array_equal(found.targets[marks], 999 - (1299 - plain.targets[marks]))
    assert BYTES.sentinels == ()
