"""Form of the layer loop for a platform's compiler and a layout, with the reasons."""

from typing import NamedTuple

from jaxscale.config.layout import Layout
from jaxscale.ops.sizes import HIDING_TOKENS
from jaxscale.sharding.resolve import automatic_axes, has_experts
from jaxscale.sharding.zero import Zero


class ReductionTiming(NamedTuple):
    """Reductions that end before further gradients are computed, and the timing of gathers.

    XLA for TPUs (libtpu 0.0.52) keeps gradients in float32 until it reduces them, and it does so
    late: the head's after all layers, a layer's while the one below computes its own. On GPUs more
    of the reductions would be exposed, for no memory.
    """

    head: bool = False  # before the layers'
    layers: bool = False  # a layer's, while the one below is recomputed

    defer_gathers: bool = False
    """Whether a layer's backward pass gathers its weights when it starts: if the compiler waits for
    gathers anyway, prefetched weights only take memory."""


class LoopForm(NamedTuple):
    """The form of a step's loops over layers, which does not change the results."""

    unroll: bool  # whether layers are unrolled, each with separate residuals
    offload: bool  # whether residuals are in host memory between the passes
    fetches: bool  # whether weights of layers are in host memory
    early: ReductionTiming
    in_place: bool  # whether layers write residuals directly to the stack (`save_in_place`)
    hides_index: bool  # whether gradients are added at indices that the compiler does not know
    unfilled: bool  # whether arrays that are written before they are read are uninitialised
    reuses: bool  # whether all groups write their residuals into one set of arrays
    experts_on_use: bool  # whether experts are gathered and reduced during their own layer


def make_loop_form(
    layout: Layout,
    zero: Zero,
    platform: str,
    tokens: int,
    *,
    fetches: bool = False,
    unroll: bool = False,
) -> LoopForm:
    """The form on a platform.

    Args:
      tokens: as `early_reductions`.
      fetches: whether weights of layers are in host memory.
      unroll: whether to unroll even if the layout does not.
    """
    unroll = layout.unroll_layers or unroll
    unfilled = _can_leave_unfilled(layout, platform)
    stacked = not (unroll or layout.offloads_residuals)
    return LoopForm(
        unroll=unroll,
        offload=layout.offloads("activations"),
        fetches=fetches,
        early=early_reductions(layout, zero, platform, tokens),
        in_place=saves_in_place(layout, zero, platform),
        # XLA for GPUs (jax 0.11.2) adds to an entry in place only with a `dynamic-slice`: at
        # a constant index it reads and writes the entries of all layers.
        hides_index=platform == "gpu",
        unfilled=unfilled,
        # XLA (jax 0.12) fills new arrays with zeros in each group, and copies them: 112 GB in loops
        # of Llama 3.2 1B on eight H200, instead of 45. Not on TPUs, where a step needed more memory
        # and moved as many bytes; nor for unrolled layers, whose residuals are not stacked.
        reuses=(layout.num_groups > 1 or unfilled) and platform != "tpu" and stacked,
        # Not on GPUs, for which it has not been compiled with the kernels of grouped matmuls.
        experts_on_use=platform != "gpu",
    )


def saves_in_place(layout: Layout, zero: Zero, platform: str) -> bool:
    """Whether layers write residuals directly to the stack (`save_in_place`): on one GPU, with one
    micro-batch per group.

    With collectives, XLA's scheduler (jax 0.12) overlaps fewer of them with matmuls in fusions:
    Llama 3 8B, fsdp 8, exposes 14 ms more, for 3 ms of copies less. With experts, steps move 5 %
    more bytes."""
    one_device, one_microbatch = layout.num_devices == 1, layout.group_size == 1
    plain = not (layout.offloads_residuals or layout.unroll_layers or has_experts(zero.axes))
    return platform == "gpu" and one_device and one_microbatch and plain


def _can_leave_unfilled(layout: Layout, platform: str) -> bool:
    """Whether arrays that a step writes before it reads them need not be filled: on GPUs without
    automatic axes, over which the partitioner would replicate an uninitialised array."""
    sizes = layout.sizes
    return platform == "gpu" and all(sizes[axis] == 1 for axis in automatic_axes(sizes))


def early_reductions(layout: Layout, zero: Zero, platform: str, tokens: int) -> ReductionTiming:
    """The reductions that end early: the head's on TPUs, and the layers' if recompute hides them.

    Args:
      tokens: of a micro-batch on a rank, summed over tensor ranks.
    """
    if platform != "tpu" or not zero.reduces:
        return ReductionTiming()
    remat = layout.remat_policy
    recomputes = remat.by_names and not remat.names
    # Several micro-batches would all wait before the first is recomputed.
    layers = recomputes and layout.group_size == 1 and tokens >= HIDING_TOKENS
    late = layers and zero.waits_for_gathers and not layout.offloads("activations")
    return ReductionTiming(head=True, layers=layers, defer_gathers=late)
