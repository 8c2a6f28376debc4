"""A trainer in simulation: runs iterations under a trace and reports them as ranks would.

The messages of an iteration are those of the simulator. Their wire times are measured with noise,
in windows, and go to the real controller; a directive is in effect in the iteration after the one
in which it reached all ranks, as they commit it.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal, NamedTuple

from pipemorph.api.spec import JobSpec
from pipemorph.control import JobController, initial_plan
from pipemorph.control.decide.replan import propose
from pipemorph.control.observe.observer import Observer
from pipemorph.planning import OpKind, Plan, Route, Simulation
from pipemorph.planning.offload import copying
from pipemorph.planning.simulation.core import INF
from pipemorph.planning.simulation.simulator import Message, deliver
from pipemorph.replay.links import ROUNDING, Links, failed_over
from pipemorph.replay.ranks import JobTelemetry, PlayedRanks
from pipemorph.wire import IterationSample, LinkSample, ReductionSample, StageProfile, WireTime

Telemetry = Literal["exact", "python", "device"]
"""How arrivals are observed on the direct route. exact: as they happen. python: a receiver that
computes sees a message at the end of its op, and says so. device: the same, and it never knows that
it was idle, as on CUDA where events cannot be timed closely enough. On the delegated route the
engine sees all as they happen."""

WAITED = 0.001
"""Seconds in the queue from which a message counts as held up, as for the ranks' recorders."""
WINDOW = 0.05
"""Seconds of one window of link samples."""
DELIVERY = 0.1
"""Seconds from the end of a window until all ranks hold the plan that follows from it: the report,
the decision, the directive and its preparation between two ops."""
NOISE = 0.05
"""Relative standard deviation of a measured wire time."""
OUTLIERS, OUTLIER = 0.01, 4.0
"""Share of messages that are measured far too long, and by what factor."""


@dataclass(frozen=True)
class Iteration:
    """One finished iteration. ``seconds``: its time; ``version``: of the plan it ran."""

    seconds: float
    version: int


class _Series(NamedTuple):
    """Messages that are measured together."""

    link: int
    forward: bool
    route: Route


