"""The start-up barrier (rendezvous): waits for every process of a run, and compares them.

Process 0 sends a challenge to each that connects. The hello is signed with the challenge and the
token, the answer with the hello's nonce, so that messages recorded at another start cannot be
replayed.
"""

import contextlib
import hashlib
import hmac
import json
import os
import resource
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

from jaxscale.distributed.control_channel import Connection, ControlChannel, Decide

TOKEN = "JAXSCALE_TOKEN"
"""An environment variable: when set, only processes with the same value are admitted."""

MOST_GUESTS = 64
"""Connections without a hello that may be open beyond the number of processes; the oldest is closed
when there are more."""

GUEST_SECONDS = 10.0
"""How long a connection may stay open without a hello."""

MOST_HELLO_BYTES = 1 << 20
"""Far above the size of any hello."""

LATE_SECONDS = 5
"""After a refusal, how long process 0 waits to send it to processes that connect late."""


class _Refused(ValueError):  # noqa: N818 - sent to all, it ends start-up
    """Start-up is refused; every process that has connected gets the reason, and the status."""

    exit_status = 2


class MissingProcessError(_Refused):
    """A process did not connect; a supervisor tries again, since it may connect the next time."""

    exit_status = 1


class _Start(NamedTuple):
    """A start as one process sees it; the fields other than `hello` and `deadline` are `join`'s."""

    coordinator: str
    address: tuple[str, int]
    hello: dict[str, Any]
    timeout: float
    deadline: float
    hint: str


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
      coordinator: HOST:PORT as messages show it.
      address: host and port where process 0 listens.
      report: of this process.
      decide: called in process 0 with all reports in order; every process gets its result. A
        "refusal" in the result, a sentence, aborts every process.
      timeout: in seconds.
      hint: appended to the error when a process is missing.
      valid: whether a received value has the form of a report; others are ignored.

    Returns:
      The control channel, and the answer.

    Raises:
      ValueError: the refusal; or a process is missing, has the id of another, or was given another
        number of processes. One process on each host raises the whole text, the others on that
        host refer to it.
    """
    hello = {
        "process_id": process_id,
        "num_processes": num_processes,
        "host": host_name(),
        "report": report,
        "nonce": os.urandom(16).hex(),
    }
    start = _Start(coordinator, address, hello, timeout, time.monotonic() + timeout, hint)
    if process_id:
        connection, welcome = _connect(start)
        connections = {0: connection}
    else:
        connections, welcome = _accept_all(start, decide, valid)
    return ControlChannel(process_id, connections, welcome["names"]), welcome["answer"]


def _accept_all(
    start: _Start, decide: Decide, valid: Callable[[Any], bool]
) -> tuple[dict[int, Connection], dict[str, Any]]:
    """Accepts all other processes, in process 0."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
    hello, count = start.hello, start.hello["num_processes"]
    listener = _listen(start.coordinator, *start.address)
    with _Entrance(listener, count + MOST_GUESTS, valid) as entrance:
        try:
            while len(entrance.members) < count - 1:
                connection = entrance.await_member(start.deadline)
                if connection is None:
                    raise MissingProcessError(_missing(start, entrance.members) + start.hint)
                _check_member(hello, connection, entrance.members)
            joined = {member["process_id"]: each for each, member in entrance.members.items()}
            hellos = [hello, *(entrance.members[joined[i]] for i in range(1, count))]
            answer = decide([each["report"] for each in hellos])
            if answer.get("refusal"):
                raise _Refused(answer["refusal"])
        except _Refused as refusal:
            absent = {*range(1, count)} - {m["process_id"] for m in entrance.members.values()}
            _abort_all(hello, entrance, refusal)
            if time.monotonic() < start.deadline:  # they would wait until their own deadline
                _refuse_late(entrance, absent, refusal)
            raise
    welcome = {"names": [name(i, each["host"]) for i, each in enumerate(hellos)], "answer": answer}
    for i, connection in joined.items():
        connection.send(_signed("answer", hellos[i]["nonce"], welcome))
    return joined, welcome


