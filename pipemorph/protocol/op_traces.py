"""Ops of a rank in an iteration, with the rank's other times.

They are not in reports, since no decision depends on them. About once a second the agent requests
those of an iteration from the ranks: it attributes their idle time to causes, and passes the ops of
a pipeline column to the live page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from pipemorph.planning.ir import KIND_OF_LETTER, LETTER_OF_KIND, OpKind
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.protocol.message_base import Count, ProtocolModel, Seconds, WallClock

MOST_OPS = 65_536
"""Most ops of a stage in an iteration; a stage with more sends none."""
Microseconds = Annotated[int, Field(ge=-(10**12), le=10**12)]
ClockOffset = Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False)]


class RankTimes(ProtocolModel):
    """Times of a rank outside its ops, from the end of an iteration to the end of the next one:
    that of the gradient norm of all stages, otherwise of the step."""

    window: Seconds
    """Whole time."""
    optimizer: Seconds = 0.0
    norm: Seconds | None = None
    """In the gradient norm of all stages, with the waiting for other ranks; None without it."""
    checkpoint: Seconds = 0.0
    """In saving the state, with the waiting for other ranks."""
    data: Seconds = 0.0
    """In the script's own code between two steps, without the optimizer, which is mostly the
    loading of data, and in splitting the batch."""
    drawn: Seconds = 0.0
    """In drawing microbatches in the step."""
    gc: Seconds = 0.0
    """In pauses of Python's garbage collector before the step."""
    reduction: Seconds | None = None
    """After the last op, until the gradients were averaged over the replicas; None without
    replicas."""
    tied: Seconds | None = None
    """In the sum of the gradients of tied weights; None without any."""
    pauses: Annotated[list[tuple[Microseconds, Microseconds]], Field(max_length=1024)] = Field(
        default_factory=list
    )
    """Pauses of the garbage collector in the step: time from its start, and duration."""
    clock_offset: ClockOffset = 0.0
    """Seconds to add to the wall clock of the stage above to get that of this rank."""


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
    waits: Annotated[list[Microseconds], Field(max_length=MOST_OPS)] = Field(default_factory=list)
    """Time that the rank waited for each op's message, the end of its ``gap``; empty: unknown."""
    rank_times: RankTimes | None = None
    """Other times of the rank; only with its first stage."""

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
        *,
        waits: Sequence[tuple[OpKind, int, float, float]] = (),
        rank_times: RankTimes | None = None,
    ) -> OpsTrace | None:
        """Trace of ops. ``place``: rank, stage and column. ``ops``: kind, microbatch, start and
        end, in wall-clock seconds; ``waits``: those of the waits for their messages. None if there
        are too many, or none."""
        if not 0 < len(ops) <= MOST_OPS:
            return None
        kinds, microbatches, *times = zip(*ops, strict=True)
        starts, ends = ([round(1e6 * (at - origin)) for at in each] for each in times)
        rank, stage, column = place
        waited = {(kind, microbatch): end - start for kind, microbatch, start, end in waits}
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
            waits=[round(1e6 * waited.get(op[:2], 0.0)) for op in ops] if waited else [],
            rank_times=rank_times,
        )
