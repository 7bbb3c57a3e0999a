"""A run with a URL: uploads, and downloads after kills, damage and failures."""

import contextlib
import json
import logging
import shutil
import threading
from types import SimpleNamespace

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import command_line, evaluate, run_folder, supervise, train
from jaxscale import config as configs
from jaxscale.checkpoints import remote
from jaxscale.checkpoints.errors import DamagedError
from jaxscale.checkpoints.folder import remove
from jaxscale.checkpoints.restore import restore
from jaxscale.checkpoints.retention import Retention
from jaxscale.checkpoints.save import CheckpointWriter
from jaxscale.distributed import processes
from jaxscale.run import lock, metrics, mirror, signals, trainer, training_loop
from jaxscale.run.setup import preflight
from jaxscale.run.setup.restore import restore_params
from jaxscale.storage import durable, local_tier, untrusted
from jaxscale.storage.object_store import ObjectStore, StoreError
from jaxscale.training.step import StepMetrics
from tests.run.conftest import move_to
from tests.run.test_saves import SETTINGS, flip, values

METADATA = {"config": {}, "data": {"fingerprint": "", "next_example": 0}}
STATE = {"w": np.arange(6.0), "b": np.ones((3, 50))}


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "jaxscale")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(mirror, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(mirror, "FIRST_PAUSE_SECONDS", 0.01)


def open_checkpoints(place):
    workdir = run_folder.folder(place)
    return CheckpointWriter(
        workdir / "checkpoints", Retention(2), newest_file=workdir / local_tier.LAST_SAVED
    )


def save(place, *steps, seconds=30.0, frozen=()):
    """Saves checkpoints locally, and uploads them; what could not be uploaded."""
    workdir = run_folder.folder(place)
    (workdir / "config.json").write_text("{}")
    with contextlib.closing(open_checkpoints(place)) as checkpoints:
        for step in steps:
            checkpoints.save(step, {**STATE, "step": np.int32(step)}, METADATA, frozen=frozen)
            checkpoints.wait()
        with mirror.mirrored(workdir) as uploads:
            uploads.start(checkpoints)
            return uploads.finish(seconds)


def newest(place, **options):
    """The step that a run on this machine would resume from, which is then intact here."""
    workdir = run_folder.folder(place)
    with contextlib.closing(open_checkpoints(place)) as checkpoints:
        with local_tier.fetching(workdir, training=True) as store:
            local_tier.fetch_files(store, workdir, nested=True)
        found = checkpoints.newest_intact(**options)
        wanted = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in STATE.items()}
        if found.step:
            read = restore(checkpoints, found.step, wanted, part=True)
            jax.tree.map(np.testing.assert_array_equal, read, STATE)
        checkpoints.set_aside(found.damaged, found.step)
        return found.step


@jax.jit
def learn(state, batch):
    """A step that compiles at once; what it does depends on its examples and the state before."""
    factor = 1 + jnp.sum(batch.tokens * batch.weights) / 1e8
    params = jax.tree.map(lambda x: x * factor.astype(x.dtype), state.params)
    return state._replace(step=state.step + 1, params=params), StepMetrics(*[factor] * 4, {}, {})


def run(workdir, steps, *others, fit=True):
    """Trains up to a step; the trainer that it began with, and the last state."""
    config = configs.load("configs/tiny.py", [*SETTINGS, f"run.steps={steps}", *others])
    with lock.locked(workdir), mirror.mirrored(workdir) as uploads:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "lower_step", lambda engine: None)
            patch.setattr(trainer, "compile_step", lambda *_: learn)
            ready = trainer.open_trainer(config, workdir, uploads=uploads)
        assert ready
        state = training_loop.fit(ready, trackers=())[0] if fit else ready.state
        assert not (uploads and uploads.finish(30.0))
    return ready, jax.tree.map(np.asarray, state)


