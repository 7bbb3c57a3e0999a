"""The control channel of a run: every process to process 0, for agreement and failure detection.

It is separate from JAX's own connections, which do not report what people ask first: which process
is missing, what differs between two, which one died. JAX ends a process without naming the one that
failed. Here a process that ends closes its connection (the kernel does it even for a process that
is killed), and process 0 tells the others within a second. Messages are small, few, and JSON, one a
line: no data of a training step is sent here.
"""

import collections
import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from jaxscale.distributed import messages
from jaxscale.storage.untrusted import parse_json

MOST_MESSAGE_BYTES = 1 << 24
"""No message is nearly as long: what sends more is not one of our processes."""

LOST_SECONDS = 30
"""A host that has not responded for this long counts as dead."""

SILENT_SECONDS = 5
"""A process that does not answer a question for this long is frozen."""

ERRORS = (1, 2)
"""Statuses of a process that failed, and of one that refused to go on; others were asked to end."""

SILENT_DEATH = (
    "it ended without reporting an error; its log, or its launcher, may say whether it was killed "
    "or ran out of memory"
)

Decide = Callable[[list[Any]], Any]


class Connection:
    """A socket to one process: JSON messages in and out."""

    def __init__(self, sock: socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", LOST_SECONDS // 3),
            ("TCP_KEEPINTVL", LOST_SECONDS // 6),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", 1000 * LOST_SECONDS),
        ):
            if hasattr(socket, option):  # macOS has other names for some of them
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self.socket = sock
        self._buffer = b""
        self._messages: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message; drops it when the other end is gone."""
        with self._lock, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, most_bytes: int | None = None) -> bool:
        """Blocks for one read; False when the other end has closed.

        Args:
          most_bytes: of a message; by default `MOST_MESSAGE_BYTES`.

        Raises:
          ValueError: the data is not one of our messages: some other program sent it.
        """
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if max(map(len, (self._buffer, *lines))) > (most_bytes or MOST_MESSAGE_BYTES):
            raise ValueError("too long for a message")
        for line in lines:
            message = parse_json(line)
            if not isinstance(message, dict):
                raise ValueError("not a message")
            self._messages.append(message)
        return bool(data)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Removes and yields the messages received so far."""
        while self._messages:
            yield self._messages.pop(0)


def end(who: int, text: str, status: int = 1) -> NoReturn:
    """Ends this process at once: another one is gone, and no collective completes without it."""
    with contextlib.suppress(OSError):  # the terminal may be closed
        print(f"error: {text}" if status in ERRORS else text, file=sys.stderr, flush=True)
    os._exit(status)


class ControlChannel:
    """Connects this process to the others, once all have joined.

    Args:
      connections: process id -> its connection: all others in process 0, process 0 alone elsewhere.
      names: of each process, for error messages.
      on_death: called with the id, a sentence and the status to end with when another process
        failed, died or left.
    """

    def __init__(
        self,
        process_id: int,
        connections: dict[int, Connection],
        names: list[str],
        on_death: Callable[[int, str, int], Any] = end,
    ):
        self.process_id, self.names = process_id, names
        self._connections, self._on_death = connections, on_death
        self._changed = threading.Condition()
        # Process 0: topic, process -> its reports, in their order.
        self._reports = collections.defaultdict[tuple[str, int], collections.deque](
            collections.deque
        )
        # Topic -> process 0's broadcasts, in their order.
        self._answers = collections.defaultdict[str, collections.deque](collections.deque)
        self._failure: messages.Failure | None = None
        self._failing = self._closed = False
        # A process may run several training loops, one after the other; keys are a loop's number.
        self._loop, self._step = 0, 0
        self._signals: dict[int, tuple[int, str]] = {}  # the process, and what asked it
        self._positions = collections.defaultdict[int, dict[int, int]](
            dict
        )  # process 0: each's step
        self._last: dict[int, int] = {}  # the step after which all stop
        # What this process is doing, and whether for too long; what it prints in a hang.
        self.place: Callable[[], tuple[str, bool]] = lambda: ("starting", False)
        self.dump: Callable[[str], Any] = lambda doing: None
        self._question, self._asking = 0, False
        self._places: dict[int, tuple[str, bool]] = {}  # process 0: answers to the question
        self._thread = threading.Thread(target=self._receive, name="control channel", daemon=True)
        self._thread.start()

    # Called by the main thread.

    def gather(self, topic: str, report: Any, decide: Decide, timeout: float | None = None) -> Any:
        """Gathers a report of each process in process 0; all get what `decide` returns.

        Args:
          topic: names the exchange; every process must make the same number of calls for it.
          decide: called by process 0 with all reports in order; must not raise.
          timeout: in seconds.

        Raises:
          TimeoutError: names the processes that sent no report, where that is known.
        """
        if self.process_id:
            self._send_up(messages.ProcessReport(topic, report))
            return self.await_answer(topic, timeout)
        with self._changed:
            self._reports[topic, 0].append(report)
            queues = [self._reports[topic, i] for i in range(len(self.names))]
            if not self._changed.wait_for(lambda: all(queues), timeout):
                missing = (name for name, queue in zip(self.names, queues) if not queue)
                raise TimeoutError(f"{topic}: nothing from {', '.join(missing)} in {timeout:.0f} s")
            reports = [queue.popleft() for queue in queues]
        answer = decide(reports)
        self.tell(topic, answer)
        return answer

    def tell(self, topic: str, answer: Any) -> None:
        """Broadcasts from process 0; the others read it with `await_answer`."""
        self._send_down(messages.Broadcast(topic, answer))

    def await_answer(self, topic: str, timeout: float | None = None) -> Any:
        """Waits for what process 0 broadcasts on a topic."""
        with self._changed:
            answers = self._answers[topic]
            if not self._changed.wait_for(lambda: answers, timeout):
                raise TimeoutError(f"{topic}: nothing from {self.names[0]} in {timeout:.0f} s")
            return answers.popleft()

    def stops(self, step: int, request: str = "") -> tuple[int, str] | None:
        """Whether all processes stop at this step; called by each at the same points of the loop.

        Once any of them is asked to stop, all report their step and wait for the decision: the
        earliest step that none has passed. Nothing is sent before that.

        Args:
          step: counts the calls, from 1.
          request: what asked this process to stop, such as "SIGTERM".

        Returns:
          The process that was asked first, and its request; None to continue.
        """
        loop = self._loop
        if request and loop not in self._signals:
            self._send_up(messages.StopRequest(request, loop))
        with self._changed:
            self._step = step
            self._changed.wait_for(lambda: loop not in self._signals or loop in self._last)
            if loop not in self._last or step < self._last[loop]:
                return None
            self._loop, self._step = loop + 1, 0
            return self._signals[loop]

    def fail(
        self, text: str, patience: float, timeout: float = 3, status: int = 1
    ) -> tuple[int, str, int]:
        """Reports to the others that this process ends with an error.

        Args:
          patience: seconds to wait first for a report that another one has failed.
          status: that the others end with.

        Returns:
          The process that failed first, its error, which often is the reason for this one, and
          the status of all.
        """
        with self._changed:
            self._failing = True
            known = self._changed.wait_for(lambda: self._failure, patience)
        own = messages.Failure(text, status, self.process_id)
        if not known:
            self._send_up(own)
        with self._changed:
            self._changed.wait_for(lambda: self._failure, timeout)
            first = self._failure or own
        assert first.who is not None
        return first.who, first.text, first.status

    def inquire(self) -> None:
        """Makes process 0 ask all what they are doing, and end the run when they hang; called by a
        thread of a process that waits for too long."""
        before = self._question
        self._send_up(messages.Overdue())
        with self._changed:
            if self._changed.wait_for(
                lambda: self._question > before or self._failure, SILENT_SECONDS
            ):
                return
        text = f"{self.names[0]} does not respond; {self._here()}"
        hang = messages.Failure(text, who=0, hung=True)
        self._send_up(hang)  # one that goes on later would take the end of this one for a death
        self._handle(0, hang)

    def close(self) -> None:
        """Leaves the run: this process no longer reacts to the end of others."""
        with self._changed:
            self._closed = True
        for connection in self._connections.values():
            connection.send(messages.encode(messages.Goodbye()))
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)

    # Receiving, in a thread.

    def _receive(self) -> None:
        with selectors.DefaultSelector() as selector:
            for who, connection in self._connections.items():
                selector.register(connection.socket, selectors.EVENT_READ, (who, connection))
                self._handle_received(who, connection)  # what arrived with the answer to the hello
            while selector.get_map():
                for key, _ in selector.select():
                    who, connection = key.data
                    try:
                        more = connection.receive()
                        goes_on = self._handle_received(who, connection)
                    except (ValueError, KeyError, TypeError):  # no message of ours
                        more, goes_on = False, True
                    if not goes_on:
                        selector.unregister(connection.socket)
                    elif not more:
                        selector.unregister(connection.socket)
                        self._handle(who, messages.Failure(SILENT_DEATH))
        for connection in self._connections.values():
            connection.socket.close()

    def _handle_received(self, who: int, connection: Connection) -> bool:
        """Handles the messages received; False after the last one."""
        for values in connection.messages():
            message = messages.decode(values)
            if isinstance(message, messages.Goodbye):
                return False
            self._handle(who, message)
        return True

    def _send_up(self, message: messages.Message) -> None:
        """To process 0, which may be this one."""
        if self.process_id:
            self._connections[0].send(messages.encode(message))
        else:
            self._handle(0, message)

    def _send_down(self, message: messages.Message) -> None:
        """From process 0 to all, itself included."""
        for connection in self._connections.values():
            connection.send(messages.encode(message))
        self._handle(0, message)

    def _here(self) -> str:
        return f"{self.names[self.process_id]}: {self.place()[0]}"

    def _ask(self) -> None:
        """In process 0, in a thread: asks what all are doing, and ends them when they hang."""
        with self._changed:
            self._places = {}
        self._send_down(messages.Inquiry(self._question + 1))
        with self._changed:
            count = len(self.names)
            self._changed.wait_for(lambda: len(self._places) == count, SILENT_SECONDS)
            places, self._asking = dict(self._places), False
        silent = [name for i, name in enumerate(self.names) if i not in places]
        overdue = [f"{self.names[i]}: {doing}" for i, (doing, late) in places.items() if late]
        if not silent and len(overdue) < count:
            return  # somebody is at work
        who = f"{', '.join(silent)} {'do' if silent[1:] else 'does'} not respond" if silent else ""
        text = "; ".join([who or "nothing goes on", *overdue[:4]])
        self._handle(0, messages.Failure(text, hung=True))

    def _handle(self, who: int, message: messages.Message) -> None:
        """Handles a message: from `who` in process 0, or from process 0 in any process."""
        with self._changed:
            before = self._failure
            answer = self._answer(who, message)
            new_failure = None if before else self._failure
            self._changed.notify_all()
        if answer:
            (self._send_up if isinstance(answer, messages.UPWARD) else self._send_down)(answer)
        if new_failure:
            self._end(new_failure)

    def _answer(self, who: int, message: messages.Message) -> messages.Message | None:
        """Takes in a message; what is sent because of it."""
        match message:
            case messages.ProcessReport(topic, report):
                self._reports[topic, who].append(report)
            case messages.Broadcast(topic, answer) if self.process_id:
                self._answers[topic].append(answer)
            case messages.StopRequest(request, loop) if loop not in self._signals:
                self._signals[loop] = (who, request)
                return messages.Stopping(who, request, loop)
            case messages.Stopping(first, request, loop):
                self._signals[loop] = (first, request)
                # In a loop that has not begun here, any step can still be the last.
                return messages.StepPosition(self._step if loop == self._loop else 0, loop)
            case messages.StepPosition(step, loop):
                self._positions[loop][who] = step
                if len(self._positions[loop]) == len(self.names):
                    return messages.LastStep(1 + max(self._positions[loop].values()), loop)
            case messages.LastStep(step, loop):
                self._last[loop] = step
            case messages.Overdue() if not (self._asking or self._closed):
                self._asking = True
                threading.Thread(target=self._ask, name="inquiry", daemon=True).start()
            case messages.Inquiry(number):
                self._question = number
                return messages.Activity(*self.place())
            case messages.Activity(doing, late):
                self._places[who] = (doing, late)
            case messages.Failure() if not (self._failure or self._closed):
                first = who if message.who is None else message.who
                self._failure = replace(message, who=first)
                return self._failure if self.process_id == 0 else None
        return None

    def _end(self, failure: messages.Failure) -> None:
        """Ends this process because of the first failure."""
        assert failure.who is not None
        # This process may be about to find the same error by itself. Process 0 ends last: its
        # messages must arrive, and its end makes JAX end the others.
        time.sleep(1.0 if self.process_id else 1.5)
        if failure.hung:
            self.dump(self._here())
            self._on_death(failure.who, failure.text, 1)
        elif not self._failing:
            did = "failed" if failure.status in ERRORS else "ended"
            text = f"{self.names[failure.who]} {did}, so this one ends: {failure.text}"
            self._on_death(failure.who, text, failure.status)
