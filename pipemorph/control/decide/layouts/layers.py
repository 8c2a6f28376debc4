"""Finds another split of the layers over the stages, by the times that stages were measured to
take. Pure, but for the time that a search may take.

A stage takes as long as its layers and what it does beside them, such as an embedding or the loss.
All layers count as equal, and what is beside them is known (:mod:`.beside`): so a measured time
tells what a layer takes on the stage's device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from math import isfinite
from time import monotonic

from pipemorph.api.layout import Layout, RankLayout
from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.layouts.beside import Beside
from pipemorph.control.decide.layouts.relayout import (
    MOST_SWAPS,
    SEARCH_SECONDS,
    Late,
    Network,
    Proposal,
    Score,
)
from pipemorph.control.observed.stages import room
from pipemorph.planning import StageTimes
from pipemorph.planning.analysis.partition import spread_layers
from pipemorph.planning.analysis.what_if import shrunk, work

CHANGED = 0.1
"""A decision is made again when the time of a layer has changed by more than this part of it on a
stage."""


class Split:
    """The stages as they were measured in ``layout``, which may be split otherwise."""

    def __init__(
        self, spec: JobSpec, layout: Layout, stages: Sequence[StageTimes], beside: Beside
    ) -> None:
        assert spec.parallelism.layers is not None, "nobody knows how many layers there are"
        self.total = spec.parallelism.layers
        self.spec, self.layout = spec, layout
        self._stages, self._beside = tuple(stages), beside
        self.held = layout.spread(self.total)
        self.times = tuple(work(each, spec.schedule.policy_kind) for each in stages)
        """Seconds of a microbatch, by stage."""

    @cached_property
    def each(self) -> tuple[float, ...]:
        """Seconds that a layer takes on the device of each stage."""
        return tuple(
            took / (self._beside[stage] + count)
            for stage, (took, count) in enumerate(zip(self.times, self.held, strict=True))
        )

    @cached_property
    def best(self) -> tuple[int, ...]:
        """Layers per stage with which the slowest stage is the fastest."""
        beside = [self._beside[stage] * took for stage, took in enumerate(self.each)]
        return spread_layers(self.total, self.each, beside)

    @property
    def gain(self) -> float:
        """Share of its time by which the slowest stage is then faster."""
        then = max(self._took(stage, count) for stage, count in enumerate(self.best))
        return 1 - then / max(self.times)

    def _took(self, stage: int, layers: int) -> float:
        return self.each[stage] * (self._beside[stage] + layers)

    def slowest(self, layers: Sequence[int]) -> int:
        """The stage that takes longest with so many layers per stage."""
        return max(range(len(layers)), key=lambda stage: self._took(stage, layers[stage]))

    def stages(self, layers: tuple[int, ...]) -> tuple[StageTimes, ...]:
        """The op times with so many layers per stage; empty: evenly many."""
        after = replace(self.layout, layers=layers).spread(self.total)
        factors = self._beside.factors(self.held, after)
        return tuple(
            stage if factor == 1 else self._within(number, shrunk(stage, 1 / factor))
            for number, (stage, factor) in enumerate(zip(self._stages, factors, strict=True))
        )

    def _within(self, number: int, stage: StageTimes) -> StageTimes:
        """A stage with the limits that plans would get: one that was stated in microbatches counts
        whatever a microbatch takes."""
        space = room(self.spec, number, stage.activation_bytes, stage.offload_copy)
        in_flight, device = space.limits(self.spec.schedule.microbatches)
        return stage.model_copy(update={"in_flight_limit": in_flight, "device_limit": device})


def propose_layers(
    split: Split,
    network: Network,
    late: Late,
    cost: float,
    *,
    without: Collection[RankLayout] = (),
    seconds: float = SEARCH_SECONDS,
) -> Proposal | None:
    """The best split that was found within ``seconds``; None if none is better than the present
    one. ``cost``: seconds of a change. ``without``: layouts that cannot be, with all their
    numbers."""
    spec, layout, end = split.spec, split.layout, monotonic() + seconds
    score = Score(spec, network, late, layout, split.stages)
    start = layout.with_layers(split.best)
    best = layout if start.whole(split.total) in without else min(layout, start, key=score.of)
    for _ in range(MOST_SWAPS):
        others = (
            each for each in _neighbours(best, split) if each.whole(split.total) not in without
        )
        found = min(takewhile(lambda _: monotonic() < end, others), key=score.of, default=best)
        if score.of(found) >= score.of(best):
            break
        best = found
    if best == layout:
        return None
    before, after = score.of(layout)[0], score.of(best)[0]
    if not isfinite(before):
        return None
    return Proposal(best, before, after, cost, network.left, spec.adaptation.min_gain)


def _neighbours(layout: Layout, split: Split) -> Iterator[Layout]:
    """All layouts in which the slowest stage has one layer less, and those in which one that has
    more than in the beginning has."""
    held = layout.spread(split.total)
    gives = {split.slowest(held), *(at for at, n in enumerate(held) if n > split.held[at])}
    for stage in gives:
        for other in range(len(held)):
            if other != stage and held[stage] > 1:
                counts = list(held)
                counts[stage] -= 1
                counts[other] += 1
                yield layout.with_layers(counts)
