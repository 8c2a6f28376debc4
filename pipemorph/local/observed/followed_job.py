"""Job that PipeMorph observes and does not run: its ranks' steps in, reports of its state out.

The host does what the ranks and the agent of a job do that PipeMorph runs: it judges the links of
each rank, merges the states of all ranks, and reports to the job's controller, which decides
nothing here. Pure, but for a log.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from pipemorph.control import JobController
from pipemorph.control.first_plan import initial_plan, initial_routes
from pipemorph.detection.direction_series import DirectionKey
from pipemorph.detection.job_observer import JobObserver
from pipemorph.detection.rank_monitor import RankMonitor
from pipemorph.errors import InputError, one_line
from pipemorph.ingest import Reply
from pipemorph.local.observed.observed_steps import (
    AlignedStep,
    MessageSizes,
    align_step,
    build_profiles,
    build_windows,
    has_all_stages,
    list_stage_ops,
    summarize_step,
)
from pipemorph.planning import Plan, Schedule
from pipemorph.planning.ir import OpKind
from pipemorph.planning.validator import validate
from pipemorph.protocol import IterationSample, LinkHealthReport, OpsTrace
from pipemorph.protocol.observed_steps import (
    MOST_STEPS,
    ObservedPlace,
    ObservedStep,
    StepsReply,
    StepsReport,
)
from pipemorph.protocol.rank_messages import RankReport, RankState
from pipemorph.protocol.samples import IdleSeconds
from pipemorph.spec.job_spec import JobSpec, Metadata, PipeMorphJob
from pipemorph.spec.mesh import MeshShape
from pipemorph.spec.sections.parallelism import Parallelism
from pipemorph.spec.sections.schedule import Adaptation, ScheduleSpec
from pipemorph.spec.sections.trainer import Trainer

log = logging.getLogger("pipemorph.observe")

RANKS_PER_SECOND = 64
"""Reports of all ranks in a second."""
IDLE_RANKS_PER_SECOND = 32
"""Ranks of all steps in a second whose idle time is attributed to causes."""
AttributeIdle = Callable[[Sequence[OpsTrace]], IdleSeconds | None]
"""Attributes the idle time of a step to causes; None if that is not possible."""
NEWEST_STEPS = 32
"""Steps that are held for the prediction of what adapting would give."""
MOST_ENDED = 4096
"""Processes of earlier attempts that are remembered."""
POLICIES: dict[bool, tuple[str, ...]] = {
    False: ("1f1b", "gpipe"),
    True: ("1f1b-interleaved",),
}
"""Policies whose order an observed schedule may have, without and with several stages per rank."""


@dataclass
class _FollowedRank:
    """Rank of an attempt. ``newest``: its newest step; ``clock``: round trip and offset."""

    session: str
    place: ObservedPlace
    monitor: RankMonitor
    newest: int = -1
    clock: tuple[float, float] | None = None
    finished: bool = False


@dataclass
class FollowedJob:
    """Observed job of one host. ``on_started`` is called once, with the job and its controller,
    when every rank has reported a step; ``on_attempt`` when the ranks have started again;
    ``on_step`` with the ops of each step of all ranks. ``clock``: wall clock."""

    name: str
    clock: Callable[[], float]
    on_report: Callable[[LinkHealthReport], None]
    on_started: Callable[[PipeMorphJob, JobController], None]
    on_attempt: Callable[[int], None] = lambda _: None
    on_step: Callable[[Sequence[OpsTrace]], None] = lambda _: None
    attribute_idle: AttributeIdle = lambda _: None
    mesh: MeshShape | None = None
    job: PipeMorphJob | None = None
    controller: JobController | None = None
    attempt: int = 0
    ranks: dict[int, _FollowedRank] = field(default_factory=dict)
    dropped: int = 0
    """Steps that ranks dropped."""
    reported_at: float | None = None
    """Time of the newest report; None before the first."""
    newest: deque[dict[int, AlignedStep]] = field(
        default_factory=lambda: deque(maxlen=NEWEST_STEPS)
    )
    """Newest steps of all ranks, of this attempt."""
    _observer: JobObserver | None = None
    _pending: dict[int, dict[int, ObservedStep]] = field(default_factory=dict)
    """Steps that not all ranks have reported."""
    _sizes: defaultdict[DirectionKey, MessageSizes] = field(
        default_factory=lambda: defaultdict(MessageSizes)
    )
    _ended: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_ENDED))
    _done: int = 0
    """Number of steps up to the newest one of all ranks."""
    _sequence: int = 0
    _idle_at: float = float("-inf")

    @property
    def finished(self) -> bool:
        """True if every rank has reported its end."""
        whole = self.mesh is not None and len(self.ranks) == self.mesh.world_size
        return whole and all(rank.finished for rank in self.ranks.values())

    def describe_ranks(self) -> str:
        """Describe how many ranks report: ``2 of 4 ranks report``."""
        if self.mesh is None:
            return "no rank reports yet"
        return f"{len(self.ranks)} of {self.mesh.world_size} ranks report"

    # --- reports of ranks -----------------------------------------------------------------------

    def handle_report(self, body: bytes) -> Reply:
        """Answer ``POST /v1/observations``. An invalid body gives an error reply."""
        now = self.clock()
        try:
            report = StepsReport.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "report"
            return Reply.from_error(422, f"{where}: {first['msg']}", field=where)
        try:
            rank = self._register(report)
        except InputError as error:
            return Reply.from_error(409, str(error))
        if rank is None:
            return Reply.from_error(409, "another process of this rank has reported since")
        self.reported_at = now
        self._record_steps(rank, report, now)
        self._process_steps(now)
        assert self.mesh is not None
        pause = max(1.0, self.mesh.world_size / RANKS_PER_SECOND)
        return Reply(200, StepsReply(at=now, pause=pause).model_dump_json().encode())

    def _register(self, report: StepsReport) -> int | None:
        """Number of the report's rank in the mesh; None if its process has a successor. Raises
        :class:`InputError` if it belongs to another job."""
        mesh = read_mesh(report.place)
        if self.mesh is not None and mesh != self.mesh:
            raise InputError(f"the rank is of a job of {mesh}; this host observes {self.mesh}")
        rank = mesh.find_rank(report.place.chunks[0], report.place.replica)
        known = self.ranks.get(rank)
        if known is not None and known.session == report.session:
            return rank
        if report.session in self._ended:
            return None
        if known is not None:
            self._begin_attempt()
        self.mesh = mesh
        if self._observer is None:
            self._observer = self._make_observer(mesh)
        monitor = RankMonitor(mesh, rank)
        self.ranks[rank] = _FollowedRank(report.session, report.place, monitor)
        monitor.record_connection()
        self._observer.record_connection(rank)
        return rank

    def _make_observer(self, mesh: MeshShape) -> JobObserver:
        return JobObserver(mesh, job=self.name, namespace="default", attempt=self.attempt)

    def _begin_attempt(self) -> None:
        """Begin another attempt: a rank reports from another process."""
        self._ended.extend(rank.session for rank in self.ranks.values())
        self.ranks.clear()
        self._pending.clear()
        self.newest.clear()
        self.attempt, self._observer, self._done = self.attempt + 1, None, 0
        if self.controller is not None:
            self.controller.begin_attempt(self.attempt)
        self.on_attempt(self.attempt)

    def _record_steps(self, rank: int, report: StepsReport, now: float) -> None:
        known = self.ranks[rank]
        if report.clock is not None:
            known.clock = report.round_trip, report.clock
        known.finished |= report.finished
        self.dropped = max(self.dropped, report.dropped)
        for step in report.steps:
            if step.step > known.newest and has_all_stages(known.place, step):
                known.newest = step.step
                self._pending.setdefault(step.step, {})[rank] = step
        if self._observer is not None and (not report.steps or known.finished):
            # A heartbeat: the rank is there.
            self._send_report(rank, now, now)

    # --- steps of all ranks ---------------------------------------------------------------------

    def _process_steps(self, now: float) -> None:
        """Process the steps that all ranks have reported, in order. Drops those that some rank has
        left out."""
        assert self.mesh is not None
        if len(self.ranks) < self.mesh.world_size:
            self._drop_steps(MOST_STEPS)
            return
        shifts = self._find_shifts()
        if shifts is None:
            return
        complete = min(rank.newest for rank in self.ranks.values())
        for number in sorted(self._pending):
            if number > complete:
                break
            found = self._pending.pop(number)
            if len(found) < len(self.ranks):
                continue
            try:
                steps = {
                    rank: align_step(self.mesh, known.place, found[rank], shifts[rank])
                    for rank, known in sorted(self.ranks.items())
                }
                self._process_step(steps, now)
            except ValidationError as error:
                log.warning("step %d has impossible times: %s", number, one_line(str(error), 200))
        self._drop_steps(2 * MOST_STEPS)
        self._report(now)

    def _drop_steps(self, most: int) -> None:
        for number in sorted(self._pending)[: max(0, len(self._pending) - most)]:
            del self._pending[number]

    def _find_shifts(self) -> dict[int, float] | None:
        """Seconds to add to the clock of each rank: those of its host, by the request with the
        shortest round trip. None while some host has none."""
        clocks: dict[str, tuple[float, float]] = {}
        for rank in self.ranks.values():
            if rank.clock is not None:
                host = rank.place.host
                clocks[host] = min(rank.clock, clocks.get(host, rank.clock))
        if any(rank.place.host not in clocks for rank in self.ranks.values()):
            return None
        return {number: clocks[rank.place.host][1] for number, rank in self.ranks.items()}

    def _process_step(self, ranks: dict[int, AlignedStep], now: float) -> None:
        assert self.mesh is not None and self._observer is not None
        traces = [trace for step in ranks.values() for trace in step.traces]
        self._done = traces[0].iteration + 1
        self.newest.append(ranks)
        if self.controller is None:
            try:
                self._start(traces)
            except InputError as error:
                log.warning("steps cannot be observed: %s", one_line(str(error)))
                return
        for rank, step in ranks.items():
            known = self.ranks[rank]
            profiles = build_profiles(step, known.place.crowding)
            known.monitor.observe_windows((), step.ended_at, profiles=profiles)
        for at, receiver, sender, window in build_windows(self.mesh, ranks, self._sizes):
            load = {"sender_inflated": self.ranks[sender].monitor.ops_inflated}
            monitor = self.ranks[receiver].monitor
            monitor.observe_windows((window.model_copy(update=load),), at)
            if monitor.is_report_due(at):
                self._send_report(receiver, at, now)
        sample = summarize_step(ranks, traces)
        if now - self._idle_at >= max(1.0, len(ranks) / IDLE_RANKS_PER_SECOND):
            self._idle_at = now
            sample = sample.model_copy(update={"idle": self.attribute_idle(traces)})
        for rank, step in ranks.items():
            finished = sample if rank == 0 else None
            self._send_report(rank, step.ended_at, now, finished=finished)
        self._observer.update_states(now)
        self._report(now)
        self.on_step(traces)

    def _send_report(
        self, rank: int, at: float, now: float, *, finished: IterationSample | None = None
    ) -> None:
        """Send a rank's changes to the observer, as an agent's rank does."""
        observer, known = self._observer, self.ranks[rank]
        assert observer is not None
        state: RankState = "finished" if known.finished else "training"
        if known.newest < 0 and not known.finished:
            state = "starting"
        report = RankReport(
            rank=rank,
            state=state,
            iteration=self._done,
            applied_plan_version=0,
            ports=0,
            finished_iteration=finished,
            **known.monitor.take_changes(at),
        )
        observer.process_report(report, now)
        for receivers, answer in observer.take_answers(self.ranks.keys()):
            for receiver in receivers:
                self.ranks[receiver].monitor.process_answer(answer, at)

    # --- reports to the controller --------------------------------------------------------------

    def tick(self) -> None:
        """Update states that change with time. Call it about once a second."""
        if self.controller is not None and self._observer is not None:
            self._observer.update_states(now := self.clock())
            self._report(now)

    def _report(self, now: float) -> None:
        observer, controller = self._observer, self.controller
        if observer is None or controller is None or not observer.is_report_due(now):
            return
        self._sequence += 1
        report = observer.build_report(self._sequence, now, 0)
        observer.record_delivery(report, controller.process_report(report, now))

    def _start(self, traces: Sequence[OpsTrace]) -> None:
        """Make the job from the first step of all ranks. Raises :class:`InputError`."""
        assert self.mesh is not None
        place = self.ranks[0].place
        ops = list_stage_ops(self.mesh, traces)
        microbatches = max(len({*trace.microbatches}) for trace in traces)
        self.job, plan = make_observed_job(self.name, self.mesh, place, microbatches, ops)
        self.controller = JobController(
            self.job.spec, attempt=self.attempt, on_report=self.on_report, endless=True, plan=plan
        )
        self.on_started(self.job, self.controller)


def read_mesh(place: ObservedPlace) -> MeshShape:
    """Mesh of the job of a rank. Raises :class:`InputError` if the rank has no place in one."""
    each = len(place.chunks)
    if place.stages % each or place.chunks[-1] >= place.stages or place.replica >= place.replicas:
        raise InputError(
            f"stages {_join(place.chunks)} of {place.stages}, replica {place.replica} of"
            f" {place.replicas}: expected as many stages on each rank"
        )
    try:
        Parallelism(stages=place.stages, stages_per_rank=each, replicas=place.replicas)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(one_line(f"{first['loc'][-1]}: {first['msg']}")) from None
    mesh = MeshShape(place.stages, place.replicas, stages_per_rank=each)
    for placement in ("interleaved", "v"):
        found = MeshShape(place.stages, place.replicas, stages_per_rank=each, placement=placement)
        if len({found.pp_indices[stage] for stage in place.chunks}) == 1:
            return mesh if each == 1 else found
    raise InputError(
        f"a rank has stages {_join(place.chunks)} of {place.stages}; expected every"
        f" {place.stages // each}-th stage, or stages placed as a V"
    )


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def make_observed_job(
    name: str,
    mesh: MeshShape,
    place: ObservedPlace,
    microbatches: int,
    ops: Sequence[Sequence[tuple[int, OpKind, int]]],
) -> tuple[PipeMorphJob, Plan]:
    """Make the job of an observed schedule, and the plan that it runs: the order of ``ops``, of
    each rank, as it was seen. Its number of iterations is 0, for unknown. Raises
    :class:`InputError` for an order that no plan has."""
    schedule = Schedule.from_stage_ops(microbatches, ops)
    validate(schedule)
    trainer = Trainer(command=[place.framework], iterations=1)
    found: PipeMorphJob | None = None
    for policy in (*POLICIES[mesh.stages_per_rank > 1], "pipemorph"):
        spec = JobSpec(
            parallelism=Parallelism(
                stages=mesh.stages, replicas=mesh.replicas,
                stages_per_rank=mesh.stages_per_rank, stage_placement=mesh.placement,
            ),
            schedule=ScheduleSpec(microbatches=microbatches, policy=policy, dispatch="static"),  # type: ignore[arg-type]
            trainer=trainer,
            adaptation=Adaptation(enabled=False),
        )  # fmt: skip
        if policy == "pipemorph" or initial_plan(spec).schedule.encode() == schedule.encode():
            trainer = trainer.model_copy(update={"iterations": 0})
            spec = spec.model_copy(update={"trainer": trainer})
            found = PipeMorphJob(
                api_version="pipemorph.io/v1alpha1", kind="PipeMorphJob",
                metadata=Metadata(name=name), spec=spec,
            )  # fmt: skip
            break
    assert found is not None
    spec = found.spec
    plan = Plan(
        version=0,
        policy=spec.schedule.policy_kind,
        schedule=schedule,
        routes=initial_routes(spec),
        in_flight_limits=(None,) * mesh.stages,
    )
    return found, plan
