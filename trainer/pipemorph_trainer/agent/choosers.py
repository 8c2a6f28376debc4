"""What a rank may run next where the order depends on when messages arrive.

The rules of the simulator (``pipemorph/planning/simulation/core.py``), op by op. A chooser lists
the ops that the rank may run, the one that it prefers first; the rank runs the first whose message
has arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pipemorph.planning import Op, OpKind
from pipemorph.planning.ir import in_flight_peak
from pipemorph.planning.offload import Residency
from pipemorph_trainer.agent.rank_plan import RankPlan


class Candidate(NamedTuple):
    """An op that may run. ``waits_for_send``: only when its message can be sent, so that another op
    may run first."""

    stage: int
    kind: OpKind
    microbatch: int
    waits_for_send: bool = False


class _Stage:
    """What has run of a stage. ``forwards``, ``backwards``, ``weights``: how many of each; a fused
    backward counts as both of the latter."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.forwards = self.backwards = self.weights = 0

    def has_run(self, op: Op) -> bool:
        if op.kind is OpKind.F:
            return op.microbatch < self.forwards
        return op.microbatch < (self.weights if op.kind is OpKind.W else self.backwards)


class Chooser:
    """Chooses the ops of a rank for one iteration, in the plan's order. Out of turn nothing runs
    where the plan waits on purpose, and F only while fewer microbatches of its stage are in flight
    than the plan ever has."""

    def __init__(self, plan: RankPlan) -> None:
        self.microbatches = plan.microbatches
        self.stages = {mine.stage: _Stage(mine.stage) for mine in plan.stages}
        self._order = plan.order
        self._turn = 0
        self._unfinished = len(self.stages)
        self._position: dict[tuple[int, OpKind, int], int] = {}
        self._waits = frozenset(plan.waits)
        self._rules = []
        for stage, order in plan.orders.items():
            backwards = [op.kind for op in order if op.kind in (OpKind.B, OpKind.BW)]
            self._rules.append((self.stages[stage], in_flight_peak(order), backwards))
        for position, (stage, op) in enumerate(self._order):
            self._position[stage, op.kind, op.microbatch] = position

    def ran(self, stage: int, kind: OpKind) -> None:
        """Count an op that has run."""
        its = self.stages[stage]
        its.forwards += kind is OpKind.F
        its.backwards += kind is OpKind.B or kind is OpKind.BW
        if kind is OpKind.W or kind is OpKind.BW:
            its.weights += 1
            self._unfinished -= its.weights == self.microbatches

    @property
    def finished(self) -> bool:
        """Whether all ops have run."""
        return not self._unfinished

    def in_turn(self) -> int:
        """Position of the first op of the plan's order that has not run; all have before it."""
        order, turn = self._order, self._turn
        while turn < len(order) and self.stages[order[turn][0]].has_run(order[turn][1]):
            turn += 1
        self._turn = turn
        return turn

    def rest(self) -> Iterator[tuple[int, Op]]:
        """The ops that have not run, in the plan's order, in which ranks cannot wait for each other
        forever."""
        left = [(s, op) for s, op in self._order[self._turn :] if not self.stages[s].has_run(op)]
        return iter(left)

    def candidates(self, held: Mapping[int, Residency]) -> list[Candidate]:
        """The ops that may run now, the preferred one first. ``held``: what is on the device, by
        stage; without the stages that have not begun the iteration."""
        turn = self.in_turn()
        stage, (kind, microbatch, _) = self._order[turn]
        if turn in self._waits:
            if stage not in held:
                return []
            # Where the device has no room for it, a W has to make some.
            if held[stage].fits(kind, microbatch):
                return [Candidate(stage, kind, microbatch)]
        found = []
        for its, peak, backwards in self._rules:
            each, f, b, w = its.stage, its.forwards, its.backwards, its.weights
            if each not in held:
                continue
            fits = held[each].fits
            if b < f and (backwards[b] is OpKind.B or w == b) and fits(backwards[b], b):
                found.append(Candidate(each, backwards[b], b))
            in_turn = each == stage and kind is OpKind.F
            if f < self.microbatches and (in_turn or f - w < peak) and fits(OpKind.F, f):
                found.append(Candidate(each, OpKind.F, f, waits_for_send=True))
            if w < b:
                found.append(Candidate(each, OpKind.W, w))
        return sorted(found, key=lambda each: self._position[each[:3]])
