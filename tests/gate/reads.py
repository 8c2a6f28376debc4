"""Traces which files of the checkout each part of a run opens, by the kernel's fanotify(7).

It sees every process, whatever started it: compilers, helm, an emulator that serves files to its
guest. A process belongs to the part that its variable :data:`VARIABLE` names, or that of an
ancestor. A process that had ended before it could be looked at, or without a part, counts for every
part, so a part may seem to read more than it does, and never less. Tracing needs root.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
import threading
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "PIPEMORPH_TEST_PART"
"""Names the part that a process belongs to; children inherit it."""
CACHED = "__pycache__"

_CLOEXEC, _UNLIMITED_QUEUE, _UNLIMITED_MARKS = 0x1, 0x10, 0x20
_MARK_ADD, _OPEN, _ON_DIRECTORY, _ON_CHILD, _OVERFLOW = 0x1, 0x20, 0x4000_0000, 0x0800_0000, 0x4000
_EVENT = struct.Struct("IBBHQii")
_AT_FDCWD = -100


class CannotTrace(Exception):
    """Tracing is not permitted to this process; the message says why."""


class ReadTracer:
    """Records the files and folders below ``root`` that processes open, for each part.

    ``folders``: those to watch, relative to ``root``; files in other folders are not seen. A
    context manager. Raises CannotTrace where the kernel or the user's rights do not allow it.
    """

    def __init__(self, root: Path, folders: Iterable[Path]) -> None:
        self._root = root
        self._of_parts: dict[str, set[Path]] = {}
        self._of_all: set[Path] = set()
        self._lock = threading.Lock()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.fanotify_mark.argtypes = [
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_char_p,
        ]
        flags = _CLOEXEC | _UNLIMITED_QUEUE | _UNLIMITED_MARKS
        self._fd = self._libc.fanotify_init(flags, os.O_RDONLY | os.O_CLOEXEC | os.O_LARGEFILE)
        if self._fd < 0:
            raise CannotTrace(f"fanotify_init: {os.strerror(ctypes.get_errno())}")
        self._stop_read, self._stop_write = os.pipe()
        self._overflowed = False
        self._thread = threading.Thread(target=self._read_events, daemon=True)
        try:
            for folder in folders:
                self._watch(root / folder)
        except BaseException:
            self._close()
            raise
        self._thread.start()

    def _watch(self, folder: Path) -> None:
        mask = _OPEN | _ON_DIRECTORY | _ON_CHILD
        if self._libc.fanotify_mark(self._fd, _MARK_ADD, mask, _AT_FDCWD, os.fsencode(folder)) < 0:
            raise CannotTrace(f"fanotify_mark of {folder}: {os.strerror(ctypes.get_errno())}")

    def __enter__(self) -> ReadTracer:
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._stop_write, b"x")
        self._thread.join()
        self._close()

    def _close(self) -> None:
        for fd in (self._fd, self._stop_read, self._stop_write):
            os.close(fd)

    def opened_by(self, *parts: str) -> set[Path] | None:
        """Files and folders that any of these parts opened, relative to the root: at least those. A
        compiled Python file counts as its source. None if the kernel lost events."""
        with self._lock:
            opened = (self._of_parts.get(part, set()) for part in parts)
            return None if self._overflowed else self._of_all.union(*opened)

    def _read_events(self) -> None:
        while True:
            ready, _, _ = select.select([self._fd, self._stop_read], [], [])
            if self._fd not in ready:
                return  # only when no event waits
            try:
                data = os.read(self._fd, 1 << 18)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.ETXTBSY, errno.ENOENT):
                    continue  # the kernel could not open the file for us: being written, or gone
                with self._lock:
                    self._overflowed = True
                return
            self._take(data)

    def _take(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            length, _, _, _, mask, fd, pid = _EVENT.unpack_from(data, at)
            at += length
            if mask & _OVERFLOW or fd < 0:
                with self._lock:
                    self._overflowed = True
                continue
            try:
                path = Path(f"/proc/self/fd/{fd}").readlink()
            finally:
                os.close(fd)
            if pid != os.getpid():
                self._note(path, pid)

    def _note(self, path: Path, pid: int) -> None:
        if not path.is_relative_to(self._root):
            return
        path = source_of(path.relative_to(self._root))
        part = _part_of(pid)
        with self._lock:
            if part is None:
                self._of_all.add(path)
            else:
                self._of_parts.setdefault(part, set()).add(path)


def source_of(path: Path) -> Path:
    """The source of a compiled Python file; the folder of a folder of those; else the path."""
    if path.name == CACHED:
        return path.parent
    if path.parent.name == CACHED and path.suffix == ".pyc":
        return path.parent.parent / f"{path.name.split('.', 1)[0]}.py"
    return path


def _part_of(pid: int) -> str | None:
    """The part of a process: by its own variable, else by that of its closest ancestor with one."""
    prefix = f"{VARIABLE}=".encode()
    try:
        while pid > 1:
            process = Path(f"/proc/{pid}")
            for variable in (process / "environ").read_bytes().split(b"\0"):
                if variable.startswith(prefix):
                    return os.fsdecode(variable[len(prefix) :])
            # The state and the parent follow the name in parentheses.
            pid = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return None
    return None
