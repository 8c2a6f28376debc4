"""The job's agent and the agents of the job's other parts: what they send each other, and the side
of the job's agent.

A part is the ranks of one pod or of one machine, or of several pods that have one rank. Its agent
reports states as the job's agent does to the ingest (:class:`~pipemorph.wire.parts.PartReport`),
and gets plans for its ranks. Frames and handshake are those of ranks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.merge import ranks_of_part
from pipemorph.control.observe.observer import Observer
from pipemorph.wire import Count, OpsTrace, WireModel
from pipemorph.wire.parts import PartAnswer, PartReport
from pipemorph_trainer.agent import frames
from pipemorph_trainer.agent.lines import keep_alive, read
from pipemorph_trainer.agent.ops import PartOps
from pipemorph_trainer.agent.rank_plan import RankPlan


class PartPlans(WireModel):
    """Plans for the ranks of a part. ``of``: for each rank, which of ``plans`` it runs; ranks at
    one place of their pipelines mostly share one."""

    plans: tuple[RankPlan, ...]
    of: dict[Count, Count]


class PartAsked(WireModel):
    """Which ranks of a part are asked for the ops of an iteration."""

    ranks: tuple[Count, ...]
    iteration: Count


class PartMessage(WireModel):
    """What the job's agent sends."""

    answer: PartAnswer | None = None
    plans: PartPlans | None = None
    asked: PartAsked | None = None


def joined(bodies: Mapping[int, bytes]) -> bytes:
    """A frame with plans for ranks, of their bodies: those that are the same are sent once."""
    index: dict[bytes, int] = {}
    of = {rank: index.setdefault(body, len(index)) for rank, body in bodies.items()}
    ranks = ",".join(f'"{rank}":{number}' for rank, number in of.items())
    whole = b'{"plans":{"plans":[' + b",".join(index) + b'],"of":{' + ranks.encode() + b"}}}"
    return frames.frame(whole)


class PartLines:
    """Connections of the agents of parts, of so many ``ranks`` each. ``on_news`` is called when one
    has told something, ``on_ops`` with ops that were asked for."""

    def __init__(
        self,
        observer: Observer,
        mesh: MeshShape,
        ranks: int,
        on_news: Callable[[], None],
        on_ops: Callable[[OpsTrace], None] = lambda _: None,
    ) -> None:
        self._observer, self._on_news = observer, on_news
        self._mesh, self._ranks = mesh, ranks
        self._on_ops = on_ops
        self._lines: dict[int, asyncio.StreamWriter] = {}

    @property
    def connected(self) -> set[int]:
        return set(self._lines)

    def ranks(self, number: int) -> range:
        """The ranks of a part."""
        return ranks_of_part(self._mesh, number, self._ranks)

    def has(self, number: int) -> bool:
        """Whether the job has such a part with an agent of its own."""
        return self._observer.has_part(number)

    def admit(self, number: int, line: asyncio.StreamWriter) -> None:
        """Take a line in the place of an earlier one."""
        keep_alive(line)
        if previous := self._lines.pop(number, None):
            previous.close()
        self._lines[number] = line
        self._observer.meet(number)
        self.tell()

    def drop(self, number: int, line: asyncio.StreamWriter) -> None:
        if self._lines.get(number) is line:
            del self._lines[number]

    def send(self, frame_of: Callable[[range], bytes]) -> None:
        """Send every connected part what ``frame_of`` makes for its ranks."""
        for number, line in self._lines.items():
            line.write(frame_of(self.ranks(number)))

    def ask_ops(self, ranks: set[int], iteration: int) -> None:
        """Ask those of these ranks that are of connected parts for the ops of an iteration."""
        for number, line in self._lines.items():
            if mine := tuple(sorted(ranks.intersection(self.ranks(number)))):
                asked = PartAsked(ranks=mine, iteration=iteration)
                line.write(frames.frame(PartMessage(asked=asked).body()))

    async def listen(
        self, number: int, reader: asyncio.StreamReader, line: asyncio.StreamWriter
    ) -> None:
        """Process the reports of a part until its line ends, or another takes its place."""
        while self._lines.get(number) is line:
            self._hear(number, await read(reader))

    def _hear(self, number: int, payload: bytes) -> None:
        """Process one report. Raises :class:`frames.FrameError` if it is none, or
        does not fit the part."""
        if PartOps.is_one(payload):
            ops = frames.decode(PartOps, payload).ops
            if ops.rank not in self.ranks(number):
                raise frames.FrameError(f"ops of rank {ops.rank} on part {number}'s line")
            self._on_ops(ops)
            return
        report = frames.decode(PartReport, payload)
        if report.part != number:
            raise frames.FrameError(f"a report of part {report.part} on part {number}'s line")
        if (misfit := self._observer.misfit(report)) is not None:
            raise frames.FrameError(misfit)
        self._observer.hear(report, time.time())
        self._on_news()

    def tell(self) -> None:
        """Send parts what there is to tell them."""
        for number, answer in self._observer.answers(self._lines.keys()):
            self._lines[number].write(frames.frame(PartMessage(answer=answer).body()))

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
