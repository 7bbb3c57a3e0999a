"""The attention kernel that `auto` takes for each shipped configuration and family, by platform."""

import pytest

from jaxscale import config as configs
from jaxscale.config import Config, DataConfig
from jaxscale.config.layout import Layout
from jaxscale.config.model import ModelConfig
from jaxscale.model_families.shipped import FAMILIES
from jaxscale.training.kernels import attention_name
from tests.model_families.test_shipped import PUBLISHED

KERNELS = {"gpu": {"cudnn", "flash"}, "tpu": {"splash"}}
"""v5p is a "tpu", h200 a "gpu"."""

FLOAT32 = "computes in float32, a run for CPUs"

PLAIN = {
    ("gpu", "bench_8x256"): FLOAT32,
    ("gpu", "dense_tiny"): FLOAT32,
    ("gpu", "moe_tiny"): FLOAT32,
    ("gpu", "quickstart"): FLOAT32,
    ("gpu", "quickstart_pipeline"): FLOAT32,
    ("gpu", "tiny"): FLOAT32,
}
"""Platform, and configuration, of any size, or family -> why it gets attention in plain JAX."""


def published(family):
    """A run of a family's published model."""
    model = ModelConfig(family=family, **PUBLISHED[family][0])
    if model.num_encoder_layers:
        data = DataConfig(objective="span_corruption", seq_len=1024, target_len=256)
    else:
        seq_len = min(4096, model.max_seq_len or 4096)
        data = DataConfig(objective="causal" if model.causal else "masked", seq_len=seq_len)
    return Config(model=model, data=data)


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("platform", KERNELS)
def test_auto_takes_a_kernel_but_where_the_list_says_why_not(platform, context):
    runs = {name: configs.load(name) for name in configs.shipped_configs()}
    runs |= {f"{family}, published": published(family) for family in FAMILIES}
    layout = Layout(context=context)
    taken = {
        name: attention_name(layout, run.model, run.data, platform) for name, run in runs.items()
    }
    plain = {name for name, kernel in taken.items() if kernel not in KERNELS[platform]}
    where = (platform, f"{platform}, context {context}")
    expected = {
        name for name in runs for of, start in PLAIN if of in where and name.startswith(start)
    }
    assert plain == expected
    assert {taken[name] for name in plain} <= {"blockwise"}
