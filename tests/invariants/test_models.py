"""Every kind of model gives the same losses, gradients and evaluations in every kind of layout, and
resumes bitwise, in another layout too."""

import contextlib
import dataclasses
import functools
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.checkpoints.restore import restore
from jaxscale.checkpoints.save import CheckpointWriter
from jaxscale.models.decoder import plain_kernels
from jaxscale.models.protocol import Layer
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine
from tests.invariants.models import (
    BEGUN,
    KINDS,
    OWN_MODEL,
    SEQ_LEN,
    SIZES,
    VOCABULARY,
    Kind,
    advance,
    canonical,
    evaluate,
    first_state,
    make_batches,
    make_config,
    on_one_device,
    on_ranks,
    one_device,
    open_engine,
    relative_error,
    sums_of_one_device,
)
from tests.models import two_stacks

LAYERED = {"zero_stage": 3, "accumulation": "layered", "microbatches": 2}
SHARDED_GRADS = {"zero_stage": 2, "microbatches": 2}
GATHER = {"context_method": "gather"}
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 3}  # two of them of one stack
LAYOUTS = {
    "two stacks": [
        {"pipeline": 2, "fsdp": 2, "tensor": 2, "microbatches": 4, **INTERLEAVED},
        {"data": 2, "fsdp": 2, "context": 2, **LAYERED, **GATHER, "remat": "full"},
        {"pipeline": 2, "data": 2, "microbatches": 4, "schedule": "zb_v", "remat": "full"},
    ],
    "local and global layers": [
        {"data": 2, "fsdp": 2, "context": 2, **LAYERED, **GATHER},
        {"pipeline": 2, "fsdp": 2, "tensor": 2, "microbatches": 4, "schedule": "zb_h1"},
    ],
    "custom block and loss": [
        {"pipeline": 2, "data": 2, "fsdp": 2, "microbatches": 2, "schedule": "1f1b"},
        {"fsdp": 2, "tensor": 2, "context": 2, **SHARDED_GRADS, "remat": "save_matmuls"},
    ],
    "adapters": [
        {"pipeline": 2, "fsdp": 2, "tensor": 2, "microbatches": 4, "schedule": "1f1b"},
        {"fsdp": 2, "context": 2, "tensor": 2, "zero_stage": 1, "microbatches": 2, **GATHER},
    ],
    "adapters of experts": [
        {"fsdp": 2, "expert": 2, "tensor": 2, **LAYERED, "remat": "save_matmuls"},
        {
            **{"pipeline": 2, "context": 2, "tensor": 2, **GATHER},
            "microbatches": 4,
            "schedule": "zb_h1",
        },
    ],
    "adapters and a capacity": [{"expert": 2, "tensor": 2, "overlap_experts": True}],
    "quantised base": [
        {"pipeline": 2, "fsdp": 2, "tensor": 2, "microbatches": 4, "schedule": "zb_h1"},
        {"data": 2, "fsdp": 2, "tensor": 2, **LAYERED, "remat": "full"},
    ],
    "quantised experts": [
        {"expert": 2, "context": 2, "tensor": 2, "zero_stage": 1, "microbatches": 2, **GATHER},
    ],
    "side network": [
        {"pipeline": 2, "fsdp": 2, "tensor": 2, "microbatches": 4, "schedule": "zb_h1"},
        {"fsdp": 2, "context": 2, "tensor": 2, **LAYERED, "remat": "full"},
    ],
    "side network of experts": [
        {"fsdp": 2, "expert": 2, "tensor": 2, "zero_stage": 1, "microbatches": 2},
    ],
    "prompts": [
        {"pipeline": 2, "fsdp": 2, "tensor": 2, "microbatches": 4, "schedule": "1f1b"},
        {"data": 2, "context": 2, "tensor": 2, "microbatches": 2, **GATHER, "remat": "full"},
    ],
    "shared layers": [
        {"pipeline": 2, "fsdp": 2, "tensor": 2, "microbatches": 4, **INTERLEAVED, "remat": "full"},
        {"data": 2, "fsdp": 2, "context": 2, **LAYERED, **GATHER},
    ],
    "encoder and decoder": [
        {
            "pipeline": 2,
            "data": 2,
            "tensor": 2,
            "microbatches": 4,
            "schedule": "zb_v",
            "remat": "full",
        },
        {"fsdp": 2, "context": 2, "tensor": 2, **LAYERED, **GATHER},
    ],
    "experts": [
        {
            **{"fsdp": 2, "expert": 2, "expert_nodes": 2, "tensor": 2},
            **{**LAYERED, "remat": "save_matmuls"},
        },
        {"pipeline": 2, "expert": 2, "tensor": 2, "microbatches": 4, "schedule": "zb_v"},
    ],
    "segments": [
        {
            **{"pipeline": 2, "fsdp": 2, "expert": 2, "microbatches": 2, "virtual_stages": 2},
            **{"schedule": "seq1f1b_interleaved", "sequence_chunks": 2},
        }
    ],
    "prototypes": [{"expert": 2, "tensor": 2, "overlap_experts": True}],
    "expert choice": [{"expert": 2, "context": 2, "tensor": 2, "overlap_tensor": True}],
    "bert": [
        {
            "pipeline": 2,
            "fsdp": 2,
            "context": 2,
            "zero_stage": 2,
            "microbatches": 4,
            "schedule": "1f1b",
            "remat": "full",
            "context_method": "gather",
        }
    ],
}
"""`tools/matrix.py` has many more."""
ROUTED_ELSEWHERE = ("prototypes", "expert choice")
"""Of these only steps are compared: experts evaluate above. In their first layout all others do,
but for experts, whose pipeline has a stage that an evaluation passes by."""
RESUMED = (
    *("two stacks", "local and global layers", "encoder and decoder", "experts"),
    *("side network", "prompts", "quantised base"),
)
"""In their first layout these also begin (those of `BEGUN`), save, resume, and are resumed from on
one device; the parameters of the others are a decoder's, stacked as those of local and global
layers."""
SLOW = (
    *(("two stacks", 1), ("two stacks", 2), ("custom block and loss", 1)),
    *(("adapters of experts", 1), ("prompts", 1), ("shared layers", 1)),
    *(("quantised base", 1), ("adapters", 1), ("side network", 1), ("local and global layers", 1)),
    *(("encoder and decoder", 1), ("experts", 1), ("adapters and a capacity", 0)),
    ("side network of experts", 0),
)
CASES = [
    pytest.param(
        name,
        number,
        id=f"{name}-{layout}",
        marks=[pytest.mark.slow] if (name, number) in SLOW else [],
    )
    for name, layouts in LAYOUTS.items()
    for number, layout in enumerate(layouts)
]


