"""Compile time of a step by number of layers and of devices.

python tools/aot_compile_time.py [--repeat 3] [--json FILE] [--png FILE]

A step of fixed width is compiled for absent TPUs: 8 to 128 layers on 8 chips, and 8 layers on 8 to
4,096 chips. Seconds are processor time of all threads, medians of several runs, to be robust
against other load on the machine.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

import matplotlib.pyplot as plt

from jaxscale import command_line
from jaxscale.compiled.compile_ahead import compile_for
from jaxscale.config import from_dict

LAYERS = {8: "v5p:2x2x2", 32: "v5p:2x2x2", 128: "v5p:2x2x2"}
DEVICES = {8: "v5p:2x2x2", 64: "v5p:4x4x4", 512: "v5p:8x8x8", 4096: "v5p:16x16x16"}
BOUND = 0.1
"""Allowed growth from the smallest to the largest."""


def main() -> int:
    """Measures, prints, and returns 1 if compile time grows by more than the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=command_line.whole(1, 1000), default=3)
    parser.add_argument("--json", metavar="FILE", type=command_line.output_file)
    parser.add_argument("--png", metavar="FILE", type=command_line.output_file)
    options = parser.parse_args()
    seconds(8, 8, "v5p:2x2x2")  # warm-up
    names = {(n, 8): LAYERS[n] for n in LAYERS} | {(8, n): DEVICES[n] for n in DEVICES}
    # Interleaved, so that other load affects all sizes.
    runs = [{size: seconds(*size, names[size]) for size in names} for _ in range(options.repeat)]
    middle = {size: statistics.median(run[size] for run in runs) for size in names}
    found = {
        "layers": {n: middle[n, 8] for n in LAYERS},
        "devices": {n: middle[8, n] for n in DEVICES},
    }
    grown = {}
    for what, series in found.items():
        first, *_, last = series.values()
        grown[what] = last / first - 1
        shown = ", ".join(f"{n}: {value:.1f} s" for n, value in series.items())
        print(f"{what}: {shown}; {100 * grown[what]:+.1f} % from the least to the most")
    if options.json:
        options.json.write_text(json.dumps(found | {"growth": grown}, indent=2) + "\n")
    if options.png:
        draw(found, options.png)
    return int(max(grown.values()) > BOUND)


def seconds(num_layers: int, num_devices: int, topology: str) -> float:
    """Processor seconds to trace, lower and compile one step: fsdp 4, the rest data parallel."""
    config = from_dict(
        {
            "model": {
                "num_layers": num_layers,
                "d_model": 1024,
                "num_heads": 8,
                "num_kv_heads": 8,
                "head_dim": 128,
                "d_ff": 4096,
                "vocab_size": 32_000,
            },
            "data": {"global_batch_size": num_devices, "seq_len": 1024},
            "layout": {"data": -1, "fsdp": 4, "remat": "full"},
        }
    )
    start = time.process_time()
    compile_for(config, topology)
    return time.process_time() - start


def draw(found: dict[str, dict[int, float]], path: pathlib.Path) -> None:
    """Two panels: over layers, over devices."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
    for panel, (what, series) in zip(panels, found.items()):
        panel.plot(list(series), list(series.values()), marker="o")
        panel.set_xscale("log", base=2)
        panel.set_xticks(list(series), [str(n) for n in series])
        panel.set_xlabel(what)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("processor seconds to compile")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