@pytest.mark.proof
@pytest.mark.parametrize("address", ["s3"], indirect=True)
def test_a_run_continues_on_an_empty_machine_to_the_bit(address, tmp_path, monkeypatch, lines):
    """At a server that speaks S3, which also has what is damaged here; readers find it there."""
    monkeypatch.setattr(durable, "SMALL_BYTES", 0)
    monkeypatch.setattr(metrics, "plot", lambda path, records: path.touch())  # seconds to import
    _, expected = run(tmp_path / "straight", 8)
    begun, _ = run(run_folder.folder(address), 4)
    move_to(monkeypatch, tmp_path / "second_machine")
    workdir = run_folder.folder(address)
    resumed, state = run(workdir, 8)
    assert (begun.begin, resumed.begin) == (0, 4)
    assert any(line.startswith("checkpoint 4 is not here; downloaded from s3") for line in lines())
    jax.tree.map(np.testing.assert_array_equal, state, expected)

    store = local_tier.open_store(address)
    text = (store.read("metrics.jsonl") or b"").decode()
    straight = (tmp_path / "straight" / "metrics.jsonl").read_text()
    losses, wanted = ([json.loads(one)["loss"] for one in t.splitlines()] for t in (text, straight))
    assert losses == wanted
    assert len(losses) == 8
    assert (local_tier.stored_steps(store), store.read("last_saved")) == ([6, 8], b"8\n")
    assert {name for name in store.sizes() if "/" not in name} == {
        "config.json",
        "last_saved",
        "loss.png",
        "metrics.jsonl",
        "seconds.json",
        "summary.json",
    }

    flip(values(workdir, 8))  # no digest of the file, as of large ones: only the array tells
    again, restored = run(workdir, 9, fit=False)
    assert (again.begin, int(restored.step)) == (8, 8)
    assert any(line.startswith("checkpoint 8 is corrupt here (") for line in lines())

    move_to(monkeypatch, tmp_path / "third_machine")
    move_to(monkeypatch, tmp_path / "third_machine")
    begun, initial = run(tmp_path / "another_run", 1, f"model.init_from={address}", fit=False)
    assert begun.begin == 0
    jax.tree.map(np.testing.assert_array_equal, initial.params, state.params)
    reader = run_folder.folder(address)
    assert run_folder.load_config(reader).run.steps == 8
    step, params, _ = restore_params(resumed.engine, reader)
    assert step == 8
    jax.tree.map(np.testing.assert_array_equal, params, state.params)
    assert restore_params(resumed.engine, reader, wanted_step=6)[0] == 6


@pytest.mark.proof
def test_what_was_killed_before_its_description_is_no_checkpoint(address, tmp_path, monkeypatch):
    """The next run begins at the one before it, and removes what is left of it."""
    assert save(address, 2, 4) == ""
    before = ObjectStore.upload

    def killed(store, files):
        if f"checkpoints/6/{local_tier.MARKER}" in files:
            raise OSError("killed")
        before(store, files)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "upload", killed)
        patch.setattr(mirror, "END_SECONDS", 0.0)
        # Another attempt, during the checks below, would begin with a removal.
        patch.setattr(mirror, "FIRST_PAUSE_SECONDS", 60.0)
        left = save(address, 6)
    assert left.startswith("checkpoint 6 could not be uploaded to memory://bucket")
    assert "(killed); all is in" in left
    store = local_tier.open_store(address)
    assert any(name.startswith("checkpoints/6/arrays") for name in store.sizes("checkpoints"))
    assert (local_tier.stored_steps(store), store.read("last_saved")) == ([2, 4], b"4\n")
    move_to(monkeypatch, tmp_path / "second_machine")
    assert newest(address) == 4
    assert save(address, 5) == ""
    assert local_tier.stored_steps(store) == [4, 5]
    assert remote.unfinished_steps(store) == []
    assert not [name for name in store.sizes("checkpoints") if name.startswith("checkpoints/6/")]


