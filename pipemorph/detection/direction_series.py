"""Windows of one direction of a link: its detector, transfer times and latencies."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import NamedTuple

from pipemorph.detection.detector import RECENT_WINDOWS, DelayDetector, DetectorLevel
from pipemorph.planning.ir import Route
from pipemorph.protocol.states import Direction

NARROW_FRACTION = 0.5
"""Fraction of a wire time from which a message's transfer makes a link narrow. It shows in three
ways. A few bytes that leave with the message are faster (on the direct route, from the first
window). And messages that wait for each other arrive that far apart; if only their way were long,
they would arrive as close together as they were sent (on the delegated route). And larger ones take
longer (of ranks that are only observed, if sizes differ)."""
FEWEST_SPACINGS = 5
"""Fewest windows that show it in the spacing of arrivals."""
UNSURE_WINDOWS = 12
"""Most windows after a step of a narrow link's delay in which it is unknown if the link is still
narrow: spacings from before and after the step would mislead."""
HIDDEN_FRACTION = 0.1
"""Fraction of an op that a wire time is assumed to take at least if ops always hide it."""
LEAST_BASE = 1e-7

NOTES = "notes"
"""Key besides routes: notes that leave with direct messages."""

DirectionKey = tuple[int, int, Direction]
"""link, column, direction"""


@dataclass
class DirectionSeries:
    """State of one direction of a link in one column: its detector, and measurements of the time
    for which a message occupies the link. All times in seconds."""

    key: DirectionKey
    detector: DelayDetector
    newest_at: float = float("-inf")
    spacings: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=RECENT_WINDOWS)
    )
    """Spacings of arrivals on the delegated route while slow, see :class:`LinkSample`, and the wire
    times of these windows."""
    transfers: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=RECENT_WINDOWS)
    )
    """Bounds of the wire time beyond the latency, while slow or suspected to be."""
    sender_waited: float = 0.0
    """Time for which the sender waited for a processor, as of the newest window."""
    transport: str = ""
    receiver_op: float = 0.0
    """Op of the receiver that hid the newest arrival which was not seen exactly."""
    healthy_latencies: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_WINDOWS))
    """Latencies while healthy."""
    normal_latency: float | None = None
    """Median of these when the base was learned."""
    step_count: int = 0
    """Steps of the detector, at the newest window."""
    is_narrow: bool = False
    """True if the link was narrow when that was last certain."""
    transfer_share: float = 0.0
    """Fraction of the wire time that was the transfer when it was last seen."""
    unsure_windows: int = 0
    """Number of further windows in which that is uncertain."""
    failed_over: bool = False
    """True if its direct route broke, as of the newest window."""

    @property
    def transfer_time(self) -> float:
        """Seconds for which a message occupies the link; 0 if unknown or the smaller part."""
        if self.detector.level is not DetectorLevel.SLOW:
            return 0.0
        wire = self.detector.wire_time
        if len(self.spacings) >= FEWEST_SPACINGS:
            # If the delay varies, some messages arrive close together.
            # If the rate varies, each spacing belongs to the wire time of its window.
            varies = bool(self.detector.recent_delays)
            found = sorted(wire * gap / took if varies else gap for gap, took in self.spacings)
            transfer = found[len(found) // 10]
        elif self.transfers:
            transfer = median([end for bounds in self.transfers for end in bounds])
        elif self.is_narrow and self.detector.recent_delays:
            # While its rate is high, no message waits, so spacings show nothing.
            transfer = wire * self.transfer_share
        else:
            return 0.0
        return min(transfer, wire) if transfer >= NARROW_FRACTION * wire else 0.0

    @property
    def bases(self) -> dict[str, float]:
        """Normal wire times by route, and the normal latency of notes; seconds."""
        return self.detector.list_bases() | (
            {} if self.normal_latency is None else {NOTES: self.normal_latency}
        )

    @property
    def planned_wire_time(self) -> float:
        """Wire time for the planner. A base within bounds counts with its lower bound, and at least
        a small part of the op that hides it: with its upper bound, every busy receiver would look
        like a slow link; with 0, plans would have no room for the time of any message."""
        if self.detector.base_is_exact:
            return self.detector.wire_time
        base, low = self.detector.base or 0.0, self.detector.least_base
        if self.healthy_latencies:
            low = max(low, min(base, median(self.healthy_latencies)))
        return self.detector.delay + min(base, max(low, HIDDEN_FRACTION * self.receiver_op))

    @property
    def in_doubt(self) -> bool:
        """True if it is uncertain that a narrow link is still narrow, or by how much."""
        return self.unsure_windows > 0 or (self.is_narrow and self.detector.is_stepping)

    def process_window(self, window: DirectionWindow) -> None:
        """Process the spacing of arrivals and the latency, after the wire time. Spacing on the
        direct route says nothing: in its single queue messages always arrive apart."""
        slow, latency = self.detector.level is DetectorLevel.SLOW, window.latency
        if self.step_count != self.detector.step_count:
            # Earlier measurements say nothing of the present link.
            self.step_count = self.detector.step_count
            self.spacings.clear()
            self.transfers.clear()
            self.unsure_windows = UNSURE_WINDOWS if self.is_narrow else 0
        self.receiver_op = (
            window.slack if isfinite(window.slack) and window.slack else self.receiver_op
        )
        if not slow:
            self.spacings.clear()
        elif window.spacing is not None and window.route == Route.DELEGATED:
            self.spacings.append((window.spacing, max(window.value, LEAST_BASE)))
        if not slow and not self.detector.is_suspected:
            self.transfers.clear()
            if latency is not None:
                self.healthy_latencies.append(latency)
            if (
                self.normal_latency is None
                and self.healthy_latencies
                and self.detector.base is not None
            ):
                self.normal_latency = median(self.healthy_latencies)
        elif latency is not None:
            beyond = window.value - latency
            self.transfers.append((beyond - window.slack, beyond))
        elif window.transfer is not None:
            self.transfers.append((window.transfer, window.transfer))
        if self.unsure_windows:
            known = len(self.spacings) >= FEWEST_SPACINGS or self.transfers
            self.unsure_windows = 0 if known or not slow else self.unsure_windows - 1
        if not self.in_doubt:
            transfer = self.transfer_time
            self.is_narrow = transfer > 0.0
            if self.is_narrow:
                self.transfer_share = transfer / self.detector.wire_time

    def lower_base(self, usual: Mapping[str, float]) -> None:
        """Compare with the ``usual`` wire times on its route and of notes, see
        :meth:`LinkMonitor.set_usual_times`."""
        base, note = usual.get(self.detector.route or ""), usual.get(NOTES)
        if base is None:
            return
        late = 0.0 if note is None or self.normal_latency is None else self.normal_latency - note
        if self.detector.lower_base(base, late) and note is not None:
            self.normal_latency, self.healthy_latencies = note, deque([note], maxlen=RECENT_WINDOWS)

    def refine_wire_time(self, low: float, high: float, latency: float | None) -> float | None:
        """Wire time from its bounds and the latency, which is exact even if the receiver computes:
        the normal time without latency, plus the latency. None if unknown or out of the bounds. If
        the base is an upper bound, the excess over it is exact."""
        base = self.detector.base
        if latency is None or base is None or not self.healthy_latencies:
            return None
        value = max(0.0, base - median(self.healthy_latencies)) + latency
        return value if low <= value <= high else None


class DirectionWindow(NamedTuple):
    """Sample as input of a detector."""

    series: DirectionSeries
    value: float
    mark: int
    route: str
    exact: bool
    refined: bool
    """True if exact only as far as the base is, see :meth:`DirectionSeries.refine_wire_time`."""
    slack: float
    latency: float | None
    transfer: float | None
    spacing: float | None
    failed_over: bool
    sender_waited: float
    waited: float
    """Seconds for which threads of the sender and of the receiver waited for a processor."""
    inflated: bool
    """True if the newest ops of either took longer than they can."""
