"""From a Hugging Face folder to a run, trained in two layouts, and back."""

import contextlib
import json

import jax
import numpy as np
import pytest

import jaxscale
from jaxscale import convert, generate, train
from jaxscale.data.loader import batches
from jaxscale.run.setup import open_text
from jaxscale.run_folder import load_config
from tests.hugging_face import tiny_llama
from tests.hugging_face.test_round_trip import load_all

DATA = ["--config.data.global_batch_size=8", "--config.data.seq_len=16"]
TOKENS = np.random.default_rng(1).integers(0, 130, (2, 9))


@pytest.fixture(scope="module")
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
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (output / name).read_bytes() == (hf / name).read_bytes()
    assert logits(output).dtype == np.float32
    assert logits(output).shape == (2, 9, 130)
    np.testing.assert_array_equal(logits(output), logits(hf))
    np.testing.assert_array_equal(logits(converted / "run"), logits(hf))


STEP = [
    "--config.run.steps=1",
    "--config.optimizer.learning_rate=0",
    "--config.model.compute_dtype=float32",
    "--trackers=none",
]
PIPELINE = ["pipeline=2", "fsdp=2", "tensor=2", "data=1", "microbatches=2", "virtual_stages=2"]


def first_batch(workdir):
    text = open_text(load_config(workdir), workdir)
    with contextlib.closing(batches(text.train, global_batch_size=8)) as stream:
        return next(stream)


def step_one(workdir):
    (line,) = (workdir / "metrics.jsonl").read_text().splitlines()
    return json.loads(line)["loss"]


def test_training_starts_from_the_weights_on_any_layout(converted, tmp_path):
    """With a learning rate of zero a step leaves every bit as it was, through an interleaved
    pipeline, a checkpoint and an export; and the loss is that of the weights."""
    run, hf = converted / "run", converted / "hf"
    config = f"--config={run / 'config.json'}"
    piped = tmp_path / "piped"
    layout = [f"--config.layout.{one}" for one in (*PIPELINE, "schedule=interleaved")]
    init = f"--config.model.init_from={hf}"
    assert train.main([config, "--workdir", str(piped), init, *STEP, *layout]) == 0
    exported = to_hf(piped, tmp_path / "exported")
    assert tiny_llama.bits(load_all(exported)) == tiny_llama.bits(load_all(hf))
    assert (exported / "tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()
    assert json.loads((exported / "config.json").read_text())["bos_token_id"] == 1
    np.testing.assert_array_equal(logits(piped), logits(hf))

    init = f"--config.model.init_from={piped}"
    again = tmp_path / "again"
    assert train.main([config, "--workdir", str(again), init, *STEP]) == 0
    assert step_one(again) == pytest.approx(step_one(piped), rel=1e-6)
    batch = first_batch(run)
    scores = jax.nn.log_softmax(jaxscale.from_pretrained(hf)(batch.tokens, batch.segments))
    nll = -np.take_along_axis(np.asarray(scores), batch.targets[..., None], -1)[..., 0]
    assert step_one(piped) == pytest.approx(np.average(nll, weights=batch.weights), rel=1e-5)
