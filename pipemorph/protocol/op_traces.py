"""Ops of a rank in an iteration, which ranks send while their job has viewers.

They are not in reports, since no decision depends on them. While the live page requests ops
(:mod:`pipemorph.protocol.page_messages`), the agent requests those of an iteration from the ranks
of a pipeline column, about once a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from pipemorph.planning.ir import KIND_OF_LETTER, LETTER_OF_KIND, OpKind
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.protocol.message_base import Count, ProtocolModel, WallClock

MOST_OPS = 65_536
"""Most ops of a stage in an iteration; a stage with more sends none."""
Microseconds = Annotated[int, Field(ge=-(10**12), le=10**12)]


class OpsTrace(ProtocolModel):
    """Ops of a stage in an iteration on a rank, in run order. Lists have an entry per op.

    Times are by the rank's own clock.
    """

    rank: Count
    stage: Count
    column: Count
    iteration: Count
    plan_version: Count
    origin: WallClock
    """Wall clock at the start of the iteration."""
    kinds: Annotated[str, Field(max_length=MOST_OPS, pattern="^[FIWB]*$")]
    """A letter of :data:`~pipemorph.planning.ir.LETTER_OF_KIND` per op."""
    microbatches: Annotated[list[Count], Field(max_length=MOST_OPS)]
    gaps: Annotated[list[Microseconds], Field(max_length=MOST_OPS)]
    """Time from the end of the op before, or from ``origin``."""
    durations: Annotated[list[Microseconds], Field(max_length=MOST_OPS)]

    @property
    def ops(self) -> tuple[TimedOp, ...]:
        """Ops with wall-clock times, seconds."""
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
    def from_ops(
        place: tuple[int, int, int],
        iteration: int,
        plan_version: int,
        origin: float,
        ops: Sequence[tuple[OpKind, int, float, float]],
    ) -> OpsTrace | None:
        """Trace of ops. ``place``: rank, stage and column. ``ops``: kind, microbatch, start and
        end, in wall-clock seconds. None if there are too many, or none."""
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
            kinds="".join([LETTER_OF_KIND[kind] for kind in kinds]),
            microbatches=list(microbatches),
            gaps=[start - end for start, end in zip(starts, [0, *ends], strict=False)],
            durations=[end - start for start, end in zip(starts, ends, strict=True)],
        )
