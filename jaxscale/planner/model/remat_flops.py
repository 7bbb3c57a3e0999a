"""FLOPs per token that remat policies recompute, for any model shape."""

from jaxscale.planner.model.shape import ModelShape


def recomputed_flops(shape: ModelShape, remat: str) -> float:
    """FLOPs of what a policy does not save, except a layer's last matmul, whose result the backward
    pass does not need: as `ModelConfig.hardware_flops_per_token` counts.

    Raises:
      ValueError: a policy without a formula for every kind of layer.
    """
    if remat == "none":
        return 0.0
    if remat == "save_all_but_attention":
        return core_flops(shape)
    every, last = mlp_flops(shape)
    if remat == "save:query,key,value,attention,attention_out":
        return every - last + _compressed_flops(shape)
    if remat == "full":
        return shape.block_flops - last
    raise ValueError(f"remat = {remat!r} has no formula for a model given by its sizes")


def core_flops(shape: ModelShape) -> float:
    """Core attention of all layers."""
    own = shape.attending * shape.core_flops()
    if not shape.encoder_layers:
        return own
    return own + (shape.layers + _source(shape)) * shape.core_flops(shape.encoder_seq_len)


def mlp_flops(shape: ModelShape) -> tuple[float, float]:
    """All matmuls of MLPs and experts, and of these the last one of each MLP."""
    dense = shape.with_mlp - shape.expert_layers + _source(shape)
    width = shape.top_k * shape.expert_ff * shape.routed_width + shape.shared_width * shape.d_model
    last = dense * shape.d_ff * shape.d_model + shape.expert_layers * width
    return dense * shape.mlp_flops + shape.expert_layers * shape.expert_flops, 2.0 * last


def _compressed_flops(shape: ModelShape) -> float:
    """What latent attention makes queries, keys and values of, which no policy saves."""
    if not shape.latent:
        return 0.0
    ranks = shape.latent.query_rank + shape.latent.kv_rank
    return 2.0 * shape.attending * shape.d_model * ranks


def _source(shape: ModelShape) -> float:
    """Encoder layers, times encoder tokens per decoder token."""
    return shape.encoder_layers * shape.encoder_seq_len / shape.seq_len
