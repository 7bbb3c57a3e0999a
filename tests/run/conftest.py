"""Addresses for tests: in this process's memory, and at a server that speaks S3."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import fsspec
import pytest

SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of a local server, which fsspec finds in the environment; it has an empty bucket."""
    pytest.importorskip("moto", reason="moto, of the extra dev, is the server that speaks S3")
    pytest.importorskip("s3fs", reason="s3fs, of the extra s3, is its client")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    with process, pytest.MonkeyPatch.context() as patch:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        patch.setenv("AWS_ENDPOINT_URL", url)
        patch.setenv("AWS_ACCESS_KEY_ID", "anybody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3").mkdir("bucket")
        yield url
        process.send_signal(signal.SIGKILL)


@pytest.fixture
def address(monkeypatch, tmp_path, request) -> Iterator[str]:
    """The address of a new run in memory, or with the parameter "s3" at the server."""
    move_to(monkeypatch, tmp_path / "first_machine")
    if getattr(request, "param", "memory") == "s3":
        request.getfixturevalue("s3_server")
        yield f"s3://bucket/{os.getpid()}/{tmp_path.name}/run"
        return
    yield f"memory://bucket/{tmp_path.name}/run"
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm("/bucket", recursive=True)


def move_to(monkeypatch, folder) -> None:
    """To a machine without local tiers."""
    monkeypatch.setenv("JAXSCALE_LOCAL_TIER", str(folder))
