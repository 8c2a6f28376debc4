"""A rank's connection to the agent: a socket that is only used without blocking.

There is no thread: an op may hold the rank's interpreter for its whole time, so a thread would send
late and compete with ops. Instead, each call of :meth:`AgentClient.publish` or
:meth:`AgentClient.newest_plan` sends and receives what is possible, in a few microseconds. If the
agent is lost, telemetry is lost but no iteration: the client reconnects with backoff, and counts
the messages that it drops meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import socket
import time
from collections import deque
from enum import Enum
from typing import Any

from pipemorph.errors import InputError, PipeMorphError
from pipemorph.wire.ranks import RANK_PROTOCOL, RankAnswer, ToRank
from pipemorph_trainer.agent import frames
from pipemorph_trainer.agent.messages import RankTelemetry
from pipemorph_trainer.agent.ops import NONE, OpsAsked
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.context import TrainerContext

log = logging.getLogger("pipemorph.agent")

QUEUED_MESSAGES = 256
"""Twelve seconds of a stalled agent, at 20 messages a second."""
FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 5.0
START_SECONDS = 2.0
HANDSHAKE_SECONDS = 60.0
"""Longer than an agent takes to start on a busy machine, where it imports beside the ranks."""
CHALLENGE_SECONDS = 0.05
"""Wait for the challenge of an agent that runs, once per connection."""
PATIENCE = 3
"""Failures in a row before the first connection after which there is a warning."""
FLUSH_SECONDS = 1.0
FIRST_FLUSH_SECONDS = 15.0
"""Limit before the first connection: a short run may end before the agent has started, and would
otherwise report no iteration."""
RECEIVE_BYTES = 1 << 16

_IN_PROGRESS = {0, errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EALREADY}


def connect(
    context: TrainerContext, host: str, port: int, *, wait: float = START_SECONDS
) -> AgentClient:
    """Connect this rank to the agent at ``host``:``port``.

    Waits at most ``wait`` seconds for the handshake, since training has not begun. After that the
    handshake continues at each call, and messages are queued until it is done. Raises
    :class:`InputError` if ``host`` cannot be resolved.
    """
    client = AgentClient(context.rank, context.secret, host, port)
    client.wait_until_ready(wait)
    return client


class _Phase(Enum):
    DOWN = "down"
    DIALLING = "dialling"
    CHALLENGE = "waiting for the challenge"
    WELCOME = "waiting for the welcome"
    READY = "ready"
    CLOSED = "closed"


class AgentClient:
    """A :class:`~pipemorph_trainer.agent.messages.ControlClient` over one TCP socket.

    ``dropped``: messages lost because the agent did not keep up. ``reconnects``: how often an
    established connection was lost.
    """

    acknowledges = True

    def __init__(self, rank: int, secret: bytes, host: str, port: int) -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise InputError(f"agent's address {host!r} cannot be resolved: {error}") from None
        self._family: int = found[0][0]
        self._address: Any = found[0][4]
        self._rank = rank
        self._secret = secret
        self._phase = _Phase.DOWN
        self._socket: socket.socket | None = None
        self._reader = frames.FrameReader(frames.MAX_HELLO_BYTES)
        self._queue: deque[tuple[bool, bytes]] = deque()
        self._sending = memoryview(b"")
        self._plan: RankPlan | None = None
        self._seen_version = 0
        self._answers: list[RankAnswer] = []
        self.ops_asked = NONE
        self._nonces = ("", "")
        self._retry_at = 0.0
        self._retry_after = FIRST_RETRY_SECONDS
        self._give_up_at = 0.0
        self._failures = 0
        self._was_ready = False
        self.dropped = 0
        self.reconnects = self.connections = 0

    @property
    def ready(self) -> bool:
        return self._phase is _Phase.READY

    def publish(self, telemetry: RankTelemetry) -> None:
        """Queue the report and send what the socket accepts. Never blocks.

        A full queue drops its oldest message; messages that finish an iteration are dropped last.
        """
        report = telemetry.report
        if self._phase is _Phase.CLOSED or report is None:
            return
        if len(self._queue) >= QUEUED_MESSAGES:
            self._drop_one()
        keep = report.finished_iteration is not None or report.state in ("finished", "failed")
        self._queue.append((keep, frames.frame(report.body())))
        self._pump()

    def answers(self) -> list[RankAnswer]:
        """The agent's answers that this call has not returned yet, oldest first."""
        self._pump()
        found, self._answers = self._answers, []
        return found

    def newest_plan(self) -> RankPlan | None:
        """The newest plan that this call has not returned yet, or None."""
        self._pump()
        plan, self._plan = self._plan, None
        return plan

    def close(self) -> None:
        """Send the queue and close. Idempotent.

        Takes at most :data:`FLUSH_SECONDS`, or :data:`FIRST_FLUSH_SECONDS` if the agent has never
        answered.
        """
        deadline = time.monotonic() + (FLUSH_SECONDS if self._was_ready else FIRST_FLUSH_SECONDS)
        while (self._queue or self._sending) and time.monotonic() < deadline:
            self._pump()
            if self._phase is _Phase.DOWN or not (self._queue or self._sending):
                break
            self._wait(deadline)
        self._hang_up(_Phase.CLOSED)

    def wait_until_ready(self, seconds: float) -> bool:
        """Block until the handshake is done, at most ``seconds``. For the start and for tests."""
        deadline = time.monotonic() + seconds
        self._pump()
        while self._phase is not _Phase.READY and time.monotonic() < deadline:
            self._wait(deadline)
            self._pump()
        return self.ready

    # --- the state machine -----------------------------------------------------------

    def _pump(self) -> None:
        """Connect, receive and send as far as possible without blocking."""
        if self._phase is _Phase.CLOSED:
            return
        try:
            if self._phase is _Phase.DOWN:
                self._dial()
            if self._phase is _Phase.DIALLING:
                self._finish_dialling()
            if self._phase in (_Phase.CHALLENGE, _Phase.WELCOME, _Phase.READY):
                self._receive()
                self._send()
        except (OSError, PipeMorphError, frames.FrameError) as error:
            self._lose(str(error))

    def _dial(self) -> None:
        if time.monotonic() < self._retry_at:
            return
        self._socket = socket.socket(self._family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = self._socket.connect_ex(self._address)
        if code not in _IN_PROGRESS:
            raise OSError(code, errno.errorcode.get(code, "connect failed"))
        self._phase = _Phase.DIALLING
        self._give_up_at = time.monotonic() + HANDSHAKE_SECONDS

    def _finish_dialling(self) -> None:
        assert self._socket is not None
        self._check_handshake_time()
        if not select.select([], [self._socket], [], 0)[1]:
            return
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, errno.errorcode.get(code, "connect failed"))
        self._reader = frames.FrameReader(frames.MAX_HELLO_BYTES)
        self._phase = _Phase.CHALLENGE
        # The agent waits for seconds only, and the next call may come after a long op.
        select.select([self._socket], [], [], CHALLENGE_SECONDS)

    def _receive(self) -> None:
        assert self._socket is not None
        if self._phase is not _Phase.READY:
            self._check_handshake_time()
        while True:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            if not data:
                raise frames.FrameError("the agent closed the connection")
            self._reader.feed(data)
            while (payload := self._reader.next()) is not None:
                self._take(payload)

    def _take(self, payload: bytes) -> None:
        if self._phase is _Phase.CHALLENGE:
            challenge = frames.decode(frames.Challenge, payload).nonce
            nonce = frames.new_nonce()
            self._nonces = (challenge, nonce)
            answer = frames.proof(self._secret, "rank", challenge, nonce, self._rank)
            hello = frames.Hello(rank=self._rank, nonce=nonce, proof=answer, protocol=RANK_PROTOCOL)
            self._sending = memoryview(frames.encode(hello))
            self._phase = _Phase.WELCOME
        elif self._phase is _Phase.WELCOME:
            welcome = frames.decode(frames.Welcome, payload)
            if welcome.proof is None:
                raise frames.FrameError(f"the agent refused this rank: {welcome.refused}")
            expected = frames.proof(self._secret, "agent", *self._nonces, self._rank)
            if not frames.proves(welcome.proof, expected):
                raise frames.FrameError("the peer does not know this attempt's secret")
            self._reader.limit = frames.MAX_FRAME_BYTES
            self._retry_after = FIRST_RETRY_SECONDS
            self._failures = 0
            self._was_ready = True
            self.connections += 1
            self._answers.clear()
            self._phase = _Phase.READY
        elif ToRank.is_one(payload):
            self._answers.append(frames.decode(ToRank, payload).answer)
        elif OpsAsked.is_one(payload):
            self.ops_asked = frames.decode(OpsAsked, payload).ops_of
        else:
            plan = frames.decode(RankPlan, payload)
            if plan.version > self._seen_version:
                self._seen_version = plan.version
                self._plan = plan

    def _send(self) -> None:
        assert self._socket is not None
        while True:
            if not self._sending:
                if self._phase is not _Phase.READY or not self._queue:
                    return
                self._sending = memoryview(self._queue.popleft()[1])
            try:
                sent = self._socket.send(self._sending)
            except (BlockingIOError, InterruptedError):
                return
            self._sending = self._sending[sent:]

    def _check_handshake_time(self) -> None:
        if time.monotonic() > self._give_up_at:
            raise frames.FrameError(
                f"no agent after {HANDSHAKE_SECONDS:.0f} s ({self._phase.value})"
            )

    def _lose(self, why: str) -> None:
        was_up = self._phase is _Phase.READY
        self.reconnects += was_up
        self._failures += 1
        if was_up or self._failures == PATIENCE:
            log.warning(
                "rank %d: no connection to the agent (%s); training goes on with the current plan, "
                "telemetry waits for the connection",
                self._rank, why,
            )  # fmt: skip
        self._hang_up(_Phase.DOWN)
        self._retry_at = time.monotonic() + self._retry_after
        self._retry_after = min(2 * self._retry_after, LAST_RETRY_SECONDS)

    def _hang_up(self, phase: _Phase) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket = None
        self._phase = phase
        if self._sending:
            self._sending = memoryview(b"")
            self.dropped += 1

    def _drop_one(self) -> None:
        oldest = next((i for i, (keep, _) in enumerate(self._queue) if not keep), 0)
        del self._queue[oldest]
        self.dropped += 1

    def _wait(self, deadline: float) -> None:
        """Sleep until the socket is ready or it is time to reconnect. Only at the start and end."""
        left = max(0.0, deadline - time.monotonic())
        if self._socket is None:
            time.sleep(min(left, max(0.001, self._retry_at - time.monotonic())))
            return
        wants_write = self._phase is _Phase.DIALLING or bool(self._sending)
        writers = [self._socket] if wants_write else []
        select.select([self._socket], writers, [], min(left, 0.5))
