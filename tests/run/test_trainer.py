"""What a run records of its speed, what becomes of its learning rate when it is resumed, and that
its loop refuses transfers between host and devices that nobody asked for."""

import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

import jaxscale
from jaxscale import config as configs
from jaxscale.checkpoints.save import CheckpointWriter
from jaxscale.config import from_dict, load
from jaxscale.models.decoder import Decoder
from jaxscale.run import recorder, trainer, training_loop
from jaxscale.run.goodput import Account
from jaxscale.run.initial_weights import open_weights
from jaxscale.run.pretrained import Pretrained
from jaxscale.run.setup.text import open_text
from jaxscale.training.flops import step_flops
from jaxscale.training.step import StepMetrics
from jaxscale.training.tracing.traces import model_work
from tests.run.settings import with_run, with_step

SMALL = (
    "model.num_layers=1",
    "model.d_model=16",
    "model.d_ff=16",
    "model.num_heads=1",
    "model.num_kv_heads=1",
    "data.seq_len=32",
    "data.heldout=0",
)


def short_run(workdir, *overrides, profile=range(0), again=False):
    """The records of a run of the smallest model, and its last state."""
    ready = trainer.open_trainer(load("configs/tiny.py", [*SMALL, *overrides]), workdir)
    assert ready
    state, _ = training_loop.fit(ready, trackers=(), profile=profile)
    if again:
        with pytest.raises(ValueError, match="used by an earlier fit; call open_trainer again"):
            training_loop.fit(ready, trackers=())
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return records, jax.tree.map(np.asarray, state)


@pytest.mark.proof
def test_a_run_that_is_resumed_for_longer_keeps_its_schedule_and_counts_its_tokens(
    tmp_path, caplog
):
    """To the bit the run that knew both numbers from the start; and its tokens are as
    counted from the examples. Steps that were trained before cannot be traced."""
    first, straight = tmp_path / "first", tmp_path / "straight"
    given = ["data.objective=prefix", "model.family=gpt", "model.max_seq_len=32"]
    short_run(first, *given, "run.steps=2", again=True)
    resumed, state = short_run(first, *given, "run.steps=4", profile=range(1, 3))
    assert "--profile 1:2 does not trace the steps up to 2, which were trained" in caplog.text
    assert "schedule_steps" not in caplog.text, "its checkpoint has said it"
    expected, last = short_run(straight, *given, "run.steps=4", "optimizer.schedule_steps=2")
    assert "warning: optimizer.schedule_steps = 2 is below run.steps = 4" in caplog.text
    same = ("step", "loss", "grad_norm", "learning_rate", "examples")
    assert [[line[key] for key in same] for line in resumed] == [
        [line[key] for key in same] for line in expected
    ]
    jax.tree.map(np.testing.assert_array_equal, state, last)
    assert resumed[-1]["learning_rate"] == pytest.approx(1e-4), "the final rate"
    config = from_dict(json.loads((first / "config.json").read_text()))
    assert (config.run.steps, config.optimizer.schedule_steps) == (4, 2)
    assert open_weights(first).config.max_seq_len == 32, "as many positions as the run's sequences"
    examples = open_text(config, first).train
    for line in resumed:
        batch = [examples[8 * (line["step"] - 1) + row] for row in range(8)]
        assert line["tokens"] == sum(int(np.sum(one.segments > 0)) for one in batch)
        assert line["loss_tokens"] == sum(one.weights.sum() for one in batch)
        assert line["loss_tokens"] < line["tokens"]


BY_LAYER = ["run.metrics_by_layer=True"]


def open_recorder(config, workdir, device_kind, platform):
    """On two devices, of a run from step 0."""
    devices = np.array([SimpleNamespace(device_kind=device_kind, platform=platform)] * 2)
    engine = SimpleNamespace(
        config=config,
        mesh=SimpleNamespace(devices=devices),
        count_flops=lambda: step_flops(config, recomputed=0.5),
        learning_rate=None,
    )
    train = SimpleNamespace(example_digest=lambda rows: "", progress=lambda last: [])
    return recorder.Recorder(
        workdir,
        engine,
        train,
        begin=0,
        trackers=(),
        started=0.0,
        account=Account(workdir),
    )


def test_a_step_has_its_own_time_and_no_save_is_in_it(tmp_path, monkeypatch):
    """On a CPU, where a step is done when its dispatch returns: of 2 s each, the last of 8, and of
    1,000 tokens each, the third of 1,300."""
    config, now = load("configs/llama32_1b.py"), [10.0]
    with monkeypatch.context() as patched:
        patched.setattr(recorder.time, "monotonic", lambda: now[0])
        written = open_recorder(config, tmp_path, "cpu", "cpu")
        for step, seconds in enumerate((2.0, 2.0, 2.0, 8.0), 1):
            now[0] += seconds
            tokens = 1000 + 300 * (step == 3)
            written.push(step, StepMetrics(*map(np.float32, (2.0, 1.0, tokens, 400)), {}, {}))
            now[0] += 0.5
            written.flush()
            now[0] += 100  # a save
            written.restart_clock()
        summary = written.summary()
    written.close()
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [line["step_seconds"] for line in lines] == [2, 2, 2, 8]
    assert (summary["step"], summary["step_seconds"], summary["tokens"]) == (4, 2, 1000)
    assert summary["tokens_per_second"] == 1100 / 2, "of the mean of the steps after the first"


