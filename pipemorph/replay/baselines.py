"""Trainers that run through the same trace, from 1F1B to an oracle that has read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

from pipemorph.control import AdaptationRecord
from pipemorph.control.decide.forecast import MOST_SEARCH_EFFORT
from pipemorph.errors import InputError
from pipemorph.planning import Dispatch, Plan, Policy, Problem, Route, Simulation, plan
from pipemorph.planning.simulation.execution import Costs
from pipemorph.replay.adaptive_trainer import AdaptiveTrainer, Telemetry
from pipemorph.replay.link_trace import TAIL_ITERATIONS, LinkTrace, TracedLink, TracedStage
from pipemorph.replay.simulated_links import (
    DispatchChoice,
    NoRouteError,
    SimulatedLinks,
    build_job_spec,
    convert_to_seconds,
    fail_over_links,
    lengthen_reductions,
    slow_down_stages,
)
from pipemorph.views.explanation.job_explanation import describe_plan_change


class ReplayedChange(NamedTuple):
    """Change of plan. ``iteration``: the first under the new plan, None if never in effect.
    ``promised`` and ``measured``: saving as a fraction of an iteration. ``sentence``: the change
    as ``explain`` prints it, with its cause."""

    iteration: int | None
    reason: str
    promised: float | None
    measured: float | None
    sentence: str

    @staticmethod
    def from_record(record: AdaptationRecord) -> ReplayedChange:
        """Change from the controller's record."""
        return ReplayedChange(
            record.applied_at_iteration,
            record.reason,
            record.promised,
            record.measured,
            # The cause is the first part of a reason; the others are the controller's arithmetic.
            f"{describe_plan_change(record, record.routes, coming=0)}; why:"
            f" {record.reason.partition('; ')[0]}",
        )

    def to_json(self) -> dict[str, Any]:
        """JSON fields, with the full reason in place of the sentence."""
        return {name: value for name, value in self._asdict().items() if name != "sentence"}


@dataclass(frozen=True)
class TrainingRun:
    """Training through the trace. ``iteration_seconds``: seconds of each iteration. ``end_reason``:
    reason why training ended early; None if it completed."""

    iteration_seconds: tuple[float, ...]
    end_reason: str | None = None

    @property
    def seconds(self) -> float | None:
        """Seconds of all iterations; None if training ended early."""
        return None if self.end_reason is not None else sum(self.iteration_seconds)


@dataclass(frozen=True)
class ReplayResult:
    """Result of a replay. ``runs``: per contender, from the simplest to the oracle."""

    iterations: int
    runs: dict[str, TrainingRun]
    changes: list[ReplayedChange]

    @property
    def seconds(self) -> dict[str, float | None]:
        """Seconds of training; None for contenders that ended early."""
        return {name: trained.seconds for name, trained in self.runs.items()}

    def compute_iterations_per_minute(self, name: str) -> float | None:
        """Iterations per minute; None if the contender ended early or took no time."""
        seconds = self.runs[name].seconds
        return 60 * self.iterations / seconds if seconds else None

    def compute_oracle_share(self, name: str) -> float | None:
        """Gain of a contender over ``static`` as a share of the oracle's. None if the oracle gains
        nothing, or one of the three ended early."""
        static, took, oracle = (self.runs[n].seconds for n in ("static", name, "oracle"))
        if static is None or took is None or oracle is None or static <= oracle:
            return None
        return (static - took) / (static - oracle)

    def compute_harm(self, name: str, span: int | None = None) -> float:
        """Largest fraction by which a contender takes longer than ``static``: over any ``span``
        iterations in a row, or over all that both have run."""
        pairs = list(
            zip(
                self.runs["static"].iteration_seconds,
                self.runs[name].iteration_seconds,
                strict=False,
            )
        )
        span = min(span or len(pairs), len(pairs))
        spans = (pairs[k : k + span] for k in range(len(pairs) - span + 1))
        sums = [tuple(map(sum, zip(*each, strict=True))) for each in spans]
        return max(took / static - 1 for static, took in sums if static)

    def to_json(self) -> dict[str, Any]:
        """JSON fields. A contender that ended early also has a ``reason``."""
        return {
            "contenders": {
                name: {
                    "seconds": trained.seconds,
                    "iterations_per_minute": self.compute_iterations_per_minute(name),
                    "share_of_oracle_gain": self.compute_oracle_share(name),
                }
                | ({} if trained.end_reason is None else {"reason": trained.end_reason})
                for name, trained in self.runs.items()
            },
            "changes": [change.to_json() for change in self.changes],
        }


