"""Quantised checkpoints: gpt-oss's in MXFP4, read without loss, in bfloat16 or in
`model.base_dtype`; DeepSeek's and Qwen's in FP8, read as bfloat16."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxscale.config.model import ModelConfig
from jaxscale.hugging_face.model_folder import open_model, write_model
from jaxscale.hugging_face.quantised_tensors import Fp8Tensor, read_stored_part
from jaxscale.hugging_face.tensor_blocks import taken_shape
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.models.protocol import stored_weights
from jaxscale.ops.storage.quantised_storage import mxfp4_values, unpack_weights, whole_shapes
from jaxscale.run.pretrained import from_pretrained

CONFIG = ModelConfig(
    **{"family": "gpt_oss", "num_layers": 1, "d_model": 64, "d_ff": 32, "num_experts": 4},
    **{"num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "vocab_size": 128},
    **{"compute_dtype": "float32", "param_dtype": "bfloat16"},
)

DEEPSEEK = ModelConfig(
    **{"family": "deepseek_v3", "num_layers": 2, "dense_layers": 1, "d_model": 40, "d_ff": 56},
    **{"num_experts": 2, "experts_per_token": 1, "expert_d_ff": 24, "rope_head_dim": 8},
    **{"router_groups": 1, "router_groups_kept": 1, "shared_d_ff": 24},
    **{"num_heads": 3, "num_kv_heads": 3, "head_dim": 16},
    **{"value_head_dim": 12, "kv_rank": 20, "query_rank": 28, "vocab_size": 128},
    **{"compute_dtype": "float32", "param_dtype": "float32"},
)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FP8 |= {"weight_block_size": [16, 24]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same model in MXFP4 and in bfloat16, and its parameters as read from bfloat16."""
    root, rng = tmp_path_factory.mktemp("mxfp4"), np.random.default_rng(0)
    model = Decoder(CONFIG, plain_kernels())
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: jax.numpy.asarray(rng.normal(0, 0.1, x.shape), x.dtype), shapes)
    packed, whole = root / "mxfp4", root / "bfloat16"
    for folder in (packed, whole):
        write_model(folder, CONFIG, model.axes, params, dtype="bfloat16", workdir=root)
    tensors = load_file(whole / "model.safetensors")
    blocks_of = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, inputs, outputs = tensors[name].shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(118, 124, (experts, outputs, inputs // 32), np.uint8)
        values = np.stack([mxfp4_values(*one).T for one in zip(blocks, scales)])
        tensors[name] = np.ascontiguousarray(values, tensors[name].dtype)
        del blocks_of[name]
        blocks_of |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    save_file(blocks_of, packed / "model.safetensors", {"format": "pt"})
    modules = ["model.layers.*.self_attn"]
    _set_quantisation(packed, {"quant_method": "mxfp4", "modules_to_not_convert": modules})
    return packed, whole, from_pretrained(whole)


def test_blocks_are_read_as_the_weights_that_they_represent(folders):
    packed, whole = from_pretrained(folders[0]), folders[2]
    assert packed.config == whole.config
    jax.tree.map(np.testing.assert_array_equal, packed.params, whole.params)


def test_blocks_are_stored_as_blocks_without_loss(folders):
    """Of experts alone; attention keeps its type."""
    config = dataclasses.replace(
        CONFIG, lora_rank=2, base_dtype="mxfp4", base_targets="up,gate,down"
    )
    stored = stored_weights(Decoder(config, plain_kernels()))
    assert sorted(stored) == ["layers/mlp/down", "layers/mlp/gate", "layers/mlp/up"]
    model = Decoder(CONFIG, plain_kernels())
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    read = open_model(folders[0]).read(model.axes, shapes, stored)
    assert read["layers"]["mlp"]["up"].shape == (1, 4, 34, 32)
    assert read["layers"]["mlp"]["up"].dtype == np.uint8
    assert whole_shapes(jax.eval_shape(lambda: read), stored, "bfloat16") == shapes
    values = jax.jit(lambda read: unpack_weights(read, stored))(read)
    jax.tree.map(np.testing.assert_array_equal, values, folders[2].params)


def test_other_quantisations_are_refused(folders, tmp_path):
    tensors = load_file(folders[0] / "model.safetensors")
    shutil.copy(folders[0] / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    _set_quantisation(tmp_path, {"quant_method": "awq"})
    with pytest.raises(ValueError, match="and gpt_oss models' mxfp4, not quant_method = 'awq'"):
        open_model(tmp_path)
    _set_quantisation(tmp_path, {"quant_method": "mxfp4"})
    name = next(name for name in tensors if name.endswith("_scales"))
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"needs {name} of its shape without the last"):
        open_model(tmp_path)


NUMBERS = np.array(
    [
        (-1) ** (code >> 7)
        * (
            (code & 7) * 2.0**-9
            if code >> 3 & 15 == 0
            else (8 + (code & 7)) * 2.0 ** (code // 8 % 16 - 10)
        )
        for code in range(256)
    ],
    np.float32,
)
"""The number of each byte in e4m3, whose two NaNs are left out: a sign, four bits of an exponent
with bias 7, three of a significand."""
BLOCK = 16, 24


@pytest.fixture(scope="module")
def in_fp8(tmp_path_factory):
    """The folders of a DeepSeek with its matrices in blocks of FP8, and with their products in
    bfloat16; and its parameters' axes and shapes."""
    root, rng = tmp_path_factory.mktemp("fp8"), np.random.default_rng(0)
    model = Decoder(DEEPSEEK, plain_kernels())
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    packed, whole = root / "fp8", root / "bfloat16"
    params = jax.tree.map(lambda x: jax.numpy.asarray(rng.normal(0, 0.1, x.shape), x.dtype), shapes)
    write_model(packed, DEEPSEEK, model.axes, params, dtype="bfloat16", workdir=root)
    shutil.copytree(packed, whole)
    tensors = load_file(whole / "model.safetensors")
    quantised = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        codes = rng.choice([*range(127), *range(128, 255)], (rows, columns)).astype(np.uint8)
        factors = rng.uniform(0.01, 0.02, (-(-rows // BLOCK[0]), -(-columns // BLOCK[1])))
        factors = factors.astype("bfloat16" if "mlp" in name else np.float32)  # Qwen3, DeepSeek
        quantised[name] = codes.view("float8_e4m3fn")
        quantised[f"{name}_scale_inv"] = factors
        tensors[name] = tensors[name].copy()
        for row, column in np.ndindex(rows, columns):
            factor = np.float32(factors[row // BLOCK[0], column // BLOCK[1]])
            tensors[name][row, column] = NUMBERS[codes[row, column]] * factor
    save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    save_file(quantised, packed / "model.safetensors", {"format": "pt"})
    _set_quantisation(packed, FP8)
    return packed, whole, model.axes, shapes


def test_fp8_blocks_are_read_as_the_products_of_numbers_and_factors(in_fp8):
    """Of blocks that the matrix cuts, of tensors of two parameters, of parts of parameters."""
    packed, whole = (open_model(folder) for folder in in_fp8[:2])
    assert packed.config == whole.config
    assert packed.dtype == "bfloat16"
    for parameter in packed.check(*in_fp8[2:]):
        rule, name = parameter.rule, parameter.tensors[-1]
        shape = taken_shape(rule)
        assert isinstance(packed.tensors[name], Fp8Tensor) == name.endswith("_proj.weight")
        for first in (0, shape[0] // 2):
            index = (slice(first, shape[0]), *(slice(0, size) for size in shape[1:]))
            for dtype in ("bfloat16", "float32"):
                read = [
                    read_stored_part(one.tensors[name], rule, index, np.dtype(dtype))
                    for one in (packed, whole)
                ]
                np.testing.assert_array_equal(*read)


def test_other_forms_of_fp8_are_refused(in_fp8, tmp_path):
    shutil.copytree(in_fp8[0], tmp_path, dirs_exist_ok=True)
    for changed, message in (
        ({"weight_block_size": None}, "weight_block_size = None of FP8 weights must be two sizes"),
        ({"activation_scheme": "static"}, "activation_scheme = 'static' of FP8 weights must be"),
        ({"weight_block_size": [16, 16]}, "with a number, in F64, F32, F16, BF16, for each block"),
    ):
        _set_quantisation(tmp_path, FP8 | changed)
        with pytest.raises(ValueError, match=message):
            open_model(tmp_path)


def _set_quantisation(folder, config):
    written = folder / "config.json"
    hf = json.loads(written.read_text()) | {"quantization_config": config}
    written.write_text(json.dumps(hf))
