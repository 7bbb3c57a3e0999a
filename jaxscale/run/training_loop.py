"""The training loop: `fit` trains the result of `open_trainer`."""

import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax

from jaxscale import config as configs
from jaxscale.batch import ShardedBatch
from jaxscale.checkpoints.retention import best_step
from jaxscale.checkpoints.save import CheckpointWriter, NotFiniteError
from jaxscale.choices import check_kind
from jaxscale.data.skipped_ranges import skip_examples
from jaxscale.distributed import hangs, phases, processes
from jaxscale.run import signals
from jaxscale.run.evaluation import evaluate_loss
from jaxscale.run.goodput import Account
from jaxscale.run.growth.grow_state import grow_state
from jaxscale.run.recorder import BadStepsError, Recorder, tracing
from jaxscale.run.saves import SaveError, Saves, wait_for_write
from jaxscale.run.setup.resume import resume
from jaxscale.run.setup.step_programs import (
    StepPrograms,
    compile_step,
    open_engines,
    training_batches,
)
from jaxscale.run.setup.text import keep_tokenizer
from jaxscale.run.trainer import Trainer
from jaxscale.storage import durable
from jaxscale.training.step import TrainState

log = logging.getLogger("jaxscale")

MOST_RETURNS = 3
"""The most returns to one checkpoint after bad steps; another one ends the run."""

TRAINER_ADVICE = (
    "pass the result of jaxscale.open_trainer(config, workdir), which is None if the run is "
    "complete already"
)


class Stopped(Exception):  # noqa: N818 - a stop that was asked for is not an error
    """The run stopped early, by a signal or `run.max_hours`, after a checkpoint.

    Args:
      said: the request, and the step after which it stopped.
      summary: of the run so far.
    """

    def __init__(self, said: str, summary: dict[str, Any]) -> None:
        super().__init__(said)
        self.summary = summary


def fit(
    trainer: Trainer,
    *,
    trackers: tuple[str, ...] = ("tensorboard",),
    profile: range = range(0),
    started: float | None = None,
) -> tuple[TrainState, dict[str, Any]]:
    """Trains until `run.steps`; writes metrics, evaluations and checkpoints into `workdir`.

    Args:
      trackers: experiment trackers that also get the metrics: "tensorboard", "wandb", "mlflow".
      profile: steps to trace with XLA's profiler, into `workdir`/profile; the summary has their
        time by cause.
      started: `time.monotonic()` when the process began, for the time to the first step.

    Returns:
      The last state in canonical form, whose `params` `sample` and `evaluate_loss` take, and the
      summary of the run.

    Raises:
      FloatingPointError: the loss, the gradient norm or the state to be saved is not finite.
      SaveError: the last state could not be saved, or nothing can be written at the start.
      Stopped: by one of `signals.SIGNALS`, after a checkpoint.
      TrackerError: wandb or mlflow could not begin a new run.
      UnusableTokensError: the tokens on disk changed during the run, or cannot be read.
      ValueError: `trainer` is not one, or was used before; `trackers` is not a tuple of names.

    Examples:
      >>> config = jaxscale.load("tiny", ["model.num_layers=1", "run.steps=2"])
      >>> trainer = jaxscale.open_trainer(config, "runs/example")
      >>> state, summary = jaxscale.fit(trainer)
      >>> summary["step"]
      2
    """
    _check_arguments(trainer, trackers)
    if profile and profile[0] <= trainer.begin:
        log.warning(
            f"warning: --profile {profile[0]}:{profile[-1]} does not trace the steps up to "
            f"{trainer.begin}, which were trained before"
        )
    if between := _between(profile, trainer):
        log.warning(
            f"warning: --profile {profile[0]}:{profile[-1]} also traces {between}, whose time "
            "counts as that of the steps; trace fewer steps to leave it out"
        )
    account = Account(trainer.workdir, started)
    started = time.monotonic() if started is None else started
    if jax.process_index() == 0:
        with _writing(trainer.workdir):
            _write_settings(trainer, new=trainer.begin == 0)
            _check_writable(trainer.checkpoints.directory)
    returned: collections.Counter[int] = collections.Counter()
    with (
        signals.listening(),
        hangs.watching(trainer.config.run.hang_seconds),
        _closing(trainer.checkpoints),
    ):
        signals.hold()  # until the last checkpoint is written
        signals.limit(trainer.config.run.max_hours, started)
        while True:
            with _writing(trainer.workdir):
                recorder = Recorder(
                    trainer.workdir,
                    trainer.engine,
                    trainer.text.train,
                    begin=trainer.begin,
                    trackers=trackers,
                    started=started,
                    account=account,
                )
            trainer.checkpoints.losses = recorder.losses
            with contextlib.closing(recorder):
                try:
                    state = _loop(trainer, recorder, profile)
                    if trainer.end < trainer.config.run.steps:
                        recorder.flush()
                        trainer = _unshared(trainer, state)
                        continue
                    canonical = trainer.engine.placement.to_canonical(state, donate=True)
                    return canonical, recorder.finish()
                except FloatingPointError as error:
                    if not trainer.config.run.skip_bad_steps:
                        raise
                    bad = error.with_traceback(None)  # a traceback would keep the state alive
            trainer = _rewound(trainer, bad)
            returned[trainer.begin] += 1
            if returned[trainer.begin] > MOST_RETURNS:
                raise FloatingPointError(
                    f"{bad}, after {MOST_RETURNS} returns to step {trainer.begin}; lower "
                    "optimizer.learning_rate, or check the examples, which are in metrics.jsonl"
                )


