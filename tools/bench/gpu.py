"""What `gpu.sh` runs: parts, each a command of its own that appends records to a file.

A part that fails or takes too long is a record too, and the next part goes on.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from provenance import ROOT, provenance

BUDGET_SECONDS = 460
"""No part is started, or goes on, after this."""

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "flax",
    "optax",
    "nvidia-cudnn-cu13",
    "nvidia-cublas",
)

SWEEP = (
    # sequences of a micro-batch, micro-batches, remat; what is likely best first
    (16, 1, "none"),
    (8, 1, "none"),
    (16, 1, "full"),
    (8, 4, "none"),
    (16, 4, "none"),
    (4, 1, "none"),
    (32, 1, "full"),
    (24, 1, "none"),
    (4, 16, "none"),
    (8, 1, "full"),
)
OBJECTIVES = ("causal", "causal_across_documents")
"""Attention with a mask of documents, and without, on the same rows."""
BOTH = 2
"""How many of the sweep train with both."""
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
    """A program and its flags, to which `--json FILE` is added."""

    name: str
    program: list[str]
    limit_seconds: float


def parts(rehearse: bool) -> Iterator[Part]:
    """All of them, in order."""
    small = ["--rehearse"] if rehearse else []
    yield Part("attention", ["tools/bench/attention.py", *small], 120)
    yield Part("loss", ["tools/bench/loss.py", *small], 60)
    yield Part("layouts", ["tools/bench/gpu_layouts.py"], 120)
    tiny = [f"--config.model.{setting}" for setting in TINY] + ["--config.data.seq_len=64"]
    sweep = [(*case, name) for case in SWEEP[:BOTH] for name in OBJECTIVES]
    sweep += [(*case, OBJECTIVES[0]) for case in SWEEP[BOTH:]]
    for sequences, microbatches, remat, objective in sweep[2:5] if rehearse else sweep:
        yield Part(
            f"llama32_1b, {microbatches} x {sequences} sequences, remat {remat}, {objective}",
            [
                "tools/bench/train.py",
                "--config",
                "configs/llama32_1b.py",
                "--layouts",
                f"microbatches={microbatches},remat={remat}",
                "--dtypes",
                "bfloat16",
                "--against",
                "none",
                "--repeats",
                "1",
                "--steps",
                "8",
                *(tiny if rehearse else ()),
                f"--config.data.objective={objective}",
                f"--config.data.global_batch_size={sequences * microbatches}",
            ],
            75,
        )


def run(part: Part, seconds: float) -> tuple[list[dict[str, Any]], bool]:
    """The records that a part wrote, and whether it ended well; memory that ran out is well."""
    print(f"\n== {part.name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "records.jsonl"
        # Its own session, so that what it started ends with it.
        process = subprocess.Popen(
            [sys.executable, *part.program, "--json", str(file)], cwd=ROOT, start_new_session=True
        )
        limit = min(seconds, part.limit_seconds)
        try:
            status = process.wait(limit)
            trouble = f"ended with {status}" if status else None
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            trouble = f"stopped after {limit:.0f} s"
        lines = file.read_text().splitlines() if file.exists() else ()
    records = [json.loads(line) for line in lines]
    errors = [record["error"] for record in records if "error" in record]
    if trouble and not errors:
        records.append({"error": trouble})
    command = shlex.join(["python", *part.program])
    records = [{**record, "part": part.name, "command": command} for record in records]
    fits = [OUT_OF_MEMORY not in error for error in errors]
    return records, not trouble or (bool(fits) and not any(fits))


def machine() -> dict[str, Any]:
    """The chip and the versions of what drives it."""
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,power.limit",
        "--format=csv,noheader",
    ]
    try:
        chip = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        chip = "no NVIDIA GPU"
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {"chip": chip, "versions": found}


def main(argv: Sequence[str]) -> int:
    """Returns 1 when a part failed for another reason than memory."""
    parser = argparse.ArgumentParser(prog="tools/bench/gpu.sh", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="every part, tiny, on a CPU")
    parser.add_argument("--results", type=pathlib.Path, help="where JSON lines are appended")
    parser.add_argument("--commit", help="of this code, where there is no repository to ask")
    options = parser.parse_args(argv)
    folder = (
        pathlib.Path(tempfile.gettempdir()) if options.rehearse else ROOT / "tools/bench/results"
    )
    results = options.results or folder / "gpu.jsonl"
    if options.rehearse:
        os.environ["JAX_PLATFORMS"] = "cpu"
    common = machine()
    begin, failed = time.monotonic(), []
    for part in parts(options.rehearse):
        left = BUDGET_SECONDS - (time.monotonic() - begin)
        if left > 20:
            records, well = run(part, left)
        else:
            records, well = [{"part": part.name, "error": "no time left"}], False
        if not well:
            failed.append(part.name)
        stamp = provenance() | ({"commit": options.commit} if options.commit else {})
        with results.open("a") as lines:
            for record in records:
                lines.write(json.dumps({**stamp, **record, **common}) + "\n")
    print(f"\n{time.monotonic() - begin:.0f} s; appended to {results}")
    print(f"failed: {'; '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
