"""What a job's agent concludes from the telemetry of its ranks: the states that decisions and
status are made of.

Plain values that also travel in reports, so all of them are bounded. Times are seconds, sizes are
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field

from pipemorph.api.mesh import MeshShape
from pipemorph.errors import one_line
from pipemorph.planning.analysis.partition import spread_layers
from pipemorph.wire.base import Count, Seconds, WallClock, WireModel
from pipemorph.wire.samples import DeviceClock, SlowestEdge

SHOWN = 32
"""Most ports, links or stages that a view lists."""
FULL_CLOCK = 0.95
"""Part of a device's highest clock from which it is no reason to be slow."""
MOST_SLOW = 512
"""Most slow directions of links in one message."""

Direction = Literal["forward", "backward"]
Positive = Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
# Texts of peers, which terminals and pages show: none can add a line of its own to others'.
PRINTABLE = AfterValidator(lambda text: text if text.isprintable() else one_line(text, len(text)))
Device = Annotated[str, Field(min_length=1, max_length=64), PRINTABLE]
Word = Annotated[str, Field(max_length=32), PRINTABLE]
Text = Annotated[str, Field(max_length=500), PRINTABLE]
RouteTimes = Annotated[dict[Annotated[str, Field(max_length=16)], Seconds], Field(max_length=4)]

STRICT = ConfigDict(extra="forbid")
"""Of the dataclasses below, when a report is read."""


class Health(StrEnum):
    """Health of a link. UNKNOWN: no samples, too few to know its normal wire time, or no recent
    ones."""

    HEALTHY = "healthy"
    SLOW = "slow"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class LinkState:
    """State of one link: of one of its directions in one column, or of several of these, as the
    slowest of them. Times in seconds, one way."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    link: Count
    health: Health
    delay: Seconds = 0.0
    """Above the normal wire time; 0 unless slow."""
    wire_time: Seconds = 0.0
    """Current one-way time of a message: normal wire time plus delay."""
    transfer: Seconds = 0.0
    """Part of the wire time during which a message occupies the link, if that is the larger part:
    messages are sent one at a time, so that more queues do not help. 0 if unknown."""
    confidence: Share = 0.0
    """Probability that ``health`` is right."""
    in_doubt: bool = False
    """Slow, but the newest windows suggest recovery, or show hardly any delay: it is about to
    change."""
    since_iteration: Count | None = None
    """Iteration of the first window that showed this state."""
    replica: Count = 0
    direction: Direction = "forward"
    """Column (see :class:`~pipemorph.api.mesh.MeshShape`) and direction with the longest wire
    time."""
    recent: Annotated[tuple[Seconds, ...], Field(max_length=256)] = ()
    """Delays of the newest windows, oldest first, if they vary; else empty. See
    :attr:`~pipemorph.control.observe.detector.DelayDetector.recent`."""
    failed_over: bool = False
    """Whether its direct route broke, so that it is delegated whatever plans say."""
    bases: RouteTimes = field(default_factory=dict)
    """Normal wire time per route, for the detector of a rank that starts anew."""
    route: Word = ""
    transport: Word = ""
    """Of the newest messages; empty where several directions are one state."""
    column: Text = ""
    """The column's name for messages, set by the host; empty if there is only one."""
    since: WallClock | None = field(default=None, compare=False)
    """Wall clock of the host when it was found to be slow. No part of the state."""

    @property
    def is_late(self) -> bool:
        """Whether it is slow by a delay that is seen in milliseconds: in a pause it is not."""
        return self.health is Health.SLOW and self.delay >= 0.0005

    @property
    def key(self) -> tuple[int, int, Direction]:
        """Link, column and direction."""
        return self.link, self.replica, self.direction

    @property
    def name(self) -> str:
        """``link 2 of replica 1, tensor 0``."""
        return f"link {self.link}{' of ' if self.column else ''}{self.column}"

    def without_windows(self) -> LinkState:
        """The state without its newest windows, for records and snapshots."""
        return replace(self, recent=(), column="", since=None)


