"""Pictures of layouts show the shards that the devices have, and name what they show."""

import dataclasses

import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale import config as configs
from jaxscale.compiled.collectives import KINDS
from jaxscale.config.layout import Layout
from jaxscale.planner.memory.terms import GROUPS
from jaxscale.planner.plan_layouts import plan_layouts
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine
from tools.notebooks import plots

BARS = plots.step_time_figure, plots.memory_figure


def engine_of(*overrides, config="tiny"):
    config = configs.load(config, overrides)
    return make_engine(config, make_mesh(config.layout))


def area(sharding, shape, dims):
    """Of what is coloured, for each device: the share of the array that it holds."""
    places = sharding.devices_indices_map(shape).values()
    for place in places:
        spans = tuple(part.indices(size)[:2] for part, size in zip(place, shape))
        boxes = plots._boxes(spans, shape, dims)
        assert all(
            x >= 0 and y >= 0 and x + w <= 1.0001 and y + h <= 1.0001 for x, y, w, h in boxes
        )
        yield sum(w * h for _, _, w, h in boxes)


@pytest.mark.parametrize("spec", [(), ("data", "tensor"), (None, "fsdp", "tensor"), ("fsdp",)])
def test_the_coloured_part_is_the_shard(spec):
    mesh = make_mesh(Layout(data=2, fsdp=2, tensor=2))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    shape = (4, 8, 6)
    share = np.prod(sharding.shard_shape(shape)) / np.prod(shape)
    flat = [(None, None, 1, 0), (None, None, 0, 1)] if len(spec) < 3 else []
    for dims in ((0, None, 1, 2), (None, 0, 1, 2), (None, 1, 0, 2), *flat):
        assert list(area(sharding, shape, dims)) == pytest.approx([share] * 8)


@pytest.mark.proof
def test_a_row_of_tiles_for_each_layout():
    engines = {
        "a": engine_of("layout.data=1", "layout.fsdp=8"),
        "b": engine_of("layout.data=8", "layout.zero_stage=0"),
    }
    figure = plots.placement_figure(engines)
    words = [panel.get_xlabel() for panel in figure.axes]
    assert [panel.get_title() for panel in figure.axes[:4]] == list(plots.HELD)
    assert sum("1/8" in word for word in words) == 5  # all four of a, the batch of b
    assert sum("whole" in word for word in words) == 3
    (empty,) = {len(panel.patches) for panel in figure.axes[4:5]}
    assert empty == 8 * (2 + 2)  # a square and its edge, a box for each of two layers


@pytest.mark.proof
def test_an_optimizer_without_moments_has_no_squares():
    config = configs.load("tiny", ["layout.data=8"])
    engine = make_engine(config, make_mesh(config.layout), optimizer=optax.sgd(1e-3))
    panels = plots.placement_figure({"a": engine}).axes
    assert [panel.axison for panel in panels] == [True, True, False, True]


SMALL = ["model.vocab_size=512", "model.num_layers=2", "data.global_batch_size=16"]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("config", "overrides", "parameter"),
    [
        ("moe_tiny", ["layout.data=1", "layout.expert=2"], ("layers", "mlp", "up")),
        (
            "mt5_small",
            ["layout.data=2", "layout.microbatches=1", "model.num_encoder_layers=2"],
            ("decoder", "cross", "out"),
        ),
    ],
)
def test_the_shard_of_every_parameter_is_shown(config, overrides, parameter):
    """Of experts, of heads, of vectors, and of the moments of an optimizer without one for each
    element."""
    sizes = ["layout.fsdp=2", "layout.tensor=2", "model.num_heads=8", "model.num_kv_heads=8"]
    engine = engine_of(*SMALL, *sizes, *overrides, config=config)
    state, names = engine.abstract_state, engine.state_axes
    for tree, axes in ((state.params, names.params), (state.opt_state, names.opt_state)):
        for name, leaf, logical in plots._leaves(tree, axes):
            dims = plots._dims(logical, engine.zero.rules)
            shard = np.prod(leaf.sharding.shard_shape(leaf.shape))
            share = shard / np.prod(leaf.shape)
            assert list(area(leaf.sharding, leaf.shape, dims)) == pytest.approx([share] * 8), name
    (panels,) = [plots.placement_figure({"a": engine}, parameter).axes]
    ranks = 8 if config == "moe_tiny" else 4
    assert panels[0].get_xlabel().endswith(f"each, 1/{ranks}")
    with pytest.raises(ValueError, match=r"parameter = \('embed',\) .*/up.*; pass the parts of a"):
        plots.placement_figure({"a": engine}, ("embed",))


