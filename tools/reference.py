"""python tools/reference.py [PAGE ...]

Writes the generated pages of docs/: api.md, commands.md, metrics.md and features.md.
"""

import argparse
import contextlib
import importlib
import inspect
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # a checkout need not be installed

from etils import epy  # noqa: E402

import jaxscale  # noqa: E402
from jaxscale import __main__, command_line  # noqa: E402

with epy.lazy_imports():  # JAX
    from jaxscale import config as configs
    from jaxscale.models import weights
    from jaxscale.run import metrics
    from jaxscale.run.setup import layout as layouts

type Settings = Mapping[str, Any]
"""Setting ("layout.fsdp") -> value."""

BASE: Settings = {
    "model.num_layers": 4,
    "model.d_model": 32,
    "model.num_heads": 8,
    "model.num_kv_heads": 8,
    "model.head_dim": 4,
    "model.d_ff": 64,
    "data.global_batch_size": 32,
    "data.seq_len": 32,
}
"""A model and a batch whose sizes every layout below divides, so that sizes are never the reason of
a refusal."""

PIPELINE: Settings = {"layout.pipeline": 2, "layout.fsdp": 2, "layout.microbatches": 4}
EXPERTS: Settings = {"model.family": "mixtral", "model.num_experts": 4}

LAYOUTS: Mapping[str, Settings] = {
    "data": {"layout.zero_stage": 0},
    "ZeRO-1": {"layout.fsdp": 2, "layout.zero_stage": 1},
    "ZeRO-2": {"layout.fsdp": 2, "layout.zero_stage": 2},
    "ZeRO-3": {"layout.fsdp": 2},
    "layered": {"layout.fsdp": 2, "layout.accumulation": "layered", "layout.microbatches": 2},
    "tensor": {"layout.tensor": 2},
    "tensor rows": {"layout.tensor": 4, "layout.tensor_rows": 2},
    "ring": {"layout.context": 2, "layout.context_method": "ring"},
    "gather": {"layout.context": 2, "layout.context_method": "gather"},
    "Ulysses": {"layout.context": 2, "layout.context_method": "ulysses"},
    "expert": {**EXPERTS, "layout.expert": 2},
    "1F1B": {**PIPELINE, "layout.schedule": "1f1b"},
    "interleaved": {**PIPELINE, "layout.schedule": "interleaved"},
    "zero bubble": {**PIPELINE, "layout.schedule": "zb_h1"},
}
"""Column -> its settings, on eight devices. Those of a model apply to features without a family."""

LATENT: Settings = {
    "model.family": "deepseek_v3",
    "model.num_experts": 4,
    "model.experts_per_token": 2,
    "model.dense_layers": 0,
    "model.expert_d_ff": 32,
    "model.shared_d_ff": 32,
    "model.router_groups": 1,
    "model.router_groups_kept": 1,
    "model.head_dim": 8,
    "model.kv_rank": 16,
    "model.query_rank": 16,
    "model.rope_head_dim": 4,
    "model.value_head_dim": 8,
}

