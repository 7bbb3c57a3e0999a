"""Long sequences that several devices share: the same losses, nothing gathered, memory that falls.

That they are one device's in float64, whatever else is shared, is in `test_layouts`."""

import collections
import functools

import jax
import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.compiled import collectives, hlo
from jaxscale.config import from_dict
from tests.invariants.layouts import open_engine

pytestmark = pytest.mark.compiles

SEQUENCES, SEQ_LEN = 2, 4096
LIMIT = 24e6
"""Bytes of one device, in the test of what it cannot hold."""


@functools.cache
def compiled(num_layers=2, **layout):
    """(engine, its compiled step) of a thin model on two long sequences: nearly all of the memory
    is for activations. Its state is whole on each device, so that layers are passed alike."""
    config = from_dict(
        {
            "model": {
                "num_layers": num_layers,
                "d_model": 64,
                "num_heads": 4,
                "num_kv_heads": 2,
                "head_dim": 16,
                "d_ff": 128,
                "vocab_size": 256,
                "compute_dtype": "float32",
            },
            "data": {"global_batch_size": SEQUENCES, "seq_len": SEQ_LEN},
            "layout": {"data": 1, "remat": "full", "zero_stage": 0, **layout},
        }
    )
    engine = open_engine(config)
    return engine, engine.step.lower(engine.abstract_state, engine.abstract_batch).compile()


def device_bytes(**layout):
    """What a step needs on each device: what stays, and the most that it holds beside that."""
    analysis = compiled(**layout)[1].memory_analysis()
    return analysis.argument_size_in_bytes, analysis.temp_size_in_bytes


def context_bytes(**layout):
    """Kind of collective -> bytes, of those over context in a step."""
    engine, program = compiled(**layout)
    found = collections.Counter()
    for one in collectives.collectives(hlo.parse_hlo(program.as_text()), dict(engine.mesh.shape)):
        if "context" in one.axes:
            found[one.kind] += one.count * one.num_bytes
    return found


@pytest.mark.proof
def test_memory_falls_as_ranks_share_a_sequence():
    _, one = device_bytes()
    _, two = device_bytes(context=2, context_method="gather")
    _, four = device_bytes(context=4)
    assert two < 0.6 * one
    assert four < 0.3 * one


@pytest.mark.proof
def test_ranks_of_tensor_share_what_lies_between_the_products():
    """Beside the heads and the MLP, which are spread, two ranks hold half of the stream each."""
    _, one = device_bytes()
    _, two = device_bytes(tensor=2)
    assert two < 0.65 * one


@pytest.mark.proof
def test_sequences_that_one_device_cannot_hold_train():
    assert sum(device_bytes()) > LIMIT
    assert sum(device_bytes(context=4)) < LIMIT
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (SEQUENCES, SEQ_LEN + 1)).astype(np.int32)
    place = np.tile(np.arange(SEQ_LEN, dtype=np.int32), (SEQUENCES, 1))
    batch = Batch(
        tokens[:, :-1],
        tokens[:, 1:],
        1 + place // 3000,
        place % 3000,
        np.ones((SEQUENCES, SEQ_LEN), np.float32),
    )
    results = []
    for layout in ({"context": 4}, {}):
        engine, program = compiled(**layout)
        state = engine.init(jax.random.key(0))
        state, metrics = program(state, engine.shard(batch))
        results.append((float(metrics.loss), float(metrics.grad_norm)))
    np.testing.assert_allclose(*results, rtol=1e-5)


def num_params(engine, part=None):
    return sum(leaf.size for leaf in jax.tree.leaves(part or engine.abstract_state.params))


def loss_bytes():
    """Kind of collective -> bytes of the loss, each rank of which has columns of the head: tokens
    out and their gradients back, targets and weights, and three numbers of a token."""
    tokens, width = SEQUENCES * SEQ_LEN, compiled(context=4)[0].config.model.d_model
    stream = 4 * tokens * width
    return {
        "all-gather": stream + 2 * 4 * tokens,
        "reduce-scatter": stream,
        "all-reduce": 3 * 4 * tokens,
    }


