"""States that a job's agent derives from the telemetry of its ranks, as input of decisions and
status. They travel in reports, so all values are bounded. Times are seconds, sizes are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field

from pipemorph.errors import one_line
from pipemorph.planning.analysis.partition import spread_equal_layers
from pipemorph.protocol.message_base import Count, ProtocolModel, Seconds, WallClock
from pipemorph.protocol.samples import DeviceClockRate, MeanCost, SlowestEdge, WorkSpread
from pipemorph.spec.mesh import MeshShape

MOST_LISTED = 32
"""Most ports, links or stages that a view lists."""
FULL_CLOCK = 0.95
"""Fraction of a device's highest clock from which the clock is no reason to be slow."""
MOST_SLOW = 512
"""Most slow link directions in a message."""

Direction = Literal["forward", "backward"]
Positive = Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
# Texts of peers, which terminals and pages show: none can contain a line break.
PRINTABLE = AfterValidator(lambda text: text if text.isprintable() else one_line(text, len(text)))
Device = Annotated[str, Field(min_length=1, max_length=64), PRINTABLE]
Word = Annotated[str, Field(max_length=32), PRINTABLE]
Text = Annotated[str, Field(max_length=500), PRINTABLE]
RouteTimes = Annotated[dict[Annotated[str, Field(max_length=16)], Seconds], Field(max_length=4)]

STRICT = ConfigDict(extra="forbid")
"""Configuration of the dataclasses below, for reading a report."""


class Health(StrEnum):
    """Health of a link. UNKNOWN: no samples, too few for a normal wire time, or no recent ones."""

    HEALTHY = "healthy"
    SLOW = "slow"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class LinkState:
    """State of a link: of one of its directions in one column, or of the slowest of several. Times
    in seconds, one way."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    link: Count
    health: Health
    delay: Seconds = 0.0
    """Excess over the normal wire time; 0 unless slow."""
    wire_time: Seconds = 0.0
    """Current one-way time of a message: normal wire time plus delay."""
    transfer: Seconds = 0.0
    """Part of the wire time during which a message occupies the link, if that is the larger part:
    messages are sent one at a time, so more queues do not help. 0 if unknown."""
    confidence: Share = 0.0
    """Probability that ``health`` is right."""
    in_doubt: bool = False
    """True if slow, but the newest windows suggest recovery or show hardly any delay: the state is
    about to change."""
    since_iteration: Count | None = None
    """Iteration of the first window that showed this state."""
    replica: Count = 0
    direction: Direction = "forward"
    """Column (see :class:`~pipemorph.spec.mesh.MeshShape`) and direction with the longest wire
    time."""
    recent: Annotated[tuple[Seconds, ...], Field(max_length=256)] = ()
    """Delays of the newest windows, oldest first, if they vary; else empty. See
    :attr:`~pipemorph.detection.detector.DelayDetector.recent_delays`."""
    failed_over: bool = False
    """True if its direct route broke, so that it is delegated under any plan."""
    bases: RouteTimes = field(default_factory=dict)
    """Normal wire time per route, for the detector of a restarted rank."""
    route: Word = ""
    transport: Word = ""
    """Route and transport of the newest messages; empty if the state is of several directions."""
    column: Text = ""
    """Name of the column for messages, set by the host; empty if there is only one."""
    since: WallClock | None = field(default=None, compare=False)
    """Wall clock of the host when it found the link slow. Not part of the state."""

    @property
    def is_late(self) -> bool:
        """True if slow by at least half a millisecond; False in a pause of the delay."""
        return self.health is Health.SLOW and self.delay >= 0.0005

    @property
    def key(self) -> tuple[int, int, Direction]:
        """Link, column and direction."""
        return self.link, self.replica, self.direction

    @property
    def name(self) -> str:
        """Name such as ``link 2 of replica 1, tensor 0``."""
        return f"link {self.link}{' of ' if self.column else ''}{self.column}"

    def without_windows(self) -> LinkState:
        """State without its newest windows, for records and snapshots."""
        return replace(self, recent=(), column="", since=None)


class StageState(ProtocolModel):
    """Op times of a stage: medians of the newest iterations, of its slowest column."""

    stage: Count
    forward: Seconds
    backward_input: Seconds
    backward_weight: Seconds
    fused_backward: Seconds | None = None
    """Time of a fused backward; None: not measured in all columns, or no shorter than its parts."""
    activation_bytes: Count | None = None
    input_bytes: Count | None = None
    """Largest of any column, like ``activation_bytes``."""
    offload_copy: Seconds | None = None
    peak_memory: Count = 0
    """Newest value of the column with the most."""
    crowding: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    """Value of the most crowded host, see :class:`~pipemorph.protocol.StageProfile`."""
    replica: Count = 0
    """Column of the rank, in its report."""
    profiles: Count = 0
    """Number of iterations in the medians, in a rank's report."""
    recent: Seconds = 0.0
    """Sum of F, B and W, median of the newest three iterations, in a rank's report."""
    clock: DeviceClockRate | None = None
    """Clock of the rank's device, in its report."""
    cost: MeanCost | None = None
    """Mean cost of the microbatches that the op times are for, in a rank's report; None if the
    script gives no costs."""
    work_error: WorkSpread = 0.0
    """Relative standard error of the op times of one iteration by differences in work, in a rank's
    report."""

    @property
    def pace(self) -> float:
        """Recent seconds of F, B and W of a microbatch. If ranks share processors, pauses of
        several iterations are common, so the median of more iterations counts if it is shorter."""
        usual = self.forward + self.backward_input + self.backward_weight
        recent = self.recent or usual
        return recent if self.crowding <= 1 else min(recent, usual)


