"""Growth of a run: its checkpoint as that of a run with a larger model."""

import dataclasses
import json
import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale import config as configs
from jaxscale import run_folder
from jaxscale.checkpoints.folder import named_arrays
from jaxscale.checkpoints.restore import restore
from jaxscale.checkpoints.save import CheckpointWriter
from jaxscale.checkpoints.tiers import Checkpoints
from jaxscale.config import Config
from jaxscale.distributed.initialize import num_devices
from jaxscale.models.weights import exact_normal
from jaxscale.run.growth.changes import keeps_text
from jaxscale.run.growth.grow_state import grow_state
from jaxscale.run.initial_weights import with_new_tokens
from jaxscale.run.setup.layout import for_sampling, open_engine
from jaxscale.storage.local_tier import CHECKPOINTS
from jaxscale.training.engine import Engine

log = logging.getLogger("jaxscale")

GAIN = 0.01
"""The gain of a new router, whose columns are orthogonal (CPM-2, arXiv 2106.10715)."""


def open_models(config: Config, larger: Config) -> tuple[Engine, Engine]:
    """The engines of both models on the devices here, without a pipeline."""
    models = config.model, larger.model
    plain = dataclasses.replace(config, run=dataclasses.replace(config.run, skip_bad_steps=0))
    plain = run_folder.fit_devices(plain, num_devices())
    each = (for_sampling(dataclasses.replace(plain, model=model)) for model in models)
    before, after = (open_engine(one)[1] for one in each)
    if before.model.tables:
        raise ValueError(
            f"a model with tables, {', '.join(before.model.tables)}, cannot grow: grow one without "
            "tables"
        )
    return before, after


def grow_run(
    config: Config,
    larger: Config,
    workdir: pathlib.Path,
    output: pathlib.Path,
    step: int | None,
    *,
    orthogonal: bool = True,
) -> int:
    """Writes the larger run to a folder, config.json last; returns its step.

    Args:
      config, larger: of the run, and of the run to be written.
      step: the checkpoint to grow; None: the newest.
      orthogonal: whether a new router has small orthogonal columns; False: as in a new model.

    Raises:
      FileNotFoundError: there is no checkpoint.
      ValueError: it cannot be read, or written.
    """
    small, large = config.model, larger.model
    before, after = open_models(config, larger)
    checkpoints = Checkpoints(workdir / CHECKPOINTS)
    with checkpoints.reading(step) as step:
        if step is None:
            raise FileNotFoundError(f"--workdir {workdir} has no checkpoint yet")
        metadata = checkpoints.metadata(step)
        wanted = before.placement.canonical
        if not (trained := bool(checkpoints.arrays(step, "opt_state"))):
            wanted = wanted._replace(step=None, opt_state=None)
        state = restore(checkpoints, step, wanted, part=True)
    if not trained:
        state = before.begin(state.params)
    state = grow_state(
        before, after, state._replace(guard=None), _new_params(before, after, orthogonal)
    )
    saved: Any = state
    if new := large.vocab_size - small.vocab_size:
        params = with_new_tokens(state.params, after.model.axes, small.vocab_size, new)
        state = state._replace(params=params)
    if not (trained and keeps_text(small, large)):
        step, saved = 0, {"params": state.params}
        metadata = {"data": {"fingerprint": "", "next_example": 0}}
    settings = configs.read_sections(workdir / "config.json")
    settings["model"] = configs.to_dict(larger)["model"]
    writer = CheckpointWriter(output / CHECKPOINTS)
    writer.save(step, saved, metadata | {"config": settings})
    writer.close()
    if problem := writer.outcome():
        raise ValueError(problem)
    run_folder.copy_tokenizer(workdir, output)
    (output / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return step


def _new_params(before: Engine, after: Engine, orthogonal: bool) -> dict[str, jax.Array]:
    """The parameters that the smaller model has no like of, by name: routers, and others as in a
    new model."""
    abstract = named_arrays(after.abstract_state.params)
    names = sorted({*abstract} - {*named_arrays(before.abstract_state.params)})

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        found = named_arrays(after.draw(key))  # XLA removes all others as dead code
        for name in names:
            if orthogonal and name.endswith("/router"):
                found[name] = _orthogonal(key, name, abstract[name])
        return {name: found[name] for name in names}

    shardings = {name: abstract[name].sharding for name in names}
    return jax.jit(draw, out_shardings=shardings)(jax.random.key(after.config.run.seed))


def _orthogonal(key: jax.Array, name: str, like: Any) -> jax.Array:
    """Routers [layers, embed, experts] with orthogonal columns."""
    drawn = exact_normal(jax.random.fold_in(key, len(name)), like.shape, 1.0)
    columns = jnp.linalg.qr(drawn.astype(jnp.float32))[0]
    return (GAIN * columns).astype(like.dtype)
