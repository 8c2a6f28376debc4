"""Metrics of both processes. Those of a job are in :mod:`pipemorph.views.status.job_metrics`."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from pipemorph_operator.names import INGEST_OWNER, OPERATOR_OWNER

_BY_NAMESPACE = ["job_namespace"]
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

API_REQUESTS = Counter(
    "pipemorph_api_requests_total", "Requests to the Kubernetes API.", ["verb", "code"]
)
_BY_WATCH = ["kind", "job_namespace"]
WATCH_CONFIRMED = Gauge(
    "pipemorph_watch_confirmed_timestamp_seconds",
    "Time at which the API server last confirmed the known objects of a kind.",
    _BY_WATCH,
)
OBJECTS = Gauge("pipemorph_watch_objects", "Objects known.", _BY_WATCH)
WATCH_REFUSED = Gauge(
    "pipemorph_watch_refused",
    "1 while the API server refuses access to a namespace that should be served.",
    _BY_WATCH,
)
LISTS = Counter(
    "pipemorph_watch_lists_total",
    "Lists of all objects: at the start, and when a watch cannot be resumed.",
    _BY_WATCH,
)

# --- operator -----------------------------------------------------------------------------

JOBS = {
    what: Counter(f"pipemorph_operator_jobs_{what}_total", f"Jobs {what}.", _BY_NAMESPACE)
    for what in ("created", "successful", "failed", "restarted")
}
RECONCILES = Histogram(
    "pipemorph_operator_reconcile_seconds", "Time of one reconcile.", ["result"], buckets=_FAST
)
for _result in ("ok", "error"):
    RECONCILES.labels(result=_result)  # Begins at 0, see REFUSED.
LEADS = {
    component: Gauge(
        f"{component.replace('-', '_')}_leads", "1 if this replica acts, 0 if it stands by."
    )
    for component in (OPERATOR_OWNER, INGEST_OWNER)
}
QUEUED = Gauge("pipemorph_operator_queue_depth", "Jobs waiting for a reconcile.")
NODE_ACCUSING_JOBS = Gauge(
    "pipemorph_node_accusing_jobs",
    "Jobs that had a slow link at a node within a day, for nodes with several such jobs.",
    ["node"],
)

# --- ingest -------------------------------------------------------------------------------

REPORTS = Counter(
    "pipemorph_ingest_requests_total", "Reports and polls, by status code.", ["kind", "code"]
)
REFUSED = Counter(
    "pipemorph_ingest_refused_total",
    "Rejected callers and connections, by reason.",
    ["reason"],
)
for _reason in ("review", "pod", "silent", "crowded"):
    # The counter exists from 0, so that Prometheus sees its first increment.
    REFUSED.labels(reason=_reason)
REPORT_SECONDS = Histogram(
    "pipemorph_ingest_request_seconds", "Time to answer a report.", buckets=_FAST
)
DIRECTIVES = Counter("pipemorph_ingest_directives_total", "Directives persisted.")
PERSIST_SECONDS = Histogram(
    "pipemorph_ingest_persist_seconds",
    "Time to persist a directive.",
    buckets=_FAST,
)
PLAN_SECONDS = Histogram(
    "pipemorph_ingest_plan_seconds",
    "Time of a decision, without queueing.",
    buckets=_FAST,
)
PLAN_WAIT_SECONDS = Histogram(
    "pipemorph_ingest_plan_wait_seconds",
    "Time a decision waits for a planner process.",
    buckets=_FAST,
)
PLANS_WAITING = Gauge("pipemorph_ingest_plans_waiting", "Decisions that wait for a process.")
STATUS_WRITES = Counter("pipemorph_ingest_status_writes_total", "Writes to status.", ["result"])
JOBS_TRACKED = Gauge("pipemorph_ingest_jobs", "Jobs that may report; none at a standby.")
TOKEN_REVIEWS = Counter("pipemorph_ingest_token_reviews_total", "TokenReviews requested.")
