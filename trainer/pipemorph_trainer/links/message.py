"""Messages between two stages, and the note that is sent with each."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from pipemorph_trainer.topology.device_time import Moment

Record = TypeVar("Record")
new_tuple: Callable[[type[Record], Iterable[Any]], Record] = tuple.__new__  # type: ignore[assignment]
"""Makes a named tuple of all its fields. Its own constructor is a function in Python, and takes too
long for what is made for each op or message."""


class Direction(IntEnum):
    """Direction along a link: activations go forward, gradients backward."""

    FORWARD = 0
    BACKWARD = 1

    @property
    def word(self) -> str:
        return self.name.lower()

    @property
    def letter(self) -> str:
        """The op that produces the message: F or B."""
        return self.name[0]


class TensorMeta(NamedTuple):
    """Shape and dtype of one tensor at a stage boundary. ``gradient``: whether its gradient comes
    back, since the sender needs it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool = False

    @staticmethod
    def of(tensor: Tensor) -> TensorMeta:
        return TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def covers(self, tensor: Tensor) -> bool:
        """Whether a tensor can be sent as this one: a gradient that it does not need is ignored
        when it comes."""
        return (
            tensor.shape == self.shape
            and tensor.dtype == self.dtype
            and (self.gradient or not tensor.requires_grad)
        )

    @property
    def nbytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    def empty(self, device: torch.device) -> Tensor:
        # torch.empty() takes five times as long, to read its arguments.
        return _nothing(self.dtype, device).new_empty(self.shape)

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
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without elements, to make others like it."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def gradients_of(metas: tuple[TensorMeta, ...]) -> tuple[TensorMeta, ...]:
    """The tensors sent forward whose gradients come back."""
    return tuple(meta._replace(gradient=False) for meta in metas if meta.gradient)


class Contents(NamedTuple):
    """What all messages of a link carry forward. ``structure``: of the tensors, as the stages
    describe it to each other."""

    metas: tuple[TensorMeta, ...]
    structure: str


def words(metas: tuple[TensorMeta, ...]) -> str:
    return ", ".join(str(meta) for meta in metas) or "nothing"


_NOTE = struct.Struct("<IIIIddddf?")
NOTE_BYTES = _NOTE.size
pack_note = _NOTE.pack
"""The bytes of a :class:`Note` with these fields."""
ALL_PRESENT = 0xFFFFFFFF
NOTHING = 0
"""``present`` of an empty message, of a refused step. In other messages, bits without a tensor are
set: a message has at most 31 tensors."""


def presence(tensors: Sequence[Tensor | None] | None) -> int:
    """``present`` of a message with these tensors; None: an empty message."""
    if tensors is None:
        return NOTHING
    present = ALL_PRESENT
    for k, tensor in enumerate(tensors):
        if tensor is None:
            present &= ~(1 << k)
    return present


class Note(NamedTuple):
    """Sent with every message. Times are the sender's wall clock, seconds.

    ``posted_at``: when it was given to the channel; ``started_at``: when it left the queue;
    ``not_before``: the receiver must not use it earlier because of an injected fault, else 0;
    ``held_back``: seconds by which the fault delays even its first byte; ``waited``, ``inflated``:
    load of the sender, see :class:`SenderLoad`. Bit *k* of ``present``:
    whether tensor *k* exists, since a gradient may be None.
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
"""The only queue of the direct route; those of the delegated route are numbered from 0."""


class Held(NamedTuple):
    """The last fields of a message's :class:`Note`."""

    started_at: float
    not_before: float
    held_back: float = 0.0
    waited: float = 0.0
    inflated: bool = False


@dataclass(slots=True)
class SenderLoad:
    """Load of a rank, which may make its messages late. ``waited``: seconds for which its threads
    waited for a processor in its newest window; ``inflated``: whether its newest ops took longer
    than they can."""

    waited: float = 0.0
    inflated: bool = False


Hold = Callable[[int, int, float], Held]
"""``hold(queue, nbytes, now)``: how a message that is given to ``queue`` now is held. Only a fault
trace holds messages."""


Position = tuple[int, int]
"""A place in the order of one direction's messages: iteration, microbatch."""


class Departure(NamedTuple):
    """A message from a device, and when its tensors were complete there: from then on they could be
    sent."""

    position: Position
    moment: Moment


class Receives(NamedTuple):
    """When receives of one direction of one link are posted in an iteration.

    ``after[m]``: number of messages that this stage must have sent in the other direction before
    the sender can send message *m*; empty: none. ``window``: most messages that are received, or
    have a posted receive, before their ops begin; None: all. ``ops[m]``: number of ops that this
    rank must have run; empty: none.
    """

    after: tuple[int, ...] = ()
    window: int | None = None
    ops: tuple[int, ...] = ()


RECEIVE_ALL = Receives()
"""No limits."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One iteration's messages in one direction of one link: all have the same tensors.

    ``iteration`` also counts the ``uncounted`` earlier calls that were no iterations (evaluations,
    and what was refused), so that no two messages have the same place in the order.
    """

    generation: int
    iteration: int
    microbatches: int
    metas: tuple[TensorMeta, ...]
    uncounted: int = 0
    receives: Receives = RECEIVE_ALL
    """For the receiving end."""
    sizes: tuple[int, ...] = field(init=False)
    """Bytes of each tensor."""
    nbytes: int = field(init=False)
    """Bytes of one message."""
    step: int = field(init=False)
    """The iteration as users count."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(meta.nbytes for meta in self.metas))
        object.__setattr__(self, "nbytes", sum(self.sizes))
        object.__setattr__(self, "step", self.iteration - self.uncounted)


class Incoming(Protocol):
    """The receiving end of one direction of one link on one route."""

    def begin(self, batch: Batch) -> None:
        """Expect these messages. Posts receives according to ``batch.receives``. Does not block."""

    def sent(self, messages: int) -> None:
        """Say that ``messages`` of this iteration were sent in the other direction."""

    def ran(self, ops: int) -> None:
        """Say that this rank, of several stages, has run ``ops`` of this iteration."""

    def ready_at(self, microbatch: int) -> float | None:
        """Wall-clock time from which the message may be used; None if it has not arrived.

        Raises :class:`PipelineError` if it can no longer arrive.
        """

    def take(self, microbatch: int) -> list[Tensor | None] | None:
        """The tensors of a message that is ready. Each message is taken once. None if it is empty:
        the sender's step was refused."""

    def close(self, *, abandon: bool = False) -> None:
        """Stop receiving. ``abandon``: do not wait for missing messages. Idempotent."""

    @property
    def receiving(self) -> bool:
        """Whether a receiver thread of this end is running."""


class Outgoing(Protocol):
    """The sending end of one direction of one link on one route."""

    def begin(self, batch: Batch) -> None:
        """Prepare to send these messages."""

    def slot_free_at(self) -> float:
        """Wall-clock time from which :meth:`send` does not block; 0: now."""

    def send(self, microbatch: int, tensors: Sequence[Tensor | None] | None) -> None:
        """Send a message; None: an empty one. The direct route blocks while two are
        outstanding."""

    def close(self) -> None:
        """Wait for outstanding sends if needed. Idempotent."""
