"""Health of the RDMA ports of a job's ranks, from their drivers' counters. Pure, without a clock.

Soft state: the newest sample of each port, rebuilt from reports, which repeat every port once a
minute. It informs users, who see even a port that was down for a moment. Adaptation relies on
measured wire times only.

Sources. Counters of ``counters/``: the kernel's Documentation/ABI/stable/sysfs-class-infiniband,
after PortCounters of the InfiniBand Architecture Specification, chapter 16. Counters of
``hw_counters/``: the mlx5 vendor's description of its port counters, and the kernel's
drivers/infiniband/sw/rxe/rxe_hw_counters.c. The thresholds are PipeMorph's: a cable within its
specified bit error rate has a symbol error every few minutes, and a lossy RoCE fabric an occasional
retransmission; ten per minute are more than that.

- *Breaks*, one of which is too many: the port lost its link and recovered it, or retrained, or a
  queue pair ran out of retries.
- *Errors*: damaged, dropped, late or missing packets, which the hardware sent again.
- *Congestion*: marks and notifications of ECN (DCQCN). They mean load, not a fault of the port.

``port_xmit_wait`` counts ticks, not events, and grows under any load; it is only a metric.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from pipemorph.detection.event_log import EventLog
from pipemorph.protocol import MOST_LISTED, RailHealth, RailProblem, RailSample, RailsView
from pipemorph.spec.mesh import MeshShape

BREAK_COUNTERS = frozenset({"link_downed", "link_error_recovery", "retry_exceeded_err"})
ERROR_COUNTERS = frozenset(
    {
        *("symbol_error", "local_link_integrity_errors", "port_rcv_errors", "port_xmit_discards"),
        *("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err"),
        *("roce_adp_retrans", "completer_retry_err", "send_err"),
    }
)
CONGESTION_COUNTERS = frozenset({"np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets"})
JUDGED_COUNTERS = BREAK_COUNTERS | ERROR_COUNTERS | CONGESTION_COUNTERS

BREAK_SECONDS = 300.0
"""Seconds for which a break is shown: a cable that fails every few minutes stays visible."""
ERROR_SECONDS = 60.0
LEAST_ERRORS = 10
LEAST_CONGESTION = 1000
"""Least growth of one counter within :data:`ERROR_SECONDS` that is reported."""
SILENT_SECONDS = 200.0
"""Seconds without a report after which a port is unknown. Ranks report every port once a minute."""
MOST_PORTS = 65_536
MOST_PORTS_PER_RANK = 256
ACTIVE_STATE = "ACTIVE"
UNAVAILABLE_STATE = "unavailable"

PortKey = tuple[int, int, str, int]
"""stage, replica, device, port"""


@dataclass
class _PortRecord:
    """State of one port, and the recent growth of its counters."""

    state: str
    counters: dict[str, int]
    unreadable: bool
    is_used: bool | None
    seen_at: float
    was_active: bool = False
    counter_growth: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)


class RailMonitor:
    """Tracks all ports of a job. Bounded. A view costs time by the number of ports with problems.

    ``named``: devices in the spec, such as ``mlx5_0`` or ``mlx5_0:2``. ``mesh``: names columns.
    """

    def __init__(
        self,
        *,
        named: Iterable[str] = (),
        mesh: MeshShape | None = None,
        events: EventLog | None = None,
    ) -> None:
        self._named_devices, self._mesh = frozenset(named), mesh or MeshShape()
        self._events = events or EventLog()
        self._ports: OrderedDict[PortKey, _PortRecord] = OrderedDict()  # oldest report first
        self._ports_per_rank: Counter[tuple[int, int]] = Counter()
        self._active_ports: Counter[tuple[int, int]] = Counter()
        self._suspect_ports: dict[PortKey, _PortRecord] = {}
        self._expected_ports: int | None = None

    def set_named_devices(self, named: Iterable[str]) -> None:
        """Set the devices that the spec names."""
        self._named_devices = frozenset(named)

    def observe_ports(
        self, samples: Iterable[RailSample], expected: int | None, now: float, iteration: int
    ) -> None:
        """Process the ports of a report. ``now``: wall clock, seconds."""
        self._expected_ports = expected
        for sample in samples:
            key = (sample.stage, sample.replica, sample.device, sample.port)
            port = self._ports.get(key)
            if port is None:
                port = self._add_port(key, now)
                if port is None:
                    continue
            self._update_port(key, port, sample, now, iteration)
            self._ports.move_to_end(key)

    def _add_port(self, key: PortKey, now: float) -> _PortRecord | None:
        rank = key[:2]
        if len(self._ports) >= MOST_PORTS or self._ports_per_rank[rank] >= MOST_PORTS_PER_RANK:
            return None  # The view counts it as missing, since it is expected.
        self._ports_per_rank[rank] += 1
        port = self._ports[key] = _PortRecord("", {}, unreadable=False, is_used=None, seen_at=now)
        return port

    def _update_port(
        self, key: PortKey, port: _PortRecord, sample: RailSample, now: float, iteration: int
    ) -> None:
        """Update a port from a sample, with events for breaks and changes of its state."""
        read = {name: n for name, n in sample.counters.items() if isinstance(n, int)}
        for name, value in read.items():
            before = port.counters.get(name)
            # A smaller value means that the driver was reloaded or the counter cleared.
            if name in JUDGED_COUNTERS and before is not None and value > before:
                grown = port.counter_growth.setdefault(name, deque(maxlen=64))
                grown.append((now, value - before))
                if name in BREAK_COUNTERS:
                    what = f"{name} +{value - before}"
                    self._events.add_event(now, iteration, f"{self._describe_port(key)}: {what}")
        if sample.state != port.state:
            if port.state == ACTIVE_STATE or (port.was_active and sample.state == ACTIVE_STATE):
                self._events.add_event(
                    now, iteration, f"{self._describe_port(key)}: is {sample.state}"
                )
            self._active_ports[key[:2]] += (sample.state == ACTIVE_STATE) - (
                port.state == ACTIVE_STATE
            )
        port.state, port.counters, port.is_used = sample.state, read, sample.used
        port.was_active |= sample.state == ACTIVE_STATE
        port.unreadable = sample.state == UNAVAILABLE_STATE or not JUDGED_COUNTERS & read.keys()
        port.seen_at = now
        if port.state != ACTIVE_STATE or port.unreadable or port.counter_growth:
            self._suspect_ports[key] = port
        else:
            self._suspect_ports.pop(key, None)

    def _is_fault_if_inactive(self, key: PortKey, port: _PortRecord) -> bool:
        """True if a port is a fault when it is inactive. An unused port of a card with a working
        one is not: most cards have two ports and one cable."""
        device, number = key[2], key[3]
        return bool(
            port.is_used
            or port.was_active
            or f"{device}:{number}" in self._named_devices
            or device in self._named_devices
            or self._active_ports[key[:2]] == 0
        )

    def _describe_port(self, key: PortKey) -> str:
        stage, column, device, port = key
        name = self._mesh.format_column_name(column)
        return f"RDMA port {device}/{port} of stage {stage}{', ' if name else ''}{name}"

    def build_view(self, now: float) -> RailsView:
        """Build the view of the rails' present state."""
        failing: list[RailProblem] = []
        congested: list[RailProblem] = []
        unreadable = 0
        for key, port in sorted(self._suspect_ports.items()):
            broken, crowded = _describe_troubles(port, now)
            if port.state not in (ACTIVE_STATE, UNAVAILABLE_STATE) and self._is_fault_if_inactive(
                key, port
            ):
                broken.insert(0, f"is {port.state}")
            unreadable += port.unreadable
            if broken:
                failing.append(RailProblem(*key, state=port.state, what="; ".join(broken)))
            elif crowded:
                congested.append(RailProblem(*key, state=port.state, what="; ".join(crowded)))
            if port.state == ACTIVE_STATE and not (port.counter_growth or port.unreadable):
                del self._suspect_ports[key]
        return _with_health(
            RailsView(
                ports=len(self._ports),
                expected=self._expected_ports,
                faulty_count=len(failing),
                faulty=tuple(failing[:MOST_LISTED]),
                congested_count=len(congested),
                congested=tuple(congested[:MOST_LISTED]),
                unreadable=unreadable,
                silent=sum(1 for _ in self._list_silent_ports(now)),
            )
        )

    def _list_silent_ports(self, now: float) -> Iterator[PortKey]:
        for key, port in self._ports.items():
            if now - port.seen_at <= SILENT_SECONDS:
                return
            yield key


