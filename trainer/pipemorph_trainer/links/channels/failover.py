"""Failover: replaces a broken direct route by the delegated one during an iteration.

A direct route is one connection. If it breaks while both ranks live, the messages in flight are
lost, and only the receiver knows which. So each sender keeps its messages until the receiver has
taken them and has said so on the control socket. The rank that notices the failure gives up the
route permanently and tells the neighbour which message it misses first. The neighbour does the
same, and each sends the missing messages through the engine. Every message is delivered once, with
its usual key, and the iteration continues.

This works for links with an engine link; without one a broken route ends the run. The direct route
stays unused until the ranks restart, because torch.distributed creates groups collectively, and
ranks that are computing cannot take part.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from pipemorph_trainer.errors import PipelineError, WaitTimeoutError
from pipemorph_trainer.links.channels.delegated import DelegatedIncoming, DelegatedOutgoing
from pipemorph_trainer.links.channels.direct import DirectIncoming, DirectOutgoing
from pipemorph_trainer.links.message import Batch, Position, new_tuple
from pipemorph_trainer.links.peer_socket import PeerSocket

log = logging.getLogger("pipemorph.trainer")


class _Kept(NamedTuple):
    """A message that the receiver has not taken yet."""

    position: Position
    batch: Batch
    tensors: Sequence[Tensor | None] | None


class Failover:
    """One end of a link whose direct route may be given up. Main thread only."""

    def __init__(
        self,
        name: str,
        socket: PeerSocket,
        direct: tuple[DirectIncoming, DirectOutgoing],
        delegated: tuple[DelegatedIncoming, DelegatedOutgoing],
    ) -> None:
        self.name = name
        self.socket = socket
        self.incoming = FailoverIncoming(self, direct[0], delegated[0])
        self.outgoing = FailoverOutgoing(self, direct[1], delegated[1])
        self.broken: str | None = None
        """Why the direct route was given up; None while it is in use."""
        self.answered = False
        """Whether the missing messages were sent to the neighbour, after it has named them."""
        self.on_broken: Callable[[str], None] = lambda why: None
        """Called once, before the neighbour is told. Reserves slots for the delegated route."""

    def give_up(self, why: str) -> None:
        """Give up the direct route. Raises :class:`PipelineError` if the neighbour is gone, too."""
        if self.broken is not None:
            return
        self.socket.pump()
        if self.socket.lost is not None:
            raise PipelineError(why)
        self.broken = why
        log.warning("%s: the direct route failed: %s; delegated from now on", self.name, why)
        position = self.incoming.leave()
        self.outgoing.leave()
        self.on_broken(why)
        self.socket.send_position(position)
        self.attend()

    def attend(self) -> None:
        """Send the messages that the neighbour has named as missing, if any. Call during every
        wait, since the neighbour may be waiting for them."""
        position = self.socket.missing_from
        if position is None or self.answered:
            return
        self.answered = True
        self.give_up(f"rank {self.socket.peer_rank} gave it up")
        self.outgoing.send_again(position)


class FailoverIncoming:
    """Receiving end: direct, and delegated for messages missing after the route broke."""

    def __init__(
        self, failover: Failover, direct: DirectIncoming, delegated: DelegatedIncoming
    ) -> None:
        self._failover, self._direct, self._delegated = failover, direct, delegated
        self._batch: Batch | None = None

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        if self._failover.broken is None:
            self._direct.begin(batch)
        else:
            self._delegated.begin(batch)

    def sent(self, messages: int) -> None:
        if self._failover.broken is None:
            self._direct.sent(messages)

    def ran(self, ops: int) -> None:
        if self._failover.broken is None:
            self._direct.ran(ops)

    def ready_at(self, microbatch: int) -> float | None:
        failover = self._failover
        if failover.socket.missing_from is not None:
            failover.attend()
        if failover.broken is None:
            if self._direct.error is None:
                return self._direct.ready_at(microbatch)
            failover.give_up(self._direct.error)
        if self._direct.holds(microbatch):
            return self._direct.ready_at(microbatch)
        return self._delegated.ready_at(microbatch)

    def take(self, microbatch: int) -> list[Tensor | None] | None:
        assert self._batch is not None
        if self._failover.broken is None or self._direct.holds(microbatch):
            tensors = self._direct.take(microbatch)
            if self._failover.broken is None:
                batch, after = self._batch, microbatch + 1
                self._failover.socket.send_taken(
                    self._direct.direction,
                    (batch.iteration, after),
                    last=after == batch.microbatches,
                )
            return tensors
        # The note of a message that was lost on the direct route may have arrived.
        self._failover.socket.notes.pop(
            (int(self._direct.direction), self._batch.iteration, microbatch), None
        )
        return self._delegated.take(microbatch)

    def leave(self) -> Position:
        """Abort the posted receives; return the first missing message."""
        position = self._direct.give_up()
        if self._batch is not None:
            self._delegated.begin(self._batch)
        return position

    def close(self, *, abandon: bool = False) -> None:
        self._direct.close(abandon=abandon or self._failover.broken is not None)
        self._delegated.close(abandon=abandon)

    @property
    def receiving(self) -> bool:
        return self._direct.receiving


class FailoverOutgoing:
    """Sending end: keeps messages of the direct route until they are taken."""

    def __init__(
        self, failover: Failover, direct: DirectOutgoing, delegated: DelegatedOutgoing
    ) -> None:
        self._failover, self._direct, self._delegated = failover, direct, delegated
        self._batch: Batch | None = None
        self._kept: deque[_Kept] = deque()

    def allow(self, deadline: float) -> None:
        """Set the longest time of a send on the direct route, seconds."""
        self._direct.allow(deadline)

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._direct.begin(batch)
        if self._delegated.makes_room or self._failover.broken is not None:
            self._delegated.begin(batch)

    def slot_free_at(self) -> float:
        return 0.0 if self._failover.broken is not None else self._direct.slot_free_at()

    def send(self, microbatch: int, tensors: Sequence[Tensor | None] | None) -> None:
        batch = self._batch
        assert batch is not None
        failover = self._failover
        if failover.socket.missing_from is not None:
            failover.attend()
        if failover.answered:
            self._delegated.send(microbatch, tensors)
            return
        self.all_taken()
        self._kept.append(new_tuple(_Kept, ((batch.iteration, microbatch), batch, tensors)))
        if failover.broken is not None:
            # Wait for the neighbour: newer messages must not fill slots that older ones need.
            return
        try:
            self._direct.send(microbatch, tensors)
        except WaitTimeoutError:
            raise
        except PipelineError as error:
            failover.give_up(str(error))

    def all_taken(self) -> bool:
        """Whether all messages were taken by the neighbour or given to the engine."""
        kept, taken = self._kept, self._failover.socket.taken.get(self._direct.direction)
        if taken is not None:
            while kept and kept[0].position < taken:
                kept.popleft()
        return not kept

    def leave(self) -> None:
        """Abort the outstanding sends. Their messages are kept."""
        self._direct.give_up()

    def send_again(self, position: Position) -> None:
        """Send the missing messages: all kept ones from ``position`` on. Called once."""
        for kept in self._kept:
            if kept.position >= position:
                self._delegated.begin(kept.batch)
                self._delegated.send(kept.position[1], kept.tensors)
        self._kept.clear()
        if self._batch is not None:
            self._delegated.begin(self._batch)

    def tell_departures(self) -> None:
        """Tell the receiver which direct messages have become complete on the device, and when."""
        self._direct.tell_departures()

    def finish(self) -> None:
        """Wait until all sends on the direct route are done."""
        if self._failover.broken is None:
            self._direct.finish()

    def close(self) -> None:
        if self._failover.broken is None:
            self._direct.close()
        self._delegated.close()
