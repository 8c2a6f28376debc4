"""Steps of a recording that can be analysed: complete, with their dependencies and times."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from pipemorph.diagnose.analysis.step_graph import (
    COLLECTIVES,
    IN_ORDER,
    CircularOrderError,
    StepGraph,
    StepOp,
    build_graph,
    find_nested,
    sign_structure,
)
from pipemorph.diagnose.clocks import ClockAlignment, Delivery, align_clocks
from pipemorph.diagnose.operation import (
    BACKWARD,
    BACKWARD_RECV,
    COMPUTE,
    FORWARD,
    FORWARD_RECV,
    TRANSFERS,
)
from pipemorph.diagnose.operation_table import CODE_OF_OPTYPE, OperationTable, Worker
from pipemorph.errors import InputError

SETUP = 2.0
"""Time of the first step, as a multiple of the median, from which it is taken for set-up."""
LEAST_STEPS = 3
"""Steps from which the first one may be omitted."""
CLOCK_NOISE = 1e-2
"""Seconds by which a message may be received before it was sent."""
ALIGNED_NOISE = 1e-3
"""Seconds by which a message may be received before it was sent by clocks that agree."""
UNWAITED = 1e-4
"""Seconds of waiting below which a receive was complete when its worker began to wait."""
OVERHEAD = 0.05
"""Time between two ops, relative to the second, up to which it is no wait for a message."""
MOST_NAMED = 5
"""Steps and workers that a sentence names."""
_F, _B = CODE_OF_OPTYPE[FORWARD], CODE_OF_OPTYPE[BACKWARD]
_COMPUTE = frozenset(CODE_OF_OPTYPE[name] for name in COMPUTE)
_TRANSFERS = frozenset(CODE_OF_OPTYPE[name] for name in TRANSFERS)
_RECEIVES = (CODE_OF_OPTYPE[BACKWARD_RECV], CODE_OF_OPTYPE[FORWARD_RECV])
_LONG_AGO = -1e18
"""Time at which a receive was posted that nothing is known of: before its message was sent."""


@dataclass(frozen=True)
class RecordedStep:
    """A step. Lists have an entry per op; ops are sorted by worker, then start.

    ``times``: seconds of the op alone, for transfers and collectives without the waiting for other
    members; then a last entry, 0. ``begin``: first start of an op that is no receive. ``span``:
    seconds from then to the last end.
    """

    step: int
    graph: StepGraph
    ops: Sequence[StepOp]
    times: Sequence[float]
    begin: float
    span: float


@dataclass(frozen=True)
class StepSet:
    """Steps to be analysed. ``used``: numbers of the workers in them. ``notes``: sentences on what
    was omitted, and what is missing.

    ``chunk_stages``: pipeline rank by global chunk. ``microbatches``: the usual number of a step.
    """

    workers: Sequence[Worker]
    ranks: Sequence[int]
    used: frozenset[int]
    steps: Sequence[RecordedStep]
    chunk_stages: tuple[int, ...]
    microbatches: int
    notes: list[str]

    @property
    def stages(self) -> int:
        return max(self.chunk_stages) + 1

    @property
    def replicas(self) -> int:
        return len({self.workers[number].dp_rank for number in self.used})


def select_steps(table: OperationTable) -> StepSet:
    """Select the steps of a recording in which every worker ran every microbatch.

    Raises :class:`InputError` if there is none, if there is no pipeline, or if clocks differ.
    """
    notes: list[str] = []
    stages, used = _check_workers(table, notes)
    selector = _StepSelector(table, stages, used)
    added = (selector.add(step, rows) for step, rows in table.group_rows().items())
    steps = [step for step in added if step is not None]
    notes += selector.describe_omitted()
    if not steps:
        raise InputError(
            "no step is complete; expected files of one job, and of all its ranks: "
            + (" ".join(notes) or "no worker ran forwards and backwards")
        )
    _align_workers(steps, notes)
    if len(steps) >= LEAST_STEPS and steps[0].span > SETUP * median(s.span for s in steps[1:]):
        notes.append(
            f"Step {steps[0].step} took {steps[0].span:.3g} s, more than twice the median: it has"
            " set-up, and is omitted."
        )
        del steps[0]
    _check_clocks(steps, table.workers)
    _check_streams(steps, table.workers)
    ranks = table.ranks
    if len(known := [ranks[number] for number in used if ranks[number] >= 0]) > len({*known}):
        notes.append("Several workers have one rank in the trace: ranks are not named.")
        ranks = [-1] * len(ranks)
    if not selector.has_transfers:
        notes.append(
            "The trace has no sends and receives: the time that a worker waited before an op is"
            " taken for the transfer of its data."
        )
    if unmatched := max(step.graph.unmatched for step in steps):
        notes.append(
            f"{unmatched} sends and receives of a step have no counterpart: their number differs"
            " from that of the ops whose data they carry. They are omitted."
        )
    counts = Counter(_count_microbatches(step) for step in steps)
    chunks = selector.chunk_stages
    return StepSet(
        table.workers, ranks, used, steps, tuple(chunks[chunk] for chunk in sorted(chunks)),
        max(counts, key=lambda count: (counts[count], count)), notes,
    )  # fmt: skip


def _check_workers(table: OperationTable, notes: list[str]) -> tuple[int, frozenset[int]]:
    """Number of stages, and numbers of the workers of complete replicas."""
    numbers = {
        row for row in set(zip(table.worker, table.optype, strict=True)) if row[1] in _COMPUTE
    }
    here = {table.workers[number] for number, _ in numbers}
    if not here:
        raise InputError("no pipeline in it: no worker has forward-compute or backward-compute ops")
    stages = max(worker.stage for worker in table.workers) + 1
    if stages < 2:
        raise InputError(
            "no pipeline in it: all ops are of stage 0; expected a job with two stages or more"
        )
    replicas = sorted({worker.dp_rank for worker in table.workers})
    missing = [
        Worker(replica, stage)
        for replica in replicas
        for stage in range(stages)
        if Worker(replica, stage) not in here
    ]
    whole = [r for r in replicas if all(worker.dp_rank != r for worker in missing)]
    if missing:
        named = join_named(f"stage {w.stage} of dp_rank {w.dp_rank}" for w in missing)
        if not whole:
            raise InputError(
                f"workers are missing: {named}; give the traces of all ranks of a replica"
            )
        notes.append(f"Workers are missing: {named}. Their replicas are omitted.")
    if whole[-1] >= len(whole) and not missing:
        absent = sorted({*range(whole[-1])} - {*whole})
        notes.append(
            f"Replicas are missing: dp_rank {join_named(map(str, absent))}. What they cost the"
            " others cannot be said."
        )
    used = frozenset(i for i, worker in enumerate(table.workers) if worker.dp_rank in whole)
    return stages, used


def join_named(names: Iterable[str]) -> str:
    """Join the first names of a list with commas; says how many more there are."""
    every = list(names)
    more = len(every) - MOST_NAMED
    return ", ".join(every[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


class _StepSelector:
    """Makes steps of rows, and holds the numbers of those that it omits, by reason."""

    def __init__(self, table: OperationTable, stages: int, used: frozenset[int]) -> None:
        self.table = table
        self.stages = stages
        self.used = used
        self.graphs: dict[int, StepGraph] = {}
        self.omitted: dict[str, list[int]] = defaultdict(list)
        self.chunk_stages = self._place_chunks()
        self.has_transfers = any(code in _TRANSFERS for code in {*table.optype})

    def _place_chunks(self) -> dict[int, int]:
        table, found = self.table, {}
        for row, code in enumerate(table.optype):
            if code == _F:
                found[self._find_chunk(row)] = table.workers[table.worker[row]].stage
        if not found:
            raise InputError("no pipeline in it: no worker has forward-compute ops")
        if sorted(found) != list(range(len(found))) or {*found.values()} != {*range(self.stages)}:
            raise InputError(
                f"forward ops are of the model's chunks {join_named(map(str, sorted(found)))};"
                " expected all from 0 on (columns gmc and mc)"
            )
        return found

    def _find_chunk(self, row: int) -> int:
        """Global chunk of an op; -1 for one of no chunk."""
        table = self.table
        stage = table.workers[table.worker[row]].stage
        if (chunk := table.global_chunk[row]) >= 0:
            return chunk
        if (chunk := table.model_chunk[row]) >= 0:
            return chunk * self.stages + stage
        return stage if table.optype[row] in _COMPUTE else -1

    def add(self, step: int, rows: Sequence[int]) -> RecordedStep | None:
        """Make a step of its rows; None if it is omitted."""
        table = self.table
        mine = sorted(
            (row for row in rows if table.worker[row] in self.used),
            key=lambda row: (table.worker[row], table.start[row], table.seq_id[row]),
        )
        ops = self._number_microbatches(mine)
        if not self.has_transfers:
            ops = self._infer_receives(ops)
        if (reason := self._find_gap(ops)) is not None:
            self.omitted[reason].append(step)
            return None
        key = sign_structure(ops)
        graph = self.graphs.get(key)
        if graph is None:
            try:
                graph = self.graphs[key] = build_graph(ops, table.workers)
            except CircularOrderError:
                self.omitted["whose ops wait for each other in a circle"].append(step)
                return None
        return _make_step(step, graph, ops)

    def _number_microbatches(self, rows: Sequence[int]) -> list[StepOp]:
        """Ops whose microbatches are unique: gradient accumulation repeats their numbers, and
        without numbers the order of the ops is theirs."""
        table = self.table
        seen: Counter[tuple[int, int, int, int]] = Counter()
        several = 1 + max((table.microbatch[row] for row in rows), default=0)
        ops = []
        for row in rows:
            code, microbatch = table.optype[row], table.microbatch[row]
            chunk, worker = self._find_chunk(row), table.worker[row]
            if code not in IN_ORDER and code not in COLLECTIVES and microbatch < 0:
                chunk = -1
            elif code in _COMPUTE or microbatch >= 0:
                key = (worker, code, chunk, microbatch)
                # Without a number, several is 1 plus -1: the count is the number.
                microbatch = seen[key] if microbatch < 0 else microbatch + several * seen[key]
                seen[key] += 1
            start, duration = table.start[row], table.duration[row]
            posted = table.posted.get(row)
            complete = (
                posted is None
                or row in table.completed
                or (start + duration - table.waited.get(row, start) > UNWAITED)
            )
            ops.append(
                StepOp(
                    worker, code, chunk, microbatch, posted is not None, start,
                    table.completed.get(row, start + duration),
                    start if posted is None else posted, complete, table.waited.get(row),
                )
            )  # fmt: skip
        return ops

    def _infer_receives(self, ops: Sequence[StepOp]) -> list[StepOp]:
        """Ops with a receive before each op that waited for another worker: the time between the op
        before it and its start."""
        found: list[StepOp] = []
        last: StepOp | None = None
        for op in ops:
            if op.optype in (_F, _B):
                forward = op.optype == _F
                source = self.chunk_stages.get(op.chunk + (-1 if forward else 1))
                own = self.chunk_stages.get(op.chunk)
                if source is not None and source != own:
                    same = last is not None and last.worker == op.worker
                    before = last.end if last is not None and same else op.start
                    gap = max(UNWAITED, OVERHEAD * (op.end - op.start))
                    waited = not same or op.start - before > gap
                    found.append(infer_receive(op, before, waited=waited))
            found.append(op)
            if op.optype in IN_ORDER:
                last = op
        return found

    def _find_gap(self, ops: Sequence[StepOp]) -> str | None:
        """Reason to omit a step; None for a complete one."""
        forwards: dict[tuple[int, int], set[int]] = defaultdict(set)
        backwards: dict[tuple[int, int], set[int]] = defaultdict(set)
        for op in ops:
            if op.optype == _F:
                forwards[op.worker, op.chunk].add(op.microbatch)
            elif op.optype == _B:
                backwards[op.worker, op.chunk].add(op.microbatch)
        if forwards and not backwards:
            return "without backwards: evaluation"
        places = {
            (number, chunk)
            for number in self.used
            for chunk, stage in self.chunk_stages.items()
            if self.table.workers[number].stage == stage
        }
        if forwards.keys() != places or backwards.keys() != places:
            return "in which workers ran nothing"
        by_replica: dict[int, set[int]] = {}
        for place in places:
            if forwards[place] != backwards[place]:
                return "with other forwards than backwards"
            replica = self.table.workers[place[0]].dp_rank
            if by_replica.setdefault(replica, forwards[place]) != forwards[place]:
                return "whose stages ran other microbatches"
        return None

    def describe_omitted(self) -> list[str]:
        return [
            f"{'Step' if len(steps) == 1 else 'Steps'} {reason}, omitted:"
            f" {join_named(map(str, steps))}."
            for reason, steps in self.omitted.items()
        ]


def _make_step(step: int, graph: StepGraph, ops: Sequence[StepOp]) -> RecordedStep:
    """Measure the ops of a step."""
    # A worker waits for its first message while others still have the step before.
    begin = min(op.start for op in ops if op.optype not in _RECEIVES)
    end = max(op.end for op in ops)
    return RecordedStep(step, graph, ops, measure_times(ops, graph), begin, end - begin)


def infer_receive(op: StepOp, before: float, *, waited: bool) -> StepOp:
    """Receive of what an F or B needs, which ends when that starts. ``before``: end of the op
    before it. ``waited``: the worker waited for it; otherwise it may have ended earlier."""
    return StepOp(
        op.worker, _RECEIVES[op.optype == _F], op.chunk, op.microbatch, True,
        min(before, op.start), op.start, _LONG_AGO, waited,
    )  # fmt: skip


def measure_times(ops: Sequence[StepOp], graph: StepGraph) -> array[float]:
    """Time of each op alone, then 0. A receive that was not waited for gets the median of those
    from the same worker."""
    times = array("d", [max(0.0, op.end - op.start) for op in ops])
    for i, outer in find_nested(ops):
        times[outer] = max(0.0, times[outer] - times[i])
    for group in graph.groups:
        latest = max(ops[i].begin for i in group)
        for i in group:
            times[i] = max(0.0, ops[i].end - latest)
    unknown: list[tuple[int, int]] = []
    known: dict[tuple[int, int], list[float]] = defaultdict(list)
    for producer, send, i, consumer in graph.messages:
        if i < 0:
            continue
        op = ops[i]
        if send < 0 or op.posted:
            sent = ops[producer].end if send < 0 else ops[send].begin
            times[i] = max(0.0, op.end - max(sent, op.begin))
        if op.complete and _is_awaited(op, ops[producer], ops[consumer]):
            known[ops[producer].worker, op.worker].append(times[i])
        else:
            unknown.append((producer, i))
    for producer, i in unknown:
        found = known[ops[producer].worker, ops[i].worker]
        times[i] = min(times[i], median(found)) if found else 0.0
    times.append(0.0)
    return times


def _is_awaited(receive: StepOp, producer: StepOp, consumer: StepOp) -> bool:
    """True if the worker waited for the message, and not only for its own reading of one that had
    come while it computed."""
    if receive.waited is None or receive.waited <= producer.end:
        return True
    return receive.end - receive.waited > OVERHEAD * (consumer.end - consumer.start)


def _count_microbatches(step: RecordedStep) -> int:
    """Most microbatches of a replica in a step."""
    counts = Counter((op.worker, op.chunk) for op in step.ops if op.optype == _F)
    return max(counts.values())


def _list_collective_ends(steps: Sequence[RecordedStep]) -> dict[tuple[int, int], list[float]]:
    """Seconds from the latest start of a collective to the end of each other member, by the two
    workers."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in steps:
        for group in step.graph.groups:
            if len(group) > 1 and step.ops[group[0]].optype in COLLECTIVES:
                members = [step.ops[i] for i in group]
                latest = max(members, key=lambda op: op.start)
                for op in members:
                    found[latest.worker, op.worker].append(op.end - latest.start)
    return found


