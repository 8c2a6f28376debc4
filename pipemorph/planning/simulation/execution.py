"""Event core (``csrc/planner``) that executes schedules.

The simulator and the list schedules of all policies run on it, with one or several stages per rank.
An op starts when its rank is free and its message has arrived: F waits for the F upstream, B for
the B downstream (on the last stage, for its own F). Messages are sent at the end of an op and
travel as described by :class:`~pipemorph.planning.problem.Link`; those within a rank take no time.
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
from pipemorph.planning.ir import CODE_OF_KIND, KINDS, Op, Schedule, group_stages_by_rank
from pipemorph.planning.problem import Link, Problem, convert_to_grains
from pipemorph.planning.validator import validate_online

if TYPE_CHECKING:
    from pipemorph.planning._planner import Costs as PackedCosts

INF = float("inf")
LOCAL_LINK = Link()
"""Link between two stages of one rank."""

DelayAt = Callable[[int, float], float]
"""(link, time of send) → delay or transfer, in the problem's unit."""
Changes = tuple[DelayAt, DelayAt | None]
"""Delays of an iteration, and its transfers if they change as well."""
Rows = Sequence[Sequence[float]]
"""A row per rank or stage, with a time per op or microbatch."""
Waits = tuple[tuple[int, ...], ...]
"""Positions, by rank, of the ops for which the rank waits when they are in turn."""

_F, _, _W, _BW = CODE_OF_KIND.values()

TIGHT_EFFORT = 60_000_000
"""Number of stage states that the tight bound may visit: most of a second."""
RELATIVE_TOLERANCE = 1e-9
"""Relative tolerance of equal makespans: sums of the same times in different order."""
JITTER_AMPLITUDES = (0.05, 0.1, 0.2, 0.5)
"""Largest delays of a message in trials of guided dispatch, as multiples of a forward."""
JITTER_DRAWS = 3
"""Iterations simulated per amplitude."""
MOST_SLOWDOWN = 0.001
"""Fraction by which guided iterations may be longer on average."""
MOST_GUIDED_CELLS = 8192
"""Largest number of stages × microbatches for trials."""


