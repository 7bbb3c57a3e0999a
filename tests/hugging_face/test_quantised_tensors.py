"""gpt-oss's checkpoints in MXFP4: read without loss, in bfloat16 or in `model.base_dtype`."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxscale.config.model import ModelConfig
from jaxscale.hugging_face.model_folder import open_model, write_model
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.models.protocol import stored_weights
from jaxscale.ops.storage.quantised_storage import mxfp4_values, unpack_weights, whole_shapes
from jaxscale.run.pretrained import from_pretrained

CONFIG = ModelConfig(
    **{"family": "gpt_oss", "num_layers": 1, "d_model": 64, "d_ff": 32, "num_experts": 4},
    **{"num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "vocab_size": 128},
    **{"compute_dtype": "float32", "param_dtype": "bfloat16"},
)


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
    written = packed / "config.json"
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    hf = json.loads(written.read_text()) | {"quantization_config": quantised}
    written.write_text(json.dumps(hf))
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
    hf = json.loads((folders[0] / "config.json").read_text())
    tensors = load_file(folders[0] / "model.safetensors")
    hf["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="except gpt_oss models in MXFP4: quant_method = 'fp8'"):
        open_model(tmp_path)
    hf["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    name = next(name for name in tensors if name.endswith("_scales"))
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"needs {name} of its shape without the last"):
        open_model(tmp_path)
