"""What follows a step works in every kind of layout: saves, resumes, evaluations, samples."""

import contextlib
import dataclasses
import json
import types

import jax
import numpy as np
import pytest

from jaxscale import command_line, evaluate, generate, train
from jaxscale import config as configs
from jaxscale.checkpoints.restore import restore
from jaxscale.checkpoints.retention import Retention
from jaxscale.checkpoints.save import CheckpointWriter
from jaxscale.config import DataConfig
from jaxscale.config.layout import Layout
from jaxscale.data.dataset import open_dataset
from jaxscale.data.tokens.tokenizer import load_tokenizer
from jaxscale.decoding import sampling
from jaxscale.pipeline_schedules.shipped import SHIPPED
from jaxscale.run import training_loop
from jaxscale.run.evaluation import evaluate_loss
from jaxscale.run.setup.restore import restore_params
from jaxscale.run.setup.text import open_text
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine
from tests.invariants.layouts import (
    BATCH,
    LLAMA,
    SEQ_LEN,
    batches,
    compile_step,
    initial_state,
    make_config,
    open_engine,
)

MODEL = {**LLAMA, "d_model": 24, "num_heads": 4, "num_kv_heads": 4, "d_ff": 24}

# Every kind of layout, and what can live in host memory; each restores what the one before it
# saved.
JOURNEY = {
    "fsdp": {"fsdp": 2, "zero_stage": 3, "offload": "optimizer"},
    "interleaved": {
        "pipeline": 2,
        "schedule": "interleaved",
        "virtual_stages": 2,
        "tensor": 2,
        "microbatches": 4,
        "offload": "optimizer",
    },
    "context": {"context": 2, "fsdp": 2, "zero_stage": 1, "offload": "optimizer,activations"},
    "heads": {"context": 2, "tensor": 2, "context_method": "ulysses"},
    "uneven": {"pipeline": 3, "schedule": "1f1b:2,1,1", "microbatches": 4, "fsdp": 2},
    "layered": {
        "fsdp": 2,
        "tensor": 4,
        "tensor_rows": 2,
        "accumulation": "layered",
        "microbatches": 2,
        "offload": "activations",
    },
}


DEEP = {**MODEL, "num_layers": 8}
EVERY = tuple(schedule.name for schedule in SHIPPED)
NEWEST = ("seq1f1b", "seq1f1b_interleaved", "chimera", "bitpipe", "dualpipe", "dualpipe_v")
"""Schedules that are also evaluated and sampled from; the others are alike in both."""
FEW = ("1f1b", "seq1f1b_interleaved", "zb_v", "dualpipe_v", "bitpipe")


def scheduled(number: int) -> dict:
    """A layout of the schedule with this number."""
    schedule = SHIPPED[number]
    return {
        "pipeline": 4,
        "schedule": schedule.name,
        "virtual_stages": schedule.virtual_stages,
        "sequence_chunks": 2 if schedule.splits_sequences else 1,
        "microbatches": 8,
        ("tensor", "fsdp")[number % 2]: 2,
        "zero_stage": number % 4,
    }


@pytest.fixture(scope="session")
def heldout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("the quick brown fox " * 99)
    (folder / "b.txt").write_text("jumps over it " * 99)
    config = DataConfig(source=(f"{folder}/*.txt",), seq_len=SEQ_LEN, heldout=0.5)
    return open_dataset(config, load_tokenizer("bytes"), split="heldout")


def look(engine, params, heldout) -> tuple[float, list[str]]:
    """The held-out loss, and what the model writes."""
    loss = evaluate_loss(engine, params, heldout, BATCH, max_batches=1).loss
    return loss, sampling.sample(
        engine, params, load_tokenizer("bytes"), ["fox"], num_tokens=6, temperature=0
    )


def same(state, expected) -> None:
    """To the bit."""
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), expected)


def shardings(state):
    return jax.tree.map(lambda leaf: leaf.sharding, state)


