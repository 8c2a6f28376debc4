"""Sends copies of a rank's state to ranks that lack one, over the control group."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.state.kept.copies import Copy, form_of
from pipemorph_trainer.state.reduction import Wait

PIECE_BYTES = 16 << 20
"""Bytes per message."""


def send(copy: Copy, to: int, group: dist.ProcessGroup, wait: Wait) -> None:
    """Send a copy to a rank, which calls :func:`receive`."""
    content = copy.object
    head = [[list(entry) for entry in copy.form], len(content), copy.mark]
    dist.send_object_list([head], to, group=group)
    digest = hashlib.blake2b(content, digest_size=32)
    _post(dist.isend, torch.frombuffer(bytearray(content), dtype=torch.uint8), to, group, wait)
    for piece in _pieces(copy.raw()):
        _post(dist.isend, piece, to, group, wait)
        digest.update(piece.numpy().data)
    sent = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    _post(dist.isend, sent, to, group, wait)


def receive(
    path: Path, source: int, group: dist.ProcessGroup, wait: Wait
) -> tuple[Copy, dict[str, Any]]:
    """Receive a copy into the file ``path``. Returns it, not whole yet, and its mark.

    Raises :class:`OSError` if there is no memory for it, and :class:`PipelineError` if its bytes
    are not those that were sent.
    """
    box: list[Any] = [None]
    dist.recv_object_list(box, source, group=group)
    entries, length, mark = box[0]
    copy = Copy.create(path, form_of(entries), length)
    content = torch.empty(length, dtype=torch.uint8)
    _post(dist.irecv, content, source, group, wait)
    digest = hashlib.blake2b(content.numpy().data, digest_size=32)
    for piece in _pieces(copy.raw()):
        _post(dist.irecv, piece, source, group, wait)
        digest.update(piece.numpy().data)
    told = torch.empty(32, dtype=torch.uint8)
    _post(dist.irecv, told, source, group, wait)
    if told.numpy().tobytes() != digest.digest():
        raise PipelineError(f"the state that rank {source} sent arrived with other bytes")
    copy.write_object(content.numpy().tobytes())
    return copy, mark


def _pieces(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    for raw in tensors:
        for start in range(0, raw.numel(), PIECE_BYTES):
            yield raw[start : start + PIECE_BYTES]


def _post(how: Any, piece: Tensor, other: int, group: dist.ProcessGroup, wait: Wait) -> None:
    # The control group has all ranks, so its numbers are theirs.
    wait(how(piece, other, group=group))
