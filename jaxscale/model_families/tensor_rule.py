"""Where a parameter is in a Hugging Face checkpoint."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorRule:
    """One parameter, or one part of a fused tensor, in a Hugging Face checkpoint.

    ours = tensor.reshape(view)[take].transpose(order), which has the shape of ours without the
    layers of its stack and without the padding rows of the vocabulary.

    Of several rules for one parameter (a tied head) the first names the tensor that is written;
    those of the others may be missing, and must be equal to it where they are present.
    """

    param: str  # path of ours, "layers/attention/q"; of a stack: one tensor per layer
    name: str  # "model.layers.{layer}.self_attn.q_proj.weight"
    shape: tuple[int, ...]  # of the tensor: (heads * head_dim, d_model)
    view: tuple[int, ...]  # (heads, head_dim, d_model)
    order: tuple[int, ...]  # (2, 0, 1) for ours of [embed, heads, head_dim]
    take: tuple[int | slice, ...] = ()  # of a fused tensor; several rules then share one name
