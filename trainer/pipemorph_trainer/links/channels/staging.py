"""The delegated route on a device: copies messages through host memory without blocking the host.

*Out:* an event on the compute stream marks when a message's tensors are complete. A side stream
waits for it and copies them to page-locked memory. After the copies, a thread gives the memory to
the engine, which keeps it until the receiver has acknowledged it. Then it returns to the
accelerator's pool. Over shared memory it is a slot of the receiver's, if one is free, and over RDMA
memory of the engine that the cards read: then nothing is copied on the host.

*In:* a message arrives in one of the engine's slots. The slots are page-locked, so another side
stream copies directly from them, concurrently to ops, and as soon as the message has arrived. The
compute stream waits for the event behind the copy; the host does not wait. After the copy the slot
is granted to the sender again.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.links.channels.copy_stream import CopyStream
from pipemorph_trainer.links.channels.delegated import (
    GRANT_SECONDS,
    DelegatedIncoming,
    DelegatedOutgoing,
    Key,
    bytes_of,
    key_of,
)
from pipemorph_trainer.links.message import NOTHING, Batch, Note, TensorMeta, presence
from pipemorph_trainer.links.recorder import record_arrival
from pipemorph_trainer.topology.accelerator import Accelerator, Event, Stream

if TYPE_CHECKING:
    import pipemorph_trainer._engine as _engine

log = logging.getLogger("pipemorph.trainer")

AHEAD = 3
"""Messages of one direction on the device before their op: the next one and two more. Others stay
in their slots, so that early messages do not increase a stage's memory."""


class _Region(NamedTuple):
    """Page-locked memory of the engine. ``memory``: uint8 (bytes,); ``leased``: to be sent from,
    not to be received in."""

    address: int
    memory: Tensor
    owner: _engine.Link
    leased: bool

    def holds(self, address: int) -> bool:
        return self.address <= address < self.address + self.memory.numel()


