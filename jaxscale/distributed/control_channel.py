"""The control channel of a run: every process to process 0, for agreement and failure detection.

It is separate from JAX's own connections, which report neither a missing process, nor a difference
between two, nor which process died: JAX ends a process without naming the one that failed. Here a
process that ends closes its connection (the kernel closes it even after SIGKILL), and process 0
tells the others within a second. Messages are few, small, and JSON, one a line; no data of a
training step is sent here.
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
"""Far above any message of ours: a sender of more is another program."""

LOST_SECONDS = 30
"""A host that has not responded for this long counts as dead."""

SILENT_SECONDS = 5
"""A process that does not answer an inquiry for this long counts as frozen."""

ERRORS = (1, 2)
"""Exit statuses of a failure and of a refusal; with any other, the process was asked to end."""

SILENT_DEATH = (
    "it ended without reporting an error; look in its log, or its launcher's, for a kill or for "
    "out of memory"
)

Decide = Callable[[list[Any]], Any]


class Connection:
    """A socket to one process: JSON messages in and out."""

    def __init__(self, sock: socket.socket):
        # A message is one small write; Nagle's algorithm would delay a report of a death.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that loses power or its network sends no FIN, and Linux probes an idle connection
        # only after two hours. Keepalive finds an idle peer, TCP_USER_TIMEOUT one with unsent data.
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
        """Sends a message; drops it when the other end has closed."""
        # Several threads send: a line must not be cut by another. A lost peer is reported by
        # `receive`, so an error here adds nothing.
        with self._lock, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, most_bytes: int | None = None) -> bool:
        """Blocks for one read; False when the other end has closed.

        Args:
          most_bytes: of a message; by default `MOST_MESSAGE_BYTES`.

        Raises:
          ValueError: the data is not a message of this channel: another program sent it.
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
    """Ends this process at once: another one has ended, and no collective completes without it."""
    with contextlib.suppress(OSError):  # the terminal may be closed
        print(f"error: {text}" if status in ERRORS else text, file=sys.stderr, flush=True)
    # `sys.exit` in this thread would leave the main thread in its collective, and JAX's exit
    # handlers wait for the other processes.
    os._exit(status)


