"""Document of a running job's page, as JSON with a schema.

Times are seconds unless a name says microseconds; those of a picture count from its first op.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from pipemorph.protocol import AdaptationRecord
from pipemorph.spec.job_status import JobStatus

LinkSpanKind = Literal["healthy", "slow", "narrow", "fallen", "unknown"]


class _PageModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PictureRow(_PageModel):
    """Ops of a rank in run order. All lists but ``idle`` have one entry per op."""

    name: str
    kinds: str
    """A letter of :data:`pipemorph.views.pictures.colours.LETTERS` per op."""
    microbatches: list[int]
    stages: list[int] = Field(default_factory=list)
    """Stage of each op if ranks have several; else empty."""
    gaps: list[int]
    """Microseconds from the end of the op before, or from the start of the picture."""
    durations: list[int]
    """Microseconds."""
    idle: list[tuple[str, int, int]]
    """Visible idle times: cause, start and end in microseconds."""
    in_flight: int
    """Peak number of microbatches whose F has started and whose W has not finished."""
    limit: int | None
    """Limit of :attr:`in_flight`; None: there is none."""
    activations: int | None
    """Peak bytes of these on the device, from the measured size of one; None if that, or the number
    that leaves the device, is unknown."""


class IterationPicture(_PageModel):
    """Picture of an iteration, measured or simulated."""

    iteration: int
    plan_version: int
    at: float | None
    """Start of the first op, wall clock; None if simulated."""
    span_us: int
    """Microseconds from the start of the first op to the end of the last."""
    seconds: float | None
    """Time of the iteration: measured; or the measured time plus the predicted difference of the
    plan; or, if the measured plan is not stored any more, the simulated ops plus the measured time
    outside ops."""
    bubble: float
    """Idle time over all ranks' time."""
    causes: dict[str, float]
    """Parts of ``bubble`` by cause."""
    rows: list[PictureRow]


class StoredIteration(_PageModel):
    """Pictures of an iteration in a column, as in a document."""

    column: int
    measured: IterationPicture
    alternative: IterationPicture | None
    no_alternative: str


class LinkSpan(_PageModel):
    """State of a link. ``end``: the iteration in which the next state began to show; None: it
    lasts."""

    begin: int
    end: int | None
    kind: LinkSpanKind
    delegated: bool = False
    text: str


class LinkTimeline(_PageModel):
    """States of a link, oldest first."""

    name: str
    spans: list[LinkSpan]


class RecoveryEntry(_PageModel):
    """Restart of the ranks after a failure, as in ``recoveries`` of a report."""

    model_config = ConfigDict(extra="ignore")

    lost_at: float
    cause: str
    went_on_with: int | None = None
    """First iteration afterwards."""
    seconds: float | None = None
    repeated: int | None = None


class IterationTimes(_PageModel):
    """Times of the newest iterations."""

    index: list[int]
    seconds: list[float]


class PageDocument(_PageModel):
    """Running job as its page shows it: status and history, as in a report, and the ops of an
    iteration."""

    version: Literal[1] = 1
    number: int = 0
    """Number that grows with each document of a host."""
    live: bool = True
    """True if another document follows."""
    at: float
    job: str
    namespace: str
    emulated: bool
    described: str
    """Mesh and microbatches, as text."""
    stages: int
    microbatches: int
    status: JobStatus
    result: str
    """Place of the result once the job is over."""
    explanation: list[tuple[str, str]]
    """Explanation of the job: label and text per line; the label is empty within a part."""
    done: int
    wanted: int
    """Number of iterations of the job; 0: unknown, as PipeMorph only observes it."""
    seconds: float | None
    """Median of the newest iterations."""
    columns: list[str]
    """Names of the columns."""
    column: int
    available: list[int]
    """Iterations with stored ops, ascending."""
    stored: list[StoredIteration] = Field(default_factory=list)
    """Pictures of other iterations and columns, of a run that is over."""
    measured: IterationPicture | None
    alternative: IterationPicture | None
    """Iteration of :attr:`measured` under the initial plan, with the links of that time."""
    no_alternative: str
    """Reason why there is no alternative."""
    activation_memory: int | None
    """Limit of a rank's ``activations``, ``schedule.activationMemory``; None: there is none."""
    links: list[LinkTimeline]
    adaptations: list[AdaptationRecord]
    """Changes of plan, oldest first."""
    recoveries: list[RecoveryEntry]
    ranks: int
    gpus: int
    """GPUs of all ranks together; 0 if none are known."""
    steps: IterationTimes
