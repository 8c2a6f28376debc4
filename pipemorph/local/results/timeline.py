"""Writes ``timeline.json`` and ``timeline.png``: the ops of every stage over time.

The trace has all iterations if they fit into ``MOST_EVENTS``; for a long run it has those around
its adaptations, its first and its last ones, and a note. The picture compares the phases of the run
on one time scale, each by its iteration of median time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median
from typing import Any

from pipemorph.diagnose.formats.rank_traces import TraceIndex
from pipemorph.errors import InputError
from pipemorph.local.results.report import RunRecord
from pipemorph.local.results.result_folder import ResultFolder, write_atomically, write_json
from pipemorph.planning.ir import OpKind
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.protocol import AdaptationRecord, IterationSample
from pipemorph.spec.sections.faults import Fault
from pipemorph.views.explanation.explained_job import SlowPeriod
from pipemorph.views.live_page.page_builder import StageTrace
from pipemorph.views.pictures import Message, Timeline, draw_steps

MOST_EVENTS = 200_000
"""Limit of events: about 25 MB of JSON, which a browser can still open."""
AROUND = 3
"""Iterations before and after each adaptation that are written."""
MOST_PANELS = 6
"""Phases in the picture."""


def write_timeline(folder: ResultFolder, run: RunRecord, note: Callable[[str], None]) -> None:
    """Write both files from the ranks' traces; reports problems through ``note``."""
    index = TraceIndex.from_folder(folder.trace)
    iterations = index.list_iterations()
    if not iterations:
        note("no timeline: the ranks finished no iteration with a trace of its ops")
    chosen = choose_iterations(index, iterations, run.adaptations)
    mesh = run.job.spec.parallelism.mesh
    about = TraceSubject(
        run.job.metadata.name, emulated=run.emulated,
        columns=[mesh.format_column_name(i) for i in range(mesh.columns)], changes=run.adaptations,
    )  # fmt: skip
    write_json(folder.timeline, chrome_trace(index.read_iterations(chosen), about, len(iterations)))
    if not iterations:
        return
    try:
        panels = choose_panels(iterations, run)
        title = f"{about.title}: the iteration of median time of each phase"
        picture = draw_steps(title, build_timelines(index, panels, run)).to_png()
        write_atomically(folder.picture, picture)
        note(f"timeline: {folder.timeline}, {folder.picture}")
    except InputError as error:
        note(f"timeline: {folder.timeline}; no timeline.png: {error}")


def choose_iterations(
    index: TraceIndex, iterations: list[int], adaptations: Sequence[AdaptationRecord]
) -> list[int]:
    """Iterations for a trace of bounded size, ascending."""
    if not iterations:
        return []
    sample = index.read_iterations(iterations[-1:])[iterations[-1]]
    room = max(1, MOST_EVENTS // max(1, sum(len(stage.ops) for stage in sample)))
    if len(iterations) <= room:
        return iterations
    here = set(iterations)
    wanted: dict[int, None] = {}
    for record in adaptations:
        for centre in (record.detectable_at, record.applied_at_iteration):
            if centre is not None:
                wanted |= dict.fromkeys(range(centre - AROUND, centre + AROUND + 1))
    wanted |= dict.fromkeys(iterations[:AROUND])
    wanted |= dict.fromkeys(reversed(iterations))
    return sorted([i for i in wanted if i in here][:room])


@dataclass(frozen=True)
class TraceSubject:
    """Job of a trace. ``columns``: their names."""

    name: str
    emulated: bool
    columns: Sequence[str]
    changes: Sequence[AdaptationRecord]

    @property
    def title(self) -> str:
        note = " (EMULATED: stages wait instead of computing)" if self.emulated else ""
        return f"{self.name}{note}"


def chrome_trace(
    traces: Mapping[int, Sequence[StageTrace]], about: TraceSubject, recorded: int
) -> dict[str, Any]:
    """Trace Event Format: a process per replica, a thread per stage. Times in microseconds
    after the first op."""
    stages = [stage for iteration in traces.values() for stage in iteration]
    zero = min((op.start for stage in stages for op in stage.ops), default=0.0)
    events = _make_name_events(stages, about)
    events += [_make_op_event(op, stage, zero) for stage in stages for op in stage.ops]
    for record in about.changes:
        if (stages_then := traces.get(_get_first_iteration(record))) is not None:
            events.append(_make_plan_event(record, stages_then, zero))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "title": about.title,
            "emulated": about.emulated,
            "first_op_at": zero,
            "iterations": sorted(traces),
            "iterations_recorded": recorded,
        },
    }


def _make_name_events(stages: Iterable[StageTrace], about: TraceSubject) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    replicas = {stage.replica for stage in stages}
    for replica in sorted(replicas):
        column = about.columns[replica]
        name = f"{about.name}{', ' if column else ''}{column}"
        events.append(_make_metadata_event("process_name", replica, 0, {"name": name}))
    for replica, stage in sorted({(stage.replica, stage.stage) for stage in stages}):
        events.append(
            _make_metadata_event("thread_name", replica, stage, {"name": f"stage {stage}"})
        )
        events.append(
            _make_metadata_event("thread_sort_index", replica, stage, {"sort_index": stage})
        )
    return events


def _make_metadata_event(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}


def _make_op_event(op: TimedOp, stage: StageTrace, zero: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": stage.replica,
        "tid": stage.stage,
        "name": f"{op.kind.value}{op.microbatch}",
        "cat": op.kind.value,
        "ts": _to_microseconds(op.start - zero),
        "dur": _to_microseconds(op.end - op.start),
        "args": {"iteration": stage.iteration, "plan_version": stage.plan_version},
    }


