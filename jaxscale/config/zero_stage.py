"""ZeRO stages (arXiv 1910.02054): what each shards, gathers and reduces, and when; without JAX.

The step (`sharding.zero`) and the planner read the same predicates. A stage is an int, or an array
of ints for many layouts. Over axes of one rank nothing is sent in any stage.

A step computes a layer's gradients in one visit for each accumulation group.
"""

from typing import Any

Ints = Any  # an int, or int [N]
Bools = Any  # a bool, or bool [N]


def replicates(stage: Ints) -> Bools:
    """Whether every rank has whole parameters, gradients and state."""
    return stage == 0


def shards_state(stage: Ints) -> Bools:
    """Whether parameters at rest and the optimizer's state are shards; weights are gathered before
    use."""
    return stage >= 1


def keeps(stage: Ints) -> Bools:
    """Whether weights are gathered once per step, and kept."""
    return (stage >= 1) & (stage < 3)


def gathers_each_pass(stage: Ints) -> Bools:
    """Whether weights are gathered in every pass over the layers."""
    return stage == 3


def scatters(stage: Ints) -> Bools:
    """Whether every visit leaves shards of gradients."""
    return stage >= 2


def scatters_last(stage: Ints) -> Bools:
    """Whether gradients are whole until the last visit leaves shards."""
    return stage == 1


def leaves_shards(stage: Ints, single_visit: Bools) -> Bools:
    """Whether sums of gradients are shards, after every visit or after the only one."""
    return scatters(stage) | (scatters_last(stage) & single_visit)


def remains(stage: Ints, ranks: Ints, replicas: Ints) -> Bools:
    """Whether the last visit has gradients other than vectors to reduce.

    Args:
      ranks: that a stage shards over, of fsdp and expert.
      replicas: ranks with the same shards, over data.
    """
    return (replicas > 1) | ((ranks > 1) & (stage < 2))


def reduces_last(layout: Any) -> Bools:
    """Whether the last visit of a step reduces gradients that the others do not."""
    return remains(layout.zero_stage, layout.fsdp * layout.expert, layout.data)
