"""The pipemorph policy with offload, recomputation and fused backwards.

The search (``search.search``) finds the order of split backwards under in-flight caps. This module
runs it several times: with activations in host memory or recomputed, and a higher cap, or with the
backwards of some stages fused. For the search

- a fused stage is one whose B takes the whole backward and whose W takes no time;
- an offloading stage is one whose ops include the mean copy time per microbatch, and a recomputing
  stage one whose B includes the mean time of forwards that run again; if the order found exceeds
  the device limit, the oldest W runs earlier.

The results are simulated exactly, microbatch by microbatch, and the shortest is kept. The same
problem gives the same schedule on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from itertools import accumulate
from typing import NamedTuple

from pipemorph.planning.ir import Dispatch, Op, OpKind, Plan, Policy, Route, Schedule
from pipemorph.planning.offload import Residency, recompute_room
from pipemorph.planning.problem import Problem, StageTimes, in_grains, with_times_of
from pipemorph.planning.search.mixed import Rng, fuse_first, mix
from pipemorph.planning.search.search import search
from pipemorph.planning.simulation.core import SAME, Waits, decode, planned_waits
from pipemorph.planning.simulation.simulator import predict, simulate

SHARES = (1.0, 0.5, 0.25)
"""Shares to try of the microbatches beyond the device limit of a plan that has none."""
STEPS, STEP_OPS = 16, 40_000
"""Limits of the changes tried afterwards, each of a few stages: their number, or the number of ops
in all of them, but at least two changes."""
RECOMPUTE_TIMES = 3
"""So many times as many where stages recompute: each forward that runs again costs more than a
copy, so fewer of them pay, and the right ones are harder to find."""


@dataclass(frozen=True)
class Variant:
    """A schedule, the makespan of its static order, and the problem with the limits it keeps."""

    problem: Problem
    schedule: Schedule
    makespan: float
    policy: Policy = Policy.PIPEMORPH

    def to_plan(
        self, version: int, routes: Sequence[Route], dispatch: Dispatch = Dispatch.STATIC
    ) -> Plan:
        """The plan the ranks run, with ``routes[i]`` for link *i*."""
        return Plan(
            version=version,
            policy=self.policy,
            schedule=self.schedule,
            routes=tuple(routes),
            in_flight_limits=self.problem.in_flight_limits(),
            dispatch=dispatch,
            device_limits=self.problem.device_limits(),
            recompute=self.problem.recompute(),
            waits=self.waits if dispatch is Dispatch.GUIDED else (),
        )

    @cached_property
    def waits(self) -> Waits:
        """Where the plan waits on purpose, which guided dispatch keeps to."""
        return planned_waits(self.schedule, self.problem)

    @cached_property
    def objective(self) -> float:
        """Makespan or period, as the problem asks for."""
        if self.problem.objective == "makespan":
            return self.makespan
        return simulate(self.schedule, self.problem).period

    @property
    def exceeds(self) -> bool:
        """Whether activations leave the device."""
        return any(limit is not None for limit in self.problem.device_limits())


class _Choice(NamedTuple):
    """Per stage: the in-flight cap (N: none) and whether the backwards are fused. ``copies``:
    whether op times in the search include copies and recomputed forwards."""

    caps: tuple[int, ...]
    fused: tuple[bool, ...]
    copies: bool = True


def has_variants(problem: Problem) -> bool:
    """Whether the problem allows offload or recomputation, or gains from fused backwards."""
    return any(
        stage.device_limit is not None or stage.may_recompute or stage.fusing_pays
        for stage in problem.stages
    )


def best_variant(problem: Problem) -> Variant:
    """The shortest plan found, with or without offload, recomputation and fused backwards."""
    return min(variants(problem), key=lambda each: each.objective)


def _of_any_unit(find: Callable[..., Iterator[Variant]]) -> Callable[..., Iterator[Variant]]:
    """``find`` on times in grains."""

    @wraps(find)
    def found(problem: Problem, *more: Variant | None) -> Iterator[Variant]:
        for each in find(in_grains(problem)[0], *more):
            own = with_times_of(each.problem, problem)
            yield replace(each, problem=own, makespan=predict(each.schedule, own))

    return found


@_of_any_unit
def variants(problem: Problem) -> Iterator[Variant]:
    """Successively better plans of each kind: with all activations on the device (unless a fixed
    warm-up does not allow it), the same with fused backwards, with offload, and with
    recomputation."""
    without = None
    within = on_device(problem)
    if _room_for_warmup(within):
        for each in fused_variants(within):
            if each.schedule.mixed is None:
                without = each
            yield each
    yield from exceeding_variants(with_stated_limits(problem), without)
    yield from exceeding_variants(within.recomputing(), without)


def with_stated_limits(problem: Problem) -> Problem:
    """The problem whose stages keep their own device limits, also where they recompute."""
    stages = [
        stage.model_copy(update={"recompute_limit": None}) if stage.recompute else stage
        for stage in problem.stages
    ]
    return problem.model_copy(update={"stages": tuple(stages)})


def on_device(problem: Problem) -> Problem:
    """The problem in which activations stay on the device: device limits are in-flight caps."""
    return problem.with_device_limits((None,) * problem.stage_count)


def fused_variants(problem: Problem) -> Iterator[Variant]:
    """Successively better plans without offload: split, then fused where that is shorter.

    Fusing shortens the work but delays the gradient's send, so any subset of stages may be best:
    tries no stage, all stages whose fused backward is shorter, then changes of single stages, and
    last, for static dispatch, stages that fuse the backwards of their first microbatches only.
    """
    whole = tuple(stage.fusing_pays for stage in problem.stages)
    caps, none = _caps(problem), (False,) * problem.stage_count
    best = _Choice(caps, none)
    found = _plan(problem, best)
    yield found
    if not any(whole):
        return
    tried = {best}

    def better(choice: _Choice) -> bool:
        nonlocal best, found
        if choice in tried:
            return False
        tried.add(choice)
        variant = _plan(problem, choice)
        if variant.objective >= found.objective * (1 - SAME):
            return False
        best, found = choice, variant
        return True

    if better(_Choice(caps, whole)):
        yield found
    for i in [i for i, pays in enumerate(whole) if pays][: _steps(problem)]:
        if better(best._replace(fused=_toggled(best.fused, i))):
            yield found
    mixed = mix(found.problem)
    if mixed is not None and mixed.objective < found.objective * (1 - SAME):
        schedule = decode(mixed.order, problem.microbatches, problem.placed)
        yield Variant(found.problem, schedule, predict(schedule, found.problem))


@_of_any_unit
def exceeding_variants(problem: Problem, without: Variant | None) -> Iterator[Variant]:
    """Successively better plans whose activations leave the device; none if no stage needs it.

    The stages with a device limit offload or recompute, as the problem says: any subset of them,
    and as far as it pays. ``without``: the plan without, whose fused stages are the starting point.
    None: the fixed warm-up allows no such plan.
    """
    problem = problem.shared_out()
    devices = problem.device_limits()
    if all(limit is None for limit in devices):
        return
    fused = (False,) * problem.stage_count
    if without is not None:
        fused = tuple(any(op.kind is OpKind.BW for op in ops) for ops in without.schedule.stages)
    most = _caps(problem)
    own = tuple(map(max, _caps(on_device(problem)), problem.warmup or (1,) * problem.stage_count))
    widest = _plan(problem, _Choice(most, fused))
    peaks = widest.schedule.in_flight_peak()
    tried: dict[_Choice, Variant] = {}

    def attempt(choice: _Choice) -> Variant:
        if choice not in tried:
            tried[choice] = _plan(problem, choice)
        return tried[choice]

    found: Variant | None = None
    best = _Choice(most, fused)
    for share in SHARES:
        caps = tuple(
            k + round(share * max(0, peak - k)) for k, peak in zip(own, peaks, strict=True)
        )
        for copies in (True, False):
            choice = _Choice(caps, fused, copies)
            variant = attempt(choice)
            if variant.exceeds and (found is None or variant.objective < found.objective):
                best, found = choice, variant
                yield variant
    if found is None:
        return
    rng = Rng()
    for _ in range(_steps(problem)):
        choice = _step(best, rng, own, most, problem)
        variant = attempt(choice)
        if variant.exceeds and variant.objective < found.objective * (1 - SAME):
            best, found = choice, variant
            yield variant


def _step(
    choice: _Choice,
    rng: Rng,
    own: Sequence[int],
    most: Sequence[int],
    problem: Problem,
) -> _Choice:
    """One random change: the caps of some consecutive stages; one stage fused or split; whether op
    times in the search include copies; or one stage that recomputes or does not."""
    devices = problem.device_limits()
    exceeding = [i for i, limit in enumerate(devices) if limit is not None]
    what = rng.below(8)
    if what == 0:
        return choice._replace(copies=not choice.copies)
    stage = rng.pick(exceeding)
    if what == 1:
        return choice._replace(fused=_toggled(choice.fused, stage))
    if what <= 4 and problem.stages[stage].recompute:
        toggled = list(choice.caps)
        toggled[stage] = most[stage] if toggled[stage] == own[stage] else own[stage]
        return choice._replace(caps=tuple(toggled))
    by = rng.pick((-2, -1, -1, 1, 1, 2))
    first = stage if rng.below(2) else 0
    caps = [
        min(most[i], max(own[i], cap + by)) if first <= i <= stage and devices[i] else cap
        for i, cap in enumerate(choice.caps)
    ]
    return choice._replace(caps=tuple(caps))


def _room_for_warmup(problem: Problem) -> bool:
    return problem.warmup is None or all(
        x <= cap for x, cap in zip(problem.warmup, accumulate(_caps(problem), min), strict=True)
    )


def _toggled(fused: tuple[bool, ...], stage: int) -> tuple[bool, ...]:
    return (*fused[:stage], not fused[stage], *fused[stage + 1 :])


def _steps(problem: Problem) -> int:
    """How many changes are tried."""
    cells = problem.microbatches * problem.stage_count
    times = RECOMPUTE_TIMES if any(problem.recompute()) else 1
    return max(2, times * min(STEPS, STEP_OPS // (3 * cells)))


def _caps(problem: Problem) -> tuple[int, ...]:
    n = problem.microbatches
    return tuple(n if k is None else min(k, n) for k in problem.in_flight_limits())


def _plan(problem: Problem, choice: _Choice) -> Variant:
    """The plan of the search for a choice, adjusted to the device limits."""
    asked = [
        _search_times(stage, cap, fused, copies=choice.copies)
        for stage, cap, fused in zip(problem.stages, choice.caps, choice.fused, strict=True)
    ]
    n, placement = problem.microbatches, problem.placed
    order = search(problem.model_copy(update={"stages": tuple(asked)})).order
    counts = [n * fuses for fuses in choice.fused]
    fused = decode(fuse_first(order, counts, placement), n, placement)
    peaks = fused.in_flight_peak()
    limits = tuple(map(_device_limit, problem.stages, peaks))
    ranks = (
        fit_on_device(ops, [limits[stage] for stage in mine])
        for ops, mine in zip(fused.ranks, fused.stages_of, strict=True)
    )
    schedule = Schedule(n, tuple(ranks), placement)
    stages = list(on_device(problem).stages)
    for i, limit in enumerate(limits):
        if limit is not None:
            # More in flight would leave room for fewer on the device, if recomputed.
            again = problem.stages[i].recompute
            cap = peaks[i] if again else choice.caps[i]
            update = {"in_flight_limit": cap, "device_limit": limit, "recompute": again}
            stages[i] = stages[i].model_copy(update=update)
    kept = problem.model_copy(update={"stages": tuple(stages)})
    return Variant(kept, schedule, predict(schedule, kept))


def _device_limit(stage: StageTimes, in_flight: int) -> int | None:
    """The device limit of a stage with so many microbatches in flight; None if all stay on it."""
    limit = stage.device_limit
    if limit is None or in_flight <= limit:
        return None
    if not stage.recompute or stage.recompute_limit is None:
        return limit
    return recompute_room(in_flight, limit, stage.recompute_limit)


def _search_times(stage: StageTimes, cap: int, fused: bool, *, copies: bool) -> StageTimes:
    """The stage's times for the search."""
    forward, backward, weight = stage.forward, stage.backward_input, stage.backward_weight
    if fused:
        backward, weight = stage.whole_backward, 0.0
    limit = _device_limit(stage, cap)
    if copies and limit is not None:
        # Of `cap` consecutive microbatches, limit - 1 stay on the device.
        share = (cap - limit + 1) / cap
        forward, backward = forward + stage.leaving * share, backward + stage.returning * share
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
    """The ops of a rank, with W moved earlier where the device limits of its stages, by chunk,
    require it.

    Such a W always exists (:mod:`pipemorph.planning.offload`).
    """
    if all(limit is None for limit in limits):
        return tuple(ops)
    held = list(map(Residency, limits))
    run: list[Op] = []
    weights = [0] * len(limits)
    for op in ops:
        chunk = op.chunk
        if op.kind is OpKind.W and op.microbatch < weights[chunk]:
            continue  # Moved earlier.
        while not held[chunk].fits(op.kind, op.microbatch):
            held[chunk].run(OpKind.W, weights[chunk])
            run.append(Op(OpKind.W, weights[chunk], chunk))
            weights[chunk] += 1
        weights[chunk] += op.kind is OpKind.W
        held[chunk].run(op.kind, op.microbatch)
        run.append(op)
    return tuple(run)
