"""A request to stop, in every phase of a run: with a checkpoint where there is anything to save."""

import contextlib
import dataclasses
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import pytest

from jaxscale import config as configs
from jaxscale import train
from jaxscale.checkpoints.save import CheckpointWriter
from jaxscale.run import notices, signals, trainer, training_loop
from jaxscale.run.setup.text import UnusableTokensError
from jaxscale.run.trackers import TrackerError
from jaxscale.storage import local_tier
from jaxscale.training.step import StepMetrics
from tests.run.settings import with_run, with_step

SETTINGS = ["model.num_layers=1", "data.seq_len=32", "run.steps=6", "run.eval_every=3"]


@jax.jit
def count(state, batch):
    """A step that compiles at once."""
    tokens = batch.weights.sum()
    return state._replace(step=state.step + 1), StepMetrics(*[tokens] * 4, {}, {})


@pytest.fixture(scope="session")
def opened(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "lower_step", lambda engine: None)
        patch.setattr(trainer, "compile_step", lambda *_: count)
        config = configs.load("configs/tiny.py", SETTINGS)
        ready = trainer.open_trainer(config, tmp_path_factory.mktemp("run"))
    assert ready
    return ready


@pytest.fixture
def ready(opened, tmp_path):
    """A separate run for a test, with evaluations at no cost."""
    checkpoints = CheckpointWriter(tmp_path / "checkpoints")
    ready = dataclasses.replace(opened, workdir=tmp_path, checkpoints=checkpoints)
    return evaluating(ready, lambda *_: (1.0, 1.0, 1.0))


def evaluating(ready, evaluate):
    return dataclasses.replace(ready, engine=dataclasses.replace(ready.engine, evaluate=evaluate))


def fit(ready):
    """What the run said when it stopped; "" when it came to its end."""
    before = [signal.getsignal(number) for number in signals.SIGNALS]
    said = ""
    try:
        training_loop.fit(ready, trackers=())
    except training_loop.Stopped as stopped:
        said = str(stopped)
    assert [signal.getsignal(number) for number in signals.SIGNALS] == before
    return said, CheckpointWriter(ready.checkpoints.directory).steps()


def at_step(number, step):
    """The step function, which gets a signal while it does a step."""
    done = []

    def run(state, batch):
        done.append(0)
        if len(done) == step:
            signal.raise_signal(number)
        return count(state, batch)

    return run


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_during_a_step_saves_it(ready, name, caplog):
    ready = with_step(ready, at_step(signal.Signals[name], 2))
    assert fit(ready) == (f"{name}: stopped after step 2, saved", [2])
    assert f"{name} while training (step 2): finishing the step, then saving ..." in caplog.text


def test_a_signal_is_said_to_be_during_what_it_interrupted(ready, monkeypatch, caplog):
    """However late the thread that prints it runs."""
    name = signals._name

    def later(number):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.3)
        return name(number)

    monkeypatch.setattr(signals, "_name", later)
    fit(with_step(ready, at_step(signal.SIGTERM, 2)))
    assert "SIGTERM while training (step 2)" in caplog.text


def test_all_processes_of_a_complete_run_draw_a_sample_or_none(monkeypatch, tmp_path, caplog):
    """One that was asked to stop must not leave the others waiting for it."""
    caplog.set_level("INFO", "jaxscale")
    monkeypatch.setattr(trainer, "open_trainer", lambda *_, **__: object())
    monkeypatch.setattr(training_loop, "fit", lambda *_, **__: (None, {}))
    monkeypatch.setattr(train.processes, "all_reports", lambda topic, own: ["", "SIGTERM"])
    monkeypatch.setattr(train, "_show_sample", lambda *_: pytest.fail("the other draws none"))
    options = train._parser().parse_args(["--config", "configs/tiny.py"])
    assert train._train(options, configs.load("configs/tiny.py"), tmp_path, 0.0, None, "") == 0
    assert "SIGTERM: the run is complete and saved; no sample is drawn" in caplog.text


