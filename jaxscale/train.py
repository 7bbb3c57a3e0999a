"""python -m jaxscale.train --config configs/X.py [--workdir DIR] [--config.section.key=value ...]

Trains a model. When the folder holds a checkpoint, the run continues from it.
"""

import argparse
import json
import logging
import pathlib
import sys
import time
from collections.abc import Sequence

from jaxscale import command_line
from jaxscale import config as configs
from jaxscale.choices import check_choice
from jaxscale.distributed import launcher, processes

log = logging.getLogger("jaxscale")

TRACKERS = ("tensorboard", "wandb", "mlflow", "none")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the status of the process: 0, or 128 + the signal that stopped it."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m jaxscale.train",
        description="Trains a model; continues when the folder holds a checkpoint.",
        epilog="Any leaf of the config can be set: --config.optimizer.learning_rate=1e-3",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a file in configs/")
    parser.add_argument(
        "--workdir",
        metavar="DIR",
        type=pathlib.Path,
        help="the run's folder; runs/NAME of the config by default",
    )
    parser.add_argument(
        "--describe",
        action="store_true",
        help="print the layout and every parameter's place, and stop",
    )
    parser.add_argument(
        "--profile",
        metavar="FIRST:LAST",
        type=_steps,
        default=range(0),
        help="trace these steps into DIR/profile",
    )
    parser.add_argument(
        "--trackers",
        metavar="NAMES",
        type=_trackers,
        default=("tensorboard",),
        help="where metrics go: tensorboard, wandb, mlflow, or none",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=pathlib.Path, help="write the summary of the run there too"
    )
    launcher.add_flags(parser)
    options, overrides = command_line.parse(parser, sys.argv[1:] if argv is None else argv)
    with command_line.refusals():
        config = configs.load(options.config, overrides)
        place = launcher.find(options)
    workdir = options.workdir or pathlib.Path("runs") / pathlib.Path(options.config).stem
    command_line.log_to_stdout()
    settings = {"config": configs.to_dict(config), "flags": launcher.common_flags(options)}
    with processes.together(place, settings, None if options.describe else workdir):
        return _train(options, config, workdir, started)


def _train(
    options: argparse.Namespace, config: configs.Config, workdir: pathlib.Path, started: float
) -> int:
    # JAX is imported only now: a typo is answered at once.
    import jax  # noqa: PLC0415

    from jaxscale.run import setup, trainer  # noqa: PLC0415
    from jaxscale.run.layout_report import describe  # noqa: PLC0415
    from jaxscale.training import sampling  # noqa: PLC0415

    with command_line.refusals():
        if options.describe:
            log.info(describe(setup.open_engine(config)[1]))
            return 0
        ready = trainer.open_trainer(config, workdir)
    if ready is None:
        return 0
    try:
        state, summary = trainer.fit(
            ready, trackers=options.trackers, profile=options.profile, started=started
        )
    except trainer.Stopped as stopped:
        log.info(f"{stopped}; the same command continues from there")
        return 128 + stopped.number
    except FloatingPointError as error:
        command_line.refuse(str(error), status=1)
    if options.json and jax.process_index() == 0:
        options.json.write_text(json.dumps(summary, indent=2) + "\n")
    log.info(f"\nA sample at step {config.run.steps}:\n")
    text = sampling.sample(
        ready.engine, state.params, ready.text.tokenizer, [""], num_tokens=128, top_p=0.95
    )
    log.info(sampling.printable(text[0]))
    log.info(_how_to_go_on(options.config, workdir, config.run.steps))
    return 0


def _how_to_go_on(config: str, workdir: pathlib.Path, steps: int) -> str:
    return f"""
How to go on:
  python -m jaxscale.evaluate --workdir {workdir}
  python -m jaxscale.generate --workdir {workdir} --prompt "def main("
  train longer:      the same command with --config.run.steps={2 * steps}
  another layout:    JAX_NUM_CPU_DEVICES=8 python -m jaxscale.train --config {config} \\
                       --workdir {workdir}_8 --config.layout.fsdp=4 --config.layout.tensor=2
  your own text:     --config.data.source='my_texts/**/*.txt' and another --workdir
  what was written:  {workdir}/loss.png, metrics.jsonl, summary.json, tensorboard/, checkpoints/"""


def _steps(text: str) -> range:
    first, separator, last = text.partition(":")
    if not (separator and first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST, such as 10:12")
    return range(int(first), int(last) + 1)


def _trackers(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(text.split(","))
    for name in names:
        try:
            check_choice("--trackers", name, TRACKERS)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return names


if __name__ == "__main__":
    sys.exit(main())
