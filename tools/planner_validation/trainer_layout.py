"""A layout with the trainer that runs it."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxscale.config.layout import MESH_AXES
from jaxscale.planner.cost.state import Placement
from jaxscale.planner.model.parallelism import IMBALANCE, Parallelism
from jaxscale.sharding.model_trace import Ints


@dataclass(frozen=True)
class Trainer(Placement):
    """Properties in which trainers differ for the same layout. The defaults are our engine's.

    With `folded_experts` expert groups consist of the tensor, context and data ranks, and need no
    additional devices (Megatron's parallel folding).
    """

    # Kernels.
    eager: bool = False  # the host launches each kernel
    launch_seconds: float = 8e-6  # per kernel: an eager PyTorch operator takes 5 to 10 us
    blocking: bool = False  # the host waits for each kernel (CUDA_LAUNCH_BLOCKING)
    graph: str = ""  # CUDA graphs: of the "step", or of "modules" but experts
    attention: str = "fused"  # the best kernel; or "flash1", "flash2", "written" (unfused)
    attention_seen: bool = True  # attention skips masked blocks
    fused: bool = True  # elementwise kernels are fused
    loss: str = "compiled"  # fused by the compiler; or one "fused" kernel, or "plain" ones
    dropout: bool = False
    matmul: str = "bfloat16"  # operands of the layers' matmuls; or "fp8", "fp4"
    wide_layers: int = 0  # layers whose matmuls stay in 16 bits anyway
    frozen: bool = False  # only adapters are trained
    # Experts.
    imbalance: float = IMBALANCE  # load imbalance: tokens of the busiest expert rank over the mean
    folded_experts: bool = False  # experts are not split over tensor; see above
    grouped_experts: bool = True  # the matmuls of local experts are one grouped kernel
    plain_experts: bool = False  # biases and activations of experts are separate kernels
    fused_experts: bool = False  # the all-to-all kernel sorts tokens by expert
    merged_dispatch: bool = False  # a token is sent once to each node with experts for it
    masked_dispatch: bool = False  # dispatch by matmuls with one-hot masks (GShard)
    overlap_experts: bool = False  # all-to-alls overlap with compute
    # Tensor ranks, pipelines and state.
    sequence_parallel: bool = True  # tensor ranks split the tokens outside matmuls
    overlap_tensor: bool = False  # tensor collectives overlap with matmuls
    lockstep: bool = True  # pipeline ranks synchronise after each operation
    overlap_pipeline: bool = False  # pipeline sends overlap with compute
    balanced_ends: bool = False  # embedding and head count as layers of their stages
    accumulates: bool = True  # gradient accumulation without a pipeline
    gradient_bytes: int = 4  # per element in reductions
    # Memory.
    gather_params: float = 0.0  # live parameters of ZeRO-3 plus the largest matrix; 0: by layers
    bucket_bytes: float = 0.0  # buffers of bucketed collectives
    context_bytes: float = 1.0e9  # GPU memory of the driver and kernel code


OURS = ("matmul", "gradient_bytes", "frozen", "overlap_tensor")
"""Traits that are also fields of our layouts."""


@dataclass(frozen=True)
class TrainerLayout(Parallelism):
    """A layout of another trainer, whose traits set the fields in `OURS`."""

    traits: Trainer = field(default_factory=Trainer)
    casts_weights: bool = False  # they are in 16 bits between steps
    remat_share: Any = 1.0  # share of layers with the policy; the others save everything
    offload_share: Any = 1.0  # share of layers with offloaded activations, where there are any

    def __post_init__(self) -> None:
        for name in OURS:
            object.__setattr__(self, name, getattr(self.traits, name))

    @property
    def num_devices(self) -> Ints:
        """Devices that the axes need."""
        axes = (axis for axis in MESH_AXES if axis != "expert" or not self.traits.folded_experts)
        return math.prod(np.asarray(getattr(self, axis)) for axis in axes)

    @property
    def zero_ranks(self) -> Ints:
        """Ranks that ZeRO shards over: ranks of expert are not among them."""
        return np.asarray(self.fsdp) * self.context

    @property
    def batch_shards(self) -> Ints:
        """Shards of the global batch; expert ranks have their own tokens."""
        own = 1 if self.traits.folded_experts else self.expert
        return np.asarray(self.data) * self.fsdp * own

    @property
    def imbalance(self) -> Any:
        """As ours, but masked dispatch of all experts computes empty capacity, too."""
        alone = (np.asarray(self.expert) == 1) & (not self.traits.masked_dispatch)
        return np.where(alone, 1.0, self.traits.imbalance)
