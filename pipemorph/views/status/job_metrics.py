"""Metrics of a job, computed from its status. Needs prometheus-client.

There are no series per pair of ranks, only of slow links, which are bounded. The series of a
deleted job are removed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType

from prometheus_client import Counter, Gauge

from pipemorph.control import Health, LinkState
from pipemorph.spec.job_status import Condition, TrainingStatus
from pipemorph.views.status.condition_names import R_HELD_BACK, RAILS_HEALTHY, SCHEDULE_ADAPTED

_BY_JOB = ["namespace", "name"]

JOB_GAUGES = {
    what: Gauge(f"pipemorph_job_{what}", text, _BY_JOB)
    for what, text in {
        "iteration": "Iteration in progress.",
        "iteration_seconds": "Median time of the newest iterations.",
        "bubble_fraction": "Idle time over stages × iteration time.",
        "slow_links": "Links that are currently slow.",
        "slow_reductions": "Gradient reductions that are currently slow.",
        "unknown_links": "Links without recent samples.",
        "worst_link_delay_seconds": "Largest one-way delay above normal.",
        "wanted_plan_version": "Version of the newest plan.",
        "applied_plan_version": "Version of the plan in effect.",
        "plan_held_back": "1 if a link is slow and a change of plan is held back, 0 if not.",
        "adaptations": "Plan changes so far.",
        "goodput_fraction": "Time of finished iterations over the time in which the job had its"
        " place.",
        "saved_seconds": "Seconds that plan changes have saved, compared with the initial plan.",
        "saved_error_seconds": "Error of pipemorph_job_saved_seconds, estimated from measured"
        " gains.",
        "promised_gain_fraction": "Predicted gain of the newest plan change, as a fraction of an"
        " iteration; no series after a return.",
        "measured_gain_fraction": "Measured gain of that change; below 0 if iterations take"
        " longer.",
        "peak_memory_bytes": "Highest peak memory of any stage.",
        "rails_healthy": "Condition RailsHealthy: 1 True, 0 False, no series while Unknown, or"
        " without ports.",
        "slow_stages": "Stages that compute slower than they should.",
        "rdma_ports": "RDMA ports reported.",
        "faulty_rdma_ports": "RDMA ports that are down or count errors.",
        "congested_rdma_ports": "RDMA ports with a high rate of congestion notifications.",
        "fallen_links": "Links that fell back from their rails and have not recovered.",
        "link_fallbacks": "Losses of the last rail by an end of a link, in this attempt.",
        "link_failbacks": "Recoveries of a rail after such a loss, in this attempt.",
        "recoveries": "Restarts of the ranks within their pods after a failure.",
        "last_report_timestamp_seconds": "Time of the newest report.",
    }.items()
}


IDLE_SECONDS = Counter(
    "pipemorph_job_idle_seconds_total",
    "Idle time of a rank by cause, mean over the ranks; iterations between two sampled ones count"
    " like the first of them.",
    [*_BY_JOB, "cause"],
)
_IDLE_SECONDS: dict[tuple[str, str], dict[str, float]] = {}
"""Counted seconds by cause, by job."""

_BY_LINK = [*_BY_JOB, "link", "replica"]
LINK_GAUGES = {
    "delay_seconds": Gauge(
        "pipemorph_job_link_delay_seconds",
        "One-way delay of a slow link above normal; replica: the pipeline column, the slowest.",
        _BY_LINK,
    ),
    "base_seconds": Gauge(
        "pipemorph_job_link_base_seconds", "Normal one-way time of a slow link.", _BY_LINK
    ),
}


class LinkStateCode(IntEnum):
    """Values of :data:`LINK_STATE`."""

    HEALTHY = 0
    SLOW = 1
    SLOW_DELEGATED = 2
    DELEGATED = 3
    FELL_BACK = 4
    """Fell back from its rails to another transport."""
    NARROW = 5
    """Slow because of low bandwidth, and direct."""
    UNKNOWN = 6
    """Has no recent samples."""


LINK_STATE = Gauge(
    "pipemorph_job_link_state",
    "0 healthy, 1 slow, 2 slow and delegated, 3 delegated, 4 fell back from its rails, 5 narrow,"
    " 6 unknown. No series for a link that has always been healthy.",
    [*_BY_JOB, "link"],
)
MOST_LINK_STATES = 64
"""Limit of links with a series per job."""
_LINK_STATES: dict[tuple[str, str], set[str]] = {}
"""Links with a series, by job."""
_ONCE_KNOWN: dict[tuple[str, str], set[int]] = {}
"""Links whose state was known at some time, by job. The others have never been measured."""
_SLOW_LINKS: dict[tuple[str, str], set[tuple[str, str]]] = {}
"""Link and replica of each series, by job."""


def set_slow_links(
    namespace: str, name: str, links: Mapping[tuple[int, int], tuple[float, float]]
) -> None:
    """Set the series of a job's slow links, and remove those of links that are not slow any more.
    ``links``: delay and normal time in seconds, by link and replica."""
    job = namespace, name
    now = {(str(link), str(replica)): values for (link, replica), values in links.items()}
    for gone in _SLOW_LINKS.pop(job, set()) - now.keys():
        for gauge in LINK_GAUGES.values():
            _remove_series(gauge, *job, *gone)
    for labels, (delay, base) in now.items():
        LINK_GAUGES["delay_seconds"].labels(*job, *labels).set(delay)
        LINK_GAUGES["base_seconds"].labels(*job, *labels).set(base)
    if now:
        _SLOW_LINKS[job] = set(now)


def set_link_states(namespace: str, name: str, states: Mapping[int, LinkStateCode]) -> None:
    """Set the states of a job's links; links without an entry are healthy. Above the limit of
    series, unknown links come last. A link that was never measured is new, not unknown."""
    job, unknown = (namespace, name), LinkStateCode.UNKNOWN
    once_known = _ONCE_KNOWN.setdefault(job, set())
    once_known.update(link for link, state in states.items() if state is not unknown)
    found = {
        link: state
        for link, state in states.items()
        if state is not LinkStateCode.HEALTHY and link in once_known
    }
    shown = _LINK_STATES.setdefault(job, set())
    for link in sorted(found, key=lambda each: (found[each] is unknown, -found[each])):
        if len(shown) < MOST_LINK_STATES:
            shown.add(str(link))
    for label in shown:
        LINK_STATE.labels(namespace, name, label).set(found.get(int(label), LinkStateCode.HEALTHY))


def set_job_gauges(namespace: str, name: str, values: Iterable[tuple[str, float | None]]) -> None:
    """Set a job's gauges; a None value removes the series."""
    for key, value in values:
        if value is None:
            _remove_series(JOB_GAUGES[key], namespace, name)
        else:
            JOB_GAUGES[key].labels(namespace=namespace, name=name).set(value)


