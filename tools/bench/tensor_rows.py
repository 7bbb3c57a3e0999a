"""Benchmark of 2D tensor parallelism: Llama 2 70B on 64 absent chips by number of tensor rows.

python tools/bench/tensor_rows.py [--compile v5p:4x4x4] [--json FILE]

For each grid the planner's step time, the time of tensor parallelism before and after overlap, and
memory. With --compile also from the compiled step (minutes each): bytes of collectives over rows
and columns per device and step, their seconds on the links, and memory. Bytes are of whole arrays,
gathered or before the scatter; an all-reduce's count twice.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent.parent
GRIDS = ((8, 1), (8, 2), (16, 1), (16, 2), (16, 4))
"""Ranks of tensor, and their rows."""
SETTINGS = ("data.global_batch_size=64", "layout.microbatches=1", "layout.remat=full")


def main() -> int:
    """Prints a line for each grid."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", metavar="TOPOLOGY")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    rows = []
    for tensor, across in GRIDS:
        row = {"tensor": tensor, "tensor_rows": across, **planned(tensor, across)}
        if options.compile:
            row |= measured(options.compile, tensor, across)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def planned(tensor: int, across: int) -> dict[str, Any]:
    """The planner's numbers for one grid."""
    pins = {"pipeline": 1, "data": 1, "context": 1, "zero_stage": 3, "microbatches": 1}
    pins |= {"tensor": tensor, "tensor_rows": across, "remat": "full", "offload": "none"}
    command = ["jaxscale.plan", "--config", "llama2_70b", "--hardware", "v5p"]
    command += ["--devices", "64", "--top", "1", "--config.data.global_batch_size=64"]
    for name, value in pins.items():
        command += ["--pin", f"{name}={value}"]
    (best,) = run(command)["plans"]
    return {
        "step_seconds": best["step_seconds"],
        "tensor_seconds": best["terms"].get("tensor", 0.0) + best["hidden"].get("tensor", 0.0),
        "exposed_seconds": best["terms"].get("tensor", 0.0),
        "memory_bytes": best["memory_bytes"],
    }


def run(command: list[str]) -> dict[str, Any]:
    """Runs a command and returns its JSON output."""
    with tempfile.TemporaryDirectory() as folder:
        written = pathlib.Path(folder) / "numbers.json"
        command = [sys.executable, "-m", *command, "--json", str(written)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return json.loads(written.read_text())


def measured(topology: str, tensor: int, across: int) -> dict[str, Any]:
    """The compiled step's numbers for one grid."""
    sizes = (f"layout.tensor={tensor}", f"layout.tensor_rows={across}")
    command = ["jaxscale.aot", "--config", "llama2_70b", "--topology", topology]
    command += ["--skip_memory_check"]
    report = run([*command, *(f"--config.{setting}" for setting in (*SETTINGS, *sizes))])
    found: dict[str, Any] = {"topology": topology}
    for name, axis in (("rows", "tensor_rows"), ("columns", "tensor"), ("fsdp", "fsdp")):
        own = [one for one in report["collectives"] if one["axis"] == axis]
        found[f"{name}_bytes"] = sum(
            one["bytes"] * (2 if one["kind"] == "all-reduce" else 1) for one in own
        )
        found[f"{name}_seconds"] = sum(one["link_seconds"] or 0 for one in own)
    kept = ("fits", "peak_bytes", "flops", "link_seconds", "wait_seconds", "compile_seconds")
    return found | {name: report[name] for name in kept}


if __name__ == "__main__":
    sys.exit(main())
