"""Metrics of a run: metrics.jsonl, summary.json, MFU and the progress line."""

import json
import logging
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax

from jaxscale.distributed import phases
from jaxscale.formatting import duration, quantity
from jaxscale.run.loss_plot import plot
from jaxscale.run.trackers import Tracker, TrackerError, open_tracker
from jaxscale.storage.durable import GrowingFile, reason, replace_file
from jaxscale.storage.untrusted import parse_json

log = logging.getLogger("jaxscale")

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"

NUMBERS = ("loss", "eval_loss", "learning_rate", "step_seconds", "data_seconds")
"""Fields that must be numbers: records with other values are left out. A loss is null if it was not
finite, or no token had loss."""


class MetricField(NamedTuple):
    """A field of metrics.jsonl or summary.json, as docs/metrics.md lists it."""

    unit: str
    meaning: str


STEP_FIELDS = {
    "step": MetricField("1", "Number of the step, from 1."),
    "loss": MetricField(
        "nats per token",
        "Mean negative log-likelihood of `loss_tokens`; null in a step without any.",
    ),
    "grad_norm": MetricField(
        "1", "L2 norm of the gradient of the mean loss, before clipping, without frozen parameters."
    ),
    "learning_rate": MetricField("1", "Rate of this update; absent with a custom optimizer."),
    "tokens": MetricField("tokens", "Positions that the model read, without padding."),
    "loss_tokens": MetricField("tokens", "Sum of the weights of the positions with a target."),
    "data_seconds": MetricField("s", "Wall-clock wait of the host for the batch."),
    "step_seconds": MetricField(
        "s",
        "Wall-clock time from the end of the previous step to the end of this one, without saves "
        "and evaluations.",
    ),
    "tokens_per_second": MetricField("tokens/s", "`tokens` / `step_seconds`, of all devices."),
    "loss_tokens_per_second": MetricField("tokens/s", "`loss_tokens` / `step_seconds`."),
    "mfu": MetricField(
        "share of 1",
        "Model FLOPs utilisation: FLOPs of the model / (devices x dense peak x seconds); null "
        "where the peak of the chip is unknown.",
    ),
    "hfu": MetricField(
        "share of 1", "Hardware FLOPs utilisation: as `mfu`, with recomputed FLOPs included."
    ),
    "examples": MetricField("hash", "Digest of the examples that the step read."),
    "nonfinite": MetricField(
        "text", "Field -> its value, where that is an infinity or NaN and the field is null."
    ),
    "skipped": MetricField(
        "0 or 1", "Whether the step updated nothing; with `run.skip_bad_steps` above 0."
    ),
    "prediction_loss_K": MetricField(
        "nats per token", "Loss of module K of multi-token prediction (MTP)."
    ),
    "expert_load_cv": MetricField(
        "1",
        "Coefficient of variation of the number of tokens that chose each expert (0 is even); "
        "mean over layers.",
    ),
    "dead_experts": MetricField("share of 1", "Experts that no token chose; mean over layers."),
    "dropped_choices": MetricField(
        "share of 1",
        "Choices dropped for lack of capacity; mean over layers; with `model.capacity_factor`.",
    ),
    "sparsity": MetricField(
        "share of 1", "Zeros in the matrices that `optimizer.sparsity` prunes, after the update."
    ),
    "noise_scale": MetricField(
        "tokens",
        "Gradient noise scale: average of `gradient_variance` / average of `gradient_square`; null "
        "where the latter is not positive. With `run.noise_every`, in the steps that measure.",
    ),
    "gradient_square": MetricField(
        "1", "Squared norm of the true gradient, an unbiased estimate; may be negative."
    ),
    "gradient_variance": MetricField(
        "tokens", "Trace of the covariance of a token's gradient, an unbiased estimate."
    ),
    "NAME_by_layer": MetricField(
        "list", "Values of the metric NAME by layer; with `run.metrics_by_layer`."
    ),
}
"""Fields of the record of a step in metrics.jsonl. The metrics of a custom model are added under
the names of its `metrics`, as means over `loss_tokens`."""

EVALUATION_FIELDS = {
    "step": MetricField("1", "Steps done before the evaluation."),
    "eval_loss": MetricField("nats per token", "Mean negative log-likelihood of held-out text."),
    "eval_perplexity": MetricField("1", "exp(`eval_loss`)."),
    "eval_bits_per_byte": MetricField(
        "bits per byte", "`eval_loss` of the text over its bytes: comparable between tokenizers."
    ),
    "eval_tokens": MetricField("tokens", "Sum of the weights of the evaluated positions."),
    "eval_bytes": MetricField("bytes", "Text that these tokens stand for."),
}
"""Fields of an evaluation's record in metrics.jsonl; those of a validation set end in /NAME."""

