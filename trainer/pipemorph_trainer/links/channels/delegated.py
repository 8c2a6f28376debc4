"""The delegated route: messages are sent from host memory by the transfer engine.

A send returns at once; K queues per direction take the messages in turn, and receivers grant slots
in advance. So compute never waits for a send. Tensors of a device go through
:mod:`pipemorph_trainer.links.channels.staging`.

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

from pipemorph.discovery import host
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.links.message import (
    NOTHING,
    Batch,
    Direction,
    Hold,
    Note,
    TensorMeta,
    pack_note,
    presence,
)
from pipemorph_trainer.links.recorder import LinkRecorder, PeerClock, record_arrival

if TYPE_CHECKING:
    import pipemorph_trainer._engine as _engine

Key = tuple[int, int, int, int, int]
CPU = torch.device("cpu")
PLAIN = (Tensor, torch.nn.Parameter)
"""Types of which it is known where their elements are."""
LARGE_BYTES = 1 << 16
"""From this size on, a copy costs more than granting a slot by itself does."""
GRANT_SECONDS = 10.0
"""Longest wait for larger slots after a change of shapes."""


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor of any dtype, as uint8 (bytes,), without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


def as_sent(tensor: Tensor) -> Tensor:
    """The tensor with its elements in memory in order, as they are sent: itself, if they are."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def payload_of(tensor: Tensor) -> Tensor | memoryview:
    """What the engine is to send: the tensor, if its elements are in this process's memory where it
    says, else a view of its bytes. A subclass may hold its elements elsewhere, or, as the result of
    a collective, not have them yet. Raises TypeError or RuntimeError for a tensor without elements
    in host memory."""
    tensor = as_sent(tensor)
    if type(tensor) in PLAIN and tensor.is_cpu and (tensor.data_ptr() or not tensor.nbytes):
        return tensor
    return bytes_of(tensor.detach()).numpy().data


def tensor_in(message: _engine.Message, meta: TensorMeta) -> Tensor:
    """A tensor in the slot of a message, which it keeps. ``meta``: of at least one element."""
    storage = torch.frombuffer(message, dtype=torch.uint8).untyped_storage()
    # Not a view: what autograd allows in place should not depend on where a tensor is.
    tensor: Tensor = torch.empty(0, dtype=meta.dtype)
    tensor.set_(storage, 0, meta.shape)  # type: ignore[call-overload]
    return tensor


def may_hold_slots(transport: str) -> bool:
    """Whether there may be slots for tensors in use beside those that go round: on rails they are
    locked memory, of which there may be little."""
    return transport != "rdma" or host.locked_limit() == host.UNLIMITED or host.may_lock()


