"""Metrics of a job, computed from its status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pipemorph.control import Health, LinkState
from pipemorph.spec.job_status import Condition, TrainingStatus
from pipemorph_operator import names
from pipemorph_operator.metrics import (
    LinkStateCode,
    count_idle_seconds,
    set_job_gauges,
    set_link_states,
    set_slow_links,
)

AS_IN_STATUS = (
    "iteration", "iteration_seconds", "bubble_fraction", "wanted_plan_version",
    "applied_plan_version", "adaptations", "saved_seconds", "saved_error_seconds",
    "link_fallbacks", "link_failbacks",
)  # fmt: skip
"""Metrics with the name of their field in ``status.training``."""

_NO_IDLE_TIME: Mapping[str, float] = MappingProxyType({})


def update_job_metrics(
    job: tuple[str, str],
    training: TrainingStatus,
    conditions: Sequence[Condition],
    reported_at: float | None,
    *,
    recoveries: int,
    goodput: float | None = None,
    links: Sequence[LinkState] = (),
    idle: Mapping[str, float] = _NO_IDLE_TIME,
) -> None:
    """Update the metrics of ``job`` (namespace and name). ``reported_at``: wall clock of its newest
    report; ``recoveries``: number of restarts within its pods; ``goodput``: as in status;
    ``links``: current state of all links; ``idle``: idle seconds by cause so far."""
    rails = training.rails
    healthy = {c.type: c.status for c in conditions}.get(names.RAILS_HEALTHY)
    newest = training.last_adaptation
    change = newest if newest is not None and newest.kind == "adapt" else None
    worst = max((link.delay_ms for link in training.slow_links), default=0.0)
    set_job_gauges(
        *job,
        (
            *((name, getattr(training, name)) for name in AS_IN_STATUS),
            ("slow_links", training.slow_link_count),
            ("unknown_links", training.unknown_link_count),
            ("slow_reductions", training.slow_reduction_count),
            ("worst_link_delay_seconds", worst / 1e3),
            ("promised_gain_fraction", change.promised if change is not None else None),
            ("measured_gain_fraction", change.measured if change is not None else None),
            ("goodput_fraction", goodput),
            ("peak_memory_bytes", max(training.peak_memory, default=0) or None),
            ("recoveries", recoveries),
            ("last_report_timestamp_seconds", reported_at),
            ("rails_healthy", {"True": 1.0, "False": 0.0}.get(healthy or "Unknown")),
            ("slow_stages", training.slow_stage_count),
            ("rdma_ports", rails.ports if rails is not None else None),
            ("faulty_rdma_ports", rails.faulty_count if rails is not None else None),
            ("congested_rdma_ports", rails.congested_count if rails is not None else None),
            ("fallen_links", training.fallen_link_count),
        ),
    )
    count_idle_seconds(*job, idle)
    set_slow_links(
        *job,
        {
            (link.link, link.replica): (
                link.delay_ms / 1e3,
                max(0.0, link.wire_time_ms - link.delay_ms) / 1e3,
            )
            for link in training.slow_links
        },
    )
    set_link_states(*job, _build_link_codes(training, links))


def _build_link_codes(
    training: TrainingStatus, links: Sequence[LinkState]
) -> dict[int, LinkStateCode]:
    """Codes of the links. ``training`` also has links that only an earlier ingest measured."""
    states = {link.link: _HEALTHS[link.health] for link in links}
    states |= {link.link: LinkStateCode.SLOW for link in training.slow_links}
    narrow = {link.link for link in links if link.health is Health.SLOW and link.transfer > 0}
    for link, state in [*states.items()]:
        if state is LinkStateCode.SLOW and link in narrow:
            states[link] = LinkStateCode.NARROW
    for link, route in enumerate(training.routes):
        if route == "delegated" and states.get(link) is not LinkStateCode.UNKNOWN:
            late = states.get(link) in (LinkStateCode.SLOW, LinkStateCode.NARROW)
            states[link] = LinkStateCode.SLOW_DELEGATED if late else LinkStateCode.DELEGATED
    return states | {link.link: LinkStateCode.FELL_BACK for link in training.fallen_links}


_HEALTHS = {
    Health.HEALTHY: LinkStateCode.HEALTHY,
    Health.SLOW: LinkStateCode.SLOW,
    Health.UNKNOWN: LinkStateCode.UNKNOWN,
}
