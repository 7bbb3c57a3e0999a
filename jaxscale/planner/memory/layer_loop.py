"""The sizes of a step's layer loop, without JAX: see `training.layer_loop`, `sharding.zero`."""

from dataclasses import dataclass
from typing import Any

from jaxscale.config import Config
from jaxscale.planner.memory.saved_activations import saved_bytes
from jaxscale.planner.memory.zero_traffic import num_layer_passes
from jaxscale.planner.model.param_shapes import Ints, itemsize, parameters, select


@dataclass(frozen=True)
class LayerLoop:
    """How a step loops over its layers: see `training.layer_loop` and `pipeline.executor`."""

    tokens: Ints  # of a micro-batch on a device, of all tensor ranks together
    group: Ints  # micro-batches of an accumulation group: one loop over the layers
    single: Any  # whether a step computes each layer's gradients once
    gathers: Any  # whether weights are all-gathered
    scatters: Any  # whether gradients are reduce-scattered per visit
    reduces: Any  # whether gradients are reduced per visit
    beside: Any  # whether the last layer is outside the loop
    compute: int  # bytes of an element
    accumulated: int  # bytes of an element
    weights: Ints  # elements of a layer, whole over fsdp
    sums: Ints  # elements of the gradient accumulators

    @classmethod
    def of(cls, config: Config, rows: Ints) -> "LayerLoop":
        """Of a config whose layout is resolved.

        Args:
          rows: layers that a device allocates.
        """
        layout, count = config.layout, num_layer_passes(config.layout)
        whole = layout.pipeline == 1
        several, stage, single = layout.fsdp > 1, layout.zero_stage, (count == 1) & whole
        shards = layout.batch_shards * layout.microbatches * layout.context
        gathers = several & (stage == 3)
        scatters = several & ((stage >= 2) | ((stage == 1) & single))
        sums = rows * elements(config, "layers", scatters)
        # With a single visit the gradients of embedding and head need no accumulator.
        sums = sums + select(single, 0, elements(config, "embed head", scatters))
        return cls(
            tokens=config.data.tokens_per_step // shards,
            group=layout.microbatches // count,
            single=single,
            gathers=gathers,
            scatters=scatters,
            reduces=scatters | (single & (layout.batch_shards > 1)),
            beside=(gathers | layout.offloads("activations")) & whole,
            compute=itemsize(config.model.compute_dtype),
            accumulated=itemsize(config.optimizer.accumulation_dtype),
            weights=elements(config, "layers"),
            sums=sums,
        )


def elements(config: Config, parts: str, over_fsdp: Any = False) -> Ints:
    """Parameters of some parts of the model on a device; "layers" is one layer."""
    return sum(
        array.shard_size(config.layout, over_fsdp=over_fsdp)
        for array in parameters(config.model)
        if array.part in parts.split()
    )


def mlp_weights(config: Config) -> Ints:
    """Parameters of a layer's MLP, not sharded over fsdp."""
    return sum(
        array.shard_size(config.layout, over_fsdp=False)
        for array in parameters(config.model)
        if "mlp" in array.axes
    )


def stream_bytes(config: Config, loop: LayerLoop) -> Ints:
    """The residual stream of a micro-batch."""
    return loop.compute * loop.tokens * config.model.d_model // config.layout.tensor


def layer_saved_bytes(config: Config, loop: LayerLoop) -> Ints:
    """Saved activations of a layer and a micro-batch."""
    each = saved_bytes(config.model, config.layout.remat_policy)
    return loop.tokens * each // config.layout.tensor
