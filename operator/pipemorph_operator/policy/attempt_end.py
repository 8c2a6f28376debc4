"""Classifies the end of an attempt: its cause, whether it counts, and whether to restart.

All ranks restart together, since a pipeline cannot run without one of them. Failures of the user's
program count against ``failurePolicy.maxRestarts``. Disruptions by the cluster (eviction,
preemption, a lost node, a node that rejects the pod) do not count, nor do ranks that saved and
ended on request. A job with invalid input is not restarted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipemorph.exits import EXIT_NO_RESTART, EXIT_SAVED
from pipemorph.spec.job_status import AttemptStatus
from pipemorph.spec.layout import RankLayout
from pipemorph.spec.sections.parallelism import Parallelism
from pipemorph_operator import names
from pipemorph_operator.kube.object_facts import JobCondition, PodFacts, parse_time

FIRST_LAYOUT = RankLayout()
FIRST_DELAY_SECONDS = 1.0
LAST_DELAY_SECONDS = 300.0
STEADY_SECONDS = 600.0
"""Duration of an attempt that resets the restart delay: it is not part of a crash loop."""

NOT_A_CRASH = (names.R_SUSPENDED, names.R_EVICTED)
"""Reasons without a restart delay: a user or a queue stopped the attempt and decides when the
next one may run."""

EXIT_CODE_PATTERN = re.compile(r"failed with exit code (\d+) ")
"""Exit code in the condition of a failed Job."""

LOST_SECONDS = 5.0
"""Time after its grace period at which an existing pod counts as lost with its node."""

MAX_REJECTED = 8
"""Consecutive attempts that end because nodes reject pods, before the next such end counts: the
template requests something that no node offers. The delays between them add up to minutes."""


@dataclass(frozen=True)
class AttemptEndCause:
    """Cause of an attempt's end."""

    reason: str
    message: str
    counted: bool = True
    retry: bool = True


def classify_failure(
    ended: JobCondition,
    pods: Sequence[PodFacts],
    parallelism: Parallelism,
    *,
    layout: RankLayout = FIRST_LAYOUT,
    saves: bool = False,
) -> AttemptEndCause:
    """Cause of an attempt's failure, from its Job's condition and the pods that still exist.
    ``layout``: that of its last generation. ``saves``: its ranks save before a requested end."""
    disrupted = next((p for p in pods if p.disrupted), None)
    # The disruption rule is the first in the Job's podFailurePolicy. A disruption takes precedence
    # over the errors of other ranks, which may result from it; invalid input fails again anyway.
    if disrupted is not None or "FailJob rule at index 0" in ended.message:
        where = ended.message
        if disrupted is not None:
            where = f"{format_ranks(disrupted.index, parallelism, layout)} on node {disrupted.node}"
        return AttemptEndCause(names.R_DISRUPTED, where, counted=False)
    failed = sorted(
        (p for p in pods if p.problem or p.exit_code not in (None, 0)),
        key=lambda p: (p.finished_at is None, p.finished_at, p.index),
    )
    if not failed:
        # Deleted pods may be gone by now. The Job's condition still contains the code.
        code = EXIT_CODE_PATTERN.search(ended.message)
        return _classify_exit_code(
            int(code[1]) if code else None, ended.message or ended.reason, saves
        )
    # Prefer the ranks that failed first: later ones may have failed because they lost a peer.
    first = [p for p in failed if p.finished_at == failed[0].finished_at]
    ranked = (
        (names.EXIT_PREFLIGHT, failed),
        (EXIT_NO_RESTART, failed),
        (names.EXIT_INVALID_INPUT, first),
        (EXIT_SAVED, first),
    )
    causes = (p for code, pods in ranked for p in pods if p.exit_code == code and not p.problem)
    pod = next(causes, failed[0])
    message = describe_failed_pod(pod, parallelism, layout)
    if pod.problem:
        return AttemptEndCause(
            names.R_REJECTED if pod.rejected_by_node else names.R_RANK_FAILED,
            message,
            not pod.rejected_by_node,
        )
    return _classify_exit_code(pod.exit_code, message, saves)


