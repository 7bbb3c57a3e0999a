"""Training of a model; a run whose folder has a checkpoint resumes from it.

python -m jaxscale.train --config configs/X.py [--workdir DIR] [--config.section.key=value ...]
"""

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import pathlib
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

from etils import epy

from jaxscale import command_line, run_folder
from jaxscale import config as configs
from jaxscale.choices import check_choice
from jaxscale.config.model.settings import is_own_family
from jaxscale.config.optimizer import OptimizerConfig
from jaxscale.distributed import launcher, phases, processes
from jaxscale.formatting import printable
from jaxscale.run import notices, signals
from jaxscale.run.lock import locked
from jaxscale.run.mirror import Mirror, mirrored
from jaxscale.storage.local_tier import CHECKPOINTS, store_of

with epy.lazy_imports():  # they import JAX: a mistyped flag is refused before
    from jaxscale.data import objectives
    from jaxscale.decoding import sampling
    from jaxscale.run import (
        compilation_cache,
        metrics,
        saves,
        trackers,
        trainer,
        training_loop,
    )
    from jaxscale.run.setup import layout, layout_report, text
    from jaxscale.training import learning_rate

log = logging.getLogger("jaxscale")

TRACKERS = ("tensorboard", "wandb", "mlflow", "none")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or `signals.STOPPED`."""
    with signals.listening():
        return _main(sys.argv[1:] if argv is None else argv)


def _main(argv: Sequence[str]) -> int:
    started = time.monotonic()
    options, overrides = command_line.parse(_parser(), argv, configs.leaves())
    with command_line.refusals():
        config = configs.load(options.config, overrides)
        known = not config.run.epochs  # epochs become steps when the text is counted
        if known and options.profile and options.profile[-1] > config.run.steps:
            raise ValueError(
                f"--profile: step {options.profile[-1]} is beyond run.steps = {config.run.steps}; "
                "give steps up to that, or raise run.steps"
            )
        place = launcher.find_processes(options)
    workdir = options.workdir or run_folder.default_folder(options.config)
    with command_line.refusals():
        _check_outputs(options, workdir)
    command_line.log_to_stdout()
    settings = {"config": configs.to_dict(config), "flags": launcher.common_flags(options)}
    with processes.together(place, settings, None if options.describe else workdir):
        if options.describe:
            return _describe(config)
        with contextlib.ExitStack() as stack:
            uploads = None
            with command_line.refusals():
                stack.enter_context(notices.noticed(options.preemption_notices))
            if processes.first_of_all():
                with command_line.refusals():
                    stack.enter_context(locked(workdir))
                    uploads = stack.enter_context(mirrored(workdir))
            of_layout = ("layout.", "layout=")
            kept = [f"--config.{one}" for one in overrides if not one.startswith(of_layout)]
            same = shlex.join(["--config", options.config, *kept])
            return _train(options, config, workdir, started, uploads, same)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxscale.train",
        description="Trains a model; resumes if the folder has a checkpoint.",
        epilog="Any setting of the config can be changed: --config.optimizer.learning_rate=1e-3; "
        "docs/settings.md lists them",
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE",
        help="a file, the name of a shipped config (quickstart, ...), or a run's config.json",
    )
    parser.add_argument(
        "--workdir",
        metavar="DIR",
        type=run_folder.folder,
        help="the run's folder, or a URL such as s3://bucket/run; default runs/NAME of the config, "
        "or the folder of a config.json",
    )
    parser.add_argument(
        "--describe",
        action="store_true",
        help="print the layout and the sharding of every parameter, and stop",
    )
    parser.add_argument(
        "--profile",
        metavar="FIRST:LAST",
        type=_steps,
        default=range(0),
        help="trace these steps to DIR/profile, and print a time breakdown by kernel",
    )
    parser.add_argument(
        "--trackers",
        metavar="NAMES",
        type=_trackers,
        default=("tensorboard",),
        help="trackers for metrics: tensorboard, wandb, mlflow, or none",
    )
    parser.add_argument(
        "--skip_memory_check",
        action="store_true",
        help="train even if the planner predicts out of memory",
    )
    parser.add_argument(
        "--refuse_damaged",
        action="store_true",
        help="stop if the newest checkpoint is corrupt; by default it is renamed, and the run "
        "resumes from the newest intact one",
    )
    parser.add_argument(
        "--preemption_notices",
        choices=notices.CLOUDS,
        default="none",
        help="gce: poll Google Compute Engine's metadata server every second for a preemption "
        "notice, then save and stop as after SIGTERM; default none",
    )
    parser.add_argument(
        "--upload_seconds",
        metavar="S",
        type=command_line.real(0, 1e6),
        default=30.0,
        help="seconds that a run with a URL waits for its uploads when asked to stop; default 30",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=pathlib.Path,
        help="also write the run's summary to FILE, so far as known if it stops early",
    )
    launcher.add_process_flags(parser)
    return parser


def _check_outputs(options: argparse.Namespace, workdir: pathlib.Path) -> None:
    """Refuses, before training, files that could not be written after it.

    Raises:
      ValueError: names the flag.
    """
    # The run's folder is created later.
    if options.json and options.json.parent.resolve() != workdir.resolve():
        try:
            command_line.output_file(str(options.json))
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"--json {error}") from error
    run_folder.check_files(workdir)
    folder = workdir / CHECKPOINTS
    if folder.is_file():
        raise ValueError(
            f"{folder} is a file, not the folder of the run's checkpoints; move it, or give "
            "another --workdir"
        )
    for flag, given in (("--json", options.json), ("--profile", options.profile)):
        if options.describe and given:
            raise ValueError(
                f"{flag} is for training, and --describe does not train; leave one of them out"
            )
    for name in {"wandb", "mlflow"} & set(options.trackers):
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"--trackers {name}: not installed; run pip install 'jaxscale[{name}]'"
            )
    if "mlflow" in options.trackers and "MLFLOW_TRACKING_URI" not in os.environ:
        raise ValueError(
            "--trackers mlflow needs a server: set MLFLOW_TRACKING_URI, such as http://HOST:5000"
        )


def _describe(config: configs.Config) -> int:
    with command_line.refusals():
        log.info(layout_report.describe_layout(layout.open_engine(config)[1]))
    return 0


def _train(
    options: argparse.Namespace,
    config: configs.Config,
    workdir: pathlib.Path,
    started: float,
    uploads: Mirror | None,
    same: str,
) -> int:
    phases.enter_phase("importing JAX")
    failures = (
        FloatingPointError,
        ChildProcessError,
        saves.SaveError,
        trackers.TrackerError,
        text.UnusableTokensError,
    )
    with command_line.refusals():
        compilation_cache.keep_compiled_programs()
        ready = trainer.open_trainer(
            config,
            workdir,
            skip_memory_check=options.skip_memory_check,
            refuse_damaged=options.refuse_damaged,
            uploads=uploads,
        )

    def not_uploaded(*, in_all: bool = True) -> str:
        """Waits for the uploads; text on files missing at the run's URL, or "".

        Args:
          in_all: whether all processes call this; all then return the same text.
        """
        if store_of(workdir) is None:
            return ""
        phases.enter_phase("uploading")
        left = uploads.finish(options.upload_seconds) if uploads else ""
        return processes.from_first("uploads", left) if in_all else left

    if ready is None:
        if left := not_uploaded():
            command_line.refuse(left, status=1)
        _write_json(options.json, None, workdir)
        return 0
    try:
        state, summary = training_loop.fit(
            ready, trackers=options.trackers, profile=options.profile, started=started
        )
    except training_loop.Stopped as stopped:
        log.info(f"{stopped}; the same command resumes from there")
        _write_json(options.json, stopped.summary, workdir)
        if left := not_uploaded():
            log.warning(f"warning: {left}")
        return signals.STOPPED
    except failures as error:
        # A data worker, a token file or a tracker fails in one process; the others still train.
        of_one = ChildProcessError | text.UnusableTokensError | trackers.TrackerError
        left = not_uploaded(in_all=not isinstance(error, of_one))
        status = getattr(error, "exit_status", 1)
        command_line.refuse("; ".join(filter(None, (str(error), left))), status)
    if left := not_uploaded():
        command_line.refuse(left, status=1)
    _write_json(options.json, summary, workdir)
    # All processes sample together: one that was asked to stop must not leave the others waiting.
    if requests := [*filter(None, processes.all_reports("stop", signals.requested()))]:
        log.info(f"{requests[0]}: {signals.COMPLETE}; no sample is drawn")
        return 0
    phases.enter_phase("drawing a sample")
    signals.complete()
    _show_sample(ready, state.params)
    store = store_of(workdir)
    where = store.url if store else workdir
    draws = ready.engine.model.can_decode
    log.info(_next_steps(same, where, ready.config, options.trackers, draws))
    return 0


def _write_json(
    file: pathlib.Path | None, summary: dict[str, Any] | None, workdir: pathlib.Path
) -> None:
    """Writes the summary to --json, in one process; failure is a warning.

    Args:
      summary: None if the run was already complete: then the summary in its folder is copied.
    """

    if not file or not processes.first_of_all():
        return
    try:
        if summary is None:
            text = (workdir / metrics.SUMMARY).read_text()
        else:
            text = json.dumps(metrics.null_where_not_finite(summary), indent=2) + "\n"
        file.write_text(text)
    except OSError as error:
        log.warning(
            f"warning: --json {file} is not written ({error.filename or file}: {error.strerror})"
        )


def _show_sample(trainer: Any, params: Any) -> None:
    """Prints a sample. Failure is a warning: the run is complete and saved."""

    model, data = trainer.config.model, trainer.config.data
    if not model.causal:
        log.info("\nno sample: the model is not causal, but predicts masked tokens")
        return
    num_tokens = 128
    tokenizer, prompt, read = trainer.text.tokenizer, "", ""
    try:
        if model.num_encoder_layers:
            prompt = _encoders_text(trainer.text)
            read = tokenizer.decode(prompt[prompt < tokenizer.vocab_size]) + "\n-> "
        elif objectives.find_objective(data.objective, data.seq_len, data.target_len).keeps_marks:
            prompt = _first_prompt(trainer.text)
            read = tokenizer.decode(prompt) if len(prompt) else ""
        if model.max_positions is not None:
            num_tokens = min(num_tokens, model.max_positions + 1 - max(len(prompt), 1))
        (text,) = sampling.sample(
            trainer.last_engine,
            params,
            tokenizer,
            [prompt],
            num_tokens=num_tokens,
            temperature=0.6,
            top_p=0.95,
        )
    except Exception as error:
        # A refusal, such as for expert-choice routing, is a sentence by itself.
        prefix = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = f"{prefix}{error}".splitlines()[0][:300]
        log.warning(f"\nwarning: no sample of the trained model could be drawn ({reason})")
        return
    text = printable(read + text)
    log.info(f"\nA sample at step {trainer.config.run.steps}:\n\n{text}")


def _encoders_text(text: Any) -> Any:
    """The ids of the encoder's first text in an example; an empty prompt shows little of the
    model."""
    example = (text.heldout or text.train)[0]
    return example.extras["encoder_tokens"][example.extras["encoder_segments"] == 1]


def _first_prompt(text: Any) -> Any:
    """The ids of an example's first prompt, up to the first position with loss; "" for plain text.

    A model trained on responses only writes little of interest after an empty prompt. The type of
    text is read off the example: a prepared folder's entry does not have it.
    """
    example = (text.heldout or text.train)[0]
    if example.weights[0]:
        return ""
    last = int((example.weights > 0).argmax())
    begin = int((example.segments == example.segments[last]).argmax())
    return example.tokens[begin : last + 1]


def _next_steps(
    same: str,
    workdir: pathlib.Path | str,
    config: configs.Config,
    trackers: Sequence[str],
    draws: bool,
) -> str:
    """Text of next steps for a completed run.

    Args:
      same: the words of its command that define what is trained.
      draws: whether the model can generate text.
    """
    folder, other = shlex.quote(str(workdir)), shlex.quote(f"{workdir}_8")  # commands are pasted
    python = any("{stdlib}" in path for source in config.data.source for path in source.path)
    prompt = "--prompt " + ('"def main("' if python else "TEXT")
    if any(source.messages for source in config.data.source):
        prompt = "--messages FILE.json"
    trust = " --trust_family" if is_own_family(config.model.family) else ""
    evaluate = f"\n  python -m jaxscale.evaluate --workdir {folder}{trust}"
    generate = f"\n  python -m jaxscale.generate --workdir {folder} {prompt}{trust}"
    texts = config.data.heldout or config.data.validation  # to evaluate on
    events = " tensorboard/," if "tensorboard" in trackers else ""
    # The config file may set other axes and their settings, which are reset.
    sizes = (*config.layout.settings, "tensor_rows", "microbatches")
    used = [name for name in sizes if getattr(config.layout, name) > 1]
    changes = {**dict.fromkeys(used, 1), "fsdp": 4, "tensor": 2}
    policy = " --config.layout.remat=full" if config.layout.remat_policy.kept_passes else ""
    layout = " ".join(f"--config.layout.{name}={size}" for name, size in changes.items())
    return f"""
