"""Copies of a rank's state in files in shared memory, which outlive its process.

A file is one copy. It begins with fixed numbers, then has a *mark* (JSON: of which iteration it
is), the *form* (JSON: names, types and shapes of its tensors), what is no tensor as pickled bytes,
and the tensors' bytes. The first number says whether the copy is whole. It is cleared before
anything is written and set last, and the memory belongs to the kernel: a process that is killed
within a write leaves a copy that says it is not whole, and anything else is as it was written.

The last number is a checksum of form, object and tensors. It is added when the copy is whole, by a
thread where it takes long, and cleared with the first number: a process that is killed between the
two leaves a copy that is taken as it is. Hashing as well would take longer than the copy; sums of
pages, and the CRC of these, take less.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipemorph.discovery.cgroup import memory_room

log = logging.getLogger("pipemorph.trainer")

_MAGIC = b"PMKEPT\x00\x02"
_HEAD = struct.Struct("<8s8Q")
"""Magic, whole, length of the mark, of the form, room for the object, length of the object, total
size, CRC of the mark, checksum of the rest (0: none yet)."""
_WHOLE = struct.Struct("<Q")
_MARK_ROOM = 4096 - _HEAD.size
_ALIGNMENT = 64
_LEAST_OBJECT_ROOM = 1 << 16
_WORDS = 512
"""Words of 8 bytes that are summed to one: a page."""
_SUMMED = 1 << 32
"""Set in a checksum, so that none is 0."""


class Entry(NamedTuple):
    """A tensor of a copy. ``parted``: it is this rank's part of a distributed one; ``on_device``:
    it was not in host memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parted: bool = False
    on_device: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{self.name} has the unknown type {self.dtype!r}")
        return found


Form = tuple[Entry, ...]


