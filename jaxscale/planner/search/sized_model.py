"""A model given by its sizes alone, which this version plans but does not train.

`TrainableModel` is the counterpart for a config, with the same interface. Divisibility is checked
on the shape by the rules that the engine applies to a config; memory is `memory.analytic`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from jaxscale.choices import nearest_divisors
from jaxscale.config import zero_stage
from jaxscale.config.layout import Layout
from jaxscale.pipeline.partition import StackLayers
from jaxscale.planner.memory import analytic
from jaxscale.planner.memory.terms import Memory
from jaxscale.planner.model.parallelism import Parallelism
from jaxscale.planner.model.shape import ModelShape
from jaxscale.planner.tables.pipeline_slots import RankBuffers
from jaxscale.sharding.layout_checks import ulysses_refusal
from jaxscale.sharding.model_trace import Ints, ModelWork

REMATS = ("none", "full", "save_all_but_attention", "save:query,key,value,attention,attention_out")
"""Policies whose saved bytes are known for every type of layer
(`memory.layer_activations.layer_bytes`)."""

OFFLOADS = ("none", "optimizer")
"""Without activations: there is no formula for what they would transfer."""

NO_HALVES = "the tokens of a micro-batch are not dispatched in halves"
NO_RING = "there are no ranks of tensor to form a ring"
NO_SLICES = "the loss needs whole columns of the head"
NO_SHARDS = "neither weights nor gradients of a layer are in shards"
NO_HEADS = "the heads do not divide among the ranks of context"
NO_CROSS_CONTEXT = "there is no formula for cross attention under context parallelism"
ENCODER_EXCLUDES = {
    "pipeline": "there are no formulas for pipelines of an encoder and a decoder of which only the "
    "sizes are known",
    "context": NO_CROSS_CONTEXT,
}
"""Axes that must be 1 for an encoder-decoder, and why."""

RUN_TOKENS = 1e12
"""Assumed length of a run, which a shape does not give."""


@dataclass(frozen=True)
class SizedModel:
    """A model's shape and the batch of a step."""

    shape: ModelShape
    sequences: int  # of a step
    name: str = "the model"

    run_tokens = RUN_TOKENS
    offloads = OFFLOADS
    batch_reason = "the batch does not split"
    has_tensor_rows = False  # they have no formula

    @property
    def step_tokens(self) -> int:
        """Tokens of a step that the model predicts."""
        return self.sequences * self.shape.seq_len

    @property
    def untrainable_parts(self) -> str:
        """Parts that this version cannot train; "" where it trains all."""
        return "state-space mixers" if self.shape.mixer else ""

    @property
    def note(self) -> str:
        """A caveat that is printed with the plan."""
        if self.shape.encoder_layers:
            trains = "for the memory of our step, plan a config (--config mt5_xxl)"
        elif self.untrainable_parts:
            trains = f"this version cannot train a model with {self.untrainable_parts}"
        else:
            trains = (
                "to train such a model, or for the memory of our step, describe it by a config "
                "(--config FILE)"
            )
        return (
            f"Memory follows published formulas and was not checked against the compiler; {trains}."
        )

    @property
    def work(self) -> ModelWork:
        """The model's work, as the cost formulas read it."""
        return self.shape.work

    @property
    def causal(self) -> bool:
        """Whether tokens attend to those before them only."""
        return self.shape.causal

    @property
    def num_active_params(self) -> int:
        """Parameters that one token uses."""
        return self.shape.active_params

    @property
    def num_params(self) -> int:
        return self.shape.num_params

    @property
    def remats(self) -> tuple[str, ...]:
        """Policies to try. Saved bytes per tensor are not known for layers with biases."""
        return tuple(one for one in REMATS if not (self.shape.biases and one.startswith("save:")))

    @property
    def stacks(self) -> tuple[StackLayers, ...]:
        """The layers that a pipeline divides: a decoder's, see `ENCODER_EXCLUDES`."""
        return (StackLayers("layers", self.shape.layers),)

    @property
    def head_cost(self) -> float:
        """FLOPs of the head over a layer's."""
        return self.work.head_cost(self.shape.layers)

    @property
    def flops_per_token(self) -> float:
        """Training FLOPs per token, without recompute."""
        return self.work.training_flops / self.shape.seq_len

    def hardware_flops_per_token(self, remat: str, recomputed: float) -> float:
        """Training FLOPs per token, with recompute; `recomputed` is the share of a pipeline's
        passes that R operations recompute."""
        return self.work.hardware_flops(remat, recomputed) / self.shape.seq_len

    def parallelism(self, layout: Layout) -> Parallelism:
        """A layout, or a batch of them, as the cost formulas read it."""
        return Parallelism.of(layout, self.sequences)

    def with_layout(self, _: Layout) -> NoReturn:
        """Refused: there is no config.

        Raises:
          ValueError: always; names the way to train it, where there is one.
        """
        sizes = f"{self.name} is given by its sizes; describe it by a config (--config FILE)"
        parts = f"{self.name} has {self.untrainable_parts}; --json FILE writes the plan"
        raise ValueError(
            "this version trains models described by a config; "
            + (parts if self.untrainable_parts else sizes)
        )

    def check_policies(self, layout: Layout) -> None:
        """Refuses a remat or offload policy that has no formula.

        Raises:
          ValueError: names the policies that have one.
        """
        said = self._policies(layout)
        if said:
            raise ValueError(said)

    def refusal(self, layout: Layout) -> tuple[str, str]:
        """Why a layout is refused, as a short reason and a full message; "" where it is not."""
        said = {
            "no formula for the policy": self._policies(layout),
            "no formula for rows of tensor": self._tensor_rows(layout),
            **{reason: self._encoder(layout, axis) for axis, reason in ENCODER_EXCLUDES.items()},
            self.batch_reason: self._batch(layout),
            "the sequence does not split": self._lengths(layout),
            NO_HEADS: self._heads(layout),
            "a dimension of the model does not divide": next(self._dimensions(layout), ""),
        }
        return next(((reason, message) for reason, message in said.items() if message), ("", ""))

    def host_totals(self, _: Layout) -> list[Ints]:
        """None: the arrays of the state are not known."""
        return []

    def _policies(self, layout: Layout) -> str:
        if layout.slices_head and self.work.extra_predictions:
            return (
                "layout.head = 'sliced' is not available for a model with multi-token prediction; "
                "set layout.head = 'last'"
            )
        if layout.offload_bytes:
            return (
                f"layout.offload_bytes = {layout.offload_bytes} has no formula for a model given "
                "by its sizes; set layout.offload_bytes = 0, or plan a config"
            )
        for name, known in (("remat", self.remats), ("offload", self.offloads)):
            if name == "remat" and layout.remat_policy.kept_passes:
                continue  # "full" for some passes
            if getattr(layout, name) not in known:
                return (
                    f"layout.{name} = {getattr(layout, name)!r} has no formula for a model given "
                    f"by its sizes; it can be {', '.join(known)}"
                )
        return ""

    def _tensor_rows(self, layout: Layout) -> str:
        if layout.tensor_rows == 1:
            return ""
        return (
            f"layout.tensor_rows = {layout.tensor_rows} has no formula for a model given by its "
            "sizes; set layout.tensor_rows = 1, or plan a config"
        )

    def _encoder(self, layout: Layout, axis: str) -> str:
        size = getattr(layout, axis)
        if size == 1 or not self.shape.encoder_layers:
            return ""
        return f"layout.{axis} = {size}: {ENCODER_EXCLUDES[axis]}; set layout.{axis} = 1"

    def _batch(self, layout: Layout) -> str:
        parts = layout.batch_shards * layout.microbatches
        if self.sequences % parts == 0:
            return ""
        tokens = self.shape.seq_len
        below, above = self.sequences // parts * parts, -(-self.sequences // parts) * parts
        nearest = " or ".join(f"{n * tokens} ({n} sequences)" for n in (below, above) if n)
        return (
            f"a step of {self.sequences} sequences does not split into layout.data {layout.data} x "
            f"layout.fsdp {layout.fsdp} x layout.expert {layout.expert} x layout.microbatches "
            f"{layout.microbatches} = {parts} parts; set --batch_tokens to {nearest}, or change "
            "the layout"
        )

    def _lengths(self, layout: Layout) -> str:
        chunks = 2 * layout.context if layout.context > 1 else 1
        unit = math.lcm(chunks, layout.context * layout.tensor)
        for name in ("seq_len", "encoder_seq_len"):
            length = getattr(self.shape, name)
            if length % unit:
                return (
                    f"{name} = {length} does not split over layout.context = {layout.context} x "
                    f"layout.tensor = {layout.tensor}, which takes multiples of {unit}; set it to "
                    f"{length // unit * unit or unit}, or change the layout"
                )
        return ""

    def _heads(self, layout: Layout) -> str:
        shape = self.shape
        # In latent attention every head has separate keys.
        return ulysses_refusal(layout, shape.heads, shape.heads if shape.latent else shape.kv_heads)

    def _dimensions(self, layout: Layout) -> Iterator[str]:
        shape, sizes = self.shape, layout.sizes
        names = ["heads", "kv_heads", "d_ff", "expert_ff", "shared_ff", "vocab"]
        if shape.latent:  # keys and values of all heads come from one vector
            names.remove("kv_heads")
        found = [("tensor", name, getattr(shape, name)) for name in names]
        found.append(("expert", "experts", shape.experts))
        if shape.mixer:
            found.append(("tensor", "mixer.heads", shape.mixer.heads))
        for axis, name, size in found:
            if axis == "expert" and not size and sizes[axis] > 1:
                yield f"layout.expert = {sizes[axis]}, but the model has no experts; set it to 1"
            elif size % sizes[axis]:
                yield (
                    f"{name} = {size} does not divide over layout.{axis} = {sizes[axis]}; the "
                    f"nearest that does is layout.{axis} = {nearest_divisors(size, sizes[axis])}"
                )
        if zero_stage.shards_state(layout.zero_stage):
            yield from self._state(layout)

    def _state(self, layout: Layout) -> Iterator[str]:
        """Refusals of dimensions that ZeRO shards over ranks of context, fsdp and expert."""
        size, before = self.shape.d_model, ""
        for axis in ("context", "fsdp", "expert"):
            ranks = layout.sizes[axis]
            if size % ranks:
                nearest = nearest_divisors(size, ranks)
                yield (
                    f"d_model{before} = {size} does not divide over layout.{axis} = {ranks}; the "
                    f"nearest that does is layout.{axis} = {nearest}"
                )
            size //= ranks
            before += f" / layout.{axis} {ranks}" * (ranks > 1)

    def memory(self, layouts: Layout, buffers: RankBuffers | None, back_end: str) -> Memory:
        """Memory of a device; fields are numbers, or float [N].

        Args:
          buffers: of a pipeline's busiest rank; None without a pipeline.
        """
        parallelism = self.parallelism(layouts)
        return analytic.analytic_memory(
            self.shape, parallelism, buffers or RankBuffers((self.shape.layers,)), back_end
        )
