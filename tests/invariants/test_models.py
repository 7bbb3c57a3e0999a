"""Every kind of model gives the same losses, gradients and evaluations in every kind of layout."""

import dataclasses
import functools
import importlib.util
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.batch import Batch
from jaxscale.config import Config, from_dict
from jaxscale.models.decoder import plain_kernels
from jaxscale.models.protocol import Layer
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.step import find_model, make_engine
from tests.models import two_stacks

BATCH, SEQ_LEN, STEPS, VOCABULARY = 8, 16, 3, 64
FLOAT64 = {"compute_dtype": "float64", "param_dtype": "float64"}
SIZES = {"d_model": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "d_ff": 48}
OWN_MODEL = pathlib.Path("docs/my_model.py")


def import_own_model() -> str:
    """The model of docs/own_model.md, as a family."""
    if OWN_MODEL.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(OWN_MODEL.stem, OWN_MODEL)
        assert spec
        assert spec.loader
        sys.modules[OWN_MODEL.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return "my_model:MyModel"


class Case(NamedTuple):
    """A model, and what `make_engine` needs beside its settings."""

    settings: dict
    own: Callable[[], dict[str, Any]] = dict
    target_len: int = 0
    objective: str = "causal"


T5 = {"family": "t5", "num_layers": 2, "num_encoder_layers": 2, "d_model": 16, "num_heads": 4}
T5 |= {"head_dim": 8, "d_ff": 32, "relative_buckets": 8, "relative_max_distance": 12}

CASES = {
    "two stacks": Case(
        # One reader more than two stages share, and one writer more than whole periods.
        {
            "family": "tests.models.two_stacks:make",
            **two_stacks.SETTINGS,
            "readers": 3,
            "writers": 5,
        },
        lambda: {"rules": {"distances": ()}},
    ),
    "local and global layers": Case(
        {
            "family": "gemma3",
            "num_layers": 5,
            "layer_pattern": "LG",
            "sliding_window": 3,
            "local_rope_theta": 100.0,
            "dropout": 0.2,
            **SIZES,
        }
    ),
    "own block and loss": Case(
        {"family": import_own_model(), "num_layers": 4, **SIZES},
        lambda: {"optimizer": optax.lamb(1e-3)},
    ),
    "encoder and decoder": Case(T5, target_len=8, objective="span_corruption"),
}


def make_config(case: Case, **layout) -> Config:
    return from_dict(
        {
            "model": {**case.settings, **FLOAT64, "vocab_size": VOCABULARY},
            "data": {
                "global_batch_size": BATCH,
                "seq_len": SEQ_LEN,
                "target_len": case.target_len,
                "objective": case.objective,
            },
            "optimizer": {
                "accumulation_dtype": "float64",
                "moment_dtype": "float64",
                "second_moment_dtype": "float64",
            },
            "layout": {"data": 1, **layout},
        }
    )


def make_batches(extras: dict, seq_len: int = SEQ_LEN) -> list[Batch]:
    """Two documents a row, of which an encoder also has padding."""
    random, found = np.random.default_rng(0), []

    def draw(length: int) -> np.ndarray:
        return random.integers(0, VOCABULARY, (BATCH, length), np.int32)

    for _ in range(STEPS):
        tokens = draw(seq_len)
        place = np.broadcast_to(np.arange(seq_len, dtype=np.int32), tokens.shape)
        weights = (random.random(tokens.shape) < 0.8).astype(np.float32)
        more = {name: draw(length) for name, (length, _) in extras.items()}
        if "encoder_segments" in more:
            more["encoder_segments"] = np.sort(more["encoder_segments"] % 3)[:, ::-1].copy()
        cut = seq_len // 2 + 1
        segments, positions = 1 + place // cut, place % cut
        batch = Batch(tokens, np.roll(tokens, -1), segments, positions, weights, more or ())
        found.append(batch)
    return found


@functools.cache
def initial_params(name: str) -> Any:
    """In canonical form, without a layout."""
    settings = make_config(CASES[name]).model
    model = find_model(settings)(settings, plain_kernels())
    return jax.device_get(jax.jit(model.init)(jax.random.key(0)))


def run(name: str, **layout):
    """Metrics of some steps, the last parameters in canonical form, and an evaluation's sums."""
    case = CASES[name]
    config = make_config(case, **layout)
    mesh = make_mesh(config.layout, jax.devices()[: config.layout.num_devices])
    engine = make_engine(config, mesh, **case.own())
    state = engine.init(jax.random.key(0))
    to_canonical = engine.placement.part("params").to_canonical
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get(to_canonical(state.params)),
        initial_params(name),
    )
    found = []
    batches = make_batches(dict(engine.model.extras(SEQ_LEN)), config.data.output_len)
    for batch in batches:
        state, metrics = engine.step(state, engine.shard(batch))
        found.append(metrics)
    sums = engine.evaluate(state.params, engine.shard(batches[0]), np.ones(VOCABULARY, np.float32))
    return jax.device_get((found, to_canonical(state.params), tuple(sums)))


@functools.cache
def on_one_device(name: str):
    return run(name)


