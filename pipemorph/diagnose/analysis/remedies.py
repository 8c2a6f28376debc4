"""Remedies: changes that would help a job, each with its predicted step time.

Removal of a cause is simulated with the recorded steps. Another schedule, number or distribution of
microbatches is simulated with the planner's model of the slowest replica: its mean op and transfer
times, in today's order and in the new one; the difference is taken from the step as it ran. For
PipeMorph's own schedule the step is what precedes and follows the pipeline, and the simulated plan:
what today's trainer loses while its sends block a rank is not lost there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median, pstdev
from typing import Any

from pipemorph.diagnose.analysis.causes import Cause, Change
from pipemorph.diagnose.analysis.slowdown import StepSimulator
from pipemorph.diagnose.analysis.steps import RecordedStep, join_named
from pipemorph.diagnose.operation import BACKWARD, CHECKPOINT, DATA, FORWARD, GC, LOSS, WEIGHT
from pipemorph.diagnose.operation_table import CODE_OF_OPTYPE
from pipemorph.errors import InputError
from pipemorph.planning.analysis.what_if import shrink_stage
from pipemorph.planning.ir import OpKind, Plan, Policy, Route, Schedule, join_dashed, place_stages
from pipemorph.planning.planner import build_link, plan
from pipemorph.planning.problem import MAX_CELLS, Link, Problem, StageTimes
from pipemorph.planning.search.microbatch_order import order_microbatches, with_microbatch_costs
from pipemorph.planning.simulation.simulator import simulate

LEAST_GAIN = 0.01
"""Share of a step below which a change is not advised."""
LEAST_UNEVENNESS = 1.02
"""Ratio of the longest stage to the mean below which no other split is advised."""
MOST_REPLICAS = 64
"""Replicas between which microbatches are moved."""
MOST_CELLS = 4096
"""Most stages × microbatches for which another order is searched: seconds."""
ORDERED_STEPS = 4
"""Steps whose microbatches are ordered."""
SINGLE = (Policy.GPIPE, Policy.ONE_F_ONE_B, Policy.ZERO_BUBBLE)
SEVERAL = (Policy.ONE_F_ONE_B_INTERLEAVED, Policy.ZERO_BUBBLE_V)
_F, _B, _W, _LOSS = (CODE_OF_OPTYPE[name] for name in (FORWARD, BACKWARD, WEIGHT, LOSS))
_SPLIT = frozenset((_F, _B, _W))
_COMPUTE = _SPLIT | {_LOSS}
_BETWEEN = frozenset(CODE_OF_OPTYPE[name] for name in (DATA, GC, CHECKPOINT))
NOT_COMPARED = "Other schedules are not compared"
"""Begin of a sentence on why there is no prediction of one."""
AT_BEST = "at best"
HALF = "half of a backward computes gradients of weights"
ACTIONS: dict[str, tuple[str, str]] = {
    "checkpoints": ("save less often, or while training goes on", ""),
    "gc": ("collect garbage between steps, on all ranks at once", ""),
    "slow loader": ("load data ahead of their step: more loader workers, a longer queue", ""),
    "varying lengths": ("balance the microbatches: equal work in each, on each replica", ""),
    "gradient reduction": ("overlap the reduction with backwards, if it does not yet", AT_BEST),
    "pauses": ("find what stops this worker: other processes, gc, clocks", AT_BEST),
    "gaps between ops": ("shorten what workers do between ops: Python, launches, waits", AT_BEST),
}
"""Action that removes a cause, and its condition, by the name of the cause."""


@dataclass(frozen=True)
class Remedy:
    """Change of a job. ``predicted_seconds``: of a step after it; ``gain``: share of the time per
    sample that it saves. ``condition``: what must hold that the recording does not say; empty: no
    more than it says. ``schedule``: of the change, if it has one, and ``problem``: the model that
    it was simulated with, seconds. ``adapts``: PipeMorph would run it. ``error``: of its
    prediction, seconds: the spread of the steps, what of a step as it ran the simulation does not
    explain, and what a plan takes longer if a slow link is narrow. ``removal``: change of the
    recorded times, if that is one.
    """

    change: str
    predicted_seconds: float
    gain: float
    condition: str = ""
    schedule: Schedule | None = None
    problem: Problem | None = field(default=None, repr=False)
    adapts: bool = False
    error: float = 0.0
    removal: Change | None = field(default=None, repr=False, compare=False)


def find_remedies(
    simulator: StepSimulator, causes: Sequence[Cause]
) -> tuple[list[Remedy], list[str]]:
    """Remedies that save at least ``LEAST_GAIN``, best first; and sentences on those that cannot be
    predicted."""
    finder = _RemedyFinder(simulator, causes)
    found = [remedy for remedy in finder.find() if remedy.gain >= LEAST_GAIN]
    return sorted(found, key=lambda remedy: -remedy.gain), finder.notes


class _RemedyFinder:
    def __init__(self, simulator: StepSimulator, causes: Sequence[Cause]) -> None:
        self.simulator = simulator
        self.set = simulator.set
        self.causes = causes
        self.span = fmean(step.span for step in simulator.set.steps)
        self.notes: list[str] = []

    def find(self) -> Iterator[Remedy]:
        yield from self._remove_causes()
        yield from self._even_out_stages()
        try:
            yield from self._change_schedule()
        except InputError as error:
            self.notes.append(f"{NOT_COMPARED}: {error}.")

    def _make_saving(
        self, change: str, seconds: float, condition: str = "", **drawn: Any
    ) -> Remedy:
        """Remedy that saves ``seconds`` of a step. ``drawn``: further fields."""
        predicted = max(0.0, self.span - seconds)
        gain = 1 - predicted / self.span if self.span else 0.0
        return Remedy(change, predicted, gain, condition, **drawn)

    def _remove_causes(self) -> Iterator[Remedy]:
        """Remedies whose gain is the cost of the cause that they remove."""
        for cause in self.causes:
            action, condition = ACTIONS.get(cause.cause, ("", ""))
            if cause.workers:
                action = f"replace the node of {cause.where}, or find what slows it"
            elif cause.link is not None:
                action = f"repair the link {cause.where}, or place its ends on other ports"
            if action:
                yield self._make_saving(action, cause.seconds, condition, removal=cause.removal)

    # --- another split ------------------------------------------------------------------------

    def _even_out_stages(self) -> Iterator[Remedy]:
        """Simulate the recorded steps with equal stages and the same work in total."""
        sums: dict[tuple[int, int], list[float]] = defaultdict(list)
        for step in self.set.steps:
            for op, time in zip(step.ops, step.times, strict=False):
                if op.optype in _SPLIT:
                    sums[op.optype, op.chunk].append(time)
        mean = {key: fmean(times) for key, times in sums.items()}
        kinds = {kind for kind, _ in mean}
        chunks = range(len(self.set.chunk_stages))
        even = {kind: fmean(mean.get((kind, chunk), 0.0) for chunk in chunks) for kind in kinds}
        works = [0.0] * self.set.stages
        for (_, chunk), time in mean.items():
            works[self.set.chunk_stages[chunk]] += time
        average = fmean(works)
        if not average or max(works) <= LEAST_UNEVENNESS * average:
            return

        def change(step: RecordedStep, times: list[float]) -> None:
            for i, op in enumerate(step.ops):
                if own := mean.get((op.optype, op.chunk), 0.0):
                    times[i] *= even[op.optype] / own

        longest = works.index(max(works))
        saved = self.simulator.recorded - fmean(self.simulator.simulate_changed(change))
        share = 1 - average / works[longest]
        shares = " ".join(f"{work / average:.2f}" for work in works[:16])
        yield self._make_saving(
            f"another split: move {share:.0%} of stage {longest}'s work to the others (stages now"
            f" take {shares} of the mean)",
            saved,
            AT_BEST,
            removal=change,
        )

    # --- other schedules ----------------------------------------------------------------------

    def _change_schedule(self) -> Iterator[Remedy]:
        model = _ReplicaModel(self.simulator, self._find_slowest_replica())
        problem, today = model.problem, model.schedule
        before = simulate(today, problem).makespan
        policy = model.policy
        yield from self._plan_orders(model, before)
        yield from self._change_microbatches(problem, policy, before)
        if any(cause.cause == "varying lengths" for cause in self.causes):
            yield from self._order_microbatches()
        if self.set.replicas > 1:
            yield from self._move_microbatches(policy)

    def _find_slowest_replica(self) -> int:
        workers = self.set.workers
        found = self.simulator.restore_groups(lambda op: workers[op.worker].dp_rank)
        return int(str(max(found, key=lambda replica: (found[replica], -int(str(replica))))))

    def _plan_orders(self, model: _ReplicaModel, before: float) -> Iterator[Remedy]:
        """Plan other orders within today's memory, each better than those before it, and one with
        any memory. ``before``: seconds of today's order by the model."""
        problem, policy = model.problem, model.policy
        if problem.stage_count * problem.microbatches > MOST_CELLS:
            self.notes.append(f"{NOT_COMPARED}: there are too many ops.")
            return
        several = problem.multi_stage
        best = 0.0
        for other in SEVERAL if several else SINGLE[1:]:
            if other is policy:
                continue
            try:
                planned = plan(problem, other)
            except InputError:
                continue
            saved = before - planned.simulation.makespan
            if saved <= best + LEAST_GAIN / 2 * self.span:
                continue
            best = saved
            yield self._make_saving(
                f"schedule {other.value}, with no more microbatches in flight than today",
                saved,
                HALF if model.must_assume(planned.schedule) else "",
                schedule=planned.schedule,
                problem=problem,
            )
        yield from self._adapt(model, before, best)

    def _adapt(self, model: _ReplicaModel, before: float, best: float) -> Iterator[Remedy]:
        """Plan for PipeMorph's runtime, within today's memory and with any: its sends do not block
        a rank, and slow links have queues of their own. ``best``: seconds that others save."""
        slow = next((cause for cause in self.causes if cause.link is not None), None)
        links = {cause.link for cause in self.causes if cause.link is not None}
        limited, narrow = (model.plan_links(links, narrow=each) for each in (False, True))
        explained = model.rest + before
        error = abs(self.span - explained) + pstdev(step.span for step in self.set.steps)
        for problem in (limited, _lift_limits(limited)):
            planned = plan(problem, Policy.PIPEMORPH)
            predicted = model.rest + planned.simulation.makespan
            at_worst = plan(problem.model_copy(update={"links": narrow.links}), Policy.PIPEMORPH)
            later = at_worst.simulation.makespan - planned.simulation.makespan
            saved = self.span - predicted
            if saved <= best + LEAST_GAIN / 2 * self.span:
                continue
            best = saved
            name = f"schedule {Policy.PIPEMORPH.value}"
            if slow is not None:
                name = f"adapt to the slow link {slow.where}: {name}"
            conditions = [HALF] if model.must_assume(planned.schedule) else []
            if problem is limited:
                memory = "no more microbatches in flight than today"
            else:
                peaks, now = (
                    join_dashed(schedule.count_in_flight_peaks())
                    for schedule in (planned.schedule, model.schedule)
                )
                memory = f"{peaks} microbatches in flight on the stages (today {now})"
                conditions.insert(0, "the memory suffices")
            yield self._make_saving(
                f"{name}, with {memory}", saved, ", and ".join(conditions),
                schedule=planned.schedule, problem=problem, adapts=True,
                error=max(0.0, later) + error / self.span * predicted if self.span else 0.0,
            )  # fmt: skip

    def _change_microbatches(
        self, problem: Problem, policy: Policy, before: float
    ) -> Iterator[Remedy]:
        # Caps are those of today in bytes: of microbatches of half the size twice as many fit.
        n = problem.microbatches
        rest = self.span - before
        sizes = [(2.0, f"{2 * n} microbatches of half the size", "they take half the time")]
        if n % 2 == 0:
            what = f"{n // 2} microbatches of twice the size"
            sizes.append((0.5, what, "they take twice the time"))
        for factor, what, condition in sizes:
            stages = tuple(shrink_stage(stage, factor) for stage in problem.stages)
            after = self._predict(problem, policy, round(n * factor), stages)
            if after is not None:
                yield self._make_saving(what, before - after, condition)
        after = self._predict(problem, policy, 2 * n, problem.stages)
        if after is not None and self.span:
            predicted = rest + after
            yield Remedy(
                f"{2 * n} microbatches of the same size: a batch of twice the size",
                predicted, 1 - predicted / 2 / self.span, "the batch may be larger",
            )  # fmt: skip

    def _predict(
        self, problem: Problem, policy: Policy, count: int, stages: Sequence[StageTimes]
    ) -> float | None:
        """Time of ``count`` microbatches by ``policy``; None if it cannot be planned."""
        if not 1 <= count * problem.stage_count <= MAX_CELLS:
            return None
        changed = problem.model_copy(update={"microbatches": count, "stages": tuple(stages)})
        try:
            return plan(changed, policy).simulation.makespan
        except InputError:
            return None

    def _order_microbatches(self) -> Iterator[Remedy]:
        """Order the microbatches of each replica for today's schedule, in the last steps."""
        replicas = sorted({self.set.workers[number].dp_rank for number in self.set.used})
        models = [_ReplicaModel(self.simulator, replica) for replica in replicas[:MOST_REPLICAS]]
        saved = []
        for step in self.set.steps[-ORDERED_STEPS:]:
            times = [model.order_microbatches(step) for model in models]
            saved.append(max(before for before, _ in times) - max(after for _, after in times))
        yield self._make_saving(
            "run the microbatches of each step in the best order for this schedule", fmean(saved)
        )

    def _move_microbatches(self, policy: Policy) -> Iterator[Remedy]:
        """Move microbatches from slow replicas to fast ones, one by one, while that helps."""
        replicas = sorted({self.set.workers[number].dp_rank for number in self.set.used})
        slow = any(cause.workers for cause in self.causes)
        if len(replicas) > MOST_REPLICAS or not slow:
            return
        problems = {r: _ReplicaModel(self.simulator, r).problem for r in replicas}
        counts = {r: problem.microbatches for r, problem in problems.items()}
        found: dict[tuple[int, int], float | None] = {}

        def predict(replica: int, count: int) -> float:
            key = replica, count
            if key not in found:
                problem = problems[replica]
                found[key] = self._predict(problem, policy, count, problem.stages)
            seconds = found[key]
            return float("inf") if seconds is None else seconds

        times = {r: predict(r, counts[r]) for r in replicas}
        before = max(times.values())
        while True:
            source = max(replicas, key=lambda r: times[r])
            target = min(
                (r for r in replicas if r != source), key=lambda r: predict(r, counts[r] + 1)
            )
            moved = predict(source, counts[source] - 1) if counts[source] > 1 else float("inf")
            if max(moved, predict(target, counts[target] + 1)) >= times[source]:
                break
            counts[source] -= 1
            counts[target] += 1
            times[source], times[target] = moved, predict(target, counts[target])
        changes = [
            f"{counts[r]} on dp_rank {r}" for r in replicas if counts[r] != problems[r].microbatches
        ]
        if changes:
            yield self._make_saving(
                f"move microbatches between replicas: {join_named(changes)}",
                before - max(times.values()),
            )