def _with_health(view: RailsView) -> RailsView:
    """Add the health of a view, which follows from its counts."""
    missing = view.expected is None or view.ports < view.expected
    if view.faulty_count:
        health = RailHealth.FAULTY
    elif missing or view.silent or view.unreadable:
        health = RailHealth.UNKNOWN
    elif not view.ports:
        health = RailHealth.NONE
    else:
        health = RailHealth.CONGESTED if view.congested_count else RailHealth.HEALTHY
    return replace(view, health=health)


def _describe_troubles(port: _PortRecord, now: float) -> tuple[list[str], list[str]]:
    """Texts for the breaks and errors of a port, and for its congestion. Drops expired growth."""
    broken: list[str] = []
    crowded: list[str] = []
    for name in sorted(port.counter_growth):
        grown = port.counter_growth[name]
        span = BREAK_SECONDS if name in BREAK_COUNTERS else ERROR_SECONDS
        while grown and now - grown[0][0] > span:
            grown.popleft()
        if not grown:
            del port.counter_growth[name]
            continue
        total = sum(n for _, n in grown)
        if name in CONGESTION_COUNTERS:
            if total >= LEAST_CONGESTION:
                crowded.append(_describe_growth(name, total, span))
        elif name in BREAK_COUNTERS or total >= LEAST_ERRORS:
            broken.append(_describe_growth(name, total, span))
    return broken, crowded


def _describe_growth(name: str, total: int, span: float) -> str:
    """Text for the growth of a counter, rounded down to a power of ten: each change of the text is
    a write of status."""
    least = 10 ** (len(str(total)) - 1)
    return f"{name} grew by {'at least ' if least > 1 else ''}{least} within {span:g} s"