class Copy:
    """One copy of a state. Made by :meth:`create` or :meth:`open`."""

    def __init__(self, path: Path, memory: mmap.mmap, form: Form, object_room: int) -> None:
        self.path, self.form = path, form
        self._memory, self._object_room = memory, object_room
        self._object_at = _aligned(4096 + len(_encoded(form)))
        self.tensors: dict[str, Tensor] = {}
        """The tensors by name. They are the shared memory itself."""
        at = self._tensors_at = _aligned(self._object_at + object_room)
        for entry in form:
            self.tensors[entry.name] = _view(memory, at, entry)
            at += _aligned(entry.nbytes)

    @staticmethod
    def create(path: Path, form: Form, object_bytes: int) -> Copy:
        """Make a file that is not whole yet, in place of one of this name. ``object_bytes``: of
        what is no tensor; there is room for twice as much.

        Raises :class:`OSError` if it would take more than half of the memory that is left.
        """
        encoded = _encoded(form)
        object_room = _aligned(max(2 * object_bytes, _LEAST_OBJECT_ROOM))
        size = _aligned(_aligned(4096 + len(encoded)) + object_room)
        size += sum(_aligned(entry.nbytes) for entry in form)
        path.unlink(missing_ok=True)
        left = room(path)
        if size > left // 2:
            raise OSError(
                errno.ENOSPC,
                f"a copy of its state takes {size:,} bytes, more than half of the {left:,} bytes of"
                " memory that are left",
            )
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            # Now: a write without memory behind it would end the process by SIGBUS.
            os.posix_fallocate(fd, 0, size)
            memory = mmap.mmap(fd, size)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        memory[4096 : 4096 + len(encoded)] = encoded
        _HEAD.pack_into(memory, 0, _MAGIC, 0, 0, len(encoded), object_room, 0, size, 0, 0)
        return Copy(path, memory, form, object_room)

    @staticmethod
    def open(path: Path) -> Copy | None:
        """Open a file; None if there is none, or if it is none of these, or its form is damaged."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            size = os.fstat(fd).st_size
            if size < 4096:
                return None
            memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        magic, _, _, form_bytes, object_room, _, told, *_ = _HEAD.unpack_from(memory, 0)
        if magic != _MAGIC or told != size:
            return None
        try:
            form = form_of(json.loads(memory[4096 : 4096 + form_bytes]))
            return Copy(path, memory, form, object_room)
        except (ValueError, TypeError, RuntimeError) as error:
            log.warning("%s is damaged: %s", path, error)
            return None

    def fits(self, form: Form, object_bytes: int) -> bool:
        """Whether a state of this form can be written into this copy."""
        return form == self.form and object_bytes <= self._object_room

    @property
    def whole(self) -> bool:
        _, whole, length, _, _, _, _, crc, _ = self._head()
        if whole != 1:
            return False
        if zlib.crc32(self._memory[_HEAD.size : _HEAD.size + length]) != crc:
            log.warning("%s is damaged: its mark has other bytes than were written", self.path)
            return False
        return True

    @property
    def checksum(self) -> int:
        """What was added to it; 0: nothing yet."""
        return int(self._head()[8])

    def sum_up(self) -> int:
        """The checksum of form, object and tensors."""
        words = self.raw().view(torch.int64)
        pages = len(words) // _WORDS * _WORDS
        sums = words[:pages].view(-1, _WORDS).sum(1)
        rest = zlib.crc32(self.object, zlib.crc32(_encoded(self.form)))
        rest = zlib.crc32(words[pages:].numpy().tobytes(), rest)
        return zlib.crc32(sums.numpy().tobytes(), rest) | _SUMMED

    def add_checksum(self) -> None:
        _WHOLE.pack_into(self._memory, 64, self.sum_up())

    @property
    def damaged(self) -> bool:
        """Whether a whole copy has other bytes than were written."""
        if self.checksum in (0, self.sum_up()):
            return False
        log.warning("%s is damaged: it has other bytes than were written", self.path)
        return True

    @property
    def mark(self) -> dict[str, Any]:
        """What :meth:`finish` was given. Only of a whole copy."""
        found: dict[str, Any] = json.loads(self._memory[_HEAD.size : _HEAD.size + self._head()[2]])
        return found

    @property
    def object(self) -> bytes:
        """What is no tensor."""
        return self._memory[self._object_at : self._object_at + self._head()[5]]

    def _head(self) -> tuple[Any, ...]:
        return _HEAD.unpack_from(self._memory, 0)

    def begin(self) -> None:
        """Begin to write: the copy is not whole until :meth:`finish`."""
        _WHOLE.pack_into(self._memory, 8, 0)
        _WHOLE.pack_into(self._memory, 64, 0)

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Copy tensors, by name. Between :meth:`begin` and :meth:`finish`."""
        names = [name for name, value in values.items() if value.numel()]
        if names:
            with torch.no_grad():
                torch._foreach_copy_(
                    [self.tensors[name] for name in names], [values[name] for name in names]
                )

    def write_object(self, content: bytes) -> None:
        """Write what is no tensor. Between :meth:`begin` and :meth:`finish`."""
        self._memory[self._object_at : self._object_at + len(content)] = content
        _WHOLE.pack_into(self._memory, 40, len(content))

    def finish(self, mark: Mapping[str, Any]) -> None:
        """The copy is whole from now on."""
        encoded = json.dumps(mark).encode()
        if len(encoded) > _MARK_ROOM:
            raise ValueError(f"a mark has {len(encoded)} bytes; expected at most {_MARK_ROOM}")
        _WHOLE.pack_into(self._memory, 8, 0)
        self._memory[_HEAD.size : _HEAD.size + len(encoded)] = encoded
        _WHOLE.pack_into(self._memory, 16, len(encoded))
        _WHOLE.pack_into(self._memory, 56, zlib.crc32(encoded))
        _WHOLE.pack_into(self._memory, 8, 1)

    def raw(self) -> Tensor:
        """The bytes of all tensors, in order, each from a multiple of 64 on. They are the shared
        memory itself. Copies of one form have as many."""
        count = sum(_aligned(entry.nbytes) for entry in self.form)
        if not count:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(
            self._memory, dtype=torch.uint8, count=count, offset=self._tensors_at
        )


def form_of(entries: Sequence[Any]) -> Form:
    """A form from JSON or a message."""
    return tuple(Entry(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in entries)


def remove(path: Path) -> None:
    """Remove a copy, if there is one."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def room(path: Path) -> int:
    """Bytes that a file in memory can have: within its file system, the machine and the control
    groups, which would kill a process that takes more."""
    found = os.statvfs(path.parent)
    left = [found.f_bavail * found.f_frsize]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        left.append(int(available.split()[1]) * 1024)
    within_groups = memory_room()
    if within_groups is not None:
        left.append(within_groups)
    return max(0, min(left))


def _encoded(form: Form) -> bytes:
    return json.dumps(form).encode()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _view(memory: mmap.mmap, at: int, entry: Entry) -> Tensor:
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.torch_dtype)
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=entry.nbytes, offset=at)
    return raw.view(entry.torch_dtype).view(entry.shape)
