"""Which pods of a job are there: which are lost, and which wait.

Pure: words of launchers and of the host, and times, in; sets of pods out. What follows for the
ranks :class:`~pipemorph.control.generations.Generations` decides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from math import inf
from typing import NamedTuple

from pipemorph.api.running import Running
from pipemorph.api.status_recoveries import PodReplacement
from pipemorph.control.observed.reports import WrongAttempt

REPLACED_SECONDS = 300.0
"""How long the pods of a job wait for the one that takes the place of a lost pod. After that they
end, and give back what they hold: the next attempt queues for all."""
SILENT_SECONDS = 45.0
"""How long to wait for the word of a pod of which nobody knows that it is lost: longer than its
ranks may take to end, and less long than other pods wait for it."""
UNHEARD_SECONDS = 30.0
"""A pod without ranks that has not asked for the next generation for so long is not there. It asks
every few seconds; of more than a hundred, each after so many more seconds as there are hundreds."""
TAKEOVER_SECONDS = 12.0
"""How long the pods that wait have to be heard of by an ingest that has just taken over, before it
goes on without them: two of their requests."""
GONE_SECONDS = 2.0
"""After the latest time at which the ranks of a lost pod end: for their peers to notice, which say
more. Where its node is lost at once no connection ends, and they would wait for a message."""


class Lost(NamedTuple):
    """How a pod was lost, when, and when its ranks have ended at the latest: wall clock,
    seconds."""

    why: str
    at: float
    gone_by: float = inf


class Presence:
    """The ``pods`` pods of one job."""

    def __init__(self, pods: int) -> None:
        self.pods = pods
        self._settles_at: float | None = None
        """Until when pods that wait may not have been heard of yet; None: not known yet."""
        self._begin_pods()

    def _begin_pods(self) -> None:
        self.launchers: dict[int, str] = {}
        """By pod, as far as known: another ingest may have heard of the others."""
        self.awaited: dict[int, float] = {}
        """Lost pods, and since when: no other one has joined in their places."""
        self.lost: dict[int, Lost] = {}
        """Pods that are, unless others have joined in their places."""
        self._told: set[str] = set()
        """UIDs of all that were."""
        self.uids: dict[int, str] = {}
        """By pod, of the one that was heard of last, where the host knows it."""
        self.uncounted: set[int] = set()
        """Pods whose loss no program has a part in."""
        self._seen: dict[int, float] = {}
        """When a pod without ranks last asked for the next generation."""

    def begin_attempt(self) -> None:
        """All pods are others from now on."""
        self._begin_pods()
        self._settles_at = -inf

    def begin_generation(self, running: Running | None, waiting: Collection[int] = ()) -> None:
        """Ranks begin in the pods of ``running``; None: in all. ``waiting``: pods that go on
        waiting if they have none."""
        self.running = running
        self.with_ranks = frozenset(running.pods if running is not None else range(self.pods))
        """The pods with ranks in this generation."""
        self.replaced: set[int] = set()
        """Those that were lost in it, and in whose places others have joined."""
        self.gone = {pod for pod in waiting if not self.runs(pod)}
        """Pods in which no rank is left, and which can start some at once."""

    def runs(self, pod: int) -> bool:
        """Whether a pod has ranks in this generation."""
        return self.running is None or pod in self.with_ranks

    # --- what is heard ------------------------------------------------------------------------

    def begin_to_settle(self, now: float) -> None:
        """The first word has come: an ingest that took over hears the others soon."""
        if self._settles_at is None:
            self._settles_at = now + TAKEOVER_SECONDS

    def heard(self, pod: int, uid: str, now: float) -> bool:
        """Take that the launcher of a pod asks or tells. ``uid``: of the pod, empty if the host
        does not know it. Returns False if that is a pod that is lost."""
        if uid in self._told:
            self.uids.setdefault(pod, uid)
            return False
        known = self.uids.get(pod)
        if uid and (known is None or known in self._told):
            if known is not None:
                self.launchers.pop(pod, None)
            self.uids[pod] = uid
            # Whoever is lost was there before.
            self.awaited.pop(pod, None)
            self.lost.pop(pod, None)
            self.uncounted.discard(pod)
        return True

    def speaks(self, pod: int, launcher: str, uid: str, now: float) -> None:
        """Take that a launcher that :meth:`heard` knows tells something. Raises
        :class:`WrongAttempt` if another one has its place."""
        if (uid in self._told and self.uids[pod] != uid) or (
            self.launchers.setdefault(pod, launcher) != launcher
        ):
            raise WrongAttempt(f"pod {pod} is lost, and another one takes its place")
        self.awaited = {
            pod: since for pod, since in self.awaited.items() if now - since < REPLACED_SECONDS
        }

    def asks(self, pod: int, now: float) -> bool:
        """Take that a pod asks for the next generation, in which it can start ranks at once.
        Returns whether that is news."""
        news = not self.is_present(pod, now)
        self._seen[pod] = now
        if not self.runs(pod) and pod not in self.awaited:
            self.gone.add(pod)
        return news

    def ended(self, pod: int, uid: str) -> None:
        """Take that no rank is left in a pod."""
        if not (uid and uid in self._told):
            self.gone.add(pod)

    def joins(self, pod: int, launcher: str, uid: str, now: float, *, ran: bool) -> Lost | None:
        """Take a launcher that has begun: in the first start of the ranks, or instead of one that
        is lost. ``ran``: whether ranks are known to have run before. Returns how the one was lost
        in whose place it has ranks; None: it has none, or is the first one there."""
        known = self.launchers.get(pod)
        self.launchers[pod] = launcher
        if uid:
            self.uids[pod] = uid
        self.awaited.pop(pod, None)
        lost = self.lost.pop(pod, None)
        if not self.runs(pod):
            # It asks for the next generation once it can start ranks at once: others go on so long.
            self.uncounted.discard(pod)
            self.gone.discard(pod)
            return None
        self._seen[pod] = now
        if known is None and lost is None and not ran:
            return None
        self.replaced.add(pod)
        return lost or Lost(f"pod {pod} was lost, and another one has taken its place", now)

    def knows(self, pod: int, launcher: str, uid: str) -> bool:
        """Whether a launcher that says that it has begun has said so before, or is lost."""
        return self.launchers.get(pod) == launcher or uid in self._told

    def expect(self, lost: Sequence[PodReplacement], attempt: int, now: float) -> bool:
        """Take from the host which pods are lost, or about to be, and that others will take their
        places; as often as it likes. Returns whether one is waited for that was not before."""
        news = False
        for each in lost:
            at = _seconds(each.at)
            if each.attempt != attempt or each.uid in self._told or each.pod >= self.pods:
                continue
            known = self.uids.get(each.pod)
            replaced = known is not None and known != each.uid and known not in self._told
            self._told.add(each.uid)
            if replaced and each.pod in self.replaced and not each.counted:
                self.uncounted.add(each.pod)
            if replaced or now - at >= REPLACED_SECONDS:
                continue
            news = True
            gone_by = inf if each.gone_by is None else _seconds(each.gone_by)
            self.awaited[each.pod], self.lost[each.pod] = at, Lost(each.cause, at, gone_by)
            self.gone.discard(each.pod)
            if each.counted:
                self.uncounted.discard(each.pod)
            else:
                self.uncounted.add(each.pod)
        return news

    # --- who is there -------------------------------------------------------------------------

    def present(self, now: float) -> set[int]:
        """Pods that wait for the next generation."""
        return {pod for pod in self.gone if self.is_present(pod, now)}

    def is_present(self, pod: int, now: float) -> bool:
        # Of many pods each asks less often.
        longest = UNHEARD_SECONDS + self.pods / 25
        here = pod in self.gone and pod not in self.awaited
        return here and now - self._seen.get(pod, now) < longest

    def missing(self) -> frozenset[int]:
        """Pods that had ranks in this generation and do not wait for the next one."""
        return (self.with_ranks - self.gone) | (self.with_ranks & self.awaited.keys())

    def silent_until(self, over_at: float) -> float:
        """When pods that say nothing are given up. ``over_at``: when the generation was over."""
        return over_at + SILENT_SECONDS

    def given_up_at(self, missing: frozenset[int], over_at: float, patience: float) -> float:
        """When none of these pods is waited for any more. ``patience``: seconds for which those
        that are known to be lost are."""
        known = [
            # The notice comes first: until the others end, its ranks may run.
            max(self.lost[pod].at, over_at) + patience
            for pod in missing & self.lost.keys()
        ]
        if len(known) < len(missing):
            known.append(self.silent_until(over_at))
        return max(known, default=-inf)

    def settled_at(self) -> float:
        """When all pods that wait have been heard of, if they are there."""
        waiting = frozenset(range(self.pods)) - self.with_ranks
        if self._settles_at is None or waiting <= self.gone:
            return -inf
        return self._settles_at

    def unnoticed(self) -> tuple[float, str]:
        """When the generation is over although no rank says so, and why: a pod with ranks is lost,
        and its ranks have ended. Infinite: no such pod is known."""
        known = self.with_ranks & self.awaited.keys() & self.lost.keys()
        first = min((self.lost[pod] for pod in known), key=lambda each: each.gone_by, default=None)
        return (inf, "") if first is None else (first.gone_by + GONE_SECONDS, first.why)

    def running_in(self, pods: Collection[int]) -> Running:
        """What may run in these pods."""
        assert self.running is not None, "all pods run"
        return self.running.in_pods(pods)


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()
