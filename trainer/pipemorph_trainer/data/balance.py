"""Deals samples to replicas and microbatches, so that the planned iteration is shortest.

The time of a pipeline is not a sum: unequal microbatches make its stages wait, in an amount that
depends on their order. So deals with about equal sums are compared by the simulated iteration of
the replica that is last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pipemorph.errors import InputError
from pipemorph.planning import Dispatch, Link, Plan, Problem, Route, StageTimes, plan, predict
from pipemorph.planning.problem import MOST_COST
from pipemorph.planning.search.microbatch_order import order_microbatches

ORDER_SECONDS = 1e-4
"""Effort of the search for the order of a replica's microbatches, see
:func:`~pipemorph.planning.search.microbatch_order.order_microbatches`."""
MOST_TRIALS = 8
"""Most exchanges between two replicas that are simulated."""


@dataclass(frozen=True)
class Deal:
    """Samples of one step, dealt to replicas and microbatches."""

    samples: tuple[tuple[tuple[int, ...], ...], ...]
    """Indices of samples, by replica and microbatch. A replica's microbatches are in the order in
    which the planned iteration is shortest."""
    costs: tuple[tuple[float, ...], ...]
    """Cost of each microbatch, by replica: ``costs`` of :meth:`pipemorph_trainer.Pipeline.step`."""
    times: tuple[float, ...]
    """Planned iteration of each replica, in the unit of the problem's times, or of the costs."""

    @property
    def makespan(self) -> float:
        """Planned iteration: that of the replica which is last."""
        return max(self.times)


@dataclass(frozen=True)
class _ReplicaPlan:
    """Plan of a replica for equal microbatches. ``unit``: mean cost, which takes the problem's
    times. ``pace``: time of the slowest stage per cost. ``slowdown``: factor of the iteration."""

    problem: Problem
    plan: Plan
    unit: float
    pace: float
    slowdown: float = 1.0

    @property
    def microbatches(self) -> int:
        return self.problem.microbatches

    def order_costs(self, costs: Sequence[float]) -> tuple[tuple[int, ...], float]:
        """Best order of microbatches with these costs, and the time of the iteration."""
        factors = tuple(min(cost / self.unit, MOST_COST) for cost in costs)
        order = order_microbatches(self.problem, self.plan, factors, seconds=ORDER_SECONDS)
        varied = self.problem.model_copy(update={"microbatch_costs": (factors,)})
        seconds = predict(self.plan.schedule, varied.with_microbatch_order(order))
        return order, self.slowdown * seconds


@lru_cache(maxsize=256)
def _plan_schedule(text: str) -> tuple[Problem, Plan]:
    """Plan of a problem, given as JSON, for equal microbatches."""
    found = plan(Problem.model_validate_json(text))
    routes = (Route.DIRECT,) * len(found.problem.links)
    return found.problem, found.to_plan(0, routes, Dispatch.STATIC)