def _between(profile: range, trainer: Trainer) -> str:
    """Text on the saves and evaluations between traced steps, or ""."""
    run, traced = trainer.config.run, range(max(profile.start, trainer.begin + 1), profile.stop)
    periods = {"save": run.checkpoint_every, "evaluation": run.eval_every}
    if not trainer.text.evaluations:
        del periods["evaluation"]
    found = [
        f"the {what} after step {step}"
        for step in traced[:-1]
        for what, period in periods.items()
        if period and step % period == 0
    ]
    more = [f"{len(found) - 2} more"] if len(found) > 2 else []
    return " and ".join(found[:2] + more)


def _check_arguments(trainer: Trainer, trackers: tuple[str, ...]) -> None:
    check_kind("trainer", trainer, Trainer, TRAINER_ADVICE)
    if isinstance(trackers, str):
        raise ValueError(
            f"trackers = {trackers!r} is a string; pass a tuple of names, ({trackers!r},)"
        )
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(trainer.state)):
        raise ValueError("this trainer's state was used by an earlier fit; call open_trainer again")


def _write_settings(trainer: Trainer, *, new: bool) -> None:
    """Writes config.json, and for a new run the tokenizer, to its folder."""
    trainer.workdir.mkdir(parents=True, exist_ok=True)
    resolved = json.dumps(configs.to_dict(trainer.config), indent=2)
    durable.replace_file(trainer.workdir / "config.json", f"{resolved}\n".encode())
    if new:
        origin = trainer.config.model.init_from
        keep_tokenizer(origin, trainer.text.tokenizer, trainer.workdir)


def _check_writable(folder: pathlib.Path) -> None:
    """Checks before the first step that checkpoints can be written: the folder may be a link to
    another disk, which is absent or read-only.

    Raises:
      OSError: no file can be made there.
    """
    if not os.path.lexists(folder):  # the first save makes it
        return
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        error.filename = str(folder)
        raise


def _mend_folder(trainer: Trainer) -> None:
    """Writes config.json and the tokenizer again if the folder was removed or moved during the
    run, so that it can be evaluated."""
    if jax.process_index() == 0 and not (trainer.workdir / "config.json").is_file():
        with contextlib.suppress(OSError):  # the save will report it
            _write_settings(trainer, new=True)


@contextlib.contextmanager
def _closing(checkpoints: CheckpointWriter) -> Iterator[None]:
    """Waits for a pending write, also after an error: the run resumes from it."""
    with contextlib.closing(checkpoints):
        try:
            yield
        finally:
            wait_for_write(checkpoints, phases.current().step)


