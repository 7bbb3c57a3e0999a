"""The plot of a run's losses."""

from pathlib import Path

from matplotlib.figure import Figure

from jaxscale.run import loss_plot
from tests.run.test_metrics import RECORD


def test_the_picture_of_a_short_run_has_whole_steps(monkeypatch, tmp_path: Path) -> None:
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.extend(figure.axes))
    loss_plot.plot(tmp_path / "loss.png", [RECORD | {"step": step} for step in (1, 2, 3, 4, 5)])
    assert len(drawn) == 2
    assert all(tick == int(tick) for axes in drawn for tick in axes.get_xticks())
    assert {line.get_marker() for axes in drawn for line in axes.lines} == {"None"}
    drawn.clear()
    loss_plot.plot(tmp_path / "loss.png", [RECORD | {"step": 1}])
    assert {line.get_marker() for axes in drawn for line in axes.lines} == {"o"}


def test_smoothed_follows_a_line_and_calms_noise() -> None:
    line = [float(i) for i in range(1000)]
    assert loss_plot.smoothed(line)[100:900] == line[100:900]
    noise = loss_plot.smoothed([1.0, -1.0] * 500)
    assert max(map(abs, noise)) <= 1 / 10
    assert loss_plot.smoothed([2.0, 4.0]) == [2.0, 4.0]
