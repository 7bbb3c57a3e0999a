"""python tools/waterfall.py: draws docs/waterfall.png, the time breakdown of predicted steps.

docs/zb_h1.png is drawn by the schedule command: `zb_h1 --stages 4 --microbatches 8 --png FILE`.
"""

import argparse
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from jaxscale.planner.plan_layouts import plan_layouts  # noqa: E402
from tools.notebooks import plots  # noqa: E402

PINS = {
    "fsdp 64": {"fsdp": 64},
    "fsdp 8 x tensor 8": {"fsdp": 8, "tensor": 8},
    "fsdp 16 x pipeline 4, 1F1B": {"fsdp": 16, "pipeline": 4, "schedule": "1f1b"},
}
"""Title -> fixed fields of the layout; the planner chooses the others."""


def main() -> None:
    """Plans Llama 3 8B on 64 H100s in each, and draws the terms of a step."""
    argparse.ArgumentParser(
        description="Draws docs/waterfall.png, the time breakdown of predicted steps."
    ).parse_args()
    plans = {
        title: plan_layouts(
            str(ROOT / "configs/llama3_8b.py"), "h100-sxm", 64, pins={"context": 1, **pins}, top=1
        ).plans[0]
        for title, pins in PINS.items()
    }
    plots.step_time_figure(plans).savefig(ROOT / "docs" / "waterfall.png")


if __name__ == "__main__":
    main()
