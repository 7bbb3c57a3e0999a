"""Logits are those of Hugging Face's transformers, for every family and setting."""

import jax
import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.models.decoder import Decoder, plain_kernels
from tests.model_families.golden import NAMES, make_params, open_golden, read_arrays


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    config, family = open_golden(name)
    model = Decoder(config, plain_kernels())
    params = make_params(model, family, read_arrays(name, "model.safetensors"))
    expected = read_arrays(name, "expected.safetensors")
    tokens, mask, positions = (expected[key] for key in ("tokens", "mask", "positions"))

    def forward(params):
        batch = Batch(tokens, tokens, mask, positions, mask)
        x = model.embed(params["embed"], batch)
        for index in range(config.num_layers):
            layer = jax.tree.map(lambda leaf: leaf[index], params["layers"])  # noqa: B023
            x = model.block(layer, x, batch, index % config.period)
        return model.logits(model.head_params(params), x)

    compiled = jax.jit(forward, compiler_options={"xla_backend_optimization_level": 0})
    logits = np.asarray(compiled(params))
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits[mask > 0], expected["logits"][mask > 0], rtol=0, atol=1e-4)
