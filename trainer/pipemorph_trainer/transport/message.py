"""Messages between two stages, and the note of each message."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from pipemorph_trainer.topology.device_event_clock import DeviceMoment

Record = TypeVar("Record")
new_tuple: Callable[[type[Record], Iterable[Any]], Record] = tuple.__new__  # type: ignore[assignment]
"""Makes a named tuple of all its fields. The tuple's own constructor is a Python function, which is
too slow for each op or message."""


class Direction(IntEnum):
    """Direction along a link: activations go forward, gradients backward."""

    FORWARD = 0
    BACKWARD = 1

    @property
    def label(self) -> str:
        return self.name.lower()

    @property
    def letter(self) -> str:
        """Op that produces the message: F or B."""
        return self.name[0]


class TensorMeta(NamedTuple):
    """Shape and dtype of a tensor at a stage boundary. ``gradient``: true if its gradient comes
    back, since the sender needs it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool = False

    @staticmethod
    def from_tensor(tensor: Tensor) -> TensorMeta:
        return TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    def new_empty(self, device: torch.device) -> Tensor:
        # torch.empty() takes five times as long to parse its arguments.
        return _make_prototype(self.dtype, device).new_empty(self.shape)

    def encode(self) -> list[object]:
        return [list(self.shape), str(self.dtype).removeprefix("torch."), self.gradient]

    @staticmethod
    def decode(data: list[object]) -> TensorMeta:
        shape, dtype, gradient = data
        assert isinstance(shape, list)
        return TensorMeta(tuple(shape), getattr(torch, str(dtype)), bool(gradient))

    def __str__(self) -> str:
        needs = " with gradient" if self.gradient else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{needs}"


