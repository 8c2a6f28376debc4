"""Classifies the end of an attempt: its cause, whether it counts, and whether to restart.

All ranks restart together, since a pipeline cannot run with a rank missing. Failures of the user's
program count against ``failurePolicy.maxRestarts``; disruptions by the cluster (eviction,
preemption, a lost node, a node that rejects the pod), and ranks that saved and ended as they were
asked to, do not. A job with invalid input is not restarted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipemorph.api.layout import RankLayout
from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.api.status import AttemptRecord
from pipemorph.exits import EXIT_NO_MORE, EXIT_SAVED
from pipemorph_operator import names
from pipemorph_operator.cluster.facts import Ended, PodFacts, parse_time

FIRST = RankLayout()
FIRST_DELAY_SECONDS = 1.0
LAST_DELAY_SECONDS = 300.0
STEADY_SECONDS = 600.0
"""An attempt that ran this long resets the restart delay: it is not part of a crash loop."""

NOT_A_CRASH = (names.R_SUSPENDED, names.R_EVICTED)
"""Reasons without a restart delay: a user or a queue stopped the attempt and decides when the
next one may run."""

EXIT_TOLD = re.compile(r"failed with exit code (\d+) ")
"""In the condition of a failed Job."""

LOST_SECONDS = 5.0
"""A pod that exists this long after its grace period is on a node that does not respond."""

MOST_REJECTED = 8
"""Attempts that end because nodes reject pods, one after the other, before the next such end
counts: the template asks for what no node gives. The delays between them add up to minutes."""


@dataclass(frozen=True)
class Cause:
    """Why an attempt ended."""

    reason: str
    message: str
    counted: bool = True
    retry: bool = True


def classify(
    ended: Ended,
    pods: Sequence[PodFacts],
    parallelism: Parallelism,
    *,
    layout: RankLayout = FIRST,
    saves: bool = False,
) -> Cause:
    """Why an attempt failed, from its Job's condition and the pods that still exist. ``layout``: of
    its last generation. ``saves``: its ranks save before they end, if they are asked to."""
    disrupted = next((p for p in pods if p.disrupted), None)
    # The disruption rule is the first in the Job's podFailurePolicy. A disruption takes precedence
    # over the errors of other ranks, which may result from it; invalid input fails again anyway.
    if disrupted is not None or "FailJob rule at index 0" in ended.message:
        where = ended.message
        if disrupted is not None:
            where = f"{ranks_of(disrupted.index, parallelism, layout)} on node {disrupted.node}"
        return Cause(names.R_DISRUPTED, where, counted=False)
    failed = sorted(
        (p for p in pods if p.problem or p.exit_code not in (None, 0)),
        key=lambda p: (p.finished_at is None, p.finished_at, p.index),
    )
    if not failed:
        # Pods that were deleted may be gone by now. The Job's condition still tells.
        code = EXIT_TOLD.search(ended.message)
        return _by_code(int(code[1]) if code else None, ended.message or ended.reason, saves)
    # Prefer the ranks that failed first: later ones may have failed because they lost a peer.
    first = [p for p in failed if p.finished_at == failed[0].finished_at]
    ranked = (
        (names.EXIT_PREFLIGHT, failed),
        (EXIT_NO_MORE, failed),
        (names.EXIT_INVALID_INPUT, first),
        (EXIT_SAVED, first),
    )
    told = (p for code, pods in ranked for p in pods if p.exit_code == code and not p.problem)
    pod = next(told, failed[0])
    message = describe(pod, parallelism, layout)
    if pod.problem:
        return Cause(
            names.R_REJECTED if pod.rejected else names.R_RANK_FAILED, message, not pod.rejected
        )
    return _by_code(pod.exit_code, message, saves)


def _by_code(code: int | None, message: str, saves: bool) -> Cause:
    if code == names.EXIT_PREFLIGHT:
        return Cause(names.R_PREFLIGHT_FAILED, message)
    if code == names.EXIT_INVALID_INPUT:
        return Cause(names.R_INVALID_INPUT, message, retry=False)
    if code == EXIT_SAVED and saves:
        # A deletion by hand leaves no condition at the pod, unlike a disruption by the cluster.
        return Cause(
            names.R_SAVED, f"saved a checkpoint, as asked to end: {message}", counted=False
        )
    return Cause(names.R_RANK_FAILED, message, retry=code != EXIT_NO_MORE)


def lost(pods: Sequence[PodFacts], parallelism: Parallelism) -> Cause | None:
    """The cause, if a rank's node no longer responds; else None. Kubernetes then waits forever for
    the node to report the end of the pod, so the Job never fails by itself.

    Ignores pods without a node, which the control plane deletes itself.
    """
    for pod in pods:
        if seconds_until_lost(pod) == 0.0:
            where = f"{ranks_of(pod.index, parallelism)} on node {pod.node}"
            return Cause(names.R_DISRUPTED, f"{where}: the node does not respond", counted=False)
    return None


def seconds_until_lost(pod: PodFacts) -> float | None:
    """Seconds until a pod that is being deleted has to be gone; 0 if its node does not respond;
    None for all others."""
    if pod.node is None or pod.gone_by is None:
        return None
    return max(0.0, pod.grace + LOST_SECONDS - pod.sighted)


def bounded(cause: Cause, records: Sequence[AttemptRecord]) -> Cause:
    """``cause``, which counts if nodes have rejected pods too often in a row."""
    last = [record.reason for record in records[-MOST_REJECTED:]]
    if cause.reason != names.R_REJECTED or last != [names.R_REJECTED] * MOST_REJECTED:
        return cause
    message = f"{cause.message}; so ended the last {MOST_REJECTED} attempts, too"
    return Cause(cause.reason, message, counted=True)


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


def ranks_of(index: int, parallelism: Parallelism, layout: RankLayout = FIRST) -> str:
    """``rank 5 (stage 1, replica 1)``, or ``pod 5 (ranks 40 to 47)`` if a pod has several ranks;
    with ``in pod 8`` if it is a rank of another number."""
    ranks = layout.ranks_in(index, parallelism.ranks_per_pod)
    if len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"pod {index} (ranks {ranks[0]} to {ranks[-1]})"
    if len(ranks) > 1:
        return f"pod {index} (ranks {', '.join(map(str, ranks))})"
    rank = str(parallelism.mesh.coordinate(ranks[0]))
    return rank if ranks[0] == index else f"{rank} in pod {index}"


def describe(pod: PodFacts, parallelism: Parallelism, layout: RankLayout = FIRST) -> str:
    """A failed pod, with its node, exit code and termination message."""
    where = f" on node {pod.node}" if pod.node else ""
    suffix = f": {pod.message}" if pod.message else ""
    which = ranks_of(pod.index, parallelism, layout)
    if pod.problem:
        return f"{which}{where}: {pod.problem}"
    return f"{which}{where} exited with code {pod.exit_code}{suffix}"
