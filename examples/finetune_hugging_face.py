"""Fine-tunes a Hugging Face model on conversations and writes it back in the same format.

    python examples/finetune_hugging_face.py [FOLDER]

FOLDER is a model as transformers saves it, with a tokenizer that has a chat template; the default
is the tiny random Llama of the test suite. Shows the conversion to a run, `model.init_from`,
conversations as data, and the export. Takes about 30 s on two cores.
"""

import json
import logging
import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX_PLATFORMS=cuda in the environment: a GPU

import jaxscale
from jaxscale import convert

LLAMA = pathlib.Path(__file__).parents[1] / "tests" / "goldens" / "llama_chat"


def write_conversations(file: pathlib.Path) -> None:
    """200 sums, one conversation a line; the loss counts the assistant's tokens alone."""
    with file.open("w") as lines:
        for a, b in ((a, b) for a in range(20) for b in range(10)):
            question = {"role": "user", "content": f"what is {a} + {b} ?"}
            answer = {"role": "assistant", "content": str(a + b)}
            lines.write(json.dumps({"messages": [question, answer]}) + "\n")


def main(folder: str, runs: pathlib.Path = pathlib.Path("runs/examples")) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    base, tuned, exported = (runs / f"finetune_{name}" for name in ("base", "tuned", "exported"))
    if tuned.exists():
        sys.exit(f"{tuned} exists; remove {runs}/finetune_* to start again")
    convert.main(["--from_hf", folder, "--output", str(base)])
    conversations = runs / "finetune_conversations.jsonl"
    write_conversations(conversations)
    source = {"path": str(conversations), "messages": "messages"}
    settings = [f"model.init_from={base}", f"data.source={source}", "data.seq_len=64"]
    settings += ["optimizer.learning_rate=1e-3", "run.steps=20"]  # 2e-5 for a trained model
    config = jaxscale.load(base / "config.json", settings)
    _, summary = jaxscale.fit(jaxscale.open_trainer(config, tuned))
    print(f"loss {summary['loss']:.3f} nats a token of the answers")
    convert.main(["--to_hf", "--workdir", str(tuned), "--output", str(exported)])
    logits = jaxscale.from_pretrained(exported)([[3, 1, 4, 1, 5]])
    print(f"{exported} loads with transformers and here: logits {logits.shape}")


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else str(LLAMA))
