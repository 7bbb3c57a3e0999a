"""Compares compiled steps with MaxText's in docs/compile_ahead.md: memory and time estimate.

python tools/aot_peer.py [--environment DIR] [--fresh]

MaxText has a separate environment, made by `python tools/bench/peers.py --install`, and compiles
with its `train_compile` and the same libtpu, because from one libtpu to the next the same program
may need a third less. PYTHONPATH=DIR chooses another libtpu than the installed one, for ours and
MaxText's. Our bytes are those of tools/aot_table.json. XLA's cost analysis counts
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
    """A step of both."""

    text: str
    ours: str  # its name in the table
    settings: str  # MaxText's, with `SEQUENCES` unless it sets them


SEQUENCES = {"max_target_length": "4096", "per_device_batch_size": "4"}


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
    Case(
        "mixtral_8x7b, 64 v5p, fsdp 64, no token dropped",
        "mixtral_8x7b v5p:4x4x4 4 remat=full expert=1",
        "compile_topology=v5p-128 model_name=mixtral-8x7b remat_policy=full "
        "ici_fsdp_parallelism=64",
    ),
    Case(
        "the same, capacity 1.25",
        "mixtral_8x7b v5p:4x4x4 4 remat=full expert=1 model.capacity_factor=1.25",
        "compile_topology=v5p-128 model_name=mixtral-8x7b remat_policy=full "
        "ici_fsdp_parallelism=64 sparse_matmul=false megablox=false capacity_factor=1.25",
    ),
    Case(
        "the same, fsdp 8 x expert 8, no token dropped",
        "mixtral_8x7b v5p:4x4x4 4 remat=full expert=8",
        "compile_topology=v5p-128 model_name=mixtral-8x7b remat_policy=full "
        "ici_fsdp_parallelism=8 ici_expert_parallelism=8 allow_split_physical_axes=true",
    ),
    Case(
        "deepseek_v3, 512 v5p, fsdp 64 x expert 8",
        "deepseek_v3 v5p:8x8x8 1 remat=full expert=8",
        "compile_topology=v5p-1024 model_name=deepseek3-671b remat_policy=full "
        "per_device_batch_size=1 ici_fsdp_parallelism=64 ici_expert_parallelism=8",
    ),
    Case(
        "qwen3_30b_a3b, 64 v5p, fsdp 64",
        "qwen3_30b_a3b v5p:4x4x4 4 remat=full expert=1",
        "compile_topology=v5p-128 model_name=qwen3-30b-a3b remat_policy=full "
        "ici_fsdp_parallelism=64",
    ),
    Case(
        "llama3_8b, 64 v5p, fsdp 8 x context 8, 32,768 tokens",
        "llama3_8b v5p:4x4x4 0.125 remat=full context=8 data.seq_len=32768",
        "compile_topology=v5p-128 model_name=llama3.1-8b remat_policy=full "
        "max_target_length=32768 per_device_batch_size=0.125 ici_fsdp_parallelism=8 "
        "ici_context_parallelism=8 allow_split_physical_axes=true",
    ),
    Case(
        "the same, 131,072 tokens",
        "llama3_8b v5p:4x4x4 0.125 remat=full context=8 data.seq_len=131072",
        "compile_topology=v5p-128 model_name=llama3.1-8b remat_policy=full "
        "max_target_length=131072 per_device_batch_size=0.125 ici_fsdp_parallelism=8 "
        "ici_context_parallelism=8 allow_split_physical_axes=true",
    ),
    Case(
        "gemma2_9b, 64 v6e, fsdp 64, 8,192 tokens",
        "gemma2_9b v6e:8x8 1 remat=full",
        "compile_topology=v6e-64 model_name=gemma2-9b remat_policy=full "
        "max_target_length=8192 per_device_batch_size=1 ici_fsdp_parallelism=64",
    ),
)
SIZES = ("argument_bytes", "temp_bytes")
WRITTEN_OUT = f"{CASES[0].settings} scan_layers=false"


def main() -> int:
    """Compiles missing results, prints, and returns 1 if ours need more than MaxText's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", metavar="DIR", type=pathlib.Path, default=ENVIRONMENT)
    parser.add_argument("--fresh", action="store_true", help="compile again")
    options = parser.parse_args()
    compiled = json.loads(TABLE.read_text())
    version = importlib.metadata.version("libtpu")
    ours = [case.ours for case in CASES if case.ours in compiled]
    other = {compiled[name]["libtpu"] for name in ours} - {version}
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
            numbers = maxtext(options.environment, case.settings)
            kept[case.settings] = {name: numbers[name] for name in SIZES}
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    if ESTIMATE not in kept:
        theirs = maxtext(options.environment, WRITTEN_OUT)["optimal_seconds"]
        kept[ESTIMATE] = [theirs, of_all_layers(written_out(SHALLOW), written_out(DEEP))]
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    text = table(compiled, kept)
    print(text)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    for case in CASES:
        if case.ours not in compiled:
            print(f"not compiled: {case.text}; run tools/aot_table.py --only '{case.ours}'")
    theirs, mine = kept[ESTIMATE]
    return int(
        len(ours) < len(CASES)
        or any(row.ratio > 1 for row in rows(compiled, kept))
        or mine > theirs
    )