class Staging:
    """Shared by the delegated links of one rank: one side stream per direction of copies, and their
    page-locked memory. Used by the executor's thread.

    ``wake``: interrupts that thread's wait when a copy has failed. ``deadline``: longest wait of
    :meth:`drain`, seconds.
    """

    def __init__(
        self, accelerator: Accelerator, *, wake: Callable[[], None], deadline: float
    ) -> None:
        self.accelerator = accelerator
        self._wake = wake
        self._deadline = deadline
        self.to_host = CopyStream("pipemorph-to-host", accelerator, self._failed)
        self.to_device = CopyStream("pipemorph-to-device", accelerator, self._failed)
        self.incoming: list[StagedIncoming] = []
        self.outgoing: list[StagedOutgoing] = []
        self._regions: list[_Region] = []
        self._refused: set[int] = set()

    def grow(self, messages: int, metas: Sequence[TensorMeta]) -> None:
        """Grow the accelerator's pool to page-locked memory for ``messages`` messages. This may
        wait for the device, so not between ops."""
        held = [
            self.accelerator.pinned_empty((meta.nbytes,), torch.uint8)
            for _ in range(messages)
            for meta in metas
        ]
        held.clear()

    def page_lock(self, link: _engine.Link) -> None:
        """Page-lock the current slots of ``link``, so that the device can copy from them."""
        self._page_lock(link, link.slot_memory(), leased=False)

    def page_lock_added(self) -> None:
        """Page-lock what was added since: to the memory that leases are in, so that the device can
        copy to it, and by the engine to the slots of long links. This may wait for the device, so
        not between ops."""
        for incoming in self.incoming:
            incoming.page_lock()
        for link in {outgoing.link for outgoing in self.outgoing}:
            self._page_lock(link, link.lease_memory(), leased=True)

    def _page_lock(
        self, link: _engine.Link, memory: Sequence[tuple[int, int]], *, leased: bool
    ) -> None:
        known = {region.address for region in self._regions} | self._refused
        for address, nbytes in memory:
            if address in known:
                continue
            why = self.accelerator.register(address, nbytes)
            if why is not None:
                self._refused.add(address)
                log.warning(
                    "%s (%d bytes) cannot be page-locked: %s; messages in them are "
                    "copied once more on the host",
                    "memory to send from" if leased else "receive slots", nbytes, why,
                )  # fmt: skip
                continue
            array = (ctypes.c_uint8 * nbytes).from_address(address)
            whole = torch.frombuffer(array, dtype=torch.uint8)
            self._regions.append(_Region(address, whole, link, leased))

    def page_locked(self, memory: _engine.Message | _engine.Lease) -> Tensor | None:
        """The slot of a message, uint8 (bytes,); None if it is not page-locked."""
        view = np.frombuffer(memoryview(memory), dtype=np.uint8)
        address: int = view.__array_interface__["data"][0]
        for region in self._regions:
            if region.holds(address):
                at = address - region.address
                return region.memory[at : at + memory.nbytes]
        return None

    def pump(self, asking: StagedIncoming) -> None:
        """Start to copy arrived messages of all links to the device. Raises :class:`PipelineError`
        if a copy or the link of ``asking`` failed."""
        self.to_host.check()
        self.to_device.check()
        for incoming in self.incoming:
            if incoming is asking:
                incoming.fetch()
                continue
            # The link raises its error itself when its message is needed.
            with contextlib.suppress(PipelineError):
                incoming.fetch()

    def drain(self) -> None:
        """Wait until the engine has all messages. Raises like :meth:`CopyStream.drain`."""
        self.to_host.drain(self._deadline)

    def close(self, *, abandon: bool = False) -> None:
        """End the threads and unlock the slots, before the engine unmaps them. Idempotent.

        ``abandon``: drop messages that the engine does not have yet.
        """
        self._wake = _nobody
        ended = self.to_host.close(abandon=abandon)
        # Copies to the device do not depend on peers, so they end even after a failure. If the
        # device hangs, its memory stays page-locked.
        if not self.to_device.close():
            log.warning("copies to the device have not ended; their memory stays page-locked")
            return
        # Nor does what is given up: it may still be on its way to a lease.
        sent = ended and (not abandon or _is_idle(self.to_host.stream))
        while self._regions:
            region = self._regions.pop()
            if sent or not region.leased:
                self.accelerator.unregister(region.address)

    def _failed(self) -> None:
        self._wake()


def _nobody() -> None:
    """Does nothing: the executor has ended."""


def _is_idle(stream: Stream) -> bool:
    try:
        return stream.query()
    except RuntimeError:  # The device has failed.
        return False


