"""Ops of single iterations, which ranks send while somebody watches their job.

They are no part of reports: nothing is decided by them, and nothing of them is kept where nobody
looks. The answer to a report says that somebody does (:class:`OpsWanted`), the agent asks the ranks
of one pipeline column for the ops of one iteration, about once a second, and sends them on:
``POST /v1/jobs/{namespace}/{name}/ops`` with an :class:`OpsReport`, compressed (``deflate``), at
most :func:`most_ops_bytes` of the job before that. 64 stages × 256 microbatches take 0.6 MB, and a
quarter of that compressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

from pydantic import Field

from pipemorph.planning.ir import KIND_OF_LETTER, LETTERS, OpKind
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.wire.base import Answer, Count, ObjectName, Seconds, WallClock, WireModel

MAX_OPS_BYTES = 4 << 20
"""Of any job."""
OPS_OF_MICROBATCH = 3
"""Most ops of one stage for one microbatch: forward, and backward in two parts."""
OP_BYTES, STAGE_BYTES, REPORT_BYTES = 40, 512, 4096
"""Most bytes of JSON that an op, a stage without its ops, and a report without its stages take."""
MOST_OPS = 65_536
"""Of one stage in one iteration; one with more sends none."""
MOST_ROWS = 1024
"""Stages of one column."""


def most_ops_bytes(stages: int, microbatches: int) -> int:
    """Most bytes of an :class:`OpsReport` of a job with so many stages, not compressed."""
    stage = STAGE_BYTES + OPS_OF_MICROBATCH * microbatches * OP_BYTES
    return min(MAX_OPS_BYTES, REPORT_BYTES + stages * stage)


Microseconds = Annotated[int, Field(ge=-(10**12), le=10**12)]


class Timed(Protocol):
    """An op of a rank; times are wall-clock seconds."""

    @property
    def kind(self) -> OpKind: ...

    @property
    def microbatch(self) -> int: ...

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...


class OpsWanted(Answer):
    """That somebody watches: whose ops they look at, and for how long from now."""

    column: Count
    seconds: Seconds


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
    def replica(self) -> int:
        """Its column, as in traces of ops."""
        return self.column

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
        ops: Sequence[Timed],
    ) -> OpsTrace | None:
        """``place``: rank, stage and column. None if there are too many ops, or none."""
        if not 0 < len(ops) <= MOST_OPS:
            return None
        starts = [round(1e6 * (op.start - origin)) for op in ops]
        ends = [round(1e6 * (op.end - origin)) for op in ops]
        rank, stage, column = place
        return OpsTrace(
            rank=rank,
            stage=stage,
            column=column,
            iteration=iteration,
            plan_version=plan_version,
            origin=origin,
            kinds="".join([LETTERS[op.kind] for op in ops]),
            microbatches=[op.microbatch for op in ops],
            gaps=[start - end for start, end in zip(starts, [0, *ends], strict=False)],
            durations=[end - start for start, end in zip(starts, ends, strict=True)],
        )


class OpsReport(WireModel):
    """The ops of all stages of one column in one iteration."""

    job: ObjectName
    namespace: ObjectName
    attempt: Count
    column: Count
    iteration: Count
    stages: Annotated[list[OpsTrace], Field(min_length=1, max_length=MOST_ROWS)]