SUMMARY_FIELDS = {
    "seconds": MetricField("s", "Wall-clock time of the process."),
    "seconds_by_cause": MetricField(
        "s",
        "Cause -> wall-clock time of all attempts: compute, input, save, evaluation, compile, "
        "start, lost (steps trained again), restart (pauses between attempts).",
    ),
    "goodput": MetricField("share of 1", "Compute of steps that were kept / time of all attempts."),
    "attempts": MetricField("1", "Starts of the run."),
    "profile": MetricField(
        "s", "With `--profile`: the traced steps, and for each device of each process its time."
    ),
}
"""Fields of summary.json in addition to those of the last step and of the evaluation after it.
`step_seconds` is the median of the last 50 steps there, and the rates are of their mean tokens."""

WITHOUT_LOSS = (
    "no token has loss; raise data.seq_len (with an encoder, data.target_len) if prompts fill it, "
    "or check the data"
)


class Metrics:
    """Writer of a run's metrics; only process 0 writes.

    metrics.jsonl has one JSON object a line, flushed as it is written. A number that is not
    finite is written as null and its value as text: `{"step": 7, "loss": null, "nonfinite":
    {"loss": "nan"}}`.

    Args:
      directory: the run's folder, made if missing.
      start_step: where the run starts or resumes; an earlier attempt's records of later steps are
        dropped, so that each step has one record.
      trackers: any of "tensorboard", "wandb" and "mlflow".
      config: nested dictionaries, shown by the trackers.

    Raises:
      ValueError: an unknown tracker, or mlflow without MLFLOW_TRACKING_URI.
      ModuleNotFoundError: a tracker is not installed; the message names the extra.
      TrackerError: wandb or mlflow could not begin a new run.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        start_step: int = 0,
        trackers: Iterable[str] = ("tensorboard",),
        *,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory = pathlib.Path(directory)
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        self._trackers: list[Tracker] = []
        for name in trackers:
            try:
                tracker = open_tracker(name, self.directory, start_step, config or {})
                self._trackers.append(tracker)
            except (ValueError, ModuleNotFoundError):
                raise
            except Exception as error:  # of any library
                if not start_step and name == "tensorboard":  # a file in the run's folder
                    raise
                if not start_step:  # at the start of a run its user is present
                    raise TrackerError(
                        f"the tracker {name} could not start ({reason(error)}), and no step was "
                        "trained; fix it, or leave it out of --trackers"
                    ) from error
                self._lost(name, error)
        path = self.directory / METRICS
        records = read(path, last_step=start_step)
        replace_file(path, "".join(map(_line, records)).encode())
        self._file = GrowingFile(path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds one line; `record` has a "step", and numbers, lists of numbers, or strings."""
        if not self._writes:
            return
        self._file.add(_line(record).encode())
        self.track(record["step"], _numbers(record))

    def track(self, step: int, numbers: dict[str, float]) -> None:
        """Sends numbers to the trackers only."""
        if self._writes:
            for tracker in [*self._trackers]:
                try:
                    tracker.write(numbers, step)
                except Exception as error:  # of any library, such as a lost server
                    self._trackers.remove(tracker)
                    self._lost(tracker.name, error)

    def _lost(self, name: str, error: Exception) -> None:
        log.warning(
            f"warning: {name} gets no more metrics of this attempt ({reason(error)}); all are in "
            f"{self.directory / METRICS}"
        )

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes summary.json and loss.png, and closes."""
        if self._writes:
            try:
                text = json.dumps(null_where_not_finite(summary), indent=2) + "\n"
                replace_file(self.directory / SUMMARY, text.encode())
                plot(self.directory / "loss.png", read(self.directory / METRICS))
            except OSError as error:  # only a warning: the run is complete and saved
                log.warning(f"warning: summary.json or loss.png could not be written ({error})")
        self.close()

    def close(self) -> None:
        """Closes the files, and keeps them, so that a failed run can resume."""
        if self._writes:
            self._file.close()
            with phases.within("closing trackers"):
                for tracker in self._trackers:
                    try:
                        tracker.close()
                    except Exception as error:
                        self._lost(tracker.name, error)
            self._writes = False


def read(path: str | os.PathLike, *, last_step: int | None = None) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; none if the file is missing.

    Args:
      path: the file. A last line cut short by a crash is left out; so are, with a warning, other
        lines that are not records of steps.
      last_step: leaves out the records of later steps.
    """
    records = []
    file, odd = pathlib.Path(path), 0
    lines = file.read_bytes().decode(errors="replace").splitlines() if file.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
        except ValueError:
            odd += number < len(lines)
            continue
        if not isinstance(record, dict) or not _is_record(record):
            odd += 1
        elif last_step is None or record["step"] <= last_step:
            records.append(record)
    if odd:
        log.warning(f"warning: {file} has {odd} lines that are not records of steps; left out")
    return records


