"""A run survives saves that fail, checkpoints that are damaged or lost, and a state that is not
finite: nothing that was good is given up."""

import argparse
import concurrent.futures
import dataclasses
import errno
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from jaxscale import config as configs
from jaxscale import convert, evaluate, generate, train
from jaxscale.checkpoints import errors, tiers
from jaxscale.checkpoints.errors import DamagedError, UnreadableError
from jaxscale.checkpoints.folder import named_arrays
from jaxscale.checkpoints.retention import Retention
from jaxscale.checkpoints.save import CheckpointWriter
from jaxscale.checkpoints.tiers import Checkpoints, Found
from jaxscale.data.skipped_ranges import ranges_of
from jaxscale.distributed import phases
from jaxscale.planner.memory import at_rest
from jaxscale.run import metrics, recorder, saves, trainer, training_loop
from jaxscale.run.evaluation import device_batches
from jaxscale.run.saves import SaveError
from jaxscale.run.setup.layout import resolve_layout
from jaxscale.run.setup.restore import check_tokenizer_of
from jaxscale.sharding.mesh import make_mesh
from jaxscale.supervise import newest_step
from jaxscale.training.engine import make_engine
from tests.run.settings import with_run, with_step
from tests.run.test_trainer import count

SETTINGS = [
    "model.num_layers=1",
    "model.d_model=16",
    "model.d_ff=16",
    "data.seq_len=32",
    "data.heldout=0",
    "run.steps=6",
    "run.checkpoint_every=2",
    "run.keep_last=2",
]


