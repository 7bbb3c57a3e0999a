"""The text model inside a multimodal model: its settings and tensors."""

import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxscale.hugging_face.safetensors_format import StoredTensor

log = logging.getLogger("jaxscale")

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"model_type": "gemma3_text", "vocab_size": 262_208, "num_attention_heads": 8}
}
"""`model_type` -> defaults that `text_config` leaves out, from the class of transformers, in
addition to the defaults of the family's reader."""

TEXT = {"language_model.": "", "model.language_model.": "model."}
"""Prefixes of tensor names in transformers 4 and 5 -> the prefixes of a text model."""
IMAGES = tuple(
    f"{outer}{part}."
    for outer in ("", "model.")
    for part in ("vision_tower", "multi_modal_projector")
)


def text_settings(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of the text model; unchanged if the `model_type` is not in `DEFAULTS`.

    Raises:
      ValueError: there is no `text_config`.
    """
    defaults = DEFAULTS.get(str(hf.get("model_type")))
    if defaults is None:
        return hf
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(
            f"config.json has text_config = {text!r}; for a multimodal {hf['model_type']} model it "
            "is a mapping of names to values"
        )
    return {**defaults, **text}


def text_tensors(
    tensors: Mapping[str, StoredTensor], directory: pathlib.Path
) -> dict[str, StoredTensor]:
    """The tensors of the text model, under the names of a model of text only. Logs the number of
    tensors that are not read."""
    found = {
        _own_name(name): tensor for name, tensor in tensors.items() if not name.startswith(IMAGES)
    }
    log.warning(
        f"note: {directory} has a multimodal model, of which only the text model is read: "
        f"{len(tensors) - len(found)} of {len(tensors)} tensors belong to images"
    )
    return found


def _own_name(name: str) -> str:
    for outer, own in TEXT.items():
        if name.startswith(outer):
            return own + name.removeprefix(outer)
    return name