def near(got, wanted):
    assert relative_error(got, wanted) < 1e-10


def same(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.proof
@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_model_is_one_device_in_float64_and_resumes(name, number, tmp_path):
    engine = open_engine(name, LAYOUTS[name][number])
    metrics, last = on_one_device(name)
    first, resumes = first_state(name), number == 0 and name in RESUMED
    if resumes and name in BEGUN:
        same(canonical(engine, engine.init(jax.random.key(0))), first)
    state, found = advance(engine, on_ranks(engine, first), end=1)
    saved = canonical(engine, state)
    state, rest = advance(engine, state, 1)
    end = canonical(engine, state)
    near((found + rest, end.params), (metrics, last.params))
    if number == (name == "experts") and name not in ROUTED_ELSEWHERE:
        near(evaluate(engine, state), sums_of_one_device(name))
    if resumes:
        with contextlib.closing(CheckpointWriter(tmp_path)) as checkpoints:
            checkpoints.save(1, saved, {})
            checkpoints.wait()
            restored = restore(checkpoints, 1, engine.placement.canonical)
            elsewhere = restore(checkpoints, 1, one_device(name).placement.canonical)
        same(restored, saved)
        same(elsewhere, saved)
        state, again = advance(engine, engine.placement.from_canonical(restored), 1)
        same((again, canonical(engine, state)), (rest, end))
        state, again = advance(one_device(name), elsewhere, 1)
        near((again, state.params), (metrics[1:], last.params))


def test_two_stacks_are_a_few_lines_of_plain_jax():
    """What all layouts agree on is the model: its loss, the gradient of that with auxiliary losses
    and a borrowed parameter, and its sums."""
    settings = make_config(KINDS["two stacks"]).model
    model = two_stacks.make(settings, plain_kernels())
    batch = next(make_batches(dict(model.extras(SEQ_LEN))))
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
    (_, (losses, sizes)), grads = gradient(first_state("two stacks").params)
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
    kind = KINDS["two stacks"]
    config = make_config(kind, tensor=2)
    engine = make_engine(config, make_mesh(config.layout, jax.devices()[:2]), **kind.own())
    turn = engine.abstract_state.params["writers"]["turn"]
    assert 2 * turn.sharding.shard_shape(turn.shape)[-1] == turn.shape[-1]


@pytest.mark.proof
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
    config = make_config(Kind({**SIZES, "num_layers": 2}), tensor=2)
    config = dataclasses.replace(config, model=settings)
    engine = make_engine(
        config, make_mesh(config.layout, jax.devices()[:2]), model=found["Classifier"]
    )
    batch, state = next(make_batches({})), engine.init(jax.random.key(0))
    for _ in range(20):
        state, metrics = engine.step(state, engine.shard(batch._replace(targets=batch.tokens % 3)))
    assert metrics.loss < 0.9 * np.log(3)
    with pytest.raises(ValueError, match=r"targets with weights .* below the 3 classes"):
        engine.shard(batch)  # with tokens for targets, as text has
