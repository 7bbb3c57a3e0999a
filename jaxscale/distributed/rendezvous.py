"""How the processes of a run come together: all of them, each once, and of one mind."""

import contextlib
import resource
import selectors
import socket
import time
from collections.abc import Mapping
from typing import Any

from jaxscale.distributed.control_channel import Decide, Line, Peers

LATE_SECONDS = 5
"""After a refusal those who have not come yet may still hear of it."""


class _Refused(ValueError):  # noqa: N818 - said to all, it ends the meeting
    """Every process that has come is told the reason."""


def join(
    coordinator: str,
    address: tuple[str, int],
    num_processes: int,
    process_id: int,
    report: Any,
    decide: Decide,
    timeout: float,
    hint: str = "",
) -> tuple[Peers, Any]:
    """Waits until every process has come, and compares what they bring.

    Args:
      coordinator: how to call the address in messages.
      address: host and port; process 0 listens on that port of every address it has.
      report: what this process brings.
      decide: process 0 makes of all reports, in order, an answer for all. A "refusal" in it, a
        sentence, sends everybody home.
      timeout: in seconds.
      hint: what to say besides when somebody does not come.

    Returns:
      The line to the others, and the answer.

    Raises:
      ValueError: the refusal; or a process that did not come, came twice, or came with another
        idea of how many there are. The same text in all, or a hint to it on the same host.
    """
    hello = {
        "process_id": process_id,
        "num_processes": num_processes,
        "host": socket.gethostname(),
        "report": report,
    }
    deadline = time.monotonic() + timeout
    if process_id:
        line, welcome = _visit(coordinator, address, hello, timeout, deadline, hint)
        lines = {0: line}
    else:
        lines, welcome = _receive(coordinator, address[1], hello, decide, timeout, deadline, hint)
    return Peers(process_id, lines, welcome["names"]), welcome["answer"]


