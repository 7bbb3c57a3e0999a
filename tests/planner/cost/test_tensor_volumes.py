"""Bytes over rows and columns of tensor, against compiled steps, and their seconds."""

import dataclasses

import pytest

from jaxscale.config import load
from jaxscale.config.layout import Layout
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.cost.collectives import axis_levels
from jaxscale.planner.cost.communication import layer_traffic
from jaxscale.planner.cost.tensor_volumes import layer_volumes, step_volumes, stream_collectives
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.search.trainable_model import TrainableModel


@pytest.mark.parametrize(("across", "over_rows", "over_columns"), [(1, 0, 475), (2, 453, 238)])
def test_a_step_sends_what_its_program_does(across, over_rows, over_columns):
    """Llama 2 70B on 64 v5p, as `tools/bench/tensor_rows.py --compile` counted: whole arrays, those
    of all-reduces twice, of which a device sends all but its own share."""
    config = load("llama2_70b", ["data.global_batch_size=64"])
    layout = Layout(data=1, fsdp=8, tensor=8, tensor_rows=across, remat="full")
    found = step_volumes(TrainableModel(config).work, layout, 64)
    assert found.rows == pytest.approx((1 - 1 / across) * over_rows * 1e9, rel=0.01)
    columns = layout.tensor_columns
    assert found.columns == pytest.approx((1 - 1 / columns) * over_columns * 1e9, rel=0.01)


def test_what_is_recomputed_is_sent_again():
    work = TrainableModel(load("llama3_8b")).work
    grid = Layout(data=1, tensor=8, tensor_rows=2)
    each = {
        remat: layer_volumes(work, dataclasses.replace(grid, remat=remat), 1)
        for remat in ("none", "full", "save:mlp_up,mlp_gate,query,key,value", "save:attention_out")
    }
    none, full, inner, joined = each.values()
    assert full.rows > inner.rows == none.rows
    # Four gathers and four scatters; then two gathers more, and a scatter.
    assert full.columns / none.columns == pytest.approx(11 / 8)
    assert joined.columns / none.columns == pytest.approx(10 / 8)


@pytest.mark.parametrize("remat", ["none", "full", "save:query,key", "save:attention_out"])
@pytest.mark.parametrize(
    "sizes", [{"tensor": 8}, {"tensor": 8, "tensor_rows": 2}, {"tensor": 2, "pipeline": 4}]
)
def test_the_seconds_of_a_step_are_those_of_these_bytes(sizes, remat):
    work = dataclasses.replace(TrainableModel(load("llama3_8b")).work, vocab=1)  # nearly no logits
    machine = make_cluster("h100", 8, node_latency_seconds=0.0)
    layout = Layout(data=1, **sizes, remat=remat)
    parallelism = Parallelism.of(layout, 64)
    sent = layer_traffic(work, parallelism, axis_levels(machine, parallelism)).tensor
    rate = machine.tiers[0].bytes_per_second
    assert sum(sent) == pytest.approx(sum(layer_volumes(work, layout, 64)) / rate, rel=0.01)


def test_a_pipelines_recompute_is_a_whole_forward_pass():
    """And its gradients of weights, which are separate operations, gather the stream again."""
    found = {
        remat: sum(stream_collectives(Layout(pipeline=4, tensor=2, remat=remat)))
        for remat in ("none", "keep:2", "full", "save_matmuls")
    }
    assert found == {"none": 10, "keep:2": 14, "full": 14, "save_matmuls": 10}
    assert sum(stream_collectives(Layout(tensor=4, tensor_rows=2))) == 8
