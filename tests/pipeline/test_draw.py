"""Drawings. The timelines of the papers as text are in pipeline_schedules/test_shipped."""

import matplotlib.image
import pytest

from jaxscale.pipeline import draw
from jaxscale.pipeline.orders import make_order
from jaxscale.pipeline.simulator import Costs, simulate
from jaxscale.pipeline.table import compile_order
from jaxscale.pipeline_schedules.operations import NOP, B, F, R, W, X


def run(name, *numbers, costs=Costs(), **options):  # noqa: B008
    table = compile_order(make_order(name, *numbers, **options))
    return table, simulate(table, costs)


def test_cells_are_as_wide_as_the_longest_label():
    table, got = run("1f1b", 1, 11, fused=True)
    text = draw.timeline_text(table, got.start, got.duration)
    assert text.startswith("rank 0 |F0 X0 ===F1 X1 ===")
    assert text.endswith("F10X10===|")


def test_uneven_costs_are_drawn_to_scale():
    table, got = run("1f1b", 1, 1, costs=Costs(f=1, b=2.5, w=1.5))
    assert draw.timeline_text(table, got.start, got.duration) == "rank 0 |F0b0===w0=|"


def test_operations_that_cost_nothing_take_no_space():
    table, got = run("1f1b", 1, 2, costs=Costs(f=1, b=1, w=0))
    assert draw.timeline_text(table, got.start, got.duration) == "rank 0 |F0b0F1b1|"


def test_long_timelines_fold_without_losing_a_cell():
    table, got = run("interleaved", 4, 8, 2)
    whole = draw.timeline_text(table, got.start, got.duration)
    folded = draw.timeline_text(table, got.start, got.duration, columns=60)
    blocks = [block.splitlines() for block in folded.split("\n\n")]
    assert len(blocks) > 1
    assert max(map(len, folded.splitlines())) <= 60
    for rank, line in enumerate(whole.splitlines()):
        parts = [block[rank].partition("|")[2].removesuffix("|") for block in blocks]
        assert "".join(parts) == line.partition("|")[2].removesuffix("|")


def count_pixels(path):
    """How many pixels are of the colour of each kind, and of idle time (NOP)."""
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)
    return {
        kind: (pixels == [int(color[at : at + 2], 16) for at in (1, 3, 5)]).all(axis=-1).sum()
        for kind, color in {**draw.COLORS, NOP: draw.IDLE}.items()
    }


@pytest.mark.proof
def test_areas_in_the_picture_are_times(tmp_path):
    table, got = run("1f1b", 4, 16, costs=Costs(r=1), keep=0)
    draw.write_png(str(tmp_path / "a.png"), table, got, "1f1b")
    count = count_pixels(tmp_path / "a.png")
    # Numbers and white edges cover a little of what is not idle.
    for kind in (R, B, W):
        assert count[kind] / count[F] == pytest.approx(1, rel=0.05)
    assert count[NOP] / count[F] == pytest.approx((got.makespan - 4 * 16) / 16, rel=0.25)
    assert count[X] == 0


def test_directions_and_chunks_have_their_own_shades(tmp_path):
    table, got = run("bitpipe", 4, 8, fused=True)
    draw.write_png(str(tmp_path / "b.png"), table, got, "bitpipe")
    count = count_pixels(tmp_path / "b.png")
    # Only the first chunk of the first direction has the plain colours: a quarter of the time.
    assert count[X] / count[NOP] == pytest.approx(8 * 2 / 4 / (got.makespan - 8 * 3), rel=0.3)
    assert count[B] == count[W] == 0
