"""Messages between a job's agent and the process of the live page, over a Unix socket of the pod.

The process connects, and the agent sends :class:`PageFeed` messages: a :class:`PageHello`, a report
of the whole state, then each report, plans, and ops while :class:`OpsWanted` requests them. A
message is a 4-byte big-endian length and that many bytes of JSON.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pipemorph.protocol.agent_messages import LinkHealthReport, SnapshotMessage
from pipemorph.protocol.message_base import Count, ProtocolModel, Seconds
from pipemorph.protocol.op_traces import OpsTrace
from pipemorph.protocol.samples import IterationSample

MOST_MESSAGE_BYTES = 16 << 20
MOST_STAGES = 1024
"""Most stages of a column."""


class PageHello(ProtocolModel):
    """First message of an agent. ``job_file``: the job that its ranks run, as JSON; ``iterations``:
    newest reported ones."""

    attempt: Count
    job_file: str
    iterations: list[IterationSample]


class PageFeed(ProtocolModel):
    """Message of the agent, with one of the fields set."""

    hello: PageHello | None = None
    report: LinkHealthReport | None = None
    plan: SnapshotMessage | None = None
    ops: Annotated[list[OpsTrace], Field(max_length=MOST_STAGES)] = Field(default_factory=list)


class OpsWanted(ProtocolModel):
    """Message of the page: request for ops of ``column`` for ``seconds`` from now."""

    column: Count
    seconds: Seconds
