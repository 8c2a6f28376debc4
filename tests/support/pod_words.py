"""Reports of launchers and the operator on a job's pods, for tests of what follows from them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pipemorph.protocol import PodFailure, PodReport
from pipemorph.spec.status_recoveries import PodReplacement


def word(event: str, pod: int, generation: int = 0, **fields: Any) -> PodReport:
    """Report of the launcher of a pod on a generation, with any fields."""
    given = {"attempt": 0, "generation": generation, "pod": pod, "event": event}
    return PodReport.model_validate(given | {"launcher": f"pod {pod}"} | fields)


def lost_peer(at: float, **fields: Any) -> PodFailure:
    """The ranks of a pod have ended, since they lost another one."""
    given = {"reason": "rank 0 lost another one", "at": at, "rank": 0, "lost_peer": True}
    return PodFailure.model_validate(given | fields)


def lost_pod(pod: int, at: float, **fields: Any) -> PodReplacement:
    """A pod is lost, as the operator writes. ``at``: wall clock, seconds."""
    when = datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
    given = {"uid": f"{pod} {at}", "cause": f"pod {pod} exited with code 137", **fields}
    return PodReplacement(attempt=0, pod=pod, at=when, **given)
