"""Plans whose stages fuse the backwards of their first microbatches and split the others.

A fused backward is shorter than its parts but delays the gradient that it sends. If memory has
room, gradients are not urgent until the drain, so the first backwards of an iteration are fused,
and the last are split: their W fill the drain.

The search provides orders for split backwards, and for mean times with some shares of fused ones.
The number of fused backwards is then varied stage by stage, as long as the plan gets no longer.
Orders are codes of the event core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from pipemorph.planning.ir import CODE_OF_KIND, OpKind, group_stages_by_rank
from pipemorph.planning.problem import Problem, StageTimes
from pipemorph.planning.search.order_search import compute_objective, search_order
from pipemorph.planning.simulation.execution import RELATIVE_TOLERANCE

SHARES = (0.25, 0.5, 0.75)
"""Shares of fused backwards for whose mean times orders are searched."""
STEPS, STEP_OPS, FEWEST = 200, 120_000, 10
"""Limits of the changes tried on an order: their number, and the ops of all of them. A problem
that allows fewer than :data:`FEWEST` changes is skipped."""
CHANGES = (-4, -2, -1, 1, 2, 4)
"""Changes of the number of fused backwards, for a random range of neighbouring stages."""

T = TypeVar("T")

_B, _W, _BW = (CODE_OF_KIND[kind] for kind in (OpKind.B, OpKind.W, OpKind.BW))


class Rng:
    """Linear congruential generator with a fixed seed, so that plans are deterministic."""

    def __init__(self) -> None:
        self.state = 20250831

    def draw_below(self, count: int) -> int:
        """Random number from 0 to ``count - 1``."""
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % count

    def draw_choice(self, choices: Sequence[T]) -> T:
        return choices[self.draw_below(len(choices))]


class MixedOrder(NamedTuple):
    """Order in which stage *i* fuses the backwards of its first ``fused[i]`` microbatches.

    ``objective``: its makespan or period, by the problem's objective.
    """

    order: list[bytes]
    fused: tuple[int, ...]
    objective: float


def search_mixed_order(problem: Problem) -> MixedOrder | None:
    """Best mixed order found, all activations on the device; None if the problem is too large."""
    n = problem.microbatches
    steps = min(STEPS, STEP_OPS // (3 * n * problem.stage_count))
    if steps < FEWEST:
        return None
    found = _vary_fused_counts(
        problem, search_order(problem).order, _count_fused(problem, SHARES[0]), steps
    )
    for share in SHARES:
        fused = _count_fused(problem, share)
        times = map(_average_times, problem.stages, (count / n for count in fused))
        order = search_order(problem.model_copy(update={"stages": tuple(times)})).order
        other = _vary_fused_counts(problem, order, fused, steps)
        if other.objective < found.objective * (1 - RELATIVE_TOLERANCE):
            found = other
    return found


def fuse_first_backwards(
    order: Sequence[bytes], counts: Sequence[int], placement: Sequence[int]
) -> list[bytes]:
    """Order in which a BW replaces the B and W of the first ``counts[s]`` microbatches of stage
    *s*, at the place of the B."""
    found = []
    for row, mine in zip(order, group_stages_by_rank(placement), strict=True):
        remaining = {4 * c + kind: counts[s] for c, s in enumerate(mine) for kind in (_B, _W)}
        ops = bytearray()
        for code in row:
            if remaining.get(code, 0) <= 0:
                ops.append(code)
                continue
            remaining[code] -= 1
            if code & 3 == _B:
                ops.append(code - _B + _BW)
        found.append(bytes(ops))
    return found


def _count_fused(problem: Problem, share: float) -> tuple[int, ...]:
    n = problem.microbatches
    return tuple(round(share * n) if stage.fusing_pays else 0 for stage in problem.stages)


def _average_times(stage: StageTimes, share: float) -> StageTimes:
    """Mean times of the stage with this share of its backwards fused."""
    backward = share * stage.whole_backward + (1 - share) * stage.backward_input
    weight = (1 - share) * stage.backward_weight
    return stage.model_copy(update={"backward_input": backward, "backward_weight": weight})


def _vary_fused_counts(
    problem: Problem, order: Sequence[bytes], fused: tuple[int, ...], steps: int
) -> MixedOrder:
    """Try ``steps`` random changes of the numbers of fused backwards; keep each that does not
    lengthen the order. ``order``: split backwards only."""
    rng, n, placement = Rng(), problem.microbatches, problem.stage_ranks
    rows = fuse_first_backwards(order, fused, placement)
    least = compute_objective(problem, rows)
    for _ in range(steps):
        a = rng.draw_below(len(fused))
        b = rng.draw_below(len(fused)) if rng.draw_below(2) else a
        change = rng.draw_choice(CHANGES)
        counts = tuple(
            max(0, min(n, count + change))
            if min(a, b) <= i <= max(a, b) and problem.stages[i].fusing_pays
            else count
            for i, count in enumerate(fused)
        )
        if counts == fused:
            continue
        tried = fuse_first_backwards(order, counts, placement)
        objective = compute_objective(problem, tried)
        if objective <= least:
            rows, fused, least = tried, counts, objective
    return MixedOrder(rows, fused, least)
