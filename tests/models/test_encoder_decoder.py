"""Packed texts of an encoder-decoder."""

import jax
import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.config.model import ModelConfig
from jaxscale.models.decoder import plain_kernels
from jaxscale.models.encoder_decoder import EncoderDecoder
from jaxscale.models.forward import forward

SIZES = {"num_layers": 2, "num_encoder_layers": 3, "d_model": 16, "num_heads": 4, "head_dim": 8}
T5 = ModelConfig(
    family="t5",
    d_ff=24,
    vocab_size=60,
    relative_buckets=8,
    relative_max_distance=12,
    compute_dtype="float64",
    param_dtype="float64",
    **SIZES,
)
MODEL = EncoderDecoder(T5, plain_kernels())
SOURCE, TARGET = 16, 8


def make_batch(source: np.ndarray, target: np.ndarray) -> Batch:
    """One row, from tokens and segments [2, time] of encoder and decoder."""
    zeros = np.zeros_like(target[:1])
    extras = dict(zip(("encoder_tokens", "encoder_segments"), (source[:1], source[1:])))
    extras["encoder_positions"] = np.zeros_like(source[:1])
    return Batch(target[:1], target[:1], target[1:], zeros, np.ones(target[:1].shape), extras)


def place(length: int, *texts: tuple[int, int, int]) -> np.ndarray:
    """Tokens and segments of texts (first token, number, segment), then padding."""
    parts = [np.array([np.arange(n) + first, np.full(n, k)]) for first, n, k in texts]
    joined = np.concatenate(parts, axis=1)
    return np.pad(joined, ((0, 0), (0, length - joined.shape[1]))).astype(np.int32)


@pytest.mark.proof
def test_a_packed_text_is_as_alone_in_its_row():
    params = jax.jit(MODEL.init)(jax.random.key(0))
    run = jax.jit(lambda batch: forward(MODEL, params, batch)["x"])
    sources, targets = ((3, 6, 1), (20, 7, 2)), ((5, 4, 1), (30, 3, 2))
    packed = run(make_batch(place(SOURCE, *sources), place(TARGET, *targets)))[0]
    begin = 0
    for source, target in zip(sources, targets):
        alone = run(make_batch(place(SOURCE, source), place(TARGET, target)))[0]
        count = target[1]
        np.testing.assert_allclose(packed[begin : begin + count], alone[:count], rtol=1e-12)
        begin += count
    other = run(make_batch(place(SOURCE, (9, 6, 1)), place(TARGET, targets[0])))[0]
    assert np.abs(other[:4] - packed[:4]).max() > 1e-3, "the decoder reads the encoder"