def reopen(workdir, *overrides, **options):
    """The trainer of a folder, with a step that only counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "lower_step", lambda engine: None)
        patch.setattr(trainer, "compile_step", lambda *_: count)
        config = configs.load("configs/tiny.py", [*SETTINGS, *overrides])
        ready = trainer.open_trainer(config, workdir, **options)
    assert ready
    return ready


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    return reopen(tmp_path_factory.mktemp("fresh"))


@pytest.fixture
def ready(fresh, tmp_path):
    """A trainer of a new folder; its state is not donated."""
    place = tmp_path / "checkpoints"
    marker = tmp_path / "last_saved"
    checkpoints = CheckpointWriter(place, Retention(2), newest_file=marker)
    return dataclasses.replace(fresh, workdir=tmp_path, checkpoints=checkpoints)


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "jaxscale")
    return lambda: [record.getMessage() for record in caplog.records]


def full(monkeypatch, times, number=errno.ENOSPC):
    """The disk is full, or read-only, the first so many times."""
    before, left = ocp.AsyncCheckpointer.save, iter(range(times))

    def save(*arguments, **named):
        if next(left, None) is not None:
            raise OSError(number, os.strerror(number))
        before(*arguments, **named)

    monkeypatch.setattr(ocp.AsyncCheckpointer, "save", save)


def test_a_failed_save_is_repeated_while_training_goes_on(ready, monkeypatch, lines):
    """At the next step, then after two more, and when one is due anyway."""
    full(monkeypatch, 3)
    training_loop.fit(ready, trackers=())
    warnings = [line for line in lines() if line.startswith("warning")]
    assert [line.split()[3] for line in warnings] == ["2", "3", "4"]
    assert all("failed (No space left on device); there is none" in line for line in warnings)
    saved = [line.split()[1] for line in lines() if " saved in " in line]
    assert saved in (["6"], ["5", "6"], ["8", "6"])
    assert ready.checkpoints.steps()[-1] == 6


def test_the_last_save_is_tried_again_then_refused(ready, monkeypatch):
    monkeypatch.setattr(saves, "PAUSES_SECONDS", (0.0, 0.0))
    full(monkeypatch, 99, errno.EROFS)
    with pytest.raises(SaveError, match=r"saving checkpoint 6 .*\(Read-only file system\)"):
        training_loop.fit(ready, trackers=())
    assert ready.checkpoints.steps() == []


@pytest.mark.proof
def test_the_last_save_succeeds_when_there_is_room_again(ready, monkeypatch):
    monkeypatch.setattr(saves, "PAUSES_SECONDS", (0.0, 0.0))
    full(monkeypatch, 2)
    training_loop.fit(with_run(ready, checkpoint_every=0), trackers=())
    assert ready.checkpoints.steps() == [6]


@pytest.mark.proof
def test_who_waits_for_a_write_is_not_held_to_the_time_of_a_save(ready, monkeypatch):
    """A save that is due while the one before is written, the last one, and the end of a run."""
    wait, seen = CheckpointWriter.wait, []

    def note(checkpoints, **named):
        if checkpoints._thread is not None:
            seen.append(str(phases.current()))
        wait(checkpoints, **named)

    monkeypatch.setattr(CheckpointWriter, "wait", note)
    training_loop.fit(ready, trackers=())
    assert seen == [f"writing the checkpoint (step {step})" for step in (4, 6, 6)]


def test_each_batch_of_an_evaluation_has_a_deadline_of_its_own(monkeypatch):
    begun = []

    def evaluate(*_, stops, tables):
        for _ in range(3):
            stops()
            begun.append(phases.current())

    config = configs.load("configs/tiny.py")
    run = mock.Mock(config=config, text=mock.Mock(evaluations={"": None}))
    monkeypatch.setattr(training_loop, "evaluate_loss", evaluate)
    training_loop._evaluate(run, mock.Mock(), 7, mock.Mock(), lambda: "")
    assert len(set(begun)) == 3
    assert {str(phase) for phase in begun} == {"evaluating (step 7)"}


@jax.jit
def poison(state, batch):
    """Loss and gradient norm are finite, and at step 4 the state is not."""
    state, metrics = count(state, batch)
    bad = jnp.where(state.step == 4, jnp.inf, 1.0)
    scaled = jax.tree.map(lambda x: x * bad.astype(x.dtype), state.params["head"])
    return state._replace(params={**state.params, "head": scaled}), metrics


def test_a_state_that_is_not_finite_is_not_saved_and_the_good_one_stays(ready):
    poisoned = with_step(with_run(ready, keep_last=1), poison)
    with pytest.raises(FloatingPointError, match=r"step 4: . arrays .* the first params/head/"):
        training_loop.fit(poisoned, trackers=())
    assert ready.checkpoints.steps() == [2]


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A run of six steps, with checkpoints 4 and 6."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    training_loop.fit(reopen(workdir), trackers=())
    return workdir


@pytest.fixture
def begun(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def values(workdir, step):
    files = (workdir / "checkpoints" / str(step)).rglob("d/*")
    return max(files, key=lambda path: path.stat().st_size)


def failing_reads(monkeypatch, *numbers):
    """The first reads of a description fail, each with an error of the operating system."""
    read, left = tiers.read_description, iter(numbers)

    def refuse(data):
        if number := next(left, None):
            raise OSError(number, os.strerror(number))
        return read(data)

    monkeypatch.setattr(errors, "AGAIN_SECONDS", 0)
    monkeypatch.setattr(tiers, "read_description", refuse)


@pytest.mark.proof
@pytest.mark.parametrize("number", [errno.EACCES, errno.ETIMEDOUT, errno.ENOMEM])
def test_a_checkpoint_that_may_not_be_read_stays(number, begun, monkeypatch):
    """It may be intact: an older one in its place would be steps lost."""
    failing_reads(monkeypatch, number)
    why = os.strerror(number)
    with pytest.raises(UnreadableError, match=rf"6 in .* cannot be read: {why}; it is") as raised:
        Checkpoints(begun / "checkpoints").newest_intact()
    assert raised.value.exit_status == 1


@pytest.mark.proof
def test_an_error_of_the_disk_is_damage_the_second_time(begun, monkeypatch):
    """The first may be a network's, and pass."""
    checkpoints = Checkpoints(begun / "checkpoints")
    failing_reads(monkeypatch, errno.EIO)
    assert checkpoints.newest_intact().step == 6
    failing_reads(monkeypatch, errno.EIO, errno.EIO)
    assert checkpoints.newest_intact().damaged == {6: "Input/output error"}


def test_a_damaged_checkpoint_is_set_aside(begun, lines):
    """Its bits are compared: the description and all sizes are as they were."""
    flip(values(begun, 6))
    with pytest.raises(DamagedError, match=r"checkpoint 6 .* cannot be used"):
        reopen(begun, "run.steps=8", refuse_damaged=True)
    ready = reopen(begun, "run.steps=8")
    assert (ready.begin, int(ready.state.step)) == (4, 4)
    names = sorted(path.name for path in (begun / "checkpoints").iterdir())
    assert names == ["4", "6.damaged1"]
    (line,) = [line for line in lines() if line.startswith("warning")]
    assert line.startswith("warning: checkpoint 6 is corrupt (")
    assert line.endswith("6.damaged1; the newest intact one is 4")


