"""The prediction for one layout: seconds and bytes by term, and figures derived from them."""

import dataclasses
from dataclasses import dataclass

from jaxscale.config import Config
from jaxscale.config.layout import Layout, resolve_sizes
from jaxscale.formatting import gigabytes
from jaxscale.pipeline_schedules.operations import F, R
from jaxscale.planner.cost.cluster import Cluster
from jaxscale.planner.cost.energy import RunCost, mean_watts, run_cost
from jaxscale.planner.cost.step import StepSeconds, step_cost
from jaxscale.planner.cost.uneven_pipeline import UnevenPipelineCost
from jaxscale.planner.memory.terms import Memory
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.search.search import SearchResult
from jaxscale.planner.search.sized_model import SizedModel
from jaxscale.planner.search.space import HOST_MEMORY_BYTES, Query
from jaxscale.planner.search.trainable_model import TrainableModel
from jaxscale.planner.tables.pipeline_slots import (
    buffers_by_rank,
    busiest_rank_buffers,
    default_stage_layers,
)
from jaxscale.planner.tables.table_makespan import TableSpec, pipeline_table


@dataclass(frozen=True)
class Plan:
    """A layout with its predicted step time and memory."""

    planned_model: TrainableModel | SizedModel  # with its batch size
    layout: Layout
    cluster: Cluster
    layers: tuple[int, ...]  # of each virtual stage
    seconds: StepSeconds  # floats
    memory: Memory  # per device; all ranks of a pipeline have the same buffers
    limit_bytes: float  # of device memory
    back_end: str  # "gpu", "tpu" or "cpu"

    def __repr__(self) -> str:
        """One line, for notebooks; all fields would be a hundred lines."""
        needs = gigabytes(self.memory_bytes)
        return f"Plan({self.layout}, {self.step_seconds:.4g} s a step, {needs} a device)"

    @property
    def config(self) -> Config:
        """The config of a run with this layout.

        Raises:
          ValueError: this version cannot train the model.
        """
        return self.planned_model.with_layout(self.layout)

    @property
    def parallelism(self) -> Parallelism:
        """The layout as the cost formulas read it."""
        return self.planned_model.parallelism(self.layout)

    @property
    def terms(self) -> dict[str, float]:
        """Seconds that add up to the step; terms of 0 are left out."""
        return {name: value for name, value in self.seconds.terms.items() if value}

    @property
    def hidden(self) -> dict[str, float]:
        """Seconds of communication overlapped with compute, which the step does not include."""
        return {name: value for name, value in self.seconds.hidden.items() if value}

    @property
    def step_seconds(self) -> float:
        return float(self.seconds.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step per second, an encoder's and its decoder's together."""
        return self.planned_model.step_tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: without recompute, attention over visible keys only."""
        return self._utilisation(self.planned_model.flops_per_token)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: recompute counts too."""
        return self._utilisation(
            self.planned_model.hardware_flops_per_token(self.layout.remat, self.recomputed)
        )

    @property
    def recomputed(self) -> float:
        """Share of a pipeline's passes that R operations recompute."""
        if self.layout.pipeline == 1:
            return 0.0
        kind = pipeline_table(TableSpec.of(self.layout)).ops.kind
        return float((kind == R).sum() / (kind == F).sum())

    @property
    def memory_bytes(self) -> int:
        """Peak memory of a device."""
        return int(self.memory.peak)

    @property
    def stage_bytes(self) -> list[int]:
        """Peak memory that each pipeline rank uses. All allocate `memory_bytes`: they run one
        program, with the buffers of the busiest rank."""
        if self.layout.pipeline == 1:
            return [self.memory_bytes]
        stacks = self.planned_model.stacks
        each = buffers_by_rank(TableSpec.of(self.layout), self.layers, stacks)
        return [
            int(self.planned_model.memory(self.layout, buffers, self.back_end).peak)
            for buffers in each
        ]

    @property
    def host_bytes(self) -> int:
        """Host memory used per device."""
        return int(self.memory.on_host)

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.limit_bytes and self.host_bytes <= HOST_MEMORY_BYTES

    def run_cost(self, tokens: float) -> RunCost:
        """Time, energy and cost of a run of `tokens` tokens, failures included."""
        per_step = self.planned_model.step_tokens
        return run_cost(self.cluster, self.seconds, per_step, tokens)

    @property
    def watts(self) -> float:
        """Mean power of a device."""
        return float(mean_watts(self.seconds, self.cluster))

    def _utilisation(self, flops_per_token: float) -> float:
        peak = self.cluster.peak_flops("bfloat16") * self.layout.num_devices
        return flops_per_token * self.tokens_per_second / peak


UNROLLED_NOTE = (
    "Seconds and memory of unrolled layers are those of a loop over them, except weights that are "
    "cast once a step. Compiled peaks were 7 % lower to 0.4 % higher on one GPU, and 94 % higher "
    "with fsdp 8; --prove compiles the plans shown."
)


@dataclass(frozen=True)
class RankedPlans:
    """The result of `plan_layouts`: plans, best first, and their search."""

    query: Query
    plans: tuple[Plan, ...]
    found: SearchResult

    def __repr__(self) -> str:
        best = f", the best {self.plans[0]}" if self.plans else ""
        return f"RankedPlans({len(self.plans)} of {self.found.considered:,}{best})"

    @property
    def note(self) -> str:
        """Caveats that are printed with the plans."""
        notes = [self.query.planned_model.note] if self.query.planned_model.note else []
        return " ".join([*notes, *[UNROLLED_NOTE] * self.query.pins.get("unroll_layers", False)])


def predict_plan(query: Query, layout: Layout) -> Plan:
    """Step time and memory of a layout.

    Raises:
      ValueError: its sizes do not multiply to the devices of the cluster, the engine refuses it for
        the model or the batch, or no such pipeline exists.
    """
    model = query.planned_model
    layout = resolve_sizes(layout, query.cluster.num_devices)
    if said := model.refusal(layout)[1]:
        raise ValueError(said)
    parallelism = model.parallelism(layout)
    layers, buffers = (), None
    if layout.pipeline == 1:
        seconds = step_cost(query.work, query.cluster, parallelism)
        terms = {name: float(value) for name, value in seconds.terms.items()}
    else:
        pipeline, given = TableSpec.of(layout), layout.schedule_spec.layers
        layers = given or default_stage_layers(
            pipeline, model.stacks, 0.0 if layout.slices_head else model.head_cost
        )
        costs = UnevenPipelineCost.of(query.work, query.cluster, parallelism)
        seconds, terms = costs.seconds, costs.terms(pipeline, layers)
        buffers = busiest_rank_buffers(pipeline, layers, model.stacks)
    hidden = {name: float(value) for name, value in seconds.hidden.items()}
    needs = model.memory(layout, buffers, query.back_end)
    plain = {field.name: int(getattr(needs, field.name)) for field in dataclasses.fields(needs)}
    return Plan(
        model,
        layout,
        query.cluster,
        layers,
        StepSeconds(**terms, hidden=hidden),
        Memory(**plain),
        query.limit_bytes,
        query.back_end,
    )
