"""Checkpoint corruption test: damages every file of a checkpoint and resumes the run each time.

    python tools/chaos/damage.py --seed 0

A run with two checkpoints is made. Then, for each file of the newer one, a copy of the run has that
file deleted, emptied, cut to half, filled with zeros, extended by a byte, or with random bits
flipped, and is resumed. Faults: a state that differs in any bit from both checkpoints; a resume
from the older checkpoint that does not rename the newer one; any other error. A change that leaves
the file as it was, such as zeros for zeros, is not counted. The last line is JSON.
"""

import argparse
import json
import logging
import os
import pathlib
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

SETTINGS = (
    "model.num_layers=1",
    "model.d_model=32",
    "model.d_ff=64",
    "data.seq_len=32",
    "run.steps=4",
    "run.checkpoint_every=2",
)
OLDER, NEWER = 2, 4


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if any damage was not detected or not survived."""
    parser = argparse.ArgumentParser(description="Damages every file of a checkpoint.")
    parser.add_argument("--flips", type=int, default=4, help="single bits to flip in each file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    logging.getLogger("jaxscale").setLevel(logging.ERROR)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="chaos_"))
    try:
        found = campaign(folder, options.flips, random.Random(options.seed))
    finally:
        shutil.rmtree(folder)
    print(json.dumps({**vars(options), **found}))
    return int(bool(found["faults"]))


def campaign(folder: pathlib.Path, flips: int, draw: random.Random) -> dict[str, Any]:
    """Runs all damages; counts and faults."""
    import jax  # noqa: PLC0415 - after the environment is set
    import numpy as np  # noqa: PLC0415

    from jaxscale import config as configs  # noqa: PLC0415
    from jaxscale.checkpoints.tiers import Checkpoints  # noqa: PLC0415
    from jaxscale.run import trainer, training_loop  # noqa: PLC0415
    from jaxscale.run.setup.resume import resume  # noqa: PLC0415

    config = configs.load("tiny", SETTINGS)
    run = trainer.open_trainer(config, folder / "run")
    assert run
    training_loop.fit(run, trackers=())

    def resumed(workdir: pathlib.Path) -> tuple[int, Any]:
        checkpoints = Checkpoints(workdir / "checkpoints")
        found = checkpoints.newest_intact()
        step, state, _ = resume(found, run.engine, checkpoints, run.text)
        return step, jax.device_get(state)

    def same(one: Any, other: Any) -> bool:
        return all(jax.tree.leaves(jax.tree.map(np.array_equal, one, other)))

    states = {NEWER: resumed(folder / "run")[1]}
    shutil.copytree(folder / "run", folder / "older")
    shutil.rmtree(folder / "older" / "checkpoints" / str(NEWER))
    states[OLDER] = resumed(folder / "older")[1]
    newer = folder / "run" / "checkpoints" / str(NEWER)
    files = sorted(path.relative_to(newer) for path in newer.rglob("*") if path.is_file())
    counts, faults = {"damages": 0, "older": 0, "newer": 0}, []
    for name in files:
        for kind, data in damages((newer / name).read_bytes(), flips, draw):
            counts["damages"] += 1
            copy = folder / "copy"
            shutil.copytree(folder / "run", copy)
            damaged = copy / "checkpoints" / str(NEWER) / name
            damaged.unlink() if data is None else damaged.write_bytes(data)
            fault = ""
            try:
                step, state = resumed(copy)
                counts["older" if step == OLDER else "newer"] += 1
                if not same(state, states[step]):
                    fault = f"resumed at step {step} with another state"
                elif step == OLDER and not (copy / f"checkpoints/{NEWER}.damaged1").is_dir():
                    fault = "the damaged checkpoint was not set aside"
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            if fault:
                faults.append(f"{name} {kind}: {fault}")
            shutil.rmtree(copy)
        print(f"{name}: done, {len(faults)} faults so far", flush=True)
    return {"files": len(files), **counts, "faults": faults}


def damages(data: bytes, flips: int, draw: random.Random) -> Iterator[tuple[str, bytes | None]]:
    """Ways to damage a file, each with its new content; None is a deleted file."""
    changed: list[tuple[str, bytes | None]] = [
        ("deleted", None),
        ("empty", b""),
        ("cut to half", data[: len(data) // 2]),
        ("zeros", bytes(len(data))),
        ("a byte longer", data + b"\0"),
    ]
    for _ in range(flips if data else 0):
        at, bit = draw.randrange(len(data)), draw.randrange(8)
        flipped = bytes([data[at] ^ 1 << bit])
        changed.append((f"bit {bit} of byte {at}", data[:at] + flipped + data[at + 1 :]))
    yield from ((kind, left) for kind, left in changed if left != data)


if __name__ == "__main__":
    sys.exit(main())
