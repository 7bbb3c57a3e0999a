"""One run at a time at a URL, however the one before it ended."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from jaxscale.run import lock
from jaxscale.storage import local_tier
from jaxscale.storage.object_store import StoreError


@pytest.fixture
def store(address, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(lock, "FIRST_BEAT_SECONDS", 0.01)
    return local_tier.open_store(address)


def lease(store, **changed):
    """Written as by a run on another host."""
    values = {"host": "elsewhere", "pid": 7, "start": "2026-01-01", "run": "theirs"} | changed
    store.write(local_tier.LEASE, json.dumps(values).encode())


def test_a_lease_is_renewed_and_ends_with_the_run(store):
    with lock.leased(store):
        first = json.loads(store.read(local_tier.LEASE))
        assert (first["host"], first["pid"]) == (socket.gethostname(), os.getpid())
        deadline = time.monotonic() + 30
        while json.loads(store.read(local_tier.LEASE))["renewed"] < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert store.read(local_tier.LEASE) is None


def test_a_run_that_lives_is_not_disturbed(store, monkeypatch):
    monkeypatch.setattr(lock, "MOST_BEATS", 10**3)
    lease(store)
    ended = threading.Event()

    def beat():
        for count in range(10**6):
            lease(store, renewed=count)
            if ended.wait(0.01):
                return

    other = threading.Thread(target=beat)
    other.start()
    try:
        message = r"is in use by process 7 on elsewhere, since 2026-01-01; two runs would overwrite"
        with pytest.raises(ValueError, match=message), lock.leased(store):
            pass
    finally:
        ended.set()
        other.join()
    assert json.loads(store.read(local_tier.LEASE))["run"] == "theirs"


@pytest.mark.parametrize("content", [b'{"host": "elsewhere"}', b"[1", b"[]", b"null"])
def test_one_that_is_renewed_no_more_is_taken_over(store, content):
    """After a while: whatever is in it."""
    store.write(local_tier.LEASE, content)
    with lock.leased(store):
        assert json.loads(store.read(local_tier.LEASE))["pid"] == os.getpid()


def test_one_of_a_process_that_was_killed_here_is_taken_over_at_once(store, monkeypatch):
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
    lease(store, **lock._this_run() | {"pid": int(process.stdout)})
    monkeypatch.setattr(lock, "MOST_BEATS", 10**6)
    with lock.leased(store):
        assert json.loads(store.read(local_tier.LEASE))["pid"] == os.getpid()


@pytest.mark.parametrize("part", [1, 2], ids=["boot", "process ids"])
def test_one_of_another_host_or_container_with_this_name_is_watched(store, monkeypatch, part):
    """Its process ids say nothing here: a pod has the name of the one that it replaces."""
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
    place = lock._process_space()
    place[part] = "another"
    theirs = {"host": socket.gethostname(), "pid": int(process.stdout), "place": place}
    lease(store, **theirs)

    def beat(seconds):
        lease(store, **theirs, renewed=2)

    monkeypatch.setattr(lock.time, "sleep", beat)
    with pytest.raises(ValueError, match="is in use by process"), lock.leased(store):
        pass


def test_a_run_whose_lease_was_taken_ends(store, monkeypatch):
    """It was frozen for longer than others wait, say; or both began at once."""
    left, said = threading.Event(), []

    def leave(*given):
        said.append(given)
        left.set()
        raise StoreError("the process has ended")

    monkeypatch.setattr(lock.processes, "leave", leave)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock.leased(store))
        lease(store)
        assert left.wait(30)
    text, status = said[0]
    assert text.startswith(f"error: {store.url} was taken over by process 7 on elsewhere, ")
    assert status == 1
    assert json.loads(store.read(local_tier.LEASE))["run"] == "theirs", "it is not removed"
