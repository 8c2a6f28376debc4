"""Plan variants of the pipemorph policy: offload, recomputation and fused backwards.

The search (``search.search``) finds the order of split backwards under in-flight caps. This module
runs it several times: with activations in host memory or recomputed, and a higher cap, or with the
backwards of some stages fused. In the search

- the B of a fused stage takes the whole backward, and its W takes no time;
- the ops of an offloading stage include the mean copy time per microbatch, and the B of a
  recomputing stage includes the mean time of forwards that run again; if the order found exceeds
  the device limit, the oldest W runs earlier.

The results are simulated exactly, microbatch by microbatch, and the shortest wins. A problem gives
the same schedule on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from itertools import accumulate
from typing import NamedTuple

from pipemorph.planning.ir import Dispatch, Op, OpKind, Plan, Policy, Route, Schedule
from pipemorph.planning.offload import DeviceResidency, compute_device_room
from pipemorph.planning.problem import Problem, StageTimes, convert_to_grains, copy_times
from pipemorph.planning.search.mixed_fusing import Rng, fuse_first_backwards, search_mixed_order
from pipemorph.planning.search.order_search import search_order
from pipemorph.planning.simulation.execution import (
    RELATIVE_TOLERANCE,
    Waits,
    compute_lower_bound,
    decode_schedule,
    find_planned_waits,
)
from pipemorph.planning.simulation.simulator import predict, simulate

SHARES = (1.0, 0.5, 0.25)
"""Shares to try of the microbatches that exceed the device limit in a plan without caps."""
STEPS, STEP_OPS = 16, 40_000
"""Limits of the changes tried afterwards, each of a few stages: their number, and the ops of all of
them, but at least two changes."""
RECOMPUTE_TIMES = 3
"""Multiple of these limits if stages recompute: a forward that runs again costs more than a copy,
so fewer of them pay, and the right ones are harder to find."""


@dataclass(frozen=True)
class PlanVariant:
    """Schedule, the makespan of its static order, and the problem with the limits it obeys.

    ``microbatch_order[k]``: the microbatch that runs as microbatch *k* of schedule and problem;
    empty: *k* itself.
    """

    problem: Problem
    schedule: Schedule
    makespan: float
    policy: Policy = Policy.PIPEMORPH
    microbatch_order: tuple[int, ...] = ()

    def to_plan(
        self, version: int, routes: Sequence[Route], dispatch: Dispatch = Dispatch.STATIC
    ) -> Plan:
        """Plan for the ranks, with ``routes[i]`` for link *i*."""
        return Plan(
            version=version,
            policy=self.policy,
            schedule=self.schedule,
            routes=tuple(routes),
            in_flight_limits=self.problem.list_in_flight_limits(),
            dispatch=dispatch,
            device_limits=self.problem.list_device_limits(),
            recompute=self.problem.list_recompute_flags(),
            waits=self.waits if dispatch is Dispatch.GUIDED else (),
            microbatch_order=self.microbatch_order,
        )

    @cached_property
    def waits(self) -> Waits:
        """Positions at which the plan waits on purpose; guided dispatch waits there too."""
        return find_planned_waits(self.schedule, self.problem)

    @cached_property
    def objective(self) -> float:
        """Makespan or period, by the problem's ``objective``."""
        if self.problem.objective == "makespan":
            return self.makespan
        return simulate(self.schedule, self.problem).period

    @property
    def leaves_device(self) -> bool:
        """True if activations leave the device."""
        return any(limit is not None for limit in self.problem.list_device_limits())


class _VariantChoice(NamedTuple):
    """Choice by stage: the in-flight cap (N: none), and True if the backwards are fused.
    ``copies``: op times in the search include copies and recomputed forwards."""

    caps: tuple[int, ...]
    fused: tuple[bool, ...]
    copies: bool = True


def has_variants(problem: Problem) -> bool:
    """True if the problem allows offload or recomputation, or gains from fused backwards."""
    return any(
        stage.device_limit is not None or stage.may_recompute or stage.fusing_pays
        for stage in problem.stages
    )


