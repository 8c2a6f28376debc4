"""Files of a checkpoint: written with a checksum of what passes, and compared before they are
loaded."""

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

from pipemorph.checkpoints import FINISHED, FileSum, Manifest, Unfinished

_SUM = "pipemorph.sum."
"""Begins the names of results that hold checksums, on their way to rank 0."""
_PIECE_BYTES = 4 << 20


class _Summed(io.IOBase):
    """A stream that adds up what is written to it. ``failure``: the first error of a write, which
    torch replaces by one of its own."""

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


class _Files(FileSystem):
    """``before_finished``: called before :data:`FINISHED` gets its name."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}
        self.before_finished: Callable[[], None] = lambda: None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        stream: _Summed | None = None
        try:
            with super().create_stream(path, mode) as raw:
                stream = _Summed(raw)
                yield stream
                self.sums[Path(path).name] = FileSum(stream.tell(), stream.crc32)
        except Exception as error:
            if stream is not None and stream.failure is not None:
                raise stream.failure from error
            raise

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)
        self.before_finished()
        super().rename(path, new_path)


class Writer(FileSystemWriter):
    """Writes a checkpoint. ``unfinished``: its folder, on rank 0."""

    def __init__(self, folder: Path, unfinished: Unfinished | None) -> None:
        super().__init__(folder)
        self.fs = self._files = _Files()
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
            written.append(WriteResult(MetadataIndex(_SUM + name), each.size, each))
        found: Future[list[WriteResult]] = Future()
        found.set_result(written)
        return found

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        unfinished, sums, kept = self._unfinished, self._files.sums, []
        assert unfinished is not None, "rank 0 finishes, which has made the folder"
        for each in (each for mine in results for each in mine):
            if each.index.fqn.startswith(_SUM):
                sums[each.index.fqn.removeprefix(_SUM)] = each.storage_data
            else:
                kept.append(each)
        self._files.before_finished = lambda: unfinished.finish(sums)
        super().finish(metadata, [kept])


def damage(folder: Path, manifest: Manifest, rank: int, ranks: int) -> str:
    """What is wrong with the files that are this rank's to compare: as far as possible those that
    it reads anyway. Empty if nothing is."""
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
