"""Registry of the readers, and the recording that they make of a command's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipemorph.diagnose.formats.op_table import (
    CsvTableReader,
    JsonLinesReader,
    ParquetTableReader,
)
from pipemorph.diagnose.formats.run_trace import RankTraceReader, TimelineReader
from pipemorph.diagnose.formats.study_trace import StudyTraceReader
from pipemorph.diagnose.formats.torch_profiler.reader import TorchProfilerReader
from pipemorph.diagnose.operation_table import OperationTable
from pipemorph.diagnose.trace_file import OUTPUT_NAME, TraceFile, TraceReader
from pipemorph.errors import InputError, one_line

READERS: tuple[TraceReader, ...] = (
    ParquetTableReader(),
    CsvTableReader(),
    JsonLinesReader(),
    StudyTraceReader(),
    TimelineReader(),
    RankTraceReader(),
    TorchProfilerReader(),
)
"""Readers in the order in which they are tried."""
MOST_FILES = 65_536
_SUFFIXES = (".json", ".json.gz", ".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".parquet")


@dataclass(frozen=True)
class Recording:
    """Ops of a job. ``notes``: what cannot be said from this trace, and what was omitted."""

    table: OperationTable
    format_name: str
    notes: list[str]


def load_recording(paths: Sequence[Path]) -> Recording:
    """Read all ops of ``paths``, files of one format or folders of such.

    Raises :class:`InputError`, one line.
    """
    files = [TraceFile.open_file(path) for path in _list_files(paths)]
    readers = {_find_reader(file).format_name: _find_reader(file) for file in files}
    if len(readers) > 1:
        raise InputError(
            f"{files[0].name} and others are {' and '.join(readers)}; give files of one format"
        )
    (reader,) = readers.values()
    notes: list[str] = []
    table = OperationTable()
    names = ", ".join(file.name for file in files[:2]) + (", …" if len(files) > 2 else "")
    for op in reader.read_operations(files, notes):
        try:
            table.append_operation(op)
        except InputError as error:
            raise InputError(f"{names}: op {len(table)}: {error}") from None
    if not len(table):
        raise InputError(f"{names}: has no ops; expected the steps of a pipeline job")
    if table.every > 1:
        notes.append(f"The recording is long: one step in {table.every} is analysed.")
    return Recording(table, reader.format_name, notes)


def _list_files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        try:
            inside = _list_run_traces(path) or sorted(
                each
                for each in path.iterdir()
                if each.name.endswith(_SUFFIXES)
                and not OUTPUT_NAME.fullmatch(each.name)
                and each.is_file()
            )
        except OSError as error:
            raise InputError(f"{one_line(str(path))}: {error.strerror}") from None
        if not inside:
            names = ", ".join(_SUFFIXES)
            raise InputError(f"{one_line(str(path))}: has no trace; expected files like {names}")
        found += inside
    if len(found) > MOST_FILES:
        raise InputError(f"{len(found)} files; expected at most {MOST_FILES}")
    return list(dict.fromkeys(found))


def _list_run_traces(folder: Path) -> list[Path]:
    """Traces in the folder of a run: those of its ranks, otherwise its timeline; empty for another
    folder."""
    if traces := sorted(folder.glob("trace/ops-rank*.jsonl")):
        return traces
    if not (folder / "report.json").is_file():
        return []
    timeline = folder / "timeline.json"
    if not timeline.is_file():
        raise InputError(
            f"{one_line(str(folder))}: has the report of a job, but no traces of its ranks in"
            " trace/; ranks write them if PIPEMORPH_TRACE_DIR names that folder"
        )
    return [timeline]


def _find_reader(file: TraceFile) -> TraceReader:
    for reader in READERS:
        if reader.recognize_file(file):
            return reader
    formats = ", ".join(reader.format_name for reader in READERS)
    raise InputError(f"{file.name}: is no trace that can be read; expected {formats}")
