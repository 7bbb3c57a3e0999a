"""Learning rates over widths, with and without muP (arXiv 2203.03466), by training."""

import itertools
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from etils import epy

from jaxscale import config as configs
from jaxscale.config import Config
from jaxscale.studies.figures import draw_lines, lines_of, make_figure
from jaxscale.studies.study import Case, Comparison, Study, StudyRow

with epy.lazy_imports():  # they import JAX, which other studies do not need
    import jax
    import jax.numpy as jnp

    from jaxscale.models import decoder, forward, protocol
    from jaxscale.run import evaluation
    from jaxscale.run.setup import text as texts
    from jaxscale.sharding import mesh
    from jaxscale.training import device_batch, engine

HEAD = 16
"""Features of a head, at every width."""
BASE = 32
"""The width at which muP changes nothing."""
WIDTHS = (32, 64, 128)
RATES = tuple(2.0**n for n in range(-10, -3))
QUICK_RATES = (2.0**-5,)
STEPS, QUICK_STEPS, WARMUP_STEPS = 100, 10, 10
FEW_STEPS, FEW_RATE = 8, 2.0**-5
"""Steps, in the warm-up, and learning rate of the coordinate check."""
STANDARD, MUP = FORMS = ("standard", "muP")


def width_config(width: int, form: str, steps: int) -> Config:
    """Two layers of a width, on the quickstart's text in bytes, with a learning rate of 1."""
    return configs.load(
        "quickstart",
        [
            "model.num_layers=2",
            f"model.d_model={width}",
            f"model.num_heads={width // HEAD}",
            f"model.num_kv_heads={width // HEAD}",
            f"model.head_dim={HEAD}",
            f"model.d_ff={3 * width}",
            "model.tied_embeddings=False",
            "model.vocab_size=257",
            "data.tokenizer=bytes",
            "data.seq_len=64",
            "optimizer.name=adamw",
            "optimizer.learning_rate=1",
            f"optimizer.mup_base_width={BASE if form == MUP else 0}",
            f"optimizer.warmup_steps={min(WARMUP_STEPS, steps)}",
            f"run.steps={steps}",
            "run.eval_batches=16",
            "layout.data=1",
        ],
    )


def train_at_rates(
    config: Config, runs: Sequence[tuple[float, int]], folder: pathlib.Path
) -> list[dict[str, float]]:
    """Trains a decoder from the same initial values once for each (learning rate, steps).

    Updates are in proportion to the learning rate, so all runs share a compiled step of rate 1,
    whose update is multiplied: compiling takes longer than a run.

    Args:
      config: with a learning rate of 1, on one device.
      folder: of the tokenizer.

    Returns:
      Held-out loss, nats per token, and `coordinate_sizes` on the first batch.
    """
    built = engine.make_engine(config, mesh.make_mesh(config.layout, jax.devices()[:1]))
    text, rows = texts.open_text(config, folder), config.data.global_batch_size
    sizes = coordinate_sizes(config)

    @jax.jit
    def step(state: Any, batch: Any, rate: float) -> Any:
        after, _ = built.step(state, batch)
        scaled = jax.tree.map(lambda p, q: p + rate * (q - p), state.params, after.params)
        return after._replace(params=scaled)

    assert text.heldout, "the settings of the study hold text out"
    found = []
    for rate, steps in runs:
        state = built.init(jax.random.key(config.run.seed))
        batches = evaluation.device_batches(built, text.train, rows)
        first = next(batches)
        for batch in itertools.islice(itertools.chain([first], batches), steps):
            state = step(state, batch, rate)
        loss = evaluation.evaluate_loss(
            built, state.params, text.heldout, rows, max_batches=config.run.eval_batches
        ).loss
        found.append({"heldout_loss": loss, **sizes(state.params, first)})
    return found


def coordinate_sizes(config: Config) -> Callable[[Any, Any], dict[str, float]]:
    """Root mean squares of a decoder's stream after the last layer, and of its logits, as a
    function of parameters and a sharded batch. muP keeps both independent of the width."""
    plain = decoder.Decoder(config.model, decoder.plain_kernels())

    @jax.jit
    def sizes(params: Any, batch: Any) -> Any:
        x_BTD = forward.forward(plain, params, device_batch.unpack_sharded(batch))["x"]
        logits = plain.logits(protocol.head_params(plain, params), x_BTD)
        found = {"stream_rms": x_BTD, "logits_rms": logits}
        return jax.tree.map(lambda x: jnp.sqrt(jnp.mean(x**2)), found)

    return lambda params, batch: jax.tree.map(float, sizes(params, batch))


