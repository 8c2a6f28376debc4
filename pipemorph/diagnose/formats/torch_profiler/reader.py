"""Reader of ``torch.profiler`` traces of a pipeline, one or more files per rank."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipemorph.diagnose import operation
from pipemorph.diagnose.clocks import (
    ClockAlignment,
    Delivery,
    align_clocks,
)
from pipemorph.diagnose.formats.torch_profiler.compute_ops import (
    ComputeOp,
    Segmentation,
    find_compute_ops,
)
from pipemorph.diagnose.formats.torch_profiler.gpu import move_to_gpu
from pipemorph.diagnose.formats.torch_profiler.messages import TracedMessage, find_messages
from pipemorph.diagnose.formats.torch_profiler.placement import (
    RankPlace,
    list_numbers,
    place_ranks,
)
from pipemorph.diagnose.formats.torch_profiler.rank_trace import (
    EventKind,
    RankTrace,
    Span,
    merge_traces,
    read_rank_trace,
)
from pipemorph.diagnose.formats.torch_profiler.stages import (
    drop_setup,
    follow_activations,
    has_several_stages,
    name_single_stages,
)
from pipemorph.diagnose.formats.torch_profiler.steps import (
    TracedStep,
    count_microbatches,
    find_steps,
)
from pipemorph.diagnose.operation import Operation
from pipemorph.diagnose.trace_file import HEAD_BYTES, TraceFile
from pipemorph.errors import InputError


@dataclass
class _PipelineRank:
    """Contents of one rank's trace. Times in seconds of its trace."""

    place: RankPlace
    rank: int
    name: str
    base: int
    segmentation: Segmentation
    ops: list[ComputeOp]
    messages: list[TracedMessage]
    foreign: list[float]
    """Seconds of messages that belong to no op."""
    steps: list[TracedStep]
    incomplete: set[int]
    on_gpu: bool
    others: list[tuple[str, int, Span]] = field(default_factory=list)
    """Op type, step and time of what is no compute op and no message."""


_MessageKey = tuple[int, int, bool, int, int]
"""Replica, stage of the receiver, direction, step and microbatch of a message; one op may have
several tensors."""


class _MessagePair(NamedTuple):
    """A send with its receive, and their ranks."""

    sender: _PipelineRank
    send: TracedMessage
    receiver: _PipelineRank
    receive: TracedMessage

    @property
    def delivery(self) -> Delivery:
        return Delivery(
            self.sender.rank, self.receiver.rank, self.send.posted + self.sender.base / 1e9,
            self.receive.complete + self.receiver.base / 1e9,
        )  # fmt: skip

    def bound_send(self, alignment: ClockAlignment) -> None:
        """Let the send end when its receiver, which waited for it, has it. Its own wait may come
        much later. If the receiver did not wait, only the end of its issue is certain."""
        ahead = alignment.offsets[self.receiver.rank] - alignment.offsets[self.sender.rank]
        end = self.send.issued
        if self.receive.is_awaited:
            base = (self.receiver.base - self.sender.base) / 1e9
            end = max(end, self.receive.complete + base - ahead)
        self.send.complete = min(self.send.complete, end)


class TorchProfilerReader:
    """Reader of Chrome traces that ``torch.profiler`` writes, one or more for each rank."""

    format_name = "torch.profiler traces"

    def recognize_file(self, file: TraceFile) -> bool:
        """True if the head of ``file`` is of a Chrome trace by ``torch.profiler``."""
        text = file.text
        fields = ("schemaVersion", "distributedInfo", "deviceProperties")
        if not text.lstrip().startswith("{") or not any(f'"{field}"' in text for field in fields):
            return False
        # The groups of a large job fill the head.
        return '"traceEvents"' in text or len(file.head) >= HEAD_BYTES

    def read_operations(self, files: Sequence[TraceFile], notes: list[str]) -> Iterable[Operation]:
        """Operations of all complete pipelines."""
        traces = _read_traces(files)
        _require_messages(traces)
        for trace in traces.values():
            if trace.has_joint_ops:
                raise InputError(
                    f"{trace.name}: is of a schedule that runs a forward and a backward under one "
                    "label (OVERLAP_F_B, as DualPipeV): when one ends and the other begins is not "
                    "recorded"
                )
        places = place_ranks(list(traces.values()), notes)
        has_replicas = len({place.dp_rank for place in places.values()}) > 1
        ranks = [
            _read_rank(traces.pop(rank), place, has_replicas) for rank, place in places.items()
        ]
        _name_stages(ranks, notes)
        steps = _choose_steps(ranks, notes)
        pairs = list(_match_messages(ranks, steps))
        alignment = _align_ranks(ranks, pairs, steps, notes)
        for pair in pairs:
            pair.bound_send(alignment)
        _note_limits(ranks, notes)
        for rank in ranks:
            yield from _make_operations(rank, alignment, steps, ranks[0].base)


