"""Requests to a store."""

import contextlib
import os
import socket
import subprocess
import sys
import threading

import pytest

IMPATIENT = """
import importlib, sys
from jaxscale import command_line
from jaxscale.storage import object_store
object_store.ANSWER_SECONDS = 0.2
command_line.run(importlib.import_module("jaxscale." + sys.argv.pop(1)).main)
"""


COMMANDS = {
    "train --config=tiny --workdir=s3://bucket/run": "s3://bucket/run/lease.json",
    "generate --prompt=a --workdir=s3://bucket/run": "s3://bucket/run",
    "prepare --input=s3://bucket/text --output=out --tokenizer=bytes": "s3://bucket/text",
}


@pytest.mark.proof(but=("train --config=tiny --workdir=s3://bucket/run",))
@pytest.mark.parametrize("command", COMMANDS)
def test_a_store_that_accepts_and_never_answers_is_one_line(command, tmp_path):
    """With the status after which a supervisor tries again. Its client would try for minutes."""
    pytest.importorskip("s3fs", reason="s3fs, of the extra s3, is the client")
    with socket.create_server(("127.0.0.1", 0)) as store, contextlib.ExitStack() as connections:

        def accept() -> None:
            with contextlib.suppress(OSError):  # closed
                while True:
                    connections.enter_context(store.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        done = subprocess.run(
            [sys.executable, "-c", IMPATIENT, *command.split()],
            cwd=tmp_path,
            env=os.environ
            | {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{store.getsockname()[1]}",
                "AWS_ACCESS_KEY_ID": "anybody",
                "AWS_SECRET_ACCESS_KEY": "anything",
                "JAXSCALE_LOCAL_TIER": str(tmp_path),
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1, done
    assert done.stderr.startswith(f"error: {COMMANDS[command]}")
    assert done.stderr.endswith(": no answer in 200 ms\n")
    assert done.stderr.count("\n") == 1
