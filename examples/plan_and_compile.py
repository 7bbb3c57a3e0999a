"""Plans a model for TPUs that are not attached, and compiles the fastest layout for them.

    python examples/plan_and_compile.py [SECTION.KEY=VALUE ...]

Ranks layouts of a small decoder on four TPU v5p chips, then gives the first one to
`python -m jaxscale.aot`: the real train step, by the real TPU compiler. Needs the extra `aot`
(libtpu; no TPU). Compiled memory depends on the version of libtpu (docs/planning.md). Takes
about 60 s on two cores; CONFIG = "llama3_8b" takes minutes.
"""

import importlib.util
import json
import pathlib
import subprocess
import sys

import jaxscale

CONFIG, CHIP, TOPOLOGY = "quickstart", "TPUv5p", "v5p:2x2x1"
SETTINGS = ["model.compute_dtype=bfloat16", "data.global_batch_size=32"]


def main(overrides: list[str], runs: pathlib.Path = pathlib.Path("runs/examples")) -> None:
    if importlib.util.find_spec("libtpu") is None:
        sys.exit("the TPU compiler is missing; install it with: uv sync --inexact --extra aot")
    config = jaxscale.load(CONFIG, [*SETTINGS, *overrides])
    plans = jaxscale.plan_layouts(config, CHIP, 4, top=3).plans
    for plan in plans:
        print(plan)
    planned, configured = vars(plans[0].layout), vars(config.layout)
    chosen = [
        f"layout.{name}={planned[name]}" for name in planned if planned[name] != configured[name]
    ]
    command = [sys.executable, "-m", "jaxscale.aot", "--config", CONFIG, "--topology", TOPOLOGY]
    command += [f"--config.{one}" for one in (*SETTINGS, *overrides, *chosen)]
    runs.mkdir(parents=True, exist_ok=True)
    report = runs / "plan_and_compile.json"
    subprocess.run([*command, "--json", str(report)], check=True)
    compiled = json.loads(report.read_text())
    needed = compiled["peak_bytes"] / 1e9
    print(f"memory a chip: {plans[0].memory_bytes / 1e9:.2f} GB planned, {needed:.2f} GB compiled")


if __name__ == "__main__":
    main(sys.argv[1:])
