"""Finds another split of the layers over the stages, from measured stage times. Pure, but for the
clock that limits a search.

A stage takes the time of its layers and its overhead, such as an embedding or the loss. All layers
count as equal and the overhead is known (:mod:`.stage_overhead`), so a measured stage time gives
the time of a layer on the stage's device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from math import isfinite
from time import monotonic

from pipemorph.control.decide.layouts.layout_search import (
    MOST_SWAPS,
    SEARCH_SECONDS,
    LateWires,
    LayoutProposal,
    LayoutScorer,
    NetworkMeasurements,
)
from pipemorph.control.decide.layouts.stage_overhead import StageOverhead
from pipemorph.control.job_state.stages import compute_room
from pipemorph.planning import StageTimes
from pipemorph.planning.analysis.partition import spread_equal_layers
from pipemorph.planning.analysis.what_if import compute_stage_work, shrink_stage
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.layout import Layout, RankLayout

LAYER_TIME_CHANGED = 0.1
"""Relative change of a layer's time on a stage after which a decision is made again."""


class LayerSplit:
    """Stages as measured in ``layout``, and the split of their layers that would be fastest."""

    def __init__(
        self, spec: JobSpec, layout: Layout, stages: Sequence[StageTimes], overhead: StageOverhead
    ) -> None:
        # A job without a number of layers has a layer for each stage, which cannot move.
        self.total_layers = spec.parallelism.layers or spec.parallelism.stages
        self.spec, self.layout = spec, layout
        self._stages, self._stage_overhead = tuple(stages), overhead
        self.held_layers = layout.spread_layers(self.total_layers)
        self.stage_seconds = tuple(
            compute_stage_work(each, spec.schedule.policy_kind) for each in stages
        )
        """Seconds of a microbatch, by stage."""

    @cached_property
    def layer_seconds(self) -> tuple[float, ...]:
        """Seconds of a layer on the device of each stage."""
        return tuple(
            took / (self._stage_overhead[stage] + count)
            for stage, (took, count) in enumerate(
                zip(self.stage_seconds, self.held_layers, strict=True)
            )
        )

    @cached_property
    def overhead_seconds(self) -> tuple[float, ...]:
        """Seconds of each stage's work besides its layers."""
        return tuple(
            self._stage_overhead[stage] * took for stage, took in enumerate(self.layer_seconds)
        )

    @cached_property
    def best_counts(self) -> tuple[int, ...]:
        """Layers per stage with which the slowest stage is the fastest."""
        return spread_equal_layers(self.total_layers, self.layer_seconds, self.overhead_seconds)

    @property
    def best_gain(self) -> float:
        """Fraction of its time by which the slowest stage is faster with :attr:`best_counts`."""
        then = max(
            self._stage_seconds_with(stage, count) for stage, count in enumerate(self.best_counts)
        )
        return 1 - then / max(self.stage_seconds)

    def _stage_seconds_with(self, stage: int, layers: int) -> float:
        return self.layer_seconds[stage] * (self._stage_overhead[stage] + layers)

    def find_slowest_stage(self, layers: Sequence[int]) -> int:
        """Stage that takes longest with these layers per stage."""
        return max(
            range(len(layers)), key=lambda stage: self._stage_seconds_with(stage, layers[stage])
        )

    def stage_times_with(self, layers: tuple[int, ...]) -> tuple[StageTimes, ...]:
        """Op times with these layers per stage; empty: an even split."""
        after = replace(self.layout, layers=layers).spread_layers(self.total_layers)
        factors = self._stage_overhead.compute_work_factors(self.held_layers, after)
        return tuple(
            stage
            if factor == 1
            else self._with_memory_limits(number, shrink_stage(stage, 1 / factor))
            for number, (stage, factor) in enumerate(zip(self._stages, factors, strict=True))
        )

    def _with_memory_limits(self, number: int, stage: StageTimes) -> StageTimes:
        """Stage with the memory limits of its plans: a limit in microbatches in the spec holds for
        any size of a microbatch."""
        space = compute_room(self.spec, number, stage.activation_bytes, stage.offload_copy)
        in_flight, device = space.get_plan_limits(self.spec.schedule.microbatches)
        return stage.model_copy(update={"in_flight_limit": in_flight, "device_limit": device})


def propose_layer_split(
    split: LayerSplit,
    network: NetworkMeasurements,
    late: LateWires,
    cost: float,
    *,
    without: Collection[RankLayout] = (),
    seconds: float = SEARCH_SECONDS,
) -> LayoutProposal | None:
    """Propose the best split found within ``seconds``; None if none is better than the present one.
    ``cost``: seconds of a change. ``without``: layouts that failed before, with all numbers."""
    spec, layout, end = split.spec, split.layout, monotonic() + seconds
    score = LayoutScorer(spec, network, late, layout, split.stage_times_with)
    start = layout.with_layers(split.best_counts)
    best = (
        layout
        if start.to_explicit_layout(split.total_layers) in without
        else min(layout, start, key=score.score_layout)
    )
    for _ in range(MOST_SWAPS):
        others = (
            each
            for each in _list_neighbours(best, split)
            if each.to_explicit_layout(split.total_layers) not in without
        )
        found = min(
            takewhile(lambda _: monotonic() < end, others), key=score.score_layout, default=best
        )
        if score.score_layout(found) >= score.score_layout(best):
            break
        best = found
    if best == layout:
        return None
    before, after = score.score_layout(layout)[0], score.score_layout(best)[0]
    if not isfinite(before):
        return None
    return LayoutProposal(
        best, before, after, cost, network.iterations_remaining, spec.adaptation.min_gain
    )


def _list_neighbours(layout: Layout, split: LayerSplit) -> Iterator[Layout]:
    """Yield all layouts with one layer less on the slowest stage, or on a stage that has more
    layers than at first."""
    held = layout.spread_layers(split.total_layers)
    gives = {
        split.find_slowest_stage(held),
        *(at for at, n in enumerate(held) if n > split.held_layers[at]),
    }
    for stage in gives:
        for other in range(len(held)):
            if other != stage and held[stage] > 1:
                counts = list(held)
                counts[stage] -= 1
                counts[other] += 1
                yield layout.with_layers(counts)
