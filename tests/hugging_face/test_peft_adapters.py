"""Adapters in PEFT's format: written and read again, and refusals."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxscale.hugging_face.model_folder import open_model, write_adapters, write_model
from jaxscale.models.adapters.lora import (
    merge_adapters,
    with_adapters,
    with_token_rows,
    without_adapters,
)
from jaxscale.models.decoder import plain_kernels
from jaxscale.run.pretrained import from_pretrained
from jaxscale.training.tracing.abstract_model import find_model

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"
LLAMA = GOLDENS / "llama"


def settings(**changes):
    def change(folder):
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def tensors(rename):
    def change(folder):
        path = folder / "adapter_model.safetensors"
        found = load_file(path)
        save_file({new: found[old] for old in found if (new := rename(old))}, path)

    return change


REFUSED = {
    "kind": (settings(peft_type="IA3"), "peft_type = 'IA3', r = 3, .*; it must be 'LORA'"),
    "no rank": (settings(r=0), "peft_type = 'LORA', r = 0, lora_alpha = 8; it must be"),
    "text for a rank": (settings(r="3"), "r = '3', lora_alpha = 8; it must be 'LORA'"),
    "no config": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        "adapter_config.json: peft_type = None, r = None, lora_alpha = None; it must be 'LORA'",
    ),
    "some layers": (
        settings(layers_to_transform=[1]),
        r"layers_to_transform = \[1\]; adapters of all 2 layers are supported; merge these",
    ),
    "tokens of one table": (
        settings(trainable_token_indices=[3]),
        r"trainable_token_indices = \[3\]; give embedding and head the same tokens: ",
    ),
    "magnitudes": (settings(use_dora=True), "use_dora = True is not supported"),
    "ranks": (settings(rank_pattern={"q_proj": 4}), "rank_pattern = {'q_proj': 4} is not sup"),
    "copies": (settings(modules_to_save=["lm_head"]), "modules_to_save = .*is not supported"),
    "what we do not know": (settings(use_new=1), "use_new = 1 is not supported"),
    "biases": (settings(bias="all"), "bias = 'all'; only 'none' is supported"),
    "another start": (
        settings(init_lora_weights="pissa"),
        "init_lora_weights = 'pissa' changes the weights of the model, too; convert the adapters",
    ),
    "pickle": (
        lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
        "contains no PEFT adapters: no adapter_model.safetensors, which save_pretrained writes",
    ),
    "another model": (
        tensors(lambda name: name.replace("model.layers", "transformer.h")),
        "has no adapter of a weight of this model, such as base_model.model.transformer.h.0",
    ),
    "a layer less": (
        tensors(lambda name: "" if ".layers.1." in name else name),
        "(?s)llama with .*/peft: 14 tensors do not fit .*layers.1.*q_proj.lora_A.*: missing",
    ),
    "a tensor more": (
        tensors(lambda name: name.replace("1.self_attn.q_proj.lora_A", "1.input_layernorm.lora_A")),
        "input_layernorm.lora_A.weight .3, 24.: unknown",
    ),
    "another rank": (settings(r=2), "q_proj.lora_A.weight: shape .3, 24., and .2, 24. by config"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_cannot_be_read_are_refused(name, tmp_path):
    change, message = REFUSED[name]
    folder = shutil.copytree(LLAMA / "peft", tmp_path / "peft")
    change(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        from_pretrained(LLAMA, adapters=folder)


def test_which_weights_have_adapters_is_what_the_tensors_say(tmp_path):
    """As a run names them, whatever the modules of the config are."""
    folder = shutil.copytree(LLAMA / "peft", tmp_path / "peft")
    assert open_model(LLAMA, adapters=folder).settings["lora_targets"] == ""
    tensors(lambda name: name if "v_proj" in name or "down" in name else "")(folder)
    settings(target_modules="all-linear", use_rslora=False)(folder)
    given = {"lora_rank": 3, "lora_alpha": 8.0, "lora_targets": "v,down"}
    assert given.items() <= open_model(LLAMA, adapters=folder).settings.items()


def adapted(name, targets):
    """A golden with random adapters: its config, the axes of its parameters, and these."""
    base = from_pretrained(GOLDENS / name)
    config = dataclasses.replace(base.config, lora_rank=2, lora_targets=targets)
    model = find_model(config)(config, plain_kernels())
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    random = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)
    return config, model.axes, with_adapters(base.params, random)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "targets", "modules"),
    [
        ("mixtral", "", ["k_proj", "o_proj", "q_proj", "v_proj"]),
        ("qwen3_moe_sparse", "q", ["q_proj"]),  # experts in every second layer
        # Attention's own output ends so, too.
        ("bert", "down", [f"bert.encoder.layer.{i}.output.dense" for i in range(2)]),
        ("t5_first", "up", ["wi"]),
    ],
)
def test_adapters_come_back_as_they_were(name, targets, modules, tmp_path):
    config, axes, params = adapted(name, targets)
    write_adapters(tmp_path / "peft", config, axes, params, dtype="float32")
    written = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert written["target_modules"] == modules
    back = from_pretrained(GOLDENS / name, adapters=tmp_path / "peft")
    assert back.config == config
    jax.tree.map(np.testing.assert_array_equal, back.params, params)


@pytest.mark.proof
@pytest.mark.parametrize(("name", "tables"), [("llama", 2), ("gpt2", 1)])
def test_rows_of_tokens_come_back_in_the_place_of_those_in_the_model(name, tables, tmp_path):
    """One of the model's own and one that is new, of the embedding and of an untied head."""
    base = from_pretrained(GOLDENS / name)
    size = base.config.vocab_size + 1
    grown = {"lora_rank": 2, "vocab_size": size, "lora_tokens": f"3,{size - 1}"}
    config = dataclasses.replace(base.config, **grown)
    model = find_model(config)(config, plain_kernels())
    rng, shapes = np.random.default_rng(0), jax.eval_shape(model.init, jax.random.key(0))
    random = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)
    folder = tmp_path / "peft"
    params = with_token_rows(config, with_adapters(base.params, random))
    write_adapters(folder, config, model.axes, params, dtype="float32")
    written = json.loads((folder / "adapter_config.json").read_text())
    assert [*written["trainable_token_indices"].values()] == [[3, size - 1]] * tables
    back = from_pretrained(GOLDENS / name, adapters=folder)
    assert back.config == config
    jax.tree.map(np.testing.assert_array_equal, back.params, params)
    beyond = {table: [3, size] for table in written["trainable_token_indices"]}
    settings(trainable_token_indices=beyond)(folder)
    with pytest.raises(ValueError, match=rf"token {size - 1} has no row; save the adapters"):
        open_model(GOLDENS / name, adapters=folder)


