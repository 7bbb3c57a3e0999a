"""Processes that come together, agree, stop and die: as threads, over real sockets."""

import collections
import concurrent.futures
import contextlib
import json
import re
import socket
import threading
import time
from typing import Any

import pytest

from jaxscale import command_line
from jaxscale.distributed import control_channel, processes, rendezvous
from jaxscale.distributed.control_channel import ControlChannel

deaths: dict[ControlChannel, list] = collections.defaultdict(list)
"""What each of them heard of others."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def join(
    port, process_id, count, *, report=None, decide=lambda reports: {}, timeout=20.0, **settings
):
    """The line to the others, which only writes down a death, and the answer."""
    channel, answer = rendezvous.join(
        f"127.0.0.1:{port}",
        ("127.0.0.1", port),
        count,
        process_id,
        report,
        decide,
        timeout,
        **settings,
    )
    channel._on_death = lambda *death: deaths[channel].append(death)
    return channel, answer


def together(*works) -> list[Any]:
    """Runs each work in a thread; their results, or what they raised."""
    with concurrent.futures.ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(work) for work in works]
        return [future.exception() or future.result() for future in futures]


@contextlib.contextmanager
def group(count):
    port = free_port()
    found = together(*(lambda i=i: join(port, i, count)[0] for i in reversed(range(count))))
    found.sort(key=lambda channel: channel.process_id)
    try:
        yield found
    finally:
        leave(found)


def die(channel):
    """Its connections end, as the kernel ends those of the dead, and it says no more."""
    channel._closed = True
    for connection in channel._connections.values():
        connection.socket.shutdown(socket.SHUT_RDWR)


def leave(members):
    for channel in members:
        channel.close()
    for channel in members:
        channel._thread.join(10)
        assert not channel._thread.is_alive()


def until(condition, timeout=10.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_get_what_process_0_makes_of_all_reports():
    port, asked = free_port(), []

    def decide(reports):
        asked.append(reports)
        return {"sum": sum(reports)}

    works = [lambda i=i: join(port, i, 5, report=i, decide=decide) for i in (3, 1, 4, 0, 2)]
    found = together(*works)
    assert [answer for _, answer in found] == [{"sum": 10}] * 5
    assert asked == [[0, 1, 2, 3, 4]]
    host = socket.gethostname()
    assert all(channel.names[3] == f"process 3 on {host}" for channel, _ in found)
    # Large reports come in pieces, and several can be under way.
    members = [channel for channel, _ in found]
    texts = together(
        *(
            lambda p=p: [
                p.gather("a", [p.process_id] * 50_000, len),
                p.gather("b", p.process_id, list),
                p.gather("a", p.process_id, list),
            ]
            for p in members
        )
    )
    assert texts == [[5, list(range(5)), list(range(5))]] * 5
    leave(members)


def test_what_process_0_tells_arrives_in_order():
    with group(3) as members:
        for number in range(3):
            members[0].tell("topic", number)
        for channel in members[1:]:
            assert [channel.await_answer("topic", 5) for _ in range(3)] == [0, 1, 2]
            with pytest.raises(TimeoutError, match="nothing from process 0"):
                channel.await_answer("other", 0.01)
        with pytest.raises(TimeoutError, match=r"nothing from process 1 on .*, process 2"):
            members[0].gather("never", None, list, timeout=0.01)


def test_a_refusal_reaches_all():
    port = free_port()

    def decide(reports):
        return {"refusal": "process 1 is odd"}

    errors = together(*(lambda i=i: join(port, i, 3, decide=decide) for i in range(3)))
    assert all(isinstance(error, ValueError) for error in errors)
    # Once on a host is enough.
    hint = f"not started: the same error as process 0 on {socket.gethostname()}"
    assert [str(error) for error in errors] == ["process 1 is odd", hint, hint]
    assert {error.exit_status for error in errors} == {2}


@pytest.mark.proof
def test_those_who_do_not_come_are_named(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "node7")  # under SLURM its name of this host
    port = free_port()
    errors = together(*(lambda i=i: join(port, i, 5, timeout=0.7) for i in (0, 2)))
    said = (
        f"processes 1, 3 and 4 of 5 did not connect to 127.0.0.1:{port} in 1 s (process 0 on "
        "node7 and process 2 on node7 did)"
    )
    assert str(errors[0]).startswith(said)
    assert "not started: the same error as process 0 on" in str(errors[1])
    # A supervisor tries again.
    assert [error.exit_status for error in errors] == [1, 1]


@pytest.mark.proof
def test_without_process_0_its_address_is_in_doubt():
    port = free_port()
    said = rf"found no process 0 at 127.0.0.1:{port} .*refused"
    with pytest.raises(rendezvous.MissingProcessError, match=said):
        join(port, 1, 2, timeout=-4)
    with pytest.raises(ValueError, match=r"found no process 0 at no-such-host\.invalid:7"):
        rendezvous.join("no-such-host.invalid:7", ("no-such-host.invalid", 7), 2, 1, None, dict, -4)


@pytest.mark.parametrize("one_host", [True, False])
@pytest.mark.parametrize(
    ("second", "said"),
    [
        ((1, 3), "--process_id = 1 is given twice, on .* and on "),
        ((2, 4), "process 2 on .* has --num_processes = 4 and process 0 on .* has 3"),
    ],
    ids=["twice", "count"],
)
def test_processes_that_contradict_each_other_are_refused(second, said, one_host, monkeypatch):
    monkeypatch.setattr(rendezvous, "LATE_SECONDS", 0.2)  # one does not come
    if not one_host:  # a thread is a process here, and each on a separate host
        monkeypatch.setattr(socket, "gethostname", lambda: threading.current_thread().name)
    port = free_port()
    errors = together(
        lambda: join(port, 0, 3), lambda: join(port, 1, 3), lambda: join(port, *second)
    )
    assert all(isinstance(error, ValueError) for error in errors)
    assert re.search(said, str(errors[0]))


def test_one_that_has_connected_and_says_hello_after_a_refusal_hears_it(monkeypatch):
    """It would try again until its time is up, and then miss process 0. Also where another id was
    given twice, so that as many as there should be had come."""
    abort = rendezvous._abort_all
    for second, said in (
        ((2, 4), "process 2 on .* has --num_processes = 4 and process 0 on .* has 3; give all"),
        ((2, 3), "--process_id = 2 is given twice"),
    ):
        refused, port = threading.Event(), free_port()

        def abort_all(*arguments, refused=refused):
            abort(*arguments)
            refused.set()

        def late(port=port, refused=refused):
            with guest(port) as (connection, challenge):
                assert refused.wait(10)
                hello = HELLO | {"num_processes": 3}
                answer = ask(connection, rendezvous._signed("hello", challenge, hello))
                return rendezvous._opened("answer", "n", answer)

        monkeypatch.setattr(rendezvous, "_abort_all", abort_all)
        works = [late, lambda p=port: join(p, 0, 3), lambda p=port: join(p, 2, 3)]
        if second[1] == 4:
            works.pop()
        answer, *_ = together(*works, lambda p=port, s=second: join(p, *s))
        assert re.match(said, answer["refusal"]), answer


def test_a_second_process_0_finds_the_port_taken():
    port = free_port()
    with socket.create_server(("", port)), pytest.raises(ValueError, match="another process with"):
        join(port, 0, 2)


HELLO = {"process_id": 1, "num_processes": 2, "host": "h", "report": None, "nonce": "n"}


@contextlib.contextmanager
def guest(port):
    """A connection to process 0, once it listens, and the challenge."""
    deadline = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port))
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with connection:
        yield connection, read(connection)["challenge"]


def read(connection):
    """The next message; {} where there is none any more."""
    line = b""
    with contextlib.suppress(ConnectionError):
        while not line.endswith(b"\n") and (one := connection.recv(1)):
            line += one
    return json.loads(line or b"{}")


def ask(connection, message):
    with contextlib.suppress(ConnectionError):
        connection.sendall((message if isinstance(message, bytes) else encoded(message)) + b"\n")
    return read(connection)


def encoded(message):
    return json.dumps(message).encode()


def test_strangers_and_those_who_come_again_do_no_harm(monkeypatch):
    port = free_port()

    def stranger():
        for data in (
            b"GET / HTTP/1.1\r\n\r",
            b'{"process_id": 1}',
            b"[1]",
            b"[" * 100_000,
            b"\xff\xfe",
            b'{"a": 1}\n{"a": 1}',
            encoded({"content": "[" * 20_000, "proof": "p"}),
            encoded({"content": "\ud800", "proof": "\ud800"}),
        ):
            with guest(port) as (connection, _):
                assert ask(connection, data) in ({}, {"unproven": True})
        hello = HELLO | {"num_processes": 3}
        for wrong in (
            {"process_id": []},
            {"process_id": True},
            {"process_id": 3},
            {"num_processes": "3"},
            {"host": {"a": 1}},
            {"host": "h" * 10_000},
            {"nonce": None},
            {"report": "no report"},
        ):
            with guest(port) as (connection, challenge):
                assert not ask(connection, rendezvous._signed("hello", challenge, hello | wrong))
        # A process that came, and was started anew.
        with guest(port) as (connection, challenge):
            connection.sendall(encoded(rendezvous._signed("hello", challenge, hello)) + b"\n")
        time.sleep(0.2)
        return together(lambda: join(port, 1, 3), lambda: join(port, 2, 3))

    monkeypatch.setattr(rendezvous, "MOST_HELLO_BYTES", 50_000)
    found = together(lambda: join(port, 0, 3, valid=lambda report: report is None), stranger)
    first, others = found
    for channel, _ in (first, *others):
        assert channel.names == [f"process {i} on {socket.gethostname()}" for i in range(3)]
    leave([first[0], *(channel for channel, _ in others)])


def test_what_was_heard_of_another_start_or_is_changed_takes_no_part(monkeypatch):
    """Everything in a hello and in its answer is signed, for this connection alone."""
    monkeypatch.setenv(rendezvous.TOKEN, "secret")
    port, unproven = free_port(), {"unproven": True}

    def stranger():
        with guest(port) as (connection, challenge):
            heard = rendezvous._signed("hello", challenge, HELLO)
            changed = {**heard, "content": heard["content"].replace("null", '"another report"')}
            assert ask(connection, changed) == unproven
        with guest(port) as (connection, _):
            assert ask(connection, heard) == unproven
        with guest(port) as (connection, challenge):
            assert ask(connection, rendezvous._signed("answer", challenge, HELLO)) == unproven
        return join(port, 1, 2)

    (first, _), (other, _) = together(lambda: join(port, 0, 2), stranger)
    leave([first, other])

    with socket.create_server(("127.0.0.1", 0)) as process_0:
        port = process_0.getsockname()[1]
        heard = rendezvous._signed("answer", "of another start", {"refusal": "x", "missing": False})

        def answer():
            with process_0.accept()[0] as connection:
                connection.sendall(encoded({"challenge": "c"}) + b"\n" + encoded(heard) + b"\n")
                process_0.close()
                connection.recv(1 << 16)

        _, error = together(answer, lambda: join(port, 1, 2, timeout=-4.5))
        assert isinstance(error, rendezvous.MissingProcessError)
        assert "another program listens on that port" in str(error) or "refused" in str(error)


def test_silent_connections_keep_no_process_out(monkeypatch):
    """However many they are; each is closed in a while, and nothing moves the deadline."""
    port = free_port()

    def silent():
        with contextlib.ExitStack() as stack:
            for _ in range(rendezvous.MOST_GUESTS + 20):
                stack.enter_context(guest(port))
            return join(port, 1, 2)

    found = together(lambda: join(port, 0, 2), silent)
    leave([channel for channel, _ in found])

    monkeypatch.setattr(rendezvous, "GUEST_SECONDS", 0.05)
    port, ended = free_port(), threading.Event()

    def knock():
        with guest(port) as (connection, _):
            assert read(connection) == {}
        while not ended.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                pass

    def start():
        try:
            join(port, 0, 2, timeout=0.5)
        finally:
            ended.set()

    error, _ = together(start, knock)
    assert str(error).startswith("process 1 of 2 did not connect")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_the_address_that_is_needed_listens(host):
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with rendezvous._listen("c", host, 0) as listener:
        assert listener.getsockname()[0] == host
    # A name of several IP addresses, or of another machine, which forwards.
    assert rendezvous.bind_address("192.0.2.1") is None


def test_a_token_keeps_others_out_who_are_told_so(monkeypatch):
    """Threads share an environment: the token of each process is that of its thread."""
    tokens = {0: "a", 1: "b", 2: "a"}
    make = rendezvous._proof

    def proof(*signed):
        name = threading.current_thread().name
        monkeypatch.setenv(rendezvous.TOKEN, tokens[int(name)] if name.isdigit() else "a")
        return make(*signed)

    def named(process_id, port):
        threading.current_thread().name = str(process_id)
        return join(port, process_id, 2, timeout=3)

    monkeypatch.setattr(rendezvous, "_proof", proof)
    port = free_port()
    first, other = together(lambda: named(0, port), lambda: named(1, port))
    assert str(other).startswith("JAXSCALE_TOKEN differs from process 0's; set the same in")
    assert str(first).startswith("process 1 of 2 did not connect")


def test_a_frozen_process_is_named_and_all_say_what_they_did(monkeypatch):
    monkeypatch.setattr(control_channel, "SILENT_SECONDS", 0.5)
    with group(3) as members:
        said = collections.defaultdict(list)
        for channel in members:
            channel.activity = lambda c=channel: (f"training (step {c.process_id})", True)
            channel.dump = said[channel].append
        members[0].activity = lambda: ("saving (step 3)", False)
        members[1].inquire()
        time.sleep(0.7)
        assert not any(deaths[channel] for channel in members), "process 0 is at work"
        frozen = threading.Event()
        members[2].activity = lambda: frozen.wait(5) and ("", True)
        members[1].inquire()
        until(lambda: deaths[members[0]] and deaths[members[1]])
        frozen.set()
        names = members[0].names
        for channel in members[:2]:
            ((_, text, status),) = deaths[channel]
            assert text == f"{names[2]} does not respond; {names[1]}: training (step 1)"
            assert status == 1
        assert said[members[1]] == [f"{names[1]}: training (step 1)"]


@pytest.mark.proof
def test_a_frozen_process_0_is_noticed_by_the_others(monkeypatch):
    monkeypatch.setattr(control_channel, "SILENT_SECONDS", 0.3)
    with group(2) as members:
        for channel in members:
            channel.activity = lambda: ("training (step 3)", True)
        members[0]._asking = True  # it does not react
        members[1].inquire()
        until(lambda: deaths[members[1]])
        names = members[0].names
        until(lambda: deaths[members[0]])  # it resumes after all, and blames no other
        for channel in members:
            ((who, text, _),) = deaths[channel]
            assert who == 0
            assert text == f"{names[0]} does not respond; {names[1]}: training (step 3)"


def steps(channel: ControlChannel, barrier: threading.Barrier, signals: dict[int, str], last: int):
    """A training whose steps all processes take together; the step it stopped after, and why."""
    for step in range(1, last + 1):
        barrier.wait(30)
        time.sleep(0.002)
        if stop := channel.stops(step, signals.get(step, "")):
            return step, stop
    return None


@pytest.mark.parametrize(
    "signals",
    [{1: {3: "SIGTERM"}}, {0: {3: "SIGINT"}}, {i: {3: "SIGTERM"} for i in range(4)}],
    ids=["one", "first", "all"],
)
def test_a_signal_to_one_stops_all_after_the_same_step(signals):
    with group(4) as members:
        for _ in range(2):  # a session may train again
            barrier = threading.Barrier(4)
            found = together(
                *(
                    lambda p=p, b=barrier: steps(p, b, signals.get(p.process_id, {}), 300)
                    for p in members
                )
            )
            assert len(set(found)) == 1, found
            step, (who, request) = found[0]
            assert step >= 3
            assert who in signals
            assert request == signals[who][3]


def test_without_a_signal_nothing_is_sent():
    with group(2) as members:
        sent = []
        for channel in members:
            for connection in channel._connections.values():
                connection.send = sent.append
        assert [channel.stops(1) for channel in members] == [None, None]
        assert not sent


@pytest.mark.parametrize("victim", [0, 2])
def test_a_process_that_dies_is_named_by_all_others(victim):
    with group(3) as members:
        die(members[victim])
        others = [channel for channel in members if channel.process_id != victim]
        until(lambda: all(deaths[channel] for channel in others))
        for channel in others:
            ((who, text, status),) = deaths[channel]
            assert (who, status) == (victim, 1)
            assert text.startswith(f"{channel.names[victim]} failed, so this one ends: it ended")


@pytest.mark.proof
def test_an_error_ends_the_others_with_its_words():
    with group(3) as members:
        assert members[1].fail("no disk", patience=0) == (1, "no disk", 1)
        until(lambda: deaths[members[0]] and deaths[members[2]])
        for channel in (members[0], members[2]):
            said = f"{channel.names[1]} failed, so this one ends: no disk"
            assert deaths[channel] == [(1, said, 1)]
        assert not deaths[members[1]]


@pytest.mark.proof
def test_what_one_refuses_all_refuse(monkeypatch, capsys):
    """With the status after which no supervisor starts a process again."""
    with group(2) as members, monkeypatch.context() as patch:
        patch.setattr(processes, "_channel", members[0])
        patch.setattr(command_line, "_report", processes._report)
        with pytest.raises(SystemExit) as ended, command_line.refusals():
            raise ValueError("data.seq_len = 0 is too few")
        assert ended.value.code == 2
        until(lambda: deaths[members[1]])
        said = f"{members[0].names[0]} failed, so this one ends: data.seq_len = 0 is too few"
        assert deaths[members[1]] == [(0, said, 2)]
        assert members[1].fail("a collective", patience=0)[2] == 2, "what follows from it, too"
    assert capsys.readouterr().err == "error: data.seq_len = 0 is too few\n"


@pytest.mark.proof
def test_one_that_was_asked_to_stop_before_training_takes_the_others_along():
    with group(2) as members:
        members[1].fail("SIGTERM while compiling", patience=0, status=143)
        until(lambda: deaths[members[0]])
        said = f"{members[0].names[1]} ended, so this one ends: SIGTERM while compiling"
        assert deaths[members[0]] == [(1, said, 143)]


@pytest.mark.proof
def test_an_error_that_follows_from_a_death_knows_it():
    with group(3) as members:
        die(members[2])
        found = together(*(lambda p=p: p.fail("collective", patience=5) for p in members[:2]))
        assert [(who, status) for who, _, status in found] == [(2, 1), (2, 1)]
        assert not deaths[members[0]] + deaths[members[1]], "who has an error speaks for itself"


@pytest.mark.proof
def test_those_who_leave_in_peace_are_not_missed():
    with group(3) as members:
        members[1].close()
        members[2].close()
        members[0].tell("still there", 1)
        members[0].close()
        time.sleep(1.2)
        assert not any(deaths[channel] for channel in members)
