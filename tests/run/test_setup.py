"""What commands do with a config before they have an engine."""

import dataclasses
import json
import logging
import pathlib

import jax
import pytest

from jaxscale import config as configs
from jaxscale.config.layout import Layout
from jaxscale.config.model import ModelConfig
from jaxscale.data.tokens.tokenizer import load_tokenizer
from jaxscale.distributed import processes
from jaxscale.run import trainer
from jaxscale.run.setup import resume
from jaxscale.run.setup.layout import for_evaluation, for_sampling, planned, resolve_layout
from jaxscale.run.setup.text import keep_tokenizer, open_text, open_tokenizer
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine
from tests.data.dialogues import write_tokenizer


def test_a_run_keeps_all_files_of_its_tokenizers_folder_whatever_its_name_is(tmp_path):
    path = pathlib.Path(write_tokenizer(tmp_path / "given", bos=True, add_bos_token=False))
    path = path.rename(path.with_name("mine.json"))
    others = ("tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json")
    for name in (*others, "tokenizer.json", "notes.txt"):  # the last two are not of it
        (tmp_path / "given" / name).write_text("{}")
    given = load_tokenizer(str(path))
    workdir = tmp_path / "run"
    keep_tokenizer("", given, workdir)
    kept = load_tokenizer(str(workdir / "tokenizer.json"))
    assert (kept.bos, kept.fingerprint) == (given.bos, given.fingerprint)
    assert kept.bos is None
    assert kept.template == given.template is not None
    assert (kept.files, set(kept.files)) == (
        given.files,
        {"tokenizer.json", "tokenizer_config.json", *others},
    )
    assert {path.name for path in workdir.iterdir()} == set(kept.files)


def test_a_tokenizer_is_not_mixed_with_that_of_the_models_folder(tmp_path):
    """What lies there would begin texts otherwise once the run resumes. But the ids that end what
    is generated belong to the weights, of a Hugging Face model or of a run."""
    path = pathlib.Path(write_tokenizer(tmp_path / "given", bos=True))
    (path.parent / "tokenizer_config.json").unlink()
    write_tokenizer(tmp_path / "model", bos=True, add_bos_token=False)
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "eos_token_id": 7}')
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    origin = {"vocab_size": 320, "init_from": str(tmp_path / "model")}
    config = configs.from_dict({"model": origin, "data": {"tokenizer": str(path)}})
    given, workdir = load_tokenizer(str(path)), tmp_path / "run"
    keep_tokenizer(config.model.init_from, given, workdir)
    assert given.bos is not None
    opened = open_tokenizer(config, workdir)
    assert (opened.bos, opened.ends) == (given.bos, (7, 8))
    files = {"tokenizer.json", "hf_config.json", "generation_config.json"}
    assert {path.name for path in workdir.iterdir()} == files
    # A run of the run; and a tokenizer that needs no file.
    (workdir / "config.json").write_text("{}")
    config = configs.from_dict({"model": {"vocab_size": 320, "init_from": str(workdir)}})
    for tokenizer, kept in ((given, files), (load_tokenizer("bytes"), files - {"tokenizer.json"})):
        again = tmp_path / str(len(kept))
        again.mkdir()
        keep_tokenizer(config.model.init_from, tokenizer, again)
        assert {path.name for path in again.iterdir()} == kept


