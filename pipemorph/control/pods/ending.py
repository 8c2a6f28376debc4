"""How the ranks of one generation ended: when, why, and which failure caused the others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from pipemorph.control.pods.presence import Lost
from pipemorph.wire import Loss
from pipemorph.wire.generations import LONGEST_LINE


class Ending:
    """Of a generation; nothing has ended yet. Times: wall clock, seconds."""

    def __init__(self) -> None:
        self.why, self.at = "", 0.0
        """Why and when the generation was over; empty while it is not."""
        self.hang = False
        """Whether it is since ranks hang."""
        self.decided_at = -inf
        """When it was last looked whether the next one begins."""
        self.losses: dict[int, Loss] = {}
        """By pod, how its ranks failed."""
        self._since = inf
        """When the first pod was lost: earlier than any launcher may have said."""

    def __bool__(self) -> bool:
        return bool(self.why)

    @property
    def lost_at(self) -> float:
        """When the first ranks were lost."""
        return min(self.at, self._since)

    def begin(self, why: str, now: float, *, hang: bool = False) -> None:
        """The generation is over."""
        self.why, self.at, self.hang = why, now, hang

    def lose(self, pod: int, lost: Lost) -> None:
        """Take the loss of a pod for that of its ranks, unless these have failed by themselves."""
        self._since = min(self._since, lost.at)
        own = self.losses.get(pod)
        if own is None or own.lost_peer:
            self.losses[pod] = Loss(reason=lost.why[:LONGEST_LINE], at=lost.at)

    def blame(self, missing: Iterable[int], lost: Mapping[int, Lost]) -> None:
        """Take pods that do not come for the cause of the failure: others lost them. ``lost``: how,
        of those of which that is known."""
        for pod in missing:
            unknown = Lost(f"pod {pod} does not say that its ranks have ended", self.at)
            self.lose(pod, lost.get(pod, unknown))

    def cause(self) -> tuple[int | None, Loss]:
        """The pod whose failure caused the others, and that failure: what no restart changes, then
        what lost no peer, then the first."""
        found = min(
            self.losses.items(),
            key=lambda each: (each[1].retry, each[1].lost_peer, each[1].at),
            default=None,
        )
        return found or (None, Loss(reason=self.why, at=self.at, lost_peer=True))

    def words(self, cause: Loss) -> str:
        """Of ranks that hang also who waits for whom, those first that wait for no other."""
        if not cause.hang:
            return cause.reason
        told = [self.losses[pod] for pod in sorted(self.losses)]
        waits = [each for loss in sorted(told, key=lambda x: x.lost_peer) for each in loss.waits]
        return f"{cause.reason}: {'; '.join(waits)}"[:LONGEST_LINE]
