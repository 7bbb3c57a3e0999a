"""The account of a run's time: over its attempts, with what a restart costs."""

import json
import time

import pytest

from jaxscale.distributed import phases
from jaxscale.run import goodput


def test_seconds_of_all_attempts_are_added_up(tmp_path, monkeypatch):
    spent = {"training": 60.0, "waiting for input": 5.0, "importing JAX": 3.0, "starting": 2.0}
    monkeypatch.setattr(phases, "seconds_spent", lambda: dict(spent))
    first = goodput.Account(tmp_path, time.monotonic() - 70)
    assert first.seconds() == {"compute": 60, "input": 5, "start": 5}
    assert goodput.goodput_share(first.seconds()) == pytest.approx(60 / 70)
    first.keep()
    # Killed; 10 s later a second attempt trains 20 s of it again.
    kept = json.loads((tmp_path / goodput.FILE).read_text())
    (tmp_path / goodput.FILE).write_text(json.dumps(kept | {"until": time.time() - 12}))
    second = goodput.Account(tmp_path, time.monotonic() - 2)
    second.lose(20.0)
    seconds = second.seconds()
    assert second.attempts == 2
    assert seconds.pop("restart") == pytest.approx(10, abs=5)
    assert seconds == {"compute": 100, "lost": 20, "input": 10, "start": 10}
    line = goodput.time_line({**seconds, "restart": 10.0}, 2)
    assert line.startswith("goodput 66.7% of 2 min 30 s in 2 attempts: compute 1 min 40 s, lost 20")
    # Back at a checkpoint, in the same attempt: no second is counted twice.
    spent["training"] += 40.0
    second.lose(15.0)
    assert second.attempts == 2
    assert {c: second.seconds()[c] for c in ("compute", "lost")} == {"compute": 125, "lost": 35}


def test_a_clock_that_is_corrected_between_attempts_is_no_restart(tmp_path, monkeypatch):
    """By hours or years on this host; of another one, where it had not been set at all."""
    right = time.time()
    monkeypatch.setattr(phases, "seconds_spent", lambda: {"training": 60.0})

    def restart(wrong: float, **kept) -> float:
        """Of an attempt 10 s after one that ended at a wrong time of the clock."""
        monkeypatch.setattr(goodput.time, "time", lambda: wrong)
        monkeypatch.setattr(goodput.time, "clock_gettime", lambda _: 500.0)
        (tmp_path / goodput.FILE).unlink(missing_ok=True)
        goodput.Account(tmp_path).keep()
        text = json.loads((tmp_path / goodput.FILE).read_text())
        (tmp_path / goodput.FILE).write_text(json.dumps(text | kept))
        monkeypatch.setattr(goodput.time, "time", lambda: right)
        monkeypatch.setattr(goodput.time, "clock_gettime", lambda _: 510.0)
        return goodput.Account(tmp_path).seconds().get("restart", 0.0)

    assert restart(right - 10) == pytest.approx(10)
    for wrong in (5.0, right - 4 * 3600, right + 4 * 3600):
        assert restart(wrong) == pytest.approx(10)
    assert restart(right - 10, clock=["another", 0.0]) == pytest.approx(10)
    for unknown in (["another", 0.0], None):
        assert restart(5.0, clock=unknown) == 0


def test_what_the_process_did_before_is_not_of_the_run(tmp_path, monkeypatch):
    spent = {"training": 60.0, "saving": 5.0}
    monkeypatch.setattr(phases, "seconds_spent", lambda: dict(spent))
    account = goodput.Account(tmp_path)
    account.lose(7.0)  # of an attempt that left no account
    spent |= {"training": 90.0, "evaluating": 1.0}
    assert account.seconds() == {"compute": 30, "evaluation": 1}


@pytest.mark.parametrize("text", ["", "5", "{}", '{"seconds": 3}', "\x00\x01"])
def test_an_account_that_cannot_be_read_begins_anew(tmp_path, text):
    (tmp_path / goodput.FILE).write_text(text)
    assert goodput.Account(tmp_path).attempts == 1


def test_phases_are_exclusive(monkeypatch):
    clock = iter([1.0, 3.0, 6.0, 10.0])
    monkeypatch.setattr(phases.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(phases, "_seconds", phases.collections.defaultdict(float))
    monkeypatch.setattr(phases, "_now", phases.Phase("starting", 0, 0.0))
    phases.enter_phase("training", 1)
    with phases.within("saving"):
        pass
    assert phases.seconds_spent() == {"starting": 1, "training": 2 + 4, "saving": 3}
