"""Failover: the delegated route replaces a broken direct route during an iteration.

A direct route is one connection. If it breaks while both ranks live, the messages in flight are
lost, and only the receiver can name them. So each sender holds its messages until the receiver has
reported on the control socket that it consumed them. The rank that notices the failure gives up the
route permanently and sends the neighbour the position of its first missing message. The neighbour
does the same, and each sends the missing messages through the engine. Every message is delivered
once, with its usual key, and the iteration continues.

Without an engine link, a broken route ends the run. The direct route stays unused until the ranks
restart, because torch.distributed creates groups collectively, and ranks that are computing cannot
take part.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from pipemorph_trainer.errors import PipelineError, WaitTimeoutError
from pipemorph_trainer.transport.channels.delegated import DelegatedIncoming, DelegatedOutgoing
from pipemorph_trainer.transport.channels.direct import DirectIncoming, DirectOutgoing
from pipemorph_trainer.transport.control_socket import ControlSocket
from pipemorph_trainer.transport.message import MessageBatch, Position, new_tuple

log = logging.getLogger("pipemorph.trainer")


class _UnconsumedMessage(NamedTuple):
    """Message that the receiver has not consumed yet."""

    position: Position
    batch: MessageBatch
    tensors: Sequence[Tensor | None] | None


class Failover:
    """Failover at one end of a link. Main thread only."""

    def __init__(
        self,
        name: str,
        socket: ControlSocket,
        direct: tuple[DirectIncoming, DirectOutgoing],
        delegated: tuple[DelegatedIncoming, DelegatedOutgoing],
    ) -> None:
        self.name = name
        self.socket = socket
        self.incoming = FailoverIncoming(self, direct[0], delegated[0])
        self.outgoing = FailoverOutgoing(self, direct[1], delegated[1])
        self.broken: str | None = None
        """Reason for which the direct route was given up; None while it is in use."""
        self.answered = False
        """True once the messages that the neighbour named as missing were sent."""
        self.on_broken: Callable[[str], None] = lambda why: None
        """Called once, before the neighbour is notified: reserves slots for the delegated route."""

    def switch_to_delegated(self, why: str) -> None:
        """Give up the direct route. Raises :class:`PipelineError` if the neighbour is gone."""
        if self.broken is not None:
            return
        self.socket.read_arrived()
        if self.socket.lost is not None:
            raise PipelineError(why)
        self.broken = why
        log.warning("%s: the direct route failed: %s; delegated from now on", self.name, why)
        position = self.incoming.abort_direct_receives()
        self.outgoing.abort_direct_sends()
        self.on_broken(why)
        self.socket.send_missing_from(position)
        self.resend_missing()

    def resend_missing(self) -> None:
        """Send the messages that the neighbour has named as missing, if any. Call this during every
        wait, since the neighbour may wait for them."""
        position = self.socket.missing_from
        if position is None or self.answered:
            return
        self.answered = True
        self.switch_to_delegated(f"rank {self.socket.peer_rank} gave it up")
        self.outgoing.resend_from(position)


class FailoverIncoming:
    """Receiving end: direct, and delegated for messages that were lost with the direct route."""

    def __init__(
        self, failover: Failover, direct: DirectIncoming, delegated: DelegatedIncoming
    ) -> None:
        self._failover, self._direct, self._delegated = failover, direct, delegated
        self._batch: MessageBatch | None = None

    def begin_batch(self, batch: MessageBatch) -> None:
        self._batch = batch
        if self._failover.broken is None:
            self._direct.begin_batch(batch)
        else:
            self._delegated.begin_batch(batch)

    def record_sent(self, messages: int) -> None:
        if self._failover.broken is None:
            self._direct.record_sent(messages)

    def record_ops(self, ops: int) -> None:
        if self._failover.broken is None:
            self._direct.record_ops(ops)

    def ready_at(self, microbatch: int) -> float | None:
        failover = self._failover
        if failover.socket.missing_from is not None:
            failover.resend_missing()
        if failover.broken is None:
            if self._direct.error is None:
                return self._direct.ready_at(microbatch)
            failover.switch_to_delegated(self._direct.error)
        if self._direct.has_message(microbatch):
            return self._direct.ready_at(microbatch)
        return self._delegated.ready_at(microbatch)

    def pop_message(self, microbatch: int) -> list[Tensor | None] | None:
        assert self._batch is not None
        if self._failover.broken is None or self._direct.has_message(microbatch):
            tensors = self._direct.pop_message(microbatch)
            if self._failover.broken is None:
                batch, after = self._batch, microbatch + 1
                self._failover.socket.send_consumed(
                    self._direct.direction,
                    (batch.iteration, after),
                    last=after == batch.microbatches,
                )
            return tensors
        # The note of a message that was lost on the direct route may have arrived.
        self._failover.socket.notes.pop(
            (int(self._direct.direction), self._batch.iteration, microbatch), None
        )
        return self._delegated.pop_message(microbatch)

    def abort_direct_receives(self) -> Position:
        """Abort the posted receives; return the first missing message."""
        position = self._direct.abort_receives()
        if self._batch is not None:
            self._delegated.begin_batch(self._batch)
        return position

    def close(self, *, abandon: bool = False) -> None:
        self._direct.close(abandon=abandon or self._failover.broken is not None)
        self._delegated.close(abandon=abandon)

    @property
    def receiving(self) -> bool:
        return self._direct.receiving


class FailoverOutgoing:
    """Sending end: holds messages of the direct route until they are consumed."""

    def __init__(
        self, failover: Failover, direct: DirectOutgoing, delegated: DelegatedOutgoing
    ) -> None:
        self._failover, self._direct, self._delegated = failover, direct, delegated
        self._batch: MessageBatch | None = None
        self._unconsumed: deque[_UnconsumedMessage] = deque()

    def set_deadline(self, deadline: float) -> None:
        """Set the longest time of a send on the direct route, seconds."""
        self._direct.set_deadline(deadline)

    def begin_batch(self, batch: MessageBatch) -> None:
        self._batch = batch
        self._direct.begin_batch(batch)
        if self._delegated.makes_room or self._failover.broken is not None:
            self._delegated.begin_batch(batch)

    def slot_free_at(self) -> float:
        return 0.0 if self._failover.broken is not None else self._direct.slot_free_at()

    def send(self, microbatch: int, tensors: Sequence[Tensor | None] | None) -> None:
        batch = self._batch
        assert batch is not None
        failover = self._failover
        if failover.socket.missing_from is not None:
            failover.resend_missing()
        if failover.answered:
            self._delegated.send(microbatch, tensors)
            return
        self.all_consumed()
        self._unconsumed.append(
            new_tuple(_UnconsumedMessage, ((batch.iteration, microbatch), batch, tensors))
        )
        if failover.broken is not None:
            # The neighbour must answer first: newer messages must not fill slots of older ones.
            return
        try:
            self._direct.send(microbatch, tensors)
        except WaitTimeoutError:
            raise
        except PipelineError as error:
            failover.switch_to_delegated(str(error))

    def all_consumed(self) -> bool:
        """True if all messages were consumed by the neighbour or sent through the engine."""
        waiting, taken = (
            self._unconsumed,
            self._failover.socket.consumed.get(self._direct.direction),
        )
        if taken is not None:
            while waiting and waiting[0].position < taken:
                waiting.popleft()
        return not waiting

    def abort_direct_sends(self) -> None:
        """Abort the outstanding sends. Their messages stay for :meth:`resend_from`."""
        self._direct.abort_sends()

    def resend_from(self, position: Position) -> None:
        """Send the missing messages, from ``position`` on. Called once."""
        for each in self._unconsumed:
            if each.position >= position:
                self._delegated.begin_batch(each.batch)
                self._delegated.send(each.position[1], each.tensors)
        self._unconsumed.clear()
        if self._batch is not None:
            self._delegated.begin_batch(self._batch)

    def report_send_timestamps(self) -> None:
        """Send the receiver the departures of messages that have become complete on the device."""
        self._direct.report_send_timestamps()

    def finish_sends(self) -> None:
        """Wait until all sends on the direct route are done."""
        if self._failover.broken is None:
            self._direct.finish_sends()

    def close(self) -> None:
        if self._failover.broken is None:
            self._direct.close()
        self._delegated.close()