def _read_traces(files: Sequence[TraceFile]) -> dict[int, RankTrace]:
    """Traces by rank. Several of a rank are joined, as a profiler's schedule with repeats writes
    them."""
    traces: dict[int, RankTrace] = {}
    for file in files:
        trace = read_rank_trace(file)
        first = next(iter(traces.values()), trace)
        if trace.world_size != first.world_size:
            raise InputError(
                f"{trace.name}: is of a job of {trace.world_size} ranks, {first.name} of one of "
                f"{first.world_size}; give the traces of one job"
            )
        if trace.rank in traces:
            trace = merge_traces(traces[trace.rank], trace)
        traces[trace.rank] = trace
    return dict(sorted(traces.items()))


def _require_messages(traces: Mapping[int, RankTrace]) -> None:
    """Raise :class:`InputError` if no rank sends to another one."""
    if any(trace.has_messages for trace in traces.values()):
        return
    first = next(iter(traces.values()))
    names = Counter(
        event.name.removeprefix("c10d::").strip("_")
        for trace in traces.values()
        for event in trace.events
        if event.kind is EventKind.REDUCTION
    )
    found = ", ".join(f"{count} {name}" for name, count in names.most_common(3))
    raise InputError(
        f"{first.name}: has no pipeline in it: no sends or receives between ranks, but "
        f"{found or 'no collectives either'}; expected traces of a pipeline's ranks"
    )


def _read_rank(trace: RankTrace, place: RankPlace, has_replicas: bool) -> _PipelineRank:
    segmentation = find_compute_ops(trace)
    messages, foreign = find_messages(trace, segmentation, place.ranks, place.position)
    messages = [message for message in messages if not message.op.evaluated]
    ops = [op for op in segmentation.ops if not op.evaluated]
    steps = find_steps(trace, ops)
    incomplete = count_microbatches(steps, ops)
    rank = _PipelineRank(
        place, trace.rank, trace.name, trace.base, segmentation, ops, messages, foreign, steps,
        incomplete, bool(trace.kernels),
    )  # fmt: skip
    if trace.kernels:
        rank.ops = move_to_gpu(trace, ops, messages)
    rank.others = list(_find_other_ops(trace, rank, has_replicas))
    return rank


def _find_other_ops(
    trace: RankTrace, rank: _PipelineRank, has_replicas: bool
) -> Iterator[tuple[str, int, Span]]:
    """Optimizer, collectives between ops, garbage collections and waits for data, by step."""
    optimized = [event for event in trace.events if event.kind is EventKind.OPTIMIZER]
    for step in rank.steps:
        ops = [op for op in rank.ops if op.step == step.number]
        if not ops:
            continue
        first = min(op.begin for op in ops)
        last = max(op.end for op in ops)
        optimizers = [event for event in optimized if step.begin <= event.begin <= step.end]
        begin = min((event.begin for event in optimizers), default=step.end)
        if optimizers:
            end = max(event.end for event in optimizers)
            yield operation.OPTIMIZER, step.number, Span(begin, end, "")
        reduced, gathered = [], []
        for name, spans in trace.transfers.items():
            if name in ("send", "recv", "coalesced"):
                continue
            for span in spans:
                if name.startswith(("all_gather", "allgather", "_all_gather")):
                    if step.begin <= span.begin <= first or last <= span.begin <= step.end:
                        gathered.append(span)
                elif "reduce" in name and last <= span.begin <= begin:
                    reduced.append(span)
        # Of a single replica nothing is reduced but the norm of the gradients.
        reduction = operation.REDUCE_SCATTER if has_replicas else operation.CLIP
        for optype, spans in (
            (reduction, reduced),
            (operation.ALL_GATHER, gathered),
        ):
            if spans:
                end = max(span.end for span in spans)
                yield optype, step.number, Span(min(span.begin for span in spans), end, "")
        for span in trace.pauses:
            if step.begin <= span.begin <= step.end:
                optype = operation.DATA if "DataLoader" in span.name else operation.GC
                yield optype, step.number, span


