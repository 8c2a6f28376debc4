"""Messages between the launchers of a job's pods and the ingest: which generation of ranks runs.

* ``POST /v1/jobs/{namespace}/{name}/generation?wait=S`` with a :class:`PodReport` (at most
  ``MAX_POD_REPORT_BYTES``). It names the generation that it is about, so that one that comes twice
  does no harm. With a ``wait``, the answer comes when that generation is not the newest one
  any more, or after ``S`` seconds.
* ``GET /v1/jobs/{namespace}/{name}/generation?attempt=A&generation=G&pod=P&wait=S`` answers as
  soon as generation ``G`` is over, or its ranks are to leave, or after ``S`` seconds. With
  ``leaving=1`` the launcher knows that they are to leave.

Both answer a :class:`GenerationState`, and both need ``Authorization: Bearer``, as reports do.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipemorph.api.layout import RankLayout
from pipemorph.wire.base import (
    Answer,
    Count,
    PlanVersion,
    Seconds,
    WallClock,
    WireModel,
)
from pipemorph.wire.states import PRINTABLE

MAX_POD_REPORT_BYTES = 32 * 1024
LONGEST_LINE = 500

MOST_WAITS = 16

Line = Annotated[str, Field(max_length=LONGEST_LINE), PRINTABLE]
Generation = PlanVersion
"""Bounded far below what can be counted."""


LeftOut = Annotated[tuple[Count, ...], Field(max_length=4096)]
"""Replicas without which a generation runs, by their numbers in the whole job."""


class Loss(WireModel):
    """Why the ranks of a pod have ended, as its launcher sees it."""

    reason: Line
    at: WallClock
    """The launcher's wall clock, seconds since the epoch."""
    rank: Count | None = None
    retry: bool = True
    """Whether a restart may succeed."""
    error: Line | None = None
    """The exception in which the rank ended; None if it ended otherwise, or lost a peer."""
    lost_peer: bool = False
    """Whether another rank's end is the reason."""
    hang: bool = False
    """Whether none of the ranks finished an iteration."""
    waits: Annotated[tuple[Line, ...], Field(max_length=MOST_WAITS)] = ()
    """Then what each of this pod did, those first that waited for no other."""


class ResumedFrom(WireModel):
    """What a generation began with, as rank 0 says. ``rung``: ``kept``, ``replica``, ``neighbour``,
    ``checkpoint`` or ``beginning``. ``why``: why not with something newer; empty if there was
    nothing."""

    iteration: Count
    rung: Annotated[str, Field(max_length=32)]
    why: Line = ""

    def __str__(self) -> str:
        where = {
            "kept": "the ranks' own copies",
            "replica": "copies of other replicas",
            "neighbour": "copies in other pods",
            "checkpoint": "a checkpoint",
            "beginning": "the beginning",
        }.get(self.rung, self.rung)
        return f"from {where} ({self.why})" if self.why else f"from {where}"


class PodReport(WireModel):
    """What a launcher tells of a generation of its ranks.

    ``joined``: the launcher has begun, runs no ranks yet, and asks which generation to start;
    ``failed``: the ranks are about to end; ``gone``: none is left, or the generation is without
    this pod's, and the launcher can start some at once in the next one; ``completed``: all have
    finished, and the launcher ends; ``resumed``: what the generation began with; ``stays``: its
    ranks were to leave, and go on as they are.
    """

    attempt: Count
    generation: Generation
    pod: Count
    launcher: Annotated[str, Field(max_length=32)] = ""
    """Differs between the launchers of a pod and of the one that replaces it; empty: not told."""
    event: Literal["joined", "failed", "gone", "completed", "resumed", "stays"]
    loss: Loss | None = None
    """Of ``failed`` and ``gone``; None if the launcher was told that the generation is over."""
    finished: Count = 0
    """Of ``gone``: iterations of the job that ranks of the pod have finished, as far as it has seen
    them finish any; 0 if it has not."""
    reached: Count = 0
    """Of ``gone``: the same of ranks of this generation alone, with those that they began with."""
    began: Count = 0
    """Of ``gone``: those of :attr:`reached` that they began with; 0: they have not said so."""
    left_for: RankLayout | None = None
    """Of ``gone``: its ranks have left between two iterations, each with a copy of its state, as
    all have. The layout that they were to leave for, as far as the launcher knows, with all its
    numbers; empty: for other replicas, or it does not know."""
    resumed: ResumedFrom | None = None
    why: Line = ""
    """Of ``stays``."""
    left_out: LeftOut = ()
    layout: RankLayout = RankLayout()
    layout_before: RankLayout | None = None
    """All of the generation that this is about, as the launcher was told."""


class GenerationState(Answer):
    """The newest generation, and whether it is over."""

    attempt: Count
    generation: Generation
    over: bool = False
    """Its ranks have to end in all pods."""
    reason: str = ""
    """Why it is over."""
    hang: bool = False
    """Whether that is since none of its ranks finishes an iteration: they print their stacks before
    they end."""
    verdict: Literal["", "attempt", "none", "completed"] = ""
    """``attempt``: no generation follows, and pods have to end; ``none``: nor does an attempt;
    ``completed``: the ranks that ran have done all iterations, and pods without any end, too."""
    why: str = ""
    """The reason of the verdict, or of the generation's start."""
    awaits: Count | None = None
    """A pod that is lost, and that Kubernetes replaces: the others wait for the new one."""
    left_out: LeftOut = ()
    """Pods of these replicas wait."""
    leave: bool = False
    """Whether its ranks are to leave at an iteration boundary, with copies of their state: a
    replica that is left out may run again, or the layout changes."""
    leave_for: RankLayout = RankLayout()
    """Then the layout afterwards, with all its numbers; empty: that does not change."""
    layout: RankLayout = RankLayout()
    layout_before: RankLayout | None = None
    """While :attr:`layout` is on trial: the one that a failure goes back to; None: it counts."""
    cause: Count | None = None
    """Of a verdict: the pod whose rank has failed."""
    again: Seconds = 0.0
    """Ask again after so many seconds; 0: at once."""
