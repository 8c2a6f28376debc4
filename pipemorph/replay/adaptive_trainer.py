"""Simulated trainer that runs iterations under a trace and reports them as ranks would.

The simulator provides the messages of an iteration. Their wire times are measured with noise, in
windows, and go to the real controller. As in training, a directive takes effect in the iteration
after the one in which it reached all ranks.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal, NamedTuple

from pipemorph.control import JobController, initial_plan
from pipemorph.control.decide.plan_choice import decide
from pipemorph.detection.job_observer import JobObserver
from pipemorph.planning import OpKind, Plan, Route, Simulation
from pipemorph.planning.offload import find_copying_ops
from pipemorph.planning.simulation.execution import INF
from pipemorph.planning.simulation.simulator import Message, trace_messages
from pipemorph.protocol import IterationSample, LinkSample, ReductionSample, StageProfile, WireTime
from pipemorph.replay.replayed_ranks import JobTelemetry, ReplayedRanks
from pipemorph.replay.simulated_links import ROUNDING, SimulatedLinks, fail_over_links
from pipemorph.spec.job_spec import JobSpec

Telemetry = Literal["exact", "python", "device"]
"""Observation of arrivals on the direct route. exact: as they happen. python: a receiver that
computes sees a message at the end of its op, and reports so. device: like python, but no arrival
counts as exact, as on CUDA, where events cannot be timed closely enough. On the delegated route the
engine sees arrivals as they happen."""

LEAST_QUEUE_SECONDS = 0.001
"""Seconds in the queue from which a message counts as delayed, as in the ranks' recorders."""
WINDOW_SECONDS = 0.05
"""Seconds of a window of link samples."""
DELIVERY_SECONDS = 0.1
"""Seconds from the end of a window until all ranks hold the resulting plan: report, decision,
directive, and its preparation between two ops."""
NOISE = 0.05
"""Relative standard deviation of a measured wire time."""
OUTLIERS, OUTLIER = 0.01, 4.0
"""Share of messages that are measured far too long, and the factor."""


@dataclass(frozen=True)
class ReplayedIteration:
    """Finished iteration. ``seconds``: its time; ``version``: of its plan."""

    seconds: float
    version: int


class _MessageSeries(NamedTuple):
    """Messages that are measured together."""

    link: int
    forward: bool
    route: Route


