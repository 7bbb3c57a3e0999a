"""A layout as the cost formulas read it."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from jaxscale.config.layout import Layout
from jaxscale.planner.model.layout_batch import LayoutBatch
from jaxscale.sharding.model_trace import Ints

IMBALANCE = 1.2
"""Load imbalance of experts that are spread over ranks."""


@dataclass(frozen=True)
class WholeMatrices:
    """Matmuls of the update of a stack's parameter, which needs whole matrices (Muon)."""

    layers: int  # of the stack
    shared_flops: float  # of a layer, shared by tensor ranks
    repeated_flops: float  # of a layer, repeated on each tensor rank
    of_experts: bool  # whether expert ranks have separate matrices


@dataclass(frozen=True)
class Parallelism(LayoutBatch):
    """Inputs of the cost formulas: a layout or N of them, with the micro-batch size, the parsed
    string settings, and facts of the step. `schedule` is a name alone."""

    virtual_stages: Ints = 1
    microbatch: Ints = 1  # sequences per micro-batch and shard of the batch
    fused: bool = False  # the backward pass is one operation
    matmul: str = "bfloat16"  # operands of the layers' matmuls; or "fp8", "fp4"
    casts_weights: bool = True  # they are in 32 bits between steps, and cast where they are used
    gradient_bytes: int = 4  # per element in reductions
    frozen: bool = False  # only adapters are trained
    whole_matrices: tuple[WholeMatrices, ...] = ()  # of the optimizer's update
    pruning_reads: float = 0.0  # of each weight of the layers, in the update
    router_groups: int = 1  # of experts; a token chooses in `router_groups_kept` of them
    router_groups_kept: int = 1
    host_moments: Ints = 0  # bytes of a device's, in host memory by `offload_bytes`
    host_weights: Ints = 0

    @classmethod
    def of(cls, layout: Layout, global_batch_size: int, **changes: Any) -> "Parallelism":
        """From a resolved `Layout`, or a batch; `changes` are fields of this class."""
        schedule, remat = layout.schedule_spec, layout.remat_policy
        return cls(
            **{
                **{one.name: getattr(layout, one.name) for one in fields(Layout)},
                "virtual_stages": np.maximum(1, layout.virtual_stages),
                "microbatch": np.maximum(
                    1, global_batch_size // (layout.batch_shards * layout.microbatches)
                ),
                "schedule": schedule.name,
                "fused": schedule.fused,
                # With "keep:N" the table says which passes are recomputed.
                "remat": layout.remat if remat.kept_passes is None else "full",
                **changes,
            }
        )

    @property
    def imbalance(self) -> Any:
        """Load imbalance: tokens of the busiest expert rank over the mean. A rank with all experts
        is balanced."""
        return np.where(np.asarray(self.expert) == 1, 1.0, IMBALANCE)

    def nodes_of_token(self, choices: int) -> Any:
        """Nodes that a token's choices are on, of `expert_nodes`, on average: choices at random, in
        the groups that the router keeps."""
        nodes = np.asarray(self.expert_nodes, float)
        if self.router_groups > 1:
            each = np.maximum(1, nodes / self.router_groups)
            nodes = np.minimum(nodes, self.router_groups_kept * each)
        return nodes * (1 - (1 - 1 / nodes) ** choices)

    @property
    def global_batch(self) -> Ints:
        """Sequences per step."""
        return self.batch_shards * self.microbatch * self.microbatches
