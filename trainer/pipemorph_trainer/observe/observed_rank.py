"""Place of a rank in an observed job."""

from __future__ import annotations

from typing import NamedTuple


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
