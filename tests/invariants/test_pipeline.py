"""Every pipeline gives the loss, gradients and parameters of one device."""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from tests.invariants.layouts import (
    GPT,
    VOCABULARY,
    compile_step,
    initial_state,
    make_config,
    open_engine,
    relative_error,
    run,
)
from tests.invariants.test_layouts import INVOLUNTARY

# Nine layers, which divide over no number of stages here.
LLAMA = {
    "num_layers": 9, "d_model": 32, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "d_ff": 48,
    "vocab_size": VOCABULARY, "z_loss": 1e-3,
}  # fmt: skip
DEEP_GPT = {**GPT, "num_layers": 5, "d_model": 32, "num_heads": 4, "num_kv_heads": 4, "d_ff": 64}
MODELS = {"llama": LLAMA, "gpt": DEEP_GPT}

CHOICES = (
    [
        {"schedule": "gpipe"}, {"schedule": "1f1b"}, {"schedule": "1f1b:fused"},
        {"schedule": "interleaved", "virtual_stages": 2},
        {"schedule": "breadth_first", "virtual_stages": 2}, {"schedule": "zb_h2"},
        {"schedule": "zb_v"},
    ],
    [
        {"pipeline": 4, "fsdp": 2}, {"pipeline": 2, "data": 2, "fsdp": 2},
        {"pipeline": 2, "fsdp": 2, "tensor": 2},
        {"pipeline": 2, "fsdp": 2, "context": 2, "context_method": "gather"},
    ],
    [{"zero_stage": stage} for stage in range(4)],
    [{"remat": "none"}, {"remat": "full"}, {"remat": "save:query,attention"}],
)  # fmt: skip


def every_pipeline() -> list[dict[str, Any]]:
    """The whole product, with as many micro-batches as the schedule and the batch allow."""
    made = []
    for parts in itertools.product(*CHOICES):
        layout = dict(itertools.chain(*(part.items() for part in parts)))
        made.append({**layout, "microbatches": 4 if "data" in layout else 8})
    return made


def pairwise_pipelines() -> list[dict[str, Any]]:
    """Every two choices together in some layout."""

    def pairs(layout: dict[str, Any]) -> set:
        chosen = [
            next(i for i, c in enumerate(cs) if c.items() <= layout.items()) for cs in CHOICES
        ]
        return set(itertools.combinations(enumerate(chosen), 2))

    everything, chosen = every_pipeline(), []
    missing = set().union(*map(pairs, everything))
    while missing:
        chosen.append(max(everything, key=lambda layout: len(pairs(layout) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def name(layout: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in layout.items())


@functools.cache
def one_device(family: str, optimizer: str = "adamw"):
    return run(open_engine(make_config(MODELS[family], {}, name=optimizer)))


def check_pipeline(layout: dict[str, Any], family: str = "llama", optimizer: str = "adamw"):
    """Five steps against one device."""
    model = MODELS[family]
    engine = open_engine(make_config(model, layout, name=optimizer))
    state = initial_state(make_config(model, {}, name=optimizer))
    got = run(engine, on_ranks(engine, state), step=compile_step(engine))
    expected = one_device(family, optimizer)
    np.testing.assert_allclose(got.losses, expected.losses, rtol=1e-10, atol=0)
    np.testing.assert_allclose(got.norms, expected.norms, rtol=1e-10, atol=0)
    assert relative_error(in_order(engine, got.params), expected.params) < 1e-10
    if got.gradients is not None:
        gradients = in_order(engine, got.gradients)
        assert relative_error(gradients, expected.gradients, 1e-6) < 1e-10
    assert np.all(expected.norms > 0.5), "clipping must act for this to test it"
    return engine


def on_ranks(engine, state):
    """A canonical state of NumPy arrays as the engine has it."""
    rows = engine.placement.rows

    def one(axes, x, leaf):
        if "layers" in axes:
            x = np.where(rows.reshape(-1, *(1,) * (x.ndim - 1)) >= 0, x[rows], 0)
        return jax.device_put(x, leaf.sharding)

    is_axes = lambda node: type(node) is tuple and all(isinstance(n, str) for n in node)  # noqa: E731
    return jax.tree.map(one, engine.placement.axes, state, engine.abstract_state, is_leaf=is_axes)


def in_order(engine, params):
    """The layers of NumPy arrays in the order of the model; the rows beside them are zeros."""
    rows = engine.placement.rows
    place = np.argsort(np.where(rows < 0, len(rows), rows), kind="stable")
    layers = np.sum(rows >= 0)
    for leaf in jax.tree.leaves(params["layers"]):
        assert not leaf[place[layers:]].any(), "what fills up a stack must stay zero"
    return {**params, "layers": jax.tree.map(lambda x: x[place[:layers]], params["layers"])}


@pytest.mark.parametrize("layout", pairwise_pipelines(), ids=name)
def test_every_pipeline_is_one_device_in_float64(layout, capfd):
    check_pipeline(layout)
    assert INVOLUNTARY not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("layout", every_pipeline(), ids=name)
def test_the_whole_product_is_one_device_in_float64(layout):
    check_pipeline(layout)
