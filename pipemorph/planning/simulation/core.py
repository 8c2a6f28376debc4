"""The event core (``csrc/planner``): executes schedules.

Everything that executes a schedule is this: the simulator, the list schedules of the policies, with
one or several stages per rank. An op starts when its rank is free and its message has arrived: F
waits for the F upstream, B for the B downstream (on the last stage, for its own F). Messages are
sent at the end of an op and travel as described by :class:`~pipemorph.planning.problem.Link`; those
within a rank take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, isfinite
from operator import sub
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from pipemorph.errors import InputError
from pipemorph.planning import _planner
from pipemorph.planning.ir import CODE, KINDS, Op, Schedule, stages_of
from pipemorph.planning.problem import Link, Problem, in_grains
from pipemorph.planning.validator import validate_online

if TYPE_CHECKING:
    from pipemorph.planning._planner import Costs as PackedCosts

INF = float("inf")
WITHIN = Link()
"""The link of two stages of one rank."""

DelayAt = Callable[[int, float], float]
"""(link, time of send) → delay or transfer, in the problem's unit."""
Changes = tuple[DelayAt, DelayAt | None]
"""Delays of an iteration, and its transfers if they change as well."""
Rows = Sequence[Sequence[float]]
"""Per rank or stage, one time per op or microbatch."""
Waits = tuple[tuple[int, ...], ...]
"""Per rank, positions of its ops before which nothing runs in their turn."""

_F, _, _W, _BW = CODE.values()

TIGHT_EFFORT = 60_000_000
"""How many states of stages the tight bound may visit: most of a second."""
SAME = 1e-9
"""Relative tolerance of equal makespans: sums of the same times in different order."""
AMPLITUDES = (0.05, 0.1, 0.2, 0.5)
"""Most that a message comes late where guided dispatch is tried, in forwards."""
DRAWS = 3
"""Iterations that are simulated for each."""
SLOWER = 0.001
"""Fraction by which iterations may get longer on average."""
CELLS = 8192
"""Largest number of stages × microbatches that is tried."""


class Costs(NamedTuple):
    """Times in the problem's unit. ``queues`` and ``outstanding``: 0 for no limit.

    ``transfer``: how long one message occupies its direction of a link. ``whole_backward``: time of
    a fused backward. ``device_limits``: None for stages whose activations stay on the device; else
    an F after which they leave takes ``leaving`` more, and their backward ``returning``.
    ``stages_of``: the stages of each rank. ``after``: what follows the last op of a rank, and so is
    part of the makespan. ``before``: when a rank may begin, 0 or later; only executions know it.
    ``sizes``: memory of one microbatch in flight on each stage; ``memory``: of a rank, for all its
    stages, infinity for no limit.
    """

    microbatches: int
    forward: list[float]
    backward_input: list[float]
    backward_weight: list[float]
    delay: list[float]
    transfer: list[float]
    queues: list[int]
    outstanding: list[int]
    half_duplex: list[bool]
    whole_backward: list[float]
    leaving: list[float]
    returning: list[float]
    device_limits: list[int | None]
    after: list[float]
    before: list[float]
    stages_of: Sequence[Sequence[int]]
    sizes: list[float]
    memory: float

    @property
    def stage_count(self) -> int:
        return len(self.forward)

    @staticmethod
    def of(problem: Problem, placement: Sequence[int] = ()) -> Costs:
        """``placement``: the rank of each stage; empty: as of the problem. A link within a rank
        takes no time. A rank reduces the gradients of all its stages after its last op."""
        stages, placement = problem.stages, placement or problem.placed
        ranks = stages_of(placement)
        links = [
            WITHIN if placement[i] == placement[i + 1] else link
            for i, link in enumerate(problem.links)
        ]
        return Costs(
            problem.microbatches,
            [s.forward for s in stages],
            [s.backward_input for s in stages],
            [s.backward_weight for s in stages],
            [link.delay for link in links],
            [link.transfer for link in links],
            [link.queues or 0 for link in links],
            [link.outstanding or 0 for link in links],
            [link.half_duplex for link in links],
            [s.whole_backward for s in stages],
            [s.leaving for s in stages],
            [s.returning for s in stages],
            [s.device_limit for s in stages],
            [max(stages[s].reduction or 0.0 for s in mine) for mine in ranks],
            [0.0] * len(ranks),
            ranks,
            [float(size) for size in problem.sizes],
            float(problem.rank_memory or INF),
        )

    def least(self) -> Costs:
        """Costs with the shorter form of each backward, split or fused: a bound for both."""
        whole = [
            min(fused, b + w)
            for fused, b, w in zip(
                self.whole_backward, self.backward_input, self.backward_weight, strict=True
            )
        ]
        backward = list(map(min, self.backward_input, whole))
        weight = list(map(sub, whole, backward))
        return self._replace(backward_input=backward, backward_weight=weight)

    def packed(self) -> PackedCosts:
        """As the compiled core takes them."""
        return (
            self.microbatches,
            (self.forward, self.backward_input, self.backward_weight, self.whole_backward),
            self.delay,
            self.transfer,
            self.queues,
            self.outstanding,
            self.half_duplex,
            self.leaving,
            self.returning,
            # One that no stage can reach is none, however large.
            [min(limit or 0, self.microbatches + 1) for limit in self.device_limits],
            self.after,
            self.before,
            self.stages_of,
            self.sizes,
            self.memory,
        )

    def for_period(self) -> Costs:
        """Costs whose makespan is the period (see :class:`~pipemorph.planning.problem.Problem`) of
        these plus :meth:`last_start`: what a rank begins later than others, it may end later."""
        begins, last = self.begins(), self.last_start()
        after = [
            last - begins[mine[0]] + tail
            for mine, tail in zip(self.stages_of, self.after, strict=True)
        ]
        return self._replace(after=after)

    def last_start(self) -> float:
        """When the last rank begins its first op, the F of its first stage."""
        begins = self.begins()
        return max(begins[mine[0]] for mine in self.stages_of)

    def begins(self) -> list[float]:
        """When each stage begins its first op, in any schedule: the forward of microbatch 0."""
        begins = [0.0]
        for forward, transfer, delay in zip(self.forward, self.transfer, self.delay, strict=False):
            begins.append(begins[-1] + forward + transfer + delay)
        return begins

    def without_delay(self) -> Costs:
        """The same stages with links without delay, for policies that ignore delays."""
        count = len(self.delay)
        return self._replace(
            delay=[0.0] * count,
            transfer=[0.0] * count,
            queues=[0] * count,
            outstanding=[0] * count,
            half_duplex=[False] * count,
        )


