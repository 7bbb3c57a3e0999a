"""Tokenisation of text into shards for training; --inspect prints the contents of shards or text.

python -m jaxscale.prepare --input PATH ... --tokenizer NAME_OR_FILE --output DIR
"""

import argparse
import os
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from etils import epy

from jaxscale import command_line
from jaxscale import config as configs
from jaxscale.config.data_source import BOUNDARIES, FORMATS, LONG_DOCUMENTS, Source, to_sources
from jaxscale.data.text.text_files import find_files
from jaxscale.data.tokens.index import Index, find_prepared
from jaxscale.data.tokens.prepare import prepare
from jaxscale.data.tokens.shards import plan
from jaxscale.data.tokens.tokenizer import Tokenizer, begin_texts, load_tokenizer
from jaxscale.formatting import file_size
from jaxscale.storage.object_store import is_remote

with epy.lazy_imports():  # Grain takes seconds, and preparing does not need it
    from jaxscale.data import inspect

_SOURCE_KEYS = (
    "format",
    "field",
    "prompt",
    "response",
    "apart",
    "messages",
    "boundary",
    "max_document_bytes",
    "long_documents",
    "skip_share",
)


_TRAINING_KEYS = ("training_bytes", "heldout", "seed")

_WORK_KEYS = ("workers", "shard_bytes", *_TRAINING_KEYS)

