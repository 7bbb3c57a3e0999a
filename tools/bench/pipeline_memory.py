"""python tools/bench/pipeline_memory.py [--pipeline 4] [--microbatches 16,32]

Memory of pipelines: compiles a step with every schedule for virtual CPU devices and compares the
compiler's memory with the table's: slots times the residuals of a layer, plus the gradient
accumulators. The working set of one operation, the same for all schedules, is calibrated with the
first line for each remat policy and predicts all others. Nothing runs.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from pipeline import counts  # noqa: E402

from jaxscale import command_line  # noqa: E402 - which imports no JAX

SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "1f1b:fused": 1,
    "interleaved": 2,
    "breadth_first": 2,
    "zb_h1": 1,
    "zb_h2": 1,
    "zb_v": 2,
}


def main(argv: Sequence[str]) -> int:
    """Prints a line for each schedule, remat policy and number of micro-batches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pipeline", type=command_line.whole(1, 64), default=4)
    parser.add_argument("--microbatches", type=counts, default="16,32")
    parser.add_argument("--d_model", type=int, default=128)
    parser.add_argument("--seq_len", type=int, default=512)
    options = parser.parse_args(argv)
    os.environ["JAX_NUM_CPU_DEVICES"] = str(options.pipeline)
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(
        f"{'schedule':16}{'remat':8}{'micro':>6}  {'slots (b / w / cotangent / inbox)':36}"
        f"{'table MB':>9}{'and work':>9}{'compiled MB':>13}{'predicted':>10}"
    )
    for remat in ("none", "full"):
        work = None
        for schedule in SCHEDULES:
            for microbatches in options.microbatches:
                work = line(options, schedule, remat, microbatches, work)
    return 0


def line(
    options: argparse.Namespace, schedule: str, remat: str, microbatches: int, work: int | None
) -> int:
    """Compiles one case; returns the working set of an operation in bytes, calibrated with this
    case if it is None."""
    # After JAX_NUM_CPU_DEVICES is set.
    import jax  # noqa: PLC0415

    from jaxscale.config import from_dict  # noqa: PLC0415
    from jaxscale.sharding.mesh import make_mesh  # noqa: PLC0415
    from jaxscale.training.engine import make_engine  # noqa: PLC0415

    width = options.d_model
    config = from_dict(
        {
            "model": {
                "num_layers": 4 * options.pipeline,
                "d_model": width,
                "num_heads": width // 32,
                "num_kv_heads": width // 32,
                "head_dim": 32,
                "d_ff": 3 * width,
                "vocab_size": 256,
                "compute_dtype": "float32",
            },
            "data": {"global_batch_size": microbatches, "seq_len": options.seq_len},
            "layout": {
                "data": 1,
                "pipeline": options.pipeline,
                "microbatches": microbatches,
                "schedule": schedule,
                "virtual_stages": SCHEDULES[schedule],
                "remat": remat,
            },
        }
    )
    engine = make_engine(config, make_mesh(config.layout))
    assert engine.stages is not None
    kept = engine.pipeline_buffers()
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept))
    lowered = engine.step.lower(engine.abstract_state, engine.abstract_batch)
    program = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    temp = program.memory_analysis().temp_size_in_bytes
    slots = engine.stages.program.slots
    used = " / ".join(
        str(slots[name]) for name in ("residual_b", "residual_w", "cotangent", "inbox")
    )
    if work is None:
        work, ratio = int(temp - kept), ""
    else:
        ratio = f"{(kept + work) / temp:.3f}"
    print(
        f"{schedule:16}{remat:8}{microbatches:6}  {used:36}{kept / 1e6:9.2f}{work / 1e6:9.2f}"
        f"{temp / 1e6:13.2f}{ratio:>10}",
        flush=True,
    )
    return work


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
