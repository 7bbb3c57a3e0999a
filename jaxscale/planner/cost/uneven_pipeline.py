"""Seconds of pipelines whose layers are dealt as the engine deals them.

The closed forms of `cost` deal a model evenly, which no table can where layers do not divide, and
which leaves the head to one stage. Here the real table is played with what each stage really has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.pipeline.operations import R
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.cost.step import StepSeconds, operation_seconds, step_cost
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.model.shape import ModelShape
from jaxscale.planner.tables import table_makespan
from jaxscale.planner.tables.table_makespan import TableSpec

Layers = tuple[int, ...]  # of each virtual stage

BUSIEST_RANK_TERMS = (
    "matmul",
    "attention",
    "elementwise",
    "waiting",
    "recompute",
    "tensor",
    "context",
    "expert",
)
"""Terms that are what the busiest rank of a pipeline does itself."""


@dataclass(frozen=True)
class UnevenPipelineCost:
    """Of N pipelines: what a step takes beside its table, and what the table is made of."""

    seconds: StepSeconds  # with ranks that never wait
    late: np.ndarray  # stragglers, relative to all else
    others: np.ndarray  # terms that are not the table's
    layer: table_makespan.OperationSeconds  # [N, 1]: of a rank's even share of the layers
    head: table_makespan.OperationSeconds  # [N, 1]: what the last stage has beside
    shape: ModelShape
    parallelism: Parallelism

    @classmethod
    def of(
        cls, shape: ModelShape, cluster: Cluster, parallelism: Parallelism
    ) -> "UnevenPipelineCost":
        """Of pipelines whose texts are the same."""
        seconds = step_cost(shape, cluster, parallelism, waits=False)
        terms, total = seconds.terms, np.atleast_1d(seconds.step_seconds)
        stragglers = np.atleast_1d(terms["stragglers"])
        own = np.atleast_1d(sum(terms[name] for name in BUSIEST_RANK_TERMS))
        even = [np.atleast_2d(one) for one in operation_seconds(shape, cluster, parallelism)]
        return cls(
            seconds,
            stragglers / (total - stragglers),
            total - stragglers - own,
            table_makespan.OperationSeconds(*(one[:, :1] for one in even)),
            table_makespan.OperationSeconds(*(one[:, -1:] - one[:, :1] for one in even)),
            shape,
            parallelism,
        )

    def bound(self) -> np.ndarray:
        """float [N], seconds that no dealing and no schedule can be faster than: all ranks work
        all the time."""
        ranks = np.atleast_1d(np.asarray(self.parallelism.pipeline, float))
        chunks = np.atleast_1d(np.asarray(self.parallelism.virtual_stages, float))
        layer = sum(one[:, 0] for one in self.layer)
        head = sum(one[:, 0] for one in self.head)
        work = np.atleast_1d(self.parallelism.microbatches) * (layer + head / (chunks * ranks))
        return (self.others + work) * (1 + self.late)

    def costs(self, rows: Any, layers: Any) -> table_makespan.OperationSeconds:
        """Costs of stages of some rows.

        Args:
          layers: int [..., stages].
        """
        layers = np.asarray(layers)
        share = layers * layers.shape[-1] / self.shape.layers
        last = np.arange(layers.shape[-1]) == layers.shape[-1] - 1
        return table_makespan.OperationSeconds(
            *(one[rows] * share + head[rows] * last for one, head in zip(self.layer, self.head))
        )

    def makespan(self, rows: Any, spec: TableSpec, layers: Any) -> np.ndarray:
        """float [rows], seconds of the table; or [...] of the dealings of one row."""
        return table_makespan.makespan(spec, self.costs(rows, layers))

    def step_seconds(
        self, pipelines: Sequence[TableSpec], layers: Sequence[Layers], place: np.ndarray
    ) -> np.ndarray:
        """float [N], seconds of a step.

        Args:
          layers: of each pipeline.
          place: int [N], the pipeline of each row.
        """
        tables = np.zeros(len(place))
        for n, (spec, dealt) in enumerate(zip(pipelines, layers)):
            rows = np.flatnonzero(place == n)
            if len(rows):
                tables[rows] = self.makespan(rows, spec, dealt)
        return (self.others + tables) * (1 + self.late)

    def terms(self, spec: TableSpec, layers: Layers) -> dict[str, float]:
        """Of the only row: what the busiest rank does itself is scaled to what it has, and its
        waiting is the rest."""
        table = float(self.makespan([0], spec, layers)[0])
        costs, share = self.costs([0], layers), recomputed_share(spec)
        costs = costs._replace(r=share * np.asarray(costs.r))
        work = spec.microbatches * busiest_rank_seconds(spec, costs)
        terms = {name: float(np.ravel(value)[0]) for name, value in self.seconds.terms.items()}
        terms["recompute"] *= share
        scale = work / sum(terms[name] for name in BUSIEST_RANK_TERMS)
        terms |= {name: scale * terms[name] for name in BUSIEST_RANK_TERMS}
        terms["bubble"] = max(0.0, table - work)
        terms["stragglers"] = float(self.late[0]) * (sum(terms.values()) - terms["stragglers"])
        return terms


def recomputed_share(spec: TableSpec) -> float:
    """The share of its passes that the rank recomputes which recomputes most."""
    if not spec.keep:
        return 1.0
    ops = table_makespan.pipeline_table(spec).ops
    again = np.bincount(ops.rank[ops.kind == R])
    return float(again.max() / (spec.virtual_stages * spec.microbatches))


def busiest_rank_seconds(spec: TableSpec, costs: table_makespan.OperationSeconds) -> float:
    """Seconds of one micro-batch on the rank that has most to do.

    Args:
      costs: float [1, stages] each.
    """
    # Where stages live does not depend on what is done with them.
    order = table_makespan.pipeline_table(
        TableSpec(spec.schedule, spec.ranks, 2 * spec.ranks, spec.virtual_stages)
    ).order
    each = np.ravel(sum(np.asarray(one) for one in costs)) / spec.virtual_stages
    home = [order.rank_of(stage, 0) for stage in range(order.stages)]
    return float(np.bincount(home, weights=each).max())