def _cases(quick: bool, hardware: str) -> Sequence[Case]:
    del hardware
    steps, rates = (QUICK_STEPS, QUICK_RATES) if quick else (STEPS, RATES)
    widths = (BASE, 4 * BASE) if quick else WIDTHS
    return [
        {"width": width, "form": form, "steps": steps, "learning_rates": list(rates)}
        for width in widths
        for form in (FORMS if width != BASE else FORMS[:1])
    ]


def _rows(case: Case, folder: pathlib.Path) -> list[StudyRow]:
    """At the base width for both forms, which are the same there."""
    width, form, steps = case["width"], case["form"], case["steps"]
    runs = [(FEW_RATE, FEW_STEPS), *((rate, steps) for rate in case["learning_rates"])]
    folder.mkdir(parents=True, exist_ok=True)
    found = train_at_rates(width_config(width, form, steps), runs, folder)
    return [
        {"form": one, "width": width, "learning_rate": rate, "steps": count}
        | {name: value if math.isfinite(value) else None for name, value in values.items()}
        for one in (FORMS if width == BASE else (form,))
        for (rate, count), values in zip(runs, found, strict=True)
    ]


def loss_curve(rows: Sequence[StudyRow], form: str, width: int) -> list[tuple[float, float]]:
    """(learning rate, held-out loss) of the longest runs, without diverged ones."""
    steps = max(row["steps"] for row in rows)
    found = [row for row in rows if (row["form"], row["width"]) == (form, width)]
    return [
        (row["learning_rate"], row["heldout_loss"])
        for row in found
        if row["steps"] == steps and row["heldout_loss"] is not None
    ]


def best_rate(curve: Sequence[tuple[float, float]]) -> float:
    """The minimum of a parabola in the logarithm of the rate, through the lowest point and its
    neighbours; the lowest point itself at an end.

    >>> round(best_rate([(2**-3, 1.04), (2**-2, 1.0), (2**-1, 1.04)]), 3)
    0.25
    """
    lowest = min(range(len(curve)), key=lambda i: curve[i][1])
    if not 0 < lowest < len(curve) - 1:
        return curve[lowest][0]
    (left, a), (middle, b), (right, c) = curve[lowest - 1 : lowest + 2]
    step = math.log2(right / left) / 2
    return middle * 2 ** (step * (a - c) / 2 / (a - 2 * b + c))


def best_rates(rows: Sequence[StudyRow], form: str) -> dict[int, float]:
    """Width -> the best learning rate; without widths at which every run diverged."""
    widths = sorted({row["width"] for row in rows if row["form"] == form})
    curves = {width: loss_curve(rows, form, width) for width in widths}
    return {width: best_rate(curve) for width, curve in curves.items() if curve}


def octaves(rows: Sequence[StudyRow], form: str) -> float:
    """How far the best learning rate moves from the narrowest to the widest model, in octaves."""
    rates = list(best_rates(rows, form).values())
    return math.log2(rates[-1] / rates[0])


def size_ratio(rows: Sequence[StudyRow], form: str, name: str = "stream_rms") -> float:
    """The activations' size of the widest model over that of the narrowest, after a few steps."""
    few = [row for row in rows if row["form"] == form and row["steps"] == FEW_STEPS]
    few.sort(key=lambda row: row["width"])
    return few[-1][name] / few[0][name]


def lost_by_transfer(rows: Sequence[StudyRow], form: str) -> float:
    """How much the widest model's held-out loss rises at the narrowest one's best rate of the grid,
    in nats; infinite if it diverges there."""
    widths = best_rates(rows, form)
    narrow, wide = (loss_curve(rows, form, end(widths)) for end in (min, max))
    rate = min(narrow, key=lambda point: point[1])[0]
    return dict(wide).get(rate, math.inf) - min(loss for _, loss in wide)


def _ends(rows: Sequence[StudyRow], form: str) -> str:
    widths = [row["width"] for row in rows if row["form"] == form]
    return f"width {min(widths)} to {max(widths)}"