def balance(
    costs: Sequence[float],
    replicas: int,
    microbatches: int | Sequence[int],
    *,
    stages: int | None = None,
    problem: Problem | Sequence[Problem] | None = None,
    base: float = 0.0,
    sizes: Sequence[float] | None = None,
    capacity: float | None = None,
    padded: bool = False,
    in_proportion: bool = False,
) -> Deal:
    """Deal samples with these ``costs`` so that the planned iteration is shortest.

    Every sample is dealt once, and every microbatch has at least one. The deal is the same on every
    machine.

    Args:
        costs: of the samples, in one unit: tokens, or :meth:`CostModel.price_sample`.
        replicas: number of pipelines whose gradients are averaged.
        microbatches: of each replica; or a list with the number of every replica.
        stages: number of equal stages, without links; default: 1, for which only sums count.
        problem: op times, links and limits of the pipeline, for a microbatch of mean cost; or a
            list with that of every replica, of which one may be slow. Its number of microbatches
            does not count.
        base: cost of every microbatch in addition to those of its samples.
        sizes, capacity: of the samples, such as their tokens, and the most that fits a microbatch.
            All microbatches of a pipeline's step have one shape; packed ones are filled up to the
            capacity.
        padded: samples are the rows of a microbatch, and all rows of a replica's step are as long
            as its longest sample, so that each costs as much. Samples of about one length then go
            to one replica, and fewer to one with longer ones. By default samples are packed, and
            their costs add up.
        in_proportion: replicas with fewer microbatches are slower, so that with equal microbatches
            all would end at the same time: each gets work in proportion. Not with a list of
            problems.

    Raises :class:`InputError` for costs that are negative or infinite, fewer samples than
    microbatches, or samples that do not fit the capacity.
    """
    counts = _read_counts(microbatches, replicas)
    units = _read_units(costs, sizes, base)
    total = sum(counts)
    if len(units) < total:
        raise InputError(
            f"costs are of {len(units)} samples; {total} microbatches need at least as many"
        )
    if padded and capacity is not None:
        raise InputError("capacity is given, and padded; expected one of them")
    mean = base + math.fsum(unit.cost for unit in units) / total
    plans = _make_plans(counts, stages, problem, mean or 1.0)
    if in_proportion:
        plans = _slow_down(plans, problem)
    if padded:
        shares = [
            _Share(each, _pad_rows(own, each.microbatches), base)
            for each, own in zip(plans, _deal_rows(units, plans), strict=True)
        ]
    else:
        if capacity is not None:
            units = _pack_units(units, total, capacity)
        # Each replica needs a unit for each of its microbatches, and may have all spare ones.
        most = [count + len(units) - total for count in counts]
        dealt = _fill_bins(units, [each.pace for each in plans], most, counts)
        shares = [_Share(each, own, base) for each, own in zip(plans, dealt, strict=True)]
        _exchange_units(shares, base)
    return Deal(
        tuple(tuple(share.list_samples()) for share in shares),
        tuple(share.costs for share in shares),
        tuple(share.seconds for share in shares),
    )


class _Share:
    """Samples of one replica. ``units``: what may be exchanged, samples or whole microbatches."""

    def __init__(self, planned: _ReplicaPlan, units: Sequence[_Unit], base: float) -> None:
        self.planned, self.units = planned, tuple(units)
        count = planned.microbatches
        bins = _fill_bins(units, [1.0] * count, [len(units)] * count, [1] * count)
        costs = [base + math.fsum(unit.cost for unit in each) for each in bins]
        order, self.seconds = planned.order_costs(costs)
        self._bins = [bins[m] for m in order]
        self.costs = tuple(costs[m] for m in order)

    def list_samples(self) -> Iterator[tuple[int, ...]]:
        """Samples of each microbatch in the order of their indices."""
        for each in self._bins:
            yield tuple(sorted(sample for unit in each for sample in unit.samples))


@dataclass(frozen=True)
class _Unit:
    """Samples that stay together, and their cost."""

    cost: float
    samples: tuple[int, ...]
    size: float = 0.0


def _fill_bins(
    units: Sequence[_Unit], paces: Sequence[float], most: Sequence[int], least: Sequence[int]
) -> list[list[_Unit]]:
    """Deal units to bins with about equal ``pace × cost``: the largest first, each to the bin that
    would end first with it. ``most``, ``least``: numbers of units of each bin."""
    bins: list[list[_Unit]] = [[] for _ in paces]
    sums = [0.0] * len(paces)
    remaining, missing = len(units), sum(least)
    for unit in sorted(units, key=lambda each: (-each.cost, each.samples)):
        fits = [
            b
            for b, own in enumerate(bins)
            if len(own) < most[b] and (remaining > missing or len(own) < least[b])
        ]
        chosen = min(fits, key=lambda b: ((sums[b] + unit.cost) * paces[b], b))
        missing -= len(bins[chosen]) < least[chosen]
        remaining -= 1
        bins[chosen].append(unit)
        sums[chosen] += unit.cost
    return bins


