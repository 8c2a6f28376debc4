"""Chrome traces of the published study of stragglers: a process per replica, threads per worker.

Names of threads (``PP rank 3, TP rank 0, compute``) are at the end of such a file, so that it is
streamed twice; the first time they are sought in its text.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from pipemorph.diagnose.formats.chrome_trace import CHUNK, iterate_events, peek_events
from pipemorph.diagnose.operation import Operation
from pipemorph.diagnose.operation_table import CODE_OF_OPTYPE
from pipemorph.diagnose.trace_file import TraceFile
from pipemorph.errors import InputError, one_line

_THREAD = re.compile(r"PP rank (\d{1,6}), TP rank (\d{1,6})\b")
_NAME_EVENT = re.compile(
    r'\{[^{}]*(?:\{[^{}]*\}[^{}]*)?"name"\s*:\s*"thread_name"[^{}]*(?:\{[^{}]*\})?[^{}]*\}'
)
LONGEST_NAME = 1 << 10
"""Characters of an event that names a thread, at most."""
_ARGUMENTS = ("step", "seq_id", "model_chunk", "mb_id")


class StudyTraceReader:
    """Reader of the study's Chrome form of an op table."""

    format_name = "Chrome traces of the straggler study"

    def recognize_file(self, file: TraceFile) -> bool:
        for event in peek_events(file):
            if event.get("ph") == "X":
                arguments = event.get("args")
                return isinstance(arguments, dict) and all(n in arguments for n in _ARGUMENTS)
        return False

    def read_operations(self, files: Sequence[TraceFile], notes: list[str]) -> Iterator[Operation]:
        for file in files:
            stages = _read_stages(file)
            count = len(set(stages.values()))
            for event in iterate_events(file):
                if event.get("ph") == "X" and (op := _parse_event(file, event, stages, count)):
                    yield op


def _read_stages(file: TraceFile) -> dict[tuple[Any, Any], int]:
    """Stage by process and thread, of tensor rank 0."""
    stages: dict[tuple[Any, Any], int] = {}
    for event in _find_thread_names(file):
        arguments = event.get("args")
        name = arguments.get("name") if isinstance(arguments, dict) else None
        found = _THREAD.match(name) if isinstance(name, str) else None
        with suppress(TypeError):  # A process or thread that is a list.
            if found and int(found[2]) == 0:
                stages[event.get("pid"), event.get("tid")] = int(found[1])
    if not stages:
        raise InputError(f"{file.name}: names no threads 'PP rank 0, TP rank 0, …': which worker"
                         " ran an op cannot be said")  # fmt: skip
    return stages


def _find_thread_names(file: TraceFile) -> Iterator[dict[str, Any]]:
    """Events that name threads, with one level of objects inside."""
    before = ""
    try:
        with file.open_text() as stream:
            while text := stream.read(CHUNK):
                text = before + text
                if '"thread_name"' in text:
                    for found in _NAME_EVENT.finditer(text):
                        with suppress(ValueError):
                            yield json.loads(found[0])
                # The end of one read and the begin of the next may share an event.
                before = text[-LONGEST_NAME:]
    except (OSError, EOFError, zlib.error):
        raise file.truncated_error() from None
    except UnicodeDecodeError:
        raise InputError(f"{file.name}: is not UTF-8 text; expected a Chrome trace") from None


def _parse_event(
    file: TraceFile, event: dict[str, Any], stages: dict[tuple[Any, Any], int], count: int
) -> Operation | None:
    """Op of an event; None for another tensor rank than 0."""
    try:
        replica = event["pid"]
        stage = stages.get((replica, event["tid"]))
        if stage is None:
            return None
        arguments = event["args"]
        chunk = int(arguments["model_chunk"])
        optype = str(event["name"])
        is_compute = chunk >= 0 and optype.endswith("-compute")
        return Operation(
            int(arguments["step"]), int(replica), stage, -1, optype,
            event["ts"] / 1e6, event["dur"] / 1e6, int(arguments["seq_id"]), chunk,
            chunk * count + stage if is_compute else -1,
            int(arguments["mb_id"]) if optype in CODE_OF_OPTYPE else -1,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, OverflowError):
        raise InputError(
            f"{file.name}: event {one_line(repr(event), 120)} lacks a value; expected ts, dur and"
            f" pid, and {', '.join(_ARGUMENTS)} in args"
        ) from None
