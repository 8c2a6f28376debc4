"""The part of a model that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """The part of a model that a rank holds: the argument of a stage's builder."""

    stage: int
    stages: int

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def layers(self, total: int) -> range:
        """The layers of this part, of ``total`` that are split over the stages in order. If they
        cannot be split evenly, the first stages get one more."""
        each, more = divmod(total, self.stages)
        begin = self.stage * each + min(self.stage, more)
        return range(begin, begin + each + (self.stage < more))
