"""What the page of a running job is told: one document, JSON with a schema.

Iterations are numbered as everywhere. Times are seconds unless a name says microseconds; those of
a picture count from its first op.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from pipemorph.api.status import JobStatus
from pipemorph.planning.ir import OpKind
from pipemorph.wire import AdaptationRecord

LETTERS = {OpKind.F: "F", OpKind.B: "B", OpKind.W: "W", OpKind.BW: "U"}
"""One letter per kind of op, so that a row is one text."""

LaneKind = Literal["healthy", "slow", "narrow", "delegated", "fallen", "unknown"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Row(_Part):
    """The ops of one rank in run order. All lists but ``idle`` have one entry per op."""

    name: str
    kinds: str
    """A letter of :data:`LETTERS` per op."""
    microbatches: list[int]
    stages: list[int] = Field(default_factory=list)
    """Of ranks with several stages; else empty."""
    gaps: list[int]
    """Microseconds from the end of the op before, or from the start of the picture."""
    durations: list[int]
    """Microseconds."""
    idle: list[tuple[str, int, int]]
    """Idle times that can be seen: cause, start and end in microseconds."""
    in_flight: int
    """Most microbatches whose F has started and whose W has not finished."""
    limit: int | None
    """Of them."""
    activations: int | None
    """Most bytes that these hold on the device, from the measured size of one; None if that, or
    how many of them leave the device, is not known."""


class Picture(_Part):
    """One iteration, measured or simulated."""

    iteration: int
    plan_version: int
    at: float | None
    """Start of the first op, wall clock; None of a simulated one."""
    span_us: int
    """From the start of the first op to the end of the last."""
    seconds: float | None
    """What the iteration takes: measured, or the measured time and what the plan would add to
    it."""
    bubble: float
    """Idle time over all ranks' time."""
    causes: dict[str, float]
    """Parts of ``bubble`` by cause."""
    rows: list[Row]


class Span(_Part):
    """A state of a link. ``end``: the iteration in which the next one began to show; None: it
    lasts."""

    begin: int
    end: int | None
    kind: LaneKind
    text: str


class Lane(_Part):
    """The states of a link, oldest first."""

    name: str
    spans: list[Span]


class Recovered(_Part):
    """A start of the ranks after a failure, as in ``recoveries`` of a report."""

    model_config = ConfigDict(extra="ignore")

    lost_at: float
    cause: str
    went_on_with: int | None = None
    """The first iteration afterwards."""
    seconds: float | None = None
    repeated: int | None = None


class Steps(_Part):
    """The newest iterations."""

    index: list[int]
    seconds: list[float]


class WatchView(_Part):
    """A job that runs, as its page shows it: its status and its history, as in a report, and the
    ops of an iteration."""

    version: Literal[1] = 1
    number: int = 0
    """Grows with each document of a host."""
    live: bool = True
    """Whether to ask for the next one."""
    at: float
    job: str
    namespace: str
    emulated: bool
    described: str
    """The cut: stages, replicas."""
    status: JobStatus
    result: str
    """Where the result is to be found when it is over."""
    story: list[tuple[str, str]]
    """The explanation of the job: lines with the label of their part, if they are its first."""
    done: int
    wanted: int
    seconds: float | None
    """Median of the newest iterations."""
    columns: list[str]
    """Names; one entry if there is only one."""
    column: int
    available: list[int]
    """Iterations whose ops are there, ascending."""
    measured: Picture | None
    alternative: Picture | None
    """The same iteration under the plan of the start, links as they were then."""
    no_alternative: str
    """Why there is none."""
    activation_memory: int | None
    """Limit of a rank's ``activations``, ``schedule.activationMemory``; None: there is none."""
    links: list[Lane]
    adaptations: list[AdaptationRecord]
    """All changes of plan, oldest first."""
    recoveries: list[Recovered]
    ranks: int
    gpus: int
    """Of all ranks together; 0 if it is not known that they have any."""
    steps: Steps