def test_nothing_is_renamed_where_no_checkpoint_is_intact(begun):
    for step in (4, 6):
        values(begun, step).unlink()
    with pytest.raises(DamagedError, match=r"checkpoint 6 .* is missing"):
        reopen(begun, "run.steps=8")
    assert sorted(path.name for path in (begun / "checkpoints").iterdir()) == ["4", "6"]


def test_a_lost_folder_of_checkpoints_is_no_new_run(begun):
    metrics = (begun / "metrics.jsonl").read_text()
    shutil.rmtree(begun / "checkpoints")
    with pytest.raises(ValueError, match=r"has no checkpoint, and step 6 was saved there: restore"):
        reopen(begun, "run.steps=8")
    assert (begun / "metrics.jsonl").read_text() == metrics


@pytest.mark.parametrize("name", ["007", "²"])
def test_a_folder_that_is_named_otherwise_is_no_checkpoint(name, tmp_path):
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "8").mkdir()
    (tmp_path / "checkpoints" / "9").touch()
    assert Checkpoints(tmp_path / "checkpoints").steps() == [8]
    assert newest_step(tmp_path) == 8, "of the supervisor"


def test_a_file_with_the_name_of_a_step_is_no_checkpoint(begun):
    (begun / "checkpoints" / "99").write_text("")
    assert reopen(begun, "run.steps=8").begin == 6


def test_a_reader_takes_the_next_one_when_the_newest_is_deleted_first(begun, monkeypatch):
    checkpoints = Checkpoints(begun / "checkpoints")
    answers = iter([5, 6])
    monkeypatch.setattr(checkpoints, "latest", lambda: next(answers))
    with checkpoints.reading() as step:
        assert step == 6
        (begun / "checkpoints" / "4").rename(begun / "checkpoints" / "7")
        writer = CheckpointWriter(begun / "checkpoints", Retention(1))
        writer._remove_old()
        assert writer.steps() == [6, 7]
    writer._remove_old()
    assert writer.steps() == [7]


@pytest.mark.proof
def test_the_commands_read_the_checkpoint_that_is_asked_for(finished, tmp_path, capsys):
    """Such as the best one of a run, where it is not the newest."""
    workdir, out, questions = ["--workdir", str(finished)], tmp_path / "out", tmp_path / "questions"
    asked = [*workdir, "--step", "4", "--json", str(out)]
    assert convert.main([*asked, "--to_hf", "--output", str(tmp_path / "hf")]) == 0
    assert json.loads(out.read_text())["step"] == 4
    questions.write_text('{"prompt": "a", "choices": ["b", "c"], "answer": 0}')
    for main, words in (
        (generate.main, ["--prompt", "a"]),
        (evaluate.main, ["--config.data.heldout=0.5"]),
        (evaluate.main, ["--choices", str(questions)]),
    ):
        with pytest.raises(SystemExit):
            main([*workdir, "--step", "5", *words])
        assert "checkpoints has no checkpoint 5; it has 4, 6" in capsys.readouterr().err


def test_a_tokenizer_that_changed_is_refused(finished, fresh):
    """Two ids exchanged in its file mean other text to the model."""
    metadata = Checkpoints(finished / "checkpoints").metadata(6)
    tokenizer = fresh.text.tokenizer
    check_tokenizer_of(metadata, tokenizer, "it")
    other = dataclasses.replace(tokenizer, fingerprint="another")
    with pytest.raises(ValueError, match=r"it was trained with another tokenizer than 'bytes' is"):
        check_tokenizer_of(metadata, other, "it")
    check_tokenizer_of({"data": {}}, other, "one from before")


def test_evaluate_refuses_a_tokenizer_that_changed(finished, fresh, monkeypatch, capsys):
    other = dataclasses.replace(fresh.text.tokenizer, fingerprint="another")
    monkeypatch.setattr("jaxscale.run.setup.text.open_tokenizer", lambda *_: other)
    with pytest.raises(SystemExit) as ended:
        evaluate._evaluate(argparse.Namespace(workdir=finished, step=None), fresh.config)
    assert ended.value.code == 2
    assert "6 in" in (said := capsys.readouterr().err)
    assert "was trained with another tokenizer" in said


