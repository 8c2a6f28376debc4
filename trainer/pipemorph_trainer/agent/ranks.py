"""An agent's server: authenticates ranks, receives their telemetry, and sends each its plan.

That of the job's agent also lets in the agents of other parts (:mod:`.parts`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable

from pipemorph.api.mesh import MeshShape
from pipemorph.wire import Directive
from pipemorph_trainer.agent import frames
from pipemorph_trainer.agent.lines import read
from pipemorph_trainer.agent.messages import RankTelemetry
from pipemorph_trainer.agent.ops import OpsAsked
from pipemorph_trainer.agent.parts import PartLines, PartPlans, joined
from pipemorph_trainer.agent.rank_plan import cut

log = logging.getLogger("pipemorph.agent")

HELLO_SECONDS = 60.0
"""A client that has not authenticated by then is disconnected. A rank answers between two ops, and
before its first op it may be building a model."""


class RankServer:
    """Serves the connections of ``ranks``. ``on_telemetry`` is called for every message, in order.
    ``parts``: of the job's agent, if others observe parts of it."""

    def __init__(
        self,
        secret: bytes,
        mesh: MeshShape,
        ranks: range,
        on_telemetry: Callable[[RankTelemetry], None],
        parts: PartLines | None = None,
    ) -> None:
        self._secret = secret
        self._mesh, self._ranks, self._parts = mesh, ranks, parts
        self._on_telemetry = on_telemetry
        self._lines: dict[int, asyncio.StreamWriter] = {}
        self._plans: dict[int, bytes] = {}
        """The newest plan of each rank; empty before the first. Of the job's agent, for the ranks
        of all parts."""
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
                while self._lines or (self._parts is not None and self._parts.connected):
                    self._hung_up.clear()
                    await self._hung_up.wait()
        for line in self._lines.values():
            line.close()
        if self._parts is not None:
            self._parts.close()

    @property
    def connected(self) -> set[int]:
        return set(self._lines)

    async def broadcast(self, directive: Directive) -> None:
        """Send every connected rank, and those that connect later, its part of the plan of its
        replica. Raises :class:`InputError`, and sends nothing, if the ranks cannot run it."""
        # A large plan takes seconds to check, while ranks report.
        self._hand_out(await asyncio.to_thread(self._cut, directive))
        if self._parts is not None:
            self._parts.send(self._plans_of)

    def hand_on(self, plans: PartPlans) -> None:
        """Send every connected rank, and those that connect later, its part of these."""
        bodies = [plan.body() for plan in plans.plans]
        self._hand_out({rank: bodies[index] for rank, index in plans.of.items()})

    def ask_ops(self, ranks: set[int], iteration: int) -> None:
        """Ask ranks for the ops of an iteration: those that are connected here, and by their parts
        the others."""
        asked = frames.encode(OpsAsked(ops_of=iteration))
        for rank in ranks & self._lines.keys():
            self._lines[rank].write(asked)
        if self._parts is not None:
            self._parts.ask_ops(ranks, iteration)

    def _hand_out(self, plans: dict[int, bytes]) -> None:
        self._plans = plans
        for rank, line in self._lines.items():
            line.write(frames.frame(plans[rank]))

    def _plans_of(self, ranks: Iterable[int]) -> bytes:
        """A frame for the agent of a part."""
        return joined({rank: self._plans[rank] for rank in ranks})

    def _cut(self, directive: Directive) -> dict[int, bytes]:
        plan, record = directive.plan.plan(), directive.record
        told = {
            "reason": directive.reason,
            "promised": record.promised if record is not None else None,
        }
        first = b""
        others = {replica for replicas, _ in plan.own for replica in replicas}
        most = [replica for replica in range(self._mesh.replicas) if replica not in others]
        found: dict[tuple[int, int], bytes] = {}
        for replicas in (most, *(replicas for replicas, _ in plan.own)):
            if not replicas:
                continue
            for place, mine in enumerate(cut(plan.of_replica(replicas[0]), self._mesh)):
                data = mine.body()
                if 0 in replicas and place == 0:
                    first = mine.model_copy(update=told).body()
                found.update({(replica, place): data for replica in replicas})
        places = map(self._mesh.coordinate, range(self._mesh.world_size))
        parts = {at.rank: found[at.replica, at.along("pp")] for at in places}
        return {**parts, 0: first}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        who: tuple[frames.Side, int] | None = None
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                who = await self._let_in(reader, writer)
            if who is not None and who[0] == "rank":
                await self._listen(who[1], reader, writer)
            elif who is not None and self._parts is not None:
                await self._parts.listen(who[1], reader, writer)
        except asyncio.IncompleteReadError as ended:
            if ended.partial or who is None:
                log.info("the connection of %s broke", _name(who))
        except asyncio.CancelledError:
            pass  # The agent is ending; asyncio would report the cancelled task as an error.
        except (OSError, TimeoutError, frames.FrameError) as error:
            log.info("closed connection of %s: %s", _name(who), str(error) or type(error).__name__)
        finally:
            if who is not None and who[0] == "rank" and self._lines.get(who[1]) is writer:
                del self._lines[who[1]]
            elif who is not None and self._parts is not None:
                self._parts.drop(who[1], writer)
            self._hung_up.set()
            writer.close()

    async def _let_in(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[frames.Side, int] | None:
        """Do the handshake of :mod:`.frames`. Returns who it is, or None if it was refused."""
        nonce = frames.new_nonce()
        writer.write(frames.encode(frames.Challenge(nonce=nonce)))
        hello = frames.decode(frames.Hello, await read(reader, frames.MAX_HELLO_BYTES))
        expected = frames.proof(self._secret, hello.side, nonce, hello.nonce, hello.rank)
        why = None
        if not frames.proves(hello.proof, expected):
            why = "wrong secret: it is of another job or attempt"
        elif hello.side == "part" and (self._parts is None or not self._parts.has(hello.rank)):
            why = f"the job has no part {hello.rank} with an agent of its own"
        elif hello.side == "rank" and not 0 <= hello.rank < self._mesh.world_size:
            why = f"rank {hello.rank} of a job with {self._mesh.world_size} ranks"
        elif hello.side == "rank" and hello.rank not in self._ranks:
            why = f"rank {hello.rank}; this agent is that of {_range(self._ranks)}"
        if why is not None:
            host, port, *_ = writer.get_extra_info("peername")
            self.refused.append(why)
            log.warning("refused %s %d from %s:%d: %s", hello.side, hello.rank, host, port, why)
            writer.write(frames.encode(frames.Welcome(refused=why)))
            await writer.drain()
            return None
        answer = frames.proof(self._secret, "agent", nonce, hello.nonce, hello.rank)
        writer.write(frames.encode(frames.Welcome(proof=answer)))
        if hello.side == "part" and self._parts is not None:
            if self._plans:
                writer.write(self._plans_of(self._parts.ranks(hello.rank)))
            self._parts.admit(hello.rank, writer)
            return "part", hello.rank
        if self._plans:
            writer.write(frames.frame(self._plans[hello.rank]))
        if previous := self._lines.pop(hello.rank, None):
            previous.close()
        self._lines[hello.rank] = writer
        return "rank", hello.rank

    async def _listen(
        self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while self._lines.get(rank) is writer:
            telemetry = frames.decode(RankTelemetry, await read(reader))
            if telemetry.rank != rank:
                raise frames.FrameError(f"telemetry of rank {telemetry.rank} on rank {rank}'s line")
            if (misfit := telemetry.misfit(self._mesh)) is not None:
                raise frames.FrameError(misfit)
            self._on_telemetry(telemetry)


def _name(who: tuple[frames.Side, int] | None) -> str:
    return "an unauthenticated client" if who is None else f"{who[0]} {who[1]}"


def _range(ranks: range) -> str:
    return f"ranks {ranks.start} to {ranks.stop - 1}"
