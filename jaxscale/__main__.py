"""python -m jaxscale

Lists the commands.
"""

from jaxscale import command_line

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

for name, does in COMMANDS.items():
    print(f"  {f'python -m jaxscale.{name}':30}{does}")
command_line.refuse("choose a command, such as python -m jaxscale.train --help")
