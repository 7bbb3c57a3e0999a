"""Trains on one mesh, resumes on another, and compares with a run that never stopped.

    python examples/resume_on_another_mesh.py

On eight virtual CPU devices: six steps with ZeRO-3 over eight ranks, then six more with two
pipeline stages x two data ranks x two tensor ranks. The mesh is a setting of the command, not of
the checkpoint, and the examples come in the same order. Takes about 45 s on two cores.
"""

import json
import os
import pathlib
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}  # read when JAX is imported

import jaxscale

SETTINGS = ["data.seq_len=32", "optimizer.schedule_steps=12"]
SHARDED = ["layout.data=1", "layout.fsdp=8"]
PIPED = [
    *("layout.data=2", "layout.pipeline=2", "layout.tensor=2"),
    *("layout.microbatches=4", "layout.schedule=1f1b"),
]


def train(workdir: pathlib.Path, steps: int, layout: list[str]) -> None:
    """Starts a run, or resumes it from its newest checkpoint."""
    config = jaxscale.load("tiny", [*SETTINGS, f"run.steps={steps}", *layout])
    jaxscale.fit(jaxscale.open_trainer(config, workdir), trackers=())


def losses(workdir: pathlib.Path) -> list[float]:
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def main(runs: pathlib.Path = pathlib.Path("runs/examples")) -> None:
    whole, resumed = runs / "resume_whole", runs / "resume_resumed"
    if whole.exists() or resumed.exists():
        sys.exit(f"the runs exist; remove {runs}/resume_* to start again")
    train(whole, 12, SHARDED)
    train(resumed, 6, SHARDED)
    train(resumed, 12, PIPED)
    pairs = list(zip(losses(whole), losses(resumed), strict=True))
    for step, (one, other) in enumerate(pairs, 1):
        print(f"step {step:2}: never stopped {one:.5f}, resumed {other:.5f}")
    worst = max(abs(one - other) for one, other in pairs)
    print(f"largest difference {worst:.1e}, the rounding of float32")


if __name__ == "__main__":
    main()
