"""Compiles plans for absent hardware and compares their memory: `plan --prove`."""

from collections.abc import Sequence
from typing import Any

from jaxscale.compiled import compile_ahead
from jaxscale.formatting import gigabytes, table
from jaxscale.planner.search.plan import Plan


def prove_plans(plans: Sequence[Plan], name: str) -> list[dict[str, Any]]:
    """Compiles plans for a topology and compares their memory with the prediction; prints a line
    before each, and a table.

    Returns:
      A record for each plan, with `compiled_bytes` None if the compiler refuses it.
    """
    rows = [("", "predicted", "compiled", "error", "verdict")]
    proved = []
    for number, one in enumerate(plans, 1):
        print(f"compiling plan {number} for {name}", flush=True)
        try:
            compiled = compile_ahead.compile_for(one.config, name)
        except ValueError as error:
            # Such as offloading: the GPU compiler without a GPU has no host memory space.
            rows.append((str(number), gigabytes(one.memory_bytes), "-", "-", str(error)))
            proved.append(
                {
                    "plan": number,
                    "predicted_bytes": one.memory_bytes,
                    "compiled_bytes": None,
                    "refusal": str(error),
                }
            )
            continue
        error = one.memory_bytes / compiled.peak_bytes - 1
        verdict = "fits" if compiled.fits else f"needs {gigabytes(compiled.missing_bytes)} more"
        rows.append(
            (
                str(number),
                gigabytes(one.memory_bytes),
                gigabytes(compiled.peak_bytes),
                f"{100 * error:+.1f} %",
                verdict,
            )
        )
        proved.append(
            {
                "plan": number,
                "predicted_bytes": one.memory_bytes,
                "compiled_bytes": compiled.peak_bytes,
                "fits": compiled.fits,
            }
        )
    compiles = any(one["compiled_bytes"] for one in proved)
    heading = "Proved by compiling for" if compiles else "None of these could be compiled for"
    print(f"\n{heading} {name}\n{table(rows)}")
    return proved
