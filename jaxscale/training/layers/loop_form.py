"""The form of the layer loop: what a platform's compiler and a layout ask of it, and why."""

from typing import NamedTuple

from jaxscale.config.layout import Layout
from jaxscale.ops.sizes import HIDING_TOKENS
from jaxscale.sharding.resolve import automatic_axes, has_experts
from jaxscale.sharding.zero import Zero


class Early(NamedTuple):
    """Which reductions end before further gradients are computed, and what follows for weights.

    XLA for TPUs holds gradients in float32 until it reduces them, and it does so late: those of the
    head when all layers are done, those of a layer while the one below computes its own. On GPUs
    more of the reductions would be exposed, for no memory.
    """

    head: bool = False  # before the layers'
    layers: bool = False  # a layer's, while the one below is recomputed

    gathers_late: bool = False
    """Whether a layer's backward pass gathers its weights when it begins: where the compiler waits
    for gathers anyway, prefetched weights only take memory."""


class LoopForm(NamedTuple):
    """How a step's loops over layers are written; the results are the same."""

    unroll: bool  # whether the layers are written out, each with residuals of its own
    offload: bool  # whether residuals are in host memory between the passes
    early: Early
    in_place: bool  # whether residuals are written where they are made (`save_in_place`)
    hides_index: bool  # whether gradients are added at indices that the compiler does not know
    unfilled: bool  # whether arrays that are written before they are read hold anything at first
    reuses: bool  # whether all groups write their residuals into one set of arrays


def make_loop_form(
    layout: Layout, zero: Zero, platform: str, tokens: int, *, unroll: bool = False
) -> LoopForm:
    """The form on a platform.

    Args:
      tokens: as `early_reductions`.
      unroll: whether to unroll where the layout does not.
    """
    unroll = layout.unroll_layers or unroll
    unfilled = _can_leave_unfilled(layout, platform)
    stacked = not (unroll or layout.offloads_residuals)
    return LoopForm(
        unroll=unroll,
        offload=layout.offloads("activations"),
        early=early_reductions(layout, zero, platform, tokens),
        in_place=saves_in_place(layout, zero, platform),
        # XLA for GPUs adds to an entry in place only where it sees a `dynamic-slice`: at a constant
        # index it reads and writes the entries of all layers.
        hides_index=platform == "gpu",
        unfilled=unfilled,
        # XLA would fill new arrays in each group with zeros, and copy them. Not on TPUs, where a
        # step needed more memory and moved as many bytes; nor for unrolled layers, whose residuals
        # are not stacked.
        reuses=(layout.num_groups > 1 or unfilled) and platform != "tpu" and stacked,
    )


def saves_in_place(layout: Layout, zero: Zero, platform: str) -> bool:
    """Whether layers write their residuals where they make them (`save_in_place`): on one GPU, with
    one micro-batch a group.

    With collectives, XLA's scheduler hides less of them behind matmuls that it sees as fusions: 8B,
    fsdp 8: 14 ms more exposed, for 3 ms of copies less. With experts, steps move 5 % more bytes."""
    one_device, one_microbatch = layout.num_devices == 1, layout.group_size == 1
    plain = not (layout.offloads_residuals or layout.unroll_layers or has_experts(zero.axes))
    return platform == "gpu" and one_device and one_microbatch and plain


def _can_leave_unfilled(layout: Layout, platform: str) -> bool:
    """Whether arrays that a step writes before it reads them need not be filled: on GPUs, and where
    the compiler partitions nothing, for every rank of an automatic axis would have all of them."""
    sizes = layout.sizes
    return platform == "gpu" and all(sizes[axis] == 1 for axis in automatic_axes(sizes))


def early_reductions(layout: Layout, zero: Zero, platform: str, tokens: int) -> Early:
    """Which reductions end early: those of the head on TPUs, and those of layers where recompute
    hides them.

    Args:
      tokens: of a micro-batch on a rank, those of all ranks of tensor together.
    """
    if platform != "tpu" or not zero.reduces:
        return Early()
    remat = layout.remat_policy
    recomputes = remat.by_names and not remat.names
    # Several micro-batches would all wait before the first is recomputed.
    layers = recomputes and layout.group_size == 1 and tokens >= HIDING_TOKENS
    late = layers and zero.waits_for_gathers and not layout.offloads("activations")
    return Early(head=True, layers=layers, gathers_late=late)
