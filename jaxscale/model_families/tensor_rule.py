"""Where a parameter is in a Hugging Face checkpoint."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorRule:
    """One parameter (or one part of a fused one) in a Hugging Face checkpoint.

    ours = tensor.reshape(view)[take].transpose(order).reshape(shape of ours), then zero rows up to
    the padded vocabulary.
    """

    param: str  # path of ours, "layers/attention/q"; of a stack: one tensor per layer
    name: str  # "model.layers.{layer}.self_attn.q_proj.weight"
    view: tuple[int, ...]
    order: tuple[int, ...]
    take: tuple = ()  # ints and slices, of a fused tensor; several rules then share one name
