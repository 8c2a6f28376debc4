"""Selection of a rank's next op where the order depends on when messages arrive.

It follows the rules of the simulator (``pipemorph/planning/simulation/execution.py``), op by op.
The selector lists the ops that the rank may run, in order of preference. The rank runs the first
one whose message has arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pipemorph.planning import Op, OpKind
from pipemorph.planning.ir import count_in_flight_peak
from pipemorph.planning.offload import DeviceResidency
from pipemorph_trainer.agent.rank_plan import RankPlan


class OpCandidate(NamedTuple):
    """Op that may run. ``waits_for_send``: it runs only when its message can be sent, and another
    op may run first."""

    stage: int
    kind: OpKind
    microbatch: int
    waits_for_send: bool = False


class _StageProgress:
    """Progress of one stage: ``forwards``, ``backwards`` and ``weights`` count the ops that have
    run; a fused backward counts as one backward and one weight op."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.forwards = self.backwards = self.weights = 0

    def has_run(self, op: Op) -> bool:
        if op.kind is OpKind.F:
            return op.microbatch < self.forwards
        return op.microbatch < (self.weights if op.kind is OpKind.W else self.backwards)


class OpSelector:
    """Selects the ops of a rank for one iteration, in the plan's order. No op runs out of order
    where the plan waits on purpose. An F runs out of order only while its stage has fewer
    microbatches in flight than the plan's peak."""

    def __init__(self, plan: RankPlan) -> None:
        self.microbatches = plan.microbatches
        self.stages = {mine.stage: _StageProgress(mine.stage) for mine in plan.stages}
        self._order = plan.order
        self._turn = 0
        self._unfinished = len(self.stages)
        self._position: dict[tuple[int, OpKind, int], int] = {}
        self._waits = frozenset(plan.waits)
        self._rules = []
        for stage, order in plan.orders.items():
            backwards = [op.kind for op in order if op.kind in (OpKind.B, OpKind.BW)]
            self._rules.append((self.stages[stage], count_in_flight_peak(order), backwards))
        for position, (stage, op) in enumerate(self._order):
            self._position[stage, op.kind, op.microbatch] = position

    def record_op(self, stage: int, kind: OpKind) -> None:
        """Count an op that has run."""
        progress = self.stages[stage]
        progress.forwards += kind is OpKind.F
        progress.backwards += kind is OpKind.B or kind is OpKind.BW
        if kind is OpKind.W or kind is OpKind.BW:
            progress.weights += 1
            self._unfinished -= progress.weights == self.microbatches

    @property
    def finished(self) -> bool:
        """True if all ops have run."""
        return not self._unfinished

    def find_next_position(self) -> int:
        """Position in the plan's order of the first op that has not run."""
        order, turn = self._order, self._turn
        while turn < len(order) and self.stages[order[turn][0]].has_run(order[turn][1]):
            turn += 1
        self._turn = turn
        return turn

    def iterate_remaining_ops(self) -> Iterator[tuple[int, Op]]:
        """Ops that have not run, in the plan's order, which is free of deadlock."""
        rest = [(s, op) for s, op in self._order[self._turn :] if not self.stages[s].has_run(op)]
        return iter(rest)

    def list_candidates(self, held: Mapping[int, DeviceResidency]) -> list[OpCandidate]:
        """Ops that may run now, the preferred one first. ``held``: residency on the device of each
        stage that has begun the iteration."""
        turn = self.find_next_position()
        stage, (kind, microbatch, _) = self._order[turn]
        if turn in self._waits:
            if stage not in held:
                return []
            # If the device has no room for the op, a W must free some first.
            if held[stage].can_run(kind, microbatch):
                return [OpCandidate(stage, kind, microbatch)]
        found = []
        for its, peak, backwards in self._rules:
            each, f, b, w = its.stage, its.forwards, its.backwards, its.weights
            if each not in held:
                continue
            fits = held[each].can_run
            if b < f and (backwards[b] is OpKind.B or w == b) and fits(backwards[b], b):
                found.append(OpCandidate(each, backwards[b], b))
            in_turn = each == stage and kind is OpKind.F
            if f < self.microbatches and (in_turn or f - w < peak) and fits(OpKind.F, f):
                found.append(OpCandidate(each, OpKind.F, f, waits_for_send=True))
            if w < b:
                found.append(OpCandidate(each, OpKind.W, w))
        return sorted(found, key=lambda each: self._position[each[:3]])
