"""Set-up of training: config, mesh, engine, data, compiled step, new or restored state.

`training_loop.fit` trains the result.
"""

import concurrent.futures
import dataclasses
import importlib
import logging
import math
import pathlib
from dataclasses import dataclass, field
from typing import Any

import jax
from etils import epy

from jaxscale import config as configs
from jaxscale.checkpoints.differences import describe_difference
from jaxscale.checkpoints.folder import named_arrays
from jaxscale.checkpoints.retention import Retention
from jaxscale.checkpoints.save import CheckpointWriter
from jaxscale.checkpoints.tiers import Found
from jaxscale.choices import check_kind
from jaxscale.config import Config, DataConfig, RunConfig
from jaxscale.config.model import ModelSettings, is_own_family
from jaxscale.data.tokens.stop_ids import describe_stop_ids, with_stop_ids
from jaxscale.distributed import phases, processes
from jaxscale.run.growth.grow_state import unshared_config
from jaxscale.run.initial_weights import check_tokenizer, initial_state, open_initial
from jaxscale.run.metrics import METRICS, heldout_losses, read
from jaxscale.run.mirror import Mirror
from jaxscale.run.recorder import is_summarised
from jaxscale.run.saves import unchanged_params
from jaxscale.run.setup.layout import resolve_layout
from jaxscale.run.setup.layout_report import describe_layout
from jaxscale.run.setup.memory_check import check_memory, check_run_fits_host
from jaxscale.run.setup.resume import (
    check_same_examples,
    check_same_model,
    check_same_state,
    resume,
    with_stored_type,
)
from jaxscale.run.setup.step_programs import (
    Engines,
    Step,
    StepPrograms,
    compile_step,
    lower_step,
    open_engines,
)
from jaxscale.run.setup.text import Text, open_text
from jaxscale.sharding.mesh import make_mesh
from jaxscale.storage.local_tier import CHECKPOINTS, LAST_SAVED, check_free, store_of
from jaxscale.training.engine import Engine, make_engine
from jaxscale.training.learning_rate import early_end, with_schedule
from jaxscale.training.optimizer import lost_updates
from jaxscale.training.step import TrainState

with epy.lazy_imports():  # the planner's modules
    from jaxscale.run.setup import preflight

log = logging.getLogger("jaxscale")

LARGE_RUN = 64
"""The number of devices from which a run does the preflight checks before it compiles."""

LATER = ("grain", "orbax.checkpoint", "tensorboardX")
"""Modules that are needed only after compilation, and take a third of a second to import."""


@dataclass(frozen=True)
class Trainer:
    """Everything that `fit` needs to train from step `begin` on."""

    engine: Engine
    workdir: pathlib.Path
    checkpoints: CheckpointWriter = field(repr=False)
    begin: int  # steps done
    text: Text
    state: TrainState = field(repr=False)  # donated by `fit`
    programs: StepPrograms = field(repr=False)  # of `engine`, with the largest batch, and others
    unshared: Engine | None = field(default=None, repr=False)  # after `model.unshare_at`

    @property
    def config(self) -> Config:
        """Of the run, its layout resolved."""
        return self.engine.config

    @property
    def last_engine(self) -> Engine:
        """Of the run's last step."""
        return self.unshared or self.engine

    @property
    def end(self) -> int:
        """The last step with this engine."""
        steps = self.config.run.steps
        return min(steps, self.config.model.unshare_at) if self.unshared else steps


