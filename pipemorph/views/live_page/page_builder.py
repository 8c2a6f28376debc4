"""Builds the document of a running job from its host's view of it.

A document shows an iteration as measured, from the op traces of its ranks, and below it the same
iteration under the initial plan, simulated with the links of that time. Idle times of both get
their causes by one method. Status, explanation and plan changes are those of a report.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import median

from pipemorph.control.decide.forecast import Forecast, Outlook
from pipemorph.control.decide.situation import Situation
from pipemorph.errors import InputError, one_line
from pipemorph.planning import Plan
from pipemorph.planning.analysis.bubbles import IdleCause
from pipemorph.planning.ir import OpKind
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.protocol import AdaptationRecord, Health, IterationSample, LinkState
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.job_status import JobStatus, TrainingStatus
from pipemorph.spec.mesh import MeshShape
from pipemorph.views.explanation.explained_job import ExplainedJob, parse_job_object
from pipemorph.views.explanation.explanation_text import format_count, format_link
from pipemorph.views.explanation.job_explanation import NEWEST_ITERATIONS, build_explanation
from pipemorph.views.live_page.link_history import LinkHistory
from pipemorph.views.live_page.page_document import (
    IterationPicture,
    IterationTimes,
    PageDocument,
    PictureRow,
    RecoveryEntry,
    StoredIteration,
)
from pipemorph.views.pictures.colours import LETTERS

MOST_STEPS = 4000
"""Newest iterations whose times are shown."""
MOST_AVAILABLE = 512
LEAST_VISIBLE_SHARE = 1 / 2000
"""Least share of a picture's width at which an idle time is visible."""
IN_FLIGHT_CHANGE = {OpKind.F: 1, OpKind.W: -1, OpKind.BW: -1}
"""Change in the number of microbatches in flight by an op."""

ExecutedRows = Sequence[Sequence[tuple[int, TimedOp]]]
"""Rows by rank, of ``(stage, op)`` in run order."""
IdleTimes = list[tuple[IdleCause, float, float]]
"""``(cause, start, end)`` of the idle times of a rank."""


@dataclass(frozen=True)
class StageTrace:
    """Ops of a rank in an iteration; times are wall-clock seconds. ``replica``: its column;
    ``waits``: idle times before ops, waiting for the op's input message."""

    rank: int
    stage: int
    replica: int
    iteration: int
    plan_version: int
    ops: tuple[TimedOp, ...]
    waits: tuple[TimedOp, ...] = ()


@dataclass(frozen=True)
class WatchedJob:
    """State of a job in its host. ``now``: wall clock.

    ``samples``: newest finished iterations, oldest first; ``changes``: of plan, oldest first;
    ``available``: iterations with stored ops; ``outlook``: None before op times are known.
    """

    job: PipeMorphJob
    now: float
    status: JobStatus
    samples: Sequence[IterationSample] = ()
    changes: Sequence[AdaptationRecord] = ()
    link_history: LinkHistory = field(default_factory=LinkHistory)
    recoveries: Sequence[RecoveryEntry] = ()
    available: Sequence[int] = ()
    keep_reason: str = ""
    """Reason why the newest decision while a link was slow changed nothing; empty if it did."""
    outlook: Outlook | None = None
    gpus: int = 0
    """GPUs of all ranks together; 0 if none are known."""
    missing_ops_reason: str = ""
    """Reason why no iteration has ops; empty if some do, or it is unknown."""
    result_location: str = "report.json of its folder"
    """Place of the job's result once it is over."""


