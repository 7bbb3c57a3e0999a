"""Evaluation of a run's newest checkpoint: held-out loss, validation sets, or multiple choice.

python -m jaxscale.evaluate --workdir DIR [--config.section.key=value ...]
"""

import argparse
import logging
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epy

from jaxscale import command_line, run_folder
from jaxscale import config as configs
from jaxscale.data.text.dialogue import Question, read_questions
from jaxscale.distributed import launcher, processes

with epy.lazy_imports():  # they import JAX: a mistyped flag is refused before
    import jax

    from jaxscale.decoding import likelihood
    from jaxscale.run import compilation_cache, evaluation, metrics
    from jaxscale.run.setup import layout, restore, text

log = logging.getLogger("jaxscale")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the status of the process: 0."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxscale.evaluate",
        description="Loss, perplexity and bits per byte of a run's newest checkpoint on held-out "
        "text.",
    )
    run_folder.add_workdir_flags(parser)
    parser.add_argument(
        "--max_batches",
        metavar="N",
        type=command_line.whole(1, 2**40),
        help="evaluate at most N batches of each set; default all",
    )
    parser.add_argument(
        "--choices",
        metavar="FILE.jsonl",
        type=pathlib.Path,
        help='answer multiple-choice questions by likelihood instead; each line is {"prompt": '
        'TEXT, "choices": [TEXT, ...], "answer": INDEX}',
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=command_line.output_file,
        help="also write the numbers to FILE",
    )
    launcher.add_process_flags(parser)
    options, overrides = command_line.parse(
        parser, sys.argv[1:] if argv is None else argv, configs.leaves()
    )
    with command_line.refusals():
        if options.choices and options.max_batches is not None:
            raise ValueError(
                "--max_batches is for text; leave it out with --choices, which scores every "
                "question of the file"
            )
        config = run_folder.load_config(
            options.workdir, overrides, trust_foreign=options.trust_family
        )
        questions = read_questions(options.choices) if options.choices else None
        if not (questions or config.data.heldout or config.data.validation):
            raise ValueError(
                "data.heldout = 0: this run has no held-out text to evaluate on; train with "
                "data.heldout above 0, or name validation sets in data.validation"
            )
        place = launcher.find_processes(options)
    command_line.log_to_stdout()
    settings = {"config": configs.to_dict(config), "flags": launcher.common_flags(options)}
    with processes.together(place, settings | {"questions": str(questions)}):
        with command_line.refusals():
            compilation_cache.keep_compiled_programs()
            run_folder.note_other_model(config.model, options.workdir)
            config = run_folder.fit_devices(config, jax.device_count(), overrides)
        result = _answer(options, config, questions) if questions else _evaluate(options, config)
        if jax.process_index() == 0:
            command_line.write_json(options.json, metrics.null_where_not_finite(result))
    return 0


def _answer(
    options: argparse.Namespace, config: configs.Config, questions: list[Question]
) -> dict[str, Any]:
    with command_line.refusals():
        tokenizer = text.open_tokenizer(config, options.workdir)
        _, engine = layout.open_engine(layout.for_sampling(config))
        step, params, _ = restore.restore_params(engine, options.workdir, tokenizer, options.step)
        scores = likelihood.score_choices(engine, params, tokenizer, questions)
    result: dict[str, Any] = {"step": step, "questions": len(questions)}
    lines = [f"  questions           {len(questions):,}"]
    for name, title in (("accuracy", "accuracy"), ("accuracy_by_length", "by length in bytes")):
        value = getattr(scores, name)
        error = scores.standard_error(value)
        result |= {name: value, f"{name}_stderr": error}
        lines.append(f"  {title:<19} {value:.4f} +- {'n/a' if error is None else f'{error:.4f}'}")
    log.info(f"step {step} of {options.workdir} on {options.choices}:\n" + "\n".join(lines))
    return result


def _evaluate(options: argparse.Namespace, config: configs.Config) -> dict[str, Any]:
    with command_line.refusals():
        tokenizer = text.open_tokenizer(config, options.workdir)
        config, engine = layout.open_engine(layout.for_evaluation(config))
        step, params, metadata = restore.restore_params(
            engine, options.workdir, tokenizer, options.step
        )
        tables = restore.restore_tables(engine, options.workdir, step)
        if config.data.heldout:
            _check_text_is_chosen(config.data, metadata, options.workdir)
            opened = processes.first("text", lambda: text.open_text(config, options.workdir))
            evaluations = opened.evaluations
            if metadata["data"]["fingerprint"] != opened.train.fingerprint:
                log.info(
                    "note: the text or its settings differ from training: these numbers are not "
                    "comparable with the run's, and the model may have been trained on this text"
                )
        else:  # the training text may be gone
            of_run = config.data, config.model.vocab_size, options.workdir, tokenizer
            evaluations = processes.first("text", lambda: text.open_validation_sets(*of_run))
    result: dict[str, Any] = {"step": step}
    part = "" if options.max_batches is None else "part of "
    for name, examples in evaluations.items():
        found = evaluation.evaluate_loss(
            engine,
            params,
            examples,
            config.data.global_batch_size,
            options.max_batches,
            tables=tables,
        )
        result |= found.record(name)
        title = f"validation set {name!r}" if name else "the held-out text"
        log.info(f"step {step} of {options.workdir} on {part}{title}:\n{_table(found)}")
    return result


def _check_text_is_chosen(
    data: configs.DataConfig, metadata: Mapping[str, Any], workdir: pathlib.Path
) -> None:
    """Refuses to evaluate a converted model, without training text of its run, on the default text.

    Raises:
      ValueError: with the settings to change.
    """
    converted = not metadata["data"]["fingerprint"]
    if converted and data.source == configs.DataConfig().source:
        raise ValueError(
            f"{workdir} was converted, not trained, and data.source is the default, Python's "
            "standard library; set --config.data.source=TEXT_FILES, or, for the sets of "
            "--config.data.validation alone, --config.data.heldout=0"
        )


def _table(found: Any) -> str:
    if not found.tokens:
        return f"  loss           n/a: {metrics.WITHOUT_LOSS}"
    return f"""\
  loss           {found.loss:.4f} nats per token
  perplexity     {found.perplexity:.4g}
  bits per byte  {found.bits_per_byte:.4f}
  tokens         {found.tokens:,}
  bytes          {found.num_bytes:,.0f}"""


if __name__ == "__main__":
    command_line.run(main)
