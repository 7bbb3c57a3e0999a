"""Step time of pipelines with any split of the layers over stages.

The closed forms of `step_cost` split the layers evenly. Here the table of the schedule is simulated
with the layers of each stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxscale.pipeline_schedules.operations import R
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.cost.pipeline import sliced_head_seconds
from jaxscale.planner.cost.step import (
    StepParts,
    StepSeconds,
    cost_of_parts,
    end_attention_seconds,
    end_operation_seconds,
    message_seconds,
)
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.tables import table_makespan
from jaxscale.planner.tables.pipeline_slots import stages_by_rank
from jaxscale.planner.tables.state_ticks import TickCollectives, state_ticks
from jaxscale.planner.tables.table_makespan import TableSpec
from jaxscale.sharding.model_trace import ModelWork

Layers = tuple[int, ...]  # of each virtual stage

BUSIEST_RANK_TERMS = (
    "matmul",
    "attention",
    "elementwise",
    "recompute",
    "tensor",
    "context",
    "expert",
)
"""Terms that the busiest pipeline rank spends working."""


class StackCost(NamedTuple):
    """Cost of the layers of one stack in N pipelines."""

    layers: int
    share: table_makespan.OperationSeconds  # [N, 1]: of as many as each rank would have on average


@dataclass(frozen=True)
class UnevenPipelineCost:
    """Cost model of N pipelines: seconds of operations for the table, and seconds outside it."""

    seconds: StepSeconds  # without a bubble
    late: np.ndarray  # stragglers, relative to the other terms
    others: np.ndarray  # seconds outside the table
    stacks: tuple[StackCost, ...]
    head: table_makespan.OperationSeconds  # [N, 1]: extra cost of the last stage
    message: table_makespan.OperationSeconds  # [N, 1]: sends of a rank's chunks
    attention: table_makespan.OperationSeconds  # [N, 1]: core attention, part of the stacks' shares
    in_ticks: TickCollectives  # [N]: gathers and reductions within ticks
    # [N]: of a micro-batch on all ranks at once, if each has a slice of the head; else 0.
    sliced_head: np.ndarray
    head_sums: np.ndarray  # over these ranks
    parallelism: Parallelism

    @classmethod
    def of(
        cls, work: ModelWork, cluster: Cluster, parallelism: Parallelism
    ) -> "UnevenPipelineCost":
        """The cost model of pipelines whose string settings are equal."""
        parts = StepParts(work, cluster, parallelism)
        seconds = cost_of_parts(parts, waits=False)
        terms, total = seconds.terms, np.atleast_1d(seconds.step_seconds)
        stragglers = np.atleast_1d(terms["stragglers"])
        own = np.atleast_1d(sum(terms[name] for name in BUSIEST_RANK_TERMS))
        seconds_of = table_makespan.OperationSeconds
        even = [np.atleast_2d(one) for one in end_operation_seconds(parts)]
        layers = seconds_of(*(one[:, :1] for one in even))
        sent = np.atleast_2d(message_seconds(parts)).T
        stacks = [StackCost(work.layers, layers)]
        if work.source_len:
            stacks = []
            for stack in work.stacks:
                alone = end_operation_seconds(StepParts(work.alone(stack), cluster, parallelism))
                alone = seconds_of(*(np.atleast_2d(one)[:, :1] for one in alone))
                stacks.append(StackCost(stack.num_layers, alone))
        return cls(
            seconds,
            stragglers / (total - stragglers),
            total - stragglers - own,
            tuple(stacks),
            seconds_of(*(one[:, -1:] - one[:, :1] for one in even)),
            seconds_of(*(np.where(one > 0, sent, 0.0) for one in layers)),
            seconds_of(*(np.atleast_2d(one)[:, :1] for one in end_attention_seconds(parts))),
            TickCollectives(*(np.broadcast_to(one, total.shape) for one in parts.in_ticks)),
            np.broadcast_to(sliced_head_seconds(parallelism, parts.layer), total.shape),
            np.broadcast_to(parts.sent.head, total.shape),
            parallelism,
        )

    def bound(self) -> np.ndarray:
        """float [N], a lower bound in seconds for any split and schedule: no rank ever idles."""
        ranks = np.atleast_1d(np.asarray(self.parallelism.pipeline, float))
        chunks = np.atleast_1d(np.asarray(self.parallelism.virtual_stages, float))
        # The busiest rank works at least as long as the mean of all ranks.
        parts = (*(stack.share for stack in self.stacks), self.message)
        layer = sum(one[:, 0] for part in parts for one in part)
        head = sum(one[:, 0] for one in self.head)
        each = layer + head / (chunks * ranks) + self.in_ticks.outer
        each = each + self.sliced_head + self.head_sums + self.in_ticks.head_slice
        work = np.atleast_1d(self.parallelism.microbatches) * each
        return (self.others + work) * (1 + self.late)

    def costs(self, rows: Any, layers: Any) -> table_makespan.OperationSeconds:
        """Seconds of operations by stage, of some rows.

        Args:
          layers: int [..., stages], the layers of each stage; in all splits a stage belongs to the
            same stack.
        """
        layers = np.asarray(layers)
        stages = layers.shape[-1]
        ends = np.cumsum(layers.reshape(-1, stages)[0])
        last, done, total = np.arange(stages) == stages - 1, 0, [0.0] * len(self.head)
        for stack in self.stacks:
            here = (ends > done) & (ends <= done + stack.layers)
            share = here * layers * stages / stack.layers
            total = [sum_ + one[rows] * share for sum_, one in zip(total, stack.share)]
            done += stack.layers
        return table_makespan.OperationSeconds(
            *(
                sum_ + sent[rows] + head[rows] * last
                for sum_, sent, head in zip(total, self.message, self.head)
            )
        )

    def makespan(self, rows: Any, spec: TableSpec, layers: Any) -> np.ndarray:
        """float [rows], seconds of the table; or [...] for several splits of one row."""
        layers = np.asarray(layers)
        share = layers * layers.shape[-1] / layers.sum(axis=-1, keepdims=True)
        attention = table_makespan.OperationSeconds(*(one[rows] * share for one in self.attention))
        ticks = table_makespan.makespan(spec, self.costs(rows, layers), attention)
        return ticks + spec.microbatches * (self.sliced_head + self.head_sums)[rows]

    def gathers_and_reductions(self, rows: Any, spec: TableSpec) -> np.ndarray:
        """float [rows], seconds that gathers and reductions add to the ticks of the table."""
        each = TickCollectives(*(one[rows] for one in self.in_ticks))
        if not any(one.any() for one in each):
            return np.zeros(len(each.outer))
        return state_ticks(spec).seconds(each)

    def step_seconds(
        self, specs: Sequence[TableSpec], layers: Sequence[Layers], index: np.ndarray
    ) -> np.ndarray:
        """float [N], seconds of a step.

        Args:
          layers: of each spec.
          index: int [N], the spec of each row.
        """
        tables = np.zeros(len(index))
        for n, (spec, split) in enumerate(zip(specs, layers)):
            rows = np.flatnonzero(index == n)
            if len(rows):
                tables[rows] = self.makespan(rows, spec, split)
                tables[rows] += self.gathers_and_reductions(rows, spec)
        return (self.others + tables) * (1 + self.late)

    def terms(self, spec: TableSpec, layers: Layers) -> dict[str, float]:
        """Terms of a single row: the work of the busiest rank is scaled to its layers, and its idle
        time is the bubble."""
        table = float(self.makespan([0], spec, layers)[0])
        costs, share = self.costs([0], layers), recomputed_share(spec)
        costs = costs._replace(r=share * np.asarray(costs.r))
        own = busiest_rank_seconds(spec, costs) + float(self.sliced_head[0])
        work = spec.microbatches * own
        terms = {name: float(np.ravel(value)[0]) for name, value in self.seconds.terms.items()}
        terms["recompute"] *= share
        scale = work / sum(terms[name] for name in BUSIEST_RANK_TERMS)
        terms |= {name: scale * terms[name] for name in BUSIEST_RANK_TERMS}
        terms["bubble"] = max(0.0, table - work)
        terms["fsdp"] += float(self.gathers_and_reductions([0], spec)[0])
        terms["stragglers"] = float(self.late[0]) * (sum(terms.values()) - terms["stragglers"])
        return terms


def recomputed_share(spec: TableSpec) -> float:
    """The largest share of passes that a rank recomputes."""
    if not spec.keep:
        return 1.0
    ops = table_makespan.pipeline_table(spec).ops
    counts = np.bincount(ops.rank[ops.kind == R])
    passes = spec.virtual_stages * spec.microbatches * spec.segments
    return float(counts.max() / passes)


def busiest_rank_seconds(spec: TableSpec, costs: table_makespan.OperationSeconds) -> float:
    """Seconds of one micro-batch on the busiest rank.

    Args:
      costs: float [1, stages] each.
    """
    each = np.ravel(sum(np.asarray(one) for one in costs)) / spec.virtual_stages
    stages = stages_by_rank(spec.schedule, spec.ranks, spec.virtual_stages)
    return float(each[stages].sum(axis=1).max())
