"""The plain model that benchmarks compare with is the same model: same parameters, same loss."""

import importlib
import pathlib

import jax
import numpy as np
import pytest
from flax import nnx

from jaxscale import config
from jaxscale.data.synthetic import synthetic_batch
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine

SETTINGS = (
    "layout.data=1",
    "model.compute_dtype=float64",
    "model.param_dtype=float64",
    "optimizer.accumulation_dtype=float64",
    "optimizer.moment_dtype=float64",
    "optimizer.second_moment_dtype=float64",
    "optimizer.weight_decay=0",  # ours spares vectors
)


@pytest.fixture
def baseline(monkeypatch):
    """The module of tools/bench, whose scripts import each other."""
    folder = pathlib.Path(__file__).parents[2] / "tools" / "bench"
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("baseline")


def as_plain(params, variant, num_layers):
    """Our tree of parameters under the names, and in the shapes, of the plain model."""
    layers, width = params["layers"], params["embed"]["tokens"].shape[-1]

    def layer(pick):
        attention, mlp = layers["attention"], layers["mlp"]
        matrices = {name: pick(attention[name]) for name in ("q", "k", "v")}
        flat = {name: m.reshape(*m.shape[:-2], -1) for name, m in matrices.items()}
        out = pick(attention["out"])
        flat["out"] = out.reshape(*out.shape[:-3], -1, width)
        flat |= {name: pick(mlp[name]) for name in ("gate", "up", "down")}
        norms = {
            name: {"scale": pick(layers[name]["scale"])} for name in ("attention_norm", "mlp_norm")
        }
        return norms | {name: {"kernel": matrix} for name, matrix in flat.items()}

    return {
        "embed": {"embedding": params["embed"]["tokens"]},
        "layers": layer(lambda x: x)
        if variant == "scan"
        else {i: layer(lambda x, i=i: x[i]) for i in range(num_layers)},
        "norm": {"scale": params["head"]["norm"]["scale"]},
        "head": {"kernel": params["head"]["output"]},
    }


@pytest.mark.proof
@pytest.mark.parametrize("variant", [pytest.param("loop", marks=pytest.mark.slow), "scan"])
def test_the_plain_model_has_our_losses(baseline, variant):
    ours = config.load("configs/tiny.py", SETTINGS)
    engine = make_engine(ours, make_mesh(ours.layout, jax.devices()[:1]))
    state = engine.init(jax.random.key(0))
    case = baseline.build(ours, variant)
    plain = jax.tree.map(np.asarray, as_plain(state.params, variant, ours.model.num_layers))
    plain_state = case.init(jax.random.key(0))
    nnx.replace_by_pure_dict(plain_state.params, plain)
    batch = engine.shard(synthetic_batch(ours))
    for _ in range(2):
        state, metrics = engine.step(state, batch)
        plain_state, loss = case.step(plain_state, case.batch)
        # Rotary positions and logits of the plain model are float32.
        np.testing.assert_allclose(metrics.loss, loss, rtol=1e-6)


def test_the_plain_model_refuses_what_it_does_not_have(baseline):
    tied = config.load("configs/dense_tiny.py")
    with pytest.raises(ValueError, match="the default model options and adamw"):
        baseline.build(tied, "loop")
