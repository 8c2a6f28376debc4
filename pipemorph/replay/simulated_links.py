"""Links that follow a trace, and the job of a simulated trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Literal, NamedTuple

from pipemorph.errors import InputError
from pipemorph.planning import (
    Dispatch,
    Plan,
    Problem,
    Route,
    Simulation,
    StageTimes,
    build_link,
    simulate,
)
from pipemorph.planning.problem import transfer_ms
from pipemorph.planning.simulation.execution import DelayAt
from pipemorph.planning.simulation.simulator import Message, compute_next_starts, trace_messages
from pipemorph.replay.link_trace import LinkTrace, TracedLink, TracedStage
from pipemorph.spec.job_spec import JobSpec

DispatchChoice = Dispatch | Literal["auto"]
"""Value of ``spec.schedule.dispatch``."""
OUTAGE_TIMEOUT = 1.0
"""Seconds from the first lost message of a direct route until its ends abandon it: about the
retries of a network card. Messages of shorter outages go on when the link returns."""
ROUNDING = 1e-9
"""Rounding error of sums of times, seconds."""


class NoRouteError(Exception):
    """Failure of a direct route for which the trainer has no other: its training ends."""

    def __init__(self, link: int, iteration: int) -> None:
        super().__init__(f"link {link} is down in iteration {iteration}: no other route")


Held = Mapping[tuple[int, float], float]
"""(link, time of send) → seconds for which the message waits for a route."""


class RouteOutage(NamedTuple):
    """Effect of direct routes that are down on an iteration. ``held_seconds``: messages that wait
    until their route returns or is abandoned. ``abandoned_at``: links whose route is abandoned, and
    when, in seconds of training."""

    held_seconds: dict[tuple[int, float], float]
    abandoned_at: dict[int, float]


class SimulatedLinks:
    """Links of a job, in seconds: their own delay and transfer, and the changes of a trace.

    ``delegation``: fraction by which an op is longer per message that it sends or receives over a
    delegated link. ``seed``: of jitter. Raises :class:`InputError` if the trace has rates of links
    whose messages have no stated size.
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
        rank_of = problem.stage_ranks
        for states in trace.states:
            for i in states:
                if rank_of[i] == rank_of[i + 1]:
                    raise InputError(
                        f"the trace has a state of link {i}, whose stages are both on rank"
                        f" {rank_of[i]}: no message of it leaves the rank"
                    )

    def get_memory_sizes(self, stage: int) -> tuple[int | None, int | None]:
        """Bytes of a microbatch's activations and inputs that give the stage its
        ``recompute_limit``; None if it has none."""
        limits = self._problem.stages[stage]
        if not limits.may_recompute or not limits.in_flight_limit or limits.in_flight_limit == 1:
            return None, None
        return limits.recompute_limit, limits.in_flight_limit - 1

    def build_problem(self, routes: Sequence[Route]) -> Problem:
        """Problem with healthy links for messages on ``routes``, and with the time that delegation
        adds to the ops at their ends."""
        several = self._problem.multi_stage
        links = [
            build_link(route, base, several=several).model_copy(update={"transfer": transfer})
            for route, base, transfer in zip(routes, self._base, self._transfers, strict=True)
        ]
        away = [route is Route.DELEGATED for route in routes]
        ends = [above + below for above, below in zip([False, *away], [*away, False], strict=True)]
        stages = [
            _lengthen_stage(stage, self._delegation * count)
            if count and self._delegation
            else stage
            for stage, count in zip(self._problem.stages, ends, strict=True)
        ]
        return self._problem.model_copy(update={"links": tuple(links), "stages": tuple(stages)})

    def get_reduction_delays(self, iteration: int, began: float) -> Mapping[int, float]:
        """Delay of reductions, seconds by stage, in an iteration that begins ``began`` seconds
        after training did."""
        return self._trace.get_reduction_delays_at(
            float(iteration) if self._trace.unit == "iterations" else began
        )

    def list_exposed_reductions(self, iteration: int, began: float) -> list[float]:
        """Seconds of each stage's reduction after its last op; arguments as of :meth:`late`."""
        stages = lengthen_reductions(
            self._problem, self.get_reduction_delays(iteration, began)
        ).stages
        return [stage.reduction or 0.0 for stage in stages]

    def get_slow_stages(self, iteration: int, began: float) -> Mapping[int, TracedStage]:
        """Stages that are slow or pause; arguments as of :meth:`late`."""
        return self._trace.get_slow_stages_at(
            float(iteration) if self._trace.unit == "iterations" else began
        )

    def _add_pauses(
        self, iteration: int, began: float, before: Sequence[float] | None
    ) -> Sequence[float] | None:
        """Earliest start of each rank, with its pauses."""
        pauses = {i: state.pause for i, state in self.get_slow_stages(iteration, began).items()}
        if not any(pauses.values()):
            return before
        rank_of = self._problem.stage_ranks
        begins = list(before or [0.0] * (max(rank_of) + 1))
        for stage, pause in pauses.items():
            begins[rank_of[stage]] += pause
        return begins

    def make_pacer(self) -> IterationPacer:
        """Pace of another trainer that begins."""
        return IterationPacer(self._problem)

    def get_changed_links(self, iteration: int, now: float) -> Mapping[int, TracedLink]:
        """Links with a fault."""
        return self._trace.get_links_at(
            float(iteration) if self._trace.unit == "iterations" else now
        )

    def make_delay_function(self, iteration: int, began: float) -> DelayAt:
        """Function (link, seconds since the iteration began) → delay of a message sent then."""

        return lambda link, sent: self._compute_delay(link, sent, iteration, began, sent)

    def compute_latency(
        self, message: Message, iteration: int, began: float, leaves: float
    ) -> float:
        """Delay of a message that leaves its queue at ``leaves``, in seconds as of its send."""
        return self._compute_delay(message.link, message.sent, iteration, began, leaves)

    def _compute_delay(
        self, link: int, sent: float, iteration: int, began: float, at: float
    ) -> float:
        state = self.get_changed_links(iteration, began + at).get(link)
        if state is None:
            return self._base[link]
        drawn = state.jitter * self._draw_jitter(iteration, link, sent) if state.jitter else 0.0
        return self._base[link] + state.delay + drawn

    def _draw_jitter(self, iteration: int, link: int, sent: float) -> float:
        """Random number from 0 to 1 that depends only on its arguments, not on the plan."""
        key = f"{self._seed} {iteration} {link} {round(sent * 1e9)}"
        return int.from_bytes(blake2b(key.encode(), digest_size=6).digest()) / 2**48

    def compute_transfer(self, link: int, state: TracedLink | None) -> float:
        """Seconds for which a message occupies a link in a state."""
        nbytes = self._bytes[link]
        if state is None or state.gbps is None or nbytes is None:
            return self._transfers[link]
        return transfer_ms(nbytes, state.gbps) / 1e3

    def make_transfer_function(self, iteration: int, began: float) -> DelayAt | None:
        """Function like :meth:`delay_at` for the transfer; None if no link has a rate."""
        if not self._rates:
            return None
        return lambda link, sent: self.compute_transfer(
            link, self.get_changed_links(iteration, began + sent).get(link)
        )

    def simulate_iteration(
        self,
        plan: Plan,
        iteration: int,
        began: float,
        before: Sequence[float] | None = None,
        gone: dict[int, float] | None = None,
    ) -> Simulation:
        """Simulate an iteration of ``plan`` that begins ``began`` seconds after training did.
        ``before``: earliest start of each rank, relative to it; see :class:`IterationPacer`.

        ``gone``: links that the trainer delegates since their direct route is abandoned, and when
        that was, in seconds of training; this iteration adds to it. None: :class:`NoRouteError` is
        raised instead.
        """
        plan = fail_over_links(plan, gone or {})
        late = self.get_reduction_delays(iteration, began)
        problem = slow_down_stages(
            self.build_problem(plan.routes), self.get_slow_stages(iteration, began)
        )
        problem = lengthen_reductions(problem, late).with_plan_limits(plan)
        before = self._add_pauses(iteration, began, before)
        delay_at = self.make_delay_function(iteration, began)
        transfer_at = self.make_transfer_function(iteration, began)
        lost, given_up = RouteOutage({}, {}), dict[int, float]()
        while True:
            held = lost.held_seconds

            def delay_with_hold(link: int, sent: float, held: Held = held) -> float:
                return delay_at(link, sent) + held.get((link, sent), 0.0)

            ran = simulate(
                plan.schedule, problem, plan.dispatch, waits=plan.waits,
                delay_at=delay_with_hold, transfer_at=transfer_at, before=before,
            )  # fmt: skip
            if not self._may_fail:
                return ran
            found = self._find_outage(
                ran, plan, iteration, began, held, can_fail_over=gone is not None
            )
            known = given_up.keys() >= found.abandoned_at.keys()
            given_up |= found.abandoned_at
            if known and found.held_seconds == held:
                if gone is not None:
                    gone |= given_up
                return ran
            # A held message arrives only after its route returns or is abandoned. All departures
            # before that are final, so each round settles more of them.
            lost = found
            problem = self._switch_to_engine(problem, given_up)

    def _switch_to_engine(self, problem: Problem, given_up: Mapping[int, float]) -> Problem:
        """Problem with the queues of delegated routes, over which held messages leave at once. Ops
        take longer from the next iteration on."""
        links = [
            build_link(Route.DELEGATED, link.delay).model_copy(update={"transfer": link.transfer})
            if i in given_up
            else link
            for i, link in enumerate(problem.links)
        ]
        return problem.model_copy(update={"links": tuple(links)})

    def _find_outage(
        self,
        ran: Simulation,
        plan: Plan,
        iteration: int,
        began: float,
        held: Held,
        *,
        can_fail_over: bool,
    ) -> RouteOutage:
        """Outage of the messages that would leave by a direct route while it is down."""
        leaving = sorted(
            (self.compute_departure(m, iteration, began) - held.get((m.link, m.sent), 0.0), m)
            for m in trace_messages(ran).messages
            if plan.routes[m.link] is Route.DIRECT
        )
        found = RouteOutage({}, {})
        for leaves, message in leaving:
            link, at = message.link, began + leaves
            back = self._find_recovery(link, iteration, at + ROUNDING)
            noticed = found.abandoned_at.get(link, at + OUTAGE_TIMEOUT)
            if back is None or at + ROUNDING >= noticed:
                continue
            if back > noticed:
                if not can_fail_over:
                    raise NoRouteError(link, iteration)
                found.abandoned_at[link] = noticed
            key, waits = (link, message.sent), min(back, noticed) - at
            # A rounding difference would move all later messages, and the loop would not end.
            same = key in held and abs(held[key] - waits) <= ROUNDING
            found.held_seconds[key] = held[key] if same else waits
        return found

    def compute_departure(self, message: Message, iteration: int, began: float) -> float:
        """Seconds from the start of the iteration until a message has left its queue and sender."""
        transfer_at = self.make_transfer_function(iteration, began)
        transfer = transfer_at(message.link, message.sent) if transfer_at else 0.0
        delay = self.make_delay_function(iteration, began)(message.link, message.sent)
        return message.arrived - delay - transfer

    def _find_recovery(self, link: int, iteration: int, moment: float) -> float | None:
        """Second of training until which a direct route carries nothing; None if it is up."""
        if self._trace.unit == "seconds":
            return self._trace.find_recovery(link, moment)
        # A trace by iterations: the route does not return within this one.
        return None if self._trace.find_recovery(link, float(iteration)) is None else math.inf


