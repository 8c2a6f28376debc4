"""Setup of a link between two engines: refusals, and the error where none comes about."""

import contextlib
import os
import re
import select
import signal
import socket
import threading

import pairs
import pytest

from pipemorph_trainer._engine import EngineError, EngineTimeout


def dial_in_vain(dialler, port, match, *, link=0, peer=1, error=EngineTimeout, first=0.5):
    """The error of a dial for a short time. A machine that stands still for all of it answers no
    dial, and that is the error: it is dialled for longer, until a peer could answer."""
    for timeout in (first, 10 * first, pairs.TIMEOUT):
        with pytest.raises(error) as raised:
            dialler.connect(
                peer_rank=peer, link_id=link, host="127.0.0.1", port=port, timeout=timeout
            )
        if re.search(match, str(raised.value)):
            return str(raised.value)
    raise AssertionError(f"{raised.value}\nexpected: {match}")


def expect_refusal(match, *, low=None, high=None, link=pairs.LINK, peer=1, first=pairs.TIMEOUT):
    """Dial with an error in the settings; check the messages of both sides."""
    a = pairs.engine(0, **(low or {}))
    b = pairs.engine(1, **(high or {}))
    accepted = []

    def accept():
        # For longer than is dialled: a late peer gets no answer that it is wrong here.
        with contextlib.suppress(EngineError):
            accepted.append(b.accept(peer_rank=0, link_id=pairs.LINK, timeout=2 * pairs.TIMEOUT))

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        said = dial_in_vain(a, b.port, match, link=link, peer=peer, error=EngineError, first=first)
        assert f"link {link}" in said
        refused = b.refused()
    finally:
        b.close(0.0)
        a.close(0.0)
        acceptor.join()
    assert not accepted
    return refused


def test_a_wrong_secret_is_refused():
    # The engine dials again for all of its time: the address may be another job's for a moment.
    refused = expect_refusal("authentication failed", low={"secret": b"guess"}, first=1.0)
    assert len(refused) == 1
    assert "wrong job secret" in refused[0]


def engine_soon(engine, port, box):
    """Start an engine that accepts at a port as soon as the port is free."""

    def accept():
        engine.append(pairs.engine(1, port=port))
        box.append(engine[0].accept(peer_rank=0, link_id=pairs.LINK, timeout=pairs.TIMEOUT))

    return threading.Thread(target=accept)


@pytest.mark.parametrize("answer", ["another job", "a forged refusal", "nonsense", "no engine"])
def test_unsigned_messages_end_no_setup(answer):
    """Processes at the peer's address for a moment, or on the way to it, have no key."""
    answered, box, right = threading.Event(), [], []
    if answer == "another job":
        other = pairs.engine(5, job="other", secret=b"other")
        port = other.port

        def leave():
            pairs.eventually(lambda: bool(other.refused()))
            other.close(0.0)

    else:
        listener = listening(16)
        port = listener.getsockname()[1]

        def leave():
            connection, _ = listener.accept()
            opening = connection.recv(40)
            if answer == "no engine":
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(40))
            else:
                connection.sendall(opening[:8] + os.urandom(32))
                connection.recv(2000)
                connection.sendall(b"\1\0\0" if answer == "a forged refusal" else b"\xff" * 99)
            with contextlib.suppress(OSError):
                connection.recv(1)  # it closes
            connection.close()
            listener.close()

    def then():
        leave()
        answered.set()
        engine_soon(right, port, box).run()

    thread = threading.Thread(target=then)
    thread.start()
    with contextlib.closing(pairs.engine(0)) as dialler:
        link = dialler.connect(
            peer_rank=1, link_id=pairs.LINK, host="127.0.0.1", port=port, timeout=pairs.TIMEOUT
        )
        thread.join()
        assert answered.is_set()
        assert link.alive
        right[0].close(0.0)


