"""Plans whose stages fuse the backwards of their first microbatches and split the others.

A fused backward is shorter than its parts but delays the gradient that it sends. Where there is
room in memory, gradients are not urgent until the drain, so the first backwards of an iteration
are fused, and the last are split: their W fill the drain.

Orders are those of the search, for split backwards and for the mean times of some shares of fused
ones; then the number of fused backwards is changed, stage by stage, as long as the plan does not
get longer. Orders are the core's codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from pipemorph.planning.ir import CODE, OpKind, stages_of
from pipemorph.planning.problem import Problem, StageTimes
from pipemorph.planning.search.search import objective_of, search
from pipemorph.planning.simulation.core import SAME

SHARES = (0.25, 0.5, 0.75)
"""Shares of fused backwards whose mean times are searched with."""
STEPS, STEP_OPS, FEWEST = 200, 120_000, 10
"""Changes that are tried of each order: their number, or the number of ops in all of them. A
problem that allows fewer than :data:`FEWEST` has no such plan."""
CHANGES = (-4, -2, -1, 1, 2, 4)

T = TypeVar("T")

_B, _W, _BW = (CODE[kind] for kind in (OpKind.B, OpKind.W, OpKind.BW))


class Rng:
    """A linear congruential generator with a fixed seed, so that plans are deterministic."""

    def __init__(self) -> None:
        self.state = 20250831

    def below(self, count: int) -> int:
        """A number from 0 to ``count - 1``."""
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % count

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]


class Mixed(NamedTuple):
    """An order in which stage *i* fuses the backwards of its first ``fused[i]`` microbatches."""

    order: list[bytes]
    fused: tuple[int, ...]
    objective: float


def mix(problem: Problem) -> Mixed | None:
    """The best such order found; None for a problem that is too large to look. Its activations stay
    on the device."""
    n = problem.microbatches
    steps = min(STEPS, STEP_OPS // (3 * n * problem.stage_count))
    if steps < FEWEST:
        return None
    found = _changed(problem, search(problem).order, _counts(problem, SHARES[0]), steps)
    for share in SHARES:
        fused = _counts(problem, share)
        times = map(_mean_times, problem.stages, (count / n for count in fused))
        order = search(problem.model_copy(update={"stages": tuple(times)})).order
        other = _changed(problem, order, fused, steps)
        if other.objective < found.objective * (1 - SAME):
            found = other
    return found


def fuse_first(
    order: Sequence[bytes], counts: Sequence[int], placement: Sequence[int]
) -> list[bytes]:
    """An order of split backwards with those of the first ``counts[s]`` microbatches of each stage
    fused: in place of their B."""
    found = []
    for row, mine in zip(order, stages_of(placement), strict=True):
        left = {4 * c + kind: counts[s] for c, s in enumerate(mine) for kind in (_B, _W)}
        ops = bytearray()
        for code in row:
            if left.get(code, 0) <= 0:
                ops.append(code)
                continue
            left[code] -= 1
            if code & 3 == _B:
                ops.append(code - _B + _BW)
        found.append(bytes(ops))
    return found


def _counts(problem: Problem, share: float) -> tuple[int, ...]:
    n = problem.microbatches
    return tuple(round(share * n) if stage.fusing_pays else 0 for stage in problem.stages)


def _mean_times(stage: StageTimes, share: float) -> StageTimes:
    """The stage's times with this share of its backwards fused."""
    backward = share * stage.whole_backward + (1 - share) * stage.backward_input
    weight = (1 - share) * stage.backward_weight
    return stage.model_copy(update={"backward_input": backward, "backward_weight": weight})


def _changed(problem: Problem, order: Sequence[bytes], fused: tuple[int, ...], steps: int) -> Mixed:
    """The order with other numbers of fused backwards, as long as it does not get longer."""
    rng, n, placement = Rng(), problem.microbatches, problem.placed
    rows = fuse_first(order, fused, placement)
    least = objective_of(problem, rows)
    for _ in range(steps):
        a = rng.below(len(fused))
        b = rng.below(len(fused)) if rng.below(2) else a
        change = rng.pick(CHANGES)
        counts = tuple(
            max(0, min(n, count + change))
            if min(a, b) <= i <= max(a, b) and problem.stages[i].fusing_pays
            else count
            for i, count in enumerate(fused)
        )
        if counts == fused:
            continue
        tried = fuse_first(order, counts, placement)
        objective = objective_of(problem, tried)
        if objective <= least:
            rows, fused, least = tried, counts, objective
    return Mixed(rows, fused, least)
