"""Delegated route on a device: messages are copied through host memory without blocking the host.

*Sending:* an event on the compute stream marks when a message's tensors are complete. A side stream
waits for it and copies them to page-locked memory. After the copies, a thread passes the memory to
the engine, which holds it until the receiver has acknowledged the message; then it returns to the
accelerator's pool. Over shared memory the copy goes into a free slot of the receiver, and over RDMA
into memory of the engine that the cards read: then nothing is copied on the host.

*Receiving:* a message arrives in one of the engine's slots. The slots are page-locked, so another
side stream copies directly from them, concurrently to ops, as soon as the message has arrived. The
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
from pipemorph_trainer.topology.accelerator import Accelerator, DeviceEvent, DeviceStream
from pipemorph_trainer.transport.channels.copy_stream import CopyStream
from pipemorph_trainer.transport.channels.delegated import (
    GRANT_SECONDS,
    DelegatedIncoming,
    DelegatedOutgoing,
    Key,
    make_message_key,
    view_as_bytes,
)
from pipemorph_trainer.transport.link_recorder import record_wire_time
from pipemorph_trainer.transport.message import (
    NONE_PRESENT,
    MessageBatch,
    Note,
    TensorMeta,
    compute_presence_bits,
)

if TYPE_CHECKING:
    import pipemorph_trainer._engine as _engine

log = logging.getLogger("pipemorph.trainer")

MESSAGES_AHEAD = 3
"""Messages of one direction on the device before their op: the next one and two more. Others stay
in their slots, so that early messages do not increase a stage's memory."""


class _PageLockedRegion(NamedTuple):
    """Page-locked memory of the engine. ``memory``: uint8 (bytes,); ``leased``: for sending, not
    for receiving."""

    address: int
    memory: Tensor
    owner: _engine.Link
    leased: bool

    def contains_address(self, address: int) -> bool:
        return self.address <= address < self.address + self.memory.numel()


class Staging:
    """Staging memory and copy streams, shared by the delegated links of a rank: one side stream per
    direction of copies. Used by the executor's thread.

    ``wake``: interrupts that thread's wait when a copy has failed. ``deadline``: longest wait of
    :meth:`drain_sends`, seconds.
    """

    def __init__(
        self, accelerator: Accelerator, *, wake: Callable[[], None], deadline: float
    ) -> None:
        self.accelerator = accelerator
        self._wake = wake
        self._deadline = deadline
        self.to_host = CopyStream("pipemorph-to-host", accelerator, self._wake_executor)
        self.to_device = CopyStream("pipemorph-to-device", accelerator, self._wake_executor)
        self.incoming: list[StagedIncoming] = []
        self.outgoing: list[StagedOutgoing] = []
        self._regions: list[_PageLockedRegion] = []
        self._refused: set[int] = set()

    def grow_pool(self, messages: int, metas: Sequence[TensorMeta]) -> None:
        """Grow the accelerator's pool to page-locked memory for ``messages`` messages. The call may
        wait for the device, so it must not run between ops."""
        held = [
            self.accelerator.allocate_pinned((meta.nbytes,), torch.uint8)
            for _ in range(messages)
            for meta in metas
        ]
        held.clear()

    def page_lock_slots(self, link: _engine.Link) -> None:
        """Page-lock the current slots of ``link``, so that the device can copy from them."""
        self._page_lock_memory(link, link.slot_memory(), leased=False)

    def page_lock_added(self) -> None:
        """Page-lock memory added since the last call: that of leases, so that the device can copy
        to it, and slots that the engine has added to long links. The call may wait for the device,
        so it must not run between ops."""
        for incoming in self.incoming:
            incoming.page_lock_slots()
        for link in {outgoing.link for outgoing in self.outgoing}:
            self._page_lock_memory(link, link.lease_memory(), leased=True)

    def _page_lock_memory(
        self, link: _engine.Link, memory: Sequence[tuple[int, int]], *, leased: bool
    ) -> None:
        known = {region.address for region in self._regions} | self._refused
        for address, nbytes in memory:
            if address in known:
                continue
            why = self.accelerator.lock_pages(address, nbytes)
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
            self._regions.append(_PageLockedRegion(address, whole, link, leased))

    def find_page_locked(self, memory: _engine.Message | _engine.Lease) -> Tensor | None:
        """Slot of a message, uint8 (bytes,); None if it is not page-locked."""
        view = np.frombuffer(memoryview(memory), dtype=np.uint8)
        address: int = view.__array_interface__["data"][0]
        for region in self._regions:
            if region.contains_address(address):
                at = address - region.address
                return region.memory[at : at + memory.nbytes]
        return None

    def copy_arrived_messages(self, asking: StagedIncoming) -> None:
        """Start to copy arrived messages of all links to the device. Raises :class:`PipelineError`
        if a copy or the link of ``asking`` failed."""
        self.to_host.raise_error()
        self.to_device.raise_error()
        for incoming in self.incoming:
            if incoming is asking:
                incoming.start_copies()
                continue
            # Another link raises its own error when its message is needed.
            with contextlib.suppress(PipelineError):
                incoming.start_copies()

    def drain_sends(self) -> None:
        """Wait until the engine has all messages. Raises like :meth:`CopyStream.drain`."""
        self.to_host.drain(self._deadline)

    def close(self, *, abandon: bool = False) -> None:
        """End the threads and unlock the slots, before the engine unmaps them. Idempotent.

        ``abandon``: drop messages that the engine does not have yet.
        """
        self._wake = _ignore_failure
        ended = self.to_host.close(abandon=abandon)
        # Copies to the device do not depend on peers, so they end even after a failure. If the
        # device hangs, its memory stays page-locked.
        if not self.to_device.close():
            log.warning("copies to the device have not ended; their memory stays page-locked")
            return
        # An abandoned copy may still write to a lease.
        sent = ended and (not abandon or _is_idle(self.to_host.stream))
        while self._regions:
            region = self._regions.pop()
            if sent or not region.leased:
                self.accelerator.unlock_pages(region.address)

    def _wake_executor(self) -> None:
        self._wake()


