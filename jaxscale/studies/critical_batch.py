"""The critical batch of a tiny model, measured by a sweep, next to its gradient noise scale (arXiv
1812.06162)."""

import pathlib
from collections.abc import Sequence
from typing import Any

from jaxscale import config as configs
from jaxscale.config import Config
from jaxscale.studies.figures import draw_lines, make_figure
from jaxscale.studies.laws.critical_batch import (
    CriticalBatch,
    batch_ramp,
    critical_tokens,
    fit_critical_batch,
    steps_to_loss,
)
from jaxscale.studies.runs import train_run
from jaxscale.studies.study import Case, Comparison, Study, StudyRow

SEQ_LEN, MICROBATCH = 32, 4
SIZES = (4, 16, 64, 256)
QUICK_SIZES = (16,)
MEASURED = 32
"""Sequences of the batches of the run that measures the noise scale."""
NOISE_EVERY = 5
RAMP_SIZES = (4, 8, 16, 32, 64, 128, 256)
"""Batches of the schedule that the noise scale asks for."""
WINDOW = 8
"""Measurements in an average."""
RATE = 0.01
"""Learning rate of batches of `MEASURED` sequences; others are by the square root of the batch."""
TARGET, QUICK_TARGET = 2.3, 2.45
"""Training loss, nats per byte."""
EXPECTED = {TARGET: 100, QUICK_TARGET: 70}
"""Target -> steps that a run with large batches certainly needs at most."""
SETTINGS = (
    "data.source={stdlib}/*.py",
    f"data.seq_len={SEQ_LEN}",
    "data.heldout=0",
    "model.d_model=32",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.d_ff=64",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=10",
    "optimizer.weight_decay=0",
    "layout.data=1",
    "run.hang_seconds=3600",  # a slow step on busy processors is no hang
)
COLUMNS = {
    "part": "sweep: a run to the target; noise: a measurement in the first run",
    "sequences": "of a batch",
    "learning_rate": "of AdamW, constant",
    "step": "of the measurement, or the first at which the mean loss of the last quarter of the "
    "steps is at most the target",
    "read_sequences": "by all steps until then",
    "loss": "nats per byte, mean of the last quarter of the steps",
    "gradient_square": "squared norm of the gradient of the mean loss, unbiased",
    "gradient_variance": "trace of the covariance of a token's gradient",
    "noise_sequences": "gradient_variance / gradient_square, each averaged over the last "
    "measurements, in sequences",
}


def _cases(quick: bool, _: str) -> Sequence[Case]:
    sizes, target = (QUICK_SIZES, QUICK_TARGET) if quick else (SIZES, TARGET)
    found = []
    for size in (MEASURED, *sizes):  # the first run also measures
        steps = round(EXPECTED[target] * (1 + MEASURED / size))
        every = NOISE_EVERY if size == MEASURED else 0
        found.append({"sequences": size, "target": target, "noise_every": every, "steps": steps})
    return found


def _config(case: Case) -> Config:
    size = case["sequences"]
    rate = RATE * (size / MEASURED) ** 0.5
    return configs.load(
        "tiny",
        [
            *SETTINGS,
            f"data.global_batch_size={size}",
            f"layout.microbatches={size // MICROBATCH}",
            f"optimizer.learning_rate={rate}",
            f"run.steps={case['steps']}",
            f"run.noise_every={case['noise_every']}",
            f"run.checkpoint_every={case['steps']}",
        ],
    )


def _rows(case: Case, folder: pathlib.Path) -> list[StudyRow]:
    config = _config(case)
    records = train_run(config, folder).steps
    losses = recent_means([one["loss"] for one in records])
    size = case["sequences"]
    same = {"sequences": size, "learning_rate": config.optimizer.learning_rate}
    measured = _measurements(records, losses, same)
    step = next((i for i, loss in enumerate(losses, 1) if loss <= case["target"]), None)
    row = {"part": "sweep", **same, "step": step, "read_sequences": step and step * size}
    row |= {"loss": losses[(step or len(losses)) - 1]}
    return [*measured, {name: row.get(name) for name in COLUMNS}]


def _measurements(
    records: Sequence[Any], losses: Sequence[float], same: StudyRow
) -> list[StudyRow]:
    rows, names = [], ("gradient_square", "gradient_variance")
    measured = [record for record in records if names[0] in record]
    for number, record in enumerate(measured, 1):
        step, last = record["step"], measured[max(0, number - WINDOW) : number]
        square, variance = (sum(one[name] for one in last) for name in names)
        row = {"part": "noise", **same, "step": step, "read_sequences": step * same["sequences"]}
        row |= {name: record[name] for name in names}
        ratio = variance / square / SEQ_LEN if square > 0 else None
        row |= {"loss": losses[step - 1], "noise_sequences": ratio}
        rows.append({name: row.get(name) for name in COLUMNS})
    return rows