@cache
def _make_prototype(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Tensor without elements, as the prototype of others."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def select_gradients(metas: tuple[TensorMeta, ...]) -> tuple[TensorMeta, ...]:
    """Gradients that come back for tensors sent forward."""
    return tuple(meta._replace(gradient=False) for meta in metas if meta.gradient)


class MessageContents(NamedTuple):
    """Contents of all forward messages of a link. ``structure``: that of the tensors, as the stages
    encode it for each other."""

    metas: tuple[TensorMeta, ...]
    structure: str


def describe_metas(metas: tuple[TensorMeta, ...]) -> str:
    return ", ".join(str(meta) for meta in metas) or "nothing"


_NOTE = struct.Struct("<IIIIddddf?")
NOTE_BYTES = _NOTE.size
pack_note = _NOTE.pack
"""Packs the fields of a :class:`Note`."""
ALL_PRESENT = 0xFFFFFFFF
NONE_PRESENT = 0
"""``present`` of an empty message, which a refused step sends. Other messages have at most 31
tensors, and set all bits without a tensor."""


def compute_presence_bits(tensors: Sequence[Tensor | None] | None) -> int:
    """Compute ``present`` of a message with these tensors; None: an empty message."""
    if tensors is None:
        return NONE_PRESENT
    present = ALL_PRESENT
    for k, tensor in enumerate(tensors):
        if tensor is None:
            present &= ~(1 << k)
    return present


class Note(NamedTuple):
    """Note that accompanies every message. Times are the sender's wall clock, seconds.

    ``posted_at``: time at which the message entered the channel; ``started_at``: at which it exited
    the queue; ``not_before``: earliest use by the receiver, because of an injected fault, else 0;
    ``held_back``: seconds by which the fault delays even the first byte; ``waited``, ``inflated``:
    load of the sender, see :class:`SenderLoad`. Bit *k* of ``present`` is set if tensor *k* exists,
    since a gradient may be None.
    """

    generation: int
    iteration: int
    microbatch: int
    present: int
    posted_at: float
    started_at: float
    not_before: float
    held_back: float = 0.0
    waited: float = 0.0
    inflated: bool = False

    def pack(self) -> bytes:
        return _NOTE.pack(*self)

    @staticmethod
    def unpack(data: bytes) -> Note:
        return new_tuple(Note, _NOTE.unpack_from(data))


DIRECT_QUEUE = -1
"""Number of the only queue of the direct route; the delegated route counts its queues from 0."""


class HoldTimes(NamedTuple):
    """Last fields of a message's :class:`Note`: its times, and the load of its sender."""

    started_at: float
    not_before: float
    held_back: float = 0.0
    waited: float = 0.0
    inflated: bool = False


@dataclass(slots=True)
class SenderLoad:
    """Load of a rank, which may delay its messages. ``waited``: seconds for which its threads
    waited for a processor in its newest window; ``inflated``: true if its newest ops took longer
    than they should; ``forwards``: seconds of its forward op in the newest iterations."""

    waited: float = 0.0
    inflated: bool = False
    forwards: deque[float] = field(default_factory=lambda: deque(maxlen=5))


HoldMessage = Callable[[int, int, float], HoldTimes]
"""``hold(queue, nbytes, now)``: times of a message that enters ``queue`` now. Only a fault trace
holds messages."""


Position = tuple[int, int]
"""Position in the order of a direction's messages: iteration, microbatch."""


class SendTimestamp(NamedTuple):
    """Message from a device, and the moment at which its tensors were complete there, so that they
    could be sent."""

    position: Position
    moment: DeviceMoment


class ReceiveLimits(NamedTuple):
    """Conditions for posting the receives of a direction of a link in an iteration.

    ``after[m]``: number of messages that this stage must have sent in the other direction before
    the sender can send message *m*; empty: none. ``window``: most messages that are received, or
    have a posted receive, before their ops begin; None: all. ``ops[m]``: number of ops that this
    rank must have run before; empty: none.
    """

    after: tuple[int, ...] = ()
    window: int | None = None
    ops: tuple[int, ...] = ()


UNLIMITED_RECEIVES = ReceiveLimits()
"""No limits."""


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """Messages of an iteration in one direction of a link, all with the same tensors.

    ``iteration`` also counts the ``uncounted`` earlier calls that were no iterations (evaluations
    and refused steps), so that no two messages have the same position.
    """

    generation: int
    iteration: int
    microbatches: int
    metas: tuple[TensorMeta, ...]
    uncounted: int = 0
    receives: ReceiveLimits = UNLIMITED_RECEIVES
    """Conditions for the receiving end."""
    sizes: tuple[int, ...] = field(init=False)
    """Bytes of each tensor."""
    nbytes: int = field(init=False)
    """Bytes of one message."""
    step: int = field(init=False)
    """Iteration as users count."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(meta.nbytes for meta in self.metas))
        object.__setattr__(self, "nbytes", sum(self.sizes))
        object.__setattr__(self, "step", self.iteration - self.uncounted)


class IncomingChannel(Protocol):
    """Receiving end of one direction of a link on one route."""

    def begin_batch(self, batch: MessageBatch) -> None:
        """Expect these messages. Posts receives according to ``batch.receives``. Does not block."""

    def record_sent(self, messages: int) -> None:
        """Record that ``messages`` of this iteration were sent in the other direction."""

    def record_ops(self, ops: int) -> None:
        """Record that this rank, of several stages, has run ``ops`` of this iteration."""

    def ready_at(self, microbatch: int) -> float | None:
        """Wall-clock time from which the message may be used; None if it has not arrived.

        Raises :class:`PipelineError` if it can no longer arrive.
        """

    def pop_message(self, microbatch: int) -> list[Tensor | None] | None:
        """Take the tensors of a message that is ready, once per message. None if it is empty: the
        sender's step was refused."""

    def close(self, *, abandon: bool = False) -> None:
        """Stop receiving. ``abandon``: do not wait for missing messages. Idempotent."""

    @property
    def receiving(self) -> bool:
        """True if a receiver thread of this end is running."""


class OutgoingChannel(Protocol):
    """Sending end of one direction of a link on one route."""

    def begin_batch(self, batch: MessageBatch) -> None:
        """Prepare to send these messages."""

    def slot_free_at(self) -> float:
        """Wall-clock time from which :meth:`send` does not block; 0: now."""

    def send(self, microbatch: int, tensors: Sequence[Tensor | None] | None) -> None:
        """Send a message; None: an empty one. The direct route blocks while two are
        outstanding."""

    def close(self) -> None:
        """Wait for outstanding sends, if any. Idempotent."""