class StagedOutgoing(DelegatedOutgoing):
    """Sending end on a device."""

    def __init__(self, *, staging: Staging, name: str, **options: Any) -> None:
        super().__init__(**options)
        self._staging, self._name = staging, name
        self._leases = self.link.transport in ("shm", "rdma")
        self._expected = 0
        self._grown: tuple[int, tuple[TensorMeta, ...]] = 0, ()
        self._staged = self.handed_over = 0
        """Messages with memory of this host that were given to the copy stream, and those of them
        that the engine has."""
        staging.outgoing.append(self)

    def expect(self, messages: int) -> None:
        """Reserve page-locked memory for ``messages`` messages: at once if their shapes are known,
        since some stage of the rank may receive when this one begins, else at the next
        :meth:`begin`."""
        self._expected = max(self._expected, messages)
        self._grow(self._grown[1])

    makes_room = True

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._grow(batch.metas)

    def _grow(self, metas: tuple[TensorMeta, ...]) -> None:
        wanted = self._expected, metas
        if metas and wanted != self._grown:
            self._grown = wanted
            self._staging.grow(*wanted)

    def send(self, microbatch: int, tensors: Sequence[Tensor | None] | None) -> None:
        """Start to copy a message to the host. The caller may drop its tensors, but not change
        them.

        Raises :class:`PipelineError` if an earlier message could not be copied or sent.
        """
        batch = self._batch
        assert batch is not None
        staging, accelerator = self._staging, self._staging.accelerator
        staging.to_host.check()
        present = presence(tensors)
        if tensors is None:
            tensors = [None] * len(batch.metas)
        # Made contiguous in the compute stream, so before the event.
        sources = [None if t is None else bytes_of(t.detach().contiguous()) for t in tensors]
        accelerator.wait(staging.to_host.stream, accelerator.record(accelerator.compute_stream()))
        payload: list[Tensor | _engine.Lease | None] = []
        # A lease takes its slot now, other memory when the engine gets it. So nothing is leased
        # before all that is older has its slots: it could wait for ever for those.
        leases = self._staged == self.handed_over
        for k, source in enumerate(sources):
            if source is None:
                payload.append(None)
                continue
            key = key_of(batch, microbatch, self.direction, k)
            lease = self._lease(key, source.numel()) if leases else None
            to = None if lease is None else staging.page_locked(lease)
            if lease is None or to is None:
                lease = None  # Given back.
                to = accelerator.pinned_empty((source.numel(),), torch.uint8)
            if source.numel():
                accelerator.copy(staging.to_host.stream, to, source)
            payload.append(to if lease is None else lease)
        hand_over = _HandOver(self, batch, microbatch, present, payload)
        hand_over.sources = sources
        self._staged += hand_over.staged
        letter = self.direction.letter
        staging.to_host.follow(
            hand_over,
            f"{letter} of microbatch {microbatch} of iteration {batch.step} on {self._name}",
        )

    def _lease(self, key: Key, nbytes: int) -> _engine.Lease | None:
        """Memory for one tensor that the engine does not copy; None if none is free, or if the link
        has none to lease. Raises :class:`PipelineError` if the link is dead."""
        if not self._leases or not nbytes:
            return None
        try:
            return self.link.lease(key, nbytes)
        except RuntimeError as error:
            raise PipelineError(str(error)) from error

    def close(self) -> None:
        """Wait until the engine has all messages. It flushes when it is closed."""
        self._staging.drain()


class _HandOver:
    """Gives a message to the engine, tensor by tensor. Runs in the copy stream's thread."""

    def __init__(
        self,
        end: StagedOutgoing,
        batch: Batch,
        microbatch: int,
        present: int,
        payload: list[Tensor | _engine.Lease | None],
    ) -> None:
        self.sources: list[Tensor | None] = []
        """Device memory that is being copied. Held until the copy is done, so that its allocator
        need not be told of the side stream."""
        self._end, self._batch, self._microbatch = end, batch, microbatch
        self._present, self._payload = present, payload
        self.staged = any(isinstance(each, Tensor) for each in payload)
        """Whether some of it is in memory of this host."""
        self._note: bytes | None = None
        self._next = 0
        self._give_up_at = 0.0

    def __call__(self) -> bool:
        end, batch = self._end, self._batch
        self.sources.clear()
        if self._note is None:
            # Its time in the queue starts now, when it is complete on the host.
            self._note = end.note(batch, self._microbatch, self._present)
        while self._next < len(self._payload):
            payload = self._payload[self._next]
            try:
                if payload is None or isinstance(payload, Tensor):
                    key = key_of(batch, self._microbatch, end.direction, self._next)
                    memory = b"" if payload is None else payload.numpy().data
                    end.link.send(key, memory, self._note)
                else:
                    payload.send(self._note)
            except RuntimeError as error:
                # If shapes have just grown, the receiver may not have granted larger slots yet.
                now = time.monotonic()
                self._give_up_at = self._give_up_at or now + GRANT_SECONDS
                if not end.link.alive or now > self._give_up_at:
                    raise PipelineError(str(error)) from error
                return False
            self._payload[self._next] = None  # The engine keeps it now.
            self._next += 1
        end.handed_over += self.staged
        return True


@dataclass
class _Arrival:
    """A message on the device, or being copied to it in the side stream."""

    note: Note
    started_at: float
    arrived_at: float
    tensors: list[Tensor | None] = field(default_factory=list)
    event: Event | None = None
    """Event behind its copies; None for a message without bytes."""