@pytest.mark.proof
@pytest.mark.parametrize("address", ["s3"], indirect=True)
def test_files_that_checkpoints_share_are_sent_once(address, tmp_path, monkeypatch):
    """Also by a machine that had to download them. At the URL each checkpoint has its own."""
    sent, upload = [], ObjectStore.upload

    def counted(store, files):
        sent.extend(name for name in files if "/frozen/" in name)
        upload(store, files)

    monkeypatch.setattr(ObjectStore, "upload", counted)
    for step in (2, 4):
        assert not save(address, step, frozen=("b",))
    assert sent
    assert all(name.startswith("checkpoints/2/frozen/") for name in sent)
    store = local_tier.open_store(address)
    shared = {name.split("/", 2)[2] for name in sent}
    for step in (2, 4):
        assert shared < {name.split("/", 2)[2] for name in store.sizes(f"checkpoints/{step}")}

    move_to(monkeypatch, tmp_path / "second_machine")
    assert newest(address) == 4
    store.write(f"checkpoints/4/{min(shared)}", b"cut")  # no copy is made of this one
    assert not save(address, 6, frozen=("b",))
    assert [name for name in sent if "checkpoints/6/" in name] == [f"checkpoints/6/{min(shared)}"]
    move_to(monkeypatch, tmp_path / "third_machine")
    assert newest(address) == 6


@pytest.mark.proof
@pytest.mark.parametrize("address", ["s3"], indirect=True)
def test_folders_that_a_console_made_are_no_files_of_a_run(address):
    bucket, _, run = address.removeprefix("s3://").partition("/")
    for key in (f"{run}/", f"{run}/checkpoints/", f"{run}/tensorboard/"):
        fsspec.filesystem("s3").call_s3("put_object", Bucket=bucket, Key=key, Body=b"")
    assert not local_tier.open_store(address).sizes()
    assert not save(address, 1)
    assert newest(address) == 1


def test_a_removal_that_was_killed_leaves_no_checkpoint(address, monkeypatch):
    save(address, 2)
    store, removed = local_tier.open_store(address), []
    monkeypatch.setattr(ObjectStore, "remove", lambda store, names: removed.append(list(names)))
    remote.remove_checkpoint(store, 2)
    assert removed[0] == [f"checkpoints/2/{local_tier.MARKER}"]
    assert local_tier.MARKER not in " ".join(removed[1])


def test_a_cut_upload_gets_no_description(address, monkeypatch):
    before = ObjectStore.upload

    def cut(store, files):
        before(store, files)
        if name := next((name for name in files if name.endswith("arrays/_METADATA")), ""):
            store.write(name, b"{")

    monkeypatch.setattr(ObjectStore, "upload", cut)
    monkeypatch.setattr(mirror, "END_SECONDS", 0.0)
    assert "arrays/_METADATA: 1 bytes arrived of " in save(address, 2)
    assert local_tier.stored_steps(local_tier.open_store(address)) == []


