"""Splits layers over stages so that the slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from pipemorph.planning.simulation.costs import INF

# Tolerance for sums of the same times in different order.
SAME = 1e-9


def split_layers(times: Sequence[float], fixed: Sequence[float]) -> tuple[int, ...]:
    """Layers per stage, in order, at least one each: the optimum for the slowest stage.

    ``times[l]``: time of layer *l*; ``fixed[i]``: time of stage *i* beside its layers. Among the
    optimal splits it has the least sum of squares, so that the other stages are even too. Raises
    ValueError if there are fewer layers than stages.
    """
    stages, layers = len(fixed), len(times)
    if layers < stages:
        raise ValueError(f"there are {layers} layers for {stages} stages; each needs one")
    before = [0.0, *accumulate(times)]
    slowest = _least_slowest(before, fixed) * (1 + SAME)
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


def spread_layers(layers: int, each: Sequence[float], beside: Sequence[float]) -> tuple[int, ...]:
    """How many of ``layers`` equal layers each stage gets, at least one: the optimum for the
    slowest stage. ``each[i]``: time of a layer on stage *i*; ``beside[i]``: of its other work.

    Raises ValueError if there are fewer layers than stages.
    """
    if layers < len(each):
        raise ValueError(f"there are {layers} layers for {len(each)} stages; each needs one")
    counts = [1] * len(each)
    for _ in range(layers - len(counts)):
        # The stage that is the fastest with one more.
        least = min(range(len(counts)), key=lambda i: beside[i] + (counts[i] + 1) * each[i])
        counts[least] += 1
    return tuple(counts)


def _least_slowest(before: Sequence[float], fixed: Sequence[float]) -> float:
    """The least possible time of the slowest stage."""
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
