"""python tools/collectives.py [--config FILE] [--devices 8] [--config.layout.fsdp=4 ...]

Collectives of a train step by ZeRO stage: mesh axis, count and bytes of each in the compiled
program, compared with theory for those over data and fsdp. Virtual CPU devices.
"""

import argparse
import collections
import os
import pathlib
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout need not be installed

from jaxscale import command_line  # noqa: E402 - which imports no JAX


def main(argv: Sequence[str]) -> int:
    """Returns 1 if collectives over data or fsdp differ from theory."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--devices", type=command_line.whole(1, 4096), default=8)
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=range(4))
    options, overrides = command_line.parse(parser, argv)
    os.environ["JAX_NUM_CPU_DEVICES"] = str(options.devices)
    os.environ["JAX_PLATFORMS"] = "cpu"

    from jaxscale.formatting import human_bytes, table  # noqa: PLC0415 - after the devices are set

    agree = True
    for stage in options.stages:
        rows, agrees = stage_rows(options.config, [*overrides, f"layout.zero_stage={stage}"])
        agree &= agrees
        print(f"\nzero {stage}: sent in a step by each device")
        heads = ("collective", "over", "arrays", "theory", "bytes", "theory")
        print(
            table(
                [
                    heads,
                    *(
                        (kind, axes, f"{arrays:g}", theory, human_bytes(size), expected)
                        for kind, axes, arrays, theory, size, expected in rows
                    ),
                ]
            )
        )
    print(
        "\nover tensor and context: the activations of a layer's matmuls and of attention, and "
        "sums; theory here is of data and fsdp"
    )
    return 0 if agree else 1


def stage_rows(path: str, overrides: Sequence[str]) -> tuple[list[tuple], bool]:
    """A row for each type of collective and axes, and whether theory and program agree, except for
    scalars."""
    from jaxscale import config as configs  # noqa: PLC0415
    from jaxscale.compiled import collectives, hlo  # noqa: PLC0415
    from jaxscale.formatting import human_bytes  # noqa: PLC0415
    from jaxscale.run.setup.layout import open_engine  # noqa: PLC0415
    from tools.zero_traffic import step_traffic  # noqa: PLC0415

    with command_line.refusals():
        config, engine = open_engine(configs.load(path, overrides))
    lowered = engine.step.lower(engine.abstract_state, engine.abstract_batch)
    program = hlo.parse_hlo(lowered.compile().as_text())

    found = collections.defaultdict(lambda: [0.0, 0.0])
    theory = collections.defaultdict(lambda: [0.0, 0.0])
    for one in collectives.collectives(program, config.layout.sizes):
        found[one.kind, one.axes][0] += one.count * one.arrays
        found[one.kind, one.axes][1] += one.count * one.num_bytes
    for one in step_traffic(config):
        theory[one.kind, one.axes][0] += one.arrays
        theory[one.kind, one.axes][1] += one.num_bytes
    rows, agree = [], True
    for key in sorted(found.keys() | theory.keys()):
        (kind, axes), (arrays, size) = key, found[key]
        if set(axes) <= {"data", "fsdp", "expert"} and "all-to-all" not in kind:
            expected = theory[key]
            scalars = arrays - expected[0]
            agree &= 0 <= scalars <= 20 and 0 <= size - expected[1] <= 8 * scalars
            rows.append(
                (kind, "+".join(axes), arrays, f"{expected[0]:g}", size, human_bytes(expected[1]))
            )
        else:
            rows.append((kind, "+".join(axes), arrays, "", size, ""))
    return rows, bool(agree)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