class StageState(WireModel):
    """Op times of one stage: medians of the newest iterations, of its slowest column."""

    stage: Count
    forward: Seconds
    backward_input: Seconds
    backward_weight: Seconds
    fused_backward: Seconds | None = None
    """None: not measured in every column, or no shorter than its parts."""
    activation_bytes: Count | None = None
    input_bytes: Count | None = None
    """The most of any column."""
    offload_copy: Seconds | None = None
    peak_memory: Count = 0
    """Newest of the highest column."""
    crowding: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    """Of the worst host, see :class:`~pipemorph.wire.StageProfile`."""
    replica: Count = 0
    """Of a rank's report: its column."""
    profiles: Count = 0
    """Of a rank's report: iterations in the medians."""
    recent: Seconds = 0.0
    """Of a rank's report: F, B and W together, median of the newest three iterations."""
    clock: DeviceClock | None = None
    """Of a rank's report: of its device."""

    @property
    def pace(self) -> float:
        """Seconds of F, B and W of one microbatch, of late. Where ranks share processors, pauses of
        several iterations are common: there the longer median counts, unless it is longer."""
        usual = self.forward + self.backward_input + self.backward_weight
        recent = self.recent or usual
        return recent if self.crowding <= 1 else min(recent, usual)


@dataclass(frozen=True)
class ReductionHealth:
    """The gradient reduction of one group. Times in seconds, of one iteration.

    ``exposed``: what follows the last op of the stage. ``normal``: usual ``seconds``; None while
    they are learned. ``where``: the group among those of its stage; empty if it is the only one.
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
    """Of its ring, when its edges were last measured; None: they were not."""

    @property
    def name(self) -> str:
        """``gradient reduction of stage 3``"""
        return f"gradient reduction of stage {self.stage}{', ' if self.where else ''}{self.where}"

    @property
    def delay(self) -> float:
        """Seconds above normal; 0 unless slow."""
        return max(0.0, self.seconds - (self.normal or 0.0)) if self.slow else 0.0

    def record(self) -> dict[str, Any]:
        """For report.json."""
        return asdict(self)


class RailHealth(StrEnum):
    """State of all rails together. UNKNOWN: some ports were not reported or cannot be read."""

    HEALTHY = "healthy"
    CONGESTED = "congested"
    SICK = "sick"
    NONE = "none"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class RailTrouble:
    """What is wrong with one port. ``state``: as its driver reports it."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    stage: Count
    replica: Count
    device: Device
    port: Count
    state: Word
    what: Text

    def text(self, mesh: MeshShape) -> str:
        """``stage 2 mlx5_0/1: is DOWN``"""
        column = mesh.column_name(self.replica)
        who = f"stage {self.stage}{' of ' if column else ''}{column}"
        return f"{who} {self.device}/{self.port}: {self.what}"


@dataclass(frozen=True)
class RailsView:
    """The rails of a job. ``expected``: number of ports that the ranks see, None until every rank
    has looked. ``sick`` and ``congested`` list at most :data:`SHOWN` ports."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    health: RailHealth = RailHealth.UNKNOWN
    ports: Count = 0
    expected: Count | None = None
    sick_count: Count = 0
    sick: Annotated[tuple[RailTrouble, ...], Field(max_length=SHOWN)] = ()
    congested_count: Count = 0
    congested: Annotated[tuple[RailTrouble, ...], Field(max_length=SHOWN)] = ()
    unreadable: Count = 0
    """Ports without a state, or without any counter that can be read."""
    silent: Count = 0
    """Ports without a report for longer than a while, see
    :data:`~pipemorph.control.observe.rail_health.SILENT_SECONDS`."""


@dataclass(frozen=True)
class FallenLink:
    """One end of an engine link that does not use the agreed transport. ``direction``: the one that
    this end sends; ``trouble``: the engine's reason."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    link: Count
    replica: Count
    direction: Direction
    agreed: Word
    transport: Word
    fallbacks: Count
    trouble: Text

    def text(self, mesh: MeshShape) -> str:
        """``link 2 fell back from rdma to tcp (rxe0 port 1: port error)``"""
        column = mesh.column_name(self.replica)
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
    fallen: Annotated[tuple[FallenLink, ...], Field(max_length=SHOWN)] = ()
    fallbacks: Count = 0
    failbacks: Count = 0


