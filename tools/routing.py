"""python tools/routing.py [--steps 10]

Differences in MoE routing between layouts: trains a small model in bfloat16 on one device and in
other layouts, and prints the fraction of one device's choices that a layout does not make. In
float64 it is 0 (`tests/invariants/test_models.py`). Virtual CPU devices.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jaxscale import command_line  # noqa: E402 - which imports no JAX

LAYOUTS = (
    {"fsdp": 4},
    {"expert": 4},
    {"tensor": 4},
    {"context": 4},
    {"fsdp": 2, "expert": 2, "remat": "full"},
    {"expert": 2, "tensor": 2, "overlap_experts": True},
    {"pipeline": 2, "expert": 2, "microbatches": 4},
)


def main(argv: Sequence[str]) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=command_line.whole(1, 1000), default=10)
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32", "float64"),
        help="compute type of the layers",
    )
    options = parser.parse_args(argv)
    os.environ |= {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    if options.dtype == "float64":
        os.environ["JAX_ENABLE_X64"] = "1"
    alone = list(_choices({}, options))
    print(f"| layout | first step | step {options.steps} | loss of step {options.steps} |")
    print("|---|---|---|---|")
    print(f"| one device | | | {alone[-1][1]:.4f} |")
    for layout in LAYOUTS:
        found = list(_choices(layout, options))
        first, last = (_share(alone[step][0], found[step][0]) for step in (0, -1))
        name = " ".join(f"{key}={value}" for key, value in layout.items())
        print(f"| {name} | {first:.2%} | {last:.2%} | {found[-1][1]:.4f} |", flush=True)
    return 0


def _choices(layout: Mapping[str, Any], options: argparse.Namespace) -> Iterator[tuple[Any, float]]:
    """For each step, the chosen experts of each layer and token, and the loss."""
    import jax  # noqa: PLC0415 - after the devices are set
    import numpy as np  # noqa: PLC0415

    from jaxscale.batch import Batch  # noqa: PLC0415
    from jaxscale.config import from_dict  # noqa: PLC0415
    from jaxscale.sharding.mesh import make_mesh  # noqa: PLC0415
    from jaxscale.training.engine import make_engine  # noqa: PLC0415
    from tests.models.watched import LENGTH, ROWS, Watched  # noqa: PLC0415

    wide = "float64" if options.dtype == "float64" else "float32"
    model = {"family": "mixtral", "num_layers": 4, "d_model": 128, "num_heads": 4}
    model |= {"num_kv_heads": 4, "head_dim": 32, "d_ff": 128, "num_experts": 8, "vocab_size": 256}
    model |= {"compute_dtype": options.dtype, "param_dtype": wide}
    kept = ("accumulation_dtype", "moment_dtype", "second_moment_dtype")
    config = from_dict(
        {
            "model": model,
            "data": {"global_batch_size": ROWS, "seq_len": LENGTH},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 5, **dict.fromkeys(kept, wide)},
            "layout": {"data": 1, **layout},
            "run": {"steps": 1000},
        }
    )
    mesh = make_mesh(config.layout, jax.devices()[: config.layout.num_devices])
    engine = make_engine(config, mesh, model=Watched)
    state, rng = engine.init(jax.random.key(0)), np.random.default_rng(0)
    numbers = np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH)
    place = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), numbers.shape)
    for _ in range(options.steps):
        # A random sequence in which the next token is near this one, so that the model can learn.
        tokens = np.cumsum(rng.integers(0, 4, (ROWS, LENGTH + 1)), axis=1, dtype=np.int32) % 256
        weights, ones = np.ones(numbers.shape, np.float32), np.ones_like(numbers)
        batch = Batch(tokens[:, :-1], tokens[:, 1:], ones, place, weights, {"number": numbers})
        state, metrics = engine.step(state, engine.shard(batch))
        yield np.asarray(metrics.others["layers/choices"]), float(metrics.loss)


def _share(wanted: Any, found: Any) -> float:
    """The fraction of choices in `wanted`, [layers, tokens, experts], that are not in `found`."""
    return float(((wanted > 0) & (found == 0)).sum() / (wanted > 0).sum())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
