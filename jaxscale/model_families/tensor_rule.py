"""Where a parameter is in a Hugging Face checkpoint."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorRule:
    """One parameter, or one part of a fused tensor, in a Hugging Face checkpoint.

    ours = tensor.reshape(view)[take].transpose(order).reshape(shape of ours), then zero rows up to
    the padded vocabulary. The last reshape only splits dims.

    Of several rules for one parameter (a tied head) the first names the tensor that is written;
    those of the others may be missing, and must be equal to it where they are present.
    """

    param: str  # path of ours, "layers/attention/q"; of a stack: one tensor per layer
    name: str  # "model.layers.{layer}.self_attn.q_proj.weight"; {expert}: one per expert too
    view: tuple[int, ...]
    order: tuple[int, ...]
    take: tuple[int | slice, ...] = ()  # of a fused tensor; several rules then share one name
    shape: tuple[int, ...] = ()  # of the tensor itself, where it is not that of `view`
    first: int = 0  # layers of the model before those of the stack