def heldout_losses(records: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Step -> finite loss on held-out text, or on the first validation set if no text is held out,
    from the records of a metrics.jsonl."""
    return {step: loss for step, loss in _losses_by_step(records).items() if math.isfinite(loss)}


def evaluated_steps(records: Iterable[Mapping[str, Any]]) -> set[int]:
    """The steps of evaluations, also those with a non-finite loss."""
    return set(_losses_by_step(records))


def _losses_by_step(records: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    losses = {}
    for record in records:
        names = [name for name in record if name.partition("/")[0] == "eval_loss"]
        if names:
            loss = record["eval_loss" if "eval_loss" in names else names[0]]
            losses[record["step"]] = math.nan if loss is None else loss
    return losses


def token_count(weights: float) -> float:
    """The number of tokens with loss, from the sum of their weights: an integer if whole."""
    return int(weights) if weights.is_integer() else weights


def _is_record(values: Mapping[str, Any]) -> bool:
    types = {"step": int, "step_seconds": int | float, "data_seconds": int | float}
    return "step" in values and all(
        isinstance(value, types.get(name, int | float | None))
        for name, value in values.items()
        if name.partition("/")[0] in ("step", *NUMBERS)
    )


def utilisation(
    flops_per_second: float, num_devices: int, peak_flops_per_second: float | None
) -> float | None:
    """MFU or HFU, a share of 1: FLOPs per token x tokens per second / (devices x peak).

    Args:
      flops_per_second: of all devices; the model's FLOPs give MFU (PaLM, arXiv 2204.02311), the
        hardware's, with recomputation, HFU.
      num_devices: devices of the run.
      peak_flops_per_second: dense peak of one device in the compute type; None if unknown, and then
        the result is None.
    """
    if peak_flops_per_second is None:
        return None
    return flops_per_second / (num_devices * peak_flops_per_second)


def progress_line(record: Mapping[str, Any], *, steps: int, seconds_left: float) -> str:
    """The progress line of a step.

    Args:
      record: as in metrics.jsonl.
      steps: of the whole run.
      seconds_left: until the end of the run.
    """
    mfu = record["mfu"]
    parts = (
        _step_text(record["step"], steps),
        f"loss {'n/a' if record['loss'] is None else format(record['loss'], '.4f')}",
        f"grad norm {record['grad_norm']:.3f}",
        *([f"lr {record['learning_rate']:.2e}"] if "learning_rate" in record else []),
        f"{quantity(record['tokens_per_second'])} tokens/s",
        f"MFU {'n/a' if mfu is None else f'{mfu:.1%}'}",
        f"input wait {duration(record['data_seconds'])}",
        f"{duration(seconds_left)} left",
    )
    return " | ".join(parts)


def evaluation_line(
    step: int, steps: int, name: str, loss: float | None, bits_per_byte: float
) -> str:
    """The line of an evaluation after `step` of `steps`; a validation set has a name.

    Args:
      loss: None if no token has loss.
    """
    begin = f"{_step_text(step, steps)} | eval loss{f' {name}' if name else ''}"
    if loss is None:
        return f"{begin} n/a: {WITHOUT_LOSS}"
    return f"{begin} {loss:.4f} | {bits_per_byte:.3f} bits per byte"


def _step_text(step: int, steps: int) -> str:
    return f"step {step:>{len(str(steps))}}/{steps}"


def _line(record: Mapping[str, Any]) -> str:
    """One line of JSON, with null for non-finite numbers."""
    wrong = {
        name: str(value)
        for name, value in record.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    clean = null_where_not_finite(record) | ({"nonfinite": wrong} if wrong else {})
    return json.dumps(clean, allow_nan=False) + "\n"


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record for trackers; those of lists are "name/0", "name/1"."""
    found = dict(record)
    for name, value in record.items():
        if isinstance(value, list):
            found |= {f"{name}/{index}": one for index, one in enumerate(value)}
    return {
        name: float(value)
        for name, value in found.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def null_where_not_finite(tree: Any) -> Any:
    """Nested records with None in place of infinities and NaN, which JSON lacks."""
    if isinstance(tree, Mapping):
        return {key: null_where_not_finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [null_where_not_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree
