"""Compiles models for absent hardware, and writes the tables of docs/compile_ahead.md.

python tools/aot_table.py [--only WORD] [--fresh]

Each case is a separate run of `python -m jaxscale.aot`. Its numbers are kept in
tools/aot_table.json, so that an interrupted run continues and one case can be compiled again. The
page lists the cases with `listed`; the suite compares the planner with all of them.
"""

import argparse
import importlib.metadata
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

from jaxscale.compiled.topology import platform_of

ROOT = pathlib.Path(__file__).parent.parent
KEPT = ROOT / "tools" / "aot_table.json"
PAGE = ROOT / "docs" / "compile_ahead.md"
BEGIN, END = "<!-- aot table -->", "<!-- end of aot table -->"
BEGIN_STAGES, END_STAGES = "<!-- zero stages -->", "<!-- end of zero stages -->"
MINIMAL = "save:query,key,value,attention_out,mlp_gate,mlp_up"
"""Remat that saves the output of every matmul, as the peer's "minimal" does."""


ADAMW = "optimizer.name=adamw"


class Case(NamedTuple):
    """A model, a topology, sequences per device and step, and the rest of the layout."""

    model: str
    topology: str
    sequences: float
    layout: str  # "tensor=4 remat=full"; settings of other sections with theirs: "run.steps=1"
    listed: bool = True  # on the page

    @property
    def name(self) -> str:
        """The key in the file of results."""
        return f"{self.model} {self.topology} {self.sequences:g} {self.layout}"


CASES = (
    Case("llama2_7b", "v5p:4x4x4", 4, "remat=full"),
    Case("llama2_7b", "v5p:4x4x4", 4, f"remat={MINIMAL}"),
    Case("llama2_7b", "v5p:4x4x4", 16, "remat=full microbatches=4 accumulation=layered"),
    Case("llama2_7b", "v5p:4x4x4", 16, "remat=full microbatches=4", listed=False),
    Case("llama2_7b", "v5p:4x4x4", 4, "remat=full tensor=4"),
    Case("llama2_7b", "v5p:4x4x4", 4, "remat=full data=4", listed=False),
    Case("llama2_7b", "v5p:4x4x4", 4, "remat=full offload=optimizer", listed=False),
    Case("llama2_7b", "v5p:4x4x4", 0.25, "remat=full context=8"),
    Case("llama2_7b", "v5p:4x4x4", 4, "remat=full pipeline=4 microbatches=16 schedule=1f1b"),
    Case(
        "llama2_7b",
        "v5p:4x4x4",
        4,
        "remat=full pipeline=4 microbatches=16 schedule=breadth_first virtual_stages=4",
        listed=False,
    ),
    Case(
        "llama2_7b",
        "v5p:4x4x4",
        4,
        "remat=full pipeline=4 microbatches=16 schedule=1f1b pipeline_gather=layer",
    ),
    Case(
        "llama2_7b",
        "v5p:4x4x4",
        4,
        "remat=full pipeline=4 microbatches=16 schedule=interleaved virtual_stages=2 "
        "pipeline_gather=layer",
    ),
    Case("llama2_7b", "v5e:16x16", 4, "remat=full"),
    Case("llama2_7b", "v5e:16x16", 4, f"remat={MINIMAL}"),
    Case("llama2_7b", "v6e:16x16", 4, "remat=full"),
    Case("llama2_7b", "v4:4x4x4", 4, "remat=full", listed=False),
    Case("llama2_7b", "a100-80:8x8", 4, "remat=full"),
    Case("llama2_7b", "h100:8x8", 4, "remat=full", listed=False),
    Case("llama2_7b", "b200:1x8", 4, "remat=full"),
    Case("llama2_13b", "a100-80:8x8", 2, "remat=full", listed=False),
    Case("llama2_70b", "v5p:8x8x8", 4, "remat=full tensor=4"),
    Case("llama2_70b", "h200:64x8", 1, "remat=full tensor=8", listed=False),
    Case("llama3_8b", "h200:1x8", 1, "remat=full"),
    Case("llama3_8b", "h200:8x8", 2, "remat=full"),
    Case("llama3_8b", "h200:64x8", 2, "remat=full", listed=False),
    Case(
        "llama3_8b", "h200:8x8", 8, "remat=full microbatches=4 accumulation=layered", listed=False
    ),
    Case("llama3_8b", "h200:8x8", 8, "remat=full microbatches=4", listed=False),
    Case("llama3_8b", "h200:8x8", 2, f"remat={MINIMAL}"),
    Case("llama3_8b", "h200:8x8", 2, "remat=full tensor=8", listed=False),
    Case("llama3_8b", "h200:8x8", 2, "remat=full data=8", listed=False),
    Case("llama3_8b", "h200:8x8", 0.25, "remat=full context=8"),
    Case(
        "llama3_8b",
        "h200:8x8",
        2,
        "remat=full pipeline=4 microbatches=8 schedule=1f1b",
        listed=False,
    ),
    Case(
        "llama3_8b",
        "h200:8x8",
        2,
        "remat=full pipeline=4 microbatches=8 schedule=breadth_first virtual_stages=4",
        listed=False,
    ),
    Case("gpt_22b", "h100:4x8", 1, "remat=full", listed=False),
    Case("gpt_175b", "v5p:8x8x16", 1, "remat=full"),
    Case("gpt_175b", "h200:128x8", 1, "remat=full tensor=8", listed=False),
    Case(
        "gpt_1t",
        "v5p:16x16x8",
        0.25,
        "remat=full fsdp=4 tensor=8 pipeline=64 microbatches=128 schedule=1f1b zero_stage=1",
    ),
    Case("gpt_22b", "v5p:4x4x8", 2, "remat=full tensor=4", listed=False),
    Case(
        "llama3_8b",
        "v5p:4x4x4",
        2,
        "remat=full pipeline=4 microbatches=8 schedule=1f1b zero_stage=1",
        listed=False,
    ),
    Case("llama3_8b", "v6e:16x16", 1, "remat=save:query,key,value,attention"),
    Case("llama32_1b", "v5e:4x4", 4, "remat=full"),
    Case("llama32_1b", "a100-40:1x8", 2, "remat=full", listed=False),
    Case("llama2_70b", "h100:64x8", 2, "remat=save:query,key,value,attention,attention_out data=4"),
    Case(
        "llama2_7b",
        "h100:8x8",
        4,
        "remat=keep:2 pipeline=4 tensor=2 microbatches=16 schedule=zb_h1 zero_stage=1",
        listed=False,
    ),
    Case(
        "llama2_7b",
        "v5p:4x4x4",
        4,
        "remat=keep:2 pipeline=4 microbatches=16 schedule=1f1b",
        listed=False,
    ),
    Case("mixtral_8x7b", "v5p:4x4x4", 4, "remat=full expert=1"),
    Case("mixtral_8x7b", "v5p:4x4x4", 4, "remat=full expert=1 model.capacity_factor=1.25"),
    Case("mixtral_8x7b", "v5p:4x4x4", 4, "remat=full expert=8"),
    Case("deepseek_v3", "v5p:8x8x8", 1, "remat=full expert=8"),
    Case("qwen3_30b_a3b", "v5p:4x4x4", 4, "remat=full expert=1"),
    Case("llama3_8b", "v5p:4x4x4", 0.125, "remat=full context=8 data.seq_len=32768"),
    Case("llama3_8b", "v5p:4x4x4", 0.125, "remat=full context=8 data.seq_len=131072"),
    Case("gemma2_9b", "v6e:8x8", 1, "remat=full"),
)


