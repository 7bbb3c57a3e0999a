"""The matmuls of Muon's update."""

import math

from jaxscale.config.model import ModelSettings
from jaxscale.config.optimizer import ParamGroup
from jaxscale.planner.memory.at_rest import sides, trained_parameters
from jaxscale.planner.model.parallelism import WholeMatrices
from jaxscale.training.tracing.traces import model_trace

STEPS = 5
"""Of the Newton-Schulz iteration (`training.optimizer.MUON_STEPS`)."""


def muon_matrices(
    model: ModelSettings, groups: tuple[ParamGroup, ...]
) -> tuple[WholeMatrices, ...]:
    """The matrices of the layers, each step of which has three matmuls: with s the shorter and l
    the longer side, s s l twice, which ranks of tensor share, and s s s, which they repeat."""
    counts = model_trace(model).stack_layers
    found = []
    for array in trained_parameters(model, groups):
        if not (array.in_layers and sides(array)):
            continue
        short, long = sorted(math.prod(side) for side in sides(array))
        of_experts = "experts" in array.axes
        many = STEPS * array.size // (short * long)  # the experts, and layers of a turn
        found.append(
            WholeMatrices(
                layers=counts[array.part],
                shared_flops=4.0 * many * short * short * long,
                repeated_flops=2.0 * many * short**3,
                of_experts=of_experts,
            )
        )
    return tuple(found)
