"""A protein model trained causal, then masked, and back; and what a masked model
does not do."""

import contextlib
import dataclasses
import io
import json

import jax
import numpy as np
import optax
import pytest

from jaxscale import evaluate, generate, train
from jaxscale.checkpoints.restore import restore
from jaxscale.checkpoints.tiers import Checkpoints
from jaxscale.config import load
from jaxscale.run import trainer, training_loop
from jaxscale.run.initial_weights import initial_state, open_initial
from jaxscale.run.pretrained import from_pretrained
from jaxscale.run.setup.text import open_tokenizer
from jaxscale.sharding.mesh import make_mesh
from jaxscale.training.engine import make_engine
from jaxscale.training.optimizer import is_schedule

TINY = {
    "num_layers": 2,
    "d_model": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 24,
}


@pytest.fixture(scope="session")
def proteins(tmp_path_factory):
    """A file of proteins in which each residue determines its neighbours."""
    random, lines = np.random.default_rng(0), []
    for i in range(200):
        first = random.integers(0, 20)
        chain = [
            "LAGVSERTIDPKQNFYMHWC"[(first + 3 * j) % 20] for j in range(random.integers(9, 40))
        ]
        lines += [f">protein {i}", "".join(chain)]
    path = tmp_path_factory.mktemp("proteins") / "proteins.fasta"
    path.write_text("\n".join(lines) + "\n")
    return path


def overrides(proteins, objective: str, *others: str) -> list[str]:
    """Of the published ESM-2 for a run of two steps."""
    return [
        *(f"model.{name}={size}" for name, size in TINY.items()),
        f"model.causal={objective == 'causal'}",
        f"data.objective={objective}",
        f"data.source={proteins}",
        "data.global_batch_size=8",
        "data.seq_len=32",
        "optimizer.warmup_steps=0",
        "optimizer.learning_rate=0.01",
        "layout.data=8",
        "layout.microbatches=1",
        "run.steps=2",
        "run.eval_every=0",
        "run.eval_batches=1",
        *others,
    ]


def moments(opt_state):
    return jax.tree.leaves([value for _, value in optax.tree.get_all_with_path(opt_state, "mu")])


def saved(workdir, abstract):
    return restore(Checkpoints(workdir / "checkpoints"), 2, abstract)


