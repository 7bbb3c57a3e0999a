"""A layout's sizes: what is left over, what does not fit, what this version does not have."""

import dataclasses
import itertools
import math
import re

import pytest

from jaxscale import config
from jaxscale.config.layout import MANUAL_AXES, MESH_AXES, Layout, resolve_sizes
from jaxscale.config.remat_policy import BLOCK_TENSORS, RematPolicy
from jaxscale.config.schedule_spec import ScheduleSpec
from jaxscale.pipeline.stages import open_stages
from jaxscale.planner.search.space import check_fields


def test_the_mesh_axes_are_the_fields_of_a_layout_in_order():
    names = [field.name for field in dataclasses.fields(Layout)]
    assert tuple(names[: len(MESH_AXES)]) == MESH_AXES
    assert set(MANUAL_AXES) < set(MESH_AXES)


@pytest.mark.parametrize("free", ["data", "fsdp", "tensor"])
@pytest.mark.parametrize(("first", "second"), list(itertools.product([1, 2, 4], [1, 2, 3])))
def test_the_free_axis_takes_what_is_left(free, first, second):
    fixed = [axis for axis in ("data", "fsdp", "tensor") if axis != free]
    layout = Layout(**{"data": 1, free: -1, fixed[0]: first, fixed[1]: second})
    for left in (1, 5):
        resolved = resolve_sizes(layout, first * second * left)
        assert getattr(resolved, free) == left
        assert resolved.num_devices == math.prod(resolved.sizes.values()) == first * second * left
        assert resolve_sizes(resolved, resolved.num_devices) == resolved


def test_a_resolved_layout_splits_the_batch_over_data_and_fsdp():
    assert resolve_sizes(Layout(fsdp=2, tensor=2), 8).batch_shards == 4


@pytest.mark.parametrize(
    ("layout", "devices", "fragment"),
    [
        (Layout(fsdp=3), 8, "the layout (fsdp 3) needs a multiple of 3 devices and there are 8"),
        (Layout(data=1, fsdp=-1, tensor=16), 8, "needs a multiple of 16 devices and there are 8"),
        (Layout(data=2, fsdp=2), 8, "(data 2 x fsdp 2) needs 4 devices and there are 8"),
        (Layout(data=4, tensor=4), 8, "needs 16 devices and there are 8"),
        (Layout(data=1), 8, "(every axis 1) needs 1 devices and there are 8"),
    ],
)
def test_sizes_that_do_not_multiply_to_the_devices_are_refused(layout, devices, fragment):
    with pytest.raises(ValueError, match=re.escape(fragment)):
        resolve_sizes(layout, devices)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"data": 8 / 2}, "layout.data = 4.0 is not a whole number"),
        ({"tensor": "8"}, "layout.tensor = '8' is not a whole number"),
        ({"tensor_rows": "2"}, "layout.tensor_rows = '2' is not a whole number"),
        ({"zero_stage": True}, "layout.zero_stage = True is not a whole number"),
        ({"remat": None}, "layout.remat is of type NoneType; give text, such as 'none'"),
        ({"schedule": 1}, "layout.schedule is of type int; give text, such as '1f1b'"),
        ({"unroll_layers": "yes"}, "layout.unroll_layers is of type str; give True or False"),
    ],
)
def test_a_setting_of_another_type_is_refused(setting, said):
    """As a script or a pin of the planner may have it."""
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        Layout(**setting)
    with pytest.raises(ValueError, match=re.escape(said)):
        check_fields(setting, "--pin")


def test_a_layout_that_is_left_to_the_planner(tmp_path):
    path = tmp_path / "auto.py"
    path.write_text(
        "import ml_collections\n\n"
        "def get_config():\n"
        "    return ml_collections.ConfigDict({'layout': 'auto'})\n"
    )
    assert config.load(str(path)).layout.auto
    left = config.load("configs/tiny.py", ["layout=auto", "layout.tensor=2"]).layout
    assert (left.auto, left.tensor) == (True, 2)
    with pytest.raises(ValueError, match="layout = 'auto' is chosen when a run starts; here set"):
        resolve_sizes(left, 8)


@pytest.mark.parametrize(
    ("layout", "fragment"),
    [
        ({"remat": "keep:4"}, "layout.pipeline = 1; set layout.remat = 'full'"),
        ({"pipeline": 2, "remat": "keep:0"}, "write keep:NUMBER, such as keep:4"),
        ({"pipeline": 2, "remat": "keep:all"}, "write keep:NUMBER, such as keep:4"),
        ({"pipeline": 2, "remat": "kep:2"}, "did you mean 'keep'?"),
    ],
)
def test_passes_that_cannot_be_kept_are_refused(layout, fragment):
    with pytest.raises(ValueError, match=re.escape(fragment)):
        Layout(**layout)


def test_a_pipeline_that_would_keep_all_passes_is_refused():
    layout = Layout(pipeline=4, data=1, microbatches=8, remat="keep:4")
    with pytest.raises(ValueError, match=r"layout.remat = 'keep:4': .* has more passes in flight"):
        open_stages(layout, 8)


@pytest.mark.parametrize(
    ("remat", "policy"),
    [
        ("none", RematPolicy("none", BLOCK_TENSORS)),
        ("full", RematPolicy("full", (), 0)),
        ("keep:4", RematPolicy("keep", (), 4)),
        ("save:query, key", RematPolicy("save", ("query", "key"))),
        ("offload:mlp_up", RematPolicy("offload", ("mlp_up",))),
    ],
)
def test_what_a_remat_policy_says(remat, policy):
    layout = Layout(pipeline=1 if policy.offloads else 2, remat=remat)
    assert (layout.remat, layout.remat_policy) == (remat, policy)
    assert policy.by_names == (remat != "none")


@pytest.mark.parametrize(
    ("schedule", "spec"),
    [
        ("1f1b", ScheduleSpec("1f1b")),
        ("1f1b:fused:3,2", ScheduleSpec("1f1b", True, (3, 2))),
        ("runs/a.csv:3,2", ScheduleSpec("runs/a.csv", False, (3, 2))),
        ("mine.schedules:BEST:fused", ScheduleSpec("mine.schedules:BEST", True)),
    ],
)
def test_what_a_schedule_says(schedule, spec):
    layout = Layout(pipeline=2, schedule=schedule)
    assert (layout.schedule, layout.schedule_spec, str(spec)) == (schedule, spec, schedule)
