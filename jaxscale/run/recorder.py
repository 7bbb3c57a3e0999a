"""Recorder of a run: step times, metrics, progress lines, traces, summary."""

import contextlib
import dataclasses
import logging
import math
import pathlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxscale import config as configs
from jaxscale.compiled.trace import DeviceTime, read_trace, time_by_cause, trace_line
from jaxscale.data.dataset import Examples, repeats
from jaxscale.distributed import phases, processes
from jaxscale.formatting import duration
from jaxscale.hardware import peak_flops
from jaxscale.run.evaluation import Evaluation
from jaxscale.run.goodput import Account, goodput_share, time_line
from jaxscale.run.metrics import (
    METRICS,
    SUMMARY,
    WITHOUT_LOSS,
    Metrics,
    evaluation_line,
    heldout_losses,
    progress_line,
    read,
    token_count,
    utilisation,
)
from jaxscale.sharding.resolve import leaf_name
from jaxscale.storage import durable
from jaxscale.storage.untrusted import parse_json
from jaxscale.training.engine import Engine
from jaxscale.training.step import StepMetrics

log = logging.getLogger("jaxscale")

LOG_SECONDS = 5.0
"""The shortest time between progress lines."""


class BadStepsError(FloatingPointError):
    """`run.skip_bad_steps` steps in a row updated nothing."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__(f"steps {first} to {last} updated nothing")
        self.first, self.last = first, last


class Recorder:
    """Times steps, checks that loss and gradient norm are finite, and writes the metrics.

    The metrics of a step are read while the next one runs, so that accelerators never wait for the
    host. On CPUs the dispatch of a step returns when most of it is done, so that its time would
    count for the step before: there its metrics are read at once.

    Args:
      workdir: the run's folder.
      train: the examples that the steps read.
      begin: steps done before.
      trackers: trackers for metrics, in addition to files.
      started: `time.monotonic()` when the process started.
      account: the run's account of time.

    Attributes:
      begin_evaluated: whether an evaluation after step `begin` is already recorded.
      losses: step -> loss on held-out text.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        engine: Engine,
        train: Examples,
        *,
        begin: int,
        trackers: tuple[str, ...],
        started: float,
        account: Account,
    ) -> None:
        config = engine.config
        self.workdir, self.begin, self.started = workdir, begin, started
        self.steps = config.run.steps
        earlier = read(workdir / METRICS)
        at_begin = [line for line in earlier if line["step"] == begin]
        self.begin_evaluated = any(map(_is_evaluation, at_begin))
        self.losses = heldout_losses(line for line in earlier if line["step"] <= begin)
        # A step's wait for input was not counted as compute.
        lost = [
            line["step_seconds"] - line.get("data_seconds", 0.0)
            for line in earlier
            if line["step"] > begin and "step_seconds" in line
        ]
        self._account = account
        account.lose(max(0.0, sum(lost)))
        self.metrics = Metrics(
            workdir,
            start_step=begin,
            trackers=trackers,
            config=configs.to_dict(config),
        )
        self._rate = engine.learning_rate
        self._flops = engine.count_flops()
        self._by_layer = config.run.metrics_by_layer
        self._skip_bad_steps = config.run.skip_bad_steps
        self._skipped = 0  # in a row
        self._said_without_loss = False
        self._params = engine.abstract_state.params if self._skip_bad_steps else {}
        devices = engine.mesh.devices
        self._num_devices = devices.size
        self._on_cpu = devices.flat[0].platform == "cpu"
        self._peak = peak_flops(devices.flat[0].device_kind, config.model.compute_dtype)
        self._train, self._data = train, config.data
        self._pending: tuple[int, StepMetrics, float] | None = None
        self._data_seconds = 0.0
        self._shown = -math.inf
        self._recent: list[dict[str, Any]] = []  # the last steps, without the first
        self._begun = self._stepped = 0.0  # end of the first step; seconds of the steps after it
        # For a run that was stopped after its last step and before its summary.
        done = at_begin if begin == self.steps else []
        self._last = next((line for line in done if "loss" in line), {})
        self._evaluation = next(filter(_is_evaluation, done), {})
        self._profile: dict[str, Any] = {}
        # The end of the previous step; set last, since trackers may take seconds to start.
        self._mark = time.monotonic()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context that times the wait for input."""
        begin = time.monotonic()
        yield
        self._data_seconds = time.monotonic() - begin

    def push(self, step: int, out: StepMetrics) -> None:
        """Takes a dispatched step's metrics; writes the previous step's, on CPUs this one's."""
        pending, self._pending = self._pending, (step, out, self._data_seconds)
        if pending:
            self._record(*pending)
        if self._on_cpu or step == self.begin + 1:
            self.flush()

    def flush(self) -> None:
        """Waits for the last step and writes its metrics."""
        pending, self._pending = self._pending, None
        if pending:
            self._record(*pending)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context for work between steps, such as a compilation, which no step's time includes."""
        self.flush()
        yield
        self.restart_clock()

    def restart_clock(self) -> None:
        """Excludes the time since a `flush`, such as of a save, from the next step."""
        self._mark = time.monotonic()

    def evaluated(self, step: int, evaluations: Mapping[str, Evaluation]) -> None:
        """Writes the evaluations after `step`, by set; the held-out text's name is ""."""
        self._evaluation = {"step": step}
        for name, evaluation in evaluations.items():
            self._evaluation |= evaluation.record(name)
            loss = evaluation.loss if evaluation.tokens else None
            bits = evaluation.bits_per_byte
            log.info(evaluation_line(step, self.steps, name, loss, bits))
            if loss is not None and not math.isfinite(loss):
                text = f"validation set {name!r}" if name else "held-out text"
                log.warning(
                    f"warning: the loss on the {text} is {loss} after step {step}: --step best "
                    "excludes such a checkpoint. Lower optimizer.learning_rate, or check the text "
                    "with python -m jaxscale.evaluate"
                )
        self.metrics.write(self._evaluation)
        before = {one: loss for one, loss in self.losses.items() if one != step}
        self.losses = before | heldout_losses([self._evaluation])
        self.restart_clock()

    def traced(self, steps: range, reports: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Logs the time breakdown of traced steps, a line for each process, and adds it to the
        summary.

        Args:
          reports: for each process, the fields of `DeviceTime` of each of its devices.
        """
        self._profile = {"profile": {"steps": list(steps), "processes": reports}}
        for i, devices in enumerate(reports):
            times = [DeviceTime(**device) for device in devices]
            if not times:  # the process has warned that its trace was not written or read
                continue
            process = f"process {i}, " if len(reports) > 1 else ""
            log.info(f"traced steps, {process}{trace_line(times, len(steps))}")
        self.restart_clock()

    def finish(self) -> dict[str, Any]:
        """Writes summary.json and loss.png, and returns the summary."""
        summary = self.summary()
        self.metrics.finish(summary)
        log.info(time_line(summary["seconds_by_cause"], self._account.attempts))
        return summary

    def summary(self) -> dict[str, Any]:
        """The summary of the run up to its last step, with the evaluation after it, if any. Step
        time is the median of the last 50 steps; rates are their mean tokens over that time."""
        self.flush()
        step, causes = self._last.get("step", self.begin), self._account.seconds()
        rates = {}
        if self._recent:
            # Padding varies from step to step for prompts with responses.
            names = "tokens", "loss_tokens"
            tokens, loss_tokens = (float(np.mean(self._of_recent(name))) for name in names)
            rates = self._rates(
                tokens, loss_tokens, float(np.median(self._of_recent("step_seconds")))
            )
        return {
            "step": step,
            **self._last,
            **rates,
            **(self._evaluation if self._evaluation.get("step") == step else {}),
            **self._profile,
            "seconds": time.monotonic() - self.started,
            "seconds_by_cause": causes,
            "goodput": goodput_share(causes),
            "attempts": self._account.attempts,
        }

    def close(self) -> None:
        """Closes the files, also after a failure."""
        self._keep_account()
        self.metrics.close()

    def _record(self, step: int, out: StepMetrics, data_seconds: float) -> None:
        *scalars, others, by_layer = jax.device_get(out)
        wrong = others.pop("nonfinite_gradients", None)
        loss, grad_norm, tokens, loss_tokens = map(float, scalars)
        now = time.monotonic()
        seconds, self._mark = now - self._mark, now
        read = range(self._data.examples_of(step - 1), self._data.examples_of(step))
        record = {
            "step": step,
            "loss": loss if loss_tokens else None,
            "grad_norm": grad_norm,
            **({"learning_rate": float(self._rate(step - 1))} if self._rate else {}),
            "tokens": int(tokens),
            "loss_tokens": token_count(loss_tokens),
            "data_seconds": data_seconds,
            **self._rates(tokens, loss_tokens, seconds),
            **{name: float(np.mean(value)) for name, value in by_layer.items()},
            **{
                name: int(value) if name == "skipped" else value.tolist()
                for name, value in others.items()
            },
            **self._layers(by_layer),
            "examples": self._train.example_digest(read),
        }
        self._last = record
        self.metrics.write(record)
        for source in repeats(self._train, read.start, read.stop):
            log.info(f"step {step}: {source.name}: starting epoch {source.begun}")
        if not loss_tokens and not self._said_without_loss:
            self._said_without_loss = True
            log.warning(
                f"warning: in step {step} {WITHOUT_LOSS}. The loss of such a step is null (warned "
                "once)"
            )
        if wrong is not None:
            self._count_skipped(record, wrong)
        elif not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise FloatingPointError(
                f"step {step}: loss = {loss}, gradient norm = {grad_norm}; stopped, and nothing "
                "after the last checkpoint is saved. Lower optimizer.learning_rate, set "
                "optimizer.clip_norm, or lengthen optimizer.warmup_steps"
            )
        self._show(record, now)

    def _of_recent(self, name: str) -> list[float]:
        return [record[name] for record in self._recent]

    def _rates(self, tokens: float, loss_tokens: float, seconds: float) -> dict[str, float | None]:
        """The time and the rates of a step that took `seconds`."""
        tokens_per_second = tokens / seconds
        return {
            "step_seconds": seconds,
            "tokens_per_second": tokens_per_second,
            "loss_tokens_per_second": loss_tokens / seconds,
            "mfu": self._utilisation(self._flops.model * tokens_per_second),
            "hfu": self._utilisation(self._flops.hardware * tokens_per_second),
        }

    def _count_skipped(self, record: Mapping[str, Any], wrong: np.ndarray) -> None:
        """Reports a step that updated nothing.

        Args:
          wrong: whether each array of gradients is not finite.

        Raises:
          BadStepsError: `run.skip_bad_steps` in a row.
        """
        self._skipped = self._skipped + 1 if record["skipped"] else 0
        if not self._skipped:
            return
        step = record["step"]
        names = [leaf_name(path) for path, _ in jax.tree.leaves_with_path(self._params)]
        found = [name for name, bad in zip(names, wrong) if bad]
        # The backward pass starts at the head, and non-finite values spread from there.
        found.sort(key=lambda name: {"head": 0, "embed": 2}.get(name.partition("/")[0], 1))
        where = f"; {len(found)} gradients are not finite, {found[0]} the first" if found else ""
        first, end = (self._data.examples_of(one) for one in (step - 1, step))
        log.warning(
            f"warning: step {step} updates nothing: loss = {record['loss']}, gradient norm = "
            f"{record['grad_norm']}{where}; its examples are {first} to "
            f"{end - 1}, {record['examples']}"
        )
        if self._skipped >= self._skip_bad_steps:
            raise BadStepsError(step - self._skipped + 1, step)

    def _layers(self, by_layer: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
        if not self._by_layer:
            return {}
        return {f"{name}_by_layer": value.tolist() for name, value in by_layer.items()}

    def _show(self, record: dict[str, Any], now: float) -> None:
        step = record["step"]
        if step == self.begin + 1:
            log.info(f"first step done {duration(now - self.started)} after the start")
            self._begun = now
        else:
            self._recent = [*self._recent[-49:], record]
            self._stepped += record["step_seconds"]
        if now - self._shown >= LOG_SECONDS or step == self.steps:
            self._shown = now
            typical = float(np.median(self._of_recent("step_seconds") or [record["step_seconds"]]))
            # Time between steps, of evaluations and saves, is extrapolated from so far.
            between = (now - self._begun) / self._stepped if self._stepped else 1.0
            left = typical * (self.steps - step) * between
            log.info(progress_line(record, steps=self.steps, seconds_left=left))
            self._keep_account()
            causes = self._account.seconds()
            shares = {f"seconds/{cause}": each for cause, each in causes.items()}
            self.metrics.track(step, {"goodput": goodput_share(causes), **shares})

    def _keep_account(self) -> None:
        if jax.process_index() == 0:
            self._account.keep()

    def _utilisation(self, flops_per_second: float) -> float | None:
        return utilisation(flops_per_second, self._num_devices, self._peak)


def _is_evaluation(record: Mapping[str, Any]) -> bool:
    return any(key.startswith("eval_loss") for key in record)


def is_summarised(workdir: pathlib.Path, step: int) -> bool:
    """Whether summary.json, the last file of a run, exists and is of this step."""
    try:
        summary = parse_json((workdir / SUMMARY).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(summary, dict) and summary.get("step") == step


@contextlib.contextmanager
def tracing(profile: range, recorder: Recorder, program: Any) -> Generator[Callable[[int], None]]:
    """Traces the steps in `profile`; the function that it yields is called before each step. Each
    process of several has a separate folder, since files are named by hosts.

    Args:
      program: the compiled step, or the programs of all steps.
    """
    folder = recorder.workdir / "profile"
    if jax.process_count() > 1:
        folder /= f"process_{jax.process_index()}"
    done: list[int] = []  # the steps in the current trace

    def at(step: int) -> None:
        inside = step in profile
        if inside and not done:
            recorder.flush()  # excludes operations of the step before
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # tracing Python would slow the host
            jax.profiler.start_trace(str(folder), profiler_options=options)
        elif done and not inside:
            stop()
        if inside:
            done.append(step)

    def stop() -> None:
        recorder.flush()
        with phases.within("reading a trace"):
            times: list[dict[str, Any]] = []
            if _written(folder):
                log.info(f"trace written to {recorder.workdir / 'profile'}")
                times = [dataclasses.asdict(one) for one in _times(folder, program)]
            reports = processes.all_reports("trace", times)
        recorder.traced(range(done[0], done[-1] + 1), reports)
        done.clear()

    try:
        yield at
    except BaseException:
        # A run that returns to a checkpoint may trace again, and JAX refuses a second open trace.
        if done:
            with contextlib.suppress(Exception):  # a full disk must not hide the first error
                jax.profiler.stop_trace()
        raise
    if done:
        stop()


def _written(folder: pathlib.Path) -> bool:
    """Writes the current trace; False if it fails, as on a full disk, which must not end a run."""
    try:
        jax.profiler.stop_trace()
    except Exception as error:  # JAX wraps the operating system's error
        log.warning(f"warning: no trace could be written to {folder} ({durable.reason(error)})")
        return False
    return True


def _times(folder: pathlib.Path, program: Any) -> list[DeviceTime]:
    """The time breakdown on the devices of this process; empty if the trace cannot be read, which
    must not end the run."""
    try:
        return time_by_cause(read_trace(folder), program.as_text())
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        log.warning(f"warning: the trace could not be summarised ({reason})")
        return []
