"""Parameters of a run's checkpoint, the newest by default, for commands that do not train."""

import pathlib
from collections.abc import Mapping
from typing import Any, Literal

from jaxscale.checkpoints.restore import restore
from jaxscale.checkpoints.retention import best_step
from jaxscale.checkpoints.tiers import Checkpoints
from jaxscale.data.tokens.tokenizer import Tokenizer
from jaxscale.distributed import processes
from jaxscale.run.metrics import METRICS, evaluated_steps, heldout_losses, read
from jaxscale.run_folder import BEST
from jaxscale.storage.local_tier import CHECKPOINTS
from jaxscale.training.engine import Engine


def restore_params(
    engine: Engine,
    workdir: pathlib.Path,
    tokenizer: Tokenizer | None = None,
    wanted_step: int | Literal["best"] | None = None,
) -> tuple[int, Any, dict[str, Any]]:
    """Reads a checkpoint: its step, its parameters on this engine's mesh in canonical form, and its
    metadata. A run that is training does not delete it during the read.

    Args:
      tokenizer: compared with the checkpoint's.
      wanted_step: None: the newest checkpoint; `run_folder.BEST`: the lowest loss on held-out text.

    Raises:
      FileNotFoundError: the run has no checkpoint yet.
      ValueError: there is no such checkpoint, it has other parameters, or cannot be used.
    """
    checkpoints = Checkpoints(workdir / CHECKPOINTS)
    if wanted_step == BEST:
        wanted_step = _best(checkpoints, workdir)
    with checkpoints.reading(wanted_step) as step:
        if step is None:
            raise FileNotFoundError(
                f"--workdir {workdir} has no checkpoint yet; training writes one every "
                "run.checkpoint_every steps, and at the end"
            )
        metadata = checkpoints.metadata(step)
        if tokenizer:
            check_tokenizer_of(metadata, tokenizer, f"checkpoint {step} in {workdir}")
        wanted = {"params": engine.placement.canonical.params}
        params = restore(checkpoints, step, wanted, part=True)["params"]
        return step, params, metadata


def restore_tables(engine: Engine, workdir: pathlib.Path, step: int) -> Any:
    """The tables of a checkpoint of `restore_params`; None for a model without.

    Raises:
      ValueError: there is no such checkpoint, it has other tables, or cannot be used.
    """
    if not engine.model.tables:
        return None
    checkpoints = Checkpoints(workdir / CHECKPOINTS)
    with checkpoints.reading(step):
        wanted = {"tables": engine.placement.canonical.tables}
        return restore(checkpoints, step, wanted, part=True)["tables"]


def _best(checkpoints: Checkpoints, workdir: pathlib.Path) -> int:
    """The step of the checkpoint, in either tier, with the lowest loss on held-out text.

    Raises:
      ValueError: none was evaluated, or none has a finite loss.
    """
    records = read(workdir / METRICS)
    steps = checkpoints.all_steps()
    best = processes.from_first("best checkpoint", best_step(steps, heldout_losses(records)))
    if best is None:
        of_all = f"--step {BEST}: of the checkpoints of {workdir}"
        if evaluated := sorted(evaluated_steps(records) & set(steps)):
            raise ValueError(
                f"{of_all} the evaluated ones ({', '.join(map(str, evaluated))}) have no finite "
                f"held-out loss in {METRICS}; give the number of a step"
            )
        raise ValueError(
            f"{of_all} ({', '.join(map(str, steps)) or 'none'}) none was evaluated in {METRICS}; "
            "set run.eval_every and run.keep_best when training, or give the number of a step"
        )
    return best


def check_tokenizer_of(metadata: Mapping[str, Any], tokenizer: Tokenizer, what: str) -> None:
    """Refuses a tokenizer that differs from the checkpoint's, whose ids stand for other text.

    Raises:
      ValueError: they differ.
    """
    trained = metadata["data"].get("tokenizer", tokenizer.fingerprint)  # missing in older ones
    if trained != tokenizer.fingerprint:
        raise ValueError(
            f"{what} was trained with another tokenizer than {tokenizer.name!r} is now: restore "
            "the file"
        )
