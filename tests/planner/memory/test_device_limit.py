"""A step predicted out of memory is refused before it is compiled, with a layout that fits."""

import dataclasses
import re

import pytest

from jaxscale import config as configs
from jaxscale.config.layout import resolve_sizes
from jaxscale.planner.memory.device_limit import MARGIN, check_device_limit
from jaxscale.planner.memory.step import step_memory


def on(devices: int, name: str = "llama3_8b") -> configs.Config:
    config = configs.load(name)
    return dataclasses.replace(config, layout=resolve_sizes(config.layout, devices))


def test_micro_batches_that_were_sized_for_more_devices_are_refused_with_those_that_fit():
    check_device_limit(on(64), "gpu", 68e9, "an H100")
    config = on(8)
    with pytest.raises(ValueError, match="--skip_memory_check") as refused:
        check_device_limit(config, "gpu", 68e9, "an H100")
    said = str(refused.value)
    assert "layout.microbatches = 4 puts 16 sequences of 8192 tokens in a pass" in said
    assert "\n" not in said
    found = re.search(r"set layout.microbatches = (\d+)", said)
    assert found
    layout = dataclasses.replace(config.layout, microbatches=int(found[1]))
    fits = dataclasses.replace(config, layout=layout)
    check_device_limit(fits, "gpu", 68e9, "an H100")
    # The smallest number that fits.
    layout = dataclasses.replace(config.layout, microbatches=int(found[1]) // 2)
    fewer = step_memory(dataclasses.replace(config, layout=layout), "gpu", own_host=True)
    assert fewer.peak > 68e9


def test_what_may_fit_is_tried():
    config = on(8)
    peak = step_memory(config, "gpu", own_host=True).peak
    check_device_limit(config, "gpu", peak / (MARGIN - 0.01), "a GPU")
    with pytest.raises(ValueError, match="a program may use"):
        check_device_limit(config, "gpu", peak / (MARGIN + 0.01), "a GPU")


@pytest.mark.proof
def test_rows_that_experts_may_receive_are_counted_and_fewer_ranks_named():
    config = on(2048, "deepseek_v3")
    check_device_limit(config, "gpu", 70e9, "an H100")
    many = dataclasses.replace(config.layout, expert=64, fsdp=8)
    with pytest.raises(ValueError, match="no number of micro-batches fits") as refused:
        check_device_limit(dataclasses.replace(config, layout=many), "gpu", 70e9, "an H100")
    said = str(refused.value)
    # 64 ranks, of whose 4 experts each token may choose all; 4,096 tokens of 7,168 features.
    assert "layout.expert = 64 a rank allocates 256 rows for each of its tokens" in said
    assert f"{2 * 256 * 4096 * 7168 / 1e9:.2f} GB an array" in said
    assert (config.layout.expert, config.layout.fsdp) == (8, 64)
    assert "set layout.expert = 8 and layout.fsdp = 64, with" in said


def test_a_model_that_no_micro_batch_makes_fit_is_sent_to_the_planner():
    with pytest.raises(ValueError, match=r"no number of micro-batches fits: python -m jaxscale\.p"):
        check_device_limit(on(8, "llama2_70b"), "tpu", 16e9, "a TPU v5e")
