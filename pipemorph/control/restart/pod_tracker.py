"""Presence of a job's pods: which of them run ranks, wait, or are lost.

Pure: reports of launchers and of the host, and times, in; sets of pods out.
:class:`~pipemorph.control.job_generations.JobGenerations` decides what follows for the ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from math import inf
from typing import NamedTuple

from pipemorph.control.job_state.reports import WrongAttempt
from pipemorph.spec.running_subset import RunningSubset
from pipemorph.spec.status_recoveries import PodReplacement

REPLACED_SECONDS = 300.0
"""Seconds for which pods wait for the replacement of a lost pod. After that they end and release
their resources: the next attempt queues for all."""
SILENT_SECONDS = 45.0
"""Seconds to wait for the report of a pod that is not known to be lost: longer than its ranks may
take to end, and shorter than other pods wait for it."""
ABSENT_SECONDS = 30.0
"""Seconds without a poll after which a pod without ranks counts as absent. It polls every few
seconds; each 100 pods of a job add a second to that."""
TAKEOVER_SECONDS = 12.0
"""Seconds that an ingest which has just taken over waits for polls of waiting pods before it
continues without them: two polls."""
NOTICE_SECONDS = 2.0
"""Seconds after the latest end of a lost pod's ranks in which peers may report the loss themselves,
with more detail. If a node is lost at once, no connection ends and they wait for a message."""


class LostPod(NamedTuple):
    """Loss of a pod: its reason, its time, and the latest end of the pod's ranks; wall clock,
    seconds."""

    why: str
    at: float
    gone_by: float = inf


class PodTracker:
    """Tracks the ``pods`` pods of one job."""

    def __init__(self, pods: int) -> None:
        self.pod_count = pods
        self._settles_at: float | None = None
        """Time until which waiting pods may not have polled yet; None: not known yet."""
        self._reset_pods()

    def _reset_pods(self) -> None:
        self.launcher_by_pod: dict[int, str] = {}
        """Launcher by pod, as far as known: another ingest may have received others."""
        self.awaited_since: dict[int, float] = {}
        """Lost pods whose replacements have not joined, and the times of their losses."""
        self.lost_pods: dict[int, LostPod] = {}
        """Losses of pods whose replacements have not joined."""
        self._lost_uids: set[str] = set()
        """UIDs of all pods that were ever lost."""
        self.uid_by_pod: dict[int, str] = {}
        """UID of the pod that polled last, by pod, if known to the host."""
        self.uncounted_pods: set[int] = set()
        """Pods whose loss no program has a part in."""
        self._requested_at: dict[int, float] = {}
        """Time of the last poll of a pod without ranks for the next generation."""

    def begin_attempt(self) -> None:
        """Begin an attempt, in which all pods are new."""
        self._reset_pods()
        self._settles_at = -inf

    def begin_generation(
        self, running: RunningSubset | None, waiting: Collection[int] = ()
    ) -> None:
        """Begin a generation with ranks in the pods of ``running``; None: in all. ``waiting``: pods
        that continue to wait if they have no ranks."""
        self.running_subset = running
        self.pods_with_ranks = frozenset(
            running.active_pods if running is not None else range(self.pod_count)
        )
        """Pods with ranks in this generation."""
        self.replaced_pods: set[int] = set()
        """Pods that were lost in this generation and whose replacements have joined."""
        self.idle_pods = {pod for pod in waiting if not self.has_ranks(pod)}
        """Pods whose ranks have all ended, and which can start new ones at once."""

    def has_ranks(self, pod: int) -> bool:
        """True if a pod has ranks in this generation."""
        return self.running_subset is None or pod in self.pods_with_ranks

    # --- polls and reports --------------------------------------------------------------------

    def begin_settling(self, now: float) -> None:
        """Record the first report: an ingest that took over receives the others soon."""
        if self._settles_at is None:
            self._settles_at = now + TAKEOVER_SECONDS

    def record_poll(self, pod: int, uid: str, now: float) -> bool:
        """Record a poll or report of a pod's launcher. ``uid``: UID of the pod; empty: unknown to
        the host. Returns False for a lost pod."""
        if uid in self._lost_uids:
            self.uid_by_pod.setdefault(pod, uid)
            return False
        known = self.uid_by_pod.get(pod)
        if uid and (known is None or known in self._lost_uids):
            if known is not None:
                self.launcher_by_pod.pop(pod, None)
            self.uid_by_pod[pod] = uid
            # The lost pod was the one before.
            self.awaited_since.pop(pod, None)
            self.lost_pods.pop(pod, None)
            self.uncounted_pods.discard(pod)
        return True

    def check_launcher(self, pod: int, launcher: str, uid: str, now: float) -> None:
        """Check a report of a launcher, after :meth:`record_poll`. Raises :class:`WrongAttempt` if
        another one has its place."""
        if (uid in self._lost_uids and self.uid_by_pod[pod] != uid) or (
            self.launcher_by_pod.setdefault(pod, launcher) != launcher
        ):
            raise WrongAttempt(f"pod {pod} is lost, and another one takes its place")
        self.awaited_since = {
            pod: since
            for pod, since in self.awaited_since.items()
            if now - since < REPLACED_SECONDS
        }

    def record_request(self, pod: int, now: float) -> bool:
        """Record that a pod polls for the next generation, in which it can start ranks at once.
        Returns True if it was absent before."""
        was_absent = not self.is_present(pod, now)
        self._requested_at[pod] = now
        if not self.has_ranks(pod) and pod not in self.awaited_since:
            self.idle_pods.add(pod)
        return was_absent

    def record_ended_ranks(self, pod: int, uid: str) -> None:
        """Record that all ranks of a pod have ended."""
        if not (uid and uid in self._lost_uids):
            self.idle_pods.add(pod)

    def record_joined_launcher(
        self, pod: int, launcher: str, uid: str, now: float, *, ran: bool
    ) -> LostPod | None:
        """Record a launcher that has begun: at the first start of the ranks, or in the place of a
        lost one. ``ran``: True if ranks are known to have run before. Returns the loss of the pod
        that it replaces; None: it has no ranks, or is the first one in its place."""
        known = self.launcher_by_pod.get(pod)
        self.launcher_by_pod[pod] = launcher
        if uid:
            self.uid_by_pod[pod] = uid
        self.awaited_since.pop(pod, None)
        lost = self.lost_pods.pop(pod, None)
        if not self.has_ranks(pod):
            # It polls for the next generation once it can start ranks; others continue until then.
            self.uncounted_pods.discard(pod)
            self.idle_pods.discard(pod)
            return None
        self._requested_at[pod] = now
        if known is None and lost is None and not ran:
            return None
        self.replaced_pods.add(pod)
        return lost or LostPod(f"pod {pod} was lost, and another one has taken its place", now)

    def is_known_launcher(self, pod: int, launcher: str, uid: str) -> bool:
        """True if a launcher that reports its begin has done so before, or is lost."""
        return self.launcher_by_pod.get(pod) == launcher or uid in self._lost_uids

    def expect_replacements(self, lost: Sequence[PodReplacement], attempt: int, now: float) -> bool:
        """Record the host's list of pods that are lost, or about to be, and are replaced; repeated
        calls do no harm. Returns True if a replacement is awaited that was not before."""
        any_new = False
        for each in lost:
            at = _parse_timestamp(each.at)
            if each.attempt != attempt or each.uid in self._lost_uids or each.pod >= self.pod_count:
                continue
            known = self.uid_by_pod.get(each.pod)
            replaced = known is not None and known != each.uid and known not in self._lost_uids
            self._lost_uids.add(each.uid)
            if replaced and each.pod in self.replaced_pods and not each.counted:
                self.uncounted_pods.add(each.pod)
            if replaced or now - at >= REPLACED_SECONDS:
                continue
            any_new = True
            gone_by = inf if each.gone_by is None else _parse_timestamp(each.gone_by)
            self.awaited_since[each.pod], self.lost_pods[each.pod] = (
                at,
                LostPod(each.cause, at, gone_by),
            )
            self.idle_pods.discard(each.pod)
            if each.counted:
                self.uncounted_pods.discard(each.pod)
            else:
                self.uncounted_pods.add(each.pod)
        return any_new

    # --- presence -----------------------------------------------------------------------------

    def list_present(self, now: float) -> set[int]:
        """Pods that wait for the next generation."""
        return {pod for pod in self.idle_pods if self.is_present(pod, now)}

    def is_present(self, pod: int, now: float) -> bool:
        """True if a pod waits for the next generation and has polled lately."""
        # The more pods a job has, the less often each polls.
        longest = ABSENT_SECONDS + self.pod_count / 25
        here = pod in self.idle_pods and pod not in self.awaited_since
        return here and now - self._requested_at.get(pod, now) < longest

    def list_missing(self) -> frozenset[int]:
        """Pods that had ranks in this generation and do not wait for the next one."""
        return (self.pods_with_ranks - self.idle_pods) | (
            self.pods_with_ranks & self.awaited_since.keys()
        )

    def get_silence_deadline(self, over_at: float) -> float:
        """Time at which silent pods count as lost. ``over_at``: end of the generation."""
        return over_at + SILENT_SECONDS

    def get_wait_deadline(self, missing: frozenset[int], over_at: float, patience: float) -> float:
        """Time from which none of these pods is awaited. ``patience``: seconds to wait for those
        that are known to be lost."""
        known = [
            # The notice of a loss comes first: until the others end, its ranks may run.
            max(self.lost_pods[pod].at, over_at) + patience
            for pod in missing & self.lost_pods.keys()
        ]
        if len(known) < len(missing):
            known.append(self.get_silence_deadline(over_at))
        return max(known, default=-inf)

    def get_settling_time(self) -> float:
        """Time at which all present waiting pods have polled."""
        waiting = frozenset(range(self.pod_count)) - self.pods_with_ranks
        if self._settles_at is None or waiting <= self.idle_pods:
            return -inf
        return self._settles_at

    def find_unnoticed_end(self) -> tuple[float, str]:
        """Time and reason of a generation's end that no rank reports: a pod with ranks is lost and
        its ranks have ended. Infinite: no such pod is known."""
        known = self.pods_with_ranks & self.awaited_since.keys() & self.lost_pods.keys()
        first = min(
            (self.lost_pods[pod] for pod in known), key=lambda each: each.gone_by, default=None
        )
        return (inf, "") if first is None else (first.gone_by + NOTICE_SECONDS, first.why)

    def select_running(self, pods: Collection[int]) -> RunningSubset:
        """Replicas that may run in these pods."""
        assert self.running_subset is not None, "all pods run"
        return self.running_subset.with_ready_pods(pods)


def _parse_timestamp(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()