def recent_means(losses: Sequence[float]) -> list[float]:
    """The mean of the last quarter of the steps, at least one, after each step: the lag is the same
    share of the steps for every batch.

    >>> recent_means([4.0, 3.0, 2.0])
    [4.0, 3.0, 2.0]
    """
    found = []
    for step in range(1, len(losses) + 1):
        last = losses[step - max(1, step // 4) : step]
        found.append(sum(last) / len(last))
    return found


def runs_of(rows: Sequence[StudyRow]) -> dict[int, StudyRow]:
    """Batch -> its run, if that reached the target; the smallest first."""
    found = [row for row in rows if row["part"] == "sweep" and row["step"]]
    return {row["sequences"]: row for row in sorted(found, key=lambda row: row["sequences"])}


def fit_of(rows: Sequence[StudyRow]) -> CriticalBatch | None:
    """The fit of the sweep, or None of fewer than two batches that reached the target."""
    runs = runs_of(rows)
    if len(runs) < 2:
        return None
    return fit_critical_batch(list(runs), [row["step"] for row in runs.values()])


def measured_noise(rows: Sequence[StudyRow]) -> float | None:
    """The noise scale in sequences: its mean over the steps in which a run with these batches
    reaches the target by the fit, over all if there is none (arXiv 1812.06162, appendix D)."""
    fit = fit_of(rows)
    end = steps_to_loss(fit, MEASURED) if fit else float("inf")
    noise = [
        row["noise_sequences"]
        for row in rows
        if row["part"] == "noise" and row["step"] <= end and row["noise_sequences"]
    ]
    return sum(noise) / len(noise) if noise else None


def ramp_of(rows: Sequence[StudyRow]) -> dict[int, int]:
    """The schedule that the measurements ask for."""
    noise = [
        (row["read_sequences"], row["noise_sequences"])
        for row in rows
        if row["part"] == "noise" and row["noise_sequences"]
    ]
    return batch_ramp(noise, RAMP_SIZES, noise[-1][0]) if noise else {}


def _ours(value: float | None) -> str:
    return (
        "not reached" if value is None else f"{value:.0f} sequences, {value * SEQ_LEN:,.0f} tokens"
    )


def _comparisons(rows: Sequence[StudyRow]) -> list[Comparison]:
    fit, noise = fit_of(rows), measured_noise(rows)
    loss = rows[-1]["loss"]
    sweep = fit and fit.batch
    error = f"; root mean square error of the fit {fit.error:.1%}" if fit else ""
    return [
        Comparison(
            "critical batch of a sweep over the noise scale of a run",
            "about 1, within a small factor",
            "uncertain",
            f"{sweep / noise:.2f}: {_ours(sweep)} over {_ours(noise)}"
            if sweep and noise
            else f"{_ours(sweep)}; {_ours(noise)}",
            "AdamW here, and the noise scale is the simple one, without a Hessian; learning rates "
            "were not tuned for each batch, and grow as its square root",
        ),
        Comparison(
            "steps and data at the critical batch, over the fewest of each",
            "2 and 2",
            "derived",
            f"2 and 2 by the fit{error}",
            "the law defines the fit, whose error tells how well it holds",
        ),
        Comparison(
            f"critical batch at a loss of {loss:.2f} nats",
            f"{critical_tokens(loss):,.0f} tokens",
            "uncertain",
            _ours(sweep),
            "the law is of larger models on web text, with losses per token of a vocabulary of "
            "50,000; here a loss per byte, early in the training of a tiny model",
        ),
    ]


def _findings(rows: Sequence[StudyRow]) -> list[str]:
    found, fit = [], fit_of(rows)
    for size, row in runs_of(rows).items():
        predicted = f"; the fit has {steps_to_loss(fit, size):.0f}" if fit else ""
        found.append(
            f"Batches of {size} sequences: {row['step']} steps, {row['read_sequences']:,} sequences"
            f"{predicted}."
        )
    if ramp := ramp_of(rows):
        found.append(
            f"The noise scale asks for data.batch_schedule = {ramp}, with "
            f"data.global_batch_size = {max(ramp.values())} and micro-batches of {MICROBATCH}."
        )
    return found


def _figures(rows: Sequence[StudyRow]) -> dict[str, Any]:
    figure, (left, right) = make_figure(2)
    runs, fit = runs_of(rows), fit_of(rows)
    lines = {"runs": [(size, row["step"]) for size, row in runs.items()]}
    if fit:
        lines["fit"] = [(size, steps_to_loss(fit, size)) for size in runs]
    draw_lines(left, lines, log_y=True, xlabel="sequences of a batch", title="Steps to the target")
    noise = [row for row in rows if row["part"] == "noise" and row["noise_sequences"]]
    if noise:
        right.plot(
            [row["read_sequences"] for row in noise],
            [row["noise_sequences"] for row in noise],
            label="noise scale",
        )
    if fit:
        right.axhline(fit.batch, color="gray", linestyle="--", label="critical batch of the sweep")
    right.set(xlabel="sequences read", title="Noise scale, sequences", ylim=(0, None))
    right.legend(frameon=False, fontsize=7)
    return {"Steps over the batch, and the noise scale": figure}


CRITICAL_BATCH = Study(
    name="critical_batch",
    question="Does the gradient noise scale of a run predict its critical batch?",
    papers="arXiv 1812.06162; language models: arXiv 2001.08361",
    method="Runs on one local device of a decoder of two layers and a width of 32, on the bytes of "
    f"modules of Python's standard library, {SEQ_LEN} tokens a sequence, with micro-batches of "
    f"{MICROBATCH} sequences. A run measures the noise scale every 5 steps. The sweep counts the "
    f"steps to a training loss of {TARGET} nats (quick: {QUICK_TARGET}), with learning rates by "
    "the square root of the batch, and fits the critical batch.",
    hardware="",
    columns=COLUMNS,
    cases=_cases,
    rows=_rows,
    comparisons=_comparisons,
    findings=_findings,
    figures=_figures,
)
