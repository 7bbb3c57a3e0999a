"""One run at a time in a folder, however the one before it ended."""

import fcntl
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading

import pytest

from jaxscale import run_folder, train
from jaxscale.run import lock, mirror
from jaxscale.run.lock import locked
from jaxscale.storage import local_tier

HOLDS = """
import pathlib, sys, time
from jaxscale.run.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_in_a_folder_is_refused_before_anything_is_compiled(tmp_path, capsys):
    with locked(tmp_path), pytest.raises(SystemExit) as refused:
        train.main(["--config", "configs/tiny.py", "--workdir", str(tmp_path)])
    assert refused.value.code == 2
    said = capsys.readouterr()
    holder = f"in use by process {os.getpid()} on {socket.gethostname()}, since 20"
    assert said.err.startswith(f"error: --workdir {tmp_path} is {holder}")
    assert said.err.count("\n") == 1
    assert "compiling" not in said.out
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.fixture
def spellings(tmp_path, monkeypatch):
    """Of one folder, as a command line has them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(local_tier.VARIABLE, str(tmp_path / "tiers"))
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (tmp_path / "link").symlink_to(run)
    return [
        *("runs/one", f"{run}/", f"{tmp_path}//runs/../link"),
        *(f"file://{run}", f"file://{run}//", f"local://{tmp_path}/link", "file://link"),
    ]


def test_one_lock_however_a_folder_is_spelled(spellings, capsys):
    """A run's folder and the URL of the same folder: each would lose the other's files."""
    for held in ("runs/one", "file://link"):
        workdir = run_folder.folder(held)
        with locked(workdir), mirror.mirrored(workdir):
            for other in spellings:
                with pytest.raises(SystemExit) as refused:
                    train.main(["--config", "tiny", "--workdir", other])
                assert refused.value.code == 2, other
                said = capsys.readouterr().err
                assert f"is in use by process {os.getpid()} on" in said, other
    with locked(pathlib.Path("runs/one")):
        pass


def test_a_relative_address_is_another_place_in_each_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(local_tier.VARIABLE, str(tmp_path / "tiers"))
    here = local_tier.local_tier("file://run")
    monkeypatch.chdir(tmp_path)
    assert (
        local_tier.local_tier("file://run")
        == local_tier.local_tier(f"file://{tmp_path}/run")
        != here
    )


@pytest.mark.parametrize("address", ["memory://b//run/", "memory://b/./run", "memory://b/a/../run"])
def test_an_address_that_stores_read_in_two_ways_is_refused(address, tmp_path, monkeypatch):
    """s3fs lists the objects of s3://bucket/run for s3://bucket//run, and writes others."""
    monkeypatch.setenv(local_tier.VARIABLE, str(tmp_path))
    with pytest.raises(ValueError, match=r"did you mean memory://b/(a/)?run\?$"):
        local_tier.local_tier(address)


def test_a_killed_run_holds_nothing(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path], stdout=subprocess.PIPE)
    assert process.stdout
    with process.stdout as lines:
        lines.readline()
        with pytest.raises(ValueError, match=f"process {process.pid} on"), locked(tmp_path):
            pass
        process.kill()
        process.wait()
    with locked(tmp_path):
        assert str(os.getpid()) in (tmp_path / ".lock").read_text()
    with locked(tmp_path):
        pass


def test_the_lock_of_a_host_that_was_lost_is_waited_for(tmp_path, monkeypatch):
    """Its file system has still to notice; a supervisor repeats nothing that was refused."""
    theirs = {"host": "node7", "pid": 7, "start": "2026-01-01", "place": ["node7", "", ""]}
    with (tmp_path / ".lock").open("w") as file:
        file.write(json.dumps(theirs))
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        monkeypatch.setattr(lock, "LOST_SECONDS", 0)
        with pytest.raises(ValueError, match="in use by process 7 on node7"), locked(tmp_path):
            pass
        monkeypatch.setattr(lock, "LOST_SECONDS", 60)
        monkeypatch.setattr(lock.time, "sleep", lambda seconds: file.close())
        with locked(tmp_path):
            assert str(os.getpid()) in (tmp_path / ".lock").read_text()


def test_a_run_waits_for_a_reader_that_fetches_from_its_address(tmp_path, monkeypatch, caplog):
    """The reader has the run's lock during a read, and no supervisor repeats a refusal."""
    monkeypatch.setenv(local_tier.VARIABLE, str(tmp_path))
    workdir = local_tier.local_tier("memory://bucket/waits")
    with locked(workdir):  # an earlier run
        pass
    caplog.set_level("INFO", "jaxscale")
    reader, held = local_tier.fetching(workdir), []

    def train() -> None:
        with locked(workdir):
            held.append(True)

    with reader:
        thread = threading.Thread(target=train)
        thread.start()
        while "another process downloads memory://bucket/waits; waiting" not in caplog.text:
            assert thread.is_alive()
    thread.join()
    assert held


def test_a_full_disk_does_not_keep_a_run_from_locking(tmp_path):
    (tmp_path / ".lock").symlink_to("/dev/full")
    with locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        train.main(["--config", "configs/tiny.py", "--workdir", str(tmp_path / "file")])
    assert capsys.readouterr().err == f"error: {tmp_path / 'file'}: file exists\n"