def _align_workers(steps: list[RecordedStep], notes: list[str]) -> None:
    """Align the workers' clocks, step by step since they drift, by messages and collectives if some
    arrive before they are sent. Otherwise the clocks are taken as one: a link may be slower in one
    direction."""
    apart = 0.0
    for place, step in enumerate(steps):
        deliveries = list(_list_deliveries(step))
        if not any(each.arrived - each.sent < -ALIGNED_NOISE for each in deliveries):
            continue
        alignment = align_clocks({op.worker for op in step.ops}, deliveries)
        if not alignment.mismatched:
            offsets = alignment.offsets.values()
            apart = max(apart, max(offsets) - min(offsets))
            steps[place] = _shift_workers(step, alignment)
    if apart:
        notes.append(
            f"Clocks of the workers were {apart:.3g} s apart: some messages arrived before they"
            " were sent. They are aligned by the messages in both directions."
        )


def _list_deliveries(step: RecordedStep) -> Iterator[Delivery]:
    """Messages of a step, and its collectives: their members end together, once the last one has
    begun, which takes the least time."""
    ops = step.ops
    for message in step.graph.messages:
        producer, consumer = ops[message.producer], ops[message.consumer]
        sent = producer.end if message.send < 0 else ops[message.send].start
        arrived = consumer.start if message.receive < 0 else ops[message.receive].end
        yield Delivery(producer.worker, consumer.worker, sent, arrived)
    for group in step.graph.groups:
        if ops[group[0]].optype in COLLECTIVES:
            least = min(ops[i].end - ops[i].start for i in group)
            for one, other in pairwise([ops[i] for i in group]):
                yield Delivery(one.worker, other.worker, one.end - least, other.end)
                yield Delivery(other.worker, one.worker, other.end - least, one.end)


