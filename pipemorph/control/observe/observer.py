"""Observes a job: turns what its ranks report into reports of states.

It runs in rank 0's agent. Pure: no clock, no sockets. Ranks judge their own directions of links,
and report states that have changed (:mod:`~pipemorph.control.observe.rank_monitor`). This adds what
takes all ranks: whether most links are late at once, what is usual, stragglers, reductions, rails
and transports. A host needs to know at once what may ask for another plan: a link that has turned
slow or well, a delay that has changed, an iteration that shows what a new plan is worth. Anything
else goes with the next report, of which there is one a second, or fewer if the host says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import repeat

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.detector import Thresholds
from pipemorph.control.observe.events import Events
from pipemorph.control.observe.job_links import JobLinks, unlike
from pipemorph.control.observe.rail_health import RailBook
from pipemorph.control.observe.rank_monitor import silent_after
from pipemorph.control.observe.reductions import ReductionBook
from pipemorph.control.observe.report.unreported import Unreported
from pipemorph.control.observe.stage_book import StageBook
from pipemorph.control.observe.stragglers import StragglerBook
from pipemorph.control.observe.transports import TransportBook
from pipemorph.wire import (
    PROTOCOL,
    DirectiveEnvelope,
    Health,
    LinkHealthReport,
    LinkState,
    ObserverSettings,
)
from pipemorph.wire.messages import MOST_ITERATIONS
from pipemorph.wire.ranks import RankAnswer, RankReport, State, receiver

STATES: tuple[State, ...] = ("starting", "training", "finished", "failed")
REPORT_SECONDS = 1.0
"""A report has all that has changed this often, unless the host wants fewer."""
RANK_REPORTS = 64
"""Reports a second, of all ranks together, that have nothing urgent."""
USUAL_MOVED = 0.02
"""Relative change of a usual wire time that ranks are told."""
ATTENTIVE_ITERATIONS = 32
"""Iterations that are reported as they finish, since a decision may wait for them: after the start,
after the newest change of the plan or of a link's state, and while a link is slow. So are those
that the host says it waits for."""


class Observer:
    """Observes one attempt of a job."""

    def __init__(self, mesh: MeshShape, *, job: str, namespace: str, attempt: int) -> None:
        self._job, self._namespace, self._attempt = job, namespace, attempt
        self._settings = settings = ObserverSettings()
        self._mesh, self._events = mesh, Events()
        self._links = JobLinks(mesh)
        self._stages = StageBook(mesh.stages)
        thresholds = Thresholds(min_delay=settings.min_delay)
        self._reductions = ReductionBook(mesh, thresholds, events=self._events)
        self._rails = RailBook(mesh=mesh, events=self._events)
        self._transports = TransportBook(mesh, events=self._events)
        self._stragglers = StragglerBook(mesh.stages, mesh, self._events)

        self._ranks: dict[int, tuple[State, float]] = {}
        """State of each rank that has reported, and when it last did."""
        self._states: Counter[State] = Counter()
        self._silent: set[int] = set()
        self._ports: dict[int, int | None] = {}
        self._iteration = self._applied = 0
        self._rank_pause = max(0.05, mesh.world_size / RANK_REPORTS)
        """Between two reports of a rank that have nothing urgent."""
        self._usual: tuple[dict[str, float], dict[str, float]] = {}, {}
        """Usual wire times, as ranks are told."""
        self._most_late = False
        self._suspicions: dict[int, int] = {}
        """By rank, the newest suspicion that it has reported."""
        self._restore: dict[int, list[LinkState]] = {}
        """By rank, directions that were slow, for its detectors."""
        self._reported: list[int] = []
        """Iterations that the host has, and rank 0 has not been told of."""
        self._to_answer: dict[int, bool] = {}
        """Ranks to be answered, and whether with everything."""

        self._news = Unreported(self._events, lambda: self._settings.min_delay)
        self._state: State = "starting"
        self._attentive_until = 0
        self._refresh_at = self._report_at = float("-inf")
        self._urgent = True
        """Whether something that is no value of a kind has to be told at once."""
        self._memory = ""
        self._fresh, self._host_waits = True, False
        self.pause = REPORT_SECONDS
        """Between two reports, as the host says."""

    @property
    def state(self) -> State:
        """Of the job."""
        return self._state

    # --- reports of ranks -----------------------------------------------------------------

    def connect(self, rank: int) -> None:
        """Note that a rank has connected: it is sent everything, and sends everything."""
        self._to_answer[rank] = True
        self._suspicions.pop(rank, None)

    def hear(self, report: RankReport, now: float) -> None:
        """Process a report of a rank, which fits the job. ``now``: wall clock, seconds."""
        rank = report.rank
        if rank == 0:
            self._iteration = report.iteration
            if report.applied_plan_version != self._applied:
                self._applied = report.applied_plan_version
                self._attend()
        before = self._ranks.get(rank)
        self._ranks[rank] = report.state, now
        if before is None or before[0] != report.state:
            self._states.subtract([before[0]] if before is not None else [])
            self._states.update([report.state])
            self._settle_state()
        if rank in self._silent:
            self._silent.discard(rank)
            self._links.find(rank)
        self._links.take(report)
        if report.suspicion > self._suspicions.get(rank, 0):
            self._suspicions[rank] = report.suspicion
            self._to_answer.setdefault(rank, False)
        self._look_at_late()
        for state in report.stages:
            self._stages.take(state)
            self._stragglers.take(state)
        if report.reduction is not None:
            self._reductions.observe([report.reduction], now)
        if report.rails or rank not in self._ports or self._ports[rank] != report.ports:
            self._ports[rank] = report.ports
            self._rails.observe(report.rails, self._seen_ports(), now, self._iteration)
        if report.links or report.transports:
            self._transports.observe(report.links, report.transports, now, self._iteration)
        if report.finished_iteration is not None:
            self._news.finished([report.finished_iteration])
            self._urgent |= self._attentive
        if report.message:
            who = "" if report.message.startswith("rank ") else f"rank {rank}: "
            self.say(f"{who}{report.message}")

    def say(self, message: str) -> None:
        """Report a message."""
        self._news.message, self._urgent = message[:1024], True

    def _seen_ports(self) -> int | None:
        """Number of RDMA ports of all ranks; None until every rank has looked."""
        counts = list(self._ports.values())
        if len(counts) < self._mesh.world_size or None in counts:
            return None
        return sum(count or 0 for count in counts)

    def _settle_state(self) -> None:
        """Failed if one rank failed, finished if all have finished, else the earliest. Ranks that
        have told nothing are starting, unless others are training: no iteration is possible without
        them."""
        states = set(+self._states)
        if "failed" not in states and len(self._ranks) < self._mesh.world_size:
            states.add("training" if "training" in states else "starting")
        state: State = "failed" if "failed" in states else min(states, key=STATES.index)
        if state != self._state:
            self._state, self._urgent = state, True
            self._attend()

    @property
    def _attentive(self) -> bool:
        return self._host_waits or self._iteration <= self._attentive_until

    def _attend(self) -> None:
        self._attentive_until = self._iteration + ATTENTIVE_ITERATIONS

    def _look_at_late(self) -> None:
        """Tell ranks when most links become late at once, and when they no longer are."""
        most = self._links.most_are_late
        if most != self._most_late:
            self._most_late = most
            for rank in self._ranks:
                self._to_answer.setdefault(rank, False)

    # --- what follows from them -----------------------------------------------------------

    def observe(self, now: float, *, refresh: bool = False) -> None:
        """Look at what has changed. Call it soon after reports, and about once a second without.
        ``refresh``: look at everything, as before the last report of a job."""
        links, news = self._links, self._news
        refresh |= now >= self._refresh_at
        if refresh:
            self._lose_silent(now)
        moved, links.moved = links.moved, {}
        for key in moved:
            news.directions.put(replace(links.state(key), route="", transport=""))
        turned, links.turned = links.turned, {}
        for link in turned:
            news.links.put(links.rest(link))
        if turned and links.all_known:
            # A link that was slow from the start is told from its peers as soon as these are known.
            self._compare_links()
        if moved or turned or links.any_slow:
            self._attend()
        if refresh or self._attentive:
            for stage in self._stages.changed():
                news.stages.put(self._stages.state(stage))
            for group in self._reductions.changed():
                news.reductions.put(group)
        if refresh:
            self._refresh(now)

    def _lose_silent(self, now: float) -> None:
        """Forget the links of ranks that have reported nothing for too long."""
        silent = silent_after(self._settings, self._rank_pause)
        for rank, (state, heard_at) in self._ranks.items():
            ended = state in ("finished", "failed")
            if now - heard_at > silent and rank not in self._silent and not ended:
                self._silent.add(rank)
                self._links.lose(rank)

    def _refresh(self, now: float) -> None:
        """Look at what changes with time."""
        self._refresh_at = now + REPORT_SECONDS
        changed = self._links.rests()
        for link in changed:
            self._news.links.put(self._links.rest(link))
        if changed:
            self._compare_links()
        self._news.rails.put(self._rails.view(now))
        self._news.transports.put(self._transports.view())
        self._stragglers.compare(now, self._iteration)
        self._news.stragglers.put(self._stragglers.view())

    def _compare_links(self) -> None:
        """Find what is usual, and send it to ranks if it has moved."""
        usual = self._links.compare()
        if any(map(unlike, usual, self._usual, repeat(USUAL_MOVED))):
            self._usual = usual
            self._to_answer |= dict.fromkeys(self._ranks, True)

    def answers(self, connected: Collection[int]) -> list[tuple[list[int], RankAnswer]]:
        """What there is to send to ``connected`` ranks: ranks, and the answer for all of them."""
        alike: dict[tuple[bool, int], list[int]] = {}
        found = []
        for rank in [rank for rank in self._to_answer if rank in connected]:
            everything = self._to_answer.pop(rank)
            asked = self._suspicions.get(rank, 0)
            rows, reported = self._restore.pop(rank, []), []
            if rank == 0:
                reported, self._reported = (
                    self._reported[:MOST_ITERATIONS], self._reported[MOST_ITERATIONS:],
                )  # fmt: skip
                if self._reported:
                    self._to_answer[0] = False
            if rows or reported:
                found.append(
                    ([rank], self._answer(everything or bool(rows), asked, rows, reported))
                )
            else:
                alike.setdefault((everything, asked), []).append(rank)
        return found + [(ranks, self._answer(*each)) for each, ranks in alike.items()]

    def _answer(
        self,
        everything: bool,
        answered: int,
        slow: Sequence[LinkState] = (),
        reported: Sequence[int] = (),
    ) -> RankAnswer:
        return RankAnswer(
            settings=self._settings if everything else None,
            usual=self._usual[0] if everything else {},
            rare=self._usual[1] if everything else {},
            most_late=self._most_late,
            answered=answered,
            pause=self._rank_pause if everything else None,
            slow=[*slow],
            reported=[*reported],
        )

    # --- reports --------------------------------------------------------------------------

    def due(self, now: float) -> bool:
        """Whether to send a report now."""
        return self._urgent or self._news.urgent or now >= self._report_at

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
        empty = LinkHealthReport(
            protocol=PROTOCOL,
            job=self._job,
            namespace=self._namespace,
            attempt=self._attempt,
            sequence=sequence,
            sent_at=sent_at,
            state=self._state,
            iteration=self._iteration,
            observed_plan_version=observed_plan_version,
            plan_issued_at=plan_issued_at,
            term=term,
            snapshot=snapshot,
            applied_plan_version=self._applied,
            settings=self._settings.revision,
            fresh=self._fresh,
            message=self._news.message,
        )
        return self._news.fill(empty)

    def delivered(self, report: LinkHealthReport, answer: DirectiveEnvelope) -> None:
        """Note that the host has accepted a report, and what it answered."""
        self._news.told(report)
        if self._memory and answer.memory != self._memory:
            self._news.again()
        self._memory, self._host_waits = answer.memory, answer.attentive
        self.pause = answer.seldom
        if answer.settings is not None:
            self._set(answer.settings)
        for row in answer.slow:
            self._remember(row)
        self._news.keep(report.iterations)
        if report.iterations:
            self._reported += [sample.index for sample in report.iterations]
            self._to_answer.setdefault(0, False)
        self._fresh = False

    def repeat_states(self) -> None:
        """Let the next report have every state again, for somebody who has just begun to read."""
        self._news.repeat_states()
        self._urgent = True

    def _remember(self, row: LinkState) -> None:
        """Take up a direction that was slow when the host last heard of it. It has been told of it,
        so its end is news."""
        told = LinkState(row.link, Health.UNKNOWN, replica=row.replica, direction=row.direction)
        self._news.directions.delivered([told])
        rank = receiver(self._mesh, row)
        self._links.restore(row)
        self._restore.setdefault(rank, []).append(row)
        self._to_answer.setdefault(rank, False)
        self._news.directions.put(self._links.state(row.key))

    def _set(self, settings: ObserverSettings) -> None:
        """Judge by other settings from now on."""
        self._settings = settings
        self._to_answer |= dict.fromkeys(self._ranks, True)
        self._reductions.set(Thresholds(min_delay=settings.min_delay))
        self._rails.set(settings.rails)