class DelegatedIncoming:
    """Receiving end. Looks up messages by key; arrival times come from the engine."""

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
        self._batch: Batch | None = None
        self._here: dict[int, list[_engine.Message]] = {}
        self._notes: dict[int, Note] = {}
        self._in_place: weakref.WeakSet[_engine.Message] = weakref.WeakSet()
        """Those with tensors in their slots."""
        self._places = 0
        """Most of these. The other slots go round whatever the tensors are kept for."""

    def reserve(self, messages: int, batch: Batch, used: int = 0, spare: int = 0) -> None:
        """Grant slots in advance: for ``messages`` messages ahead of their ops, for ``used`` whose
        tensors ops still need, and ``spare`` more. Raises :class:`PipelineError` if the link is
        dead."""
        largest = max((meta.nbytes for meta in batch.metas), default=0)
        if largest < LARGE_BYTES or not may_hold_slots(self._link.transport):
            used = 0
        parts = max(1, len(batch.metas))
        slots = (messages + used) * parts + spare
        try:
            self._link.reserve(int(self._direction), slots, max(1, largest))
        except RuntimeError as error:
            raise PipelineError(str(error)) from error
        self._places = used * parts

    def begin(self, batch: Batch) -> None:
        self._batch = batch

    def sent(self, messages: int) -> None:
        """Does nothing: granted slots do not depend on the other direction."""

    def ran(self, ops: int) -> None:
        """Does nothing: granted slots do not depend on ops."""

    def ready_at(self, microbatch: int) -> float | None:
        batch = self._batch
        assert batch is not None
        parts = self._whole(batch, microbatch)
        if parts is None:
            return None
        note = self._notes.get(microbatch)
        if note is None:
            note = self._notes[microbatch] = Note.unpack(parts[0].note)
        return self._usable_from(note)

    def _whole(self, batch: Batch, microbatch: int) -> list[_engine.Message] | None:
        """The parts of a message; None until all have arrived. Raises :class:`PipelineError` if the
        link is dead."""
        parts = self._here.get(microbatch)
        if parts is None:
            parts = self._here[microbatch] = []
        try:
            while (k := len(parts)) < len(batch.metas):
                part = self._link.try_receive(key_of(batch, microbatch, self._direction, k))
                if part is None:
                    return None
                parts.append(part)
        except RuntimeError as error:
            raise PipelineError(str(error)) from error
        return parts

    def _usable_from(self, note: Note) -> float:
        return note.not_before + self._peer_clock.offset if note.not_before else 0.0

    def take(self, microbatch: int) -> list[Tensor | None] | None:
        batch = self._batch
        assert batch is not None
        tensors: list[Tensor | None] = []
        started = arrived = 0.0
        note, parts = self._notes.pop(microbatch), self._here.pop(microbatch)
        # The sender may have no other slot left for the next iteration.
        last = microbatch == batch.microbatches - 1
        for k, (message, meta) in enumerate(zip(parts, batch.metas, strict=True)):
            if note.present >> k & 1 and self._stays(message, batch.sizes[k]):
                self._in_place.add(message)
                began, came = message.started_at, message.arrived_at
                tensors.append(tensor_in(message, meta))
            elif note.present >> k & 1:
                tensor = meta.empty(CPU)
                # A message of another size is an error.
                began, came = message.move_to(tensor.data_ptr(), batch.sizes[k], last)
                tensors.append(tensor)
            else:
                began, came = message.started_at, message.arrived_at
                message.release()
                tensors.append(None)
            started = started or began
            arrived = max(arrived, came)
        record_arrival(
            self._recorder,
            note,
            self._peer_clock,
            arrived,
            batch.nbytes,
            exact=True,
            started_at=started,
        )
        return None if note.present == NOTHING else tensors

    def _stays(self, message: _engine.Message, nbytes: int) -> bool:
        """Whether a message of ``nbytes`` bytes may stay in its slot as long as its tensor is
        needed."""
        return LARGE_BYTES <= nbytes == message.nbytes and len(self._in_place) < self._places

    receiving = False

    def close(self, *, abandon: bool = False) -> None:
        for parts in self._here.values():
            for message in parts:
                message.release()
        self._here.clear()


class DelegatedOutgoing:
    """Sending end. The engine keeps the bytes until the receiver has acknowledged them."""

    makes_room = False
    """Whether :meth:`begin` makes room, so that it should be called before an iteration in which
    this route may take over."""

    def __init__(
        self,
        *,
        link: _engine.Link,
        direction: Direction,
        hold: Hold,
        queues: int,
        on_block: Callable[[str, int], None],
        on_unblock: Callable[[], None],
    ) -> None:
        self.link, self.direction = link, direction
        self._hold = hold
        self._on_block, self._on_unblock = on_block, on_unblock
        self._queues = queues
        self._turn = 0
        self._batch: Batch | None = None

    def begin(self, batch: Batch) -> None:
        self._batch = batch

    def slot_free_at(self) -> float:
        return 0.0

    def send(self, microbatch: int, tensors: Sequence[Tensor | None] | None) -> None:
        batch = self._batch
        assert batch is not None
        note = self.note(batch, microbatch, presence(tensors))
        for k, tensor in enumerate(tensors if tensors is not None else [None] * len(batch.metas)):
            key = key_of(batch, microbatch, self.direction, k)
            self._hand_over(key, None if tensor is None else payload_of(tensor), note)

    def note(self, batch: Batch, microbatch: int, present: int) -> bytes:
        """The note of a message that is given to the next queue now."""
        posted = time.time()
        held = self._hold(self._turn, batch.nbytes, posted)
        self._turn = (self._turn + 1) % self._queues
        return pack_note(batch.generation, batch.iteration, microbatch, present, posted, *held)

    def _hand_over(self, key: Key, payload: Tensor | memoryview | None, note: bytes) -> None:
        """Give one tensor to the engine. If shapes have just grown, the receiver may not have
        granted larger slots yet: the engine then refuses at once, and we retry."""
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


def key_of(batch: Batch, microbatch: int, direction: Direction, tensor: int) -> Key:
    return (batch.generation, batch.iteration, microbatch, int(direction), tensor)
