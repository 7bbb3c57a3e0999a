"""Text generation from a run's newest checkpoint; an encoder-decoder encodes the prompt.

python -m jaxscale.generate --workdir DIR --prompt TEXT [--prompt TEXT ...]
"""

import argparse
import logging
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from etils import epy

from jaxscale import command_line, run_folder
from jaxscale import config as configs
from jaxscale.data.text.dialogue import Conversation, read_conversations
from jaxscale.distributed import launcher, processes
from jaxscale.formatting import printable

with epy.lazy_imports():  # they import JAX: a mistyped flag is refused before
    import jax

    from jaxscale.data.tokens import stop_ids
    from jaxscale.decoding import prompts, sampling
    from jaxscale.run import compilation_cache
    from jaxscale.run.setup import layout, restore, text

log = logging.getLogger("jaxscale")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the status of the process: 0."""
    options, overrides = command_line.parse(
        _parser(), sys.argv[1:] if argv is None else argv, configs.leaves()
    )
    with command_line.refusals():
        given = _read_prompts(options)
        config = run_folder.load_config(
            options.workdir, overrides, trust_foreign=options.trust_family
        )
        place = launcher.find_processes(options)
    command_line.log_to_stdout()
    settings = {"config": configs.to_dict(config), "flags": launcher.common_flags(options)}
    with processes.together(place, settings | {"prompts": str(given)}):
        return _generate(options, config, overrides, given)


def _generate(
    options: argparse.Namespace,
    config: configs.Config,
    overrides: list[str],
    given: list[str | Conversation],
) -> int:
    settings = {
        "num_tokens": options.num_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "seed": options.seed,
        "stop": options.stop,
    }
    encoder = config.model.num_encoder_layers
    with command_line.refusals():
        compilation_cache.keep_compiled_programs()
        if encoder and not all(isinstance(prompt, str) for prompt in given):
            raise ValueError(
                f"--messages: model.family = {config.model.family!r} has an encoder, which reads "
                "texts, not conversations; use --prompt"
            )
        run_folder.note_other_model(config.model, options.workdir)
        config = run_folder.fit_devices(config, jax.device_count(), overrides)
        tokenizer = text.open_tokenizer(config, options.workdir)
        _, engine = layout.open_engine(layout.for_sampling(config))
        step, params, metadata = restore.restore_params(
            engine, options.workdir, tokenizer, options.step
        )
        tokenizer = stop_ids.with_stop_ids(tokenizer, metadata["data"].get("stop_ids", ()))
        ids = [
            prompt if isinstance(prompt, str) else prompts.encode_messages(tokenizer, *prompt)
            for prompt in given
        ]
        texts = sampling.sample(engine, params, tokenizer, ids, **settings)
    chosen = ", ".join(f"{name} {value}" for name, value in settings.items())
    log.info(f"step {step} of {options.workdir}: {chosen}")
    for number, (prompt, continuation) in enumerate(zip(given, texts), 1):
        shown = prompt if isinstance(prompt, str) else _shown(prompt)
        shown += "\n-> " if encoder else ""
        log.info(f"\n--- {number} of {len(given)}\n{printable(shown + continuation)}")
    if jax.process_index() == 0:
        samples = [_record(one) | {"continuation": end} for one, end in zip(given, texts)]
        command_line.write_json(options.json, {"step": step, **settings, "samples": samples})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxscale.generate",
        description="Continues prompts with a run's newest checkpoint.",
    )
    run_folder.add_workdir_flags(parser)
    launcher.add_process_flags(parser)
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        default=[],
        help="the text to continue ('': a new document); may be repeated",
    )
    parser.add_argument(
        "--prompt_file", metavar="FILE", type=pathlib.Path, help="a file with a prompt on each line"
    )
    parser.add_argument(
        "--messages",
        metavar="FILE.json",
        type=pathlib.Path,
        help='conversations for the tokenizer\'s chat template: [{"role": "user", "content": '
        'TEXT}, ...] or {"messages": [...], "tools": [...]}, a list of several, or JSONL with one '
        "on each line",
    )
    parser.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end a continuation before this text or special token; may be repeated",
    )
    parser.add_argument(
        "--num_tokens",
        metavar="N",
        type=command_line.whole(1, 2**24),
        default=128,
        help="largest number of new tokens; default 128",
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=command_line.real(0, 1e6),
        default=0.8,
        help="sampling temperature, 0 for greedy decoding; default 0.8",
    )
    parser.add_argument(
        "--top_k",
        metavar="K",
        type=command_line.whole(0, 2**31 - 1),
        default=0,
        help="sample from the K most likely tokens; default 0, all",
    )
    parser.add_argument(
        "--top_p",
        metavar="P",
        type=command_line.real(0, 1, above=True),
        default=0.95,
        help="sample from the most likely tokens of total probability P; default 0.95",
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=command_line.whole(0, 2**32 - 1),
        default=0,
        help="seed of the random draws; default 0",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=command_line.output_file, help="also write the texts to FILE"
    )
    return parser


def _read_prompts(options: argparse.Namespace) -> list[str | Conversation]:
    file = options.prompt_file
    lines = _read(file).removesuffix("\n").split("\n") if file else []
    conversations = read_conversations(options.messages) if options.messages else []
    if not options.prompt and not any(lines) and not conversations:
        raise ValueError(
            f"--prompt_file {file} is empty; write a prompt on each line"
            if file
            else "give --prompt TEXT ('' begins a new document), --prompt_file FILE or --messages "
            "FILE.json"
        )
    for flag, texts in (("--prompt", options.prompt), ("--stop", options.stop)):
        for text in texts:
            _check_utf8(flag, text)
    return [*options.prompt, *lines, *conversations]


def _check_utf8(flag: str, text: str) -> None:
    """Refuses command-line bytes that are not UTF-8, which Python passes as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{flag} {text!r} is not UTF-8 text; convert it") from error


def _read(file: pathlib.Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--prompt_file {file} is not {error.encoding} text: byte {error.start} is "
            f"0x{error.object[error.start]:02x} ({error.reason}); convert it"
        ) from error


def _record(prompt: str | Conversation) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    return {name: value for name, value in prompt._asdict().items() if value}


def _shown(conversation: Conversation) -> str:
    messages = conversation.messages
    return "".join(f"{message['role']}: {message.get('content')}\n" for message in messages)


if __name__ == "__main__":
    command_line.run(main)
