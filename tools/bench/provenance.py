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
    changed = _git("status", "--porcelain", "-uno")
    return {
        "load": os.getloadavg()[0],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD") + ("+changes" if changed else ""),
        "command": shlex.join(["python", *sys.argv]),
    }


def _git(*arguments: str) -> str:
    """What git prints; nothing where there is no repository, or no git."""
    try:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