class StagedIncoming(DelegatedIncoming):
    """Receiving end on a device."""

    def __init__(self, *, staging: Staging, name: str, **options: Any) -> None:
        super().__init__(**options)
        self._staging, self._name = staging, name
        self._arrivals: dict[int, _Arrival] = {}
        self._next = 0
        staging.incoming.append(self)

    def reserve(self, messages: int, batch: Batch, used: int = 0, spare: int = 0) -> None:
        # The device has tensors of its own. A sender never leases the last slot.
        super().reserve(messages, batch, spare=int(self._link.transport == "shm"))
        self.page_lock()

    def page_lock(self) -> None:
        """Page-lock the slots that the engine has for this end."""
        self._staging.page_lock(self._link)

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._next = 0

    def ready_at(self, microbatch: int) -> float | None:
        self._next = microbatch
        self._staging.pump(self)
        arrival = self._arrivals.get(microbatch)
        return None if arrival is None else self._usable_from(arrival.note)

    def fetch(self) -> None:
        """Start to copy arrived messages, at most :data:`AHEAD` before their ops."""
        batch = self._batch
        if batch is None:
            return
        for microbatch in range(self._next, min(self._next + AHEAD, batch.microbatches)):
            if microbatch in self._arrivals:
                continue
            messages = self._whole(batch, microbatch)
            if messages is not None:
                self._arrivals[microbatch] = self._copy(batch, microbatch, messages)
                del self._here[microbatch]

    def _copy(self, batch: Batch, microbatch: int, messages: Sequence[_engine.Message]) -> _Arrival:
        staging, accelerator = self._staging, self._staging.accelerator
        stream = staging.to_device.stream
        note = Note.unpack(messages[0].note)
        arrival = _Arrival(
            note, messages[0].started_at, max(message.arrived_at for message in messages)
        )
        what = (
            f"{self._direction.letter} of microbatch {microbatch} of iteration "
            f"{batch.step} on {self._name}"
        )
        for k, (message, meta) in enumerate(zip(messages, batch.metas, strict=True)):
            if note.present >> k & 1 and message.nbytes != meta.nbytes:
                raise PipelineError(
                    f"tensor {k} of {what} has {message.nbytes} bytes; expected {meta}"
                )
        held: list[tuple[_engine.Message, Tensor]] = []
        for k, (message, meta) in enumerate(zip(messages, batch.metas, strict=True)):
            if not note.present >> k & 1:
                message.release()
                arrival.tensors.append(None)
                continue
            tensor = accelerator.empty(meta.shape, meta.dtype, stream)
            arrival.tensors.append(tensor)
            if not meta.nbytes:
                message.release()
                continue
            source = staging.page_locked(message)
            if source is None:
                source = accelerator.pinned_empty((meta.nbytes,), torch.uint8)
                message.copy_into(source.numpy().data)
                message.release()
            accelerator.copy(stream, bytes_of(tensor), source)
            held.append((message, source))
        if held:
            arrival.event = staging.to_device.follow(_Release(held), what)
        return arrival

    def take(self, microbatch: int) -> list[Tensor | None] | None:
        batch, arrival = self._batch, self._arrivals.pop(microbatch)
        assert batch is not None
        self._next = microbatch + 1
        if arrival.event is not None:
            accelerator = self._staging.accelerator
            compute = accelerator.compute_stream()
            accelerator.wait(compute, arrival.event)
            for tensor in arrival.tensors:
                if tensor is not None:
                    accelerator.keep(tensor, compute)
        record_arrival(
            self._recorder, arrival.note, self._peer_clock, arrival.arrived_at, batch.nbytes,
            exact=True, started_at=arrival.started_at,
        )  # fmt: skip
        return None if arrival.note.present == NOTHING else arrival.tensors

    def close(self, *, abandon: bool = False) -> None:
        super().close(abandon=abandon)
        self._arrivals.clear()


class _Release:
    """Grants slots to the sender again. Runs in the copy stream's thread."""

    def __init__(self, held: list[tuple[_engine.Message, Tensor]]) -> None:
        self._held = held

    def __call__(self) -> bool:
        for message, _ in self._held:
            message.release()
        self._held.clear()
        return True
