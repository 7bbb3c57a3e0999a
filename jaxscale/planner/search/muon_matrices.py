"""The matmuls of Muon's update."""

import math

from jaxscale.config.model import ModelSettings
from jaxscale.config.optimizer import ParamGroup
from jaxscale.planner.memory.at_rest import sides, trained_parameters
from jaxscale.planner.model.parallelism import WholeMatrices
from jaxscale.training.tracing.traces import model_trace

STEPS = 5
"""Steps of the Newton-Schulz iteration (`training.optimizer.MUON_STEPS`)."""


def muon_matrices(
    model: ModelSettings, groups: tuple[ParamGroup, ...]
) -> tuple[WholeMatrices, ...]:
    """The matrices of the layers, with three matmuls per Newton-Schulz step: with s the shorter and
    l the longer side, s s l twice, which tensor ranks share, and s s s, which they repeat."""
    counts = model_trace(model).stack_layers
    found = []
    for array in trained_parameters(model, groups):
        if not (array.in_layers and sides(array)):
            continue
        short, long = sorted(math.prod(side) for side in sides(array))
        of_experts = "experts" in array.axes
        many = STEPS * array.size // (short * long)  # experts, and layers of a period
        found.append(
            WholeMatrices(
                layers=counts[array.part],
                shared_flops=4.0 * many * short * short * long,
                repeated_flops=2.0 * many * short**3,
                of_experts=of_experts,
            )
        )
    return tuple(found)
