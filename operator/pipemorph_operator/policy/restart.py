"""What an attempt's end means: why it ended, whether it counts, whether another one starts.

All ranks restart together or not at all: a pipeline with one rank missing does nothing. What
the user's program did counts against ``failurePolicy.maxRestarts``; what the cluster did to it
(eviction, preemption, a lost node) does not. Input that cannot be used is not tried again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from pipemorph.api.status import AttemptRecord
from pipemorph_operator import names
from pipemorph_operator.cluster.facts import Ended, PodFacts, parse_time

FIRST_DELAY_SECONDS = 1.0
LAST_DELAY_SECONDS = 300.0
STEADY_SECONDS = 600.0
"""An attempt that ran this long was not part of a crash loop: the delay starts again."""

NOT_A_CRASH = (names.R_SUSPENDED, names.R_EVICTED)
"""Somebody stopped these attempts, and says when another one may run."""

LOST_SECONDS = 5.0
"""A pod that is still there so long after its end was due has a node that does not answer."""


@dataclass(frozen=True)
class Cause:
    """Why an attempt ended."""

    reason: str
    message: str
    counted: bool = True
    retry: bool = True


def classify(ended: Ended, pods: Sequence[PodFacts], stages: int) -> Cause:
    """Why a failed attempt failed, from its Job's condition and the pods that are still there."""
    disrupted = next((p for p in pods if p.disrupted), None)
    # The disruption rule is the first of the Job's podFailurePolicy. What the other ranks say then
    # may come of it; input that is bad by itself is so in the next attempt, too.
    if disrupted is not None or "FailJob rule at index 0" in ended.message:
        where = f"{rank(disrupted.index, stages)} on node {disrupted.node}" if disrupted else ""
        return Cause(names.R_DISRUPTED, where or ended.message, counted=False)
    failed = sorted(
        (p for p in pods if p.exit_code not in (None, 0)),
        key=lambda p: (p.finished_at is None, p.finished_at, p.index),
    )
    unfit = next((p for p in failed if p.exit_code == names.EXIT_PREFLIGHT), None)
    if unfit is not None:
        return Cause(names.R_PREFLIGHT_FAILED, describe(unfit, stages))
    # Of the ranks that failed first: what is bad for all is not found by one that lost its peer.
    first = [p for p in failed if p.finished_at == failed[0].finished_at]
    unusable = next((p for p in first if p.exit_code == names.EXIT_INVALID_INPUT), None)
    if unusable is not None:
        return Cause(names.R_INVALID_INPUT, describe(unusable, stages), retry=False)
    if failed:
        return Cause(names.R_RANK_FAILED, describe(failed[0], stages))
    return Cause(names.R_RANK_FAILED, ended.message or ended.reason)


def lost(pods: Sequence[PodFacts], now: datetime, stages: int) -> Cause | None:
    """Why an attempt is over whose Job cannot know: a rank's node is gone, and with it whoever
    would report the rank's end. Kubernetes waits for such a node for ever.

    A pod that never had a node is ended by the control plane itself, in its own time.
    """
    for pod in pods:
        if pod.node is None or pod.gone_by is None:
            continue
        if now >= pod.gone_by + timedelta(seconds=LOST_SECONDS):
            where = f"{rank(pod.index, stages)} on node {pod.node}"
            return Cause(names.R_DISRUPTED, f"{where}: the node does not answer", counted=False)
    return None


def short_attempts(records: Sequence[AttemptRecord]) -> int:
    """How many of the last attempts ended soon after they began."""
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
    """Wait before an attempt that follows ``consecutive`` ones that ended early."""
    if consecutive <= 1:
        return 0.0
    return min(LAST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(consecutive - 2, 16))


def rank(index: int, stages: int) -> str:
    """``rank 5 (stage 1, replica 1)``."""
    return f"rank {index} (stage {index % stages}, replica {index // stages})"


def describe(pod: PodFacts, stages: int) -> str:
    """A failed rank in its own words."""
    where = f" on node {pod.node}" if pod.node else ""
    said = f": {pod.message}" if pod.message else ""
    return f"{rank(pod.index, stages)}{where} exited with code {pod.exit_code}{said}"
