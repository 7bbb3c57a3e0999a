"""Trains a tokenizer and a small decoder on text files, then samples from the model.

    python examples/train_from_text.py [SECTION.KEY=VALUE ...]

Shows a configuration with overrides, the training loop, the held-out loss and sampling. For other
text set data.source='texts/**/*.txt'. The same command resumes a run that was stopped. Takes about
40 s on two cores.
"""

import logging
import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX_PLATFORMS=cuda in the environment: a GPU

import jaxscale

SETTINGS = [
    "data.source={stdlib}/asyncio/*.py",  # the source of a module that every Python has
    "data.tokenizer=bpe:1024",
    "data.global_batch_size=8",
    "data.seq_len=128",
    "model.num_layers=2",
    "model.d_model=128",
    "model.num_heads=4",
    "model.d_ff=256",
    "model.vocab_size=1024",
    "run.steps=100",
    "run.eval_every=50",
    "run.checkpoint_every=50",
]


def main(overrides: list[str], runs: pathlib.Path = pathlib.Path("runs/examples")) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = jaxscale.load("quickstart", [*SETTINGS, *overrides])
    workdir = runs / "train_from_text"
    trainer = jaxscale.open_trainer(config, workdir)
    if trainer is None:
        sys.exit(f"{workdir} is complete; raise run.steps or remove the folder")
    state, summary = jaxscale.fit(trainer)
    print(f"held-out loss {summary['eval_loss']:.3f} nats, in {workdir}/metrics.jsonl by step")
    tokenizer = trainer.text.tokenizer
    (text,) = jaxscale.sample(trainer.engine, state.params, tokenizer, ["def "], num_tokens=48)
    print(f"a sample:\ndef {text}")


if __name__ == "__main__":
    main(sys.argv[1:])
