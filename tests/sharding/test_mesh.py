"""Which axes go over the network between slices."""

import pytest

from jaxscale.compiled.compile_ahead import compile_for
from jaxscale.compiled.topology import open_topology
from jaxscale.config import from_dict
from jaxscale.config.layout import Layout
from jaxscale.sharding.mesh import axes_between_slices, over_slices
from jaxscale.training.tracing.traces import model_trace
from tests.compiled.test_topology import NEEDS_TPU

pytestmark = pytest.mark.compiles


def test_the_first_axes_go_over_slices():
    assert over_slices({"data": 4, "fsdp": 16, "tensor": 2}, 8) == [4, 2, 1]
    assert over_slices({"pipeline": 2, "data": 4, "tensor": 2}, 2) == [2, 1, 1]
    with pytest.raises(ValueError, match=r"fsdp 4 .* 3 slices.*layout.data = 3"):
        over_slices({"fsdp": 4, "tensor": 1}, 3)


@pytest.mark.proof
@NEEDS_TPU
def test_two_slices_sum_gradients_over_the_network():
    """What every rank sends to its like in the other slice: its shards of the gradients."""
    machine = open_topology("v5e:2x2:2")
    layout = Layout(data=2, fsdp=4)
    assert axes_between_slices(layout, machine.devices) == ("data",)
    config = from_dict(
        {
            "model": {
                "num_layers": 2,
                "d_model": 512,
                "num_heads": 4,
                "num_kv_heads": 4,
                "head_dim": 128,
                "d_ff": 1024,
                "vocab_size": 257,
                "attention": "blockwise",
            },
            "data": {"global_batch_size": 8, "seq_len": 128},
            "layout": {"data": 2, "fsdp": 4},
        }
    )
    report = compile_for(config, machine)
    sums = [one for one in report.collectives if one.axes == ("data",)]
    assert {one.kind for one in sums} == {"all-reduce"}
    num_bytes = sum(one.num_bytes for one in sums)
    assert num_bytes == pytest.approx(model_trace(config.model).num_params, rel=0.02)
