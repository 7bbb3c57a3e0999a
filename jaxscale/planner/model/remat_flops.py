"""What remat policies make again, in operations of a token, of a shape of any kind."""

from jaxscale.planner.model.shape import ModelShape


def recomputed_flops(shape: ModelShape, remat: str) -> float:
    """What a policy does not keep, but for a layer's last product, whose result no backward pass
    needs: as `ModelConfig.hardware_flops_per_token` counts it.

    Raises:
      ValueError: a policy that is not known of all kinds of layers.
    """
    if remat == "none":
        return 0.0
    if remat == "save_all_but_attention":
        return core_flops(shape)
    every, last = mlp_flops(shape)
    if remat == "save:query,key,value,attention,attention_out":
        return every - last
    if remat == "full":
        return shape.block_flops - last
    raise ValueError(f"what remat = {remat!r} repeats of a shape's layers is not known")


def core_flops(shape: ModelShape) -> float:
    """The two products of attention, of all layers."""
    own = shape.attending * shape.core_flops()
    if not shape.encoder_layers:
        return own
    return own + (shape.layers + _source(shape)) * shape.core_flops(shape.encoder_seq_len)


def mlp_flops(shape: ModelShape) -> tuple[float, float]:
    """All products of MLPs and experts, and the last ones of each alone."""
    dense = shape.with_mlp - shape.expert_layers + _source(shape)
    width = shape.top_k * shape.expert_ff * shape.routed_width + shape.shared_width * shape.d_model
    last = dense * shape.d_ff * shape.d_model + shape.expert_layers * width
    return dense * shape.mlp_flops + shape.expert_layers * shape.expert_flops, 2.0 * last


def _source(shape: ModelShape) -> float:
    """Layers of the encoder, times its tokens for one of the decoder."""
    return shape.encoder_layers * shape.encoder_seq_len / shape.seq_len