def _has_several_rates(rows: Sequence[StudyRow]) -> bool:
    return len(loss_curve(rows, MUP, BASE)) > 1


def _comparisons(rows: Sequence[StudyRow]) -> list[Comparison]:
    differs = "theirs are Transformers up to width 8,192, of more steps and text; ours are tiny"
    measure = "theirs is the mean of absolute values, of an MLP; ours is of the stream at its end"
    adam = f"size of activations after {FEW_STEPS} steps of Adam"
    known = {MUP: ("stable over widths", "published"), STANDARD: ("falls with width", "uncertain")}
    found = []
    for form, (said, evidence) in known.items() if _has_several_rates(rows) else ():
        ours = f"moves by {octaves(rows, form):+.1f} octaves, {_ends(rows, form)}"
        found.append(Comparison(f"best learning rate, {form}", said, evidence, ours, differs))
    for form, said in ((MUP, "stable over widths"), (STANDARD, "grows with width")):
        ours = f"times {size_ratio(rows, form):.2g}, {_ends(rows, form)}"
        found.append(Comparison(f"{adam}, {form}", said, "published", ours, measure))
    return found


def _findings(rows: Sequence[StudyRow]) -> list[str]:
    found = []
    for form in FORMS:
        found.append(
            f"After {FEW_STEPS} steps of the warm-up the stream is {size_ratio(rows, form):.2f} "
            f"times as large, {_ends(rows, form)}, {form}."
        )
        if not _has_several_rates(rows):
            continue
        rates = best_rates(rows, form)
        listed = ", ".join(f"2^{math.log2(rate):.1f} at {width}" for width, rate in rates.items())
        found.append(f"Best learning rate, {form}: {listed}.")
        found.append(
            f"At the narrowest model's best rate the widest loses "
            f"{lost_by_transfer(rows, form):.3f} nats, {form}."
        )
    return found


def _figures(rows: Sequence[StudyRow]) -> dict[str, Any]:
    figure, panels = make_figure(3)
    widths = sorted({row["width"] for row in rows})
    losses = [
        loss for f, w in itertools.product(FORMS, widths) for _, loss in loss_curve(rows, f, w)
    ]
    shown = min(losses) - 0.05, min(max(losses), min(losses) + 1.2) + 0.05
    for panel, form in zip(panels, FORMS):
        draw_lines(
            panel,
            {f"width {width}": loss_curve(rows, form, width) for width in widths},
            xlabel="learning rate",
            ylabel="held-out loss, nats per byte",
            title=form,
            ylim=shown,
        )
        rates = sorted({row["learning_rate"] for row in rows})
        panel.set_xticks(rates, [f"$2^{{{math.log2(rate):.0f}}}$" for rate in rates], rotation=0)
    few = [row for row in rows if row["steps"] == FEW_STEPS]
    draw_lines(
        panels[2],
        lines_of(few, "form", "width", "stream_rms"),
        log_y=True,
        xlabel="width",
        title=f"Stream after {FEW_STEPS} steps, root mean square",
    )
    return {"Held-out loss over learning rates, and the coordinate check": figure}


TRANSFER = Study(
    name="transfer",
    question="Is the best learning rate of a narrow model that of a wide one, with or without muP?",
    papers="arXiv 2203.03466; decay: arXiv 2405.13698",
    method=f"Two layers, heads of {HEAD} features, AdamW, {STEPS} steps of 512 bytes of the "
    "quickstart's text; each width and form is trained with each learning rate, from the same "
    f"initial values. The form muP has optimizer.mup_base_width = {BASE}; at that width both "
    f"forms are the same run. The coordinate check is after {FEW_STEPS} steps of the warm-up.",
    hardware="",
    columns={
        "form": "standard, or muP",
        "width": "d_model; heads and d_ff are in proportion",
        "learning_rate": "at the peak",
        "steps": "of training",
        "heldout_loss": "nats per byte at the end; none if the run diverged",
        "logits_rms": "root mean square of the logits on the first batch",
        "stream_rms": "of the stream after the last layer",
    },
    cases=_cases,
    rows=_rows,
    comparisons=_comparisons,
    findings=_findings,
    figures=_figures,
)