def test_after_bad_steps_in_a_row_the_run_returns_and_passes_over_their_examples(
    fresh, ready, lines
):
    """The list is in the checkpoint, so that a run that is resumed reads what this one would."""
    ready = with_run(ready, steps=10, skip_bad_steps=2)
    stream = device_batches(ready.engine, ready.text.train, 8)
    bad = [int(next(stream).tokens.sum()) for _ in range(6)][4:]
    stream.close()

    @jax.jit
    def step(state, batch):
        state, metrics = count(state, batch)
        skipped = jnp.isin(batch.tokens.sum(), jnp.array(bad))
        wrong = jnp.zeros(len(jax.tree.leaves(state.params)), bool).at[1].set(skipped)
        return state, metrics._replace(others={"skipped": skipped, "nonfinite_gradients": wrong})

    training_loop.fit(with_step(ready, step), trackers=())
    warnings = [line for line in lines() if line.startswith("warning")]
    assert [line.partition(" updates nothing")[0] for line in warnings[:2]] == [
        "warning: step 5",
        "warning: step 6",
    ]
    assert "its examples are 32 to 39, " in warnings[0]
    assert "back at step 4; the examples 32 to 47 are skipped" in warnings[2]
    records = metrics.read(ready.workdir / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 11))
    digest = fresh.text.train.example_digest
    wanted = [digest(range(8 * s, 8 * s + 8)) for s in (*range(4), *range(6, 12))]
    assert [record["examples"] for record in records] == wanted
    data = ready.checkpoints.metadata(10)["data"]
    assert (data["passed_over"], data["next_example"]) == ([[32, 48]], 80)
    again = reopen(ready.workdir, "run.steps=12", "run.skip_bad_steps=2")
    assert again.text.train.example_digest(range(80, 88)) == digest(range(96, 104))
    assert again.state.guard.good == 0, "a checkpoint from before the setting"


@pytest.mark.parametrize(("error", "status"), [(ValueError("changed"), 2), (OSError("away"), 1)])
def test_tokens_that_changed_end_the_command_with_a_line(error, status, ready, monkeypatch, capsys):
    """And with a status after which no supervisor trains on."""
    outcome = concurrent.futures.Future()
    outcome.set_exception(error)
    text = dataclasses.replace(ready.text, verification=(outcome,))
    opened = dataclasses.replace(ready, text=text)
    monkeypatch.setattr(trainer, "open_trainer", lambda *_, **__: opened)
    with pytest.raises(SystemExit) as ended:
        train.main(["--config", "tiny", "--workdir", str(ready.workdir), "--trackers", "none"])
    assert (ended.value.code, capsys.readouterr().err) == (status, f"error: {error}\n")


