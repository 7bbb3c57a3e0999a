"""Compares compiled steps with MaxText's in docs/compile_ahead.md: memory and time estimate.

python tools/aot_peer.py [--environment DIR] [--fresh]

MaxText has a separate environment, made by `python tools/bench/peers.py --install`, and compiles
with its `train_compile` and the same libtpu, because from one libtpu to the next the same program
may need a third less. Our temporaries are those of tools/aot_table.json. XLA's cost analysis counts
the body of a loop once, so the estimate is of programs with unrolled loops: ours are compiled with
4 and 6 layers and extrapolated linearly. Results are kept in tools/aot_peer.json.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
TABLE = ROOT / "tools" / "aot_table.json"
KEPT = ROOT / "tools" / "aot_peer.json"
PAGE = ROOT / "docs" / "compile_ahead.md"
ENVIRONMENT = pathlib.Path.home() / ".cache" / "jaxscale" / "peers" / "maxtext"
BEGIN, END = "<!-- aot peer -->", "<!-- end of aot peer -->"
MINIMAL = "save:query,key,value,attention_out,mlp_gate,mlp_up"
NUM_LAYERS, SHALLOW, DEEP = 32, 4, 6
ESTIMATE = "estimate"


class Case(NamedTuple):
    """A step of both, with 4 sequences of 4,096 tokens a chip."""

    text: str
    ours: str  # its name in the table
    settings: str  # MaxText's


CASES = (
    Case(
        "llama2_7b, 64 v5p, fsdp 64, full remat",
        "llama2_7b v5p:4x4x4 4 remat=full",
        "compile_topology=v5p-128 model_name=llama2-7b remat_policy=full",
    ),
    Case(
        "the same, every matmul's output saved",
        f"llama2_7b v5p:4x4x4 4 remat={MINIMAL}",
        "compile_topology=v5p-128 model_name=llama2-7b remat_policy=minimal",
    ),
    Case(
        "the same, fsdp 16 x pipeline 4, 16 micro-batches, full remat",
        "llama2_7b v5p:4x4x4 4 remat=full pipeline=4 microbatches=16 schedule=1f1b "
        "pipeline_gather=layer",
        "compile_topology=v5p-128 model_name=llama2-7b remat_policy=full "
        "ici_pipeline_parallelism=4 ici_fsdp_parallelism=16 num_layers_per_pipeline_stage=8 "
        "num_pipeline_microbatches=16",
    ),
    Case(
        "llama2_7b, 256 v5e, fsdp 256, full remat",
        "llama2_7b v5e:16x16 4 remat=full",
        "compile_topology=v5e-256 model_name=llama2-7b remat_policy=full",
    ),
    Case(
        "llama2_70b, 512 v5p, fsdp 128 x tensor 4, full remat",
        "llama2_70b v5p:8x8x8 4 remat=full tensor=4",
        "compile_topology=v5p-1024 model_name=llama2-70b remat_policy=full "
        "ici_fsdp_parallelism=128 ici_tensor_parallelism=4 allow_split_physical_axes=true",
    ),
)
WRITTEN_OUT = f"{CASES[0].settings} scan_layers=false"


def main() -> int:
    """Compiles missing results, prints, and returns 1 if ours need more than MaxText's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", metavar="DIR", type=pathlib.Path, default=ENVIRONMENT)
    parser.add_argument("--fresh", action="store_true", help="compile again")
    options = parser.parse_args()
    compiled = json.loads(TABLE.read_text())
    version = importlib.metadata.version("libtpu")
    other = {compiled[case.ours]["libtpu"] for case in CASES} - {version}
    if other:
        parser.error(
            f"libtpu {version} is installed, and tools/aot_table.json is of {', '.join(other)}; "
            "install that version, or run tools/aot_table.py --fresh"
        )
    kept: dict[str, Any] = (
        {} if options.fresh or not KEPT.exists() else json.loads(KEPT.read_text())
    )
    kept = kept if kept.get("libtpu") == version else {"libtpu": version}
    for case in CASES:
        if case.settings not in kept:
            kept[case.settings] = maxtext(options.environment, case.settings)["temp_bytes"]
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    if ESTIMATE not in kept:
        theirs = maxtext(options.environment, WRITTEN_OUT)["optimal_seconds"]
        kept[ESTIMATE] = [theirs, of_all_layers(written_out(SHALLOW), written_out(DEEP))]
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    print(table(compiled, kept))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(compiled, kept)}\n{END}{after}")
    return int(any(ours > theirs for theirs, ours in pairs(compiled, kept)))


