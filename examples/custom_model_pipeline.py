"""Trains a custom model on one device and in a zero-bubble pipeline, and compares the losses.

    python examples/custom_model_pipeline.py

The model is docs/my_model.py: attention and MLP in parallel, each with a learned gate, and a loss
with heavier late tokens (docs/own_model.md explains it). Nothing in it names a mesh axis, yet it
runs in every layout. Takes about 30 s on two cores.
"""

import itertools
import os
import pathlib
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}  # read when JAX is imported

import jax

import jaxscale

SETTINGS = ["model.family=my_model:MyModel", "model.late_weight=3.0", "data.seq_len=32"]
LAYOUTS = {
    "one device": ["layout.data=1"],
    "pipeline 2 x tensor 2": [
        *("layout.data=1", "layout.pipeline=2", "layout.tensor=2"),
        *("layout.schedule=zb_h1", "layout.microbatches=4"),
    ],
}


def train(layout: list[str], steps: int, runs: pathlib.Path) -> list[float]:
    config = jaxscale.load("tiny", [*SETTINGS, *layout])
    mesh = jaxscale.make_mesh(config.layout, jax.devices()[: config.layout.num_devices])
    engine = jaxscale.make_engine(config, mesh)
    text = jaxscale.open_text(config, runs / "custom_model")
    state, losses = engine.init(jax.random.key(0)), []
    for batch in itertools.islice(jaxscale.device_batches(engine, text.train, 8), steps):
        state, metrics = engine.step(state, batch)  # donates the state
        losses.append(float(metrics.loss))
    return losses


def main(runs: pathlib.Path = pathlib.Path("runs/examples")) -> None:
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "docs"))  # where my_model.py is
    found = {name: train(layout, 5, runs) for name, layout in LAYOUTS.items()}
    for name, losses in found.items():
        print(f"{name:22}", *(f"{loss:.5f}" for loss in losses))
    one, piped = found.values()
    worst = max(abs(a - b) for a, b in zip(one, piped, strict=True))
    print(f"largest difference {worst:.1e}, the rounding of float32")


if __name__ == "__main__":
    main()
