"""Where a measured number comes from."""

import datetime
import os
import pathlib
import shlex
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]


def provenance() -> dict[str, Any]:
    """When, from what commit, by which command, and how busy the machine was."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True)
    return {
        "load": os.getloadavg()[0],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() + ("+changes" if changed.stdout else ""),
        "command": shlex.join(["python", *sys.argv]),
    }