@pytest.mark.parametrize("error", [ChildProcessError, UnusableTokensError, TrackerError])
def test_a_failure_of_one_process_waits_for_no_other(error, monkeypatch, tmp_path, capsys):
    """Of a run with a URL, whose uploads are process 0's: it is at work in a step."""

    def fail(*_, **__):
        raise error("a worker was killed")

    monkeypatch.setenv(local_tier.VARIABLE, str(tmp_path))
    monkeypatch.setattr(trainer, "open_trainer", lambda *_, **__: object())
    monkeypatch.setattr(training_loop, "fit", fail)
    monkeypatch.setattr(train.processes, "from_first", lambda *_: pytest.fail("waits"))
    options = train._parser().parse_args(["--config", "configs/tiny.py"])
    workdir = local_tier.local_tier("memory://bucket/fails")
    with pytest.raises(SystemExit):
        train._train(options, configs.load("configs/tiny.py"), workdir, 0.0, None, "")
    assert capsys.readouterr().err == "error: a worker was killed\n"


@pytest.mark.proof
def test_a_signal_during_the_last_save_does_not_lose_it(ready, monkeypatch):
    wait = ready.checkpoints.wait

    def interrupted(**named):
        if ready.checkpoints._thread:
            signal.raise_signal(signal.SIGTERM)
        wait(**named)

    monkeypatch.setattr(ready.checkpoints, "wait", interrupted)
    assert fit(ready) == ("", [6])


@pytest.mark.proof
def test_an_evaluation_that_was_broken_off_is_repeated(ready):
    asked = []

    def evaluate(*_):
        asked.append(0)
        if len(asked) == 1:
            signal.raise_signal(signal.SIGTERM)
        return 1.0, 1.0, 1.0

    ready = evaluating(ready, evaluate)
    assert fit(ready) == ("SIGTERM: stopped after step 3, saved", [3])
    assert len(asked) == 1
    assert "eval_loss" not in (ready.workdir / "metrics.jsonl").read_text()
    checkpoints = CheckpointWriter(ready.checkpoints.directory)
    assert fit(dataclasses.replace(ready, begin=3, checkpoints=checkpoints)) == ("", [3, 6])
    lines = (ready.workdir / "metrics.jsonl").read_text().splitlines()
    assert [i for i, line in enumerate(lines) if "eval_loss" in line] == [3, 7]


