"""The windows of one direction of a link, as they come, and what they say beside its detector."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import NamedTuple

from pipemorph.control.observe.detector import RECENT, DelayDetector, Level
from pipemorph.planning.ir import Route
from pipemorph.wire.states import Direction

NARROW = 0.5
"""A link is narrow if this part of a wire time or more is a message's transfer. It shows in two
ways. A few bytes that leave with the message do not take as long (the direct route, from the first
window). And messages that wait for each other arrive that far apart: if they only travelled for
long, they would arrive as close together as they were sent (the delegated route)."""
FEW_SPACINGS = 5
"""Windows that show it in the spacing of arrivals."""
UNSURE = 12
"""Most windows after a step of its delay in which it is not said whether a link that was narrow
still is. Spacings of before and after make the link narrow when it is not, or the other way."""
HIDDEN = 0.1
"""Part of an op that a wire time is assumed to take at least if ops always hide it."""
LEAST_BASE = 1e-7

NOTES = "notes"
"""Beside routes: the notes that leave with direct messages."""

Key = tuple[int, int, Direction]
"""link, column, direction"""


@dataclass
class Series:
    """What is known of one direction of a link in one column: its detector, and what windows tell
    of how long a message occupies the link. All times in seconds."""

    key: Key
    detector: DelayDetector
    seen_at: float = float("-inf")
    spacings: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Between arrivals on the delegated route while slow, see :class:`LinkSample`, and the wire
    times of these windows."""
    transfers: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Bounds of the wire time beyond the latency, while slow or suspected to be."""
    sender_waited: float = 0.0
    """For a processor, as of the newest window."""
    transport: str = ""
    op: float = 0.0
    """Of the receiver, which hid the newest arrival that was not seen as it happened."""
    well: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Latencies while healthy."""
    first: float | None = None
    """Their median when the base was learned."""
    steps: int = 0
    """Of the detector, at the newest window."""
    narrow: bool = False
    """Whether the link was narrow when that was last sure."""
    share: float = 0.0
    """Part of the wire time that was the transfer when that was last seen."""
    unsure: int = 0
    """Windows left in which it is not."""
    failed_over: bool = False
    """Whether its direct route broke, as of the newest window."""

    @property
    def transfer(self) -> float:
        """How long a message occupies the link; 0 if that is unknown or the smaller part."""
        if self.detector.level is not Level.SLOW:
            return 0.0
        wire = self.detector.wire_time
        if len(self.spacings) >= FEW_SPACINGS:
            # Of messages whose delay varies, some arrive close together.
            # If the rate varies, each spacing belongs to the wire time of its window.
            varies = bool(self.detector.recent)
            found = sorted(wire * gap / took if varies else gap for gap, took in self.spacings)
            transfer = found[len(found) // 10]
        elif self.transfers:
            transfer = median([end for bounds in self.transfers for end in bounds])
        elif self.narrow and self.detector.recent:
            # While its rate is high, no message waits, so that nothing is seen.
            transfer = wire * self.share
        else:
            return 0.0
        return min(transfer, wire) if transfer >= NARROW * wire else 0.0

    @property
    def bases(self) -> dict[str, float]:
        """Normal wire times by route, and the normal latency of notes; seconds."""
        return self.detector.bases() | ({} if self.first is None else {NOTES: self.first})

    @property
    def plannable(self) -> float:
        """One-way time for the planner. Of a base that is known within bounds, what is sure, and at
        least a small part of the op that hides it: as a whole, every busy receiver would look like
        a slow link; as nothing, plans would have no room for the little time that every message
        takes."""
        if self.detector.base_is_exact:
            return self.detector.wire_time
        base, low = self.detector.base or 0.0, self.detector.least_base
        if self.well:
            low = max(low, min(base, median(self.well)))
        return self.detector.delay + min(base, max(low, HIDDEN * self.op))

    @property
    def in_doubt(self) -> bool:
        """Whether it is not sure that a link which was narrow still is, or by how much."""
        return self.unsure > 0 or (self.narrow and self.detector.stepping)

    def take(self, window: Window) -> None:
        """Process the spacing of arrivals and the latency, after the wire time. Spacing on the
        direct route says nothing: it has one queue, where messages arrive apart from each other
        whatever the reason."""
        slow, latency = self.detector.level is Level.SLOW, window.latency
        if self.steps != self.detector.steps:
            # What was seen before says nothing of the link as it is now.
            self.steps = self.detector.steps
            self.spacings.clear()
            self.transfers.clear()
            self.unsure = UNSURE if self.narrow else 0
        self.op = window.slack if isfinite(window.slack) and window.slack else self.op
        if not slow:
            self.spacings.clear()
        elif window.spacing is not None and window.route == Route.DELEGATED:
            self.spacings.append((window.spacing, max(window.value, LEAST_BASE)))
        if not slow and not self.detector.suspects:
            self.transfers.clear()
            if latency is not None:
                self.well.append(latency)
            if self.first is None and self.well and self.detector.base is not None:
                self.first = median(self.well)
        elif latency is not None:
            beyond = window.value - latency
            self.transfers.append((beyond - window.slack, beyond))
        if self.unsure:
            known = len(self.spacings) >= FEW_SPACINGS or self.transfers
            self.unsure = 0 if known or not slow else self.unsure - 1
        if not self.in_doubt:
            transfer = self.transfer
            self.narrow = transfer > 0.0
            if self.narrow:
                self.share = transfer / self.detector.wire_time

    def lower(self, usual: Mapping[str, float]) -> None:
        """Compare with what is ``usual`` on its route, and of notes, see
        :meth:`LinkBook.compare`."""
        base, note = usual.get(self.detector.route or ""), usual.get(NOTES)
        if base is None:
            return
        late = 0.0 if note is None or self.first is None else self.first - note
        if self.detector.lower_base(base, late) and note is not None:
            self.first, self.well = note, deque([note], maxlen=RECENT)

    def refined(self, low: float, high: float, latency: float | None) -> float | None:
        """The wire time from its bounds and the latency, which is exact even if the receiver
        computes: what is normal without latency, and the latency. None if that is unknown, or not
        within the bounds. If the base is an upper bound, its excess over the base is exact."""
        base = self.detector.base
        if latency is None or base is None or not self.well:
            return None
        value = max(0.0, base - median(self.well)) + latency
        return value if low <= value <= high else None


class Window(NamedTuple):
    """One sample, as input of a detector."""

    series: Series
    value: float
    mark: int
    route: str
    exact: bool
    refined: bool
    """Exact only as far as the base is, see :meth:`Series.refined`."""
    slack: float
    latency: float | None
    spacing: float | None
    failed_over: bool
    sender_waited: float
    waited: float
    """Seconds for which threads of the sender and of the receiver waited for a processor."""
    inflated: bool
    """Whether the newest ops of either took longer than they can."""
