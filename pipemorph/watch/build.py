"""Makes the document of a running job from what its host knows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import median

from pipemorph.api.mesh import MeshShape
from pipemorph.api.spec import PipeMorphJob
from pipemorph.api.status import JobStatus, TrainingStatus
from pipemorph.control.decide.forecast import Forecast, Outlook
from pipemorph.control.decide.situation import Situation
from pipemorph.errors import InputError, one_line
from pipemorph.explain.cluster_job import ClusterJob, read_job
from pipemorph.explain.of_status import NEWEST, story_of
from pipemorph.explain.story import link_name, plural
from pipemorph.planning import Plan
from pipemorph.planning.analysis.bubbles import Cause
from pipemorph.planning.ir import OpKind
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.watch.document import LETTERS, Picture, Recovered, Row, Steps, WatchView
from pipemorph.watch.lanes import LaneLog
from pipemorph.wire import AdaptationRecord, Health, IterationSample, LinkState

MOST_STEPS = 4000
"""Newest iterations whose times are shown."""
MOST_AVAILABLE = 512
SEEN = 1 / 2000
"""Part of a picture's width from which an idle time can be seen."""
ENTERS = {OpKind.F: 1, OpKind.W: -1, OpKind.BW: -1}
"""Microbatches in flight more after an op than before it."""

Ran = Sequence[Sequence[tuple[int, TimedOp]]]
"""Per rank, ``(stage, op)`` in run order."""
Idle = list[tuple[Cause, float, float]]
"""``(cause, start, end)`` of the idle times of a rank."""


@dataclass(frozen=True)
class StageTrace:
    """The ops of one rank in one iteration; times are wall-clock seconds. ``replica``: its column;
    ``waits``: idle times before ops, waiting for the op's input message."""

    rank: int
    stage: int
    replica: int
    iteration: int
    plan_version: int
    ops: tuple[TimedOp, ...]
    waits: tuple[TimedOp, ...] = ()


@dataclass(frozen=True)
class Watched:
    """What a host knows of a job. ``now``: wall clock.

    ``samples``: finished iterations, the newest of them last; ``changes``: of plan, oldest first;
    ``available``: iterations whose ops are there; ``outlook``: None before op times are known.
    """

    job: PipeMorphJob
    now: float
    status: JobStatus
    samples: Sequence[IterationSample] = ()
    changes: Sequence[AdaptationRecord] = ()
    lanes: LaneLog = field(default_factory=LaneLog)
    recoveries: Sequence[Recovered] = ()
    available: Sequence[int] = ()
    kept: str = ""
    """Why the last decision kept the plan; empty if it did not."""
    outlook: Outlook | None = None
    gpus: int = 0
    """Of all ranks together; 0 if it is not known that they have any."""
    no_ops: str = ""
    """Why there are no ops of any iteration; empty if there are, or that is not known."""
    result: str = "report.json of its folder"
    """Where the job's result is to be found when it is over."""


def watch_view(
    known: Watched, traces: Sequence[StageTrace], *, column: int, number: int = 0, live: bool = True
) -> WatchView:
    """The document. ``traces``: the ops of all ranks in the iteration to show, empty for none;
    ``column``: whose pipeline to show."""
    spec, mesh = known.job.spec, known.job.spec.parallelism.mesh
    times = [sample.seconds for sample in known.samples]
    measured = alternative = None
    why = known.no_ops or "no iteration with a trace of its ops has finished"
    mine = [trace for trace in traces if trace.replica == column]
    if mine:
        measured = _measured(mine, known, mesh)
        alternative, why = _alternative(measured, known, column, mesh)
    newest = known.samples[-MOST_STEPS:]
    meta = known.job.metadata
    training = known.status.training or TrainingStatus()
    explained = as_report(known)
    return WatchView(
        number=number,
        live=live,
        at=known.now,
        job=meta.name,
        namespace=meta.namespace,
        emulated=spec.emulation is not None,
        described=f"{mesh}, {plural(spec.schedule.microbatches, 'microbatch', 'microbatches')}",
        status=known.status.model_copy(update={"training": training}),
        result=known.result,
        story=story_of(explained).rows(),
        done=known.samples[-1].index + 1 if known.samples else 0,
        wanted=spec.trainer.iterations,
        seconds=median(times[-NEWEST:]) if times else None,
        columns=[mesh.column_name(i) for i in range(mesh.columns)],
        column=column,
        available=list(known.available[-MOST_AVAILABLE:]),
        measured=measured,
        alternative=alternative,
        no_alternative="" if alternative else why,
        activation_memory=spec.schedule.activation_memory,
        links=known.lanes.lanes(link_name(i) for i in range(mesh.stages - 1)),
        adaptations=list(known.changes),
        recoveries=list(known.recoveries),
        ranks=mesh.world_size,
        gpus=explained.gpus,
        steps=Steps(
            index=[sample.index for sample in newest],
            seconds=[round(sample.seconds, 6) for sample in newest],
        ),
    )


