"""Formulas of memory against ahead-of-time compilation for absent hardware: the table of
`tools/aot_table.py`."""

import dataclasses
import json
import pathlib
import statistics
from typing import NamedTuple

import pytest

from jaxscale import config as configs
from jaxscale.compiled.topology import platform_of
from jaxscale.config import Config
from jaxscale.config.layout import Layout
from jaxscale.planner.memory.step import step_memory

pytestmark = pytest.mark.compiles


class Comparison(NamedTuple):
    """Peak memory per device of one case, predicted and compiled."""

    back_end: str
    predicted_bytes: float
    compiled_bytes: int

    @property
    def error(self) -> float:
        """Relative error, positive where the prediction is higher."""
        return self.predicted_bytes / self.compiled_bytes - 1


def compare(case: dict) -> Comparison:
    back_end = platform_of(case["topology"])
    predicted = step_memory(case_config(case), back_end, own_host=True).peak
    return Comparison(back_end, predicted, case["peak_bytes"])


def case_config(case: dict) -> Config:
    """The config that a case compiled."""
    others = [f"{name}={value}" for name, value in case.get("others", {}).items()]
    config = configs.load(case["config"], others)
    data = dataclasses.replace(config.data, global_batch_size=case["global_batch_size"])
    # The table may have fields that no longer exist: they were at their defaults.
    known = {field.name for field in dataclasses.fields(Layout)} & set(case["layout"])
    layout = Layout(**{name: case["layout"][name] for name in known})
    return dataclasses.replace(config, data=data, layout=layout)


TABLE = json.loads(pathlib.Path("tools/aot_table.json").read_text())
# Refused cases have no memory figure.
PAIRS = {name: compare(case) for name, case in TABLE.items() if "refusal" not in case}


def test_predicted_memory_is_what_compilers_say():
    """In the median, over every case of the table."""
    assert len(PAIRS) >= 24
    assert {pair.back_end for pair in PAIRS.values()} == {"tpu", "gpu"}
    errors = {name: abs(pair.error) for name, pair in PAIRS.items()}
    assert statistics.median(errors.values()) <= 0.05, errors


@pytest.mark.parametrize("name", PAIRS)
def test_no_case_is_far_off(name):
    assert abs(PAIRS[name].error) <= 0.15, PAIRS[name]


def test_ranks_of_tensor_are_right_on_tpus():
    errors = [
        abs(pair.error)
        for name, pair in PAIRS.items()
        if pair.back_end == "tpu" and "tensor=" in name
    ]
    assert len(errors) == 4
    assert max(errors) <= 0.06
