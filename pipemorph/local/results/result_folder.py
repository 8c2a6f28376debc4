"""Folder for the results of a run.

A folder with results of an earlier run is rejected, unless ``--force`` is given; then only the
files of that run are deleted, never others. A lock excludes other runs, if the file system has
locks.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipemorph.checkpoints import delete_path
from pipemorph.errors import InputError, one_line
from pipemorph.local.processes.locked_folder import try_lock

LOCK = ".lock"
RESULTS = ("report.json", "status.json", "page.json", "timeline.json", "timeline.png")
VIEWS = ("page.html", "comparison.html")
"""Files that ``pipemorph view`` writes."""
OUTPUTS = (*RESULTS, "logs", "trace", *VIEWS)


@dataclass(frozen=True)
class ResultFolder:
    """Paths of everything a run writes. A context manager: the folder is locked until its end."""

    root: Path
    lock: int = -1
    """Descriptor of the lock file; -1: there is none."""

    def __enter__(self) -> ResultFolder:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.lock >= 0:
            with contextlib.suppress(OSError):
                (self.root / LOCK).unlink(missing_ok=True)
            os.close(self.lock)

    @staticmethod
    def claim_folder(root: Path, *, force: bool) -> ResultFolder:
        """Prepare ``root`` for a run. Raises :class:`InputError` if another run uses it, if it
        holds an earlier run and ``force`` is not set, or if it cannot be written."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            folder = ResultFolder(root, _acquire_lock(root / LOCK))
        except OSError as error:
            raise InputError(
                f"--out {shorten_path(root)} cannot be used: {error.strerror}"
            ) from None
        try:
            held = [name for name in OUTPUTS if (root / name).exists()]
            if held and not force:
                raise InputError(
                    f"--out {root} holds an earlier run ({', '.join(held)}); choose another "
                    f"folder, or replace that run with --force"
                )
            for name in held:
                delete_path(root / name)
            folder.logs.mkdir()
            folder.trace.mkdir()
        except (OSError, InputError) as error:
            with contextlib.suppress(OSError):
                folder.logs.rmdir()
            folder.__exit__()
            if isinstance(error, InputError):
                raise
            where = f" ({error.filename})" if error.filename else ""
            raise InputError(
                f"--out {shorten_path(root)} cannot be used: {error.strerror}{where}"
            ) from None
        return folder

    @property
    def report(self) -> Path:
        return self.root / "report.json"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def page(self) -> Path:
        """Document of the page of the run that is over."""
        return self.root / "page.json"

    @property
    def timeline(self) -> Path:
        return self.root / "timeline.json"

    @property
    def picture(self) -> Path:
        return self.root / "timeline.png"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def trace(self) -> Path:
        return self.root / "trace"

    @property
    def host_log(self) -> Path:
        return self.logs / "host.log"

    def get_rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"


def shorten_path(path: Path) -> str:
    """A path, shortened to fit on one line."""
    text = str(path)
    return text if len(text) <= 200 else text[:199] + "…"


def write_json(path: Path, content: Any, *, indent: int | None = None) -> None:
    """Replace ``path`` atomically, so that readers never see partial content."""
    write_atomically(path, (json.dumps(content, indent=indent) + "\n").encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` atomically: complete or unchanged. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _acquire_lock(path: Path) -> int:
    """Lock the file ``path``; returns its descriptor, or -1 if the file system has no locks. Raises
    :class:`InputError` if another run holds the lock, OSError if the file cannot be made."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            free = try_lock(descriptor)
        except OSError:
            os.close(descriptor)
            return -1
        if not free:
            owner = one_line(os.pread(descriptor, 200, 0).decode(errors="replace"))
            os.close(descriptor)
            raise InputError(
                f"--out {shorten_path(path.parent)} is used by another run ({owner}), also with "
                "--force; choose another folder, or end that run"
            )
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                os.ftruncate(descriptor, 0)
                os.pwrite(
                    descriptor, f"process {os.getpid()} of {socket.gethostname()}\n".encode(), 0
                )
                return descriptor
        os.close(descriptor)  # The run that held the lock has just removed its file.
