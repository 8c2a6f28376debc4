"""Connection of a rank to the agent: a TCP socket that never blocks.

The client has no thread. An op may hold the rank's interpreter for its whole duration, so a thread
would send late and compete with ops. Instead, each call of :meth:`AgentClient.publish` or
:meth:`AgentClient.pop_newest_plan` sends and receives what is possible, in a few microseconds. If
the agent is lost, telemetry is lost but no iteration: the client reconnects with backoff, and
counts the messages that it drops meanwhile.
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
from pipemorph.protocol.rank_messages import RANK_PROTOCOL, RankAnswer, RankFrame
from pipemorph_trainer.agent import frames
from pipemorph_trainer.agent.messages import RankTelemetry
from pipemorph_trainer.agent.ops_collector import NO_ITERATION, OpsRequest
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.context import TrainerContext

log = logging.getLogger("pipemorph.agent")

QUEUED_MESSAGES = 256
"""Room for twelve seconds of a stalled agent, at 20 messages per second."""
FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 5.0
START_SECONDS = 2.0
HANDSHAKE_SECONDS = 60.0
"""Longer than an agent takes to start on a busy machine, where the ranks import as well."""
CHALLENGE_SECONDS = 0.05
"""Longest wait for the challenge of a running agent, once per connection."""
PATIENCE = 3
"""Consecutive failures before the first connection after which a warning is logged."""
FLUSH_SECONDS = 1.0
FIRST_FLUSH_SECONDS = 15.0
"""Limit before the first connection: a short run may end before the agent has started, and would
then report no iteration."""
RECEIVE_BYTES = 1 << 16

_IN_PROGRESS = {0, errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EALREADY}


def connect_to_agent(
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


class _ConnectionPhase(Enum):
    DOWN = "down"
    DIALLING = "dialling"
    CHALLENGE = "waiting for the challenge"
    WELCOME = "waiting for the welcome"
    READY = "ready"
    CLOSED = "closed"


class AgentClient:
    """A :class:`~pipemorph_trainer.agent.messages.ControlClient` over one TCP socket.

    ``dropped``: messages lost because the agent was too slow. ``reconnects``: number of established
    connections that were lost.
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
        self._phase = _ConnectionPhase.DOWN
        self._socket: socket.socket | None = None
        self._reader = frames.FrameReader(frames.MAX_HELLO_BYTES)
        self._queue: deque[tuple[bool, bytes]] = deque()
        self._sending = memoryview(b"")
        self._plan: RankPlan | None = None
        self._seen_version = 0
        self._answers: list[RankAnswer] = []
        self.requested_ops_iteration = NO_ITERATION
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
        return self._phase is _ConnectionPhase.READY

    def publish(self, telemetry: RankTelemetry) -> None:
        """Queue the report and send what the socket accepts. Never blocks.

        A full queue drops its oldest message; messages that finish an iteration are dropped last.
        """
        report = telemetry.report
        if self._phase is _ConnectionPhase.CLOSED or report is None:
            return
        if len(self._queue) >= QUEUED_MESSAGES:
            self._drop_oldest_message()
        keep = report.finished_iteration is not None or report.state in ("finished", "failed")
        self._queue.append((keep, frames.add_length_prefix(report.to_json())))
        self._exchange_frames()

    def pop_answers(self) -> list[RankAnswer]:
        """New answers of the agent, oldest first; each is returned once."""
        self._exchange_frames()
        found, self._answers = self._answers, []
        return found

    def pop_newest_plan(self) -> RankPlan | None:
        """Newest plan, returned once; None if no newer plan has arrived."""
        self._exchange_frames()
        plan, self._plan = self._plan, None
        return plan

    def close(self) -> None:
        """Send the queue and close. Idempotent.

        Takes at most :data:`FLUSH_SECONDS`, or :data:`FIRST_FLUSH_SECONDS` if no handshake has
        completed.
        """
        deadline = time.monotonic() + (FLUSH_SECONDS if self._was_ready else FIRST_FLUSH_SECONDS)
        while (self._queue or self._sending) and time.monotonic() < deadline:
            self._exchange_frames()
            if self._phase is _ConnectionPhase.DOWN or not (self._queue or self._sending):
                break
            self._wait_for_socket(deadline)
        self._close_socket(_ConnectionPhase.CLOSED)

    def wait_until_ready(self, seconds: float) -> bool:
        """Block until the handshake is done, at most ``seconds``. For the start and for tests."""
        deadline = time.monotonic() + seconds
        self._exchange_frames()
        while self._phase is not _ConnectionPhase.READY and time.monotonic() < deadline:
            self._wait_for_socket(deadline)
            self._exchange_frames()
        return self.ready

    # --- the state machine -----------------------------------------------------------

    def _exchange_frames(self) -> None:
        """Connect, receive and send as far as possible without blocking."""
        if self._phase is _ConnectionPhase.CLOSED:
            return
        try:
            if self._phase is _ConnectionPhase.DOWN:
                self._begin_connect()
            if self._phase is _ConnectionPhase.DIALLING:
                self._finish_connect()
            if self._phase in (
                _ConnectionPhase.CHALLENGE,
                _ConnectionPhase.WELCOME,
                _ConnectionPhase.READY,
            ):
                self._receive_frames()
                self._send_queued()
        except (OSError, PipeMorphError, frames.FrameError) as error:
            self._handle_connection_loss(str(error))

    def _begin_connect(self) -> None:
        if time.monotonic() < self._retry_at:
            return
        self._socket = socket.socket(self._family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = self._socket.connect_ex(self._address)
        if code not in _IN_PROGRESS:
            raise OSError(code, errno.errorcode.get(code, "connect failed"))
        self._phase = _ConnectionPhase.DIALLING
        self._give_up_at = time.monotonic() + HANDSHAKE_SECONDS

    def _finish_connect(self) -> None:
        assert self._socket is not None
        self._check_handshake_time()
        if not select.select([], [self._socket], [], 0)[1]:
            return
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, errno.errorcode.get(code, "connect failed"))
        self._reader = frames.FrameReader(frames.MAX_HELLO_BYTES)
        self._phase = _ConnectionPhase.CHALLENGE
        # The agent waits for seconds only, and the next call may follow a long op.
        select.select([self._socket], [], [], CHALLENGE_SECONDS)

    def _receive_frames(self) -> None:
        assert self._socket is not None
        if self._phase is not _ConnectionPhase.READY:
            self._check_handshake_time()
        while True:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            if not data:
                raise frames.FrameError("the agent closed the connection")
            self._reader.feed(data)
            while (payload := self._reader.next_frame()) is not None:
                self._handle_frame(payload)

    def _handle_frame(self, payload: bytes) -> None:
        if self._phase is _ConnectionPhase.CHALLENGE:
            challenge = frames.decode_message(frames.Challenge, payload).nonce
            nonce = frames.new_nonce()
            self._nonces = (challenge, nonce)
            answer = frames.compute_proof(self._secret, "rank", challenge, nonce, self._rank)
            hello = frames.Hello(rank=self._rank, nonce=nonce, proof=answer, protocol=RANK_PROTOCOL)
            self._sending = memoryview(frames.encode_frame(hello))
            self._phase = _ConnectionPhase.WELCOME
        elif self._phase is _ConnectionPhase.WELCOME:
            welcome = frames.decode_message(frames.Welcome, payload)
            if welcome.proof is None:
                raise frames.FrameError(f"the agent refused this rank: {welcome.refused}")
            expected = frames.compute_proof(self._secret, "agent", *self._nonces, self._rank)
            if not frames.equal_proofs(welcome.proof, expected):
                raise frames.FrameError("the peer does not have this attempt's secret")
            self._reader.limit = frames.MAX_FRAME_BYTES
            self._retry_after = FIRST_RETRY_SECONDS
            self._failures = 0
            self._was_ready = True
            self.connections += 1
            self._answers.clear()
            self._phase = _ConnectionPhase.READY
        elif RankFrame.is_answer(payload):
            self._answers.append(frames.decode_message(RankFrame, payload).answer)
        elif OpsRequest.is_ops_request(payload):
            self.requested_ops_iteration = frames.decode_message(OpsRequest, payload).ops_of
        else:
            plan = frames.decode_message(RankPlan, payload)
            if plan.version > self._seen_version:
                self._seen_version = plan.version
                self._plan = plan

    def _send_queued(self) -> None:
        assert self._socket is not None
        while True:
            if not self._sending:
                if self._phase is not _ConnectionPhase.READY or not self._queue:
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

    def _handle_connection_loss(self, why: str) -> None:
        was_up = self._phase is _ConnectionPhase.READY
        self.reconnects += was_up
        self._failures += 1
        if was_up or self._failures == PATIENCE:
            log.warning(
                "rank %d: no connection to the agent (%s); training goes on with the current plan, "
                "telemetry waits for the connection",
                self._rank, why,
            )  # fmt: skip
        self._close_socket(_ConnectionPhase.DOWN)
        self._retry_at = time.monotonic() + self._retry_after
        self._retry_after = min(2 * self._retry_after, LAST_RETRY_SECONDS)

    def _close_socket(self, phase: _ConnectionPhase) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket = None
        self._phase = phase
        if self._sending:
            self._sending = memoryview(b"")
            self.dropped += 1

    def _drop_oldest_message(self) -> None:
        oldest = next((i for i, (keep, _) in enumerate(self._queue) if not keep), 0)
        del self._queue[oldest]
        self.dropped += 1

    def _wait_for_socket(self, deadline: float) -> None:
        """Sleep until the socket is ready or it is time to reconnect. Only at the start and end."""
        remaining = max(0.0, deadline - time.monotonic())
        if self._socket is None:
            time.sleep(min(remaining, max(0.001, self._retry_at - time.monotonic())))
            return
        awaits_write = self._phase is _ConnectionPhase.DIALLING or bool(self._sending)
        writers = [self._socket] if awaits_write else []
        select.select([self._socket], writers, [], min(remaining, 0.5))
