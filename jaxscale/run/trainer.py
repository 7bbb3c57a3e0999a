"""Training: from a config and a folder to a trained model, and back in where it stopped."""

import concurrent.futures
import contextlib
import json
import logging
import math
import pathlib
import signal
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxscale import config as configs
from jaxscale.batch import Batch
from jaxscale.config import Config
from jaxscale.data.dataset import Examples, repeats
from jaxscale.distributed import processes
from jaxscale.formatting import duration, human_bytes
from jaxscale.hardware import peak_flops
from jaxscale.run.layout_report import describe
from jaxscale.run.setup import (
    Evaluation,
    Text,
    device_batches,
    evaluate,
    open_engine,
    open_text,
)
from jaxscale.training.checkpoint import Checkpoints, describe_difference
from jaxscale.training.metrics import Metrics, progress_line, utilisation
from jaxscale.training.optimizer import schedule
from jaxscale.training.step import Engine, StepMetrics, TrainState

log = logging.getLogger("jaxscale")

LOG_SECONDS = 5.0
"""A progress line at most this often."""


class Stopped(Exception):  # noqa: N818 - a stop that was asked for is no error
    """A signal ended the run early, after a checkpoint."""

    def __init__(self, step: int, number: int, who: str = ""):
        name = signal.Signals(number).name + (f" to {who}" if who else "")
        super().__init__(f"{name}: stopped after step {step}, saved")
        self.number = number


@dataclass(frozen=True)
class Trainer:
    """Finished objects, ready to train from step `begin` on."""

    config: Config  # its layout resolved
    engine: Engine
    workdir: pathlib.Path
    checkpoints: Checkpoints
    begin: int  # steps done
    text: Text
    state: TrainState  # given up to `fit`
    step: Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]  # compiled


def open_trainer(config: Config, workdir: pathlib.Path) -> Trainer | None:
    """Checks everything, reads the text, compiles the step, and restores the newest checkpoint.

    Returns:
      None when the run is complete already.

    Raises:
      ValueError: settings that do not go together, with each other, the devices, the data or the
        checkpoint. Layouts and shapes are refused before anything is compiled.
    """
    config, engine = open_engine(config, workdir)
    log.info(describe(engine))
    run = config.run
    checkpoints = Checkpoints(
        workdir / "checkpoints", keep_last=run.keep_last, keep_every=run.keep_every, report=log.info
    )
    begin = processes.from_first("newest checkpoint", checkpoints.latest() or 0)
    if begin >= run.steps:
        checkpoints.close()
        log.info(
            f"nothing to do: run.steps = {run.steps} and {workdir} is at step {begin}; "
            "raise run.steps to go on"
        )
        return None
    with concurrent.futures.ThreadPoolExecutor() as pool:
        # Reading and tokenising while the compiler works; but what is wrong at once (a source that
        # is not there, a tokenizer's name) should not have to wait for it.
        reading = pool.submit(processes.first, "text", lambda: open_text(config, workdir))
        if reading in concurrent.futures.wait([reading], timeout=1).done:
            reading.result()
        step = compile_step(engine)
        text = reading.result()
    for source in text.train.progress(run.steps * config.data.global_batch_size):
        log.info(
            f"data: {source.name} has {source.epoch:,} examples, and run.steps = {run.steps} goes "
            f"through them {source.seen / source.epoch:.2f} times"
        )
    state = _begin(engine, config, checkpoints, begin, text.train)
    return Trainer(config, engine, workdir, checkpoints, begin, text, state, step)


def fit(
    trainer: Trainer,
    *,
    trackers: tuple[str, ...] = ("tensorboard",),
    profile: range = range(0),
    started: float | None = None,
) -> tuple[TrainState, dict[str, Any]]:
    """Trains until `run.steps`, writing metrics, evaluations and checkpoints on the way.

    Args:
      trackers: where metrics go besides files: "tensorboard", "wandb", "mlflow".
      profile: steps to trace with XLA's profiler, into `workdir`/profile.
      started: `time.monotonic()` when the process began, for the time to the first step.

    Returns:
      The last state, and the summary of the run.

    Raises:
      FloatingPointError: the loss or the gradient norm is not finite.
      Stopped: by SIGINT or SIGTERM, after a checkpoint.
    """
    if jax.process_index() == 0:
        resolved = json.dumps(configs.to_dict(trainer.config), indent=2)
        trainer.workdir.mkdir(parents=True, exist_ok=True)
        (trainer.workdir / "config.json").write_text(resolved + "\n")
    recorder = Recorder(trainer, trackers, time.monotonic() if started is None else started)
    with contextlib.closing(recorder), contextlib.closing(trainer.checkpoints):
        state = _loop(trainer, recorder, profile)
        return state, recorder.finish()


