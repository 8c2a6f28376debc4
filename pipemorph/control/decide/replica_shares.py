"""Numbers of microbatches by replica, for replicas that compute at different speeds.

An iteration ends with its slowest replica. A replica takes about ``a + b·k`` for *k* microbatches:
*b* is the time of its slowest stage, *a* the time to fill and drain its pipeline. So the shares are
those for which the slowest replica ends first, with the sum of equal shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pipemorph.planning import Problem, StageTimes
from pipemorph.protocol import StragglersView
from pipemorph.spec.mesh import MeshShape

MATERIAL_PACE_CHANGE = 0.1
"""Relative change of a pace that requires another decision: that of a stage that becomes slow or
healthy is larger, since the detection has thresholds."""
MOST_SPEEDS = 4
"""Most speeds of replicas that shares distinguish; nearly equal ones count as the slower one. Each
speed has at most two numbers of microbatches, for each of which there is a schedule."""

Paces = tuple[tuple[float, ...], ...]
"""Seconds of F, B and W of a microbatch, by replica and stage; empty if no replica is slow."""


def measure_paces(view: StragglersView, mesh: MeshShape) -> Paces:
    """Read the paces of the replicas from the stages that compute slower than their peers."""
    slow = [each for each in view.slowest if each.column is not None]
    if not slow or not view.paces:
        return ()
    rows = [list(view.paces) for _ in range(mesh.replicas)]
    for each in slow:
        row = rows[mesh.find_coordinate(mesh.find_rank(each.stage, each.column or 0)).replica]
        row[each.stage] = max(row[each.stage], each.seconds)
    return tuple(map(tuple, rows))


def paces_differ(now: Paces, before: Paces) -> bool:
    """True if a replica's pace differs so much from the one before that it requires a decision."""
    if not now or not before:
        return bool(now) != bool(before)
    return any(
        abs(new - old) > MATERIAL_PACE_CHANGE * old
        for mine, theirs in zip(now, before, strict=True)
        for new, old in zip(mine, theirs, strict=True)
    )


def compute_slowness(paces: Paces) -> list[float]:
    """Ratio of each replica's slowest stage to that of the fastest replica."""
    slowest = [max(row) for row in paces]
    return [each / min(slowest) for each in slowest]


def merge_speeds(paces: Paces) -> Paces:
    """Replace paces so that at most :data:`MOST_SPEEDS` rows differ, each by a slower one."""
    rows = sorted(set(paces), key=max)
    merged = dict(zip(rows, rows, strict=True))
    while len(set(merged.values())) > MOST_SPEEDS:
        distinct = sorted(set(merged.values()), key=max)
        low, high = min(pairwise(distinct), key=lambda pair: max(pair[1]) / max(pair[0]))
        both = tuple(map(max, low, high))
        merged = {row: both if to in (low, high) else to for row, to in merged.items()}
    return tuple(merged[row] for row in paces)


def scale_problem(problem: Problem, row: Sequence[float], microbatches: int) -> Problem:
    """Problem of a replica with the paces ``row`` (empty: as the problem) and so many
    microbatches."""
    stages = problem.stages
    if row:
        stages = tuple(map(_scale_stage, stages, row))
    return problem.model_copy(update={"stages": stages, "microbatches": microbatches})


def _scale_stage(stage: StageTimes, pace: float) -> StageTimes:
    """Scale op times to the seconds ``pace`` of F, B and W."""
    total = stage.forward + stage.backward_input + stage.backward_weight
    if total <= 0:
        return stage
    names = ("forward", "backward_input", "backward_weight", "fused_backward")
    times = {name: getattr(stage, name) for name in names}
    return stage.model_copy(
        update={n: None if time is None else time * pace / total for n, time in times.items()}
    )


def divide_microbatches(total: int, fixed: Sequence[float], each: Sequence[float]) -> list[int]:
    """Divide ``total`` microbatches so that the slowest replica ends first. Replica *r* takes
    ``fixed[r] + each[r]·k`` for *k* microbatches, and gets at least one."""

    def count(limit: float) -> list[int]:
        pairs = zip(fixed, each, strict=True)
        return [max(1, int((limit - a) / b + 1e-9)) for a, b in pairs]

    low, high = 0.0, max(fixed) + max(each) * total
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(count(middle)) >= total else (middle, high)
    shares = count(high)
    while sum(shares) > total:
        # The last replica to end of those that can have fewer; of equals the last one.
        ends = [
            (a + b * k, r)
            for r, (a, b, k) in enumerate(zip(fixed, each, shares, strict=True))
            if k > 1
        ]
        shares[max(ends)[1]] -= 1
    return shares