def test_a_timeout_names_the_last_refusal_before_the_peer_was_gone():
    other = pairs.engine(1, secret=b"other")

    def leave():
        pairs.eventually(lambda: bool(other.refused()))
        other.close(0.0)

    thread = threading.Thread(target=leave)
    thread.start()
    with contextlib.closing(pairs.engine(0)) as dialler, pytest.raises(EngineTimeout) as raised:
        dialler.connect(
            peer_rank=1, link_id=pairs.LINK, host="127.0.0.1", port=other.port, timeout=2.0
        )
    thread.join()
    assert re.search(
        r"last: cannot connect .*: Connection refused; before that: .*authentication failed",
        str(raised.value),
    )


@pytest.mark.parametrize("version", [0, 1, 99, 65535])
def test_another_version_is_final_after_one_answer(version):
    answers = []

    def answer(listener):
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            opening = connection.recv(40)
            answers.append(opening)
            other = version.to_bytes(2, "little")
            connection.sendall(opening[:4] + other + opening[6:8] + os.urandom(32))
            with contextlib.suppress(OSError):
                connection.recv(1)  # it closes
            connection.close()

    with contextlib.closing(pairs.engine(0)) as dialler, listening(16) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        said = rf"the peer speaks protocol version {version}, this engine \d+: run one release"
        with pytest.raises(EngineError, match=said):
            dialler.connect(
                peer_rank=1, link_id=0, host="127.0.0.1", port=listener.getsockname()[1],
                timeout=pairs.TIMEOUT,
            )  # fmt: skip
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert len(answers) == 1


def test_a_wrong_job_or_attempt_is_refused():
    [refused] = expect_refusal("wrong job: rank 0 runs 'test/2'", low={"job": "test/2"})
    assert "'test/2'" in refused
    assert "'test/1'" in refused


def test_a_wrong_rank_is_refused():
    [refused] = expect_refusal("wrong rank", peer=2)
    assert "rank 0 dials rank 2, this is rank 1" in refused


def test_a_wrong_link_is_refused():
    # The engine dials again for all of its time, since the right link may come yet.
    [refused] = expect_refusal("wrong link: rank 0 dials link 9", link=9, first=1.0)
    assert "waits for link 3" in refused


def test_contradicting_transports_are_refused():
    expect_refusal("transports differ", low={"transport": "tcp"}, high={"transport": "shm"})


def test_dialling_a_missing_peer():
    with contextlib.closing(pairs.engine(0)) as a, socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and no process listens there
        port = reserved.getsockname()[1]
        dial_in_vain(a, port, rf"rank 0 -> 1.*:{port}.*Connection refused", first=0.3)
        with pytest.raises(EngineTimeout, match="rank 5 did not connect"):
            a.accept(peer_rank=5, link_id=0, timeout=0.1)


def listening(backlog):
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("127.0.0.1", 0))
    s.listen(backlog)
    return s


def connecting(port):
    s = socket.socket()
    s.setblocking(False)
    s.connect_ex(("127.0.0.1", port))
    return s


@pytest.mark.parametrize(
    ("who", "said"),
    [
        ("no answer", "cannot connect to 127.0.0.1:{port}: no answer"),
        ("a mute", "127.0.0.1:{port} accepted the connection, but sends nothing"),
        ("a peer that waits for others", "127.0.0.1:{port} is there, but did not accept"),
    ],
)
def test_a_connection_that_was_not_answered_in_time_says_how_far_it_came(who, said):
    with contextlib.ExitStack() as stack:
        a, b = (stack.enter_context(contextlib.closing(pairs.engine(rank))) for rank in (0, 1))
        port = b.port
        if who != "a peer that waits for others":
            backlog = 0 if who == "no answer" else 16
            port = stack.enter_context(listening(backlog)).getsockname()[1]
        if who == "no answer":
            # A listener with a full queue drops later connections.
            queue = [stack.enter_context(connecting(port)) for _ in range(3)]
            assert len(select.select([], queue, [], 0.2)[1]) < len(queue), "the queue is not full"
        dial_in_vain(a, port, re.escape(said.format(port=port)))


def never(link, connection):
    raise AssertionError(f"{link.link_id} came about")