def _receive(
    coordinator: str,
    port: int,
    hello: dict[str, Any],
    decide: Decide,
    timeout: float,
    deadline: float,
    hint: str,
) -> tuple[dict[int, Line], dict[str, Any]]:
    """Process 0: lets the others in."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
    guests: dict[Line, dict[str, Any]] = {}  # their hellos, {} before it is there
    with _listen(coordinator, port) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while sum(map(bool, guests.values())) < hello["num_processes"] - 1:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    raise _Refused(_missing(coordinator, hello, guests, timeout) + hint)
                for key, _ in events:
                    if key.fileobj is listener:
                        line = Line(listener.accept()[0])
                        guests[line] = {}
                        selector.register(line.connection, selectors.EVENT_READ, line)
                    elif not _hear(key.data, hello, guests):
                        selector.unregister(key.data.connection)
                        key.data.connection.close()
                        del guests[key.data]
            come = {guest["process_id"]: line for line, guest in guests.items() if guest}
            hellos = [hello, *(guests[come[i]] for i in range(1, hello["num_processes"]))]
            answer = decide([each["report"] for each in hellos])
            if answer.get("refusal"):
                raise _Refused(answer["refusal"])
        except _Refused as refusal:
            _send_home(hello, guests, str(refusal))
            if time.monotonic() < deadline:  # they would wait in vain for long
                _turn_away(listener, hello["num_processes"] - 1 - len(guests), str(refusal))
            raise
    welcome = {"names": [name(i, each["host"]) for i, each in enumerate(hellos)], "answer": answer}
    for line in come.values():
        line.send(welcome)
    for line in guests.keys() - come.values():
        line.connection.close()
    return come, welcome


def _send_home(hello: dict[str, Any], guests: Mapping[Line, dict[str, Any]], text: str) -> None:
    """Tells those who have come why it does not begin; at length once on each host."""
    says = {hello["host"]: 0}  # host -> who says it there
    for line, guest in guests.items():
        host, who = guest.get("host", ""), guest.get("process_id", -1)
        first = says.setdefault(host, who)
        line.send({"refusal": text if who == first else f"not begun, as {name(first, host)} says"})
        line.connection.close()


def _turn_away(listener: socket.socket, count: int, text: str) -> None:
    """Tells those who come late, as many as are missing, for some seconds."""
    deadline = time.monotonic() + LATE_SECONDS
    while count > 0 and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        with contextlib.suppress(OSError, ValueError):  # none came, or no process of ours
            line = Line(listener.accept()[0])
            line.connection.settimeout(1)
            line.receive()  # what is not read when a connection closes may destroy what was sent
            line.send({"refusal": text})
            line.connection.close()
            count -= 1


def name(process_id: int, host: str) -> str:
    """How a process is called in messages."""
    return f"process {process_id} on {host}"


def _listen(coordinator: str, port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port),
            family=socket.AF_INET6 if dual else socket.AF_INET,
            backlog=1024,
            dualstack_ipv6=dual,
        )
    except OSError as error:
        raise ValueError(
            f"process 0 cannot listen on port {port} of --coordinator = {coordinator} "
            f"({error.strerror}): another run, or another process with --process_id = 0, may have "
            "it; choose another port"
        ) from error


def _hear(line: Line, hello: dict[str, Any], guests: dict[Line, dict[str, Any]]) -> bool:
    """Takes in what a guest says; whether to keep its line."""
    try:
        more, messages = line.receive(), list(line.messages())
        if not messages:
            return more
        (guest,) = messages
        who, num_processes, host = guest["process_id"], guest["num_processes"], guest["host"]
        guest["report"]
    except (ValueError, KeyError):  # no process of ours: a port scan, a health check
        return False
    if num_processes != hello["num_processes"]:
        raise _Refused(
            f"{name(who, host)} has --num_processes = {num_processes} and "
            f"{name(0, hello['host'])} has {hello['num_processes']}; give all the same"
        )
    others = [(0, hello["host"])]
    others += [(other["process_id"], other["host"]) for other in guests.values() if other]
    for other, place in others:
        if other == who:
            raise _Refused(
                f"--process_id = {who} is given twice, on {place} and on {host}; each process "
                f"needs its own, from 0 to {num_processes - 1}"
            )
    guests[line] = guest
    return True


def _missing(
    coordinator: str, hello: dict[str, Any], guests: Mapping[Line, dict[str, Any]], timeout: float
) -> str:
    here = {0: hello["host"]}
    here |= {guest["process_id"]: guest["host"] for guest in guests.values() if guest}
    missing = [i for i in range(hello["num_processes"]) if i not in here]
    come = [name(*each) for each in sorted(here.items())]
    return (
        f"{_processes(missing)} of {hello['num_processes']} did not come to {coordinator} in "
        f"{timeout:.0f} s ({_listing(come)} did): look at the first lines of their logs, and "
        "whether their hosts reach that address"
    )


def _processes(ids: list[int]) -> str:
    return f"process{'es' * (len(ids) > 1)} {_listing(list(map(str, ids)))}"


def _listing(words: list[str], most: int = 8) -> str:
    more = [f"{len(words) - most} more"] if len(words) > most else []
    *init, last = words[:most] + more
    return f"{', '.join(init)} and {last}" if init else last


def _visit(
    coordinator: str,
    address: tuple[str, int],
    hello: dict[str, Any],
    timeout: float,
    deadline: float,
    hint: str,
) -> tuple[Line, dict[str, Any]]:
    """Any process but 0: reports to it, and waits for its answer."""
    trouble = "no answer"
    # Process 0 gives up first: it knows who is missing.
    while (left := deadline + 5 - time.monotonic()) > 0:
        try:
            line = Line(socket.create_connection(address, timeout=min(5, left)))
        except OSError as error:  # it may not be there yet, nor its name
            trouble = error.strerror or str(error)
            time.sleep(min(0.3, left))
            continue
        line.send(hello)
        try:
            return line, _answer(line, deadline + 10)
        except _Refused:
            line.connection.close()
            raise
        except (ValueError, KeyError):
            trouble = "something else listens on that port"
        except ConnectionError as error:  # process 0 ended: another one may take its place
            trouble = str(error)
        line.connection.close()
        time.sleep(0.3)
    who = name(hello["process_id"], hello["host"])
    raise ValueError(
        f"{who} found no process 0 at {coordinator} in {timeout:.0f} s ({trouble}): is it running, "
        f"is that the address of its host, and is the port open between hosts?{hint}"
    )


def _answer(line: Line, deadline: float) -> dict[str, Any]:
    while True:
        line.connection.settimeout(max(0.1, deadline - time.monotonic()))
        more = line.receive()
        for welcome in line.messages():
            if "refusal" in welcome:
                raise _Refused(welcome["refusal"])
            if "names" not in welcome:
                raise KeyError("names")
            line.connection.settimeout(None)
            return welcome
        if not more:
            raise ConnectionError("it closed the connection")
