"""Stands for `jaxscale.autotune.trial` where a test is about the search: the seconds are a formula
of the layout, and some layouts fail in the ways that real ones do."""

import json
import os
import signal
import sys
import time

asked = json.loads(sys.stdin.readline())
if asked is None:
    print(json.dumps({"devices": 8, "kind": "fake", "platform": "cpu"}))
    sys.exit()
layout = asked["config"]["layout"]
if layout["tensor"] == 8:
    print("jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory", file=sys.stderr)
    sys.exit(1)
if layout["context"] == 8:
    print(
        "F1 x.cc:9] Check failed: a.size() == b.size()\n*** stack ***", file=sys.stderr, flush=True
    )
    os.kill(os.getpid(), signal.SIGABRT)
if layout["pipeline"] == 8:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
seconds = (
    layout["pipeline"] * layout["tensor"] ** 2
    + layout["context"]
    + layout["microbatches"] / 4
    + {"none": 0, "full": 3}.get(layout["remat"], 1)
)
print(json.dumps({"step_seconds": [seconds], "loss": 1.0, "compile_seconds": 0, "memory_bytes": 1}))