def fail_over_links(plan: Plan, gone: Mapping[int, float]) -> Plan:
    """Plan in which the links ``gone``, whose direct routes are abandoned, are delegated."""
    if not gone:
        return plan
    routes = [Route.DELEGATED if i in gone else route for i, route in enumerate(plan.routes)]
    return replace(plan, routes=tuple(routes))


def lengthen_reductions(problem: Problem, late: Mapping[int, float]) -> Problem:
    """Problem with reductions that take ``late`` seconds longer, by stage."""
    if not late:
        return problem
    stages = list(problem.stages)
    for i, seconds in late.items():
        stages[i] = stages[i].model_copy(update={"reduction": (stages[i].reduction or 0) + seconds})
    return problem.model_copy(update={"stages": tuple(stages)})


def slow_down_stages(problem: Problem, slow: Mapping[int, TracedStage]) -> Problem:
    """Problem with the op times of slow stages."""
    if not slow:
        return problem
    stages = list(problem.stages)
    for i, state in slow.items():
        ops = ((name, getattr(stages[i], name)) for name in OP_TIME_FIELDS)
        longer = {name: op * state.slowdown for name, op in ops if op is not None}
        stages[i] = stages[i].model_copy(update=longer)
    return problem.model_copy(update={"stages": tuple(stages)})


