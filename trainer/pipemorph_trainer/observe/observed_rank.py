"""Place of a rank in an observed job, and its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipemorph_trainer.record import RecordedOp


class ObservedRank(NamedTuple):
    """Place of this rank in the job. ``stage``: its rank in the pipeline. ``chunks``: global
    numbers of its model chunks, in its order. ``records``: False for a rank whose ops are those of
    another one, such as tensor rank 1. ``ranks``, ``replicas``: of a pipeline, and of the job.
    ``backend``: of its messages. ``schedule``: framework and schedule that run."""

    rank: int
    stage: int
    dp_rank: int
    chunks: tuple[int, ...]
    records: bool = True
    ranks: int = 1
    replicas: int = 1
    backend: str = "gloo"
    schedule: str = "torch"


class FinishedStep(NamedTuple):
    """Step of a rank. ``began``, ``ended``: wall clock; ``omitted``: seconds in evaluations;
    ``waits``: times of readings, and seconds for which threads had waited for a processor."""

    step: int
    ops: Sequence[RecordedOp]
    began: float
    ended: float
    omitted: float = 0.0
    waits: Sequence[tuple[float, float]] = ()