@contextlib.contextmanager
def _writing(workdir: pathlib.Path) -> Iterator[None]:
    """Raises `SaveError` for failed writes before the first step."""
    try:
        yield
    except OSError as error:
        raise SaveError(
            f"{error.filename or workdir} cannot be written ({durable.reason(error)}), and no step "
            "was trained"
        ) from error


def _rewound(trainer: Trainer, bad: FloatingPointError) -> Trainer:
    """The trainer at the newest checkpoint, without the examples of the bad steps after it: the
    steps that updated nothing, or the last ones before a non-finite state."""
    if isinstance(bad, BadStepsError):
        steps = range(bad.first, bad.last + 1)
    elif isinstance(bad, NotFiniteError):
        first = bad.step + 1 - trainer.config.run.skip_bad_steps
        steps = range(max(first, trainer.begin + 1), bad.step + 1)
    else:
        raise bad
    config, engine, checkpoints = trainer.config, trainer.engine, trainer.checkpoints
    wait_for_write(checkpoints, steps[-1])
    phases.enter_phase("reading the checkpoint", steps[-1])
    found = checkpoints.newest_intact()
    if not found.step:
        raise FloatingPointError(f"{bad}, and there is no checkpoint to return to") from bad
    begin, state, _ = resume(found, engine, checkpoints, trainer.text)
    first, last = map(config.data.examples_of, (max(steps.start - 1, begin), steps.stop - 1))
    log.warning(
        f"warning: {bad}: back at step {begin}; the examples {first} to {last - 1} are skipped"
    )
    text = dataclasses.replace(trainer.text, train=skip_examples(trainer.text.train, first, last))
    return dataclasses.replace(trainer, begin=begin, state=state, text=text)


def _unshared(trainer: Trainer, state: TrainState) -> Trainer:
    """The trainer after `model.unshare_at`. Its state is saved, and then config.json changed: the
    newest checkpoint is of the config's model except between the two."""
    before, after, step = trainer.engine, trainer.unshared, trainer.end
    assert after, "the run ends with another engine"
    phases.enter_phase("copying shared weights", step)
    log.info(
        f"after step {step}: the {before.config.model.share_layers} layers of each group get their "
        "own weights"
    )
    with jax.transfer_guard("allow"):
        state = grow_state(before, after, state)
    trainer = dataclasses.replace(
        trainer,
        engine=after,
        begin=step,
        state=state,
        programs=StepPrograms(open_engines(after, {}), after.config, compile_step(after), step),
        unshared=None,
    )
    Saves(after, trainer.text, trainer.checkpoints, 0).finish(step, state)
    if jax.process_index() == 0:
        _write_settings(trainer, new=False)
    return trainer


def _loop(trainer: Trainer, recorder: Recorder, profile: range) -> TrainState:
    """Trains up to the engine's last step. Implicit transfers between host and devices, such as of
    a NumPy array among a step's arguments, are errors. Intended transfers are batches to the
    devices, metrics to the host (`Recorder`, by `jax.device_get`), evaluations and checkpoints."""
    config, engine, text = trainer.config, trainer.engine, trainer.text
    run, state, programs = config.run, trainer.state, trainer.programs
    stream = training_batches(programs.engines, config, text.train, trainer.begin)
    stops = _Stops()
    saves = Saves(engine, text, trainer.checkpoints, trainer.begin)
    with (
        contextlib.closing(stream),
        tracing(profile, recorder, programs) as trace,
        jax.transfer_guard("disallow"),
    ):
        request = _evaluate_begun(trainer, recorder, stops)
        if request and trainer.begin == run.steps:
            _stop(recorder, saves, trainer.begin, state, request)
        for step in range(trainer.begin + 1, trainer.end + 1):
            trace(step)
            try:
                batch = _next_batch(stream, recorder, step)
            except signals.Interrupted:
                _stop(recorder, saves, step - 1, state, signals.requested())
            program = programs.of(step, recorder.paused)
            phases.enter_phase("training", step)
            text.check_tokens()
            state, out = program(state, batch)
            recorder.push(step, out)
            if step + 1 not in profile:
                trace(step + 1)  # stops before a following evaluation or save
            last = step == run.steps
            request = stops()
            if _evaluation_due(trainer, step) and not request:
                request = _evaluate(trainer, recorder, step, state, stops)
            if step == trainer.end < run.steps:
                return state  # saved with its layers' own weights
            if saves.due(step):
                phases.enter_phase("saving", step)
                # Raises where loss or gradient norm is not finite: such a state is not saved.
                recorder.flush()
                _mend_folder(trainer)
                saves.save(step, state)
                recorder.restart_clock()
            if request and (text.evaluations or not last):
                _stop(recorder, saves, step, state, request)
    saves.finish(run.steps, state)
    _say_best(trainer.checkpoints, keep_best=run.keep_best)
    return state


