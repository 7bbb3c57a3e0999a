"""Provenance of a measurement."""

import datetime
import os
import pathlib
import shlex
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]


def provenance() -> dict[str, Any]:
    """Date, commit, command and load of the machine."""
    changed = _git("status", "--porcelain", "-uno")
    return {
        "load": os.getloadavg()[0],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD") + ("+changes" if changed else ""),
        "command": shlex.join(["python", *sys.argv]),
    }


def _git(*arguments: str) -> str:
    """Git's output; "" without a repository or git."""
    try:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
