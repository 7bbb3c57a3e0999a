"""GPU benchmark suite run by `gpu.sh`: parts, each a separate command that appends records to a
file.

A part that fails or times out is recorded, too, and the next part runs.
"""

import argparse
import importlib.metadata
import json
import math
import os
import pathlib
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from provenance import ROOT, provenance
from train import OUT_OF_MEMORY

from jaxscale import config as configs
from jaxscale.training.flops import step_flops

BUDGET_SECONDS = 460
"""Total seconds; the limits of the first cases fit."""

ENDING_SECONDS = 20
"""Seconds left for a case after its steps, for the trace and the record."""

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "flax",
    "optax",
    "nvidia-cudnn-cu13",
    "nvidia-cublas",
)


class Case(NamedTuple):
    """A timed train step."""

    config: str
    sequences: int  # of a micro-batch
    microbatches: int
    remat: str
    settings: tuple[str, ...] = ()
    memory_gib: float = 0.0  # of the smallest device with enough memory
    below_gib: float = math.inf  # of devices that have a larger form of the case

    def fits(self, memory_gib: float) -> bool:
        """Whether it is for a device with so much memory."""
        return self.memory_gib <= memory_gib and (
            memory_gib < self.below_gib or self.below_gib == math.inf
        )


ONE_DOCUMENT = "data.objective=causal_across_documents"
CUDNN = "model.attention=cudnn"
FLOAT8 = "model.matmul_dtype=float8"
UNROLLED = "layout.unroll_layers=True"
CAST_ONCE = (UNROLLED, "layout.zero_stage=2")  # of weights, in place of casts in every pass
NARROW = (
    "optimizer.moment_dtype=bfloat16",
    "optimizer.second_moment_dtype=bfloat16",
    "optimizer.moment_rounding=stochastic",
)
"""For an 8B model: 32 GB of moments instead of 64."""

ATTENTION_SAVED = "save:query,key,value,attention"

LONG = "data.seq_len=32768"
LARGE_GIB, SMALL_GIB = 135, 75
"""The memory of an H200 that is left for a step, and of an H100."""


def by_memory(config: str, remat: str, layers: tuple[int, int], *settings: str) -> tuple[Case, ...]:
    """A case with as many layers as fit a large device and a small one; 0 is all of the config."""
    cases = []
    for count, least, most in zip(layers, (LARGE_GIB, SMALL_GIB), (math.inf, LARGE_GIB)):
        some = (f"model.num_layers={count}",) if count else ()
        cases.append(Case(config, 1, 1, remat, (ONE_DOCUMENT, *settings, *some), least, most))
    return tuple(cases)


EXPERTS_AND_LONG = (
    *by_memory(
        "qwen3_30b_a3b", "save_matmuls", (11, 5), "layout.expert=1", "data.seq_len=16384", *NARROW
    ),
    *by_memory("llama3_8b", "full", (0, 16), LONG, *NARROW),
    *by_memory("llama3_8b", "full", (0, 0), "model.lora_rank=16", "data.seq_len=16384"),
)
"""Experts, a long context and adapters."""

FIRST_CASES = (
    Case("llama3_8b", 1, 4, "save_matmuls", (ONE_DOCUMENT, *NARROW, *CAST_ONCE), 135),
    Case("llama3_8b", 1, 4, "save_matmuls", (ONE_DOCUMENT, *NARROW, *CAST_ONCE, FLOAT8), 135),
    Case("llama3_8b", 1, 16, "save_matmuls", (ONE_DOCUMENT, *NARROW, *CAST_ONCE), 135),
)
"""The target cases."""