def build_page_document(
    known: WatchedJob,
    traces: Sequence[StageTrace],
    *,
    column: int,
    number: int = 0,
    live: bool = True,
) -> PageDocument:
    """Build the document. ``traces``: ops of all ranks in the iteration to show, empty for none;
    ``column``: the pipeline to show."""
    spec, mesh = known.job.spec, known.job.spec.parallelism.mesh
    times = [sample.seconds for sample in known.samples]
    made = build_stored_iteration(known, traces, column)
    why = known.missing_ops_reason or "no iteration with a trace of its ops has finished"
    newest = known.samples[-MOST_STEPS:]
    meta = known.job.metadata
    training = known.status.training or TrainingStatus()
    explained = to_report(known)
    return PageDocument(
        number=number,
        live=live,
        at=known.now,
        job=meta.name,
        namespace=meta.namespace,
        emulated=spec.emulation is not None,
        described=f"{mesh}, "
        + format_count(spec.schedule.microbatches, "microbatch", "microbatches"),
        stages=mesh.stages,
        microbatches=spec.schedule.microbatches,
        status=known.status.model_copy(update={"training": training}),
        result=known.result_location,
        explanation=build_explanation(explained).label_rows(),
        done=known.samples[-1].index + 1 if known.samples else 0,
        wanted=spec.trainer.iterations,
        seconds=median(times[-NEWEST_ITERATIONS:]) if times else None,
        columns=[mesh.format_column_name(i) for i in range(mesh.columns)],
        column=column,
        available=list(known.available[-MOST_AVAILABLE:]),
        measured=made.measured if made else None,
        alternative=made.alternative if made else None,
        no_alternative=made.no_alternative if made else why,
        activation_memory=spec.schedule.activation_memory,
        links=known.link_history.build_timelines(format_link(i) for i in range(mesh.stages - 1)),
        adaptations=list(known.changes),
        recoveries=list(known.recoveries),
        ranks=mesh.world_size,
        gpus=explained.gpus,
        steps=IterationTimes(
            index=[sample.index for sample in newest],
            seconds=[round(sample.seconds, 6) for sample in newest],
        ),
    )


def build_stored_iteration(
    known: WatchedJob, traces: Sequence[StageTrace], column: int
) -> StoredIteration | None:
    """Pictures of an iteration in a column; None without ops. ``traces``: at least its ops."""
    mine = [trace for trace in traces if trace.replica == column]
    if not mine:
        return None
    mesh = known.job.spec.parallelism.mesh
    measured = _build_measured_picture(mine, known, mesh)
    alternative, why = _build_alternative_picture(measured, known, column, mesh)
    return StoredIteration(
        column=column, measured=measured, alternative=alternative, no_alternative=why
    )


def find_slowest_column(known: WatchedJob) -> int:
    """Column to show first: that of the slowest link; 0 if all are healthy."""
    training = known.status.training
    return training.slow_links[0].replica if training and training.slow_links else 0


def to_report(known: WatchedJob) -> ExplainedJob:
    """Job in the form of a report, as of now."""
    content = known.job.model_dump(mode="json", by_alias=True, exclude_none=True) | {
        "status": known.status,
        "iterations": known.samples,
        "adaptations": known.changes,
        "links": {"slow": known.link_history.list_slow_periods()},
        "keep_reason": known.keep_reason,
        "gpus": known.gpus,
    }
    return parse_job_object(content)


# --- pictures ---------------------------------------------------------------------------------


def _build_measured_picture(
    traces: Sequence[StageTrace], known: WatchedJob, mesh: MeshShape
) -> IterationPicture:
    ranks: dict[int, list[tuple[int, TimedOp]]] = defaultdict(list)
    for trace in traces:
        ranks[trace.rank] += ((trace.stage, op) for op in trace.ops)
    # In the order of stages, like limits and peaks: ranks may have changed places.
    numbers = sorted(ranks, key=lambda rank: min(stage for stage, _ in ranks[rank]))
    ran = [sorted(ranks[rank], key=lambda each: each[1].start) for rank in numbers]
    iteration = traces[0].iteration
    seconds = next((s.seconds for s in reversed(known.samples) if s.index == iteration), None)
    plan = _find_plan(known, traces[0].plan_version)
    return build_picture(
        ran, iteration=iteration, plan_version=traces[0].plan_version, seconds=seconds,
        room=RowLimits.from_plan(plan, known, mesh), numbers=numbers, measured=True,
    )  # fmt: skip


def _build_alternative_picture(
    measured: IterationPicture, known: WatchedJob, column: int, mesh: MeshShape
) -> tuple[IterationPicture | None, str]:
    """Picture of the iteration under the initial plan, or None and the reason."""
    if known.job.spec.is_observed:
        return None, "the schedule is the job's own: PipeMorph only observes it"
    if _is_initial_plan(measured.plan_version, known):
        return None, "the initial plan is in force in this iteration"
    outlook = known.outlook
    if outlook is None:
        return None, "op times are not known yet"
    situation, start = outlook.situation, outlook.initial_plan
    if measured.iteration != known.available[-1]:
        situation = _replace_links(situation, known.link_history.get_states_at(measured.iteration))
    forecast = Forecast(outlook.planning_spec, situation)
    try:
        made = build_picture(
            forecast.simulate_plan(start), iteration=measured.iteration, plan_version=0,
            seconds=None, room=RowLimits.from_plan(start, known, mesh),
            numbers=[
                mesh.find_rank(mesh.pp_indices.index(i), column) for i in range(mesh.sizes["pp"])
            ],
        )  # fmt: skip
        if measured.seconds is None:
            return made, ""
        if outlook.running_plan.version != measured.plan_version:
            # That plan is gone: the time outside ops is as measured.
            outside = measured.seconds - 1e-6 * measured.span_us
            return made.model_copy(update={"seconds": 1e-6 * made.span_us + outside}), ""
        # Errors of the model are in both predictions and mostly cancel in the difference.
        more = (
            forecast.predict_option(start).seconds
            - forecast.predict_option(outlook.running_plan).seconds
        )
    except InputError as error:
        return None, f"it cannot be simulated: {one_line(str(error))}"
    return made.model_copy(update={"seconds": measured.seconds + more}), ""


