"""Exit analysis of one generation: when and why it ended, and the first failure. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from pipemorph.control.restart.pod_tracker import LostPod
from pipemorph.protocol import PodFailure
from pipemorph.protocol.generation_messages import LONGEST_LINE


class ExitAnalysis:
    """Exits of a generation's ranks; False while they run. Times: wall clock, seconds."""

    def __init__(self) -> None:
        self.why, self.ended_at = "", 0.0
        """Reason and time of the generation's end; empty while it runs."""
        self.ranks_hang = False
        """True if the generation ended because ranks hang."""
        self.decided_at = -inf
        """Time of the last check whether the next generation can begin."""
        self.losses: dict[int, PodFailure] = {}
        """Failure of a pod's ranks, by pod."""
        self._first_lost_at = inf
        """Time of the first loss of a pod, which may be earlier than any launcher's report."""

    def __bool__(self) -> bool:
        return bool(self.why)

    @property
    def lost_at(self) -> float:
        """Time at which the first ranks were lost."""
        return min(self.ended_at, self._first_lost_at)

    def record_end(self, end_reason: str, now: float, *, hang: bool = False) -> None:
        """Record the end of the generation."""
        self.why, self.ended_at, self.ranks_hang = end_reason, now, hang

    def record_lost_pod(self, pod: int, lost: LostPod) -> None:
        """Record the loss of a pod as the failure of its ranks, unless these failed before."""
        self._first_lost_at = min(self._first_lost_at, lost.at)
        own = self.losses.get(pod)
        if own is None or own.lost_peer:
            self.losses[pod] = PodFailure(reason=lost.why[:LONGEST_LINE], at=lost.at)

    def blame_missing_pods(self, missing: Iterable[int], lost: Mapping[int, LostPod]) -> None:
        """Blame the failure on missing pods: others lost them. ``lost``: known losses."""
        for pod in missing:
            unknown = LostPod(f"pod {pod} has not reported the end of its ranks", self.ended_at)
            self.record_lost_pod(pod, lost.get(pod, unknown))

    def find_cause(self) -> tuple[int | None, PodFailure]:
        """Find the pod whose failure caused the others, and that failure. First come failures that
        no restart changes, then those that did not lose a peer, then the earliest."""
        found = min(
            self.losses.items(),
            key=lambda each: (each[1].retry, each[1].lost_peer, each[1].at),
            default=None,
        )
        return found or (None, PodFailure(reason=self.why, at=self.ended_at, lost_peer=True))

    def describe_cause(self, cause: PodFailure) -> str:
        """Text for a cause. For ranks that hang it adds which rank waits for which, first those
        that wait for no other."""
        if not cause.hang:
            return cause.reason
        losses = [self.losses[pod] for pod in sorted(self.losses)]
        waits = [each for loss in sorted(losses, key=lambda x: x.lost_peer) for each in loss.waits]
        return f"{cause.reason}: {'; '.join(waits)}"[:LONGEST_LINE]
