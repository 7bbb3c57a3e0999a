"""FLOPs of a step per token, the numerators of MFU and HFU, from a model's recorded work."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxscale.config import Config
from jaxscale.training.tracing.traces import model_work


class StepFlops(NamedTuple):
    """FLOPs of a token, forward and backward."""

    model: float  # without recomputation
    hardware: float  # with recomputation


def step_flops(
    config: Config, recomputed: float = 0.0, make: Callable[[Any, Any], Any] | None = None
) -> StepFlops:
    """The FLOPs of a token in a step.

    Args:
      recomputed: in a pipeline whose schedule has recompute operations, the share of passes that
        are recomputed (`PipelineStages.recomputed`), each as whole layers.
      make: the function that makes the model; None: by `model.family`.
    """
    data = config.data
    work = model_work(config.model, data.seq_len, data.output_len, make)
    tokens = data.tokens_per_step / data.global_batch_size
    hardware = work.hardware_flops(config.layout.remat, recomputed)
    return StepFlops(work.training_flops / tokens, hardware / tokens)