def test_speeds_are_of_tokens_read_and_hfu_counts_what_is_repeated_once(tmp_path, monkeypatch):
    """Of 1,000 tokens in two seconds, 400 with loss, on two H200; half the passes recomputed."""
    config = load("configs/llama32_1b.py", ["layout.pipeline=2", "layout.remat=keep:2", *BY_LAYER])
    clock = itertools.chain([10.0], itertools.repeat(12.0))
    with monkeypatch.context() as patched:
        written = open_recorder(config, tmp_path, "NVIDIA H200", "gpu")
        patched.setattr(recorder.time, "monotonic", lambda: next(clock))
        written.restart_clock()
        loads = {"expert_load_cv": np.array([0.5, 1.5])}
        written._record(2, StepMetrics(*map(np.float32, (2.0, 1.0, 1000, 400)), {}, loads), 0.0)
    written.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (record["tokens"], record["loss_tokens"]) == (1000, 400)
    assert (record["expert_load_cv"], record["expert_load_cv_by_layer"]) == (1.0, [0.5, 1.5])
    assert (record["tokens_per_second"], record["loss_tokens_per_second"]) == (500, 200)
    model, seq_len = config.model, config.data.seq_len
    share = 500 / (2 * 989.4e12)
    layers = model_work(model, seq_len, seq_len).layer_flops / seq_len
    head = 2 * model.d_model * model.vocab_size
    assert record["mfu"] == pytest.approx(3 * (layers + head) * share, rel=1e-12)
    assert record["hfu"] == pytest.approx((3 * (layers + head) + 0.5 * layers) * share, rel=1e-12)


SETTINGS = ["layout.fsdp=2", "model.num_layers=1", "data.seq_len=32", "run.steps=1"]


@jax.jit
def count(state, batch):
    """A step that compiles at once: what crosses is around a step."""
    tokens = batch.weights.sum()
    return state._replace(step=state.step + 1), StepMetrics(*[tokens] * 4, {}, {})


def open_uncompiled(workdir, *overrides):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "lower_step", lambda engine: None)
        patch.setattr(trainer, "compile_step", lambda *_: count)
        config = configs.load("configs/tiny.py", [*SETTINGS, *overrides])
        ready = trainer.open_trainer(config, workdir)
    assert ready
    return ready


@pytest.fixture(scope="session")
def opened(tmp_path_factory):
    return open_uncompiled(tmp_path_factory.mktemp("run"))


