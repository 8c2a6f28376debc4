"""Trace of one rank by ``torch.profiler``: the events that say something of a pipeline."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from pipemorph.diagnose.formats.chrome_trace import iterate_events
from pipemorph.diagnose.formats.torch_profiler.row_columns import RowColumns
from pipemorph.diagnose.trace_file import TraceFile
from pipemorph.errors import InputError, one_line


class EventKind(IntEnum):
    """Class of an event, by its name."""

    OPERATOR = 0
    """An operator of torch that belongs to no other class."""
    BACKWARD = 1
    """Evaluation of a node of the autograd graph."""
    SEND = 2
    RECEIVE = 3
    REDUCTION = 4
    """A collective operation, such as an all-reduce."""
    OPTIMIZER = 5


class TraceEvent(NamedTuple):
    """An event of the processor. ``begin``, ``end``: seconds since :attr:`RankTrace.base`.
    ``sequence``: number of the node of the autograd graph that it makes or evaluates, −1 if none.
    ``peer``: rank of the other end in its process group, −1 if unknown."""

    begin: float
    end: float
    kind: EventKind
    name: str
    thread: int | str
    sequence: int = -1
    peer: int = -1


class Span(NamedTuple):
    """A named interval. ``begin``, ``end``: seconds since :attr:`RankTrace.base`."""

    begin: float
    end: float
    name: str


class Kernel(NamedTuple):
    """A kernel of a GPU. ``launch``: second at which the processor launched it."""

    begin: float
    end: float
    launch: float
    name: str


class ProcessGroup(NamedTuple):
    """A process group of the rank. ``ranks``: global ranks of its members."""

    description: str
    ranks: tuple[int, ...]


def _make_events() -> RowColumns[TraceEvent]:
    return RowColumns(TraceEvent, "ddOOOqq")


def _make_kernels() -> RowColumns[Kernel]:
    return RowColumns(Kernel, "dddO")


@dataclass
class RankTrace:
    """Events of one rank, in order of their begins. ``base``: nanoseconds of the wall clock at
    second 0 of the events."""

    name: str
    """Name of the file."""
    rank: int = 0
    world_size: int = 1
    groups: tuple[ProcessGroup, ...] = ()
    base: int = 0
    events: RowColumns[TraceEvent] = field(default_factory=_make_events)
    labels: list[Span] = field(default_factory=list)
    """Ranges that torch's schedules annotate: ``PP:0F1``, ``Forward 3``."""
    steps: list[Span] = field(default_factory=list)
    """Ranges ``ProfilerStep#N``."""
    transfers: dict[str, list[Span]] = field(default_factory=dict)
    """Ranges from the begin of a message or collective to the end of the wait for it, by names:
    ``send``, ``recv``, ``coalesced``, and those of collectives."""
    pauses: list[Span] = field(default_factory=list)
    """Garbage collections and waits for data."""
    has_joint_ops: bool = False
    """Whether its schedule runs a forward and a backward under one label, as DualPipeV does."""
    kernels: RowColumns[Kernel] = field(default_factory=_make_kernels)
    """In order of their launches."""

    @property
    def has_messages(self) -> bool:
        """True if the rank sends to or receives from single ranks."""
        return any(event.kind in (EventKind.SEND, EventKind.RECEIVE) for event in self.events)

    @property
    def begin(self) -> float:
        """Second of the first event; 0 without any."""
        return next((event.begin for event in self.events), 0.0)

    @property
    def end(self) -> float:
        """Second at which the last event ends; 0 without any."""
        return max((event.end for event in self.events), default=0.0)


LABEL = re.compile(r"PP:\d+[A-Z_]+\d*$|(?:Forward|Backward) \d+$")
JOINT_LABEL = "OVERLAP_F_B"
PAUSE = re.compile(r"enumerate\(DataLoader\)#|(?:gc|garbage)[\s._-]*collect", re.IGNORECASE)
TRANSFER = re.compile(r"(gloo|nccl|mpi|ucc|xccl|hccl):(\w+)")
BACKWARD = "autograd::engine::evaluate_function"
_RECEIVES = ("c10d::recv_", "c10d::recv_any_source_")
_IGNORED_COLLECTIVES = ("c10d::barrier", "c10d::monitored_barrier_")
LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime")


def classify_event(name: str) -> EventKind:
    """Class of an operator or annotation, by its name."""
    if name.startswith(BACKWARD):
        return EventKind.BACKWARD
    if name.startswith("c10d::"):
        if name == "c10d::send":
            return EventKind.SEND
        return EventKind.RECEIVE if name in _RECEIVES else EventKind.REDUCTION
    return EventKind.OPTIMIZER if name.startswith("Optimizer.step") else EventKind.OPERATOR


def may_matter(text: str) -> bool:
    """False for the text of an event that says nothing of a pipeline, as most do: calls of Python,
    flows, operators that make no node of the graph or are parts of a backward."""
    if '"cpu_op"' in text:
        if '"Sequence number"' not in text:
            return "c10d::" in text or BACKWARD in text
        return '"Fwd thread id": 0' in text or '"Fwd thread id"' not in text or BACKWARD in text
    return '"python_function"' not in text and '"ac2g"' not in text


def read_rank_trace(file: TraceFile) -> RankTrace:
    """Read the trace of a rank. Raises :class:`InputError` if it is damaged or says no rank."""
    fields: dict[str, Any] = {}
    trace = RankTrace(file.name)
    _sort_events(trace, iterate_events(file, fields, may_matter))
    trace.base = _read_integer(fields.get("baseTimeNanoseconds"), 0)
    trace.rank, trace.world_size, trace.groups = read_distributed_info(file.name, fields)
    return trace


