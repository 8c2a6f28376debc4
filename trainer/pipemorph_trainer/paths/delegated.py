"""The delegated path: messages leave through host memory and the transfer engine.

Sends are handed over and forgotten, K queues per direction take them in turn, and receivers
grant slots ahead; compute never waits for a send.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.paths.arrival import PeerClock, now, record_arrival
from pipemorph_trainer.paths.faults import Shaper
from pipemorph_trainer.paths.message import ALL_PRESENT, Batch, Direction, Note
from pipemorph_trainer.profile import LinkRecorder

if TYPE_CHECKING:
    from pipemorph_trainer import _engine

Key = tuple[int, int, int, int, int]
GRANT_SECONDS = 10.0
"""Longest wait for larger slots after a change of shapes."""


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's memory as bytes, without a copy; any dtype (numpy knows no bfloat16)."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class DelegatedIncoming:
    """Receiving end: looks messages up by key; arrival times are the engine's own."""

    def __init__(
        self,
        *,
        link: _engine.Link,
        direction: Direction,
        peer_clock: PeerClock,
        recorder: LinkRecorder,
        device: torch.device,
    ) -> None:
        self._link, self._direction = link, direction
        self._peer_clock, self._recorder = peer_clock, recorder
        self._device = device
        self._batch: Batch | None = None
        self._nbytes = 0
        self._here: dict[int, list[_engine.Message | None]] = {}

    def reserve(self, messages: int, batch: Batch) -> None:
        """Grant slots for ``messages`` messages ahead of their use."""
        largest = max((meta.nbytes for meta in batch.metas), default=0)
        self._link.reserve(
            int(self._direction), messages * max(1, len(batch.metas)), max(1, largest)
        )

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._nbytes = sum(meta.nbytes for meta in batch.metas)

    def ready_at(self, microbatch: int) -> float | None:
        batch = self._batch
        assert batch is not None
        parts = self._here.get(microbatch)
        if parts is None:
            parts = self._here[microbatch] = [None] * len(batch.metas)
        for k in range(len(parts)):
            if parts[k] is None:
                parts[k] = self._try(_key(batch, microbatch, self._direction, k))
                if parts[k] is None:
                    return None
        first = parts[0]
        assert first is not None
        note = Note.unpack(first.note)
        return note.not_before + self._peer_clock.offset if note.not_before else 0.0

    def _try(self, key: Key) -> _engine.Message | None:
        try:
            return self._link.try_receive(key)
        except RuntimeError as error:
            raise PipelineError(str(error)) from error

    def take(self, microbatch: int) -> list[Tensor | None]:
        batch = self._batch
        assert batch is not None
        tensors: list[Tensor | None] = []
        note: Note | None = None
        started = arrived = 0.0
        parts = self._here.pop(microbatch)
        for k, (message, meta) in enumerate(zip(parts, batch.metas, strict=True)):
            assert message is not None
            if note is None:
                note = Note.unpack(message.note)
                started = message.started_at
            arrived = max(arrived, message.arrived_at)
            if not note.present >> k & 1:
                tensors.append(None)
                message.release()
                continue
            tensor = meta.empty(torch.device("cpu"))
            if meta.nbytes:
                message.copy_into(_bytes_of(tensor))
            message.release()
            tensors.append(tensor.to(self._device, non_blocking=True))
        assert note is not None
        record_arrival(
            self._recorder,
            note,
            self._peer_clock,
            arrived,
            self._nbytes,
            exact=True,
            started_at=started,
        )
        return tensors

    receiving = False

    def close(self, *, abandon: bool = False) -> None:
        for parts in self._here.values():
            for message in parts:
                if message is not None:
                    message.release()
        self._here.clear()


class DelegatedOutgoing:
    """Sending end. The engine holds the bytes until the receiver has acknowledged them."""

    def __init__(
        self,
        *,
        link: _engine.Link,
        direction: Direction,
        shaper: Shaper,
        queues: int,
        on_block: Callable[[int, int], None],
        on_unblock: Callable[[], None],
    ) -> None:
        self._link, self._direction, self._shaper = link, direction, shaper
        self._on_block, self._on_unblock = on_block, on_unblock
        self._queues = queues
        self._turn = 0
        self._batch: Batch | None = None
        self._nbytes = 0

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._nbytes = sum(meta.nbytes for meta in batch.metas)

    def slot_free_at(self) -> float:
        return 0.0

    def send(self, microbatch: int, tensors: list[Tensor | None]) -> None:
        batch = self._batch
        assert batch is not None
        posted = now()
        started, not_before = self._shaper.hold(self._turn, self._nbytes, posted)
        self._turn = (self._turn + 1) % self._queues
        present = ALL_PRESENT
        for k, tensor in enumerate(tensors):
            if tensor is None:
                present &= ~(1 << k)
        note = Note(
            batch.generation, batch.iteration, microbatch, present, posted, started, not_before
        ).pack()
        for k, tensor in enumerate(tensors):
            # A CUDA tensor is staged in host memory first; the copy is waited for here.
            payload = b"" if tensor is None else _bytes_of(tensor.detach().contiguous().cpu())
            self._hand_over(_key(batch, microbatch, self._direction, k), payload, note)

    def _hand_over(self, key: Key, payload: bytes | memoryview, note: bytes) -> None:
        """Give one tensor to the engine. When shapes have just grown, the receiver may not
        have granted larger slots yet; the engine says so at once, and we ask again."""
        deadline = 0.0
        while True:
            try:
                self._link.send(key, payload, note)
                break
            except RuntimeError as error:
                if not deadline:
                    deadline = time.monotonic() + GRANT_SECONDS
                    self._on_block(key[1], key[2])
                if not self._link.alive or time.monotonic() > deadline:
                    raise PipelineError(str(error)) from error
                time.sleep(0.0005)
        if deadline:
            self._on_unblock()

    def close(self) -> None:
        """Nothing to wait for: the engine flushes when it is closed."""


def _key(batch: Batch, microbatch: int, direction: Direction, tensor: int) -> Key:
    return (batch.generation, batch.iteration, microbatch, int(direction), tensor)
