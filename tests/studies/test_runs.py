"""A run of a study is trained once, resumes, and is read when it is complete."""

import pytest

from jaxscale import config as configs
from jaxscale.run import trainer
from jaxscale.studies.runs import TrainedRun, train_run

TINY = ("data.seq_len=32", "layout.data=8", "run.eval_batches=1", "run.checkpoint_every=2")


@pytest.mark.proof
def test_a_complete_run_is_read(tmp_path, monkeypatch):
    config = configs.load("tiny", [*TINY, "run.steps=3"])
    done = train_run(config, tmp_path / "run")
    assert [one["step"] for one in done.steps] == [1, 2, 3]
    assert list(done.eval_losses) == [3]
    assert done.eval_loss == done.eval_losses[3] > 0
    assert done.step_seconds == sum(one["step_seconds"] for one in done.steps)
    monkeypatch.setattr(trainer, "compile_step", None)  # nothing is trained
    assert train_run(config, tmp_path / "run") == done


def test_a_run_without_a_held_out_loss_has_none():
    with pytest.raises(ValueError, match="no held-out loss; set"):
        _ = TrainedRun([], {}).eval_loss
