"""Observes a job: turns the telemetry of its ranks into reports of states.

It runs in rank 0's agent. Pure: no clock, no sockets. A host needs to know at once what may ask for
another plan: a link that has turned slow or well, a delay that has changed, an iteration that shows
what a new plan is worth. Anything else goes with the next report, of which there is one a second,
or fewer if the host says so. So the host's work is that of what has changed, whatever the mesh.

The cost of telemetry is that of its windows. What walks all directions of all links is done in
turns, so that its cost in a second is bounded.

The windows of a large job are more than one process can judge. There each part of it, a range of
ranks, has an observer, which reports to that of the job in the same way as that one reports to the
host, and says nothing while nothing is new. The job's observer judges the windows of the first part
and merges the states of the others (:mod:`~pipemorph.control.observe.merge`). What compares all
ranks stays with it: it gets paces, normal wire times and late links, and tells the parts whether
most links are late and what is usual.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.detector import Thresholds
from pipemorph.control.observe.events import Events
from pipemorph.control.observe.link_book import LinkBook
from pipemorph.control.observe.merge import Part, Parts, State
from pipemorph.control.observe.rail_health import RailBook, merge_rails
from pipemorph.control.observe.reductions import ReductionBook
from pipemorph.control.observe.report.unreported import Unreported
from pipemorph.control.observe.stage_book import StageBook
from pipemorph.control.observe.stragglers import PaceBook, StragglerBook
from pipemorph.control.observe.transports import TransportBook, merge_transports
from pipemorph.wire import (
    MOST_SLOW,
    PROTOCOL,
    DirectiveEnvelope,
    Health,
    IterationSample,
    LinkHealthReport,
    LinkSample,
    LinkState,
    ObserverSettings,
    RailSample,
    ReductionSample,
    StageProfile,
    TransportSample,
)
from pipemorph.wire.parts import PartAnswer, PartReport

REPORT_SECONDS = 1.0
"""A report has all that has changed this often, unless the host wants fewer."""
HEARTBEAT_SECONDS, HEARTBEAT_PAUSES = 20.0, 2.0
"""A part with nothing new reports as often, or each so many of its pauses if that is longer: of
1,280 parts, 32 a second. That its connection is lost is known sooner."""
SILENT_HEARTBEATS = 2.5
"""A part that has told nothing for so many, and for as long as links may be without windows, is
unknown."""
SELDOM_REPORTS = 64
"""Reports a second, of all parts together, that have nothing urgent."""
USUAL_MOVED = 0.02
"""Relative change of a usual wire time that is worth telling."""
ATTENTIVE_ITERATIONS = 32
"""Iterations that are reported as they finish, since a decision may wait for them: after the start,
after the newest change of the plan or of a link's state, and while a link is slow. So are those
that the host says it waits for."""
MOVES = 64
"""Slow directions of which the delay is computed anew with each telemetry."""
TURNS = 512
"""Directions that have turned slow or well of which it is computed."""
WALKED = 4096
"""Directions of links that are walked with each telemetry for links whose state has changed, and
once a second for those whose wire time may have."""
PEERS_SECONDS = 75e-6
"""Between two comparisons of all directions, for each of them: a fiftieth of what it takes."""


@dataclass(frozen=True)
class JobTelemetry:
    """What ranks have told since the last telemetry. ``ports``: RDMA ports of all ranks together;
    None until every rank has looked. ``iteration``, ``applied_plan_version``: of rank 0."""

    state: State = "training"
    iteration: int = 0
    applied_plan_version: int = 0
    iterations: Sequence[IterationSample] = ()
    links: Sequence[LinkSample] = ()
    stages: Sequence[StageProfile] = ()
    reductions: Sequence[ReductionSample] = ()
    rails: Sequence[RailSample] = ()
    ports: int | None = None
    transports: Sequence[TransportSample] = ()
    message: str | None = None


class Observer:
    """Observes one attempt of a job: all ranks of ``mesh``, or a part of them.

    ``part``: number of the part; None for the job. ``part_ranks``: of each part of a job that has
    several; the job's observer judges those of part 0 and hears of the others. ``memory``: of the
    job's observer, another one whenever it starts anew.
    """

    def __init__(
        self,
        mesh: MeshShape,
        *,
        job: str,
        namespace: str,
        attempt: int,
        part: int | None = None,
        part_ranks: int = 0,
        memory: str = "",
    ) -> None:
        self._job, self._namespace, self._attempt = job, namespace, attempt
        self._part, self._parts_memory = part, memory
        self._settings = settings = ObserverSettings()
        self._mesh, self._events = mesh, Events()
        thresholds = _thresholds(settings)
        self._links = LinkBook(mesh, thresholds=thresholds, stale_after=settings.stale_after)
        self._stages = StageBook(mesh.stages, settings)
        self._reductions = ReductionBook(mesh, thresholds, events=self._events)
        self._rails = RailBook(mesh=mesh, events=self._events)
        self._transports = TransportBook(mesh, events=self._events)
        self._paces = PaceBook()
        self._stragglers = StragglerBook(mesh.stages, mesh, self._events)
        self._parts = Parts(mesh, part_ranks if part is None else 0)
        self._seldom = REPORT_SECONDS * max(1.0, len(self._parts) / SELDOM_REPORTS)
        """Between two reports of a part of this job, as it is told."""
        self.pause = REPORT_SECONDS
        """Between two reports of this observer, as its host tells, or the job's observer."""
        self._usual: dict[str, float] = {}
        """Per route, the normal wire time of the job's directions."""
        self._to_tell: set[int] = set()
        """Parts with something to be told before they report."""
        self._moved_links: set[int] = set()
        """Links of which parts have told other figures since the last refresh."""
        self._told_late = (False, False)
        self._links.judged_elsewhere = self._parts.judged
        self._reductions.elsewhere = self._parts.groups
        if part is not None:
            self._links.most_late = self._reductions.most_late = False

        self._news = Unreported(self._events, lambda: self._settings.min_delay)
        self._newest = JobTelemetry(state="starting")
        self._state: State = "starting"
        self._late: tuple[tuple[int, ...], int] = ((), 0)
        """Late links and the number of late reductions, of a part."""
        self._attentive_until = 0
        self._walk_next = 0
        self._peers_at = self._refresh_at = self._report_at = self._beat_at = float("-inf")
        self._compare_at = float("-inf")
        self._urgent = True
        """Whether something that is no value of a kind has to be told at once."""
        self._memory = ""
        self._fresh, self._host_waits = True, False

    @property
    def state(self) -> State:
        """Of the job."""
        return self._newest.state

    # --- telemetry ------------------------------------------------------------------------

    def observe(self, telemetry: JobTelemetry, now: float, *, refresh: bool = False) -> None:
        """Process what ranks have told. ``now``: wall clock, seconds. Call it as well, about once a
        second, when they have told nothing. ``refresh``: look at everything, as before the last
        report of a job."""
        before, self._newest = self._newest, telemetry
        self._settle_state()
        if telemetry.message:
            self._news.message, self._urgent = telemetry.message, True
        if telemetry.applied_plan_version != before.applied_plan_version:
            self._attend()
        for profile in telemetry.stages:
            self._stages.observe(profile)
            self._paces.observe(profile)
        if telemetry.reductions:
            self._reductions.observe(telemetry.reductions, now)
        if telemetry.links:
            self._links.observe(telemetry.links, now, ends=self._stages)
            if now >= self._peers_at:
                self._compare_peers(now)
        if self._part is not None or self._parts:
            self._look_at_late(now)
        self._rails.observe(telemetry.rails, telemetry.ports, now, telemetry.iteration)
        self._transports.observe(telemetry.links, telemetry.transports, now, telemetry.iteration)
        self._look_at_links(now)
        self._news.finished(telemetry.iterations)
        attentive = self._host_waits or telemetry.iteration <= self._attentive_until
        self._urgent |= attentive and bool(telemetry.iterations)
        refresh |= now >= self._refresh_at
        if refresh or (attentive and telemetry.iterations):
            self._look_at_stages()
        if refresh:
            self._refresh(now)

    def _settle_state(self) -> None:
        state = self._parts.state(self._newest.state)
        if state != self._state:
            self._state, self._urgent = state, True
            self._attend()

    def _compare_peers(self, now: float) -> None:
        pause = PEERS_SECONDS * len(self._links)
        if self._part is not None:
            for bases in self._links.bases():
                self._news.bases.put(bases)
            self._links.lower_bases(self._usual)
        elif self._parts:
            pause = max(pause, REPORT_SECONDS)
            found = self._links.compare_peers(self._parts.bases)
            told = self._usual
            if found.keys() != told.keys() or any(
                abs(base - told[route]) > USUAL_MOVED * told[route] for route, base in found.items()
            ):
                self._usual = found
                self._to_tell.update(self._parts.parts)
        else:
            self._links.compare_peers()
        self._peers_at = now + pause

    def _compare_reductions(self) -> None:
        """Tell parts of reductions there that take much longer than others."""
        for each in self._reductions.usual_elsewhere():
            owner = self._parts.part_of(each.stage, each.replica)
            self._parts.parts[owner].reductions.append(each)
            self._to_tell.add(owner)

    def _look_at_late(self, now: float) -> None:
        """Tell the job's observer which links are late, or the parts whether most are."""
        if self._part is not None:
            late = (tuple(self._links.late(now)), self._reductions.late)
            self._urgent |= late != self._late
            self._late = late
            return
        self._links.late_elsewhere = self._parts.late
        self._reductions.late_elsewhere = self._parts.late_reductions
        most = (self._links.most_are_late(now), self._reductions.most_are_late)
        if most != self._told_late:
            self._told_late = most
            self._to_tell.update(self._parts.parts)

    def _attend(self) -> None:
        self._attentive_until = self._newest.iteration + ATTENTIVE_ITERATIONS

    def _look_at_links(self, now: float) -> None:
        """Look at the directions and links that the newest windows have changed."""
        links = self._links
        for key in links.touched(moves=MOVES, turns=TURNS):
            self._news.directions.put(links.direction(key, now))
        turned = links.turned(WALKED)
        for link in turned:
            self._look_at_rest(link, now)
        if turned or links.any_slow or self._parts.any_slow:
            self._attend()

    def _look_at_rest(self, link: int, now: float) -> None:
        self._news.links.put(self._links.rest(link, now, self._parts.rests[link].values()))

    def _look_at_stage(self, stage: int) -> None:
        if self._part is None:
            self._news.stages.put(self._stages.state(stage, self._parts.stages[stage].values()))
        elif (mine := self._stages.part(stage)) is not None:
            self._news.stages.put(mine)

    def _look_at_stages(self) -> None:
        for stage in self._stages.changed():
            self._look_at_stage(stage)
        for group in self._reductions.changed():
            self._news.reductions.put(group)

    def _refresh(self, now: float) -> None:
        """Look at what changes with time."""
        self._refresh_at = now + REPORT_SECONDS
        links, walked = self._links, 0
        for key in links.silent(now, TURNS):
            self._news.directions.put(links.direction(key, now))
        for link in self._moved_links:
            self._look_at_rest(link, now)
        self._moved_links.clear()
        for _ in range(links.count):
            self._look_at_rest(self._walk_next, now)
            walked += links.directions(self._walk_next) + len(self._parts.rests[self._walk_next])
            self._walk_next = (self._walk_next + 1) % links.count
            if walked > WALKED:
                break
        self._news.rails.put(merge_rails([self._rails.view(now), *self._parts.rails.values()]))
        views = [self._transports.view(), *self._parts.transports.values()]
        self._news.transports.put(merge_transports(views))
        if self._part is not None:
            for pace in self._paces.changed():
                self._news.paces.put(pace)
            return
        self._stragglers.take(self._paces.changed())
        if now >= self._compare_at:
            # That walks all ranks, whose paces come no more often.
            self._compare_at = now + 0.9 * self._seldom
            self._stragglers.compare(now, self._newest.iteration)
            self._news.stragglers.put(self._stragglers.view())
            self._compare_reductions()
        silent = max(self._settings.stale_after, SILENT_HEARTBEATS * _heartbeat(self._seldom))
        for number in list(self._parts.silent(now, silent)):
            unknown, ended = self._parts.forget(number)
            self._to_tell.add(number)
            for row in unknown:
                self._news.directions.put(row)
            for rest in ended:
                self._look_at_rest(rest.link, now)

    # --- the parts of a job ---------------------------------------------------------------

    def misfit(self, report: PartReport) -> str | None:
        """What of a part's report does not fit the job or the part; None if all does."""
        return self._parts.misfit(report)

    def hear(self, report: PartReport, now: float) -> None:
        """Process a report of a part, which fits."""
        known, healthy = len(self._parts.judged), self._parts.parts[report.part].rests
        moved = {rest.link for rest in report.links if rest.health is Health.HEALTHY} & healthy
        self._moved_links |= moved
        self._parts.take(report, now)
        for row in report.directions:
            self._news.directions.put(row)
        for rest in report.links:
            if rest.link not in moved:
                self._look_at_rest(rest.link, now)
        for state in report.stages:
            self._look_at_stage(state.stage)
        for group in report.reductions:
            self._news.reductions.put(group)
        self._stragglers.take(report.paces)
        for event in report.events:
            self._events.add(now, event.iteration, event.text)
        if report.message:
            self._news.message, self._urgent = report.message, True
        if report.directions or len(self._parts.judged) != known:
            self._attend()
        self._settle_state()
        if report.settings != self._parts.parts[report.part].settings:
            self._to_tell.add(report.part)

    def has_part(self, number: int) -> bool:
        """Whether the job has such a part, beside the first."""
        return number in self._parts.parts

    def meet(self, number: int) -> None:
        """Note that the agent of a part has connected: what it told last, or was told, may not have
        come."""
        self._parts.meet(number)
        self._to_tell.add(number)

    def answers(self, connected: Collection[int]) -> list[tuple[int, PartAnswer]]:
        """What there is to tell to ``connected`` parts."""
        waiting = [number for number in self._to_tell if number in connected]
        return [(number, self._answer(number)) for number in waiting]

    def _answer(self, number: int) -> PartAnswer:
        part: Part = self._parts.parts[number]
        usual = {} if part.usual is self._usual else self._usual
        slow, part.restore = part.restore[:MOST_SLOW], part.restore[MOST_SLOW:]
        reductions, part.reductions = part.reductions, []
        part.usual, part.settings = self._usual, self._settings.revision
        self._to_tell.discard(number)
        return PartAnswer.model_construct(
            memory=f"{self._parts_memory}.{part.life}",
            fresh=self._fresh,
            settings=self._settings,
            slow=slow,
            seldom=self._seldom,
            links_late=self._told_late[0],
            reductions_late=self._told_late[1],
            usual=usual,
            reductions=reductions,
        )

    # --- reports --------------------------------------------------------------------------

    def due(self, now: float) -> bool:
        """Whether to send a report now."""
        if self._urgent or self._news.urgent:
            return True
        return now >= self._report_at and (now >= self._beat_at or self.has_news)

    @property
    def has_news(self) -> bool:
        """Whether the next report has anything but the heartbeat."""
        return self._urgent or bool(self._news)

    def report(
        self,
        sequence: int,
        sent_at: float,
        observed_plan_version: int,
        *,
        plan_issued_at: float | None = None,
        term: int | None = None,
        snapshot: str = "",
    ) -> LinkHealthReport:
        """The next report, of at most ``MAX_REPORT_BYTES``. What it has is news until
        :meth:`delivered`. The last four are of what the agent has from the ingest."""
        self._report_at, self._urgent = sent_at + self.pause, False
        self._beat_at = self._report_at
        if self._part is not None:
            self._beat_at = sent_at + _heartbeat(self.pause)
        empty = self._empty(
            protocol=PROTOCOL,
            job=self._job,
            namespace=self._namespace,
            attempt=self._attempt,
            sequence=sequence,
            sent_at=sent_at,
            state=self._state,
            iteration=self._newest.iteration,
            observed_plan_version=observed_plan_version,
            plan_issued_at=plan_issued_at,
            term=term,
            snapshot=snapshot,
            applied_plan_version=self._newest.applied_plan_version,
            settings=self._settings.revision,
            fresh=self._fresh,
            message=self._news.message,
        )
        return self._news.fill(empty)

    def _empty(self, **told: Any) -> LinkHealthReport:
        if self._part is None:
            return LinkHealthReport(**told)
        links, reductions = self._late
        return PartReport(**told, part=self._part, late=list(links), late_reductions=reductions)

    def delivered(self, report: LinkHealthReport, answer: DirectiveEnvelope, now: float) -> None:
        """Note that the host has accepted a report, and what it answered."""
        self.told(report)
        self.take(answer, now)
        self._news.keep(report.iterations)
        self._fresh = False

    def repeat_states(self) -> None:
        """Let the next report have every state again, for somebody who has just begun to read."""
        self._news.repeat_states()
        self._urgent = True

    def told(self, report: LinkHealthReport) -> None:
        """Note that a report has been sent by a part, or accepted by the host. Should one of a part
        be lost with its connection, the answer to the next has another ``memory``."""
        self._news.told(report)

    def take(self, answer: DirectiveEnvelope, now: float) -> None:
        """Note what the host says, or to a part the job's observer."""
        if self._memory and answer.memory != self._memory:
            self._news.again()
        self._memory, self._host_waits = answer.memory, answer.attentive
        self.pause = answer.seldom
        if answer.settings is not None:
            self._set(answer.settings)
        if isinstance(answer, PartAnswer):
            self._links.most_late = answer.links_late
            self._reductions.most_late = answer.reductions_late
            if answer.usual:
                self._usual = answer.usual
            for each in answer.reductions:
                self._reductions.lower((each.stage, each.replica), each.seconds, now)
        for row in answer.slow:
            self._remember(row, now)
        if isinstance(answer, PartAnswer):
            self._fresh = answer.fresh

    def _remember(self, row: LinkState, now: float) -> None:
        """Take up a direction that was slow when the host last heard of it. It has been told of it,
        so its end is news."""
        key = row.key
        told = LinkState(row.link, Health.UNKNOWN, replica=row.replica, direction=row.direction)
        self._news.directions.delivered([told])
        owner = self._parts.receiver(key)
        if owner in self._parts.parts:
            self._news.directions.put(self._parts.remember(row))
            self._to_tell.add(owner)
            return
        if self._fresh or not self._links.has(key):
            self._links.restore([row], now)
        self._news.directions.put(self._links.direction(key, now))

    def _set(self, settings: ObserverSettings) -> None:
        """Judge by other settings from now on."""
        self._settings = settings
        self._to_tell.update(self._parts.parts)
        thresholds = _thresholds(settings)
        self._links.set(thresholds, settings.stale_after)
        self._reductions.set(thresholds)
        self._stages.set(settings)
        self._rails.set(settings.rails)


def _heartbeat(pause: float) -> float:
    return max(HEARTBEAT_SECONDS, HEARTBEAT_PAUSES * pause)


def _thresholds(settings: ObserverSettings) -> Thresholds:
    return Thresholds(min_delay=settings.min_delay)