def _sort_events(trace: RankTrace, events: Iterable[Mapping[str, Any]]) -> None:
    """Add the events that say something of a pipeline, in order."""
    launches: dict[int, float] = {}
    # Of a kernel whose launch is not known yet, the number of that is in its place.
    kernels = _make_kernels()
    for event in events:
        if event.get("ph") != "X":
            continue
        category, name = event.get("cat"), event.get("name")
        try:
            begin = float(event["ts"]) / 1e6
            end = begin + float(event["dur"]) / 1e6
        except (KeyError, TypeError, ValueError):
            continue
        if not isinstance(name, str):
            continue
        arguments = event.get("args")
        if not isinstance(arguments, Mapping):
            arguments = {}
        name = sys.intern(name)
        if category in ("cpu_op", "Operator"):
            _add_operator(trace, Span(begin, end, name), event.get("tid", 0), arguments)
        elif category == "user_annotation":
            _add_annotation(trace, Span(begin, end, name), event.get("tid", 0))
        elif category in LAUNCHES and "correlation" in arguments:
            launches[_read_integer(arguments["correlation"], -1)] = begin
        elif category in ("kernel", "Kernel") and "correlation" in arguments:
            number = _read_integer(arguments["correlation"], -1)
            kernels.append(Kernel(begin, end, number, name))
    for kernel in kernels:
        if (launch := launches.get(int(kernel.launch))) is not None:
            trace.kernels.append(kernel._replace(launch=launch))
    trace.kernels.sort_rows(2)
    trace.events.sort_rows(1, descending=True)
    trace.events.sort_rows(0)
    for spans in (trace.labels, trace.steps, trace.pauses, *trace.transfers.values()):
        spans.sort()


def _add_operator(
    trace: RankTrace, span: Span, thread: int | str, arguments: Mapping[str, Any]
) -> None:
    begin, end, name = span
    if name in _IGNORED_COLLECTIVES:
        return
    kind = classify_event(name)
    sequence = _read_integer(arguments.get("Sequence number"), -1)
    # Most operators make no node of the graph, or are parts of a backward, which has its own event.
    is_part = sequence < 0 or _read_integer(arguments.get("Fwd thread id"), 0) > 0
    if kind is EventKind.OPERATOR and is_part:
        return
    peer = -1
    if kind in (EventKind.SEND, EventKind.RECEIVE):
        # The tensors, the group, the peer and the tag; only there with record_shapes=True.
        inputs = arguments.get("Concrete Inputs")
        if isinstance(inputs, list) and len(inputs) > 2:
            peer = _read_integer(inputs[2], -1)
    trace.events.append(TraceEvent(begin, end, kind, name, thread, sequence, peer))


def _add_annotation(trace: RankTrace, span: Span, thread: int | str) -> None:
    begin, end, name = span
    if LABEL.match(name):
        trace.labels.append(span)
    elif name.endswith(JOINT_LABEL):
        trace.has_joint_ops = True
    elif name.startswith("ProfilerStep#"):
        trace.steps.append(span)
    elif name.startswith("Optimizer.step"):
        trace.events.append(TraceEvent(begin, end, EventKind.OPTIMIZER, name, thread))
    elif match := TRANSFER.match(name):
        trace.transfers.setdefault(match[2], []).append(span)
    elif PAUSE.search(name):
        trace.pauses.append(span)


def read_distributed_info(
    name: str, header: Mapping[str, Any]
) -> tuple[int, int, tuple[ProcessGroup, ...]]:
    """Rank, world size and process groups of a trace's header."""
    info = header.get("distributedInfo")
    if not isinstance(info, Mapping):
        raise InputError(
            f"{name}: has no distributedInfo, so it is not of a rank of a distributed job; "
            "expected traces of torch.profiler by ranks of a pipeline"
        )
    rank, size = _read_integer(info.get("rank"), -1), _read_integer(info.get("world_size"), -1)
    if not 0 <= rank < size:
        raise InputError(
            f"{name}: distributedInfo has rank {one_line(str(info.get('rank')), 20)} of "
            f"world_size {one_line(str(info.get('world_size')), 20)}; expected a rank below it"
        )
    groups = []
    listed = info.get("pg_config")
    for group in listed if isinstance(listed, list) else []:
        members = group.get("ranks") if isinstance(group, Mapping) else None
        if isinstance(members, list) and all(isinstance(member, int) for member in members):
            groups.append(ProcessGroup(str(group.get("pg_desc", "")), tuple(members)))
    return rank, size, tuple(groups)


def _read_integer(value: Any, default: int) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return default
    return number if abs(number) < 1 << 63 else default


def merge_traces(first: RankTrace, second: RankTrace) -> RankTrace:
    """Join two traces of a rank. Raises :class:`InputError` if they overlap in time."""
    if first.base + 1e9 * first.begin > second.base + 1e9 * second.begin:
        first, second = second, first
    shift = (second.base - first.base) / 1e9
    if first.end > second.begin + shift:
        raise InputError(
            f"{second.name}: is of rank {second.rank} and of the same time as {first.name}; give "
            "one of them"
        )

    def move(span: Span) -> Span:
        return Span(span.begin + shift, span.end + shift, span.name)

    for event in second.events:
        first.events.append(event._replace(begin=event.begin + shift, end=event.end + shift))
    first.labels += map(move, second.labels)
    first.steps += map(move, second.steps)
    first.pauses += map(move, second.pauses)
    for name, spans in second.transfers.items():
        first.transfers.setdefault(name, []).extend(map(move, spans))
    for begin, end, launch, name in second.kernels:
        first.kernels.append(Kernel(begin + shift, end + shift, launch + shift, name))
    return first
