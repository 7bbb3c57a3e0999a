"""A line from every process of a run to process 0: what they agree on, and who has died.

It lies beside JAX's own connections, because those are silent about what people ask first: which
process did not come, what differs between two, which one died. JAX ends a process without a word
that names another; here a process that ends closes its line, which the kernel does for it even
when it is killed, and process 0 tells the rest within a second. Messages are lines of JSON, small
and few: nothing of a training step goes through here.
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
from typing import Any, NoReturn

LOST_SECONDS = 30
"""After this time without a sign of life, a host that has vanished counts as ended."""

SILENT_DEATH = (
    "it ended without a word; its log, or whoever started it, may say whether it was killed or ran "
    "out of memory"
)

Decide = Callable[[list[Any]], Any]


class Line:
    """One connection: messages in and out."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", LOST_SECONDS // 3),
            ("TCP_KEEPINTVL", LOST_SECONDS // 6),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", 1000 * LOST_SECONDS),
        ):
            if hasattr(socket, option):  # macOS calls some of them otherwise
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self.connection = connection
        self._buffer = b""
        self._messages: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message; one that can no longer arrive is dropped, its reader is gone."""
        with self._lock, contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> bool:
        """Waits for data once; False at the end.

        Raises:
          ValueError: what came is no message: something else speaks there.
        """
        try:
            data = self.connection.recv(1 << 16)
        except OSError:
            data = b""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._messages.append(json.loads(line))
            if not isinstance(self._messages[-1], dict):
                raise ValueError("not a message")
        return bool(data)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Takes those that have come, and are not taken yet."""
        while self._messages:
            yield self._messages.pop(0)


def end(who: int, text: str) -> NoReturn:
    """Ends this process at once: another one is gone, and nothing here can go on without it."""
    print(f"error: {text}", file=sys.stderr, flush=True)
    os._exit(1)


