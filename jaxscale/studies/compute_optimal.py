"""Compute-optimal sizes of small byte-level models that are trained here: Chinchilla's three
approaches (arXiv 2203.15556), the hand-off from causal to masked training (arXiv 2411.02142), and
the law of sparse training (arXiv 2309.08520)."""

import math
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from jaxscale import config as configs
from jaxscale.config import Config
from jaxscale.studies.compute_optimal_fits import (
    compare_fits,
    describe_fits,
    draw_fits,
)
from jaxscale.studies.runs import TrainedRun, train_run
from jaxscale.studies.study import Case, Study, StudyRow

CLM, MLM, HANDOFF = "clm", "mlm", "handoff"


class ModelSize(NamedTuple):
    """A decoder with a gated MLP."""

    num_layers: int
    d_model: int
    num_heads: int
    d_ff: int

    @property
    def matrices(self) -> int:
        """Weights of the layers' matrices, which `optimizer.sparsity` prunes."""
        return self.num_layers * (4 * self.d_model**2 + 3 * self.d_model * self.d_ff)

    @property
    def params(self) -> int:
        """Parameters without embedding and head: matrices, and norms."""
        return self.matrices + (2 * self.num_layers + 1) * self.d_model


SIZES = {
    "30k": ModelSize(2, 32, 1, 112),
    "55k": ModelSize(2, 48, 1, 128),
    "100k": ModelSize(2, 64, 2, 176),
    "170k": ModelSize(2, 80, 2, 240),
    "330k": ModelSize(3, 96, 3, 256),
    "580k": ModelSize(3, 128, 4, 336),
    "1M": ModelSize(4, 144, 4, 384),
}
BUDGETS = (3e11, 1e12, 3e12, 1e13)
"""FLOPs of training, 6 N D with N outside embedding and head."""
SPARSE_SIZES, SPARSITIES = ("55k", "100k", "170k", "330k"), (0.5, 0.75, 0.875)
MASKED_SIZES, MASKED_BUDGETS = ("30k", "55k", "100k", "170k"), (3e11, 1e12)
CLM_SHARES = (0.15, 0.3, 0.5)
"""Shares of the FLOPs of a hand-off that are causal."""
SEQ_LEN = 64
EVAL_SEQUENCES = 1024
LEAST_BATCH = 512
WARMUP = 0.05
"""Of the steps, at the start and after the hand-off."""
PRUNINGS = 50


def _cases(quick: bool, hardware: str) -> Sequence[Case]:
    """Runs, those of the fewest FLOPs first; dense causal ones, of which the fits are, before
    others of up to a quarter of their FLOPs."""
    del hardware
    if quick:
        found = [_case(CLM, size, 1e9) for size in ("30k", "55k", "100k")]
        return [*found, _case(HANDOFF, "30k", 2e9, clm_share=0.5)]
    found = [_case(CLM, size, flops) for flops in BUDGETS for size in SIZES]
    for flops, sparsities in ((BUDGETS[0], SPARSITIES), (BUDGETS[1], SPARSITIES[:2])):
        found += [_case(CLM, n, flops, sparsity=s) for s in sparsities for n in SPARSE_SIZES]
    found += [_case(MLM, size, flops) for flops in MASKED_BUDGETS for size in MASKED_SIZES]
    found += [_case(HANDOFF, "100k", MASKED_BUDGETS[-1], clm_share=s) for s in CLM_SHARES]

    def order(one: Case) -> float:
        return one["flops"] * (1 if one["objective"] == CLM and not one["sparsity"] else 4)

    return sorted(found, key=order)


def _case(
    objective: str, size: str, flops: float, *, sparsity: float = 0.0, clm_share: float = 0.0
) -> Case:
    return {
        "objective": objective,
        "size": size,
        "flops": flops,
        "sparsity": sparsity,
        "clm_share": clm_share,
    }


def batch_tokens(tokens: float) -> int:
    """Tokens of a step of a run of so many: the power of two next to their root, at least 512.

    >>> [batch_tokens(tokens) for tokens in (5e4, 1e6, 5e7)]
    [512, 1024, 8192]
    """
    return max(LEAST_BATCH, 2 ** round(math.log2(tokens) / 2))


def peak_rate(size: ModelSize) -> float:
    """The learning rate by size, in inverse proportion to the width (arXiv 2203.03466)."""
    return 0.336 / size.d_model


