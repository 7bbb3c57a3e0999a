"""Folders that are refused before any value is read."""

import json
import pathlib

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import models

from jaxscale.hugging_face import model_folder, text_part
from jaxscale.hugging_face.model_folder import name_tokenizer_class, open_model, write_model
from jaxscale.hugging_face.safetensors_format import read_header
from jaxscale.run.pretrained import from_pretrained
from jaxscale.run_folder import HF_CONFIG
from tests.hugging_face import tiny_llama

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"


def config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def index(weight_map):
    def change(folder):
        path = folder / "model.safetensors.index.json"
        before = json.loads(path.read_text())["weight_map"]
        path.write_text(json.dumps({"weight_map": weight_map(before)}))

    return change


def pickled(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def cut_short(folder):
    path = folder / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def wrong_size(folder):
    path = folder / "a.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"shape":[16]', b'"shape":[15]', 1))


REFUSED = {
    "type": (config(model_type="lama"), "model_type 'lama' is not supported; it can be .*llama"),
    "list for a type": (config(model_type=["llama"]), "model_type .'llama'. is not supported"),
    "text for a number": (config(vocab_size="300"), "config.json: .*vocab_size = '300'; it can"),
    "too large a size": (config(vocab_size=10**30), "config.json: .*vocab_size = 10{30}; it can"),
    "too large a number": (
        config(rms_norm_eps=10**400),
        "config.json: .*rms_norm_eps = 10{400}; it",
    ),
    "deep": (
        lambda folder: (folder / "config.json").write_text("[" * 100_000),
        r"config.json is not JSON: nested more than 128 deep$",
    ),
    "setting": (config(rope_turns=3), r"config.json: .*rope_turns"),
    "code": (
        config(model_type="lama", auto_map={"AutoModel": "x.Y"}),
        r"model_type 'lama' is not supported \(its auto_map names custom .* run\); it can be",
    ),
    "quantized": (config(quantization_config={}), "quantized weights"),
    "pickle": (pickled, r"pickles \(pytorch_model.bin\).*safetensors first"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "no index": (
        lambda folder: (folder / "model.safetensors.index.json").unlink(),
        "no model.safetensors and no model.safetensors.index.json",
    ),
    "cut short": (cut_short, r"a.safetensors has .* bytes and its header asks for"),
    "wrong size": (wrong_size, r"does not have the bytes of its shape \(15,\)"),
    "no header": (lambda folder: (folder / "a.safetensors").write_bytes(b"x" * 20), "not a safete"),
    "index too long": (index(lambda files: {**files, "x": "a.safetensors"}), "x is in no file"),
    "index too short": (index(lambda files: dict(list(files.items())[1:])), "in no file by"),
    "outside": (index(lambda files: dict.fromkeys(files, "../a.safetensors")), "not a file of its"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_cannot_be_used_is_refused(name, tmp_path):
    folder = tiny_llama.save(tmp_path)
    open_model(folder)
    change, message = REFUSED[name]
    change(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_model(folder)


def test_custom_code_is_not_run_and_is_reported(tmp_path, monkeypatch):
    """The family is one of ours: its own implementation reads the same tensors."""
    said = []
    monkeypatch.setattr(model_folder.log, "warning", said.append)
    folder = tiny_llama.save(tmp_path)
    plain = open_model(folder)
    assert said == []
    config(auto_map={"AutoModel": "x.Y"})(folder)
    assert open_model(folder).settings == plain.settings
    (line,) = said
    assert f"{folder / 'config.json'} names custom code (auto_map), which is not run" in line
    assert "jaxscale's llama" in line


@pytest.mark.parametrize("outer", ["language_model.model.", "model.language_model."])
def test_of_a_model_that_reads_images_the_text_model_is_taken(outer, tmp_path, monkeypatch):
    """As Gemma 3's of 4 to 27 billion, in the form of transformers 4 and 5."""
    said = []
    monkeypatch.setattr(text_part.log, "warning", said.append)
    text = json.loads((GOLDENS / "gemma3" / "config.json").read_text())
    hf = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "image_token_index": 5}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    tensors = load_file(GOLDENS / "gemma3" / "model.safetensors")
    values = {name.replace("model.", outer, 1): value for name, value in tensors.items()}
    images = ("vision_tower.x", "model.multi_modal_projector.y")
    save_file(values | {name: np.zeros(2) for name in images}, tmp_path / "model.safetensors")
    model, alone = open_model(tmp_path), open_model(GOLDENS / "gemma3")
    assert model.settings == alone.settings
    assert model.tensors.keys() == alone.tensors.keys()
    (line,) = said
    assert f"2 of {len(tensors) + 2} tensors belong to images" in line
    config(text_config=None)(tmp_path)
    with pytest.raises(
        ValueError, match=r"text_config = None; for a multimodal gemma3 model it is"
    ):
        open_model(tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "padding", "written"),
    [("esm", 1, 1), ("esm", None, 9), ("bert", None, 9), ("umt5", None, 9), ("llama", None, None)],
)
def test_an_exported_model_has_the_padding_id_that_transformers_needs(
    name, padding, written, tmp_path
):
    export(name, tmp_path, padding=padding)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["pad_token_id"] == written


def export(name, folder, **ids):
    """Writes a golden model into `folder / "hf"`, with its other files in `folder`."""
    model, out = from_pretrained(GOLDENS / name), folder / "hf"
    settings = {"dtype": "float32", "workdir": folder, "end_of_text": 9, **ids}
    write_model(out, model.config, model.model.axes, model.params, **settings)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("before", "ends", "written"),
    [(None, (), 9), (None, (7,), [9, 7]), (7, (7,), 7), (8, (7,), [8, 7]), ([8, 7], (7,), [8, 7])],
)
def test_an_exported_model_ends_with_what_the_tokenizer_says_too(before, ends, written, tmp_path):
    files = ["config.json"]
    if before:
        files.append("generation_config.json")
        for name in (HF_CONFIG, "generation_config.json"):
            (tmp_path / name).write_text(json.dumps({"eos_token_id": before}))
    export("llama", tmp_path, ends=ends)
    for name in files:
        assert json.loads((tmp_path / "hf" / name).read_text())["eos_token_id"] == written


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (None, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}),
        (
            {"eos_token": "x", "model_max_length": 9},
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "x",
                "model_max_length": 9,
            },
        ),
        ({"tokenizer_class": "GemmaTokenizer"}, {"tokenizer_class": "GemmaTokenizer"}),
        # As transformers 5 saves it, which 4 refuses.
        (
            {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["a"]},
            {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["a"]},
        ),
        (
            {"tokenizer_class": "GemmaTokenizer", "extra_special_tokens": {"image_token": "a"}},
            {"tokenizer_class": "GemmaTokenizer", "extra_special_tokens": {"image_token": "a"}},
        ),
    ],
)
def test_an_exported_tokenizer_says_that_it_is_read_as_it_is(given, written, tmp_path):
    """By the model's type transformers 5 would take Gemma's class, which fails on it."""
    tokenizer = tokenizers.Tokenizer(models.BPE({"<|endoftext|>": 0, "a": 1}, []))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if given:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
    hf = {
        "model_type": "gemma3_text",
        "eos_token_id": [0, 1],
        "bos_token_id": {},
        "pad_token_id": [],
    }
    name_tokenizer_class(tmp_path, hf)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == written


def test_an_exported_sentencepiece_model_is_read_as_it_is_too(tmp_path):
    """By their types transformers 5 would take ids of Gemma's own for its pieces, end every text as
    T5's do, or fail on it, as on BERT's."""
    path = tmp_path / "tokenizer_config.json"
    name_tokenizer_class(tmp_path, {"model_type": "t5"})
    assert not path.exists(), "there is no tokenizer"
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    name_tokenizer_class(tmp_path, {"model_type": "t5", "eos_token_id": 1})
    assert json.loads(path.read_text()) == {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text('{"add_bos_token": true}')
    name_tokenizer_class(tmp_path, {"model_type": "gemma2"})
    assert json.loads(path.read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
    }


def test_headers_are_read_as_the_library_writes_them(tmp_path):
    tiny_llama.save(tmp_path)
    expected = tiny_llama.tensors(tiny_llama.CONFIG)
    found = read_header(tmp_path / "a.safetensors") | read_header(tmp_path / "b.safetensors")
    assert {name: one.shape for name, one in found.items()} == {
        name: value.shape for name, value in expected.items()
    }
    one = found["model.norm.weight"]
    data = one.path.read_bytes()[one.offset :]
    assert data.startswith(expected["model.norm.weight"].tobytes())