CASES = (
    # First the baselines of the target cases, then alternatives.
    Case("llama3_8b", 1, 16, "save_matmuls", (ONE_DOCUMENT, *NARROW, *CAST_ONCE, FLOAT8), 135),
    Case("llama3_8b", 1, 4, "save_matmuls", (ONE_DOCUMENT, *NARROW, UNROLLED), 120),
    Case("llama32_1b", 8, 1, "none"),
    Case("llama32_1b", 8, 1, "none", (CUDNN,)),
    Case("llama32_1b", 8, 1, "none", (ONE_DOCUMENT, FLOAT8)),
    Case("llama32_1b", 8, 1, "none", (ONE_DOCUMENT, "layout.offload=optimizer")),
    Case("llama32_1b", 8, 1, "full", (ONE_DOCUMENT, "layout.offload=activations")),
    Case("llama32_1b", 16, 1, "none", (ONE_DOCUMENT, UNROLLED), 120),
    Case("llama32_1b", 16, 1, "none", (ONE_DOCUMENT, *CAST_ONCE), 120),
    Case("llama32_1b", 8, 1, "none", (ONE_DOCUMENT,)),
    Case("llama32_1b", 8, 1, "none", (ONE_DOCUMENT, UNROLLED)),
    Case("llama3_8b", 1, 4, "save_matmuls", (ONE_DOCUMENT, *NARROW), 120),
    Case("llama3_8b", 1, 4, "save_matmuls", (ONE_DOCUMENT, *NARROW, UNROLLED, FLOAT8), 120),
    Case("llama3_8b", 2, 2, ATTENTION_SAVED, (ONE_DOCUMENT, *NARROW), 120),
    Case("llama3_8b", 2, 2, ATTENTION_SAVED, (ONE_DOCUMENT, *NARROW, FLOAT8), 120),
    Case("llama32_1b", 16, 1, "full", (ONE_DOCUMENT,)),
    Case("llama32_1b", 8, 4, "none", (ONE_DOCUMENT,)),
    Case("llama32_1b", 4, 1, "none", (ONE_DOCUMENT,)),
    Case("llama32_1b", 8, 1, "full", (ONE_DOCUMENT,)),
    Case("llama3_8b", 2, 1, "full", (ONE_DOCUMENT, *NARROW), 120),
    Case("llama32_1b", 32, 1, "full", (ONE_DOCUMENT,)),
)
FLOPS_TIMED = 3e15
"""FLOPs of all timed steps of a case: 8 seconds at 40 % of an H100's peak; 3 to 16 steps."""
TINY = (
    "num_layers=2",
    "d_model=64",
    "num_heads=4",
    "num_kv_heads=2",
    "head_dim=16",
    "d_ff=128",
    "vocab_size=512",
)


class Part(NamedTuple):
    """A program and its flags; `--json FILE` is added."""

    name: str
    program: list[str]
    limit_seconds: float
    steps: bool = False  # whether it gets --seconds, the time limit of its steps


def parts(rehearse: bool, memory_gib: float = math.inf) -> Iterator[Part]:
    """The parts that fit a device's memory, in order."""
    small = ["--rehearse"] if rehearse else []
    new, first, others = (
        [case for case in cases if case.fits(memory_gib)]
        for cases in (EXPERTS_AND_LONG, FIRST_CASES, CASES)
    )
    if rehearse:
        offloading = [case for case in others if any("offload" in one for one in case.settings)]
        first, others = first[:2], [others[2], *offloading]
    *before, adapters = (_timed(case, rehearse) for case in new) if new else (None,)
    yield from before
    pairs = ["tools/bench/attention.py", "--context", *small]
    yield Part("attention of context ranks", pairs, 60)
    if adapters:
        yield adapters
    yield from (_timed(case, rehearse) for case in first)
    yield Part("attention", ["tools/bench/attention.py", *small], 60)
    yield Part("layouts", ["tools/bench/gpu_layouts.py"], 75)
    yield Part("sums of float8", ["tools/bench/float8.py", *small], 40)
    yield Part("loss", ["tools/bench/loss.py", *small], 60)
    yield Part("grouped matmuls", ["tools/bench/grouped.py", *small], 60)
    save = ["tools/bench/checkpoint.py", "--gigabytes", "2", "--repeats", "3", *small]
    yield Part("save and restore", save, 45)
    yield from (_timed(case, rehearse) for case in others)


def _timed(case: Case, rehearse: bool) -> Part:
    rows = case.sequences * case.microbatches
    settings = [*case.settings, f"data.global_batch_size={rows}", f"layout.remat={case.remat}"]
    if rehearse:
        settings = [one for one in settings if "num_layers" not in one and "seq_len" not in one]
        settings += [f"model.{setting}" for setting in TINY] + ["data.seq_len=64"]
        if configs.load(ROOT / f"configs/{case.config}.py").model.num_experts:
            settings += ["model.num_experts=8", "model.expert_d_ff=64"]
    file = f"configs/{case.config}.py"
    config = configs.load(ROOT / file, settings)
    flops = step_flops(config).model * config.data.tokens_per_step
    name = ", ".join((*case.settings, f"remat {case.remat}"))
    return Part(
        f"{case.config}, {case.microbatches} x {case.sequences} sequences, {name}",
        [
            "tools/bench/train.py",
            "--config",
            file,
            "--layouts",
            f"microbatches={case.microbatches}",
            "--dtypes",
            "bfloat16",
            "--against",
            "none",
            "--repeats",
            "1",
            "--steps",
            str(min(16, max(3, int(FLOPS_TIMED / flops)))),
            *(f"--config.{setting}" for setting in settings),
        ],
        (85 if case.memory_gib else 60)
        + (15 if UNROLLED in case.settings else 0)
        + (40 if case.microbatches > 8 else 0),
        steps=True,
    )