class Costs(NamedTuple):
    """Problem laid out for the core, in the problem's unit of time.

    ``transfer``: time for which a message occupies its direction of a link. ``queues`` and
    ``outstanding``: 0 for no limit. ``whole_backward``: time of a fused backward.
    ``device_limits``: None for stages whose activations stay on the device; otherwise an F after
    which they leave takes ``departure_times`` more, and their backward ``return_times``.
    ``stages_by_rank``: stages of each rank. ``rank_tails``: time after the last op of a rank, part
    of the makespan. ``rank_starts``: earliest start of a rank, 0 or later; only executions use it.
    ``microbatch_sizes``: memory of a microbatch in flight, by stage; ``rank_memory``: of a rank for
    all its stages, infinity for no limit. ``factors``: costs of the microbatches by stage, factors
    of all op times; empty if all are equal.
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
    departure_times: list[float]
    return_times: list[float]
    device_limits: list[int | None]
    rank_tails: list[float]
    rank_starts: list[float]
    stages_by_rank: Sequence[Sequence[int]]
    microbatch_sizes: list[float]
    rank_memory: float
    factors: Rows = ()

    @property
    def stage_count(self) -> int:
        return len(self.forward)

    @staticmethod
    def from_problem(problem: Problem, placement: Sequence[int] = ()) -> Costs:
        """Costs of a problem. ``placement``: the rank of each stage; empty: the problem's. Links
        within a rank take no time. A rank reduces its stages' gradients after its last op."""
        stages, placement = problem.stages, placement or problem.stage_ranks
        ranks = group_stages_by_rank(placement)
        links = [
            LOCAL_LINK if placement[i] == placement[i + 1] else link
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
            [s.departure_time for s in stages],
            [s.return_time for s in stages],
            [s.device_limit for s in stages],
            [max(stages[s].reduction or 0.0 for s in mine) for mine in ranks],
            [0.0] * len(ranks),
            ranks,
            [float(size) for size in problem.microbatch_sizes],
            float(problem.rank_memory or INF),
            problem.stage_costs,
        )

    def with_least_backward(self) -> Costs:
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

    def pack_for_planner(self) -> PackedCosts:
        """Tuple for the compiled core."""
        return (
            self.microbatches,
            (self.forward, self.backward_input, self.backward_weight, self.whole_backward),
            self.delay,
            self.transfer,
            self.queues,
            self.outstanding,
            self.half_duplex,
            self.departure_times,
            self.return_times,
            # A limit that no stage can reach is cut, so that it fits an int.
            [min(limit or 0, self.microbatches + 1) for limit in self.device_limits],
            self.rank_tails,
            self.rank_starts,
            self.stages_by_rank,
            self.microbatch_sizes,
            self.rank_memory,
            self.factors,
        )

    def for_period(self) -> Costs:
        """Costs whose makespan is this one's period (see
        :class:`~pipemorph.planning.problem.Problem`) plus :meth:`find_last_start`: a rank may end
        as much later than others as it begins later."""
        begins, last = self.compute_first_starts(), self.find_last_start()
        after = [
            last - begins[mine[0]] + tail
            for mine, tail in zip(self.stages_by_rank, self.rank_tails, strict=True)
        ]
        return self._replace(rank_tails=after)

    def find_last_start(self) -> float:
        """Time at which the last rank begins its first op, the F of its first stage."""
        begins = self.compute_first_starts()
        return max(begins[mine[0]] for mine in self.stages_by_rank)

    def compute_first_starts(self) -> list[float]:
        """Start of each stage's first op in any schedule: the forward of microbatch 0."""
        begins = [0.0]
        for forward, transfer, delay in zip(self.forward, self.transfer, self.delay, strict=False):
            begins.append(begins[-1] + forward + transfer + delay)
        return begins

    def without_delay(self) -> Costs:
        """Costs with links that take no time, for policies that ignore delays."""
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
class DispatchRules:
    """Restrictions on the ops that each stage may run. One entry per stage.

    A rank runs its first ready op of B, F, W; of two stages, the op of the later one in the model.
    Run before the iteration, with the order as result, this is the paper's list scheduler ("full
    schedule"). The device limit of a stage restricts its ops, too
    (:class:`~pipemorph.planning.offload.DeviceResidency`).

    Several stages on a rank cause no deadlock: an idle rank has no ready op on any of its stages,
    so each of them waits as it would on a rank of its own.

    - ``warmup[i]``: number of F before any other op.
    - ``caps[i]``: F only while fewer microbatches than this are in flight (F start to W end).
    - ``exact_warmup``: no F beyond ``warmup`` before the first backward.
    - ``fused[i]``: one BW in place of B and W.
    """

    warmup: tuple[int, ...]
    caps: tuple[int, ...]
    fused: tuple[bool, ...]
    exact_warmup: bool = False

    @staticmethod
    def from_problem(
        problem: Problem,
        warmup: Sequence[int],
        *,
        exact_warmup: bool = False,
        fused: Sequence[bool] | None = None,
    ) -> DispatchRules:
        """Rules for a problem, with its caps.

        Raises :class:`~pipemorph.planning.validator.ScheduleError` if the schedule could
        deadlock.
        """
        limits = problem.list_in_flight_limits()
        validate_online(warmup, limits, problem.list_device_limits())
        n = problem.microbatches
        return DispatchRules(
            tuple(min(n, x) for x in warmup),
            tuple(n if limit is None else min(n, limit) for limit in limits),
            tuple(fused) if fused is not None else (False,) * problem.stage_count,
            exact_warmup=exact_warmup,
        )


def compute_zero_bubble_warmup(problem: Problem) -> tuple[int, ...]:
    """Warm-up that covers the round trip of equal stages, within the caps."""
    count = problem.stage_count
    return fit_warmup([2 * (count - i) - 1 for i in range(count)], problem)


def fit_warmup(wanted: Sequence[int], problem: Problem) -> tuple[int, ...]:
    """Reduce ``wanted`` to valid counts: at least 1, at most N and all caps up to the stage,
    non-increasing."""
    most = problem.microbatches
    fitted = []
    for x, stage in zip(wanted, problem.stages, strict=True):
        if stage.in_flight_limit is not None:
            most = min(most, stage.in_flight_limit)
        most = max(1, min(most, x))
        fitted.append(most)
    return tuple(fitted)


def choose_paper_warmup(problem: Problem) -> tuple[int, ...]:
    """Warm-up of the paper: adapted counts if a link has a delay or memory limits are unknown, else
    those of the initial plan."""
    undisturbed = not any(link.wire_time for link in problem.links)
    if undisturbed and problem.stages[0].in_flight_limit is not None:
        return compute_initial_warmup(problem)
    return compute_adapted_warmup(problem)


