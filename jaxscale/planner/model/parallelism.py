"""How a model is spread over devices, as the planner sees it: one layout, or arrays of them."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxscale.layout import MESH_AXES, kept_passes, parse_schedule

Ints = Any  # an int, or int [N]; those of one Choice broadcast


@dataclass(frozen=True)
class TrainerTraits:
    """By what trainers differ that walk the same layout. The defaults are this package's engine.

    With `folded_experts` the expert axis is made of the ranks of tensor, context and data, and
    takes no devices of its own (Megatron).
    """

    lockstep: bool = True  # ranks of a pipeline meet after each operation
    sequence_parallel: bool = True  # ranks of tensor share out the tokens between products
    attention: str = "fused"  # the vendor's best kernel; or "flash1", "flash2", "written" scores
    eager: bool = False  # the host launches each kernel
    launch_seconds: float = 8e-6  # of that: an eager operator takes PyTorch 5 to 10 us
    blocking: bool = False  # and waits for it to end (CUDA_LAUNCH_BLOCKING)
    fused: bool = True  # elementwise work is fused with its neighbours
    loss: str = "compiled"  # with its neighbours; or one "fused" kernel, or "plain"
    dropout: bool = False
    overlap_gradients: bool = True  # reduced beside the backward pass
    overlap_parameters: bool = True  # gathered beside computation
    overlap_tensor: bool = False  # collectives of tensor run beside their products
    overlap_pipeline: bool = False  # messages of the pipeline travel beside computation
    overlap_experts: bool = False  # all-to-alls run beside computation
    gather_params: float = 0.0  # beside its largest matrix, that ZeRO-3 gathers; 0 is by layers
    keep_gathered: bool = False  # ZeRO-3 gathers once for both passes
    reduce_each: bool = True  # ZeRO-2 and 3 reduce after each micro-batch, not once a step
    matmul: str = "bfloat16"  # or "fp8", "fp4": operands of the layers' products
    wide_layers: int = 0  # whose products stay in 16 bits where the others' operands do not
    gradient_bytes: int = 4  # of an element that is reduced
    attention_seen: bool = True  # attention skips keys that the mask hides
    merged_dispatch: bool = False  # a token goes once to each node that has experts for it
    grouped_experts: bool = True  # the products of a device's experts are one kernel
    fused_experts: bool = False  # the exchange sorts tokens by expert
    masked_dispatch: bool = False  # tokens go to places of experts by products with a mask
    plain_experts: bool = False  # their biases and activations are kernels of their own
    folded_experts: bool = False  # and an expert is not split over tensor
    context_bytes: float = 1.0e9  # of a GPU's memory, that the driver and kernels' code take
    bucket_bytes: float = 0.0  # that collectives are collected in
    imbalance: float = 1.2  # tokens of the busiest expert rank over the mean
    frozen: bool = False  # weights are not trained, only small adapters beside them
    balanced_ends: bool = False  # layers are dealt so that embedding and head count as layers
    scattered_messages: bool = True  # the ranks of tensor share a pipeline's message
    accumulates: bool = True  # a step can have several micro-batches without a pipeline
    graph: str = ""  # launches that are recorded once: of the "step", or of "modules" but experts


JAXSCALE = TrainerTraits()


@dataclass(frozen=True)
class Parallelism:
    """One layout, or N: every number may be an int array [N]; texts are common to all."""

    pipeline: Ints = 1
    data: Ints = 1
    fsdp: Ints = 1
    expert: Ints = 1
    context: Ints = 1
    tensor: Ints = 1
    zero_stage: Ints = 3
    microbatch: Ints = 1  # sequences of one micro-batch on one shard of the batch
    microbatches: Ints = 1  # a step
    virtual_stages: Ints = 1
    sequence_chunks: Ints = 1
    schedule: str = "1f1b"
    fused: bool = False  # the backward pass is one operation
    remat: str = "none"
    remat_share: Any = 1.0  # of the layers, that the policy is for; the others keep everything
    offload: str = "none"
    accumulation: str = "sequential"
    context_method: str = "ring"
    traits: TrainerTraits = field(default=JAXSCALE)

    @classmethod
    def of(cls, layout: Any, global_batch_size: int, **changes: Any) -> "Parallelism":
        """That of a resolved `Layout`, or of `Layouts`; `changes` are fields of this class."""
        name, fused, _ = parse_schedule(layout.schedule)
        shards = layout.batch_shards * layout.expert
        return cls(
            **{
                **{axis: getattr(layout, axis) for axis in MESH_AXES},
                "zero_stage": layout.zero_stage,
                "microbatch": np.maximum(1, global_batch_size // (shards * layout.microbatches)),
                "microbatches": layout.microbatches,
                "virtual_stages": np.maximum(1, layout.virtual_stages),
                "sequence_chunks": layout.sequence_chunks,
                "schedule": name,
                "fused": fused,
                # Which passes of a pipeline are recomputed, and which are kept, its table says.
                "remat": layout.remat if kept_passes(layout.remat) is None else "full",
                "offload": layout.offload,
                "accumulation": layout.accumulation,
                "context_method": layout.context_method,
                **changes,
            }
        )

    @property
    def num_devices(self) -> Ints:
        """Devices that the axes need."""
        axes = (axis for axis in MESH_AXES if axis != "expert" or not self.traits.folded_experts)
        return math.prod(np.asarray(getattr(self, axis)) for axis in axes)

    @property
    def batch_shards(self) -> Ints:
        """Ways in which a global batch is split: the ranks of expert have tokens of their own."""
        own = 1 if self.traits.folded_experts else self.expert
        return np.asarray(self.data) * self.fsdp * own

    @property
    def imbalance(self) -> Any:
        """Tokens that the busiest rank's experts have over the mean. A rank that has all experts
        has what its own tokens ask for; places that are left empty it has all the same."""
        alone = (np.asarray(self.expert) == 1) & (not self.traits.masked_dispatch)
        return np.where(alone, 1.0, self.traits.imbalance)

    @property
    def global_batch(self) -> Ints:
        """Sequences of a step."""
        return self.batch_shards * self.microbatch * self.microbatches

    @property
    def count(self) -> int:
        """How many layouts these are."""
        return len(np.atleast_1d(self.num_devices))
