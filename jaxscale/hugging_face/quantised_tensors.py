"""Tensors of checkpoints that are stored quantised: gpt-oss's experts in MXFP4.

A weight NAME [experts, inputs, outputs] is two tensors of bytes: NAME_blocks [experts, outputs,
inputs / 32, 16], two codes a byte, and NAME_scales [experts, outputs, inputs / 32], e8m0.
"""

import math
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxscale.hugging_face.safetensors_format import StoredTensor
from jaxscale.hugging_face.tensor_blocks import Index, inside_index, read_part, stored_order
from jaxscale.model_families.family import TensorRule
from jaxscale.ops.storage.quantised_storage import mxfp4_values

BLOCKS, SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class Mxfp4Tensor(StoredTensor):
    """A tensor of blocks and one of scales, as the bfloat16 weight that they represent exactly."""

    scales_at: tuple[pathlib.Path, int] = (pathlib.Path(), 0)  # file and first byte


def without_quantisation(
    hf: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """config.json and tensors of a checkpoint, with `Mxfp4Tensor`s in place of pairs of tensors.

    Raises:
      ValueError: another quantisation, or tensors that do not fit each other.
    """
    plain = {key: value for key, value in hf.items() if key != "quantization_config"}
    if plain == dict(hf):
        return plain, dict(tensors)
    given = hf["quantization_config"]
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if method != "mxfp4" or hf.get("model_type") != "gpt_oss":
        raise ValueError(
            f"quantized weights are not supported, except gpt_oss models in MXFP4: quant_method = "
            f"{method!r}; use a copy of the model in bfloat16"
        )
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(BLOCKS)]:
        weight = name.removesuffix(BLOCKS)
        blocks, scales = found.pop(name), found.pop(weight + SCALES, None)
        found[weight] = _joined(weight, blocks, scales)
    return plain, found


def _joined(weight: str, blocks: StoredTensor, scales: StoredTensor | None) -> Mxfp4Tensor:
    """The weight of both tensors."""
    if scales is not None and scales.dtype == blocks.dtype == "U8" and len(scales.shape) == 3:
        experts, outputs, count = scales.shape
        if blocks.shape == (experts, outputs, count, 16):
            shape, scales_at = (experts, 32 * count, outputs), (scales.path, scales.offset)
            return Mxfp4Tensor(blocks.path, blocks.offset, "BF16", shape, scales_at)
    raise ValueError(
        f"{weight}{BLOCKS} {blocks.dtype} {blocks.shape} needs {weight}{SCALES} of its shape "
        "without the last dimension, 16, both in U8"
    )


def read_stored_part(
    tensor: StoredTensor, rule: TensorRule, index: Index, dtype: np.dtype
) -> np.ndarray:
    """`read_part` for any tensor. Of MXFP4 the host stores one expert more."""
    if not isinstance(tensor, Mxfp4Tensor):
        return read_part(tensor, rule, index, dtype)
    inside, dims = inside_index(rule, index), stored_order(rule)
    part = np.zeros([index[dim].stop - index[dim].start for dim in dims], dtype)
    taken = [*rule.take, *[slice(None)] * (len(rule.view) - len(rule.take))][1:]
    rows = inside[dims[0]]
    for number in range(rows.start, rows.stop):
        one = _read_expert(tensor, number).reshape(rule.view[1:])[tuple(taken)]
        one = one[tuple(inside[dim] for dim in dims[1:])]
        target = part[number - rows.start]
        target[tuple(slice(0, size) for size in one.shape)] = one
    return part


def _read_expert(tensor: Mxfp4Tensor, number: int) -> np.ndarray:
    """The weight [inputs, outputs] of an expert, float32."""
    _, inputs, outputs = tensor.shape
    shape = outputs, inputs // 32
    blocks = _read_bytes(tensor.path, tensor.offset, number, (*shape, 16))
    return mxfp4_values(blocks, _read_bytes(*tensor.scales_at, number, shape)).T


def _read_bytes(path: pathlib.Path, offset: int, number: int, shape: tuple[int, ...]) -> np.ndarray:
    size = math.prod(shape)
    data = np.empty(size, np.uint8)
    with path.open("rb", buffering=0) as file:
        if os.preadv(file.fileno(), [data], offset + number * size) != size:
            raise ValueError(f"{path} ends before its header says")
    return data.reshape(shape)