@pytest.mark.proof(but=("missing", "description"))
@pytest.mark.parametrize("damage", ["flipped", "missing", "cut", "description", "name"])
def test_a_damaged_one_there_is_fallen_back_from(address, tmp_path, monkeypatch, lines, damage):
    save(address, 4, 6)
    store, folder = local_tier.open_store(address), "checkpoints/6"
    names = store.sizes(folder)
    name = max((name for name in names if local_tier.MARKER not in name), key=names.__getitem__)
    marker = f"{folder}/{local_tier.MARKER}"
    data = bytearray(store.read(marker if damage in ("description", "name") else name) or b"")
    if damage == "missing":
        store.remove([name])
    elif damage == "cut":
        store.write(name, bytes(data[:-1]))
    elif damage == "description":
        description = json.loads(data) | {"metadata": {"config": {}}}
        store.write(marker, json.dumps(description).encode())
    elif damage == "name":
        description = json.loads(data)
        del description["digest"]
        description["files"]["../../../stolen"] = [1, ""]
        description["digest"] = durable.json_digest(description)
        store.write(marker, json.dumps(description).encode())
    else:
        data[len(data) // 2] ^= 1
        store.write(name, bytes(data))
    move_to(monkeypatch, tmp_path / "second_machine")
    assert newest(address) == 4
    (warning,) = [line for line in lines() if line.startswith("warning")]
    assert warning.startswith("warning: checkpoint 6 is corrupt (")
    assert warning.endswith("run/checkpoints/6.damaged1; the newest intact one is 4")
    assert local_tier.stored_steps(store) == [4]
    assert newest(address) == 4
    assert save(address, 6) == ""
    assert local_tier.stored_steps(store) == [4, 6]


def test_a_damaged_one_here_is_replaced_by_the_one_there(address, lines):
    """Also where only its arrays tell, when they are read; with a flag it is refused."""
    save(address, 4, 6)
    here = run_folder.folder(address)
    flip(here / "checkpoints" / "6" / "arrays" / "_METADATA")
    with pytest.raises(DamagedError, match=r"checkpoint 6 in .* changed since it was written"):
        newest(address, refuse_damaged=True)
    assert newest(address) == 6
    assert any(line.startswith("checkpoint 6 is corrupt here (") for line in lines())
    assert (here / "checkpoints" / "6.damaged1").is_dir()

    with contextlib.closing(open_checkpoints(address)) as checkpoints:
        problem = DamagedError("bits of w changed", "bits of w changed")
        checkpoints.replace(6, problem)
        assert (here / "checkpoints" / "6.damaged2").is_dir()
        remote.remove_checkpoint(local_tier.open_store(address), 6)
        with pytest.raises(DamagedError, match="bits of w changed"):
            checkpoints.replace(6, problem)


def test_newer_ones_here_are_used_and_put_there(address, monkeypatch):
    """Such as after a run whose uploads failed; only kept checkpoints."""
    with monkeypatch.context() as patch:
        patch.setattr(mirror.Mirror, "finish", lambda uploads, seconds: "")
        patch.setattr(mirror.Mirror, "start", lambda uploads, checkpoints: None)
        save(address, 2, 4, 6)
    store = local_tier.open_store(address)
    assert local_tier.stored_steps(store) == []
    assert newest(address) == 6
    assert save(address) == ""
    assert local_tier.stored_steps(store) == [4, 6]
    assert save(address, 8) == ""
    assert local_tier.stored_steps(store) == [6, 8]


def test_an_address_that_was_emptied_is_no_new_run(address):
    """Nor is it silently filled again."""
    save(address, 2)
    fsspec.filesystem("memory").rm("/bucket", recursive=True)
    workdir = run_folder.folder(address)
    with pytest.raises(ValueError, match=r"no checkpoint any more, and its .* has step 2: remove"):
        save(address)
    assert local_tier.open_store(address).sizes() == {}
    (workdir / local_tier.SENT).unlink()
    assert save(address) == ""
    assert local_tier.stored_steps(local_tier.open_store(address)) == [2]


def test_a_file_that_cannot_be_read_keeps_no_checkpoint_back(address, monkeypatch):
    copy = shutil.copyfile

    def unreadable(source, target):
        if source.name == "config.json":
            raise PermissionError(13, "Permission denied", str(source))
        copy(source, target)

    monkeypatch.setattr(mirror.shutil, "copyfile", unreadable)
    monkeypatch.setattr(mirror, "END_SECONDS", 0.0)
    left = save(address, 2)
    assert left.startswith(
        f"the newest metrics could not be uploaded to {address} ([Errno 13] Perm"
    )
    assert "config.json'); all is in" in left
    assert local_tier.stored_steps(local_tier.open_store(address)) == [2]


def test_a_failed_upload_is_tried_again_with_one_line(address, monkeypatch, lines):
    before, left = ObjectStore.upload, [3]

    def full(store, files):
        if any(name.startswith("checkpoints/") for name in files) and left[0]:
            left[0] -= 1
            raise StoreError(f"{store.url}: SlowDown: reduce your request rate")
        before(store, files)

    monkeypatch.setattr(ObjectStore, "upload", full)
    assert save(address, 2) == ""
    assert left == [0]
    (warning,) = [line for line in lines() if line.startswith("warning")]
    assert warning.startswith(f"warning: upload to {address} failed ({address}: Slow")


def test_a_stop_waits_no_longer_than_it_may(address, monkeypatch):
    """For a store that does not answer; the same command puts there what is missing."""
    answers = threading.Event()
    before = ObjectStore.upload
    monkeypatch.setattr(signals, "requested", lambda: "SIGTERM")
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "upload", lambda *given: (answers.wait(), before(*given)))
        left = save(address, 2, seconds=0.2)
        answers.set()
    for thread in threading.enumerate():
        if thread.name == "uploads":
            thread.join(30)
    assert left.startswith(f"checkpoint 2 could not be uploaded to {address} ")
    assert "(not done in 200 ms); all is in " in left
    assert left.endswith("and the same command uploads it")


