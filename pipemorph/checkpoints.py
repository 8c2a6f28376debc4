"""Folders of checkpoints in a directory: their names, which run wrote each, and which are whole.

A folder is called ``iteration-00000040``, or ``iteration-00000040.1`` if that name is in use. Its
:data:`MANIFEST` names the run from the beginning, and once all is written the size and checksum of
each file; after that torch's :data:`FINISHED` gets its name. A run deletes only folders whose
manifest names it, and what an interrupted run did not finish. Any other folder is a user's. One
without a manifest, as earlier releases wrote them, can be resumed from.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

MANIFEST = "pipemorph.json"
FINISHED = ".metadata"
_NAME = re.compile(r"iteration-(\d{8,})(?:\.\d+)?")


class FileSum(NamedTuple):
    """``size``: bytes; ``crc32``: as :func:`zlib.crc32`."""

    size: int
    crc32: int


class Manifest(BaseModel):
    """``order``: the higher, the later it was written; ``files``: empty until all are written."""

    run: str
    iteration: int
    order: int
    files: dict[str, FileSum] = {}


@dataclass(frozen=True)
class Saved:
    """A folder. ``manifest``: None without a valid one. ``damage``: why it cannot be used, as far
    as names and sizes show; empty if they show nothing."""

    folder: Path
    iteration: int
    manifest: Manifest | None = None
    damage: str = ""

    @property
    def finished(self) -> bool:
        return (self.folder / FINISHED).exists()

    @property
    def order(self) -> tuple[int, int]:
        """The higher, the newer."""
        if self.manifest is not None:
            return self.manifest.order, self.iteration
        finished = self.folder / FINISHED
        return finished.stat().st_mtime_ns if finished.exists() else 0, self.iteration

    def is_of(self, run: str) -> bool:
        """Whether a run wrote it."""
        return self.manifest is not None and self.manifest.run == run


def read(folder: Path) -> Saved | None:
    """Read a folder; None if it is no checkpoint by its name or its manifest."""
    match = _NAME.fullmatch(folder.name)
    if match is None or not folder.is_dir():
        return None
    iteration = int(match[1])
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return Saved(folder, iteration) if (folder / FINISHED).exists() else None
    except OSError as error:
        return Saved(folder, iteration, damage=f"{MANIFEST}: {error.strerror}")
    except ValidationError:
        return Saved(folder, iteration, damage=f"{MANIFEST} is damaged")
    if manifest.iteration != iteration:
        return None  # Somebody's copy under another name.
    return Saved(folder, iteration, manifest, _wrong_sizes(folder, manifest))


def _wrong_sizes(folder: Path, manifest: Manifest) -> str:
    for name, written in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        if size != written.size:
            return f"{name} has {size:,} bytes, and had {written.size:,}"
    return ""


def in_directory(directory: Path) -> Iterator[Saved]:
    """All checkpoints there, also unfinished ones, in no order."""
    with contextlib.suppress(FileNotFoundError):
        for path in directory.iterdir():
            if (found := read(path)) is not None:
                yield found


def to_resume(directory: Path, run: str = "") -> list[Saved]:
    """The checkpoints that were finished, the newest first: those of the run go before others."""
    found = [s for s in in_directory(directory) if s.finished or s.damage]
    return sorted(found, key=lambda each: (each.is_of(run), *each.order), reverse=True)


class Unfinished:
    """A new folder for a checkpoint, of one process. Nobody else deletes it meanwhile.

    Raises :class:`OSError` if it cannot be made.
    """

    def __init__(self, directory: Path, iteration: int, run: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        newest = max((s.order[0] for s in in_directory(directory) if s.is_of(run)), default=0)
        # A clock may be set back.
        order = max(time.time_ns(), newest + 1)
        self._manifest = Manifest(run=run, iteration=iteration, order=order)
        self.folder, number = directory / f"iteration-{iteration:08d}", 0
        while True:
            try:
                self.folder.mkdir()
                break
            except FileExistsError:
                number += 1
                self.folder = directory / f"iteration-{iteration:08d}.{number}"
        try:
            self._fd = os.open(self.folder / MANIFEST, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            with contextlib.suppress(OSError):  # Some network file systems have no locks.
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write()
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _write(self) -> None:
        content = self._manifest.model_dump_json().encode()
        os.pwrite(self._fd, content, 0)
        os.ftruncate(self._fd, len(content))
        os.fsync(self._fd)

    def finish(self, files: Mapping[str, FileSum]) -> None:
        """Write the sizes and checksums of all files. Raises :class:`OSError`."""
        self._manifest.files = {**files}
        self._write()

    def close(self) -> None:
        """Nothing is written any more. A folder that is not finished is deleted."""
        os.close(self._fd)
        if not (self.folder / FINISHED).exists():
            remove(self.folder)


def sweep(directory: Path, run: str) -> None:
    """Delete what a run did not finish: this one before it began anew, or another that has
    ended."""
    for each in list(in_directory(directory)):
        if each.finished or each.manifest is None or (each.manifest.files and not each.is_of(run)):
            continue
        with contextlib.suppress(OSError):
            fd = os.open(each.folder / MANIFEST, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(each.folder)
            finally:
                os.close(fd)


def remove_old(directory: Path, run: str, keep: int) -> None:
    """Delete the finished checkpoints of a run but the ``keep`` newest, and those of an iteration
    that it has saved again."""
    mine = [each for each in in_directory(directory) if each.finished and each.is_of(run)]
    seen: set[int] = set()
    for each in sorted(mine, key=lambda each: each.order, reverse=True):
        if (each.iteration in seen or len(seen) >= keep) and not each.folder.is_symlink():
            remove(each.folder)
        seen.add(each.iteration)


def remove(folder: Path) -> None:
    """Delete a checkpoint: first the file that marks it as finished, last the one that says whose
    it is."""
    (folder / FINISHED).unlink(missing_ok=True)
    for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder.rmdir()


def named(skipped: Collection[tuple[Path, str]]) -> str:
    """``iteration-00000006 was skipped: __0_0.distcp has 10 bytes, and had 2,000``"""
    return "; ".join(f"{folder.name} was skipped: {why}" for folder, why in skipped)
