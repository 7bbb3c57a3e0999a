"""One of several real processes of a test: runs commands in turn, as if each were started anew.

To start a process costs more than most commands, so that all of a test's share one start. A command
is the name of a module and its arguments, or "fit", a workdir and settings. The last line that a
command prints is its name and status.
"""

import argparse
import contextlib
import importlib
import json
import os
import pathlib
import sys
from unittest import mock

from jaxscale import command_line, config
from jaxscale.distributed import launcher, processes


def train(argv: list[str]) -> int:
    """The command without compiling its sample, which `generate` makes too."""
    with compiled_once(), mock.patch("jaxscale.decoding.sampling.sample", return_value=[""]):
        return importlib.import_module("jaxscale.train").main(argv)


def fit(argv: list[str]) -> int:
    """Trains only; the status as that of `train`."""
    from jaxscale.run import signals, trainer, training_loop  # noqa: PLC0415

    workdir, *overrides = argv
    with compiled_once():
        ready = trainer.open_trainer(
            config.load("configs/tiny.py", overrides), pathlib.Path(workdir)
        )
        assert ready
        try:
            training_loop.fit(ready, trackers=())
        except training_loop.Stopped as stopped:
            print(stopped, flush=True)
            return signals.STOPPED
    return 0


_compiled = []


@contextlib.contextmanager
def compiled_once():
    """One program for all runs of a process: their shapes and layouts are the same."""
    from jaxscale.run import trainer  # noqa: PLC0415

    lower_step, compile_step = trainer.lower_step, trainer.compile_step

    def lower_once(engine):
        return None if _compiled else lower_step(engine)

    def compile_once(engine, lowered):
        if not _compiled:
            _compiled.append(compile_step(engine, lowered))
        return _compiled[0]

    with mock.patch.multiple(trainer, lower_step=lower_once, compile_step=compile_once):
        yield


def main(argv: list[str]) -> None:
    """Runs the commands of a JSON file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("commands", type=pathlib.Path)
    launcher.add_process_flags(parser)
    options = parser.parse_args(argv)
    command_line.log_to_stdout()
    print(f"pid {os.getpid()}", flush=True)
    with processes.together(launcher.find_processes(options), {}, options.commands.parent):
        # What a command sets up anew is there.
        processes.together = lambda *arguments: contextlib.nullcontext()
        command_line.log_to_stdout = lambda: None
        for name, *arguments in json.loads(options.commands.read_text()):
            run = {"fit": fit, "train": train}.get(name)
            run = run or importlib.import_module(f"jaxscale.{name}").main
            print(f"{name}: {run(arguments)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