@pytest.mark.proof
def test_lost_is_what_was_counted_as_compute(ready):
    """The steps of a killed attempt waited for input most of their time: to take all of it from
    compute left goodput 0."""
    steps = [{"step": step, "step_seconds": 10, "data_seconds": 9} for step in (1, 2, 3)]
    (ready.workdir / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    seconds = {"compute": 30.0, "input": 270.0}
    account = {"attempts": 1, "seconds": seconds, "until": time.time()}
    (ready.workdir / "seconds.json").write_text(json.dumps(account))
    _, summary = training_loop.fit(ready, trackers=())
    found = summary["seconds_by_cause"]
    assert found["lost"] == 3
    assert found["compute"] > 27


@pytest.mark.proof
def test_the_time_left_counts_on_saves_as_so_far(ready, monkeypatch, lines):
    """Every step takes a second and every second one is saved for ten: six seconds a step."""
    clock, save = [0.0], saves.Saves.save

    def step(state, batch):
        clock[0] += 1
        return count(state, batch)

    def slow(*arguments):
        clock[0] += 10
        save(*arguments)

    monkeypatch.setattr(recorder, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(saves.Saves, "save", slow)
    training_loop.fit(with_step(ready, step), trackers=(), started=0.0)
    found = [line for line in lines() if line.startswith("step 5/6")]
    assert [line.rpartition("| ")[2] for line in found] == ["6.0 s left"]


@pytest.mark.proof
def test_the_first_step_has_not_the_time_in_which_trackers_begin(ready, monkeypatch):
    clock, begin = [0.0], recorder.Metrics

    def slow(*arguments, **named):
        clock[0] += 100
        return begin(*arguments, **named)

    def step(state, batch):
        clock[0] += 1
        return count(state, batch)

    monkeypatch.setattr(recorder, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(recorder, "Metrics", slow)
    training_loop.fit(with_step(ready, step), trackers=(), started=0.0)
    records = metrics.read(ready.workdir / "metrics.jsonl")
    assert [record["step_seconds"] for record in records] == [1.0] * 6


@pytest.mark.proof
def test_a_folder_that_is_removed_under_a_run_is_begun_anew(ready, monkeypatch, lines):
    """Its checkpoints were saved and could not be evaluated, and its metrics went nowhere."""
    save = saves.Saves.save

    def then_remove(self, step, state):
        save(self, step, state)
        saves.wait_for_write(self._checkpoints, step)
        if step == 2:
            shutil.rmtree(ready.workdir)

    monkeypatch.setattr(saves.Saves, "save", then_remove)
    training_loop.fit(ready, trackers=("tensorboard",))
    assert ready.checkpoints.steps() == [4, 6]
    assert (ready.workdir / "config.json").is_file()
    assert [one["step"] for one in metrics.read(ready.workdir / "metrics.jsonl")] == [3, 4, 5, 6]
    said = [line for line in lines() if line.startswith("warning")]
    assert len(said) == 2
    assert all("was removed or moved; created again" in line for line in said)


@pytest.mark.proof
def test_a_trace_ends_with_its_last_step(ready, monkeypatch, lines):
    """And not after the evaluation and the save that follow: their time was said to be the step's,
    most of it idle."""
    saved = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: None)
    monkeypatch.setattr(
        jax.profiler, "stop_trace", lambda: saved.extend(ready.workdir.glob("checkpoints/*"))
    )
    training_loop.fit(ready, trackers=(), profile=range(1, 3))
    assert ready.checkpoints.steps() == [4, 6]
    assert not saved
    assert not [line for line in lines() if "also traces" in line]


def test_what_comes_between_traced_steps_is_said(ready):
    assert training_loop._between(range(1, 3), ready) == ""
    assert training_loop._between(range(2, 4), ready) == "the save after step 2"
    expected = "the save after step 2 and the save after step 4"
    assert training_loop._between(range(1, 6), ready) == expected
    assert training_loop._between(range(1, 9), ready) == f"{expected} and 1 more"


@pytest.mark.proof
def test_a_trace_that_cannot_be_written_ends_no_run(ready, lines):
    (ready.workdir / "profile").touch()
    training_loop.fit(ready, trackers=(), profile=range(1, 3))
    assert ready.checkpoints.steps() == [4, 6]
    (said,) = (line for line in lines() if "trace" in line)
    assert said.startswith(f"warning: no trace could be written to {ready.workdir}/profile (")


@pytest.mark.parametrize(("newest", "passed"), [(3, [(32, 56)]), (5, [(40, 56)])])
def test_what_is_passed_over_begins_after_the_checkpoint(newest, passed, fresh, monkeypatch):
    """Of the bad steps 5, 6 and 7 the first was before the checkpoint 5, and its examples are read
    by nobody again: to leave out as many others would lose good ones."""
    text = dataclasses.replace(fresh.text, train=range(1000))
    monkeypatch.setattr(training_loop, "resume", lambda *_: (newest, None, text))
    checkpoints = mock.Mock(newest_intact=lambda: Found(newest))
    trainer = dataclasses.replace(fresh, text=text, checkpoints=checkpoints)
    found = training_loop._rewound(trainer, recorder.BadStepsError(5, 7))
    assert list(ranges_of(found.text.train)) == passed


def test_a_folder_that_takes_no_files_ends_a_run_before_its_first_step(ready, tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(SaveError, match=r"\(Is a directory\), and no step was trained"):
        training_loop.fit(dataclasses.replace(ready, workdir=tmp_path), trackers=())


def test_the_file_that_cannot_be_written_is_named(ready, tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(SaveError, match=f"^{tmp_path}/metrics.jsonl cannot be written "):
        training_loop.fit(dataclasses.replace(ready, workdir=tmp_path), trackers=())


def test_checkpoints_on_a_disk_that_is_away_end_a_run_before_its_first_step(ready, tmp_path):
    """Each of its saves failed, and a run that saves its last step only learned it then."""
    (tmp_path / "checkpoints").symlink_to(tmp_path / "away" / "run")
    place = f"^{tmp_path}/checkpoints cannot be written "
    with pytest.raises(SaveError, match=rf"{place}\(No such file or directory\), and no step was"):
        training_loop.fit(ready, trackers=())


def test_a_path_that_is_not_utf_8_is_refused(tmp_path):
    """The library that writes checkpoints takes none; Python has them in a locale without UTF-8."""
    with pytest.raises(ValueError, match="which is not UTF-8: choose another --workdir"):
        Checkpoints(tmp_path / "caf\udce9")


def test_an_empty_record_of_the_last_save_is_said_to_be_one(tmp_path):
    (tmp_path / "last_saved").touch()
    with pytest.raises(ValueError, match=r"no checkpoint, and step \? was saved"):
        Checkpoints(tmp_path / "checkpoints", newest_file=tmp_path / "last_saved").latest()


LIMITED = """
import pathlib, resource, sys, threading
import numpy as np
from jaxscale import command_line
from jaxscale.checkpoints.save import CheckpointWriter

def refused(thread):
    raise RuntimeError("can't start new thread")

def main(argv):
    place = pathlib.Path(argv[0])
    checkpoints = CheckpointWriter(place)
    command_line.log_to_stdout()
    limits, start = resource.getrlimit(resource.RLIMIT_FSIZE), threading.Thread.start
    state = {f"w{i}": np.ones((256, 256)) for i in range(8)}
    for step, limit in enumerate((0, limits[0], limits[0], limits[0], 0)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        threading.Thread.start = refused if step == 2 else start
        checkpoints.save(step, state, {})
        checkpoints.wait()
    checkpoints.close()

command_line.run(main)
"""


@pytest.mark.proof
def test_a_failed_save_leaves_no_error_for_later_ones_and_says_one_line(tmp_path):
    """No file can be written, as on a full disk, or no thread started, as under `ulimit -v`; what
    the writer's threads do then concerns nobody."""
    words = [sys.executable, "-W", "ignore:coroutine:RuntimeWarning", "-c", LIMITED, tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    said = [re.sub(r"checkpoint | in (/\S+|[\d.]+ s)|;.*", "", line) for line in lines]
    assert said == [
        "warning: saving 0 failed (File too large)",
        "1 saved",
        "warning: saving 2 failed (RuntimeError: can't start new thread)",
        "3 saved",
        "warning: saving 4 failed (File too large)",
    ]


UNCHANGED = {
    "adapters": (
        ["model.lora_rank=2", "optimizer.groups={'params':'*/q_lora/*','frozen':True}"],
        lambda name: "_lora" not in name or "/q_lora/" in name,
    ),
    "embedding": (
        ["optimizer.groups={'params':'embed/*','frozen':True}"],
        lambda name: name.startswith("params/embed/"),
    ),
    "balanced": (
        [
            "model.family=deepseek_v3",
            "model.num_experts=4",
            "model.experts_per_token=2",
            "model.dense_layers=0",
            "model.kv_rank=8",
            "model.rope_head_dim=4",
            "model.router_groups=1",
            "model.num_kv_heads=4",
            "model.router_groups_kept=1",
        ],
        lambda name: False,
    ),
}


@pytest.mark.proof(but=("embedding", "adapters"))
@pytest.mark.parametrize("kind", UNCHANGED)
def test_which_parameters_no_step_changes(kind):
    """A model moves the biases of its routers itself. The planner counts the same bytes."""
    settings, unchanged = UNCHANGED[kind]
    config = resolve_layout(configs.load("configs/tiny.py", [*SETTINGS, *settings]))
    engine = make_engine(config, make_mesh(config.layout))
    arrays = named_arrays({"params": engine.abstract_state.params})
    found = saves.unchanged_params(engine)
    assert found == set(filter(unchanged, arrays))
    size = sum(arrays[name].size * arrays[name].dtype.itemsize for name in found)
    assert at_rest.unchanged_bytes(config.model, config.optimizer.groups) == size
