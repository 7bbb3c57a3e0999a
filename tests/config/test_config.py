"""Records of a run: the published models, the loader, and what every configuration file keeps."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import pytest

from jaxscale import config
from jaxscale.config import records
from jaxscale.config.data_source import Source
from jaxscale.config.layout import Layout
from jaxscale.config.model import ModelConfig
from jaxscale.training.tracing.traces import model_trace

CONFIGS = sorted(pathlib.Path("configs").glob("*.py"))
EMPTY = "import ml_collections\n\n\ndef get_config():\n    return ml_collections.ConfigDict()\n"


@pytest.mark.proof(but=("deepseek_v3-671026419200", "mt5_base-582401280"))
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama2_7b", 6_738_415_616),
        ("llama2_13b", 13_015_864_320),
        ("llama2_70b", 68_976_648_192),
        ("llama3_8b", 8_030_261_248),
        ("llama32_1b", 1_235_814_400),
        ("mt5_small", 300_176_768),
        ("mt5_base", 582_401_280),
        ("mt5_large", 1_229_581_312),
        ("mt5_xl", 3_742_619_648),
        ("mt5_xxl", 12_921_057_280),
        # From the parameters per rank in the authors' log, replicated ones counted once.
        ("gpt_175b", 174_609_555_456),
        ("bert_base", 109_514_298 + 70 * (768 + 1)),  # rows of padding, and the head's bias
        ("esm2_8m", 7_512_353 + 95 * (320 + 1)),
        ("mixtral_8x7b", 46_702_792_704),
        ("qwen3_30b_a3b", 30_532_122_624),
        # With the biases of its routers, which other counts leave out, and without the module that
        # predicts a second token.
        ("deepseek_v3", 671_026_419_200),
    ],
)
def test_parameter_counts_are_those_published(name, published):
    assert model_trace(config.load(name).model).num_params == published


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_shows_what_is_not_a_default_and_no_more(path):
    """Its text makes it again, and fits the last line of a cell."""
    loaded = config.load(str(path))
    names = {"Layout": Layout, "ModelConfig": ModelConfig, "Source": Source, **vars(records)}
    assert eval(repr(loaded), names) == loaded
    assert len(repr(loaded)) < 600


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "published", "last_digit"), [("gpt_22b", 2.207e10, 1e7), ("gpt_1t", 1.0080e12, 1e8)]
)
def test_parameter_counts_agree_with_rounded_ones(name, published, last_digit):
    got = model_trace(config.load(name).model).num_params
    assert abs(got - published) <= last_digit / 2


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("m6_t_10b", 10_737_418_240),
        ("m6_t_100b", 103_079_215_104),
        ("m6_t_1t", 1_002_606_428_160),
    ],
)
def test_the_experts_of_m6_t_have_the_published_parameters(name, published):
    trace = model_trace(config.load(name).model)
    arrays = [array for array in trace.parameters if "experts" in array.axes]
    assert sum(array.size * trace.stack_layers[array.part] for array in arrays) == published


@pytest.mark.proof(but=("32",))
@pytest.mark.parametrize("x", [4, 32, 108, 160])
def test_the_x_family_has_12_x_to_the_fifth_weights(x):
    model = config.load(f"configs/x_family.py:{x}").model
    matrices = model.num_layers * (4 * model.d_model**2 + 2 * model.d_model * model.d_ff)
    assert matrices == 12 * x**5
    biases_and_norms = 13 * model.d_model
    layer = sum(one.size for one in model_trace(model).parameters if one.part == "layers")
    assert layer * x == matrices + x * biases_and_norms
    assert (model.num_heads * model.head_dim, model.max_seq_len) == (x**2, 16 * x)


def test_the_x_family_is_32_by_default():
    assert config.load("configs/x_family.py") == config.load("configs/x_family.py:32")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_is_one_page_and_says_what_to_expect(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    imports = [line for line in text.splitlines() if line.startswith(("import", "from"))]
    assert imports == ["import ml_collections"]
    command = rf"--config (configs/{path.name}|{path.stem}_\w+)\b"
    for word in (command, "Hardware:", "Expected:"):
        assert re.search(word, text)


@pytest.mark.parametrize(("name", "path"), config.shipped_configs().items())
def test_a_configuration_is_found_by_its_name(name, path, tmp_path, monkeypatch):
    loaded = config.load(path)
    monkeypatch.chdir(tmp_path)  # where nobody has cloned the repository
    assert config.load(name) == loaded


def test_a_family_of_configurations_has_a_name_for_each_size():
    assert config.load("llama2_70b") == config.load("configs/llama2.py:70b")
    assert config.load("configs/llama2.py") == config.load("llama2_7b")
    assert not {"llama2", "gpt", "m6_t", "mt5"} & set(config.shipped_configs())
    with pytest.raises(ValueError, match="size '8b' is not known; it can be 7b, 13b, 70b"):
        config.load("configs/llama2.py:8b")
    with pytest.raises(FileNotFoundError, match=r"no such file; did you mean 'llama2_7b'\?"):
        config.load("configs/llama2_7b.py")


def test_no_configuration_imports_jax():
    program = (
        "import pathlib, sys\n"
        "from jaxscale import config\n"
        "for path in sorted(pathlib.Path('configs').glob('*.py')):\n"
        "    config.load(str(path))\n"
        "assert 'jax' not in sys.modules, 'jax was imported'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_mistyped_key_is_answered_without_jax():
    program = (
        "import sys\n"
        "from jaxscale import config\n"
        "try:\n"
        "    config.load('llama2_7b', ['model.num_layer=3'])\n"
        "except ValueError as error:\n"
        "    assert 'config.model.num_layers?' in str(error)\n"
        "    assert 'jax' not in sys.modules\n"
        "else:\n"
        "    raise SystemExit('it was accepted')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.fixture
def empty(tmp_path):
    path = tmp_path / "empty.py"
    path.write_text(EMPTY)
    return str(path)


def test_keys_that_a_file_leaves_out_keep_their_defaults(empty):
    assert config.load(empty) == config.Config()


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("model.num_layers=7", "model", "num_layers", 7),
        ("model.num_layers=1e1", "model", "num_layers", 10),
        ("run.steps=1_000", "run", "steps", 1000),
        ("model.rope_theta=3", "model", "rope_theta", 3.0),
        ("optimizer.learning_rate=3e-4", "optimizer", "learning_rate", 3e-4),
        ("model.tied_embeddings=True", "model", "tied_embeddings", True),
        ("data.tokenizer=bpe:4096", "data", "tokenizer", "bpe:4096"),
        ("data.tokenizer=a=b.json", "data", "tokenizer", "a=b.json"),
        ("data.source=a.txt", "data", "source", (Source(("a.txt",)),)),
        ("data.source=a.txt,b/*.txt", "data", "source", (Source(("a.txt",)), Source(("b/*.txt",)))),
        ("data.source=('a,b.txt',)", "data", "source", (Source(("a,b.txt",)),)),
        (
            'data.source={"path": "a.jsonl", "apart": false}',
            "data",
            "source",
            (Source(("a.jsonl",)),),
        ),
        ("layout.fsdp=8", "layout", "fsdp", 8),
        ("optimizer.schedule_steps=1e3", "optimizer", "schedule_steps", 1000),
        ("optimizer.schedule_steps=None", "optimizer", "schedule_steps", None),
    ],
)
def test_an_override_has_the_type_of_its_key(empty, override, section, key, value):
    loaded = config.load(empty, [override])
    got = getattr(getattr(loaded, section), key)
    assert (got, type(got)) == (value, type(value))
    changed = dataclasses.replace(getattr(config.Config(), section), **{key: value})
    assert loaded == dataclasses.replace(config.Config(), **{section: changed})


def test_the_last_override_wins(empty):
    assert config.load(empty, ["run.steps=5", "run.steps=6"]).run.steps == 6


def test_overrides_may_be_wrong_one_by_one_but_right_together(empty):
    overrides = ["layout.fsdp=-1", "layout.data=1", "model.family=gpt"]
    loaded = config.load(empty, [*overrides, "model.tied_embeddings=True"])
    assert (loaded.layout.fsdp, loaded.model.family) == (-1, "gpt")


def test_the_vocabulary_is_padded_so_that_it_divides():
    assert ModelConfig(vocab_size=257).padded_vocab_size == 384
    assert ModelConfig(vocab_size=384).padded_vocab_size == 384
