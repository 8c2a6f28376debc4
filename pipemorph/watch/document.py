"""What the page of a running job is told: one document, JSON with a schema.

Iterations are numbered as everywhere. Times are seconds unless a name says microseconds; those of
a picture count from its first op.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from pipemorph.planning.ir import OpKind

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
    name: str
    kind: LaneKind
    """Now."""
    text: str
    since_iteration: int | None
    since: float | None
    """When the present state was found, wall clock; None before the first report."""
    spans: list[Span]


class Change(_Part):
    """A change of plan. ``iteration``: the first under it; None: there was none. ``pending``: the
    ranks are to change to it."""

    plan_version: int
    kind: Literal["adapt", "return", "revert"]
    at: float
    iteration: int | None
    pending: bool
    reason: str
    promised: float | None
    measured: float | None
    before: float | None
    after: float | None
    """Seconds per iteration, measured."""


class Recovered(_Part):
    """A start of the ranks after a failure. ``iteration``: the first afterwards."""

    at: float
    cause: str
    iteration: int | None
    seconds: float | None
    repeated: int | None


class Saved(_Part):
    """Against the plan of the start. ``per_iteration``: predicted for the present state; None where
    the plan of the start is in force or nothing was predicted."""

    per_iteration: float | None
    seconds: float
    error: float
    """How far ``seconds`` may be from the truth, as promised and measured gains differ."""
    hours: float
    """``seconds`` of all GPUs of the job together, or of its ranks; see ``of``."""
    of: Literal["GPU", "rank"]
    """Ranks where it is not known that the job has GPUs."""


class Steps(_Part):
    """The newest iterations."""

    index: list[int]
    seconds: list[float]


class WatchView(_Part):
    """A job that runs, as its page shows it."""

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
    state: Literal[
        "starting", "training", "recovering", "completed", "failed", "deadline", "interrupted"
    ]
    reason: str
    """Of a failure; else empty."""
    result: str
    """Where the result is to be found when it is over."""
    story: list[str]
    """Sentences for who sees the job for the first time."""
    done: int
    wanted: int
    seconds: float | None
    """Median of the newest iterations."""
    plan_version: int
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
    peak_memory: list[int | None]
    """Bytes per stage, of its highest rank so far, with weights and all else: of the device on a
    GPU, else of the process. Empty, or None for a stage, if not reported."""
    activation_memory: int | None
    """Limit of a rank's ``activations``, ``schedule.activationMemory``; None: there is none."""
    links: list[Lane]
    changes: list[Change]
    recoveries: list[Recovered]
    saved: Saved
    steps: Steps
