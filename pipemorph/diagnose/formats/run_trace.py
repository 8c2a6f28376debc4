"""Traces of ``pipemorph run``: the ranks' ``ops-rank{R}.jsonl``, and ``timeline.json``."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipemorph.diagnose.formats.chrome_trace import iterate_events, peek_events
from pipemorph.diagnose.formats.rank_traces import TraceIndex
from pipemorph.diagnose.operation import (
    BACKWARD,
    BACKWARD_RECV,
    CHECKPOINT,
    DATA,
    FORWARD,
    FORWARD_RECV,
    GC,
    OPTIMIZER,
    REDUCE_SCATTER,
    WEIGHT,
    Operation,
)
from pipemorph.diagnose.trace_file import TraceFile
from pipemorph.errors import InputError

OPTYPES = {"F": FORWARD, "B": BACKWARD, "BW": BACKWARD, "W": WEIGHT}
"""Op types by the kinds of a plan."""
RECEIVES = {"F": FORWARD_RECV, "B": BACKWARD_RECV, "BW": BACKWARD_RECV}


class RankTraceReader:
    """Reader of the ranks' traces in the folder ``trace`` of a run. An iteration that was repeated
    counts once, and only those that all ranks have are read."""

    format_name = "rank traces of pipemorph run"

    def recognize_file(self, file: TraceFile) -> bool:
        first = file.text.split("\n", 1)[0]
        return first.startswith('{"rank": ') and '"iteration": ' in first and '"ops": ' in first

    def read_operations(self, files: Sequence[TraceFile], notes: list[str]) -> Iterator[Operation]:
        folders = {file.path.parent for file in files}
        if len(folders) > 1:
            raise InputError(f"{files[0].name}: files are of {len(folders)} runs; give one folder")
        (folder,) = folders
        index = TraceIndex.from_folder(folder)
        iterations = index.list_iterations()
        if not iterations:
            raise InputError(f"{files[0].name}: no iteration is in the traces of all ranks")
        try:
            places = _place_stages(index.read_lines(iterations[-1]))
            for iteration in iterations:
                for line in index.read_lines(iteration):
                    yield from _read_line(line, places)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise files[0].truncated_error() from None


def _place_stages(lines: Sequence[dict[str, Any]]) -> dict[tuple[int, int], tuple[int, int]]:
    """Place of each stage of a replica: pipeline rank, and chunk on it."""
    stages: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        stages[line["replica"]][line["rank"]].append(line["stage"])
    places = {}
    for replica, by_rank in stages.items():
        for place, rank in enumerate(sorted(by_rank, key=lambda rank: min(by_rank[rank]))):
            for chunk, stage in enumerate(sorted(by_rank[rank])):
                places[replica, stage] = place, chunk
    return places


def _read_line(
    line: dict[str, Any], places: dict[tuple[int, int], tuple[int, int]]
) -> Iterator[Operation]:
    """Ops of a stage in an iteration, each after its receive."""
    stage, replica, origin = line["stage"], line["replica"], float(line["origin"])
    place, chunk = places[replica, stage]

    def make(optype: str, start: float, end: float, **more: Any) -> Operation:
        return Operation(
            line["iteration"], replica, place, line["rank"], optype, origin + start, end - start,
            -1, **more,
        )  # fmt: skip

    yield from _list_times_before(line.get("times") or {}, make)
    waits: dict[tuple[str, int], tuple[float, float]] = {}
    for kind, microbatch, start, end in line.get("waits", []):
        before = waits.get((kind, microbatch), (start, end))
        waits[kind, microbatch] = min(start, before[0]), max(end, before[1])
    finished = 0.0
    for kind, microbatch, start, end in line["ops"]:
        of = {"model_chunk": chunk, "global_chunk": stage, "microbatch": microbatch}
        source = places.get((replica, stage - 1 if kind == "F" else stage + 1), (place, 0))
        if kind in RECEIVES and source[0] != place:
            waited, arrived = waits.get((kind, microbatch), (start, start))
            yield make(RECEIVES[kind], waited, arrived, **of, posted=origin, waited=origin + waited)
        yield make(OPTYPES[kind], start, end, **of)
        finished = max(finished, end)
    if (reduction := line.get("reduction")) is not None:
        yield make(REDUCE_SCATTER, finished, finished + float(reduction["waited"]))


def _list_times_before(
    times: Mapping[str, Any], make: Callable[[str, float, float], Operation]
) -> Iterator[Operation]:
    """Ops of what a rank did since the step before, and its pauses in the step. ``times``: fields
    of :class:`~pipemorph.protocol.op_traces.RankTimes` that are not zero."""
    end = 0.0
    for optype, names in (
        (GC, ("gc",)),
        (DATA, ("data", "drawn")),
        (CHECKPOINT, ("checkpoint",)),
        (OPTIMIZER, ("optimizer",)),
    ):
        seconds = sum(float(times.get(name, 0.0)) for name in names)
        if seconds > 0:
            yield make(optype, end - seconds, end)
            end -= seconds
    for start, duration in times.get("pauses", ()):
        yield make(GC, start / 1e6, (start + duration) / 1e6)


class TimelineReader:
    """Reader of ``timeline.json``: compute ops, without receives. A stage counts as a worker."""

    format_name = "timelines of pipemorph run"

    def recognize_file(self, file: TraceFile) -> bool:
        for event in peek_events(file):
            if event.get("ph") == "X":
                arguments = event.get("args")
                return isinstance(arguments, dict) and {"iteration", "plan_version"} <= {*arguments}
        return False

    def read_operations(self, files: Sequence[TraceFile], notes: list[str]) -> Iterator[Operation]:
        for file in files:
            for event in iterate_events(file):
                if event.get("ph") != "X":
                    continue
                try:
                    kind = event["cat"]
                    yield Operation(
                        event["args"]["iteration"], event["pid"], event["tid"], -1, OPTYPES[kind],
                        event["ts"] / 1e6, event["dur"] / 1e6, -1, 0, event["tid"],
                        int(event["name"].removeprefix(kind)),
                    )  # fmt: skip
                except (KeyError, TypeError, ValueError, AttributeError):
                    shown = json.dumps(event)[:120]
                    raise InputError(
                        f"{file.name}: event {shown} is no op of a timeline of pipemorph run"
                    ) from None