def replay_trace(
    problem: Problem,
    trace: LinkTrace,
    *,
    telemetry: Telemetry = "exact",
    dispatch: DispatchChoice = "auto",
    delegation: float = 0.0,
    replicas: int = 1,
    iterations: int | None = None,
    seed: int = 0,
    known: ReplayResult | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> ReplayResult:
    """Train through ``trace`` with every contender. ``problem`` is in milliseconds.

    ``dispatch``: of ``adaptive``. ``delegation``: see
    :class:`~pipemorph.replay.simulated_links.SimulatedLinks`. ``replicas``: number of replicas;
    their iterations end together. ``iterations``: number of iterations, by default until the last
    line of the trace and :data:`~pipemorph.replay.link_trace.TAIL_ITERATIONS` more. ``known``: a
    replay of the same problem, trace and iterations, which provides the other contenders. ``note``
    receives the contender that trains next. Raises :class:`InputError` for a problem that a replay
    does not support.
    """
    problem.require_equal_microbatches("replay")
    spec = build_job_spec(problem, dispatch, replicas)
    problem = convert_to_seconds(problem)
    each = [
        SimulatedLinks(problem, trace.select_replica(replica), delegation, f"{seed} {replica}")
        for replica in range(replicas)
    ]
    links = each[0]
    well = links.build_problem((Route.DIRECT,) * len(problem.links))
    fixed = {
        name: _plan_direct(well, policy) for name, policy in _list_fixed_policies(problem).items()
    }
    if iterations is None:
        iterations = _count_iterations(trace, each, fixed["static"])

    adaptive = AdaptiveTrainer(spec, each, telemetry, seed)

    def train(name: str, step: Step) -> TrainingRun:
        note(f"{iterations} iterations: {name}")
        return _run_training(iterations, step)

    took = {"adaptive": train("adaptive", lambda _, __: adaptive.step().seconds)}
    if known is not None:
        trained = known.runs | took
    else:
        trained = {name: train(name, _make_fixed_step(each, made)) for name, made in fixed.items()}
        oracles = [OracleTrainer(problem, mine, fixed["static"]).step for mine in each]
        trained |= took | {"oracle": train("oracle", _combine_steps(oracles))}
    return ReplayResult(
        iterations,
        trained,
        [ReplayedChange.from_record(each) for each in adaptive.controller.records],
    )


class OracleTrainer:
    """Trainer with foreknowledge of the trace. For each iteration it runs the best plan for its
    delays, direct or with the slow links delegated, at once and at no cost.

    ``late``: makes an oracle that detects a change only in the first iteration under it. That
    iteration runs ``late(plan)`` of the plan before. No trainer that has to see a fault first and
    changes its plan between iterations is quicker.
    """

    def __init__(
        self,
        problem: Problem,
        links: SimulatedLinks,
        static: Plan,
        *,
        late: Callable[[Plan], Plan] | None = None,
    ) -> None:
        self._problem, self._links, self._static = problem, links, static
        self._late, self._last = late, static
        self._slow: frozenset[int] = frozenset()
        self._made = cache(self._make_plan)
        self._pace = links.make_pacer()
        self._begins = Costs.from_problem(problem).compute_first_starts()

    def step(self, iteration: int, now: float) -> float:
        """Seconds of an iteration that begins ``now`` seconds after training did."""
        ran: list[tuple[Plan, Simulation]] = []
        with suppress(NoRouteError):  # Plans that would lose messages are no candidates.
            ran.append((self._static, self._simulate_plan(self._static, iteration, now)))
        # States that change within the iteration: plan for their mean.
        span = (ran[0] if ran else self._delegate_all_links(iteration, now))[1].makespan / 16
        moments = [self._links.get_changed_links(iteration, now + k * span) for k in range(16)]
        late, slow = (
            self._links.get_reduction_delays(iteration, now),
            self._links.get_slow_stages(iteration, now),
        )
        for each in self._make_candidate_plans(moments, late, slow):
            with suppress(NoRouteError):
                ran.append((each, self._simulate_plan(each, iteration, now)))
        ran = ran or [self._delegate_all_links(iteration, now)]
        best, quickest = min(ran, key=lambda pair: self._compute_end(pair[1]))
        links = frozenset(moments[0])
        if self._late is not None and links != self._slow:
            # The late oracle does not foresee a route that is down either: it loses messages first.
            quickest = self._simulate_plan(self._late(self._last), iteration, now, {})
        self._last, self._slow = best, links
        return self._pace.advance_iteration(quickest)

    def _delegate_all_links(self, iteration: int, now: float) -> tuple[Plan, Simulation]:
        """Static plan with all links delegated, and its iteration."""
        plan = fail_over_links(self._static, dict.fromkeys(range(len(self._problem.links)), now))
        return plan, self._simulate_plan(plan, iteration, now)

    def _simulate_plan(
        self, plan: Plan, iteration: int, now: float, gone: dict[int, float] | None = None
    ) -> Simulation:
        return self._links.simulate_iteration(plan, iteration, now, self._pace.rank_starts, gone)

    def _compute_end(self, ran: Simulation) -> float:
        """End of the iteration; without a barrier, time by which it delays the next one."""
        if self._pace.barrier:
            return ran.makespan
        return max(ops[-1].end - begin for ops, begin in zip(ran.stages, self._begins, strict=True))

    def _make_candidate_plans(
        self,
        moments: Sequence[Mapping[int, TracedLink]],
        late: Mapping[int, float],
        slow: Mapping[int, TracedStage],
    ) -> list[Plan]:
        if not (any(moments) or late or slow):
            return []
        states = [[each.get(link) for each in moments] for link in range(len(self._problem.links))]
        delays = tuple(fmean(s.mean_delay if s else 0.0 for s in each) for each in states)
        transfers = tuple(
            fmean(self._links.compute_transfer(link, s) for s in each)
            for link, each in enumerate(states)
        )
        other = tuple(sorted(late.items())), tuple(sorted(slow.items()))
        down = tuple(any(s.down for s in each if s) for each in states)
        return [self._made(delays, transfers, other, down, route) for route in Route]

    def _make_plan(
        self,
        delays: tuple[float, ...],
        transfers: tuple[float, ...],
        other: tuple[tuple[tuple[int, float], ...], tuple[tuple[int, TracedStage], ...]],
        down: tuple[bool, ...],
        slow: Route,
    ) -> Plan:
        own = self._problem.links
        routes = tuple(
            Route.DELEGATED
            if failed
            else (slow if delay or transfer != link.transfer else Route.DIRECT)
            for delay, transfer, failed, link in zip(delays, transfers, down, own, strict=True)
        )
        well = self._links.build_problem(routes)
        links = tuple(
            link.model_copy(update={"delay": link.delay + delay, "transfer": transfer})
            for link, delay, transfer in zip(well.links, delays, transfers, strict=True)
        )
        late, stages = other
        problem = slow_down_stages(well.model_copy(update={"links": links}), dict(stages))
        problem = lengthen_reductions(problem, dict(late))
        return plan(problem, effort=MOST_SEARCH_EFFORT).to_plan(0, routes)


def _list_fixed_policies(problem: Problem) -> dict[str, Policy]:
    """Contenders that never change their plan, with their policies. If ranks have several stages,
    only the rule for the placement is among them."""
    rules = {"1f1b": Policy.ONE_F_ONE_B, "zero-bubble": Policy.ZERO_BUBBLE}
    if problem.multi_stage:
        rules = {"1f1b": Policy.ONE_F_ONE_B_INTERLEAVED}
        if problem.placement == "v":
            rules = {"zero-bubble": Policy.ZERO_BUBBLE_V}
    return rules | {"static": Policy.PIPEMORPH}


def _plan_direct(problem: Problem, policy: Policy) -> Plan:
    routes = (Route.DIRECT,) * len(problem.links)
    return plan(problem, policy).to_plan(0, routes)


Step = Callable[[int, float], float]
"""Seconds of an iteration, and of training before it → seconds that the iteration takes."""


def _make_fixed_step(
    each: Sequence[SimulatedLinks], made: Plan, *, fails_over: bool = False
) -> Step:
    """Trainer that never changes its plan. ``each``: links of each replica. ``fails_over``: links
    whose direct route fails are delegated."""

    def make_replica_step(links: SimulatedLinks) -> Step:
        pace = links.make_pacer()
        gone: dict[int, float] | None = {} if fails_over else None
        return lambda iteration, now: pace.advance_iteration(
            links.simulate_iteration(made, iteration, now, pace.rank_starts, gone)
        )

    return _combine_steps([make_replica_step(links) for links in each])


def _combine_steps(steps: Sequence[Step]) -> Step:
    """Step of all replicas. A reduction begins when the last replica reaches it, so the iteration
    ends with the slowest replica."""
    return lambda iteration, now: max(step(iteration, now) for step in steps)


def _run_training(iterations: int, step: Step) -> TrainingRun:
    """Run ``step(iteration, seconds before it)`` for each iteration, until one has no route."""
    now, steps = 0.0, list[float]()
    for iteration in range(iterations):
        try:
            took = step(iteration, now)
        except NoRouteError as error:
            return TrainingRun(tuple(steps), str(error))
        steps.append(took)
        now += took
    return TrainingRun(tuple(steps))


def keep_plan(plan: Plan) -> Plan:
    return plan


def use_guided_dispatch(plan: Plan) -> Plan:
    """Plan with guided dispatch, and without its deliberate waits."""
    return replace(plan, dispatch=Dispatch.GUIDED)


def measure_late_share(
    problem: Problem,
    trace: LinkTrace,
    delegation: float = 0.0,
    late: Callable[[Plan], Plan] = keep_plan,
) -> float:
    """Share of the oracle's gain that is possible an iteration late, after a fault is seen; only
    plans that suit the delays within an iteration better than their mean could exceed it.
    ``problem`` is in milliseconds; ``late``: see :class:`OracleTrainer`. Raises :class:`InputError`
    for a trace in which the static plan ends early."""
    problem = convert_to_seconds(problem)
    links = SimulatedLinks(problem, trace, delegation)
    static = _plan_static(problem, links)
    return _measure_share(
        problem, trace, links, OracleTrainer(problem, links, static, late=late).step
    )


def _plan_static(problem: Problem, links: SimulatedLinks) -> Plan:
    return _plan_direct(links.build_problem((Route.DIRECT,) * len(problem.links)), Policy.PIPEMORPH)


def _measure_share(problem: Problem, trace: LinkTrace, links: SimulatedLinks, step: Step) -> float:
    static = _plan_static(problem, links)
    iterations = _count_iterations(trace, [links], static)
    steps = {"static": _make_fixed_step([links], static), "it": step}
    steps["oracle"] = OracleTrainer(problem, links, static).step
    trained = {name: _run_training(iterations, each) for name, each in steps.items()}
    share = ReplayResult(iterations, trained, []).compute_oracle_share("it")
    if share is None:
        ended = [each.end_reason for each in trained.values() if each.end_reason]
        raise InputError(f"no share of the oracle's gain: {' '.join(ended) or 'it gains nothing'}")
    return share


def _count_iterations(trace: LinkTrace, each: Sequence[SimulatedLinks], static: Plan) -> int:
    if trace.unit == "iterations":
        return int(trace.last_moment) + TAIL_ITERATIONS
    now, count, step = 0.0, 0, _make_fixed_step(each, static, fails_over=True)
    while now < trace.last_moment:
        now += step(count, now)
        count += 1
    return count + TAIL_ITERATIONS