def _read_units(costs: Sequence[float], sizes: Sequence[float] | None, base: float) -> list[_Unit]:
    """A unit of each sample."""
    if sizes is not None and len(sizes) != len(costs):
        raise InputError(f"sizes are of {len(sizes)} samples, and costs of {len(costs)}")
    lists = {"costs": costs, "sizes": sizes or (), "base": [base]}
    for name, values in lists.items():
        for k, value in enumerate(values):
            if not (math.isfinite(value) and value >= 0):
                where = name if name == "base" else f"{name}[{k}]"
                raise InputError(f"{where} is {value}; expected a number from 0 on")
    return [
        _Unit(float(cost), (k,), 0.0 if sizes is None else float(sizes[k]))
        for k, cost in enumerate(costs)
    ]


def _read_counts(microbatches: int | Sequence[int], replicas: int) -> list[int]:
    if replicas < 1:
        raise InputError(f"replicas is {replicas}; expected at least 1")
    counts = [microbatches] * replicas if isinstance(microbatches, int) else list(microbatches)
    if len(counts) != replicas or any(count < 1 for count in counts):
        raise InputError(
            f"microbatches is {microbatches}; expected a number from 1 on, or one for each of"
            f" {replicas} replicas"
        )
    return counts


def _make_plans(
    counts: Sequence[int],
    stages: int | None,
    problem: Problem | Sequence[Problem] | None,
    unit: float,
) -> list[_ReplicaPlan]:
    if problem is not None and stages is not None:
        raise InputError("stages and problem are given; expected one of them")
    if problem is None:
        if stages is not None and stages < 1:
            raise InputError(f"stages is {stages}; expected at least 1")
        third = unit / 3
        times = StageTimes(forward=third, backward_input=third, backward_weight=third)
        some = stages or 1
        problem = Problem(microbatches=1, stages=(times,) * some, links=(Link(),) * (some - 1))
    problems = [problem] * len(counts) if isinstance(problem, Problem) else list(problem)
    if len(problems) != len(counts):
        raise InputError(
            f"problem is a list of {len(problems)}; expected one for each of {len(counts)} replicas"
        )
    found = []
    for own, count in zip(problems, counts, strict=True):
        equal = {"microbatches": count, "microbatch_costs": None, "warmup": None}
        text = own.model_copy(update=equal).model_dump_json()
        pace = max(stage.forward + stage.least_backward for stage in own.stages) / unit
        found.append(_ReplicaPlan(*_plan_schedule(text), unit, pace))
    return found


def _slow_down(
    plans: list[_ReplicaPlan], problem: Problem | Sequence[Problem] | None
) -> list[_ReplicaPlan]:
    """Slow down replicas with fewer microbatches, so that all end at the same time if all
    microbatches cost as much."""
    if problem is not None and not isinstance(problem, Problem):
        raise InputError("in_proportion is given, and a list of problems; expected one of them")
    times = [predict(each.plan.schedule, each.problem) for each in plans]
    most = max(each.microbatches for each in plans)
    return [
        replace(each, pace=each.pace * most / each.microbatches, slowdown=max(times) / time)
        for each, time in zip(plans, times, strict=True)
    ]


def _pack_units(units: Sequence[_Unit], groups: int, capacity: float) -> list[_Unit]:
    """Pack samples to groups of about equal cost, none larger than the capacity: the samples that
    cost most first; if they do not fit so, the largest ones first. Raises :class:`InputError` if
    they do not fit."""
    by_cost = sorted(units, key=lambda unit: (-unit.cost, unit.samples))
    by_size = sorted(units, key=lambda unit: (-unit.size, unit.samples))
    for ordered, by in ((by_cost, "cost"), (by_size, "cost"), (by_size, "size")):
        bins: list[list[_Unit]] = [[] for _ in range(groups)]
        sums = [dict.fromkeys(("cost", "size"), 0.0) for _ in bins]
        for k, unit in enumerate(ordered):
            empty = sum(not own for own in bins)
            fits = [
                b
                for b, own in enumerate(bins)
                if sums[b]["size"] + unit.size <= capacity and (not own or len(ordered) - k > empty)
            ]
            if not fits:
                break
            chosen = min(fits, key=lambda b: (sums[b][by], b))
            bins[chosen].append(unit)
            sums[chosen]["cost"] += unit.cost
            sums[chosen]["size"] += unit.size
        else:
            return [_join_units(own) for own in bins]
    raise InputError(
        f"the samples do not fit {groups} microbatches of capacity {capacity:g}: their sizes are"
        f" {math.fsum(unit.size for unit in units):g} in all, and up to {by_size[0].size:g};"
        " expected a larger capacity, more microbatches or fewer samples"
    )


