"""Resuming a run from its newest intact checkpoint, local or remote."""

import dataclasses
import functools
import json
import logging
from collections.abc import Mapping
from typing import Any

import jax

from jaxscale import config as configs
from jaxscale.checkpoints.differences import describe_difference
from jaxscale.checkpoints.errors import DamagedError
from jaxscale.checkpoints.restore import check_fits, restore
from jaxscale.checkpoints.tiers import Checkpoints, Found
from jaxscale.config import DataConfig
from jaxscale.config.model import ModelConfig, ModelSettings
from jaxscale.config.optimizer import OptimizerConfig
from jaxscale.data.dataset import Examples
from jaxscale.data.skipped_ranges import with_ranges
from jaxscale.data.tokens.stop_ids import with_stop_ids
from jaxscale.run.initial_weights import may_differ
from jaxscale.run.setup.text import Text
from jaxscale.training.engine import Engine
from jaxscale.training.learning_rate import rate_change
from jaxscale.training.noise_scale import init_averages
from jaxscale.training.step import TrainState, init_guard

log = logging.getLogger("jaxscale")


def resume(
    found: Found,
    engine: Engine,
    checkpoints: Checkpoints,
    text: Text,
    *,
    refuse_damaged: bool = False,
) -> tuple[int, TrainState, Text]:
    """Reads the newest intact checkpoint: step, state in this run's layout, and the text without
    skipped examples. Corrupt checkpoints above it are then renamed.

    Raises:
      ValueError: the checkpoint is of another run, or none is intact.
      DamagedError: with `refuse_damaged`, if one is corrupt.
    """
    config, resolved = engine.config, configs.to_dict(engine.config)
    found, state = _read(checkpoints, found, engine, resolved, refuse_damaged)
    step, metadata = found.step, found.metadata
    state = engine.placement.from_canonical(state, donate=True)
    _check_examples(step, metadata, text.train)
    train = with_ranges(text.train, metadata["data"].get("passed_over", ()))
    checkpoints.set_aside(found.damaged, step)
    log.info(f"resuming at step {step} of {config.run.steps}")
    for line in describe_difference(metadata["config"], resolved):
        log.info(f"  changed since: {line}")
    if not engine.own_optimizer and (
        change := rate_change(metadata["config"], config.optimizer, config.run.steps, step)
    ):
        log.info(f"  {change}")
    tokenizer = with_stop_ids(text.tokenizer, metadata["data"].get("stop_ids", ()))
    return step, state, dataclasses.replace(text, train=train, tokenizer=tokenizer)


def check_same_examples(found: Found, data: DataConfig) -> None:
    """Refuses, before reading text and compiling, settings that would change a resumed run's
    examples.

    Raises:
      ValueError: names the setting.
    """
    before = found.metadata["config"].get("data", {})
    keys = ("seq_len", "target_len", "seed", "heldout", "objective", "text_begin")
    read = found.metadata["data"]["next_example"]
    if data.examples_of(found.step) != read:
        raise ValueError(_other_batches(found.step, before, data, read))
    for key in keys:
        now = getattr(data, key)
        if before.get(key, now) != now:
            raise ValueError(
                f"checkpoint {found.step} was trained with data.{key} = {before[key]!r}, and this "
                f"run has data.{key} = {now!r}; restore it, or start a new --workdir, with this "
                "run's as model.init_from"
            )


def _other_batches(step: int, before: Mapping[str, Any], data: DataConfig, read: int) -> str:
    """The refusal of batches by which a run would have read other examples so far."""
    names = ("global_batch_size", "batch_schedule")
    was = ", ".join(f"data.{name} = {before[name]!r}" for name in names if before.get(name))
    now = ", ".join(f"data.{n} = {getattr(data, n)!r}" for n in names if getattr(data, n))
    return (
        f"checkpoint {step} was trained with {was} and has read {read} examples, and this run has "
        f"{now}: {data.examples_of(step)} by then; restore it, set data.batch_schedule to the "
        f"batches before and after step {step}, or start a new --workdir, with this run's as "
        "model.init_from"
    )


def with_stored_type(model: ModelSettings, saved: Mapping[str, Any]) -> ModelSettings:
    """The model with the stored type of a resumed run's frozen weights, under adapters;
    `ModelConfig` chooses it for a new run.

    Args:
      saved: the config of a checkpoint, {} for a new run.
    """
    stored = saved.get("model", {}).get("param_dtype")
    if not (stored and model.adapts) or stored == model.param_dtype:
        return model
    log.info(f"model.param_dtype = {stored!r}, as when the run started")
    return dataclasses.replace(model, param_dtype=stored)


