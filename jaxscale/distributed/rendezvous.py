"""The start-up barrier: waits for every process of a run, and verifies that they fit together."""

import contextlib
import hashlib
import hmac
import os
import resource
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxscale.distributed.control_channel import Connection, ControlChannel, Decide

TOKEN = "JAXSCALE_TOKEN"
"""An environment variable: when it is set, only processes that know its value take part."""

MOST_GUESTS = 64
"""Connections beyond the number of processes that may be open without a hello."""

LATE_SECONDS = 5
"""After a refusal, how long process 0 stays to tell it to processes that connect late."""


class _Refused(ValueError):  # noqa: N818 - sent to all, it ends start-up
    """Start-up is refused; every process that has connected gets the reason, and the status."""

    exit_status = 2


class MissingProcessError(_Refused):
    """One did not come: it may the next time, so that a supervisor tries again."""

    exit_status = 1


def join(
    coordinator: str,
    address: tuple[str, int],
    num_processes: int,
    process_id: int,
    report: Any,
    decide: Decide,
    timeout: float,
    hint: str = "",
    valid: Callable[[Any], bool] = lambda report: True,
) -> tuple[ControlChannel, Any]:
    """Waits until every process has connected, and compares their reports.

    Args:
      coordinator: the address as messages show it.
      address: host and port, where process 0 listens.
      report: of this process.
      decide: called in process 0 with all reports in order; every process gets what it returns. A
        "refusal" in it, a sentence, aborts every process.
      timeout: in seconds.
      hint: appended to the error when a process is missing.
      valid: whether something received may be a report; strangers are not listened to.

    Returns:
      The control channel, and the answer.

    Raises:
      ValueError: the refusal; or a process is missing, has the id of another, or was given another
        number of processes. The text is the same in all; one process on each host has it whole,
        the others on that host refer to it.
    """
    hello = {
        "process_id": process_id,
        "num_processes": num_processes,
        "host": host_name(),
        "report": report,
        "nonce": os.urandom(16).hex(),
    }
    hello["proof"] = _proof("hello", hello)
    deadline = time.monotonic() + timeout
    if process_id:
        connection, welcome = _connect(coordinator, address, hello, timeout, deadline, hint)
        connections = {0: connection}
    else:
        connections, welcome = _accept_all(
            coordinator, address, hello, decide, timeout, deadline, hint, valid
        )
    return ControlChannel(process_id, connections, welcome["names"]), welcome["answer"]


