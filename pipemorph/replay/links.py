"""What a trainer in simulation runs on: a job, and links that follow a trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Literal, NamedTuple

from pipemorph.api.spec import JobSpec
from pipemorph.errors import InputError
from pipemorph.planning import (
    Dispatch,
    Plan,
    Problem,
    Route,
    Simulation,
    StageTimes,
    link_on,
    simulate,
)
from pipemorph.planning.problem import transfer_ms
from pipemorph.planning.simulation.core import DelayAt
from pipemorph.planning.simulation.simulator import Message, deliver, following
from pipemorph.replay.trace import LinkTrace, TracedLink, TracedStage

DispatchChoice = Dispatch | Literal["auto"]
"""As of ``spec.schedule.dispatch``."""
NOTICED = 1.0
"""Seconds from the first message that a direct route loses until its ends give it up: about what
the retries of a network card take. What waits for less goes on when the link is back."""
ROUNDING = 1e-9
"""Seconds that sums of times may be off."""


class NoRouteError(Exception):
    """A direct route has failed, and the trainer has no other one: its training ends."""

    def __init__(self, link: int, iteration: int) -> None:
        super().__init__(f"link {link} is down in iteration {iteration}: no other route")


Held = Mapping[tuple[int, float], float]
"""(link, when a message is sent) → seconds for which it waits for a route."""


class Lost(NamedTuple):
    """What a direct route that is down does to an iteration. ``held``: what waits until the route
    is back, or given up. ``given_up``: links whose route is, and when, in seconds of training."""

    held: dict[tuple[int, float], float]
    given_up: dict[int, float]


class Links:
    """The links of a job in seconds: their own delay and transfer, and what a trace changes.

    ``delegation``: part of an op by which it is longer for each message that it sends or receives
    over a delegated link. ``seed``: of jitter. Raises :class:`InputError` if a trace has rates of
    links whose messages have no stated size.
    """

    def __init__(
        self, problem: Problem, trace: LinkTrace, delegation: float = 0.0, seed: str = "0"
    ) -> None:
        self._delegation, self._seed = delegation, seed
        self._base = [link.delay for link in problem.links]
        self._transfers = [link.transfer for link in problem.links]
        self._bytes = [link.message_bytes for link in problem.links]
        for i, state in (pair for states in trace.states for pair in states.items()):
            if state.gbps is not None and self._bytes[i] is None:
                raise InputError(f"the trace has gbps of link {i}; set links[{i}].message_bytes")
        narrow = any(state.gbps for states in trace.states for state in states.values())
        self._rates = narrow or any(self._transfers)
        self._may_fail = any(state.down for states in trace.states for state in states.values())
        self._problem, self._trace = problem, trace
        rank_of = problem.placed
        for states in trace.states:
            for i in states:
                if rank_of[i] == rank_of[i + 1]:
                    raise InputError(
                        f"the trace has a state of link {i}, whose stages are both on rank"
                        f" {rank_of[i]}: no message of it leaves the rank"
                    )

    def sizes(self, stage: int) -> tuple[int | None, int | None]:
        """Bytes of a microbatch's activations and of its inputs that lead to the stage's
        ``recompute_limit``; None if it has none."""
        limits = self._problem.stages[stage]
        if not limits.may_recompute or not limits.in_flight_limit or limits.in_flight_limit == 1:
            return None, None
        return limits.recompute_limit, limits.in_flight_limit - 1

    def under(self, routes: Sequence[Route]) -> Problem:
        """The problem with links as they are without a fault, for messages on ``routes``, and with
        what delegating takes of the ops at their ends."""
        several = self._problem.several
        links = [
            link_on(route, base, several=several).model_copy(update={"transfer": transfer})
            for route, base, transfer in zip(routes, self._base, self._transfers, strict=True)
        ]
        away = [route is Route.DELEGATED for route in routes]
        ends = [above + below for above, below in zip([False, *away], [*away, False], strict=True)]
        stages = [
            _longer(stage, self._delegation * count) if count and self._delegation else stage
            for stage, count in zip(self._problem.stages, ends, strict=True)
        ]
        return self._problem.model_copy(update={"links": tuple(links), "stages": tuple(stages)})

    def late(self, iteration: int, began: float) -> Mapping[int, float]:
        """Seconds by which reductions end later in an iteration that begins ``began`` seconds after
        training did, by stage."""
        return self._trace.late_at(float(iteration) if self._trace.unit == "iterations" else began)

    def reductions(self, iteration: int, began: float) -> list[float]:
        """What of each stage's reduction follows its last op, in such an iteration."""
        stages = with_reductions(self._problem, self.late(iteration, began)).stages
        return [stage.reduction or 0.0 for stage in stages]

    def stages(self, iteration: int, began: float) -> Mapping[int, TracedStage]:
        """The stages that are not well in such an iteration."""
        return self._trace.stages_at(
            float(iteration) if self._trace.unit == "iterations" else began
        )

    def _paused(
        self, iteration: int, began: float, before: Sequence[float] | None
    ) -> Sequence[float] | None:
        """When each rank may begin, with its pauses."""
        pauses = {i: state.pause for i, state in self.stages(iteration, began).items()}
        if not any(pauses.values()):
            return before
        rank_of = self._problem.placed
        begins = list(before or [0.0] * (max(rank_of) + 1))
        for stage, pause in pauses.items():
            begins[rank_of[stage]] += pause
        return begins

    def pace(self) -> Pace:
        """Of another trainer that begins."""
        return Pace(self._problem)

    def changed(self, iteration: int, now: float) -> Mapping[int, TracedLink]:
        """The links that are not well."""
        return self._trace.at(float(iteration) if self._trace.unit == "iterations" else now)

    def delay_at(self, iteration: int, began: float) -> DelayAt:
        """(link, seconds since the iteration began) → delay of a message sent then."""

        return lambda link, sent: self._delay(link, sent, iteration, began, sent)

    def latency(self, message: Message, iteration: int, began: float, leaves: float) -> float:
        """The delay of a message that leaves its queue at ``leaves``, counted as it is sent."""
        return self._delay(message.link, message.sent, iteration, began, leaves)

    def _delay(self, link: int, sent: float, iteration: int, began: float, at: float) -> float:
        state = self.changed(iteration, began + at).get(link)
        if state is None:
            return self._base[link]
        drawn = state.jitter * self._draw(iteration, link, sent) if state.jitter else 0.0
        return self._base[link] + state.delay + drawn

    def _draw(self, iteration: int, link: int, sent: float) -> float:
        """A number from 0 to 1, the same whenever it is asked for, and for whatever plan runs."""
        key = f"{self._seed} {iteration} {link} {round(sent * 1e9)}"
        return int.from_bytes(blake2b(key.encode(), digest_size=6).digest()) / 2**48

    def transfer(self, link: int, state: TracedLink | None) -> float:
        """How long a message occupies a link in a state."""
        nbytes = self._bytes[link]
        if state is None or state.gbps is None or nbytes is None:
            return self._transfers[link]
        return transfer_ms(nbytes, state.gbps) / 1e3

    def transfer_at(self, iteration: int, began: float) -> DelayAt | None:
        """The same for how long a message occupies the link; None if none has a rate."""
        if not self._rates:
            return None
        return lambda link, sent: self.transfer(
            link, self.changed(iteration, began + sent).get(link)
        )

    def run(
        self,
        plan: Plan,
        iteration: int,
        began: float,
        before: Sequence[float] | None = None,
        gone: dict[int, float] | None = None,
    ) -> Simulation:
        """An iteration of ``plan`` that begins ``began`` seconds after training did. ``before``:
        when each rank may begin, counted from then; see :class:`Pace`.

        ``gone``: links whose direct route the trainer has given up, and so delegates, and since
        when, in seconds of training; those that it gives up in this iteration are added. Without
        it, :class:`NoRouteError` is raised where one would be.
        """
        plan = failed_over(plan, gone or {})
        late = self.late(iteration, began)
        problem = with_slow(self.under(plan.routes), self.stages(iteration, began))
        problem = with_reductions(problem, late).under(plan)
        before = self._paused(iteration, began, before)
        delay_at = self.delay_at(iteration, began)
        transfer_at = self.transfer_at(iteration, began)
        lost, given_up = Lost({}, {}), dict[int, float]()
        while True:
            held = lost.held

            def held_at(link: int, sent: float, held: Held = held) -> float:
                return delay_at(link, sent) + held.get((link, sent), 0.0)

            ran = simulate(
                plan.schedule, problem, plan.dispatch, waits=plan.waits,
                delay_at=held_at, transfer_at=transfer_at, before=before,
            )  # fmt: skip
            if not self._may_fail:
                return ran
            found = self._lost(ran, plan, iteration, began, held, can_fail_over=gone is not None)
            known = given_up.keys() >= found.given_up.keys()
            given_up |= found.given_up
            if known and found.held == held:
                if gone is not None:
                    gone |= given_up
                return ran
            # Nothing that is held arrives before its route is back or given up, so that what leaves
            # before is known now, and each round knows more.
            lost = found
            problem = self._through_the_engine(problem, given_up)

    def _through_the_engine(self, problem: Problem, given_up: Mapping[int, float]) -> Problem:
        """The problem with the queues of delegated routes: what was kept is sent at once. Ops take
        longer from the next iteration on."""
        links = [
            link_on(Route.DELEGATED, link.delay).model_copy(update={"transfer": link.transfer})
            if i in given_up
            else link
            for i, link in enumerate(problem.links)
        ]
        return problem.model_copy(update={"links": tuple(links)})

    def _lost(
        self,
        ran: Simulation,
        plan: Plan,
        iteration: int,
        began: float,
        held: Held,
        *,
        can_fail_over: bool,
    ) -> Lost:
        """What becomes of the messages that would leave by a direct route while it is down."""
        leaving = sorted(
            (self.left(m, iteration, began) - held.get((m.link, m.sent), 0.0), m)
            for m in deliver(ran).messages
            if plan.routes[m.link] is Route.DIRECT
        )
        found = Lost({}, {})
        for leaves, message in leaving:
            link, at = message.link, began + leaves
            back = self._down_until(link, iteration, at + ROUNDING)
            noticed = found.given_up.get(link, at + NOTICED)
            if back is None or at + ROUNDING >= noticed:
                continue
            if back > noticed:
                if not can_fail_over:
                    raise NoRouteError(link, iteration)
                found.given_up[link] = noticed
            key, waits = (link, message.sent), min(back, noticed) - at
            # A difference of rounding would move all that follows, and so go on for ever.
            same = key in held and abs(held[key] - waits) <= ROUNDING
            found.held[key] = held[key] if same else waits
        return found

    def left(self, message: Message, iteration: int, began: float) -> float:
        """When a message of an iteration has left its queue and its sender, in seconds since the
        iteration began."""
        transfer_at = self.transfer_at(iteration, began)
        transfer = transfer_at(message.link, message.sent) if transfer_at else 0.0
        delay = self.delay_at(iteration, began)(message.link, message.sent)
        return message.arrived - delay - transfer

    def _down_until(self, link: int, iteration: int, moment: float) -> float | None:
        """Until which second of training a direct route carries nothing."""
        if self._trace.unit == "seconds":
            return self._trace.down_until(link, moment)
        # Not in this iteration.
        return None if self._trace.down_until(link, float(iteration)) is None else math.inf