def worst_column(known: Watched) -> int:
    """The column to look at first: that of the slowest link; 0 if all are well."""
    training = known.status.training
    return training.slow_links[0].replica if training and training.slow_links else 0


def as_report(known: Watched) -> ClusterJob:
    """The job as its report would have it now."""
    content = known.job.model_dump(mode="json", by_alias=True, exclude_none=True) | {
        "status": known.status,
        "iterations": known.samples,
        "adaptations": known.changes,
        "links": {"slow": known.lanes.slow_times()},
        "kept": known.kept,
        "gpus": known.gpus,
    }
    return read_job(content)


# --- pictures ---------------------------------------------------------------------------------


def _measured(traces: Sequence[StageTrace], known: Watched, mesh: MeshShape) -> Picture:
    ranks: dict[int, list[tuple[int, TimedOp]]] = defaultdict(list)
    for trace in traces:
        ranks[trace.rank] += ((trace.stage, op) for op in trace.ops)
    # In the order of their stages, as limits and peaks are, whatever places ranks have changed to.
    numbers = sorted(ranks, key=lambda rank: min(stage for stage, _ in ranks[rank]))
    ran = [sorted(ranks[rank], key=lambda each: each[1].start) for rank in numbers]
    iteration = traces[0].iteration
    seconds = next((s.seconds for s in reversed(known.samples) if s.index == iteration), None)
    plan = _plan(known, traces[0].plan_version)
    return picture(
        ran, iteration=iteration, plan_version=traces[0].plan_version, seconds=seconds,
        room=Room.of(plan, known, mesh), numbers=numbers, measured=True,
    )  # fmt: skip


def _alternative(
    measured: Picture, known: Watched, column: int, mesh: MeshShape
) -> tuple[Picture | None, str]:
    """The iteration under the plan of the start, and why there is none."""
    if _as_started(measured.plan_version, known.changes):
        return None, "the plan of the start is in force in this iteration"
    outlook = known.outlook
    if outlook is None:
        return None, "op times are not known yet"
    situation, start = outlook.situation, outlook.start
    if measured.iteration != known.available[-1]:
        situation = _with_links(situation, known.lanes.at(measured.iteration))
    forecast = Forecast(outlook.rules, situation)
    try:
        made = picture(
            forecast.simulated(start), iteration=measured.iteration, plan_version=0, seconds=None,
            room=Room.of(start, known, mesh),
            numbers=[mesh.rank(mesh.placed.index(i), column) for i in range(mesh.sizes["pp"])],
        )  # fmt: skip
        if measured.seconds is None or outlook.running.version != measured.plan_version:
            return made, ""
        # Errors of the model are in both predictions, and mostly cancel in the difference.
        more = forecast.of(start).seconds - forecast.of(outlook.running).seconds
    except InputError as error:
        return None, f"it cannot be simulated: {one_line(str(error))}"
    return made.model_copy(update={"seconds": measured.seconds + more}), ""