LAYERED = {"zero_stage": 3, "accumulation": "layered", "microbatches": 2}
TWO_CHUNKS = {"schedule": "interleaved", "virtual_stages": 2}
LAYOUTS = {
    "two stacks": [
        {"data": 2, "fsdp": 2, "tensor": 2, **LAYERED, "remat": "full"},
        {"fsdp": 4, "context": 2, "zero_stage": 2, "microbatches": 2},
        {"pipeline": 2, "fsdp": 2, "tensor": 2, "microbatches": 4, "schedule": "1f1b"},
        {"pipeline": 2, "data": 2, "microbatches": 4, **TWO_CHUNKS},
        {"pipeline": 2, "data": 2, "microbatches": 4, "schedule": "zb_v", "remat": "full"},
    ],
    "local and global layers": [
        {"data": 2, "fsdp": 2, "context": 2, **LAYERED},
        {"pipeline": 2, "fsdp": 2, "tensor": 2, "microbatches": 4, "schedule": "zb_h1"},
    ],
    "own block and loss": [
        {"fsdp": 2, "tensor": 2, "context": 2, **LAYERED, "remat": "save_matmuls"},
        {"pipeline": 2, "data": 2, "fsdp": 2, "microbatches": 2, **TWO_CHUNKS},
    ],
    "encoder and decoder": [
        {"fsdp": 2, "context": 2, "tensor": 2, **LAYERED},
        {"pipeline": 2, "tensor": 2, "microbatches": 4, "schedule": "zb_v", "remat": "full"},
    ],
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, id=f"{name}-{layout}")
        for name, layouts in LAYOUTS.items()
        for layout in layouts
    ],
)
def test_a_model_is_one_device_in_float64(name, layout):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12),
        run(name, **layout),
        on_one_device(name),
    )


def test_two_stacks_are_a_few_lines_of_plain_jax():
    """What all layouts agree on is the model: its loss, the gradient of that with auxiliary losses
    and a borrowed parameter, and its sums."""
    settings = make_config(CASES["two stacks"]).model
    model = two_stacks.make(settings, plain_kernels())
    batch = make_batches(dict(model.extras(SEQ_LEN)))[0]
    count = batch.weights.sum(dtype=np.float64)

    def mean_loss(params):
        def layer(name, index):
            return jax.tree.map(lambda x: x[index], params[name])

        embed, sums = params["embed"], []
        stream = model.enter_readers(embed, {}, batch)
        for index in range(settings.readers):
            stream, _ = model.read(layer("readers", index), stream, batch, Layer(index, 0))
        stream = model.enter_writers(embed, stream, batch)
        for index in range(settings.writers):
            place = Layer(index, index % 2)
            x, found = model.write(layer("writers", index), stream, batch, place)
            stream, sums = {**stream, **x}, [*sums, found]
        losses = model.loss({**params["head"], "tied": embed["tokens"]}, stream, batch)
        loss = losses["loss"] + sum(one["loss"] for one in sums)
        return loss / count, (losses, jnp.stack([one["size"] for one in sums]))

    gradient = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))
    (_, (losses, sizes)), grads = gradient(initial_params("two stacks"))
    assert model.frozen == ("readers/scale",)
    assert np.abs(grads["readers"].pop("scale")).min() > 0
    expected = {
        "loss": losses["nll"] / count,
        "grad_norm": optax.tree.norm(grads),
        "others": {"confident": losses["confident"] / count, "writers/size": sizes},
    }
    found = on_one_device("two stacks")[0][0]._asdict()
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-10),
        {name: found[name] for name in expected},
        expected,
    )


def test_an_axis_of_its_own_is_sharded_as_the_model_says():
    case = CASES["two stacks"]
    config = make_config(case, tensor=2)
    engine = make_engine(config, make_mesh(config.layout, jax.devices()[:2]), **case.own())
    turn = engine.abstract_state.params["writers"]["turn"]
    assert 2 * turn.sharding.shard_shape(turn.shape)[-1] == turn.shape[-1]


def test_the_page_shows_the_own_model_and_its_code_runs():
    page = pathlib.Path("docs/own_model.md").read_text()
    model, *others = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert model.splitlines() == OWN_MODEL.read_text().splitlines()[2:]
    assert len(model.splitlines()) < 60
    found = dict(vars(sys.modules[OWN_MODEL.stem]))
    for block in others:
        exec(block, found)
    assert found["engine"].model.settings.late_weight == 2

    # The classifier, with labels for targets.
    settings = found["LabelSettings"](family="my_model:Classifier", vocab_size=VOCABULARY, **SIZES)
    config = make_config(Case({**SIZES, "num_layers": 2}), tensor=2)
    config = dataclasses.replace(config, model=settings)
    engine = make_engine(
        config, make_mesh(config.layout, jax.devices()[:2]), model=found["Classifier"]
    )
    (batch, *_), state = make_batches({}), engine.init(jax.random.key(0))
    for _ in range(20):
        state, metrics = engine.step(state, engine.shard(batch._replace(targets=batch.tokens % 3)))
    assert metrics.loss < 0.9 * np.log(3)