def _replace_links(situation: Situation, links: Sequence[LinkState]) -> Situation:
    """Situation with the links as they were at another time."""
    if len(links) != len(situation.delays):
        return situation
    slow = tuple(link.health is Health.SLOW for link in links)
    well = situation.without_delays().wire_times
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


def _is_initial_plan(version: int, known: WatchedJob) -> bool:
    """True if this version is the initial plan, or a return to it. The plan for healthy links is
    another one if op times differ from the planned ones."""
    record = _find_record(known.changes, version)
    if not version or record is None or known.outlook is None:
        return not version
    first = known.outlook.initial_plan
    same = (list(first.warmup), list(first.routes)) == (record.warmup_after, record.routes)
    return record.kind == "return" and same


def _find_record(changes: Sequence[AdaptationRecord], version: int) -> AdaptationRecord | None:
    return next((each for each in reversed(changes) if each.plan_version == version), None)


def _find_plan(known: WatchedJob, version: int) -> Plan | None:
    """Plan of that version; None if unknown."""
    outlook = known.outlook
    if outlook is None:
        return None
    return next(
        (p for p in (outlook.running_plan, outlook.initial_plan) if p.version == version), None
    )


@dataclass(frozen=True)
class RowLimits:
    """Limits of a plan by row, and sizes of a microbatch. Empty fields are unknown."""

    in_flight_limits: Sequence[int | None] = ()
    """Most microbatches in flight, by row; None: no limit."""
    device_limits: Sequence[int | None] = ()
    """Most microbatches with their activations on the device, by row; None: all."""
    activation_sizes: Sequence[int | None] = ()
    """Bytes of a microbatch's activations, by stage."""

    @staticmethod
    def from_plan(plan: Plan | None, known: WatchedJob, mesh: MeshShape) -> RowLimits:
        """Limits of a plan; without a plan or op times all fields are empty."""
        if plan is None or known.outlook is None:
            return RowLimits()
        sizes = [stage.activation_bytes for stage in known.outlook.situation.stages]
        if any(plan.recompute):
            sizes = []  # Dropped activations retain their inputs, whose size is unknown here.
        if mesh.stages_per_rank == 1:
            return RowLimits(plan.in_flight_limits, plan.device_limits, sizes)
        # A limit is of one stage; a row has several.
        return RowLimits() if any(plan.device_limits) else RowLimits(activation_sizes=sizes)

    def compute_peak_bytes(
        self, row: int, ran: Sequence[tuple[int, TimedOp]], in_flight: int
    ) -> int | None:
        """Peak bytes on the device of the microbatches in flight; None if unknown."""
        stages = {stage for stage, _ in ran}
        sizes = {i: self.activation_sizes[i] or 0 for i in stages if i < len(self.activation_sizes)}
        if not stages or not all(sizes.get(i) for i in stages):
            return None
        if len(stages) == 1:
            device = self.device_limits[row] if row < len(self.device_limits) else None
            here = in_flight if device is None else min(in_flight, device)
            return here * sizes[stages.pop()]
        held = accumulate(IN_FLIGHT_CHANGE.get(op.kind, 0) * sizes[stage] for stage, op in ran)
        return max(held)


