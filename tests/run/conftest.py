"""URLs for runs: in this process's memory, and at an S3 server."""

import contextlib
import os
from collections.abc import Iterator

import fsspec
import pytest


@pytest.fixture
def address(monkeypatch, tmp_path, request) -> Iterator[str]:
    """The URL of a new run in memory, or with the parameter "s3" at the server."""
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
