"""What ranks measure: the telemetry that goes to their job's agent, which concludes states from it.

Times are seconds, sizes are bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, PlainSerializer

from pipemorph.planning.ir import Route
from pipemorph.wire.base import Count, Seconds, WireModel


class WireTime(WireModel):
    """Distribution of wire times in one window: from the first byte sent to complete reception.

    Excludes queueing before the first byte; includes delays injected by a fault trace. ``count``:
    messages in the window; ``exact``: those whose arrival was observed as it happened. If ``exact``
    is above 0 the values describe only those messages; if 0 they are upper bounds (the receiver was
    computing when the message arrived, so the true time is shorter by at most one receiver op).
    """

    count: Count
    exact: Count
    min: Seconds
    p50: Seconds
    p99: Seconds
    mean: Seconds


class LinkSample(WireModel):
    """Measurements of one direction of one link in one window."""

    link: Count
    replica: Count = 0
    direction: Literal["forward", "backward"]
    route: Route
    transport: Literal["gloo", "nccl", "tcp", "shm", "rdma"]
    iteration: Count
    """Iteration in which the window's last message was sent."""
    bytes: Count
    """Total payload of the window's messages."""
    wire: WireTime
    queue_p50: Seconds
    """Median time a message waited in its queue before the first byte left."""
    spacing: Seconds | None = None
    """Shortest time between two arrivals in a row of which the second message had to wait in its
    queue; None if none had. A link with enough queues and such waits is narrow."""
    latency: Seconds | None = None
    """Shortest time from the start of a message until a few bytes that left with it arrived, if
    they take the same way; None if not measured. A wire time that is much longer is that of a
    narrow link."""
    waited: Seconds | None = None
    """Time for which threads of the receiver have waited for a processor in this window, added up;
    None if unknown. A message may seem late by as much."""
    sender_waited: Seconds = 0.0
    """The same of the sender, as its messages said."""
    sender_inflated: bool = False
    """Whether the newest ops of the sender took longer than they can."""
    failed_over: bool = False
    """Whether the link's direct route broke, so that its messages are delegated whatever plans
    say."""
    rtt_min: Seconds | None = None
    """Shortest round trip on the engine's control connection; None if not measured."""


class DeviceClock(WireModel):
    """The clock of a stage's device in MHz, now and at most, and what holds it down."""

    mhz: Count
    most_mhz: Count
    held_by: tuple[Annotated[str, Field(min_length=1, max_length=32)], ...] = Field(
        (), max_length=8
    )
    """``power cap``, ``heat``, …"""


class StageProfile(WireModel):
    """Measured op times of one stage, seconds, mean over the last iteration.

    ``backward_weight`` is 0 while the stage runs fused backwards. ``split``: whether and how the
    stage can run B and W separately.
    """

    stage: Count
    replica: Count = 0
    forward: Seconds
    backward_input: Seconds
    backward_weight: Seconds
    split: Literal["deferred", "fused", "emulated"]
    peak_memory: Count
    """Bytes: device peak on CUDA, resident-set peak on CPU."""
    activation_bytes: Count | None = None
    """Bytes one microbatch holds between its F and its W, if measured."""
    input_bytes: Count | None = None
    """Bytes that one microbatch holds if only what its F began with is kept, to run it again; None
    if the stage cannot."""
    offload_copy: Seconds | None = None
    """Time to copy the activations to host memory, or back, if measured. ``forward`` and
    ``backward_input`` exclude copies, and forwards that run again."""
    fused_backward: Seconds | None = None
    """Time of one fused backward (BW), if measured in addition to separate B and W."""
    crowding: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = None
    """Ranks of the job that compute on this host's processors, over the number of those; None for
    a stage that does not compute on them."""
    clock: DeviceClock | None = None
    """None for a stage without device, and where its driver does not say."""


@dataclass(frozen=True)
class SlowestEdge:
    """The slowest edge of a group's ring, as a message of the size of a reduction's chunk found it.

    ``at``: from this rank of the group, numbered in its order, to the next. ``seconds``: half of a
    round trip. ``usual``: the least that most edges of the ring have taken.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    at: Count
    seconds: Seconds
    usual: Seconds


class ReductionSample(WireModel):
    """How the gradients of a stage were reduced over the ranks with other data, in one iteration.

    ``seconds`` and ``exposed`` are the least of all ranks of the group, and so the same for all:
    those of the rank that came last, which waited for the network alone. Only one rank of a group
    reports to the ingest.
    """

    stage: Count
    replica: Count = 0
    group: Count = 0
    """First column of the group: that of the rank that reports."""
    iteration: Count
    bytes: Count
    """Gradients of this rank."""
    buckets: Count
    seconds: Seconds
    """Time during which gradients were under way."""
    exposed: Seconds
    """Of it, after the last op of the rank."""
    waited: Seconds
    """``exposed`` of this rank, which may have waited for others of the group."""
    slowest: SlowestEdge | None = None
    """If the edges were measured."""


class RailSample(WireModel):
    """State and driver counters of one RDMA port of a stage's host.

    An unreadable value is "unavailable": a 0 would look healthy. Counters never reset while the
    driver is loaded, so health depends on their increase.
    """

    stage: Count
    replica: Count = 0
    device: Annotated[str, Field(min_length=1, max_length=64)]
    port: Annotated[int, Field(ge=1, le=255)]
    state: Annotated[str, Field(max_length=32)]
    """ACTIVE, DOWN, INIT, ARMED, … or "unavailable"."""
    counters: dict[
        Annotated[str, Field(min_length=1, max_length=64)], Count | Literal["unavailable"]
    ] = Field(max_length=64)
    """By their names in sysfs; without those that the driver lacks."""
    used: bool | None = None
    """Whether the engine uses it as a rail; None without an engine."""


class TransportSample(WireModel):
    """The engine's state of one link, at the end that sends in ``direction``."""

    link: Count
    replica: Count = 0
    direction: Literal["forward", "backward"]
    agreed: Literal["tcp", "shm", "rdma"]
    """Transport that both ends agreed on when they connected."""
    transport: Literal["tcp", "shm", "rdma"]
    """Transport in use now: tcp if a link over rdma fell back."""
    fallbacks: Count
    failbacks: Count
    """``fallbacks``: times the last rail was lost; ``failbacks``: times a rail recovered."""
    reconnects: Count
    """Times the control connection was lost and restored."""
    trouble: Annotated[str, Field(max_length=200)] = ""
    """The engine's reason why the rails are not in use; empty while they are."""


def _in_json(loss: float) -> float | str:
    if math.isfinite(loss):
        return loss
    return "NaN" if math.isnan(loss) else "Infinity" if loss > 0 else "-Infinity"


class IterationSample(WireModel):
    """One finished iteration, as measured by rank 0."""

    index: Count
    seconds: Seconds
    loss: Annotated[float, PlainSerializer(_in_json, when_used="json")] | None
    """In JSON, which has no such numbers, ``"NaN"``, ``"Infinity"`` or ``"-Infinity"`` for a loss
    that is not finite."""
    plan_version: Count
    bubble_fraction: Annotated[float, Field(ge=0, le=1)]
    barrier: bool | None = None
    """Whether all stages waited for each other between this iteration and the next one, as for the
    gradient norm of all stages; None if unknown."""
    ops_seconds: Seconds | None = None
    """From the first op of any rank to the end of the last one. The rest of ``seconds`` is the
    optimizer, the gradient norm, data loading."""

    @property
    def diverged(self) -> bool:
        """Whether the loss is NaN or infinite."""
        return self.loss is not None and not math.isfinite(self.loss)