def head_bytes(engine):
    """Of the head's gradient, which is not summed over ranks."""
    return 4 * engine.abstract_state.params["head"]["output"].size


@pytest.mark.proof
def test_a_ring_gathers_no_keys_and_sums_each_gradient_once():
    engine, _ = compiled(context=4)
    found, loss = context_bytes(context=4), loss_bytes()
    assert set(found) == {"collective-permute", *loss}
    head = head_bytes(engine)
    summed = 4 * num_params(engine) - head
    assert found["all-reduce"] == pytest.approx(summed + loss["all-reduce"], abs=64)
    assert found["all-gather"] == pytest.approx(head + loss["all-gather"], abs=64)
    assert found["reduce-scatter"] == pytest.approx(loss["reduce-scatter"], abs=64)


@pytest.mark.proof
def test_pairs_of_ranks_send_what_a_ring_sends():
    """In a pipeline, where a rank has half of the layers: nothing over context is of all devices,
    and every exchange is of two neighbours. Of a stage's only layer, XLA for CPUs would move the
    exchanges out of the operation's loop, into every tick."""
    settings = {"num_layers": 4, "context": 4, "microbatches": 2, "remat": "none"}
    engine, program = compiled(pipeline=2, **settings)
    assert engine.stages is not None
    runs = hlo.parse_hlo(program.as_text(), engine.stages.trips)
    found = list(collectives.collectives(runs, dict(engine.mesh.shape)))
    permuted = {one.axes for one in found if one.kind == "collective-permute"}
    assert permuted == {("pipeline",)}
    pairs = [one for one in found if one.subgroup]
    assert {(one.kind, one.axes, one.subgroup.size) for one in pairs} == {
        ("all-gather", ("context",), 2)
    }
    part = 4 * SEQ_LEN // 4 * 2 * 16  # keys of a rank, or values
    received = sum(one.count * one.num_bytes / 2 for one in pairs if one.num_bytes >= part)
    # Keys and values in both passes, three times, and their gradients around the whole ring.
    assert received == 2 * 2 * (2 * 3 * 2 + 4 * 2) * part


@pytest.mark.proof
def test_state_is_gathered_once_a_pass():
    """Sharded over context, a layer's weights are gathered for its forward and its backward pass,
    the last layer's once; the embedding once. Nothing else is, except by the loss, and the tokens
    of whose rows the embedding's gradient is summed: each rank gets its columns of the head."""
    engine, _ = compiled(context=4, zero_stage=3)
    found = context_bytes(context=4, zero_stage=3)
    layers = engine.abstract_state.params["layers"]
    layer = num_params(engine, layers) // engine.config.model.num_layers
    weights = 4 * (num_params(engine) + layer) - head_bytes(engine)
    indices = 4 * SEQUENCES * SEQ_LEN
    expected = weights + indices + loss_bytes()["all-gather"]
    assert found["all-gather"] == pytest.approx(expected, abs=64)


@pytest.mark.proof
def test_gathering_gathers_keys_alone():
    """Beside the keys of whole sequences, in the forward pass (and again where it is repeated) and
    in the backward pass, and the sums of their gradients, only gradients of weights, and what the
    loss exchanges."""
    engine, _ = compiled(context=2, context_method="gather")
    found, loss = context_bytes(context=2, context_method="gather"), loss_bytes()
    each = 4 * (2 * 2 * 16 + 1)  # bytes of keys, values and the segment of a token
    keys = SEQUENCES * SEQ_LEN * each
    assert set(found) == set(loss)
    head = head_bytes(engine)
    assert found["all-gather"] <= 6 * keys + head + loss["all-gather"]
    summed = 4 * num_params(engine) - head
    assert found["all-reduce"] == pytest.approx(summed + loss["all-reduce"], abs=64)
