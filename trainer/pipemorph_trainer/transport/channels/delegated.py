"""Delegated route: the transfer engine sends messages from host memory.

A send returns at once: K queues per direction carry the messages in turn, and receivers grant slots
in advance. So compute never waits for a send. Tensors of a device go through
:mod:`pipemorph_trainer.transport.channels.staging`.

The receiver does not copy large tensors on the CPU: they lie in the slots, and a slot is granted to
the sender again when the last tensor in it is gone.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipemorph.doctor import host
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.transport.link_recorder import LinkRecorder, PeerClock, record_wire_time
from pipemorph_trainer.transport.message import (
    NONE_PRESENT,
    Direction,
    HoldMessage,
    MessageBatch,
    Note,
    TensorMeta,
    compute_presence_bits,
    pack_note,
)

if TYPE_CHECKING:
    import pipemorph_trainer._engine as _engine

Key = tuple[int, int, int, int, int]
CPU = torch.device("cpu")
PLAIN = (Tensor, torch.nn.Parameter)
"""Types whose elements are where ``data_ptr`` says."""
LARGE_BYTES = 1 << 16
"""Size from which a copy costs more than a separate grant of the slot."""
GRANT_SECONDS = 10.0
"""Longest wait for larger slots after a change of shapes."""


def view_as_bytes(tensor: Tensor) -> Tensor:
    """View of the memory of a contiguous tensor of any dtype as uint8 (bytes,), without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


