"""Every optimizer gives the losses, norms and parameters of one device, also while it prunes; those
with statistics of whole matrices in an uneven pipeline, too."""

import numpy as np
import pytest

from jaxscale.compiled import flops as hlo_cost
from jaxscale.compiled import hlo
from jaxscale.planner.cost.state import update_flops
from jaxscale.planner.search.trainable_model import TrainableModel
from tests.invariants.layouts import (
    LLAMA,
    compile_step,
    initial_state,
    make_config,
    open_engine,
    relative_error,
    run,
)
from tests.invariants.test_layouts import INVOLUNTARY
from tests.invariants.test_pipeline import in_order, on_ranks

SHARED = {"data": 2, "fsdp": 2, "tensor": 2, "zero_stage": 2}
# Rows that fill up a stack belong to no statistic; Lion has none.
UNEVEN = {"pipeline": 3, "schedule": "1f1b:1,2,1", "microbatches": 4, "fsdp": 2, "zero_stage": 2}
# Two layers for each rank of data and fsdp: of an only one XLA keeps no names of the matmuls.
SPARSE = {
    "adafactor": {"sparsity": 0.7, "sparsity_begin": 1, "sparsity_steps": 3, "mup_base_width": 16},
    "muon": {
        **{"sparsity": 0.5, "sparsity_steps": 4, "sparsity_pattern": "2:4"},
        "mup_base_width": 32,
    },
}
"""Its counts are of whole matrices, too; muP scales rates and initial values by parameter."""
EIGHT, UNEVEN_EIGHT = LLAMA | {"num_layers": 8}, UNEVEN | {"schedule": "1f1b:2,4,2"}


# Lion's update is of each element by itself, as AdamW's is in every layout of `test_layouts`.
@pytest.mark.compiles
@pytest.mark.proof
@pytest.mark.parametrize(
    "optimizer", ["adafactor", pytest.param("lion", marks=pytest.mark.slow), "muon"]
)
def test_every_optimizer_is_one_device_in_float64(optimizer, capfd):
    model, uneven = (EIGHT, UNEVEN_EIGHT) if optimizer == "muon" else (LLAMA, UNEVEN)
    settings = {"name": optimizer, **SPARSE.get(optimizer, {})}

    def train(**layout):
        engine = open_engine(make_config(model, layout, **settings))
        step = compile_step(engine)
        state = None
        if "pipeline" in layout:
            state = on_ranks(engine, initial_state(make_config(model, {}, **settings)))
        return engine, step, run(engine, state, step=step)

    _, step, one = train()
    for layout in (SHARED, uneven)[: 1 if optimizer == "lion" else 2]:
        engine, sharded, got = train(**layout)
        np.testing.assert_allclose(got.losses, one.losses, rtol=1e-10, atol=0)
        np.testing.assert_allclose(got.norms, one.norms, rtol=1e-10, atol=0)
        params = in_order(engine, got.params) if layout is uneven else got.params
        assert relative_error(params, one.params) < 1e-10
        if layout is SHARED:
            check_update(engine, optimizer_flops(sharded), optimizer_flops(step))
    assert INVOLUNTARY not in capfd.readouterr().err


def check_update(engine, counted, alone):
    """The FLOPs of a rank's update, beside those of one device."""
    planned = update_flops(TrainableModel(engine.config).parallelism(engine.layout))
    # XLA shares a little more over tensor than the two larger products.
    assert counted <= planned <= 1.06 * counted
    # Each rank of data and fsdp has a quarter of Muon's layers; those of tensor share the larger of
    # its matmuls. Other rules have no matmuls.
    assert counted <= alone / 6


def optimizer_flops(step):
    """Of the matmuls in a compiled step's update, on one device."""
    program = hlo.parse_hlo(step.as_text())

    def own(instruction, named):
        count = hlo_cost.instruction_flops(instruction, named)
        return 0.0 if count is not None and "/optimizer/" not in instruction.op_name else count

    return hlo_cost.computation_costs(program, own)[program.entry]