FEATURES: Mapping[str, Settings] = {
    "packed documents (`causal`)": {},
    "attention across documents (`causal_across_documents`)": {
        "data.objective": "causal_across_documents"
    },
    "grouped-query attention (GQA)": {"model.num_kv_heads": 4},
    "sliding windows on some layers": {
        "model.family": "gemma3",
        "model.num_layers": 8,
        "model.layer_pattern": "LG",
        "model.sliding_window": 8,
    },
    "attention sinks, experts (`gpt_oss`)": {
        "model.family": "gpt_oss",
        "model.num_experts": 4,
        "model.num_layers": 8,
        "model.layer_pattern": "LG",
        "model.sliding_window": 8,
    },
    "tied embeddings": {"model.tied_embeddings": True},
    "dropout": {"model.dropout": 0.1},
    "experts, `top_k` router (MoE)": EXPERTS,
    "experts, `expert_choice` router": {
        "model.family": "tests.models.experts:make",
        "model.num_experts": 4,
        "model.router": "expert_choice",
        "model.capacity_factor": 1.0,
        "model.balance_weight": 0.0,
        "data.objective": "causal_across_documents",
    },
    "`overlap_experts`, `expert = 2`": {
        **EXPERTS,
        "layout.expert": 2,
        "layout.overlap_experts": True,
    },
    "latent attention (MLA), experts": LATENT,
    "multi-token prediction (MTP)": {**LATENT, "model.prediction_depth": 1},
    "encoder and decoder (T5)": {
        "model.family": "t5",
        "model.num_encoder_layers": 4,
        "data.target_len": 32,
        "data.objective": "span_corruption",
    },
    "masked objective (BERT)": {
        "model.family": "bert",
        "model.max_seq_len": 32,
        "data.objective": "masked",
    },
    "custom model (`docs/my_model.py`)": {"model.family": "my_model:MyModel"},
    "LoRA adapters": {"model.lora_rank": 4},
    "side network": {"model.side_width": 4},
    "prompts": {"model.prompt_tokens": 4},
    "n-gram embeddings ([tables](tables.md))": {"model.ngram_rows": 64},
    "float8 matmuls": {"model.matmul_dtype": "float8"},
    "int8 matmuls": {"model.matmul_dtype": "int8"},
    "Muon": {"optimizer.name": "muon"},
    "Adafactor": {"optimizer.name": "adafactor"},
    "pruning (`optimizer.sparsity`)": {"optimizer.sparsity": 0.5, "optimizer.sparsity_steps": 4},
    "muP (`optimizer.mup_base_width`)": {"optimizer.mup_base_width": 16},
    "noise scale (`run.noise_every`)": {"run.noise_every": 2},
    "batch schedule (`data.batch_schedule`)": {
        "data.batch_schedule": {0: 16, 2: 32},
        "layout.microbatches": 4,
    },
    "frozen parameters (`optimizer.groups`)": {
        "optimizer.groups": ({"params": "embed/*", "frozen": True},)
    },
    "skipped bad steps (`run.skip_bad_steps`)": {"run.skip_bad_steps": 3},
    "remat `full`": {"layout.remat": "full"},
    "remat `save_matmuls`": {"layout.remat": "save_matmuls"},
    "remat `save_all_but_attention`": {"layout.remat": "save_all_but_attention"},
    "remat `save:NAMES`": {"layout.remat": "save:query,key,value"},
    "remat `offload:NAMES`": {"layout.remat": "offload:query,key,value"},
    "remat `keep:NUMBER`": {"layout.remat": "keep:1"},
    "offloaded optimizer state": {"layout.offload": "optimizer"},
    "part of the state in host memory (`offload_bytes`)": {"layout.offload_bytes": 1024},
    "offloaded activations": {"layout.offload": "activations"},
    "`unroll_layers`": {"layout.unroll_layers": True},
    "`overlap_tensor`, `tensor = 2`": {
        "layout.tensor": 2,
        "layout.overlap_tensor": True,
    },
    "`pipeline_gather = layer`": {"layout.pipeline_gather": "layer"},
}
"""Row -> its settings."""

ENDS_HERE = re.compile(r";|: (?=set )")
"""Where the remedy of a refusal begins."""

GENERATED = (
    "\n<!-- Generated by `python tools/reference.py`; change that, or the code it reads. -->\n"
)


def main() -> int:
    """Writes the pages that are named, or all."""
    parser = argparse.ArgumentParser(description="Writes the generated pages of docs/.")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"of {', '.join(PAGES)}")
    named = parser.parse_args().pages
    if unknown := set(named) - set(PAGES):
        parser.error(f"{unknown.pop()} is not one of {', '.join(PAGES)}")
    for name in named or PAGES:
        (ROOT / "docs" / f"{name}.md").write_text(PAGES[name](), encoding="utf-8")
    return 0


