"""Input of pictures: timed ops per rank, simulated or measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipemorph.planning.analysis.bubbles import Bubble, explain_idle_time
from pipemorph.planning.ir import OpKind, group_stages_by_rank
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation.simulator import Message, Simulation, TimedOp

SECONDS_PER_MILLISECOND = 1e-3


@dataclass(frozen=True)
class Timeline:
    """Ops of each rank in run order, in seconds from a common zero. ``stages``: by rank.

    ``messages``: messages to draw as delays. ``bubbles`` and ``limits`` (in-flight caps): by rank,
    empty if unknown. ``placement``: the rank of each stage if ranks have several stages, else
    empty.
    """

    stages: Sequence[Sequence[TimedOp]]
    title: str = ""
    messages: Sequence[Message] = ()
    bubbles: Sequence[Sequence[Bubble]] = ()
    limits: Sequence[int | None] = ()
    placement: Sequence[int] = ()

    @property
    def begin(self) -> float:
        """Start of the first op, seconds."""
        return min((ops[0].start for ops in self.stages if ops), default=0.0)

    @property
    def end(self) -> float:
        """End of the last op, seconds."""
        return max((op.end for ops in self.stages for op in ops), default=0.0)

    @staticmethod
    def from_simulation(
        simulation: Simulation,
        problem: Problem,
        *,
        title: str = "",
        microbatch_order: Sequence[int] = (),
    ) -> Timeline:
        """Timeline of a simulated iteration. ``microbatch_order[k]``: the microbatch that ran as
        microbatch *k* of the simulation; empty: *k* itself."""
        bubbles, messages = explain_idle_time(simulation, problem)
        one = simulation.schedule.one_stage_each
        order = microbatch_order or range(simulation.schedule.microbatches)
        return Timeline(
            [_scale_ops(ops, order) for ops in simulation.ranks],
            title,
            _scale_messages(messages, problem, order),
            bubbles=_scale_bubbles(bubbles),
            limits=problem.list_in_flight_limits() if one else (),
            placement=() if one else simulation.schedule.placement,
        )

    def list_op_stages(self, row: int) -> list[int] | None:
        """Stage of each op of a rank; None if ranks have one stage."""
        if not self.placement:
            return None
        mine = group_stages_by_rank(self.placement)[row]
        return [mine[op.chunk] for op in self.stages[row]]

    def format_row_name(self, row: int) -> str:
        """Name of a row: a stage, or a rank with its stages."""
        if not self.placement:
            return f"stage {row}"
        own = [str(stage) for stage, rank in enumerate(self.placement) if rank == row]
        return f"rank {row} ({', '.join(own)})"


def _scale_ops(ops: Iterable[TimedOp], order: Sequence[int]) -> list[TimedOp]:
    """Ops with times in seconds, and their microbatches in place of the places in ``order``."""
    return [
        op._replace(
            microbatch=order[op.microbatch],
            start=op.start * SECONDS_PER_MILLISECOND,
            end=op.end * SECONDS_PER_MILLISECOND,
        )
        for op in ops
    ]


def _scale_messages(
    messages: Sequence[Message], problem: Problem, order: Sequence[int]
) -> tuple[Message, ...]:
    """Messages on links with a delay, as :func:`_scale_ops` has ops."""
    return tuple(
        message._replace(
            microbatch=order[message.microbatch],
            sent=message.sent * SECONDS_PER_MILLISECOND,
            arrived=message.arrived * SECONDS_PER_MILLISECOND,
        )
        for message in messages
        if problem.links[message.link].delay > 0
    )


def _scale_bubbles(bubbles: Sequence[Sequence[Bubble]]) -> list[list[Bubble]]:
    return [
        [
            Bubble(
                each.start * SECONDS_PER_MILLISECOND, each.end * SECONDS_PER_MILLISECOND, each.cause
            )
            for each in idle
        ]
        for idle in bubbles
    ]


def trace_in_flight(ops: Sequence[TimedOp]) -> list[tuple[float, int]]:
    """Curve of a stage: ``(time, microbatches in flight from then on)``, in order of time."""
    changes = [(op.start, 1) for op in ops if op.kind is OpKind.F]
    changes += [(op.end, -1) for op in ops if op.kind in (OpKind.W, OpKind.BW)]
    # At equal times, count the end of a microbatch before the start of the next.
    curve: list[tuple[float, int]] = []
    now = 0
    for time, change in sorted(changes):
        now += change
        curve.append((time, now))
    return curve


def compute_idle_fraction(ops: Sequence[TimedOp], begin: float, end: float) -> float:
    """Share of the time from ``begin`` to ``end`` in which the stage is idle."""
    busy = sum(op.end - op.start for op in ops)
    return max(0.0, 1.0 - busy / (end - begin)) if end > begin else 0.0
