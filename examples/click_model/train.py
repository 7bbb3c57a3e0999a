"""Trains the click model with tables updated 0, 1 and 10 steps late, and a synchronous reference.

    python -m examples.click_model.train

The reference is one device with the whole table and plain JAX, without jaxscale's step. With no
arguments the clicks are synthetic; a file in Criteo's format may be given in their place, the last
tenth of which is held out. The held-out area under the ROC curve by step is written to
runs/click_model/. Takes about 80 s on two cores.
"""

import functools
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}  # read when JAX is imported

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxscale
from examples.click_model.criteo import Clicks, read, write_synthetic
from examples.click_model.model import ClickModel
from jaxscale.models.protocol import Layer

TIME, NUM_ROWS = 32, 2**16
CONFIG = str(pathlib.Path(__file__).parent / "config.py")
OPTIMIZER = optax.adam(1e-3)
EVERY = 50
"""Steps between evaluations, from the first."""

type Trained = tuple[ClickModel, dict, jax.Array]
"""A model, its parameters and the rows of its table."""


def batches(clicks: Clicks, size: int) -> Iterator[jaxscale.Batch]:
    """Batches of `size` rows of impressions, in the order of the file."""
    each, ones = size * TIME, np.ones((size, TIME), np.int32)
    places = np.broadcast_to(np.arange(TIME, dtype=np.int32), (size, TIME))
    for begin in range(0, len(clicks.labels) - each + 1, each):
        one = Clicks(*(field[begin : begin + each] for field in clicks))
        extras = {"ids": one.ids.reshape(size, -1), "counts": one.counts.reshape(size, -1)}
        targets, weights = one.labels.reshape(size, TIME), ones.astype(np.float32)
        yield jaxscale.Batch(0 * ones, targets, ones, places, weights, extras)


def area_under_curve(labels: np.ndarray, scores: np.ndarray) -> float:
    """The probability that a click has a higher score than another impression."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    clicks = int(labels.sum())
    least = clicks * (clicks + 1) / 2
    return float((ranks[labels == 1].sum() - least) / (clicks * (len(labels) - clicks)))


@functools.partial(jax.jit, static_argnums=0)
def score(model: ClickModel, params: dict, rows: jax.Array, batch: jaxscale.Batch) -> jax.Array:
    """Logits [batch, time, 2], with the whole table on one device."""
    ids = batch.extras["ids"]
    vectors = jnp.where(ids[..., None] < 0, 0, rows[ids])
    x = model.enter(params["embed"], {}, batch._replace(vectors={"ids": vectors}))
    weights = {name: x[0] for name, x in params["layers"].items()}
    return model.logits(params["head"], model.block(weights, x, batch, Layer(0, 0))[0]["x"])


def with_tables(train: Clicks, staleness: int) -> Iterator[Trained]:
    """Trains on four devices: the model after each step."""
    config = jaxscale.load(CONFIG, [f"optimizer.table_staleness={staleness}"])
    mesh = jaxscale.make_mesh(config.layout, jax.devices()[: config.layout.num_devices])
    engine = jaxscale.make_engine(config, mesh, optimizer=OPTIMIZER)
    state = engine.init(jax.random.key(0))
    for batch in batches(train, config.data.global_batch_size):
        state, _ = engine.step(state, engine.shard(batch))
        yield engine.model, state.params, state.tables["categories"].rows


def synchronous(train: Clicks) -> Iterator[Trained]:
    """The same training by plain JAX on one device, with gradients of the whole table."""
    config = jaxscale.load(CONFIG, ["layout.data=1", "layout.fsdp=1"])
    mesh = jaxscale.make_mesh(config.layout, jax.devices()[:1])
    engine = jaxscale.make_engine(config, mesh, optimizer=OPTIMIZER)
    state, model, rate = engine.init(jax.random.key(0)), engine.model, 0.05
    params, rows, sums = state.params, *state.tables["categories"][:2]
    moments = OPTIMIZER.init(params)

    def loss(params: dict, rows: jax.Array, batch: jaxscale.Batch) -> jax.Array:
        log_p = jax.nn.log_softmax(score(model, params, rows, batch))
        return -jnp.mean(jnp.take_along_axis(log_p, batch.targets[..., None], axis=-1))

    @jax.jit
    def step(params: dict, moments: Any, rows: jax.Array, sums: jax.Array, batch: Any) -> tuple:
        of_params, of_rows = jax.grad(loss, (0, 1))(params, rows, batch)
        updates, moments = OPTIMIZER.update(of_params, moments, params)
        sums += jnp.mean(jnp.square(of_rows), axis=-1)
        rows -= rate * of_rows / (jnp.sqrt(sums) + 1e-8)[:, None]
        return optax.apply_updates(params, updates), moments, rows, sums

    for batch in batches(train, config.data.global_batch_size):
        params, moments, rows, sums = step(params, moments, rows, sums, batch)
        yield model, params, rows


def area(trained: Trained, held: Clicks) -> float:
    """The area under the curve on held-out impressions."""
    model, (params, rows) = trained[0], jax.device_get(trained[1:])
    found = list(batches(held, 8))
    scores = [np.diff(score(model, params, rows, batch)).reshape(-1) for batch in found]
    labels = [batch.targets.reshape(-1) for batch in found]
    return area_under_curve(np.concatenate(labels), np.concatenate(scores))


def curve(steps: Iterator[Trained], held: Clicks, folder: pathlib.Path) -> float:
    """Writes the areas under the curve by step, and returns the last."""
    lines = [
        {"step": step, "eval_auc": area(trained, held)}
        for step, trained in enumerate(steps, 1)
        if step % EVERY == 1
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines[-1]["eval_auc"]


def main(file: pathlib.Path | None = None, lines: int = 100_000, stale: tuple = (0, 1, 10)) -> None:
    runs = pathlib.Path("runs/click_model")
    if file is None:
        file = runs / "clicks.tsv"
        runs.mkdir(parents=True, exist_ok=True)
        write_synthetic(file, lines)
    clicks = read(file, NUM_ROWS)
    end = len(clicks.labels) * 9 // 10
    train, held = (Clicks(*(x[part] for x in clicks)) for part in (slice(end), slice(end, None)))
    found = {"synchronous": synchronous(train)}
    found |= {f"staleness_{k}": with_tables(train, k) for k in stale}
    for name, steps in found.items():
        print(f"{name:14} AUC {curve(steps, held, runs / name):.5f}", flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if sys.argv[1:] else None)