@pytest.mark.proof
def test_epochs_are_steps_of_the_text_that_is_counted(opened, tmp_path):
    """In place of the steps of the file; those of the command line exclude them."""
    config = configs.load("configs/tiny.py", [*SETTINGS[:-1], "run.epochs=1.5"])
    run = trainer._with_steps(config, tmp_path).run
    assert run.steps == -(-1.5 * len(opened.text.train) // config.data.global_batch_size)
    assert run == dataclasses.replace(config.run, steps=run.steps, epochs=0.0)
    with pytest.raises(ValueError, match=r"run.steps = 1 and run.epochs = 2 exclude each other"):
        configs.load("configs/tiny.py", [*SETTINGS, "run.epochs=2"])
    entries = [{"path": f"{{stdlib}}/{name}/*.py", "weight": 1.0} for name in ("email", "json")]
    mixed = [*SETTINGS[:-1], "run.epochs=2", f"data.source={entries}"]
    with pytest.raises(ValueError, match=r"run.epochs = 2.0: data.source has weights.*run.steps"):
        trainer._with_steps(configs.load("configs/tiny.py", mixed), tmp_path / "mixed")


@pytest.mark.proof
@pytest.mark.parametrize(("dtype", "lost"), [("bfloat16", True), ("float32", False)])
def test_parameters_too_narrow_for_small_updates_are_said(dtype, lost, tmp_path, caplog):
    caplog.set_level("WARNING", "jaxscale")
    ready = open_uncompiled(tmp_path, f"model.param_dtype={dtype}")
    params = ready.state.params["layers"]["mlp"]["up"]
    updates = np.abs(np.asarray(params, np.float32)) * (0.99 * 2**-9)
    same = np.asarray(optax.apply_updates(params, updates)) == np.asarray(params)
    assert bool(np.all(same)) is lost
    said = [line for line in caplog.messages if "loses updates of less than 2^-9" in line]
    assert bool(said) is lost


@pytest.mark.proof
def test_adapters_are_wide_enough_beside_narrow_weights(tmp_path, caplog):
    caplog.set_level("WARNING", "jaxscale")
    open_uncompiled(tmp_path, "model.param_dtype=bfloat16", "model.lora_rank=2")
    assert "2^-9" not in caplog.text


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda run: jaxscale.fit(run.config),
            "trainer is of type Config; pass the result of .*open_trainer",
        ),
        (
            lambda run: jaxscale.fit(run, trackers="tensorboard"),
            r"trackers = 'tensorboard' is a string; pass a tuple of names, \('tensorboard',\)",
        ),
        (
            lambda run: jaxscale.open_trainer("tiny", "x"),
            "config is of type str; pass the result of .*load",
        ),
        (
            lambda run: jaxscale.open_trainer(run.config, "x", model=Decoder),
            "model is Decoder, and the run's config.json would have model.family = 'llama'; set "
            "model.family = 'jaxscale.models.decoder:Decoder' instead",
        ),
        (lambda run: jaxscale.open_engine("tiny"), "config is of type str"),
        (lambda run: jaxscale.open_text(run.engine, "x"), "config is of type Engine"),
        (lambda run: jaxscale.load(run.config), "path is of type Config"),
        (lambda run: jaxscale.load("tiny", {"layout.fsdp": 2}), "are not a list of texts"),
        (lambda run: jaxscale.load("tiny", [2]), "are not a list of texts"),
        (lambda run: jaxscale.make_mesh(run.config), "layout is of type Config; .* config.layout"),
        (
            lambda run: jaxscale.make_mesh(jaxscale.Layout()),
            "the layout has a size of -1; pass that",
        ),
        (
            lambda run: jaxscale.make_mesh(jaxscale.Layout(data=4)),
            r"\(data 4\) needs 4 devices and",
        ),
        (
            lambda run: jaxscale.make_engine(jaxscale.load("tiny"), run.engine.mesh),
            "the mesh has the sizes .*'data': 4, .* and config.layout .*'data': -1",
        ),
        (lambda run: jaxscale.make_engine("tiny", run.engine.mesh), "config is of type str"),
        (lambda run: jaxscale.make_engine(run.config, run.config.layout), "mesh is of type Layout"),
        (lambda run: jaxscale.plan_layouts(run.config.model, "h100-sxm", 8), "type ModelConfig"),
        (lambda run: jaxscale.describe_layout(run.config), "engine is of type Config"),
        (lambda run: jaxscale.open_engine(run.config, optimizer="lion"), "set optimizer.name"),
        (
            lambda run: jaxscale.open_engine(
                run.config, optimizer=optax.contrib.reduce_on_plateau()
            ),
            "and the parameters only, as a step does: .*argument: 'value'",
        ),
        (
            lambda run: jaxscale.open_engine(
                load("configs/tiny.py", ["optimizer.groups={'params':'*','weight_decay':0.5}"]),
                optimizer=optax.sgd(0.1),
            ),
            r"optimizer.groups\[0\] = '\*' sets a rate or a decay, which optimizer= defines itself",
        ),
        (lambda run: jaxscale.open_engine(run.config, model="mixtral"), "set model.family"),
        (lambda run: jaxscale.open_engine(run.config, rules=("rank",)), "pass a dictionary"),
        (lambda run: stream(run, size=0), "global_batch_size = 0 is too small"),
        (lambda run: stream(run, size=8.5), "global_batch_size = 8.5 is not a whole number"),
        (lambda run: stream(run, size=3), "does not split into layout.data 4"),
        (lambda run: stream(run, start_step=-1), "start_step = -1 is too small"),
        (lambda run: stream(run, workers=-1), "workers = -1 is too small"),
        (lambda run: stream(run, dataset=run.text), "dataset is of type Text; pass `train`"),
        (lambda run: loss(run, params=run.state), "pass its parameters, state.params"),
        (lambda run: loss(run, params=[donated()]), "pass those of the state that it returned"),
        (lambda run: loss(run, heldout=None), "heldout is of type NoneType"),
        (lambda run: loss(run, max_batches=0), "max_batches = 0 is too small"),
        (lambda run: text(run, prompts="abc"), r"prompts = 'abc' is a string; .* \['abc'\]"),
        (lambda run: text(run, stop="abc"), "stop = 'abc' is a string"),
        (lambda run: text(run, prompts=[[1, 257]]), r"prompts\[0\] has ids from 1 to 257"),
        (lambda run: text(run, prompts=[[]]), r"prompts\[0\] has shape \(0,\)"),
        (lambda run: text(run, params=run.state), "pass its parameters, state.params"),
        (lambda run: text(run, tokenizer=run.text), "tokenizer is of type Text"),
        (lambda run: text(run, num_tokens=2.0), "--num_tokens = 2.0 is not a whole number"),
    ],
)
def test_arguments_of_another_kind_are_refused(call, said, opened):
    with pytest.raises(ValueError, match=said):
        call(opened)


