"""Compares the planner's predictions with steps measured by `tools/bench/train.py`.

python tools/bench/planned.py [RECORDS.jsonl] [--hardware h200]

A line of a table for each measured step of one device, in the order of the records: seconds and
peak memory, measured and predicted. The planner needs no device.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from jaxscale import command_line  # noqa: E402
from jaxscale import config as configs  # noqa: E402
from jaxscale.planner.cost.cluster import make_cluster  # noqa: E402
from jaxscale.planner.plan_layouts import plan_layouts  # noqa: E402

RECORDS = ROOT / "tools" / "bench" / "results" / "gpu.jsonl"


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="?", type=pathlib.Path, default=RECORDS)
    parser.add_argument("--hardware", default="h200")
    options = parser.parse_args()
    with command_line.refusals():
        options.records.open().close()
        make_cluster(options.hardware, 1)
    names = ["model", "sequences", "remat", "offload", "layers", "matmuls", "attention"]
    titles = [*names, "s a step", "planned", "", "peak", "planned"]
    print(row_of(titles))
    print(row_of(["---"] * len(titles)))
    for row in compared(options.records, options.hardware):
        seconds, memory = row["seconds"], row["bytes"]
        cells = [f"{seconds[0]:.4g}", f"{seconds[1]:.4g}", f"{seconds[1] / seconds[0] - 1:+.1%}"]
        cells += [f"{one / 1e9:.1f} GB" for one in memory]
        print(row_of([*(row[name] for name in names), *cells]))
    return 0


def row_of(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def compared(records: pathlib.Path, hardware: str) -> Iterator[dict[str, Any]]:
    """Measured and predicted values of the same steps, in the order of the records."""
    for line in records.read_text().splitlines():
        record = json.loads(line)
        if record.get("benchmark") != "train" or "step_seconds" not in record:
            continue
        if record["num_devices"] != 1:
            raise ValueError(
                f"a record has a step of {record['num_devices']} devices; give records of 1 device"
            )
        config = configs.load(ROOT / record["config"], record["settings"])
        layout = config.layout
        pins = {name: getattr(layout, name) for name in ("microbatches", "accumulation", "remat")}
        pins |= {name: getattr(layout, name) for name in ("zero_stage", "offload", "unroll_layers")}
        # The step fitted, so the plan may use all of the memory.
        memory = make_cluster(hardware, 1).memory_bytes
        asked = {"pins": pins, "max_memory_bytes": memory, "top": 1}
        plan = plan_layouts(config, hardware, 1, **asked).plans[0]
        each = config.data.global_batch_size // layout.microbatches
        yield {
            "model": pathlib.Path(record["config"]).stem,
            "sequences": f"{layout.microbatches} x {each}",
            "remat": layout.remat,
            "offload": layout.offload,
            "layers": "unrolled" if layout.unroll_layers else "loop",
            "matmuls": config.model.matmul_dtype or config.model.compute_dtype,
            "attention": record["note"].removesuffix(" attention"),
            "seconds": (record["step_seconds"], plan.step_seconds),
            "bytes": (record["peak_device_bytes"], plan.memory_bytes),
        }


if __name__ == "__main__":
    sys.exit(main())
