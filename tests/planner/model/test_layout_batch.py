"""Formulas of many layouts at once equal the formulas of each."""

import dataclasses
import itertools
import random

import numpy as np
import pytest

from jaxscale.config import Config, from_dict
from jaxscale.config.layout import Layout
from jaxscale.planner.memory.step import step_memory
from jaxscale.planner.model.layout_batch import stack_layouts
from jaxscale.planner.tables.pipeline_slots import layout_buffers, stack_buffers

CONFIG = from_dict(
    {
        "model": {
            "num_layers": 8,
            "d_model": 256,
            "num_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 32,
            "d_ff": 512,
            "vocab_size": 4096,
            "compute_dtype": "bfloat16",
        },
        "data": {"global_batch_size": 64, "seq_len": 256},
    }
)
PAIRED = from_dict(
    {
        "model": {"family": "mt5", "num_encoder_layers": 8, "num_layers": 6, "num_heads": 8},
        "data": {"objective": "span_corruption", "global_batch_size": 64, "seq_len": 256}
        | {"target_len": 128},
    }
)
TEXTS = [
    {"remat": "full"},
    {"remat": "none", "accumulation": "layered"},
    {"remat": "save:query,mlp_up", "offload": "optimizer"},
    {"remat": "offload:query", "offload": "optimizer,activations"},
    {"remat": "save_all_but_attention", "accumulation": "layered", "offload": "activations"},
]
PIPELINES = [
    {"schedule": "1f1b", "remat": "full"},
    {"schedule": "interleaved:fused", "virtual_stages": 2},
    {"schedule": "zb_v", "virtual_stages": 2, "remat": "save_matmuls", "offload": "optimizer"},
]


def sample(options: dict, pipelines: tuple[int, ...], count: int) -> list[Layout]:
    draw = random.Random(str(options))
    every = itertools.product(pipelines, (1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 4), range(4), (4, 8))
    names = ("pipeline", "data", "fsdp", "context", "tensor", "zero_stage", "microbatches")
    return [
        Layout(**dict(zip(names, numbers)), context_method="gather", **options)
        for numbers in draw.sample(list(every), count)
    ]


def check(layouts: list[Layout], optimizer: str, config: Config = CONFIG) -> None:
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, name=optimizer)
    )
    configs = [dataclasses.replace(config, layout=one) for one in layouts]
    buffers = [layout_buffers(one.model, one.data, one.layout) for one in configs]
    together = stack_buffers(buffers, np.arange(len(buffers)))
    many = step_memory(
        config, "cpu", layout=stack_layouts(layouts), own_host=True, buffers=together
    )
    for n, one in enumerate(configs):
        alone = step_memory(one, own_host=True)
        for name, value in vars(alone).items():
            assert np.broadcast_to(getattr(many, name), (len(configs),))[n] == value, name
        assert many.peak[n] == alone.peak


@pytest.mark.proof
@pytest.mark.parametrize("options", TEXTS, ids=str)
def test_many_layouts_are_each_of_them(options):
    check(sample(options, (1,), 60), "muon" if "layered" in options.values() else "adafactor")


@pytest.mark.proof
@pytest.mark.parametrize("options", PIPELINES, ids=str)
def test_many_pipelines_are_each_of_them(options):
    check(sample(options, (2, 4) if options["schedule"] != "zb_v" else (2,), 30), "adamw")
    if options.get("virtual_stages") == 2:
        check(sample(options, (2,), 20), "adamw", PAIRED)


def test_taking_and_stacking():
    layouts = sample(TEXTS[0], (1,), 5)
    many = stack_layouts(layouts)
    assert [many.layout(n) for n in range(5)] == layouts
    assert len(many.take(np.array([True, False, True, False, False]))) == 2
    assert many.take(np.array([3, 1])).layout(1) == layouts[1]
