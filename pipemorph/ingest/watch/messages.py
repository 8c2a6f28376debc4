"""What an ingest and the process that makes pages of jobs tell each other, over a pipe, pickled.

Both are the same version of the same program. A frame has a number and a message: of a question
that is to be answered above 0 from the ingest and below 0 from the process, 0 of what is only told.
An answer has the number of its question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipemorph.api.spec import PipeMorphJob
from pipemorph.control.decide.forecast import Rules, Situation
from pipemorph.control.observed.links import LinkHealth
from pipemorph.control.record.worth import Worth
from pipemorph.planning import Plan, Route
from pipemorph.watch.document import Recovered
from pipemorph.wire import AdaptationRecord, IterationSample

Runs = tuple[object, ...]
"""What runs of a job: ops of one are no ops of another."""
ChangeKey = tuple[int, float]
"""Version of a plan, and when its need was detected."""


class Links(NamedTuple):
    """The links as they are now. ``iteration``: the one in progress; ``at``: wall clock."""

    iteration: int
    at: float
    links: Sequence[LinkHealth]
    routes: Sequence[Route]
    fallen: Mapping[int, str]
    """Transports that links fell back to."""


@dataclass(frozen=True)
class Sample:
    """A finished iteration."""

    index: int
    seconds: float
    loss: float | None
    plan_version: int
    bubble_fraction: float

    def restored(self) -> IterationSample:
        return IterationSample.model_validate(vars(self))


@dataclass(frozen=True)
class Begin:
    """Somebody begins to watch: what is known from before. Told. ``number``: by which the job is
    called from now on; ``above``: numbers of its documents are higher."""

    number: int
    above: int
    samples: Sequence[Sample]
    links: Links


@dataclass(frozen=True)
class News:
    """A report of a watched job. Told. ``links``: None if they were told of a moment ago."""

    number: int
    runs: Runs
    samples: Sequence[Sample]
    links: Links | None


@dataclass(frozen=True)
class Forget:
    """Nobody watches. Told. ``ops``: drop no more than the ops of iterations."""

    number: int
    ops: bool


@dataclass(frozen=True)
class Failed:
    """The answer to a question that the process could not answer, for a reason that is in the
    log."""


@dataclass(frozen=True)
class Check:
    """Asked: may the bearer of a token watch a job? Answered by a :class:`Verdict`."""

    token: str = field(repr=False)
    namespace: str
    job: str


@dataclass(frozen=True)
class Verdict:
    """``status``: 200, or of the refusal; then ``reason`` is for the metric, and ``said`` for who
    asked. Else ``said`` is who it is. Since the verdict before: ``reviews`` that were made, and
    ``requests`` to the Kubernetes API by verb and status."""

    status: int
    said: str
    reason: str = ""
    reviews: int = 0
    requests: Mapping[tuple[str, str], int] = field(default_factory=dict)


@dataclass(frozen=True)
class Tell:
    """Asked: the page, or a document. Answered by :class:`Told`. ``gone``: the job is over;
    ``packed``: whether who asks takes gzip."""

    number: int
    column: int | None
    iteration: int | None
    after: int | None
    page: bool
    packed: bool
    gone: bool


@dataclass(frozen=True)
class Told:
    """``newest``: number of the newest document."""

    status: int
    body: bytes
    packed: bool = False
    newest: int = 0


@dataclass(frozen=True)
class Ops:
    """Asked: take ops of an iteration. Answered by :class:`Taken`. ``body``: as it came, packed as
    by zlib if it is so; ``most``: bytes of it unpacked; ``iteration``: in progress."""

    number: int
    runs: Runs
    job: PipeMorphJob
    attempt: int
    iteration: int
    body: bytes
    packed: bool
    most: int


@dataclass(frozen=True)
class Taken:
    """``status``: of the answer to the agent; ``error``: empty if they were taken."""

    status: int
    error: str = ""


class Marks(NamedTuple):
    """Which of what seldom changes is known, by numbers of the ingest: 0 for nothing."""

    job: int = 0
    rules: int = 0
    start: int = 0
    running: int = 0
    changes: int = 0


@dataclass(frozen=True)
class Look:
    """Asked by the process: how is a job? Answered by a :class:`Sight`. ``has``: what need not be
    told again; ``outlook``: whether that is wanted."""

    number: int
    has: Marks
    outlook: bool


@dataclass(frozen=True)
class Sight:
    """A job as it is now. What is None is as it was told before."""

    marks: Marks
    runs: Runs
    at: float
    state: str
    reason: str
    links: Links
    worth: Worth
    plan_version: int
    wanted_version: int
    recoveries: Sequence[Recovered]
    peak_memory: Sequence[int | None]
    kept: str
    order: Sequence[ChangeKey]
    """All changes, oldest first."""
    changes: Mapping[ChangeKey, AdaptationRecord]
    """Those that are new, or not as they were."""
    situation: Situation | None
    """None if no outlook was wanted, or there is none."""
    job: PipeMorphJob | None
    rules: Rules | None
    start: Plan | None
    running: Plan | None