def compute_adapted_warmup(problem: Problem) -> tuple[int, ...]:
    """Warm-up with enough slackness to absorb each link's delay, from ``x_{S-1} = 1`` backwards.

    ``Δ_i = max(2, ceil((tF_i + tB_i + 2 c_i) / (tF_{i+1} + tB_{i+1})))`` (paper,
    "adaptation"). The paper bounds Δ by ``N - 2S``, which is not positive for short
    pipelines; here counts are bounded by N and the in-flight caps instead.
    """
    stages, links = problem.with_mean_costs().stages, problem.links
    count = problem.stage_count
    warmup = [1] * count
    for i in range(count - 2, -1, -1):
        here = stages[i].forward + stages[i].backward_input + 2 * links[i].wire_time
        below = stages[i + 1].forward + stages[i + 1].backward_input
        # A rounding error in near-equal times must not add a microbatch.
        slack = ceil(here / below - 1e-9) if here < below * problem.microbatches else 10**6
        warmup[i] = warmup[i + 1] + max(2, slack)
    return fit_warmup(warmup, problem)


def compute_initial_warmup(problem: Problem) -> tuple[int, ...]:
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
class DispatchGuide:
    """Order and limits of guided dispatch. One entry per rank (``caps``: per stage).

    A rank runs its ready op that is first in the plan's order, so a late message holds up only the
    ops that need it. The first op of the plan's order that a rank has not run is *in turn*. Others,
    of any of its stages, run out of turn, within these limits:

    - A stage never holds more microbatches in flight than in the plan, :attr:`DispatchGuide.caps`.
    - Each kind of op of a stage runs in microbatch order, and fused and split backwards are those
      of the plan.
    - Some plans let a rank idle though an op is ready, since a more urgent one is about to arrive.
      The rank runs nothing before such an op, :attr:`DispatchGuide.waits`. While messages arrive as
      planned, nothing runs out of turn, and the order is the plan's.

    Guided dispatch cannot deadlock. Consider the time order in which the plan would run, and the
    first op in it that has not run. It is in turn on its rank. The op that it waits for is earlier,
    has run, and its message arrives. No limit forbids it: all ops before it in the plan have run,
    so no more is in flight than in the plan at that point; and if the device has no room for it, a
    W can run (:mod:`pipemorph.planning.offload`). This needs sends that never wait for the receiver
    to run an op: the engine buffers at the sender, and the direct route posts receives for all
    possible messages (``agent/receive_windows.py`` in the trainer).

    - ``op_codes[i]``: the plan's order, as in :class:`Execution`.
    - ``waits[i]``: positions of the ops for which the rank waits when they are in turn.
    - ``caps[i]``: F out of turn only while fewer microbatches than this are in flight.
    """

    op_codes: tuple[bytes, ...]
    waits: tuple[tuple[int, ...], ...]
    caps: tuple[int, ...]


def build_guide(schedule: Schedule, problem: Problem, waits: Waits | None = None) -> DispatchGuide:
    """Guide for dispatch by ``schedule``. ``waits``: empty for none, None for those that the
    schedule has under ``problem``."""
    if waits is None:
        waits = find_planned_waits(schedule, problem)
    return DispatchGuide(
        op_codes=schedule.op_codes,
        waits=waits or ((),) * len(schedule.ranks),
        caps=schedule.count_in_flight_peaks(),
    )


def find_planned_waits(schedule: Schedule, problem: Problem) -> Waits:
    """Positions at which ranks wait for an op though another could run, or for a link to accept a
    message, if messages take as long as under ``problem``."""
    costs = Costs.from_problem(convert_to_grains(problem)[0], schedule.placement)
    found = _planner.find_planned_waits(
        costs.pack_for_planner(), schedule.op_codes, schedule.count_in_flight_peaks()
    )
    return tuple(map(tuple, found))


class Execution(NamedTuple):
    """Executed iteration; times in the problem's unit.

    ``op_codes[rank]``: the ops in run order, as :data:`CODE_OF_KIND` of their kinds plus 4 times
    the chunk. ``start``, ``end`` and ``free_at``: by rank and op; the rank can run its next op at
    ``free_at``, later than ``end`` if a send blocked it. ``forward_arrivals[stage][m]``: arrival of
    the forward of microbatch *m* from the stage above; ``gradient_arrivals``: of the gradient from
    the stage below; infinity if not sent.
    """

    op_codes: Sequence[bytes]
    start: Rows
    end: Rows
    free_at: Rows
    forward_arrivals: Rows
    gradient_arrivals: Rows

    def compute_makespan(self, after: Sequence[float]) -> float:
        """End of the iteration. ``after``: time after the last op of each rank."""
        return max(ends[-1] + tail for ends, tail in zip(self.end, after, strict=True))