def _shift_workers(step: RecordedStep, alignment: ClockAlignment) -> RecordedStep:
    """Step by the clock of its first worker."""

    def shift(op: StepOp) -> StepOp:
        ahead = alignment.offsets[op.worker]
        waited = None if op.waited is None else op.waited - ahead
        return op._replace(
            start=op.start - ahead, end=op.end - ahead, begin=op.begin - ahead, waited=waited
        )

    return _make_step(step.step, step.graph, [shift(op) for op in step.ops])


def _check_streams(steps: Sequence[RecordedStep], workers: Sequence[Worker]) -> None:
    """Raise :class:`InputError` if most compute ops of a worker overlap, or if none takes time."""
    count: Counter[int] = Counter()
    overlapping: Counter[int] = Counter()
    for step in steps:
        computes = [op for op in step.ops if op.optype in _COMPUTE]
        for before, op in pairwise(computes):
            if before.worker == op.worker:
                count[op.worker] += 1
                overlapping[op.worker] += before.end - op.start > 0.5 * (op.end - op.start) > 0
    for worker, number in overlapping.items():
        if 4 * number > count[worker]:
            raise InputError(
                f"compute ops of {workers[worker].key} overlap, {number} of {count[worker]}; give"
                " the files of one job, each once, with times of one stream"
            )
    if not any(time > 0 for step in steps for time in step.times):
        raise InputError("no op takes any time: all durations are 0")


