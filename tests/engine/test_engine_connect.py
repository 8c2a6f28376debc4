"""How two engines find each other: who is refused, and what is said where nothing comes about."""

import contextlib
import re
import select
import socket
import threading

import pairs
import pytest

from pipemorph_trainer._engine import EngineError, EngineTimeout


def expect_refusal(match, *, low=None, high=None, link=pairs.LINK, peer=1, timeout=3.0):
    """Dial with something wrong, see both sides say what."""
    a = pairs.engine(0, **(low or {}))
    b = pairs.engine(1, **(high or {}))
    accepted = []

    def accept():
        # For longer than is dialled: whoever comes too late is not told that it is wrong here.
        with contextlib.suppress(EngineError):
            accepted.append(b.accept(peer_rank=0, link_id=pairs.LINK, timeout=pairs.TIMEOUT))

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        with pytest.raises(EngineError, match=match) as e:
            a.connect(peer_rank=peer, link_id=link, host="127.0.0.1", port=b.port, timeout=timeout)
        assert f"link {link}" in str(e.value)
        refused = b.refused()
    finally:
        b.close(0.0)
        a.close(0.0)
        acceptor.join()
    assert not accepted
    return refused


def test_a_wrong_secret_is_refused():
    refused = expect_refusal("authentication failed", low={"secret": b"guess"})
    assert len(refused) == 1
    assert "wrong job secret" in refused[0]


def test_a_wrong_job_or_attempt_is_refused():
    [refused] = expect_refusal("wrong job: rank 0 runs 'test/2'", low={"job": "test/2"})
    assert "'test/2'" in refused
    assert "'test/1'" in refused


def test_a_wrong_rank_is_refused():
    [refused] = expect_refusal("wrong rank", peer=2)
    assert "rank 0 looks for rank 2, this is rank 1" in refused


def test_a_wrong_link_is_refused():
    [refused] = expect_refusal("wrong link: rank 0 dials link 9", link=9, timeout=1.0)
    assert "waits for link 3" in refused


def test_contradicting_transports_are_refused():
    expect_refusal("transports differ", low={"transport": "tcp"}, high={"transport": "shm"})


def test_nobody_there():
    with contextlib.closing(pairs.engine(0)) as a:
        with contextlib.closing(pairs.engine(1)) as b:
            port = b.port
        with pytest.raises(EngineTimeout, match=rf"rank 0 -> 1.*:{port}.*Connection refused"):
            a.connect(peer_rank=1, link_id=0, host="127.0.0.1", port=port, timeout=0.3)
        with pytest.raises(EngineTimeout, match="rank 5 did not connect"):
            a.accept(peer_rank=5, link_id=0, timeout=0.1)


def listening(backlog):
    s = socket.socket()
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
        ("nobody answers", "cannot connect to 127.0.0.1:{port}: no answer"),
        ("a mute", "127.0.0.1:{port} took the connection, but says nothing"),
        ("a peer that waits for others", "127.0.0.1:{port} is there, but did not accept"),
    ],
)
def test_a_connection_that_was_not_answered_in_time_says_how_far_it_came(who, said):
    with contextlib.ExitStack() as stack:
        a, b = (stack.enter_context(contextlib.closing(pairs.engine(rank))) for rank in (0, 1))
        port = b.port
        if who != "a peer that waits for others":
            port = stack.enter_context(listening(0)).getsockname()[1]
        if who == "nobody answers":
            # With as many as it lets wait, it drops what comes after them.
            queue = [stack.enter_context(connecting(port)) for _ in range(3)]
            assert len(select.select([], queue, [], 0.2)[1]) < len(queue), "the queue is not full"
        with pytest.raises(EngineTimeout, match=re.escape(said.format(port=port))):
            a.connect(peer_rank=1, link_id=0, host="127.0.0.1", port=port, timeout=0.5)


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
        again = []
        acceptor = threading.Thread(
            target=lambda: again.append(
                p.high.accept(peer_rank=0, link_id=pairs.LINK, timeout=pairs.TIMEOUT)
            )
        )
        acceptor.start()
        link = p.low.connect(
            peer_rank=1, link_id=pairs.LINK, host="127.0.0.1", port=p.high.port, timeout=10.0
        )
        acceptor.join()
        link.send((0, 0, 0, 0, 0), b"", b"again")
        assert again[0].receive((0, 0, 0, 0, 0), pairs.TIMEOUT).note == b"again"