def plan_in_order(problem: Problem, *, effort: int, near: float) -> tuple[PlanVariant, float]:
    """Best plan found for the microbatches in their order, and a lower bound of its objective."""
    if has_variants(problem):
        return find_best_variant(problem), compute_lower_bound(problem)
    found = search_order(problem, effort=effort, near=near)
    schedule = found.schedule
    is_makespan = problem.objective == "makespan"
    makespan = found.objective if is_makespan else predict(schedule, problem)
    return PlanVariant(problem, schedule, makespan), found.bound


def find_best_variant(problem: Problem) -> PlanVariant:
    """Shortest plan found, with or without offload, recomputation and fused backwards."""
    return min(generate_variants(problem), key=lambda each: each.objective)


def _with_exact_times(
    find: Callable[..., Iterator[PlanVariant]],
) -> Callable[..., Iterator[PlanVariant]]:
    """Decorator that runs ``find`` on times in grains and restores the unit of its results."""

    @wraps(find)
    def find_exact(problem: Problem, *more: PlanVariant | None) -> Iterator[PlanVariant]:
        for each in find(convert_to_grains(problem)[0], *more):
            own = copy_times(each.problem, problem)
            yield replace(each, problem=own, makespan=predict(each.schedule, own))

    return find_exact


@_with_exact_times
def generate_variants(problem: Problem) -> Iterator[PlanVariant]:
    """Successively better plans of each kind: with all activations on the device (unless a fixed
    warm-up forbids it), then with fused backwards as well, with offload, with recomputation."""
    without = None
    within = keep_on_device(problem)
    if _has_room_for_warmup(within):
        for each in generate_fused_variants(within):
            if each.schedule.first_mixed_stage is None:
                without = each
            yield each
    yield from generate_exceeding_variants(with_stated_limits(problem), without)
    yield from generate_exceeding_variants(within.with_recomputation(), without)


def with_stated_limits(problem: Problem) -> Problem:
    """Problem whose stages obey their own device limits, even if they recompute."""
    stages = [
        stage.model_copy(update={"recompute_limit": None}) if stage.recompute else stage
        for stage in problem.stages
    ]
    return problem.model_copy(update={"stages": tuple(stages)})


def keep_on_device(problem: Problem) -> Problem:
    """Problem in which activations stay on the device: device limits become in-flight caps."""
    return problem.with_device_limits((None,) * problem.stage_count)


def generate_fused_variants(problem: Problem) -> Iterator[PlanVariant]:
    """Successively better plans without offload: split, then fused where that is shorter.

    Fusing shortens the work but delays the gradient's send, so any subset of stages may be best.
    Tries no stage, all stages whose fused backward is shorter, then changes of single stages, and
    last, for static dispatch, stages that fuse the backwards of their first microbatches only.
    """
    whole = tuple(stage.fusing_pays for stage in problem.stages)
    caps, none = _list_caps(problem), (False,) * problem.stage_count
    best = _VariantChoice(caps, none)
    found = _plan_choice(problem, best)
    yield found
    if not any(whole):
        return
    tried = {best}

    def try_choice(choice: _VariantChoice) -> bool:
        nonlocal best, found
        if choice in tried:
            return False
        tried.add(choice)
        variant = _plan_choice(problem, choice)
        if variant.objective >= found.objective * (1 - RELATIVE_TOLERANCE):
            return False
        best, found = choice, variant
        return True

    if try_choice(_VariantChoice(caps, whole)):
        yield found
    for i in [i for i, pays in enumerate(whole) if pays][: _count_steps(problem)]:
        if try_choice(best._replace(fused=_toggle_stage(best.fused, i))):
            yield found
    mixed = search_mixed_order(found.problem)
    if mixed is not None and mixed.objective < found.objective * (1 - RELATIVE_TOLERANCE):
        schedule = decode_schedule(mixed.order, problem.microbatches, problem.stage_ranks)
        yield PlanVariant(found.problem, schedule, predict(schedule, found.problem))


