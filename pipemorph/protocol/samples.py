"""Telemetry that ranks send to their job's agent. Times are seconds, sizes are bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import ConfigDict, Field, PlainSerializer

from pipemorph.planning.ir import Route
from pipemorph.protocol.message_base import Count, ProtocolModel, Seconds

MeanCost = Annotated[float, Field(gt=0, le=1e31, allow_inf_nan=False)]
"""Mean cost of microbatches, in the unit of the script."""


Fraction = Annotated[float, Field(ge=0, le=1)]
WorkSpread = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class FittedCosts(ProtocolModel):
    """Cost of a microbatch as the trainer has fitted it to op times of stage 0: ``base + per_token
    · tokens + per_square · Σ length²``, in seconds of F, B and W. Errors are relative, root mean
    squares, as fractions.
    """

    base: Seconds
    per_token: Seconds
    per_square: Seconds
    error: Fraction
    """Error of the model."""
    equal_error: Fraction
    """Error of one cost for all microbatches: how much there is to explain."""
    microbatches: Annotated[int, Field(ge=1)]
    """Number of measured microbatches."""

    def format_text(self) -> str:
        """Format as ``costs are 1.2e-03 s + 3.4e-06 s per token + 5.6e-09 s per squared length,
        fitted to 64 microbatches with an error of 2.1% (equal costs: 41%)``."""
        terms = (self.base, ""), (self.per_token, " per token"), (
            self.per_square, " per squared length"
        )  # fmt: skip
        text = " + ".join(f"{value:.2g} s{each}" for value, each in terms if value)
        return (
            f"costs are {text}, fitted to {self.microbatches} microbatches with an error of"
            f" {self.error:.1%} (equal costs: {self.equal_error:.0%})"
        )


class WireTime(ProtocolModel):
    """Distribution of wire times in a window: from the first byte sent to complete reception.

    Excludes queueing before the first byte; includes delays injected by a fault trace. ``count``:
    messages in the window; ``exact``: those whose arrival was observed as it happened. If ``exact``
    is above 0 the values describe only those messages. If it is 0 they are upper bounds: the
    receiver was computing when the message arrived, so the true time is shorter by at most one
    receiver op.
    """

    count: Count
    exact: Count
    min: Seconds
    p50: Seconds
    p99: Seconds
    mean: Seconds


class LinkSample(ProtocolModel):
    """Measurements of a link direction in a window."""

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
    """Median time that a message waited in its queue before its first byte was sent."""
    spacing: Seconds | None = None
    """Shortest time between consecutive arrivals of which the second message had waited in its
    queue; None if none had. A link with enough queues and such waits is narrow."""
    latency: Seconds | None = None
    """Shortest time from the start of a message until a few bytes sent with it on the same path
    arrived; None if not measured. If the wire time is much longer, the link is narrow."""
    waited: Seconds | None = None
    """Total time for which threads of the receiver waited for a processor in this window; None if
    unknown. A message may seem late by as much."""
    sender_waited: Seconds = 0.0
    """Total time for which threads of the sender waited for a processor, from its messages."""
    sender_inflated: bool = False
    """True if the newest ops of the sender took longer than they can."""
    failed_over: bool = False
    """True if the link's direct route broke, so that its messages are delegated under any plan."""
    rtt_min: Seconds | None = None
    """Shortest round trip on the engine's control connection; None if not measured."""
    transfer: Seconds | None = None
    """Time for which a message occupied the link, by sizes that differ; None if unknown."""
    slack: Seconds | None = None
    """Most time by which an upper bound may be too long; None: the longest op of the receiver."""


class DeviceClockRate(ProtocolModel):
    """Clock of a stage's device in MHz, now and at most, and the causes that limit it."""

    mhz: Count
    most_mhz: Count
    held_by: tuple[Annotated[str, Field(min_length=1, max_length=32)], ...] = Field(
        (), max_length=8
    )
    """Causes that limit the clock: ``power cap``, ``heat``, …"""


class StageProfile(ProtocolModel):
    """Measured op times of a stage, seconds, mean over the last iteration.

    ``backward_weight`` is 0 while the stage runs fused backwards. ``split``: the way in which the
    stage runs B and W separately, if it can.
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
    """Bytes that a microbatch holds between its F and its W, if measured."""
    input_bytes: Count | None = None
    """Bytes that a microbatch holds if only the inputs of its F are retained, to run it again; None
    if the stage cannot."""
    offload_copy: Seconds | None = None
    """Time to copy the activations to host memory, or back, if measured. ``forward`` and
    ``backward_input`` exclude copies, and forwards that run again."""
    fused_backward: Seconds | None = None
    """Time of one fused backward (BW), if measured in addition to separate B and W."""
    crowding: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] | None = None
    """Number of the job's ranks that compute on this host's processors over the number of these;
    None for a stage that does not compute on them."""
    clock: DeviceClockRate | None = None
    """Clock of the device; None without a device, or if its driver does not report it."""
    cost: MeanCost | None = None
    """Mean cost of the microbatches, in the unit of the script; None if it gave none. Op times are
    those of a microbatch of this cost."""
    work_error: WorkSpread = 0.0
    """Relative standard error of the op times, as far as microbatches differ in work beyond their
    costs."""


@dataclass(frozen=True)
class SlowestEdge:
    """Slowest edge of a group's ring, measured with a message of the size of a reduction's chunk.

    ``at``: index in the group of the rank at which the edge begins. ``seconds``: half of a round
    trip. ``usual``: the least that most edges of the ring have taken.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    at: Count
    seconds: Seconds
    usual: Seconds


