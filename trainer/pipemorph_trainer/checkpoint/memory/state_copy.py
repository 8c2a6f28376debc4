"""Copies of a rank's state in files in shared memory, which outlive its process.

Each file holds a copy. It begins with a header of fixed numbers. Then come a *mark* (JSON: its
iteration and rank), the *form* (JSON: names, types and shapes of the tensors), the *object* (pickle
of all other state), and the bytes of the tensors. The header says whether the copy is whole: this
flag is cleared before anything is written and set last. The memory belongs to the kernel, so a
process killed during a write leaves a copy that is marked as not whole.

The header also has a checksum of form, object and tensors. It is added after the copy is whole, by
a thread if that takes long. A process killed in between leaves a copy without a checksum, which is
used unchecked. The checksum is the CRC of sums of pages: a hash would take longer than the copy.
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

from pipemorph.doctor.cgroup import read_memory_headroom

log = logging.getLogger("pipemorph.trainer")

_MAGIC = b"PMKEPT\x00\x02"
_HEAD = struct.Struct("<8s8Q")
"""Header: magic, whole, length of the mark, length of the form, room for the object, length of the
object, total size, CRC of the mark, checksum of the rest (0: none yet)."""
_WHOLE = struct.Struct("<Q")
_MARK_ROOM = 4096 - _HEAD.size
_ALIGNMENT = 64
_LEAST_OBJECT_ROOM = 1 << 16
_WORDS = 512
"""Words of 8 bytes per page, which are added up."""
_SUMMED = 1 << 32
"""Bit set in every checksum, so that none is 0."""


class TensorEntry(NamedTuple):
    """Tensor of a copy. ``is_shard``: it is this rank's shard of a distributed tensor;
    ``on_device``: the original was not in host memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_shard: bool = False
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


CopyForm = tuple[TensorEntry, ...]


