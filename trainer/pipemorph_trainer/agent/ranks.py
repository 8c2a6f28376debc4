"""The agent's server for ranks: authenticates them, receives telemetry, sends each its plan."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from pipemorph.api.mesh import MeshShape
from pipemorph.wire import PlanMessage
from pipemorph_trainer.agent import frames
from pipemorph_trainer.agent.messages import RankTelemetry
from pipemorph_trainer.agent.rank_plan import cut

log = logging.getLogger("pipemorph.agent")

HELLO_SECONDS = 60.0
"""A client that has not authenticated by then is disconnected. A rank answers between two ops, and
before its first op it may be building a model."""


class RankServer:
    """Serves the connections of the ranks of ``mesh``. ``on_telemetry`` is called for every
    message, in order."""

    def __init__(
        self, secret: bytes, mesh: MeshShape, on_telemetry: Callable[[RankTelemetry], None]
    ) -> None:
        self._secret = secret
        self._mesh = mesh
        self._on_telemetry = on_telemetry
        self._lines: dict[int, asyncio.StreamWriter] = {}
        self._plans: dict[tuple[int, int], bytes] = {}
        """The newest plan of each replica, as frames for the ranks at each place along ``pp``;
        empty before the first."""
        self._server: asyncio.Server | None = None
        self._hung_up = asyncio.Event()
        self.refused: list[str] = []

    async def start(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(self._serve, sock=listener)

    async def close(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for the ranks to disconnect, then close the others."""
        if self._server is not None:
            self._server.close()
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

    async def broadcast(self, plan: PlanMessage) -> None:
        """Send every connected rank, and those that connect later, its part of the plan of its
        replica. Raises :class:`InputError`, and sends nothing, if the ranks cannot run it."""
        # A large plan takes seconds to check, while ranks report.
        self._plans = await asyncio.to_thread(self._cut, plan)
        for rank, line in self._lines.items():
            line.write(self._plan_of(rank))

    def _cut(self, message: PlanMessage) -> dict[tuple[int, int], bytes]:
        plan = message.plan()
        others = {replica for replicas, _ in plan.own for replica in replicas}
        most = [replica for replica in range(self._mesh.replicas) if replica not in others]
        found = {}
        for replicas in (most, *(replicas for replicas, _ in plan.own)):
            if not replicas:
                continue
            for place, mine in enumerate(cut(plan.of_replica(replicas[0]), self._mesh)):
                data = frames.frame(mine.body())
                found.update({(replica, place): data for replica in replicas})
        return found

    def _plan_of(self, rank: int) -> bytes:
        at = self._mesh.coordinate(rank)
        return self._plans[at.replica, at.along("pp")]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank: int | None = None
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                rank = await self._let_in(reader, writer)
            if rank is not None:
                await self._listen(rank, reader, writer)
        except asyncio.IncompleteReadError as ended:
            if ended.partial or rank is None:
                log.info("the connection of %s broke", _who(rank))
        except asyncio.CancelledError:
            pass  # The agent is ending; asyncio would report the cancelled task as an error.
        except (OSError, TimeoutError, frames.FrameError) as error:
            log.info("closed connection of %s: %s", _who(rank), str(error) or type(error).__name__)
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
        hello = frames.decode(frames.Hello, await _read(reader, frames.MAX_HELLO_BYTES))
        expected = frames.proof(self._secret, "rank", nonce, hello.nonce, hello.rank)
        why = None
        if not frames.proves(hello.proof, expected):
            why = "wrong secret: it is of another job or attempt"
        elif not 0 <= hello.rank < self._mesh.world_size:
            why = f"rank {hello.rank} of a job with {self._mesh.world_size} ranks"
        if why is not None:
            host, port, *_ = writer.get_extra_info("peername")
            self.refused.append(why)
            log.warning("refused rank %d from %s:%d: %s", hello.rank, host, port, why)
            writer.write(frames.encode(frames.Welcome(refused=why)))
            await writer.drain()
            return None
        answer = frames.proof(self._secret, "agent", nonce, hello.nonce, hello.rank)
        writer.write(frames.encode(frames.Welcome(proof=answer)))
        if self._plans:
            writer.write(self._plan_of(hello.rank))
        if previous := self._lines.pop(hello.rank, None):
            previous.close()
        self._lines[hello.rank] = writer
        return hello.rank

    async def _listen(
        self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while self._lines.get(rank) is writer:
            telemetry = frames.decode(RankTelemetry, await _read(reader, frames.MAX_FRAME_BYTES))
            if telemetry.rank != rank:
                raise frames.FrameError(f"telemetry of rank {telemetry.rank} on rank {rank}'s line")
            if (misfit := telemetry.misfit(self._mesh)) is not None:
                raise frames.FrameError(misfit)
            self._on_telemetry(telemetry)


def _who(rank: int | None) -> str:
    return "an unauthenticated client" if rank is None else f"rank {rank}"


async def _read(reader: asyncio.StreamReader, limit: int) -> bytes:
    length = int.from_bytes(await reader.readexactly(frames.HEADER_BYTES), "big")
    if length > limit:
        raise frames.FrameError(f"frame of {length} bytes; at most {limit}")
    return await reader.readexactly(length)