def _with_links(situation: Situation, links: Sequence[LinkState]) -> Situation:
    """The situation with the links as they were at another time."""
    if len(links) != len(situation.delays):
        return situation
    slow = tuple(link.health is Health.SLOW for link in links)
    well = situation.well().wire_times
    return replace(
        situation,
        wire_times=tuple(
            link.wire_time if link.health is not Health.UNKNOWN else usual
            for link, usual in zip(links, well, strict=True)
        ),
        delays=tuple(link.delay for link in links),
        slow=slow,
        transfers=tuple(link.transfer for link in links),
        unknown=tuple(link.health is Health.UNKNOWN for link in links),
        failed_over=tuple(link.failed_over for link in links)
        if any(link.failed_over for link in links)
        else (),
        recent=(),
    )


def _as_started(version: int, changes: Sequence[AdaptationRecord]) -> bool:
    """Whether this version is the plan of the start: that one, or a return to it."""
    record = _record(changes, version)
    return not version or (record is not None and record.kind == "return")


def _record(changes: Sequence[AdaptationRecord], version: int) -> AdaptationRecord | None:
    return next((each for each in reversed(changes) if each.plan_version == version), None)


def _plan(known: Watched, version: int) -> Plan | None:
    """The plan of that version; None if it is not known."""
    outlook = known.outlook
    if outlook is None:
        return None
    return next((p for p in (outlook.running, outlook.start) if p.version == version), None)


@dataclass(frozen=True)
class Room:
    """What a plan allows each row, and what a microbatch takes. Whatever is empty is not known."""

    limits: Sequence[int | None] = ()
    """Of microbatches in flight, by row; None: no limit."""
    devices: Sequence[int | None] = ()
    """Most of them with their activations on the device, by row; None: all."""
    sizes: Sequence[int | None] = ()
    """Bytes of the activations of one microbatch, by stage."""

    @staticmethod
    def of(plan: Plan | None, known: Watched, mesh: MeshShape) -> Room:
        if plan is None or known.outlook is None:
            return Room()
        sizes = [stage.activation_bytes for stage in known.outlook.situation.stages]
        if any(plan.recompute):
            sizes = []  # What is dropped keeps its inputs, whose size is not told here.
        if mesh.stages_per_rank == 1:
            return Room(plan.in_flight_limits, plan.device_limits, sizes)
        # Limits are of each stage, rows of several together.
        return Room() if any(plan.device_limits) else Room(sizes=sizes)

    def activations(
        self, row: int, ran: Sequence[tuple[int, TimedOp]], in_flight: int
    ) -> int | None:
        """Most bytes on the device of the microbatches in flight; None if that is not known."""
        stages = {stage for stage, _ in ran}
        sizes = {i: self.sizes[i] or 0 for i in stages if i < len(self.sizes)}
        if not stages or not all(sizes.get(i) for i in stages):
            return None
        if len(stages) == 1:
            device = self.devices[row] if row < len(self.devices) else None
            here = in_flight if device is None else min(in_flight, device)
            return here * sizes[stages.pop()]
        held = accumulate(ENTERS.get(op.kind, 0) * sizes[stage] for stage, op in ran)
        return max(held)