def check_same_model(found: Found, model: ModelConfig) -> None:
    """Refuses settings that would change the meaning of the checkpoint's weights; settings that
    only a custom model has are not checked.

    Raises:
      ValueError: with a line for each setting that differs.
    """
    before = found.metadata["config"].get("model", {})
    now = json.loads(json.dumps(configs.read_settings(model)))  # with lists, as the other
    shipped = {field.name for field in dataclasses.fields(ModelConfig)} - may_differ(model)
    lines = [
        f"model.{name} = {now[name]!r} here, {before[name]!r} there"
        for name in sorted(shipped & now.keys() & before.keys())
        if now[name] != before[name]
    ]
    if lines:
        title = f"checkpoint {found.step} is of a model with other settings; restore them:"
        raise ValueError("\n  ".join([title, *lines]))


def check_same_state(found: Found, engine: Engine, checkpoints: Checkpoints) -> None:
    """Refuses settings, such as another optimizer, that need other arrays than the checkpoint's.

    Raises:
      ValueError: only one of the two optimizers is custom; or with a line for each array, and for
        each setting that differs.
    """
    before, now = found.metadata.get("own_optimizer"), engine.own_optimizer
    resolved = configs.to_dict(engine.config)
    if before not in (None, now):
        change = "pass the same optimizer= to open_trainer" if before else "leave optimizer= out"
        raise ValueError(
            f"checkpoint {found.step} was trained with {_rule(before, found.metadata['config'])}, "
            f"and this run has {_rule(now, resolved)}; {change}, or start a new --workdir, with "
            "this run's as model.init_from"
        )
    wanted, without = _wanted(checkpoints, found.step, engine)
    check_fits(checkpoints, found.step, wanted, config=resolved, without=without)


def _rule(own: bool, config: dict[str, dict]) -> str:
    name = config.get("optimizer", {}).get("name", OptimizerConfig.name)
    return "a custom optimizer, given in Python" if own else f"optimizer.name = {name!r}"


def _read(
    checkpoints: Checkpoints,
    found: Found,
    engine: Engine,
    resolved: dict[str, Any],
    refuse_damaged: bool,
) -> tuple[Found, TrainState]:
    """The newest checkpoint in either tier whose arrays are intact, and its state.

    Raises:
      DamagedError: none is intact; or, with `refuse_damaged`, the newest local one is corrupt.
    """
    damaged, first = dict(found.damaged), None
    while found.step:
        try:
            state = _restore(checkpoints, found.step, engine, resolved, refuse_damaged)
            return dataclasses.replace(found, damaged=damaged), state
        except DamagedError as error:  # in all processes
            if refuse_damaged:
                raise
            first, damaged[found.step] = first or error, error.reason
        try:
            found = checkpoints.newest_intact(found.step)
        except DamagedError:
            break
        damaged |= found.damaged
    assert first, "`found` is a checkpoint"
    raise first


def _restore(
    checkpoints: Checkpoints,
    step: int,
    engine: Engine,
    resolved: dict[str, Any],
    refuse_damaged: bool,
) -> TrainState:
    """A state in canonical form, downloaded from the run's URL if the local copy is corrupt.
    Optional parts are new if the checkpoint lacks them, and not read if the run needs none."""
    wanted, without = _wanted(checkpoints, step, engine)
    read = functools.partial(restore, checkpoints, step, wanted, config=resolved, without=without)
    try:
        state = read()
    except DamagedError as error:
        if refuse_damaged:
            raise
        checkpoints.replace(step, error)
        state = read()
    return state._replace(**{name: _new_part(name, engine) for name in _missing(wanted, engine)})


OPTIONAL = ("guard", "noise")
"""Parts of a state that a setting of `run` adds."""


def _wanted(
    checkpoints: Checkpoints, step: int, engine: Engine
) -> tuple[TrainState, tuple[str, ...]]:
    """The state that a run reads from a checkpoint, and the parts that it leaves out."""
    wanted = engine.placement.canonical
    without = tuple(name for name in OPTIONAL if getattr(wanted, name) is None)
    absent = [name for name in OPTIONAL if not checkpoints.arrays(step, name)]
    return wanted._replace(**dict.fromkeys(absent)), without


def _missing(wanted: TrainState, engine: Engine) -> list[str]:
    """The parts that the run has and `wanted` lacks."""
    canonical = engine.placement.canonical
    return [
        name
        for name in OPTIONAL
        if getattr(wanted, name) is None and getattr(canonical, name) is not None
    ]


def _new_part(name: str, engine: Engine) -> Any:
    """An optional part of a state as a new run begins with it."""
    part = getattr(engine.placement.canonical, name)
    new = init_guard() if name == "guard" else init_averages(engine.zero.loss_dtype)
    return jax.device_put(new, jax.tree.map(lambda leaf: leaf.sharding, part))


def _check_examples(step: int, metadata: dict[str, Any], train: Examples) -> None:
    """Refuses other examples than the checkpoint's; a run may resume in another layout only.

    Raises:
      ValueError: with the possible changes.
    """
    if metadata["data"]["fingerprint"] != train.fingerprint:
        raise ValueError(
            f"the examples differ from those of checkpoint {step}: the text, the names of its "
            "files, its weights, data.tokenizer or model.vocab_size changed, or an earlier "
            "jaxscale, which cut conversations and prompts with responses at the ends of rows, "
            "made them; restore what changed, or start a new --workdir"
        )
