"""Benchmark of the data pipeline: packing rate compared with a train step's consumption.

Batches of 2,048-token rows are packed on one core, for each objective, for a mixture, and for text
of very short documents, the slowest to pack. The step is timed in the same process on all cores.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

import jax
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from jaxscale import command_line  # noqa: E402
from jaxscale.config import (  # noqa: E402
    OBJECTIVES,
    Config,
    DataConfig,
    load,
)
from jaxscale.data.dataset import Examples, open_dataset  # noqa: E402
from jaxscale.data.loader import batches  # noqa: E402
from jaxscale.data.mixture import mix  # noqa: E402
from jaxscale.data.tokens.corpus import Corpus, open_corpus  # noqa: E402
from jaxscale.data.tokens.tokenizer import Tokenizer, load_tokenizer  # noqa: E402
from jaxscale.run.evaluation import device_batches  # noqa: E402
from jaxscale.run.setup.layout import open_engine  # noqa: E402

SEQ_LEN, ROWS = 2048, 4
ENOUGH = 10.0
"""Required ratio of packing rate to consumption."""


def consumption(config: Config, train: Examples, steps: int = 5) -> float:
    """Tokens per second of the config's train step on this machine, by the median."""
    config, engine = open_engine(config)
    stream = device_batches(engine, train, config.data.global_batch_size)
    state, seconds = engine.init(jax.random.key(0)), []
    for _ in range(steps + 1):
        batch = next(stream)
        begin = time.perf_counter()
        state, out = engine.step(state, batch)
        jax.block_until_ready(out)
        seconds.append(time.perf_counter() - begin)
    stream.close()
    return config.data.tokens_per_step / statistics.median(seconds[1:])


def production(dataset: Examples, seconds: float = 1.0) -> float:
    """Tokens that one core packs into batches per second of processor time."""
    stream = batches(dataset, global_batch_size=ROWS)
    next(stream)
    made, begin = 0, time.process_time()
    while time.process_time() - begin < seconds:
        next(stream)
        made += 1
    spent = time.process_time() - begin
    stream.close()
    return made * ROWS * dataset.seq_len / spent


def short_documents(tokenizer: Tokenizer, length: int = 20) -> Corpus:
    """A million random tokens in documents of `length`."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, tokenizer.vocab_size, 10**6, np.uint16)
    ids[::length] = tokenizer.boundary
    count = len(ids) // length
    return Corpus(
        (ids,),
        np.arange(count + 1) * length,
        rng.integers(0, 2**63, count).astype(np.uint64),
        tokenizer.token_bytes,
        len(ids),
        "random",
    )


def cases(data: DataConfig, tokenizer: Tokenizer, corpus: Corpus) -> dict[str, Examples]:
    """The measured datasets by name."""

    def of(text: Corpus, objective: str) -> Examples:
        config = dataclasses.replace(data, seq_len=SEQ_LEN, objective=objective)
        return open_dataset(config, tokenizer, split="train", corpus=text)

    short = short_documents(tokenizer)
    found = {name: of(corpus, name) for name in OBJECTIVES}
    found |= {f"{name}, documents of 20": of(short, name) for name in OBJECTIVES}
    members = [open_dataset(data, tokenizer, split="train", corpus=corpus) for _ in range(3)]
    members = [dataclasses.replace(member, seq_len=SEQ_LEN) for member in members]
    return found | {"mixture of 3": mix(members, [0.7, 0.2, 0.1], lambda step: step * ROWS)}


def main(argv: Sequence[str]) -> int:
    """Returns 1 if a case is not fast enough."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default=str(ROOT / "configs/quickstart.py"))
    parser.add_argument(
        "--workdir", help="where tokens are kept; default: a folder that is deleted"
    )
    parser.add_argument(
        "--step_tokens_per_second",
        type=float,
        metavar="X",
        help="consumption of the step, instead of a measurement",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=command_line.output_file, help="append a line for each case"
    )
    options = parser.parse_args(argv)
    with command_line.refusals():
        config = load(options.config)
    with tempfile.TemporaryDirectory() as temporary:
        workdir = pathlib.Path(options.workdir or temporary)
        data = config.data
        tokenizer = load_tokenizer(
            data.tokenizer, data.source, workdir, heldout=data.heldout, seed=data.seed
        )
        corpus = open_corpus(data.source, tokenizer, workdir / "tokens")
        train = open_dataset(data, tokenizer, split="train", corpus=corpus)
        taken = options.step_tokens_per_second or consumption(config, train)
        print(f"the step of {options.config} takes {taken:,.0f} tokens a second", flush=True)
        slowest = np.inf
        for name, dataset in cases(data, tokenizer, corpus).items():
            made = production(dataset)
            slowest = min(slowest, made / taken)
            print(
                f"{name:34} {made / (ROWS * SEQ_LEN):9,.0f} batches of {ROWS} x {SEQ_LEN} "
                f"a second and core, {made / taken:9,.0f} times the step",
                flush=True,
            )
            if options.json:
                record = {
                    "benchmark": "data",
                    "case": name,
                    "tokens_per_second": made,
                    "step_tokens_per_second": taken,
                    "ratio": made / taken,
                }
                with open(options.json, "a") as lines:
                    lines.write(json.dumps(record) + "\n")
    return int(slowest < ENOUGH)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
