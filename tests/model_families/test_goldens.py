"""Models of Hugging Face's transformers, of every family and in every setting: their logits, and
their tensors back bit for bit."""

import fnmatch
import json
import pathlib

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxscale.hugging_face import model_folder
from jaxscale.hugging_face.model_folder import open_model, write_adapters, write_model
from jaxscale.model_families.shipped import find_family
from jaxscale.run.pretrained import from_pretrained

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"
NAMES = sorted(path.name for path in GOLDENS.iterdir() if path.is_dir())


def newer_name(name: str, renamed: dict[str, str]) -> str:
    for old, new in renamed.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


COMMON = (
    "esm",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "llama_yarn_all",
    "mixtral",
    "olmo2",
    "phi3_long",
)
"""Common blocks, and ways to extend their context."""


@pytest.mark.proof(but=COMMON)
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_tensors_are_those_of_transformers(name, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(model_folder.log, "warning", said.append)
    with jax.enable_x64(False):
        model = from_pretrained(GOLDENS / name)
        expected = load_file(GOLDENS / name / "expected.safetensors")
        names = ("decoder_tokens",) if "decoder_tokens" in expected else ()
        given = {"segments": expected["mask"], "decoder_segments": expected.get("decoder_mask")}
        given["token_types"] = expected.get("token_types")
        logits = np.asarray(model(expected["tokens"], *(expected[n] for n in names), **given))
    assert logits.dtype == np.float32
    real = expected.get("decoder_mask", expected["mask"]) > 0
    np.testing.assert_allclose(logits[real], expected["logits"][real], rtol=0, atol=1e-4)

    written = tmp_path / "written"
    write_model(
        written, model.config, model.model.axes, model.params, dtype="float32", workdir=tmp_path
    )
    family = find_family(model.config.family)
    stored = {
        newer_name(key, family.hf_renamed): value
        for key, value in load_file(GOLDENS / name / "model.safetensors").items()
        if not any(fnmatch.fnmatchcase(key, pattern) for pattern in family.ignored)
    }
    tensors = {key: value for key, value in stored.items() if "contact_head" not in key}
    lines = [f"note: 2 tensors esm.contact_head.* of {GOLDENS / name} have no part in the logits"]
    assert [line.rpartition(":")[0] for line in said] == lines[: len(stored) > len(tensors)]
    back = load_file(written / "model.safetensors")
    settings = dict(open_model(GOLDENS / name).settings)
    if name == "umt5":  # which their class reads with the inputs of its head scaled
        norm = "decoder.final_layer_norm.weight"
        larger = tensors.pop(norm) * np.sqrt(np.float32(settings["d_model"]))
        np.testing.assert_allclose(back.pop(norm), larger, rtol=1e-6)
        settings["scaled_head"] = True
    assert {key: value.tobytes() for key, value in back.items()} == {
        key: value.tobytes() for key, value in tensors.items()
    }
    assert open_model(written).settings == settings
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (GOLDENS / name, written)
    )
    assert after["architectures"] == before["architectures"]


FUSED = {"qkv_proj": 3, "gate_up_proj": 2, "c_attn": 3, "query_key_value": 3}
"""Modules with several of our weights, and how many."""


@pytest.mark.proof
@pytest.mark.parametrize("name", sorted(path.parent.name for path in GOLDENS.glob("*/peft")))
def test_adapters_are_those_of_peft(name, tmp_path):
    """Logits, and the folder back: every tensor bit for bit, and of the config what says the same.
    A Conv1D of GPT-2 and an encoder are among them, and a scale by the root of the rank. Of a fused
    weight the tensors are those of an adapter of higher rank, which adds the same."""
    base, folder = GOLDENS / name, GOLDENS / name / "peft"
    with jax.enable_x64(False):
        model = from_pretrained(base, adapters=folder)
        expected = load_file(folder / "expected.safetensors")
        decoder = [expected[one] for one in ("decoder_tokens",) if one in expected]
        masks = {"segments": expected["mask"], "decoder_segments": expected.get("decoder_mask")}
        logits = np.asarray(model(expected["tokens"], *decoder, **masks))
    real = expected.get("decoder_mask", expected["mask"]) > 0
    np.testing.assert_allclose(logits[real], expected["logits"][real], rtol=0, atol=1e-4)
    without = load_file(base / "expected.safetensors")["logits"]
    assert np.abs(logits - without)[real].max() > 0.1

    back = tmp_path / "back"
    axes = model.model.axes
    write_adapters(back, model.config, axes, model.params, dtype="float32", base=base)
    tensors, theirs = (load_file(at / "adapter_model.safetensors") for at in (back, folder))
    assert tensors.keys() == theirs.keys()
    fused = {key for key in tensors if key.split(".")[-3] in FUSED}
    assert {key: tensors[key].tobytes() for key in tensors.keys() - fused} == {
        key: theirs[key].tobytes() for key in theirs.keys() - fused
    }
    for key in fused:
        first, second = key, key.replace("lora_A", "lora_B")
        if first != second:
            assert tensors[first].shape[0] == theirs[first].shape[0] * FUSED[key.split(".")[-3]]
            np.testing.assert_allclose(
                tensors[second] @ tensors[first], theirs[second] @ theirs[first], atol=1e-6
            )
    ours, peft = (json.loads((at / "adapter_config.json").read_text()) for at in (back, folder))
    assert ours.keys() < peft.keys()
    scales = [
        one["lora_alpha"] / (one["r"] ** 0.5 if one["use_rslora"] else one["r"])
        for one in (ours, peft)
    ]
    assert scales[0] == pytest.approx(scales[1])
    same = ("r", "peft_type", "bias", "fan_in_fan_out", "inference_mode")
    assert {key: ours[key] for key in same} == {key: peft[key] for key in same}
    assert ours["base_model_name_or_path"] == str(base)
    # PEFT adapts every module that is named, or whose name ends so.
    modules = {key.removesuffix(".weight") for key in load_file(base / "model.safetensors")}
    found = {
        module
        for module in modules
        for target in ours["target_modules"]
        if f".{module}".endswith(f".{target}")
    }
    assert {f"base_model.model.{one}.lora_A.weight" for one in found} == {
        key for key in tensors if "lora_A" in key
    }
    assert from_pretrained(base, adapters=back).config == model.config


@pytest.mark.proof(but=("esm",))
@pytest.mark.parametrize("name", ["bert", "esm"])
def test_masked_texts_that_share_a_row_do_not_see_each_other(name):
    """With masks in other shares; a text of masks alone is finite."""
    with jax.enable_x64(False):
        model, mask = from_pretrained(GOLDENS / name), 32
        texts = [np.array(text) for text in ([5, mask, 7, 8, 9], [4, 4, mask, mask], [mask], [11])]
        segments = np.concatenate([np.full(len(text), i + 1) for i, text in enumerate(texts)])
        # The first row has all texts, the others one each, and padding.
        rows = [(np.concatenate(texts), segments), *((text, text > 0) for text in texts)]
        tokens, segments = (
            np.stack([np.pad(row[part], (0, len(segments) - len(row[part]))) for row in rows])
            for part in (0, 1)
        )
        packed, *alone = model(tokens, segments=segments.astype(np.int32))
    alone = np.concatenate([logits[: len(text)] for logits, text in zip(alone, texts)])
    np.testing.assert_allclose(packed, alone, rtol=0, atol=1e-5)