def _name_stages(ranks: Sequence[_PipelineRank], notes: list[str]) -> None:
    """Set stages and microbatches that labels do not name, pipeline by pipeline."""
    if all(op.stage >= 0 for rank in ranks for op in rank.ops):
        return
    for dp_rank in sorted({rank.place.dp_rank for rank in ranks}):
        mine = {rank.place.position: rank for rank in ranks if rank.place.dp_rank == dp_rank}
        ops = {position: rank.ops for position, rank in mine.items()}
        if mine[0].segmentation.labels is None and (dropped := drop_setup(ops)):
            notes.append(f"{dropped} forwards by which ranks inferred shapes are omitted.")
            for rank in mine.values():
                remaining = {id(op) for op in rank.ops}
                rank.messages = [each for each in rank.messages if id(each.op) in remaining]
        messages = {position: rank.messages for position, rank in mine.items()}
        if has_several_stages(messages[0]):
            if not follow_activations(ops, messages):
                raise InputError(
                    f"{mine[0].name}: is of a schedule with several stages per rank and without "
                    "labels, and messages do not lead from stage to stage, so the stage of an op "
                    "cannot be known; record with record_shapes=True, all ranks and whole steps"
                )
            continue
        for position, rank in mine.items():
            if rank.segmentation.labels is not None:
                for op in rank.ops:
                    op.stage = position
            else:
                name_single_stages(position, rank.ops)


def _choose_steps(ranks: Sequence[_PipelineRank], notes: list[str]) -> list[int]:
    """Steps that are whole on all ranks."""
    found = [{op.step for op in rank.ops} - {-1} for rank in ranks]
    common = set.intersection(*found)
    if not common:
        shown = "; ".join(
            f"{rank.name} has {list_numbers(sorted(steps)) or 'none'}"
            for rank, steps in list(zip(ranks, found, strict=True))[:3]
        )
        raise InputError(
            f"{ranks[0].name}: no step is in the traces of all ranks: {shown}; record the same "
            "steps on all ranks"
        )
    incomplete = set.union(*(rank.incomplete for rank in ranks))
    partial = sorted(set.union(*found) - common)
    if partial:
        notes.append(f"Steps {list_numbers(partial)} are not in all traces, and are omitted.")
    if broken := sorted(common & incomplete):
        notes.append(
            f"Steps {list_numbers(broken)} are omitted: their forwards and backwards are not all "
            "in the traces."
        )
    chosen = sorted(common - incomplete)
    if len(chosen) > 1 and chosen[0] == 0 and _has_setup(ranks, chosen):
        notes.append(f"Step {chosen[0]} is omitted: it has the set-up, an exchange of shapes.")
        del chosen[0]
    if not chosen:
        raise InputError(
            f"{ranks[0].name}: has no whole step: forwards or backwards are missing in steps "
            f"{list_numbers(broken)}; record whole steps, by prof.step() after each"
        )
    return chosen


def _has_setup(ranks: Sequence[_PipelineRank], steps: Sequence[int]) -> bool:
    """True if more messages that belong to no op precede the second step's first op than the third
    one's, or any precede it where there is none."""
    for rank in ranks:
        begins = [min(op.begin for op in rank.ops if op.step == step) for step in steps[:3]]
        places = [bisect_left(sorted(rank.foreign), begin) for begin in begins]
        if places[0] > (places[2] - places[1] if len(places) > 2 else 0):
            return True
    return False


def _align_ranks(
    ranks: Sequence[_PipelineRank],
    pairs: Iterable[_MessagePair],
    steps: Sequence[int],
    notes: list[str],
) -> ClockAlignment:
    """Offsets of the ranks' clocks against that of the first rank, by messages and reductions."""
    deliveries = [*(pair.delivery for pair in pairs), *_match_reductions(ranks, steps)]
    alignment = align_clocks([rank.rank for rank in ranks], deliveries)
    if mismatched := alignment.mismatched:
        listed = "; ".join(
            f"{a} and {b} by {-1e3 * alignment.bounds[a, b]:.3g} ms" for a, b in mismatched[:4]
        )
        notes.append(
            f"Messages do not fit together: some arrive before they are sent ({listed}). These "
            "traces are of different runs, or their messages are matched wrongly; times between "
            "these ranks mean nothing."
        )
    elif alignment.bounds:
        largest = max(alignment.bounds.values())
        apart = max(alignment.offsets.values()) - min(alignment.offsets.values())
        notes.append(
            f"Clocks of the ranks are aligned by their messages: they were {_seconds(apart)} "
            f"apart; the error between two neighbours is at most {_seconds(largest)}."
        )
    if alignment.unaligned:
        notes.append(
            f"Clocks of ranks {list_numbers(alignment.unaligned)} are taken as recorded: no "
            "messages in both directions connect them with the first rank."
        )
    return alignment


def _match_messages(ranks: Sequence[_PipelineRank], steps: Sequence[int]) -> Iterator[_MessagePair]:
    """Sends with their receives: an op's output goes to the next stage, its gradient back."""
    wanted = set(steps)
    sent: dict[_MessageKey, list[tuple[_PipelineRank, TracedMessage]]] = {}
    for rank in ranks:
        for message in rank.messages:
            op = message.op
            if message.is_send and op.step in wanted:
                target = op.stage + (1 if message.is_forward else -1)
                key = rank.place.dp_rank, target, message.is_forward, op.step, op.number
                sent.setdefault(key, []).append((rank, message))
    for rank in ranks:
        for message in rank.messages:
            op = message.op
            key = rank.place.dp_rank, op.stage, message.is_forward, op.step, op.number
            if not message.is_send and sent.get(key):
                yield _MessagePair(*sent[key].pop(0), rank, message)


