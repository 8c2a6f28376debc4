"""Ways to train through the same trace, from 1F1B to an oracle that knows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

from pipemorph.control import AdaptationRecord
from pipemorph.control.decide.forecast import MOST_EFFORT
from pipemorph.errors import InputError
from pipemorph.planning import Dispatch, Plan, Policy, Problem, Route, Simulation, plan
from pipemorph.planning.simulation.core import Costs
from pipemorph.replay.links import (
    DispatchChoice,
    Links,
    NoRouteError,
    failed_over,
    in_seconds,
    job_spec,
    with_reductions,
    with_slow,
)
from pipemorph.replay.trace import TAIL, LinkTrace, TracedLink, TracedStage
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
class Trained:
    """``steps``: seconds of each iteration. ``ended``: why training ended before its last one; None
    if it did not."""

    steps: tuple[float, ...]
    ended: str | None = None

    @property
    def seconds(self) -> float | None:
        """Of all iterations; None if not all were run."""
        return None if self.ended is not None else sum(self.steps)


@dataclass(frozen=True)
class Replay:
    """``trained``: per contender, from the simplest to the oracle."""

    iterations: int
    trained: dict[str, Trained]
    changes: list[Change]

    @property
    def seconds(self) -> dict[str, float | None]:
        """Of training; None for contenders that could not finish."""
        return {name: trained.seconds for name, trained in self.trained.items()}

    def per_minute(self, name: str) -> float | None:
        """Iterations per minute; None if the contender could not finish, or took no time."""
        seconds = self.trained[name].seconds
        return 60 * self.iterations / seconds if seconds else None

    def share(self, name: str) -> float | None:
        """What a contender gains over ``static``, of what the oracle does. None where the oracle
        gains nothing, or one of them could not finish."""
        static, took, oracle = (self.trained[n].seconds for n in ("static", name, "oracle"))
        if static is None or took is None or oracle is None or static <= oracle:
            return None
        return (static - took) / (static - oracle)

    def harm(self, name: str, span: int | None = None) -> float:
        """By which part of its time a contender takes longer than ``static``, at worst: over any
        ``span`` iterations, or over all that both have run."""
        pairs = list(zip(self.trained["static"].steps, self.trained[name].steps, strict=False))
        span = min(span or len(pairs), len(pairs))
        spans = (pairs[k : k + span] for k in range(len(pairs) - span + 1))
        sums = [tuple(map(sum, zip(*each, strict=True))) for each in spans]
        return max(took / kept - 1 for kept, took in sums if kept)

    def fields(self) -> dict[str, Any]:
        """As JSON. A contender that could not finish also has a ``reason``."""
        return {
            "contenders": {
                name: {
                    "seconds": trained.seconds,
                    "iterations_per_minute": self.per_minute(name),
                    "share_of_oracle_gain": self.share(name),
                }
                | ({} if trained.ended is None else {"reason": trained.ended})
                for name, trained in self.trained.items()
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
    each = [
        Links(problem, trace.of(replica), delegation, f"{seed} {replica}")
        for replica in range(replicas)
    ]
    links = each[0]
    well = links.under((Route.DIRECT,) * len(problem.links))
    fixed = {name: _plan(well, policy) for name, policy in _fixed(problem).items()}
    if iterations is None:
        iterations = _iterations(trace, each, fixed["static"])

    adaptive = AdaptiveTrainer(spec, each, telemetry, seed)
    took = {"adaptive": _train(iterations, lambda _, __: adaptive.step().seconds)}
    if known is not None:
        trained = known.trained | took
    else:
        trained = {name: _train(iterations, _keep(each, made)) for name, made in fixed.items()}
        oracles = [Oracle(problem, mine, fixed["static"]).step for mine in each]
        trained |= took | {"oracle": _train(iterations, _together(oracles))}
    return Replay(iterations, trained, [Change.of(each) for each in adaptive.controller.records])


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
        ran: list[tuple[Plan, Simulation]] = []
        with suppress(NoRouteError):  # What would lose messages is none of its choices.
            ran.append((self._static, self._run(self._static, iteration, now)))
        # States that change within the iteration: plan for their mean.
        span = (ran[0] if ran else self._aside(iteration, now))[1].makespan / 16
        moments = [self._links.changed(iteration, now + k * span) for k in range(16)]
        late, slow = self._links.late(iteration, now), self._links.stages(iteration, now)
        for each in self._plans(moments, late, slow):
            with suppress(NoRouteError):
                ran.append((each, self._run(each, iteration, now)))
        ran = ran or [self._aside(iteration, now)]
        best, quickest = min(ran, key=lambda pair: self._ends(pair[1]))
        links = frozenset(moments[0])
        if self._late is not None and links != self._slow:
            # That a direct route is down it does not know either: it loses messages first.
            quickest = self._run(self._late(self._last), iteration, now, {})
        self._last, self._slow = best, links
        return self._pace.follow(quickest)

    def _aside(self, iteration: int, now: float) -> tuple[Plan, Simulation]:
        """The static plan with all links delegated."""
        plan = failed_over(self._static, dict.fromkeys(range(len(self._problem.links)), now))
        return plan, self._run(plan, iteration, now)

    def _run(
        self, plan: Plan, iteration: int, now: float, gone: dict[int, float] | None = None
    ) -> Simulation:
        return self._links.run(plan, iteration, now, self._pace.before, gone)

    def _ends(self, ran: Simulation) -> float:
        """When the iteration ends; without a barrier, by how much it holds the next one up."""
        if self._pace.barrier:
            return ran.makespan
        return max(ops[-1].end - begin for ops, begin in zip(ran.stages, self._begins, strict=True))

    def _plans(
        self,
        moments: Sequence[Mapping[int, TracedLink]],
        late: Mapping[int, float],
        slow: Mapping[int, TracedStage],
    ) -> list[Plan]:
        if not (any(moments) or late or slow):
            return []
        states = [[each.get(link) for each in moments] for link in range(len(self._problem.links))]
        delays = tuple(fmean(s.mean if s else 0.0 for s in each) for each in states)
        transfers = tuple(
            fmean(self._links.transfer(link, s) for s in each) for link, each in enumerate(states)
        )
        beside = tuple(sorted(late.items())), tuple(sorted(slow.items()))
        down = tuple(any(s.down for s in each if s) for each in states)
        return [self._made(delays, transfers, beside, down, route) for route in Route]

    def _make(
        self,
        delays: tuple[float, ...],
        transfers: tuple[float, ...],
        beside: tuple[tuple[tuple[int, float], ...], tuple[tuple[int, TracedStage], ...]],
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
        well = self._links.under(routes)
        links = tuple(
            link.model_copy(update={"delay": link.delay + delay, "transfer": transfer})
            for link, delay, transfer in zip(well.links, delays, transfers, strict=True)
        )
        late, stages = beside
        problem = with_slow(well.model_copy(update={"links": links}), dict(stages))
        problem = with_reductions(problem, dict(late))
        return plan(problem, effort=MOST_EFFORT).to_plan(0, routes)


def _fixed(problem: Problem) -> dict[str, Policy]:
    """The contenders that never change their plan. With several stages per rank there is one made
    by a rule, that of the placement."""
    rules = {"1f1b": Policy.ONE_F_ONE_B, "zero-bubble": Policy.ZERO_BUBBLE}
    if problem.several:
        rules = {"1f1b": Policy.ONE_F_ONE_B_INTERLEAVED}
        if problem.placement == "v":
            rules = {"zero-bubble": Policy.ZERO_BUBBLE_V}
    return rules | {"static": Policy.PIPEMORPH}


def _plan(problem: Problem, policy: Policy) -> Plan:
    routes = (Route.DIRECT,) * len(problem.links)
    return plan(problem, policy).to_plan(0, routes)


Step = Callable[[int, float], float]
"""Seconds of an iteration, and of training before it → seconds that the iteration takes."""


def _keep(each: Sequence[Links], made: Plan, *, fails_over: bool = False) -> Step:
    """A trainer that never changes its plan. ``each``: the links of a replica. ``fails_over``:
    whether it has another route for links whose direct one fails."""

    def step_of(links: Links) -> Step:
        pace = links.pace()
        gone: dict[int, float] | None = {} if fails_over else None
        return lambda iteration, now: pace.follow(
            links.run(made, iteration, now, pace.before, gone)
        )

    return _together([step_of(links) for links in each])


def _together(steps: Sequence[Step]) -> Step:
    """The step of all replicas: each reduction begins when the last of them has got there, so the
    iteration ends with that of the slowest."""
    return lambda iteration, now: max(step(iteration, now) for step in steps)


def _train(iterations: int, step: Step) -> Trained:
    """``step`` gets the iteration and the seconds before it."""
    now, steps = 0.0, list[float]()
    for iteration in range(iterations):
        try:
            took = step(iteration, now)
        except NoRouteError as error:
            return Trained(tuple(steps), str(error))
        steps.append(took)
        now += took
    return Trained(tuple(steps))


def unchanged(plan: Plan) -> Plan:
    return plan


def guided(plan: Plan) -> Plan:
    """The plan with guided dispatch, without what it waits for on purpose."""
    return replace(plan, dispatch=Dispatch.GUIDED)


def late_share(
    problem: Problem,
    trace: LinkTrace,
    delegation: float = 0.0,
    late: Callable[[Plan], Plan] = unchanged,
) -> float:
    """The share of an oracle that is an iteration late: most that can be had by seeing a fault,
    except by plans that suit the delays within an iteration better than one for their mean does.
    ``problem`` is in milliseconds; ``late``: see :class:`Oracle`. Raises :class:`InputError` for a
    trace that the static plan does not get through."""
    problem = in_seconds(problem)
    links = Links(problem, trace, delegation)
    static = _static(problem, links)
    return _share(problem, trace, links, Oracle(problem, links, static, late=late).step)


def _static(problem: Problem, links: Links) -> Plan:
    return _plan(links.under((Route.DIRECT,) * len(problem.links)), Policy.PIPEMORPH)


def _share(problem: Problem, trace: LinkTrace, links: Links, step: Step) -> float:
    static = _static(problem, links)
    iterations = _iterations(trace, [links], static)
    steps = {"static": _keep([links], static), "it": step}
    steps["oracle"] = Oracle(problem, links, static).step
    trained = {name: _train(iterations, each) for name, each in steps.items()}
    share = Replay(iterations, trained, []).share("it")
    if share is None:
        ended = [each.ended for each in trained.values() if each.ended]
        raise InputError(f"no share of the oracle's gain: {' '.join(ended) or 'it gains nothing'}")
    return share


def _iterations(trace: LinkTrace, each: Sequence[Links], static: Plan) -> int:
    if trace.unit == "iterations":
        return int(trace.last) + TAIL
    now, count, step = 0.0, 0, _keep(each, static, fails_over=True)
    while now < trace.last:
        now += step(count, now)
        count += 1
    return count + TAIL
