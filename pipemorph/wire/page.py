"""Messages between a job's agent and the process of the live page, over a Unix socket of the pod.

The process connects, and the agent sends :class:`PageFeed` messages: first a :class:`PageHello`,
then each report with the whole state first, plans, and ops as long as :class:`OpsWanted` requests
them. A message is a 4-byte big-endian length and that many bytes of JSON.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pipemorph.wire.base import Count, Seconds, WireModel
from pipemorph.wire.messages import HandIn, LinkHealthReport
from pipemorph.wire.ops import OpsTrace
from pipemorph.wire.samples import IterationSample

MOST_MESSAGE_BYTES = 16 << 20
MOST_STAGES = 1024
"""Stages of one column."""


class PageHello(WireModel):
    """First message of an agent. ``job_file``: the job that its ranks run, as JSON; ``iterations``:
    the newest that were reported."""

    attempt: Count
    job_file: str
    iterations: list[IterationSample]


class PageFeed(WireModel):
    """Message of the agent. One of the fields is set."""

    hello: PageHello | None = None
    report: LinkHealthReport | None = None
    plan: HandIn | None = None
    ops: Annotated[list[OpsTrace], Field(max_length=MOST_STAGES)] = Field(default_factory=list)


class OpsWanted(WireModel):
    """Message of the page: ops of ``column`` are wanted for so many seconds from now."""

    column: Count
    seconds: Seconds