def test_a_checkpoint_is_not_deleted_while_it_is_put_there(address, monkeypatch):
    before, kept = remote.send_checkpoint, []

    def send(store, folder, step):
        with contextlib.closing(open_checkpoints(address)) as other:
            remove(other.directory / str(step))
        kept.append((folder / str(step)).is_dir())
        return before(store, folder, step)

    monkeypatch.setattr(remote, "send_checkpoint", send)
    assert save(address, 2) == ""
    assert kept == [True]


def test_a_reader_takes_nothing_from_there_beside_a_run_and_drops_old_copies(
    address, tmp_path, monkeypatch
):
    save(address, 2, 4)
    first = tmp_path / "first_machine"
    move_to(monkeypatch, tmp_path / "second_machine")
    workdir = run_folder.folder(address)
    with contextlib.closing(open_checkpoints(address)) as checkpoints:
        checkpoints.fetch()
        assert checkpoints.steps() == [4]
        move_to(monkeypatch, first)
        save(address, 6, 8)
        with lock.locked(workdir):
            checkpoints.fetch()
            assert checkpoints.steps() == [4]
        checkpoints.fetch()
        assert checkpoints.steps() == [8]


def test_a_reader_keeps_what_is_still_to_be_put_there(address, tmp_path, monkeypatch):
    before = ObjectStore.upload

    def away(store, files):
        if any(name.startswith("checkpoints/4/") for name in files):
            raise OSError("away")
        before(store, files)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "upload", away)
        patch.setattr(mirror, "END_SECONDS", 0.0)
        patch.setattr(mirror, "FIRST_PAUSE_SECONDS", 60.0)
        assert save(address, 4, 6).startswith("checkpoint 4 could not be uploaded to memory://")
    with contextlib.closing(open_checkpoints(address)) as checkpoints:
        checkpoints.fetch()
        assert checkpoints.steps() == [4, 6]
    assert save(address) == ""
    assert local_tier.stored_steps(local_tier.open_store(address)) == [4, 6]


def test_a_lost_folder_of_checkpoints_at_the_address_is_no_new_run(address, tmp_path, monkeypatch):
    save(address, 2)
    remote.remove_checkpoint(local_tier.open_store(address), 2)
    assert newest(address) == 2, "still here"
    move_to(monkeypatch, tmp_path / "second_machine")
    with pytest.raises(ValueError, match=r"has no checkpoint, and step 2 was saved there"):
        newest(address)