def test_what_a_cell_shows_has_no_arrays(opened):
    read = Pretrained(opened.config.model, opened.state.params, opened.engine.model)
    for shown in (opened, opened.engine, opened.text, opened.text.tokenizer, read):
        assert "rray(" not in repr(shown)
        assert len(repr(shown)) < 6000


def donated():
    array = jax.numpy.zeros(1)
    array.delete()
    return array


def stream(run, dataset=None, size=8, **settings):
    return jaxscale.device_batches(run.engine, dataset or run.text.train, size, **settings)


def loss(run, **changed):
    arguments = {"params": run.state.params, "heldout": run.text.train, "global_batch_size": 8}
    return jaxscale.evaluate_loss(run.engine, **(arguments | changed))


def text(run, **changed):
    arguments = {"params": run.state.params, "tokenizer": run.text.tokenizer, "prompts": ["a"]}
    return jaxscale.sample(run.engine, **({"num_tokens": 1} | arguments | changed))


@pytest.mark.parametrize(
    ("transfer", "refused"),
    [
        # What every device holds whole a CPU reads in place, unnoticed: so the array is sharded.
        pytest.param(
            lambda batch: np.asarray(batch.tokens),
            "device-to-host",
            marks=pytest.mark.skipif(
                jax.__version_info__ < (0, 12), reason="JAX 0.11 does not guard reads of a CPU"
            ),
        ),
        (lambda batch: batch.weights * np.ones(32), "host-to-device"),
    ],
)
def test_a_transfer_in_the_loop_is_refused(opened, tmp_path, transfer, refused):
    def step(state, batch):
        transfer(batch)
        return count(state, batch)

    checkpoints = CheckpointWriter(tmp_path / "checkpoints")
    ready = dataclasses.replace(opened, workdir=tmp_path, checkpoints=checkpoints)
    ready = with_step(ready, step)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"Disallowed {refused} transfer"):
        training_loop.fit(ready, trackers=())


def test_a_step_without_a_token_that_counts_has_no_loss(opened, tmp_path, caplog):
    """It is not a step of loss 0, and the run says once how to mend it; nor is an evaluation."""

    def step(state, batch):
        state, out = count(state, batch)
        return state, out._replace(**dict.fromkeys(("loss", "grad_norm", "loss_tokens"), 0.0))

    engine = dataclasses.replace(opened.engine, evaluate=lambda *_: (0.0, 0.0, 0.0))
    opened = with_run(dataclasses.replace(opened, engine=engine), steps=2)
    ready = dataclasses.replace(
        opened,
        workdir=tmp_path,
        checkpoints=CheckpointWriter(tmp_path / "checkpoints"),
    )
    ready = with_step(ready, step)
    caplog.set_level("INFO", "jaxscale")
    _, summary = training_loop.fit(ready, trackers=())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["loss"], line["loss_tokens"]) for line in lines[:2]] == [(None, 0)] * 2
    assert lines[2]["eval_loss"] is None is summary["loss"]
    assert caplog.text.count("warning: in step 1 no token has loss; raise data.seq_len") == 1
    assert "step 2/2 | loss n/a |" in caplog.text
    assert "eval loss n/a: no token has loss; raise data.seq_len" in caplog.text


def test_every_process_traces_into_a_folder_of_its_own(monkeypatch, tmp_path):
    """Their files have the names of their hosts."""
    traced = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax.profiler, "start_trace", lambda path, **options: traced.append(path))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: traced.append("stopped"))
    reports = []
    stub = SimpleNamespace(
        workdir=tmp_path, flush=lambda: None, traced=lambda *report: reports.append(report)
    )
    with recorder.tracing(range(2, 4), stub, program=None) as trace:
        for step in range(1, 6):
            trace(step)
    assert traced == [str(tmp_path / "profile" / "process_1"), "stopped"]
    assert reports == [(range(2, 4), [[]])], "what cannot be read does not end the run"
    # Bad steps while steps are traced: the run returns to a checkpoint, and may trace them again.
    with contextlib.suppress(FloatingPointError), recorder.tracing(range(9), stub, None) as trace:
        trace(2)
        raise FloatingPointError
    assert traced[2:] == traced[:2]
    assert len(reports) == 1


@pytest.mark.proof
def test_what_a_run_needs_later_is_not_imported_before():
    program = (
        "import sys; from jaxscale.run import trainer\n"
        "assert not set(trainer.LATER) & set(sys.modules)\n"
        "trainer.import_later()\n"
        "assert set(trainer.LATER) <= set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
