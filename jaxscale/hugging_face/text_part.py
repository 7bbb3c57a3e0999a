"""The text model inside one that reads images too: its settings, and its tensors."""

import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxscale.hugging_face.safetensors_format import StoredTensor

log = logging.getLogger("jaxscale")

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"model_type": "gemma3_text", "vocab_size": 262_208, "num_attention_heads": 8}
}
"""By `model_type`: what the `text_config` of such a model leaves out, as the class of transformers
has it, beside what its reader knows."""

TEXT = {"language_model.": "", "model.language_model.": "model."}
"""Beginnings of the names of its tensors, in transformers 4 and 5 -> those of a text model."""
IMAGES = tuple(
    f"{outer}{part}."
    for outer in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector")
)


def text_settings(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of the text model: of another model than those of `DEFAULTS` its own.

    Raises:
      ValueError: there is no `text_config`.
    """
    defaults = DEFAULTS.get(str(hf.get("model_type")))
    if defaults is None:
        return hf
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(
            f"config.json has text_config = {text!r}; of a {hf['model_type']} model, which reads "
            "images too, it is a mapping of names to values"
        )
    return {**defaults, **text}


def text_tensors(
    tensors: Mapping[str, StoredTensor], directory: pathlib.Path
) -> dict[str, StoredTensor]:
    """The tensors of the text model, under the names that it has alone. A line says how many are
    left out."""
    found = {
        _own_name(name): tensor for name, tensor in tensors.items() if not name.startswith(IMAGES)
    }
    log.warning(
        f"note: of the model in {directory}, which reads images too, the text model is taken: "
        f"{len(tensors) - len(found)} tensors of {len(tensors)} are of images, and left out"
    )
    return found


def _own_name(name: str) -> str:
    for outer, own in TEXT.items():
        if name.startswith(outer):
            return own + name.removeprefix(outer)
    return name
