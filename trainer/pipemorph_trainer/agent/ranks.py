"""The agent's server: authenticates ranks, receives their reports, and sends each its plan."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable

from pipemorph.api.mesh import MeshShape
from pipemorph.ingest.connections import (
    Acceptor,
    Connection,
    ConnectionLimits,
    open_files_limit,
)
from pipemorph.wire import Directive
from pipemorph.wire.ranks import RANK_PROTOCOL, RankAnswer, RankReport, ToRank
from pipemorph_trainer.agent import frames
from pipemorph_trainer.agent.ops import OpsAsked
from pipemorph_trainer.agent.rank_plan import cut

log = logging.getLogger("pipemorph.agent")

HELLO_SECONDS = 5.0
"""A client that has not authenticated by then is disconnected. A rank that builds a model meanwhile
connects again at its next op."""
UNAUTHENTICATED = 64
"""Connections that may wait for a hello, if the job has fewer ranks."""
REFUSALS_LOGGED = 16
"""Log lines about refused clients, which may come again for ever."""
FILES_PER_CONNECTION = 3
"""Of the process's limit of open files: the acceptor uses a third of them."""


class RankServer:
    """Serves the connections of all ranks. ``on_connected`` is called with each rank that has
    connected, ``on_report`` with every report, in order."""

    def __init__(
        self,
        secret: bytes,
        mesh: MeshShape,
        on_connected: Callable[[int], None],
        on_report: Callable[[RankReport], None],
    ) -> None:
        self._secret, self._mesh = secret, mesh
        self._on_connected, self._on_report = on_connected, on_report
        self._lines: dict[int, asyncio.StreamWriter] = {}
        self._plans: dict[int, bytes] = {}
        """The newest plan of each rank; empty before the first."""
        ranks, waiting = mesh.world_size, max(UNAUTHENTICATED, mesh.world_size)
        most = ranks + waiting
        open_files_limit(FILES_PER_CONNECTION * most)
        self._acceptor = Acceptor(
            self._protocol,
            limits=ConnectionLimits(in_all=most, per_source=most, unauthenticated=waiting),
            head_seconds=HELLO_SECONDS,
        )
        self._hung_up = asyncio.Event()
        self._refusals = 0

    async def start(self, listener: socket.socket) -> None:
        await self._acceptor.listen([listener])

    def _protocol(self) -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._serve)

    async def close(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for the ranks to disconnect, then close the others."""
        await self._acceptor.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._lines:
                    self._hung_up.clear()
                    await self._hung_up.wait()
        for line in self._lines.values():
            line.close()

    @property
    def connected(self) -> set[int]:
        return set(self._lines)

    async def broadcast(self, directive: Directive) -> None:
        """Send every connected rank, and those that connect later, its part of the plan of its
        replica. Raises :class:`InputError`, and sends nothing, if the ranks cannot run it."""
        # A large plan takes seconds to check, while ranks report.
        self._plans = await asyncio.to_thread(self._cut, directive)
        for rank, line in self._lines.items():
            line.write(frames.frame(self._plans[rank]))

    def answer(self, ranks: Iterable[int], answer: RankAnswer) -> None:
        """Send connected ranks an answer."""
        frame = frames.frame(ToRank(answer=answer).body())
        for rank in ranks:
            self._lines[rank].write(frame)

    def ask_ops(self, ranks: set[int], iteration: int) -> None:
        """Ask connected ranks for the ops of an iteration."""
        asked = frames.encode(OpsAsked(ops_of=iteration))
        for rank in ranks & self._lines.keys():
            self._lines[rank].write(asked)

    def _cut(self, directive: Directive) -> dict[int, bytes]:
        plan, record = directive.plan.plan(), directive.record
        told = {
            "reason": directive.reason,
            "promised": record.promised if record is not None else None,
        }
        parts = cut(plan, self._mesh)
        bodies = [mine.body() for mine in parts]
        places = map(self._mesh.coordinate, range(self._mesh.world_size))
        found = {at.rank: bodies[at.along("pp")] for at in places}
        return {**found, 0: parts[0].model_copy(update=told).body()}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank: int | None = None
        try:
            rank = await self._let_in(reader, writer)
            if rank is not None:
                await self._listen(rank, reader, writer)
        except asyncio.IncompleteReadError as ended:
            if ended.partial or rank is None:
                log.log(_level(rank), "the connection of %s broke", _name(rank))
        except asyncio.CancelledError:
            pass  # The agent is ending; asyncio would report the cancelled task as an error.
        except (OSError, frames.FrameError) as error:
            why = str(error) or type(error).__name__
            log.log(_level(rank), "closed connection of %s: %s", _name(rank), why)
        finally:
            if rank is not None and self._lines.get(rank) is writer:
                del self._lines[rank]
            self._hung_up.set()
            writer.close()

    async def _let_in(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> int | None:
        """Do the handshake of :mod:`.frames`. Returns the rank, or None if it was refused."""
        nonce = frames.new_nonce()
        writer.write(frames.encode(frames.Challenge(nonce=nonce)))
        hello = frames.decode(frames.Hello, await frames.read(reader, frames.MAX_HELLO_BYTES))
        rank = hello.rank
        expected = frames.proof(self._secret, "rank", nonce, hello.nonce, rank)
        why = None
        if not frames.proves(hello.proof, expected):
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
            writer.write(frames.encode(frames.Welcome(refused=why)))
            await writer.drain()
            return None
        connection = writer.transport.get_protocol()
        assert isinstance(connection, Connection)
        connection.authenticated()
        answer = frames.proof(self._secret, "agent", nonce, hello.nonce, rank)
        writer.write(frames.encode(frames.Welcome(proof=answer)))
        if self._plans:
            writer.write(frames.frame(self._plans[rank]))
        if previous := self._lines.pop(rank, None):
            previous.close()
        self._lines[rank] = writer
        self._on_connected(rank)
        return rank

    async def _listen(
        self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while self._lines.get(rank) is writer:
            report = frames.decode(RankReport, await frames.read(reader))
            if report.rank != rank:
                raise frames.FrameError(f"a report of rank {report.rank} on rank {rank}'s line")
            if (misfit := report.misfit(self._mesh)) is not None:
                raise frames.FrameError(misfit)
            self._on_report(report)


def _level(rank: int | None) -> int:
    """Log level of a lost connection: the acceptor sums up those of unauthenticated clients."""
    return logging.DEBUG if rank is None else logging.INFO


def _name(rank: int | None) -> str:
    return "an unauthenticated client" if rank is None else f"rank {rank}"