@_with_exact_times
def generate_exceeding_variants(
    problem: Problem, without: PlanVariant | None
) -> Iterator[PlanVariant]:
    """Successively better plans whose activations leave the device; none if no stage needs it.

    Stages with a device limit offload or recompute, as the problem says: any subset of them, as far
    as it pays. ``without``: the plan on the device, whose fused stages are the starting point;
    None: the fixed warm-up allows no such plan.
    """
    problem = problem.with_divided_memory()
    devices = problem.list_device_limits()
    if all(limit is None for limit in devices):
        return
    fused = (False,) * problem.stage_count
    if without is not None:
        fused = tuple(any(op.kind is OpKind.BW for op in ops) for ops in without.schedule.stages)
    most = _list_caps(problem)
    own = tuple(
        map(max, _list_caps(keep_on_device(problem)), problem.warmup or (1,) * problem.stage_count)
    )
    widest = _plan_choice(problem, _VariantChoice(most, fused))
    peaks = widest.schedule.count_in_flight_peaks()
    tried: dict[_VariantChoice, PlanVariant] = {}

    def plan_once(choice: _VariantChoice) -> PlanVariant:
        if choice not in tried:
            tried[choice] = _plan_choice(problem, choice)
        return tried[choice]

    found: PlanVariant | None = None
    best = _VariantChoice(most, fused)
    for share in SHARES:
        caps = tuple(
            k + round(share * max(0, peak - k)) for k, peak in zip(own, peaks, strict=True)
        )
        for copies in (True, False):
            choice = _VariantChoice(caps, fused, copies)
            variant = plan_once(choice)
            if variant.leaves_device and (found is None or variant.objective < found.objective):
                best, found = choice, variant
                yield variant
    if found is None:
        return
    rng = Rng()
    for _ in range(_count_steps(problem)):
        choice = _draw_change(best, rng, own, most, problem)
        variant = plan_once(choice)
        if variant.leaves_device and variant.objective < found.objective * (1 - RELATIVE_TOLERANCE):
            best, found = choice, variant
            yield variant


def _draw_change(
    choice: _VariantChoice,
    rng: Rng,
    own: Sequence[int],
    most: Sequence[int],
    problem: Problem,
) -> _VariantChoice:
    """Draw a change: caps of some consecutive stages; a stage fused or split; op times in the
    search with or without copies; or recomputation of a stage on or off."""
    devices = problem.list_device_limits()
    exceeding = [i for i, limit in enumerate(devices) if limit is not None]
    what = rng.draw_below(8)
    if what == 0:
        return choice._replace(copies=not choice.copies)
    stage = rng.draw_choice(exceeding)
    if what == 1:
        return choice._replace(fused=_toggle_stage(choice.fused, stage))
    if what <= 4 and problem.stages[stage].recompute:
        toggled = list(choice.caps)
        toggled[stage] = most[stage] if toggled[stage] == own[stage] else own[stage]
        return choice._replace(caps=tuple(toggled))
    by = rng.draw_choice((-2, -1, -1, 1, 1, 2))
    first = stage if rng.draw_below(2) else 0
    caps = [
        min(most[i], max(own[i], cap + by)) if first <= i <= stage and devices[i] else cap
        for i, cap in enumerate(choice.caps)
    ]
    return choice._replace(caps=tuple(caps))


def _has_room_for_warmup(problem: Problem) -> bool:
    return problem.warmup is None or all(
        x <= cap
        for x, cap in zip(problem.warmup, accumulate(_list_caps(problem), min), strict=True)
    )


def _toggle_stage(fused: tuple[bool, ...], stage: int) -> tuple[bool, ...]:
    return (*fused[:stage], not fused[stage], *fused[stage + 1 :])


