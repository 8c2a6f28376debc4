"""Right to set up a control socket between two neighbours: a rank must know the secret."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
import torch

from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.topology.device_event_clock import DeviceMoment
from pipemorph_trainer.transport import control_socket
from pipemorph_trainer.transport.message import (
    ALL_PRESENT,
    Direction,
    MessageContents,
    Note,
    SendTimestamp,
    TensorMeta,
)

SECRET = b"the job's secret"
SOON = 20.0


def dial(port: int, timeout: float = SOON) -> control_socket.ControlSocket:
    return control_socket.connect_to_peer(
        "127.0.0.1", port, rank=0, peer_rank=1, secret=SECRET, timeout=timeout
    )


def accept(listener: socket.socket, timeout: float = SOON) -> control_socket.ControlSocket:
    return control_socket.accept_peer(listener, rank=1, peer_rank=0, secret=SECRET, timeout=timeout)


@contextmanager
def joined(body: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(SOON)
        assert not thread.is_alive()


def test_strangers_that_say_little_or_nothing_hold_up_no_rank() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(control_socket.open_listener("127.0.0.1"))
        here = listener.getsockname()
        accepted: list[control_socket.ControlSocket] = []
        began = time.monotonic()
        with joined(lambda: accepted.append(accept(listener))):
            # More than are served at once, some of them in the middle of a message.
            for i in range(control_socket._MOST_CLIENTS + 20):
                stranger = stack.enter_context(socket.create_connection(here))
                if i % 2:
                    stranger.sendall(b"x" * 20)
            dialled = stack.enter_context(closing_socket(dial(here[1])))
        stack.enter_context(closing_socket(accepted[0]))
        assert time.monotonic() - began < SOON
        dialled.send_token(control_socket.StepToken(1, 2, 3))
        dialled.close(goodbye=True)
        assert accepted[0].wait_for_end(SOON)
        assert list(accepted[0].tokens) == [control_socket.StepToken(1, 2, 3)]


@contextmanager
def closing_socket(sock: control_socket.ControlSocket) -> Iterator[control_socket.ControlSocket]:
    try:
        yield sock
    finally:
        sock.close(goodbye=False)


def test_a_stranger_that_goes_on_talking_does_not_move_the_deadline() -> None:
    over = threading.Event()

    def talk() -> None:
        with socket.create_connection(listener.getsockname()) as stranger:
            while not over.wait(0.3):
                stranger.sendall(b"x")

    with control_socket.open_listener("127.0.0.1") as listener, joined(talk):
        began = time.monotonic()
        try:
            with pytest.raises(PipelineError, match="rank 1 waited 0 s for rank 0 to connect"):
                accept(listener, timeout=0.5)
        finally:
            over.set()
        assert time.monotonic() - began < 5.0


def reflect(peer: socket.socket) -> None:
    hello = peer.recv(control_socket._HELLO.size, socket.MSG_WAITALL)
    peer.sendall(hello[-32:])


def steer(peer: socket.socket) -> None:
    peer.recv(control_socket._HELLO.size, socket.MSG_WAITALL)
    token = struct.pack("<BBH", 1, 0, 12) + struct.pack("<III", 7, 99, 1)
    peer.sendall(token * 2 + struct.pack("<BBH", 4, 0, 0))


def leave(peer: socket.socket) -> None:
    peer.recv(control_socket._HELLO.size, socket.MSG_WAITALL)


def say_nothing(peer: socket.socket) -> None:
    peer.recv(control_socket._HELLO.size + 1, socket.MSG_WAITALL)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (reflect, "the peer does not have this job's secret"),
        (steer, "the peer does not have this job's secret"),
        (leave, "it closed the connection"),
        (say_nothing, "timed out"),
    ],
)
def test_who_answers_without_the_secret_is_not_believed(
    answer: Callable[[socket.socket], None], said: str
) -> None:
    def impostor() -> None:
        with listener.accept()[0] as peer:
            peer.sendall(bytes(16))
            answer(peer)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener, joined(impostor):
        port = listener.getsockname()[1]
        with pytest.raises(PipelineError, match=f"rank 0 cannot reach rank 1 at .*{port}: {said}"):
            dial(port, timeout=0.5 if answer is say_nothing else SOON)


def test_a_forked_child_keeps_no_line_open() -> None:
    with control_socket.open_listener("127.0.0.1") as listener:
        dialled: list[control_socket.ControlSocket] = []
        with joined(lambda: dialled.append(dial(listener.getsockname()[1]))):
            accepted = accept(listener)
        child = os.fork()
        if child == 0:
            highest = max(listener.fileno(), accepted.fileno(), dialled[0].fileno())
            accepted.close(goodbye=True)
            os._exit(0 if highest < 0 else 1)
        assert os.waitpid(child, 0)[1] == 0
        with closing_socket(accepted), closing_socket(dialled[0]):
            dialled[0].read_arrived()
            assert dialled[0].lost is None and not dialled[0].goodbye


# --- what a connection carries ------------------------------------------------------------------


@contextmanager
def pair() -> Iterator[tuple[control_socket.ControlSocket, control_socket.ControlSocket]]:
    with ExitStack() as stack:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            mine = socket.create_connection(listener.getsockname())
            other = listener.accept()[0]
        yield (
            stack.enter_context(closing_socket(control_socket.ControlSocket(mine, 1))),
            stack.enter_context(closing_socket(control_socket.ControlSocket(other, 0))),
        )


def comes(peer: control_socket.ControlSocket, what: Callable[[], object]) -> None:
    until = time.monotonic() + SOON
    while not what():
        assert time.monotonic() < until, "it does not come"
        peer.read_arrived()


def note(microbatch: int) -> Note:
    return Note(1, 7, microbatch, ALL_PRESENT, 1.0, 2.0, 3.0, 4.0)


def test_frames_of_every_length_arrive_in_order() -> None:
    long = MessageContents((TensorMeta((4, 1024), torch.float32, True),) * 31, "x" * 2000)
    with pair() as (mine, other):
        for _ in range(3):
            mine.send_held(frozenset(range(200)))
            mine.send_token(control_socket.StepToken(1, 2, 3))
            mine.send_shapes(long)
            mine.send_shapes(None)
            mine.send_note(Direction.FORWARD, note(5))
        comes(other, lambda: len(other.shapes) == 6 and other.notes)
        assert list(other.tokens) == [control_socket.StepToken(1, 2, 3)] * 3
        assert list(other.shapes) == [long, None] * 3
        assert other.held == frozenset(range(200))
        assert other.notes[0, 7, 5].note == note(5)
        assert other.find_note((0, 7, 6)) is None


def test_taken_messages_are_counted_in_notes_or_after_some_or_at_the_end() -> None:
    with pair() as (mine, other):
        for m in range(3):
            mine.send_consumed(Direction.BACKWARD, (7, m + 1), last=False)
        mine.send_note(Direction.FORWARD, note(0))
        comes(other, lambda: other.consumed == {Direction.BACKWARD: (7, 3)})
        for m in range(3, 7):
            mine.send_consumed(Direction.BACKWARD, (7, m + 1), last=False)
        comes(other, lambda: other.consumed == {Direction.BACKWARD: (7, 7)})
        mine.send_consumed(Direction.BACKWARD, (7, 8), last=True)
        comes(other, lambda: other.consumed == {Direction.BACKWARD: (7, 8)})


def test_departures_cross_whole_however_many() -> None:
    """Departures are more than fit into one frame; they come in order, and behind a note."""
    sent = [SendTimestamp((2, m), DeviceMoment(1e9 + m / 8, m / 1024)) for m in range(3000)]
    with pair() as (mine, other):
        received: list[tuple[int, SendTimestamp]] = []
        other.on_send_timestamps = lambda direction, some: received.extend(
            (direction, d) for d in some
        )
        mine.send_note(Direction.FORWARD, note(0))
        sender = threading.Thread(target=mine.send_timestamps, args=(Direction.BACKWARD, sent))
        sender.start()
        comes(other, lambda: len(received) == len(sent))
        sender.join(10)
        assert received == [(Direction.BACKWARD, each) for each in sent]
        assert not other.goodbye