Next steps:{evaluate if texts else ""}{generate if draws else ""}
{_how_to_train_longer(config.run.steps, config.optimizer)}
  another layout:    JAX_NUM_CPU_DEVICES=8 python -m jaxscale.train {same} \\
                       --workdir {other} {layout}{policy}
  your own text:     --config.data.source='my_texts/**/*.txt' and another --workdir
  output files:      {workdir}/loss.png, metrics.jsonl, summary.json,{events} checkpoints/"""


def _how_to_train_longer(steps: int, optimizer: OptimizerConfig) -> str:
    """Text on longer training and its learning rate, which should decay at the end."""

    longer = f"  train longer:      the same command with --config.run.steps={2 * steps}"
    if optimizer.schedule == "constant":
        return f"""{longer}
  ... and decay:     also with --config.optimizer.schedule=wsd \\
                       --config.optimizer.schedule_steps={2 * steps}: over the last fifth"""
    rate = learning_rate.schedule_of(optimizer, optimizer.schedule_steps or steps)(steps)
    return f"""{longer}; the learning rate continues from {rate:.3g}
  length unknown:    start with --config.optimizer.schedule=constant, and decay at the end"""


def _steps(text: str) -> range:
    first, separator, last = text.partition(":")
    numbers = separator and first.isdecimal() and last.isdecimal()
    if not numbers or not 1 <= int(first) <= int(last):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST, such as 10:12, from step 1")
    return range(int(first), int(last) + 1)


def _trackers(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(text.split(","))
    if "none" in names:
        raise argparse.ArgumentTypeError(
            f"{text!r} combines none with others; leave none out, or give only none"
        )
    for name in names:
        try:
            check_choice("--trackers", name, TRACKERS)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return names


if __name__ == "__main__":
    command_line.run(main)