# --- rules of list schedules, and their warm-ups --------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """Restrictions on what each stage may run. One entry per stage.

    On each rank the first ready op of B, F, W runs, of two stages that of the later one in the
    model. The paper's list scheduler ("full schedule") is the same, run before the iteration, with
    its order as result. A stage's device limit restricts them, too
    (:class:`~pipemorph.planning.offload.Residency`).

    Several stages on a rank do not make ranks wait for each other forever: an idle rank has no
    ready op on any of its stages, so each of them waits as it would on a rank of its own.

    - ``warmup[i]``: only F until this many have run.
    - ``caps[i]``: F only while fewer microbatches than this are in flight (F start to W end).
    - ``exact_warmup``: no F beyond ``warmup`` before the first backward.
    - ``fused[i]``: one BW in place of B and W.
    """

    warmup: tuple[int, ...]
    caps: tuple[int, ...]
    fused: tuple[bool, ...]
    exact_warmup: bool = False

    @staticmethod
    def of(
        problem: Problem,
        warmup: Sequence[int],
        *,
        exact_warmup: bool = False,
        fused: Sequence[bool] | None = None,
    ) -> Rules:
        """Rules for a problem, with its caps.

        Raises :class:`~pipemorph.planning.validator.ScheduleError` if the schedule could
        deadlock.
        """
        limits = problem.in_flight_limits()
        validate_online(warmup, limits, problem.device_limits())
        n = problem.microbatches
        return Rules(
            tuple(min(n, x) for x in warmup),
            tuple(n if limit is None else min(n, limit) for limit in limits),
            tuple(fused) if fused is not None else (False,) * problem.stage_count,
            exact_warmup=exact_warmup,
        )


def zero_bubble_warmup(problem: Problem) -> tuple[int, ...]:
    """Warm-up that covers the round trip of equal stages, within the caps."""
    count = problem.stage_count
    return fit_warmup([2 * (count - i) - 1 for i in range(count)], problem)


def fit_warmup(wanted: Sequence[int], problem: Problem) -> tuple[int, ...]:
    """``wanted`` reduced to valid counts: at least 1, at most N and all caps up to the stage,
    non-increasing."""
    most = problem.microbatches
    fitted = []
    for x, stage in zip(wanted, problem.stages, strict=True):
        if stage.in_flight_limit is not None:
            most = min(most, stage.in_flight_limit)
        most = max(1, min(most, x))
        fitted.append(most)
    return tuple(fitted)


def paper_warmup(problem: Problem) -> tuple[int, ...]:
    """The paper's warm-up: adapted counts if a link has a delay; else those of the initial plan, if
    memory limits are known."""
    undisturbed = not any(link.wire_time for link in problem.links)
    if undisturbed and problem.stages[0].in_flight_limit is not None:
        return initial_warmup(problem)
    return adapted_warmup(problem)


def adapted_warmup(problem: Problem) -> tuple[int, ...]:
    """Warm-up with enough slackness to absorb each link's delay, from ``x_{S-1} = 1`` backwards.

    ``Δ_i = max(2, ceil((tF_i + tB_i + 2 c_i) / (tF_{i+1} + tB_{i+1})))`` (paper,
    "adaptation"). The paper bounds Δ by ``N - 2S``, which is not positive for short
    pipelines; here counts are bounded by N and the in-flight caps instead.
    """
    stages, links = problem.stages, problem.links
    count = problem.stage_count
    warmup = [1] * count
    for i in range(count - 2, -1, -1):
        here = stages[i].forward + stages[i].backward_input + 2 * links[i].wire_time
        below = stages[i + 1].forward + stages[i + 1].backward_input
        # A rounding error in near-equal times must not add a microbatch.
        slack = ceil(here / below - 1e-9) if here < below * problem.microbatches else 10**6
        warmup[i] = warmup[i + 1] + max(2, slack)
    return fit_warmup(warmup, problem)


def initial_warmup(problem: Problem) -> tuple[int, ...]:
    """Warm-up with all slackness that memory allows, spread evenly (paper, "initial plan").

    ``x_0`` is the first stage's cap (or N), ``x_{S-1} = 1``, and the smallest Δ is as large as
    possible; the remainder goes to the last links, where a delay costs most.
    """
    count = problem.stage_count
    if count == 1:
        return fit_warmup([1], problem)
    limit = problem.stages[0].in_flight_limit
    most = problem.microbatches if limit is None else min(limit, problem.microbatches)
    each, more = divmod(max(0, most - 1), count - 1)
    warmup = [1] * count
    for i in range(count - 2, -1, -1):
        warmup[i] = warmup[i + 1] + each + (1 if i >= count - 1 - more else 0)
    return fit_warmup(warmup, problem)


# --- execution ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Guide:
    """What guided dispatch follows. One entry per rank (``caps``: per stage).

    Of its ready ops, a rank runs the first in the plan's order, so a late message holds up only
    what needs it. The first op of the plan's order that a rank has not run is *in turn*. Others, of
    any of its stages, run out of turn, within these limits:

    - A stage never holds more microbatches in flight than its plan does, :attr:`Guide.caps`.
    - Each kind of op of a stage runs in microbatch order, and fused and split backwards are those
      of the plan.
    - Some plans let a rank idle though an op is ready, since a more urgent one is about to arrive.
      The rank runs nothing before such an op, :attr:`Guide.waits`. So nothing runs out of turn
      while messages arrive as planned: the order then is the plan's.

    Guided dispatch cannot deadlock. Take the order of time in which the plan itself would run, and
    of all ranks' ops that have not run the first one in it. It is in turn on its rank. What it
    waits for comes earlier, so it has run and its message arrives. No limit forbids it: what the
    plan runs before it has run, so that no more is in flight than in the plan at that point; and
    where the device has no room for it, a W can run (:mod:`pipemorph.planning.offload`). This needs
    sends that never wait for the receiver to run an op: the engine keeps bytes at the sender, and
    the direct route has receives for all that can come (``agent/receives.py`` in the trainer).

    - ``codes[i]``: the plan's order, as in :class:`Ran`.
    - ``waits[i]``: positions of ops before which nothing runs in their turn.
    - ``caps[i]``: F out of turn only while fewer microbatches than this are in flight.
    """

    codes: tuple[bytes, ...]
    waits: tuple[tuple[int, ...], ...]
    caps: tuple[int, ...]


def guide_of(schedule: Schedule, problem: Problem, waits: Waits | None = None) -> Guide:
    """What guided dispatch of ``schedule`` follows. ``waits``: empty for none, None for those that
    the schedule has under ``problem``."""
    if waits is None:
        waits = planned_waits(schedule, problem)
    return Guide(
        codes=schedule.codes,
        waits=waits or ((),) * len(schedule.ranks),
        caps=schedule.in_flight_peak(),
    )


def planned_waits(schedule: Schedule, problem: Problem) -> Waits:
    """Where ranks wait for an op though another could run, or for a link to take a message, if
    messages take as long as under ``problem``."""
    costs = Costs.of(in_grains(problem)[0], schedule.placement)
    found = _planner.waits(costs.packed(), schedule.codes, schedule.in_flight_peak())
    return tuple(map(tuple, found))


class Ran(NamedTuple):
    """One executed iteration; times in the problem's unit.

    ``codes[rank]``: the ops in run order, as :data:`CODE` of their kinds plus 4 times the chunk.
    ``start``, ``end`` and ``free``: per rank and op; ``free`` is when the rank could go on, later
    than ``end`` if a send blocked it. ``above[stage][m]``: arrival of the forward of microbatch *m*
    from the stage above; ``below``: of the gradient from the stage below; infinity if it was not
    sent.
    """

    codes: Sequence[bytes]
    start: Rows
    end: Rows
    free: Rows
    above: Rows
    below: Rows

    def makespan(self, after: Sequence[float]) -> float:
        """The end of the iteration. ``after``: what follows the last op of each rank."""
        return max(ends[-1] + tail for ends, tail in zip(self.end, after, strict=True))


def decode(
    codes: Sequence[bytes | bytearray], microbatches: int, placement: Sequence[int] = ()
) -> Schedule:
    """The schedule of codes. Its ranks share the op objects."""
    chunks = 1 + max((code for kinds in codes for code in set(kinds)), default=0) // 4
    ops = [
        [Op(kind, m, chunk) for m in range(microbatches)]
        for chunk in range(chunks)
        for kind in KINDS
    ]
    ranks = []
    for kinds in codes:
        if chunks > 1 or _BW in kinds:
            turns = zip(kinds, microbatches_of(kinds), strict=True)
            ranks.append(tuple([ops[code][m] for code, m in turns]))
        else:
            left = [iter(each) for each in ops]
            ranks.append(tuple([next(left[kind]) for kind in kinds]))
    return Schedule(microbatches, tuple(ranks), tuple(placement))


def microbatches_of(codes: bytes | bytearray) -> list[int]:
    """The microbatch of each op of a rank. A BW is the turn of a B and of a W of its chunk."""
    found = []
    done = [[0, 0, 0] for _ in range(1 + max(codes, default=0) // 4)]
    """Per chunk: F, B and W."""
    for code in codes:
        turns, kind = done[code >> 2], code & 3
        if kind == _BW:
            found.append(turns[1])
            turns[1] += 1
            turns[2] += 1
        else:
            found.append(turns[kind])
            turns[kind] += 1
    return found


def in_order(
    costs: Costs,
    codes: Sequence[bytes],
    delay_at: DelayAt | None = None,
    transfer_at: DelayAt | None = None,
) -> Ran:
    """Executes each rank's ops in their order; a rank that waits forever stops early.

    ``delay_at`` and ``transfer_at``: delays and transfers that change within the iteration, in
    place of those of ``costs``; transfers need ``delay_at`` too.
    """
    return Ran(*_planner.in_order(costs.packed(), codes, delay_at, transfer_at))


def makespan(costs: Costs, codes: Sequence[bytes]) -> float:
    """End of a static order; infinity if ranks wait for each other."""
    return _planner.makespan(costs.packed(), codes)


def online(costs: Costs, rules: Rules) -> tuple[Sequence[bytes], float]:
    """The order of one iteration in which each rank picks its next op by ``rules``, and its end.

    A rank picks when it becomes free and when a message arrives. Raises :class:`InputError` on a
    deadlock.
    """
    order, end = _planner.online(
        costs.packed(), rules.caps, rules.warmup, rules.exact_warmup, rules.fused
    )
    for codes, mine in zip(order, costs.stages_of, strict=True):
        for chunk, stage in enumerate(mine):
            f, b, w, whole = (codes.count(4 * chunk + code) for code in range(4))
            if w + whole < costs.microbatches:
                raise InputError(
                    f"stage {stage} waits forever after {f} F, {b + whole} B and {w + whole} W:"
                    f" warm-up {list(rules.warmup)}, caps {list(rules.caps)}"
                )
    return order, end


def guided(
    costs: Costs,
    guide: Guide,
    delay_at: DelayAt | None = None,
    transfer_at: DelayAt | None = None,
) -> Ran:
    """Runs one iteration in which each rank picks the ready op that is first in the plan's order,
    within the limits of :class:`Guide`. Raises :class:`InputError` on
    a deadlock, which only an invalid order has."""
    ran = Ran(
        *_planner.guided(
            costs.packed(), guide.codes, guide.waits, guide.caps, delay_at, transfer_at
        )
    )
    for i, (codes, order) in enumerate(zip(ran.codes, guide.codes, strict=True)):
        if len(codes) < len(order):
            raise InputError(f"rank {i} waits forever after {len(codes)} of {len(order)} ops")
    return ran


def guided_makespan(costs: Costs, guide: Guide) -> float:
    """The end of the iteration that :func:`guided` runs."""
    found = _planner.guided_makespan(costs.packed(), guide.codes, guide.waits, guide.caps)
    return found if isfinite(found) else guided(costs, guide).makespan(costs.after)


def jittered(costs: Costs, guide: Guide, most: float, draws: int) -> tuple[float, float]:
    """Mean makespans of a valid order and of guided dispatch by it, over ``draws`` iterations in
    which each message between ranks comes up to ``most`` late, at random by the moment of its
    send."""
    made = (guide.codes, guide.waits, guide.caps)
    own, guided_ = _planner.jittered(costs.packed(), *made, most, draws)
    return own, guided_


def as_fast_guided(schedule: Schedule, problem: Problem, waits: Waits) -> bool:
    """Whether a valid plan takes no longer under guided dispatch, whatever the jitter. Larger
    problems are not tried: no. The same on every machine.

    Guided dispatch runs another op as soon as one is late. Where the late one comes a moment later,
    it then waits for the other one to end. Without in-flight limits the plan has room for that;
    with tight ones iterations get up to 3% longer, though links are well. So it is tried under
    drawn delays, from a twentieth of an op to half of one.
    """
    if problem.stage_count * problem.microbatches > CELLS:
        return False
    unit = fmean(stage.forward for stage in problem.stages)
    if unit <= 0:
        return False
    costs, guide = Costs.of(problem, schedule.placement), guide_of(schedule, problem, waits)
    for amplitude in AMPLITUDES:
        own, free = jittered(costs, guide, amplitude * unit, DRAWS)
        if free > own * (1 + SLOWER):
            return False
    return True


# --- bounds ---------------------------------------------------------------------------------------


def lower_bound(problem: Problem, placement: Sequence[int] = ()) -> float:
    """Lower bound of the problem's objective (makespan or period) for all schedules, in its unit.
    ``placement``: the rank of each stage; empty: as of the problem.

    Valid for split and fused backwards, with and without offload or recomputation, static and
    guided dispatch, and all link models: limits on sends only delay messages.

    The longest path of the precedence graph is a weak bound, since a stage runs one op at a time.
    So the compiled bound (``csrc/planner/lower_bound.cpp``) also counts the ops that must run on
    the same rank, and takes for each rank the preemptive one-machine schedule of its ops between
    their heads and tails (Jackson's rule, as Carlier and Pinson use it for job shops).

    Under in-flight caps that is several percent below the optimum. A tighter bound, which takes
    longer than a plan, refutes makespans instead (``csrc/planner/windows.cpp``).
    """
    costs, less, grain = _relaxed(problem, placement)
    return (_planner.lower_bound(costs.packed(), _loosest_caps(problem)) - less) * grain


def tight_lower_bound(problem: Problem, objective: float, effort: int = TIGHT_EFFORT) -> float:
    """As :func:`lower_bound`, of one stage per rank, but larger where possible; at most
    ``objective``, the makespan or period of some plan. The closer that is to the optimum, the
    sooner the bound is found.

    Windows in which each op must start are narrowed by what each stage can run in one order, until
    there is no schedule below ``objective``, or bisection has found the least that is not refuted.
    The bound is that of :func:`lower_bound` if ``effort`` is too small to begin, as it is for 128
    stages.
    """
    costs, less, grain = _relaxed(problem)
    found = _planner.tight_lower_bound(
        costs.packed(), _loosest_caps(problem), objective / grain + less, effort
    )
    return (found - less) * grain


def _relaxed(problem: Problem, placement: Sequence[int] = ()) -> tuple[Costs, float, float]:
    """The costs to bound in grains, how much more than the objective a makespan under them is, and
    a grain in the problem's unit."""
    grained, grain = in_grains(problem, down=True)
    costs = Costs.of(grained, placement).least()
    if problem.objective == "period":
        return costs.for_period(), costs.last_start(), grain
    return costs, 0.0, grain


def _loosest_caps(problem: Problem) -> tuple[int, ...]:
    """The most microbatches in flight of any plan."""
    stages = zip(problem.stages, hard_caps(problem), strict=True)
    return tuple(
        min(stage.recompute_limit or cap, problem.microbatches) if stage.may_recompute else cap
        for stage, cap in stages
    )


def hard_caps(problem: Problem) -> tuple[int, ...]:
    """``K_i`` as a number: N for no cap; no more than the memory of the rank allows."""
    n, memory = problem.microbatches, problem.rank_memory
    return tuple(
        min(n if k is None else min(k, n), n if memory is None else memory // size)
        for k, size in zip(problem.in_flight_limits(), problem.sizes, strict=True)
    )