def build_picture(
    ran: ExecutedRows,
    *,
    iteration: int,
    plan_version: int,
    seconds: float | None,
    numbers: Sequence[int],
    room: RowLimits = RowLimits(),
    measured: bool = False,
) -> IterationPicture:
    """Build the picture of an iteration's ops. ``numbers``: rank of each row."""
    begin, end = find_bounds(ran)
    span = max(end - begin, 1e-9)
    several = any(row and row[0][0] != stage for row in ran for stage, _ in row)
    causes: dict[str, float] = defaultdict(float)
    rows = []
    for i, (row, idle) in enumerate(zip(ran, find_idle_times(ran), strict=True)):
        for cause, start, stop in idle:
            causes[cause.value] += (stop - start) / span / len(ran)
        own = sorted({stage for stage, _ in row})
        stages = ", ".join(map(str, own))
        name = f"rank {numbers[i]} ({stages})" if several else f"stage {stages or i}"
        starts = [_to_microseconds(op.start - begin) for _, op in row]
        ends = [_to_microseconds(op.end - begin) for _, op in row]
        in_flight = max(accumulate(IN_FLIGHT_CHANGE.get(op.kind, 0) for _, op in row), default=0)
        rows.append(
            PictureRow(
                name=name,
                kinds="".join([LETTERS[op.kind] for _, op in row]),
                microbatches=[op.microbatch for _, op in row],
                stages=[stage for stage, _ in row] if several else [],
                gaps=[start - end for start, end in zip(starts, [0, *ends], strict=False)],
                durations=[end - start for start, end in zip(starts, ends, strict=True)],
                idle=[
                    (cause.value, _to_microseconds(a - begin), _to_microseconds(b - begin))
                    for cause, a, b in idle
                    if b - a >= LEAST_VISIBLE_SHARE * span
                ],
                in_flight=in_flight,
                limit=room.in_flight_limits[i] if i < len(room.in_flight_limits) else None,
                activations=room.compute_peak_bytes(i, row, in_flight),
            )
        )
    return IterationPicture(
        iteration=iteration,
        plan_version=plan_version,
        at=begin if measured else None,
        span_us=_to_microseconds(span),
        seconds=seconds,
        bubble=min(1.0, sum(causes.values())),
        causes=dict(causes),
        rows=rows,
    )


def _to_microseconds(seconds: float) -> int:
    return round(1e6 * seconds)


# --- idle times -------------------------------------------------------------------------------
#
# The cause of every idle time of an iteration, from its ops and their times alone. For simulations
# `pipemorph.planning.analysis.bubbles` is more precise. The page compares a measured iteration with
# a simulated one, so the causes of both come from the data that both have.


def find_bounds(ran: ExecutedRows) -> tuple[float, float]:
    """Start of the first op and end of the last one."""
    begin = min((row[0][1].start for row in ran if row), default=0.0)
    return begin, max((row[-1][1].end for row in ran if row), default=0.0)


def find_idle_times(ran: ExecutedRows) -> list[IdleTimes]:
    """Idle times by rank: ``(cause, start, end)`` in order of time.

    Before the first op it is *fill*, after the last one *drain*. In between the rank waits for the
    input of its next op: *dependency* until that was computed, *link* from then on. *order* if the
    op needed no input from another rank: the host, or a send before it, took the time.
    """
    begin, end = find_bounds(ran)
    rank_of = {stage: rank for rank, row in enumerate(ran) for stage, _ in row}
    forward: dict[int, dict[int, float]] = {stage: {} for stage in rank_of}
    backward: dict[int, dict[int, float]] = {stage: {} for stage in rank_of}
    for row in ran:
        for stage, op in row:
            if op.kind is OpKind.F:
                forward[stage][op.microbatch] = op.end
            elif op.kind is not OpKind.W:
                backward[stage][op.microbatch] = op.end

    def find_input_time(stage: int, op: TimedOp) -> float | None:
        """Time at which another rank had computed the input of an op; None if it needed none."""
        first = op.kind is OpKind.F
        source = stage - 1 if first else stage + 1
        if op.kind is OpKind.W or rank_of.get(source, rank_of[stage]) == rank_of[stage]:
            return None
        return (forward if first else backward)[source].get(op.microbatch)

    return [_find_row_idle_times(row, begin, end, find_input_time) for row in ran]


def _find_row_idle_times(
    row: Sequence[tuple[int, TimedOp]],
    begin: float,
    end: float,
    computed: Callable[[int, TimedOp], float | None],
) -> IdleTimes:
    found: IdleTimes = []

    def add_idle_time(cause: IdleCause, start: float, stop: float) -> None:
        if stop > start:
            found.append((cause, start, stop))

    free = None
    for stage, op in row:
        if free is None:
            add_idle_time(IdleCause.FILL, begin, op.start)
        elif op.start > free:
            ready = computed(stage, op)
            if ready is None:
                add_idle_time(IdleCause.ORDER, free, op.start)
            else:
                ready = min(max(ready, free), op.start)
                add_idle_time(IdleCause.DEPENDENCY, free, ready)
                add_idle_time(IdleCause.LINK, ready, op.start)
        free = op.end
    add_idle_time(IdleCause.DRAIN, begin if free is None else free, end)
    return found
