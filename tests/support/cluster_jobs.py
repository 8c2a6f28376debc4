"""PipeMorphJobs of a cluster as kubectl prints them, with status by the models that the operator
and the ingest write it with; and a kubectl that prints them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipemorph.spec.job_status import AdaptationSummary, Condition, JobStatus, TrainingStatus
from pipemorph.spec.status_links import RailsStatus, SlowLink

NOW = datetime(2026, 1, 2, 3, 10, 0, tzinfo=UTC).timestamp()
"""Time of the commands under test."""


def at(seconds_ago: float) -> str:
    return datetime.fromtimestamp(NOW - seconds_ago, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def found(kind: str, status: Any, reason: str, message: str, seconds_ago: float) -> Condition:
    return Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message,
        last_transition_time=at(seconds_ago),
    )


SLOW = found("LinksHealthy", "False", "SlowLinks", "link 2 (+60 ms forward) slow", 130)
WELL = found("LinksHealthy", "True", "LinksHealthy", "3 links, all healthy", 200)


def slow_link(
    link: int, delay_ms: float, replica: int = 0, *, seconds_ago: float | None = 130
) -> SlowLink:
    return SlowLink(
        link=link,
        replica=replica,
        direction="forward",
        delay_ms=delay_ms,
        wire_time_ms=delay_ms + 1.1,
        confidence=0.999,
        since=None if seconds_ago is None else at(seconds_ago),
    )


CHANGE = AdaptationSummary(
    plan_version=1,
    kind="adapt",
    reason="link 2 is slow by 60.1 ms one way",
    detected_at=at(129),
    detected_at_iteration=10,
    applied_at_iteration=11,
    links=[2],
    warmup_before=[7, 5, 3, 1],
    warmup_after=[12, 11, 9, 1],
    iteration_seconds_before=1.06,
    iteration_seconds_after=0.472,
    promised=0.56,
    measured=0.53,
)


def adapted(*links: SlowLink, **fields: Any) -> TrainingStatus:
    """Figures of a job that runs a plan for a slow link 2."""
    values: dict[str, Any] = {
        "state": "training",
        "last_report_time": at(4),
        "iteration": 118,
        "iteration_seconds": 0.5,
        "bubble_fraction": 0.21,
        "routes": ["direct", "direct", "delegated"],
        "transports": ["gloo", "gloo", "rdma"],
        "wanted_plan_version": 1,
        "observed_plan_version": 1,
        "applied_plan_version": 1,
        "slow_links": list(links or [slow_link(2, 60.2)]),
        "slow_link_count": len(links or "1"),
        "rails": RailsStatus(ports=8, expected_ports=8),
        "adaptations": 1,
        "saved_seconds": 64.0,
        "saved_error_seconds": 9.6,
        "last_adaptation": CHANGE,
    }
    return TrainingStatus(**values | fields)


def healthy(**fields: Any) -> TrainingStatus:
    values: dict[str, Any] = {"state": "training", "iteration": 40, "iteration_seconds": 0.41}
    return TrainingStatus(**values | fields)


def running(training: TrainingStatus, *conditions: Condition, **fields: Any) -> JobStatus:
    values: dict[str, Any] = {
        "state": "Running",
        "ready": "4/4",
        "training": training,
        "conditions": list(conditions),
    }
    return JobStatus(**values | fields)


def cluster_job(
    name: str, status: JobStatus | None, *, namespace: str = "team", **parallelism: Any
) -> dict[str, Any]:
    """The object as kubectl prints it."""
    content: dict[str, Any] = {
        "apiVersion": "pipemorph.io/v1alpha1",
        "kind": "PipeMorphJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "parallelism": {"stages": 4} | parallelism,
            "schedule": {"microbatches": 12},
            "trainer": {"module": "m", "iterations": 1000},
        },
    }
    if status is not None:
        content["status"] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return content


KUBECTL = """#!/bin/sh
echo "$*" >> {folder}/calls
case "$3" in
-*) exec cat {folder}/list ;;
esac
[ -f "{folder}/of-$3" ] && exec cat "{folder}/of-$3"
echo 'E0101 memcache.go:265] "Unhandled Error" err="no API group list"' >&2
echo "Error from server (NotFound): pipemorphjobs.pipemorph.io \\"$3\\" not found" >&2
exit 1
"""


class Kubectl:
    """A kubectl in ``folder``, for PATH. It prints the jobs that it was given last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.becomes(KUBECTL.format(folder=folder))
        self.has()

    def becomes(self, script: str) -> None:
        """Replace the program at once."""
        written = self.folder / "kubectl.new"
        written.write_text(script)
        written.chmod(0o755)
        written.rename(self.folder / "kubectl")

    def has(self, *jobs: dict[str, Any]) -> None:
        named = {f"of-{each['metadata']['name']}": each for each in jobs}
        for name, content in {**named, "list": {"kind": "List", "items": jobs}}.items():
            written = self.folder / f"{name}.new"
            written.write_text(json.dumps(content))
            written.rename(self.folder / name)

    def calls(self) -> list[str]:
        """Arguments, call by call."""
        return (self.folder / "calls").read_text().splitlines()