class StateCopy:
    """Copy of a rank's state in a file, made by :meth:`create` or :meth:`open`."""

    def __init__(self, path: Path, memory: mmap.mmap, form: CopyForm, object_room: int) -> None:
        self.path, self.form = path, form
        self._memory, self._object_room = memory, object_room
        self._object_at = _align_size(4096 + len(_encode_form(form)))
        self.tensors: dict[str, Tensor] = {}
        """Tensors by name: views of the shared memory."""
        at = self._tensors_at = _align_size(self._object_at + object_room)
        for entry in form:
            self.tensors[entry.name] = _view_tensor(memory, at, entry)
            at += _align_size(entry.nbytes)

    @staticmethod
    def create(path: Path, form: CopyForm, object_bytes: int) -> StateCopy:
        """Make a file that is not whole yet; replaces a file of this name. ``object_bytes``: length
        of the object; there is room for twice as much.

        Raises :class:`OSError` if the file would take more than half of the free memory.
        """
        encoded = _encode_form(form)
        object_room = _align_size(max(2 * object_bytes, _LEAST_OBJECT_ROOM))
        size = _align_size(_align_size(4096 + len(encoded)) + object_room)
        size += sum(_align_size(entry.nbytes) for entry in form)
        path.unlink(missing_ok=True)
        free = find_available_bytes(path)
        if size > free // 2:
            raise OSError(
                errno.ENOSPC,
                f"a copy of its state takes {size:,} bytes, more than half of the {free:,} bytes of"
                " free memory",
            )
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            # Reserves the memory: a write to a page without memory would end the process (SIGBUS).
            os.posix_fallocate(fd, 0, size)
            memory = mmap.mmap(fd, size)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        memory[4096 : 4096 + len(encoded)] = encoded
        _HEAD.pack_into(memory, 0, _MAGIC, 0, 0, len(encoded), object_room, 0, size, 0, 0)
        return StateCopy(path, memory, form, object_room)

    @staticmethod
    def open(path: Path) -> StateCopy | None:
        """Open a file; None if it is missing, is no copy, or has a damaged form."""
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
        magic, _, _, form_bytes, object_room, _, total, *_ = _HEAD.unpack_from(memory, 0)
        if magic != _MAGIC or total != size:
            return None
        try:
            form = parse_form(json.loads(memory[4096 : 4096 + form_bytes]))
            return StateCopy(path, memory, form, object_room)
        except (ValueError, TypeError, RuntimeError) as error:
            log.warning("%s is damaged: %s", path, error)
            return None

    def can_hold(self, form: CopyForm, object_bytes: int) -> bool:
        """True if a state of this form can be written into this copy."""
        return form == self.form and object_bytes <= self._object_room

    @property
    def whole(self) -> bool:
        """True if the copy is complete and its mark undamaged."""
        _, whole, length, _, _, _, _, crc, _ = self._read_header()
        if whole != 1:
            return False
        if zlib.crc32(self._memory[_HEAD.size : _HEAD.size + length]) != crc:
            log.warning("%s is damaged: its mark has other bytes than were written", self.path)
            return False
        return True

    @property
    def checksum(self) -> int:
        """Checksum in the header; 0 if none has been added."""
        return int(self._read_header()[8])

    def compute_checksum(self) -> int:
        """Compute the checksum of form, object and tensors."""
        words = self.view_tensor_bytes().view(torch.int64)
        pages = len(words) // _WORDS * _WORDS
        sums = words[:pages].view(-1, _WORDS).sum(1)
        rest = zlib.crc32(self.pickled_object, zlib.crc32(_encode_form(self.form)))
        rest = zlib.crc32(words[pages:].numpy().tobytes(), rest)
        return zlib.crc32(sums.numpy().tobytes(), rest) | _SUMMED

    def add_checksum(self) -> None:
        _WHOLE.pack_into(self._memory, 64, self.compute_checksum())

    @property
    def damaged(self) -> bool:
        """True if a whole copy has other bytes than were written."""
        if self.checksum in (0, self.compute_checksum()):
            return False
        log.warning("%s is damaged: it has other bytes than were written", self.path)
        return True

    @property
    def mark(self) -> dict[str, Any]:
        """Mark given to :meth:`finish_write`. Only for a whole copy."""
        found: dict[str, Any] = json.loads(
            self._memory[_HEAD.size : _HEAD.size + self._read_header()[2]]
        )
        return found

    @property
    def pickled_object(self) -> bytes:
        """Pickled state apart from tensors."""
        return self._memory[self._object_at : self._object_at + self._read_header()[5]]

    def _read_header(self) -> tuple[Any, ...]:
        return _HEAD.unpack_from(self._memory, 0)

    def begin_write(self) -> None:
        """Begin to write. The copy is not whole until :meth:`finish_write`."""
        _WHOLE.pack_into(self._memory, 8, 0)
        _WHOLE.pack_into(self._memory, 64, 0)

    def write_tensors(self, values: Mapping[str, Tensor]) -> None:
        """Write tensors, by name. Call it between :meth:`begin_write` and :meth:`finish_write`."""
        names = [name for name, value in values.items() if value.numel()]
        if names:
            with torch.no_grad():
                torch._foreach_copy_(
                    [self.tensors[name] for name in names], [values[name] for name in names]
                )

    def write_object(self, content: bytes) -> None:
        """Write the object. Call it between :meth:`begin_write` and :meth:`finish_write`."""
        self._memory[self._object_at : self._object_at + len(content)] = content
        _WHOLE.pack_into(self._memory, 40, len(content))

    def finish_write(self, mark: Mapping[str, Any]) -> None:
        """Write the mark and set the flag that the copy is whole."""
        encoded = json.dumps(mark).encode()
        if len(encoded) > _MARK_ROOM:
            raise ValueError(f"a mark has {len(encoded)} bytes; expected at most {_MARK_ROOM}")
        _WHOLE.pack_into(self._memory, 8, 0)
        self._memory[_HEAD.size : _HEAD.size + len(encoded)] = encoded
        _WHOLE.pack_into(self._memory, 16, len(encoded))
        _WHOLE.pack_into(self._memory, 56, zlib.crc32(encoded))
        _WHOLE.pack_into(self._memory, 8, 1)

    def view_tensor_bytes(self) -> Tensor:
        """View the bytes of all tensors in order, uint8, each tensor aligned to 64 bytes. Shares
        the memory. Copies of one form have equally many bytes."""
        count = sum(_align_size(entry.nbytes) for entry in self.form)
        if not count:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(
            self._memory, dtype=torch.uint8, count=count, offset=self._tensors_at
        )


def parse_form(entries: Sequence[Any]) -> CopyForm:
    """Parse a form from JSON or a message."""
    return tuple(
        TensorEntry(name, dtype, tuple(shape), *rest) for name, dtype, shape, *rest in entries
    )


def delete_copy(path: Path) -> None:
    """Delete the file of a copy, if it exists."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def find_available_bytes(path: Path) -> int:
    """Find the bytes that a file in memory can take: the least that its file system, the machine
    and the control groups have free. Control groups would kill a process that takes more."""
    found = os.statvfs(path.parent)
    free = [found.f_bavail * found.f_frsize]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        free.append(int(available.split()[1]) * 1024)
    within_groups = read_memory_headroom()
    if within_groups is not None:
        free.append(within_groups)
    return max(0, min(free))


def _encode_form(form: CopyForm) -> bytes:
    return json.dumps(form).encode()


def _align_size(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _view_tensor(memory: mmap.mmap, at: int, entry: TensorEntry) -> Tensor:
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.torch_dtype)
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=entry.nbytes, offset=at)
    return raw.view(entry.torch_dtype).view(entry.shape)