def open_trainer(
    config: Config,
    workdir: str | pathlib.Path,
    *,
    skip_memory_check: bool = False,
    refuse_damaged: bool = False,
    uploads: Mirror | None = None,
    **own: Any,
) -> Trainer | None:
    """Prepares a run: checks the settings, opens the text, compiles the step, and restores the
    newest checkpoint.

    Args:
      workdir: the run's folder.
      skip_memory_check: compiles the step even if the predicted memory exceeds the devices'.
      refuse_damaged: raises if the newest checkpoint is damaged; otherwise that is renamed, and the
        run resumes from the newest intact one.
      uploads: the mirror of a `workdir` that is the local tier of a URL.
      own: `model`, `optimizer` and `rules` of `make_engine`; the model is the one that
        `model.family` names.

    Returns:
      The trainer, which `fit` takes; None if the run is complete already.

    Raises:
      ValueError: settings that are incompatible with each other, the devices, the data or the
        checkpoint. Layouts and shapes are refused before anything is compiled.

    Examples:
      The run of the example of `fit` is complete:

      >>> config = jaxscale.load("runs/example/config.json")
      >>> jaxscale.open_trainer(config, "runs/example") is None
      True
    """
    check_kind("config", config, Config, configs.CONFIG_ADVICE)
    _check_model_is_named(config.model.family, own.get("model"))
    run, workdir = config.run, pathlib.Path(workdir)
    checkpoints = CheckpointWriter(
        workdir / CHECKPOINTS,
        Retention(run.keep_last, run.keep_every, run.keep_best),
        newest_file=workdir / LAST_SAVED,
    )
    found = checkpoints.newest_intact(refuse_damaged=refuse_damaged)
    if run.keep_best:  # before uploads start, which remove checkpoints at the URL
        checkpoints.losses = heldout_losses(read(workdir / METRICS, last_step=found.step))
    config = _as_it_began(config, found, workdir)
    run = config.run
    if not skip_memory_check:
        check_run_fits_host(config)
    config = _resolved(config, workdir)
    if found.step < run.steps and jax.device_count() >= LARGE_RUN:
        _examine(config, workdir)
    engine = make_engine(config, make_mesh(config.layout), **own)
    log.info(describe_layout(engine))
    later, engines = _unshared_engine(engine, own), open_engines(engine, own)
    largest = later or engine
    if not skip_memory_check:
        check_memory(largest)
    _check_local_space(run, largest, checkpoints)
    if found.step == 0:
        _warn_of_rate(engine)
    if _is_complete(run, found.step, workdir):
        checkpoints.close()
        trainer = None
        log.info(
            f"nothing to do: run.steps = {run.steps}, and {workdir} is at step {found.step}; "
            "raise run.steps to train longer"
        )
        for line in describe_difference(found.metadata["config"], configs.to_dict(config)):
            log.info(f"  changed since: {line}")
    else:
        trainer = _prepare(found, engine, engines, workdir, checkpoints, refuse_damaged)
        trainer = dataclasses.replace(trainer, unshared=later)
    if uploads:
        uploads.start(checkpoints)
    return trainer


def _as_it_began(config: Config, found: Found, workdir: pathlib.Path) -> Config:
    """The config with the settings that a run keeps from its start, and with `run.steps`."""
    if found.step == 0:
        _check_text_is_chosen(config.data, config.model)
    if config.run.epochs:
        config = _with_steps(config, workdir)
    saved = found.metadata.get("config", {})
    if found.step:
        config = _as_parted(config, found)
    model = with_stored_type(config.model, saved if found.step else {})
    config = dataclasses.replace(with_schedule(config, saved), model=model)
    if configs.is_before_text_begin(saved):
        data = dataclasses.replace(config.data, text_begin="boundary")
        config = dataclasses.replace(config, data=data)
    return config


def _as_parted(config: Config, found: Found) -> Config:
    """The config of a run whose layers may have parted before the checkpoint.

    Raises:
      ValueError: they should have parted, and share weights.
    """
    model, saved = config.model, found.metadata["config"].get("model", {})
    if model.share_layers == 1 or not 0 < model.unshare_at <= found.step:
        return config
    if saved.get("share_layers", 1) == 1:
        return unshared_config(config)
    raise ValueError(
        f"model.unshare_at = {model.unshare_at}, and the layers of checkpoint {found.step} share "
        f"weights; set model.unshare_at = {found.step + 1} or later, or 0"
    )


def _resolved(config: Config, workdir: pathlib.Path) -> Config:
    """The config with its layout resolved, for the model after `model.unshare_at`."""
    resolved = resolve_layout(unshared_config(config) if _unshares(config) else config, workdir)
    return dataclasses.replace(config, layout=resolved.layout)


def _unshares(config: Config) -> bool:
    """Whether the layers part later in this run."""
    model = config.model
    return model.share_layers > 1 and 0 < model.unshare_at < config.run.steps


def _unshared_engine(engine: Engine, own: dict[str, Any]) -> Engine | None:
    """The engine after `model.unshare_at`, or None."""
    if not _unshares(engine.config):
        return None
    return make_engine(unshared_config(engine.config), engine.mesh, **own)