def failed_over(plan: Plan, gone: Mapping[int, float]) -> Plan:
    """What a trainer makes of a plan that has given up the direct routes of some links."""
    if not gone:
        return plan
    routes = [Route.DELEGATED if i in gone else route for i, route in enumerate(plan.routes)]
    return replace(plan, routes=tuple(routes))


def with_reductions(problem: Problem, late: Mapping[int, float]) -> Problem:
    """The problem with reductions that take so much longer, by stage."""
    if not late:
        return problem
    stages = list(problem.stages)
    for i, seconds in late.items():
        stages[i] = stages[i].model_copy(update={"reduction": (stages[i].reduction or 0) + seconds})
    return problem.model_copy(update={"stages": tuple(stages)})


def with_slow(problem: Problem, slow: Mapping[int, TracedStage]) -> Problem:
    """The problem with the op times of slow stages."""
    if not slow:
        return problem
    stages = list(problem.stages)
    for i, state in slow.items():
        ops = ((name, getattr(stages[i], name)) for name in OPS)
        longer = {name: op * state.slowdown for name, op in ops if op is not None}
        stages[i] = stages[i].model_copy(update=longer)
    return problem.model_copy(update={"stages": tuple(stages)})


class Pace:
    """Makes iterations follow each other: all ranks begin the next one when the last rank has
    ended, or, without a barrier, each when it has ended itself."""

    def __init__(self, problem: Problem) -> None:
        self.barrier = problem.objective == "makespan"
        self.before: list[float] | None = None
        """When each rank may begin the next iteration, counted from its begin on rank 0."""

    def follow(self, ran: Simulation) -> float:
        """Seconds from the begin of an iteration to that of the next, which is then the one that
        follows."""
        if self.barrier:
            return ran.makespan
        took, self.before = following(ran.ran.free, ran.after)
        return took