def make_contiguous(tensor: Tensor) -> Tensor:
    """Contiguous form of a tensor, as it is sent: the tensor itself if it is contiguous."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def make_payload(tensor: Tensor) -> Tensor | memoryview:
    """Payload of a tensor for the engine: the tensor, if ``data_ptr`` is the address of its
    elements, else a view of its bytes. A subclass may hold its elements elsewhere, or, as the
    result of a collective, lack them yet. Raises TypeError or RuntimeError for a tensor without
    elements in host memory."""
    tensor = make_contiguous(tensor)
    if type(tensor) in PLAIN and tensor.is_cpu and (tensor.data_ptr() or not tensor.nbytes):
        return tensor
    return view_as_bytes(tensor.detach()).numpy().data


def view_slot(message: _engine.Message, meta: TensorMeta) -> Tensor:
    """Tensor in the slot of a message, which it holds. ``meta``: of at least one element."""
    storage = torch.frombuffer(message, dtype=torch.uint8).untyped_storage()
    # A view would restrict in-place operations of autograd.
    tensor: Tensor = torch.empty(0, dtype=meta.dtype)
    tensor.set_(storage, 0, meta.shape)  # type: ignore[call-overload]
    return tensor


def can_hold_slots(transport: str) -> bool:
    """True if there may be more slots for tensors in use: on rails, slots are locked memory, which
    may be limited."""
    return (
        transport != "rdma"
        or host.read_locked_memory_limit() == host.UNLIMITED
        or host.has_ipc_lock()
    )


class DelegatedIncoming:
    """Receiving end. Messages are found by key; arrival times come from the engine."""

    def __init__(
        self,
        *,
        link: _engine.Link,
        direction: Direction,
        peer_clock: PeerClock,
        recorder: LinkRecorder,
    ) -> None:
        self._link, self._direction = link, direction
        self._peer_clock, self._recorder = peer_clock, recorder
        self._batch: MessageBatch | None = None
        self._here: dict[int, list[_engine.Message]] = {}
        self._notes: dict[int, Note] = {}
        self._in_place: weakref.WeakSet[_engine.Message] = weakref.WeakSet()
        """Messages whose tensors lie in their slots."""
        self._places = 0
        """Most messages in :attr:`_in_place`, so that other slots always return to the sender."""

    def reserve_slots(
        self, messages: int, batch: MessageBatch, used: int = 0, spare: int = 0
    ) -> None:
        """Grant slots in advance: for ``messages`` messages ahead of their ops, for ``used``
        messages whose tensors ops still need, and ``spare`` slots more. Raises
        :class:`PipelineError` if the link is dead."""
        largest = max((meta.nbytes for meta in batch.metas), default=0)
        if largest < LARGE_BYTES or not can_hold_slots(self._link.transport):
            used = 0
        parts = max(1, len(batch.metas))
        slots = (messages + used) * parts + spare
        try:
            self._link.reserve(int(self._direction), slots, max(1, largest))
        except RuntimeError as error:
            raise PipelineError(str(error)) from error
        self._places = used * parts

    def begin_batch(self, batch: MessageBatch) -> None:
        self._batch = batch

    def record_sent(self, messages: int) -> None:
        """Does nothing: granted slots do not depend on the other direction."""

    def record_ops(self, ops: int) -> None:
        """Does nothing: granted slots do not depend on ops."""

    def ready_at(self, microbatch: int) -> float | None:
        batch = self._batch
        assert batch is not None
        parts = self._receive_parts(batch, microbatch)
        if parts is None:
            return None
        note = self._notes.get(microbatch)
        if note is None:
            note = self._notes[microbatch] = Note.unpack(parts[0].note)
        return self._usable_from(note)

    def _receive_parts(self, batch: MessageBatch, microbatch: int) -> list[_engine.Message] | None:
        """Parts of a message, one per tensor; None until all have arrived. Raises
        :class:`PipelineError` if the link is dead."""
        parts = self._here.get(microbatch)
        if parts is None:
            parts = self._here[microbatch] = []
        try:
            while (k := len(parts)) < len(batch.metas):
                part = self._link.try_receive(
                    make_message_key(batch, microbatch, self._direction, k)
                )
                if part is None:
                    return None
                parts.append(part)
        except RuntimeError as error:
            raise PipelineError(str(error)) from error
        return parts

    def _usable_from(self, note: Note) -> float:
        return note.not_before + self._peer_clock.offset if note.not_before else 0.0

    def pop_message(self, microbatch: int) -> list[Tensor | None] | None:
        batch = self._batch
        assert batch is not None
        tensors: list[Tensor | None] = []
        started = arrived = 0.0
        note, parts = self._notes.pop(microbatch), self._here.pop(microbatch)
        # The sender may need this slot for the next iteration.
        last = microbatch == batch.microbatches - 1
        for k, (message, meta) in enumerate(zip(parts, batch.metas, strict=True)):
            if note.present >> k & 1 and self._can_stay_in_slot(message, batch.sizes[k]):
                self._in_place.add(message)
                began, came = message.started_at, message.arrived_at
                tensors.append(view_slot(message, meta))
            elif note.present >> k & 1:
                tensor = meta.new_empty(CPU)
                # A message of another size is an error.
                began, came = message.move_to(tensor.data_ptr(), batch.sizes[k], last)
                tensors.append(tensor)
            else:
                began, came = message.started_at, message.arrived_at
                message.release()
                tensors.append(None)
            started = started or began
            arrived = max(arrived, came)
        record_wire_time(
            self._recorder,
            note,
            self._peer_clock,
            arrived,
            batch.nbytes,
            exact=True,
            started_at=started,
        )
        return None if note.present == NONE_PRESENT else tensors

    def _can_stay_in_slot(self, message: _engine.Message, nbytes: int) -> bool:
        """True if a message of ``nbytes`` bytes may stay in its slot until its tensor is gone."""
        return LARGE_BYTES <= nbytes == message.nbytes and len(self._in_place) < self._places

    receiving = False

    def close(self, *, abandon: bool = False) -> None:
        for parts in self._here.values():
            for message in parts:
                message.release()
        self._here.clear()


class DelegatedOutgoing:
    """Sending end. The engine holds the bytes until the receiver has acknowledged them."""

    makes_room = False
    """True if :meth:`begin_batch` reserves memory, so that it must be called before an iteration in
    which this route may take over."""

    def __init__(
        self,
        *,
        link: _engine.Link,
        direction: Direction,
        hold: HoldMessage,
        queues: int,
        on_block: Callable[[str, int], None],
        on_unblock: Callable[[], None],
    ) -> None:
        self.link, self.direction = link, direction
        self._hold = hold
        self._on_block, self._on_unblock = on_block, on_unblock
        self._queues = queues
        self._turn = 0
        self._batch: MessageBatch | None = None

    def begin_batch(self, batch: MessageBatch) -> None:
        self._batch = batch

    def slot_free_at(self) -> float:
        return 0.0

    def send(self, microbatch: int, tensors: Sequence[Tensor | None] | None) -> None:
        batch = self._batch
        assert batch is not None
        note = self.make_note(batch, microbatch, compute_presence_bits(tensors))
        for k, tensor in enumerate(tensors if tensors is not None else [None] * len(batch.metas)):
            key = make_message_key(batch, microbatch, self.direction, k)
            self._send_tensor(key, None if tensor is None else make_payload(tensor), note)

    def make_note(self, batch: MessageBatch, microbatch: int, present: int) -> bytes:
        """Pack the note of a message that enters the next queue now."""
        posted = time.time()
        held = self._hold(self._turn, batch.nbytes, posted)
        self._turn = (self._turn + 1) % self._queues
        return pack_note(batch.generation, batch.iteration, microbatch, present, posted, *held)

    def _send_tensor(self, key: Key, payload: Tensor | memoryview | None, note: bytes) -> None:
        """Send one tensor through the engine. If shapes have just grown, the receiver may not have
        granted larger slots yet: then the engine refuses at once, and this call retries."""
        deadline = 0.0
        while True:
            try:
                if isinstance(payload, Tensor):
                    self.link.send_memory(key, payload.data_ptr(), payload.nbytes, payload, note)
                else:
                    self.link.send(key, b"" if payload is None else payload, note)
                break
            except RuntimeError as error:
                if not deadline:
                    deadline = time.monotonic() + GRANT_SECONDS
                    assert self._batch is not None
                    self._on_block(f"iteration {self._batch.step}", key[2])
                if not self.link.alive or time.monotonic() > deadline:
                    raise PipelineError(str(error)) from error
                time.sleep(0.0005)
        if deadline:
            self._on_unblock()

    def close(self) -> None:
        """Does nothing: the engine flushes when it is closed."""


def make_message_key(
    batch: MessageBatch, microbatch: int, direction: Direction, tensor: int
) -> Key:
    return (batch.generation, batch.iteration, microbatch, int(direction), tensor)