class Row(NamedTuple):
    """A case with both results."""

    case: Case
    theirs: Mapping[str, float]
    ours: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Our bytes over MaxText's: arguments and temporaries; temporaries alone where MaxText's
        arguments are not recorded."""
        names = [name for name in SIZES if name in self.theirs]
        theirs, ours = (sum(one[name] for name in names) for one in (self.theirs, self.ours))
        return ours / theirs


def maxtext(environment: pathlib.Path, settings: str) -> dict[str, float]:
    """Arguments and temporaries in bytes, and XLA's estimate in seconds, of MaxText's step.

    Raises:
      RuntimeError: it did not compile; with the end of its output.
    """
    python = environment / "bin" / "python"
    (package,) = environment.glob("lib/python*/site-packages/maxtext")
    spec = importlib.util.find_spec("libtpu")
    assert spec, "its version was found"
    assert spec.submodule_search_locations
    given = SEQUENCES | dict(setting.split("=", 1) for setting in settings.split())
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
            *(f"{name}={value}" for name, value in given.items()),
            "compile_topology_num_slices=1",
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
    arguments, temporaries = (
        re.search(rf"[( ]{name}_size_in_bytes=(\d+)", printed) for name in ("argument", "temp")
    )
    seconds = re.search(r"'optimal_seconds': ([\d.e+-]+)", printed)
    if not (arguments and temporaries):
        raise RuntimeError(f"MaxText did not compile {settings}: {printed[-500:]}")
    return {
        "argument_bytes": float(arguments[1]),
        "temp_bytes": float(temporaries[1]),
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


def rows(compiled: Mapping[str, Any], kept: Mapping[str, Any]) -> list[Row]:
    """The cases that both have compiled."""
    known = [case for case in CASES if case.ours in compiled and case.settings in kept]
    return [Row(case, kept[case.settings], compiled[case.ours]) for case in known]


def table(compiled: Mapping[str, Any], kept: Mapping[str, Any]) -> str:
    """The comparison in Markdown."""

    def cell(row: Row, name: str) -> str:
        both = (one.get(name) for one in (row.theirs, row.ours))
        return " / ".join("-" if x is None else f"{x / 1e9:.2f}" for x in both)

    lines = [
        "| MaxText / jaxscale | arguments, GB | temporaries, GB | ratio |",
        "|---|---|---|---|",
    ]
    for row in rows(compiled, kept):
        cells = [cell(row, name) for name in SIZES]
        lines.append(f"| {row.case.text} | {' | '.join(cells)} | {row.ratio:.2f} |")
    theirs, ours = kept[ESTIMATE]
    last = f"Estimate of the first, loops unrolled: {theirs:.3f} / {ours:.3f} s"
    return "\n".join([*lines, "", f"{last}, ratio {ours / theirs:.2f}."])


if __name__ == "__main__":
    sys.exit(main())