def job_spec(problem: Problem, dispatch: DispatchChoice, replicas: int = 1) -> JobSpec:
    """The spec of a job of this problem (milliseconds), as its user would write it.

    Raises :class:`InputError` for what a replay does not know.
    """
    for i, stage in enumerate(problem.stages):
        if stage.device_limit is not None:
            raise InputError(f"stages[{i}].device_limit is set; a replay does not offload")
    caps = problem.in_flight_limits()
    for i, link in enumerate(problem.links):
        if link.half_duplex:
            raise InputError(f"links[{i}].half_duplex is set; a replay has a queue per direction")
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
    if replicas > 1:
        problem.check_makespan("a replay of replicas")
    parallelism: dict[str, object] = {"stages": problem.stage_count, "replicas": replicas}
    ranks = len(set(problem.placed))
    if problem.several:
        each = {"stagesPerRank": problem.stage_count // ranks, "stagePlacement": problem.placement}
        parallelism |= each
    return JobSpec.model_validate(
        {
            "parallelism": parallelism,
            "schedule": schedule,
            # A job has to say so; the control loop is told that no end is known.
            "trainer": {"module": "replay", "iterations": 1_000_000},
        }
    )


def _longer(stage: StageTimes, part: float) -> StageTimes:
    """The stage with a longer F and B; W sends nothing."""
    fused, extra = stage.fused_backward, part * stage.backward_input
    return stage.model_copy(
        update={
            "forward": stage.forward * (1 + part),
            "backward_input": stage.backward_input + extra,
            "fused_backward": None if fused is None else fused + extra,
        }
    )


OPS = ("forward", "backward_input", "backward_weight", "fused_backward")


def in_seconds(problem: Problem) -> Problem:
    """A problem file's milliseconds as seconds."""
    stages = tuple(
        stage.model_copy(
            update={
                name: value / 1e3
                for name in (*OPS, "reduction")
                if (value := getattr(stage, name)) is not None
            }
        )
        for stage in problem.stages
    )
    links = tuple(
        link.model_copy(update={"delay": link.delay / 1e3, "transfer": link.transfer / 1e3})
        for link in problem.links
    )
    return problem.model_copy(update={"stages": stages, "links": links})
