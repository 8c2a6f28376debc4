"""Messages between a rank of an observed job and ``pipemorph serve --observe``.

``POST /v1/observations`` with a :class:`StepsReport` (at most ``MAX_STEPS_BYTES``), about once a
second; the response is a :class:`StepsReply`. PipeMorph does not run such a job: the rank has no
agent, and nothing comes down. Each report has the rank's place, so the host may start at any time.
All times are by the rank's own clock, which the host aligns by ``clock``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipemorph.protocol.message_base import Count, ProtocolModel, ResponseModel, Seconds, WallClock
from pipemorph.protocol.op_traces import Microseconds
from pipemorph.protocol.states import PRINTABLE

MAX_STEPS_BYTES = 4 << 20
MOST_STEPS, MOST_CHUNKS, MOST_ROWS = 64, 64, 65_536
"""Most steps of a report, stages of a rank, and rows of a step."""

Number = Annotated[int, Field(ge=0, lt=1 << 20)]
Size = Annotated[int, Field(ge=1, le=100_000)]
Signed = Annotated[int, Field(ge=-1, lt=1 << 20)]
Duration = Annotated[int, Field(ge=0, le=10**12)]
Bytes = Annotated[int, Field(ge=-1, le=1 << 50)]
Name = Annotated[str, Field(min_length=1, max_length=64), PRINTABLE]
ObservedRow = tuple[
    Name, Signed, Signed, Microseconds, Duration, Microseconds | None, Microseconds | None, Bytes
]
"""Row of an op table: op type, stage, microbatch (-1 where there is none); start after ``began_at``
and duration; of a receive, when it was posted, and when the rank began to wait for it;
size of a send or receive (-1: unknown)."""
ClockOffset = Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False)]


class ObservedPlace(ProtocolModel):
    """Place of a rank in an observed job. ``chunks``: its stages, ascending."""

    rank: Number
    """Number of the rank in the whole job, for messages."""
    stages: Size
    replicas: Size = 1
    replica: Number = 0
    chunks: Annotated[tuple[Number, ...], Field(min_length=1, max_length=MOST_CHUNKS)]
    host: Name
    """Name of its host: ranks of one host share its clock."""
    transport: Literal["gloo", "nccl"] = "gloo"
    crowding: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """See :class:`~pipemorph.protocol.StageProfile`."""
    framework: Name = "torch"
    """Framework and schedule that run."""


class ObservedStep(ProtocolModel):
    """Step of a rank, from the end of the one before. ``omitted``: seconds in evaluations."""

    step: Count
    began_at: WallClock
    ended_at: WallClock
    omitted: Seconds = 0.0
    rows: Annotated[list[ObservedRow], Field(max_length=MOST_ROWS)]
    waits: Annotated[list[tuple[Microseconds, Duration]], Field(max_length=MOST_ROWS)] = Field(
        default_factory=list
    )
    """Times at which the rank read for how long its threads had waited for a processor since the
    time before: a message may seem late by as much."""


class StepsReport(ProtocolModel):
    """Steps of a rank since its last report."""

    protocol: Literal[1]
    session: Name
    """Random name of the rank's process: another one begins another attempt."""
    place: ObservedPlace
    clock: ClockOffset | None = None
    """Seconds to add to the rank's clock to get the host's; None before the first reply."""
    round_trip: Seconds = 0.0
    """Round trip of the request by which ``clock`` was measured: twice its largest error."""
    steps: Annotated[list[ObservedStep], Field(max_length=MOST_STEPS)] = Field(default_factory=list)
    dropped: Count = 0
    """Steps so far that the rank dropped, since the host was away or slow."""
    finished: bool = False
    """True in the last report of the process."""


class StepsReply(ResponseModel):
    """Reply to a report. ``at``: the host's clock; ``pause``: least seconds until the next one."""

    at: WallClock
    pause: Seconds = 1.0