class Peers:
    """This process and the others, once all have come.

    Args:
      lines: process id -> its line: of all others for process 0, of process 0 alone for the rest.
      names: how each process is called in messages.
      on_death: gets the id and a sentence when another process failed or died.
    """

    def __init__(
        self,
        process_id: int,
        lines: dict[int, Line],
        names: list[str],
        on_death: Callable[[int, str], Any] = end,
    ):
        self.process_id, self.names = process_id, names
        self._lines, self._on_death = lines, on_death
        self._changed = threading.Condition()
        # Process 0: topic, process -> its reports, in their order.
        self._reports = collections.defaultdict[tuple[str, int], collections.deque](
            collections.deque
        )
        # Topic -> what process 0 said, in its order.
        self._answers = collections.defaultdict[str, collections.deque](collections.deque)
        self._failure: tuple[int, str] | None = None
        self._failing = self._closed = False
        # A process may stop several times, one loop after the other; these are by that number.
        self._loop, self._step = 0, 0
        self._signals: dict[int, tuple[int, int]] = {}  # who was signalled, and with what
        self._places = collections.defaultdict[int, dict[int, int]](dict)  # process 0: of each
        self._last: dict[int, int] = {}  # the step that all stop after
        self._thread = threading.Thread(target=self._listen, name="peers", daemon=True)
        self._thread.start()

    # What the main thread calls.

    def gather(self, topic: str, report: Any, decide: Decide, timeout: float | None = None) -> Any:
        """Collects a report of each process at process 0; all get what it makes of them.

        Args:
          topic: what the reports are about; each process reports on it equally often.
          decide: called by process 0 with all reports in order; must not raise.
          timeout: in seconds.

        Raises:
          TimeoutError: names the processes that have sent no report, where that is known.
        """
        if self.process_id:
            self._send_up({"topic": topic, "report": report})
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
        """Process 0 says something to all; they read it with `await_answer`."""
        self._send_down({"topic": topic, "answer": answer})

    def await_answer(self, topic: str, timeout: float | None = None) -> Any:
        """What process 0 said on a topic, once it has."""
        with self._changed:
            answers = self._answers[topic]
            if not self._changed.wait_for(lambda: answers, timeout):
                raise TimeoutError(f"{topic}: nothing from {self.names[0]} in {timeout:.0f} s")
            return answers.popleft()

    def stops(self, step: int, signalled: int = 0) -> tuple[int, int] | None:
        """Whether all processes stop after this step; called by each after every step.

        Once any of them is signalled, all say where they are and wait for the decision: the
        earliest step that none has gone beyond. Nothing is sent before that.

        Returns:
          The process that was signalled first, and its signal; None to go on.
        """
        loop = self._loop
        if signalled and loop not in self._signals:
            self._send_up({"signal": signalled, "loop": loop})
        with self._changed:
            self._step = step
            self._changed.wait_for(lambda: loop not in self._signals or loop in self._last)
            if loop not in self._last or step < self._last[loop]:
                return None
            self._loop, self._step = loop + 1, 0
            return self._signals[loop]

    def fail(self, text: str, patience: float, timeout: float = 3) -> tuple[int, str]:
        """Tells the others that this process ends with an error.

        Args:
          patience: seconds to wait first for the word that another one has failed.

        Returns:
          The process that failed first, and its error: often the reason for this one.
        """
        with self._changed:
            self._failing = True
            if self._changed.wait_for(lambda: self._failure, patience):
                assert self._failure
                return self._failure
        self._send_up({"failed": text})
        with self._changed:
            self._changed.wait_for(lambda: self._failure, timeout)
            return self._failure or (self.process_id, text)

    def close(self) -> None:
        """Leaves in peace: what becomes of the others is no matter of this process any more."""
        with self._changed:
            self._closed = True
        for line in self._lines.values():
            line.send({"bye": True})
            with contextlib.suppress(OSError):
                line.connection.shutdown(socket.SHUT_WR)

    # What comes over the lines, in the thread.

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for who, line in self._lines.items():
                selector.register(line.connection, selectors.EVENT_READ, (who, line))
                self._take(who, line)  # what came close behind the welcome
            while selector.get_map():
                for key, _ in selector.select():
                    who, line = key.data
                    try:
                        more = line.receive()
                    except ValueError:
                        more = False
                    if not self._take(who, line):
                        selector.unregister(line.connection)
                    elif not more:
                        selector.unregister(line.connection)
                        self._hear(who, {"failed": SILENT_DEATH})
        for line in self._lines.values():
            line.connection.close()

    def _take(self, who: int, line: Line) -> bool:
        """Hears what has come; False when it was the last."""
        for message in line.messages():
            if "bye" in message:
                return False
            self._hear(who, message)
        return True

    def _send_up(self, message: dict[str, Any]) -> None:
        """To process 0, which may be this one."""
        if self.process_id:
            self._lines[0].send(message)
        else:
            self._hear(0, message)

    def _send_down(self, message: dict[str, Any]) -> None:
        """From process 0 to all, itself included."""
        for line in self._lines.values():
            line.send(message)
        self._hear(0, message)

    def _hear(self, who: int, message: dict[str, Any]) -> None:
        """Acts on a message: of `who`, to process 0; or of process 0, to all."""
        down: list[dict[str, Any]] = []  # what process 0 has to say to all
        loop = message.get("loop", 0)
        with self._changed:
            if "report" in message:
                self._reports[message["topic"], who].append(message["report"])
            elif "answer" in message:
                if self.process_id:
                    self._answers[message["topic"]].append(message["answer"])
            elif "signal" in message:
                if loop not in self._signals:
                    self._signals[loop] = (who, message["signal"])
                    down.append({"signalled": self._signals[loop], "loop": loop})
            elif "signalled" in message:
                self._signals[loop] = tuple(message["signalled"])
                # A loop that has not begun here has no step that is too late.
                down.append({"at": self._step if loop == self._loop else 0, "loop": loop})
            elif "at" in message:
                self._places[loop][who] = message["at"]
                if len(self._places[loop]) == len(self.names):
                    down.append({"last": 1 + max(self._places[loop].values()), "loop": loop})
            elif "last" in message:
                self._last[loop] = message["last"]
            elif "failed" in message and not self._failure and not self._closed:
                first, text = self._failure = (message.get("who", who), message["failed"])
                if not self.process_id:
                    down.append({"failed": text, "who": first})
            else:
                return
            self._changed.notify_all()
        for answer in down:
            (self._send_up if "at" in answer else self._send_down)(answer)
        if "failed" in message:
            # This process may be about to find the same error by itself. Process 0 ends last: what
            # it says must arrive, and JAX takes its end for that of the others too.
            time.sleep(1.0 if self.process_id else 1.5)
            if not self._failing:
                self._on_death(first, f"{self.names[first]} failed, so this one ends: {text}")
