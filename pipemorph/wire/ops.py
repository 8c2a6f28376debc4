"""Ops of one rank in one iteration, which ranks send while somebody watches their job.

They are no part of reports: no decision depends on them. Somebody watches as long as the live page
requests ops (:mod:`pipemorph.wire.page`); the agent then requests those of one iteration from the
ranks of one pipeline column, about once a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from pipemorph.planning.ir import KIND_OF_LETTER, LETTERS, OpKind
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.wire.base import Count, WallClock, WireModel

MOST_OPS = 65_536
"""Of one stage in one iteration; one with more sends none."""
Microseconds = Annotated[int, Field(ge=-(10**12), le=10**12)]


class OpsTrace(WireModel):
    """The ops of one stage in one iteration on one rank, in run order. Lists have one entry per op.

    Times are of the rank's own clock.
    """

    rank: Count
    stage: Count
    column: Count
    iteration: Count
    plan_version: Count
    origin: WallClock
    """Wall clock at the start of the iteration."""
    kinds: Annotated[str, Field(max_length=MOST_OPS, pattern="^[FIWB]*$")]
    """A letter of :data:`~pipemorph.planning.ir.LETTERS` per op."""
    microbatches: Annotated[list[Count], Field(max_length=MOST_OPS)]
    gaps: Annotated[list[Microseconds], Field(max_length=MOST_OPS)]
    """From the end of the op before, or from ``origin``."""
    durations: Annotated[list[Microseconds], Field(max_length=MOST_OPS)]

    @property
    def ops(self) -> tuple[TimedOp, ...]:
        """With wall-clock times, seconds."""
        found, at = [], 0
        each = zip(self.kinds, self.microbatches, self.gaps, self.durations, strict=False)
        for letter, microbatch, gap, duration in each:
            start = at + gap
            at = start + duration
            found.append(
                TimedOp(
                    KIND_OF_LETTER[letter],
                    microbatch,
                    self.origin + start / 1e6,
                    self.origin + at / 1e6,
                )
            )
        return tuple(found)

    @staticmethod
    def of(
        place: tuple[int, int, int],
        iteration: int,
        plan_version: int,
        origin: float,
        ops: Sequence[tuple[OpKind, int, float, float]],
    ) -> OpsTrace | None:
        """``place``: rank, stage and column. ``ops``: kind, microbatch, start and end, wall-clock
        seconds. None if there are too many, or none."""
        if not 0 < len(ops) <= MOST_OPS:
            return None
        kinds, microbatches, *times = zip(*ops, strict=True)
        starts, ends = ([round(1e6 * (at - origin)) for at in each] for each in times)
        rank, stage, column = place
        return OpsTrace(
            rank=rank,
            stage=stage,
            column=column,
            iteration=iteration,
            plan_version=plan_version,
            origin=origin,
            kinds="".join([LETTERS[kind] for kind in kinds]),
            microbatches=list(microbatches),
            gaps=[start - end for start, end in zip(starts, [0, *ends], strict=False)],
            durations=[end - start for start, end in zip(starts, ends, strict=True)],
        )