def _warn_of_rate(engine: Engine) -> None:
    """Warns if updates of a new run would be lost by rounding, or its learning rate ends early."""
    trained = engine.zero.trained(engine.abstract_state.params, engine.zero.frozen)
    lines = (
        lost_updates(trained),
        "" if engine.own_optimizer else early_end(engine.config.optimizer, engine.config.run.steps),
    )
    for line in filter(None, lines):
        log.warning(f"warning: {line}")


def _check_model_is_named(family: str, model: Any) -> None:
    """Refuses a model that the run's config.json would not name: its weights would later be read as
    those of `model.family`, unnoticed if the shapes are the same.

    Raises:
      ValueError: names the setting.
    """
    if model is not None and not is_own_family(family):
        name = getattr(model, "__qualname__", "NAME")
        raise ValueError(
            f"model is {name}, and the run's config.json would have model.family = {family!r}; set "
            f"model.family = '{getattr(model, '__module__', 'MODULE')}:{name}' instead"
        )


def _check_text_is_chosen(data: DataConfig, model: ModelSettings) -> None:
    """Refuses the default text, Python's standard library, for a model with a large vocabulary or
    for pretrained weights: it is hardly intended, and the loss would not tell.

    Raises:
      ValueError: names the settings.
    """
    default, size = DataConfig(), model.vocab_size
    if (data.source, data.tokenizer) == (default.source, default.tokenizer) and size > 4096:
        raise ValueError(
            f"model.vocab_size = {size}, and data.source and data.tokenizer are the defaults: "
            "Python's standard library as bytes, 257 tokens; set --config.data.source=TEXT_FILES "
            "and --config.data.tokenizer=tokenizer.json"
        )
    own = data.tokenizer.endswith((".json", ".model"))
    if data.source == default.source and own and model.init_from:
        raise ValueError(
            f"model.init_from = {model.init_from!r} with data.tokenizer = "
            f"{data.tokenizer!r}, and data.source is the default, Python's standard library; set "
            "--config.data.source=TEXT_FILES"
        )


def _with_steps(config: Config, workdir: pathlib.Path) -> Config:
    """The config with `run.steps` in place of `run.epochs`, from the size of the text.

    Raises:
      ValueError: sources with weights, whose epochs differ.
    """
    epochs, batch = config.run.epochs, config.data.global_batch_size
    phases.enter_phase("counting the text")
    text = processes.first("text", lambda: open_text(config, workdir))
    sources = text.train.progress(0)
    if len(sources) > 1:
        raise ValueError(
            f"run.epochs = {epochs}: data.source has weights, by which the epochs of sources "
            "differ; set run.steps"
        )
    steps = max(1, math.ceil(epochs * sources[0].epoch / batch))
    log.info(
        f"run.epochs = {epochs:g}: run.steps = {steps}, each of {batch} of the "
        f"{sources[0].epoch:,} examples"
    )
    return dataclasses.replace(config, run=dataclasses.replace(config.run, steps=steps, epochs=0.0))


def _is_complete(run: RunConfig, step: int, workdir: pathlib.Path) -> bool:
    """Whether a run at this step is complete. It may have been stopped or killed after its last
    step, before the evaluation and the summary."""
    if step != run.steps:
        return step > run.steps
    done = jax.process_index() == 0 and is_summarised(workdir, step)
    return processes.from_first("summary", done)


def _prepare(
    found: Found,
    engine: Engine,
    engines: Engines,
    workdir: pathlib.Path,
    checkpoints: CheckpointWriter,
    refuse_damaged: bool,
) -> Trainer:
    """Reads the text, compiles the step, and makes the state: from the newest checkpoint, from
    initial weights, or random."""
    begin, config = found.step, engine.config
    if begin:
        check_same_examples(found, config.data)
        check_same_model(found, config.model)
        check_same_state(found, engine, checkpoints)
    weights = None if begin else open_initial(engine, workdir)
    random = begin == 0 and weights is None
    first = engines[config.data.sequences_after(begin)]
    text, step, state = _read_and_compile(engine, first, workdir, random=random)
    _log_epochs(text, config.run.steps, config.data)
    if begin:
        phases.enter_phase("reading the checkpoint")
        begin, state, text = resume(found, engine, checkpoints, text, refuse_damaged=refuse_damaged)
    else:
        checkpoints.set_aside(found.damaged, begin)
    if weights:
        check_tokenizer(text.tokenizer, weights)
        kept = set(weights.stop_ids) & set(text.tokenizer.special.values())
        text = dataclasses.replace(text, tokenizer=with_stop_ids(text.tokenizer, kept))
        phases.enter_phase("reading the weights")
        state = initial_state(engine, weights, jax.random.key(config.run.seed))
    assert state is not None, "a new run has weights or is random"
    _log_stop_ids(text)
    programs = StepPrograms(engines, config, step, begin)
    return Trainer(engine, workdir, checkpoints, begin, text, state, programs)


