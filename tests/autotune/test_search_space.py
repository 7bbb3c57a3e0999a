"""The search space of a measured search is the layouts that the engine accepts, each once."""

import dataclasses
import itertools
import random

import pytest

from jaxscale import config as configs
from jaxscale.autotune.search_space import candidate_of, candidates, layout_of, refusal
from jaxscale.config.layout import Layout
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine

SETTINGS = ("data.global_batch_size=16", "model.num_layers=8")
CONFIG = configs.load("configs/tiny.py", SETTINGS)


@pytest.fixture(scope="module")
def pool():
    return candidates(CONFIG, 8)


@pytest.mark.proof
def test_choices_and_layouts_are_one_to_one(pool):
    layouts = [layout_of(choices, CONFIG.layout, 8) for choices in pool]
    assert [candidate_of(layout) for layout in layouts] == pool
    assert len({str(layout) for layout in layouts}) == len(pool) > 3000
    assert {layout.num_devices for layout in layouts} == {8}


@pytest.mark.proof
@pytest.mark.parametrize(
    ("setting", "value", "where", "otherwise"),
    [
        ("overlap_tensor", True, {"pipeline": 1, "tensor": 4, "tensor_rows": 1}, False),
        ("offload", "optimizer,activations", {"pipeline": 1}, "optimizer"),
        ("context_method", "ulysses", {"context": 2}, "ring"),
    ],
)
def test_a_setting_of_the_config_that_a_candidate_excludes_is_left_out(
    setting, value, where, otherwise, pool
):
    """So that every candidate is a layout, whatever the config's own is; elsewhere it holds."""
    base = Layout(**{setting: value})
    layouts = [layout_of(choices, base, 8) for choices in pool]
    assert [candidate_of(layout) for layout in layouts] == pool
    assert {getattr(layout, setting) for layout in layouts} == {value, otherwise}
    for choices, layout in zip(pool, layouts):
        assert where.items() - choices.items() or getattr(layout, setting) == value


def test_every_mesh_that_divides_is_there_and_no_other(pool):
    """Four heads: eight columns of tensor have nothing to share; two key heads are replicated. Rows
    are no more than columns, and go without ranks of context."""
    axes = ("pipeline", "fsdp", "context", "tensor", "tensor_rows")
    meshes = {tuple(choices[axis] for axis in axes) for choices in pool}
    sizes = (1, 2, 4, 8)
    expected = {
        (p, f, c, t, r)
        for p, f, c, t in itertools.product(sizes, repeat=4)
        for r in (1, 2)
        if 8 % (p * f * c * t) == 0 and t // r <= 4 and (r == 1 or (c == 1 and t >= 4))
    }
    assert meshes == expected


@pytest.mark.proof
def test_the_engine_accepts_what_is_not_refused(pool):
    """Eight that are not refused and four that are: about a quarter of the pool is."""
    shuffled = random.Random(0).sample(pool, 100)
    layouts = [layout_of(choices, CONFIG.layout, 8) for choices in shuffled]
    refused = [layout for layout in layouts if refusal(CONFIG, layout)]
    accepted = [layout for layout in layouts if layout not in refused]
    assert len(accepted) > len(refused) > 3
    for layout in accepted[:8]:
        config = dataclasses.replace(CONFIG, layout=layout)
        assert make_engine(config, make_mesh(layout)).layout == layout
    for layout in refused[:4]:
        config = dataclasses.replace(CONFIG, layout=layout)
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the same words, whichever
            make_engine(config, make_mesh(layout))
        assert str(error.value) == refusal(CONFIG, layout)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (Layout(data=1, tensor=8), "model.num_heads = 4"),
        (Layout(data=8, microbatches=4), "data.global_batch_size = 16 does not split"),
        (Layout(data=4, pipeline=2, schedule="zb_v", microbatches=2), "zb_v needs microbatches"),
        (
            Layout(data=2, pipeline=4, schedule="interleaved", virtual_stages=4, microbatches=4),
            "model.num_layers = 8 is less than the 16 stages",
        ),
        (Layout(data=2, pipeline=4, microbatches=4, remat="keep:4"), "no rank has more passes"),
    ],
)
def test_refusals_say_why(layout, why):
    assert why in refusal(CONFIG, layout)