def _count_steps(problem: Problem) -> int:
    """Number of changes to try."""
    cells = problem.microbatches * problem.stage_count
    times = RECOMPUTE_TIMES if any(problem.list_recompute_flags()) else 1
    return max(2, times * min(STEPS, STEP_OPS // (3 * cells)))


def _list_caps(problem: Problem) -> tuple[int, ...]:
    n = problem.microbatches
    return tuple(n if k is None else min(k, n) for k in problem.list_in_flight_limits())


def _plan_choice(problem: Problem, choice: _VariantChoice) -> PlanVariant:
    """Plan of the search for a choice, adjusted to the device limits."""
    timed = [
        _adjust_times(stage, cap, fused, copies=choice.copies)
        for stage, cap, fused in zip(problem.stages, choice.caps, choice.fused, strict=True)
    ]
    n, placement = problem.microbatches, problem.stage_ranks
    order = search_order(problem.model_copy(update={"stages": tuple(timed)})).order
    counts = [n * fuses for fuses in choice.fused]
    fused = decode_schedule(fuse_first_backwards(order, counts, placement), n, placement)
    peaks = fused.count_in_flight_peaks()
    limits = tuple(map(_choose_device_limit, problem.stages, peaks))
    ranks = (
        fit_on_device(ops, [limits[stage] for stage in mine])
        for ops, mine in zip(fused.ranks, fused.stages_by_rank, strict=True)
    )
    schedule = Schedule(n, tuple(ranks), placement)
    stages = list(keep_on_device(problem).stages)
    for i, limit in enumerate(limits):
        if limit is not None:
            # More in flight would leave room for fewer on the device, if recomputed.
            again = problem.stages[i].recompute
            cap = peaks[i] if again else choice.caps[i]
            update = {"in_flight_limit": cap, "device_limit": limit, "recompute": again}
            stages[i] = stages[i].model_copy(update=update)
    limited = problem.model_copy(update={"stages": tuple(stages)})
    return PlanVariant(limited, schedule, predict(schedule, limited))


def _choose_device_limit(stage: StageTimes, in_flight: int) -> int | None:
    """Device limit of a stage with ``in_flight`` microbatches; None if all stay on the device."""
    limit = stage.device_limit
    if limit is None or in_flight <= limit:
        return None
    if not stage.recompute or stage.recompute_limit is None:
        return limit
    return compute_device_room(in_flight, limit, stage.recompute_limit)


def _adjust_times(stage: StageTimes, cap: int, fused: bool, *, copies: bool) -> StageTimes:
    """Times of the stage for the search."""
    forward, backward, weight = stage.forward, stage.backward_input, stage.backward_weight
    if fused:
        backward, weight = stage.whole_backward, 0.0
    limit = _choose_device_limit(stage, cap)
    if copies and limit is not None:
        # limit - 1 of `cap` consecutive microbatches stay on the device.
        share = (cap - limit + 1) / cap
        forward, backward = (
            forward + stage.departure_time * share,
            backward + stage.return_time * share,
        )
    return stage.model_copy(
        update={
            "forward": forward,
            "backward_input": backward,
            "backward_weight": weight,
            "in_flight_limit": cap,
            "device_limit": None,
            "recompute": False,
        }
    )


def fit_on_device(ops: Sequence[Op], limits: Sequence[int | None]) -> tuple[Op, ...]:
    """Ops of a rank, with W moved earlier where the device limits of its stages require it; these
    are ``limits``, by chunk. Such a W always exists (:mod:`pipemorph.planning.offload`).
    """
    if all(limit is None for limit in limits):
        return tuple(ops)
    held = list(map(DeviceResidency, limits))
    run: list[Op] = []
    weights = [0] * len(limits)
    for op in ops:
        chunk = op.chunk
        if op.kind is OpKind.W and op.microbatch < weights[chunk]:
            continue  # Moved earlier.
        while not held[chunk].can_run(op.kind, op.microbatch):
            held[chunk].record_op(OpKind.W, weights[chunk])
            run.append(Op(OpKind.W, weights[chunk], chunk))
            weights[chunk] += 1
        weights[chunk] += op.kind is OpKind.W
        held[chunk].record_op(op.kind, op.microbatch)
        run.append(op)
    return tuple(run)
