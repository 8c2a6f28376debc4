"""Locks that end with their process: of result folders, and of folders that nobody else removes.

A lock is a file or folder that a process holds open under ``flock``; the kernel gives it back
however the process ends. File systems without such locks are used without.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from pipemorph.api.spec import PipeMorphJob


def lock(descriptor: int) -> bool:
    """Take the lock of an open file. False if another process has it; raises OSError if its file
    system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class TemporaryFolder:
    """A new folder of mode 0700, which :meth:`remove` removes; or :func:`sweep`, once this process
    has ended. ``kind``: what it is for, in its name. Raises OSError."""

    def __init__(self, kind: str, parent: Path) -> None:
        sweep(kind, parent)
        while True:
            self.root = Path(tempfile.mkdtemp(prefix=_prefix(kind), dir=parent))
            try:
                self._descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue  # Another process that starts has swept it: it was not locked yet.
            with contextlib.suppress(OSError):
                if not lock(self._descriptor) or not self.root.exists():
                    os.close(self._descriptor)
                    continue
            return

    def remove(self) -> bool:
        """Whether it is gone: without a free file descriptor nothing can be removed."""
        shutil.rmtree(self.root, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        return not self.root.exists()


def sweep(kind: str, parent: Path) -> None:
    """Remove the folders of this user's processes that were killed on this machine."""
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{_prefix(kind)}*"):
            with contextlib.suppress(OSError):
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        private = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
        if private and lock(descriptor):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _prefix(kind: str) -> str:
    # A shared file system may have locks that other machines do not see.
    machine = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
    return f"pipemorph-{kind}-{machine}-"


SECRET_BYTES = 32


class PrivateFolder(TemporaryFolder):
    """A folder with files of mode 0600, among them a new random secret. Raises OSError if it cannot
    be written."""

    def __init__(self, job: PipeMorphJob, token: str) -> None:
        super().__init__("run", Path(tempfile.gettempdir()))
        self.secret, self.token = self.root / "secret", self.root / "token"
        self.job = self.root / "job.json"
        try:
            _write(self.secret, secrets.token_bytes(SECRET_BYTES))
            _write(self.token, token.encode())
            _write(self.job, job.model_dump_json(by_alias=True, exclude_none=True).encode())
        except OSError:
            self.remove()
            raise


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