def _log_stop_ids(text: Text) -> None:
    line, warning = describe_stop_ids(text.tokenizer, text.response_ends)
    if line:
        log.info(line)
    if warning:
        log.warning(f"warning: {warning}")


def _examine(config: Config, workdir: pathlib.Path) -> None:
    """Logs the findings of the preflight checks, those with advice as warnings."""

    phases.enter_phase("preflight")
    for finding in preflight.examine_run(config, workdir):
        if finding.advice:
            log.warning(f"warning: preflight, {finding}")
        else:
            log.info(f"preflight, {finding}")


def _check_local_space(run: RunConfig, engine: Engine, checkpoints: CheckpointWriter) -> None:
    """Refuses a run with a URL whose local tier has too little free space for its checkpoints.

    Raises:
      StoreError: with the space that they need.
    """
    if store_of(checkpoints.directory.parent) is None or jax.process_index() != 0:
        return
    sizes = {
        name: math.prod(leaf.shape) * leaf.dtype.itemsize
        for name, leaf in named_arrays(engine.abstract_state).items()
    }
    once = sum(sizes[name] for name in unchanged_params(engine))
    there = len(checkpoints.steps())
    # A new checkpoint is complete before an old one is removed.
    missing = max(0, run.keep_last + run.keep_best + 1 - there)
    needs = missing * (sum(sizes.values()) - once) + (0 if there else once)
    check_free(checkpoints.directory.parent, needs, f"{missing} checkpoints of the run")


def _read_and_compile(
    engine: Engine, first: Engine, workdir: pathlib.Path, *, random: bool
) -> tuple[Text, Step, TrainState | None]:
    """Reads and tokenises the text, and with `random` draws parameters, while the step of `first`
    compiles."""
    phases.enter_phase("reading text and compiling")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        reading = pool.submit(processes.first, "text", lambda: _open_text(engine, workdir))

        def refuse_early(seconds: float) -> None:
            """Raises an early error (a missing source, a tokenizer's name) before compilation."""
            if reading in concurrent.futures.wait([reading], timeout=seconds).done:
                reading.result()

        refuse_early(0.2)
        key = jax.random.key(engine.config.run.seed)
        # One program compiles while another is traced, but no two compile at the same time: XLA for
        # GPUs times kernels (autotuning) on the device.
        compiling = pool.submit(engine.init.lower(key).compile) if random else None
        lowered = lower_step(first)
        refuse_early(0.0)
        pool.submit(import_later)
        state = compiling.result()(key) if compiling else None
        step = compile_step(first, lowered)
        return reading.result(), step, state


def _open_text(engine: Engine, workdir: pathlib.Path) -> Text:
    """The text of a run, whose targets are tokens.

    Raises:
      ValueError: as `open_text`, or the model's head has fewer classes.
    """
    config, classes = engine.config, engine.model.num_classes
    text = open_text(config, workdir)
    if classes is not None and classes < text.tokenizer.vocab_size:
        raise ValueError(
            f"the head of model.family = {config.model.family!r} has {classes} classes "
            f"(num_classes), and the targets of data.source are the {text.tokenizer.vocab_size} "
            f"tokens of data.tokenizer = {config.data.tokenizer!r}; train it in Python, by "
            "engine.step(state, engine.shard(batch)) with custom batches"
        )
    return text


def import_later() -> None:
    """Imports the modules of `LATER`, in a thread during compilation."""
    for module in LATER:
        importlib.import_module(module)


def _log_epochs(text: Text, steps: int, data: DataConfig) -> None:
    tokenizer = f"data.tokenizer = {data.tokenizer} ({text.tokenizer.vocab_size:,} tokens)"
    for source in text.train.progress(data.examples_of(steps)):
        log.info(
            f"data: {source.name} has {source.epoch:,} examples by {tokenizer}; run.steps = "
            f"{steps} reads them {source.seen / source.epoch:.2f} times"
        )
