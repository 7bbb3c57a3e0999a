"""Runs with a prompt and with a side network, by the commands: trained from another run's
weights, resumed, evaluated, generated from, and converted."""

import json
import shutil

import jax
import numpy as np
import pytest

import jaxscale
from jaxscale import convert, evaluate, generate, train
from jaxscale.models.adapters.lora import without_adapters
from jaxscale.models.adapters.prompt import initial_ids
from jaxscale.models.protocol import stored_weights
from jaxscale.ops.storage.quantised_storage import pack_weights
from jaxscale.storage.local_tier import CHECKPOINTS

SETTINGS = ["--config.model.num_layers=1", "--config.model.param_dtype=float32"]
SETTINGS += ["--config.data.source=docs/*.md", "--config.data.heldout=0.2", "--trackers=none"]
SETTINGS += ["--config.layout.data=8", "--config.optimizer.warmup_steps=0"]
ADAPTERS = {
    "prompt": ["--config.model.prompt_tokens=5"],
    "side": ["--config.model.side_width=4"],
    "quantised base": [
        *("--config.model.lora_rank=4", "--config.model.base_dtype=mxfp4"),
        "--config.model.base_targets=q,k,v,up,gate,down",
    ],
}


def trained(workdir, *more: str) -> dict:
    """A run's parameters."""
    arguments = ["--config", "tiny", "--workdir", str(workdir), *SETTINGS, *more]
    assert train.main(arguments) == 0
    return jaxscale.from_pretrained(workdir).params


def same(got, wanted) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.proof
@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param("prompt", marks=pytest.mark.slow),
        "side",
        pytest.param("quantised base", marks=pytest.mark.slow),
    ],
)
def test_a_run_beside_the_weights_of_another(adapter, tmp_path, capsys):
    base, run, out = tmp_path / "base", tmp_path / "run", tmp_path / "out.json"
    frozen = trained(base, "--config.run.steps=1")
    more = [f"--config.model.init_from={base}", *ADAPTERS[adapter], "--config.run.steps=4"]
    more += ["--config.run.checkpoint_every=2", "--config.optimizer.learning_rate=0.01"]
    params = trained(run, *more)
    stored = stored_weights(jaxscale.from_pretrained(run).model)
    assert bool(stored) == (adapter == "quantised base")
    same(without_adapters(params), jax.jit(lambda x: pack_weights(x, stored))(frozen))
    if adapter == "prompt":
        rows, table = params["embed"]["prompt"]["rows"], frozen["embed"]["tokens"]
        first = table[initial_ids(jaxscale.from_pretrained(run).config)]
        assert 0 < np.abs(rows - first).max() < 0.1  # it began as rows of the base's embedding
    elif adapter == "side":
        assert np.abs(params["layers"]["side"]["up"]).max() > 0
    else:
        assert np.abs(params["layers"]["attention"]["q_lora"]["b"]).max() > 0

    # As if it had been stopped after the checkpoint of step 2.
    shutil.copytree(run, tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / CHECKPOINTS / "4")
    same(trained(tmp_path / "resumed", *more), params)
    assert "resuming at step 2 of 4" in capsys.readouterr().out

    shared = ["--workdir", str(run), "--json", str(out)]
    assert evaluate.main([*shared, "--max_batches=1"]) == 0
    assert np.isfinite(json.loads(out.read_text())["eval_loss"])
    assert generate.main([*shared, "--prompt", "a", "--num_tokens=3", "--temperature=0"]) == 0
    (sample,) = json.loads(out.read_text())["samples"]
    ids = np.array([[256, *b"a"]])
    logits = jaxscale.from_pretrained(run)(ids)[0, -1, :257]
    likeliest = int(np.argmax(logits))
    if likeliest < 128:
        assert sample["continuation"].startswith(chr(likeliest))
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "a", "choices": ["b", "cd"], "answer": 0}\n')
    assert evaluate.main([*shared, "--choices", str(questions)]) == 0
    assert json.loads(out.read_text())["accuracy"] in (0, 1)
    if adapter == "prompt":
        written = ["--to_peft", "--workdir", str(run), "--output", str(tmp_path / "peft")]
        assert convert.main(written) == 0
        peft = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
        assert (peft["peft_type"], peft["num_virtual_tokens"]) == ("PROMPT_TUNING", 5)
    if stored:
        for form in ("hf", "peft"):
            written = [f"--to_{form}", "--workdir", str(run), "--output", str(tmp_path / form)]
            assert convert.main(written) == 0
        merged = jaxscale.from_pretrained(tmp_path / "hf")(ids)[0, -1, :257]
        np.testing.assert_allclose(merged, logits, atol=1e-5)