def _join_units(units: Sequence[_Unit]) -> _Unit:
    samples = tuple(sample for unit in units for sample in unit.samples)
    return _Unit(math.fsum(unit.cost for unit in units), samples)


def _deal_rows(units: Sequence[_Unit], plans: Sequence[_ReplicaPlan]) -> list[list[_Unit]]:
    """Deal samples of falling cost to replicas, so that the last one ends early: each gets as many
    rows in its microbatches as it can run in the same time."""
    falling = sorted(units, key=lambda unit: (-unit.cost, unit.samples))
    needed = [sum(each.microbatches for each in plans[r:]) for r in range(len(plans) + 1)]

    def deal_within(seconds: float) -> list[list[_Unit]] | None:
        found, begin = [], 0
        for r, each in enumerate(plans):
            row = falling[begin].cost * each.pace * each.microbatches
            rows = int(seconds / row) if row > 0 else len(falling)
            end = min(begin + rows * each.microbatches, len(falling) - needed[r + 1])
            if end - begin < each.microbatches:
                return None
            found.append(falling[begin:end])
            begin = end
        return found if begin == len(falling) else None

    low, high = 0.0, falling[0].cost * plans[0].pace or 1.0
    while deal_within(high) is None:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if deal_within(middle) is not None else (middle, high)
    dealt = deal_within(high)
    assert dealt is not None, "the search ends at a time that suffices"
    return dealt


def _pad_rows(units: Sequence[_Unit], microbatches: int) -> list[_Unit]:
    """Microbatches of a replica: samples in turn, in rows that all cost as much as the first."""
    groups = [units[m::microbatches] for m in range(microbatches)]
    cost = len(groups[0]) * units[0].cost
    return [_Unit(cost, _join_units(group).samples) for group in groups]


def _exchange_units(shares: list[_Share], base: float) -> None:
    """Exchange units between the replica that is last and the one that is first, as long as the
    later of both becomes shorter."""
    for _ in range(MOST_TRIALS):
        ranked = sorted(range(len(shares)), key=lambda r: (shares[r].seconds, r))
        first, last = ranked[0], ranked[-1]
        pair = _choose_exchange(shares[last], shares[first])
        if pair is None:
            return
        gives, takes = pair
        lasts = [unit for unit in shares[last].units if unit not in gives] + list(takes)
        firsts = [unit for unit in shares[first].units if unit not in takes] + list(gives)
        found = [
            _Share(shares[last].planned, lasts, base), _Share(shares[first].planned, firsts, base)
        ]  # fmt: skip
        if max(share.seconds for share in found) >= shares[last].seconds:
            return
        shares[last], shares[first] = found


def _choose_exchange(
    last: _Share, first: _Share
) -> tuple[tuple[_Unit, ...], tuple[_Unit, ...]] | None:
    """Units of the last replica and of the first one, whose exchange makes both end at about the
    same time; None if no exchange moves them closer together."""
    gap = last.seconds - first.seconds
    paces = last.planned.pace + first.planned.pace
    wanted = gap / paces
    best: tuple[float, tuple[_Unit, ...], tuple[_Unit, ...]] | None = None
    ordered = sorted(first.units, key=lambda unit: unit.cost)
    may_give = len(last.units) > last.planned.microbatches
    for unit in last.units:
        for other in [None, *ordered] if may_give else ordered:
            moved = unit.cost - (other.cost if other is not None else 0.0)
            # Twice of what is wanted would exchange the roles of both.
            if not 0 < moved < 2 * wanted:
                continue
            miss = abs(moved - wanted)
            if best is None or miss < best[0]:
                best = miss, (unit,), () if other is None else (other,)
    return None if best is None else (best[1], best[2])