FUSED = [
    ("phi3", "q,v,down", {"self_attn.qkv_proj": 4}),
    ("phi3", "", {"self_attn.qkv_proj": 6, "mlp.gate_up_proj": 4}),
    ("gpt2", "k,out", {}),
    ("gpt_neox", "q,k,v,up", {"attention.query_key_value": 6}),
    ("deepseek_v3_direct", "q_turned,kv_down,out", {}),
    (
        "deepseek_v3",
        "",
        {f"self_attn.{name}": 4 for name in ("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")},
    ),
    ("mixtral", "q,up,gate,down", {"mlp.experts.gate_up_proj": 4}),
    ("gpt_oss", "up,down", {}),
]


@pytest.mark.proof
@pytest.mark.parametrize(("name", "targets", "ranks"), FUSED)
def test_adapters_of_parts_of_a_fused_weight_come_back(name, targets, ranks, tmp_path):
    """Each with a separate first matrix: one adapter as PEFT has it, of their ranks together."""
    config, axes, params = adapted(name, targets)
    write_adapters(tmp_path / "peft", config, axes, params, dtype="float32")
    written = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert written["rank_pattern"] == ranks
    assert written["alpha_pattern"] == {key: rank * 8 for key, rank in ranks.items()}
    back = from_pretrained(GOLDENS / name, adapters=tmp_path / "peft")
    assert back.config == config
    jax.tree.map(np.testing.assert_array_equal, back.params, params)
    # As PEFT would save it after training it further, when the zeros are none.
    tensors(lambda key: key)(tmp_path / "peft")
    if ranks:
        with pytest.raises(ValueError, match=r"rank_pattern = .* is not supported"):
            from_pretrained(GOLDENS / name, adapters=tmp_path / "peft")


def test_each_adds_to_its_part_of_a_fused_weight(tmp_path):
    """What the two tensors of PEFT's one adapter multiply to, part by part."""
    config, axes, params = adapted("phi3", "q,v")
    write_adapters(tmp_path / "peft", config, axes, params, dtype="float32")
    found = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.self_attn.qkv_proj"
    added = found[f"{prefix}.lora_B.weight"] @ found[f"{prefix}.lora_A.weight"]

    def of(letter):
        if letter not in config.adapted_weights:
            return np.zeros((config.num_kv_heads * config.head_dim, config.d_model))
        a, b = (params["layers"]["attention"][f"{letter}_lora"][part][1] for part in "ab")
        return (np.asarray(a) @ np.asarray(b).reshape(len(b), -1)).T

    np.testing.assert_allclose(added, np.concatenate([of(letter) for letter in "qkv"]), rtol=1e-5)


@pytest.mark.proof
def test_adapters_of_latent_attention_add_what_merging_adds(tmp_path):
    """To each of DeepSeek's fused tensors, in the order of its features."""
    config, axes, params = adapted("deepseek_v3", "")
    write_adapters(tmp_path / "peft", config, axes, params, dtype="float32")
    merged = merge_adapters(config, jax.tree.map(jnp.copy, params))
    plain = dataclasses.replace(config, lora_rank=0)
    written = {"dtype": "float32", "workdir": tmp_path}
    write_model(tmp_path / "hf", plain, without_adapters(axes), merged, **written)
    before, after = (
        load_file(one / "model.safetensors") for one in (GOLDENS / "deepseek_v3", tmp_path / "hf")
    )
    found = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    names = [name for name in found if name.endswith(".lora_A.weight")]
    assert len({name.rsplit(".", 3)[1] for name in names}) == 5
    for name in names:
        added = found[name.replace("lora_A", "lora_B")] @ found[name] * config.lora_alpha / 2
        ours = name.removeprefix("base_model.model.").replace("lora_A.", "")
        np.testing.assert_allclose(after[ours] - before[ours], added, atol=1e-4)
