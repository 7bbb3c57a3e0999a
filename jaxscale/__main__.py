"""python -m jaxscale

Lists the commands.
"""

from collections.abc import Sequence

from jaxscale import command_line
from jaxscale.choices import nearest

COMMANDS = {
    "train": "trains a model, and resumes",
    "evaluate": "loss of held-out text, and multiple choice",
    "generate": "samples from a run",
    "convert": "Hugging Face weights into a run, and back",
    "prepare": "tokenises text into shards",
    "plan": "ranks the layouts of a model on a cluster",
    "aot": "compiles a step for hardware that is not there",
    "schedule": "draws a pipeline schedule",
    "doctor": "versions, devices, what is missing, and a self-test",
    "supervise": "starts a command again when it fails",
}


def main(argv: Sequence[str]) -> int:
    """Prints the list; 2 unless that was asked for, since no command ran."""
    for name, does in COMMANDS.items():
        print(f"  {f'python -m jaxscale.{name}':30}{does}")
    if argv[:1] not in (["--help"], ["-h"]):
        command_line.refuse(_refusal(argv))
    return 0


def _refusal(argv: Sequence[str]) -> str:
    if not argv:
        return "choose a command, such as python -m jaxscale.train --help"
    near = [f"; did you mean python -m jaxscale.{name}?" for name in nearest(argv[0], COMMANDS)]
    return f"{argv[0]!r} is not one of them{''.join(near)}"


if __name__ == "__main__":
    command_line.run(main)
