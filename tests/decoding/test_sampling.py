"""Sampling: the cache changes nothing, batches and layouts change nothing, draws are the filtered
distribution's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.config import Config, DataConfig
from jaxscale.config.layout import Layout
from jaxscale.config.model import ModelConfig
from jaxscale.data.tokens.tokenizer import Tokenizer
from jaxscale.decoding import cache, sampling
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.models.forward import forward
from jaxscale.models.protocol import head_params
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import Engine, make_engine
from jaxscale.training.kernels import evaluation_kernels
from tests.models import experts

SIZES = {
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 48,
    "param_dtype": "float64",
    "compute_dtype": "float64",
}
LLAMA = ModelConfig(**SIZES, vocab_size=20, qk_norm=True, sliding_window=5)
GPT = ModelConfig(
    **SIZES, vocab_size=20, family="gpt", tied_embeddings=True, max_seq_len=30, logit_soft_cap=30.0
)
WINDOWS = {"sliding_window": 4, "layer_pattern": "LG"}
LOCAL = ModelConfig(**{**SIZES, **WINDOWS, "num_layers": 3}, vocab_size=20, family="gemma3")
PARALLEL = ModelConfig(**SIZES, vocab_size=20, family="gpt_neox")
EXPERTS = ModelConfig(
    **SIZES
    | experts.EVERYTHING
    | experts.LATENT_ATTENTION
    | {"num_layers": 3, "capacity_factor": 0.5},
    vocab_size=20,
    family="tests.models.experts:make",
)
ADAPTED = dataclasses.replace(
    EXPERTS,
    lora_rank=3,
    lora_targets="q_down,q_plain,q_turned,kv_down,k_turned,k_plain,v,out,up,gate,down",
)

LETTERS = "abcdefgh"
BOUNDARY = len(LETTERS)


def encode(texts):
    return [np.array([LETTERS.index(letter) for letter in text], np.int32) for text in texts]


def decode(ids):
    """Refuses what this tokenizer does not have, though the model does."""
    return "".join((LETTERS + "|")[i] for i in ids).replace("|", "")


TOKENIZER = Tokenizer(len(LETTERS) + 1, BOUNDARY, np.ones(9), "letters", encode, decode)
PROMPTS = ["abc", "", "hgfedcbahgfe", "c"]
NUM_TOKENS = 18
"""With the longest prompt, they use every learned position of GPT."""


@functools.cache
def fresh(config: ModelConfig) -> dict:
    """Parameters whose texts are not dull: one ends early, and no two are equal."""
    rng = np.random.default_rng(4)
    shapes = jax.eval_shape(Decoder(config, plain_kernels()).init, jax.random.key(0))
    return jax.tree.map(lambda leaf: 0.3 * rng.normal(size=leaf.shape), shapes)


def make(model: ModelConfig, **layout) -> tuple[Engine, dict]:
    chosen = Layout(**{"data": 1, **layout})
    data = DataConfig(global_batch_size=chosen.batch_shards, seq_len=16)
    config = Config(model, data, layout=chosen)
    engine = make_engine(config, make_mesh(chosen, jax.devices()[: chosen.num_devices]))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, engine.abstract_state.params)
    return engine, jax.device_put(fresh(model), shardings)


@functools.cache
def one_device(config: ModelConfig) -> tuple[Engine, dict]:
    return make(config)


def full_logits(config: ModelConfig, tokens_BT) -> np.ndarray:
    """The forward pass of training, over whole sequences."""
    padding = ((0, 0), (0, 40 - tokens_BT.shape[1]))  # one shape for all; nobody sees what follows
    logits_BTV = _full_logits(config, fresh(config), np.pad(tokens_BT, padding))
    return np.asarray(logits_BTV)[:, : tokens_BT.shape[1]]


@functools.partial(jax.jit, static_argnums=0)
def _full_logits(config, params, tokens_BT):
    kernels = evaluation_kernels(plain_kernels())  # text drops no choice of an expert
    model, shape = Decoder(config, kernels), tokens_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    ones = jnp.ones(shape, jnp.int32)
    batch = Batch(tokens_BT, tokens_BT, ones, positions_BT, ones)
    return model.logits(head_params(model, params), forward(model, params, batch)["x"])


@pytest.mark.proof
@pytest.mark.parametrize(
    "config",
    [LLAMA, GPT, LOCAL, PARALLEL, EXPERTS, ADAPTED],
    ids=["llama", "gpt", "local", "parallel", "latent and experts", "adapted"],
)
def test_the_cache_gives_the_logits_of_the_forward_pass(config):
    model, params = Decoder(config, plain_kernels()), fresh(config)
    tokens_BT = np.random.default_rng(0).integers(0, config.vocab_size, (2, 14))

    @jax.jit
    def read(params, tokens_BT, positions_BT, cache):
        x_BTD, cache = model.decode(params, tokens_BT, positions_BT, cache)
        return model.logits(head_params(model, params), x_BTD), cache

    cache, found = model.empty_cache(2, 16), []
    # Ten tokens at a time, then one by one.
    for begin, end in [(0, 10), *((i, i + 1) for i in range(10, 14))]:
        positions_BT = np.broadcast_to(np.arange(begin, end), (2, end - begin))
        logits_BTV, cache = read(params, tokens_BT[:, begin:end], positions_BT, cache)
        found.append(logits_BTV)
    expected = full_logits(config, tokens_BT)
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, rtol=0, atol=1e-10)
    assert expected.std() > 0.1


def check_likeliest(config: ModelConfig, prompt: str, text: str, num_tokens: int):
    """Each token of `text`, and its end, is what the forward pass finds likeliest there."""
    ids = np.concatenate([[BOUNDARY], *encode([prompt + text])])
    ended = len(text) < num_tokens
    expected = np.append(ids[1 + len(prompt) :], [BOUNDARY] * ended)
    logits_TV = full_logits(config, ids[None])[0, len(prompt) :, : TOKENIZER.vocab_size]
    np.testing.assert_array_equal(logits_TV[: len(expected)].argmax(-1), expected)


@pytest.mark.proof
@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_greedy_text_is_what_the_forward_pass_finds_likeliest(config):
    """Prompts of different lengths in one batch; some texts end before `num_tokens`."""
    engine, params = one_device(config)
    texts = sampling.sample(
        engine, params, TOKENIZER, PROMPTS, num_tokens=NUM_TOKENS, temperature=0
    )
    for prompt, text in zip(PROMPTS, texts):
        check_likeliest(config, prompt, text, NUM_TOKENS)
    assert len(set(texts)) == len(texts)


@pytest.mark.proof
def test_a_long_prompt_is_read_in_parts(monkeypatch):
    monkeypatch.setattr(cache, "CHUNK", 8)
    engine, params = one_device(LLAMA)
    prompts = ["abcdefghaabbccddeeffgg", "b"]
    texts = sampling.sample(engine, params, TOKENIZER, prompts, num_tokens=9, temperature=0)
    for prompt, text in zip(prompts, texts):
        check_likeliest(LLAMA, prompt, text, 9)


@pytest.mark.proof
def test_it_stops_when_every_text_has_ended(monkeypatch):
    monkeypatch.setattr(sampling, "_continuation", lambda tokenizer, row, length: row[length:])
    engine, params = one_device(LLAMA)
    for seed in range(20):
        rows = np.array(
            sampling.sample(
                engine,
                params,
                TOKENIZER,
                PROMPTS,
                num_tokens=NUM_TOKENS,
                temperature=3.0,
                seed=seed,
            )
        )
        ends = [row.tolist().index(BOUNDARY) for row in rows if BOUNDARY in row]
        if len(ends) == len(rows) and max(ends) < NUM_TOKENS - 4:
            # What was not drawn is as it was: filled with the boundary.
            assert (rows[:, max(ends) + 1 :] == BOUNDARY).all()
            return
    pytest.fail("no seed ends every text early")


@pytest.mark.proof
def test_a_prompt_alone_goes_on_as_in_a_batch():
    engine, params = one_device(LLAMA)
    sample = functools.partial(sampling.sample, engine, params, TOKENIZER, num_tokens=NUM_TOKENS)
    for settings in ({"temperature": 0}, {"temperature": 1.5, "seed": 5}):
        together = sample(PROMPTS, **settings)
        assert [sample([prompt], **settings)[0] for prompt in PROMPTS] == together


@pytest.mark.proof
@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (LLAMA, {"data": 2, "fsdp": 2, "tensor": 2, "zero_stage": 3}),
        (LLAMA, {"tensor": 4}),  # more ranks than key heads
        # Here fsdp splits both the rows and the weights.
        (LLAMA, {"fsdp": 2, "tensor": 2, "zero_stage": 3}),
        (LLAMA, {"fsdp": 8, "zero_stage": 1}),  # more replicas than prompts
        (EXPERTS, {"fsdp": 2, "expert": 2, "tensor": 2}),
    ],
    ids=lambda value: value.family if isinstance(value, ModelConfig) else str(value),
)
def test_a_layout_changes_no_text(config, layout, capfd):
    found = []
    for engine, params in (one_device(config), make(config, **layout)):
        sample = functools.partial(
            sampling.sample, engine, params, TOKENIZER, num_tokens=NUM_TOKENS
        )
        settings = ({"temperature": 0}, {"temperature": 1.5, "seed": 3}, {"top_p": 0.8})
        found.append([sample(PROMPTS, **each) for each in settings])
    assert found[0] == found[1]
    # Nor do other neighbours and another place, of a batch of the same shape.
    others = ["gfedcbahgfec", "c", "dd", "abc"]
    texts = dict(zip(others, sample(others, temperature=1.5, seed=3)))
    for prompt in ("c", "abc"):
        assert texts[prompt] == found[0][1][PROMPTS.index(prompt)]
    # With whole key heads and sharded query heads, the partitioner gathers a token's;
    # and it gathers experts, of which the loop over blocks takes one at a time.
    gathers = layout == {"tensor": 4} or config is EXPERTS
    assert gathers or "rematerialization" not in capfd.readouterr().err


def test_the_seed_decides_and_settings_compile_nothing():
    engine, params = one_device(LLAMA)
    sample = functools.partial(sampling.sample, engine, params, TOKENIZER, temperature=1.0)
    texts = sample(["ab"] * 4, num_tokens=NUM_TOKENS)
    assert len(set(texts)) == 4, "the same prompt four times is drawn four times"
    compiled = sampling._extend._cache_size()
    assert sample(["ab"] * 4, num_tokens=NUM_TOKENS) == texts
    assert sample(["ab"] * 4, num_tokens=NUM_TOKENS, seed=1) != texts
    shorter = sample(["ab"] * 4, num_tokens=15)
    assert shorter == [text[:15] for text in texts]
    sample(["abcde", "", "a", "b"], num_tokens=12, top_k=2, top_p=0.5)
    assert sampling._extend._cache_size() == compiled


def test_top_k_of_one_is_greedy():
    engine, params = one_device(LLAMA)
    sample = functools.partial(
        sampling.sample, engine, params, TOKENIZER, PROMPTS, num_tokens=NUM_TOKENS
    )
    assert sample(temperature=2.0, top_k=1) == sample(temperature=0)


P = np.array([0.1, 0.4, 0.05, 0.3, 0.15])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "expected"),
    [
        (1.0, 5, 1.0, P),
        (2.0, 5, 1.0, np.sqrt(P)),
        (0.5, 5, 1.0, P**2),
        (1.0, 2, 1.0, [0, 0.4, 0, 0.3, 0]),
        (1.0, 1, 1.0, [0, 1, 0, 0, 0]),
        (1.0, 5, 0.39, [0, 1, 0, 0, 0]),  # never empty
        (1.0, 5, 0.41, [0, 0.4, 0, 0.3, 0]),
        (1.0, 5, 0.75, [0, 0.4, 0, 0.3, 0.15]),
        (1.0, 5, 0.9999, P),
        # The share is of what the temperature (squared: 0.55, 0.31, 0.08, ...) and top-k leave.
        (0.5, 5, 0.5, [0, 1, 0, 0, 0]),
        (1.0, 2, 0.5, [0, 1, 0, 0, 0]),
        (1.0, 3, 0.6, [0, 0.4, 0, 0.3, 0]),
    ],
)
def test_the_distribution_is_exact(temperature, top_k, top_p, expected):
    # Logits are log-probabilities up to a constant.
    logits_BV = jnp.log(jnp.array([P, P[::-1]])) + 7
    found = jax.nn.softmax(sampling.filtered_logits(logits_BV, temperature, top_k, top_p))
    expected = np.array(expected) / np.sum(expected)
    np.testing.assert_array_equal(np.asarray(found[0]) > 0, expected > 0)
    np.testing.assert_allclose(found, [expected, expected[::-1]], rtol=1e-12)


@pytest.mark.proof
def test_nothing_unlikely_is_lost_when_everything_is_wanted():
    logits_BV = jnp.array([[0.0, -40.0, -80.0]], jnp.float32)
    found = sampling.filtered_logits(logits_BV, 1.0, 3, 1.0)
    np.testing.assert_array_equal(found, logits_BV)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_tokens": 0}, "--num_tokens = 0 is too small; at least 1"),
        ({"temperature": -0.1}, "--temperature = -0.1 must be at least 0"),
        ({"temperature": float("nan")}, "--temperature = nan must be at least 0"),
        ({"top_k": -1}, "--top_k = -1 is too small; at least 0"),
        ({"top_k": 10}, r"--top_k = 10 .* at most the 9 tokens of the vocabulary"),
        ({"top_p": 0.0}, "--top_p = 0.0 must be above 0"),
        ({"top_p": 1.01}, "--top_p = 1.01 must be above 0 and at most 1"),
        ({"seed": -1}, "--seed = -1 must be at least 0"),
        ({"prompts": []}, "no prompt; give --prompt TEXT"),
        (
            {"prompts": PROMPTS, "num_tokens": NUM_TOKENS + 1},
            r"prompt of 13 tokens and --num_tokens 19 need 31 .* model.max_seq_len = 30",
        ),
    ],
)
def test_bad_settings_are_refused(settings, message):
    engine, params = one_device(GPT)
    settings = {"prompts": ["a"], "num_tokens": 1, **settings}
    with pytest.raises(ValueError, match=message):
        sampling.sample(engine, params, TOKENIZER, **settings)


def test_texts_beyond_the_memory_of_the_host_are_refused_before_anything_is_compiled(monkeypatch):
    engine, params = one_device(GPT)
    monkeypatch.setattr(cache, "host_memory_bytes", lambda: 1000)
    monkeypatch.setattr(sampling, "_extend", lambda *_, **__: pytest.fail("it began"))
    with pytest.raises(ValueError, match=r"2 texts of \d+ tokens need .* lower --num_tokens"):
        sampling.sample(engine, params, TOKENIZER, ["a", "a"], num_tokens=3)


@pytest.mark.proof
def test_several_ends_stop_strings_and_a_first_token():
    """Each ends a text where it appears first; ids of a prompt are taken as they are."""
    engine, params = one_device(LLAMA)

    def sample(prompts, tokenizer=TOKENIZER, **settings):
        settings = {"num_tokens": NUM_TOKENS, "temperature": 0} | settings
        return sampling.sample(engine, params, tokenizer, prompts, **settings)

    whole = sample(PROMPTS)
    longest = max(whole, key=len)
    middle = longest[len(longest) // 2]
    end = LETTERS.index(middle)
    several = dataclasses.replace(TOKENIZER, ends=(end,))
    assert sample(PROMPTS, several) == [text.partition(middle)[0] for text in whole]
    pair = longest[2:4]
    assert sample(PROMPTS, stop=["never", pair, middle]) == [
        min((text.partition(s)[0] for s in (pair, middle)), key=len) for text in whole
    ]
    special = dataclasses.replace(TOKENIZER, special={"<|end|>": end})
    assert sample(PROMPTS, special, stop=["<|end|>"]) == sample(PROMPTS, several)
    begun = dataclasses.replace(TOKENIZER, bos=0)
    ids = [np.append(0, *encode([prompt])) for prompt in PROMPTS]
    assert sample(PROMPTS, begun) == sample(ids)
    assert sample(PROMPTS, begun) != whole
    with pytest.raises(ValueError, match="--stop '' is in every text"):
        sample(PROMPTS, stop=["a", ""])