@pytest.mark.proof
def test_every_kind_of_layout_saves_resumes_evaluates_and_samples(heldout, tmp_path, capfd):
    """One device takes a step; its state then goes through every kind, which all find in it what
    one device does."""
    one = open_engine(make_config(MODEL, {}))
    step, first, second = compile_step(one), *map(one.shard, batches()[:2])
    state, _ = step(jax.device_put(initial_state(one.config)), first)
    (loss, texts), saved = look(one, state.params, heldout), jax.tree.map(np.asarray, state)
    next_loss = float(step(state, second)[1].loss)
    with contextlib.closing(CheckpointWriter(tmp_path, Retention(9))) as checkpoints:
        checkpoints.save(0, saved, {})
        checkpoints.wait()
        for number, (name, layout) in enumerate(JOURNEY.items(), 1):
            engine = open_engine(make_config(MODEL, layout))
            placement = engine.placement
            restored = restore(checkpoints, number - 1, placement.canonical)
            same(restored, saved)
            state = placement.from_canonical(restored, donate=True)
            assert shardings(state) == shardings(engine.abstract_state), name
            # Every second one has files of their own for some arrays, from this layout.
            frozen = {"params/embed/tokens", "params/layers/attention/q"} if number % 2 else ()
            written = placement.to_canonical(state, on_host=True)
            checkpoints.save(number, written, {}, frozen=frozen)
            checkpoints.wait()
            # As a notebook has it between steps, and as `fit` returns it.
            canonical = placement.to_canonical(state)
            for tree in {id(tree): tree for tree in (state, canonical)}.values():
                found = look(engine, tree.params, heldout)
                assert found == (pytest.approx(loss, rel=1e-10), texts), name
            same(canonical, saved)
            if name == "interleaved":
                _, metrics = compile_step(engine)(state, engine.shard(batches()[1]))
                assert float(metrics.loss) == pytest.approx(next_loss, rel=1e-10)
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.proof
@pytest.mark.parametrize("names", [FEW, pytest.param(EVERY, marks=pytest.mark.slow)], ids=len)
def test_schedules_continue_the_runs_of_others(names, heldout, tmp_path):
    """Each takes a step from the checkpoint of the one before it, the first and last of which is
    one device's, with the losses of one device, and resumes its own checkpoint to the bit."""
    one = open_engine(make_config(DEEP, {}))
    state, expected, step = jax.device_put(initial_state(one.config)), [], compile_step(one)
    steps = [batches()[number % len(batches())] for number in range(len(names) + 1)]
    for batch in steps:
        state, metrics = step(state, one.shard(batch))
        expected.append(pytest.approx(float(metrics.loss), rel=1e-10))

    with contextlib.closing(CheckpointWriter(tmp_path, Retention(99))) as checkpoints:
        checkpoints.save(0, initial_state(one.config), {})

        def resume(engine, number):
            checkpoints.wait()
            placement = engine.placement
            restored = restore(checkpoints, number, placement.canonical)
            return placement.from_canonical(restored, donate=True)

        for number, name in enumerate(names):
            engine = open_engine(make_config(DEEP, scheduled(EVERY.index(name))))
            first, second = map(engine.shard, steps[number : number + 2])
            advance = compile_step(engine, {"xla_backend_optimization_level": 0})
            state, metrics = advance(resume(engine, number), first)
            assert float(metrics.loss) == expected[number], name
            checkpoints.save(number + 1, engine.placement.to_canonical(state, on_host=True), {})
            if name in NEWEST:
                loss, texts = look(engine, state.params, heldout)
                wanted = look(one, resume(one, number + 1).params, heldout)
                assert (pytest.approx(loss, rel=1e-10), texts) == wanted, name
            straight, _ = advance(state, second)
            resumed, _ = advance(resume(engine, number + 1), second)
            same(resumed, jax.tree.map(np.asarray, straight))
        _, metrics = step(resume(one, len(names)), one.shard(steps[-1]))
        assert float(metrics.loss) == expected[-1]


