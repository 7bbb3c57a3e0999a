"""A model that this version trains, given by a config: the engine's own checks and exact memory.

`SizedModel` is the counterpart for a model given by its sizes alone, with the same interface.
"""

import dataclasses
from dataclasses import dataclass

from jaxscale.config import Config
from jaxscale.layout import OFFLOADS, Layout
from jaxscale.planner.memory.step import Memory
from jaxscale.planner.model.param_shapes import parameters
from jaxscale.planner.model.shape import ModelShape
from jaxscale.planner.search.layout_batch import LayoutBatch, batch_memory
from jaxscale.planner.tables.pipeline_slots import RankBuffers
from jaxscale.sharding.rules import (
    REPLICATED_WEIGHTS,
    WEIGHTS,
    check_divides,
    check_sequence,
    mesh_axes,
    with_whole_kv_heads,
)

REMATS = (
    "none",
    "full",
    "save_matmuls",
    "save_all_but_attention",
    "save:query,key,value,attention",
    "save:query,key,value",
    "save:query,key,value,attention,attention_out",
    "offload:query,key,value,attention_out",
)
"""Policies that the search tries; a list of names can say many more."""


@dataclass(frozen=True)
class TrainableModel:
    """A config's model and batch."""

    config: Config  # its layout is ignored

    note = ""
    batch_reason = "data.global_batch_size does not split"

    @property
    def shape(self) -> ModelShape:
        return ModelShape.of(self.config)

    @property
    def num_params(self) -> int:
        return self.config.model.num_params

    @property
    def sequences(self) -> int:
        """Per step."""
        return self.config.data.global_batch_size

    @property
    def run_tokens(self) -> float:
        """Tokens of the whole run."""
        return self.config.run.steps * self.config.data.tokens_per_step

    @property
    def head_cost(self) -> float:
        """FLOPs of the head over those of a layer."""
        return self.config.model.head_cost(self.config.data.seq_len)

    @property
    def remats(self) -> tuple[str, ...]:
        """Policies to try."""
        return REMATS

    @property
    def offloads(self) -> tuple[str, ...]:
        """Offload policies to try."""
        return OFFLOADS

    @property
    def flops_per_token(self) -> float:
        """Of training, without recompute, attention over visible keys only."""
        return self.config.model.flops_per_token(self.config.data.seq_len)

    def hardware_flops_per_token(self, remat: str, recomputed: float) -> float:
        """Of training, with recompute; `recomputed` is the share of a pipeline's passes that R
        operations recompute."""
        return self.config.model.hardware_flops_per_token(
            self.config.data.seq_len, remat=remat, recomputed=recomputed
        )

    def with_layout(self, layout: Layout) -> Config:
        """The config of a run with a layout.

        Raises:
          ValueError: the model does not support the layout's remat policy or axes.
        """
        return dataclasses.replace(self.config, layout=layout)

    def check_policies(self, layout: Layout) -> None:
        """Refuses a remat policy or an axis that the model does not support.

        Raises:
          ValueError: the engine's message.
        """
        self.with_layout(Layout(pipeline=layout.pipeline, expert=layout.expert, remat=layout.remat))

    def refusal(self, layout: Layout) -> tuple[str, str]:
        """Why the engine refuses a layout, as a short reason and its message; "" where it does
        not."""
        try:
            config = self.with_layout(layout)
        except ValueError as error:
            return "not available in this version", str(error)
        for check, reason in (
            (check_divides, self.batch_reason),
            (check_sequence, "data.seq_len does not split"),
            (check_parameters, "a dimension of the model does not divide"),
        ):
            try:
                check(config)
            except ValueError as error:
                return reason, str(error)
        return "", ""

    def memory(
        self, layouts: LayoutBatch | Layout, buffers: RankBuffers | None, back_end: str
    ) -> Memory:
        """Of a device; fields are int, or int [N].

        Args:
          buffers: of a pipeline's busiest rank; None without a pipeline.
        """
        return batch_memory(self.config, layouts, buffers, back_end, own_host=True)


def check_parameters(config: Config) -> None:
    """Refuses axes over which a parameter does not divide, as the engine does when it shards them.

    Raises:
      ValueError: names the dimension and the nearest size of the axis.
    """
    layout = config.layout
    rules = WEIGHTS if layout.zero_stage >= 1 else REPLICATED_WEIGHTS
    for array in parameters(config.model):
        axes = with_whole_kv_heads(array.axes, array.shape, layout.sizes)
        mesh_axes(axes, rules, layout.sizes, array.shape, name=f"{array.part}/{array.name}")
