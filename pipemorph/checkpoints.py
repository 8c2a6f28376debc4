"""Checkpoint folders of a directory: their names, the run that wrote each, and which are whole.

A folder is called ``iteration-00000040``, or ``iteration-00000040.1`` if that name is in use. Its
:data:`MANIFEST` names the run from the start. When all files are written, the manifest gets their
sizes and checksums, and then torch renames a file to :data:`FINISHED`. A run deletes only folders
whose manifest names it, and folders that an interrupted run did not finish. All other folders
belong to users. Earlier releases wrote no manifest; their folders can be resumed from.
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


class FileChecksum(NamedTuple):
    """``size``: bytes; ``crc32``: of :func:`zlib.crc32`."""

    size: int
    crc32: int


class CheckpointManifest(BaseModel):
    """``order``: grows with each checkpoint; ``files``: empty until all are written."""

    run: str
    iteration: int
    order: int
    files: dict[str, FileChecksum] = {}


@dataclass(frozen=True)
class SavedCheckpoint:
    """Checkpoint folder. ``manifest``: None without a valid one. ``damage``: why the checkpoint
    cannot be used, as far as names and sizes show; empty if they show nothing."""

    folder: Path
    iteration: int
    manifest: CheckpointManifest | None = None
    damage: str = ""

    @property
    def finished(self) -> bool:
        return (self.folder / FINISHED).exists()

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: a newer checkpoint has a higher one."""
        if self.manifest is not None:
            return self.manifest.order, self.iteration
        finished = self.folder / FINISHED
        return finished.stat().st_mtime_ns if finished.exists() else 0, self.iteration

    def written_by(self, run: str) -> bool:
        """True if ``run`` wrote the checkpoint."""
        return self.manifest is not None and self.manifest.run == run


def read_checkpoint(folder: Path) -> SavedCheckpoint | None:
    """Read a folder; None if its name or its manifest is not that of a checkpoint."""
    match = _NAME.fullmatch(folder.name)
    if match is None or not folder.is_dir():
        return None
    iteration = int(match[1])
    try:
        manifest = CheckpointManifest.model_validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return SavedCheckpoint(folder, iteration) if (folder / FINISHED).exists() else None
    except OSError as error:
        return SavedCheckpoint(folder, iteration, damage=f"{MANIFEST}: {error.strerror}")
    except ValidationError:
        return SavedCheckpoint(folder, iteration, damage=f"{MANIFEST} is damaged")
    if manifest.iteration != iteration:
        return None  # A user's copy under another name.
    return SavedCheckpoint(folder, iteration, manifest, _find_wrong_size(folder, manifest))


def _find_wrong_size(folder: Path, manifest: CheckpointManifest) -> str:
    for name, written in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        if size != written.size:
            return f"{name} has {size:,} bytes instead of {written.size:,}"
    return ""


def list_checkpoints(directory: Path) -> Iterator[SavedCheckpoint]:
    """Yield all checkpoints of a directory, also unfinished ones, in no order."""
    with contextlib.suppress(FileNotFoundError):
        for path in directory.iterdir():
            if (found := read_checkpoint(path)) is not None:
                yield found


def list_resumable(directory: Path, run: str = "") -> list[SavedCheckpoint]:
    """Return the finished checkpoints: first those of ``run``, then others, each newest first."""
    found = [s for s in list_checkpoints(directory) if s.finished or s.damage]
    return sorted(found, key=lambda each: (each.written_by(run), *each.order), reverse=True)


class UnfinishedCheckpoint:
    """New checkpoint folder, locked so that no other process deletes it while it is written.

    Raises :class:`OSError` if the folder cannot be made.
    """

    def __init__(self, directory: Path, iteration: int, run: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        newest = max(
            (s.order[0] for s in list_checkpoints(directory) if s.written_by(run)), default=0
        )
        # The clock may have been set back since then.
        order = max(time.time_ns(), newest + 1)
        self._manifest = CheckpointManifest(run=run, iteration=iteration, order=order)
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
            self._write_manifest()
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _write_manifest(self) -> None:
        content = self._manifest.model_dump_json().encode()
        os.pwrite(self._fd, content, 0)
        os.ftruncate(self._fd, len(content))
        os.fsync(self._fd)

    def write_checksums(self, files: Mapping[str, FileChecksum]) -> None:
        """Write the sizes and checksums of all files. Raises :class:`OSError`."""
        self._manifest.files = {**files}
        self._write_manifest()

    def close(self) -> None:
        """End writing. Delete the folder if it is not finished."""
        os.close(self._fd)
        if not (self.folder / FINISHED).exists():
            delete_checkpoint(self.folder)


def delete_unfinished(directory: Path, run: str) -> None:
    """Delete unfinished checkpoints of ``run`` from before its restart, and of runs that ended."""
    for each in list(list_checkpoints(directory)):
        if (
            each.finished
            or each.manifest is None
            or (each.manifest.files and not each.written_by(run))
        ):
            continue
        with contextlib.suppress(OSError):
            fd = os.open(each.folder / MANIFEST, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                delete_checkpoint(each.folder)
            finally:
                os.close(fd)


def delete_old(directory: Path, run: str, keep: int) -> None:
    """Delete a run's finished checkpoints except the ``keep`` newest. Of several checkpoints of
    one iteration, only the newest stays."""
    mine = [each for each in list_checkpoints(directory) if each.finished and each.written_by(run)]
    seen: set[int] = set()
    for each in sorted(mine, key=lambda each: each.order, reverse=True):
        if (each.iteration in seen or len(seen) >= keep) and not each.folder.is_symlink():
            delete_checkpoint(each.folder)
        seen.add(each.iteration)


def delete_checkpoint(folder: Path) -> None:
    """Delete a checkpoint: first :data:`FINISHED`, last the manifest, which names its run."""
    (folder / FINISHED).unlink(missing_ok=True)
    for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST):
        delete_path(path)
    folder.rmdir()


def delete_path(path: Path, *, lenient: bool = False) -> None:
    """Delete a file, a link or a folder. ``lenient``: it may be gone, and a folder may stay."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=lenient)
    else:
        path.unlink(missing_ok=lenient)


def describe_skipped(skipped: Collection[tuple[Path, str]]) -> str:
    """Format skipped checkpoints: ``iteration-00000006 was skipped: its .metadata is missing``."""
    return "; ".join(f"{folder.name} was skipped: {why}" for folder, why in skipped)
