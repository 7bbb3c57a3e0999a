"""Sets llama2_7b on 64 v5p chips beside MaxText 0.2.5 in docs/compile_ahead.md: memory and
estimate.

python tools/aot_peer.py [--fresh]

Temporaries are those of tools/aot_table.json. The estimate is XLA's own, which counts the body of a
loop once, so that it means something only for a program whose loops are written out. Programs of 4
and 6 layers are compiled (minutes each, kept in tools/aot_peer.json); each layer more costs half of
what they differ by.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
TABLE = ROOT / "tools" / "aot_table.json"
KEPT = ROOT / "tools" / "aot_peer.json"
PAGE = ROOT / "docs" / "compile_ahead.md"
BEGIN, END = "<!-- aot peer -->", "<!-- end of aot peer -->"
CASE = "llama2_7b v5p:4x4x4 4 remat="
MINIMAL = "save:query,key,value,attention_out,mlp_gate,mlp_up"
NUM_LAYERS, SHALLOW, DEEP = 32, 4, 6
PEER = {"full": 14.02e9, "minimal": 53.30e9, "seconds": 2.2425}
"""MaxText 0.2.5, `train_compile`: bytes of temporaries by remat policy; XLA's estimate of
the program with its layers written out and full remat."""


def main() -> int:
    """Compiles what is missing, prints, and returns 1 where we need more than the peer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="compile again")
    options = parser.parse_args()
    kept = {} if options.fresh or not KEPT.exists() else json.loads(KEPT.read_text())
    for num_layers in (SHALLOW, DEEP):
        if str(num_layers) not in kept:
            kept[str(num_layers)] = written_out(num_layers)
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    numbers = ours(json.loads(TABLE.read_text()), kept)
    print(table(numbers))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(numbers)}\n{END}{after}")
    return int(any(numbers[key] > PEER[key] for key in ("full", "minimal", "seconds")))


def written_out(num_layers: int) -> dict[str, Any]:
    """Seconds of XLA's estimate for a model of some layers, loops written out."""
    with tempfile.TemporaryDirectory() as folder:
        written = pathlib.Path(folder) / "numbers.json"
        command = [
            sys.executable,
            "-m",
            "jaxscale.aot",
            "--config",
            "configs/llama2_7b.py",
            "--topology",
            "v5p:4x4x4",
            "--unroll_layers",
            "--json",
            str(written),
            f"--config.model.num_layers={num_layers}",
            "--config.data.global_batch_size=256",
            "--config.layout.microbatches=1",
            "--config.layout.remat=full",
        ]
        subprocess.run(command, cwd=ROOT, check=True)
        numbers = json.loads(written.read_text())
    return {key: numbers[key] for key in ("optimal_seconds", "temp_bytes", "compile_seconds")}


def ours(compiled: dict[str, Any], kept: dict[str, Any]) -> dict[str, float]:
    """The numbers of `PEER` that we have."""
    shallow, deep = (kept[str(n)]["optimal_seconds"] for n in (SHALLOW, DEEP))
    return {
        "full": compiled[CASE + "full"]["temp_bytes"],
        "minimal": compiled[CASE + MINIMAL]["temp_bytes"],
        "seconds": shallow + (NUM_LAYERS - SHALLOW) / (DEEP - SHALLOW) * (deep - shallow),
    }


def table(numbers: dict[str, float]) -> str:
    """Both, in Markdown."""

    def row(name: str, key: str, scale: float, form: str, unit: str) -> str:
        peer, own = (f"{value[key] / scale:{form}} {unit}" for value in (PEER, numbers))
        return f"| {name} | {peer} | {own} |"

    return "\n".join(
        [
            "| | MaxText | jaxscale |",
            "|---|---|---|",
            row("temporaries, full remat", "full", 1e9, ".2f", "GB"),
            row("temporaries, every product kept", "minimal", 1e9, ".2f", "GB"),
            row("estimate, full remat", "seconds", 1, ".3f", "s"),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
