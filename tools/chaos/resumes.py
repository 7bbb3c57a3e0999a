"""Resharding test: saves a run in each of twelve layouts, and resumes each in each.

    python tools/chaos/resumes.py

A decoder with experts, on eight virtual devices: data, fsdp with its ZeRO stages, tensor, context,
expert, pipelines of three schedules, layered accumulation. In each layout the first step runs and
is saved; every layout then reads every checkpoint. Faults: an array that differs in any bit from
the saved one, and a next step with a loss that differs by more than 1e-5 from that of the layout
that saved. The last line is JSON.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

MODEL = {
    "family": "qwen3_moe",
    "num_layers": 4,
    "d_model": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 32,
    "num_experts": 4,
    "experts_per_token": 2,
    "vocab_size": 257,
    "compute_dtype": "float32",
}
BATCH, SEQ_LEN = 8, 32
LAYERED = {"accumulation": "layered", "microbatches": 2}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"data": 1},
    {"data": 8},
    {"data": 4, "fsdp": 2, "zero_stage": 1},
    {"fsdp": 8, "zero_stage": 3},
    {"fsdp": 4, "data": 2, "zero_stage": 2, "offload": "optimizer"},
    {"fsdp": 2, "tensor": 2, "context": 2},
    {"tensor": 4, "data": 2},
    {"expert": 4, "data": 2},
    {"expert": 2, "fsdp": 2, "tensor": 2, "zero_stage": 3, **LAYERED},
    {"pipeline": 4, "data": 2, "microbatches": 4, "schedule": "1f1b"},
    {
        "pipeline": 2,
        "fsdp": 2,
        "microbatches": 4,
        "schedule": "interleaved",
        "virtual_stages": 2,
    },
    {"pipeline": 2, "expert": 2, "tensor": 2, "microbatches": 4, "schedule": "zb_v"},
)
TOLERANCE = 1e-5


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a resume differs."""
    parser = argparse.ArgumentParser(description="Resumes runs of twelve layouts in each other.")
    parser.parse_args(argv)
    os.environ |= {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    # Unoptimised: steps run for milliseconds and compile for seconds.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="chaos_"))
    try:
        found = campaign(folder)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(found))
    return int(bool(found["faults"]))


def campaign(folder: pathlib.Path) -> dict[str, Any]:
    """The number of resumed pairs, the largest difference of a loss, and the faults."""
    import jax  # noqa: PLC0415 - after the environment is set
    import numpy as np  # noqa: PLC0415

    from jaxscale.checkpoints.restore import restore  # noqa: PLC0415
    from jaxscale.checkpoints.save import CheckpointWriter  # noqa: PLC0415
    from jaxscale.checkpoints.tiers import Checkpoints  # noqa: PLC0415
    from jaxscale.config import from_dict  # noqa: PLC0415
    from jaxscale.data.synthetic import synthetic_batch  # noqa: PLC0415
    from jaxscale.sharding.mesh import make_mesh  # noqa: PLC0415
    from jaxscale.training.engine import make_engine  # noqa: PLC0415

    def opened(layout: dict[str, Any]) -> Any:
        data = {"global_batch_size": BATCH, "seq_len": SEQ_LEN}
        config = from_dict({"model": MODEL, "data": data, "layout": {"data": 1, **layout}})
        devices = jax.devices()[: config.layout.num_devices]
        return make_engine(config, make_mesh(config.layout, devices))

    engines = [opened(layout) for layout in LAYOUTS]
    batch = synthetic_batch(engines[0].config)

    def step(engine: Any, state: Any) -> tuple[Any, float]:
        state, metrics = engine.step(state, engine.shard(batch))
        return state, float(metrics.loss)

    saved, losses = [], []
    for number, engine in enumerate(engines):
        state, _ = step(engine, engine.init(jax.random.key(0)))
        canonical = engine.placement.to_canonical(state)
        with contextlib.closing(CheckpointWriter(folder / str(number))) as checkpoints:
            checkpoints.save(1, canonical, {})
        saved.append(jax.device_get(canonical))
        losses.append(step(engine, engine.placement.from_canonical(canonical))[1])
        print(f"saved: {LAYOUTS[number]}", flush=True)
    count, largest, faults = 0, 0.0, []
    for number, engine in enumerate(engines):
        for origin in range(len(engines)):
            checkpoints = Checkpoints(folder / str(origin))
            state = restore(checkpoints, 1, engine.placement.canonical)
            pair = f"{LAYOUTS[origin]} resumed as {LAYOUTS[number]}"
            equal = jax.tree.map(np.array_equal, jax.device_get(state), saved[origin])
            if not all(jax.tree.leaves(equal)):
                faults.append(f"{pair}: arrays differ")
            loss = step(engine, engine.placement.from_canonical(state))[1]
            difference = abs(loss / losses[origin] - 1)
            if not difference <= TOLERANCE:
                faults.append(f"{pair}: the loss differs by {difference:.1e}")
            count, largest = count + 1, max(largest, difference)
        print(f"resumed from all: {LAYOUTS[number]}, {len(faults)} faults so far", flush=True)
    return {"resumes": count, "largest_difference_of_a_loss": largest, "faults": faults}


if __name__ == "__main__":
    sys.exit(main())