def decode_schedule(
    codes: Sequence[bytes | bytearray], microbatches: int, placement: Sequence[int] = ()
) -> Schedule:
    """Schedule from the core's codes. Its ranks share the op objects."""
    chunks = 1 + max((code for kinds in codes for code in set(kinds)), default=0) // 4
    ops = [
        [Op(kind, m, chunk) for m in range(microbatches)]
        for chunk in range(chunks)
        for kind in KINDS
    ]
    ranks = []
    for kinds in codes:
        if chunks > 1 or _BW in kinds:
            turns = zip(kinds, list_microbatches(kinds), strict=True)
            ranks.append(tuple([ops[code][m] for code, m in turns]))
        else:
            remaining = [iter(each) for each in ops]
            ranks.append(tuple([next(remaining[kind]) for kind in kinds]))
    return Schedule(microbatches, tuple(ranks), tuple(placement))


def list_microbatches(codes: bytes | bytearray) -> list[int]:
    """Microbatch of each op of a rank. A BW counts as a B and as a W of its chunk."""
    found = []
    done = [[0, 0, 0] for _ in range(1 + max(codes, default=0) // 4)]
    """Counts of F, B and W, by chunk."""
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


def execute_in_order(
    costs: Costs,
    codes: Sequence[bytes],
    delay_at: DelayAt | None = None,
    transfer_at: DelayAt | None = None,
) -> Execution:
    """Execute each rank's ops in their order; a rank that waits forever stops early.

    ``delay_at`` and ``transfer_at``: delays and transfers that change within the iteration, in
    place of those of ``costs``; ``transfer_at`` needs ``delay_at``.
    """
    return Execution(
        *_planner.execute_in_order(costs.pack_for_planner(), codes, delay_at, transfer_at)
    )


def compute_makespan(costs: Costs, codes: Sequence[bytes]) -> float:
    """End of a static order; infinity on a deadlock."""
    return _planner.compute_makespan(costs.pack_for_planner(), codes)


def schedule_online(costs: Costs, rules: DispatchRules) -> tuple[Sequence[bytes], float]:
    """Order of an iteration in which each rank picks its next op by ``rules``, and its end.

    A rank picks when it becomes free and when a message arrives. Raises :class:`InputError` on a
    deadlock.
    """
    order, end = _planner.schedule_online(
        costs.pack_for_planner(), rules.caps, rules.warmup, rules.exact_warmup, rules.fused
    )
    for codes, mine in zip(order, costs.stages_by_rank, strict=True):
        for chunk, stage in enumerate(mine):
            f, b, w, whole = (codes.count(4 * chunk + code) for code in range(4))
            if w + whole < costs.microbatches:
                raise InputError(
                    f"stage {stage} waits forever after {f} F, {b + whole} B and {w + whole} W:"
                    f" warm-up {list(rules.warmup)}, caps {list(rules.caps)}"
                )
    return order, end


def execute_guided(
    costs: Costs,
    guide: DispatchGuide,
    delay_at: DelayAt | None = None,
    transfer_at: DelayAt | None = None,
) -> Execution:
    """Execute an iteration in which each rank picks the ready op that is first in the plan's order,
    within the limits of :class:`DispatchGuide`. Raises :class:`InputError` on a deadlock, which
    only an invalid order causes."""
    ran = Execution(
        *_planner.execute_guided(
            costs.pack_for_planner(), guide.op_codes, guide.waits, guide.caps, delay_at, transfer_at
        )
    )
    for i, (codes, order) in enumerate(zip(ran.op_codes, guide.op_codes, strict=True)):
        if len(codes) < len(order):
            raise InputError(f"rank {i} waits forever after {len(codes)} of {len(order)} ops")
    return ran


def compute_guided_makespan(costs: Costs, guide: DispatchGuide) -> float:
    """End of the iteration that :func:`execute_guided` executes."""
    found = _planner.compute_guided_makespan(
        costs.pack_for_planner(), guide.op_codes, guide.waits, guide.caps
    )
    return (
        found
        if isfinite(found)
        else execute_guided(costs, guide).compute_makespan(costs.rank_tails)
    )


def compute_jittered_makespans(
    costs: Costs, guide: DispatchGuide, most: float, draws: int
) -> tuple[float, float]:
    """Mean makespans of a valid order and of guided dispatch by it, over ``draws`` iterations in
    which each message between ranks is up to ``most`` late, drawn by the moment of its send."""
    made = (guide.op_codes, guide.waits, guide.caps)
    own, guided_ = _planner.compute_jittered_makespans(costs.pack_for_planner(), *made, most, draws)
    return own, guided_


def is_guided_as_fast(schedule: Schedule, problem: Problem, waits: Waits) -> bool:
    """True if a valid plan takes no longer under guided dispatch with any drawn jitter. False,
    without trials, above :data:`MOST_GUIDED_CELLS`. Equal on every machine.

    Guided dispatch runs another op as soon as one is late. If the late op becomes ready a moment
    later, it waits for the other one to end. Plans without in-flight limits have room for that;
    with tight limits, iterations on healthy links get up to 3% longer. Hence the trials, under
    drawn delays of a twentieth to half of an op.
    """
    if problem.stage_count * problem.microbatches > MOST_GUIDED_CELLS:
        return False
    unit = fmean(stage.forward for stage in problem.with_mean_costs().stages)
    if unit <= 0:
        return False
    costs, guide = (
        Costs.from_problem(problem, schedule.placement),
        build_guide(schedule, problem, waits),
    )
    for amplitude in JITTER_AMPLITUDES:
        own, free = compute_jittered_makespans(costs, guide, amplitude * unit, JITTER_DRAWS)
        if free > own * (1 + MOST_SLOWDOWN):
            return False
    return True


# --- bounds ---------------------------------------------------------------------------------------


def compute_lower_bound(problem: Problem, placement: Sequence[int] = ()) -> float:
    """Lower bound of the problem's objective (makespan or period) for all schedules, in its unit.
    ``placement``: the rank of each stage; empty: the problem's.

    Valid for split and fused backwards, with and without offload or recomputation, static and
    guided dispatch, and all link models: limits on sends only delay messages.

    The longest path of the precedence graph is a weak bound, since a stage runs one op at a time.
    The compiled bound (``csrc/planner/lower_bound.cpp``) therefore counts the ops that must run on
    the same rank: it takes the preemptive one-machine schedule of each rank's ops between their
    heads and tails (Jackson's rule, as Carlier and Pinson use it for job shops).

    If the microbatches may be reordered, it holds for every order of them.

    Under in-flight caps this is several percent below the optimum.
    :func:`compute_tight_lower_bound` is closer, but takes longer than planning.
    """
    costs, less, grain = _relax_costs(problem, placement)
    return (
        _planner.compute_lower_bound(
            costs.pack_for_planner(), _list_loosest_caps(problem), problem.reorders
        )
        - less
    ) * grain


def compute_tight_lower_bound(
    problem: Problem, objective: float, effort: int = TIGHT_EFFORT
) -> float:
    """Lower bound for one stage per rank, often larger than :func:`compute_lower_bound`; at most
    ``objective``, the makespan or period of some plan. The closer that is to the optimum, the
    sooner the bound is found.

    Windows in which each op must start are narrowed by the orders that each stage can run
    (``csrc/planner/windows.cpp``), until no schedule below ``objective`` remains, or bisection has
    found the least makespan that is not refuted. If ``effort`` is too small to begin, as for 128
    stages, the bound is that of :func:`compute_lower_bound`.
    """
    costs, less, grain = _relax_costs(problem)
    found = _planner.compute_tight_lower_bound(
        costs.pack_for_planner(), _list_loosest_caps(problem), objective / grain + less, effort
    )
    return (found - less) * grain


def _relax_costs(problem: Problem, placement: Sequence[int] = ()) -> tuple[Costs, float, float]:
    """Costs to bound, in grains; excess of a makespan under them over the objective; and a grain in
    the problem's unit."""
    grained, grain = convert_to_grains(problem, down=True)
    costs = Costs.from_problem(grained, placement).with_least_backward()
    if problem.objective == "period":
        return costs.for_period(), costs.find_last_start(), grain
    return costs, 0.0, grain


def _list_loosest_caps(problem: Problem) -> tuple[int, ...]:
    """Most microbatches in flight in any plan, by stage."""
    stages = zip(problem.stages, list_hard_caps(problem), strict=True)
    return tuple(
        min(stage.recompute_limit or cap, problem.microbatches) if stage.may_recompute else cap
        for stage, cap in stages
    )


def list_hard_caps(problem: Problem) -> tuple[int, ...]:
    """Caps ``K_i`` as numbers: N for no cap, and no more than the memory of the rank allows."""
    n, memory = problem.microbatches, problem.rank_memory
    return tuple(
        min(n if k is None else min(k, n), n if memory is None else memory // size)
        for k, size in zip(problem.list_in_flight_limits(), problem.microbatch_sizes, strict=True)
    )
