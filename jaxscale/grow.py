"""Growth of a trained model: layers with their own weights, experts, more layers, more tokens.

python -m jaxscale.grow --workdir RUN --output RUN2 --to model.num_layers=24
"""

import argparse
import logging
import sys
from collections.abc import Sequence

from etils import epy

from jaxscale import command_line, run_folder
from jaxscale.distributed import processes
from jaxscale.run.growth import changes

with epy.lazy_imports():  # they import JAX: a mistyped flag is refused before
    from jaxscale.run.growth import grow_run

log = logging.getLogger("jaxscale")

ROUTERS = ("orthogonal", "new")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the status of the process: 0."""
    options, overrides = command_line.parse(_parser(), sys.argv[1:] if argv is None else argv)
    with command_line.refusals():
        run_folder.check_empty(options.output)
        config = run_folder.load_config(options.workdir, overrides)
        larger = changes.larger_config(config, options.to)
    command_line.log_to_stdout()
    processes.leave_absent_hardware_alone()
    with command_line.refusals():
        processes.take_gpu_memory()
        step = grow_run.grow_run(
            *(config, larger, options.workdir, options.output, options.step),
            orthogonal=options.router == "orthogonal",
        )
    for line in changes.described(config.model, larger.model):
        log.info(line)
    log.info(
        f"step {step} written to {options.output}\n\nNext steps:\n"
        f"  python -m jaxscale.evaluate --workdir {options.output}\n"
        f"  python -m jaxscale.train --config {options.output}/config.json --workdir "
        f"{options.output} --config.run.steps=..."
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxscale.grow",
        description="Writes a run with a larger model from a run: layers that shared weights get "
        "their own, MLPs become experts, layers and tokens are added. Training continues from the "
        "same step, with the optimizer's state.",
    )
    run_folder.add_workdir_flags(parser)
    parser.add_argument(
        "--output", required=True, metavar="DIR", type=run_folder.new_folder, help="a new folder"
    )
    parser.add_argument(
        "--to",
        required=True,
        nargs="+",
        metavar="model.KEY=VALUE",
        help=f"settings of the larger model: {', '.join(changes.ALLOWED)}",
    )
    parser.add_argument(
        "--router",
        choices=ROUTERS,
        default="orthogonal",
        help="a new router's weights: orthogonal columns of norm 0.01, or as in a new model",
    )
    return parser


if __name__ == "__main__":
    command_line.run(main)
