"""Sends copies of a rank's state to other ranks, over a group, in pieces.

First the *head*: what a copy is of, its form, so that the receiver makes room, and its checksum;
then the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from pipemorph.errors import one_line
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.state.kept.copies import Copy, form_of
from pipemorph_trainer.state.reduction import Wait
from pipemorph_trainer.topology.groups import MOST_BYTES

PIECE_BYTES = 16 << 20
"""Bytes per message."""


class Head(NamedTuple):
    """What is to come. ``length``: bytes of what is no tensor."""

    entries: list[list[Any]]
    length: int
    mark: dict[str, Any]
    checksum: int

    def make(self, path: Path) -> Copy:
        """A file for it. Raises :class:`OSError` if there is no memory for it."""
        return Copy.create(path, form_of(self.entries), self.length)

    def fits(self, copy: Copy) -> bool:
        return copy.fits(form_of(self.entries), self.length)


_HEAD: TypeAdapter[Head | None] = TypeAdapter(Head | None)


def send_head(copy: Copy | None, to: int, group: dist.ProcessGroup) -> None:
    """``copy``: the one to be sent; None: there is none."""
    head = None
    if copy is not None:
        entries = [list(entry) for entry in copy.form]
        checksum = copy.checksum or copy.sum_up()
        head = Head(entries, len(copy.object), copy.mark, checksum)
    body = bytearray(_HEAD.dump_json(head))
    dist.send(torch.tensor([len(body)]), to, group=group)
    dist.send(torch.frombuffer(body, dtype=torch.uint8), to, group=group)


def receive_head(source: int, group: dist.ProcessGroup) -> Head | None:
    """Raises :class:`PipelineError` if what comes is no head."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source, group=group)
    if not 0 < int(size) <= MOST_BYTES:
        raise PipelineError(f"rank {source} sends {int(size)} bytes about its copy; expected fewer")
    body = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(body, source, group=group)
    try:
        return _HEAD.validate_json(body.numpy().tobytes())
    except ValidationError as error:
        raise PipelineError(
            f"rank {source} sent no head of a copy: {one_line(str(error))}"
        ) from None


def send_body(copy: Copy, to: int, group: dist.ProcessGroup, wait: Wait) -> None:
    """Send what a copy holds."""
    _post(dist.isend, torch.frombuffer(bytearray(copy.object), dtype=torch.uint8), to, group, wait)
    for piece in _pieces(copy.raw()):
        _post(dist.isend, piece, to, group, wait)


def receive_body(copy: Copy, head: Head, source: int, group: dist.ProcessGroup, wait: Wait) -> bool:
    """Receive into ``copy``, which is not whole. Returns whether its bytes are those of the head's
    checksum: not if somebody has written to the sender's copy meanwhile."""
    content = torch.empty(head.length, dtype=torch.uint8)
    _post(dist.irecv, content, source, group, wait)
    for piece in _pieces(copy.raw()):
        _post(dist.irecv, piece, source, group, wait)
    copy.write_object(content.numpy().tobytes())
    copy.add_checksum()
    return copy.checksum == head.checksum


def send(copy: Copy, to: int, group: dist.ProcessGroup, wait: Wait) -> None:
    """Send a copy to a rank, which calls :func:`receive`."""
    send_head(copy, to, group)
    send_body(copy, to, group, wait)


def receive(
    source: int, group: dist.ProcessGroup, wait: Wait, room: Callable[[Head], Copy]
) -> dict[str, Any]:
    """Receive a copy into the one that ``room`` makes. Returns its mark.

    Raises :class:`PipelineError` if its bytes are not those that were sent.
    """
    head = receive_head(source, group)
    assert head is not None, "this rank was told that there is a copy"
    if not receive_body(room(head), head, source, group, wait):
        raise PipelineError(f"the state that rank {source} sent arrived with other bytes")
    return head.mark


def _pieces(raw: Tensor) -> Iterator[Tensor]:
    for start in range(0, raw.numel(), PIECE_BYTES):
        yield raw[start : start + PIECE_BYTES]


def _post(how: Any, piece: Tensor, other: int, group: dist.ProcessGroup, wait: Wait) -> None:
    # The group has all ranks, so its numbers are theirs.
    wait(how(piece, other, group=group))