MOST_BYTES = 2**60


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 130 after an interrupt."""
    argv = sys.argv[1:] if argv is None else argv
    options, overrides = command_line.parse(_parser(), argv)
    command_line.log_to_stdout()
    with command_line.refusals():
        _check(options, overrides, {word.partition("=")[0] for word in argv})
        if options.inspect is not None:
            result = _inspect(options, overrides)
        else:
            try:
                result = _prepare(options)
            except KeyboardInterrupt:
                print("interrupted; run the same command again to resume")
                return 130
    command_line.write_json(options.json, result)
    return 0


def _prepare(options: argparse.Namespace) -> dict[str, Any]:
    begin = time.perf_counter()
    source, output = _source(options, options.input), pathlib.Path(options.output)
    if find_prepared(source):
        raise ValueError(f"--input {options.input[0]} is a folder of shards; give text")
    tokenizer = load_tokenizer(
        options.tokenizer,
        [source],
        output,
        heldout=options.heldout,
        seed=options.seed,
        training_bytes=options.training_bytes,
    )
    tokenizer = begin_texts(tokenizer, options.text_begin)
    works = plan(find_files([source]), tokenizer, output, options.shard_bytes)
    index = prepare(works, tokenizer, workers=options.workers)
    seconds = time.perf_counter() - begin
    print(_report(index, tokenizer, output, seconds))
    return {
        "output": options.output,
        "num_documents": index.num_documents,
        "num_tokens": index.num_tokens,
        "num_bytes": index.num_bytes,
        "num_left_out": index.num_left_out,
        "num_shards": len(index.shards),
        "tokenizer": index.tokenizer,
        "vocab_size": index.vocab_size,
        "max_id": index.max_id,
        "fingerprint": index.fingerprint,
        "seconds": seconds,
    }


def _report(index: Index, tokenizer: Tokenizer, output: pathlib.Path, seconds: float) -> str:
    own = output / tokenizer.file_name if tokenizer.file else tokenizer.name
    left_out = f", {index.num_left_out:,} bad ones left out" if index.num_left_out else ""
    return (
        f"{output}: {index.num_documents:,} documents{left_out}, {file_size(index.num_bytes)} "
        f"of text, {index.num_tokens:,} tokens ({index.num_bytes / index.num_tokens:.2f} bytes a "
        f"token) in {len(index.shards)} shards; {seconds:.1f} s\n"
        f"to train on them: --config.data.source={shlex.quote(_as_source(output))} "
        f"--config.data.tokenizer={shlex.quote(str(own))} "
        f"--config.model.vocab_size={index.vocab_size}"
    )


def _as_source(folder: pathlib.Path) -> str:
    """A folder as a command-line value; a comma would separate two paths."""
    plain = "," not in str(folder) and not str(folder).startswith(("(", "[", "{"))
    return str(folder) if plain else str({"path": str(folder)})


def _inspect(options: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if options.config:
        config = configs.load(options.config, overrides)
        surveys, examples = inspect.survey_config(config.data, config.model.vocab_size)
    else:
        source = _source(options, options.inspect)
        surveys = [inspect.survey(source, options.tokenizer, options.text_begin)]
        config, examples = None, inspect.examples_of(surveys[0])
    print("\n\n".join(inspect.describe_data(one) for one in surveys))
    result["sources"] = [one.numbers() for one in surveys]
    if examples is None:
        print("\nno examples: an entry is too large to inspect as text; prepare it first")
    else:
        if config:
            num_examples = config.data.examples_of(config.run.steps)
            result["mixture"] = inspect.mixture_of(examples, num_examples)
            print("\n" + inspect.print_mixture(result["mixture"], config.run.steps))
        described = inspect.describe_examples(examples, surveys[0].tokenizer, options.examples)
        result["examples"] = described
        print("\n" + inspect.print_examples(described))
    if options.png:
        inspect.png(str(options.png), surveys)
    return result


def _source(options: argparse.Namespace, paths: Sequence[str]) -> Source:
    """The entry of `data.source` for the flags."""
    chosen = {key: getattr(options, key) for key in _SOURCE_KEYS}
    given = {key: value for key, value in chosen.items() if value is not None}
    return to_sources([{"path": paths} | given])[0]


def _check(options: argparse.Namespace, overrides: Sequence[str], given: Collection[str]) -> None:
    """Refuses missing flags, flags that exclude each other, and flags that nothing would read.

    Args:
      given: the words of the command line, cut at the `=`.
    """
    if options.inspect is None:
        for flag in ("input", "output", "tokenizer"):
            if not getattr(options, flag):
                raise ValueError(
                    f"--{flag} is missing; give --input PATH ... --tokenizer NAME_OR_FILE "
                    "--output DIR, or --inspect PATH"
                )
        if options.config or overrides:
            raise ValueError("--config is for --inspect; give --input PATH ... to prepare")
        if is_remote(options.output):
            raise ValueError(
                f"--output {options.output} is a URL; give a local folder, and upload it afterwards"
            )
        if pathlib.Path(options.output).is_file():
            raise ValueError(
                f"--output {options.output} is a file; give the name of a folder for the shards"
            )
        _refuse_unread(("examples", "png"), given, "for --inspect; leave it out to prepare")
        if not options.tokenizer.startswith("bpe:"):
            purpose = f"for --tokenizer bpe:N; leave it out with {options.tokenizer}"
            _refuse_unread(_TRAINING_KEYS, given, purpose)
    elif options.input or options.output:
        raise ValueError("--inspect only reads; leave --input and --output out")
    elif bool(options.config) == bool(options.inspect):
        raise ValueError("--inspect needs either PATH ... or --config FILE")
    else:
        _refuse_unread(_WORK_KEYS, given, "for preparing; leave it out of --inspect")
        if options.config:
            keys = ("tokenizer", "text_begin", *_SOURCE_KEYS)
            _refuse_unread(keys, given, "for --inspect PATH; with --config, set it in data")


def _refuse_unread(keys: Sequence[str], given: Collection[str], purpose: str) -> None:
    for key in keys:
        if f"--{key}" in given:
            raise ValueError(f"--{key} is {purpose}")


def _num_cores() -> int:
    """The cores that this process may use, or all if the system does not tell."""
    known = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxscale.prepare",
        description="Tokenises text into shards for training, in parallel; after an interruption "
        "the same command resumes. --inspect prints the contents of shards, of text, or of a "
        "configuration's mixture.",
    )
    _add_path_flags(parser.add_argument)
    _add_document_flags(parser.add_argument)
    _add_work_flags(parser.add_argument)
    _add_tokenizer_flags(parser.add_argument)
    _add_inspect_flags(parser.add_argument)
    return parser


def _add_path_flags(add: Callable[..., Any]) -> None:
    """Adds the flags of the input and the output."""
    add(
        "--input",
        nargs="+",
        metavar="PATH",
        help="files, folders, globs or URLs (s3://...): text, .jsonl, .parquet, .arrow, "
        ".arrayrecord, FASTA, plain or .gz or .zst",
    )
    add(
        "--tokenizer",
        metavar="NAME_OR_FILE",
        type=os.path.expanduser,  # a shell leaves --tokenizer=~/FILE as it is
        help="bytes, esm2, a tokenizer.json, a SentencePiece .model, or bpe:32000 to train one of "
        "that size first",
    )
    add("--output", metavar="DIR", type=os.path.expanduser, help="folder for the shards")
    add(
        "--inspect",
        nargs="*",
        metavar="PATH",
        help="print the contents of shards or text; with --config, of the data of a run",
    )
    add("--config", metavar="FILE", help="a configuration to inspect")


def _add_document_flags(add: Callable[..., Any]) -> None:
    """Adds the flags of how files are read as documents."""
    add("--format", choices=FORMATS, help="format of the files; default by their suffix")
    add(
        "--field",
        metavar="NAME",
        help="field of a record with the text, a.b for b inside a; default text",
    )
    add("--prompt", metavar="NAME", help="field of a prompt, which carries no loss")
    add("--response", metavar="NAME", help="field of the response to the prompt")
    add(
        "--apart",
        action="store_const",
        const=True,
        help="tokenise prompts and responses separately, for an encoder-decoder",
    )
    add(
        "--text_begin",
        choices=configs.TEXT_BEGINS,
        default=configs.DataConfig.text_begin,
        help="start of prompts with responses, as data.text_begin: the prefix of the tokenizer's "
        "post-processor, or the token that begins a document",
    )
    add(
        "--messages",
        metavar="NAME",
        help="field of a conversation, for the chat template next to the tokenizer.json; loss is "
        "on the assistant's messages",
    )
    add(
        "--boundary",
        choices=BOUNDARIES,
        help="unit that is a document; default file for text, record for other formats",
    )
    add(
        "--max_document_bytes",
        metavar="N",
        type=command_line.whole(1, MOST_BYTES),
        help="largest document, in bytes of UTF-8; default no limit",
    )
    add(
        "--long_documents",
        choices=LONG_DOCUMENTS,
        help="split or refuse documents beyond that limit; default split",
    )
    add(
        "--skip_share",
        metavar="S",
        type=command_line.real(0, 0.999),
        help="largest share of bad documents that are left out (and counted); default 0",
    )


def _add_work_flags(add: Callable[..., Any]) -> None:
    """Adds the flags that divide the work."""
    add(
        "--workers",
        metavar="N",
        type=command_line.whole(0, 4096),
        default=_num_cores(),
        help="worker processes; default one for each core; 0: none, in this process",
    )
    add(
        "--shard_bytes",
        metavar="N",
        type=command_line.whole(0, MOST_BYTES),
        default=0,
        help="bytes of input files in each shard; default by their total size",
    )


def _add_tokenizer_flags(add: Callable[..., Any]) -> None:
    """Adds the flags of a tokenizer's training text."""
    data = configs.DataConfig()
    add(
        "--training_bytes",
        metavar="N",
        type=command_line.whole(1, MOST_BYTES),
        default=100_000_000,
        help="bytes of text that bpe:N is trained on; default 100 MB",
    )
    add(
        "--heldout",
        metavar="S",
        type=command_line.real(0, 0.999),
        default=data.heldout,
        help=f"held-out share, not used to train bpe:N, as data.heldout; default {data.heldout}",
    )
    add(
        "--seed",
        metavar="N",
        type=command_line.whole(0, 2**32 - 1),
        default=data.seed,
        help=f"seed that selects the held-out share, as data.seed; default {data.seed}",
    )


def _add_inspect_flags(add: Callable[..., Any]) -> None:
    """Adds the flags of printed and written results."""
    add(
        "--examples",
        metavar="N",
        type=command_line.whole(0, 10_000),
        default=3,
        help="examples that --inspect prints; default 3",
    )
    add(
        "--png", metavar="FILE", type=command_line.output_file, help="draw the lengths of documents"
    )
    add(
        "--json",
        metavar="FILE",
        type=command_line.output_file,
        help="also write the numbers to this file",
    )


if __name__ == "__main__":
    command_line.run(main)
