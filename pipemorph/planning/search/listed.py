"""The pipemorph policy for ranks with several stages: the best of rules and of list schedules.

The list schedules are made under the problem's delays, with more and more microbatches in flight:
on the device or, as far as the stages' limits allow, with activations in host memory or computed
again. A given warm-up is that of each stage, not of a rank: the F of stage *s* before its first B.
Then only schedules with it are candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import le

from pipemorph.errors import InputError
from pipemorph.planning.offload import recompute_room
from pipemorph.planning.problem import Problem, StageTimes
from pipemorph.planning.rule_based import one_f_one_b_interleaved, zero_bubble_v
from pipemorph.planning.search.variants import Variant, on_device, with_stated_limits
from pipemorph.planning.simulation import core
from pipemorph.planning.simulation.core import Costs, Rules
from pipemorph.planning.simulation.simulator import predict
from pipemorph.planning.validator import validate

AHEAD = (0, 1, 2, 4, 8)
"""Microbatches that policy pipemorph tries to have in flight on every stage, beyond one per stage
from there to the end of the pipeline."""
SAME = 0.005
"""Times within this fraction count as equal: then fewer microbatches in flight win, and plans
whose activations stay on the device."""
MOST_OPS = 50_000
"""Of a problem for which all of :data:`AHEAD` are tried; of a larger one, the first and the
last."""


def best_listed(problem: Problem) -> Variant:
    """The candidate that takes the shortest time; of equal ones the first, which has the fewest
    microbatches in flight, on the device if possible. Raises :class:`InputError` if there is
    none."""
    within = on_device(problem)
    found = [
        *_candidates(within),
        *exceeding_listed(with_stated_limits(problem)),
        *exceeding_listed(within.recomputing()),
    ]
    if not found:
        shown = list(problem.warmup or ())
        raise InputError(f"warmup is {shown}, more than the limits of the stages allow")
    least = min(each.objective for each in found) * (1 + SAME)
    return next(each for each in found if each.objective <= least)


def exceeding_listed(problem: Problem) -> Iterator[Variant]:
    """List schedules of which activations leave the device; none if no stage has a device limit.

    Where a stage recomputes, the more microbatches are in flight, the fewer stay on its device.
    """
    for caps in _caps(problem):
        stages = tuple(map(_with_cap, problem.stages, caps))
        if any(stage.device_limit is not None for stage in stages):
            yield _listed(problem.model_copy(update={"stages": stages}), caps)


def _candidates(problem: Problem) -> Iterator[Variant]:
    """Schedules whose activations stay on the device."""
    placement = problem.placed
    for make in (one_f_one_b_interleaved, zero_bubble_v):
        try:
            schedule = make(problem)
            warmup = problem.warmup in (None, schedule.warmup())
            if schedule.placement == placement and warmup:
                validate(schedule, problem.in_flight_limits(), problem.device_limits())
                yield Variant(problem, schedule, predict(schedule, problem))
        except InputError:
            # Not for this placement or number of microbatches, or beyond the caps.
            continue
    for caps in _caps(problem):
        yield _listed(problem, caps)


def _with_cap(stage: StageTimes, cap: int) -> StageTimes:
    """A stage with ``cap`` microbatches in flight; with a device limit only if it needs one."""
    limit = stage.device_limit
    if limit is None or cap <= limit:
        # The smaller of its limits: what is in flight is all on the device.
        least = min((n for n in (stage.in_flight_limit, limit) if n is not None), default=None)
        off = {"in_flight_limit": least, "device_limit": None, "recompute": False}
        return stage.model_copy(update=off)
    if stage.recompute and stage.recompute_limit is not None:
        limit = recompute_room(cap, limit, stage.recompute_limit)
    return stage.model_copy(update={"in_flight_limit": cap, "device_limit": limit})


def _caps(problem: Problem) -> Iterator[tuple[int, ...]]:
    """The microbatches in flight by stage that are tried, fewest first."""
    stages, n = problem.stage_count, problem.microbatches
    warmup = problem.warmup or (1,) * stages
    tried = AHEAD if 3 * stages * n <= MOST_OPS else (AHEAD[0], AHEAD[-1])
    seen = set()
    for ahead in (*tried, n):
        caps = tuple(
            min(n, max(least, stages - s + ahead), n if limit is None else limit)
            for s, (limit, least) in enumerate(zip(problem.in_flight_limits(), warmup, strict=True))
        )
        if caps not in seen and all(map(le, warmup, caps)):
            seen.add(caps)
            yield caps


def _listed(problem: Problem, caps: Sequence[int]) -> Variant:
    """The list schedule with at most ``caps[s]`` microbatches in flight on stage *s*, made
    under the delays of the problem."""
    costs, given = Costs.of(problem), problem.warmup
    rules = Rules(
        warmup=given or (1,) * problem.stage_count,
        caps=tuple(caps),
        fused=tuple(stage.fusing_pays for stage in problem.stages),
        exact_warmup=given is not None,
    )
    codes, _ = core.online(costs, rules)
    schedule = core.decode(codes, problem.microbatches, problem.placed)
    return Variant(problem, schedule, predict(schedule, problem))