def _ignore_failure() -> None:
    """Do nothing, since the executor has ended."""


def _is_idle(stream: DeviceStream) -> bool:
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
        """Messages in memory of this host: number scheduled in the copy stream, and number that the
        engine has of these."""
        staging.outgoing.append(self)

    def expect_messages(self, messages: int) -> None:
        """Reserve page-locked memory for ``messages`` messages. If their shapes are known this is
        done at once, since another stage of the rank may receive when this one begins; else at the
        next :meth:`begin_batch`."""
        self._expected = max(self._expected, messages)
        self._grow_pool(self._grown[1])

    makes_room = True

    def begin_batch(self, batch: MessageBatch) -> None:
        super().begin_batch(batch)
        self._grow_pool(batch.metas)

    def _grow_pool(self, metas: tuple[TensorMeta, ...]) -> None:
        wanted = self._expected, metas
        if metas and wanted != self._grown:
            self._grown = wanted
            self._staging.grow_pool(*wanted)

    def send(self, microbatch: int, tensors: Sequence[Tensor | None] | None) -> None:
        """Start to copy a message to the host. The caller may drop its tensors, but not change
        them.

        Raises :class:`PipelineError` if an earlier message could not be copied or sent.
        """
        batch = self._batch
        assert batch is not None
        staging, accelerator = self._staging, self._staging.accelerator
        staging.to_host.raise_error()
        present = compute_presence_bits(tensors)
        if tensors is None:
            tensors = [None] * len(batch.metas)
        # Tensors become contiguous in the compute stream, so before the event.
        sources = [None if t is None else view_as_bytes(t.detach().contiguous()) for t in tensors]
        accelerator.wait_event(
            staging.to_host.stream, accelerator.record_event(accelerator.compute_stream())
        )
        payload: list[Tensor | _engine.Lease | None] = []
        # A lease takes its slot now, other memory only when the engine gets it. Older messages must
        # have their slots before a lease, or they could wait for them forever.
        leases = self._staged == self.handed_over
        for k, source in enumerate(sources):
            if source is None:
                payload.append(None)
                continue
            key = make_message_key(batch, microbatch, self.direction, k)
            lease = self._lease_memory(key, source.numel()) if leases else None
            to = None if lease is None else staging.find_page_locked(lease)
            if lease is None or to is None:
                lease = None  # The lease is released.
                to = accelerator.allocate_pinned((source.numel(),), torch.uint8)
            if source.numel():
                accelerator.copy_tensor(staging.to_host.stream, to, source)
            payload.append(to if lease is None else lease)
        hand_over = _EngineSend(self, batch, microbatch, present, payload)
        hand_over.sources = sources
        self._staged += hand_over.staged
        letter = self.direction.letter
        staging.to_host.schedule_action(
            hand_over,
            f"{letter} of microbatch {microbatch} of iteration {batch.step} on {self._name}",
        )

    def _lease_memory(self, key: Key, nbytes: int) -> _engine.Lease | None:
        """Lease memory for one tensor, which the engine does not copy; None if none is free, or the
        link has none. Raises :class:`PipelineError` if the link is dead."""
        if not self._leases or not nbytes:
            return None
        try:
            return self.link.lease(key, nbytes)
        except RuntimeError as error:
            raise PipelineError(str(error)) from error

    def close(self) -> None:
        """Wait until the engine has all messages. The engine flushes when it is closed."""
        self._staging.drain_sends()