def sized_config(
    size: ModelSize, flops: float, *, causal: bool, sparsity: float = 0.0, init_from: str = ""
) -> Config:
    """The configuration of a run: a cosine over its whole length, which follows from the FLOPs."""
    tokens = flops / 6 / size.params
    sequences = batch_tokens(tokens) // SEQ_LEN
    steps = max(1, round(tokens / SEQ_LEN / sequences))
    settings = {
        "model.num_layers": size.num_layers,
        "model.d_model": size.d_model,
        "model.num_heads": size.num_heads,
        "model.num_kv_heads": size.num_heads,
        "model.head_dim": size.d_model // size.num_heads,
        "model.d_ff": size.d_ff,
        "model.vocab_size": 258,  # bytes, the end of a document, and the mask
        "model.causal": causal,
        "model.attention": "reference",  # the fastest for sequences this short
        "model.init_from": init_from,
        "data.objective": "causal" if causal else "masked",
        "data.source": "{stdlib}/**/*.py",
        "data.seq_len": SEQ_LEN,
        "data.global_batch_size": sequences,
        "optimizer.learning_rate": peak_rate(size),
        "optimizer.warmup_steps": math.ceil(WARMUP * steps),
        "run.steps": steps,
        "run.eval_batches": max(1, EVAL_SEQUENCES // sequences),
        "run.checkpoint_every": max(steps // 4, 200),
        "run.keep_last": 1,
        "run.hang_seconds": 3600,  # an evaluation on busy processors is no hang
    }
    if sparsity:
        settings |= {
            "optimizer.sparsity": sparsity,
            "optimizer.sparsity_begin": steps // 4,
            "optimizer.sparsity_steps": max(1, steps // 2),
            "optimizer.sparsity_every": max(1, steps // 2 // PRUNINGS),
        }
    return configs.load("tiny", [f"{name}={value}" for name, value in settings.items()])


def _rows(case: Case, folder: pathlib.Path) -> list[StudyRow]:
    size, share = SIZES[case["size"]], case["clm_share"]
    init_from, done = "", []
    if case["objective"] == HANDOFF:
        config = sized_config(size, share * case["flops"], causal=True)
        done.append((config, train_run(config, folder / CLM)))
        init_from = str(folder / CLM)
    config = sized_config(
        size,
        (1 - share) * case["flops"],
        causal=case["objective"] == CLM,
        sparsity=case["sparsity"],
        init_from=init_from,
    )
    done.append((config, train_run(config, folder / MLM if init_from else folder)))
    return [{**case, **_measured(size, case["sparsity"], done)}]


def _measured(
    size: ModelSize, sparsity: float, done: Sequence[tuple[Config, TrainedRun]]
) -> StudyRow:
    """The columns after the case's, of a run, or of two runs one after the other."""
    last, result = done[-1]
    steps = [config.run.steps for config, _ in done]
    tokens = [n * config.data.global_batch_size * SEQ_LEN for n, (config, _) in zip(steps, done)]
    return {
        "params": size.params,
        "weights": size.params - round(sparsity * size.matrices),
        "tokens": sum(tokens),
        "steps": sum(steps),
        "batch_tokens": last.data.global_batch_size * SEQ_LEN,
        "learning_rate": last.optimizer.learning_rate,
        "eval_loss": result.eval_loss,
        "step_seconds": sum(run.step_seconds for _, run in done),
    }


COMPUTE_OPTIMAL = Study(
    name="compute_optimal",
    question="Which model size has the lowest loss for a number of FLOPs, by Chinchilla's three "
    "approaches, and how do masked training and sparsity change it?",
    papers="Chinchilla: arXiv 2203.15556, fitted again by 2404.10102; protein models, causal and "
    "masked: 2411.02142; sparse models: 2309.08520",
    method="Trains decoders of "
    f"{SIZES['30k'].params:,} to {SIZES['1M'].params:,} parameters outside embedding and head, on "
    "the bytes of Python's standard library, in float32 on the local devices. FLOPs are 6 N D. "
    f"Each run has a cosine over its whole length after {WARMUP:.0%} of warm-up, about as many "
    "tokens in a step as steps, and a peak rate in inverse proportion to the width; losses are of "
    f"the same {EVAL_SEQUENCES:,} held-out sequences of {SEQ_LEN} bytes. Sparse runs cost dense "
    "FLOPs and prune from a quarter to three quarters. A hand-off starts a masked run from a "
    "causal one with a new optimizer and schedule.",
    hardware="",
    columns={
        "objective": "causal (clm), masked (mlm), or masked after causal (handoff)",
        "size": "of the model",
        "flops": "budget, 6 N D; of a hand-off both parts",
        "sparsity": "final share of zeros in the layers' matrices",
        "clm_share": "share of the FLOPs of a hand-off that are causal",
        "params": "N: parameters without embedding and head",
        "weights": "the same without zeros",
        "tokens": "D: of training",
        "steps": "of training",
        "batch_tokens": "tokens of a step",
        "learning_rate": "at the peak",
        "eval_loss": "nats per byte of held-out text; of masked runs per masked byte",
        "step_seconds": "of all steps, without compilation, evaluation and saves",
    },
    cases=_cases,
    rows=_rows,
    comparisons=compare_fits,
    findings=describe_fits,
    figures=draw_fits,
)