STAGES = tuple(
    Case("mt5_xxl", "a100-80:8x8", 16, f"remat=full microbatches=8 zero_stage={stage} {ADAMW}")
    for stage in range(4)
)
"""As in the study of ZeRO stages on mT5 (arXiv 2310.05350): its largest model, its GPUs and the
largest of its numbers of nodes."""
STUDY_SECONDS = ("-", "-", "31.4", "38.9")
"""Of a step on 8 nodes, as quoted second-hand; the study gives no bytes."""


def main() -> int:
    """Compiles the cases without a result, and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="cases with WORD in their name")
    parser.add_argument("--fresh", action="store_true", help="compile cases with a result again")
    options = parser.parse_args()
    if not any(options.only in case.name for case in (*CASES, *STAGES)):
        parser.error(f"--only {options.only} matches no case; give a part of a name in CASES")
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for case in (*CASES, *STAGES):
        if options.only in case.name and (options.fresh or case.name not in kept):
            print(case.name, flush=True)
            kept[case.name] = compiled(case)
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    text = put(PAGE.read_text(), BEGIN, table(kept), END)
    PAGE.write_text(put(text, BEGIN_STAGES, stage_table(kept), END_STAGES))
    return 0


def put(text: str, begin: str, table: str, end: str) -> str:
    """Replaces the table between two marks."""
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{table}\n{end}{after}"


def compiled(case: Case) -> dict[str, Any]:
    """The numbers of a case, or {"refusal": ...} in one line."""
    settings = dict(setting.split("=", 1) for setting in case.layout.split())
    others = {name: settings.pop(name) for name in list(settings) if "." in name}
    settings = {"data": "1", "fsdp": "-1", "zero_stage": "3", "microbatches": "1"} | settings
    settings = {f"layout.{name}": value for name, value in settings.items()} | others
    batch = round(case.sequences * num_devices(case.topology))
    with tempfile.TemporaryDirectory() as folder:
        written = pathlib.Path(folder) / "numbers.json"
        command = [
            sys.executable,
            "-m",
            "jaxscale.aot",
            "--config",
            case.model,
            "--topology",
            case.topology,
            "--json",
            str(written),
            f"--config.data.global_batch_size={batch}",
            "--skip_memory_check",
            *(f"--config.{key}={value}" for key, value in settings.items()),
        ]
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        processor = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
        if not written.exists():
            return {"refusal": (run.stderr.strip().splitlines() or ["no message"])[-1]}
        numbers = json.loads(written.read_text())
    about = {"config": case.model, "global_batch_size": batch, "others": others}
    about["processor_seconds"] = processor
    if platform_of(case.topology) == "tpu":
        about["libtpu"] = importlib.metadata.version("libtpu")
    return about | {key: numbers[key] for key in numbers if key != "buffers"}


def num_devices(topology: str) -> int:
    """Devices of a topology with one device per chip."""
    count = 1
    for size in topology.split(":")[1].split("x"):
        count *= int(size)
    return count


def table(kept: dict[str, dict[str, Any]]) -> str:
    """The listed results as a table in Markdown."""
    lines = [
        "| model | topology | sequences a device | layout | arguments, GB | temporaries, GB "
        "| limit, GB | estimate, s | overlapped, % | hidden, % |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    shown = [case for case in CASES if case.listed and case.name in kept]
    lines += ["| " + " | ".join(row(case, kept[case.name])) + " |" for case in shown]
    versions = sorted({kept[case.name]["libtpu"] for case in shown if "libtpu" in kept[case.name]})
    return "\n".join([*lines, "", f"TPUs by libtpu {', '.join(versions)}."])


def stage_table(kept: dict[str, dict[str, Any]]) -> str:
    """The steps of `STAGES` as a table in Markdown, with ZeRO's formulas and the study."""
    lines = [
        "| ZeRO stage | arguments, GB | temporaries, GB | total, GB | limit, GB "
        "| states at 16 B a parameter, GB | the study, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage, case in enumerate(STAGES):
        if case.name in kept:
            numbers = kept[case.name]
            keys = ("argument_bytes", "temp_bytes", "peak_bytes")
            cells = [f"{numbers[key] / 1e9:.1f}" for key in keys]
            states = zero_bytes(12_921_057_280, stage, num_devices(case.topology))
            cells += [limit(numbers), f"{states / 1e9:.1f}", STUDY_SECONDS[stage]]
            lines.append(" | ".join([f"| {stage}", *cells]) + " |")
    return "\n".join(lines)


def zero_bytes(params: int, stage: int, ranks: int) -> float:
    """Bytes of state per device by ZeRO's formulas (arXiv 1910.02054, section 3.1): weights and
    gradients in 16 bits, master weights and Adam's moments in 32."""
    whole = (16, 4, 2, 0)[stage]
    return params * (whole + (16 - whole) / ranks)


def limit(numbers: dict[str, Any]) -> str:
    """The GB that a program may use, and by how many a step that does not fit exceeds them."""
    text = f"{numbers['limit_bytes'] / 1e9:.1f}"
    missing = numbers["peak_bytes"] - numbers["limit_bytes"]
    return text if numbers["fits"] else f"{text}, exceeded by {missing / 1e9:.1f}"


def row(case: Case, numbers: dict[str, Any]) -> list[str]:
    """The cells of a case."""
    others = [setting for setting in case.layout.split() if not setting.startswith("fsdp=")]
    layout = " ".join(others)
    first = [case.model, case.topology, f"{case.sequences:g}"]
    if "refusal" in numbers:
        return [*first, layout, "-", "-", "refused", "-", "-", "-"]
    sizes = [f"{numbers[key] / 1e9:.2f}" for key in ("argument_bytes", "temp_bytes")]
    seconds = numbers["optimal_seconds"]
    return [
        *first,
        f"fsdp={numbers['layout']['fsdp']} {layout}",
        *sizes,
        limit(numbers),
        f"{seconds:.2f}" if seconds else "-",
        *hidden(numbers),
    ]


def hidden(numbers: dict[str, Any]) -> tuple[str, str]:
    """The share of the bytes of collectives that overlap with matmuls, and of their seconds on the
    links that matmuls hide, in percent.

    A result from before runs were counted one by one has neither ("?"), unless no matmul overlaps
    any collective.
    """
    if "beside_bytes" not in numbers:
        overlapped = any(one["async"] and one["beside_flops"] for one in numbers["collectives"])
        return ("?", "?") if overlapped else ("0", "0") if numbers["collectives"] else ("-", "-")
    return (
        share(numbers["beside_bytes"], numbers["collective_bytes"]),
        share(max(0, numbers["link_seconds"] - numbers["wait_seconds"]), numbers["link_seconds"]),
    )


def share(part: float, whole: float) -> str:
    """In percent."""
    return f"{100 * part / whole:.0f}" if whole else "-"


if __name__ == "__main__":
    sys.exit(main())
