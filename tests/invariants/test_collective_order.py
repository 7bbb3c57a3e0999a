"""Every rank reaches its collectives in one order, also on virtual CPU devices."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxscale.config import from_dict
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import Engine, make_engine
from tests.invariants import models
from tests.invariants.collective_order import dump_options, unordered

pytestmark = pytest.mark.compiles

SEQ_LEN = 64
LLAMA = {"num_layers": 4, "d_model": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
LLAMA |= {"d_ff": 128}
T5 = LLAMA | {"family": "t5", "num_kv_heads": 4, "num_encoder_layers": 2}
PAIR = {"pipeline": 2, "tensor": 2, "microbatches": 2}

# Model and layout. Arrays of more than 512 bytes: XLA:CPU runs smaller programs one by one.
WORST = {
    "encoder-decoder, 1f1b": (T5, PAIR | {"schedule": "1f1b"}),
    "encoder-decoder, 1f1b, full remat": (T5, PAIR | {"schedule": "1f1b", "remat": "full"}),
    "encoder-decoder, stage 3": (T5, PAIR | {"fsdp": 2, "zero_stage": 3}),
    "decoder, zb_v": (
        LLAMA,
        PAIR | {"fsdp": 2, "schedule": "zb_v", "virtual_stages": 2, "microbatches": 4},
    ),
    "decoder, breadth first": (
        LLAMA,
        PAIR
        | {"fsdp": 2, "schedule": "breadth_first", "virtual_stages": 2, "microbatches": 4}
        | {"zero_stage": 3},
    ),
    "decoder, sliced head": (
        LLAMA,
        PAIR | {"fsdp": 2, "schedule": "chimera", "head": "sliced", "zero_stage": 3},
    ),
    "decoder, dualpipe": (LLAMA, PAIR | {"fsdp": 2, "schedule": "dualpipe", "microbatches": 4}),
    "decoder, seq1f1b": (LLAMA, PAIR | {"fsdp": 2, "schedule": "seq1f1b", "sequence_chunks": 2}),
    "decoder, layered": (
        LLAMA,
        {"fsdp": 2, "tensor": 2, "microbatches": 4, "accumulation": "layered", "zero_stage": 3},
    ),
    "decoder, ring": (
        LLAMA,
        {"fsdp": 2, "context": 2, "tensor": 2, "microbatches": 2, "zero_stage": 3},
    ),
    "decoder, ring in a pipeline": (LLAMA, {"pipeline": 2, "context": 4, "microbatches": 4}),
    "decoder, ring of both passes": (
        LLAMA,
        {"pipeline": 2, "context": 4, "microbatches": 4, "schedule": "dualpipe"},
    ),
}


def open_engine(name: str) -> Engine:
    model, layout = WORST[name]
    encodes = "num_encoder_layers" in model
    data = {"global_batch_size": models.MODEL_BATCH, "seq_len": SEQ_LEN}
    if encodes:
        data |= {"target_len": 16, "objective": "span_corruption"}
    config = from_dict(
        {
            "model": {**model, "vocab_size": models.VOCABULARY, "compute_dtype": "float32"},
            "data": data,
            "layout": {"data": 1, **layout},
        }
    )
    return make_engine(config, make_mesh(config.layout, jax.devices()[: config.layout.num_devices]))


def run(name: str, steps: int, folder: pathlib.Path) -> None:
    """Compiles a step and runs it. In a pipeline, each loop of a tick ends before what follows."""
    engine = open_engine(name)
    lowered = engine.step.lower(engine.abstract_state, engine.abstract_batch)
    step = lowered.compile(compiler_options=dump_options(folder))
    if engine.layout.pipeline > 1:
        assert not unordered(folder)
    state = jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
        engine.abstract_state,
    )
    extras = dict(engine.model.extras(SEQ_LEN))
    batch = engine.shard(next(models.make_batches(extras, engine.config.data.output_len)))
    for _ in range(steps):
        state, metrics = step(state, batch)
    assert int(state.step) == steps
    assert np.isfinite(metrics.loss)


@pytest.mark.proof
@pytest.mark.parametrize(
    "name",
    ["encoder-decoder, 1f1b", "decoder, ring in a pipeline"],
)
def test_operations_and_sends_of_a_tick_have_one_order(name, tmp_path):
    run(name, 20, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORST)
def test_two_hundred_steps(name, tmp_path):
    run(name, 200, tmp_path)


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"JAX_NUM_CPU_DEVICES": "400"}, "1600"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=400"}, "1600"),
        ({"JAX_NUM_CPU_DEVICES": "400", "PJRT_NPROC": "3"}, "3"),
        ({"JAX_NUM_CPU_DEVICES": "1"}, "None"),
    ],
)
def test_several_cpu_devices_have_threads_to_wait_in(variables, threads):
    names = ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "PJRT_NPROC")
    others = {name: value for name, value in os.environ.items() if name not in names}
    command = "import jaxscale, os; print(os.environ.get('PJRT_NPROC'))"
    done = subprocess.run(
        [sys.executable, "-c", command], env=others | variables, capture_output=True, text=True
    )
    assert done.stdout.strip() == threads
