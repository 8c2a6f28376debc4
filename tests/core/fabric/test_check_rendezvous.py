"""The rendezvous of a fabric check: who gets in, and what cannot be put into a connection."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

import pytest

from pipemorph.fabric.check import rendezvous
from pipemorph.fabric.check.rendezvous import Channel, Listener, RendezvousError, connect

SECRET = "0123456789abcdef"
SECONDS = 20.0


def answering(channel: Channel) -> bool:
    """Say back what is heard, until told to end."""
    try:
        while (said := channel.hear(SECONDS)) != {"end": True}:
            channel.say(said)
    except RendezvousError:
        return False
    return True


@contextmanager
def listening(seconds: float = SECONDS) -> Iterator[tuple[int, Queue[bool]]]:
    """The port, and what became of it."""
    done: Queue[bool] = Queue()
    with Listener("127.0.0.1", 0, SECRET) as listener:
        serving = threading.Thread(target=lambda: done.put(listener.serve(answering, seconds)))
        serving.start()
        yield listener.port, done
        serving.join(SECONDS)
        assert not serving.is_alive()


def end(channel: Channel) -> None:
    channel.say({"end": True})
    channel.close()


def test_requests_are_answered_until_the_end():
    with listening() as (port, done):
        channel = connect("127.0.0.1", port, SECRET, SECONDS)
        for number in range(3):
            assert channel.ask({"n": number}, SECONDS) == {"n": number}
        end(channel)
        assert done.get(timeout=SECONDS) is True


def test_a_host_without_the_secret_is_refused_and_the_next_is_served():
    with listening() as (port, done):
        with pytest.raises(RendezvousError, match=r"closed the connection .*is the secret file"):
            connect("127.0.0.1", port, "x" * 16, SECONDS)
        end(connect("127.0.0.1", port, SECRET, SECONDS))
        assert done.get(timeout=SECONDS) is True


def test_a_connector_that_vanishes_does_not_end_it():
    with listening() as (port, done):
        connect("127.0.0.1", port, SECRET, SECONDS).close()
        end(connect("127.0.0.1", port, SECRET, SECONDS))
        assert done.get(timeout=SECONDS) is True


def test_strangers_that_say_nothing_keep_nobody_out():
    with listening() as (port, done):
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
        end(connect("127.0.0.1", port, SECRET, SECONDS))
        assert done.get(timeout=SECONDS) is True
        for each in strangers:
            each.close()


def test_the_time_that_a_connector_takes_is_not_that_of_the_next():
    done: Queue[bool] = Queue()
    seconds, in_use = 0.2, threading.Event()

    def long(channel: Channel) -> bool:
        in_use.set()
        deadline = time.monotonic() + 2 * seconds
        while time.monotonic() < deadline:
            pass
        return answering(channel)

    with Listener("127.0.0.1", 0, SECRET) as listener:
        serving = threading.Thread(target=lambda: done.put(listener.serve(long, seconds)))
        serving.start()
        connect("127.0.0.1", listener.port, SECRET, SECONDS).close()
        assert in_use.wait(SECONDS)
        end(connect("127.0.0.1", listener.port, SECRET, SECONDS))
        assert done.get(timeout=SECONDS) is True
        serving.join(SECONDS)


def test_nobody_comes():
    with listening(seconds=0.01) as (_, done):
        assert done.get(timeout=SECONDS) is False


def test_a_listener_that_does_not_know_the_secret_is_found_out():
    """One that sends back what it got, and one that says nothing of use."""

    def answer(line: dict[str, Any]) -> bytes:
        return json.dumps({"proof": line["proof"]}).encode() + b"\n"

    for reply in (answer, lambda _: b"[]\n"):
        with socket.create_server(("127.0.0.1", 0)) as server:

            def impostor(server: socket.socket = server, reply: Any = reply) -> None:
                stream, _ = server.accept()
                with stream, stream.makefile("rb") as lines:
                    stream.sendall(b'{"nonce": "1"}\n')
                    stream.sendall(reply(json.loads(lines.readline())))

            thread = threading.Thread(target=impostor)
            thread.start()
            with pytest.raises(RendezvousError):
                connect("127.0.0.1", server.getsockname()[1], SECRET, SECONDS)
            thread.join(SECONDS)


def pair() -> tuple[Channel, Channel, socket.socket]:
    """Two ends with a key, and the stream into the second one."""
    a, b = socket.socketpair()
    key = b"key"
    return Channel(a, key, rendezvous.CONNECTOR), Channel(b, key, rendezvous.LISTENER), a


def line(number: int, text: str, role: str = rendezvous.CONNECTOR) -> bytes:
    code = rendezvous._code(b"key", role, number, text)
    return json.dumps({"code": code, "text": text}).encode() + b"\n"


@pytest.mark.parametrize(
    "lines",
    [
        [line(0, "{}").replace(b"{}", b"[]")],
        [line(0, "{}"), line(0, "{}")],
        [line(1, "{}")],
        [line(0, "{}", rendezvous.LISTENER)],
        [b"\xff\n"],
        [b'{"text": "{}"}\n'],
        [b"[" * 10_000 + b"\n"],
    ],
    ids=["changed", "replayed", "out of order", "reflected", "no JSON", "no code", "deep"],
)
def test_lines_of_others_are_refused(lines: list[bytes]):
    first, second, stream = pair()
    for each in lines:
        stream.sendall(each)
    with pytest.raises(RendezvousError):
        for _ in lines:
            assert second.hear(SECONDS) == {}
    first.close()
    second.close()


def test_a_line_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous, "MOST_LINE", 1000)
    first, second, stream = pair()
    stream.sendall(b"x" * 2000)
    with pytest.raises(RendezvousError, match="a line of more than 1000 bytes"):
        second.hear(SECONDS)
    first.close()
    second.close()


def test_silence_has_an_end():
    first, second, _ = pair()
    with pytest.raises(RendezvousError, match=r"no answer within 0\.01 s"):
        second.hear(0.01)
    first.close()
    second.close()
