"""What is said of a search: words, flags that lead back to the layout, a table, a picture."""

import pytest
from matplotlib.figure import Figure

from jaxscale import config as configs
from jaxscale.autotune import results
from jaxscale.autotune.search import Devices, Trial
from jaxscale.config.layout import Layout

EIGHT = Devices(8, "cpu", "cpu")
PIPED = Layout(pipeline=4, data=1, tensor=2, microbatches=8, schedule="zb_v", virtual_stages=2)
WIDE = Layout(data=2, fsdp=4, microbatches=2, accumulation="layered", remat="full")
TRIALS = [
    Trial(0, WIDE, "measured", step_seconds=0.2, loss=5.5, memory_bytes=3 << 20),
    Trial(1, Layout(data=8), "out of memory", "RESOURCE_EXHAUSTED: 9 GB"),
    Trial(2, PIPED, "measured", step_seconds=0.1, loss=5.5, memory_bytes=2 << 20),
]


@pytest.mark.parametrize("layout", [WIDE, PIPED, Layout(data=8)])
@pytest.mark.parametrize("base", [{}, {"tensor": 2, "overlap_tensor": True, "remat": "full"}])
def test_flags_lead_back_to_the_layout(layout, base):
    own = [f"layout.{name}={value}" for name, value in base.items()]
    flags = results.layout_flags(layout, configs.load("configs/tiny.py", own).layout).split()
    overrides = [flag.removeprefix("--config.") for flag in flags]
    assert configs.load("configs/tiny.py", [*own, *overrides]).layout == layout


def test_a_line_for_each_trial():
    assert "0.2 s  data 2 x fsdp 4" in results.trial_line(TRIALS[0], [], 3)
    assert "best so far" in results.trial_line(TRIALS[2], TRIALS[:2], 3)
    failed = results.trial_line(TRIALS[1], TRIALS[:1], 3)
    assert "2/3  out of memory  data 8: RESOURCE_EXHAUSTED: 9 GB" in failed


def test_the_summary_ranks_and_counts():
    text = results.search_summary(TRIALS, {"tensor": 0.7, "remat": 0.3}, EIGHT, Layout())
    assert "3 trials on 8 x cpu: 2 measured, 1 out of memory" in text
    assert text.index("0.1 ") < text.index("0.2 ")
    assert "tensor  70%" in text
    assert text.endswith(results.layout_flags(PIPED, Layout()))
    nothing = results.search_summary(TRIALS[1:2], {}, EIGHT, Layout())
    assert "no layout could be measured; see the messages above" in nothing
    late = results.search_summary(
        [Trial(0, WIDE, "timed out", "not finished")], {}, EIGHT, Layout()
    )
    assert "all timed out: raise --trial_seconds" in late


@pytest.mark.proof
def test_the_picture(tmp_path):
    for name, trials, shares in (("a", TRIALS, {"tensor": 1.0}), ("b", TRIALS[1:2], {})):
        path = tmp_path / f"{name}.png"
        results.save_png(path, trials, shares)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_trials_are_counted_in_whole_numbers():
    axes = Figure().subplots()
    results._history(axes, TRIALS)
    assert all(tick == int(tick) for tick in axes.get_xticks())
