"""From a Hugging Face folder to a run, trained in two layouts, and back."""

import contextlib
import dataclasses
import json
import types
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

import jaxscale
from jaxscale import convert, evaluate, generate, train
from jaxscale.checkpoints.save import CheckpointWriter
from jaxscale.config import from_dict
from jaxscale.data.loader import batches
from jaxscale.models.adapters.lora import with_adapters, without_adapters
from jaxscale.models.decoder import Decoder, plain_kernels
from jaxscale.run.initial_weights import initial_state, open_initial, open_weights
from jaxscale.run.pretrained import Pretrained
from jaxscale.run.setup.layout import open_engine
from jaxscale.run.setup.text import open_text, open_tokenizer
from jaxscale.run_folder import load_config
from jaxscale.storage.local_tier import CHECKPOINTS
from jaxscale.training.engine import Engine
from tests.hugging_face import tiny_llama
from tests.hugging_face.test_round_trip import load_all

DATA = ["--config.data.global_batch_size=8", "--config.data.seq_len=16"]
KEY = jax.random.key(0)
TOKENS = np.random.default_rng(1).integers(0, 130, (2, 9))


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """A model's folder, and the run that it was converted to."""
    folder = tmp_path_factory.mktemp("convert")
    tiny_llama.save(folder / "hf")
    text = "".join(map(chr, np.random.default_rng(0).integers(34, 130, 40_000)))
    (folder / "text.txt").write_text(text)
    source = f"--config.data.source={folder / 'text.txt'}"
    options = ["--from_hf", str(folder / "hf"), "--output", str(folder / "run")]
    assert convert.main([*options, source, "--config.data.heldout=0", *DATA]) == 0
    return folder


def logits(directory):
    return np.asarray(jaxscale.from_pretrained(directory)(TOKENS))


def to_hf(run, output, *options):
    assert convert.main(["--to_hf", "--workdir", str(run), "--output", str(output), *options]) == 0
    return output