@pytest.mark.full
def test_a_last_attempt_without_time_does_not_cover_up_what_is_known():
    for timeout in (2.0, 6.0, pairs.TIMEOUT):  # the later for a machine that stood still at first
        with pairs.child(never, 1, {}) as peer, contextlib.closing(pairs.engine(0)) as a:
            port = peer.hear()
            stop = threading.Timer(timeout - 1.0, os.kill, (peer.pid, signal.SIGSTOP))
            stop.start()
            with pytest.raises(EngineError) as raised:
                a.connect(peer_rank=1, link_id=9, host="127.0.0.1", port=port, timeout=timeout)
            stop.join()
            peer.process.kill()
        if "wrong link: rank 0 dials link 9" in str(raised.value):
            return
    raise raised.value


def test_accept_may_come_after_connect():
    a, b = pairs.engine(0), pairs.engine(1)
    box = []
    dialler = threading.Thread(
        target=lambda: box.append(
            a.connect(peer_rank=1, link_id=0, host="127.0.0.1", port=b.port, timeout=pairs.TIMEOUT)
        )
    )
    dialler.start()
    with pytest.raises(EngineTimeout):
        b.accept(peer_rank=4, link_id=0, timeout=0.2)  # meanwhile the dialler waits
    link = b.accept(peer_rank=0, link_id=0, timeout=pairs.TIMEOUT)
    dialler.join()
    box[0].send((0, 0, 0, 0, 0), b"", b"hi")
    assert link.receive((0, 0, 0, 0, 0), pairs.TIMEOUT).note == b"hi"
    a.close()
    b.close()


def test_a_link_can_be_made_again_after_its_end():
    with pairs.in_process() as p:
        p.dialled.close()
        pairs.eventually(lambda: not p.accepted.alive)
        link, again = pairs.join(p.low, p.high)
        link.send((0, 0, 0, 0, 0), b"", b"again")
        assert again.receive((0, 0, 0, 0, 0), pairs.TIMEOUT).note == b"again"


def read(s, size):
    data = b""
    while len(data) < size:
        part = s.recv(size - len(data))
        assert part, "the connection ended"
        data += part
    return data


def pass_on(source, sink):
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def cut_after_handshake(client, engine):
    """Passes a control connection's handshake on, and cuts it before the dialler's next message,
    which has come so far, has reached the acceptor."""
    engine.sendall(read(client, 40))
    client.sendall(read(engine, 40))
    size = read(client, 2)
    engine.sendall(size + read(client, int.from_bytes(size, "little") + 32))
    verdict = read(engine, 3)
    client.sendall(verdict + read(engine, int.from_bytes(verdict[1:], "little") + 32))
    read(client, 24)


def test_a_control_connection_that_breaks_before_the_dialler_has_confirmed_is_made_again():
    with contextlib.ExitStack() as stack:
        a, b = (
            stack.enter_context(contextlib.closing(pairs.engine(rank, transport="tcp")))
            for rank in (0, 1)
        )
        relay = stack.enter_context(listening(16))
        cut = []

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    client, _ = relay.accept()
                    engine = socket.create_connection(("127.0.0.1", b.port))
                    if not cut:
                        cut_after_handshake(client, engine)
                        client.close()
                        engine.close()
                        cut.append(True)
                    else:
                        for ends in ((client, engine), (engine, client)):
                            threading.Thread(target=pass_on, args=ends, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        link, accepted = pairs.join(a, b, port=relay.getsockname()[1])
        assert cut
        link.send((0, 0, 0, 0, 0), b"", b"after all")
        assert accepted.receive((0, 0, 0, 0, 0), pairs.TIMEOUT).note == b"after all"
        assert link.alive and accepted.alive
        relay.shutdown(socket.SHUT_RDWR)


def test_nonsense_until_the_deadline_is_what_the_error_says():
    over = threading.Event()

    def answer(listener):
        with contextlib.suppress(OSError):
            while not over.is_set():
                with listener.accept()[0] as taken:
                    taken.sendall(bytes(40))
                    taken.recv(40)

    with contextlib.closing(pairs.engine(0)) as a, listening(16) as other:
        port = other.getsockname()[1]
        thread = threading.Thread(target=answer, args=[other], daemon=True)
        thread.start()
        dial_in_vain(a, port, "the peer is not a PipeMorph engine")
        over.set()