def count_idle_seconds(namespace: str, name: str, totals: Mapping[str, float]) -> None:
    """Count a job's idle seconds. ``totals``: by cause so far; they begin at 0 again if another
    host takes the job over."""
    counted = _IDLE_SECONDS.setdefault((namespace, name), {})
    for cause, total in totals.items():
        before = counted.get(cause, 0.0)
        more = total - before if total >= before else total
        IDLE_SECONDS.labels(namespace, name, cause).inc(more)
        counted[cause] = total


def remove_job_series(namespace: str, name: str) -> None:
    """Remove all series of a deleted job."""
    for gauge in JOB_GAUGES.values():
        _remove_series(gauge, namespace, name)
    set_slow_links(namespace, name, {})
    for cause in _IDLE_SECONDS.pop((namespace, name), {}):
        _remove_series(IDLE_SECONDS, namespace, name, cause)
    _ONCE_KNOWN.pop((namespace, name), None)
    for link in _LINK_STATES.pop((namespace, name), set()):
        _remove_series(LINK_STATE, namespace, name, link)


def _remove_series(gauge: Gauge | Counter, *labels: str) -> None:
    try:
        gauge.remove(*labels)
    except KeyError:
        return  # There was no series.


# --- from a job's status --------------------------------------------------------------------------

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
    by_type = {c.type: c for c in conditions}
    rails_healthy, adapted = by_type.get(RAILS_HEALTHY), by_type.get(SCHEDULE_ADAPTED)
    ports = {"True": 1.0 if rails is not None and rails.ports else None, "False": 0.0}
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
            (
                "rails_healthy",
                ports.get(rails_healthy.status) if rails_healthy is not None else None,
            ),
            ("plan_held_back", float(adapted.reason == R_HELD_BACK) if adapted else None),
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
