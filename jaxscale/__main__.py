"""List of the commands: python -m jaxscale."""

from collections.abc import Sequence

from jaxscale import command_line
from jaxscale.choices import nearest

COMMANDS = {
    "train": "trains a model, or resumes a run",
    "evaluate": "loss on held-out text, and multiple choice",
    "generate": "samples text from a run",
    "convert": "converts Hugging Face weights to a run, and back",
    "grow": "makes a run with a larger model from a run",
    "prepare": "tokenises text into shards",
    "plan": "ranks the layouts of a model on a cluster",
    "aot": "compiles a train step for a TPU or GPU topology, without the hardware",
    "study": "computes a study of a paper, with published figures next to ours",
    "schedule": "draws a pipeline schedule",
    "doctor": "versions, devices, missing packages, and a self-test",
    "supervise": "restarts a command when it fails",
}


def main(argv: Sequence[str]) -> int:
    """Prints the list; exits with 2 unless --help was given, since no command ran."""
    for name, does in COMMANDS.items():
        print(f"  {f'python -m jaxscale.{name}':30}{does}")
    if argv[:1] not in (["--help"], ["-h"]):
        command_line.refuse(_refusal(argv))
    return 0


def _refusal(argv: Sequence[str]) -> str:
    if not argv:
        return "choose a command, such as python -m jaxscale.train --help"
    near = [f"; did you mean python -m jaxscale.{name}?" for name in nearest(argv[0], COMMANDS)]
    return f"{argv[0]!r} is not a command{''.join(near)}"


if __name__ == "__main__":
    command_line.run(main)
