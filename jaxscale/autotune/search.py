"""Measured search: layouts proposed by Optuna are timed in short trials on the local devices.

As in the Frontier study (arXiv 2312.12705), a trial that crashes, runs out of memory or times out
is also a result, ranked below every measured one. Each trial is a separate process; this process
never uses a device.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import DatabaseError

from jaxscale import config as configs
from jaxscale.autotune.search_space import (
    FIELDS,
    Candidate,
    candidate_of,
    candidates,
    layout_of,
    refusal,
)
from jaxscale.config import Config
from jaxscale.config.layout import Layout

PROGRAM = (sys.executable, "-m", "jaxscale.autotune.trial")
STARTUP = 10
"""Trials before the sampler fits a model: the given layouts, then random ones."""

OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|out of memory|MemoryError|bad_alloc", re.IGNORECASE)
OUTCOMES = ("measured", "out of memory", "crashed", "timed out", "refused")


@dataclass(frozen=True)
class Trial:
    """A layout and its outcome; figures are None unless it was measured."""

    number: int
    layout: Layout
    outcome: str  # of OUTCOMES
    message: str = ""  # of a failure
    step_seconds: float | None = None  # median
    loss: float | None = None  # of the first step: equal for all layouts
    memory_bytes: int | None = None  # of the compiled step, per device
    compile_seconds: float | None = None

    @property
    def measured(self) -> bool:
        """Whether it was timed."""
        return self.outcome == "measured"


@dataclass(frozen=True)
class Devices:
    """The devices of the trials, as JAX names them."""

    devices: int
    kind: str
    platform: str


def find_devices(program: Sequence[str] = PROGRAM) -> Devices:
    """Finds the devices, in a process that starts as trials do.

    Raises:
      ValueError: there are none; with the message of that process.
    """
    outcome, answer = _run(program, None, limit_seconds=300)
    if outcome != "measured":
        raise ValueError(f"no devices to measure on: {answer['message']}")
    return Devices(**answer)


def search_by_measuring(
    config: Config,
    devices: Devices,
    *,
    trials: int,
    storage: pathlib.Path,
    first: Sequence[Layout] = (),
    pins: Mapping[str, Any] | None = None,
    steps: int = 5,
    limit_seconds: float = 600,
    seed: int = 0,
    report: Callable[[Trial, list[Trial]], None] = lambda trial, before: None,
    program: Sequence[str] = PROGRAM,
) -> list[Trial]:
    """Measures layouts until the storage has `trials` trials; returns all of them in order.

    Args:
      trials: number of trials, with those of earlier calls.
      storage: an SQLite file, written after every trial: the same call resumes an interrupted
        search.
      first: layouts to start from, such as the planner's best; read if the file is new.
      pins: fixed settings, by their names in `search_space.FIELDS`.
      steps: timed steps of a trial, after the warm-up.
      limit_seconds: time limit of a trial, from its start.
      report: called after each trial, with it and the earlier ones.
      program: the command of a trial.

    Raises:
      ValueError: the file has trials of another config or on other devices, or is not a database.
    """
    study = open_study(config, devices, storage, first, pins, seed)
    done = finished(study)
    while len(done) < trials:
        asked = study.ask(_distributions(study))
        layout = layout_of(asked.params, config.layout, devices.devices)
        with _interruptible(study, asked):
            outcome, answer = try_layout(
                config, layout, steps=steps, limit_seconds=limit_seconds, program=program
            )
        for name, value in {**answer, "outcome": outcome}.items():
            asked.set_user_attr(name, value)
        asked.set_user_attr("layout", dataclasses.asdict(layout))
        if outcome == "measured":
            study.tell(asked, statistics.median(answer["step_seconds"]))
        else:
            # Pruned trials without a value rank below all completed ones.
            study.tell(asked, state=TrialState.PRUNED)
        before, done = done, finished(study)
        report(done[-1], before)
    return done


def try_layout(
    config: Config,
    layout: Layout,
    *,
    steps: int = 5,
    limit_seconds: float = 600,
    program: Sequence[str] = PROGRAM,
) -> tuple[str, dict[str, Any]]:
    """The outcome of one trial, with its figures ("step_seconds" of every step, and fields of
    `Trial`), or a "message"."""
    if why := refusal(config, layout):
        return "refused", {"message": why}
    changed = dataclasses.replace(config, layout=layout)
    request = {"config": configs.to_dict(changed), "steps": steps}
    return _run(program, request, limit_seconds)


def open_study(
    config: Config,
    devices: Devices,
    storage: pathlib.Path,
    first: Sequence[Layout] = (),
    pins: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> optuna.Study:
    """Opens the study in a file; interrupted trials are enqueued again.

    Raises:
      ValueError: it is a study of another search, or not a database.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage.parent.mkdir(parents=True, exist_ok=True)
    pool = candidates(config, devices.devices, pins)
    if not pool:
        raise ValueError(
            f"no layout on {devices.devices} devices fits data.global_batch_size = "
            f"{config.data.global_batch_size}, this model and {pins or 'no pins'}; change one"
        )
    try:
        study = optuna.create_study(
            study_name="layouts",
            storage=f"sqlite:///{storage}",
            load_if_exists=True,
        )
    except DatabaseError as error:
        raise ValueError(
            f"{storage} is not a database of trials ({error.orig}); give another file in --storage"
        ) from error
    subject = {"config": _digest(config), "pins": pins or {}, **dataclasses.asdict(devices)}
    if "subject" not in study.user_attrs:
        _fill(study, [candidate_of(layout) for layout in first], pool)
        study.set_user_attr("subject", subject)
    for name, value in subject.items():
        if (had := study.user_attrs["subject"][name]) != value:
            what = (
                "another config" if name == "config" else f"{name} = {had}, and there are {value}"
            )
            raise ValueError(f"{storage} has trials of {what}; give another file in --storage")
    for left in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(left.number, state=TrialState.FAIL)
        if len(left.params) == len(_distributions(study)):
            study.enqueue_trial(left.params)
    seen = len(study.get_trials(deepcopy=False))
    study.sampler = _Proposals(config, devices.devices, pool, seed + seen)
    return study


