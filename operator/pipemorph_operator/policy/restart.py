"""Classifies the end of an attempt: its cause, whether it counts, and whether to restart.

All ranks restart together, since a pipeline cannot run with a rank missing. Failures of the user's
program count against ``failurePolicy.maxRestarts``; disruptions by the cluster (eviction,
preemption, a lost node) do not. A job with invalid input is not restarted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from pipemorph.api.mesh import MeshShape
from pipemorph.api.status import AttemptRecord
from pipemorph_operator import names
from pipemorph_operator.cluster.facts import Ended, PodFacts, parse_time

FIRST_DELAY_SECONDS = 1.0
LAST_DELAY_SECONDS = 300.0
STEADY_SECONDS = 600.0
"""An attempt that ran this long resets the restart delay: it is not part of a crash loop."""

NOT_A_CRASH = (names.R_SUSPENDED, names.R_EVICTED)
"""Reasons without a restart delay: a user or a queue stopped the attempt and decides when the
next one may run."""

LOST_SECONDS = 5.0
"""A pod that exists this long after its grace period is on a node that does not respond."""


@dataclass(frozen=True)
class Cause:
    """Why an attempt ended."""

    reason: str
    message: str
    counted: bool = True
    retry: bool = True


def classify(ended: Ended, pods: Sequence[PodFacts], mesh: MeshShape) -> Cause:
    """Why an attempt failed, from its Job's condition and the pods that still exist."""
    disrupted = next((p for p in pods if p.disrupted), None)
    # The disruption rule is the first in the Job's podFailurePolicy. A disruption takes precedence
    # over the errors of other ranks, which may result from it; invalid input fails again anyway.
    if disrupted is not None or "FailJob rule at index 0" in ended.message:
        where = f"{mesh.coordinate(disrupted.index)} on node {disrupted.node}" if disrupted else ""
        return Cause(names.R_DISRUPTED, where or ended.message, counted=False)
    failed = sorted(
        (p for p in pods if p.exit_code not in (None, 0)),
        key=lambda p: (p.finished_at is None, p.finished_at, p.index),
    )
    unfit = next((p for p in failed if p.exit_code == names.EXIT_PREFLIGHT), None)
    if unfit is not None:
        return Cause(names.R_PREFLIGHT_FAILED, describe(unfit, mesh))
    # Prefer the ranks that failed first: later ones may have failed because they lost a peer.
    first = [p for p in failed if p.finished_at == failed[0].finished_at]
    unusable = next((p for p in first if p.exit_code == names.EXIT_INVALID_INPUT), None)
    if unusable is not None:
        return Cause(names.R_INVALID_INPUT, describe(unusable, mesh), retry=False)
    if failed:
        return Cause(names.R_RANK_FAILED, describe(failed[0], mesh))
    return Cause(names.R_RANK_FAILED, ended.message or ended.reason)


def lost(pods: Sequence[PodFacts], now: datetime, mesh: MeshShape) -> Cause | None:
    """The cause, if a rank's node no longer responds; else None. Kubernetes then waits forever for
    the node to report the end of the pod, so the Job never fails by itself.

    Ignores pods without a node, which the control plane deletes itself.
    """
    for pod in pods:
        if pod.node is None or pod.gone_by is None:
            continue
        if now >= pod.gone_by + timedelta(seconds=LOST_SECONDS):
            where = f"{mesh.coordinate(pod.index)} on node {pod.node}"
            return Cause(names.R_DISRUPTED, f"{where}: the node does not respond", counted=False)
    return None


def short_attempts(records: Sequence[AttemptRecord]) -> int:
    """Number of consecutive last attempts that ran less than STEADY_SECONDS."""
    count = 0
    for record in reversed(records):
        began, ended = parse_time(record.started_at), parse_time(record.ended_at)
        if began and ended and (ended - began).total_seconds() > STEADY_SECONDS:
            break
        if record.reason in NOT_A_CRASH:
            break
        count += 1
    return count


def delay_seconds(consecutive: int) -> float:
    """Delay before an attempt after ``consecutive`` short ones."""
    if consecutive <= 1:
        return 0.0
    return min(LAST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(consecutive - 2, 16))


def describe(pod: PodFacts, mesh: MeshShape) -> str:
    """A failed rank, with its node, exit code and termination message."""
    where = f" on node {pod.node}" if pod.node else ""
    suffix = f": {pod.message}" if pod.message else ""
    return f"{mesh.coordinate(pod.index)}{where} exited with code {pod.exit_code}{suffix}"
