"""What each stage does beside its layers, such as an embedding or the loss. Pure.

With the split that a job begins with, the stage that takes least is taken to have nothing beside
its layers, and what others take more than that is theirs beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipemorph.planning import Policy, StageTimes
from pipemorph.planning.analysis.what_if import work


@dataclass(frozen=True)
class Beside:
    """What stages do beside their layers, in times of a layer. ``layers``: of the model, None: not
    known. ``least``: by stage, the fewest seconds of a microbatch that were measured with the split
    that the job begins with; empty: none were."""

    layers: int | None = None
    least: tuple[float, ...] = ()

    def seen(self, stages: Sequence[StageTimes], policy: Policy) -> Beside:
        """With measured times of the split that the job begins with."""
        times = tuple(work(each, policy) for each in stages)
        if not all(times):
            return self
        return replace(self, least=tuple(map(min, times, self.least)) if self.least else times)

    def __getitem__(self, stage: int) -> float:
        if not self.least or self.layers is None:
            return 0.0
        each = self.layers / len(self.least)
        return each * (self.least[stage] / min(self.least) - 1)

    def factors(self, before: Sequence[int], after: Sequence[int]) -> tuple[float, ...]:
        """By stage, how many times the work of before it has with other numbers of layers."""
        return tuple(
            (self[stage] + now) / (self[stage] + was)
            for stage, (was, now) in enumerate(zip(before, after, strict=True))
        )
