"""Slowdown of a job as the published study defines it, by simulation of its steps."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from pipemorph.diagnose.analysis.step_graph import IN_ORDER, StepOp
from pipemorph.diagnose.analysis.steps import RecordedStep, StepSet
from pipemorph.diagnose.operation import (
    BACKWARD_RECV,
    BACKWARD_SEND,
    COMPUTE,
    FORWARD_RECV,
    FORWARD_SEND,
    OPTYPES,
)
from pipemorph.diagnose.operation_table import CODE_OF_OPTYPE

SLOWEST_PERCENT = 3
"""Share of the workers that M_W takes for the slowest."""
MOST_WORKERS = 64
"""Workers with a slowdown of their own: those for which the bound by replica and stage is the
largest."""
TRANSFER_NAMES = {
    FORWARD_SEND: "forward-pp-comm",
    FORWARD_RECV: "forward-pp-comm",
    BACKWARD_SEND: "backward-pp-comm",
    BACKWARD_RECV: "backward-pp-comm",
}
"""Transfers count as one type per direction."""
_COMPUTE = frozenset(CODE_OF_OPTYPE[name] for name in COMPUTE)


@dataclass(frozen=True)
class Slowdown:
    """Slowdowns of a job. ``recorded``, ``ideal``: mean seconds of a step, simulated with the
    recorded times, and with all ops of a type equal. ``span``: mean seconds of a step as it ran.

    ``by_…[x]``: slowdown if only the ops of *x* took their recorded times. ``m_s``, ``m_w``: share
    of the lost time that ideal times of the last stage, and of the slowest workers, would save;
    None if nothing was lost.
    """

    recorded: float
    ideal: float
    span: float
    by_optype: dict[str, float]
    by_stage: dict[int, float]
    by_dp_rank: dict[int, float]
    by_worker: dict[str, float]
    m_s: float | None
    m_w: float | None
    slowest: tuple[int, ...]
    """Numbers of the workers of M_W."""

    @property
    def total(self) -> float:
        """Slowdown S."""
        return self.recorded / self.ideal if self.ideal else 1.0

    @property
    def launch(self) -> float:
        """Slowdown by delays between the moment when an op could start and its start."""
        return self.span / self.recorded if self.recorded else 1.0


class StepSimulator:
    """Simulates the steps of a recording under changed times, and returns mean seconds."""

    def __init__(self, steps: StepSet) -> None:
        self.set = steps
        self.ideal_times = compute_ideal_times(steps.steps)
        self._ideal = [
            array("d", [*(self.ideal_times[op.optype] for op in step.ops), 0.0])
            for step in steps.steps
        ]
        self.ideal = fmean(
            step.graph.simulate(times) for step, times in zip(steps.steps, self._ideal, strict=True)
        )
        self.recorded_steps = [step.graph.simulate(step.times) for step in steps.steps]
        self.recorded = fmean(self.recorded_steps)

    def restore_groups(self, key: Callable[[StepOp], Hashable]) -> dict[Hashable, float]:
        """Seconds, by key, if only the ops with that key take their recorded times."""
        return self._mix(key, restore=True)

    def idealize_groups(self, key: Callable[[StepOp], Hashable]) -> dict[Hashable, float]:
        """Seconds, by key, if only the ops with that key take their ideal times. Ops whose key is
        None are in no group."""
        return self._mix(key, restore=False)

    def _mix(self, key: Callable[[StepOp], Hashable], *, restore: bool) -> dict[Hashable, float]:
        sums: dict[Hashable, float] = defaultdict(float)
        counts: dict[Hashable, int] = defaultdict(int)
        for step, ideal in zip(self.set.steps, self._ideal, strict=True):
            base, other = (ideal, step.times) if restore else (step.times, ideal)
            groups: dict[Hashable, list[int]] = defaultdict(list)
            for i, op in enumerate(step.ops):
                groups[key(op)].append(i)
            groups.pop(None, None)
            for name, members in groups.items():
                mixed = list(base)
                for i in members:
                    mixed[i] = other[i]
                sums[name] += step.graph.simulate(mixed)
                counts[name] += 1
        # A step without ops of a key is as the others are.
        rest = self.ideal if restore else self.recorded
        total = len(self.set.steps)
        return {
            name: (found + rest * (total - counts[name])) / total for name, found in sums.items()
        }

    def simulate_changed(self, change: Callable[[RecordedStep, list[float]], None]) -> list[float]:
        """Seconds of each step after ``change(step, times)`` has changed its times."""
        found = []
        for step in self.set.steps:
            times = list(step.times)
            change(step, times)
            found.append(step.graph.simulate(times))
        return found


def compute_ideal_times(steps: Sequence[RecordedStep]) -> dict[int, float]:
    """Ideal time by op type: the mean over all compute ops, the median over all others."""
    found: dict[int, array[float]] = defaultdict(lambda: array("d"))
    for step in steps:
        for op, time in zip(step.ops, step.times, strict=False):
            found[op.optype].append(time)
    return {
        code: fmean(times) if code in IN_ORDER else median(times) for code, times in found.items()
    }


def analyse_slowdown(simulator: StepSimulator) -> Slowdown:
    """Slowdown of the steps, in total and by type, stage, replica and worker."""
    steps, ideal = simulator.set, simulator.ideal
    workers = steps.workers

    def restore(key: Callable[[StepOp], Hashable]) -> dict[Hashable, float]:
        found = simulator.restore_groups(key)
        return {name: seconds / ideal if ideal else 1.0 for name, seconds in found.items()}

    names = [TRANSFER_NAMES.get(name, name) for name in OPTYPES]
    by_optype = {str(k): v for k, v in restore(lambda op: names[op.optype]).items()}
    by_stage = {int(str(k)): v for k, v in restore(lambda op: workers[op.worker].stage).items()}
    by_dp = {int(str(k)): v for k, v in restore(lambda op: workers[op.worker].dp_rank).items()}
    used = sorted({op.worker for op in steps.steps[0].ops})
    bound = {w: min(by_dp[workers[w].dp_rank], by_stage[workers[w].stage]) for w in used}
    ordered = sorted(used, key=lambda w: (-bound[w], workers[w].stage, workers[w].dp_rank))
    chosen = frozenset(ordered[:MOST_WORKERS])
    by_worker = restore(lambda op: op.worker if op.worker in chosen else None)
    slowest = tuple(ordered[: -(-len(used) * SLOWEST_PERCENT // 100)])
    last = steps.stages - 1

    def save(key: Callable[[StepOp], bool]) -> float | None:
        lost = simulator.recorded - ideal
        if lost <= 1e-9 * ideal:
            return None
        (seconds,) = simulator.idealize_groups(lambda op: key(op) or None).values()
        return (simulator.recorded - seconds) / lost

    return Slowdown(
        simulator.recorded,
        ideal,
        fmean(step.span for step in steps.steps),
        by_optype,
        dict(sorted(by_stage.items())),
        dict(sorted(by_dp.items())),
        {
            workers[w].key: by_worker[w]
            for w in sorted(chosen, key=lambda w: (-float(by_worker[w]), w))
        },
        save(lambda op: workers[op.worker].stage == last),
        save(lambda op: op.worker in slowest),
        slowest,
    )


def compute_bubble_fraction(steps: StepSet) -> float:
    """Idle share of the workers between the first compute op of a replica and its last, as it ran:
    the mean over replicas and steps."""
    found = []
    for step in steps.steps:
        begin: dict[int, float] = {}
        end: dict[int, float] = {}
        busy: dict[int, float] = defaultdict(float)
        for op, time in zip(step.ops, step.times, strict=False):
            if op.optype in _COMPUTE:
                replica = steps.workers[op.worker].dp_rank
                begin[replica] = min(begin.get(replica, op.start), op.start)
                end[replica] = max(end.get(replica, op.end), op.end)
                busy[replica] += time
        found += [
            1 - busy[replica] / (steps.stages * (end[replica] - begin[replica]))
            for replica in begin
            if end[replica] > begin[replica]
        ]
    return max(0.0, fmean(found)) if found else 0.0