def test_a_run_is_self_contained_and_comes_back_bit_for_bit(converted, tmp_path, capsys):
    hf = converted / "hf"
    run = tmp_path / "moved"
    (converted / "run").rename(run)
    try:
        output = to_hf(run, tmp_path / "back", "--max_file_gb=1e-5")
        assert (
            generate.main(
                ["--workdir", str(run), "--prompt", "ABC", "--num_tokens=3", "--temperature=0"]
            )
            == 0
        )
    finally:
        run.rename(converted / "run")
    assert "ABC" in capsys.readouterr().out
    assert tiny_llama.bits(load_all(output)) == tiny_llama.bits(load_all(hf))
    written = json.loads((output / "config.json").read_text())
    assert {name: written.get(name) for name in tiny_llama.CONFIG} == tiny_llama.CONFIG
    assert (output / "tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()
    before, after = (
        json.loads((folder / "tokenizer_config.json").read_text()) for folder in (hf, output)
    )
    assert after == {"tokenizer_class": "PreTrainedTokenizerFast"} | before  # its ids are ordinary
    assert logits(output).dtype == np.float32
    assert logits(output).shape == (2, 9, 130)
    np.testing.assert_array_equal(logits(output), logits(hf))
    np.testing.assert_array_equal(logits(converted / "run"), logits(hf))


STEP = [
    "--config.run.steps=1",
    "--config.optimizer.learning_rate=0",
    "--config.model.compute_dtype=float32",
    "--config.layout.pipeline=2",
    "--config.layout.fsdp=2",
    "--config.layout.data=2",
    "--config.layout.microbatches=2",
    "--trackers=none",
]


def first_batch(workdir):
    text = open_text(load_config(workdir), workdir)
    with contextlib.closing(batches(text.train, global_batch_size=8)) as stream:
        return next(stream)


@pytest.mark.proof
def test_training_starts_from_the_weights_in_a_pipeline(converted, tmp_path):
    """With a learning rate of zero a step leaves every bit as it was, through a pipeline, a
    checkpoint and an export; and the loss is that of the weights."""
    run, hf, tuned = converted / "run", converted / "hf", tmp_path / "tuned"
    init = f"--config.model.init_from={hf}"
    assert train.main(["--config", f"{run}/config.json", "--workdir", str(tuned), init, *STEP]) == 0
    exported = to_hf(tuned, tmp_path / "exported", "--config.layout.fsdp=2")
    assert tiny_llama.bits(load_all(exported)) == tiny_llama.bits(load_all(hf))
    assert (exported / "tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()
    assert json.loads((exported / "config.json").read_text())["bos_token_id"] == 1

    batch = first_batch(run)
    scores = jax.nn.log_softmax(
        jaxscale.from_pretrained(tuned)(batch.tokens, segments=batch.segments)
    )
    nll = -np.take_along_axis(np.asarray(scores), batch.targets[..., None], -1)[..., 0]
    (line,) = (tuned / "metrics.jsonl").read_text().splitlines()
    loss = np.average(nll, weights=batch.weights)
    assert json.loads(line)["loss"] == pytest.approx(loss, rel=1e-5)


def test_nobody_means_the_default_text_of_a_converted_model(converted, tmp_path, capsys):
    """The standard library's source: its loss would tell nothing of the model."""
    run = converted / "run"
    default = ["--config.data.source={stdlib}/**/*.py", "--config.data.heldout=0.05"]
    start = ["--config", f"{run}/config.json", "--workdir", str(tmp_path / "tuned"), *STEP]
    for command, arguments, said in (
        (evaluate, ["--workdir", str(run)], "was converted, not trained, and data.source is the d"),
        (train, [*start, f"--config.model.init_from={run}"], "tokenizer.json', and data.source is"),
    ):
        with pytest.raises(SystemExit):
            command.main([*arguments, *default])
        error = capsys.readouterr().err
        assert said in error
        assert "set --config.data.source=TEXT_FILES" in error
    chosen = ["--workdir", str(run), "--max_batches=1", "--json", str(tmp_path / "out.json")]
    page = {"name": "page", "path": str(converted / "text.txt")}
    sets = f"--config.data.validation={[page]}"
    assert evaluate.main([*chosen, default[0], sets]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["eval_loss/page"] > 0


@pytest.mark.proof
def test_a_run_starts_from_another_runs_weights(converted):
    """From checkpoint 0 in its folder, or from another run, in other types and on a layout."""
    run, hf = converted / "run", converted / "hf"
    config = load_config(run, ["model.param_dtype=bfloat16", "layout.fsdp=4", "layout.tensor=2"])
    config, engine = open_engine(config)
    weights = open_initial(engine, run)
    assert weights is not None
    params = weights.read(engine.model.axes, engine.placement.canonical.params)
    for leaf, wanted in zip(
        jax.tree.leaves(params), jax.tree.leaves(engine.placement.canonical.params)
    ):
        assert (leaf.dtype, leaf.sharding) == (np.dtype("bfloat16"), wanted.sharding)
    expected = jaxscale.from_pretrained(hf, param_dtype="bfloat16").params
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.proof
def test_adapters_begin_beside_frozen_weights_and_merge_into_them(converted, tmp_path):
    """In a pipeline: as the engine draws them, with the bits of the weights. What they add once
    they are trained is in the weights that are exported."""
    run, hf = converted / "run", converted / "hf"
    changes = ["model.lora_rank=3", f"model.init_from={hf}", "layout.pipeline=2", "layout.fsdp=4"]
    changes += ["model.param_dtype=float32"]
    _, engine = open_engine(load_config(run, changes))
    weights = open_initial(engine, tmp_path / "new")
    assert weights is not None
    state = initial_state(engine, weights, KEY)
    place = engine.placement.part("params").to_canonical
    params, fresh = jax.device_get((place(state.params), place(engine.init(KEY).params)))
    base = jaxscale.from_pretrained(hf)
    jax.tree.map(np.testing.assert_array_equal, without_adapters(params), base.params)
    jax.tree.map(np.testing.assert_array_equal, params, with_adapters(base.params, fresh))
    assert len(jax.tree.leaves(params)) == len(jax.tree.leaves(base.params)) + 2 * 7
    moments = optax.tree.get(state.opt_state, "mu")
    assert len(jax.tree.leaves(moments)) == 2 * 7

    rng, model = np.random.default_rng(0), dataclasses.replace(base.config, lora_rank=3)
    trained = with_adapters(
        base.params, jax.tree.map(lambda x: 0.1 * rng.normal(size=x.shape).astype(x.dtype), params)
    )
    adapted = Pretrained(model, trained, Decoder(model, plain_kernels()))(TOKENS)
    assert np.abs(adapted - base(TOKENS)).max() > 0.01
    sections = json.loads((run / "config.json").read_text())
    sections["model"] |= {"lora_rank": 3, "param_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(sections))
    metadata = {"config": sections, "data": {"fingerprint": "", "next_example": 0}}
    with contextlib.closing(CheckpointWriter(tmp_path / CHECKPOINTS)) as checkpoints:
        checkpoints.save(0, {"params": jax.tree.map(jnp.asarray, trained)}, metadata)
    exported = to_hf(tmp_path, tmp_path / "exported")
    np.testing.assert_allclose(logits(exported), adapted, atol=1e-5)
    assert load_all(exported).keys() == load_all(hf).keys()

    # Alone, in PEFT's format, and with their base model into a run again.
    peft, again = tmp_path / "peft", tmp_path / "again"
    written = ["--to_peft", "--workdir", str(tmp_path), "--output", str(peft)]
    assert convert.main([*written, "--config.layout.fsdp=2"]) == 0
    read = ["--from_hf", str(hf), "--from_peft", str(peft), "--output", str(again)]
    assert convert.main([*read, *DATA]) == 0
    pretrained = jaxscale.from_pretrained(again)
    jax.tree.map(np.testing.assert_array_equal, pretrained.params, trained)
    np.testing.assert_array_equal(pretrained(TOKENS), adapted)
    _, engine = open_engine(load_config(again, [f"model.init_from={again}"]))
    weights = open_initial(engine, tmp_path / "new")
    assert weights is not None
    state = initial_state(engine, weights, KEY)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), trained)


REFUSED = {
    "settings": (
        {"rope_theta": 1.0, "tied_embeddings": True, "init_from": "hf"},
        r"(?s)init_from = .*other settings:\n  model.rope_theta = 1.0 here, 5000.0 there\n  "
        "model.tied_embeddings = True here, False there",
    ),
    "fewer tokens": ({"vocab_size": 129, "init_from": "run"}, "_size = 129 here, 130 there"),
    "shapes": ({"d_ff": 32, "init_from": "run"}, "model.d_ff = 32 here, 24 there"),
    "twice": ({"init_from": "hf"}, "already has initial weights"),
    "nowhere": ({"init_from": "nowhere"}, "nowhere is not a folder; download a Hugging"),
}


@pytest.mark.proof(but=("settings", "nowhere", "fewer tokens"))
@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_do_not_fit_are_refused(name, converted, tmp_path):
    changes, message = REFUSED[name]
    changes = {**changes, "init_from": str(converted / changes["init_from"])}
    config = load_config(converted / "run")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
    config, engine = open_engine(config)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_initial(engine, converted / "run" if name == "twice" else tmp_path)


def test_a_larger_vocabulary_starts_from_the_mean_of_the_rows_of_the_smaller(converted, tmp_path):
    """Within the padding rows of a Hugging Face model, and beyond those of a run, on a layout."""
    known = jaxscale.from_pretrained(converted / "hf").params
    layout = ["layout.fsdp=4", "layout.tensor=2"]
    for origin, size in (("hf", 200), ("run", 300)):
        grown = [f"model.init_from={converted / origin}", f"model.vocab_size={size}"]
        _, engine = open_engine(load_config(converted / "run", [*grown, *layout]))
        weights = open_initial(engine, tmp_path)
        assert weights is not None
        params = initial_state(engine, weights, jax.random.key(0)).params
        for before, new in (
            (known["embed"]["tokens"], params["embed"]["tokens"]),
            (known["head"]["output"].T, params["head"]["output"].T),
        ):
            assert len(new) == (256 if size == 200 else 384)
            np.testing.assert_array_equal(new[:130], before[:130])
            mean = np.broadcast_to(np.mean(before[:130], axis=0), (size - 130, before.shape[1]))
            np.testing.assert_allclose(new[130:size], mean, rtol=1e-5, atol=1e-7)
            assert not np.any(new[size:])
        jax.tree.map(np.testing.assert_array_equal, params["layers"], known["layers"])


def test_no_optimizers_state_to_keep_is_refused_before_a_step_is_compiled(converted, tmp_path):
    run = converted / "run"
    for origin in (run, converted / "hf"):
        keep = [f"model.init_from={origin}", "optimizer.keep_state=True"]
        _, engine = open_engine(load_config(run, keep))
        with pytest.raises(ValueError, match=r"keep_state = True, and model.init_from = .* with"):
            open_initial(engine, tmp_path)


def test_a_model_of_ones_own_without_such_a_setting_starts_anew(tmp_path):
    config = from_dict({"model": {"family": "tests.models.two_stacks:make"}})
    assert open_initial(cast(Engine, types.SimpleNamespace(config=config)), tmp_path) is None


@pytest.mark.proof
def test_what_ends_turns_stops_the_tuned_model_here_and_at_hugging_face(tmp_path, capsys):
    """A base model's eos_token_id ends documents, and its chat template ends responses with another
    token: it is a stop id of the run, of one that starts from it or resumes, and of the export."""
    hf, run = tiny_llama.save(tmp_path / "hf"), tmp_path / "run"
    vocabulary = {"</s>": 0, **{chr(33 + i): i for i in range(1, 129)}, "<end>": 129}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["</s>", "<end>"])
    tokenizer.save(str(hf / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    (hf / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (hf / "generation_config.json").write_text('{"eos_token_id": 2, "top_p": 0.9}')
    said = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "BC"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    (tmp_path / "ask.json").write_text(json.dumps(said[:1]))
    chat = {"path": str(tmp_path / "chat.jsonl"), "messages": "messages"}
    assert convert.main(["--from_hf", str(hf), "--output", str(run), *DATA]) == 0
    tune = ["--config", f"{run}/config.json", "--config.data.heldout=0", "--trackers=none"]
    tune += ["--config.optimizer.learning_rate=0.03", "--config.run.steps=30"]
    assert train.main([*tune, "--workdir", str(run), f"--config.data.source={[chat]}"]) == 0
    assert "\nstop ids: 2 (#), 129 (<end>), 0 (</s>)\n" in capsys.readouterr().out
    answer = tmp_path / "answer.json"
    ask = ["--workdir", str(run), "--messages", str(tmp_path / "ask.json"), "--json", str(answer)]
    assert generate.main([*ask, "--temperature=0", "--num_tokens=9"]) == 0
    assert json.loads(answer.read_text())["samples"][0]["continuation"].split() == ["B", "C"]
    exported = to_hf(run, tmp_path / "exported")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((exported / name).read_text())["eos_token_id"] == [2, 129]
    assert open_weights(run).stop_ids == (2, 129), "of a run that starts from this one"


@pytest.mark.proof
def test_a_special_token_beyond_the_model_is_refused_only_in_a_text(tmp_path, capsys):
    """As Gemma 3's <image_soft_token>: the model is converted, and continues plain text."""
    hf, run = tiny_llama.save(tmp_path / "hf"), tmp_path / "run"
    vocabulary = {"</s>": 0, **{chr(33 + i): i for i in range(1, 130)}}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["</s>", "<image>"])
    tokenizer.save(str(hf / "tokenizer.json"))
    template = "{{ messages[0]['content'] }}"
    (hf / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert convert.main(["--from_hf", str(hf), "--output", str(run), *DATA]) == 0
    # The default is for models that are trained from scratch.
    assert f"init_from={run} --config.optimizer.learning_rate=2e-5" in capsys.readouterr().out
    draw = ["--workdir", str(run), "--num_tokens=2", "--temperature=0"]
    assert generate.main([*draw, "--prompt", "A<image>B"]) == 0
    messages = tmp_path / "messages.json"
    messages.write_text('[{"role": "user", "content": "AB"}]')
    assert generate.main([*draw, "--messages", str(messages)]) == 0
    messages.write_text('[{"role": "user", "content": "A<image>B"}]')
    with pytest.raises(SystemExit):
        generate.main([*draw, "--messages", str(messages)])
    refused = "a text has the special token '<image>' (in 'A<image>B'), whose id 130 is beyond"
    assert refused in capsys.readouterr().err
    config = from_dict(
        {"model": {"vocab_size": 130}, "data": {"tokenizer": f"{hf}/tokenizer.json"}}
    )
    assert open_tokenizer(config, tmp_path).vocab_size == 130


ROUTED = {"family": "qwen3_moe", "num_experts": 8, "dense_layers": 1}
BAD_COMMANDS = {
    "neither": (["--output", "x"], "give --from_hf DIR, or --to_hf"),
    "no run": (["--to_hf", "--output", "x"], "--to_hf and --to_peft need --work"),
    "two ways": (["--to_hf", "--to_peft", "--output", "x"], "or --to_hf or --to_peft with"),
    "adapters of what": (
        ["--to_hf", "--workdir", "{run}", "--from_peft", "x", "--output", "{hf}_"],
        "--from_peft needs --from_hf DIR, the base model of the adapters",
    ),
    "no adapters": (
        ["--to_peft", "--workdir", "{run}", "--output", "{hf}_"],
        "{run} has no adapters (model.lora_rank = 0); --to_hf writes its model",
    ),
    "no such adapters": (
        ["--from_hf", "{hf}", "--from_peft", "{hf}", "--output", "{hf}_", *DATA],
        "{hf} contains no PEFT adapters: no adapter_config.json",
    ),
    "adapters of more tokens": (
        ["--to_peft", "--workdir", "{wider}", "--output", "{hf}_"],
        "model.vocab_size = 131 is 1 more than {hf} has, and the rows of the new tokens are not",
    ),
    "new adapters": (
        ["--from_hf", "{hf}", "--output", "{hf}_", "--config.model.lora_rank=4", *DATA],
        "model.lora_rank = 4: --from_hf reads the adapters of --from_peft DIR; for new adapters",
    ),
    "side network": (
        ["--to_hf", "--workdir", "{side}", "--output", "{hf}_"],
        "model.side_width = 4 of {side}: a side network cannot be converted, since its layers",
    ),
    "side network alone": (
        ["--to_peft", "--workdir", "{side}", "--output", "{hf}_"],
        "a side network cannot be converted, since PEFT has no such adapter; generate",
    ),
    "adapters of experts": (
        ["--to_peft", "--workdir", "{routed}", "--output", "{hf}_"],
        "model.lora_targets = 'q,up' of {routed} adapts experts, and the MLPs next to them (dense "
        "layers, a shared expert), whose adapters PEFT does not load: it takes the names",
    ),
    "prompt": (
        ["--to_hf", "--workdir", "{prompted}", "--output", "{hf}_"],
        "model.prompt_tokens = 4 of {prompted}: a prompt cannot be merged into a model's weights",
    ),
    "new prompt": (
        ["--from_hf", "{hf}", "--output", "{hf}_", "--config.model.prompt_tokens=4", *DATA],
        "model.prompt_tokens = 4: --from_hf reads the adapters of --from_peft DIR; for new",
    ),
    "adapters in files": (
        ["--to_peft", "--workdir", "{run}", "--max_file_gb=1", "--output", "x"],
        "--max_file_gb is for --to_hf; PEFT reads adapters from one file",
    ),
    "mixed": (["--from_hf", "x", "--dtype=float32", "--output", "y"], "are for --to_hf"),
    "file size": (
        ["--from_hf", "x", "--max_file_gb=1", "--output", "y"],
        "--max_file_gb for --to_hf",
    ),
    "not empty": (["--from_hf", "{hf}", "--output", "{run}"], "is not empty; name a new folder"),
    "other settings": (
        ["--from_hf", "{hf}", "--output", "{hf}_", "--config.model.rope_theta=2", *DATA],
        "model.rope_theta = 2.0 here, 5000.0 there",
    ),
    "new tokens": (
        ["--from_hf", "{hf}", "--output", "{hf}_", "--config.model.vocab_size=131", *DATA],
        "model.vocab_size = 131 here, 130 there",
    ),
    "large tokenizer": (
        ["--from_hf", "{hf}", "--output", "{hf}_", "--config.data.tokenizer=bytes"],
        "data.tokenizer = 'bytes' has 257 tokens, and the model in {hf} only 130; add the model's",
    ),
    "own family": (
        ["--to_hf", "--workdir", "{own}", "--output", "{hf}_"],
        "of {own} is a custom model, which has no Hugging Face format",
    ),
    "own schedule": (
        ["--to_hf", "--workdir", "{scheduled}", "--output", "{hf}_"],
        "of {scheduled} is code from outside the package, not needed to convert: add",
    ),
    "a run": (
        ["--from_hf", "{run}", "--output", "{hf}_"],
        "{run} is the folder of a run, not of a Hugging Face model; write one with",
    ),
}


@pytest.mark.parametrize("name", BAD_COMMANDS)
def test_commands_that_cannot_work_are_refused_in_one_line(name, converted, tmp_path, capsys):
    words, message = BAD_COMMANDS[name]
    bare = tiny_llama.save(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    places = {"hf": converted / "hf", "run": converted / "run", "bare": bare}
    wider = {"vocab_size": 131, "lora_rank": 3, "init_from": str(converted / "hf")}
    for place, sections in (
        ("own", {"model": {"family": "tests.models.two_stacks:make"}}),
        ("scheduled", {"layout": {"schedule": "tests.pipeline.eager_1f1b:RECORD"}}),
        ("wider", {"model": wider}),
        ("side", {"model": {"side_width": 4}}),
        ("prompted", {"model": {"prompt_tokens": 4}}),
        ("routed", {"model": {**ROUTED, "lora_rank": 4, "lora_targets": "q,up"}}),
    ):
        places[place] = tmp_path / place
        places[place].mkdir()
        (places[place] / "config.json").write_text(json.dumps(sections))
    with pytest.raises(SystemExit) as stopped:
        convert.main([word.format(**places) for word in words])
    assert stopped.value.code == 2
    assert message.format(**places) in capsys.readouterr().err
    assert not (converted / "hf_").exists()


@pytest.mark.proof
def test_weights_are_converted_without_a_tokenizer_and_a_line_says_so(tmp_path, capsys):
    """And back. What needs one says where it is looked for."""
    hf, run = tiny_llama.save(tmp_path / "hf"), tmp_path / "run"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (hf / name).unlink()
    assert convert.main(["--from_hf", str(hf), "--output", str(run), *DATA]) == 0
    said = capsys.readouterr().out
    assert f"{hf} has no tokenizer.json and no tokenizer.model: only the weights are" in said
    output = to_hf(run, tmp_path / "back")
    assert tiny_llama.bits(load_all(output)) == tiny_llama.bits(load_all(hf))
    written = json.loads((output / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (1, 2)
    with pytest.raises(SystemExit):
        generate.main(["--workdir", str(run), "--prompt", "A"])
    assert f"data.tokenizer = '{run / 'tokenizer.json'}' is neither" in capsys.readouterr().err


def test_learned_positions_are_the_length_of_a_converted_models_texts(tmp_path):
    run = tmp_path / "run"
    assert convert.main(["--from_hf", "tests/goldens/gpt2", "--output", str(run)]) == 0
    config = load_config(run)
    assert config.data.seq_len == config.model.max_seq_len == 32


def test_the_runs_tokenizer_is_the_one_it_started_with(converted, tmp_path):
    """Its copy is used where the file has gone, and another file is refused."""
    config = load_config(converted / "run", [f"data.tokenizer={tmp_path / 'tokenizer.json'}"])
    assert open_tokenizer(config, converted / "run").vocab_size == 100
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not the tokenizer of the run"):
        open_tokenizer(config, converted / "run")
