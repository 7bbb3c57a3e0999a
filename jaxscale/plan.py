"""Layout search: ranks the layouts of a model on a cluster by predicted step time.

python -m jaxscale.plan --config configs/X.py --hardware NAME --devices N

It needs no device, and imports JAX only to trace, to compile (`--prove`) or to measure. The
function for programs is `jaxscale.plan_layouts`.
"""

import argparse
import dataclasses
import pathlib
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

from etils import epy

from jaxscale import command_line
from jaxscale import config as configs
from jaxscale.config import Config
from jaxscale.config.layout import Layout
from jaxscale.config.schedule_spec import AUTO
from jaxscale.planner.cost.cluster import make_cluster
from jaxscale.planner.plan_layouts import plan_layouts, run_config
from jaxscale.planner.report import html_report, json_report, tensor_grids, text_report, why_not
from jaxscale.planner.report.write_config import write_plan
from jaxscale.planner.search.plan import Plan, RankedPlans, predict_plan
from jaxscale.planner.search.search import search_layouts
from jaxscale.planner.search.space import check_fields, check_pins

with epy.lazy_imports():  # JAX, and optional packages
    from jaxscale.autotune import run
    from jaxscale.compiled import prove_plans, topology

MOST_DEVICES = 2**20
MOST_TOKENS = 2**40
"""Limits against mistyped numbers, ten times the largest machines and a million times the largest
steps: the divisors of an arbitrary number can take forever to find."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    heads = {word.partition("=")[0].partition(".")[0] for word in words}
    if "--validate" in heads:
        command_line.refuse(
            "--validate is a tool of the repository: python tools/planner_validation/score.py CSV"
        )
    options, overrides = command_line.parse(_parser(), words, configs.leaves())
    with command_line.refusals():
        _check_read([name for name in vars(options) if f"--{name}" in heads], overrides)
        _check(options)
        if options.measure:
            return _measure(options, overrides)
        model, pins = _model(options, overrides), parse_pins(options.pin)
        topology = _topology(options) if options.prove else ""
        answer = plan_layouts(
            model,
            options.hardware,
            options.devices,
            pins=pins,
            max_memory_bytes=parse_bytes(options.max_memory),
            batch_tokens=parse_tokens(options.batch_tokens),
            seq_len=options.seq_len,
            top=options.top,
        )
        _print_answer(answer, options)
        _write_answer(answer, options)
    numbers = json_report.ranking_json(answer)
    if options.prove:
        numbers["proved"] = prove_plans.prove_plans(answer.plans[: options.prove], topology)
    command_line.write_json(options.json, numbers)
    if options.prove and not any(one["compiled_bytes"] for one in numbers["proved"]):
        return 1
    return 0


def _write_answer(answer: RankedPlans, options: argparse.Namespace) -> None:
    if options.write:
        write_plan(options.write, answer.plans[0], options.config or options.model)
        written = shlex.quote(str(options.write))
        print(f"\nwrote {options.write}: python -m jaxscale.train --config {written}")
    if options.report:
        options.report.write_text(html_report.plan_page(answer))
        print(f"\nwrote {options.report}")


def _print_answer(answer: RankedPlans, options: argparse.Namespace) -> None:
    """Prints the table of plans, the best one, and the answers about others."""
    print(text_report.ranking_text(answer))
    print(f"\nStep time of the best plan\n{text_report.waterfall_text(answer.plans[0])}")
    print(f"\nIts memory per device\n{text_report.memory_text(answer.plans[0])}")
    if grids := tensor_grids.grids_text(answer.query, answer.plans[0]):
        print(
            "\nBytes that a device sends over its tensor ranks, by their grid (a layer's for "
            f"one micro-batch)\n{grids}"
        )
    if options.why_not:
        print("\n" + why_not.explain_why_not(answer, parse_pins(split_pins(options.why_not))))
    if options.compare:
        print("\n" + text_report.comparison(*(_named(answer, name) for name in options.compare)))


READ_BY_MEASURE = ("measure", "config", "pin", "trials", "storage", "trial_seconds", "json")
"""Flags that --measure reads."""

READ_WITH = {
    "trials": "measure",
    "storage": "measure",
    "trial_seconds": "measure",
    "topology": "prove",
}
"""Flag -> the flag that it needs."""


def _check_read(given: Sequence[str], overrides: Sequence[str]) -> None:
    """Refuses flags and overrides that nothing would read.

    Args:
      given: the flags on the command line.

    Raises:
      ValueError: names the flag and its replacement.
    """
    for name in given:
        if "measure" in given and name not in READ_BY_MEASURE:
            raise ValueError(f"--{name} is not read with --measure; leave one of them out")
        if name in READ_WITH and READ_WITH[name] not in given:
            raise ValueError(
                f"--{name} is read with --{READ_WITH[name]}; add that, or leave it out"
            )
    for override in overrides:
        name, _, value = override.partition("=")
        # A search by measuring starts from the config's own layout.
        if name.partition(".")[0] == "layout" and "measure" not in given:
            key = name.partition(".")[2]
            instead = f"use --pin {key}={value}" if key and value != AUTO else "leave it out"
            raise ValueError(
                f"--config.{override}: the layout of a config is not read here, the planner "
                f"chooses it; {instead}"
            )


def _check(options: argparse.Namespace) -> None:
    """Refuses flags that would otherwise fail after the search, which may take minutes.

    Raises:
      ValueError: a plan that will not be in the table, or settings that no layout can have.
    """
    for name in ("hardware", "devices"):
        if getattr(options, name) is None and not options.measure:
            raise ValueError(f"--{name} is missing; see --help for an example")
    for name in options.compare:
        if not _is_rank(name):
            check_fields(parse_pins(split_pins(name)), "--compare")
        elif not 1 <= int(name) <= options.top:
            raise ValueError(
                f"--compare {name}: plans 1 to {options.top} are shown; raise --top for more"
            )
    if options.prove > options.top:
        raise ValueError(
            f"--prove {options.prove}: plans 1 to {options.top} are shown; raise --top for more"
        )
    if options.why_not:
        check_fields(parse_pins(split_pins(options.why_not)), "--why_not")


def _is_rank(name: str) -> bool:
    return re.fullmatch(r"[+-]?\d+", name) is not None


def _model(options: argparse.Namespace, overrides: Sequence[str]) -> Config | str:
    """The config, or the name or file of a model described by its sizes."""
    if not options.config and not options.model:
        raise ValueError("--config FILE or --model NAME is missing; see --help for an example")
    if not options.model:
        return configs.load(options.config, overrides)
    if not options.config and (config := run_config(options.model, overrides)):
        return config
    if options.config or overrides or ".py" in options.model:
        raise ValueError(
            f"--model {options.model} does not go with a config; give --config FILE, or --model "
            "NAME with --seq_len and --batch_tokens"
        )
    for name in ("write", "prove"):
        if getattr(options, name):
            raise ValueError(
                f"--{name} needs a model that this version trains, described by a config; "
                f"leave it out with --model {options.model} (--json FILE keeps the plan), "
                "or give --config FILE"
            )
    return options.model


def _topology(options: argparse.Namespace) -> str:
    """The topology to compile for.

    Raises:
      ValueError: it is not known, there is none for the hardware, or its number of devices is not
        that of the plans.
    """
    name = options.topology or topology.topology_name(
        make_cluster(options.hardware, options.devices)
    )
    topology.leave_hardware_alone()
    try:
        found = len(topology.open_topology(name).devices)
    except ModuleNotFoundError as error:
        command_line.refuse(str(error))
    if found != options.devices:
        raise ValueError(
            f"--topology {name} has {found} devices, and the plans are for --devices "
            f"{options.devices}; give a topology with that number"
        )
    return name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxscale.plan",
        description="Ranks the layouts of a model on a cluster by predicted step time, with "
        "memory, energy and cost, and explains them. Needs no device.",
        epilog="Examples: python -m jaxscale.plan --config llama2_70b --hardware "
        "h100-sxm --devices 512 --pin tensor=8, or with --model mixtral-8x7b --seq_len 4096 "
        "--batch_tokens 4M instead of the config",
    )
    _add_model_flags(parser.add_argument)
    _add_search_flags(parser.add_argument)
    _add_report_flags(parser.add_argument)
    _add_check_flags(parser.add_argument)
    return parser


def _add_model_flags(add: Callable[..., Any]) -> None:
    """Adds the flags of the model and the cluster."""
    add("--config", metavar="FILE", help="a file, or the name of a shipped config; not its layout")
    add(
        "--model",
        default="",
        metavar="NAME",
        help="instead of --config: a known model, a JSON file of sizes, or a run's config.json",
    )
    add(
        "--seq_len",
        type=command_line.whole(1, MOST_TOKENS),
        default=0,
        metavar="N",
        help="sequence length of a --model; default that of the model",
    )
    add("--hardware", metavar="NAME", help="a device of hardware.csv, or a CSV or JSON file")
    add(
        "--devices",
        type=command_line.whole(1, MOST_DEVICES),
        metavar="N",
        help="number of devices",
    )
    add("--batch_tokens", default="", metavar="4M", help="tokens per step; K is 1024, M is 1024 K")


def _add_search_flags(add: Callable[..., Any]) -> None:
    """Adds the flags that restrict the search."""
    add(
        "--pin",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="fix fields of the layout: tensor=8 remat=full",
    )
    add("--max_memory", default="", metavar="70GB", help="memory per device that a plan may use")
    add("--top", type=command_line.whole(1, 1000), default=10, metavar="N", help="plans to show")


def _add_report_flags(add: Callable[..., Any]) -> None:
    """Adds the flags of explanations and output files."""
    file = command_line.output_file
    add(
        "--why_not",
        default="",
        metavar="tensor=4,pipeline=8",
        help="explain why this layout is not best or does not fit, with the smallest change",
    )
    add(
        "--compare",
        nargs=2,
        default=[],
        metavar=("A", "B"),
        help="compare two plans term by term, by rank in the table or as tensor=4,pipeline=8",
    )
    add("--write", type=file, metavar="FILE", help="write a config that trains with the best plan")
    add("--report", type=file, metavar="FILE", help="write an HTML page with tables and figures")
    add("--json", type=file, metavar="FILE", help="write the numbers to a file")


def _add_check_flags(add: Callable[..., Any]) -> None:
    """Adds the flags of compiled plans and of trials on the local devices."""
    add(
        "--prove",
        type=command_line.whole(1, 1000),
        default=0,
        metavar="N",
        help="compile the best N plans",
    )
    add("--topology", default="", metavar="NAME", help="the topology to compile for: h100:64x8")
    add(
        "--measure",
        action="store_true",
        help="time layouts on the local devices, each in its own process",
    )
    add(
        "--trials",
        type=command_line.whole(1, 100_000),
        default=40,
        metavar="N",
        help="number of trials, earlier ones included",
    )
    add(
        "--storage",
        type=pathlib.Path,
        metavar="FILE.db",
        help="database of trials; a search resumes from it",
    )
    add(
        "--trial_seconds",
        type=command_line.real(0, 1e6, above=True),
        default=600,
        metavar="S",
        help="time limit of a trial",
    )


_PINNED: dict[Any, tuple[str, str]] = {
    int: (r"-?\d+", "a whole number"),
    bool: ("True|False", "True or False"),
}
"""Type -> the pattern of its values, and the description in errors."""


def parse_pins(texts: Sequence[str]) -> dict[str, Any]:
    """["tensor=8", "remat=full"] -> {"tensor": 8, "remat": "full"}.

    Raises:
      ValueError: one is not of that form, or two name the same field.
    """
    pins: dict[str, Any] = {}
    types = {field.name: field.type for field in dataclasses.fields(Layout)}
    for text in texts:
        name, equals, value = text.removeprefix("layout.").partition("=")
        value_type = types.get(name)
        if not equals or not value:
            raise ValueError(
                f"{text!r} is not KEY=VALUE, such as tensor=8, remat=full or overlap_experts=True"
            )
        pattern, allowed = _PINNED.get(value_type, (".+", ""))
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{text!r}: layout.{name} can be {allowed}")
        if name in pins:
            raise ValueError(f"{text!r}: {name} is already {pins[name]}; give it once")
        if value_type is bool:
            pins[name] = value == "True"
        else:
            pins[name] = int(value) if value_type is int else value
    return pins


def split_pins(text: str) -> list[str]:
    """Splits at the commas before a key; values may contain commas."""
    return re.split(r",(?=\w+=)", text)


def parse_bytes(text: str) -> float:
    """ "70GB" -> 70e9, "64GiB" -> 64 * 2**30, "" -> 0.

    Raises:
      ValueError: not a size, or 0.
    """
    if not text:
        return 0.0
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", text)
    size = float(matched[1]) * {"GB": 1e9, "GiB": 2.0**30}[matched[2]] if matched else 0.0
    if not size:
        raise ValueError(f"--max_memory {text!r} is not a size such as 70GB or 64GiB")
    return size


def parse_tokens(text: str) -> int:
    """ "4M" -> 4 * 2**20, "" -> 0.

    Raises:
      ValueError: not a number of tokens, 0, or too large.
    """
    if not text:
        return 0
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)([KM]?)", text)
    tokens = float(matched[1]) * {"": 1, "K": 2**10, "M": 2**20}[matched[2]] if matched else 0.0
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(
            f"--batch_tokens {text!r} is not a number such as 4M, 512K or 4194304, up to 1048576M"
        )
    return round(tokens)


def _named(answer: RankedPlans, name: str) -> Plan:
    """A plan by its rank in the table, or the best one with given settings."""
    if _is_rank(name):
        if not 1 <= int(name) <= len(answer.plans):
            raise ValueError(f"--compare {name}: the table has plans 1 to {len(answer.plans)}")
        return answer.plans[int(name) - 1]
    pins = {**answer.query.pins, **parse_pins(split_pins(name))}
    query = dataclasses.replace(answer.query, pins=pins)
    check_pins(query)
    found = search_layouts(query, 1)
    if not found.layouts:
        raise ValueError(f"--compare {name}: no such layout fits; see --why_not {name}")
    return predict_plan(query, found.layouts[0])


def _measure(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if not options.config:
        raise ValueError("--config is missing; see --help for an example")
    config = configs.load(options.config, overrides)
    try:
        measure = run.measure
    except ModuleNotFoundError as error:
        command_line.refuse(
            f"--measure needs optional packages: uv sync --inexact --extra measure ({error})"
        )
    command_line.log_to_stdout()
    return measure(options, config, parse_pins(options.pin))


if __name__ == "__main__":
    command_line.run(main)