class ControlChannel:
    """Connects this process to the others, once all have joined.

    Args:
      connections: by process id: to all others in process 0, to process 0 in the others.
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
        # In process 0: (topic, process) -> its reports, oldest first.
        self._reports = collections.defaultdict[tuple[str, int], collections.deque](
            collections.deque
        )
        # Topic -> broadcasts of process 0, oldest first.
        self._answers = collections.defaultdict[str, collections.deque](collections.deque)
        self._failure: messages.Failure | None = None
        self._failing = self._closed = False
        # A process may run several training loops, one after the other. The dictionaries are keyed
        # by the number of the loop, so that a late message of one never stops the next.
        self._loop, self._step = 0, 0
        self._signals: dict[int, tuple[int, str]] = {}  # the process asked first, and its request
        # In process 0: the step at which each process waits.
        self._positions = collections.defaultdict[int, dict[int, int]](dict)
        self._last: dict[int, int] = {}  # the step after which all stop
        # The activity of this process, and whether it is past its deadline; the report in a hang.
        self.activity: Callable[[], tuple[str, bool]] = lambda: ("starting", False)
        self.dump: Callable[[str], Any] = lambda doing: None
        self._question, self._asking = 0, False
        self._activities: dict[int, tuple[str, bool]] = {}  # in process 0: answers to an inquiry
        self._thread = threading.Thread(target=self._receive, name="control channel", daemon=True)
        self._thread.start()

    # Called by the main thread.

    def gather(self, topic: str, report: Any, decide: Decide, timeout: float | None = None) -> Any:
        """Gathers a report of each process in process 0; all get the result of `decide`.

        Args:
          topic: names the exchange; every process must make the same number of calls for it.
          decide: called by process 0 with all reports in order; must not raise.
          timeout: in seconds.

        Raises:
          TimeoutError: in process 0 it names the processes that sent no report.
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
        """Waits for the next broadcast of process 0 on a topic."""
        with self._changed:
            answers = self._answers[topic]
            if not self._changed.wait_for(lambda: answers, timeout):
                raise TimeoutError(f"{topic}: nothing from {self.names[0]} in {timeout:.0f} s")
            return answers.popleft()

    def stops(self, step: int, request: str = "") -> tuple[int, str] | None:
        """Whether all processes stop at this step; called by each at the same points of the loop.

        When one is asked to stop, each reports its step and waits; process 0 decides on the
        earliest step that none has passed. Nothing is sent before the request.

        Args:
          step: counts the calls, from 1.
          request: what asked this process to stop, such as "SIGTERM".

        Returns:
          The process that was asked first, and its request; None to continue.
        """
        # JAX dispatches steps ahead, so processes are at different steps: one that stopped alone
        # would leave the others in a collective.
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
          status: the exit status of the others.

        Returns:
          The process that failed first, its error, often the cause of this one, and the exit
          status of all.
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
        """Makes process 0 ask all for their activity, and end the run when it hangs; called by the
        watchdog thread of a process that is past its deadline."""
        before = self._question
        self._send_up(messages.Overdue())
        with self._changed:
            if self._changed.wait_for(
                lambda: self._question > before or self._failure, SILENT_SECONDS
            ):
                return
        text = f"{self.names[0]} does not respond; {self._here()}"
        hang = messages.Failure(text, who=0, hung=True)
        # For a process 0 that was only frozen (SIGSTOP) and resumes: it would take the end of this
        # process for a death, and its supervisor would exclude the wrong host.
        self._send_up(hang)
        self._handle(0, hang)

    def close(self) -> None:
        """Leaves the run: this process no longer reacts to the end of others."""
        with self._changed:
            self._closed = True
        for connection in self._connections.values():
            connection.send(messages.encode(messages.Goodbye()))
            # `close` of the socket with unread data sends RST, which may discard the goodbye.
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)

    # Receiving, in a thread.

    def _receive(self) -> None:
        with selectors.DefaultSelector() as selector:
            for who, connection in self._connections.items():
                selector.register(connection.socket, selectors.EVENT_READ, (who, connection))
                self._handle_received(who, connection)  # read together with the rendezvous's answer
            while selector.get_map():
                for key, _ in selector.select():
                    who, connection = key.data
                    try:
                        more = connection.receive()
                        stays = self._handle_received(who, connection)
                    except (ValueError, KeyError, TypeError):  # from another program
                        more, stays = False, True
                    if not stays:
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
        """Sends to process 0, which may be this one."""
        if self.process_id:
            self._connections[0].send(messages.encode(message))
        else:
            self._handle(0, message)

    def _send_down(self, message: messages.Message) -> None:
        """Sends from process 0 to all, itself included."""
        for connection in self._connections.values():
            connection.send(messages.encode(message))
        self._handle(0, message)

    def _here(self) -> str:
        return f"{self.names[self.process_id]}: {self.activity()[0]}"

    def _ask(self) -> None:
        """Asks all for their activity, and ends them when they hang; in a thread of process 0."""
        with self._changed:
            self._activities = {}
        self._send_down(messages.Inquiry(self._question + 1))
        with self._changed:
            count = len(self.names)
            self._changed.wait_for(lambda: len(self._activities) == count, SILENT_SECONDS)
            answers, self._asking = dict(self._activities), False
        silent = [name for i, name in enumerate(self.names) if i not in answers]
        overdue = [f"{self.names[i]}: {doing}" for i, (doing, late) in answers.items() if late]
        # The others may be waiting for one process that is within its deadline, such as process 0
        # in a long save: that is no hang.
        if not silent and len(overdue) < count:
            return
        who = f"{', '.join(silent)} {'do' if silent[1:] else 'does'} not respond" if silent else ""
        text = "; ".join([who or "the run hangs", *overdue[:4]])
        self._handle(0, messages.Failure(text, hung=True))

    def _handle(self, who: int, message: messages.Message) -> None:
        """Handles a message: from `who` in process 0, or from process 0 in any process."""
        # Sent without the lock: a send may block on a full socket, or in process 0 call this again.
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
        """Updates the state by a message; returns the reply to send, if any."""
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
                # Step 0 for a loop that this process has not begun: any step may be the last.
                return messages.StepPosition(self._step if loop == self._loop else 0, loop)
            case messages.StepPosition(step, loop):
                self._positions[loop][who] = step
                if len(self._positions[loop]) == len(self.names):
                    return messages.LastStep(1 + max(self._positions[loop].values()), loop)
            case messages.LastStep(step, loop):
                self._last[loop] = step
            case messages.Overdue() if not (self._asking or self._closed):
                # In a thread, because the receiving thread has to read the answers.
                self._asking = True
                threading.Thread(target=self._ask, name="inquiry", daemon=True).start()
            case messages.Inquiry(number):
                self._question = number
                return messages.Activity(*self.activity())
            case messages.Activity(doing, late):
                self._activities[who] = (doing, late)
            case messages.Failure() if not (self._failure or self._closed):
                first = who if message.who is None else message.who
                self._failure = replace(message, who=first)
                return self._failure if self.process_id == 0 else None
        return None

    def _end(self, failure: messages.Failure) -> None:
        """Ends this process because of the first failure."""
        assert failure.who is not None
        # This process may be about to report the same error itself (`_failing`). Process 0 ends
        # last: its messages must arrive, and JAX ends all others when process 0 ends.
        time.sleep(1.0 if self.process_id else 1.5)
        if failure.hung:
            self.dump(self._here())
            self._on_death(failure.who, failure.text, 1)
        elif not self._failing:
            did = "failed" if failure.status in ERRORS else "ended"
            text = f"{self.names[failure.who]} {did}, so this one ends: {failure.text}"
            self._on_death(failure.who, text, failure.status)