def _accept_all(
    coordinator: str,
    address: tuple[str, int],
    hello: dict[str, Any],
    decide: Decide,
    timeout: float,
    deadline: float,
    hint: str,
    valid: Callable[[Any], bool],
) -> tuple[dict[int, Connection], dict[str, Any]]:
    """In process 0: accepts the others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
    arrived: dict[Connection, dict[str, Any]] = {}  # -> its hello, {} until that is received
    with _listen(coordinator, *address) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while sum(map(bool, arrived.values())) < hello["num_processes"] - 1:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    missing = _missing(coordinator, hello, arrived, timeout)
                    raise MissingProcessError(missing + hint)
                for key, _ in events:
                    if key.fileobj is listener:
                        connection = Connection(listener.accept()[0])
                        if len(arrived) >= hello["num_processes"] + MOST_GUESTS:
                            connection.socket.close()
                            continue
                        arrived[connection] = {}
                        selector.register(connection.socket, selectors.EVENT_READ, connection)
                    elif not _read_hello(key.data, hello, arrived, valid):
                        selector.unregister(key.data.socket)
                        key.data.socket.close()
                        del arrived[key.data]
            joined = {
                member["process_id"]: connection for connection, member in arrived.items() if member
            }
            hellos = [hello, *(arrived[joined[i]] for i in range(1, hello["num_processes"]))]
            answer = decide([each["report"] for each in hellos])
            if answer.get("refusal"):
                raise _Refused(answer["refusal"])
        except _Refused as refusal:
            _abort_all(hello, arrived, refusal)
            silent = [connection for connection, member in arrived.items() if not member]
            count = hello["num_processes"] - 1 - len(arrived) + len(silent)
            if time.monotonic() < deadline:  # the others would wait until their own deadline
                _refuse_late(listener, silent, count, refusal)
            for connection in silent:
                connection.socket.close()
            raise
    welcome = {"names": [name(i, each["host"]) for i, each in enumerate(hellos)], "answer": answer}
    for connection in joined.values():
        connection.send(welcome | {"proof": _proof("welcome", arrived[connection])})
    for connection in arrived.keys() - joined.values():
        connection.socket.close()
    return joined, welcome


def _abort_all(
    hello: dict[str, Any], arrived: Mapping[Connection, dict[str, Any]], refusal: _Refused
) -> None:
    """Sends the refusal to every process that has said hello: the whole text once on each host."""
    printing = {hello["host"]: 0}  # host -> the process that prints it
    for connection, member in arrived.items():
        if not member:
            continue
        host, who = member["host"], member["process_id"]
        first = printing.setdefault(host, who)
        short = type(refusal)(f"not started: the same error as {name(first, host)}")
        _send_refusal(connection, refusal if who == first else short, member)
        connection.socket.close()


def _send_refusal(connection: Connection, refusal: _Refused, member: Mapping[str, Any]) -> None:
    text, missing = str(refusal), isinstance(refusal, MissingProcessError)
    proof = _proof("welcome", member)
    connection.send({"refusal": text, "missing": missing, "proof": proof})


def _proof(kind: str, hello: Mapping[str, Any]) -> str:
    """What shows that the sender knows the token, for one message of one start."""
    token = os.environ.get(TOKEN, "")
    words = [kind, *(str(hello.get(key)) for key in ("nonce", "process_id", "host"))]
    return hmac.new(token.encode(), "\n".join(words).encode(), hashlib.sha256).hexdigest()


def _refuse_late(
    listener: socket.socket, silent: list[Connection], count: int, refusal: _Refused
) -> None:
    """Sends the refusal to processes that say hello late, up to `count`, for `LATE_SECONDS`. Only
    the answer to a hello is believed: until one comes, a process tries again.

    Args:
      silent: those that have connected already.
    """
    deadline = time.monotonic() + LATE_SECONDS
    while count > 0 and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        with contextlib.suppress(OSError, ValueError):  # none connected, or no process of ours
            connection = silent.pop() if silent else Connection(listener.accept()[0])
            with connection.socket:
                connection.socket.settimeout(1)
                connection.receive()  # closing with unread data could discard what is sent
                _send_refusal(connection, refusal, next(connection.messages(), {}))
            count -= 1


def host_name() -> str:
    """The name of this host in messages: what those who can do without it call it. JAXSCALE_NODE is
    for containers, whose own names say nothing; `srun --exclude` takes SLURM's name."""
    given = os.environ.get("JAXSCALE_NODE") or os.environ.get("SLURMD_NODENAME")
    return given or socket.gethostname()


def name(process_id: int, host: str) -> str:
    """The name of a process in messages."""
    return f"process {process_id} on {host}"


def bind_address(host: str) -> tuple[socket.AddressFamily, str] | None:
    """Where this host listens, to be reached as `host`: the one address that the name stands for;
    None where there are several, or it is another machine's that forwards to this one."""
    with contextlib.suppress(OSError):
        found = {(info[0], str(info[4][0])) for info in socket.getaddrinfo(host, None)}
        if len(found) == 1:
            ((family, address),) = found
            with socket.socket(family) as trial:
                trial.bind((address, 0))
            return family, address
    return None