class _Entrance:
    """The listener of process 0 and its connections: members have sent a signed hello, guests not.

    Leaving the context closes the listener and the guests.
    """

    def __init__(
        self, listener: socket.socket, most_guests: int, valid: Callable[[Any], bool]
    ) -> None:
        self.members: dict[Connection, dict[str, Any]] = {}  # -> its hello
        self._guests: dict[Connection, tuple[str, float]] = {}  # -> challenge, deadline
        self._listener, self._most_guests, self._valid = listener, most_guests, valid
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def await_member(self, deadline: float) -> Connection | None:
        """The next process to send a hello; None when there is none before the deadline."""
        while (now := time.monotonic()) < deadline:
            ends = [deadline]
            for guest, (_, until) in [*self._guests.items()]:
                ends.append(until)
                if until <= now:
                    self.dismiss(guest)
            for key, _ in self._selector.select(max(0.0, min(ends) - now)):
                if key.fileobj is self._listener:
                    self._accept()
                elif self._is_new_member(key.data):
                    return key.data
        return None

    def dismiss(self, connection: Connection) -> None:
        """Closes a connection."""
        if connection in self._guests or connection in self.members:
            self._selector.unregister(connection.socket)
            connection.socket.close()
            self._guests.pop(connection, None)
            self.members.pop(connection, None)

    def _accept(self) -> None:
        try:
            connection = Connection(self._listener.accept()[0])
        except OSError:  # already closed, or out of file descriptors (EMFILE)
            self._dismiss_oldest()
            return
        if len(self._guests) >= self._most_guests:
            self._dismiss_oldest()
        challenge = os.urandom(16).hex()
        self._guests[connection] = challenge, time.monotonic() + GUEST_SECONDS
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        connection.send({"challenge": challenge})

    def _dismiss_oldest(self) -> None:
        for guest in [*self._guests][:1]:
            self.dismiss(guest)

    def _is_new_member(self, connection: Connection) -> bool:
        """Whether a connection has sent a valid hello and is now a member; closes one that has sent
        anything else, or is closed at the other end."""
        challenge, _ = self._guests.get(connection, (None, 0))
        try:
            more = connection.receive(MOST_HELLO_BYTES)
            messages = [*connection.messages()]
        except ValueError:  # another program: a port scan, a health check
            more, messages = False, []
        if challenge and len(messages) == 1 and "proof" in messages[0]:
            hello = _opened("hello", challenge, messages[0])
            if hello is None:
                connection.send({"unproven": True})
            elif _is_hello(hello) and self._valid(hello["report"]):
                del self._guests[connection]
                self.members[connection] = hello
                return True
        if messages or not more:
            self.dismiss(connection)
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for guest in [*self._guests]:
            self.dismiss(guest)
        self._selector.close()
        self._listener.close()


def _check_member(
    hello: dict[str, Any], connection: Connection, members: Mapping[Connection, dict[str, Any]]
) -> None:
    """Refuses a process that contradicts process 0 or one that came before it."""
    member = members[connection]
    who, num_processes, host = member["process_id"], member["num_processes"], member["host"]
    if num_processes != hello["num_processes"]:
        raise _Refused(
            f"{name(who, host)} has --num_processes = {num_processes} and "
            f"{name(0, hello['host'])} has {hello['num_processes']}; give all the same"
        )
    others = [hello, *(other for each, other in members.items() if each is not connection)]
    for other in others:
        if other["process_id"] == who:
            raise _Refused(
                f"--process_id = {who} is given twice, on {other['host']} and on {host}; each "
                f"process needs its own, from 0 to {num_processes - 1}"
            )


def _abort_all(hello: dict[str, Any], entrance: _Entrance, refusal: _Refused) -> None:
    """Sends the refusal to every member: the whole text to one process on each host."""
    printing = {hello["host"]: 0}  # host -> the process that prints it
    for connection, member in [*entrance.members.items()]:
        host, who = member["host"], member["process_id"]
        first = printing.setdefault(host, who)
        short = type(refusal)(f"not started: the same error as {name(first, host)}")
        _send_refusal(connection, refusal if who == first else short, member)
        entrance.dismiss(connection)


def _send_refusal(connection: Connection, refusal: _Refused, member: Mapping[str, Any]) -> None:
    missing = isinstance(refusal, MissingProcessError)
    answer = {"refusal": str(refusal), "missing": missing}
    connection.send(_signed("answer", member["nonce"], answer))


def _signed(kind: str, nonce: str, content: Mapping[str, Any]) -> dict[str, str]:
    """A message of one start, signed with the token (HMAC-SHA256).

    Args:
      kind: "hello" or "answer"; part of the signed text, so that neither passes for the other.
      nonce: of the receiver, used once.
    """
    text = json.dumps(content)
    return {"content": text, "proof": _proof(kind, nonce, text)}


def _opened(kind: str, nonce: str, message: Mapping[str, Any]) -> dict[str, Any] | None:
    """The content of a message; None unless it is signed with our token."""
    text, proof = message.get("content"), message.get("proof")
    if not isinstance(text, str) or not isinstance(proof, str):
        return None
    try:
        if not hmac.compare_digest(_proof(kind, nonce, text).encode(), proof.encode()):
            return None
        content = json.loads(text)
    except (ValueError, RecursionError):  # not text, or not JSON
        return None
    return content if isinstance(content, dict) else None


def _proof(kind: str, nonce: str, text: str) -> str:
    token = os.environ.get(TOKEN, "")
    return hmac.new(token.encode(), f"{kind}\n{nonce}\n{text}".encode(), hashlib.sha256).hexdigest()