def finished(study: optuna.Study) -> list[Trial]:
    """The finished trials, in order."""
    ended = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
    return [_trial(one) for one in ended]


def importances(study: optuna.Study) -> dict[str, float]:
    """The share of each setting in the variance of log step time, largest first; {} with too few
    measured trials.

    By fANOVA (Hutter et al., ICML 2014), from a random forest that is fitted to the trials.
    """
    measured = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(measured) < STARTUP:
        return {}
    found = optuna.importance.get_param_importances(
        study,
        evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0),
        target=lambda trial: math.log(trial.values[0]),
    )
    return {name: float(share) for name, share in sorted(found.items(), key=lambda x: -x[1])}


def importances_of(trials: Sequence[tuple[Mapping[str, Any], float]]) -> dict[str, float]:
    """`importances` of settings whose step times were not measured here, such as predicted ones.

    Args:
      trials: settings, and seconds.
    """
    names = trials[0][0] if trials else {}
    space: dict[str, Any] = {
        name: optuna.distributions.CategoricalDistribution(
            list(dict.fromkeys(settings[name] for settings, _ in trials))
        )
        for name in names
    }
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    for settings, seconds in trials:
        study.add_trial(
            optuna.trial.create_trial(params=dict(settings), distributions=space, value=seconds)
        )
    return importances(study)


