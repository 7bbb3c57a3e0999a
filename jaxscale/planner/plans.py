"""One layout judged in full: seconds by term, bytes by what they hold, and what follows."""

import dataclasses
from dataclasses import dataclass

from jaxscale.config import Config
from jaxscale.layout import Layout, parse_schedule
from jaxscale.planner.choice import Choice
from jaxscale.planner.cost import Seconds, cost
from jaxscale.planner.dealt import Parts
from jaxscale.planner.energy import Bill, bill, watts
from jaxscale.planner.held import deal, head_cost
from jaxscale.planner.machine import Cluster
from jaxscale.planner.memory import Memory, memory
from jaxscale.planner.search import Found
from jaxscale.planner.shape import Shape
from jaxscale.planner.space import HOST_MEMORY_BYTES, Query, with_layout


@dataclass(frozen=True)
class Plan:
    """A layout, and what the formulas say of it."""

    config: Config  # with the layout, and the batch that was asked for
    cluster: Cluster
    layers: tuple[int, ...]  # of each virtual stage
    seconds: Seconds  # floats
    memory: Memory  # of a device; every rank of a pipeline has the same buffers
    limit_bytes: float

    @property
    def layout(self) -> Layout:
        return self.config.layout

    @property
    def terms(self) -> dict[str, float]:
        """Seconds that add up to the step, those of nothing left out."""
        return {name: value for name, value in self.seconds.terms.items() if value}

    @property
    def hidden(self) -> dict[str, float]:
        """Seconds of collectives beside computation, not in the step."""
        return {name: value for name, value in self.seconds.hidden.items() if value}

    @property
    def step_seconds(self) -> float:
        return float(self.seconds.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.config.data.tokens_per_step / self.step_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: `ModelConfig.flops_per_token`, nothing repeated, attention over
        the keys that a query sees."""
        return self._utilisation(self.config.model.flops_per_token(self.config.data.seq_len))

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: what remat repeats counts too."""
        model, seq_len = self.config.model, self.config.data.seq_len
        return self._utilisation(model.hardware_flops_per_token(seq_len, remat=self.layout.remat))

    @property
    def memory_bytes(self) -> int:
        """The peak of a device."""
        return int(self.memory.peak)

    @property
    def host_bytes(self) -> int:
        """In host memory, for a device."""
        optimizer = self.memory.host_optimizer if self.layout.offloads("optimizer") else 0
        return int(optimizer + self.memory.host_stash)

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.limit_bytes and self.host_bytes <= HOST_MEMORY_BYTES

    def bill(self, tokens: float) -> Bill:
        """Days, energy and money of a run of so many tokens, failures included."""
        shape, per_step = Shape.of(self.config), self.config.data.tokens_per_step
        return bill(shape, self.cluster, self.seconds, per_step, tokens)

    @property
    def watts(self) -> float:
        """That a device draws on average."""
        return float(watts(self.seconds, self.cluster))

    def _utilisation(self, flops_per_token: float) -> float:
        peak = self.cluster.peak_flops("bfloat16") * self.layout.num_devices
        return flops_per_token * self.tokens_per_second / peak


@dataclass(frozen=True)
class Answer:
    """What a search found, judged: `plans` are best first."""

    query: Query
    plans: tuple[Plan, ...]
    found: Found


def judge(query: Query, layout: Layout) -> Plan:
    """What the formulas say of a resolved layout that the engine accepts.

    Raises:
      ValueError: a pipeline that cannot be.
    """
    config = with_layout(query.config, layout)
    choice = Choice.of(layout, config.data.global_batch_size)
    seconds = cost(query.shape, query.cluster, choice)
    terms = {name: float(value) for name, value in seconds.terms.items()}
    hidden = {name: float(value) for name, value in seconds.hidden.items()}
    layers: tuple[int, ...] = ()
    if layout.pipeline > 1:
        layers = layers_of(config)
        terms = Parts.of(query.shape, query.cluster, choice).terms(layers)
    needs = memory(config, query.back_end, own_host=True)
    plain = {field.name: int(getattr(needs, field.name)) for field in dataclasses.fields(needs)}
    return Plan(
        config, query.cluster, layers, Seconds(**terms, hidden=hidden), Memory(**plain),
        query.limit_bytes,
    )  # fmt: skip


def layers_of(config: Config) -> tuple[int, ...]:
    """The layers of each virtual stage of a pipeline."""
    layout = config.layout
    name, fused, layers = parse_schedule(layout.schedule)
    return layers or deal(
        name, layout.pipeline, max(1, layout.virtual_stages), layout.microbatches, fused=fused,
        recompute=layout.remat == "full", num_layers=config.model.num_layers,
        head_cost=head_cost(config),
    )  # fmt: skip
