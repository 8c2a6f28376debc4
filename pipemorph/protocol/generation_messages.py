"""Messages between the launchers of a job's pods and the ingest about the generation of ranks.

* ``POST /v1/jobs/{namespace}/{name}/generation?wait=S`` with a :class:`PodReport` (at most
  ``MAX_POD_REPORT_BYTES``). It names its generation, so a duplicate does no harm. With a ``wait``,
  the answer comes when a newer generation exists, or after ``S`` seconds.
* ``GET /v1/jobs/{namespace}/{name}/generation?attempt=A&generation=G&pod=P&wait=S`` answers as
  soon as generation ``G`` is over, or its ranks are to stop, or after ``S`` seconds. With
  ``leaving=1`` the launcher has received the request to stop.

Both answer a :class:`GenerationState`, and both need ``Authorization: Bearer``, as reports do.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipemorph.protocol.message_base import (
    Count,
    PlanVersion,
    ProtocolModel,
    ResponseModel,
    Seconds,
    WallClock,
)
from pipemorph.protocol.states import PRINTABLE
from pipemorph.spec.layout import RankLayout

MAX_POD_REPORT_BYTES = 32 * 1024
LONGEST_LINE = 500

MOST_WAITS = 16

ReasonLine = Annotated[str, Field(max_length=LONGEST_LINE), PRINTABLE]
Generation = PlanVersion
"""Number of a generation, bounded far below :data:`Count`."""


ReplicaNumbers = Annotated[tuple[Count, ...], Field(max_length=4096)]
"""Replicas that a generation runs without, by their numbers in the whole job."""


class PodFailure(ProtocolModel):
    """Reason why the ranks of a pod have ended, from its launcher."""

    reason: ReasonLine
    at: WallClock
    """Wall clock of the launcher, seconds since the epoch."""
    rank: Count | None = None
    retry: bool = True
    """True if a restart may succeed."""
    error: ReasonLine | None = None
    """Exception in which the rank ended; None if it ended otherwise, or lost a peer."""
    lost_peer: bool = False
    """True if another rank's end is the reason."""
    hang: bool = False
    """True if the ranks ended since none finished an iteration."""
    waits: Annotated[tuple[ReasonLine, ...], Field(max_length=MOST_WAITS)] = ()
    """Activity of each rank of this pod in a hang; ranks that waited for no other come first."""


class ResumedFrom(ProtocolModel):
    """State that a generation began with, from rank 0. ``rung``: ``kept``, ``replica``,
    ``neighbour``, ``checkpoint`` or ``beginning``. ``why``: reason why no newer state was used;
    empty if there was none."""

    iteration: Count
    rung: Annotated[str, Field(max_length=32)]
    why: ReasonLine = ""

    def __str__(self) -> str:
        where = {
            "kept": "the ranks' own copies",
            "replica": "copies of other replicas",
            "neighbour": "copies in other pods",
            "checkpoint": "a checkpoint",
            "beginning": "the beginning",
        }.get(self.rung, self.rung)
        return f"from {where} ({self.why})" if self.why else f"from {where}"


class PodReport(ProtocolModel):
    """Report of a launcher about a generation of its ranks.

    ``joined``: the launcher has begun, runs no ranks yet, and requests the generation to start;
    ``failed``: the ranks are about to end; ``gone``: all have ended, or the generation runs without
    this pod, and the launcher can start ranks of the next one at once; ``completed``: all have
    finished, and the launcher ends; ``resumed``: the state that the generation began with;
    ``stays``: its ranks were to stop, and go on.
    """

    attempt: Count
    generation: Generation
    pod: Count
    launcher: Annotated[str, Field(max_length=32)] = ""
    """Name of the launcher, which a pod's replacement changes; empty: unknown."""
    event: Literal["joined", "failed", "gone", "completed", "resumed", "stays"]
    loss: PodFailure | None = None
    """Reason for ``failed`` and ``gone``; None if the ingest had ended the generation."""
    finished: Count = 0
    """Iterations of the job that ranks of the pod have finished, for ``gone``; 0 if unknown."""
    reached: Count = 0
    """Iterations that this generation has reached, with those that it began with, for ``gone``."""
    began: Count = 0
    """Iterations of :attr:`reached` that the generation began with; 0 if unknown."""
    left_for: RankLayout | None = None
    """Layout for which the ranks stopped between two iterations, each with a copy of its state, for
    ``gone``. Has all its numbers; empty: for other replicas, or unknown. None: another end."""
    resumed: ResumedFrom | None = None
    why: ReasonLine = ""
    """Reason for ``stays``."""
    excluded_replicas: ReplicaNumbers = ()
    layout: RankLayout = RankLayout()
    layout_before: RankLayout | None = None
    """Copies, like the two fields above, from the answer that started the report's generation."""


class GenerationState(ResponseModel):
    """Newest generation, and its end."""

    attempt: Count
    generation: Generation
    over: bool = False
    """True if its ranks have to end in all pods."""
    reason: str = ""
    """Reason why it is over."""
    hang: bool = False
    """True if it is over since none of its ranks finishes an iteration. Ranks print their stacks
    before they end."""
    verdict: Literal["", "attempt", "none", "completed"] = ""
    """``attempt``: no generation follows, and pods have to end; ``none``: nor does an attempt;
    ``completed``: the ranks have done all iterations, and pods without ranks end, too."""
    why: str = ""
    """Reason of the verdict, or of the generation's start."""
    awaits: Count | None = None
    """Lost pod that Kubernetes replaces: the others wait for the new one."""
    excluded_replicas: ReplicaNumbers = ()
    """Replicas whose pods wait."""
    leave: bool = False
    """True if its ranks are to stop at an iteration boundary, with copies of their state: a missing
    replica may run again, or the layout changes."""
    leave_for: RankLayout = RankLayout()
    """Layout after that, with all its numbers; empty: unchanged."""
    layout: RankLayout = RankLayout()
    layout_before: RankLayout | None = None
    """Layout to which a failure returns while :attr:`layout` is on trial; None: no trial."""
    cause: Count | None = None
    """Pod whose rank has failed, for a verdict."""
    again: Seconds = 0.0
    """Seconds until the next request; 0: at once."""
