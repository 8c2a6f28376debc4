"""Prometheus metrics of a rank: its telemetry, served at an HTTP port.

They are enabled in the operator's pods (``spec.trainer.metricsPort``, PIPEMORPH_METRICS_PORT). A
rank has at most two links, so the number of series grows with the ranks and not with pairs of
ranks. A failure here only affects metrics.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipemorph.planning.ir import count_in_flight_peak
from pipemorph.protocol import RailSample, TransportSample
from pipemorph_trainer.agent.messages import RankTelemetry
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.topology.addresses import find_own_address, get_wildcard_address

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge

    from pipemorph.spec.mesh import Coordinate

log = logging.getLogger("pipemorph.metrics")

_RANK = ["name", "stage", "replica", "column"]
_LINK = [*_RANK, "link", "direction", "route"]
MOST_PORTS = 64
"""Most ports of a rank that get series: a host may have hundreds of virtual functions."""


class RankMetrics:
    """Metrics of a rank, from its telemetry and its plans.

    ``stage``: the first of its stages. ``replica``: index of its column, which ``column`` names,
    such as ``replica 1, tensor 0``; empty if it is the only one. ``clock``: monotonic, seconds.
    Raises ImportError without prometheus-client.
    """

    def __init__(
        self,
        job: str,
        stage: int,
        replica: int,
        column: str = "",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self.registry = CollectorRegistry()
        self._busy: dict[int, float] = {}
        """Seconds of all ops of a microbatch, by stage."""
        who = {"name": job, "stage": str(stage), "replica": str(replica), "column": column}
        self._who = who
        self._clock = clock
        self._began: tuple[int, float] | None = None
        self._microbatches = 0
        self._seconds = 0.0
        self._routes: dict[tuple[int, str], str] = {}

        def make_gauge(name: str, text: str, labels: list[str] = _RANK) -> Gauge:
            return Gauge(f"pipemorph_rank_{name}", text, labels, registry=self.registry)

        def make_counter(name: str, text: str, labels: list[str] = _RANK) -> Counter:
            return Counter(f"pipemorph_rank_{name}", text, labels, registry=self.registry)

        self._iteration = make_gauge("iteration", "Iteration in progress.")
        self._iteration_seconds = make_gauge("iteration_seconds", "Time of the newest iteration.")
        self._bubble = make_gauge(
            "bubble_fraction", "Part of the newest iteration in which this rank ran no op."
        )
        self._applied = make_gauge(
            "applied_plan_version", "Version of the plan of the iteration in progress."
        )
        self._prepared = make_gauge(
            "prepared_plan_version", "Version of the newest plan this rank could run."
        )
        self._in_flight = make_gauge(
            "in_flight_peak", "Most microbatches in flight on a stage under the plan in effect."
        )
        self._memory = make_gauge("peak_memory_bytes", "Highest memory use so far.")
        self._offloaded = make_counter(
            "offloaded_microbatches", "Microbatches whose activations went to host memory."
        )
        self._offloaded_bytes = make_counter(
            "offloaded_bytes", "Activations copied to host memory, and later back."
        )
        self._offload_seconds = make_counter(
            "offload_copy_seconds", "Time of these copies, in both directions, within ops."
        )
        self._host_memory = make_gauge(
            "offload_host_memory_bytes", "Host memory held for activations."
        )
        self._reduction_seconds = make_gauge(
            "reduction_seconds", "Time of the newest gradient reduction of this rank's group."
        )
        self._reduction_exposed = make_gauge(
            "reduction_exposed_seconds",
            "Part of the reduction after the last op of the group's last rank.",
        )
        self._reduction_waited = make_gauge(
            "reduction_waited_seconds", "Wait of this rank for the reduction after its ops."
        )
        self._reduction_bytes = make_counter("reduction_bytes", "Gradients reduced.")
        self._lost = make_counter(
            "lost_checkpoints", "Checkpoints that the disk refused; rank 0 counts all ranks'."
        )
        self._lost.labels(**who)
        self._wire = make_gauge(
            "link_wire_seconds",
            "First byte sent to last byte received: median of the newest window, including the "
            "time that is normal for the message's size.",
            _LINK,
        )
        self._queue = make_gauge(
            "link_queue_seconds", "Wait before the first byte: median of the newest window.", _LINK
        )
        self._bytes = make_counter("link_bytes", "Payload sent.", _LINK)
        self._messages = make_counter("link_messages", "Messages sent.", _LINK)
        self._reroutes = make_counter("reroutes", "Changes of a link's route.", [*_RANK, "link"])
        of_link = [*_RANK, "link"]
        self._carries = make_gauge(
            "link_transport",
            "1 for the transport that carries the link now, 0 for earlier ones.",
            [*of_link, "agreed", "transport"],
        )
        self._changes = {
            "fallbacks": make_counter(
                "link_fallbacks", "Times the last rail was lost and TCP took over.", of_link
            ),
            "failbacks": make_counter("link_failbacks", "Times a rail took over again.", of_link),
            "reconnects": make_counter(
                "link_reconnects", "Control and data connections made again.", of_link
            ),
        }
        self._trouble = make_gauge(
            "link_trouble",
            "1 while a data connection is lost, or no data has arrived since one was lost.",
            of_link,
        )
        of_port = [*_RANK, "device", "port"]
        self._ports = make_gauge("rdma_ports", "RDMA ports that this rank sees.")
        self._active = make_gauge(
            "rdma_port_active", "1 while the port is ACTIVE; no series: unavailable.", of_port
        )
        self._counts = make_counter(
            "rdma_port_events",
            "Driver's counter of that name; no series: unavailable.",
            [*of_port, "counter"],
        )
        self._counted: dict[tuple[str, int, str], int] = {}
        self._ends: dict[int, TransportSample] = {}
        self._known_ports: set[tuple[str, int]] = set()

    def record_plan(self, plan: RankPlan) -> None:
        """Record the plan that takes effect."""
        self._microbatches = plan.microbatches
        self._in_flight.labels(**self._who).set(
            max(map(count_in_flight_peak, plan.orders.values()))
        )

    def record_telemetry(self, telemetry: RankTelemetry) -> None:
        """Update the metrics with one message of this rank to its agent."""
        now = self._clock()
        self._iteration.labels(**self._who).set(telemetry.iteration)
        self._applied.labels(**self._who).set(telemetry.applied_plan_version)
        self._prepared.labels(**self._who).set(telemetry.prepared_plan_version)
        if self._began is None or telemetry.iteration != self._began[0]:
            if self._began is not None and telemetry.iteration > self._began[0]:
                self._seconds = (now - self._began[1]) / (telemetry.iteration - self._began[0])
                self._iteration_seconds.labels(**self._who).set(self._seconds)
            self._began = (telemetry.iteration, now)
        profile = telemetry.profile
        if profile is not None:
            self._memory.labels(**self._who).set(profile.peak_memory)
            each = profile.forward + profile.backward_input + profile.backward_weight
            self._busy[profile.stage] = each
            busy = self._microbatches * sum(self._busy.values())
            if self._seconds > 0 and busy > 0:
                self._bubble.labels(**self._who).set(max(0.0, 1 - busy / self._seconds))
        offloaded = telemetry.offloaded
        if offloaded is not None:
            self._offloaded.labels(**self._who).inc(offloaded.microbatches)
            self._offloaded_bytes.labels(**self._who).inc(offloaded.bytes)
            self._offload_seconds.labels(**self._who).inc(offloaded.seconds)
            self._host_memory.labels(**self._who).set(offloaded.host_bytes)
        self._lost.labels(**self._who).inc(telemetry.lost_checkpoint)
        reduced = telemetry.reduction
        if reduced is not None:
            self._reduction_seconds.labels(**self._who).set(reduced.seconds)
            self._reduction_exposed.labels(**self._who).set(reduced.exposed)
            self._reduction_waited.labels(**self._who).set(reduced.waited)
            self._reduction_bytes.labels(**self._who).inc(reduced.bytes)
        for sample in telemetry.links:
            route = sample.route.value
            where = {"link": str(sample.link), "direction": sample.direction, "route": route}
            self._bytes.labels(**self._who, **where).inc(sample.bytes)
            self._messages.labels(**self._who, **where).inc(sample.wire.count)
            self._queue.labels(**self._who, **where).set(sample.queue_p50)
            if sample.wire.count:
                self._wire.labels(**self._who, **where).set(sample.wire.p50)
            before = self._routes.setdefault((sample.link, sample.direction), route)
            # Created before the first change: the increase of a new series would be invisible.
            reroutes = self._reroutes.labels(**self._who, link=where["link"])
            if before != route:
                self._routes[sample.link, sample.direction] = route
                reroutes.inc()
        for end in telemetry.transports:
            self._record_transport(end)
        if telemetry.ports is not None:
            self._ports.labels(**self._who).set(telemetry.ports)
        for rail in telemetry.rails:
            self._record_rail(rail)

    def _record_transport(self, end: TransportSample) -> None:
        before = self._ends.get(end.link)
        self._ends[end.link] = end
        of_link = self._who | {"link": str(end.link)}
        if before is not None and before.transport != end.transport:
            self._carries.labels(**of_link, agreed=end.agreed, transport=before.transport).set(0)
        self._carries.labels(**of_link, agreed=end.agreed, transport=end.transport).set(1)
        self._trouble.labels(**of_link).set(bool(end.trouble))
        for name, metric in self._changes.items():
            known = getattr(before, name) if before is not None else 0
            metric.labels(**of_link).inc(max(0, getattr(end, name) - known))

    def _record_rail(self, rail: RailSample) -> None:
        port = (rail.device, rail.port)
        if port not in self._known_ports and len(self._known_ports) >= MOST_PORTS:
            return
        self._known_ports.add(port)
        of_port = self._who | {"device": rail.device, "port": str(rail.port)}
        labels = list(of_port.values())
        if rail.state == "unavailable":
            _remove_series(self._active, labels)
        else:
            self._active.labels(**of_port).set(rail.state == "ACTIVE")
        for name, value in rail.counters.items():
            if value == "unavailable":
                self._counted.pop((*port, name), None)
                _remove_series(self._counts, [*labels, name])
                continue
            before = self._counted.get((*port, name), 0)
            self._counted[*port, name] = value
            # A smaller value means that the counter was reset.
            grown = value - before if value >= before else value
            self._counts.labels(**of_port, counter=name).inc(grown)


def _remove_series(metric: Counter | Gauge, labels: list[str]) -> None:
    try:
        metric.remove(*labels)
    except KeyError:
        return  # It had no series.


def start_metrics(
    context: TrainerContext, coordinate: Coordinate, plan: RankPlan
) -> RankMetrics | None:
    """Serve metrics of a rank that begins with ``plan``; None if the host has set no port."""
    if not context.metrics_port:
        return None
    job = context.job.metadata.name if context.job is not None else "job"
    host = get_wildcard_address(find_own_address(context.master_addr))
    at, column = context.metrics_port, coordinate.column
    named = coordinate.mesh.format_column_name(column)
    metrics = serve_metrics(job, coordinate.stage, column, at, host, named=named)
    if metrics is not None:
        metrics.record_plan(plan)
    return metrics


def serve_metrics(
    job: str, stage: int, replica: int, port: int, host: str, *, named: str = ""
) -> RankMetrics | None:
    """Serve metrics at ``host:port``. ``named``: the column. Warns and returns None on failure."""
    try:
        metrics = RankMetrics(job, stage, replica, named)
        from prometheus_client import start_http_server

        start_http_server(port, host, registry=metrics.registry)
    except ImportError:
        log.warning("no metrics: prometheus-client is not installed")
        return None
    except OSError as error:
        log.warning(
            "no metrics: port %d: %s; on a node with other ranks and hostNetwork, give"
            " spec.trainer.metricsPort 0 or use placement.onePodPerNode",
            port, error.strerror or error,
        )  # fmt: skip
        return None
    return metrics
