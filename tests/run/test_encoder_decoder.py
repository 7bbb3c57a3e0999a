"""A run of an encoder-decoder by the commands: trained on prompts and responses, sampled, evaluated
and generated from."""

import json

import pytest

from jaxscale import evaluate, generate, train

SETTINGS = {
    "model.num_layers": 2,
    "model.num_encoder_layers": 2,
    "model.d_model": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.d_ff": 24,
    "model.vocab_size": 270,
    "data.tokenizer": "bytes",
    "data.objective": "prefix",
    "data.global_batch_size": 8,
    "data.seq_len": 32,
    "data.target_len": 16,
    "data.heldout": 0,
    "run.steps": 1,
    "run.eval_every": 0,
    "optimizer.warmup_steps": 0,
    "layout.data": 8,
    "layout.microbatches": 1,
    "layout.remat": "none",
}


def refusal(command, arguments, capsys) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit):
        command.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.proof
def test_a_run_is_sampled_evaluated_and_generated_from(tmp_path, capsys):
    workdir, pairs = ["--workdir", str(tmp_path / "run")], tmp_path / "pairs.jsonl"
    pairs.write_text('{"q": "say jax", "a": "jaxscale"}\n' * 9)
    source = {"path": str(pairs), "prompt": "q", "response": "a"}
    settings = {**SETTINGS, "data.source": repr(source)}
    settings = (f"--config.{name}={value}" for name, value in settings.items())
    assert train.main(["--config", "mt5_small", *workdir, "--trackers=none", *settings]) == 0
    printed = capsys.readouterr().out
    sample = printed.partition("A sample at step 1:\n\n")[2].partition("\nNext steps")[0]
    assert sample.startswith("say jax\n-> ")
    assert "jaxscale.generate" in printed

    out = ["--json", str(tmp_path / "out.json")]
    asked = [*workdir, *out, "--num_tokens=5", "--temperature=0", "--prompt"]
    assert generate.main([*asked, "jax", "--prompt", ""]) == 0
    first, _ = json.loads((tmp_path / "out.json").read_text())["samples"]
    assert first["prompt"] == "jax"
    assert f"--- 1 of 2\njax\n-> {first['continuation']}" in capsys.readouterr().out

    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "jax", "choices": ["scale", "~"], "answer": 0}\n')
    assert evaluate.main([*workdir, *out, "--choices", str(questions)]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["accuracy"] in (0, 1)

    messages = tmp_path / "messages.json"
    messages.write_text('[{"role": "user", "content": "a"}]')
    line = refusal(generate, [*workdir, "--messages", str(messages)], capsys)
    assert "--messages: model.family = 'mt5' has an encoder, which reads texts" in line