class AdaptiveTrainer:
    """Trainer with the adaptation as it ships. ``controller`` has the records of its plan changes.
    ``links``: of each replica."""

    def __init__(
        self, spec: JobSpec, links: Sequence[SimulatedLinks], telemetry: Telemetry, seed: int
    ) -> None:
        # A trace is a part of a job: its end says nothing about the useful life of a plan.
        self.controller = JobController(spec, endless=True)
        self._links, self._telemetry = links, telemetry
        self._abandoned_links: list[dict[int, float]] = [{} for _ in links]
        """Links of each replica whose direct route was abandoned for good, and when."""
        self._pace = links[0].make_pacer()
        self._rng = random.Random(seed)
        self._plan = initial_plan(spec)
        self._prepared: list[tuple[float, Plan]] = []
        """Pending plans, oldest first, with the time at which all ranks hold them."""
        self._observed = self._sequence = self._iteration = 0
        self._now = 0.0
        self._observer = JobObserver(
            spec.parallelism.mesh, job="replay", namespace="default", attempt=0
        )
        self._ranks = ReplayedRanks(spec.parallelism.mesh, self._observer)
        self._exchange_report(0.0)  # An agent reports before its ranks measure anything.

    def step(self) -> ReplayedIteration:
        """Run the next iteration."""
        index, began = self._iteration, self._now
        while self._prepared and began >= self._prepared[0][0]:
            self._plan = self._prepared.pop(0)[1]
        # A link whose direct route broke stays delegated under every plan.
        plans = [fail_over_links(self._plan, gone) for gone in self._abandoned_links]
        ran = [
            links.simulate_iteration(plan, index, began, self._pace.rank_starts, gone)
            for plan, links, gone in zip(plans, self._links, self._abandoned_links, strict=True)
        ]
        seconds = self._pace.advance_iteration(max(ran, key=lambda each: each.makespan))
        windows: dict[float, list[LinkSample]] = {}
        for replica, each in enumerate(ran):
            at = (index, began, seconds)
            for end, samples in self._sample_windows(replica, plans[replica], each, at):
                windows.setdefault(end, []).extend(samples)
        for end, samples in sorted(windows.items()):
            self._send_telemetry(began + end, links=samples)
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
            self._profile_stage(i, replica, plan, each)
            for replica, (plan, each) in enumerate(zip(plans, ran, strict=True))
            for i in range(len(each.stages))
        ]
        reductions = self._sample_reductions(index, began)
        self._send_telemetry(
            self._now, iterations=[finished], stages=profiles, reductions=reductions
        )
        return ReplayedIteration(seconds, self._plan.version)

    def _sample_reductions(self, iteration: int, began: float) -> list[ReductionSample]:
        """Reductions as the ranks of replica 0 measure them."""
        if len(self._links) == 1:
            return []
        return [
            ReductionSample(
                stage=stage, iteration=iteration, bytes=1 << 20, buckets=1, seconds=seconds,
                exposed=seconds, waited=seconds,
            )
            for stage, seconds in enumerate(
                self._links[0].list_exposed_reductions(iteration, began)
            )
        ]  # fmt: skip

    def _sample_windows(
        self,
        replica: int,
        plan: Plan,
        ran: Simulation,
        at: tuple[int, float, float],
    ) -> list[tuple[float, list[LinkSample]]]:
        """Windows of an iteration: end, in seconds since its start, and the samples of all links of
        a replica. ``at``: the iteration, its start, and seconds until the next one begins; the last
        windows end there at the latest."""
        iteration, began, seconds = at
        links, gone = self._links[replica], self._abandoned_links[replica]
        transfer_at = links.make_transfer_function(iteration, began) or (lambda _, __: 0.0)
        seen: dict[int, dict[_MessageSeries, list[tuple[float, bool]]]] = {}
        held: dict[_MessageSeries, list[float]] = {}
        spaced: dict[tuple[int, _MessageSeries], float] = {}
        before: dict[_MessageSeries, float] = {}
        latencies: dict[tuple[int, _MessageSeries], float] = {}
        for message in trace_messages(ran).messages:
            leaves, sent = links.compute_departure(message, iteration, began), message.sent
            route = plan.routes[message.link]
            given_up = gone.get(message.link, INF) - began
            if route is Route.DIRECT and leaves > given_up - ROUNDING:
                # The engine got the message when its direct route was abandoned.
                route, sent = Route.DELEGATED, max(sent, given_up)
            stamp, exact = self._observe_arrival(route, ran, message)
            latency = links.compute_latency(message, iteration, began, max(0.0, leaves))
            wire = transfer_at(message.link, message.sent) + latency
            wire *= self._rng.gauss(1.0, NOISE)
            if self._rng.random() < OUTLIERS:
                wire *= OUTLIER
            where = _MessageSeries(message.link, message.forward, route)
            rows = seen.setdefault(int(stamp / WINDOW_SECONDS), {}).setdefault(where, [])
            rows.append((max(0.0, wire) + stamp - message.arrived, exact))
            if self._measures_latency(route):
                key = (int(stamp / WINDOW_SECONDS), where)
                latency *= max(0.0, self._rng.gauss(1.0, NOISE))
                latencies[key] = min(latencies.get(key, INF), latency)
            held.setdefault(where, []).append(max(0.0, leaves - sent))
            if leaves - sent > LEAST_QUEUE_SECONDS and where in before:
                key = (int(stamp / WINDOW_SECONDS), where)
                spaced[key] = min(spaced.get(key, INF), max(0.0, stamp - before[where]))
            before[where] = stamp
        return [
            (
                min((window + 1) * WINDOW_SECONDS, seconds),
                [
                    self._make_link_sample(
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

    def _observe_arrival(
        self, route: Route, ran: Simulation, message: Message
    ) -> tuple[float, bool]:
        """Time at which the receiver sees a message, and True if that is known as its arrival."""
        if self._telemetry == "exact" or route is Route.DELEGATED:
            return message.arrived, True
        stage = message.link + 1 if message.forward else message.link
        ops = ran.ranks[ran.schedule.placement[stage]]
        running = ops[max(0, bisect_right(ops, message.arrived, key=lambda op: op.start) - 1)]
        if running.start <= message.arrived < running.end:
            return running.end, False
        return message.arrived, self._telemetry == "python"

    def _measures_latency(self, route: Route) -> bool:
        """True if ranks measure the latency. They time the notes that accompany direct messages,
        but not on devices, where NCCL may use another path than the notes."""
        return route is Route.DIRECT and self._telemetry != "device"

    def _make_link_sample(
        self,
        where: _MessageSeries,
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

    def _profile_stage(self, stage: int, replica: int, plan: Plan, ran: Simulation) -> StageProfile:
        """Profile of a stage as its rank measures it. If all backwards are fused, B and W have one
        time. A forward that runs again is not part of its backward."""
        took: dict[OpKind, list[float]] = {}
        ops = ran.stages[stage]
        forward = _average_times([op.end - op.start for op in ops if op.kind is OpKind.F])
        order = ran.schedule.stages[stage]
        for op, away in zip(ops, find_copying_ops(order, plan.device_limits[stage]), strict=True):
            again = forward if away and op.kind is not OpKind.F else 0.0
            took.setdefault(op.kind, []).append(op.end - op.start - again)
        size, inputs = self._links[replica].get_memory_sizes(stage)
        fused = took.get(OpKind.BW)
        return StageProfile(
            stage=stage,
            replica=replica,
            forward=_average_times(took[OpKind.F]),
            backward_input=_average_times(took.get(OpKind.B) or took[OpKind.BW]),
            backward_weight=_average_times(took[OpKind.W]) if OpKind.W in took else 0.0,
            fused_backward=_average_times(fused) if fused else None,
            split="emulated",
            peak_memory=0,
            activation_bytes=size,
            input_bytes=inputs,
        )

    def _send_telemetry(
        self,
        now: float,
        *,
        links: Sequence[LinkSample] = (),
        iterations: Sequence[IterationSample] = (),
        stages: Sequence[StageProfile] = (),
        reductions: Sequence[ReductionSample] = (),
    ) -> None:
        self._ranks.process_telemetry(
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
        if self._observer.is_report_due(now):
            self._exchange_report(now)

    def _exchange_report(self, now: float) -> None:
        self._sequence += 1
        report = self._observer.build_report(self._sequence, now, self._observed)
        self._observer.record_delivery(report, self.controller.process_report(report, now))
        if (request := self.controller.pending_request) is not None:
            self.controller.apply_proposal(request, decide(request), now)
        directive = self.controller.get_directive(self._observed)
        if directive is not None:
            self._observed = directive.plan_version
            self._prepared.append((now + DELIVERY_SECONDS, directive.plan.to_plan()))


def _average_times(times: Sequence[float]) -> float:
    """Mean in whole nanoseconds, as of a clock: rounding of sums must not choose the plan."""
    return round(fmean(times), 9)
