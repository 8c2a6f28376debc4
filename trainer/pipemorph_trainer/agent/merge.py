"""Merges the telemetry of all ranks into reports of at most 64 KiB. Pure: no clock, no sockets.

What does not fit waits for the next report, unless newer data replaces it. A report has first the
newest iterations, which are few and small. Then stage profiles, gradient reductions, transports of
links, and RDMA ports that changed get a share of the bytes each, oldest first: a plan needs a
profile of every stage as much as windows of every link. The newest windows of links get the rest
(see :mod:`.windows`). Any bytes left are filled with more of most kinds. Transports and ports are
kept, to be reported again to an ingest that has restarted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from pipemorph.wire import (
    MAX_REPORT_BYTES,
    IterationSample,
    LinkHealthReport,
    LinkSample,
    RailSample,
    ReductionSample,
    StageProfile,
    TransportSample,
    WireModel,
)
from pipemorph_trainer.agent.messages import RankTelemetry
from pipemorph_trainer.agent.windows import Budget, LinkWindows

ITERATIONS_KEPT = 4096
NEWEST_ITERATIONS = 16
HEADROOM_BYTES = 256
"""Room for sequence numbers and times, which are set last."""
PROFILES_SHARE, TRANSPORTS_SHARE, RAILS_SHARE, REDUCTIONS_SHARE = 1 / 4, 1 / 16, 1 / 8, 1 / 8
"""Shares of a report's bytes while other data waits: about 60 profiles, 30 ends of links, RDMA
ports with up to 64 counters each, and 50 reductions."""
STATES = ("starting", "training", "finished", "failed")

T = TypeVar("T", bound=WireModel)
StageKey = tuple[int, int]
"""stage, replica"""
RailKey = tuple[int, int, str, int]
"""stage, replica, device, port"""
EndKey = tuple[int, int, str]
"""link, replica, direction"""


@dataclass
class Selection:
    """The contents of one report, to be passed to :meth:`TelemetryMerger.delivered`."""

    report: LinkHealthReport
    iterations: list[IterationSample]
    links: list[LinkSample]
    stages: list[StageProfile]
    reductions: list[ReductionSample]
    rails: list[RailSample]
    transports: list[TransportSample]
    message: str | None


class TelemetryMerger:
    """The telemetry that the agent has not reported yet.

    ``dirty``: whether something important has arrived since the last report: a finished iteration,
    a link window, a change of state, a message.
    """

    def __init__(self, job: str, namespace: str, attempt: int, world_size: int) -> None:
        self._job = job
        self._namespace = namespace
        self._attempt = attempt
        self._world_size = world_size
        self._states: dict[int, str] = {}
        self._iteration = 0
        self._applied_plan_version = 0
        self._links = LinkWindows()
        self._iterations: deque[IterationSample] = deque(maxlen=ITERATIONS_KEPT)
        self._profiles: dict[StageKey, StageProfile] = {}
        self._unsent_profiles: dict[StageKey, StageProfile] = {}
        self._unsent_reductions: dict[StageKey, ReductionSample] = {}
        self._rails: dict[RailKey, RailSample] = {}
        self._unsent_rails: dict[RailKey, RailSample] = {}
        self._ports: dict[int, int | None] = {}
        self._transports: dict[EndKey, TransportSample] = {}
        self._unsent_transports: dict[EndKey, TransportSample] = {}
        self._message: str | None = None
        self.dirty = False

    def add(self, telemetry: RankTelemetry) -> None:
        """Add one message of one rank."""
        if self._states.get(telemetry.rank) != telemetry.state:
            self._states[telemetry.rank] = telemetry.state
            self.dirty = True
        if telemetry.rank == 0:
            self._iteration = telemetry.iteration
            self._applied_plan_version = telemetry.applied_plan_version
        for sample in telemetry.links:
            self._links.add(sample)
            self.dirty = True
        if telemetry.profile is not None:
            self._add_profile(telemetry.profile)
        reduced = telemetry.reduction
        if reduced is not None and reduced.replica == reduced.group:
            self._unsent_reductions[reduced.stage, reduced.replica] = reduced
        for rail in telemetry.rails:
            # Goes with the next report: counters alone do not trigger one.
            port = (rail.stage, rail.replica, rail.device, rail.port)
            self._rails[port] = self._unsent_rails[port] = rail
        self._ports[telemetry.rank] = telemetry.ports
        for end in telemetry.transports:
            at = (end.link, end.replica, end.direction)
            # Only a change, such as a fallback, triggers a report.
            self.dirty |= self._transports.get(at) != end
            self._transports[at] = self._unsent_transports[at] = end
        if telemetry.finished_iteration is not None:
            self._iterations.append(telemetry.finished_iteration)
            self.dirty = True
        if telemetry.message:
            who = "" if telemetry.message.startswith("rank ") else f"rank {telemetry.rank}: "
            self.say(f"{who}{telemetry.message}")

    def say(self, message: str) -> None:
        """Report a message."""
        self._message = message[:1024]
        self.dirty = True

    def tell_again(self) -> None:
        """Report every port and transport again, since the ingest may have restarted."""
        self._unsent_rails = dict(self._rails)
        self._unsent_transports = dict(self._transports)

    def _seen_ports(self) -> int | None:
        """Number of RDMA ports of all ranks; None until every rank has looked."""
        counts = list(self._ports.values())
        if len(counts) < self._world_size or None in counts:
            return None
        return sum(count or 0 for count in counts)

    def select(self, sequence: int, sent_at: float, observed_plan_version: int) -> Selection:
        """Make the next report. Its data is kept until :meth:`delivered`."""
        self.dirty = False
        empty = LinkHealthReport(
            job=self._job,
            namespace=self._namespace,
            attempt=self._attempt,
            sequence=sequence,
            sent_at=sent_at,
            state=self._state(),  # type: ignore[arg-type]
            iteration=self._iteration,
            observed_plan_version=observed_plan_version,
            applied_plan_version=self._applied_plan_version,
            message=self._message,
            ports=self._seen_ports(),
        )
        room = MAX_REPORT_BYTES - len(empty.body()) - HEADROOM_BYTES
        budget = Budget(room)
        finished = list(reversed(self._iterations))
        profiles = list(self._unsent_profiles.values())
        reduced = list(self._unsent_reductions.values())
        ends = list(self._unsent_transports.values())
        ports = list(self._unsent_rails.values())

        iterations = _fill(budget, finished, NEWEST_ITERATIONS)
        stages = _fill_part(budget, profiles, 256, room * PROFILES_SHARE)
        reductions = _fill_part(budget, reduced, 256, room * REDUCTIONS_SHARE)
        transports = _fill_part(budget, ends, 512, room * TRANSPORTS_SHARE)
        rails = _fill_part(budget, ports, 256, room * RAILS_SHARE)
        chosen = self._links.choose(budget, room)
        stages += _fill(budget, profiles, 256, after=len(stages))
        transports += _fill(budget, ends, 512, after=len(transports))
        rails += _fill(budget, ports, 256, after=len(rails))
        iterations += _fill(budget, finished, 256, after=len(iterations))
        links = self._links.samples(chosen, budget)
        iterations.sort(key=lambda sample: sample.index)
        report = empty.model_copy(
            update={
                "iterations": iterations,
                "links": links,
                "stages": stages,
                "reductions": reductions,
                "rails": rails,
                "transports": transports,
            }
        )
        return Selection(
            report, iterations, links, stages, reductions, rails, transports, self._message
        )

    def delivered(self, selection: Selection) -> None:
        """Drop what the ingest has accepted. Newer data stays."""
        self._links.delivered(selection.links)
        sent = {id(sample) for sample in selection.iterations}
        self._iterations = deque(
            (sample for sample in self._iterations if id(sample) not in sent), ITERATIONS_KEPT
        )
        for profile in selection.stages:
            stage = (profile.stage, profile.replica)
            if self._unsent_profiles.get(stage) is profile:
                del self._unsent_profiles[stage]
        for reduced in selection.reductions:
            stage = (reduced.stage, reduced.replica)
            if self._unsent_reductions.get(stage) is reduced:
                del self._unsent_reductions[stage]
        for rail in selection.rails:
            port = (rail.stage, rail.replica, rail.device, rail.port)
            if self._unsent_rails.get(port) is rail:
                del self._unsent_rails[port]
        for end in selection.transports:
            at = (end.link, end.replica, end.direction)
            if self._unsent_transports.get(at) is end:
                del self._unsent_transports[at]
        if self._message == selection.message:
            self._message = None
        self.dirty = self.dirty or bool(self._links or self._iterations or self._unsent_profiles)

    def _state(self) -> str:
        """The job's state: failed if a rank failed, finished if all finished, else the earliest.

        A rank without a message yet is starting, unless others are training: then it is training
        too, since no iteration is possible without it.
        """
        states = set(self._states.values())
        if "failed" in states:
            return "failed"
        if len(self._states) < self._world_size:
            states.add("training" if "training" in states else "starting")
        return min(states, key=STATES.index)

    def _add_profile(self, profile: StageProfile) -> None:
        key = (profile.stage, profile.replica)
        if self._profiles.get(key) != profile:
            # Keeps its place in the queue: at the end, a profile that changes often would never go.
            self._profiles[key] = self._unsent_profiles[key] = profile


def _fill(budget: Budget, items: Sequence[T], most: int, *, after: int = 0) -> list[T]:
    """The ``items`` from index ``after`` to ``most`` that fit, in order, up to the first that does
    not."""
    taken: list[T] = []
    for item in islice(items, after, most):
        if not budget.admit(item):
            break
        taken.append(item)
    return taken


def _fill_part(budget: Budget, items: Sequence[T], most: int, size: float) -> list[T]:
    """Like :func:`_fill`, but within ``size`` bytes."""
    part = budget.part(size)
    taken = _fill(part, items, most)
    budget.back(part)
    return taken
