"""The checkpoint with the lowest held-out loss: kept locally and at a URL, and read by name."""

import argparse
import math

import jax
import numpy as np
import pytest

from jaxscale import run_folder
from jaxscale.checkpoints.retention import best_step
from jaxscale.checkpoints.tiers import Checkpoints
from jaxscale.run import mirror, training_loop
from jaxscale.run.evaluation import Evaluation
from jaxscale.run.metrics import METRICS, heldout_losses
from jaxscale.run.setup.restore import restore_params
from jaxscale.run_folder import BEST
from jaxscale.storage import local_tier
from tests.run.conftest import move_to
from tests.run.test_mirror import run

SETTINGS = ("data.heldout=0.05", "run.eval_every=2", "run.keep_best=True", "run.keep_last=1")


@pytest.fixture
def losses(monkeypatch):
    """What evaluations find, one after the other: of texts that are long to evaluate, quickly."""
    found = []
    monkeypatch.setattr(
        training_loop, "evaluate_loss", lambda *_, **__: Evaluation(found.pop(0), 8, 8.0)
    )
    return found


def there(workdir):
    return Checkpoints(workdir / "checkpoints").steps()


@pytest.mark.proof
def test_it_is_kept_and_a_run_that_resumes_remembers_it(losses, tmp_path, caplog):
    caplog.set_level("INFO", "jaxscale")
    losses[:] = [3.0, 1.0, math.nan, 1.5]
    _, state = run(tmp_path, 8, *SETTINGS)
    assert there(tmp_path) == [4, 8]
    assert "held-out loss of a checkpoint is 1.0000, after step 4 (--step best)" in caplog.text
    assert caplog.text.count("warning: the loss on the held-out text is nan after step 6") == 1
    losses[:] = [1.0, 0.5, 2.0]  # an equal one is no better
    run(tmp_path, 10, *SETTINGS)
    assert there(tmp_path) == [4, 10]
    resumed, _ = run(tmp_path, 14, *SETTINGS)
    assert there(tmp_path) == [12, 14]
    step, params, _ = restore_params(resumed.engine, tmp_path, wanted_step=BEST)
    assert step == 12
    assert not np.array_equal(*(jax.tree.leaves(tree)[0] for tree in (params, state.params)))


@pytest.mark.proof
def test_at_an_address_it_stays_and_a_reader_finds_it(address, losses, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "POLL_SECONDS", 0.01)
    losses[:] = [3.0, 1.0, 2.0]
    run(run_folder.folder(address), 6, *SETTINGS)
    assert local_tier.stored_steps(local_tier.open_store(address)) == [4, 6]
    move_to(monkeypatch, tmp_path / "second_machine")
    losses[:] = [1.5]
    resumed, _ = run(run_folder.folder(address), 8, *SETTINGS)
    assert resumed.begin == 6
    assert local_tier.stored_steps(local_tier.open_store(address)) == [4, 8]
    move_to(monkeypatch, tmp_path / "third_machine")
    reader = run_folder.folder(address)
    run_folder.load_config(reader)
    assert restore_params(resumed.engine, reader, wanted_step=BEST)[0] == 4


@pytest.mark.proof
def test_without_evaluations_there_is_none(tmp_path, losses):
    ready, _ = run(tmp_path, 2)
    with pytest.raises(ValueError, match=r"--step best: of the checkpoints of .* \(2\) none was"):
        restore_params(ready.engine, tmp_path, wanted_step=BEST)
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 2, "eval_loss": null, "nonfinite": {"eval_loss": "nan"}}\n')
    with pytest.raises(ValueError, match=r"the evaluated ones \(2\) have no finite held-out loss"):
        restore_params(ready.engine, tmp_path, wanted_step=BEST)
    with pytest.raises(ValueError, match=r"data.heldout = 0 leaves no documents to evaluate on"):
        run(tmp_path / "another", 2, *SETTINGS[1:])
    with pytest.raises(argparse.ArgumentTypeError, match="'bets' is not a whole number, or best"):
        run_folder.step_or_best("bets")


def test_it_is_that_of_the_held_out_text_or_of_the_first_set():
    records = [
        {"step": 1, "eval_loss": None, "eval_loss/a": 1.0},
        {"step": 2, "eval_loss": 2.0, "eval_loss/a": 1.0, "eval_tokens": 9},
        {"step": 3, "loss": 1.0},
        {"step": 4, "eval_loss/a": 3.0, "eval_loss/b": 1.0},
        {"step": 5, "eval_loss": math.inf},
        {"step": 2, "eval_loss": 4.0},  # after a return to a checkpoint
    ]
    assert heldout_losses(records) == {2: 4.0, 4: 3.0}
    assert best_step([1, 2, 4, 5], {2: 4.0, 4: 3.0, 7: 1.0}) == 4
    assert best_step([1, 5], {2: 4.0}) is None