class ReductionSample(ProtocolModel):
    """Reduction of a stage's gradients over the ranks with other data, in an iteration.

    ``seconds`` and ``exposed`` are the least of all ranks of the group, and so equal for all: those
    of the rank that came last, which waited for the network alone. Only one rank of a group
    reports to the ingest.
    """

    stage: Count
    replica: Count = 0
    group: Count = 0
    """First column of the group: that of the rank that reports."""
    iteration: Count
    bytes: Count
    """Bytes of this rank's gradients."""
    buckets: Count
    seconds: Seconds
    """Time during which gradients were in transit."""
    exposed: Seconds
    """Part of ``seconds`` after the last op of the rank."""
    waited: Seconds
    """Exposed time of this rank, which may include waiting for others of the group."""
    slowest: SlowestEdge | None = None
    """Slowest edge, if the edges were measured."""


class RailSample(ProtocolModel):
    """State and driver counters of one RDMA port of a stage's host.

    An unreadable value is "unavailable": a 0 would seem healthy. Counters never reset while the
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
    """Counters that the driver has, by their names in sysfs."""
    used: bool | None = None
    """True if the engine uses the port as a rail; None without an engine."""


class TransportSample(ProtocolModel):
    """State of a link in the engine, at the end that sends in ``direction``."""

    link: Count
    replica: Count = 0
    direction: Literal["forward", "backward"]
    agreed: Literal["tcp", "shm", "rdma"]
    """Transport that both ends agreed on when they connected."""
    transport: Literal["tcp", "shm", "rdma"]
    """Transport in use now: tcp if a link over rdma fell back."""
    fallbacks: Count
    failbacks: Count
    """Number of times that the last rail was lost (``fallbacks``), and that a rail recovered."""
    reconnects: Count
    """Number of times that the control connection was lost and restored."""
    trouble: Annotated[str, Field(max_length=200)] = ""
    """Reason of the engine why the rails are not in use; empty while they are."""


def _serialize_loss(loss: float) -> float | str:
    if math.isfinite(loss):
        return loss
    return "NaN" if math.isnan(loss) else "Infinity" if loss > 0 else "-Infinity"


IdleCause = Literal[
    "gc", "data", "checkpoint", "reduction", "link", "work", "stage", "bubble", "other"
]
"""Cause of idle time, see :mod:`pipemorph.diagnose.analysis.idle_time`."""
IDLE_CAUSES: tuple[IdleCause, ...] = get_args(IdleCause)
IdleSeconds = dict[IdleCause, Annotated[float, Field(ge=-1e7, le=1e7, allow_inf_nan=False)]]
"""Idle seconds of a rank in an iteration by cause, the mean over ranks. Below 0 only where the
model of an iteration takes longer than the iteration did."""


class IterationSample(ProtocolModel):
    """Finished iteration, as measured by rank 0."""

    index: Count
    seconds: Seconds
    loss: Annotated[float, PlainSerializer(_serialize_loss, when_used="json")] | None
    """Loss. JSON has no infinite numbers, so there it is ``"NaN"``, ``"Infinity"`` or
    ``"-Infinity"`` if not finite."""
    plan_version: Count
    bubble_fraction: Annotated[float, Field(ge=0, le=1)]
    barrier: bool | None = None
    """True if all stages waited for each other between this iteration and the next one, as for the
    gradient norm of all stages; None if unknown."""
    ops_seconds: Seconds | None = None
    """Time from the first op of any rank to the end of the last one. The rest of ``seconds`` is
    optimizer, gradient norm and data loading."""
    gc_inside: Seconds | None = None
    """Time for which Python's garbage collector paused the rank that it paused longest, at any time
    in the iteration; None if unknown."""
    gc_between: Seconds | None = None
    """Time for which it paused the ranks at the end of the iteration, on all ranks at once."""
    cost: MeanCost | None = None
    """Mean cost of the microbatches, of the column with the most work; None if the script gives
    no costs."""
    work_spread: WorkSpread | None = None
    """Standard deviation of the microbatches' work over its mean, by their op times on all stages;
    None if unknown."""
    unexplained_spread: WorkSpread | None = None
    """Standard deviation of the work per cost, over its mean; ``work_spread`` without costs."""
    fitted_costs: FittedCosts | None = None
    """Costs that the trainer has fitted with the op times of this iteration, for later ones."""

    idle: IdleSeconds | None = None
    """Idle time by cause, from the end of the iteration before to the end of this one, see
    :class:`~pipemorph.protocol.op_traces.RankTimes`; None for one that was not sampled."""

    @property
    def diverged(self) -> bool:
        """True if the loss is NaN or infinite."""
        return self.loss is not None and not math.isfinite(self.loss)


def average_idle_time(samples: Iterable[IterationSample]) -> dict[str, float]:
    """Average the idle seconds by cause over the sampled iterations; empty without any."""
    sampled = [sample.idle for sample in samples if sample.idle is not None]
    return {
        cause: sum(idle.get(cause, 0.0) for idle in sampled) / len(sampled)
        for cause in (IDLE_CAUSES if sampled else ())
    }
