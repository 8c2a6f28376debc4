"""Locks that end with their process, of result folders and of temporary folders.

A lock is a file or folder that a process holds open under ``flock``; the kernel releases it however
the process ends. File systems without such locks are used unlocked.
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

from pipemorph.spec.job_spec import PipeMorphJob


def try_lock(descriptor: int) -> bool:
    """Lock an open file. Returns False if another process holds it; raises OSError without
    locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """True if another process holds the lock of a file. Raises OSError if the file cannot be read,
    or without locks."""
    # NFS locks only files that are open for writing.
    mode = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY
    descriptor = os.open(path, mode | os.O_NOFOLLOW)
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


class TemporaryFolder:
    """New folder of mode 0700. :meth:`remove` removes it, or :func:`remove_abandoned`, once this
    process has ended. ``kind``: its purpose, for its name. Raises OSError."""

    def __init__(self, kind: str, parent: Path) -> None:
        remove_abandoned(kind, parent)
        while True:
            self.root = Path(tempfile.mkdtemp(prefix=_make_folder_prefix(kind), dir=parent))
            try:
                self._descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue  # Another process that starts has removed it before it was locked.
            with contextlib.suppress(OSError):
                if not try_lock(self._descriptor) or not self.root.exists():
                    os.close(self._descriptor)
                    continue
            return

    def remove(self) -> bool:
        """Remove the folder. Returns True if it is gone: that needs a free file descriptor."""
        shutil.rmtree(self.root, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        return not self.root.exists()


def remove_abandoned(kind: str, parent: Path) -> None:
    """Remove folders of this user's processes that were killed on this machine."""
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{_make_folder_prefix(kind)}*"):
            with contextlib.suppress(OSError):
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        private = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
        if private and try_lock(descriptor):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _make_folder_prefix(kind: str) -> str:
    # Other machines may not see the locks of a shared file system.
    machine = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
    return f"pipemorph-{kind}-{machine}-"


SECRET_BYTES = 32


class PrivateFolder(TemporaryFolder):
    """Folder with files of mode 0600, among them a new random secret. Raises OSError."""

    def __init__(self, job: PipeMorphJob, token: str) -> None:
        super().__init__("run", Path(tempfile.gettempdir()))
        self.secret, self.token = self.root / "secret", self.root / "token"
        self.job = self.root / "job.json"
        try:
            _write_private_file(self.secret, secrets.token_bytes(SECRET_BYTES))
            _write_private_file(self.token, token.encode())
            _write_private_file(
                self.job, job.model_dump_json(by_alias=True, exclude_none=True).encode()
            )
        except OSError:
            self.remove()
            raise


def _write_private_file(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