class IterationPacer:
    """Start times of consecutive iterations: with a barrier, all ranks begin when the last rank has
    ended; without, each rank begins when it has ended itself."""

    def __init__(self, problem: Problem) -> None:
        self.barrier = problem.objective == "makespan"
        self.rank_starts: list[float] | None = None
        """Earliest start of each rank in the next iteration, relative to that of rank 0."""

    def advance_iteration(self, ran: Simulation) -> float:
        """Advance to the next iteration; returns seconds from the start of ``ran`` to it."""
        if self.barrier:
            return ran.makespan
        took, self.rank_starts = compute_next_starts(ran.execution.free_at, ran.rank_tails)
        return took


def build_job_spec(problem: Problem, dispatch: DispatchChoice, replicas: int = 1) -> JobSpec:
    """Spec of a job for this problem (milliseconds), as a user would write it.

    Raises :class:`InputError` for fields that a replay does not support.
    """
    for i, stage in enumerate(problem.stages):
        if stage.device_limit is not None:
            raise InputError(f"stages[{i}].device_limit is set; a replay does not offload")
    caps = problem.list_in_flight_limits()
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
        problem.require_makespan("a replay of replicas")
    parallelism: dict[str, object] = {"stages": problem.stage_count, "replicas": replicas}
    ranks = len(set(problem.stage_ranks))
    if problem.multi_stage:
        each = {"stagesPerRank": problem.stage_count // ranks, "stagePlacement": problem.placement}
        parallelism |= each
    return JobSpec.model_validate(
        {
            "parallelism": parallelism,
            "schedule": schedule,
            # A spec needs iterations; the controller runs with `endless`.
            "trainer": {"module": "replay", "iterations": 1_000_000},
        }
    )


def _lengthen_stage(stage: StageTimes, part: float) -> StageTimes:
    """Stage with a longer F and B; W sends nothing."""
    fused, extra = stage.fused_backward, part * stage.backward_input
    return stage.model_copy(
        update={
            "forward": stage.forward * (1 + part),
            "backward_input": stage.backward_input + extra,
            "fused_backward": None if fused is None else fused + extra,
        }
    )


OP_TIME_FIELDS = ("forward", "backward_input", "backward_weight", "fused_backward")


def convert_to_seconds(problem: Problem) -> Problem:
    """Problem in seconds, from a problem file's milliseconds."""
    stages = tuple(
        stage.model_copy(
            update={
                name: value / 1e3
                for name in (*OP_TIME_FIELDS, "reduction")
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