def compile_step(engine: Engine) -> Callable:
    """Compiles the train step, saying so, and what memory it takes."""
    log.info("compiling the train step ...")
    begin = time.monotonic()
    lowered = engine.step.lower(engine.abstract_state, engine.abstract_batch)
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    log.info(
        f"compiled in {duration(time.monotonic() - begin)}; each device keeps "
        f"{human_bytes(memory.argument_size_in_bytes)} between steps and needs "
        f"{human_bytes(memory.temp_size_in_bytes)} more during one"
    )
    return compiled


def _begin(
    engine: Engine, config: Config, checkpoints: Checkpoints, begin: int, train: Examples
) -> TrainState:
    """Fresh state, or that of checkpoint `begin`."""
    if not begin:
        return engine.init(jax.random.key(config.run.seed))
    metadata, resolved = checkpoints.metadata(begin), configs.to_dict(config)
    # A layout may change under a run, its examples may not.
    state = checkpoints.restore(begin, engine.placement.canonical, config=resolved)
    state = engine.placement.from_canonical(state)
    if metadata["data"]["fingerprint"] != train.fingerprint:
        raise ValueError(
            f"the examples are not those that checkpoint {begin} was trained on: the text, its "
            "weights, data.tokenizer, data.seed, data.seq_len, data.heldout or data.objective "
            "changed; put it back, or start a new --workdir"
        )
    if metadata["data"]["next_example"] != begin * config.data.global_batch_size:
        raise ValueError(
            f"checkpoint {begin} is at example {metadata['data']['next_example']}, which "
            f"data.global_batch_size = {config.data.global_batch_size} does not meet at that "
            "step; put the batch size back, or start a new --workdir"
        )
    log.info(f"continuing at step {begin} of {config.run.steps}")
    for line in describe_difference(metadata["config"], resolved):
        log.info(f"  changed since: {line}")
    return state


def _metadata(config: Config, train: Examples, step: int) -> dict[str, Any]:
    next_example = step * config.data.global_batch_size
    data = {"fingerprint": train.fingerprint, "next_example": next_example}
    return {"config": configs.to_dict(config), "data": data}


def _loop(trainer: Trainer, recorder: "Recorder", profile: range) -> TrainState:
    config, engine, text = trainer.config, trainer.engine, trainer.text
    run, data, state = config.run, config.data, trainer.state
    stream = device_batches(
        engine, text.train, data.global_batch_size, start_step=trainer.begin, workers=data.workers
    )
    with contextlib.closing(stream), _signals() as received, _tracing(profile, recorder) as trace:
        for step in range(trainer.begin + 1, run.steps + 1):
            trace(step)
            with recorder.waiting():
                batch = next(stream)
            state, out = trainer.step(state, batch)
            recorder.push(step, out)
            last, stop = step == run.steps, processes.stops(step, received())
            if text.heldout and (last or _due(step, run.eval_every)):
                recorder.flush()
                evaluation = evaluate(
                    engine, state.params, text.heldout, data.global_batch_size, run.eval_batches
                )
                recorder.evaluated(step, evaluation)
            if last or stop or _due(step, run.checkpoint_every):
                # Only now is it known whether the step was sound; an unsound one is not saved.
                recorder.flush()
                saved = engine.placement.to_canonical(state)
                trainer.checkpoints.save(step, saved, _metadata(config, text.train, step))
            if stop and not last:
                who, number = stop
                trainer.checkpoints.wait()
                raise Stopped(step, number, who)
    trainer.checkpoints.wait()
    return state