def _lift_limits(problem: Problem) -> Problem:
    stages = [stage.model_copy(update={"in_flight_limit": None}) for stage in problem.stages]
    return problem.model_copy(update={"stages": tuple(stages)})


class _ReplicaModel:
    """Planner's model of a replica: mean times, seconds, and the order of its last step.

    Raises :class:`InputError` if the order is none that the planner can simulate. ``split``: the
    trace has gradients of weights apart.
    """

    def __init__(self, simulator: StepSimulator, replica: int) -> None:
        self.set = simulator.set
        self.replica = replica
        self.step = simulator.set.steps[-1]
        times: dict[tuple[int, int], list[float]] = defaultdict(list)
        waits: dict[int, list[float]] = defaultdict(list)
        for step in self.set.steps:
            for op, time in zip(step.ops, step.times, strict=False):
                if self._is_mine(op.worker):
                    times[op.optype, op.chunk].append(time)
            for transfer in step.graph.messages:
                producer = step.ops[transfer.producer]
                if transfer.receive >= 0 and self._is_mine(producer.worker):
                    ends = producer.chunk, step.ops[transfer.consumer].chunk
                    waits[min(ends)].append(step.times[transfer.receive])
        self.times = {key: fmean(found) for key, found in times.items()}
        last = _F, len(self.set.chunk_stages) - 1
        loss = sum(sum(found) for (kind, _), found in times.items() if kind == _LOSS)
        self.times[last] += loss / len(times[last])
        self.delays = {link: fmean(found) for link, found in waits.items()}
        self.split = any(kind == _W for kind, _ in self.times)

    def must_assume(self, schedule: Schedule) -> bool:
        """True if a schedule splits backwards whose parts are not recorded."""
        return not self.split and any(op.kind is OpKind.B for ops in schedule.ranks for op in ops)

    def _is_mine(self, worker: int) -> bool:
        return self.set.workers[worker].dp_rank == self.replica

    @cached_property
    def schedule(self) -> Schedule:
        """Order of the ops of the last step. Microbatches are numbered as the first stage runs
        them."""
        by_worker: dict[int, list[tuple[int, OpKind, int]]] = defaultdict(list)
        numbers: dict[int, int] = {}
        mine = [op for op in self.step.ops if self._is_mine(op.worker) and op.optype in _SPLIT]
        for op in mine:
            if op.chunk == 0 and op.optype == _F:
                numbers[op.microbatch] = len(numbers)
        weights = {(op.chunk, op.microbatch) for op in mine if op.optype == _W}
        if any(op.microbatch not in numbers for op in mine):
            raise InputError("gradients of weights have other microbatches than forwards")
        for op in mine:
            kind = {_F: OpKind.F, _W: OpKind.W, _B: OpKind.B}[op.optype]
            if kind is OpKind.B and (op.chunk, op.microbatch) not in weights:
                kind = OpKind.BW
            stage = self.set.workers[op.worker].stage
            by_worker[stage].append((op.chunk, kind, numbers[op.microbatch]))
        ranks = [by_worker[stage] for stage in sorted(by_worker)]
        schedule = Schedule.from_stage_ops(len(numbers), ranks)
        simulate(schedule, self.open_problem)
        return schedule

    @cached_property
    def open_problem(self) -> Problem:
        """Times without limits of microbatches in flight."""
        stages = []
        for chunk in range(len(self.set.chunk_stages)):
            forward, backward, weight = (
                self.times.get((kind, chunk), 0.0) for kind in (_F, _B, _W)
            )
            # The share of the gradients of weights is not in a trace of whole backwards.
            parts = (backward, weight) if self.split else (backward / 2, backward / 2)
            stages.append(
                StageTimes(forward=forward, backward_input=parts[0], backward_weight=parts[1])
            )
        links = [Link(delay=self.delays.get(i, 0.0)) for i in range(len(stages) - 1)]
        count = len(
            {op.microbatch for op in self.step.ops if self._is_forward(op.optype, op.worker)}
        )
        ranks, placement = self.set.stages, self.set.chunk_stages
        if len(stages) == ranks:
            return Problem(microbatches=count, stages=tuple(stages), links=tuple(links))
        for name in ("interleaved", "v"):
            if len(stages) % ranks == 0 and place_stages(len(stages), ranks, name) == placement:
                return Problem(
                    microbatches=count, stages=tuple(stages), links=tuple(links), ranks=ranks,
                    placement=name,
                )  # fmt: skip
        raise InputError("the chunks are placed in a way that the planner does not know")

    def _is_forward(self, optype: int, worker: int) -> bool:
        return optype == _F and self._is_mine(worker)

    @cached_property
    def problem(self) -> Problem:
        """Times, with as many microbatches in flight as today at most."""
        peaks = self.schedule.count_in_flight_peaks()
        stages = [
            stage.model_copy(update={"in_flight_limit": peak})
            for stage, peak in zip(self.open_problem.stages, peaks, strict=True)
        ]
        return self.open_problem.model_copy(update={"stages": tuple(stages)})

    @cached_property
    def rest(self) -> float:
        """Seconds of a step before and after the pipeline's ops, and of what runs between these."""
        found = []
        for step in self.set.steps:
            mine = [
                (op, time)
                for op, time in zip(step.ops, step.times, strict=False)
                if self._is_mine(op.worker)
            ]
            compute = [op for op, _ in mine if op.optype in _COMPUTE]
            begin, end = min(op.start for op in compute), max(op.end for op in compute)
            between: dict[int, float] = defaultdict(float)
            for op, time in mine:
                if op.optype in _BETWEEN and begin < op.start and op.end < end:
                    between[op.worker] += time
            found.append(step.span - (end - begin) + max(between.values(), default=0.0))
        return fmean(found)

    @cached_property
    def message_delays(self) -> dict[int, float]:
        """Seconds of a message by its link, mean of both directions: the median of those that were
        expected, without the time that they waited for those before them."""
        expected: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        others: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        for step in self.set.steps:
            arrived: dict[tuple[int, int], float] = {}
            for message in sorted(
                step.graph.messages, key=lambda each: step.ops[each.producer].end
            ):
                producer = step.ops[message.producer]
                if message.receive < 0 or not self._is_mine(producer.worker):
                    continue
                way = producer.chunk, step.ops[message.consumer].chunk
                receive, time = step.ops[message.receive], step.times[message.receive]
                alone = min(time, max(0.0, receive.end - arrived.get(way, receive.end - time)))
                arrived[way] = receive.end
                # Before its receive was posted, a message may have travelled already.
                ready = receive.complete and receive.begin <= producer.end
                (expected if ready else others)[way].append((time, alone))
        by_link: dict[int, list[float]] = defaultdict(list)
        for way in expected.keys() | others.keys():
            times, since = zip(*(expected[way] or others[way]), strict=True)
            # Where messages wait for those before them, the time since these varies less.
            by_link[min(way)].append(median(since if pstdev(since) < pstdev(times) else times))
        return {link: fmean(found) for link, found in by_link.items()}

    def plan_links(self, slow: Container[int], *, narrow: bool) -> Problem:
        """Problem with the links of PipeMorph's runtime. ``slow``: links that are delegated, by
        their first stage; with ``narrow`` each of their messages occupies the link: most
        have one size, so what they take may be a delay or a transfer."""
        stages = self.set.chunk_stages
        several = self.problem.multi_stage
        links = []
        for i, (a, b) in enumerate(pairwise(stages)):
            route = Route.DELEGATED if min(a, b) in slow else Route.DIRECT
            link = build_link(route, self.message_delays.get(i, 0.0), several=several)
            if narrow and route is Route.DELEGATED:
                link = link.model_copy(update={"transfer": link.delay, "delay": 0.0})
            links.append(link)
        return self.problem.model_copy(update={"links": tuple(links)})

    def order_microbatches(self, step: RecordedStep) -> tuple[float, float]:
        """Seconds of a step's microbatches in their order, and in the best order found."""
        places: dict[int, int] = {}
        sums = [[0.0, 0.0] for _ in range(self.problem.microbatches)]
        mine = [i for i, op in enumerate(step.ops) if self._is_mine(op.worker)]
        for i in mine:
            op = step.ops[i]
            if op.optype == _F and op.chunk == 0:
                places[op.microbatch] = len(places)
        if len(places) != len(sums):
            raise InputError("steps have different numbers of microbatches")
        for i in mine:
            op = step.ops[i]
            if op.optype in _SPLIT:
                sums[places[op.microbatch]][0] += step.times[i]
                sums[places[op.microbatch]][1] += self.times[op.optype, op.chunk]
        costs = [spent / usual if usual else 1.0 for spent, usual in sums]
        varied = with_microbatch_costs(self.problem, costs)
        plan_of_today = Plan(
            0, self.policy, self.schedule, (Route.DIRECT,) * len(self.problem.links),
            self.problem.list_in_flight_limits(),
        )  # fmt: skip
        order = order_microbatches(self.problem, plan_of_today, costs)
        before, after = (
            simulate(self.schedule, varied.with_microbatch_order(each)).makespan
            for each in ((), order)
        )
        return before, after

    @cached_property
    def policy(self) -> Policy:
        """Policy whose order is today's; pipemorph if none is."""
        for policy in SEVERAL if self.problem.multi_stage else SINGLE:
            try:
                if plan(self.problem, policy).schedule.op_codes == self.schedule.op_codes:
                    return policy
            except InputError:
                continue
        return Policy.PIPEMORPH