@dataclass(frozen=True)
class ReductionHealth:
    """Gradient reduction of a group. Times in seconds, of an iteration.

    ``exposed``: the part after the last op of the stage. ``normal``: usual ``seconds``; None while
    unknown. ``where``: the group among those of its stage; empty if it is the only one.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    stage: Count
    replica: Count
    where: Text
    slow: bool
    seconds: Seconds
    normal: Seconds | None
    exposed: Seconds
    bytes: Count
    slowest: SlowestEdge | None = None
    """Slowest edge of its ring as last measured; None if not measured."""

    @property
    def name(self) -> str:
        """Name such as ``gradient reduction of stage 3``."""
        return f"gradient reduction of stage {self.stage}{', ' if self.where else ''}{self.where}"

    @property
    def delay(self) -> float:
        """Seconds above normal; 0 unless slow."""
        return max(0.0, self.seconds - (self.normal or 0.0)) if self.slow else 0.0

    def to_record(self) -> dict[str, Any]:
        """JSON object for report.json."""
        return asdict(self)


class RailHealth(StrEnum):
    """State of all rails together. UNKNOWN: some ports were not reported or cannot be read."""

    HEALTHY = "healthy"
    CONGESTED = "congested"
    FAULTY = "faulty"
    NONE = "none"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class RailProblem:
    """Problem of a port. ``state``: as reported by its driver."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    stage: Count
    replica: Count
    device: Device
    port: Count
    state: Word
    what: Text

    def format_text(self, mesh: MeshShape) -> str:
        """Text such as ``stage 2 mlx5_0/1: is DOWN``."""
        column = mesh.format_column_name(self.replica)
        stage = f"stage {self.stage}{' of ' if column else ''}{column}"
        return f"{stage} {self.device}/{self.port}: {self.what}"


@dataclass(frozen=True)
class RailsView:
    """Rails of a job. ``expected``: number of ports of the ranks, None until every rank has counted
    its own. ``faulty`` and ``congested`` list at most :data:`MOST_LISTED` ports."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    health: RailHealth = RailHealth.UNKNOWN
    ports: Count = 0
    expected: Count | None = None
    faulty_count: Count = 0
    faulty: Annotated[tuple[RailProblem, ...], Field(max_length=MOST_LISTED)] = ()
    congested_count: Count = 0
    congested: Annotated[tuple[RailProblem, ...], Field(max_length=MOST_LISTED)] = ()
    unreadable: Count = 0
    """Ports without a state, or without a readable counter."""
    silent: Count = 0
    """Ports without a recent report, see
    :data:`~pipemorph.detection.rail_monitor.SILENT_SECONDS`."""


@dataclass(frozen=True)
class TransportFallback:
    """End of an engine link that does not use the agreed transport. ``direction``: the one in which
    this end sends; ``trouble``: the engine's reason."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    link: Count
    replica: Count
    direction: Direction
    agreed: Word
    transport: Word
    fallbacks: Count
    trouble: Text

    def format_text(self, mesh: MeshShape) -> str:
        """Text such as ``link 2 fell back from rdma to tcp (rxe0 port 1: port error)``."""
        column = mesh.format_column_name(self.replica)
        where = f"link {self.link}{' of ' if column else ''}{column}"
        why = f" ({self.trouble})" if self.trouble else ""
        return f"{where} fell back from {self.agreed} to {self.transport}{why}"