@dataclass(frozen=True)
class Straggler:
    """A slow stage. ``column``: None if the stage is slow in all columns. Seconds of F, B and W of
    one microbatch: ``seconds`` now, ``usual`` of its peers, or of its own past. ``clock``: of its
    device, of several the lowest; None if unknown."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    stage: Count
    column: Count | None
    seconds: Seconds
    usual: Positive
    clock: DeviceClock | None = None

    @property
    def ratio(self) -> float:
        return self.seconds / self.usual

    def text(self, mesh: MeshShape) -> str:
        """``stage 2 of replica 1 computes 1.4 times as long as its peers: its clock is 1.0 of 2.0
        GHz (power cap)``"""
        name = mesh.column_name(self.column) if self.column is not None else ""
        whom = "before" if self.column is None else "its peers"
        return (
            f"stage {self.stage}{' of ' if name else ''}{name} computes {self.ratio:.1f} times as"
            f" long as {whom}{_clock_phrase(self.clock)}"
        )


def _clock_phrase(clock: DeviceClock | None) -> str:
    """What the clock explains; empty if nothing."""
    if clock is None or (not clock.held_by and clock.mhz >= FULL_CLOCK * clock.most_mhz):
        return ""
    why = f" ({', '.join(clock.held_by)})" if clock.held_by else ""
    # Rounded, so that the message does not change with every profile.
    return f": its clock is {clock.mhz / 1e3:.1f} of {clock.most_mhz / 1e3:.1f} GHz{why}"


class Split(NamedTuple):
    """Layers per stage, and the share by which the slowest stage takes less time with them."""

    layers: tuple[int, ...]
    gain: float

    def text(self) -> str:
        """``with 5, 3, 4, 4 layers the slowest stage would take 21% less``"""
        layers = ", ".join(map(str, self.layers))
        return f"with {layers} layers the slowest stage would take {self.gain:.0%} less"


@dataclass(frozen=True)
class StragglersView:
    """The slowest first, at most :data:`SHOWN`. ``known``: whether every stage was measured."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    known: bool = False
    count: Count = 0
    slowest: Annotated[tuple[Straggler, ...], Field(max_length=SHOWN)] = ()
    paces: Annotated[tuple[Positive, ...], Field(max_length=4096)] = ()
    """Seconds of F, B and W of one microbatch of each stage, of its median column; empty if not
    known."""

    def better_split(self, layers: int | None, held: Sequence[int] = ()) -> Split | None:
        """How ``layers`` equal layers would be spread best over stages of these speeds. ``held``:
        how many each stage has now; empty: evenly many. All columns of a stage hold the same
        layers, and an iteration waits for the slowest: its speed counts. None if nothing is slow,
        the slowest stage cannot be faster, or the layers are not known."""
        if layers is None or not self.paces or not self.slowest:
            return None
        paces = [*self.paces]
        for slow in self.slowest:
            paces[slow.stage] = max(paces[slow.stage], slow.seconds)
        held = held or (layers // len(paces),) * len(paces)
        per_layer = [pace / count for pace, count in zip(paces, held, strict=True)]
        counts = spread_layers(layers, per_layer, [0.0] * len(paces))
        slowest = max(n * took for n, took in zip(counts, per_layer, strict=True))
        gain = 1 - slowest / max(paces)
        return Split(counts, gain) if gain > 0.01 else None