class _Proposals(optuna.samplers.TPESampler):
    """Tree-structured Parzen estimator (TPE, Optuna's default) over untried feasible layouts: a
    sample moves to the nearest one, by the number of differing settings."""

    def __init__(self, config: Config, num_devices: int, pool: list[Candidate], seed: int):
        super().__init__(
            n_startup_trials=STARTUP, multivariate=True, constant_liar=False, seed=seed
        )
        self._random = np.random.default_rng(seed)
        self._pool = pool
        self._refused = functools.cache(
            lambda index: bool(refusal(config, layout_of(pool[index], config.layout, num_devices)))
        )

    def infer_relative_search_space(self, study, trial):
        """The search space of all settings, from the first trial on."""
        return _distributions(study)

    def sample_relative(self, study, trial, search_space):
        """The settings of a layout; random until `STARTUP` trials are finished."""
        drawn = super().sample_relative(study, trial, search_space)
        taken = [one.params for one in study.get_trials(deepcopy=False)]
        taken = [params for params in taken if len(params) == len(search_space)]
        far = np.array([sum(drawn[n] != one[n] for n in drawn) for one in self._pool], float)
        for index in np.argsort(far + self._random.uniform(size=len(far))):
            chosen = {name: self._pool[index][name] for name in search_space}
            if chosen not in taken and not self._refused(int(index)):
                return chosen
        raise ValueError(f"all {len(taken)} feasible layouts were tried; set --trials {len(taken)}")


def _fill(study: optuna.Study, first: Sequence[Candidate], pool: Sequence[Candidate]) -> None:
    """Stores the search space, and enqueues the first layouts."""
    space = {name: list(dict.fromkeys(one[name] for one in [*pool, *first])) for name in FIELDS}
    study.set_user_attr("space", space)
    for choices in first:
        study.enqueue_trial(dict(choices), skip_if_exists=True)


def _distributions(study: optuna.Study) -> dict[str, Any]:
    return {
        name: optuna.distributions.CategoricalDistribution(values)
        for name, values in study.user_attrs["space"].items()
    }


def _digest(config: Config) -> str:
    """A hash of the config without searched settings and settings that trials do not read."""
    sections = configs.to_dict(config)
    for name in ("data", *FIELDS):
        sections["layout"].pop(name, None)
    kept = {name: sections[name] for name in ("model", "optimizer", "layout")}
    kept["data"] = {name: sections["data"][name] for name in ("global_batch_size", "seq_len")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def _trial(one: FrozenTrial) -> Trial:
    known = {field.name for field in dataclasses.fields(Trial)}
    kept = {name: value for name, value in one.user_attrs.items() if name in known}
    kept |= {"layout": Layout(**one.user_attrs["layout"]), "step_seconds": one.value}
    return Trial(number=one.number, **kept)


@contextlib.contextmanager
def _interruptible(study: optuna.Study, asked: optuna.Trial) -> Iterator[None]:
    """Enqueues a trial again if the user interrupts it, since it has no result."""
    try:
        yield
    except BaseException:
        study.tell(asked, state=TrialState.FAIL)
        study.enqueue_trial(asked.params)
        raise


def _run(program: Sequence[str], request: Any, limit_seconds: float) -> tuple[str, dict[str, Any]]:
    """Runs one process; its outcome, and its answer or a message about its failure."""
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
        subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=out, stderr=err, text=True
        ) as process,
    ):
        assert process.stdin
        try:
            # stdin is not closed: a trial exits when its input ends, as when this process dies.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            status = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            return "timed out", {"message": f"not finished after {limit_seconds:g} s"}
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        answers, errors = out.read().splitlines(), err.read()
    if status:
        return _failure(status, errors)
    if not answers:
        return "crashed", {"message": "exited without an answer"}
    answer = json.loads(answers[-1])
    if "refused" in answer:
        return "refused", {"message": answer["refused"]}
    return "measured", answer


def _failure(status: int, words: str) -> tuple[str, dict[str, str]]:
    """The outcome of a failed process, and its most informative line."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    if memory := next((line for line in lines if OUT_OF_MEMORY.search(line)), ""):
        return "out of memory", {"message": memory[:500]}
    telling = next((line for line in lines if "Check failed" in line), (lines or [""])[-1])
    if status == -signal.SIGKILL:
        telling = "killed, probably by the system for lack of memory"
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    return "crashed", {"message": f"{how}: {telling[:500]}"}