def same(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def schedules(opt_state):
    return [leaf for leaf in jax.tree.leaves(opt_state, is_leaf=is_schedule) if is_schedule(leaf)]


@pytest.fixture(scope="session")
def runs(proteins, tmp_path_factory):
    """A causal run, a masked one that starts from it, and the output of the second."""
    base = tmp_path_factory.mktemp("runs")
    ready = trainer.open_trainer(
        load("configs/esm2_8m.py", overrides(proteins, "causal")), base / "causal"
    )
    assert ready
    training_loop.fit(ready, trackers=())
    given = overrides(proteins, "masked", f"model.init_from={base / 'causal'}")
    arguments = ["--config", "configs/esm2_8m.py", "--workdir", str(base / "masked")]
    arguments += ["--trackers", "none", *(f"--config.{one}" for one in given)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert train.main(arguments) == 0
    return base, printed.getvalue()


def with_sections(engine, **sections):
    return dataclasses.replace(engine, config=dataclasses.replace(engine.config, **sections))


@pytest.mark.proof
def test_a_causal_run_goes_on_masked_and_back(proteins, runs):
    base, _ = runs
    config = load(
        "configs/esm2_8m.py",
        overrides(
            proteins,
            "causal",
            f"model.init_from={base / 'masked'}",
            "optimizer.keep_state=True",
            "layout.data=1",
            "layout.fsdp=8",
        ),
    )
    engine = make_engine(config, make_mesh(config.layout))
    weights = open_initial(engine, base / "back")
    other = dataclasses.replace(config.optimizer, name="lion")
    with pytest.raises(ValueError, match=r"optimizer.name = 'lion' here, 'adamw' there; set the"):
        open_initial(with_sections(engine, optimizer=other), base / "back")
    frozen = dataclasses.replace(config.optimizer, groups=({"params": "embed/*", "frozen": True},))
    frozen = dataclasses.replace(config, optimizer=frozen)
    with pytest.raises(ValueError, match=r"moments of other parameters: .*groups = \[\]; freeze"):
        open_initial(make_engine(frozen, make_mesh(config.layout)), base / "back")
    more = dataclasses.replace(config.model, vocab_size=40)
    with pytest.raises(ValueError, match=r"vocab_size = 40 is above the 33 of .* no moments; set"):
        open_initial(with_sections(engine, model=more), base / "back")
    begun = initial_state(engine, weights, jax.random.key(0))
    masked = saved(base / "masked", engine.abstract_state)
    same(begun.params, masked.params)
    same(moments(begun.opt_state), moments(masked.opt_state))
    assert any(np.any(leaf) for leaf in moments(begun.opt_state))
    assert [int(leaf.count) for leaf in schedules(begun.opt_state)] == [0]
    assert [int(leaf.count) for leaf in schedules(masked.opt_state)] == [2]

    # Otherwise the optimizer is new; and what a token sees is what the config says.
    plain = dataclasses.replace(config.optimizer, keep_state=False)
    engine = with_sections(engine, optimizer=plain)
    begun = initial_state(engine, weights, jax.random.key(0))
    assert not any(np.any(leaf) for leaf in moments(begun.opt_state))
    tokens = np.full((1, 8), 5)
    changed = np.where(np.arange(8) == 6, 9, tokens)
    for name, sees in (("causal", False), ("masked", True)):
        model = from_pretrained(base / name)
        assert bool(np.any(model(tokens)[0, :6] != model(changed)[0, :6])) is sees


@pytest.mark.proof
def test_what_a_loaded_model_cannot_compute_is_refused(runs):
    base, _ = runs
    refused = pytest.raises(ValueError, match=r"float64.* needs .*jax_enable_x64")
    with jax.enable_x64(False), refused:
        from_pretrained(base / "causal", compute_dtype="float64")
    model = from_pretrained(base / "causal")
    with pytest.raises(ValueError, match="tokens are float64; pass integers"):
        model(np.full((1, 8), 5.0))
    with pytest.raises(ValueError, match=r"to 1000000, and ids of the model are from 0 to \d+"):
        model(np.full((1, 8), 1_000_000))
    with pytest.raises(ValueError, match=r"esm model is called with decoder_tokens; call it with"):
        model(np.full((1, 8), 5), np.full((1, 8), 5))


@pytest.mark.proof
def test_a_masked_run_is_evaluated_on_the_same_masks_and_draws_no_samples(runs, capsys):
    base, printed = runs
    assert "no sample: the model is not causal" in printed
    assert "jaxscale.generate" not in printed
    records = (base / "masked" / "metrics.jsonl").read_text().splitlines()
    (last,) = [one for one in map(json.loads, records) if "eval_loss" in one]
    out = base / "evaluation.json"
    workdir = ["--workdir", str(base / "masked")]
    assert evaluate.main([*workdir, "--max_batches", "1", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["eval_loss"] == last["eval_loss"]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        generate.main([*workdir, "--prompt", "MK"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "model.family = 'esm' is not causal here: it predicts masked tokens" in line


def test_an_objective_that_does_not_fit_the_model_is_refused(proteins):
    for objective, causal, said in (
        (
            "masked",
            True,
            "'masked' needs bidirectional attention, and this model .model.family = 'esm'. is c",
        ),
        ("causal", False, "'causal' needs causal attention, .* to masked, or set model.causal"),
    ):
        with pytest.raises(ValueError, match=said):
            load("configs/esm2_8m.py", [f"data.objective={objective}", f"model.causal={causal}"])
    config = load("configs/esm2_8m.py", overrides(proteins, "masked", "model.dropped_token=31"))
    with pytest.raises(ValueError, match=r"31 is not the mask of .*'esm2', which is 32; set model"):
        open_tokenizer(config, proteins.parent)
    with pytest.raises(ValueError, match=r"keep_state = True loads .*init_from, which is empty"):
        load("configs/esm2_8m.py", ["optimizer.keep_state=True"])