def _match_reductions(ranks: Sequence[_PipelineRank], steps: Sequence[int]) -> Iterator[Delivery]:
    """Reductions over replicas: none ends before all have begun."""
    wanted = set(steps)
    spans: dict[tuple[int, int], list[tuple[int, float, float]]] = {}
    for rank in ranks:
        for optype, step, span in rank.others:
            if optype == operation.REDUCE_SCATTER and step in wanted:
                base = rank.base / 1e9
                spans.setdefault((rank.place.position, step), []).append(
                    (rank.rank, span.begin + base, span.end + base)
                )
    for members in spans.values():
        for source, begin, _ in members:
            for target, _, end in members:
                if source != target:
                    yield Delivery(source, target, begin, end)


def _note_limits(ranks: Sequence[_PipelineRank], notes: list[str]) -> None:
    """Add what was omitted, and what these traces cannot show."""
    if evaluated := sum(op.evaluated for rank in ranks for op in rank.segmentation.ops):
        notes.append(f"{evaluated} forwards of evaluations are omitted.")
    if unclaimed := sum(rank.segmentation.unclaimed for rank in ranks):
        notes.append(f"{unclaimed} backwards are omitted: their forwards precede the traces.")
    if foreign := sum(len(rank.foreign) for rank in ranks):
        notes.append(f"{foreign} messages that belong to no op are omitted.")
    if any(rank.on_gpu for rank in ranks):
        notes.append(
            "Times are those of GPU kernels. This has only been tried on traces made by hand, and "
            "not on a GPU: compare with what you expect. A message's kernel also runs while it "
            "waits, so transfer and waiting are distinguished only between ranks."
        )
    else:
        notes.append(
            "Cannot be known: the loss is part of the last stage's forward, and true ends of sends "
            "and of receives that were there before the wait are not recorded."
        )


def _make_operations(
    rank: _PipelineRank, alignment: ClockAlignment, steps: Sequence[int], origin: int
) -> Iterator[Operation]:
    """Rows of a rank, by the clock of the first one."""
    shift = (rank.base - origin) / 1e9 - alignment.offsets[rank.rank]
    wanted = set(steps)
    chunks = {stage: chunk for chunk, stage in enumerate(sorted({op.stage for op in rank.ops}))}
    counts: Counter[tuple[int, str]] = Counter()
    rows: list[Operation] = []

    def make_row(step: int, optype: str, begin: float, end: float) -> Operation:
        place = rank.place
        return Operation(
            step, place.dp_rank, place.position, rank.rank, optype, begin + shift,
            max(0.0, end - begin), 0,
        )  # fmt: skip

    def name_op(row: Operation, op: ComputeOp) -> Operation:
        return row._replace(
            model_chunk=chunks[op.stage], global_chunk=op.stage, microbatch=op.number
        )

    for op in rank.ops:
        if op.step in wanted:
            optype = {"F": operation.FORWARD, "W": operation.WEIGHT}.get(
                op.kind, operation.BACKWARD
            )
            rows.append(name_op(make_row(op.step, optype, op.begin, op.end), op))
    for message in rank.messages:
        op = message.op
        if op.step not in wanted:
            continue
        forward = message.is_forward
        if message.is_send:
            optype = operation.FORWARD_SEND if forward else operation.BACKWARD_SEND
        else:
            optype = operation.FORWARD_RECV if forward else operation.BACKWARD_RECV
        row = name_op(make_row(op.step, optype, message.posted, message.complete), op)
        if not message.is_send:
            seen = rank.on_gpu or message.is_awaited
            row = row._replace(
                posted=message.posted + shift,
                waited=None if rank.on_gpu else message.waited + shift,
                completed=message.complete + shift if seen else None,
            )
        rows.append(row)
    rows += [
        make_row(step, optype, *span[:2]) for optype, step, span in rank.others if step in wanted
    ]
    rows.sort(key=lambda row: row.start)
    for row in rows:
        number = counts[row.step, row.optype]
        counts[row.step, row.optype] += 1
        yield row._replace(seq_id=number)


def _seconds(value: float) -> str:
    """Seconds for a message, in a unit that suits."""
    size = abs(value)
    if size >= 3600:
        return f"{value / 3600:.1f} h"
    if size >= 1:
        return f"{value:.3f} s"
    return f"{1e3 * value:.3g} ms" if size >= 1e-3 else f"{1e6 * value:.0f} µs"
