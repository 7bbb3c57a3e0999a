"""Text that `generate` of transformers finds likeliest, token for token."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from jaxscale.config import Config, DataConfig
from jaxscale.data.tokens.tokenizer import Tokenizer
from jaxscale.layout import Layout
from jaxscale.run.pretrained import from_pretrained
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine
from jaxscale.training.sampling import sample

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/greedy.json"))
FIRST = ord("A")
"""The letter of id 0."""


def letters(ids):
    return "".join(chr(FIRST + i) for i in ids)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_that_of_transformers(name):
    """Prompts of several lengths in one batch, through the cache."""
    golden = json.loads((GOLDENS / name / "greedy.json").read_text())
    with jax.enable_x64(False):
        model = from_pretrained(GOLDENS / name)
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
        texts = sample(
            engine,
            jax.tree.map(lambda x: golden["scale"] * x, model.params),
            tokenizer,
            [np.array(ids) for ids in golden["prompts"]],
            num_tokens=16,
            temperature=0,
        )
    assert texts == [letters(ids) for ids in golden["texts"]]
