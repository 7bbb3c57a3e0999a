"""Prompt tuning: trained vectors before each text, exact under packing and in the cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.config.model import ModelConfig
from jaxscale.data.objectives import causal
from jaxscale.data.packing import Vocabulary, Window
from jaxscale.data.prompts import with_prompts
from jaxscale.decoding.likelihood import log_likelihoods
from jaxscale.decoding.prompts import encode_prompts
from jaxscale.decoding.sampling import sample
from jaxscale.models.adapters.prompt import initial_ids, with_initial_prompt
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.models.embedding import Embedding
from jaxscale.models.forward import forward
from jaxscale.models.protocol import head_params
from jaxscale.models.weights import params_of
from jaxscale.run.pretrained import Pretrained
from jaxscale.sharding.resolve import leaf_name
from tests.decoding.test_sampling import BOUNDARY, SIZES, TOKENIZER, encode, fresh, make

COUNT, VOCABULARY = 3, 20
PROMPTED = ModelConfig(**SIZES, vocab_size=VOCABULARY, prompt_tokens=COUNT, sliding_window=7)
SIDE = ModelConfig(**SIZES, vocab_size=VOCABULARY, side_width=4)
VIRTUAL = tuple(range(VOCABULARY, VOCABULARY + COUNT))


@functools.partial(jax.jit, static_argnums=0)
def logits(model: Decoder, params, batch: Batch) -> jax.Array:
    return model.logits(head_params(model, params), forward(model, params, batch)["x"])


def packed(texts: list[list[int]]) -> Batch:
    """A row of documents with their prompts."""
    ids = np.concatenate([*texts, [BOUNDARY]]).astype(np.int32)
    window = Window(ids, np.cumsum([0, *map(len, texts)]))
    vocabulary = Vocabulary(BOUNDARY + 1, BOUNDARY, VOCABULARY, prompt=VIRTUAL)
    row = with_prompts(causal(window, lambda n: np.zeros(n), vocabulary), vocabulary)
    return Batch(*(field[None] for field in row[:5]))


def test_packed_documents_are_those_alone_and_only_the_prompt_has_a_gradient():
    """And the prompt replaces embeddings: the vectors of tokens give what these tokens would."""
    model, params = Decoder(PROMPTED, plain_kernels()), fresh(PROMPTED)
    texts = [[BOUNDARY, 1, 2, 3, 4], [BOUNDARY, 5], [BOUNDARY, 6, 7]]
    row = packed(texts)
    found = logits(model, params, row)
    alone = Pretrained(PROMPTED, params, model)
    padded = np.zeros((len(texts), max(map(len, texts))), np.int32)  # nobody sees what follows
    for line, text in zip(padded, texts):
        line[: len(text)] = text
    expected, begin = alone(padded), 0
    for line, text in zip(expected, texts):
        begin += COUNT
        end = begin + len(text)
        np.testing.assert_allclose(found[0, begin:end], line[: len(text)], rtol=0, atol=1e-5)
        begin = end

    def loss(params):
        trained = jax.tree_util.tree_map_with_path(
            lambda path, x: jax.lax.stop_gradient(x) if leaf_name(path) in model.frozen else x,
            params,
        )
        return model.loss(head_params(model, trained), forward(model, trained, row), row)["loss"]

    grads = jax.jit(jax.grad(loss))(params)
    moved = [
        leaf_name(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
        if np.abs(leaf).max() > 0
    ]
    assert moved == ["embed/prompt/rows"]
    # A vocabulary's own vectors as the prompt.
    plain = Decoder(dataclasses.replace(PROMPTED, prompt_tokens=0), plain_kernels())
    same = with_initial_prompt(PROMPTED, jax.tree.map(jnp.asarray, params))
    ids = row.tokens.copy()
    for place, token in enumerate(initial_ids(PROMPTED)):
        ids[ids == VOCABULARY + place] = token
    bare = {**same, "embed": {"tokens": same["embed"]["tokens"]}}
    np.testing.assert_array_equal(
        logits(model, same, row), logits(plain, bare, row._replace(tokens=ids))
    )


def test_a_new_prompt_is_rows_of_the_embedding():
    assert initial_ids(PROMPTED).tolist() == [0, 10, 19]
    embed = params_of(Embedding(PROMPTED, jax.random.key(0)))
    rows = embed["prompt"]["rows"]
    np.testing.assert_array_equal(rows, embed["tokens"][initial_ids(PROMPTED)])
    assert with_initial_prompt(SIDE, {"embed": {}}) == {"embed": {}}


def plainly(config: ModelConfig, params, first: str, second: str) -> float:
    """The log-probability of a text by the forward pass."""
    ids = np.concatenate([[BOUNDARY], *encode([first, second])]).astype(np.int32)
    model = Decoder(config, plain_kernels())
    scores = Pretrained(config, params, model)(ids[None, :-1])[0]
    log_p = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return float(sum(log_p[i, ids[i + 1]] for i in range(len(first), len(ids) - 1)))


@pytest.mark.proof
@pytest.mark.parametrize("config", [PROMPTED, SIDE], ids=["PROMPTED", "SIDE"])
def test_the_cache_scores_and_generates_as_the_forward_pass(config):
    tokenizer = dataclasses.replace(TOKENIZER, prompt=VIRTUAL[: config.prompt_tokens])
    engine, params = make(config)
    pairs = [("abc", "de"), ("", "abca")]
    found = log_likelihoods(engine, params, tokenizer, pairs)
    expected = [plainly(config, params, *pair) for pair in pairs]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)  # logits are float32
    _, (ids,) = encode_prompts(engine, tokenizer, ["abc"])
    assert ids.tolist() == [*tokenizer.prompt, BOUNDARY, *encode(["abc"])[0]]
    (text,) = sample(engine, params, tokenizer, ["abc"], num_tokens=4, temperature=0)
    model = Decoder(config, plain_kernels())
    chosen = np.concatenate([[BOUNDARY], *encode(["abc" + text])]).astype(np.int32)
    scores = Pretrained(config, params, model)(chosen[None])[0, 3 : 3 + len(text), : BOUNDARY + 1]
    np.testing.assert_array_equal(np.argmax(scores, -1), chosen[4:])


def test_what_a_prompt_refuses():
    engine, params = make(PROMPTED)
    tokenizer = dataclasses.replace(TOKENIZER, prompt=VIRTUAL)
    beyond = np.array([VOCABULARY + COUNT])
    with pytest.raises(ValueError, match=r"below model.vocab_size = 20 \+ model.prompt_tokens = 3"):
        encode_prompts(engine, tokenizer, [beyond])
    model = Decoder(PROMPTED, plain_kernels())
    with pytest.raises(ValueError, match="pass one text in each row, without padding"):
        Pretrained(PROMPTED, params, model)([[1, 2]], segments=jnp.array([[1, 0]]))
    rows = np.full((1, 16), VOCABULARY + COUNT, np.int32)
    batch = Batch(rows, 0 * rows, 1 + 0 * rows, 0 * rows, np.ones((1, 16), np.float32))
    with pytest.raises(ValueError, match=r"20 \+ model.prompt_tokens = 3"):
        engine.shard(batch)
