"""Predicted memory against the compiler's, over the table of `tools/aot_table.py`."""

import dataclasses
import json
import pathlib
import statistics
from typing import NamedTuple

from jaxscale import config as configs
from jaxscale.config import Config
from jaxscale.layout import Layout
from jaxscale.planner.memory.step import step_memory

TPUS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "v7x")
"""Topologies of TPUs."""


class MemoryComparison(NamedTuple):
    """Peak memory per device of one case, predicted and compiled."""

    name: str
    back_end: str
    predicted_bytes: int
    compiled_bytes: int

    @property
    def error(self) -> float:
        """Relative error, positive where the prediction is higher."""
        return self.predicted_bytes / self.compiled_bytes - 1


def compare_table(path: str | pathlib.Path) -> list[MemoryComparison]:
    """Every case of the table that compiled; refused cases have no memory figure."""
    pairs = []
    for name, case in json.loads(pathlib.Path(path).read_text()).items():
        if "refusal" not in case:
            back_end = "tpu" if case["topology"].partition(":")[0] in TPUS else "gpu"
            predicted = step_memory(case_config(case), back_end, own_host=True).peak
            pairs.append(MemoryComparison(name, back_end, int(predicted), case["peak_bytes"]))
    return pairs


def case_config(case: dict) -> Config:
    """The config that a case compiled."""
    others = [f"{name}={value}" for name, value in case.get("others", {}).items()]
    config = configs.load(case["config"], others)
    data = dataclasses.replace(config.data, global_batch_size=case["global_batch_size"])
    # The table may have fields that no longer exist: they were at their defaults.
    known = {field.name for field in dataclasses.fields(Layout)} & set(case["layout"])
    layout = Layout(**{name: case["layout"][name] for name in known})
    return dataclasses.replace(config, data=data, layout=layout)


def comparison_text(pairs: list[MemoryComparison]) -> str:
    """A line for each case, and the median and worst error."""
    lines = [
        f"{pair.name:72} {pair.predicted_bytes / 1e9:8.2f} GB {pair.compiled_bytes / 1e9:8.2f} GB "
        f"{100 * pair.error:+6.1f} %"
        for pair in pairs
    ]
    errors = [abs(pair.error) for pair in pairs]
    return "\n".join(
        [
            f"{'case':72} {'predicted':>11} {'compiled':>11} {'error':>8}",
            *lines,
            f"median {100 * statistics.median(errors):.1f} %, worst {100 * max(errors):.1f} % "
            f"of {len(pairs)} cases",
        ]
    )