def api() -> str:
    """The page of the public names, whose docstrings mkdocstrings inserts."""
    rows, entries = [], []
    for name, home in sorted(jaxscale._HOMES.items(), key=lambda item: item[0].lower()):
        purpose = (inspect.getdoc(getattr(jaxscale, name)) or "").split("\n\n")[0]
        rows.append((f"[`{name}`](#{name.lower()})", purpose))
        entries.append(
            f"## {name}\n\n::: jaxscale.{home}.{name}\n    options:\n"
            f"      heading: jaxscale.{name}\n"
        )
    return f"""# Public names

The Python interface: every name of `import jaxscale`, from its docstring.

```bash
python -c "import jaxscale; help(jaxscale.load)"
```

These names are stable; other names in the package may change. The examples are run by the tests
and assume `import jax, jaxscale` and `import numpy as np`. Those of `device_batches`,
`evaluate_loss`, `from_pretrained`, `open_trainer` and `sample` continue the example of
[`fit`](#fit). [Commands](commands.md) are on another page, and so are the settings of a
[run](settings.md), a [layout](layouts.md) and a [model](model_families.md).

{table(("name", "purpose"), rows)}
{chr(10).join(entries)}{GENERATED}"""


def commands() -> str:
    """The page of the commands and their flags."""
    parts = [
        """# Commands

Every command of `python -m jaxscale` and its flags.

```bash
python -m jaxscale --help
```

A command with `--config` also takes `--config.SECTION.KEY=VALUE` for each [setting](settings.md).
Flags are never abbreviated; a mistyped flag is refused, and the error names the nearest one.
"""
    ]
    for name in __main__.COMMANDS:
        parser = parser_of(name)
        rows = [
            (flags_of(action), default_of(action), help_of(action))
            for action in parser._actions
            if action.dest != "help"
        ]
        text = f"\n## {name}\n\n`{parser.prog}`: {sentence(parser.description)}\n\n"
        text += '<div class="flags" markdown="1">\n\n'
        text += table(("flag", "default", "meaning"), rows) + "\n</div>\n"
        if parser.epilog:
            text += f"\n{sentence(parser.epilog)}\n"
        parts.append(text)
    return "".join(parts) + GENERATED


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of a command, taken where it parses its arguments."""
    with mock.patch.object(command_line, "parse", side_effect=_ParserTakenError) as parse:
        with contextlib.suppress(_ParserTakenError):
            importlib.import_module(f"jaxscale.{command}").main(["--help"])
        return parse.call_args.args[0]


class _ParserTakenError(Exception):
    """Ends a command before it parses."""

    def __init__(self, *given: Any) -> None:
        super().__init__()


def flags_of(action: argparse.Action) -> str:
    """A flag and its value in code spans, as `--step` `N`."""
    if str(action.metavar).startswith("."):  # of --config.SECTION.KEY=VALUE
        return f"`{action.option_strings[0]}{action.metavar}`"
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    values = () if action.nargs == 0 else value if isinstance(value, tuple) else (value,)
    more = ("...",) if action.nargs in ("+", "*", argparse.REMAINDER) else ()
    return " ".join(f"`{part}`" for part in (*action.option_strings, *values, *more))


def default_of(action: argparse.Action) -> str:
    """The default of a flag, or "required"; empty where it is off or absent."""
    if action.required:
        return "required"
    value = action.default
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    if value in (None, False, "", argparse.SUPPRESS) or isinstance(value, range):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def help_of(action: argparse.Action) -> str:
    """The help of a flag, without a default that the table has."""
    text = re.sub(r"([*<])", r"\\\1", (action.help or "").replace("%%", "%"))
    if default_of(action) not in ("", "required"):
        value = re.escape(default_of(action).strip("`"))
        text = re.sub(rf"[;,] default {value}(?=$|,|;)", "", text)
    return text


def sentence(text: str | None) -> str:
    """A text of a parser in one line, with a full stop."""
    line = " ".join((text or "").split())
    return line if line.endswith((".", ":")) else f"{line}."


def metric_fields() -> str:
    """The page of the fields of metrics.jsonl and summary.json."""
    step, evaluation, summary = (
        table(
            ("field", "unit", "meaning"),
            [(f"`{name}`", field.unit, field.meaning) for name, field in fields.items()],
        )
        for fields in (metrics.STEP_FIELDS, metrics.EVALUATION_FIELDS, metrics.SUMMARY_FIELDS)
    )
    return f"""# Metrics

