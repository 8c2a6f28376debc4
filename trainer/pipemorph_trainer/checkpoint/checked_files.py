"""Checkpoint files: their checksums are computed while they are written, and compared before they
are loaded."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import serialization
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pipemorph.checkpoints import FINISHED, CheckpointManifest, FileChecksum, UnfinishedCheckpoint

_CHECKSUM_PREFIX = "pipemorph.sum."
"""Prefix of the names of write results that carry checksums to rank 0."""
_PIECE_BYTES = 4 << 20


class _ChecksumStream(io.IOBase):
    """Stream with a checksum of the bytes written to it. ``failure``: the first error of a write,
    which torch replaces by an error of its own."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.crc32 = 0
        self.failure: OSError | None = None

    def write(self, content: Any) -> int:
        self.crc32 = zlib.crc32(content, self.crc32)
        try:
            return int(self._raw.write(content))
        except OSError as error:
            self.failure = self.failure or error
            raise

    def tell(self) -> int:
        return int(self._raw.tell())

    def flush(self) -> None:
        self._raw.flush()

    def fileno(self) -> int:
        return int(self._raw.fileno())


class _ChecksumFileSystem(FileSystem):
    """File system that sums up each file. ``before_finished``: called before torch renames a file
    to :data:`FINISHED`."""

    def __init__(self) -> None:
        self.sums: dict[str, FileChecksum] = {}
        self.before_finished: Callable[[], None] = lambda: None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        stream: _ChecksumStream | None = None
        try:
            with super().create_stream(path, mode) as raw:
                stream = _ChecksumStream(raw)
                yield stream
                self.sums[Path(path).name] = FileChecksum(stream.tell(), stream.crc32)
        except Exception as error:
            if stream is not None and stream.failure is not None:
                raise stream.failure from error
            raise

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)
        self.before_finished()
        super().rename(path, new_path)


class CheckpointWriter(FileSystemWriter):
    """Writes a checkpoint. ``unfinished``: its folder, on rank 0."""

    def __init__(self, folder: Path, unfinished: UnfinishedCheckpoint | None) -> None:
        super().__init__(folder)
        self.fs = self._files = _ChecksumFileSystem()
        self._unfinished = unfinished

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # torch's own checksums, which it does not compare, would take as long again.
        before = serialization.get_crc32_options()
        serialization.set_crc32_options(False)
        try:
            written = super().write_data(plan, planner).wait()
        finally:
            serialization.set_crc32_options(before)
        for name, each in self._files.sums.items():
            written.append(WriteResult(MetadataIndex(_CHECKSUM_PREFIX + name), each.size, each))
        found: Future[list[WriteResult]] = Future()
        found.set_result(written)
        return found

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        unfinished, sums, own_results = self._unfinished, self._files.sums, []
        assert unfinished is not None, "rank 0, which made the folder, finishes"
        for each in (each for mine in results for each in mine):
            if each.index.fqn.startswith(_CHECKSUM_PREFIX):
                sums[each.index.fqn.removeprefix(_CHECKSUM_PREFIX)] = each.storage_data
            else:
                own_results.append(each)
        self._files.before_finished = lambda: unfinished.write_checksums(sums)
        super().finish(metadata, [own_results])


def find_damage(folder: Path, manifest: CheckpointManifest, rank: int, ranks: int) -> str:
    """Find damage in this rank's share of the files: if possible, those that it reads anyway.
    Returns an empty text if there is none."""
    # torch calls the files of rank 3 ``__3_0.distcp``.
    names = sorted(manifest.files, key=lambda name: (name == FINISHED, len(name), name))
    for name in names[rank::ranks]:
        buffer, crc32 = memoryview(bytearray(_PIECE_BYTES)), 0
        try:
            with (folder / name).open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    crc32 = zlib.crc32(buffer[:count], crc32)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if crc32 != manifest.files[name].crc32:
            return f"{name} has other bytes than were written"
    return ""
