"""Ways to train through the same trace, from 1F1B to an oracle that knows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

from pipemorph.control import AdaptationRecord
from pipemorph.control.decide.forecast import MOST_EFFORT
from pipemorph.planning import Dispatch, Plan, Policy, Problem, Route, Simulation, plan
from pipemorph.planning.interleaved import plan_interleaved
from pipemorph.planning.simulation.costs import Costs
from pipemorph.replay.links import DispatchChoice, Links, in_seconds, job_spec, with_reductions
from pipemorph.replay.trace import TAIL, LinkState, LinkTrace
from pipemorph.replay.trainer import AdaptiveTrainer, Telemetry


class Change(NamedTuple):
    """One change of plan: ``iteration`` is the first that it was in effect for, None if never.
    ``promised`` and ``measured`` are fractions of an iteration that it saves."""

    iteration: int | None
    reason: str
    promised: float | None
    measured: float | None

    @staticmethod
    def of(record: AdaptationRecord) -> Change:
        return Change(
            record.applied_at_iteration,
            record.reason,
            record.promised,
            record.measured,
        )


@dataclass(frozen=True)
class Replay:
    """``seconds``: of training, per contender in the order of :data:`CONTENDERS`."""

    iterations: int
    seconds: dict[str, float]
    changes: list[Change]

    def share(self, name: str) -> float | None:
        """What a contender gains over ``static``, of what the oracle does. None where the oracle
        gains nothing."""
        most = self.seconds["static"] - self.seconds["oracle"]
        return (self.seconds["static"] - self.seconds[name]) / most if most > 0 else None

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "contenders": {
                name: {
                    "seconds": seconds,
                    "iterations_per_minute": 60 * self.iterations / seconds if seconds else None,
                    "share_of_oracle_gain": self.share(name),
                }
                for name, seconds in self.seconds.items()
            },
            "changes": [change._asdict() for change in self.changes],
        }


def replay(
    problem: Problem,
    trace: LinkTrace,
    *,
    telemetry: Telemetry = "exact",
    dispatch: DispatchChoice = "auto",
    delegation: float = 0.0,
    replicas: int = 1,
    iterations: int | None = None,
    seed: int = 0,
    known: Replay | None = None,
) -> Replay:
    """Train through ``trace`` in every way. ``problem`` is in milliseconds.

    ``dispatch``: of ``adaptive``. ``delegation``: see :class:`~pipemorph.replay.links.Links`.
    ``replicas``: whose iterations end together. ``iterations``: how many; by default until the last
    line of the trace, and :data:`~pipemorph.replay.trace.TAIL` more. ``known``: a replay of the
    same problem, trace and iterations, whose other contenders need not run again. Raises
    :class:`InputError` for a problem that a replay does not know.
    """
    spec = job_spec(problem, dispatch, replicas)
    problem = in_seconds(problem)
    each = [Links(problem, trace.of(replica), delegation) for replica in range(replicas)]
    links = each[0]
    well = links.under((Route.DIRECT,) * len(problem.links))
    fixed = {name: _plan(well, policy) for name, policy in _fixed(problem).items()}
    if iterations is None:
        iterations = _iterations(trace, each, fixed["static"])

    adaptive = AdaptiveTrainer(spec, each, telemetry, seed)
    took = {"adaptive": _train(iterations, lambda _, __: adaptive.step().seconds)}
    if known is not None:
        seconds = known.seconds | took
    else:
        seconds = {name: _train(iterations, _keep(each, made)) for name, made in fixed.items()}
        oracles = [Oracle(problem, mine, fixed["static"]).step for mine in each]
        seconds |= took | {"oracle": _train(iterations, _together(oracles))}
    return Replay(iterations, seconds, [Change.of(each) for each in adaptive.controller.records])


class Oracle:
    """Knows the trace: runs the best plan for the delays of the iteration that begins, directly
    or with the slow links delegated, at once and at no cost.

    ``late``: learns which links are slow from an iteration that began so, and runs in it what
    ``late`` makes of the plan of the one before: the same, for what has to see a fault first and
    changes between iterations. Nothing of that kind is quicker.
    """

    def __init__(
        self,
        problem: Problem,
        links: Links,
        static: Plan,
        *,
        late: Callable[[Plan], Plan] | None = None,
    ) -> None:
        self._problem, self._links, self._static = problem, links, static
        self._late, self._last = late, static
        self._slow: frozenset[int] = frozenset()
        self._made = cache(self._make)
        self._pace = links.pace()
        self._begins = Costs.of(problem).begins()

    def step(self, iteration: int, now: float) -> float:
        """Seconds of an iteration that begins ``now``, seconds since training did."""
        ran = [(self._static, self._run(self._static, iteration, now))]
        # States that change within the iteration: plan for their mean.
        span = ran[0][1].makespan / 16
        moments = [self._links.changed(iteration, now + k * span) for k in range(16)]
        late = self._links.late(iteration, now)
        for each in self._plans(moments, late):
            ran.append((each, self._run(each, iteration, now)))
        best, quickest = min(ran, key=lambda pair: self._ends(pair[1]))
        slow = frozenset(moments[0])
        if self._late is not None and slow != self._slow:
            quickest = self._run(self._late(self._last), iteration, now)
        self._last, self._slow = best, slow
        return self._pace.follow(quickest)

    def _run(self, plan: Plan, iteration: int, now: float) -> Simulation:
        return self._links.run(plan, iteration, now, self._pace.before)

    def _ends(self, ran: Simulation) -> float:
        """When the iteration ends; without a barrier, by how much it holds the next one up."""
        if self._pace.barrier:
            return ran.makespan
        return max(ops[-1].end - begin for ops, begin in zip(ran.stages, self._begins, strict=True))

    def _plans(
        self, moments: Sequence[Mapping[int, LinkState]], late: Mapping[int, float]
    ) -> list[Plan]:
        if not any(moments) and not late:
            return []
        states = [[each.get(link) for each in moments] for link in range(len(self._problem.links))]
        delays = tuple(fmean(s.delay if s else 0.0 for s in each) for each in states)
        transfers = tuple(
            fmean(self._links.transfer(link, s) for s in each) for link, each in enumerate(states)
        )
        lates = tuple(sorted(late.items()))
        return [self._made(delays, transfers, lates, route) for route in Route]

    def _make(
        self,
        delays: tuple[float, ...],
        transfers: tuple[float, ...],
        late: tuple[tuple[int, float], ...],
        slow: Route,
    ) -> Plan:
        own = self._problem.links
        routes = tuple(
            slow if delay or transfer != link.transfer else Route.DIRECT
            for delay, transfer, link in zip(delays, transfers, own, strict=True)
        )
        well = self._links.under(routes)
        links = tuple(
            link.model_copy(update={"delay": link.delay + delay, "transfer": transfer})
            for link, delay, transfer in zip(well.links, delays, transfers, strict=True)
        )
        problem = with_reductions(well.model_copy(update={"links": links}), dict(late))
        if _has_several(problem):
            return plan_interleaved(problem, Policy.PIPEMORPH).to_plan(0, routes)
        return plan(problem, effort=MOST_EFFORT).to_plan(0, routes)


def _has_several(problem: Problem) -> bool:
    """Whether ranks have several stages."""
    return problem.ranks not in (None, problem.stage_count)


def _fixed(problem: Problem) -> dict[str, Policy]:
    """The contenders that never change their plan. With several stages per rank there is one made
    by a rule, that of the placement."""
    rules = {"1f1b": Policy.ONE_F_ONE_B, "zero-bubble": Policy.ZERO_BUBBLE}
    if _has_several(problem):
        rules = {"1f1b": Policy.ONE_F_ONE_B_INTERLEAVED}
        if problem.placement == "v":
            rules = {"zero-bubble": Policy.ZERO_BUBBLE_V}
    return rules | {"static": Policy.PIPEMORPH}


def _plan(problem: Problem, policy: Policy) -> Plan:
    routes = (Route.DIRECT,) * len(problem.links)
    if _has_several(problem):
        return plan_interleaved(problem, policy).to_plan(0, routes)
    return plan(problem, policy).to_plan(0, routes)


Step = Callable[[int, float], float]
"""Seconds of an iteration, and of training before it → seconds that the iteration takes."""


def _keep(each: Sequence[Links], made: Plan) -> Step:
    """A trainer that never changes its plan. ``each``: the links of a replica."""

    def step_of(links: Links) -> Step:
        pace = links.pace()
        return lambda iteration, now: pace.follow(links.run(made, iteration, now, pace.before))

    return _together([step_of(links) for links in each])


def _together(steps: Sequence[Step]) -> Step:
    """The step of all replicas: each reduction begins when the last of them has got there, so the
    iteration ends with that of the slowest."""
    return lambda iteration, now: max(step(iteration, now) for step in steps)


def _train(iterations: int, step: Step) -> float:
    """Seconds of training; ``step`` gets the iteration and the seconds before it."""
    now = 0.0
    for iteration in range(iterations):
        now += step(iteration, now)
    return now


def unchanged(plan: Plan) -> Plan:
    return plan


def ready_first(plan: Plan) -> Plan:
    """The plan with any op that is ready next, on the same routes."""
    return replace(plan, dispatch=Dispatch.ONLINE)


def late_share(
    problem: Problem,
    trace: LinkTrace,
    delegation: float = 0.0,
    late: Callable[[Plan], Plan] = unchanged,
) -> float:
    """The share of an oracle that is an iteration late: most that can be had by seeing a fault,
    except by plans that suit the delays within an iteration better than one for their mean does.
    ``problem`` is in milliseconds; ``late``: see :class:`Oracle`."""
    problem = in_seconds(problem)
    links = Links(problem, trace, delegation)
    static = _plan(links.under((Route.DIRECT,) * len(problem.links)), Policy.PIPEMORPH)
    iterations = _iterations(trace, [links], static)
    most = _train(iterations, Oracle(problem, links, static).step)
    took = _train(iterations, Oracle(problem, links, static, late=late).step)
    fixed = _train(iterations, _keep([links], static))
    return (fixed - took) / (fixed - most)


def _iterations(trace: LinkTrace, each: Sequence[Links], static: Plan) -> int:
    if trace.unit == "iterations":
        return int(trace.last) + TAIL
    now, count, step = 0.0, 0, _keep(each, static)
    while now < trace.last:
        now += step(count, now)
        count += 1
    return count + TAIL
