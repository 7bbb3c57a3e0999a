"""python tools/bench/peers.py [--install] [--environments DIR] [--dtypes NAME ...] [--json FILE]

Compares train steps and start-up on a CPU with MaxText's and PyTorch's: the same sizes of model and
batch, AdamW with float32 state, synthetic tokens, no checkpoints. Each peer has a separate
environment below `--environments`, made by `--install`. MaxText (2.4 GB) runs its train command
(`peer_maxtext.py`) with each remat policy of `--remat`; PyTorch runs a plain trainer
(`peer_torch.py`), eager and compiled. All subjects of a round run together with interleaved steps,
and a ratio is the median over neighbouring steps, so that other load on the machine affects all
equally.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from baseline import SIZES  # noqa: E402
from provenance import provenance  # noqa: E402
from train import (  # noqa: E402
    COLUMNS,
    OURS,
    Run,
    Subject,
    command_of,
    compare,
    median,
    row,
    summarise,
)

from jaxscale import command_line  # noqa: E402
from jaxscale import config as configs  # noqa: E402
from jaxscale.config import Config  # noqa: E402
from jaxscale.config.model import ModelConfig  # noqa: E402
from jaxscale.training.tracing.traces import model_trace  # noqa: E402

PACKAGES = {"maxtext": "maxtext[tpu]==0.2.5", "torch": "torch>=2.13"}
"""Peer, which is the name of its environment -> what is installed there."""
TORCH = {"torch eager": [], "torch compiled": ["--compile"]}
"""Subject -> options of `peer_torch.py`."""
CONFIG = "configs/bench_8x256.py"


def main(argv: Sequence[str]) -> int:
    """Returns 1 if a subject failed."""
    parser = argparse.ArgumentParser(
        prog="python tools/bench/peers.py",
        description="Compares train steps and start-up with MaxText's and PyTorch's.",
        epilog="Any leaf of the config can be set: --config.data.seq_len=256",
    )
    parser.add_argument("--config", metavar="FILE", default=CONFIG)
    parser.add_argument(
        "--peers", nargs="+", metavar="NAME", choices=PACKAGES, default=list(PACKAGES)
    )
    parser.add_argument(
        "--install",
        action="store_true",
        help=f"first installs {' and '.join(PACKAGES.values())} below DIR",
    )
    parser.add_argument(
        "--environments",
        metavar="DIR",
        type=pathlib.Path,
        default=pathlib.Path.home() / ".cache" / "jaxscale" / "peers",
        help="the folder of the peers' virtual environments, maxtext and torch",
    )
    parser.add_argument("--dtypes", nargs="+", metavar="NAME", default=["float32", "bfloat16"])
    parser.add_argument(
        "--remat",
        nargs="+",
        metavar="POLICY",
        default=["full", "minimal"],
        help="MaxText's remat policies, each a subject; ours is from the config",
    )
    parser.add_argument(
        "--steps", type=command_line.whole(1, 10**6), default=5, help="timed steps of a process"
    )
    parser.add_argument(
        "--repeats", type=command_line.whole(1, 10**6), default=3, help="processes of each subject"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=command_line.output_file,
        help="append a line of JSON for each subject",
    )
    options, overrides = command_line.parse(parser, argv)
    with command_line.refusals():
        configs.load(options.config)
    for peer in options.peers:
        if options.install:
            install(options.environments / peer, PACKAGES[peer])
        python = python_of(options.environments / peer)
        if not python.exists():
            parser.error(
                f"{python} does not exist; --install makes it, or name another --environments"
            )
    failed = False
    for dtype in options.dtypes:
        settings = [*overrides, "layout.data=1", f"model.compute_dtype={dtype}"]
        print(f"\n{options.config}, {dtype}\n{COLUMNS}", flush=True)
        try:
            records = run_case(options, settings)
        except (RuntimeError, ValueError) as error:
            print(f"failed: {error}")
            failed = True
            continue
        for record in records:
            print(row(record), flush=True)
            if options.json:
                with pathlib.Path(options.json).open("a") as lines:
                    lines.write(json.dumps({"benchmark": "peers", **provenance(), **record}) + "\n")
        print(ratios(records[0]), flush=True)
    return int(failed)


def install(environment: pathlib.Path, package: str) -> None:
    """Makes a virtual environment with a package."""
    venv.create(environment, with_pip=True)
    command = [str(python_of(environment)), "-m", "pip", "install", "--quiet", package]
    subprocess.run(command, check=True)


def python_of(environment: pathlib.Path) -> pathlib.Path:
    """The interpreter of a virtual environment."""
    return environment / "bin" / "python"


def run_case(options: argparse.Namespace, settings: Sequence[str]) -> list[dict[str, Any]]:
    """The records of a compute type, ours first."""
    config = configs.load(options.config, settings)
    of_peer = {"maxtext": [f"maxtext {remat}" for remat in options.remat], "torch": list(TORCH)}
    names = [OURS, *(name for peer in options.peers for name in of_peer[peer])]
    rounds = []
    for _ in range(options.repeats):
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            subjects = []
            for name in names:
                command, path = command_of(OURS, options.config, settings), str(ROOT)
                if name != OURS:
                    peer, _, form = name.partition(" ")
                    given = (
                        torch_arguments(config, name)
                        if peer == "torch"
                        else maxtext_settings(config, form, folder)
                    )
                    program = str(ROOT / f"tools/bench/peer_{peer}.py")
                    python = str(python_of(options.environments / peer))
                    # Without -P Python would import modules from the program's folder.
                    command, path = [python, "-P", program, *given], ""
                subject = Subject(name, command, 1, path)
                subjects.append(stack.enter_context(contextlib.closing(subject)))
            check_same_model(config, subjects)
            for _ in range(options.steps):
                for subject in subjects:
                    subject.step()
            rounds.append({subject.name: subject.finish() for subject in subjects})
    case = {"config": options.config, "settings": list(settings), "rounds": len(rounds)}
    return with_ratios({name: [each[name] for each in rounds] for name in names}, config, case)


def maxtext_settings(config: Config, remat: str, folder: str) -> list[str]:
    """MaxText's settings for our config.

    Raises:
      ValueError: a model option or an optimizer without a translation.
    """
    check_translated(config)
    model, data, optimizer = config.model, config.data, config.optimizer
    given = {
        "run_name": "peer",
        "base_output_directory": folder,
        "hardware": "cpu",
        "skip_jax_distributed_system": "true",
        "dataset_type": "synthetic",
        "enable_checkpointing": "false",
        "steps": 1_000_000,  # the input's end stops it
        "base_emb_dim": model.d_model,
        "base_num_decoder_layers": model.num_layers,
        "base_num_query_heads": model.num_heads,
        "base_num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "base_mlp_dim": model.d_ff,
        "vocab_size": model.vocab_size,
        "rope_max_timescale": int(model.rope_theta),
        "max_target_length": data.seq_len,
        "per_device_batch_size": data.global_batch_size,
        "dtype": model.compute_dtype,
        "weight_dtype": model.param_dtype,
        "remat_policy": remat,
        "learning_rate": optimizer.learning_rate,
        "adam_b1": optimizer.b1,
        "adam_b2": optimizer.b2,
        "adam_weight_decay": optimizer.weight_decay,
        "gradient_clipping_threshold": optimizer.clip_norm,
    }
    return [f"{name}={value}" for name, value in given.items()]


def torch_arguments(config: Config, name: str) -> list[str]:
    """The arguments of `peer_torch.py` for our config.

    Raises:
      ValueError: as `maxtext_settings`.
    """
    check_translated(config)
    model, data, optimizer = config.model, config.data, config.optimizer
    given = {name: getattr(model, name) for name in SIZES} | {
        "vocab_size": model.padded_vocab_size,
        "seq_len": data.seq_len,
        "batch": data.global_batch_size,
        "learning_rate": optimizer.learning_rate,
        "b1": optimizer.b1,
        "b2": optimizer.b2,
        "weight_decay": optimizer.weight_decay,
        "clip_norm": optimizer.clip_norm,
    }
    return [f"--sizes={json.dumps(given)}", *TORCH[name]]


def check_translated(config: Config) -> None:
    """Checks that the peers have the model and the optimizer.

    Raises:
      ValueError: a model option or an optimizer without a translation.
    """
    model, optimizer = config.model, config.optimizer
    if ModelConfig(**{name: getattr(model, name) for name in SIZES}) != model:
        raise ValueError(f"peers: of the model only {', '.join(SIZES)} are translated")
    if optimizer.name != "adamw":
        raise ValueError(f"peers: optimizer.name = {optimizer.name} is not translated; set adamw")


def check_same_model(config: Config, subjects: Sequence[Subject]) -> None:
    """Checks that all subjects have the same number of parameters.

    Raises:
      ValueError: a peer has another number of parameters than our config.
    """
    ours = model_trace(config.model).num_params
    for subject in subjects:
        found = subject.first.get("num_params", ours)
        if found != ours:
            raise ValueError(f"{subject.name} has {found:,} parameters, ours {ours:,}")


def with_ratios(
    runs: dict[str, list[Run]], config: Config, case: dict[str, Any]
) -> list[dict[str, Any]]:
    """A record for each subject; ours is compared with the peer with the fastest steps."""
    records = {name: {**case, **summarise(name, each, config)} for name, each in runs.items()}
    peers = [name for name in records if name != OURS]
    fastest = min(peers, key=lambda name: records[name]["step_seconds"])
    pairs = list(zip(runs[OURS], runs[fastest]))

    def start_ratio(seconds_of: Any) -> float:
        return median(seconds_of(mine) / seconds_of(theirs) for mine, theirs in pairs)

    records[OURS] |= {
        "compared_with": fastest,
        **compare(runs[OURS], runs[fastest]),
        "start_ratio": start_ratio(lambda run: sum(run.first["phases"].values())),
        "start_cpu_ratio": start_ratio(lambda run: run.first["cpu_seconds"]),
    }
    return list(records.values())


def ratios(ours: dict[str, Any]) -> str:
    """Both ratios, in a line."""
    return (
        f"{ours['speed_ratio']:.2f} x the tokens/s of {ours['compared_with']} "
        f"({ours['cpu_ratio']:.2f} by CPU time); start to first step: {ours['start_ratio']:.2f} of "
        f"its time ({ours['start_cpu_ratio']:.2f} of its CPU time)"
    )


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main(sys.argv[1:]))