The fields of `metrics.jsonl` and `summary.json` in a run's folder.

```bash
python -m jaxscale.train --config tiny --workdir runs/metrics --config.run.steps=2
```

`metrics.jsonl` has one JSON object per line. A number that is not finite is null, and `nonfinite`
has its value as text. Formulas of MFU and HFU: [training](training.md).

## A step

{step}
The metrics of a [custom model](own_model.md) are added under the names of its `metrics`.

## An evaluation

Each evaluation adds a record. Fields of a validation set end in `/NAME`, as `eval_loss/code`.

{evaluation}
## The summary

`summary.json` has the fields of the last step and of the evaluation after it. There `step_seconds`
is the median of the last 50 steps; `tokens_per_second`, `loss_tokens_per_second`, `mfu` and `hfu`
are the mean tokens of these steps over that median. In addition:

{summary}{GENERATED}"""


def features() -> str:
    """The page of the features that each layout takes, from the checks before compiling."""
    notes: dict[str, int] = {}
    rows = []
    with prepared_for_eight_devices():
        for feature, settings in FEATURES.items():
            row = [feature]
            for layout in LAYOUTS.values():
                refusal = refusal_of(combined(layout, settings))
                number = notes.setdefault(refusal, len(notes) + 1) if refusal else 0
                row.append(f"[{number}](#refusals)" if number else "yes")
            rows.append(tuple(row))
    columns = [
        (name, " ".join(f"`{key.partition('.')[2]}={value}`" for key, value in settings.items()))
        for name, settings in LAYOUTS.items()
    ]
    listed = "".join(f"{number}. {text}.\n" for text, number in notes.items())
    return f"""# Features and layouts

Which feature goes with which layout, as the checks before compiling answer.

```bash
JAX_NUM_CPU_DEVICES=8 python -m jaxscale.train --config tiny --config.layout.tensor=2 --describe
```

Each cell is a small model on eight CPU devices. A number refers to the refusals below the table;
the error of a run also names the setting to change. Sizes that do not divide, such as heads over
`layout.tensor`, are refused separately ([layouts](layouts.md)), and so are kernels that a device
does not have ([kernels](kernels.md)).

<div class="matrix" markdown="1">

{table(("feature", *LAYOUTS), rows)}
</div>

## Refusals

{listed}
## Settings of the columns

Other settings keep their defaults; `data` takes the remaining devices.

{table(("column", "settings"), columns)}{GENERATED}"""


def combined(layout: Settings, feature: Settings) -> Settings:
    """The settings of a cell."""
    of_layout = {name: value for name, value in layout.items() if name.startswith("layout.")}
    model = of_layout if "model.family" in feature else layout
    return {**BASE, **model, **feature, **of_layout}


@contextlib.contextmanager
def prepared_for_eight_devices() -> Iterator[None]:
    """Eight CPU devices, and parameters of zeros: most of the time to trace a model is its random
    initialisation, which refuses nothing."""
    import jax  # noqa: PLC0415 - after the environment is set
    import jax.numpy as jnp  # noqa: PLC0415

    if jax.device_count() != 8:
        raise SystemExit("error: docs/features.md needs JAX_NUM_CPU_DEVICES=8")

    def zeros(key: Any, shape: tuple[int, ...], std: float) -> Any:
        return jnp.zeros(shape, jnp.float32)

    with mock.patch.object(weights, "exact_normal", zeros), jax.enable_x64(False):
        yield


def refusal_of(settings: Settings) -> str:
    """What the checks before compiling refuse, without the remedy; "" where they pass."""
    sections: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}, "layout": {}, "data": {}}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    try:
        layouts.open_engine(configs.from_dict(sections))
    except ValueError as error:
        return ENDS_HERE.split(str(error))[0]
    return ""


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)


def cell(text: str) -> str:
    """The text of a cell in one line; an empty cell is a space."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


PAGES = {
    "api": api,
    "commands": commands,
    "metrics": metric_fields,
    "features": features,
}
"""Page of docs/ -> the function that writes it."""

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    sys.exit(main())
