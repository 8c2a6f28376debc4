"""What a stage may run next where the order depends on when messages arrive.

The rules of the simulator (``pipemorph/planning/simulation``: ``online.py``, ``guided.py``), op by
op. Each chooser lists the ops that the stage may run, the one that it prefers first; the executor
runs the first whose message has arrived.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from pipemorph.planning import Dispatch, Op, OpKind
from pipemorph.planning.ir import in_flight_peak
from pipemorph.planning.offload import Residency
from pipemorph_trainer.agent.rank_plan import RankStage


class Candidate(NamedTuple):
    """An op that may run. ``waits_for_send``: only when its message can be sent, so that another op
    may run first."""

    kind: OpKind
    microbatch: int
    waits_for_send: bool = False


class Chooser(ABC):
    """``forwards``, ``backwards``, ``weights``: how many of each have run; a fused backward counts
    as both of the latter."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self.forwards = self.backwards = self.weights = 0

    @staticmethod
    def of(dispatch: Dispatch, mine: RankStage, microbatches: int) -> Chooser:
        """The chooser of a dispatch whose order varies, for one iteration."""
        kind = GuidedChooser if dispatch is Dispatch.GUIDED else OnlineChooser
        return kind(mine, microbatches)

    @abstractmethod
    def candidates(self, held: Residency) -> list[Candidate]:
        """The ops that may run now, the preferred one first. ``held``: what is on the device."""

    def ran(self, kind: OpKind) -> None:
        """Count an op that has run."""
        self.forwards += kind is OpKind.F
        self.backwards += kind in (OpKind.B, OpKind.BW)
        self.weights += kind in (OpKind.W, OpKind.BW)


class OnlineChooser(Chooser):
    """B, then F, then W. During the warm-up only F; F within the in-flight limit; F and B within
    the device limit."""

    def __init__(self, mine: RankStage, microbatches: int) -> None:
        super().__init__(microbatches)
        limit = mine.in_flight_limit
        self._warmup = min(mine.warmup, microbatches)
        self._cap = microbatches if limit is None else min(limit, microbatches)
        self._backward = OpKind.BW if mine.fused else OpKind.B

    def candidates(self, held: Residency) -> list[Candidate]:
        f, b, w = self.forwards, self.backwards, self.weights
        found = []
        if f >= self._warmup and b < f and held.fits(self._backward, b):
            found.append(Candidate(self._backward, b))
        if f < self.microbatches and f - w < self._cap and held.fits(OpKind.F, f):
            found.append(Candidate(OpKind.F, f, waits_for_send=True))
        if w < b:
            found.append(Candidate(OpKind.W, w))
        return found


class GuidedChooser(Chooser):
    """In the plan's order. Out of turn nothing runs where the plan waits on purpose, and F only
    while fewer microbatches are in flight than the plan ever has."""

    def __init__(self, mine: RankStage, microbatches: int) -> None:
        super().__init__(microbatches)
        self._order, self._waits = mine.order, frozenset(mine.waits)
        self._peak = in_flight_peak(mine.order)
        self._position = {op: position for position, op in enumerate(mine.order)}
        self._backwards = [op.kind for op in mine.order if op.kind in (OpKind.B, OpKind.BW)]
        self._turn = 0

    def candidates(self, held: Residency) -> list[Candidate]:
        f, b, w = self.forwards, self.backwards, self.weights
        while self._has_run(*self._order[self._turn]):
            self._turn += 1
        kind, microbatch = self._order[self._turn]
        # Where the device has no room for it, a W has to make some.
        if self._turn in self._waits and held.fits(kind, microbatch):
            return [Candidate(kind, microbatch)]
        found = []
        if b < f and (self._backwards[b] is OpKind.B or w == b):
            found.append(Candidate(self._backwards[b], b))
        in_turn = kind is OpKind.F
        if f < self.microbatches and (in_turn or f - w < self._peak):
            found.append(Candidate(OpKind.F, f, waits_for_send=True))
        found = [each for each in found if held.fits(each.kind, each.microbatch)]
        if w < b:
            found.append(Candidate(OpKind.W, w))
        return sorted(found, key=lambda each: self._position[Op(each.kind, each.microbatch)])

    def _has_run(self, kind: OpKind, microbatch: int) -> bool:
        counts = {OpKind.F: self.forwards, OpKind.W: self.weights}
        return microbatch < counts.get(kind, self.backwards)
