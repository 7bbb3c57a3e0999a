"""Text from an encoder-decoder: what the forward pass finds likeliest, alone and in a batch, in
every kind of layout; and the likelihood of a text after another."""

import dataclasses
import functools
import pathlib

import jax
import numpy as np
import pytest
import tokenizers

from jaxscale.config import Config, DataConfig
from jaxscale.config.layout import Layout
from jaxscale.data.tokens.tokenizer import Tokenizer, load_tokenizer
from jaxscale.decoding import cache, likelihood, prompts, sampling
from jaxscale.run.pretrained import Pretrained, from_pretrained
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import Engine, make_engine

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"
PAD, END = 0, 1
LETTERS = ".$" + "".join(map(chr, range(ord("A"), ord("A") + 65)))
"""Of all ids. A decoder may write the first, though it also begins with it; the second ends."""


def encode(texts):
    return [np.array([LETTERS.index(c) for c in text], np.int32) for text in texts]


def decode(ids):
    return "".join(LETTERS[i] for i in ids if i != END)


SPECIAL = {"<pad>": PAD, "</s>": END}
TOKENIZER = Tokenizer(67, END, np.ones(67), "letters", encode, decode, special=SPECIAL)
PROMPTS = ["ABC", "", "HGFEDCBAHGFEDCBAHG", "z", "aBcD", "cab"]
NUM_TOKENS = 12


@functools.cache
def golden(name: str) -> Pretrained:
    """In float64, with scaled parameters: no two texts are equal."""
    model = from_pretrained(GOLDENS / name, compute_dtype="float64", param_dtype="float64")
    return dataclasses.replace(model, params=jax.tree.map(lambda x: 2.0 * x, model.params))


def make(name: str, **layout) -> tuple[Engine, dict]:
    chosen = Layout(**{"data": 1, **layout})
    lengths = {"seq_len": 16, "target_len": 16, "objective": "span_corruption"}
    data = DataConfig(global_batch_size=chosen.batch_shards * chosen.microbatches, **lengths)
    settings = dataclasses.replace(golden(name).config, attention="auto")
    config = Config(settings, data, layout=chosen)
    engine = make_engine(config, make_mesh(chosen, jax.devices()[: chosen.num_devices]))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, engine.placement.canonical.params)
    params = jax.device_put(golden(name).params, shardings)  # as checkpoints give them
    return engine, engine.placement.part("params").from_canonical(params)


@functools.cache
def one_device(name: str) -> tuple[Engine, dict]:
    return make(name)


def full_logits(name: str, prompt: str, ids: list[int]) -> np.ndarray:
    """The forward pass of training: the logits after the decoder's start and each id."""
    source = np.append(encode([prompt])[0], END)
    width, length = 24, 16  # one shape for all
    segments = np.arange(width) < len(source)
    tokens = np.pad(np.array([PAD, *ids]), (0, length - 1 - len(ids)))
    logits = golden(name)(
        np.pad(source, (0, width - len(source)))[None], tokens[None], segments=segments[None]
    )
    return np.asarray(logits)[0, : len(ids) + 1]


def check_likeliest(name: str, prompt: str, text: str) -> None:
    """Each token of a text, and its end, is what the forward pass finds likeliest there."""
    ids = encode([text])[0].tolist()
    likeliest = full_logits(name, prompt, ids).argmax(-1).tolist()
    assert likeliest[: len(ids)] == ids
    assert len(ids) == NUM_TOKENS or likeliest[-1] == END


@pytest.mark.proof
@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_greedy_text_is_what_the_forward_pass_finds_likeliest(name):
    """Prompts of different lengths in one batch; some texts end before `num_tokens`."""
    engine, params = one_device(name)
    sample = functools.partial(
        sampling.sample, engine, params, TOKENIZER, num_tokens=NUM_TOKENS, temperature=0
    )
    texts = sample(PROMPTS)
    for prompt, text in zip(PROMPTS, texts):
        check_likeliest(name, prompt, text)
    assert len(set(texts)) == len(texts), "each prompt has another text"
    if name == "umt5":  # whose tables are in each layer
        assert any(len(text) < NUM_TOKENS for text in texts)
        assert [sample([prompt])[0] for prompt in PROMPTS[:2]] == texts[:2]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("t5", {"context": 2, "fsdp": 2, "tensor": 2, "zero_stage": 3}),
        ("umt5", {"pipeline": 2, "fsdp": 2, "tensor": 2, "microbatches": 2}),
    ],
    ids=str,
)
def test_a_layout_changes_no_text(name, layout, capfd):
    found = []
    for engine, params in (one_device(name), make(name, **layout)):
        sample = functools.partial(
            sampling.sample, engine, params, TOKENIZER, PROMPTS, num_tokens=NUM_TOKENS
        )
        found.append([sample(temperature=0), sample(temperature=1.5, seed=3, top_p=0.8, top_k=9)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.proof
def test_several_ends_and_stop_strings():
    engine, params = one_device("t5")
    sample = functools.partial(
        sampling.sample, engine, params, prompts=PROMPTS, num_tokens=NUM_TOKENS, temperature=0
    )
    whole = sample(TOKENIZER)
    middle = whole[0][NUM_TOKENS // 2]
    several = dataclasses.replace(TOKENIZER, ends=(LETTERS.index(middle),))
    expected = [text.partition(middle)[0] for text in whole]
    assert sample(several) == sample(TOKENIZER, stop=[middle]) == expected
    ids = [np.append(encode([prompt])[0], END) for prompt in PROMPTS]
    assert sample(TOKENIZER, prompts=ids) == whole


@pytest.mark.proof
def test_a_sentinel_in_a_prompt_is_read_as_in_training(tmp_path):
    names = ["<pad>", "</s>", "<extra_id_0>", "a", "b", "<unk>"]
    vocabulary = {name: i for i, name in enumerate(names)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(names[:3])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer, engine = load_tokenizer(str(tmp_path / "tokenizer.json")), one_device("t5")[0]
    for prompt, expected in (("a <extra_id_0> b", [3, 2, 4, END]), ("b a", [4, 3, END])):
        assert prompts.prompt_ids(engine, tokenizer, prompt).tolist() == expected
    (plain,) = tokenizer.encode(["a <extra_id_0> b"])  # as a document has it
    assert 2 not in plain


PAIRS = [("ABC", "d"), ("ABC", "hgfedC"), ("", "abcabc"), ("HGFEDCBAHGFEDCBAHG", "a"), ("c", "ab")]


@pytest.mark.proof
def test_log_likelihoods_are_those_of_the_forward_pass(monkeypatch):
    monkeypatch.setattr(likelihood, "ROWS", 4)  # two batches, the last not full
    monkeypatch.setattr(cache, "CHUNK", 4)  # the longest text is in two parts
    name = "umt5"
    engine, params = make(name, data=2, fsdp=2, tensor=2, zero_stage=3)
    found = likelihood.log_likelihoods(engine, params, TOKENIZER, PAIRS)
    for (first, second), value in zip(PAIRS, found):
        ids = encode([second])[0].tolist()
        logits_TV = full_logits(name, first, ids)
        log_p_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
        expected = sum(log_p_TV[i, token] for i, token in enumerate(ids))
        # The notebook's logits are rounded to float32.
        assert value == pytest.approx(expected, abs=1e-5)
