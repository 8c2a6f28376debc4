"""Splits layers over stages so that the slowest stage or rank is as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise, permutations

from pipemorph.planning.simulation.execution import INF

# Relative tolerance for sums of the same times in different order.
RELATIVE_TOLERANCE = 1e-9


def split_layers(times: Sequence[float], fixed: Sequence[float]) -> tuple[int, ...]:
    """Layers per stage, in order, at least one each: the optimum for the slowest stage.

    ``times[l]``: time of layer *l*; ``fixed[i]``: time of stage *i* without its layers. Among the
    optimal splits it has the least sum of squares, so that the other stages are even too. Raises
    ValueError if there are fewer layers than stages.
    """
    stages, layers = len(fixed), len(times)
    if layers < stages:
        raise ValueError(f"there are {layers} layers for {stages} stages; each needs one")
    before = [0.0, *accumulate(times)]
    slowest = _minimize_slowest_stage(before, fixed) * (1 + RELATIVE_TOLERANCE)
    # best[j]: least sum of squares with the first j layers on the stages so far.
    best = [0.0] + [INF] * layers
    choices: list[list[int]] = []
    for i, extra in enumerate(fixed):
        reached = [INF] * (layers + 1)
        choice = [0] * (layers + 1)
        for end in range(i + 1, layers - (stages - i - 1) + 1):
            for start in range(end - 1, i - 1, -1):
                took = extra + before[end] - before[start]
                if took > slowest and end - start > 1:
                    break
                found = best[start] + took * took
                if took <= slowest and found < reached[end]:
                    reached[end], choice[end] = found, start
        best = reached
        choices.append(choice)
    counts = []
    end = layers
    for choice in reversed(choices):
        counts.append(end - choice[end])
        end = choice[end]
    return tuple(reversed(counts))


def split_layers_over_ranks(
    times: Sequence[float], fixed: Sequence[float], placement: Sequence[int]
) -> tuple[int, ...]:
    """Layers per stage, in order, at least one each, for ranks with several stages: a split whose
    slowest rank gets no faster by any move of one layer between two stages.

    ``times``, ``fixed``: see :func:`split_layers`; ``placement[i]``: the rank of stage *i*. Moves
    that do not change the slowest rank are made if they even out the others. Raises ValueError if
    there are fewer layers than stages.
    """
    before = [0.0, *accumulate(times)]
    stages = range(len(fixed))

    def evaluate_split(ends: Sequence[int]) -> tuple[float, float]:
        ranks = [0.0] * (max(placement) + 1)
        for i in stages:
            ranks[placement[i]] += fixed[i] + before[ends[i + 1]] - before[ends[i]]
        return max(ranks), sum(each * each for each in ranks)

    ends = [0, *accumulate(split_layers(times, fixed))]
    slowest, squares = evaluate_split(ends)
    moved: list[int] | None = ends
    while moved is not None:
        ends, moved = moved, None
        for source, target in permutations(stages, 2):
            tried = _move_layer(ends, source, target)
            if tried is None:
                continue
            took, its = evaluate_split(tried)
            faster = took < slowest * (1 - RELATIVE_TOLERANCE)
            if faster or (took <= slowest and its < squares * (1 - RELATIVE_TOLERANCE)):
                moved, slowest, squares = tried, took, its
    return tuple(end - start for start, end in pairwise(ends))


def _move_layer(ends: Sequence[int], source: int, target: int) -> list[int] | None:
    """Ends of the stages after ``source`` gives up a layer and ``target`` gains one; each stage
    between them passes one on. None if ``source`` would have no layer."""
    if ends[source + 1] - ends[source] < 2:
        return None
    step = -1 if source < target else 1
    between = range(min(source, target) + 1, max(source, target) + 1)
    return [end + step if i in between else end for i, end in enumerate(ends)]


def spread_equal_layers(
    layers: int, each: Sequence[float], fixed: Sequence[float]
) -> tuple[int, ...]:
    """Number of ``layers`` equal layers on each stage, at least one: the optimum for the slowest
    stage. ``each[i]``: time of a layer on stage *i*; ``fixed[i]``: time of its other work.

    Raises ValueError if there are fewer layers than stages.
    """
    if layers < len(each):
        raise ValueError(f"there are {layers} layers for {len(each)} stages; each needs one")
    counts = [1] * len(each)
    for _ in range(layers - len(counts)):
        # The stage that is the fastest with another layer.
        least = min(range(len(counts)), key=lambda i: fixed[i] + (counts[i] + 1) * each[i])
        counts[least] += 1
    return tuple(counts)


def _minimize_slowest_stage(before: Sequence[float], fixed: Sequence[float]) -> float:
    """Least possible time of the slowest stage."""
    layers, stages = len(before) - 1, len(fixed)
    best = [0.0] + [INF] * layers
    for i, extra in enumerate(fixed):
        reached = [INF] * (layers + 1)
        for end in range(i + 1, layers - (stages - i - 1) + 1):
            least = INF
            for start in range(end - 1, i - 1, -1):
                took = extra + before[end] - before[start]
                if took >= least:
                    break  # More layers make it slower still.
                least = min(least, max(best[start], took))
            reached[end] = least
        best = reached
    return best[layers]
