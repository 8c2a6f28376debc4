"""Are the RDMA ports of a job's ranks well? Pure: what their drivers count, no clock.

Soft state: the newest of each port, rebuilt from reports, which repeat every port now and then.
Adaptation does not go by it (what counts there is measured in band); it is for people, who see a
port that was down for a moment here before any link is slow.

What is judged, and from which documentation. Counters of ``counters/``: the kernel's
Documentation/ABI/stable/sysfs-class-infiniband, after PortCounters of the InfiniBand
Architecture Specification, chapter 16. Of ``hw_counters/``: the mlx5 vendor's description of its
port counters, and the kernel's drivers/infiniband/sw/rxe/rxe_hw_counters.c. The thresholds are
ours: a cable within its specified bit error rate shows a symbol error every few minutes, and a
lossy RoCE fabric a retransmission now and then; ten in a minute are more than that.

- *Breaks*, where one is one too many: the port lost its link and got it back, retrained, or a
  queue pair gave up.
- *Errors*: damaged, dropped, late or missing packets that the hardware sent again.
- *Congestion*: marks and notifications of ECN (DCQCN). The network does what it was built for,
  only with too much to carry: said, but no sickness of the port.

``port_xmit_wait`` counts ticks, not events, and grows under any load: it is a metric only.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from pipemorph.control.observe.events import Events
from pipemorph.wire import RailSample

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
"""A break is told of for so long: a cable that lets go every few minutes is one story."""
ERROR_SECONDS = 60.0
LEAST_ERRORS = 10
LEAST_CONGESTION = 1000
"""Growth of one counter within :data:`ERROR_SECONDS` that is worth a word."""
SILENT_SECONDS = 200.0
"""Ranks repeat what they know every minute; a port not heard of for three is not known."""
MOST_PORTS = 65_536
MOST_PORTS_PER_RANK = 256
SHOWN = 32
"""Ports that a view names."""
ACTIVE = "ACTIVE"
UNAVAILABLE = "unavailable"

PortKey = tuple[int, int, str, int]
"""stage, replica, device, port"""


class RailHealth(StrEnum):
    """State of all rails together. UNKNOWN: not heard of, not all yet, or not visible."""

    HEALTHY = "healthy"
    CONGESTED = "congested"
    SICK = "sick"
    NONE = "none"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class RailTrouble:
    """What is wrong with one port. ``state`` as its driver says it."""

    stage: int
    replica: int
    device: str
    port: int
    state: str
    what: str

    def record(self) -> dict[str, object]:
        """For report.json and status."""
        return {
            "stage": self.stage,
            "replica": self.replica,
            "device": self.device,
            "port": self.port,
            "state": self.state,
            "what": self.what,
        }

    def text(self, *, replicas: bool) -> str:
        """``stage 2 mlx5_0/1: is DOWN``"""
        who = f"stage {self.stage}" + (f" of replica {self.replica}" if replicas else "")
        return f"{who} {self.device}/{self.port}: {self.what}"


@dataclass(frozen=True)
class RailsView:
    """The rails of a job. ``expected``: ports that the ranks say they see, None until every
    rank has looked. ``sick`` and ``congested`` name at most :data:`SHOWN` ports."""

    health: RailHealth = RailHealth.UNKNOWN
    ports: int = 0
    expected: int | None = None
    sick_count: int = 0
    sick: tuple[RailTrouble, ...] = ()
    congested_count: int = 0
    congested: tuple[RailTrouble, ...] = ()
    unreadable: int = 0
    """Ports without a state, or without a single counter that can be read."""
    silent: int = 0
    """Ports that have not been heard of lately."""


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
    """All ports of a job. Bounded; a view costs what is wrong and not what there is.

    ``named``: devices of the spec, such as ``mlx5_0`` or ``mlx5_0:2``.
    """

    def __init__(self, *, named: Iterable[str] = (), events: Events | None = None) -> None:
        self._named = frozenset(named)
        self._events = events or Events()
        self._ports: OrderedDict[PortKey, _Port] = OrderedDict()  # longest silent first
        self._of_rank: Counter[tuple[int, int]] = Counter()
        self._active: Counter[tuple[int, int]] = Counter()
        self._suspects: dict[PortKey, _Port] = {}
        self._expected: int | None = None

    def observe(
        self, samples: Iterable[RailSample], expected: int | None, now: float, iteration: int
    ) -> None:
        """Take in what a report says of its ports. ``now``: wall clock, seconds."""
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
            return None  # It is missed in the view, since it is expected.
        self._of_rank[rank] += 1
        port = self._ports[key] = _Port("", {}, unreadable=False, used=None, seen_at=now)
        return port

    def _update(
        self, key: PortKey, port: _Port, sample: RailSample, now: float, iteration: int
    ) -> None:
        read = {name: n for name, n in sample.counters.items() if isinstance(n, int)}
        for name, value in read.items():
            before = port.counters.get(name)
            # Less than before: the driver was loaded again, or somebody cleared it.
            if name in JUDGED and before is not None and value > before:
                grown = port.grown.setdefault(name, deque(maxlen=64))
                grown.append((now, value - before))
                if name in BREAKS:
                    self._events.add(now, iteration, f"{_place(key)}: {name} +{value - before}")
        if sample.state != port.state:
            if port.state == ACTIVE or (port.was_active and sample.state == ACTIVE):
                self._events.add(now, iteration, f"{_place(key)}: is {sample.state}")
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
        """Whether a port that is not active is missed: not one that nobody has used, beside
        another that works. Most cards have two ports and one cable."""
        device, number = key[2], key[3]
        return bool(
            port.used
            or port.was_active
            or f"{device}:{number}" in self._named
            or device in self._named
            or self._active[key[:2]] == 0
        )

    def view(self, now: float) -> RailsView:
        """The rails as they are now."""
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
        silent = sum(1 for _ in self._silent(now))
        if sick:
            health = RailHealth.SICK
        elif self._expected is None or len(self._ports) < self._expected or silent or unreadable:
            health = RailHealth.UNKNOWN
        elif not self._ports:
            health = RailHealth.NONE
        else:
            health = RailHealth.CONGESTED if congested else RailHealth.HEALTHY
        return RailsView(
            health=health,
            ports=len(self._ports),
            expected=self._expected,
            sick_count=len(sick),
            sick=tuple(sick[:SHOWN]),
            congested_count=len(congested),
            congested=tuple(congested[:SHOWN]),
            unreadable=unreadable,
            silent=silent,
        )

    def _silent(self, now: float) -> Iterator[PortKey]:
        for key, port in self._ports.items():
            if now - port.seen_at <= SILENT_SECONDS:
                return
            yield key


def _troubles(port: _Port, now: float) -> tuple[list[str], list[str]]:
    """What a port's counters say: what is broken, what is crowded. Forgets what is long ago."""
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
    """To the power of ten: a text that is another one every few seconds would be a write of
    status every few seconds."""
    least = 10 ** (len(str(total)) - 1)
    return f"{name} grew by {'at least ' if least > 1 else ''}{least} within {span:g} s"


def _place(key: PortKey) -> str:
    stage, replica, device, port = key
    return f"RDMA port {device}/{port} of stage {stage}, replica {replica}"