def run(
    part: Part, seconds: float, trace: pathlib.Path | None = None
) -> tuple[list[dict[str, Any]], bool]:
    """Runs a part: its records, and whether it succeeded; out of memory counts as success.

    Args:
      seconds: the time limit.
      trace: a file for an archive of the steps' trace.
    """
    print(f"\n== {part.name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "records.jsonl"
        limit = min(seconds, part.limit_seconds)
        flags = ["--json", str(file)]
        if part.steps:
            flags += [f"--seconds={limit - ENDING_SECONDS:.0f}", f"--trace={folder}/trace"]
        # A separate session, so that processes it started can be killed with it.
        process = subprocess.Popen(
            [sys.executable, *part.program, *flags], cwd=ROOT, start_new_session=True
        )
        try:
            status = process.wait(limit)
            trouble = f"ended with {status}" if status else None
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            trouble = f"stopped after {limit:.0f} s"
        lines = file.read_text().splitlines() if file.exists() else ()
        if trace and part.steps and (found := pathlib.Path(folder) / "trace").exists():
            with tarfile.open(trace, "w:gz") as archive:
                archive.add(found, trace.name.partition(".")[0])
    records = [json.loads(line) for line in lines]
    # A numeric "error" is a measurement of loss.py, not a failure.
    errors = [record["error"] for record in records if isinstance(record.get("error"), str)]
    if trouble and not errors:
        records.append({"error": trouble})
    command = shlex.join(["python", *part.program])
    records = [{**record, "part": part.name, "command": command} for record in records]
    fits = [OUT_OF_MEMORY not in error for error in errors]
    return records, not trouble or (bool(fits) and not any(fits))


def machine() -> dict[str, Any]:
    """The first chip, its memory and the versions of driver and packages."""
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,power.limit",
        "--format=csv,noheader",
    ]
    try:
        chip = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
        chip, memory_gib = chip.splitlines()[0], float(chip.split(",")[2].split()[0]) / 1024
    except (OSError, subprocess.CalledProcessError):
        chip, memory_gib = "no NVIDIA GPU", 0.0
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {"chip": chip, "memory_gib": memory_gib, "versions": found}


def main(argv: Sequence[str]) -> int:
    """Returns 1 if a part failed, except for out of memory."""
    parser = argparse.ArgumentParser(prog="tools/bench/gpu.sh", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="every part, tiny, on a CPU")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="WORD",
        help="parts with one of these words in the name: 8b, float8, loss",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=BUDGET_SECONDS,
        help=f"total time limit, {BUDGET_SECONDS} by default",
    )
    parser.add_argument("--results", type=pathlib.Path, help="file to append JSON lines to")
    parser.add_argument(
        "--traces", type=pathlib.Path, help="folder for the traces of steps and their programs"
    )
    parser.add_argument("--commit", help="commit of this code, if there is no repository")
    options = parser.parse_args(argv)
    folder = (
        pathlib.Path(tempfile.gettempdir()) if options.rehearse else ROOT / "tools/bench/results"
    )
    results = options.results or folder / "gpu.jsonl"
    if options.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
    common = machine()
    if options.traces:
        options.traces.mkdir(parents=True, exist_ok=True)
    begin, failed = time.monotonic(), []
    memory_gib = math.inf if options.rehearse else common["memory_gib"]
    chosen = [
        part
        for part in parts(options.rehearse, memory_gib)
        if any(word in part.name for word in options.only)
    ]
    if not chosen:
        names = "; ".join(part.name for part in parts(options.rehearse, memory_gib))
        parser.error(f"--only {' '.join(options.only)} matches no part; parts: {names}")
    for number, part in enumerate(chosen):
        left = options.seconds - (time.monotonic() - begin)
        if left > 20:
            file = options.traces / f"trace_{number}.tar.gz" if options.traces else None
            records, well = run(part, left, file)
        else:
            records, well = [{"part": part.name, "error": "no time left"}], False
        if not well:
            failed.append(part.name)
        stamp, commit = provenance(), {"commit": options.commit} if options.commit else {}
        with results.open("a") as lines:
            for record in records:
                lines.write(json.dumps({**stamp, **record, **common, **commit}) + "\n")
    print(f"\n{time.monotonic() - begin:.0f} s; appended to {results}")
    print(f"failed: {'; '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