def _refuse_late(entrance: _Entrance, absent: set[int], refusal: _Refused) -> None:
    """Sends the refusal to processes that connect late, for `LATE_SECONDS`. A process only believes
    a signed answer to its hello, and connects again until it gets one."""
    deadline = time.monotonic() + LATE_SECONDS
    while absent and (connection := entrance.await_member(deadline)):
        member = entrance.members[connection]
        _send_refusal(connection, refusal, member)
        entrance.dismiss(connection)
        absent = absent - {member["process_id"]}


def host_name() -> str:
    """The name of this host in messages, as a supervisor excludes it: JAXSCALE_NODE for containers,
    whose host names are arbitrary; else SLURM's name, which `srun --exclude` takes."""
    given = os.environ.get("JAXSCALE_NODE") or os.environ.get("SLURMD_NODENAME")
    return given or socket.gethostname()


def name(process_id: int, host: str) -> str:
    """The name of a process in messages."""
    return f"process {process_id} on {host}"


def bind_address(host: str) -> tuple[socket.AddressFamily, str] | None:
    """The family and IP address on which to listen to be reached as `host`; None when the name has
    several IP addresses, or that of another machine, which forwards to this one."""
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
            f"({error.strerror}): another run, or another process with --process_id = 0, may use "
            "it; choose another port"
        ) from error


def _is_hello(message: Mapping[str, Any]) -> bool:
    """Whether a message has the fields of a hello, with the right types."""
    numbers = [message.get(key) for key in ("process_id", "num_processes")]
    texts = [message.get(key) for key in ("host", "nonce")]
    return (
        all(type(number) is int and 0 <= number < 2**31 for number in numbers)
        and all(isinstance(text, str) and text.isascii() and len(text) < 256 for text in texts)
        and message["process_id"] < message["num_processes"]
        and "report" in message
    )


def _missing(start: _Start, members: Mapping[Connection, dict[str, Any]]) -> str:
    hello = start.hello
    here = {0: hello["host"]}
    here |= {member["process_id"]: member["host"] for member in members.values()}
    missing = [i for i in range(hello["num_processes"]) if i not in here]
    joined = [name(*each) for each in sorted(here.items())]
    return (
        f"{_processes(missing)} of {hello['num_processes']} did not connect to "
        f"{start.coordinator} in {start.timeout:.0f} s ({_listing(joined)} did): look at the first "
        "lines of their logs, and check that their hosts reach that port"
    )


def _processes(ids: list[int]) -> str:
    return f"process{'es' * (len(ids) > 1)} {_listing(list(map(str, ids)))}"


def _listing(words: list[str], most: int = 8) -> str:
    more = [f"{len(words) - most} more"] if len(words) > most else []
    *init, last = words[:most] + more
    return f"{', '.join(init)} and {last}" if init else last


def _connect(start: _Start) -> tuple[Connection, dict[str, Any]]:
    """Sends the hello to process 0 and waits for its answer, in every other process."""
    trouble = "no answer"
    # Process 0 times out first: it knows which processes are missing.
    while (left := start.deadline + 5 - time.monotonic()) > 0:
        try:
            connection = Connection(socket.create_connection(start.address, timeout=min(5, left)))
        except OSError as error:  # process 0, or its DNS name, may not exist yet
            trouble = error.strerror or str(error)
            time.sleep(min(0.3, left))
            continue
        try:
            return connection, _answer(connection, start.hello, start.deadline + 10)
        except _Refused:
            connection.socket.close()
            raise
        except (ValueError, KeyError):
            trouble = "another program listens on that port"
        except ConnectionError as error:  # process 0 ended: it may be restarted
            trouble = str(error)
        connection.socket.close()
        time.sleep(0.3)
    who = name(start.hello["process_id"], start.hello["host"])
    raise MissingProcessError(
        f"{who} found no process 0 at {start.coordinator} in {start.timeout:.0f} s ({trouble}): "
        f"check that it runs, that this is its host, and that the port is open between hosts"
        f"{start.hint}"
    )


def _answer(connection: Connection, hello: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Sends the hello after the challenge of process 0; returns the answer."""
    while True:
        connection.socket.settimeout(max(0.1, deadline - time.monotonic()))
        more = connection.receive()
        for message in connection.messages():
            if isinstance(message.get("challenge"), str):
                connection.send(_signed("hello", message["challenge"], hello))
                continue
            if message.get("unproven"):  # the token differs, or is set in one of the two only
                raise _Refused(
                    f"{TOKEN} differs from process 0's; set the same in the environment of all "
                    "processes"
                )
            answer = _opened("answer", hello["nonce"], message)
            if answer is None:
                raise ValueError("not an answer of process 0")
            if "refusal" in answer:
                raise (MissingProcessError if answer["missing"] else _Refused)(answer["refusal"])
            connection.socket.settimeout(None)
            return answer
        if not more:
            raise ConnectionError("it closed the connection")
