"""Sends copies of a rank's state to other ranks, over a process group, in pieces.

A *head* comes first: mark, form and checksum of the copy, so that the receiver can allocate memory.
The bytes follow.
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
from pipemorph_trainer.checkpoint.memory.state_copy import StateCopy, parse_form
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.sync.reduction import WaitForCollective
from pipemorph_trainer.topology.groups import MOST_BYTES

PIECE_BYTES = 16 << 20
"""Bytes per message."""


class CopyHeader(NamedTuple):
    """Description of a copy that is sent. ``length``: bytes of its object."""

    entries: list[list[Any]]
    length: int
    mark: dict[str, Any]
    checksum: int

    def create_copy(self, path: Path) -> StateCopy:
        """Make a file for the copy. Raises :class:`OSError` if there is no memory for it."""
        return StateCopy.create(path, parse_form(self.entries), self.length)

    def fits_copy(self, copy: StateCopy) -> bool:
        return copy.can_hold(parse_form(self.entries), self.length)


_HEAD: TypeAdapter[CopyHeader | None] = TypeAdapter(CopyHeader | None)


def send_header(copy: StateCopy | None, to: int, group: dist.ProcessGroup) -> None:
    """Send the head of ``copy`` to a rank. None: there is no copy."""
    head = None
    if copy is not None:
        entries = [list(entry) for entry in copy.form]
        checksum = copy.checksum or copy.compute_checksum()
        head = CopyHeader(entries, len(copy.pickled_object), copy.mark, checksum)
    body = bytearray(_HEAD.dump_json(head))
    dist.send(torch.tensor([len(body)]), to, group=group)
    dist.send(torch.frombuffer(body, dtype=torch.uint8), to, group=group)


def receive_header(source: int, group: dist.ProcessGroup) -> CopyHeader | None:
    """Receive a head; None if the sender has no copy. Raises :class:`PipelineError` if the message
    is no head."""
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
            f"rank {source} sent an invalid head of a copy: {one_line(str(error))}"
        ) from None


def send_body(copy: StateCopy, to: int, group: dist.ProcessGroup, wait: WaitForCollective) -> None:
    """Send the object and the tensors of a copy."""
    _post_piece(
        dist.isend,
        torch.frombuffer(bytearray(copy.pickled_object), dtype=torch.uint8),
        to,
        group,
        wait,
    )
    for piece in _split_pieces(copy.view_tensor_bytes()):
        _post_piece(dist.isend, piece, to, group, wait)


def receive_body(
    copy: StateCopy,
    head: CopyHeader,
    source: int,
    group: dist.ProcessGroup,
    wait: WaitForCollective,
) -> bool:
    """Receive into ``copy``, which is not whole. Returns True if the bytes match the head's
    checksum, False if the sender's copy was written to meanwhile."""
    content = torch.empty(head.length, dtype=torch.uint8)
    _post_piece(dist.irecv, content, source, group, wait)
    for piece in _split_pieces(copy.view_tensor_bytes()):
        _post_piece(dist.irecv, piece, source, group, wait)
    copy.write_object(content.numpy().tobytes())
    copy.add_checksum()
    return copy.checksum == head.checksum


def send_copy(copy: StateCopy, to: int, group: dist.ProcessGroup, wait: WaitForCollective) -> None:
    """Send a copy to a rank, which calls :func:`receive_copy`."""
    send_header(copy, to, group)
    send_body(copy, to, group, wait)


def receive_copy(
    source: int,
    group: dist.ProcessGroup,
    wait: WaitForCollective,
    room: Callable[[CopyHeader], StateCopy],
) -> dict[str, Any]:
    """Receive a copy into the one that ``room`` makes. Returns its mark.

    Raises :class:`PipelineError` if the bytes differ from those that were sent.
    """
    head = receive_header(source, group)
    assert head is not None, "all ranks have agreed that there is a copy"
    if not receive_body(room(head), head, source, group, wait):
        raise PipelineError(f"the state that rank {source} sent arrived with other bytes")
    return head.mark


def _split_pieces(raw: Tensor) -> Iterator[Tensor]:
    for start in range(0, raw.numel(), PIECE_BYTES):
        yield raw[start : start + PIECE_BYTES]


def _post_piece(
    how: Any, piece: Tensor, other: int, group: dist.ProcessGroup, wait: WaitForCollective
) -> None:
    # The group has all ranks in order, so ranks of the group are global ranks.
    wait(how(piece, other, group=group))