@pytest.mark.proof
def test_the_last_evaluation_is_made_up_for(ready):
    """A run that was asked to stop in its last step, or killed after it, is not complete yet."""
    ready = with_step(ready, at_step(signal.SIGTERM, 6))
    assert fit(ready) == ("SIGTERM: stopped after step 6, saved", [6])
    assert not trainer._is_complete(ready.config.run, 6, ready.workdir)
    checkpoints = CheckpointWriter(ready.checkpoints.directory)
    assert fit(dataclasses.replace(ready, begin=6, checkpoints=checkpoints)) == ("", [6])
    assert trainer._is_complete(ready.config.run, 6, ready.workdir)
    lines = map(json.loads, (ready.workdir / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
    summary = json.loads((ready.workdir / "summary.json").read_text())
    assert (summary["step"], summary["eval_loss"]) == (6, 1.0)
    assert "loss" in summary, "of the step before"


@pytest.mark.proof
def test_an_evaluation_that_is_recorded_is_not_repeated(ready):
    (ready.workdir / "metrics.jsonl").write_text('{"step": 3, "eval_loss": 1.0}\n')
    assert fit(dataclasses.replace(ready, begin=3)) == ("", [6])
    lines = map(json.loads, (ready.workdir / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]


@pytest.mark.parametrize("step", [1, 3])
def test_a_wait_for_input_that_never_ends_is_broken_off(ready, monkeypatch, step):
    training_batches, ended = training_loop.training_batches, []

    def stalled(*arguments, **settings):
        batches = training_batches(*arguments, **settings)
        for _ in range(step - 1):
            yield next(batches)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        threading.Event().wait(600)
        ended.append("the wait")

    monkeypatch.setattr(training_loop, "training_batches", stalled)
    said, steps = fit(ready)
    done = f"after step {step - 1}, saved" if step > 1 else "before the first step"
    assert said == f"SIGTERM: stopped {done}"
    assert steps == ([step - 1] if step > 1 else [])
    assert not ended


def test_the_time_of_a_run_may_be_limited(ready):
    said, steps = fit(with_run(ready, max_hours=1e-9))
    assert said == "run.max_hours = 1e-09: stopped before the first step"
    assert steps == []


@pytest.mark.proof
def test_the_time_of_a_run_may_be_limited_in_any_thread(ready):
    """A thread without signals reads the clock, and the next run has another limit."""
    said = []

    def run():
        for hours in (1e-9, 0):
            limited = with_run(ready, max_hours=hours)
            checkpoints = CheckpointWriter(ready.checkpoints.directory)
            said.append(fit(dataclasses.replace(limited, checkpoints=checkpoints)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert said == [("run.max_hours = 1e-09: stopped before the first step", []), ("", [6])]
    assert not signals.requested()


def test_a_limit_longer_than_any_timer_takes_is_never_reached():
    with signals.listening():
        signals.limit(1e300, time.monotonic())
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 1e8
        assert not signals.requested()


@pytest.fixture
def metadata_server(monkeypatch):
    """That of Google's machines: what it answers, in a list of one."""
    answers = [b"FALSE"]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            good = self.path == "/computeMetadata/v1/instance/preempted"
            good = good and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if good else 403)
            self.end_headers()
            self.wfile.write(answers[0] if good else b"")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv(notices.HOST, f"127.0.0.1:{server.server_port}")
        monkeypatch.setattr(notices, "LOOK_SECONDS", 0.01)
        yield answers
        server.shutdown()
        thread.join()


def test_the_notice_of_a_cloud_saves_the_step(ready, metadata_server):
    def step(state, batch):
        if int(state.step) == 2:
            metadata_server[0] = b"TRUE"
            while not signals.requested():
                time.sleep(0.01)
        return count(state, batch)

    with signals.listening(), notices.noticed("gce"):
        said, steps = fit(with_step(ready, step))
    assert said == "the preemption notice of gce: stopped after step 3, saved"
    assert steps == [3]


def test_a_machine_without_a_metadata_server_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(notices.HOST, "127.0.0.1:9")
    command = ["--config=tiny", f"--workdir={tmp_path}", "--preemption_notices=gce"]
    with pytest.raises(SystemExit) as ended:
        train.main(command)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --preemption_notices gce: no metadata server at 127.0.0.1:9 (")
    assert said.count("\n") == 1


BUSY = """
import hashlib, sys
from jaxscale.distributed import phases
from jaxscale.run import signals
with signals.listening():
    signals.limit(float(sys.argv[1]), 0.0)
    phases.enter_phase("compiling")
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes, in C
"""


@pytest.mark.parametrize(
    "name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "run.max_hours = 1e-09"]
)
def test_before_training_a_signal_ends_the_process_even_in_a_compiler(name):
    """And SIGQUIT prints what it does, and lets it continue."""
    hours = "1e-9" if "=" in name else "0"
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY, hours],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    try:
        if "=" not in name:
            process.stdout.readline()
            process.send_signal(signal.SIGQUIT)
            time.sleep(0.1)
            process.send_signal(signal.Signals[name])
        printed = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == signals.STOPPED
    lines = printed.splitlines()
    assert lines[-1].startswith(f"{name} while ")
    assert lines[-1].endswith("stopped; there was nothing to save")
    assert ('File "<string>"' in printed) == ("=" not in name), "the stacks"


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.listening():
            signals.hold()
            signal.raise_signal(signal.SIGHUP)
            assert not signals.requested()
            signal.raise_signal(signal.SIGUSR1)
            assert signals.requested() == "SIGUSR1"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_ends_the_process(monkeypatch):
    left = []
    monkeypatch.setattr(signals, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(signals.processes, "leave", lambda text, status: left.append(status))
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals.listening())
        signals.hold()
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.01)
    assert left == [signals.ENDED_UNSAVED]
