"""A trainer in simulation: runs iterations under a trace and reports them as ranks would.

The messages of an iteration are those of the simulator. Their wire times are measured with noise,
in windows, and go to the real controller; a directive is in effect in the iteration after the one
in which it reached all ranks, as they commit it.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from pipemorph.api.spec import JobSpec
from pipemorph.control import JobController, initial_plan
from pipemorph.control.decide.replan import propose
from pipemorph.control.observe.observer import JobTelemetry, Observer
from pipemorph.errors import InputError
from pipemorph.planning import Dispatch, Op, OpKind, Plan, Problem, Route, Simulation, link_on
from pipemorph.planning.ir import place_stages
from pipemorph.planning.offload import copying
from pipemorph.planning.problem import transfer_ms
from pipemorph.planning.simulation.costs import INF
from pipemorph.planning.simulation.interleaved import (
    InterleavedSchedule,
    simulate_interleaved,
)
from pipemorph.planning.simulation.messages import Message, deliver
from pipemorph.planning.simulation.simulator import following, simulate_changing
from pipemorph.replay.trace import LinkState, LinkTrace
from pipemorph.wire import IterationSample, LinkSample, StageProfile, WireTime

Telemetry = Literal["exact", "python", "device"]
"""How arrivals are observed on the direct route. exact: as they happen. python: a receiver that
computes sees a message at the end of its op, and says so. device: the same, and it never knows that
it was idle, as on CUDA. On the delegated route the engine sees all as they happen."""

DispatchChoice = Dispatch | Literal["auto"]
"""As of ``spec.schedule.dispatch``."""

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


class Links:
    """The links of a job in seconds: their own delay and transfer, and what a trace changes.

    Raises :class:`InputError` if a trace has rates of links whose messages have no stated size.
    """

    def __init__(self, problem: Problem, trace: LinkTrace) -> None:
        self._base = [link.delay for link in problem.links]
        self._transfers = [link.transfer for link in problem.links]
        self._bytes = [link.message_bytes for link in problem.links]
        for i, state in (pair for states in trace.states for pair in states.items()):
            if state.gbps is not None and self._bytes[i] is None:
                raise InputError(f"the trace has gbps of link {i}; set links[{i}].message_bytes")
        narrow = any(state.gbps for states in trace.states for state in states.values())
        self._rates = narrow or any(self._transfers)
        self._half = [link.half_duplex for link in problem.links]
        self._problem, self._trace = problem, trace
        self.rank_of = ranks_of(problem)
        for states in trace.states:
            for i in states:
                if self.within(i):
                    raise InputError(
                        f"the trace has a state of link {i}, whose stages are both on rank"
                        f" {self.rank_of[i]}: no message of it leaves the rank"
                    )

    def within(self, link: int) -> bool:
        """Whether both ends of a link are on one rank."""
        return self.rank_of[link] == self.rank_of[link + 1]

    def sizes(self, stage: int) -> tuple[int | None, int | None]:
        """Bytes of a microbatch's activations and of its inputs that lead to the stage's
        ``recompute_limit``; None if it has none."""
        limits = self._problem.stages[stage]
        if not limits.may_recompute or not limits.in_flight_limit or limits.in_flight_limit == 1:
            return None, None
        return limits.recompute_limit, limits.in_flight_limit - 1

    def under(self, routes: Sequence[Route]) -> Problem:
        """The problem with links as they are without a fault, for messages on ``routes``."""
        links = [
            link_on(route, base, half_duplex=half).model_copy(update={"transfer": transfer})
            for route, base, transfer, half in zip(
                routes, self._base, self._transfers, self._half, strict=True
            )
        ]
        return self._problem.model_copy(update={"links": tuple(links)})

    def bubble_fraction(self, ran: Simulation) -> float:
        """Idle time of the ranks over ranks × makespan."""
        busy = (1.0 - ran.bubble_fraction) * len(ran.stages)
        return max(0.0, 1.0 - busy / len(set(self.rank_of)))

    def pace(self) -> Pace:
        """Of another trainer that begins."""
        return Pace(self._problem)

    def changed(self, iteration: int, now: float) -> Mapping[int, LinkState]:
        """The links that are not well."""
        return self._trace.at(float(iteration) if self._trace.unit == "iterations" else now)

    def delay_at(self, iteration: int, began: float) -> Callable[[int, float], float]:
        """(link, seconds since the iteration began) → delay of a message sent then."""

        def delay(link: int, sent: float) -> float:
            state = self.changed(iteration, began + sent).get(link)
            return self._base[link] + (state.delay if state is not None else 0.0)

        return delay

    def transfer(self, link: int, state: LinkState | None) -> float:
        """How long a message occupies a link in a state."""
        nbytes = self._bytes[link]
        if state is None or state.gbps is None or nbytes is None:
            return self._transfers[link]
        return transfer_ms(nbytes, state.gbps) / 1e3

    def transfer_at(self, iteration: int, began: float) -> Callable[[int, float], float] | None:
        """The same for how long a message occupies the link; None if none has a rate."""
        if not self._rates:
            return None
        return lambda link, sent: self.transfer(
            link, self.changed(iteration, began + sent).get(link)
        )

    def run(
        self, plan: Plan, iteration: int, began: float, before: Sequence[float] | None = None
    ) -> Simulation:
        """An iteration of ``plan`` that begins ``began`` seconds after training did. ``before``:
        when each stage may begin, counted from then; see :class:`Pace`."""
        problem = self.under(plan.routes).under(plan)
        delay_at = self.delay_at(iteration, began)
        transfer_at = self.transfer_at(iteration, began)
        if plan.turns:
            order = InterleavedSchedule.of_plan(plan)
            return simulate_interleaved(
                order, problem, delay_at=delay_at, transfer_at=transfer_at
            ).simulation
        return simulate_changing(
            plan.schedule,
            problem,
            delay_at,
            plan.dispatch,
            transfer_at=transfer_at,
            before=before,
        )


class Pace:
    """Makes iterations follow each other: all stages begin the next one when the last stage has
    ended, or, without a barrier, each when it has ended itself."""

    def __init__(self, problem: Problem) -> None:
        self.barrier = problem.objective == "makespan"
        self.before: list[float] | None = None
        """When each stage may begin the next iteration, counted from its begin on stage 0."""

    def follow(self, ran: Simulation) -> float:
        """Seconds from the begin of an iteration to that of the next, which is then the one that
        follows."""
        if self.barrier:
            return ran.makespan
        took, self.before = following(ran.free, ran.after)
        return took


def ranks_of(problem: Problem) -> tuple[int, ...]:
    """The rank of each stage. Raises :class:`InputError` if ranks do not share the stages evenly,
    or for an objective that ranks with several stages do not know."""
    count, ranks = problem.stage_count, problem.ranks
    if ranks is None or ranks == count:
        return tuple(range(count))
    problem.check_makespan("a replay of ranks with several stages")
    if count % ranks:
        raise InputError(f"ranks is {ranks}; expected a number that divides {count} stages")
    return place_stages(count, ranks, problem.placement)


def job_spec(problem: Problem, dispatch: DispatchChoice) -> JobSpec:
    """The spec of a job of this problem (milliseconds), as its user would write it.

    Raises :class:`InputError` for what a replay does not know.
    """
    for i, stage in enumerate(problem.stages):
        if stage.device_limit is not None:
            raise InputError(f"stages[{i}].device_limit is set; a replay does not offload")
    caps = problem.in_flight_limits()
    half = {link.half_duplex for link in problem.links}
    if len(half) > 1:
        raise InputError("some links have half_duplex; a replay needs all of them, or none")
    times = [
        {
            "forward": stage.forward,
            "backwardInput": stage.backward_input,
            "backwardWeight": stage.backward_weight,
            "fusedBackward": stage.fused_backward,
        }
        for stage in problem.stages
    ]
    schedule = {
        "microbatches": problem.microbatches,
        "stageTimes": times,
        "dispatch": str(dispatch),
        "warmup": list(problem.warmup) if problem.warmup else None,
        "recompute": "auto" if any(s.may_recompute for s in problem.stages) else "never",
    }
    if any(cap is not None for cap in caps):
        schedule["inFlightLimit"] = [cap or problem.microbatches for cap in caps]
    parallelism: dict[str, object] = {"stages": problem.stage_count}
    ranks = len(set(ranks_of(problem)))
    if ranks < problem.stage_count:
        each = {"stagesPerRank": problem.stage_count // ranks, "stagePlacement": problem.placement}
        parallelism |= each
    return JobSpec.model_validate(
        {
            "parallelism": parallelism,
            "schedule": schedule,
            "trainer": {"module": "replay", "iterations": 1_000_000},
            "transport": {"directDuplex": "half" if True in half else "full"},
        }
    )


TIMES = ("forward", "backward_input", "backward_weight", "fused_backward", "reduction")


def in_seconds(problem: Problem) -> Problem:
    """A problem file's milliseconds as seconds."""
    stages = tuple(
        stage.model_copy(
            update={
                name: value / 1e3 for name in TIMES if (value := getattr(stage, name)) is not None
            }
        )
        for stage in problem.stages
    )
    links = tuple(
        link.model_copy(update={"delay": link.delay / 1e3, "transfer": link.transfer / 1e3})
        for link in problem.links
    )
    return problem.model_copy(update={"stages": stages, "links": links})