class _EngineSend:
    """Action of the copy stream that sends a message through the engine, tensor by tensor."""

    def __init__(
        self,
        end: StagedOutgoing,
        batch: MessageBatch,
        microbatch: int,
        present: int,
        payload: list[Tensor | _engine.Lease | None],
    ) -> None:
        self.sources: list[Tensor | None] = []
        """Device memory that is being copied, held until the copy is done: its allocator does not
        track the side stream."""
        self._end, self._batch, self._microbatch = end, batch, microbatch
        self._present, self._payload = present, payload
        self.staged = any(isinstance(each, Tensor) for each in payload)
        """True if some tensor is in memory of this host, and not in a lease."""
        self._note: bytes | None = None
        self._next = 0
        self._give_up_at = 0.0

    def __call__(self) -> bool:
        end, batch = self._end, self._batch
        self.sources.clear()
        if self._note is None:
            # The time in the queue starts now, when the message is complete on the host.
            self._note = end.make_note(batch, self._microbatch, self._present)
        while self._next < len(self._payload):
            payload = self._payload[self._next]
            try:
                if payload is None or isinstance(payload, Tensor):
                    key = make_message_key(batch, self._microbatch, end.direction, self._next)
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
            self._payload[self._next] = None  # The engine holds it now.
            self._next += 1
        end.handed_over += self.staged
        return True


@dataclass
class _StagedMessage:
    """Message on the device, or being copied to it in the side stream."""

    note: Note
    started_at: float
    arrived_at: float
    tensors: list[Tensor | None] = field(default_factory=list)
    event: DeviceEvent | None = None
    """Event behind its copies; None for a message without bytes."""


class StagedIncoming(DelegatedIncoming):
    """Receiving end on a device."""

    def __init__(self, *, staging: Staging, name: str, **options: Any) -> None:
        super().__init__(**options)
        self._staging, self._name = staging, name
        self._arrivals: dict[int, _StagedMessage] = {}
        self._next = 0
        staging.incoming.append(self)

    def reserve_slots(
        self, messages: int, batch: MessageBatch, used: int = 0, spare: int = 0
    ) -> None:
        # Tensors live on the device, not in slots. A sender never leases the last slot.
        super().reserve_slots(messages, batch, spare=int(self._link.transport == "shm"))
        self.page_lock_slots()

    def page_lock_slots(self) -> None:
        """Page-lock the slots that the engine has for this end."""
        self._staging.page_lock_slots(self._link)

    def begin_batch(self, batch: MessageBatch) -> None:
        super().begin_batch(batch)
        self._next = 0

    def ready_at(self, microbatch: int) -> float | None:
        self._next = microbatch
        self._staging.copy_arrived_messages(self)
        arrival = self._arrivals.get(microbatch)
        return None if arrival is None else self._usable_from(arrival.note)

    def start_copies(self) -> None:
        """Start to copy arrived messages, at most :data:`MESSAGES_AHEAD` before their ops."""
        batch = self._batch
        if batch is None:
            return
        for microbatch in range(self._next, min(self._next + MESSAGES_AHEAD, batch.microbatches)):
            if microbatch in self._arrivals:
                continue
            messages = self._receive_parts(batch, microbatch)
            if messages is not None:
                self._arrivals[microbatch] = self._copy_to_device(batch, microbatch, messages)
                del self._here[microbatch]

    def _copy_to_device(
        self, batch: MessageBatch, microbatch: int, messages: Sequence[_engine.Message]
    ) -> _StagedMessage:
        staging, accelerator = self._staging, self._staging.accelerator
        stream = staging.to_device.stream
        note = Note.unpack(messages[0].note)
        arrival = _StagedMessage(
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
            tensor = accelerator.allocate_empty(meta.shape, meta.dtype, stream)
            arrival.tensors.append(tensor)
            if not meta.nbytes:
                message.release()
                continue
            source = staging.find_page_locked(message)
            if source is None:
                source = accelerator.allocate_pinned((meta.nbytes,), torch.uint8)
                message.copy_into(source.numpy().data)
                message.release()
            accelerator.copy_tensor(stream, view_as_bytes(tensor), source)
            held.append((message, source))
        if held:
            arrival.event = staging.to_device.schedule_action(_SlotRelease(held), what)
        return arrival

    def pop_message(self, microbatch: int) -> list[Tensor | None] | None:
        batch, arrival = self._batch, self._arrivals.pop(microbatch)
        assert batch is not None
        self._next = microbatch + 1
        if arrival.event is not None:
            accelerator = self._staging.accelerator
            compute = accelerator.compute_stream()
            accelerator.wait_event(compute, arrival.event)
            for tensor in arrival.tensors:
                if tensor is not None:
                    accelerator.keep_until_done(tensor, compute)
        record_wire_time(
            self._recorder, arrival.note, self._peer_clock, arrival.arrived_at, batch.nbytes,
            exact=True, started_at=arrival.started_at,
        )  # fmt: skip
        return None if arrival.note.present == NONE_PRESENT else arrival.tensors

    def close(self, *, abandon: bool = False) -> None:
        super().close(abandon=abandon)
        self._arrivals.clear()


class _SlotRelease:
    """Action that grants slots to the sender again, in the copy stream's thread."""

    def __init__(self, held: list[tuple[_engine.Message, Tensor]]) -> None:
        self._held = held

    def __call__(self) -> bool:
        for message, _ in self._held:
            message.release()
        self._held.clear()
        return True
