"""Server of the agent: authenticates ranks, receives their reports, and sends each its plan."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable

from pipemorph.ingest.connections import (
    Acceptor,
    ClientConnection,
    ConnectionLimits,
    raise_open_files_limit,
)
from pipemorph.protocol import Directive
from pipemorph.protocol.rank_messages import RANK_PROTOCOL, RankAnswer, RankFrame, RankReport
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer.agent import frames
from pipemorph_trainer.agent.ops_collector import OpsRequest
from pipemorph_trainer.agent.rank_plan import split_plan

log = logging.getLogger("pipemorph.agent")

HELLO_SECONDS = 5.0
"""Time for a client to authenticate before it is disconnected. A rank that builds a model meanwhile
connects again at its next op."""
UNAUTHENTICATED = 64
"""Least number of connections that may wait for a hello; a job with more ranks may have more."""
REFUSALS_LOGGED = 16
"""Log lines about refused clients, which may come back without limit."""
FILES_PER_CONNECTION = 3
"""Open files to allow per connection: the acceptor uses a third of the process's limit."""


class RankServer:
    """Server of the connections of all ranks. ``on_connected`` is called with each rank that
    connects, ``on_report`` with every report, in order."""

    def __init__(
        self,
        secret: bytes,
        mesh: MeshShape,
        on_connected: Callable[[int], None],
        on_report: Callable[[RankReport], None],
    ) -> None:
        self._secret, self._mesh = secret, mesh
        self._on_connected, self._on_report = on_connected, on_report
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._plans: dict[int, bytes] = {}
        """Newest plan of each rank; empty before the first plan."""
        ranks, waiting = mesh.world_size, max(UNAUTHENTICATED, mesh.world_size)
        most = ranks + waiting
        raise_open_files_limit(FILES_PER_CONNECTION * most)
        self._acceptor = Acceptor(
            self._make_protocol,
            limits=ConnectionLimits(total=most, per_source=most, unauthenticated=waiting),
            head_seconds=HELLO_SECONDS,
        )
        self._hung_up = asyncio.Event()
        self._refusals = 0

    async def start(self, listener: socket.socket) -> None:
        await self._acceptor.accept_from([listener])

    def _make_protocol(self) -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._serve_rank)

    async def close(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for the ranks to disconnect, then disconnect them."""
        await self._acceptor.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._writers:
                    self._hung_up.clear()
                    await self._hung_up.wait()
        for line in self._writers.values():
            line.close()

    @property
    def connected_ranks(self) -> set[int]:
        return set(self._writers)

    async def broadcast_plan(self, directive: Directive) -> None:
        """Send each rank its part of the plan, now or when it connects. Raises
        :class:`InputError`, and sends nothing, if the ranks cannot run the plan."""
        # The check of a large plan takes seconds, in which ranks report.
        self._plans = await asyncio.to_thread(self._encode_rank_plans, directive)
        for rank, line in self._writers.items():
            line.write(frames.add_length_prefix(self._plans[rank]))

    def send_answer(self, ranks: Iterable[int], answer: RankAnswer) -> None:
        """Send connected ranks an answer."""
        frame = frames.add_length_prefix(RankFrame(answer=answer).to_json())
        for rank in ranks:
            self._writers[rank].write(frame)

    def request_ops(self, ranks: set[int], iteration: int) -> None:
        """Request the ops of an iteration from connected ranks."""
        request = frames.encode_frame(OpsRequest(ops_of=iteration))
        for rank in ranks & self._writers.keys():
            self._writers[rank].write(request)

    def _encode_rank_plans(self, directive: Directive) -> dict[int, bytes]:
        plan, record = directive.plan.to_plan(), directive.record
        for_trackers = {
            "reason": directive.reason,
            "promised": record.promised if record is not None else None,
        }
        times = directive.plan.times
        bodies: dict[int, list[bytes]] = {}
        found: dict[int, bytes] = {}
        for at in map(self._mesh.find_coordinate, range(self._mesh.world_size)):
            # Replicas with as many microbatches run the same.
            share = plan.shares[at.replica] if plan.shares else 0
            if share not in bodies:
                parts = split_plan(
                    plan, self._mesh, replica=at.replica, orders=times is not None, times=times
                )
                bodies[share] = [mine.to_json() for mine in parts]
                if at.rank == 0:
                    found[0] = parts[0].model_copy(update=for_trackers).to_json()
            found.setdefault(at.rank, bodies[share][at.index_along("pp")])
        return found

    async def _serve_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank: int | None = None
        try:
            rank = await self._authenticate_rank(reader, writer)
            if rank is not None:
                await self._receive_reports(rank, reader, writer)
        except asyncio.IncompleteReadError as ended:
            if ended.partial or rank is None:
                log.log(
                    _choose_log_level(rank), "the connection of %s broke", _describe_client(rank)
                )
        except asyncio.CancelledError:
            pass  # The agent is ending; asyncio would log the cancelled task as an error.
        except (OSError, frames.FrameError) as error:
            why = str(error) or type(error).__name__
            log.log(
                _choose_log_level(rank), "closed connection of %s: %s", _describe_client(rank), why
            )
        finally:
            if rank is not None and self._writers.get(rank) is writer:
                del self._writers[rank]
            self._hung_up.set()
            writer.close()

    async def _authenticate_rank(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> int | None:
        """Do the handshake of :mod:`.frames`. Returns the rank, or None if it was refused."""
        nonce = frames.new_nonce()
        writer.write(frames.encode_frame(frames.Challenge(nonce=nonce)))
        hello = frames.decode_message(
            frames.Hello, await frames.read_frame(reader, frames.MAX_HELLO_BYTES)
        )
        rank = hello.rank
        expected = frames.compute_proof(self._secret, "rank", nonce, hello.nonce, rank)
        why = None
        if not frames.equal_proofs(hello.proof, expected):
            why = "wrong secret: it is of another job or attempt"
        elif hello.protocol != RANK_PROTOCOL:
            why = (
                f"it speaks protocol {hello.protocol}, and this agent {RANK_PROTOCOL}: run the same"
                " version of the trainer on all ranks"
            )
        elif not 0 <= rank < self._mesh.world_size:
            why = f"rank {rank} of a job with {self._mesh.world_size} ranks"
        if why is not None:
            host, port, *_ = writer.get_extra_info("peername")
            self._refusals += 1
            level = logging.WARNING if self._refusals <= REFUSALS_LOGGED else logging.DEBUG
            log.log(level, "refused rank %d from %s:%d: %s", rank, host, port, why)
            writer.write(frames.encode_frame(frames.Welcome(refused=why)))
            await writer.drain()
            return None
        connection = writer.transport.get_protocol()
        assert isinstance(connection, ClientConnection)
        connection.mark_authenticated()
        answer = frames.compute_proof(self._secret, "agent", nonce, hello.nonce, rank)
        writer.write(frames.encode_frame(frames.Welcome(proof=answer)))
        if self._plans:
            writer.write(frames.add_length_prefix(self._plans[rank]))
        if previous := self._writers.pop(rank, None):
            previous.close()
        self._writers[rank] = writer
        self._on_connected(rank)
        return rank

    async def _receive_reports(
        self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while self._writers.get(rank) is writer:
            report = frames.decode_message(RankReport, await frames.read_frame(reader))
            if report.rank != rank:
                raise frames.FrameError(
                    f"a report of rank {report.rank} on rank {rank}'s connection"
                )
            if (misfit := report.find_mismatch(self._mesh)) is not None:
                raise frames.FrameError(misfit)
            self._on_report(report)


def _choose_log_level(rank: int | None) -> int:
    """Log level of a lost connection: the acceptor sums up unauthenticated clients."""
    return logging.DEBUG if rank is None else logging.INFO


def _describe_client(rank: int | None) -> str:
    return "an unauthenticated client" if rank is None else f"rank {rank}"
