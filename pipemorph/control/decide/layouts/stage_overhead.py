"""Overhead of stages: their work besides layers, such as an embedding or the loss. Pure.

With a job's initial split, the fastest stage is assumed to have no overhead, and the other stages'
overhead is the time that they take beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipemorph.planning import Policy, StageTimes
from pipemorph.planning.analysis.what_if import compute_stage_work


@dataclass(frozen=True)
class StageOverhead:
    """Overhead of stages, as a multiple of a layer's time. ``model_layers``: None if
    unknown. ``initial_seconds``: least ones of a microbatch with the initial split, by stage."""

    model_layers: int | None = None
    initial_seconds: tuple[float, ...] = ()

    def with_measured_times(self, stages: Sequence[StageTimes], policy: Policy) -> StageOverhead:
        """Update with measured times of the job's initial split."""
        times = tuple(compute_stage_work(each, policy) for each in stages)
        if not all(times):
            return self
        return replace(
            self,
            initial_seconds=tuple(map(min, times, self.initial_seconds))
            if self.initial_seconds
            else times,
        )

    def __getitem__(self, stage: int) -> float:
        if not self.initial_seconds or self.model_layers is None:
            return 0.0
        each = self.model_layers / len(self.initial_seconds)
        return each * (self.initial_seconds[stage] / min(self.initial_seconds) - 1)

    def compute_work_factors(
        self, before: Sequence[int], after: Sequence[int]
    ) -> tuple[float, ...]:
        """Ratio of the work after a change of layers to that before, by stage."""
        return tuple(
            (self[stage] + now) / (self[stage] + was)
            for stage, (was, now) in enumerate(zip(before, after, strict=True))
        )
