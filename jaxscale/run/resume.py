"""Where a run resumes: at its newest checkpoint that is intact, here or at its address."""

import dataclasses
import functools
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxscale import config as configs
from jaxscale.checkpoints.both_tiers import (
    all_steps,
    fetch_everywhere,
    make_intact,
    set_aside_everywhere,
    steps_at_address,
)
from jaxscale.checkpoints.checkpoint import Checkpoints, read_everywhere
from jaxscale.checkpoints.differences import describe_difference
from jaxscale.checkpoints.folder import DamagedError
from jaxscale.config import Config
from jaxscale.config.model import ModelConfig
from jaxscale.config.optimizer import OptimizerConfig
from jaxscale.data.dataset import Examples
from jaxscale.data.skipped_ranges import pass_over, with_ranges
from jaxscale.data.tokens.stop_ids import with_stop_ids
from jaxscale.distributed import phases, processes
from jaxscale.run.initial_weights import may_differ
from jaxscale.run.saves import wait_for_write
from jaxscale.run.setup.restore import metadata_of
from jaxscale.run.setup.text import Text
from jaxscale.training.engine import Engine
from jaxscale.training.learning_rate import rate_change
from jaxscale.training.step import TrainState, init_guard

log = logging.getLogger("jaxscale")


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that looks intact; those above it do not."""

    step: int  # 0: none
    metadata: dict[str, Any] = field(default_factory=dict)
    damaged: dict[int, str] = field(default_factory=dict)  # newer steps, and why


def find_newest(checkpoints: Checkpoints, *, refuse_damaged: bool = False) -> Found:
    """The newest checkpoint whose files are there and whose description is intact. Its arrays are
    checked when they are read. One that is intact only at the run's address is brought here.

    Raises:
      DamagedError: there are checkpoints and none is intact; or with `refuse_damaged`, the newest
        one is not.
    """
    found = processes.from_first("newest checkpoint", _search(checkpoints, refuse_damaged))
    if isinstance(found[0], str):
        raise DamagedError(*found)
    step, damaged = found
    metadata = metadata_of(checkpoints, step) if step else {}
    return Found(step, metadata, {int(number): why for number, why in damaged.items()})


def _search(checkpoints: Checkpoints, refuse_damaged: bool) -> list[Any]:
    """The step and the damaged ones above it; or the message and reason of a refusal."""
    if jax.process_index() != 0:
        return []
    damaged, first = {}, None
    if not steps_at_address(checkpoints):
        checkpoints.latest()  # refuses a folder that was lost
    for step in reversed(all_steps(checkpoints)):
        try:
            if refuse_damaged and step in checkpoints.steps():
                checkpoints.metadata(step)
            make_intact(checkpoints, step)
        except DamagedError as error:
            first = first or [str(error), error.reason]
            if refuse_damaged:
                break
            damaged[str(step)] = error.reason
        else:
            return [step, damaged]
    return first or [0, {}]


def resume(
    found: Found,
    config: Config,
    engine: Engine,
    checkpoints: Checkpoints,
    text: Text,
    *,
    refuse_damaged: bool = False,
) -> tuple[int, TrainState, Text]:
    """The step and the state of the newest intact checkpoint, in the layout of this run, and the
    text without what was passed over. Damaged ones above it are renamed, once one is read.

    Raises:
      ValueError: the checkpoint is of another run; or none is intact.
      DamagedError: with `refuse_damaged`, when one is.
    """
    resolved, damaged, first = configs.to_dict(config), dict(found.damaged), None
    for step in reversed(_steps_to(found.step, checkpoints)):
        try:
            metadata, state = _read(checkpoints, step, engine, resolved, refuse_damaged)
            break
        except DamagedError as error:
            if refuse_damaged:
                raise
            first, damaged[step] = first or error, error.reason
    else:
        assert first, "`found` is a checkpoint"
        raise first
    state = engine.placement.from_canonical(state, donate=True)
    _check_examples(step, metadata, text.train)
    train = with_ranges(text.train, metadata["data"].get("passed_over", ()))
    set_aside(checkpoints, damaged, step)
    log.info(f"resuming at step {step} of {config.run.steps}")
    for line in describe_difference(metadata["config"], resolved):
        log.info(f"  changed since: {line}")
    if not engine.own_optimizer and (change := rate_change(metadata["config"], config, step)):
        log.info(f"  {change}")
    tokenizer = with_stop_ids(text.tokenizer, metadata["data"].get("stop_ids", ()))
    return step, state, dataclasses.replace(text, train=train, tokenizer=tokenizer)


def check_same_examples(found: Found, config: Config) -> None:
    """Refuses, before text is read or anything compiled, settings with which a run that resumes
    would see other examples.

    Raises:
      ValueError: names the setting.
    """
    before = found.metadata["config"].get("data", {})
    keys = ("global_batch_size", "seq_len", "target_len", "seed", "heldout", "objective")
    for key in (*keys, "text_begin"):
        now = getattr(config.data, key)
        if before.get(key, now) != now:
            raise ValueError(
                f"checkpoint {found.step} was trained with data.{key} = {before[key]!r}, and this "
                f"run has data.{key} = {now!r}; restore it, or start a new --workdir, whose "
                "model.init_from can name this run's"
            )


def with_stored_type(config: Config, saved: Mapping[str, Any]) -> Config:
    """The config with the type in which a run that has begun stores the weights that adapters
    freeze; `ModelConfig` chooses that of a new one.

    Args:
      saved: the config of a checkpoint, {} of a new run.
    """
    stored = saved.get("model", {}).get("param_dtype")
    if not (stored and config.model.lora_rank) or stored == config.model.param_dtype:
        return config
    log.info(f"model.param_dtype = {stored!r}, as when the run started")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, param_dtype=stored))


def check_same_model(found: Found, config: Config) -> None:
    """Refuses settings with which the checkpoint's weights would mean another model; those of a
    family of one's own are its own business.

    Raises:
      ValueError: with a line for each setting that differs.
    """
    before = found.metadata["config"].get("model", {})
    now = json.loads(json.dumps(configs.to_dict(config)["model"]))  # with lists, as the other
    shipped = {field.name for field in dataclasses.fields(ModelConfig)} - may_differ(config.model)
    lines = [
        f"model.{name} = {now[name]!r} here, {before[name]!r} there"
        for name in sorted(shipped & now.keys() & before.keys())
        if now[name] != before[name]
    ]
    if lines:
        title = f"checkpoint {found.step} is of a model with other settings; restore them:"
        raise ValueError("\n  ".join([title, *lines]))


def check_same_state(
    found: Found, config: Config, engine: Engine, checkpoints: Checkpoints
) -> None:
    """Refuses settings, such as another optimizer, with which the checkpoint holds other arrays.

    Raises:
      ValueError: the optimizer is one's own, and was not, or the reverse; or with a line for each
        array, and for each setting that differs.
    """
    before, now = found.metadata.get("own_optimizer"), engine.own_optimizer
    if before not in (None, now):
        change = "pass the same optimizer= to open_trainer" if before else "leave optimizer= out"
        raise ValueError(
            f"checkpoint {found.step} was trained with {_rule(before, found.metadata['config'])}, "
            f"and this run has {_rule(now, configs.to_dict(config))}; {change}, or start a new "
            "--workdir, whose model.init_from can name this run's"
        )
    wanted, without = _wanted(checkpoints, found.step, engine)
    resolved = configs.to_dict(config)
    checkpoints.check_fits(found.step, wanted, config=resolved, without=without)


def _rule(own: bool, config: dict[str, dict]) -> str:
    name = config.get("optimizer", {}).get("name", OptimizerConfig.name)
    return "an optimizer of its own, given in Python" if own else f"optimizer.name = {name!r}"


def _steps_to(last: int, checkpoints: Checkpoints) -> list[int]:
    """The steps up to `last` with a checkpoint in either tier; the same in every process."""
    steps = all_steps(checkpoints) if jax.process_index() == 0 else []
    return [s for s in processes.from_first("steps of checkpoints", steps) if s <= last]


def _read(
    checkpoints: Checkpoints,
    step: int,
    engine: Engine,
    resolved: dict[str, Any],
    refuse_damaged: bool,
) -> tuple[dict[str, Any], TrainState]:
    """The metadata and the state of a checkpoint, from the run's address where they are damaged
    here.

    Raises:
      DamagedError: neither is intact; or with `refuse_damaged`, the one here is not.
    """
    problem = _problem(checkpoints, step) if jax.process_index() == 0 else None
    if problem := processes.from_first("checkpoint", problem):
        raise DamagedError(*problem)

    def read() -> tuple[dict[str, Any], TrainState]:
        own = functools.partial(metadata_of, checkpoints, step)
        metadata = read_everywhere("metadata of a checkpoint", own)
        return metadata, _restore(checkpoints, step, engine, resolved)

    try:
        return read()
    except DamagedError as error:  # in all processes
        if refuse_damaged:
            raise
        fetch_everywhere(checkpoints, step, error)
        return read()


def _problem(checkpoints: Checkpoints, step: int) -> list[str] | None:
    """The message and reason of a checkpoint that is not intact in either tier."""
    try:
        make_intact(checkpoints, step)
    except DamagedError as error:
        return [str(error), error.reason]
    return None


def _restore(
    checkpoints: Checkpoints, step: int, engine: Engine, resolved: dict[str, Any]
) -> TrainState:
    """A state in canonical form. What bad steps are judged by begins anew where the checkpoint has
    none, and is left out where the run needs none."""
    guard = engine.placement.canonical.guard
    wanted, without = _wanted(checkpoints, step, engine)
    state = checkpoints.restore(step, wanted, config=resolved, without=without)
    if guard is None or wanted.guard is not None:
        return state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, guard)
    return state._replace(guard=jax.device_put(init_guard(), shardings))


def _wanted(checkpoints: Checkpoints, step: int, engine: Engine) -> tuple[TrainState, str]:
    """What a run reads of a checkpoint, and the part of it that it leaves out."""
    wanted = engine.placement.canonical
    if wanted.guard is None:
        return wanted, "guard"
    return wanted if "guard" in checkpoints.parts(step) else wanted._replace(guard=None), ""


def rewind(
    bad: FloatingPointError,
    steps: range,
    config: Config,
    engine: Engine,
    checkpoints: Checkpoints,
    text: Text,
) -> tuple[int, TrainState, Text]:
    """Returns to the newest checkpoint, past the examples of the bad steps after it. Those of bad
    steps before it, which updated nothing either, are behind it in the order already.

    Args:
      bad: what was wrong with them; raised where there is no checkpoint.
      steps: the bad ones.
    """
    wait_for_write(checkpoints, steps[-1])
    phases.enter_phase("reading the checkpoint", steps[-1])
    step = processes.from_first("newest checkpoint", checkpoints.latest() or 0)
    if not step:
        raise FloatingPointError(f"{bad}, and there is no checkpoint to return to") from bad
    found = Found(step, metadata_of(checkpoints, step))
    begin, state, _ = resume(found, config, engine, checkpoints, text)
    size = config.data.global_batch_size
    first, last = max(steps.start - 1, begin) * size, (steps.stop - 1) * size
    log.warning(
        f"warning: {bad}: back at step {begin}; the examples {first} to {last - 1} are passed over"
    )
    return begin, state, dataclasses.replace(text, train=pass_over(text.train, first, last))


def set_aside(checkpoints: Checkpoints, damaged: dict[int, str], step: int) -> None:
    """Renames damaged checkpoints, with a line for each.

    Args:
      damaged: their steps, and why.
      step: where the run resumes.
    """
    for number, why in sorted(damaged.items()):
        if jax.process_index() == 0:
            path = set_aside_everywhere(checkpoints, number)
            log.warning(
                f"warning: checkpoint {number} is damaged ({why}) and is now {path}; the newest "
                f"intact one is {step}"
            )


def _check_examples(step: int, metadata: dict[str, Any], train: Examples) -> None:
    """A run may resume in another layout, but not on other examples.

    Raises:
      ValueError: with what may have changed.
    """
    if metadata["data"]["fingerprint"] != train.fingerprint:
        raise ValueError(
            f"the examples are not those that checkpoint {step} was trained on: the text, the "
            "names of its files, its weights, data.tokenizer or model.vocab_size changed, or an "
            "earlier jaxscale made them, which cut conversations and prompts with responses at "
            "the ends of rows; restore what changed, or start a new --workdir"
        )