@pytest.mark.proof
def test_a_layout_left_to_the_planner_is_taken_and_kept(tmp_path, caplog):
    config = configs.load("configs/tiny.py", ["layout=auto", "layout.tensor=2"])
    logging.getLogger("jaxscale").propagate = True
    with caplog.at_level(logging.INFO, logger="jaxscale"):
        taken = planned(config, tmp_path)
    assert not taken.layout.auto
    assert (taken.layout.tensor, taken.layout.num_devices) == (2, jax.device_count())
    assert "layout = 'auto' chose" in caplog.text
    # A run that has begun continues with its layout, whatever would be chosen today.
    other = dataclasses.replace(config, layout=Layout(data=1, fsdp=8))
    (tmp_path / "config.json").write_text(json.dumps(configs.to_dict(other)))
    assert planned(config, tmp_path) == other
    # It is only read: code that it names is not imported, nor does a file that is not a config
    # end in a traceback.
    for text, said in (
        ('{"layout": {"schedule": "antigravity:RECORD"}}', "names code from outside the package"),
        ("[]", "is not the config of a run"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            planned(config, tmp_path)


def test_a_layout_that_is_said_stays():
    config = configs.load("configs/tiny.py")
    assert planned(config) is config


PIPELINE = {"data": 4, "pipeline": 2, "microbatches": 2}


@pytest.mark.parametrize(
    ("name", "usual", "other", "axes", "said"),
    [
        ("remat", "none", "full", {"data": 8}, "here set a policy"),
        ("head", "last", "sliced", PIPELINE, "here set 'last' or 'sliced'"),
    ],
)
def test_a_run_keeps_the_choice_that_it_began_with(name, usual, other, axes, said, tmp_path):
    config = configs.load("configs/tiny.py")
    layout = Layout(**axes, **{name: "auto"})
    config = dataclasses.replace(config, layout=layout)
    with pytest.raises(ValueError, match=rf"chosen when a run starts, .* {said}"):
        make_engine(config, make_mesh(layout))
    chosen = resolve_layout(config, tmp_path)
    assert getattr(chosen.layout, name) == usual
    begun = dataclasses.replace(chosen, layout=dataclasses.replace(chosen.layout, **{name: other}))
    (tmp_path / "config.json").write_text(json.dumps(configs.to_dict(begun)))
    assert resolve_layout(config, tmp_path) == begun
    moved = dataclasses.replace(layout, data=layout.data // 2, fsdp=2)
    moved = resolve_layout(dataclasses.replace(config, layout=moved), tmp_path)
    assert getattr(moved.layout, name) == usual


@pytest.mark.proof
def test_a_step_without_room_is_refused_before_anything_is_compiled(tmp_path, monkeypatch):
    class Compiled(Exception):  # noqa: N818
        pass

    def lower_step(engine):
        raise Compiled

    monkeypatch.setattr(trainer, "lower_step", lower_step)
    config = configs.load("configs/tiny.py")
    with pytest.raises(Compiled):
        trainer.open_trainer(config, tmp_path)
    monkeypatch.setattr("jaxscale.run.setup.memory_check.host_memory_bytes", lambda: 1e7)
    with pytest.raises(ValueError, match=r"a program may use 0\.00 GB of this host's memory"):
        trainer.open_trainer(config, tmp_path)
    with pytest.raises(Compiled):
        trainer.open_trainer(config, tmp_path, skip_memory_check=True)


@pytest.mark.parametrize(
    ("layout", "batch", "expected"),
    [
        ({"fsdp": 4, "microbatches": 2}, 16, (16, 2)),  # it fits
        ({"fsdp": 8, "microbatches": 4}, 8, (8, 1)),
        ({"data": 8, "microbatches": 2}, 40, (16, 1)),
        ({"data": 8}, 4, (8, 1)),
    ],
)
def test_a_batch_that_does_not_split_is_evaluated_in_others(layout, batch, expected):
    config = configs.Config(
        layout=Layout(**{"data": 8 // layout.get("fsdp", 8)} | layout),
        data=configs.DataConfig(global_batch_size=batch),
    )
    found = for_evaluation(config)
    assert (found.data.global_batch_size, found.layout.microbatches) == expected


def test_the_ranks_of_a_pipeline_share_layers_to_sample():
    for fsdp, expected in ((2, {"fsdp": 4, "data": 2}), (1, {"fsdp": 2, "data": 4})):
        layout = Layout(pipeline=2, fsdp=fsdp, zero_stage=1, schedule="1f1b:2,1", remat="keep:1")
        found = for_sampling(configs.Config(layout=layout)).layout
        assert {axis: size for axis, size in found.sizes.items() if size > 1} == expected
        assert found.zero_stage == 3
    model = ModelConfig(d_model=18, num_heads=2, num_kv_heads=2, head_dim=4)
    found = for_sampling(configs.Config(model=model, layout=Layout(pipeline=4, data=2))).layout
    assert (found.data, found.fsdp) == (8, 1)


def test_a_run_without_weights_trains_its_tokenizer_again_where_the_text_changed(
    tmp_path, monkeypatch
):
    """An attempt on the wrong text leaves nothing to the next one; a run with weights continues."""
    text, run = tmp_path / "a.txt", tmp_path / "run"

    def attempt(words: str):
        text.write_text("\n".join([words] * 40))
        data = {
            "source": [{"path": str(text), "boundary": "line"}],
            "tokenizer": "bpe:262",
            "heldout": 0.2,
        }
        config = {"data": data | {"seq_len": 8}, "model": {"vocab_size": 262}}
        return open_text(configs.from_dict(config), run).tokenizer

    wrong, right = attempt("the wrong words of it"), attempt("some other text")
    assert wrong.fingerprint != right.fingerprint
    with monkeypatch.context() as patch:  # which the first process has just saved
        patch.setattr(processes, "first_of_all", lambda: False)
        assert attempt("a copy of the file").fingerprint == right.fingerprint
    (run / "checkpoints" / "10").mkdir(parents=True)
    run = run.rename(tmp_path / "moved")
    assert attempt("and yet another text").fingerprint == right.fingerprint
    (run / "tokenizer_record.txt").unlink()  # a run from before there were records
    before = {path.name: path.read_bytes() for path in run.glob("*.*")}
    assert attempt("and yet another text").fingerprint == right.fingerprint
    assert {path.name: path.read_bytes() for path in run.glob("*.*")} == before


def test_a_run_whose_files_are_renamed_is_told_that_names_matter(tmp_path):
    def train(folder):
        data = {"source": [f"{folder}/*.txt"], "seq_len": 8, "heldout": 0}
        config = configs.from_dict({"data": data, "run": {"eval_every": 0}})
        return open_text(config, tmp_path / "run").train

    texts = tmp_path / "texts"
    texts.mkdir()
    for name in "ab":
        (texts / f"{name}.txt").write_text(f"the text of {name}")
    metadata = {"data": {"fingerprint": train(texts).fingerprint, "next_example": 0}}
    texts = texts.rename(tmp_path / "moved")
    resume._check_examples(0, metadata, train(texts))
    (texts / "a.txt").rename(texts / "c.txt")
    with pytest.raises(
        ValueError, match=r"differ from those of checkpoint 0.*the names of its files"
    ):
        resume._check_examples(0, metadata, train(texts))
