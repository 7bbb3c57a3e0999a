"""Benchmark of data preparation: text per second and core, read, tokenised with 32k byte pairs and
written.

Byte pairs are learnt from the text first. Every run begins with a tokenizer with an empty word
cache, in one process without threads, as a worker of python -m jaxscale.prepare does. CPU seconds
are counted, so that other load matters little. "library" is without the word cache.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import tokenizers

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from jaxscale import command_line  # noqa: E402
from jaxscale.data.text.documents import cut, read_documents  # noqa: E402
from jaxscale.data.text.text_files import find_files  # noqa: E402
from jaxscale.data.tokens.prepare import prepare  # noqa: E402
from jaxscale.data.tokens.shards import plan  # noqa: E402
from jaxscale.data.tokens.tokenizer import (  # noqa: E402
    Tokenizer,
    from_file,
    load_tokenizer,
    save_tokenizer,
)


def library(path: str) -> Tokenizer:
    """The tokenizer in a file, with every text encoded by the library only."""
    plain = tokenizers.Tokenizer.from_file(path)
    plain.encode_special_tokens = True

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        encodings = plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    return dataclasses.replace(from_file(path, "library"), encode=encode)


def to_jsonl(source: Sequence[str], path: pathlib.Path) -> None:
    """Writes the documents of a source as JSON lines, one paragraph each."""
    with path.open("w") as file:
        for piece in cut(find_files(source), 1 << 20):
            for document in read_documents(piece):
                for text in getattr(document, "text", "").split("\n\n"):
                    if text:
                        file.write(json.dumps({"text": text}) + "\n")


def main(argv: Sequence[str]) -> int:
    """Prints a line for each input format; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", nargs="+", default=["{stdlib}/**/*.py"], metavar="PATH")
    parser.add_argument("--vocab_size", type=int, default=32_000)
    parser.add_argument("--repeats", type=command_line.whole(1, 10**6), default=3)
    parser.add_argument(
        "--json", metavar="FILE", type=command_line.output_file, help="append a line for each"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with command_line.refusals():
            learnt = load_tokenizer(f"bpe:{options.vocab_size}", options.input)
        save_tokenizer(learnt, folder)
        path = str(folder / "tokenizer.json")
        to_jsonl(options.input, folder / "lines.jsonl")
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        for reading, source, make in (
            ("files", options.input, lambda: from_file(path, "words")),
            ("lines of JSON", [str(folder / "lines.jsonl")], lambda: from_file(path, "words")),
            ("files, library", options.input, lambda: library(path)),
        ):
            rates, index = [], None
            for i in range(options.repeats):
                tokenizer = make()
                works = plan(find_files(source), tokenizer, folder / f"{reading}-{i}")
                begin = time.process_time()
                index = prepare(works, tokenizer)
                rates.append(index.num_bytes / 1e6 / (time.process_time() - begin))
            assert index
            record = {
                "benchmark": "prepare",
                "reading": reading,
                "vocab_size": options.vocab_size,
                "text_bytes": index.num_bytes,
                "num_documents": index.num_documents,
                "num_tokens": index.num_tokens,
                "fingerprint": index.fingerprint,
                "mb_per_core_second": statistics.median(rates),
                "all": rates,
            }
            print(
                f"{reading:16} {record['mb_per_core_second']:6.1f} MB/s a core (median of "
                f"{[round(rate, 1) for rate in rates]}), {index.num_bytes / 1e6:.1f} MB in "
                f"{index.num_documents:,} documents",
                flush=True,
            )
            if options.json:
                with open(options.json, "a") as lines:
                    lines.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
