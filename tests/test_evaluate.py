"""Held-out loss: the plain mean over all held-out tokens, on any layout."""

import json
import math

import jax
import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.config import Config, DataConfig
from jaxscale.config.layout import Layout
from jaxscale.config.model import ModelConfig
from jaxscale.data.dataset import Dataset, open_dataset
from jaxscale.data.tokens.tokenizer import load_tokenizer
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.models.protocol import head_params
from jaxscale.run.evaluation import Evaluation, evaluate_loss
from jaxscale.run.metrics import null_where_not_finite
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import Engine, make_engine

MODEL = ModelConfig(
    num_layers=2,
    d_model=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=48,
    vocab_size=257,
    z_loss=1e-3,
    param_dtype="float64",
    compute_dtype="float64",
)
BATCH, SEQ_LEN = 4, 16


@pytest.fixture(scope="session")
def heldout(tmp_path_factory) -> Dataset:
    """Documents of many lengths; their windows do not fill the last batch."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(12):
        (folder / f"{i}.txt").write_text("häöüß, "[: 1 + i % 7] * (1 + i))
    config = DataConfig(source=(f"{folder}/*.txt",), seq_len=SEQ_LEN, heldout=0.5)
    dataset = open_dataset(config, load_tokenizer("bytes"), split="heldout")
    assert len(dataset) % BATCH
    assert dataset.num_tokens % SEQ_LEN
    return dataset


def make(**layout) -> tuple[Engine, dict]:
    chosen = Layout(**{"data": 1, **layout})
    config = Config(MODEL, DataConfig(global_batch_size=BATCH, seq_len=SEQ_LEN), layout=chosen)
    engine = make_engine(config, make_mesh(chosen, jax.devices()[: chosen.num_devices]))
    rng = np.random.default_rng(0)

    def one(leaf):
        return jax.device_put(0.3 * rng.normal(size=leaf.shape), leaf.sharding)

    return engine, jax.tree.map(one, engine.abstract_state.params)


def plain_evaluation(params, heldout: Dataset, windows: range) -> Evaluation:
    """From the logits of whole windows, one number per token."""
    model = Decoder(MODEL, plain_kernels())

    @jax.jit
    def log_probabilities(params, batch):
        x_BTD = model.embed(params["embed"], batch)
        x_BTD, _ = jax.lax.scan(
            lambda x, layer: (model.block(layer, x, batch), None), x_BTD, params["layers"]
        )
        return jax.nn.log_softmax(model.logits(head_params(model, params), x_BTD))

    batch = Batch(*(np.stack(field) for field in zip(*(heldout[i][:5] for i in windows))))
    found_BTV = np.asarray(log_probabilities(jax.tree.map(np.asarray, params), batch))
    real = batch.weights > 0
    loss = -np.take_along_axis(found_BTV, batch.targets[..., None], -1)[real].mean()
    num_bytes = sum(target < 256 for target in batch.targets[real])
    return Evaluation(float(loss), int(real.sum()), float(num_bytes))


@pytest.mark.proof(but=("{'fsdp': 2, 'context': 2, 'zero_stage': 1, 'microbatches': 2}",))
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"data": 2, "fsdp": 2, "tensor": 2, "zero_stage": 3},
        {"fsdp": 2, "context": 2, "zero_stage": 1, "microbatches": 2},
    ],
    ids=str,
)
def test_it_is_the_mean_over_every_heldout_token(layout, heldout):
    engine, params = make(**layout)
    found = evaluate_loss(engine, params, heldout, BATCH)
    expected = plain_evaluation(params, heldout, range(len(heldout)))
    assert found.tokens == expected.tokens == heldout.num_tokens
    assert found.num_bytes == expected.num_bytes
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    bits = expected.loss * expected.tokens / math.log(2)
    assert found.bits_per_byte == pytest.approx(bits / expected.num_bytes, rel=1e-12)
    assert found.perplexity == pytest.approx(math.exp(expected.loss), rel=1e-10)


def test_some_batches_are_the_first_ones(heldout):
    engine, params = make()
    found = evaluate_loss(engine, params, heldout, BATCH, max_batches=2)
    expected = plain_evaluation(params, heldout, range(2 * BATCH))
    assert found.tokens == expected.tokens == 2 * BATCH * SEQ_LEN
    # A document is cut off there, so that its boundary is among the inputs and not the targets.
    assert found.num_bytes == expected.num_bytes
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)


def test_a_loss_beyond_what_an_exponential_holds_ends_no_run():
    found = Evaluation(loss=710.0, tokens=8, num_bytes=8.0)
    assert found.record()["eval_perplexity"] == math.inf
    text = json.dumps(null_where_not_finite(found.record("code")), allow_nan=False)
    assert json.loads(text)["eval_perplexity/code"] is None
