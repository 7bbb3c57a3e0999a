"""python tools/adapters.py [--steps N] [--json FILE] [--png FILE]

Fine-tunes one small decoder, trained on Python's source, on the prose of docs/, in four ways: all
weights, LoRA, a side network, a prompt. Prints for each the held-out loss, and of a step the FLOPs,
the temporaries and the seconds. docs/adapters.md shows the table, docs/adapters.png losses and
memory.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from matplotlib.figure import Figure

import jaxscale
from jaxscale import command_line
from jaxscale.compiled import hlo
from jaxscale.compiled.flops import computation_costs, instruction_flops
from jaxscale.run.trainer import Trainer

MODEL = ["model.num_layers=4", "model.d_model=128", "model.head_dim=32", "model.d_ff=384"]
MODEL += ["data.seq_len=128", "model.attention=reference", "layout.data=1", "run.eval_batches=8"]
BASE = ["data.source={stdlib}/*.py", "optimizer.learning_rate=3e-3"]
TUNED = ["data.source=docs/*.md", "data.heldout=0.2"]
KINDS = {  # name -> settings, with a learning rate near the best of 1, 3 and 10 times a power of 10
    "all weights": ["optimizer.learning_rate=1e-3"],
    "LoRA, rank 8": ["model.lora_rank=8", "optimizer.learning_rate=1e-2"],
    "side, width 32": ["model.side_width=32", "optimizer.learning_rate=1e-2"],
    "prompt of 16": ["model.prompt_tokens=16", "optimizer.learning_rate=1e-1"],
}
TIMED = 10


def main(argv: Sequence[str]) -> None:
    """Trains the model and its four fine-tuned versions in a temporary folder."""
    parser = argparse.ArgumentParser(description="Compares four ways of fine-tuning.")
    parser.add_argument("--steps", type=command_line.whole(2, 10**6), default=200, metavar="N")
    parser.add_argument("--json", type=command_line.output_file, metavar="FILE")
    parser.add_argument("--png", type=command_line.output_file, metavar="FILE")
    options = parser.parse_args(argv)
    every = max(1, options.steps // 10)
    periods = [f"run.eval_every={every}", f"run.steps={options.steps}"]
    with tempfile.TemporaryDirectory() as folder:
        runs, trained = pathlib.Path(folder), f"run.steps={4 * options.steps}"
        train([*BASE, trained], runs / "base")
        origin, trainers = f"model.init_from={runs / 'base'}", {}
        for name, settings in KINDS.items():
            workdir = runs / name.replace(" ", "_")
            trainers[name] = train([*TUNED, *periods, origin, *settings], workdir)
        seconds = step_seconds(trainers)
        forward = forward_flops(trainers["all weights"])
        rows = {
            name: {
                **measured(trainer, runs / name.replace(" ", "_"), forward),
                "seconds": seconds[name],
            }
            for name, trainer in trainers.items()
        }
    print(table(rows))
    if options.json:
        command_line.write_json(options.json, rows)
    if options.png:
        draw(rows, options.png)


def train(settings: Sequence[str], workdir: pathlib.Path) -> Trainer:
    """A finished run."""
    trainer = jaxscale.open_trainer(jaxscale.load("tiny", [*MODEL, *settings]), workdir)
    assert trainer
    jaxscale.fit(trainer)
    return trainer


def step_seconds(trainers: dict[str, Trainer]) -> dict[str, float]:
    """The fastest of some steps of each, one kind after the other: other load falls on all."""
    states, least = {}, {}
    for name, trainer in trainers.items():
        states[name] = trainer.engine.init(jax.random.key(0))
    for _ in range(TIMED):
        for name, trainer in trainers.items():
            batch = trainer.engine.shard(first_batch(trainer))
            begin = time.perf_counter()
            states[name], _ = jax.block_until_ready(trainer.engine.step(states[name], batch))
            spent = time.perf_counter() - begin
            least[name] = min(spent, least.get(name, spent))
    return least


def first_batch(trainer: Trainer) -> jaxscale.Batch:
    """The first examples of a run."""
    size = trainer.config.data.global_batch_size
    rows = [trainer.text.train[i] for i in range(size)]
    return jax.tree.map(lambda *x: jax.numpy.stack(x).__array__(), *rows)


def forward_flops(trainer: Trainer) -> float:
    """FLOPs of a forward pass over a batch."""
    engine = trainer.engine
    token_bytes = jax.ShapeDtypeStruct((engine.config.model.vocab_size,), "float32")
    arguments = engine.abstract_state.params, engine.abstract_batch, token_bytes
    return matmul_flops(engine.evaluate.lower(*arguments).compile())


def measured(trainer: Trainer, workdir: pathlib.Path, forward: float) -> dict[str, Any]:
    """Memory of the compiled step, trained parameters, FLOPs in forward passes, and held-out losses
    by step."""
    engine = trainer.engine
    frozen = {*engine.model.frozen}
    sizes = jax.tree_util.tree_leaves_with_path(engine.abstract_state.params)
    names = {"/".join(key.key for key in path): leaf.size for path, leaf in sizes}
    step = engine.step.lower(engine.abstract_state, engine.abstract_batch).compile()
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    losses = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    held = engine.abstract_state
    return {
        "weights": leaf_bytes(held.params),
        "optimizer": leaf_bytes(held.opt_state),
        "trained": sum(size for name, size in names.items() if name not in frozen),
        "flops": matmul_flops(step) / forward,
        "temporaries": step.memory_analysis().temp_size_in_bytes,
        "losses": losses,
    }


def leaf_bytes(tree: Any) -> int:
    """Bytes of all arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def matmul_flops(program: Any) -> float:
    """FLOPs of a compiled program's matmuls."""
    parsed = hlo.parse_hlo(program.as_text())
    return computation_costs(parsed, instruction_flops)[parsed.entry]


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The numbers as a table in Markdown."""
    lines = [
        "| trained | parameters | held-out loss | FLOPs of a step | temporaries | seconds |",
        "|---|---|---|---|---|---|",
    ]
    slowest = rows["all weights"]["seconds"]
    for name, row in rows.items():
        loss = row["losses"][max(row["losses"])]
        lines.append(
            f"| {name} | {row['trained']:,} | {loss:.3f} | {row['flops']:.2f} forward | "
            f"{row['temporaries'] / 2**20:.1f} MiB | {row['seconds'] / slowest:.2f} |"
        )
    return "\n".join(lines)


def draw(rows: dict[str, dict[str, Any]], file: Any) -> None:
    """The held-out losses by step, and the memory of training."""
    figure = Figure(figsize=(9, 3.2), layout="constrained", dpi=110)
    losses, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    for name, row in rows.items():
        losses.plot([*row["losses"]], [*row["losses"].values()], label=name, marker="o")
    losses.set(xlabel="step", ylabel="held-out loss, nats per byte")
    losses.legend(frameon=False)
    begin = [0.0] * len(rows)
    for part in ("weights", "optimizer", "temporaries"):
        sizes = [row[part] / 2**20 for row in rows.values()]
        memory.barh([*rows], sizes, left=begin, label=part)
        begin = [sum(pair) for pair in zip(begin, sizes)]
    memory.invert_yaxis()
    memory.set(xlabel="memory of a step, MiB")
    memory.legend(frameon=False, loc=(0.5, 0.25))  # next to the shortest bar
    for panel in (losses, memory):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, format="png")


if __name__ == "__main__":
    main(sys.argv[1:])
