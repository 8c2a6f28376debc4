"""Trace file, plain or gzip: its beginning, its bytes, and the interface of its readers."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, cast

from pipemorph.diagnose.operation import Operation
from pipemorph.errors import InputError, one_line

HEAD_BYTES = 64 << 10
"""Bytes at the beginning of a trace by which its format is recognized."""
OUTPUT_NAME = re.compile(
    r"diagnosis\.(json|html)|schedule\.csv|(as-it-ran|without-stragglers|advice-[1-9]\d?)\.json"
)
"""Name of a file that ``pipemorph diagnose --out`` writes. It is no trace."""
GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class TraceFile:
    """A trace on disk. ``head``: its first bytes, unpacked."""

    path: Path
    packed: bool
    head: bytes

    @staticmethod
    def open_file(path: Path) -> TraceFile:
        """Read the beginning of ``path``. Raises :class:`InputError` if it cannot be read, or is
        empty."""
        try:
            with path.open("rb") as file:
                packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            trace = TraceFile(path, packed, b"")
            with trace.open_bytes() as unpacked:
                head = unpacked.read(HEAD_BYTES)
        except OSError as error:
            raise InputError(f"{one_line(str(path))}: {error.strerror or error}") from None
        except (EOFError, zlib.error):
            raise trace.truncated_error() from None
        if not head.strip():
            raise InputError(f"{trace.name}: is empty; expected a trace of ops")
        return TraceFile(path, packed, head)

    @property
    def name(self) -> str:
        """File name for messages, one line."""
        return one_line(self.path.name)

    @property
    def text(self) -> str:
        """Beginning as text."""
        return self.head.decode("utf-8-sig", errors="replace")

    def open_bytes(self) -> IO[bytes]:
        """Open the unpacked bytes. Reading raises OSError, EOFError or zlib.error."""
        if self.packed:
            return cast(IO[bytes], gzip.open(self.path, "rb"))
        return self.path.open("rb")

    def open_text(self) -> IO[str]:
        """Open the unpacked text, UTF-8. Reading also raises UnicodeDecodeError."""
        return io.TextIOWrapper(self.open_bytes(), encoding="utf-8-sig", newline="")

    def truncated_error(self) -> InputError:
        """Error of a file that ends early."""
        return InputError(
            f"{self.name}: ends in the middle, or is damaged; copy the whole file, or record again"
        )

    def malformed_error(self, line: int, what: str) -> InputError:
        """Error of a line, or of the row of a table."""
        return InputError(f"{self.name}: line {line} {what}")


class TraceReader(Protocol):
    """Reader of one format.

    A reader is given all files of its format together, since a format may write a file per rank.
    It streams them: what it holds at once does not grow with the number of events that are no ops.
    """

    @property
    def format_name(self) -> str:
        """Format, plural, for messages: ``"op tables (CSV)"``."""

    def recognize_file(self, file: TraceFile) -> bool:
        """True if the head of ``file`` is of this format. Raises nothing."""

    def read_operations(self, files: Sequence[TraceFile], notes: list[str]) -> Iterable[Operation]:
        """Operations of ``files``, in any order, their times within a step by one clock.

        Appends to ``notes`` a sentence for each fact that cannot be derived from this trace, and
        for what was omitted. Raises :class:`InputError`, one line that begins with the file's
        name, if a file is truncated or malformed, has no pipeline in it, or lacks ranks without
        which nothing can be said.
        """
