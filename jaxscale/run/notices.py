"""Preemption notices (GCE metadata server): a request to stop, like a signal.

Google Compute Engine announces a preemption 30 seconds ahead on its metadata server only; processes
get no signal before the shutdown (cloud.google.com/compute/docs/instances/preemptible).
"""

import contextlib
import http.client
import logging
import os
import threading
import urllib.request
from collections.abc import Iterator

from jaxscale.run import signals
from jaxscale.storage import durable

log = logging.getLogger("jaxscale")

CLOUDS = ("none", "gce")

HOST = "GCE_METADATA_HOST"
"""Environment variable of another metadata server, which Google's libraries also read."""

FAILURES = OSError, http.client.HTTPException
LOOK_SECONDS, ANSWER_SECONDS = 1.0, 5.0


@contextlib.contextmanager
def noticed(cloud: str) -> Iterator[None]:
    """Watches for a notice inside the context, which asks the run to stop.

    Args:
      cloud: one of `CLOUDS`.

    Raises:
      ValueError: there is no metadata server.
    """
    if cloud == "none":
        yield
        return
    try:
        _is_preempted()
    except FAILURES as error:
        raise ValueError(
            f"--preemption_notices gce: no metadata server at {_host()} "
            f"({durable.reason(error)}); leave it out if this is not a machine of Google's cloud"
        ) from error
    done = threading.Event()
    thread = threading.Thread(target=_watch, args=(done,), name="notices", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _watch(done: threading.Event) -> None:
    """Polls the metadata server, in a thread."""
    said = False
    while not done.is_set():
        try:
            if _is_preempted():
                signals.ask("the preemption notice of gce")
                return
        except FAILURES as error:
            if not said:
                log.warning(
                    f"warning: no preemption notices ({durable.reason(error)}); trying again"
                )
            said = True
        done.wait(LOOK_SECONDS)


def _is_preempted() -> bool:
    request = urllib.request.Request(
        f"http://{_host()}/computeMetadata/v1/instance/preempted",
        headers={"Metadata-Flavor": "Google"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=ANSWER_SECONDS) as answer:
        return answer.read(16).strip() == b"TRUE"


def _host() -> str:
    return os.environ.get(HOST) or "metadata.google.internal"