class AdaptiveTrainer:
    """The product as it ships. ``controller`` has the records of what it changed and why.
    ``links``: of each replica."""

    def __init__(
        self, spec: JobSpec, links: Sequence[Links], telemetry: Telemetry, seed: int
    ) -> None:
        # A trace is a part of a job: where it ends says nothing of how long a plan will be of use.
        self.controller = JobController(spec, endless=True)
        self._links, self._telemetry = links, telemetry
        self._gone: list[dict[int, float]] = [{} for _ in links]
        """Of each replica: links whose direct route was given up, and when. It stays so."""
        self._pace = links[0].pace()
        self._rng = random.Random(seed)
        self._plan = initial_plan(spec)
        self._prepared: list[tuple[float, Plan]] = []
        """Plans to come, oldest first, and when all ranks hold them."""
        self._observed = self._sequence = self._iteration = 0
        self._now = 0.0
        self._observer = Observer(
            spec.parallelism.mesh, job="replay", namespace="default", attempt=0
        )
        self._ranks = PlayedRanks(spec.parallelism.mesh, self._observer)
        self._report(0.0)  # An agent reports before its ranks measure anything.

    def step(self) -> Iteration:
        """Run the next iteration."""
        index, began = self._iteration, self._now
        while self._prepared and began >= self._prepared[0][0]:
            self._plan = self._prepared.pop(0)[1]
        # As a link whose direct route broke stays delegated, whatever plans say.
        plans = [failed_over(self._plan, gone) for gone in self._gone]
        ran = [
            links.run(plan, index, began, self._pace.before, gone)
            for plan, links, gone in zip(plans, self._links, self._gone, strict=True)
        ]
        seconds = self._pace.follow(max(ran, key=lambda each: each.makespan))
        windows: dict[float, list[LinkSample]] = {}
        for replica, each in enumerate(ran):
            at = (index, began, seconds)
            for end, samples in self._windows(replica, plans[replica], each, at):
                windows.setdefault(end, []).extend(samples)
        for end, samples in sorted(windows.items()):
            self._send(began + end, links=samples)
        self._now = began + seconds
        self._iteration += 1
        finished = IterationSample(
            index=index,
            seconds=seconds,
            loss=None,
            plan_version=self._plan.version,
            bubble_fraction=fmean(each.bubble_fraction for each in ran),
            barrier=self._pace.barrier,
        )
        profiles = [
            self._profile(i, replica, plan, each)
            for replica, (plan, each) in enumerate(zip(plans, ran, strict=True))
            for i in range(len(each.stages))
        ]
        reductions = self._reductions(index, began)
        self._send(self._now, iterations=[finished], stages=profiles, reductions=reductions)
        return Iteration(seconds, self._plan.version)

    def _reductions(self, iteration: int, began: float) -> list[ReductionSample]:
        """What the ranks of replica 0 measure."""
        if len(self._links) == 1:
            return []
        return [
            ReductionSample(
                stage=stage, iteration=iteration, bytes=1 << 20, buckets=1, seconds=seconds,
                exposed=seconds, waited=seconds,
            )
            for stage, seconds in enumerate(self._links[0].reductions(iteration, began))
        ]  # fmt: skip

    def _windows(
        self,
        replica: int,
        plan: Plan,
        ran: Simulation,
        at: tuple[int, float, float],
    ) -> list[tuple[float, list[LinkSample]]]:
        """Per window, its end since the iteration began and the samples of all links of a replica.
        ``at``: the iteration, when it began, and seconds until the next one begins, in which the
        last windows of this one may end."""
        iteration, began, seconds = at
        links, gone = self._links[replica], self._gone[replica]
        transfer_at = links.transfer_at(iteration, began) or (lambda _, __: 0.0)
        seen: dict[int, dict[_Series, list[tuple[float, bool]]]] = {}
        held: dict[_Series, list[float]] = {}
        spaced: dict[tuple[int, _Series], float] = {}
        before: dict[_Series, float] = {}
        latencies: dict[tuple[int, _Series], float] = {}
        for message in deliver(ran).messages:
            leaves, sent = links.left(message, iteration, began), message.sent
            route = plan.routes[message.link]
            given_up = gone.get(message.link, INF) - began
            if route is Route.DIRECT and leaves > given_up - ROUNDING:
                # Given to the engine once its direct route was known to be gone.
                route, sent = Route.DELEGATED, max(sent, given_up)
            stamp, exact = self._observe(route, ran, message)
            latency = links.latency(message, iteration, began, max(0.0, leaves))
            wire = transfer_at(message.link, message.sent) + latency
            wire *= self._rng.gauss(1.0, NOISE)
            if self._rng.random() < OUTLIERS:
                wire *= OUTLIER
            where = _Series(message.link, message.forward, route)
            rows = seen.setdefault(int(stamp / WINDOW), {}).setdefault(where, [])
            rows.append((max(0.0, wire) + stamp - message.arrived, exact))
            if self._knows_latency(route):
                key = (int(stamp / WINDOW), where)
                latency *= max(0.0, self._rng.gauss(1.0, NOISE))
                latencies[key] = min(latencies.get(key, INF), latency)
            held.setdefault(where, []).append(max(0.0, leaves - sent))
            if leaves - sent > WAITED and where in before:
                key = (int(stamp / WINDOW), where)
                spaced[key] = min(spaced.get(key, INF), max(0.0, stamp - before[where]))
            before[where] = stamp
        return [
            (
                min((window + 1) * WINDOW, seconds),
                [
                    self._sample(
                        where,
                        rows,
                        replica,
                        queued=median(held[where]),
                        spacing=spaced.get((window, where)),
                        latency=latencies.get((window, where)),
                        failed_over=where.route is Route.DELEGATED and where.link in gone,
                    )
                    for where, rows in sorted(found.items())
                ],
            )
            for window, found in sorted(seen.items())
        ]

    def _observe(self, route: Route, ran: Simulation, message: Message) -> tuple[float, bool]:
        """When the receiver sees a message, and whether it knows that this was when it came."""
        if self._telemetry == "exact" or route is Route.DELEGATED:
            return message.arrived, True
        stage = message.link + 1 if message.forward else message.link
        ops = ran.ranks[ran.schedule.placement[stage]]
        running = ops[max(0, bisect_right(ops, message.arrived, key=lambda op: op.start) - 1)]
        if running.start <= message.arrived < running.end:
            return running.end, False
        return message.arrived, self._telemetry == "python"

    def _knows_latency(self, route: Route) -> bool:
        """Whether ranks measure the latency: of the notes beside direct messages, but not where
        NCCL may take another way than they do."""
        return route is Route.DIRECT and self._telemetry != "device"

    def _sample(
        self,
        where: _Series,
        rows: Sequence[tuple[float, bool]],
        replica: int,
        *,
        queued: float,
        spacing: float | None,
        latency: float | None,
        failed_over: bool,
    ) -> LinkSample:
        exact = [wire for wire, known in rows if known]
        values = sorted(exact or [wire for wire, _ in rows])
        return LinkSample(
            link=where.link,
            replica=replica,
            direction="forward" if where.forward else "backward",
            route=where.route,
            transport="gloo" if where.route is Route.DIRECT else "tcp",
            iteration=self._iteration,
            bytes=len(rows) << 20,
            wire=WireTime(
                count=len(rows),
                exact=len(exact),
                min=values[0],
                p50=median(values),
                p99=values[-1],
                mean=fmean(values),
            ),
            queue_p50=queued,
            spacing=spacing,
            latency=latency,
            failed_over=failed_over,
        )

    def _profile(self, stage: int, replica: int, plan: Plan, ran: Simulation) -> StageProfile:
        """What the stage's rank measures. If it fuses all backwards, that is one time for B and
        W. A forward that runs again is not part of its backward."""
        took: dict[OpKind, list[float]] = {}
        ops = ran.stages[stage]
        forward = _mean([op.end - op.start for op in ops if op.kind is OpKind.F])
        order = ran.schedule.stages[stage]
        for op, away in zip(ops, copying(order, plan.device_limits[stage]), strict=True):
            again = forward if away and op.kind is not OpKind.F else 0.0
            took.setdefault(op.kind, []).append(op.end - op.start - again)
        size, kept = self._links[replica].sizes(stage)
        fused = took.get(OpKind.BW)
        return StageProfile(
            stage=stage,
            replica=replica,
            forward=_mean(took[OpKind.F]),
            backward_input=_mean(took.get(OpKind.B) or took[OpKind.BW]),
            backward_weight=_mean(took[OpKind.W]) if OpKind.W in took else 0.0,
            fused_backward=_mean(fused) if fused else None,
            split="emulated",
            peak_memory=0,
            activation_bytes=size,
            input_bytes=kept,
        )

    def _send(
        self,
        now: float,
        *,
        links: Sequence[LinkSample] = (),
        iterations: Sequence[IterationSample] = (),
        stages: Sequence[StageProfile] = (),
        reductions: Sequence[ReductionSample] = (),
    ) -> None:
        self._ranks.observe(
            JobTelemetry(
                iteration=self._iteration,
                applied_plan_version=self._plan.version,
                links=links,
                iterations=iterations,
                stages=stages,
                reductions=reductions,
            ),
            now,
        )
        if self._observer.due(now):
            self._report(now)

    def _report(self, now: float) -> None:
        self._sequence += 1
        report = self._observer.report(self._sequence, now, self._observed)
        self._observer.delivered(report, self.controller.report(report, now))
        if (asked := self.controller.replan) is not None:
            self.controller.settle(asked, propose(asked), now)
        directive = self.controller.directive(self._observed)
        if directive is not None:
            self._observed = directive.plan_version
            self._prepared.append((now + DELIVERY, directive.plan.plan()))


def _mean(times: Sequence[float]) -> float:
    """In whole nanoseconds, as of a clock: rounding errors of sums must not choose the plan."""
    return round(fmean(times), 9)