@dataclass(frozen=True)
class TransportsView:
    """Transports of a job's links.

    ``links``: the transport of each link, such as ``rdma``; ``rdma+tcp`` if replicas or directions
    differ; empty if unknown. Counts are over all ends since they were made.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    links: Annotated[tuple[Word, ...], Field(max_length=4096)] = ()
    fallen_count: Count = 0
    fallen: Annotated[tuple[TransportFallback, ...], Field(max_length=MOST_LISTED)] = ()
    fallbacks: Count = 0
    failbacks: Count = 0


@dataclass(frozen=True)
class Straggler:
    """Slow stage. ``column``: None if the stage is slow in all columns. Seconds of F, B and W of a
    microbatch: ``seconds`` now, ``usual`` of its peers, or of its own past. ``clock``: of its
    device, the lowest of several; None if unknown."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    stage: Count
    column: Count | None
    seconds: Seconds
    usual: Positive
    clock: DeviceClockRate | None = None

    @property
    def ratio(self) -> float:
        """Time now over usual time."""
        return self.seconds / self.usual

    def format_text(self, mesh: MeshShape) -> str:
        """Text such as ``stage 2 of replica 1 computes 1.4 times as long as its peers: its clock is
        1.0 of 2.0 GHz (power cap)``."""
        name = mesh.format_column_name(self.column) if self.column is not None else ""
        usual = "before" if self.column is None else "its peers"
        return (
            f"stage {self.stage}{' of ' if name else ''}{name} computes {self.ratio:.1f} times as"
            f" long as {usual}{_describe_clock(self.clock)}"
        )


def _describe_clock(clock: DeviceClockRate | None) -> str:
    """Phrase about a clock that explains slowness; empty if it does not."""
    if clock is None or (not clock.held_by and clock.mhz >= FULL_CLOCK * clock.most_mhz):
        return ""
    why = f" ({', '.join(clock.held_by)})" if clock.held_by else ""
    # Rounded, so that the message does not change with every profile.
    return f": its clock is {clock.mhz / 1e3:.1f} of {clock.most_mhz / 1e3:.1f} GHz{why}"


class SuggestedSplit(NamedTuple):
    """Suggested layers per stage, and the fraction of time that the slowest stage saves."""

    layers: tuple[int, ...]
    gain: float

    def format_text(self) -> str:
        """Text such as ``with 5, 3, 4, 4 layers the slowest stage would take 21% less``."""
        layers = ", ".join(map(str, self.layers))
        return f"with {layers} layers the slowest stage would take {self.gain:.0%} less"


@dataclass(frozen=True)
class StragglersView:
    """Slow stages, slowest first, at most :data:`MOST_LISTED`. ``known``: all were measured."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    known: bool = False
    count: Count = 0
    slowest: Annotated[tuple[Straggler, ...], Field(max_length=MOST_LISTED)] = ()
    paces: Annotated[tuple[Positive, ...], Field(max_length=4096)] = ()
    """Seconds of F, B and W of a microbatch, by stage, of its median column; empty if unknown."""

    def suggest_split(self, layers: int | None, held: Sequence[int] = ()) -> SuggestedSplit | None:
        """Suggest a split of ``layers`` equal layers over stages of these speeds. ``held``: number
        of layers on each stage now; empty: evenly many. All columns of a stage have equal layers,
        and an iteration waits for the slowest column, so its speed counts. None if nothing is slow,
        the slowest stage cannot be faster, or the layers are unknown."""
        if layers is None or not self.paces or not self.slowest:
            return None
        paces = [*self.paces]
        for slow in self.slowest:
            paces[slow.stage] = max(paces[slow.stage], slow.seconds)
        held = held or (layers // len(paces),) * len(paces)
        per_layer = [pace / count for pace, count in zip(paces, held, strict=True)]
        counts = spread_equal_layers(layers, per_layer, [0.0] * len(paces))
        slowest = max(n * took for n, took in zip(counts, per_layer, strict=True))
        gain = 1 - slowest / max(paces)
        return SuggestedSplit(counts, gain) if gain > 0.01 else None
