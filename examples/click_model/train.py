"""Trains the click model with tables updated 0, 1 and 10 steps late, and a synchronous reference.

    python -m examples.click_model.train

The reference is one device with the whole table and plain JAX, without jaxscale's step. With no
arguments the clicks are synthetic; a file in Criteo's format may be given in their place, the last
tenth of which is held out. Takes about 80 s on two cores.
"""

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


def score(model: ClickModel, params: dict, rows: jax.Array, batch: jaxscale.Batch) -> jax.Array:
    """Logits [batch, time, 2], with the whole table on one device."""
    ids = batch.extras["ids"]
    vectors = jnp.where(ids[..., None] < 0, 0, rows[ids])
    x = model.enter(params["embed"], {}, batch._replace(vectors={"ids": vectors}))
    weights = {name: x[0] for name, x in params["layers"].items()}
    return model.logits(params["head"], model.block(weights, x, batch, Layer(0, 0))[0]["x"])


def with_tables(train: Clicks, staleness: int) -> tuple[ClickModel, dict, jax.Array]:
    """Trains on four devices: the model, its parameters and the table's rows."""
    config = jaxscale.load(CONFIG, [f"optimizer.table_staleness={staleness}"])
    mesh = jaxscale.make_mesh(config.layout, jax.devices()[: config.layout.num_devices])
    engine = jaxscale.make_engine(config, mesh, optimizer=OPTIMIZER)
    state = engine.init(jax.random.key(0))
    for batch in batches(train, config.data.global_batch_size):
        state, _ = engine.step(state, engine.shard(batch))
    params, rows = jax.device_get((state.params, state.tables["categories"].rows))
    return engine.model, params, rows


def synchronous(train: Clicks) -> tuple[ClickModel, dict, jax.Array]:
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
    return model, params, rows


def area(trained: tuple[ClickModel, dict, jax.Array], held: Clicks) -> float:
    """The area under the curve on held-out impressions."""
    model, (params, rows) = trained[0], jax.tree.map(jnp.asarray, trained[1:])
    run = jax.jit(lambda batch: jnp.diff(score(model, params, rows, batch))[..., 0])
    found = list(batches(held, 8))
    scores = np.concatenate([np.asarray(run(batch)).reshape(-1) for batch in found])
    return area_under_curve(np.concatenate([b.targets.reshape(-1) for b in found]), scores)


def main(file: pathlib.Path | None = None, lines: int = 100_000, stale: tuple = (0, 1, 10)) -> dict:
    if file is None:
        file = pathlib.Path("runs/examples/clicks.tsv")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_synthetic(file, lines)
    clicks = read(file, NUM_ROWS)
    end = len(clicks.labels) * 9 // 10
    train, held = (Clicks(*(x[part] for x in clicks)) for part in (slice(end), slice(end, None)))
    found = {"synchronous reference": area(synchronous(train), held)}
    for staleness in stale:
        found[f"staleness {staleness}"] = area(with_tables(train, staleness), held)
    for name, value in found.items():
        print(f"{name:22} AUC {value:.5f}")
    return found


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if sys.argv[1:] else None)
