"""Idle time of an iteration by cause.

A rank is idle while it runs neither ops nor the optimizer. Its idle time is measured; the causes
are found by simulation of the iteration, repeated until it is steady, with the times that the ranks
measured. Then one cause after another is removed, in the order of :data:`REMOVALS`: what a removal
saves is the idle time of that cause, on all ranks. So the causes add up, and where several hide
each other the last one gets the time.

- ``gc``: pauses of Python's garbage collector. ``data``: code of the script between two steps, most
  of it loading of data. ``checkpoint``: saving the state.
- ``reduction``: of gradients, of their norm, and of tied weights, without waiting for late ranks.
- ``link``: transfers between stages, and the ranks' own time to send, receive and serve links
  between ops, and to agree on a plan.
- ``work``: microbatches that differ; then each takes the mean of its replicas.
- ``stage``: ops of one type that differ between stages or ranks; then each takes the median.
- ``bubble``: the rest of the simulated idle time, which the order of ops has with equal times.
- ``other``: the measured idle time that the simulation does not have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from statistics import fmean, median_low

from pipemorph.diagnose.analysis.step_graph import (
    COLLECTIVES,
    IN_ORDER,
    CircularOrderError,
    StepGraph,
    StepOp,
    build_graph,
)
from pipemorph.diagnose.analysis.steps import infer_receive, measure_times
from pipemorph.diagnose.operation import (
    BACKWARD,
    CLIP,
    DATA,
    EMBEDDING_REDUCE,
    FORWARD,
    GC,
    LOSS,
    OPTIMIZER,
    REDUCE_SCATTER,
    WEIGHT,
)
from pipemorph.diagnose.operation_table import CODE_OF_OPTYPE, Worker
from pipemorph.planning.ir import OpKind
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.protocol.op_traces import OpsTrace, RankTimes
from pipemorph.protocol.samples import IdleCause, IdleSeconds

REMOVALS: tuple[IdleCause, ...] = (
    "gc", "data", "checkpoint", "reduction", "link", "work", "stage",
)  # fmt: skip
"""Causes in the order in which they are removed."""
MOST_REPETITIONS, AVERAGED = 10, 4
"""Most simulated repetitions of the iteration, and the newest ones whose mean is taken if they do
not become equal."""
STEADY_SECONDS = 1e-7
"""Difference between two repetitions up to which they are equal."""

OPTYPES = {OpKind.F: FORWARD, OpKind.B: BACKWARD, OpKind.BW: BACKWARD, OpKind.W: WEIGHT}
"""Op types by the kinds of a plan."""


def attribute_idle_time(traces: Sequence[OpsTrace]) -> IdleSeconds | None:
    """Idle seconds by cause, mean over the ranks whose ``traces`` are given: of one iteration, with
    all stages of each column. None if the ops do not belong together."""
    by_rank: dict[tuple[int, int], list[OpsTrace]] = defaultdict(list)
    for trace in traces:
        by_rank[trace.column, trace.rank].append(trace)
    ranks = [sorted(each, key=lambda trace: trace.stage) for each in by_rank.values()]
    ranks.sort(key=lambda rank: (rank[0].column, rank[0].stage))
    iteration = _IterationModel()
    if not all(trace.kinds for trace in traces):
        return None
    column, place, shift = -1, 0, 0.0
    for rank in ranks:
        if (times := rank[0].rank_times) is None:
            return None
        first = rank[0].column != column
        column, place = rank[0].column, 0 if first else place + 1
        shift = 0.0 if first else shift + times.clock_offset
        iteration.add_rank(Worker(column, place), rank, times, shift)
    try:
        return iteration.attribute() if ranks else None
    except CircularOrderError:
        return None


@dataclass
class _IterationModel:
    """Ops of all ranks in an iteration, with the other times of the ranks as ops.

    ``places``: pipeline rank by stage. ``starts``: the first op of each rank, which takes no time.
    ``of_cause``: ops of which a cause alone consists. ``kinds``: those of compute ops.
    ``waited``: seconds in each collective, with the waiting for other ranks. ``receives``: start of
    each compute op, and whether its rank waited for it. ``windows``: sum of the whole times of the
    ranks. ``at``: end of the newest op.
    """

    workers: list[Worker] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)
    ops: list[StepOp] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    of_cause: dict[IdleCause, list[int]] = field(default_factory=lambda: defaultdict(list))
    kinds: dict[int, OpKind] = field(default_factory=dict)
    optimizers: list[int] = field(default_factory=list)
    waited: dict[int, float] = field(default_factory=dict)
    receives: dict[int, tuple[float, bool]] = field(default_factory=dict)
    windows: float = 0.0
    at: float = 0.0

    def add_rank(
        self, worker: Worker, traces: Sequence[OpsTrace], times: RankTimes, shift: float
    ) -> None:
        """Add a rank. ``traces``: of its stages. ``shift``: seconds by which its clock is ahead of
        that of the first rank of its column."""
        self.workers.append(worker)
        self.places |= {trace.stage: worker.stage for trace in traces}
        self.windows += times.window
        rows = [
            (op._replace(start=op.start - shift, end=op.end - shift), trace.stage, waited)
            for trace in traces
            for op, waited in zip(trace.ops, trace.waits or repeat(0), strict=False)
        ]
        rows.sort(key=lambda row: row[0].start)
        origin, (first, stage, waited) = traces[0].origin - shift, rows[0]
        # The first stage begins late if its step does; others wait for it anyway.
        begins = origin + times.drawn if not stage else first.start - waited / 1e6
        self.at = begins - sum(
            (times.optimizer, times.data, times.drawn, times.gc, times.checkpoint)
        )
        self.starts.append(self._append(DATA, 0.0))
        self.optimizers.append(self._append(OPTIMIZER, times.optimizer))
        self.of_cause["data"].append(self._append(DATA, times.data + times.drawn))
        self.of_cause["gc"].append(self._append(GC, times.gc))
        self.of_cause["checkpoint"].append(self._append(DATA, times.checkpoint))
        pauses = [(origin + s / 1e6, origin + (s + d) / 1e6) for s, d in times.pauses]
        for op, stage, waited in rows:
            self._append_compute(op, stage, waited / 1e6, pauses)
        for optype, seconds in (
            (REDUCE_SCATTER, times.reduction), (EMBEDDING_REDUCE, times.tied), (CLIP, times.norm),
        ):  # fmt: skip
            if seconds is not None:
                self._append_collective(optype, seconds)

    def _append(self, optype: str, seconds: float, chunk: int = -1, microbatch: int = -1) -> int:
        """Append an op of the newest rank after its last one. Returns its number."""
        at, self.at = self.at, self.at + seconds
        code, worker = CODE_OF_OPTYPE[optype], len(self.workers) - 1
        self.ops.append(StepOp(worker, code, chunk, microbatch, False, at, self.at, at, True))
        return len(self.ops) - 1

    def _append_collective(self, optype: str, seconds: float) -> None:
        self.of_cause["reduction"].append(i := self._append(optype, seconds))
        self.waited[i] = seconds

    def _append_compute(
        self, op: TimedOp, stage: int, waited: float, pauses: Sequence[tuple[float, float]]
    ) -> None:
        """Append a compute op, after the pauses before it and in it, and after the time in which
        the rank handled messages. ``waited``: seconds that it waited for the op's message."""

        def count_paused(since: float, until: float) -> float:
            return sum(max(0.0, min(until, end) - max(since, start)) for start, end in pauses)

        before = self.at
        if paused := count_paused(before, op.start):
            self.of_cause["gc"].append(self._append(GC, paused))
        if (handled := op.start - before - waited - paused) > 0:
            self.of_cause["link"].append(self._append(LOSS, handled))
        self.at = max(before, op.start)
        if paused := count_paused(op.start, op.end):
            self.of_cause["gc"].append(self._append(GC, paused))
        i = self._append(OPTYPES[op.kind], max(0.0, op.end - self.at), stage, op.microbatch)
        self.kinds[i] = op.kind
        self.receives[i] = op.start, waited > 0

    def _append_receives(self) -> None:
        """Append the receives of ops that need what another rank sends."""
        for i, (start, waited) in self.receives.items():
            op, kind = self.ops[i], self.kinds[i]
            source = self.places.get(op.chunk + (-1 if kind is OpKind.F else 1))
            if kind is not OpKind.W and source not in (None, self.workers[op.worker].stage):
                self.of_cause["link"].append(len(self.ops))
                self.ops.append(infer_receive(op._replace(start=start), start, waited=waited))

    def attribute(self) -> IdleSeconds:
        """Attribute the idle seconds. Raises :class:`CircularOrderError`."""
        self._append_receives()
        simulator = _SteadySimulator.from_ops(self.ops, self.workers, self.starts)
        times = [*measure_times(self.ops, simulator.graph)]
        for group in simulator.graph.groups:
            if group[0] in self.waited:
                # The last rank waits for the network alone, whatever the clocks say.
                least = min(self.waited[i] for i in group)
                for i in group:
                    times[i] = least
        count = len(self.workers)
        idle = self._simulate_idle(simulator, times)
        found: IdleSeconds = {"other": (self.windows - self._sum_busy(times) - idle) / count}
        for cause in REMOVALS:
            if cause == "work":
                self._equalize_microbatches(times)
            elif cause == "stage":
                self._equalize_stages(times)
            else:
                for i in self.of_cause[cause]:
                    times[i] = 0.0
            saved = max(0.0, idle - self._simulate_idle(simulator, times))
            found[cause] = saved / count
            idle -= saved
        found["bubble"] = idle / count
        return found

    def _simulate_idle(self, simulator: _SteadySimulator, times: list[float]) -> float:
        return len(self.workers) * simulator.find_period(times) - self._sum_busy(times)

    def _sum_busy(self, times: Sequence[float]) -> float:
        return sum(times[i] for i in (*self.kinds, *self.optimizers))

    def _equalize_microbatches(self, times: list[float]) -> None:
        """Divide each op by the length of its microbatch. That is the median of its ops over the
        means of their types in the replica, times the length of the replica's microbatches: by how
        much the means of all its types are above those of the job, or below."""
        by_replica: dict[tuple[int, OpKind], dict[int, list[int]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for i, kind in self.kinds.items():
            by_replica[self.ops[i].chunk, kind][self._get_microbatch(i)[0]].append(i)
        ratios: dict[tuple[int, int], list[float]] = defaultdict(list)
        replica_ratios: dict[int, list[float]] = defaultdict(list)
        for members in by_replica.values():
            means = {replica: fmean(times[i] for i in mine) for replica, mine in members.items()}
            usual = fmean(means.values())
            for replica, mine in members.items():
                if (mean := means[replica]) > 0:
                    replica_ratios[replica].append(mean / usual)
                    for i in mine:
                        ratios[self._get_microbatch(i)].append(times[i] / mean)
        lengths = {key: median_low(found) for key, found in ratios.items()}
        of_replica: dict[int, float] = {}
        for replica, found in replica_ratios.items():
            usual = fmean(each for key, each in lengths.items() if key[0] == replica)
            # A device that is slow alone changes the ops of its stage alone.
            common = max(1.0, min(found)) * min(1.0, max(found))
            of_replica[replica] = common / usual if usual > 0 else 1.0
        for i in self.kinds:
            key = self._get_microbatch(i)
            if (length := lengths.get(key, 0.0) * of_replica.get(key[0], 1.0)) > 0:
                times[i] /= length

    def _get_microbatch(self, i: int) -> tuple[int, int]:
        """Replica and number of an op's microbatch."""
        return self.workers[self.ops[i].worker].dp_rank, self.ops[i].microbatch

    def _equalize_stages(self, times: list[float]) -> None:
        by_rank: dict[tuple[OpKind, int, int], list[int]] = defaultdict(list)
        for i, kind in self.kinds.items():
            by_rank[kind, self.ops[i].worker, self.ops[i].chunk].append(i)
        means: dict[OpKind, list[float]] = defaultdict(list)
        for (kind, _, _), members in by_rank.items():
            means[kind].append(fmean(times[i] for i in members))
        for i, kind in self.kinds.items():
            times[i] = median_low(means[kind])


@dataclass
class _SteadySimulator:
    """Simulator of an iteration that repeats, each rank beginning when it has ended the one before.
    ``ends``: nodes of each worker after which it has ended."""

    graph: StepGraph
    starts: Sequence[int]
    ends: Sequence[Sequence[int]]

    @staticmethod
    def from_ops(
        ops: Sequence[StepOp], workers: Sequence[Worker], starts: Sequence[int]
    ) -> _SteadySimulator:
        """Make the simulator. Raises :class:`CircularOrderError`."""
        graph = build_graph(ops, workers)
        last: dict[tuple[int, bool], int] = {}
        for i, op in enumerate(ops):
            if op.optype in IN_ORDER or op.optype in COLLECTIVES:
                last[op.worker, op.optype in COLLECTIVES] = i
        nodes = {i: node for node, i in enumerate(graph.ops, 1)}
        ends: list[list[int]] = [[] for _ in workers]
        for (worker, _), i in last.items():
            ends[worker].append(nodes[i])
        return _SteadySimulator(graph, starts, ends)

    def find_period(self, times: list[float]) -> float:
        """Find the seconds of a repetition. ``times``: of the ops, then 0."""
        begins = [0.0] * len(self.starts)
        periods: list[float] = []
        while len(periods) < MOST_REPETITIONS:
            for i, begin in zip(self.starts, begins, strict=True):
                times[i] = begin
            ends = self.graph.compute_ends(times)
            after = [max(ends[node] for node in nodes) for nodes in self.ends]
            gains = [end - begin for end, begin in zip(after, begins, strict=True)]
            periods.append(fmean(gains))
            if max(gains) - min(gains) <= STEADY_SECONDS:
                break
            begins = after
        else:
            return fmean(periods[-AVERAGED:])
        return periods[-1]
