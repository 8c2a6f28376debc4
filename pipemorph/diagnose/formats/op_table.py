"""Op tables, our open format: CSV, JSON lines or Parquet. See ``docs/reference/op-table.md``."""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipemorph.diagnose.operation import Operation
from pipemorph.diagnose.trace_file import TraceFile
from pipemorph.errors import InputError, one_line
from pipemorph.extras import missing_package_error

REQUIRED = ("step", "dp_rank", "stage", "optype", "start_ts", "duration")
WHOLE = {"step": None, "dp_rank": None, "stage": None, "rank": -1, "seq_id": -1, "mc": -1,
         "gmc": -1, "mb_id": -1, "bytes": -1}  # fmt: skip
"""Columns of whole numbers, with the value of a column that is absent; None: it must be there."""
SECONDS = {"start_ts": None, "duration": None, "posted": -1, "waited": -1, "completed": -1}
"""Columns of seconds; -1: none if absent."""
TEXTS = ("optype", "schedule")
TIMES = ("posted", "waited", "completed")
LONGEST_LINE = 1 << 20
PARQUET_MAGIC = b"PAR1"


class CsvTableReader:
    """Reader of op tables as CSV with a line of column names."""

    format_name = "op tables (CSV)"

    def recognize_file(self, file: TraceFile) -> bool:
        lines = file.text.splitlines()
        first = lines[0] if lines else ""
        names = {name.strip() for name in first.split(",")}
        return "optype" in names or len(names & {*WHOLE, *SECONDS}) > 2

    def read_operations(self, files: Sequence[TraceFile], notes: list[str]) -> Iterator[Operation]:
        for file in files:
            rows = csv.reader(_read_lines(file))
            names = [name.strip() for name in next(rows)]
            _check_columns(file, names)
            try:
                for row in rows:
                    if not row:
                        continue
                    if len(row) != len(names):
                        raise file.malformed_error(
                            rows.line_num, f"has {len(row)} values; expected {len(names)}"
                        )
                    yield _parse_row(file, rows.line_num, dict(zip(names, row, strict=True)))
            except csv.Error as error:
                raise file.malformed_error(rows.line_num, f"is not CSV ({error})") from None


class JsonLinesReader:
    """Reader of op tables as JSON lines: an object per op."""

    format_name = "op tables (JSON lines)"

    def recognize_file(self, file: TraceFile) -> bool:
        first = file.text.lstrip().split("\n", 1)[0]
        try:
            row = json.loads(first)
        except (ValueError, RecursionError):
            return False
        return isinstance(row, dict) and "optype" in row

    def read_operations(self, files: Sequence[TraceFile], notes: list[str]) -> Iterator[Operation]:
        for file in files:
            for number, line in enumerate(_read_lines(file), 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    if not line.endswith("\n"):
                        raise file.truncated_error() from None
                    raise file.malformed_error(number, "is not JSON") from None
                if not isinstance(row, dict):
                    raise file.malformed_error(number, "is not an object")
                _check_columns(file, row, number)
                yield _parse_row(file, number, row)


class ParquetTableReader:
    """Reader of op tables as Parquet, with pyarrow."""

    format_name = "op tables (Parquet)"

    def recognize_file(self, file: TraceFile) -> bool:
        return file.head.startswith(PARQUET_MAGIC)

    def read_operations(self, files: Sequence[TraceFile], notes: list[str]) -> Iterator[Operation]:
        try:
            import pyarrow as arrow  # type: ignore[import-untyped, unused-ignore]
            from pyarrow import parquet
        except ImportError:
            what = f"{files[0].name}: Parquet needs pyarrow"
            raise missing_package_error(what, "parquet") from None
        for file in files:
            try:
                table = parquet.ParquetFile(file.path)
                names = table.schema_arrow.names
                _check_columns(file, names)
                columns = [name for name in names if name in {*WHOLE, *SECONDS, *TEXTS}]
                number = 0
                for batch in table.iter_batches(columns=columns, batch_size=8192):
                    for row in batch.to_pylist():
                        number += 1
                        yield _parse_row(file, number, row)
            except (arrow.ArrowException, OSError) as error:
                raise InputError(
                    f"{file.name}: cannot be read as Parquet: {one_line(str(error))}"
                ) from None


def _read_lines(file: TraceFile) -> Iterator[str]:
    """Lines of a text. Raises :class:`InputError` if the file is damaged."""
    number = 0
    with file.open_text() as stream:
        while True:
            number += 1
            try:
                line = stream.readline(LONGEST_LINE)
            except UnicodeDecodeError:
                raise file.malformed_error(number, "is not UTF-8 text") from None
            except (OSError, EOFError, zlib.error):
                raise file.truncated_error() from None
            if not line:
                return
            if len(line) >= LONGEST_LINE:
                raise file.malformed_error(number, f"is longer than {LONGEST_LINE} characters")
            yield line


def _check_columns(file: TraceFile, names: Iterable[str], line: int = 1) -> None:
    here = set(names)
    missing = [name for name in REQUIRED if name not in here]
    if missing:
        raise file.malformed_error(
            line, f"has no {' and no '.join(missing)}; expected the columns of an op table"
        )


def _parse_row(file: TraceFile, line: int, row: Mapping[str, Any]) -> Operation:
    found: dict[str, Any] = {}
    for columns, kind in ((WHOLE, _parse_whole), (SECONDS, float)):
        for name, absent in columns.items():
            value = row.get(name)
            if value is None or value == "":
                if absent is None:
                    raise file.malformed_error(line, f"has no {name}")
                found[name] = absent
                continue
            try:
                if isinstance(value, bool):
                    raise ValueError
                found[name] = kind(value)
            except (ValueError, TypeError, OverflowError):
                shown = one_line(repr(value), 60)
                raise file.malformed_error(line, f"{name} is {shown}; expected a number") from None
    times = [None if found[name] == -1 else found[name] for name in TIMES]
    return Operation(
        found["step"], found["dp_rank"], found["stage"], found["rank"], str(row["optype"]).strip(),
        found["start_ts"], found["duration"], found["seq_id"], found["mc"], found["gmc"],
        found["mb_id"], times[0], times[1], times[2], str(row.get("schedule") or ""),
        found["bytes"],
    )  # fmt: skip


def _parse_whole(value: Any) -> int:
    """Whole number; pandas writes those of a column with gaps as 3.0."""
    return value if isinstance(value, int) else int(float(value))
