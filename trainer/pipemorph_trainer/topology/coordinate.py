"""A rank's position among the stages and replicas of a job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coordinate:
    """A rank's position: rank = replica × stages + stage."""

    rank: int
    stage: int
    stages: int
    replica: int
    replicas: int

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def __str__(self) -> str:
        where = f"rank {self.rank} (stage {self.stage}"
        return f"{where}, replica {self.replica})" if self.replicas > 1 else f"{where})"