def _check_clocks(steps: Sequence[RecordedStep], workers: Sequence[Worker]) -> None:
    """Raise :class:`InputError` if a worker's clock differs: its messages arrive too early."""
    early: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in steps:
        for message in step.graph.messages:
            sender, receiver = step.ops[message.producer], step.ops[message.consumer]
            early[sender.worker, receiver.worker].append(receiver.end - sender.end)
    for (a, b), spare in early.items():
        if (found := median(spare)) < -CLOCK_NOISE:
            raise InputError(
                f"clocks differ: {workers[b].key} used what {workers[a].key} sent {-found:.3g} s"
                " before that was computed, and no offset explains it; give files of one run"
            )
    for (a, b), spare in _list_collective_ends(steps).items():
        if (found := median(spare)) < -CLOCK_NOISE:
            raise InputError(
                f"clocks differ: {workers[b].key} ended collectives {-found:.3g} s before"
                f" {workers[a].key} began them; give times by one clock within a step"
            )
    for step in steps:
        longest = max(step.times)
        busy: dict[int, float] = defaultdict(float)
        begins: dict[int, float] = {}
        for op, time in zip(step.ops, step.times, strict=False):
            busy[op.worker] += time
            begins[op.worker] = min(begins.get(op.worker, op.start), op.start)
        first, last = min(begins, key=begins.__getitem__), max(begins, key=begins.__getitem__)
        apart = begins[last] - begins[first]
        if apart > max(60.0, 10 * (longest + max(busy.values())) * len(busy)):
            raise InputError(
                f"clocks differ: in step {step.step} {workers[last].key} begins {apart:.3g} s after"
                f" {workers[first].key}; give times by one clock within a step"
            )
