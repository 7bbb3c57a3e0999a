"""Batches are the same whoever loads them and wherever they begin; nothing outlives a run."""

import itertools
import multiprocessing
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jaxscale.batch import Batch
from jaxscale.data.dataset import Dataset
from jaxscale.data.loader import batches
from jaxscale.data.mixture import Mixture, mix
from tests.data.documents import END, assert_same, documents_of, numbered, opened


def take(count: int, dataset, **settings) -> list[Batch]:
    iterator = batches(dataset, global_batch_size=6, **settings)
    taken = list(itertools.islice(iterator, count))
    iterator.close()
    return taken


@pytest.mark.proof
@pytest.mark.parametrize(
    "rows",
    [[slice(0, 3), slice(3, 6)], [[0, 2, 4], [1, 3, 5]], [slice(i, i + 1) for i in range(6)]],
)
def test_rows_of_any_processes_make_the_same_batches(rows):
    dataset = opened(numbered(20))
    whole = take(5, dataset)
    parts = [take(5, dataset, rows=part) for part in rows]
    for step, batch in enumerate(whole):
        for part, taken in zip(rows, parts):
            assert_same(Batch(*(field[part] for field in batch[:5])), taken[step])
        for row in range(6):
            expected = dataset[step * 6 + row]
            assert_same(Batch(*(field[row] for field in batch[:5])), expected)


def test_continuing_at_any_step_is_never_having_stopped():
    dataset = opened(numbered(20))
    whole = take(7, dataset)
    for step in range(7):
        for expected, got in zip(whole[step:], take(7 - step, dataset, start_step=step)):
            assert_same(expected, got)


@pytest.fixture(scope="module")
def mixture() -> Mixture:
    """Examples with all that could differ between processes: random spans, members, stages."""
    members = [opened(numbered(size), seq_len=64, objective="span_corruption") for size in (20, 50)]
    return mix(members, [[(0, 1.0), (2, 0.5)], 1.0], lambda step: 6 * step)


@pytest.mark.proof
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_any_number_of_processes_and_shards_makes_the_same_batches(mixture, processes):
    whole = [[mixture[step * 6 + row] for row in range(6)] for step in range(3, 7)]
    digests = [mixture.example_digest(range(step * 6, step * 6 + 6)) for step in range(3, 7)]
    assert len(set(digests)) == 4
    for process in range(processes):
        copy = pickle.loads(pickle.dumps(mixture))  # as another process has it
        rows = range(process, 6, processes)
        for step, batch in enumerate(take(4, copy, rows=rows, start_step=3)):
            for place, row in enumerate(rows):
                assert_same(Batch(*(field[place] for field in batch[:5])), whole[step][row])
        assert [copy.example_digest(range(s * 6, s * 6 + 6)) for s in range(3, 7)] == digests


@pytest.mark.proof
def test_worker_processes_change_nothing_and_end(mixture):
    expected = take(4, mixture, rows=[1, 3, 5], start_step=3)
    got = take(4, mixture, rows=[1, 3, 5], start_step=3, workers=2)
    for before, after in zip(expected, got, strict=True):
        assert_same(before, after)
    assert not multiprocessing.active_children()


@pytest.mark.proof
class Killed:
    """Examples whose reader is killed as often as `kills` says: at its first one, when it holds
    none of the locks that it shares."""

    split = "train"

    def __init__(self, dataset: Dataset, file: pathlib.Path, kills: int) -> None:
        self.dataset, self.file, self.kills = dataset, file, kills

    def __getitem__(self, number: int) -> Batch:
        done = len(self.file.read_bytes())
        if done < self.kills:
            self.file.write_bytes(bytes(done + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return self.dataset[number]


def test_a_killed_worker_is_replaced_once_for_a_batch(tmp_path, caplog):
    (tmp_path / "kills").touch()
    dataset = opened(numbered(20))
    with caplog.at_level("WARNING", "jaxscale"):
        got = take(2, Killed(dataset, tmp_path / "kills", 1), start_step=3, workers=1)
    for before, after in zip(take(2, dataset, start_step=3), got, strict=True):
        assert_same(before, after)
    line = "note: a data worker was killed (SIGKILL), perhaps for lack of memory; another begins at"
    assert [record.getMessage() for record in caplog.records] == [f"{line} its batch"]
    with pytest.raises(ChildProcessError, match=r"killed \(SIGKILL\) twice .*; lower data.workers"):
        take(2, Killed(dataset, tmp_path / "kills", 3), workers=1)
    assert not multiprocessing.active_children()


KILLED = """
import multiprocessing, pathlib, signal, sys
from jaxscale.config import DataConfig
from jaxscale.data import dataset, loader
from jaxscale.data.tokens.tokenizer import load_tokenizer

if __name__ == "__main__":
    config = DataConfig(source=("{stdlib}/json/*.py",), seq_len=16)
    text = dataset.open_dataset(config, load_tokenizer("bytes"), split="train")
    iterator = loader.batches(text, global_batch_size=2, workers=2)
    next(iterator), next(iterator)  # one from each worker
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    signal.pause()
"""


@pytest.mark.proof
def test_worker_processes_end_when_the_run_is_killed(tmp_path):
    (tmp_path / "run.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "run.py")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as run:
        assert run.stdout
        children = run.stdout.readline().split()
        run.kill()
    assert len(children) == 2
    deadline = time.monotonic() + 30
    while any(alive(child) for child in children):
        assert time.monotonic() < deadline, f"processes {children} outlived their parent"
        time.sleep(0.2)


def alive(pid: str) -> bool:
    """Whether a process runs; one that ended and waits to be collected does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True)
    return bool(state.stdout.strip()) and not state.stdout.startswith("Z")


def test_a_closed_iterator_leaves_no_threads():
    before = set(threading.enumerate())
    take(3, opened(numbered(20)))
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)
        assert not thread.is_alive()


def test_held_out_documents_are_counted_once_and_end():
    corpus = numbered(40)
    dataset = opened(corpus, "heldout")
    taken = list(batches(dataset, global_batch_size=7))
    assert len(taken) == -(-len(dataset) // 7)
    counted = np.concatenate([batch.targets[batch.weights > 0] for batch in taken])
    documents = documents_of(corpus, "heldout", 0.2, 0)
    assert counted.tolist() == list(itertools.chain(*([*d, END] for d in documents)))
    num_bytes = sum((dataset.token_bytes[b.targets] * b.weights).sum() for b in taken)
    assert num_bytes == sum(map(len, documents))
    beyond = dataset[len(dataset)]
    assert not any(field.any() for field in (beyond.segments, beyond.positions, beyond.weights))
    assert list(batches(dataset, global_batch_size=7, start_step=len(taken))) == []