def maxtext(environment: pathlib.Path, settings: str) -> dict[str, float]:
    """Temporaries in bytes, and XLA's estimate in seconds, of MaxText's step.

    Raises:
      RuntimeError: it did not compile; with the end of its output.
    """
    python = environment / "bin" / "python"
    (package,) = environment.glob("lib/python*/site-packages/maxtext")
    spec = importlib.util.find_spec("libtpu")
    assert spec, "its version was found"
    assert spec.submodule_search_locations
    libtpu = pathlib.Path(spec.submodule_search_locations[0])
    with tempfile.TemporaryDirectory() as folder:
        # Only libtpu is ours: MaxText uses the JAX of its environment.
        for found in libtpu.parent.glob("libtpu*"):
            (pathlib.Path(folder) / found.name).symlink_to(found)
        command = [
            str(python),
            "-m",
            "maxtext.trainers.pre_train.train_compile",
            str(package / "configs" / "base.yml"),
            *settings.split(),
            "compile_topology_num_slices=1",
            "max_target_length=4096",
            "per_device_batch_size=4",
            "enable_checkpointing=false",
            "run_name=peer",
            f"base_output_directory={folder}/out",
        ]
        surroundings = os.environ | {
            "PYTHONPATH": folder,
            "JAX_PLATFORMS": "cpu",
            "DECOUPLE_GCLOUD": "TRUE",
        }
        done = subprocess.run(command, env=surroundings, cwd=folder, capture_output=True, text=True)
    printed = done.stdout + done.stderr
    memory = re.search(r"[( ]temp_size_in_bytes=(\d+)", printed)
    seconds = re.search(r"'optimal_seconds': ([\d.e+-]+)", printed)
    if not memory:
        raise RuntimeError(f"MaxText did not compile {settings}: {printed[-500:]}")
    return {
        "temp_bytes": float(memory[1]),
        "optimal_seconds": float(seconds[1]) if seconds else float("nan"),
    }


def written_out(num_layers: int) -> float:
    """XLA's estimate in seconds for our model with some layers, unrolled."""
    with tempfile.TemporaryDirectory() as folder:
        written = pathlib.Path(folder) / "numbers.json"
        command = [
            sys.executable,
            "-m",
            "jaxscale.aot",
            "--config",
            "llama2_7b",
            "--topology",
            "v5p:4x4x4",
            "--unroll_loops",
            "--json",
            str(written),
            f"--config.model.num_layers={num_layers}",
            "--config.data.global_batch_size=256",
            "--config.layout.microbatches=1",
            "--config.layout.remat=full",
        ]
        subprocess.run(command, cwd=ROOT, check=True)
        return json.loads(written.read_text())["optimal_seconds"]


def of_all_layers(shallow: float, deep: float) -> float:
    """Extrapolates the estimate to `NUM_LAYERS` layers from `SHALLOW` and `DEEP`."""
    return shallow + (NUM_LAYERS - SHALLOW) / (DEEP - SHALLOW) * (deep - shallow)


def pairs(compiled: Mapping[str, Any], kept: Mapping[str, Any]) -> list[tuple[float, float]]:
    """MaxText's and our numbers: bytes of each case, and seconds."""
    sizes = [(kept[case.settings], compiled[case.ours]["temp_bytes"]) for case in CASES]
    return [*sizes, tuple(kept[ESTIMATE])]


def table(compiled: Mapping[str, Any], kept: Mapping[str, Any]) -> str:
    """The comparison in Markdown."""
    *sizes, seconds = pairs(compiled, kept)
    rows = [
        f"| {case.text} | {theirs / 1e9:.2f} | {ours / 1e9:.2f} |"
        for case, (theirs, ours) in zip(CASES, sizes)
    ]
    estimate = " | ".join(f"{value:.3f}" for value in seconds)
    last = f"| estimate of the first, loops unrolled, s | {estimate} |"
    return "\n".join(["| temporaries, GB | MaxText | jaxscale |", "|---|---|---|", *rows, last])


if __name__ == "__main__":
    sys.exit(main())