def _stop(recorder: Recorder, saves: Saves, step: int, state: TrainState, request: str) -> NoReturn:
    """Saves the state after a step, and raises Stopped."""
    phases.enter_phase("saving", step)
    recorder.flush()
    saves.finish(step, state)
    done = f"after step {step}, saved" if step else "before the first step"
    raise Stopped(f"{request}: stopped {done}", recorder.summary())


def _evaluate_begun(trainer: Trainer, recorder: Recorder, stops: Callable[[], str]) -> str:
    """Does the evaluation that is due where a run resumes, if a stop prevented it; returns the
    request to stop, or ""."""
    begin = trainer.begin
    if not (begin and _evaluation_due(trainer, begin)):
        return ""
    if processes.from_first("evaluated", recorder.begin_evaluated):
        return ""
    return _evaluate(trainer, recorder, begin, trainer.state, stops)


def _next_batch(stream: Iterator[ShardedBatch], recorder: Recorder, step: int) -> ShardedBatch:
    """The next batch. Raises `signals.Interrupted` if a signal asks to stop during the wait."""
    phases.enter_phase("waiting for input", step)
    allowed = jax.transfer_guard_host_to_device("allow")
    with signals.interruptible(), recorder.waiting(), allowed:
        return next(stream)


def _say_best(checkpoints: CheckpointWriter, *, keep_best: bool) -> None:
    best = best_step(checkpoints.steps(), checkpoints.losses)
    if keep_best and best is not None:
        log.info(
            f"the lowest held-out loss of a checkpoint is {checkpoints.losses[best]:.4f}, after "
            f"step {best} (--step best)"
        )


class _Stops:
    """Requests to stop, asked for at the same points of the loop in every process.

    The points are counted; an answer is kept.
    """

    def __init__(self) -> None:
        self._points = itertools.count(1)
        self._answer = ""

    def __call__(self) -> str:
        self._answer = self._answer or processes.stops(next(self._points), signals.requested())
        return self._answer


def _evaluate(
    trainer: Trainer, recorder: Recorder, step: int, state: TrainState, stops: Callable[[], str]
) -> str:
    """Evaluates and records the result; returns the request to stop during it, which prevents the
    record, or ""."""
    phases.enter_phase("evaluating", step)
    recorder.flush()
    config = trainer.config
    size, most = config.data.global_batch_size, config.run.eval_batches

    def after_batch() -> str:
        phases.enter_phase("evaluating", step)  # the watchdog's deadline is for a batch
        return stops()

    # Validation sets, which have names, are read as a whole.
    with jax.transfer_guard("allow"):  # batches and sums
        evaluations = {
            name: evaluate_loss(
                trainer.engine,
                state.params,
                examples,
                size,
                None if name else most,
                stops=after_batch,
                tables=state.tables,
            )
            for name, examples in trainer.text.evaluations.items()
        }
    if not (request := stops()):
        recorder.evaluated(step, evaluations)
        trainer.checkpoints.losses = recorder.losses
    return request


def _evaluation_due(trainer: Trainer, step: int) -> bool:
    run = trainer.config.run
    due = step == run.steps or (run.eval_every > 0 and step % run.eval_every == 0)
    return bool(trainer.text.evaluations) and due