def _due(step: int, period: int) -> bool:
    return period > 0 and step % period == 0


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """Holds SIGINT and SIGTERM back until the loop asks; the number received, or 0."""
    numbers = [0]

    def note(number, frame):
        numbers[0] = number
        log.warning(f"{signal.Signals(number).name}: finishing the step, then saving ...")
        # A second one acts at once.
        signal.signal(number, before[number])

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: numbers[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _tracing(profile: range, recorder: "Recorder") -> Generator[Callable[[int], None]]:
    """Traces the steps in `profile`: called with each step before it starts."""
    running = False

    def at(step: int) -> None:
        nonlocal running
        inside = step in profile and jax.process_index() == 0
        if inside and not running:
            jax.profiler.start_trace(str(recorder.workdir / "profile"))
        elif running and not inside:
            stop()
        running = inside

    def stop() -> None:
        recorder.flush()
        jax.profiler.stop_trace()
        log.info(f"trace written to {recorder.workdir / 'profile'}")

    yield at
    if running:
        stop()


class Recorder:
    """Times steps, checks that they are sound, and writes what there is to say of them.

    A step is read only when the next one is under way, so that devices never wait for the host.
    """

    def __init__(self, trainer: Trainer, trackers: tuple[str, ...], started: float):
        config, engine = trainer.config, trainer.engine
        model, data, optimizer = config.model, config.data, config.optimizer
        self.workdir, self.begin, self.started = trainer.workdir, trainer.begin, started
        self.steps = config.run.steps
        self.metrics = Metrics(
            trainer.workdir,
            start_step=trainer.begin,
            trackers=trackers,
            config=configs.to_dict(config),
        )
        self._rate = schedule(
            optimizer.schedule,
            learning_rate=optimizer.learning_rate,
            final=optimizer.final_learning_rate,
            warmup_steps=optimizer.warmup_steps,
            steps=config.run.steps,
        )
        self._model_flops = model.flops_per_token(data.seq_len)
        self._hardware_flops = model.hardware_flops_per_token(
            data.seq_len,
            remat=config.layout.remat,
            recomputed=engine.stages.recomputed if engine.stages else 0.0,
        )
        devices = engine.mesh.devices
        self._num_devices = devices.size
        self._peak = peak_flops(devices.flat[0].device_kind, model.compute_dtype)
        self._train, self._batch_size = trainer.text.train, data.global_batch_size
        self._pending: tuple[int, StepMetrics, float] | None = None
        self._data_seconds = 0.0
        self._mark = time.monotonic()  # when the step before was done
        self._shown = -math.inf
        self._recent: list[float] = []
        self._last: dict[str, Any] = {}
        self._evaluation: dict[str, Any] = {}

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for input."""
        begin = time.monotonic()
        yield
        self._data_seconds = time.monotonic() - begin

    def push(self, step: int, out: StepMetrics) -> None:
        """A step is under way; writes the one before it."""
        pending, self._pending = self._pending, (step, out, self._data_seconds)
        if pending:
            self._record(*pending)
        if step == self.begin + 1:
            self.flush()

    def flush(self) -> None:
        """Waits for the step under way and writes it; what follows is not part of any step."""
        pending, self._pending = self._pending, None
        if pending:
            self._record(*pending)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Writes an evaluation after `step`."""
        self._evaluation = {
            "step": step,
            "eval_loss": evaluation.loss,
            "eval_perplexity": evaluation.perplexity,
            "eval_bits_per_byte": evaluation.bits_per_byte,
            "eval_tokens": evaluation.tokens,
        }
        self.metrics.write(self._evaluation)
        line = progress_line(self._evaluation, steps=self.steps, seconds_left=0)
        log.info(f"{line} | {evaluation.bits_per_byte:.3f} bits per byte")
        self._mark = time.monotonic()

    def finish(self) -> dict[str, Any]:
        """Writes summary.json and loss.png, and returns the summary."""
        self.flush()
        seconds = time.monotonic() - self.started
        summary = {**self._last, **self._evaluation, "seconds": seconds}
        self.metrics.finish(summary)
        return summary

    def close(self) -> None:
        """Closes the files, also of a run that failed."""
        self.metrics.close()

    def _record(self, step: int, out: StepMetrics, data_seconds: float) -> None:
        loss, grad_norm, tokens = (float(value) for value in out)
        now = time.monotonic()
        seconds, self._mark = now - self._mark, now
        tokens_per_second = tokens / seconds
        first = step * self._batch_size
        record = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": float(self._rate(step - 1)),
            "tokens": int(tokens),
            "step_seconds": seconds,
            "data_seconds": data_seconds,
            "tokens_per_second": tokens_per_second,
            "mfu": self._utilisation(self._model_flops * tokens_per_second),
            "hfu": self._utilisation(self._hardware_flops * tokens_per_second),
            "examples": self._train.example_digest(range(first - self._batch_size, first)),
        }
        self._last = record
        self.metrics.write(record)
        for source in repeats(self._train, first - self._batch_size, first):
            log.info(f"step {step}: {source.name} begins again, epoch {source.begun}")
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise FloatingPointError(
                f"step {step}: loss = {loss}, gradient norm = {grad_norm}; stopped, and nothing "
                "after the last checkpoint is saved. Lower optimizer.learning_rate, set "
                "optimizer.clip_norm, or lengthen optimizer.warmup_steps"
            )
        self._show(record, now)

    def _show(self, record: dict[str, Any], now: float) -> None:
        step = record["step"]
        if step == self.begin + 1:
            log.info(f"first step done {duration(now - self.started)} after the start")
        else:
            self._recent = [*self._recent[-49:], record["step_seconds"]]
        if now - self._shown >= LOG_SECONDS or step == self.steps:
            self._shown = now
            typical = float(np.median(self._recent or [record["step_seconds"]]))
            left = typical * (self.steps - step)
            log.info(progress_line(record, steps=self.steps, seconds_left=left))

    def _utilisation(self, flops_per_second: float) -> float | None:
        return utilisation(flops_per_second, self._num_devices, self._peak)