class Compiled:
    """A step that is nothing but a collective of each kind, of 1,000 floats."""

    def as_text(self):
        pairs, groups = "source_target_pairs={{0,1}}", "replica_groups={{0,1,2,3,4,5,6,7}}"
        lines = [
            f"  %y{n} = f32[{125 if kind == 'reduce-scatter' else 1000}]{{0}} {kind}(%x, %x), "
            f"{pairs if kind == 'collective-permute' else groups}"
            for n, kind in enumerate(KINDS)
        ]
        entry = "ENTRY %main (x: f32[1000]) -> f32[1000] {"
        return "\n".join([entry, "  %x = f32[1000]{0} parameter(0)", *lines, "}"])


def test_a_bar_of_traffic_has_every_kind_of_collective():
    figure = plots.traffic_figure({"a": engine_of("layout.data=8")}, {"a": Compiled()})
    (panel,) = figure.axes
    assert panel.get_legend_handles_labels()[1] == list(KINDS)
    bars: list = list(panel.patches)
    assert [bar.get_width() for bar in bars] == pytest.approx([0.004] * len(KINDS))
    assert len({bar.get_facecolor() for bar in bars}) == len(KINDS)
    assert panel.texts[0].get_text().strip() == "0.024 MB"


class Silent:
    """The step of one device."""

    def as_text(self):
        return "ENTRY %main (x: f32[8]) -> f32[8] {\n  ROOT %x = f32[8]{0} parameter(0)\n}"


def test_a_step_that_sends_nothing_has_a_row():
    engine = engine_of("layout.data=8")
    (panel,) = plots.traffic_figure({"a": engine, "b": engine}, dict.fromkeys("ab", Silent())).axes
    assert [text.get_text().strip() for text in panel.texts] == ["nothing"] * 2
    assert [text.get_text() for text in panel.get_yticklabels()] == ["b", "a"]
    assert panel.get_xlim()[1] > 1


@pytest.mark.parametrize(
    ("figure", "arguments"),
    [
        (plots.placement_figure, ({},)),
        (plots.traffic_figure, ({}, {})),
        (plots.loss_figure, ({},)),
        (plots.step_time_figure, ({},)),
        (plots.memory_figure, ({},)),
    ],
)
def test_a_figure_of_nothing_is_refused(figure, arguments):
    """As after a cell that failed before it had filled them."""
    with pytest.raises(ValueError, match="is empty; pass at least one entry"):
        figure(*arguments)


def test_losses_and_plans_are_labelled(tmp_path):
    figure = plots.loss_figure({"one": [3.0, 2.0], "two": [3.0, 2.000001]})
    assert next(text.get_text() for text in figure.axes[1].texts) == "5.0e-07"
    for curves in (
        {"one": [3.0] * 300, "two": [3.3] * 300},  # as in bfloat16, or not
        {"one": [np.nan, np.nan], "two": [np.nan, np.nan]},
        {"one": [3.0, 2.0]},
    ):
        figure = plots.loss_figure(curves)
        figure.canvas.draw()
        left, right = figure.axes
        assert len(left.get_xticks()) < 12
        assert right.get_visible() == (len(curves) > 1)
        bars: list = list(right.patches)
        for bar, text in zip(bars, right.texts):
            assert not text.get_position()[0] <= bar.get_width()  # next to it
            assert not bar.get_width() > right.get_xlim()[1]
    answer = plan_layouts("llama2_7b", "H100-SXM", 8, top=1, pins={"pipeline": 1, "tensor": 1})
    (best,) = answer.plans
    for draw, unit in zip(BARS, ("seconds", "GB")):
        figure = draw({"best": best})
        assert unit in figure.axes[0].get_xlabel()
        figure.savefig(tmp_path / "a.png")
    larger = dataclasses.replace(best, limit_bytes=2 * best.limit_bytes)
    figure = plots.memory_figure({"one": best, "another": larger})
    lines: list = list(figure.axes[0].collections)
    limits = [line.get_segments()[0][0][0] for line in lines]
    assert limits == pytest.approx([best.limit_bytes / 1e9, larger.limit_bytes / 1e9])
    bars: list = list(plots.step_time_figure({"b": best}).axes[0].patches)
    widths = sum(bar.get_width() for bar in bars)
    assert widths == pytest.approx(best.step_seconds, rel=0.01)


@pytest.mark.proof
def test_every_term_of_a_plan_has_a_colour():
    best = plan_layouts("configs/tiny.py", "H100-SXM", 8, top=1).plans[0]
    labels = [draw({"tiny": best}).axes[0].texts[0].get_text().split() for draw in BARS]
    assert [unit for _, unit in labels] == ["s", "GB"]
    assert float(labels[0][0]) == pytest.approx(best.step_seconds, rel=0.01)  # of a millisecond
    assert float(labels[1][0]) == pytest.approx(best.memory_bytes / 1e9, rel=0.01)
    named = {name for _, names in plots.SECONDS.values() for name in names}
    assert set(best.seconds.terms) == named
    assert set(plots.BYTES) == set(GROUPS.values())
