"""Health of the RDMA ports of a job's ranks, from their drivers' counters. Pure, without a clock.

Soft state: the newest sample of each port, rebuilt from reports, which repeat every port once a
minute. It informs people, who see here a port that was down for a moment. Adaptation relies on
measured wire times only.

Sources. Counters of ``counters/``: the kernel's Documentation/ABI/stable/sysfs-class-infiniband,
after PortCounters of the InfiniBand Architecture Specification, chapter 16. Counters of
``hw_counters/``: the mlx5 vendor's description of its port counters, and the kernel's
drivers/infiniband/sw/rxe/rxe_hw_counters.c. The thresholds are PipeMorph's: a cable within its
specified bit error rate has a symbol error every few minutes, and a lossy RoCE fabric an occasional
retransmission; ten per minute are more than that.

- *Breaks*, of which one is too many: the port lost its link and recovered it, or retrained, or a
  queue pair ran out of retries.
- *Errors*: damaged, dropped, late or missing packets, which the hardware sent again.
- *Congestion*: marks and notifications of ECN (DCQCN). They mean load, not a fault of the port.

``port_xmit_wait`` counts ticks, not events, and grows under any load; it is only a metric.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.events import Events
from pipemorph.wire import SHOWN, RailHealth, RailSample, RailsView, RailTrouble

BREAKS = frozenset({"link_downed", "link_error_recovery", "retry_exceeded_err"})
ERRORS = frozenset(
    {
        *("symbol_error", "local_link_integrity_errors", "port_rcv_errors", "port_xmit_discards"),
        *("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err"),
        *("roce_adp_retrans", "completer_retry_err", "send_err"),
    }
)
CONGESTION = frozenset({"np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets"})
JUDGED = BREAKS | ERRORS | CONGESTION

BREAK_SECONDS = 300.0
"""How long a break is shown: a cable that fails every few minutes stays visible."""
ERROR_SECONDS = 60.0
LEAST_ERRORS = 10
LEAST_CONGESTION = 1000
"""Least growth of one counter within :data:`ERROR_SECONDS` that is reported."""
SILENT_SECONDS = 200.0
"""Ranks report every port once a minute; a port without reports for longer is unknown."""
MOST_PORTS = 65_536
MOST_PORTS_PER_RANK = 256
ACTIVE = "ACTIVE"
UNAVAILABLE = "unavailable"

PortKey = tuple[int, int, str, int]
"""stage, replica, device, port"""


@dataclass
class _Port:
    state: str
    counters: dict[str, int]
    unreadable: bool
    used: bool | None
    seen_at: float
    was_active: bool = False
    grown: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)


class RailBook:
    """All ports of a job. Bounded. The cost of a view depends on the number of ports with problems.

    ``named``: devices in the spec, such as ``mlx5_0`` or ``mlx5_0:2``. ``mesh``: names columns.
    """

    def __init__(
        self,
        *,
        named: Iterable[str] = (),
        mesh: MeshShape | None = None,
        events: Events | None = None,
    ) -> None:
        self._named, self._mesh = frozenset(named), mesh or MeshShape()
        self._events = events or Events()
        self._ports: OrderedDict[PortKey, _Port] = OrderedDict()  # oldest report first
        self._of_rank: Counter[tuple[int, int]] = Counter()
        self._active: Counter[tuple[int, int]] = Counter()
        self._suspects: dict[PortKey, _Port] = {}
        self._expected: int | None = None

    def set(self, named: Iterable[str]) -> None:
        """Devices that the spec names."""
        self._named = frozenset(named)

    def observe(
        self, samples: Iterable[RailSample], expected: int | None, now: float, iteration: int
    ) -> None:
        """Process the ports of a report. ``now``: wall clock, seconds."""
        self._expected = expected
        for sample in samples:
            key = (sample.stage, sample.replica, sample.device, sample.port)
            port = self._ports.get(key)
            if port is None:
                port = self._add(key, now)
                if port is None:
                    continue
            self._update(key, port, sample, now, iteration)
            self._ports.move_to_end(key)

    def _add(self, key: PortKey, now: float) -> _Port | None:
        rank = key[:2]
        if len(self._ports) >= MOST_PORTS or self._of_rank[rank] >= MOST_PORTS_PER_RANK:
            return None  # The view counts it as missing, since it is expected.
        self._of_rank[rank] += 1
        port = self._ports[key] = _Port("", {}, unreadable=False, used=None, seen_at=now)
        return port

    def _update(
        self, key: PortKey, port: _Port, sample: RailSample, now: float, iteration: int
    ) -> None:
        read = {name: n for name, n in sample.counters.items() if isinstance(n, int)}
        for name, value in read.items():
            before = port.counters.get(name)
            # A smaller value means that the driver was reloaded or the counter cleared.
            if name in JUDGED and before is not None and value > before:
                grown = port.grown.setdefault(name, deque(maxlen=64))
                grown.append((now, value - before))
                if name in BREAKS:
                    what = f"{name} +{value - before}"
                    self._events.add(now, iteration, f"{self._place(key)}: {what}")
        if sample.state != port.state:
            if port.state == ACTIVE or (port.was_active and sample.state == ACTIVE):
                self._events.add(now, iteration, f"{self._place(key)}: is {sample.state}")
            self._active[key[:2]] += (sample.state == ACTIVE) - (port.state == ACTIVE)
        port.state, port.counters, port.used = sample.state, read, sample.used
        port.was_active |= sample.state == ACTIVE
        port.unreadable = sample.state == UNAVAILABLE or not JUDGED & read.keys()
        port.seen_at = now
        if port.state != ACTIVE or port.unreadable or port.grown:
            self._suspects[key] = port
        else:
            self._suspects.pop(key, None)

    def _counts(self, key: PortKey, port: _Port) -> bool:
        """Whether an inactive port is a fault. An unused port beside one that works is not: most
        cards have two ports and one cable."""
        device, number = key[2], key[3]
        return bool(
            port.used
            or port.was_active
            or f"{device}:{number}" in self._named
            or device in self._named
            or self._active[key[:2]] == 0
        )

    def _place(self, key: PortKey) -> str:
        stage, column, device, port = key
        name = self._mesh.column_name(column)
        return f"RDMA port {device}/{port} of stage {stage}{', ' if name else ''}{name}"

    def view(self, now: float) -> RailsView:
        """The current state of the rails."""
        sick: list[RailTrouble] = []
        congested: list[RailTrouble] = []
        unreadable = 0
        for key, port in sorted(self._suspects.items()):
            broken, crowded = _troubles(port, now)
            if port.state not in (ACTIVE, UNAVAILABLE) and self._counts(key, port):
                broken.insert(0, f"is {port.state}")
            unreadable += port.unreadable
            if broken:
                sick.append(RailTrouble(*key, state=port.state, what="; ".join(broken)))
            elif crowded:
                congested.append(RailTrouble(*key, state=port.state, what="; ".join(crowded)))
            if port.state == ACTIVE and not (port.grown or port.unreadable):
                del self._suspects[key]
        return _judged(
            RailsView(
                ports=len(self._ports),
                expected=self._expected,
                sick_count=len(sick),
                sick=tuple(sick[:SHOWN]),
                congested_count=len(congested),
                congested=tuple(congested[:SHOWN]),
                unreadable=unreadable,
                silent=sum(1 for _ in self._silent(now)),
            )
        )

    def _silent(self, now: float) -> Iterator[PortKey]:
        for key, port in self._ports.items():
            if now - port.seen_at <= SILENT_SECONDS:
                return
            yield key


def _judged(view: RailsView) -> RailsView:
    """With its health, which follows from the counts."""
    missing = view.expected is None or view.ports < view.expected
    if view.sick_count:
        health = RailHealth.SICK
    elif missing or view.silent or view.unreadable:
        health = RailHealth.UNKNOWN
    elif not view.ports:
        health = RailHealth.NONE
    else:
        health = RailHealth.CONGESTED if view.congested_count else RailHealth.HEALTHY
    return replace(view, health=health)


def _troubles(port: _Port, now: float) -> tuple[list[str], list[str]]:
    """Texts for breaks and errors, and for congestion, of one port. Drops expired growth."""
    broken: list[str] = []
    crowded: list[str] = []
    for name in sorted(port.grown):
        grown = port.grown[name]
        span = BREAK_SECONDS if name in BREAKS else ERROR_SECONDS
        while grown and now - grown[0][0] > span:
            grown.popleft()
        if not grown:
            del port.grown[name]
            continue
        total = sum(n for _, n in grown)
        if name in CONGESTION:
            if total >= LEAST_CONGESTION:
                crowded.append(_growth(name, total, span))
        elif name in BREAKS or total >= LEAST_ERRORS:
            broken.append(_growth(name, total, span))
    return broken, crowded


def _growth(name: str, total: int, span: float) -> str:
    """Text for the growth of a counter, rounded down to a power of ten: each change of the text is
    a write of status."""
    least = 10 ** (len(str(total)) - 1)
    return f"{name} grew by {'at least ' if least > 1 else ''}{least} within {span:g} s"