def picture(
    ran: Ran,
    *,
    iteration: int,
    plan_version: int,
    seconds: float | None,
    numbers: Sequence[int],
    room: Room = Room(),
    measured: bool = False,
) -> Picture:
    """A picture of the ops of an iteration. ``numbers``: of the ranks, by row."""
    begin, end = bounds(ran)
    span = max(end - begin, 1e-9)
    several = any(row and row[0][0] != stage for row in ran for stage, _ in row)
    causes: dict[str, float] = defaultdict(float)
    rows = []
    for i, (row, idle) in enumerate(zip(ran, idle_times(ran), strict=True)):
        for cause, start, stop in idle:
            causes[cause.value] += (stop - start) / span / len(ran)
        own = sorted({stage for stage, _ in row})
        stages = ", ".join(map(str, own))
        name = f"rank {numbers[i]} ({stages})" if several else f"stage {stages or i}"
        starts = [_us(op.start - begin) for _, op in row]
        ends = [_us(op.end - begin) for _, op in row]
        in_flight = max(accumulate(ENTERS.get(op.kind, 0) for _, op in row), default=0)
        rows.append(
            Row(
                name=name,
                kinds="".join([LETTERS[op.kind] for _, op in row]),
                microbatches=[op.microbatch for _, op in row],
                stages=[stage for stage, _ in row] if several else [],
                gaps=[start - end for start, end in zip(starts, [0, *ends], strict=False)],
                durations=[end - start for start, end in zip(starts, ends, strict=True)],
                idle=[
                    (cause.value, _us(a - begin), _us(b - begin))
                    for cause, a, b in idle
                    if b - a >= SEEN * span
                ],
                in_flight=in_flight,
                limit=room.limits[i] if i < len(room.limits) else None,
                activations=room.activations(i, row, in_flight),
            )
        )
    return Picture(
        iteration=iteration,
        plan_version=plan_version,
        at=begin if measured else None,
        span_us=_us(span),
        seconds=seconds,
        bubble=min(1.0, sum(causes.values())),
        causes=dict(causes),
        rows=rows,
    )


def _us(seconds: float) -> int:
    return round(1e6 * seconds)


# --- idle times -------------------------------------------------------------------------------
#
# The cause of every idle time of an iteration, from nothing but its ops and their times.
# `pipemorph.planning.analysis.bubbles` knows more of a simulation. Here a measured iteration and a
# simulated one are to be compared, so both are judged by what both have.


def bounds(ran: Ran) -> tuple[float, float]:
    """The start of the first op and the end of the last one."""
    begin = min((row[0][1].start for row in ran if row), default=0.0)
    return begin, max((row[-1][1].end for row in ran if row), default=0.0)


def idle_times(ran: Ran) -> list[Idle]:
    """Per rank, ``(cause, start, end)`` in order of time.

    Before the first op it is *fill*, after the last one *drain*. In between the rank waits for the
    input of its next op: *dependency* until that was computed, *link* from then on. *order* where
    the op needed nothing of another rank: then the host, or a send before it, took the time.
    """
    begin, end = bounds(ran)
    rank_of = {stage: rank for rank, row in enumerate(ran) for stage, _ in row}
    forward: dict[int, dict[int, float]] = {stage: {} for stage in rank_of}
    backward: dict[int, dict[int, float]] = {stage: {} for stage in rank_of}
    for row in ran:
        for stage, op in row:
            if op.kind is OpKind.F:
                forward[stage][op.microbatch] = op.end
            elif op.kind is not OpKind.W:
                backward[stage][op.microbatch] = op.end

    def computed(stage: int, op: TimedOp) -> float | None:
        """When another rank had computed the input of an op; None if it needed none."""
        first = op.kind is OpKind.F
        source = stage - 1 if first else stage + 1
        if op.kind is OpKind.W or rank_of.get(source, rank_of[stage]) == rank_of[stage]:
            return None
        return (forward if first else backward)[source].get(op.microbatch)

    return [_idle_of(row, begin, end, computed) for row in ran]


def _idle_of(
    row: Sequence[tuple[int, TimedOp]],
    begin: float,
    end: float,
    computed: Callable[[int, TimedOp], float | None],
) -> Idle:
    found: Idle = []

    def add(cause: Cause, start: float, stop: float) -> None:
        if stop > start:
            found.append((cause, start, stop))

    free = None
    for stage, op in row:
        if free is None:
            add(Cause.FILL, begin, op.start)
        elif op.start > free:
            ready = computed(stage, op)
            if ready is None:
                add(Cause.ORDER, free, op.start)
            else:
                ready = min(max(ready, free), op.start)
                add(Cause.DEPENDENCY, free, ready)
                add(Cause.LINK, ready, op.start)
        free = op.end
    add(Cause.DRAIN, begin if free is None else free, end)
    return found
