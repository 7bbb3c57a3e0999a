"""How a step goes through the layers, in numbers: `zero.Zero` and `walk` without JAX."""

from dataclasses import dataclass

from jaxscale.config import Config
from jaxscale.planner.arrays import itemsize, parameters
from jaxscale.planner.collectives import walks
from jaxscale.planner.kept import kept_bytes


@dataclass(frozen=True)
class Walk:
    """How a step goes through the layers, as `zero.Zero` and `walk` have it."""

    tokens: int  # of a micro-batch on a device; the ranks of tensor share what they hold of them
    group: int  # micro-batches that walk together
    single: bool  # whether a step visits each layer's gradients once
    gathers: bool
    scatters: bool
    reduces: bool
    beside: bool  # whether there are layers outside of the loop over them
    compute: int  # bytes of an element
    accumulated: int  # bytes of an element
    weights: int  # elements of a layer, whole over fsdp
    sums: int  # elements of the accumulators

    @classmethod
    def of(cls, config: Config) -> "Walk":
        layout, count = config.layout, walks(config.layout)
        several, stage, single = layout.fsdp > 1, layout.zero_stage, count == 1
        shards = layout.batch_shards * layout.microbatches * layout.context
        gathers = several and stage == 3
        scatters = several and (stage >= 2 or (stage == 1 and single))
        sums = config.model.num_layers * elements(config, "layers", scatters)
        # A step of one visit has nothing to add to the gradients of embedding and head.
        sums += 0 if single else elements(config, "embed head", scatters)
        return cls(
            tokens=config.data.tokens_per_step // shards,
            group=layout.microbatches // count,
            single=single,
            gathers=gathers,
            scatters=scatters,
            reduces=scatters or (single and layout.batch_shards > 1),
            beside=gathers or layout.offloads("activations"),
            compute=itemsize(config.model.compute_dtype),
            accumulated=itemsize(config.optimizer.accumulation_dtype),
            weights=elements(config, "layers"),
            sums=sums,
        )


def elements(config: Config, parts: str, over_fsdp: bool = False) -> int:
    """Of the parameters of these parts, one layer's for "layers"."""
    return sum(
        array.shard_size(config.layout, over_fsdp=over_fsdp)
        for array in parameters(config.model)
        if array.part in parts.split()
    )


def mlp_weights(config: Config) -> int:
    """Elements of a layer's MLP, whole over fsdp."""
    return sum(
        array.shard_size(config.layout, over_fsdp=False)
        for array in parameters(config.model)
        if "mlp" in array.axes
    )


def stream_bytes(config: Config, walk: Walk) -> int:
    """The residual stream of a micro-batch."""
    return walk.compute * walk.tokens * config.model.d_model // config.layout.tensor


def layer_kept_bytes(config: Config, walk: Walk) -> int:
    """What a layer keeps of a micro-batch."""
    each = kept_bytes(config.model, config.layout.remat)
    return walk.tokens * each // config.layout.tensor