@pytest.mark.proof
def test_no_room_in_the_local_tier_is_one_line(address, tmp_path, monkeypatch):
    save(address, 2)
    move_to(monkeypatch, tmp_path / "second_machine")
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(local_tier.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(StoreError, match=r"checkpoint 2: .* 100 B free; free space, or set JAXSCA"):
        newest(address)
    with pytest.raises(StoreError, match=r"3 checkpoints of the run: .* has 100 B free"):
        run(run_folder.folder(f"{address}2"), 4)


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "a//x", "a\\x", "", "."])
def test_names_stay_in_their_folder(name):
    with pytest.raises(ValueError, match="is not the name of a file in a run's folder"):
        untrusted.safe_name(name)


def refused(command, capsys, *arguments, expected=2):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "log_to_stdout", lambda: None)
        patch.setattr(trainer, "open_trainer", None)  # before anything is compiled
        with pytest.raises(SystemExit) as status:
            command(list(arguments))
    said = capsys.readouterr().err
    assert status.value.code == expected
    assert said.count("\n") == 1
    return said


def test_an_address_that_cannot_be_used_is_one_line(s3_server, tmp_path, monkeypatch, capsys):
    move_to(monkeypatch, tmp_path)
    given = ["--config", "configs/tiny.py", "--workdir"]
    said = refused(train.main, capsys, *given, "nowhere://bucket/run")
    assert said == (
        "error: argument --workdir: nowhere://bucket/run cannot be opened: Protocol not known: "
        "nowhere\n"
    )
    assert "has no folder" in refused(train.main, capsys, *given, "memory://")
    said = refused(train.main, capsys, *given, "s3://bucket/run[1]")
    assert "s3://bucket/run[1] has one of * ? [, which stores take for a pattern" in said
    said = refused(train.main, capsys, *given, "s3://nobodys/run", expected=1)
    assert said.startswith("error: s3://nobodys/run/lease.json: FileNotFoundError: The specified")
    said = refused(evaluate.main, capsys, "--workdir", "s3://bucket/nothing")
    assert said == "error: --workdir s3://bucket/nothing has no run (no config.json)\n"


def test_a_missing_package_is_named(tmp_path, monkeypatch, capsys):
    move_to(monkeypatch, tmp_path)

    def missing(*given, **named):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    said = refused(train.main, capsys, "--config", "configs/tiny.py", "--workdir", "gs://b/run")
    assert said.endswith("install gcsfs to access Google Storage; pip install 'jaxscale[gs]'\n")


def test_processes_with_local_tiers_of_their_own_are_refused(address, monkeypatch):
    """Such as on hosts without a shared file system."""
    channel = SimpleNamespace(
        process_id=0,
        names=["process 0 on a", "process 1 on b"],
        tell=lambda topic, value: None,
        gather=lambda topic, seen, decide: decide([seen, False]),
    )
    monkeypatch.setattr(processes, "_channel", channel)
    workdir = run_folder.folder(address)
    message = (
        rf"is not shared: process 1 on b does not .* for {address} set "
        "JAXSCALE_LOCAL_TIER to a folder that every host has mounted"
    )
    with pytest.raises(ValueError, match=message):
        processes._check_folder(channel, workdir)


def test_preflight_writes_to_the_address(address, monkeypatch):
    workdir = run_folder.folder(address)
    assert list(preflight._object_store(workdir.parent)) == []
    (found,) = preflight._object_store(workdir)
    assert str(found).startswith(f"object store: {address}: ")
    assert not found.advice
    assert local_tier.open_store(address).sizes() == {}

    def refuse(*given):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(local_tier.open_store(address).fs), "pipe_file", refuse)
    (found,) = preflight._object_store(workdir)
    assert found.measured == f"{address}/preflight: PermissionError: Access Denied"
    assert found.advice.startswith("check the URL, credentials, ")


def test_a_supervisor_sees_progress_in_the_local_tier(address):
    save(address, 2, 4)
    for command in (["train", "--workdir", address], ["train", f"--workdir={address}"]):
        workdir = supervise._workdir(command)
        assert workdir == run_folder.folder(address)
        assert supervise.newest_step(workdir) == 4
