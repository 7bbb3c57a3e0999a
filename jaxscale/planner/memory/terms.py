"""Memory of a step as a sum of terms: their names in reports, and the phases where each is live."""
# ruff: noqa: RUF009 - `_term` makes a field, as `dataclasses.field` does

from dataclasses import dataclass, field, fields
from typing import Any

from jaxscale.sharding.model_trace import Ints, maximum

FORWARD, HEAD, ACTIVATIONS, ATTENTION, GRADIENTS, LOOP_END, STEP_END = PHASES = (
    "forward",
    "head",
    "activations of a layer",
    "attention of a layer",
    "gradients of a layer",
    "end of the layer loop",
    "end of the step",
)
BACKWARD = ACTIVATIONS, ATTENTION, GRADIENTS
LAYER = FORWARD, *BACKWARD
MICROBATCHES = HEAD, *LAYER

WEIGHTS, GRADS, MOMENTS, SAVED, GATHERED, OTHERS = (
    "weights",
    "gradients",
    "optimizer state",
    "saved activations",
    "gathered weights",
    "temporaries",
)
"""Groups of terms, for figures."""


def _term(text: str, group: str, *phases: str) -> Any:
    return field(default=0, metadata={"text": text, "group": group, "phases": phases})


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    `arguments` are live throughout; the temporaries are the terms of the largest phase.
    """

    # Between steps: the arguments.
    parameters: Ints = _term("weights", WEIGHTS)
    optimizer: Ints = _term("optimizer state", MOMENTS)  # on the device
    batch: Ints = _term("batch", OTHERS)  # and the step counter
    tables: Ints = _term("embedding tables", WEIGHTS)
    vectors: Ints = _term("looked-up rows of tables", OTHERS, *PHASES)
    # Whole accumulators, or reduce-scattered shards.
    gradients: Ints = _term("gradients", GRADS, *LAYER, LOOP_END, STEP_END)
    stash: Ints = _term("saved activations", SAVED, *MICROBATCHES)  # on the device
    # Of attention in the layer outside the loop.
    zeros: Ints = _term("attention accumulators", OTHERS, *MICROBATCHES)
    # Lion's update and its next moments read the same ones.
    moments_copy: Ints = _term("copy of the moments", MOMENTS, *PHASES)
    # In a pipeline: received activations and gradients, and send buffers.
    messages: Ints = _term("pipeline send and receive buffers", SAVED, *MICROBATCHES)
    # With the next chunk's.
    outer_weights: Ints = _term("gathered embedding and head", GATHERED, *MICROBATCHES)
    pending: Ints = _term("gradients of a chunk before reduction", GRADS, *MICROBATCHES)
    # In ZeRO stages 1 and 2: gathered, in the compute type.
    kept_weights: Ints = _term(
        "weights in use, kept for the step", WEIGHTS, *MICROBATCHES, LOOP_END
    )
    # In a pipeline with two directions, in the compute type, the mirrored rank's included.
    mirrored_weights: Ints = _term("weights of two directions", WEIGHTS, *MICROBATCHES)
    # And accumulators for the mirrored rank's.
    mirrored_gradients: Ints = _term(
        "gradients of the mirrored direction", GRADS, *MICROBATCHES, LOOP_END, STEP_END
    )
    # By the TPU's compiler: sharded parameters of the layers.
    converted: Ints = _term("weights cast to the compute type", WEIGHTS, *MICROBATCHES)
    # An encoder's output and last layer; the gradients of what the decoder read.
    between_stacks: Ints = _term(
        "between stacks, as of an encoder or dense layers", SAVED, *MICROBATCHES
    )
    # Of a layer, until the backward pass of the same operation has read its buffers.
    paired_forward: Ints = _term("activations of an overlapped forward pass", SAVED, *BACKWARD)
    # With an encoder in a pipeline: the inputs of passes, for their W.
    received: Ints = _term("streams kept for weight gradients", SAVED, *MICROBATCHES)
    # From host memory, of this layer and the next.
    fetched: Ints = _term("shards of a layer from host memory", GATHERED, *LAYER)
    # In ZeRO stage 1: shards from the last visit, next to whole sums.
    reduced_gradients: Ints = _term("gradients, reduced", GRADS, *LAYER, LOOP_END, STEP_END)
    # In the compute type; where gathered, also the next layer's.
    layer_weights: Ints = _term("gathered weights of a layer", GATHERED, *LAYER)
    outer_gradients: Ints = _term("gradients of embedding and head", GRADS, *LAYER, STEP_END)
    # By the TPU's compiler: before and after reduction.
    carried: Ints = _term("gradients of the previous layer", GRADS, *LAYER)
    restacked: Ints = _term("gradients of experts, for their reduce-scatter", GRADS, *LAYER)
    # Outputs of G micro-batches.
    forward_loop: Ints = _term("activations of one layer's forward", OTHERS, FORWARD)
    # Logits of a chunk, the gathered matrix, its gradient, the stream.
    head: Ints = _term("logits and head", OTHERS, HEAD)
    # Accumulators as above, without the ones not allocated yet.
    head_sums: Ints = _term("gradients", GRADS, HEAD)
    # Inputs and outputs of one layer for G micro-batches, and its accumulators.
    group: Ints = _term("accumulation group of micro-batches", SAVED, *BACKWARD)
    # Activations and their gradients, at the MLP's activation.
    working_set: Ints = _term("activations of one layer's backward", OTHERS, ACTIVATIONS)
    # With an encoder: the same at attention's kernel.
    attention: Ints = _term("activations of attention's backward", OTHERS, ATTENTION)
    # With what is left of the working set.
    layer_gradients: Ints = _term("weight gradients of one layer", GRADS, GRADIENTS)
    # By the TPU's compiler: queued at the end of the loop.
    walk_end: Ints = _term("gradients waiting for reduction", GRADS, LOOP_END)
    # The larger of the outputs of reductions over replicas and the optimizer's temporaries.
    end: Ints = _term("gradient reduction and update", OTHERS, STEP_END)
    updated: Ints = _term("a parameter and its moments from host memory", MOMENTS, STEP_END)
    # In host memory, where the back end has one.
    host_optimizer: Ints = _term("in host memory: optimizer state", MOMENTS)
    host_stash: Ints = _term("in host memory: activations", SAVED)
    host_weights: Ints = _term("in host memory: weights", WEIGHTS)

    @property
    def on_host(self) -> Ints:
        """Bytes in host memory."""
        return self.host_optimizer + self.host_stash + self.host_weights

    @property
    def arguments(self) -> Ints:
        return self.parameters + self.optimizer + self.batch + self.tables

    @property
    def phases(self) -> dict[str, Ints]:
        """Temporaries of each phase."""
        return {phase: sum(getattr(self, name) for name in LIVE[phase]) for phase in PHASES}

    @property
    def at_peak(self) -> dict[str, int]:
        """Terms of one layout's peak by field, without terms of 0 bytes."""
        phase = max(self.phases, key=lambda name: self.phases[name])
        names = ("parameters", "optimizer", "batch", "tables", *LIVE[phase])
        sizes = {name: int(getattr(self, name)) for name in names}
        return {name: size for name, size in sizes.items() if size}

    @property
    def temporaries(self) -> Ints:
        return maximum(*self.phases.values())

    @property
    def peak(self) -> Ints:
        return self.arguments + self.temporaries


TEXTS = {term.name: term.metadata["text"] for term in fields(Memory)}
GROUPS = {term.name: term.metadata["group"] for term in fields(Memory)}
LIVE = {
    phase: [term.name for term in fields(Memory) if phase in term.metadata["phases"]]
    for phase in PHASES
}
"""Phase -> the terms that are live in it, in addition to the arguments."""