class AdaptiveTrainer:
    """The product as it ships. ``controller`` has the records of what it changed and why."""

    def __init__(self, spec: JobSpec, links: Links, telemetry: Telemetry, seed: int) -> None:
        self.controller = JobController(spec)
        self._links, self._telemetry = links, telemetry
        self._pace = links.pace()
        self._rng = random.Random(seed)
        self._plan = initial_plan(spec)
        self._prepared: list[tuple[float, Plan]] = []
        """Plans to come, oldest first, and when all ranks hold them."""
        self._observed = self._sequence = self._iteration = 0
        self._now = 0.0
        self._observer = Observer(
            spec.parallelism.mesh, job="replay", namespace="default", attempt=0
        )
        self._report(0.0)  # An agent reports before its ranks measure anything.

    def step(self) -> Iteration:
        """Run the next iteration."""
        index, began = self._iteration, self._now
        while self._prepared and began >= self._prepared[0][0]:
            self._plan = self._prepared.pop(0)[1]
        ran = self._links.run(self._plan, index, began, self._pace.before)
        seconds = self._pace.follow(ran)
        for end, samples in self._windows(ran, index, began, seconds):
            self._send(began + end, links=samples)
        self._now = began + seconds
        self._iteration += 1
        finished = IterationSample(
            index=index,
            seconds=seconds,
            loss=None,
            plan_version=self._plan.version,
            bubble_fraction=self._links.bubble_fraction(ran),
            barrier=self._pace.barrier,
        )
        profiles = [self._profile(i, ran) for i in range(len(ran.stages))]
        self._send(self._now, iterations=[finished], stages=profiles)
        return Iteration(seconds, self._plan.version)

    def _windows(
        self, ran: Simulation, iteration: int, began: float, seconds: float
    ) -> list[tuple[float, list[LinkSample]]]:
        """Per window, its end since the iteration began and the samples of all links. ``seconds``:
        until the next iteration begins, in which the last windows of this one may end."""
        delay_at = self._links.delay_at(iteration, began)
        transfer_at = self._links.transfer_at(iteration, began) or (lambda _, __: 0.0)
        seen: dict[int, dict[tuple[int, bool], list[tuple[float, bool]]]] = {}
        held: dict[tuple[int, bool], list[float]] = {}
        spaced: dict[tuple[int, int, bool], float] = {}
        before: dict[tuple[int, bool], float] = {}
        latencies: dict[tuple[int, int, bool], float] = {}
        for message in deliver(ran).messages:
            if self._links.within(message.link):
                continue
            stamp, exact = self._observe(ran, message)
            transfer = transfer_at(message.link, message.sent)
            leaves = message.arrived - delay_at(message.link, message.sent) - transfer
            latency = delay_at(message.link, max(0.0, leaves))
            wire = transfer + latency
            wire *= self._rng.gauss(1.0, NOISE)
            if self._rng.random() < OUTLIERS:
                wire *= OUTLIER
            where = (message.link, message.forward)
            rows = seen.setdefault(int(stamp / WINDOW), {}).setdefault(where, [])
            rows.append((max(0.0, wire) + stamp - message.arrived, exact))
            if self._knows_latency(message.link):
                key = (int(stamp / WINDOW), *where)
                latency *= max(0.0, self._rng.gauss(1.0, NOISE))
                latencies[key] = min(latencies.get(key, INF), latency)
            held.setdefault(where, []).append(max(0.0, leaves - message.sent))
            if leaves - message.sent > WAITED and where in before:
                key = (int(stamp / WINDOW), *where)
                spaced[key] = min(spaced.get(key, INF), max(0.0, stamp - before[where]))
            before[where] = stamp
        return [
            (
                min((window + 1) * WINDOW, seconds),
                [
                    self._sample(
                        link,
                        forward,
                        rows,
                        queued=median(held[link, forward]),
                        spacing=spaced.get((window, link, forward)),
                        latency=latencies.get((window, link, forward)),
                    )
                    for (link, forward), rows in sorted(links.items())
                ],
            )
            for window, links in sorted(seen.items())
        ]

    def _observe(self, ran: Simulation, message: Message) -> tuple[float, bool]:
        """When the receiver sees a message, and whether it knows that this was when it came."""
        if self._telemetry == "exact" or self._plan.routes[message.link] is Route.DELEGATED:
            return message.arrived, True
        stage = message.link + 1 if message.forward else message.link
        rank = self._links.rank_of[stage]
        ops = sorted(
            (
                op
                for ops, mine in zip(ran.stages, self._links.rank_of, strict=True)
                if mine == rank
                for op in ops
            ),
            key=lambda op: op.start,
        )
        running = ops[max(0, bisect_right(ops, message.arrived, key=lambda op: op.start) - 1)]
        if running.start <= message.arrived < running.end:
            return running.end, False
        return message.arrived, self._telemetry == "python"

    def _knows_latency(self, link: int) -> bool:
        """Whether ranks measure the latency: of the notes beside direct messages, but not where
        NCCL may take another way than they do."""
        return self._plan.routes[link] is Route.DIRECT and self._telemetry != "device"

    def _sample(
        self,
        link: int,
        forward: bool,
        rows: Sequence[tuple[float, bool]],
        *,
        queued: float,
        spacing: float | None,
        latency: float | None,
    ) -> LinkSample:
        exact = [wire for wire, known in rows if known]
        values = sorted(exact or [wire for wire, _ in rows])
        return LinkSample(
            link=link,
            direction="forward" if forward else "backward",
            route=self._plan.routes[link],
            transport="gloo" if self._plan.routes[link] is Route.DIRECT else "tcp",
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
        )

    def _profile(self, stage: int, ran: Simulation) -> StageProfile:
        """What the stage's rank measures. If it fuses all backwards, that is one time for B and
        W. A forward that runs again is not part of its backward."""
        took: dict[OpKind, list[float]] = {}
        ops = ran.stages[stage]
        forward = _mean([op.end - op.start for op in ops if op.kind is OpKind.F])
        order = [Op(op.kind, op.microbatch) for op in ops]
        for op, away in zip(ops, copying(order, self._plan.device_limits[stage]), strict=True):
            again = forward if away and op.kind is not OpKind.F else 0.0
            took.setdefault(op.kind, []).append(op.end - op.start - again)
        size, kept = self._links.sizes(stage)
        fused = took.get(OpKind.BW)
        return StageProfile(
            stage=stage,
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
    ) -> None:
        self._observer.observe(
            JobTelemetry(
                iteration=self._iteration,
                applied_plan_version=self._plan.version,
                links=links,
                iterations=iterations,
                stages=stages,
            ),
            now,
        )
        if self._observer.due(now):
            self._report(now)

    def _report(self, now: float) -> None:
        self._sequence += 1
        report = self._observer.report(self._sequence, now, self._observed)
        self._observer.delivered(report, self.controller.report(report, now), now)
        if (asked := self.controller.replan) is not None:
            self.controller.settle(asked, propose(asked), now)
        directive = self.controller.directive(self._observed)
        if directive is not None:
            self._observed = directive.plan_version
            self._prepared.append((now + DELIVERY, directive.plan.plan()))


def _mean(times: Sequence[float]) -> float:
    """In whole nanoseconds, as of a clock: rounding errors of sums must not choose the plan."""
    return round(fmean(times), 9)