def _get_first_iteration(record: AdaptationRecord) -> int:
    """First iteration under this plan; -1 if it never took effect."""
    return -1 if record.applied_at_iteration is None else record.applied_at_iteration


def _make_plan_event(
    record: AdaptationRecord, stages: Sequence[StageTrace], zero: float
) -> dict[str, Any]:
    first = min((op.start for stage in stages for op in stage.ops), default=zero)
    return {
        "ph": "i",
        "s": "g",
        "pid": 0,
        "tid": 0,
        "name": f"plan v{record.plan_version} in force",
        "ts": _to_microseconds(first - zero),
        "args": {"reason": record.reason},
    }


def _to_microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 1)


@dataclass(frozen=True)
class TimelinePanel:
    """Iteration to draw for a phase: iterations with one plan and the same slow links.

    ``label``: links and iterations of the phase; ``delays``: seconds by link, of ``column``.
    """

    iteration: int
    label: str = ""
    delays: Mapping[int, float] = field(default_factory=dict)
    column: int = 0


def choose_panels(traced: Sequence[int], run: RunRecord) -> list[TimelinePanel]:
    """Choose one iteration per phase of a run, of those in ``traced``: the one whose time is
    nearest to the phase's median. At most :data:`MOST_PANELS`, of the longest phases, without the
    first iteration of the run."""
    periods = run.slow_links or _list_fault_periods(run.job.spec.faults)
    column = max(periods, key=lambda period: period.delay).column if periods else 0

    def find_phase(sample: IterationSample) -> tuple[int, tuple[tuple[int, float], ...]]:
        late = [
            (period.link, period.delay)
            for period in periods
            if period.column == column and period.begin <= sample.index
            if period.end is None or sample.index < period.end
        ]
        return sample.plan_version, tuple(sorted(late))

    here, found = set(traced), []
    for (_, late), group in groupby(run.iterations[1:], find_phase):
        phase = list(group)
        usual = median(sample.seconds for sample in phase)
        # A new plan or a delay may begin in the middle of the first one.
        mine = [s for s in (phase[1:] or phase) if s.index in here]
        if not mine:
            continue
        chosen = min(mine, key=lambda sample: abs(sample.seconds - usual))
        links = ", ".join(f"link {link} +{1e3 * delay:.3g} ms" for link, delay in late)
        label = f"{links or 'no link slow'}; iterations {phase[0].index}–{phase[-1].index}"
        panel = TimelinePanel(chosen.index, label, dict(late), column)
        found.append((len(phase), panel))
    longest = sorted(found, key=lambda each: -each[0])[:MOST_PANELS]
    panels = [each for each in found if each in longest]
    return [panel for _, panel in panels] or [TimelinePanel(traced[len(traced) // 2])]


def _list_fault_periods(faults: Sequence[Fault]) -> list[SlowPeriod]:
    """Delays of the fault trace that begin with an iteration."""
    return [
        SlowPeriod(
            link=fault.link, begin=fault.from_iteration, end=fault.to_iteration,
            delay=fault.delay_ms / 1e3, column=fault.replica,
        )
        for fault in faults
        if fault.delay_ms and fault.link is not None and fault.from_iteration is not None
    ]  # fmt: skip


def build_timelines(
    index: TraceIndex, panels: Sequence[TimelinePanel], run: RunRecord
) -> list[Timeline]:
    """The panels' iterations, of one column each; each timeline starts at its first op."""
    traces = index.read_iterations(panel.iteration for panel in panels)
    samples = {sample.index: sample for sample in run.iterations}
    made = []
    for panel in panels:
        rows = [stage for stage in traces[panel.iteration] if stage.replica == panel.column]
        column = run.job.spec.parallelism.mesh.format_column_name(panel.column)
        about = (f"plan v{rows[0].plan_version}", column, panel.label)
        title = f"{', '.join(filter(None, about))}; iteration {panel.iteration}"
        if (sample := samples.get(panel.iteration)) is not None:
            title += f": {1e3 * sample.seconds:.0f} ms, idle {sample.bubble_fraction:.0%}"
        made.append(
            Timeline([s.ops for s in rows], title, reconstruct_messages(rows, panel.delays))
        )
    return made


def reconstruct_messages(
    stages: Sequence[StageTrace], delays: Mapping[int, float]
) -> list[Message]:
    """The messages of one iteration on the links in ``delays`` (seconds).

    If the receiver waited for a message, its arrival is known from the trace; else it is estimated
    from the link's delay, and is not later than the op that used it.
    """
    found = []
    for link, delay in delays.items():
        for sender, receiver, forward in ((link, link + 1, True), (link + 1, link, False)):
            used = {_get_message_key(op): op.start for op in stages[receiver].ops}
            arrived = {_get_message_key(wait): wait.end for wait in stages[receiver].waits}
            for op in stages[sender].ops:
                need = _get_message_key(op)
                if op.kind is OpKind.W or need[0] is not forward or need not in used:
                    continue
                guess = min(op.end + delay, used[need])
                at = max(op.end, arrived.get(need, guess))
                found.append(Message(link, forward, op.microbatch, op.end, at))
    return found


def _get_message_key(op: TimedOp) -> tuple[bool | None, int]:
    """The message an op receives and sends: (forward, microbatch); (None, microbatch) for W."""
    return (None if op.kind is OpKind.W else op.kind is OpKind.F), op.microbatch