def _listen(coordinator: str, host: str, port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    everywhere = (socket.AF_INET6 if dual else socket.AF_INET, "")
    family, address = bind_address(host) or everywhere
    try:
        return socket.create_server(
            (address, port), family=family, backlog=1024, dualstack_ipv6=dual and not address
        )
    except OSError as error:
        raise ValueError(
            f"process 0 cannot listen on port {port} of --coordinator = {coordinator} "
            f"({error.strerror}): another run, or another process with --process_id = 0, may have "
            "it; choose another port"
        ) from error


def _read_hello(
    connection: Connection,
    hello: dict[str, Any],
    arrived: dict[Connection, dict[str, Any]],
    valid: Callable[[Any], bool],
) -> bool:
    """Reads a hello into `arrived`; whether to keep the connection."""
    try:
        more, messages = connection.receive(), list(connection.messages())
    except ValueError:  # no process of ours: a port scan, a health check
        return False
    if not messages:
        return more
    member = messages[0]
    if messages[1:] or not _is_hello(member) or not valid(member["report"]):
        return False
    if not hmac.compare_digest(_proof("hello", member), member["proof"]):
        text = f"{TOKEN} is not that of process 0; set the same in the environment of all processes"
        _send_refusal(connection, _Refused(text), {})
        return False
    who, num_processes, host = member["process_id"], member["num_processes"], member["host"]
    others = [(0, hello["host"])]
    others += [(other["process_id"], other["host"]) for other in arrived.values() if other]
    arrived[connection] = member
    if num_processes != hello["num_processes"]:
        raise _Refused(
            f"{name(who, host)} has --num_processes = {num_processes} and "
            f"{name(0, hello['host'])} has {hello['num_processes']}; give all the same"
        )
    for other, place in others:
        if other == who:
            raise _Refused(
                f"--process_id = {who} is given twice, on {place} and on {host}; each process "
                f"needs its own, from 0 to {num_processes - 1}"
            )
    return True


def _is_hello(message: Mapping[str, Any]) -> bool:
    """Whether a message has the fields of a hello, in their types."""
    numbers = [message.get(key) for key in ("process_id", "num_processes")]
    texts = [message.get(key) for key in ("host", "nonce", "proof")]
    return (
        all(type(number) is int and 0 <= number < 2**31 for number in numbers)
        and all(isinstance(text, str) and text.isascii() and len(text) < 256 for text in texts)
        and "report" in message
    )


def _missing(
    coordinator: str,
    hello: dict[str, Any],
    arrived: Mapping[Connection, dict[str, Any]],
    timeout: float,
) -> str:
    here = {0: hello["host"]}
    here |= {member["process_id"]: member["host"] for member in arrived.values() if member}
    missing = [i for i in range(hello["num_processes"]) if i not in here]
    joined = [name(*each) for each in sorted(here.items())]
    return (
        f"{_processes(missing)} of {hello['num_processes']} did not connect to {coordinator} in "
        f"{timeout:.0f} s ({_listing(joined)} did): look at the first lines of their logs, and "
        "whether their hosts reach that address"
    )


def _processes(ids: list[int]) -> str:
    return f"process{'es' * (len(ids) > 1)} {_listing(list(map(str, ids)))}"


def _listing(words: list[str], most: int = 8) -> str:
    more = [f"{len(words) - most} more"] if len(words) > most else []
    *init, last = words[:most] + more
    return f"{', '.join(init)} and {last}" if init else last


def _connect(
    coordinator: str,
    address: tuple[str, int],
    hello: dict[str, Any],
    timeout: float,
    deadline: float,
    hint: str,
) -> tuple[Connection, dict[str, Any]]:
    """In any process but 0: sends the hello to process 0, and waits for its answer."""
    trouble = "no answer"
    # Process 0 times out first: it knows which processes are missing.
    while (left := deadline + 5 - time.monotonic()) > 0:
        try:
            connection = Connection(socket.create_connection(address, timeout=min(5, left)))
        except OSError as error:  # process 0, or its DNS name, may not exist yet
            trouble = error.strerror or str(error)
            time.sleep(min(0.3, left))
            continue
        connection.send(hello)
        try:
            return connection, _answer(connection, hello, deadline + 10)
        except _Refused:
            connection.socket.close()
            raise
        except (ValueError, KeyError):
            trouble = "something else listens on that port"
        except ConnectionError as error:  # process 0 ended: it may be restarted
            trouble = str(error)
        connection.socket.close()
        time.sleep(0.3)
    who = name(hello["process_id"], hello["host"])
    raise MissingProcessError(
        f"{who} found no process 0 at {coordinator} in {timeout:.0f} s ({trouble}): is it running, "
        f"is that the address of its host, and is the port open between hosts?{hint}"
    )


def _answer(connection: Connection, hello: dict[str, Any], deadline: float) -> dict[str, Any]:
    while True:
        connection.socket.settimeout(max(0.1, deadline - time.monotonic()))
        more = connection.receive()
        for welcome in connection.messages():
            proven = welcome.get("proof") == _proof("welcome", hello)
            # One with another token cannot prove itself, and is believed that much.
            if "refusal" in welcome and (proven or str(welcome["refusal"]).startswith(TOKEN)):
                refused = MissingProcessError if welcome.get("missing") else _Refused
                raise refused(str(welcome["refusal"])[:10_000])
            if "names" not in welcome or not proven:
                raise ValueError("no answer of process 0")
            connection.socket.settimeout(None)
            return welcome
        if not more:
            raise ConnectionError("it closed the connection")
