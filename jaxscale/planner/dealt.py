"""Seconds of pipelines whose layers are dealt as the engine deals them.

The closed forms of `cost` deal a model evenly, which no table can where layers do not divide, and
which leaves the head to one stage. Here the real table is played with what each stage really has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.pipeline.records import R
from jaxscale.planner import ticks
from jaxscale.planner.choice import Choice
from jaxscale.planner.cost import Seconds, cost, rank_costs
from jaxscale.planner.machine import Cluster
from jaxscale.planner.shape import Shape

Layers = tuple[int, ...]  # of each virtual stage

OWN = (
    "matmul", "attention", "elementwise", "waiting", "recompute", "tensor", "context", "expert",
)  # fmt: skip
"""Terms that are what the busiest rank of a pipeline does itself."""


@dataclass(frozen=True)
class Parts:
    """Of N pipelines: what a step takes beside its table, and what the table is made of."""

    seconds: Seconds  # with ranks that never wait
    late: np.ndarray  # stragglers, relative to all else
    others: np.ndarray  # terms that are not the table's
    layer: ticks.Costs  # [N, 1]: of a rank's even share of the layers
    head: ticks.Costs  # [N, 1]: what the last stage has beside
    shape: Shape
    choice: Choice

    @classmethod
    def of(cls, shape: Shape, cluster: Cluster, choice: Choice) -> "Parts":
        """Of pipelines whose texts are the same."""
        seconds = cost(shape, cluster, choice, waits=False)
        terms, total = seconds.terms, np.atleast_1d(seconds.step_seconds)
        stragglers = np.atleast_1d(terms["stragglers"])
        own = np.atleast_1d(sum(terms[name] for name in OWN))
        even = [np.atleast_2d(one) for one in rank_costs(shape, cluster, choice)]
        return cls(
            seconds, stragglers / (total - stragglers), total - stragglers - own,
            ticks.Costs(*(one[:, :1] for one in even)),
            ticks.Costs(*(one[:, -1:] - one[:, :1] for one in even)), shape, choice,
        )  # fmt: skip

    def bound(self) -> np.ndarray:
        """float [N], seconds that no dealing and no schedule can be faster than: all ranks work
        all the time."""
        ranks = np.atleast_1d(np.asarray(self.choice.pipeline, float))
        chunks = np.atleast_1d(np.asarray(self.choice.virtual_stages, float))
        layer = sum(one[:, 0] for one in self.layer)
        head = sum(one[:, 0] for one in self.head)
        work = np.atleast_1d(self.choice.microbatches) * (layer + head / (chunks * ranks))
        return (self.others + work) * (1 + self.late)

    def costs(self, rows: Any, layers: Any) -> ticks.Costs:
        """Costs of stages of some rows.

        Args:
          layers: int [..., stages].
        """
        layers = np.asarray(layers)
        share = layers * layers.shape[-1] / self.shape.layers
        last = np.arange(layers.shape[-1]) == layers.shape[-1] - 1
        return ticks.Costs(
            *(one[rows] * share + head[rows] * last for one, head in zip(self.layer, self.head))
        )

    def makespan(self, rows: Any, ranks: int, count: int, chunks: int, layers: Any) -> np.ndarray:
        """float [rows], seconds of the table; or [...] of the dealings of one row."""
        return ticks.makespan(
            self.choice.schedule, ranks, count, chunks, self.costs(rows, layers),
            fused=self.choice.fused, keep=self.choice.keep,
        )  # fmt: skip

    def step_seconds(self, keys: np.ndarray, place: np.ndarray, dealt: Sequence[Layers]):
        """float [N], seconds of a step.

        Args:
          keys: int [K, 3], ranks, chunks and micro-batches.
          place: int [N], the key of each.
          dealt: of each key.
        """
        tables = np.zeros(len(place))
        for n, ((ranks, chunks, count), layers) in enumerate(zip(keys.tolist(), dealt)):
            rows = np.flatnonzero(place == n)
            if not len(rows):
                continue
            tables[rows] = self.makespan(rows, ranks, count, chunks, layers)
        return (self.others + tables) * (1 + self.late)

    def terms(self, layers: Layers) -> dict[str, float]:
        """Of the only row: what the busiest rank does itself is scaled to what it has, and its
        waiting is the rest."""
        ranks, chunks = int(self.choice.pipeline), int(self.choice.virtual_stages)
        count = int(self.choice.microbatches)
        table = float(self.makespan([0], ranks, count, chunks, layers)[0])
        costs, share = self.costs([0], layers), self.recomputed()
        work = count * busiest(
            self.choice.schedule, ranks, chunks, costs._replace(r=share * np.asarray(costs.r))
        )
        terms = {name: float(np.ravel(value)[0]) for name, value in self.seconds.terms.items()}
        terms["recompute"] *= share
        scale = work / sum(terms[name] for name in OWN)
        terms |= {name: scale * terms[name] for name in OWN}
        terms["bubble"] = max(0.0, table - work)
        terms["stragglers"] = float(self.late[0]) * (sum(terms.values()) - terms["stragglers"])
        return terms

    def recomputed(self) -> float:
        """Of the only row: the share of its passes that the busiest rank recomputes."""
        if not self.choice.keep:
            return 1.0
        ranks, chunks = int(self.choice.pipeline), int(self.choice.virtual_stages)
        key = self.choice.schedule, ranks, chunks, self.choice.fused, True
        table = ticks.open_table(*key, int(self.choice.microbatches), self.choice.keep)
        again = np.bincount(table.ops.rank[table.ops.kind == R], minlength=ranks)
        return float(again.max() / (chunks * self.choice.microbatches))


def busiest(schedule: str, ranks: int, chunks: int, costs: ticks.Costs) -> float:
    """Seconds of one micro-batch on the rank that has most to do.

    Args:
      costs: float [1, stages] each.
    """
    order = ticks.open_table(schedule, ranks, chunks, False, False, 2 * ranks).order
    each = np.ravel(sum(np.asarray(one) for one in costs)) / chunks
    home = [order.rank_of(stage, 0) for stage in range(order.stages)]
    return float(np.bincount(home, weights=each).max())
