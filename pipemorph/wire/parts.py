"""Messages between the agent of some of a job's ranks and the job's agent.

The agent of a part reports states as the job's agent reports to the ingest, and besides what is
judged over all ranks: paces, normal wire times, and which links are late right now. The job's agent
answers when there is something to tell: whenever a part connects, and when what follows for it from
reports of all parts has changed.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pipemorph.wire.base import Count, Seconds, WireModel
from pipemorph.wire.messages import DirectiveEnvelope, LinkHealthReport
from pipemorph.wire.samples import DeviceClock
from pipemorph.wire.states import RouteTimes

MOST_PACES, MOST_BUCKETS = 4096, 1024


class Pace(WireModel):
    """Seconds of F, B and W of one microbatch of a stage in one column: the median of the newest
    iterations. ``settled``: of as many as there are in a median."""

    stage: Count
    column: Count
    seconds: Seconds
    settled: bool = False
    clock: DeviceClock | None = None


class RouteBases(WireModel):
    """Normal wire times of a part's directions on one route: how many are in each bucket, see
    :func:`~pipemorph.control.observe.link_book.bucket`."""

    route: Annotated[str, Field(max_length=16)]
    counts: Annotated[dict[int, Count], Field(max_length=MOST_BUCKETS)]


class UsualReduction(WireModel):
    """What the gradient reduction of one group would usually take, judged by the others."""

    stage: Count
    replica: Count
    seconds: Seconds


class PartReport(LinkHealthReport):
    """What has changed in one part of a job. Op times of fused backwards are as measured, and
    ``iteration`` and ``applied_plan_version`` are those of the part's first rank."""

    part: Count
    late: list[Count] = Field(default_factory=list, max_length=4096)
    """Links with directions that are late now and may turn slow soon."""
    late_reductions: Count = 0
    """Groups that were late in their newest iteration."""
    bases: list[RouteBases] = Field(default_factory=list, max_length=4)
    paces: list[Pace] = Field(default_factory=list, max_length=MOST_PACES)


class PartAnswer(DirectiveEnvelope):
    """What the job's agent tells a part. ``slow``: directions of the part that were slow when last
    heard of, given when it connects. Another ``memory`` than before: all has to be told again."""

    fresh: bool = False
    """Whether the job's agent has not been told yet what its host remembers."""
    links_late: bool = False
    """Whether most links of the job are late at this moment."""
    reductions_late: bool = False
    usual: RouteTimes = Field(default_factory=dict)
    """Normal wire time of the job's directions, per route; those that have changed."""
    reductions: list[UsualReduction] = Field(default_factory=list)
    """Given for groups of the part that take much longer than others."""
