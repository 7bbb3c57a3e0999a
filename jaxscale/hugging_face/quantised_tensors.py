"""Tensors of checkpoints that are stored quantised: gpt-oss's experts in MXFP4, matrices in FP8.

MXFP4: a weight NAME [experts, inputs, outputs] is two tensors of bytes: NAME_blocks [experts,
outputs, inputs / 32, 16], two codes a byte, and NAME_scales [experts, outputs, inputs / 32], e8m0.

FP8, as published for DeepSeek-V3 and Qwen3 and written by transformers' FineGrainedFP8Config: a
weight NAME [outputs, inputs] in e4m3, and NAME_scale_inv [outputs / a, inputs / b], rounded up, the
factors of its blocks of a x b (`weight_block_size`).
"""

import math
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxscale.hugging_face.safetensors_format import DTYPES, StoredTensor
from jaxscale.hugging_face.tensor_blocks import Decode, Index, inside_index, read_part, stored_order
from jaxscale.model_families.family import TensorRule
from jaxscale.ops.storage.quantised_storage import mxfp4_values, scaled_by_blocks

BLOCKS, SCALES = "_blocks", "_scales"
FP8, FACTORS = "F8_E4M3", "_scale_inv"
CODES = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True)
class Mxfp4Tensor(StoredTensor):
    """A tensor of blocks and one of scales, as the bfloat16 weight that they represent exactly."""

    scales_at: tuple[pathlib.Path, int]  # file and first byte


@dataclass(frozen=True)
class Fp8Tensor(StoredTensor):
    """A matrix of codes and one of factors, as codes times factors in bfloat16, rounded from
    float32: the weights that DeepSeek's own conversion (`fp8_cast_bf16.py`) writes."""

    factors: StoredTensor
    block: tuple[int, int]  # outputs, inputs


def without_quantisation(
    hf: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """config.json and tensors of a checkpoint, with `Mxfp4Tensor`s or `Fp8Tensor`s in place of
    pairs of tensors.

    Raises:
      ValueError: another quantisation, or tensors that do not fit each other.
    """
    plain = {key: value for key, value in hf.items() if key != "quantization_config"}
    if plain == dict(hf):
        return plain, dict(tensors)
    given = hf["quantization_config"]
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if method == "mxfp4" and hf.get("model_type") == "gpt_oss":
        return plain, _from_mxfp4(tensors)
    if method == "fp8":
        return plain, _from_fp8(given, tensors)
    raise ValueError(
        f"quantized weights can be FP8 in blocks (quant_method fp8) and gpt_oss models' mxfp4, not "
        f"quant_method = {method!r}; use a copy of the model in bfloat16"
    )


def _from_mxfp4(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(BLOCKS)]:
        weight = name.removesuffix(BLOCKS)
        blocks, scales = found.pop(name), found.pop(weight + SCALES, None)
        found[weight] = _joined(weight, blocks, scales)
    return found


def _from_fp8(
    given: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    match given.get("weight_block_size"):
        case [int(outputs), int(inputs)] if min(outputs, inputs) > 0:
            block = outputs, inputs
        case size:
            raise ValueError(
                f"weight_block_size = {size!r} of FP8 weights must be two sizes, such as [128, "
                "128]; use a copy of the model in bfloat16"
            )
    if given.get("activation_scheme", "dynamic") != "dynamic":
        raise ValueError(
            f"activation_scheme = {given['activation_scheme']!r} of FP8 weights must be 'dynamic': "
            "stored scales of activations have no use here; use a copy of the model in bfloat16"
        )
    found = dict(tensors)
    for name in [name for name, one in tensors.items() if one.dtype == FP8]:
        found[name] = _scaled(name, tensors[name], found.pop(name + FACTORS, None), block)
    return found


def _scaled(
    name: str, codes: StoredTensor, factors: StoredTensor | None, block: tuple[int, int]
) -> Fp8Tensor:
    """The weight of both tensors."""
    if factors is not None and factors.dtype in DTYPES and len(codes.shape) == 2:
        shape = tuple(-(-size // part) for size, part in zip(codes.shape, block))
        if factors.shape == shape:
            return Fp8Tensor(codes.path, codes.offset, "BF16", codes.shape, factors, block)
    has = f"{factors.dtype} {factors.shape}" if factors is not None else "none"
    raise ValueError(
        f"{name} {codes.dtype} {codes.shape} needs {name}{FACTORS} with a number, in "
        f"{', '.join(DTYPES)}, for each block of {block[0]} x {block[1]}; it has {has}"
    )


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
    if isinstance(tensor, Fp8Tensor):
        return read_part(tensor, rule, index, dtype, (CODES, _fp8_values(tensor)))
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


def _fp8_values(tensor: Fp8Tensor) -> Decode:
    """The values of codes of a matrix, whose rows are scaled whole."""
    factors, columns = tensor.factors, tensor.shape[1]
    stored = DTYPES[factors.dtype]
    shape = (*factors.shape, stored.itemsize)
    of_blocks = _read_bytes(factors.path, factors.offset, 0, shape).view(stored)[..., 0]

    def values(codes: np.ndarray, first: int) -> np.ndarray:
        row, before = divmod(first, columns)
        after = -(before + codes.size) % columns
        rows = np.pad(codes, (before, after)).reshape(-1, columns)
        scaled = scaled_by_blocks(rows, of_blocks, tensor.block, row)
        return scaled.reshape(-1)[before : before + codes.size].astype(DTYPES[tensor.dtype])

    return values


def _read_bytes(path: pathlib.Path, offset: int, number: int, shape: tuple[int, ...]) -> np.ndarray:
    size = math.prod(shape)
    data = np.empty(size, np.uint8)
    with path.open("rb", buffering=0) as file:
        if os.preadv(file.fileno(), [data], offset + number * size) != size:
            raise ValueError(f"{path} ends before its header says")
    return data.reshape(shape)