@pytest.mark.proof
def test_the_commands_after_an_uneven_pipeline_are_one_devices(tmp_path, monkeypatch, capsys):
    """Trained, sampled, evaluated and generated from as a user does; `fit` returns what is
    saved."""
    fit, returned = training_loop.fit, []
    monkeypatch.setattr(
        training_loop, "fit", lambda *a, **k: returned.append(fit(*a, **k)) or returned[0]
    )
    settings = (
        "model.num_layers=3",
        "model.d_model=16",
        "model.d_ff=24",
        "model.num_kv_heads=4",
        "model.compute_dtype=float64",
        "model.param_dtype=float64",
        "optimizer.moment_dtype=float64",
        "optimizer.accumulation_dtype=float64",
        "data.seq_len=16",
        "data.source={stdlib}/email/*.py",
        "run.steps=1",
        "run.eval_batches=1",
        "layout.pipeline=2",
        "layout.fsdp=2",
        "layout.tensor=2",
        "layout.microbatches=2",
        "layout.schedule=1f1b:2,1",
        "layout.remat=keep:1",
        "layout.offload=optimizer",
    )
    workdir = str(tmp_path / "run")
    command = ["--config", "configs/tiny.py", "--workdir", workdir, "--trackers", "none"]
    assert train.main([*command, *(f"--config.{setting}" for setting in settings)]) == 0
    assert "A sample at step 1" in capsys.readouterr().out

    config = configs.load("configs/tiny.py", [*settings, "layout.remat=none"])
    config = dataclasses.replace(config, layout=Layout(data=1))
    engine = make_engine(config, make_mesh(config.layout, jax.devices()[:1]))
    step, params, _ = restore_params(engine, tmp_path / "run")
    assert step == 1
    jax.tree.map(np.testing.assert_array_equal, returned[0][0].params, params)

    out = tmp_path / "out.json"
    assert evaluate.main(["--workdir", workdir, "--json", str(out), "--max_batches", "1"]) == 0
    text = open_text(config, tmp_path / "run")
    expected = evaluate_loss(engine, params, text.heldout, 8, max_batches=1)
    assert json.loads(out.read_text())["eval_loss"] == pytest.approx(expected.loss, rel=1e-12)

    asked = ["--prompt", "def ", "--num_tokens", "6", "--temperature", "0"]
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "def ", "choices": ["f(x)", "~~~~"], "answer": 0}\n' * 3)
    chosen = ["--workdir", workdir, "--choices", str(questions), "--json", str(out)]
    assert evaluate.main(chosen) == 0
    answers = json.loads(out.read_text())
    assert (answers["questions"], answers["accuracy"] in (0, 1)) == (3, True)
    assert (
        f"  questions           3\n  accuracy            {answers['accuracy']:.4f} +- 0.0000"
        in (capsys.readouterr().out)
    )
    assert generate.main(["--workdir", workdir, "--json", str(out), *asked]) == 0
    expected = sampling.sample(
        engine, params, text.tokenizer, ["def "], num_tokens=6, temperature=0
    )
    assert [each["continuation"] for each in json.loads(out.read_text())["samples"]] == expected
    assert "using layout.fsdp = 4 in place of layout.pipeline = 2" in capsys.readouterr().out


def test_a_sample_of_prompts_continues_the_first_that_is_held_out(monkeypatch, capsys):
    def sample(engine, params, tokenizer, prompts, **settings):
        assert [prompt.tolist() for prompt in prompts] == [[256, *b"2 + 2 ="]]
        return [" 4"]

    monkeypatch.setattr(sampling, "sample", sample)
    texts = [*b"1\n"], [256, *b"2 + 2 = 4"]  # the end of one, and a whole one
    example = types.SimpleNamespace(
        tokens=np.array([token for text in texts for token in text]),
        segments=np.array([1] * 2 + [2] * 10),
        weights=np.array([0] * 9 + [1] * 2 + [0]),
    )
    done = types.SimpleNamespace(
        config=configs.load("configs/tiny.py", ["data.source=prepared"]),  # says not what it holds
        last_engine=None,
        text=types.SimpleNamespace(tokenizer=load_tokenizer("bytes"), heldout=[example]),
    )
    command_line.log_to_stdout()
    train._show_sample(done, None)
    assert capsys.readouterr().out.endswith(":\n\n2 + 2 = 4\n")


def test_a_sample_that_fails_is_one_line(monkeypatch, capsys):
    def fail(*arguments, **settings):
        raise ValueError("no text\nat all")

    monkeypatch.setattr(sampling, "sample", fail)
    done = types.SimpleNamespace(
        config=configs.load("configs/tiny.py"),
        last_engine=None,
        text=types.SimpleNamespace(
            tokenizer=None, heldout=[types.SimpleNamespace(weights=np.ones(4))]
        ),
    )
    command_line.log_to_stdout()
    train._show_sample(done, None)
    line = "warning: no sample of the trained model could be drawn (no text)"
    assert capsys.readouterr().out == f"\n{line}\n"
