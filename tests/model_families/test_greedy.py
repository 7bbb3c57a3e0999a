"""Text that `generate` of transformers finds likeliest, token for token."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from jaxscale.config import Config, DataConfig
from jaxscale.config.layout import Layout
from jaxscale.data.tokens.tokenizer import Tokenizer
from jaxscale.decoding.sampling import sample
from jaxscale.run.pretrained import from_pretrained
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/greedy.json"))
FIRST = ord("A")
"""The letter of id 0."""


def letters(ids):
    return "".join(chr(FIRST + i) for i in ids)


def greedy(model, prompts):
    """The ids after each prompt, at most 16, through the cache."""
    config = dataclasses.replace(model.config, attention="auto")
    data = DataConfig(global_batch_size=1, seq_len=16)
    if config.num_encoder_layers:
        data = dataclasses.replace(data, target_len=16, objective="span_corruption")
    config = Config(config, data, layout=Layout(data=1))
    engine = make_engine(config, make_mesh(config.layout, jax.devices()[:1]))
    end, size = 1 + (not config.model.num_encoder_layers), config.model.vocab_size
    tokenizer = Tokenizer(
        size, end, np.ones(size), "letters", lambda _: [], letters, special={"<pad>": 0}
    )
    ids = [np.array(prompt) for prompt in prompts]
    texts = sample(engine, model.params, tokenizer, ids, num_tokens=16, temperature=0)
    return [[ord(letter) - FIRST for letter in text] for text in texts]


@pytest.mark.proof
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_that_of_transformers(name):
    """Prompts of several lengths in one batch."""
    golden = json.loads((GOLDENS / name / "greedy.json").read_text())
    with jax.enable_x64(False):
        model = from_pretrained(GOLDENS / name)
        larger = jax.tree.map(lambda x: golden["scale"] * x, model.params)
        found = greedy(dataclasses.replace(model, params=larger), golden["prompts"])
    assert found == golden["texts"]


@pytest.mark.proof
def test_positions_of_a_text_are_those_of_its_length():
    """Its first tokens, too, though they are within the original context, 16 tokens."""
    prompt = [57, 43, 35, 20]  # after which the short factors write another text
    with jax.enable_x64(False):
        model = from_pretrained(GOLDENS / "phi3_long")
        (found,) = greedy(model, [prompt])
        logits = np.asarray(model([prompt + found]))[0, len(prompt) - 1 : -1]
    assert len(found) == 16
    assert logits.argmax(-1).tolist() == found
