"""Times as whole numbers of one grain, so that a plan depends on no unit.

Sums of whole numbers are exact in any order, and the same times in another unit are the same
numbers, so that all that compares times comes out the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from pipemorph.planning.problem import Link, Problem, StageTimes

FINEST = 2.0**-24
"""Smallest common divisor of times that is looked for, of the longest: of 10 ms, 1 ns is found."""
EXACT = 2.0**-46
"""Most that a time may differ from a multiple of it, of the longest: rounding in its unit."""
GRAINS = 2**30
"""Grains of the longest time if they have none. Sums of as many ops as a plan can have are exact,
and what rounding in a unit changes is far less than a grain."""

_STAGE = ("forward", "backward_input", "backward_weight", "fused_backward", "offload_copy")
_TIMES = {StageTimes: (*_STAGE, "reduction"), Link: ("delay", "transfer")}


def in_grains(problem: Problem) -> tuple[Problem, float]:
    """The problem with its times as whole numbers that have no common divisor, and what they are
    multiples of, in its unit."""
    every = (*problem.stages, *problem.links)
    times = {getattr(each, name) for each in every for name in _TIMES[type(each)]} - {None, 0.0}
    if not times:
        return problem, 1.0
    counts = _counts(times) | {0.0: 0.0, None: None}
    stages = tuple(
        stage.model_copy(update={t: counts[getattr(stage, t)] for t in _TIMES[StageTimes]})
        for stage in problem.stages
    )
    links = tuple(
        link.model_copy(update={t: counts[getattr(link, t)] for t in _TIMES[Link]})
        for link in problem.links
    )
    longest = max(times)
    grained = problem.model_copy(update={"stages": stages, "links": links})
    return grained, longest / counts[longest]


def with_times_of(problem: Problem, other: Problem) -> Problem:
    """The problem with its own limits and the times of another one, which has as many stages."""
    stages = tuple(
        own.model_copy(update={name: getattr(timed, name) for name in _TIMES[StageTimes]})
        for own, timed in zip(problem.stages, other.stages, strict=True)
    )
    return problem.model_copy(update={"stages": stages, "links": other.links})


def _counts(times: Iterable[float]) -> dict[float | None, float | None]:
    ordered = sorted(times, reverse=True)
    grain = longest = ordered[0]
    for time in ordered:
        grain = longest / round(longest / _divisor(grain, time, longest * FINEST))
    counts = {time: round(time / grain) for time in ordered}
    if any(abs(count * grain - time) > longest * EXACT for time, count in counts.items()):
        # No time becomes 0: ops that take none are planned in another way.
        counts = {time: max(1, round(time / longest * GRAINS)) for time in ordered}
    least = gcd(*counts.values())
    return {time: float(count // least) for time, count in counts.items()}


def _divisor(a: float, b: float, small: float) -> float:
    """The greatest common divisor, by Euclid's algorithm with the nearest multiples."""
    while b > small:
        a, b = b, abs(a - round(a / b) * b)
    return a