def _classify_exit_code(code: int | None, message: str, saves: bool) -> AttemptEndCause:
    if code == names.EXIT_PREFLIGHT:
        return AttemptEndCause(names.R_PREFLIGHT_FAILED, message)
    if code == names.EXIT_INVALID_INPUT:
        return AttemptEndCause(names.R_INVALID_INPUT, message, retry=False)
    if code == EXIT_SAVED and saves:
        # A deletion by hand leaves no condition at the pod, unlike a disruption by the cluster.
        return AttemptEndCause(
            names.R_SAVED, f"saved a checkpoint and ended on request: {message}", counted=False
        )
    return AttemptEndCause(names.R_RANK_FAILED, message, retry=code != EXIT_NO_RESTART)


def detect_lost_node(pods: Sequence[PodFacts], parallelism: Parallelism) -> AttemptEndCause | None:
    """Cause of the attempt's end if the node of a rank no longer responds; else None. Kubernetes
    waits forever for the node to report the end of the pod, so the Job never fails by itself.

    Ignores pods without a node, which the control plane deletes itself.
    """
    for pod in pods:
        if seconds_until_lost(pod) == 0.0:
            where = f"{format_ranks(pod.index, parallelism)} on node {pod.node}"
            return AttemptEndCause(
                names.R_DISRUPTED, f"{where}: the node does not respond", counted=False
            )
    return None


def seconds_until_lost(pod: PodFacts) -> float | None:
    """Seconds until a deleted pod must be gone; 0 if its node does not respond; else None."""
    # A pod that ended before its grace period is deleted again, with a period of 0, by its node;
    # it exists until the Job controller has counted it, which may take long.
    if pod.node is None or pod.deletion_deadline is None or pod.ended:
        return None
    return max(0.0, pod.grace_seconds + LOST_SECONDS - pod.ending_seconds)


def limit_rejections(cause: AttemptEndCause, records: Sequence[AttemptStatus]) -> AttemptEndCause:
    """Cause as given, but counted if nodes have rejected pods too often in a row."""
    last = [record.reason for record in records[-MAX_REJECTED:]]
    if cause.reason != names.R_REJECTED or last != [names.R_REJECTED] * MAX_REJECTED:
        return cause
    message = f"{cause.message}; the last {MAX_REJECTED} attempts ended likewise"
    return AttemptEndCause(cause.reason, message, counted=True)


def count_short_attempts(records: Sequence[AttemptStatus]) -> int:
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


def compute_restart_delay(consecutive: int) -> float:
    """Delay before an attempt after ``consecutive`` short ones."""
    if consecutive <= 1:
        return 0.0
    return min(LAST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(consecutive - 2, 16))


def format_ranks(index: int, parallelism: Parallelism, layout: RankLayout = FIRST_LAYOUT) -> str:
    """Text such as ``rank 5 (stage 1, replica 1)``, or ``pod 5 (ranks 40 to 47)`` for several
    ranks; with ``in pod 8`` if rank and pod have different numbers."""
    ranks = layout.find_ranks_in_pod(index, parallelism.ranks_per_pod)
    if len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"pod {index} (ranks {ranks[0]} to {ranks[-1]})"
    if len(ranks) > 1:
        return f"pod {index} (ranks {', '.join(map(str, ranks))})"
    rank = str(parallelism.mesh.find_coordinate(ranks[0]))
    return rank if ranks[0] == index else f"{rank} in pod {index}"


def describe_failed_pod(
    pod: PodFacts, parallelism: Parallelism, layout: RankLayout = FIRST_LAYOUT
) -> str:
    """Text on a failed pod, with its node, exit code and termination message."""
    where = f" on node {pod.node}" if pod.node else ""
    suffix = f": {pod.message}" if pod.message else ""
    which = format_ranks(pod.index, parallelism, layout)
    if pod.problem:
        return f"{which}{where}: {pod.problem}"
    return f"{which}{where} exited with code {pod.exit_code}{suffix}"
