"""Traces of torch.profiler, made by hand: ops, messages, clocks, and what is refused."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hand_made_profiles import (
    BACKWARD,
    BASE,
    FORWARD,
    TRANSFER,
    HandMadePipeline,
    HandMadeTrace,
    Labels,
)

from pipemorph.cli import main
from pipemorph.diagnose import operation
from pipemorph.diagnose.clocks import Delivery, align_clocks
from pipemorph.diagnose.formats.torch_profiler.reader import TorchProfilerReader
from pipemorph.diagnose.operation import Operation
from pipemorph.diagnose.trace_file import TraceFile
from pipemorph.errors import InputError

MILLISECOND = 1e-3
BACKWARD_NODE = "autograd::engine::evaluate_function"


def read(paths: Iterable[Path]) -> tuple[list[Operation], list[str]]:
    notes: list[str] = []
    files = [TraceFile.open_file(path) for path in paths]
    reader = TorchProfilerReader()
    assert all(map(reader.recognize_file, files))
    return list(reader.read_operations(files, notes)), notes


def write(folder: Path, traces: Sequence[HandMadeTrace]) -> list[Path]:
    return [trace.write(folder) for trace in traces]


def list_compute(ops: Iterable[Operation]) -> Counter[tuple[str, int, int, int]]:
    return Counter(
        (op.optype, op.step, op.stage, op.microbatch)
        for op in ops
        if op.optype in operation.COMPUTE
    )


def every_op(steps: int, stages: int, microbatches: int) -> Counter[tuple[str, int, int, int]]:
    return Counter(
        (optype, step, stage, microbatch)
        for optype in (operation.FORWARD, operation.BACKWARD)
        for step in range(steps)
        for stage in range(stages)
        for microbatch in range(microbatches)
    )


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("labels", ["", "stages", "numbers"])
def test_ops_and_messages_are_found(tmp_path: Path, labels: Labels, gpu: bool) -> None:
    pipeline = HandMadePipeline(range(4), 4, labels=labels, gpu=gpu, slow={2: 1.5})
    ops, notes = read(write(tmp_path, pipeline.make_traces()))
    assert list_compute(ops) == every_op(2, 4, 3)
    for op in ops:
        # Without a label or a message before it, an op begins with its first operator.
        first = (op.optype, op.stage) in ((operation.FORWARD, 0), (operation.BACKWARD, 3))
        alone = first and not (labels or gpu or op.microbatch)
        if op.optype in operation.COMPUTE and not alone:
            expected = FORWARD if op.optype == operation.FORWARD else BACKWARD
            expected *= 1.5 if op.stage == 2 else 1.0
            assert op.duration == pytest.approx(expected * MILLISECOND, abs=2e-4), op
            assert op.global_chunk == op.stage and op.model_chunk == 0
    counts = Counter(op.optype for op in ops)
    assert {counts[optype] for optype in operation.TRANSFERS} == {2 * 3 * 3}
    sends = {
        (op.step, op.stage + 1, op.microbatch): op
        for op in ops
        if op.optype == operation.FORWARD_SEND
    }
    transfers = []
    for op in ops:
        if op.optype == operation.FORWARD_RECV:
            send = sends[op.step, op.stage, op.microbatch]
            assert op.posted is not None and gpu == (op.waited is None)
            if op.completed is None:
                assert op.duration < 2e-4, "it was there before the wait"
            else:
                transfers.append(op.completed - max(send.start, op.posted))
                # The sender itself waits for the end of a send much later.
                assert send.end == pytest.approx(op.completed, abs=1e-6)
    assert transfers == pytest.approx([TRANSFER * MILLISECOND] * len(transfers), abs=2e-4)
    assert len(transfers) == 18 if gpu else len(transfers) >= 6
    assert counts[operation.OPTIMIZER] == 2 * 4
    assert any("not on a GPU" in note for note in notes) == gpu
    assert len({(op.step, op.rank, op.optype, op.seq_id) for op in ops}) == len(ops)


def test_clocks_that_are_hours_apart_are_aligned(tmp_path: Path) -> None:
    plain = HandMadePipeline(range(4), 4).make_traces()
    expected, _ = read(write(tmp_path, plain))
    for trace, skew in zip(plain, (0.0, 5_000.0, -7_200_000.0, 3.5), strict=True):
        trace.skew = skew
    ops, notes = read(write(tmp_path, plain))
    for op, same in zip(ops, expected, strict=True):
        assert op.start == pytest.approx(same.start, abs=1e-6)
    assert any("were 2.0 h apart" in note and "at most 2 ms" in note for note in notes), notes


def test_traces_of_different_runs_are_called_so(tmp_path: Path) -> None:
    traces = HandMadePipeline(range(2), 2).make_traces()
    # In the other run, stage 0 took longer, and stage 1 begins its backwards without waiting.
    other = HandMadePipeline(range(2), 2, slow={0: 8.0}).make_traces()
    _, notes = read(write(tmp_path, [traces[0], other[1]]))
    assert any("Messages do not fit together" in note for note in notes), notes


@pytest.mark.parametrize("seed", range(5))
def test_true_offsets_lie_within_the_bound(seed: int) -> None:
    draw = random.Random(seed)
    skews = [0.0, *(draw.uniform(-5, 5) for _ in range(4))]
    deliveries = []
    for _ in range(200):
        a = draw.randrange(4)
        a, b = draw.choice([(a, a + 1), (a + 1, a)])
        sent = draw.uniform(0, 60)
        arrived = sent + draw.uniform(0.001, 0.003) + draw.expovariate(100)
        deliveries.append(Delivery(a, b, sent + skews[a], arrived + skews[b]))
    alignment = align_clocks(range(5), deliveries)
    assert not alignment.mismatched and not alignment.unaligned
    for (a, b), bound in alignment.bounds.items():
        found = alignment.offsets[b] - alignment.offsets[a]
        assert 0 < bound < 0.004
        assert abs(found - (skews[b] - skews[a])) <= bound


def test_ranks_without_messages_in_both_directions_keep_their_clocks() -> None:
    alignment = align_clocks(range(3), [Delivery(0, 1, 0.0, 1.0), Delivery(1, 0, 1.0, 2.0),
                                        Delivery(1, 2, 1.0, 2.0)])  # fmt: skip
    assert alignment.unaligned == [2] and alignment.offsets[2] == 0.0


@pytest.mark.parametrize(
    ("pipeline_group", "tensor_group"),
    [("mesh_pp", "mesh_tp"),
     ("PIPELINE_MODEL_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL_GROUP")],
)  # fmt: skip
def test_replicas_and_tensor_ranks_follow_from_groups(
    tmp_path: Path, pipeline_group: str, tensor_group: str
) -> None:
    # Ranks 0..7: pipeline of two, two replicas, two tensor ranks, as pp × dp × tp.
    paths = []
    for dp in range(2):
        for tp in range(2):
            ranks = [2 * dp + tp, 4 + 2 * dp + tp]
            for trace in HandMadePipeline(ranks, 8).make_traces():
                first = trace.rank - trace.rank % 2
                trace.groups = [(pipeline_group, ranks), (tensor_group, [first, first + 1])]
                paths.append(trace.write(tmp_path))
    ops, notes = read(paths)
    places = {(op.rank, op.dp_rank, op.stage) for op in ops}
    assert places == {(0, 0, 0), (4, 0, 1), (2, 1, 0), (6, 1, 1)}
    assert any("Ranks 1, 3, 5, 7 are not diagnosed" in note for note in notes), notes
    ops, notes = read(path for path in paths if path.name != "rank6.json")
    assert {op.rank for op in ops} == {0, 4}
    assert any("Traces of ranks 6 are missing" in note for note in notes), notes


def test_steps_of_one_trace_only_are_left_out(tmp_path: Path) -> None:
    traces = HandMadePipeline(range(2), 2, steps=3).make_traces()
    other = HandMadePipeline(range(2), 2, steps=2).make_traces()
    ops, notes = read(write(tmp_path, [traces[0], other[1]]))
    assert list_compute(ops) == every_op(2, 2, 3)
    assert any("Steps 2 are not in all traces" in note for note in notes), notes


def test_without_marks_steps_end_with_the_optimizer(tmp_path: Path) -> None:
    traces = HandMadePipeline(range(2), 2, steps=3).make_traces()
    for trace in traces:
        trace.events = [e for e in trace.events if "ProfilerStep" not in e["name"]]
        for event in [e for e in trace.events if "Optimizer" in e["name"]]:
            # An optimizer that calls another one.
            trace.annotate(
                "Optimizer.step#Both.step", event["ts"] / 1e3 - 0.1, event["ts"] / 1e3 + 3
            )
    ops, _ = read(write(tmp_path, traces))
    assert list_compute(ops) == every_op(3, 2, 3)


def test_a_step_that_is_cut_is_left_out(tmp_path: Path) -> None:
    traces = HandMadePipeline(range(2), 2, steps=2).make_traces()
    for trace in traces:
        # The profiler began after the first forward.
        first = min(e["ts"] for e in trace.events if e["name"] == "aten::add")
        trace.events = [
            e for e in trace.events if e["ts"] > first + 1 or "ProfilerStep" in e["name"]
        ]
    ops, notes = read(write(tmp_path, traces))
    assert {op.step for op in ops} == {1}
    assert any("their forwards precede the traces" in note for note in notes), notes


def test_several_files_of_a_rank_are_joined(tmp_path: Path) -> None:
    traces = HandMadePipeline(range(2), 2, steps=1).make_traces()
    later = HandMadePipeline(range(2), 2, steps=1, sequence=200).make_traces()
    for trace in later:
        trace.skew = 60_000.0
        for event in trace.events:
            event["name"] = event["name"].replace("ProfilerStep#0", "ProfilerStep#1")
    paths = [
        trace.write(tmp_path, f"{trace.rank}.{part}.json")
        for part, mine in enumerate((traces, later))
        for trace in mine
    ]
    ops, _ = read(paths)
    assert list_compute(ops) == every_op(2, 2, 3)
    with pytest.raises(InputError, match=r"again\.json: is of rank 0 and of the same time"):
        read([*paths, traces[0].write(tmp_path, "again.json")])


def refused(paths: Iterable[Path]) -> str:
    with pytest.raises(InputError) as found:
        read(paths)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_what_is_no_pipeline_is_refused_in_a_line(tmp_path: Path) -> None:
    trace = HandMadeTrace(0, 2)
    trace.add("aten::add", 0.0, 1.0)
    trace.add("c10d::allreduce_", 1.0, 1.0)
    assert refused([trace.write(tmp_path)]).startswith(
        "rank0.json: has no pipeline in it: no sends or receives between ranks, but 1 allreduce"
    )
    # An exchange of all with all runs the same kernels as a message.
    trace.events.pop()
    trace.add("c10d::alltoall_base_", 1.0, 1.0)
    trace.annotate("nccl:all_to_all", 1.0, 2.0)
    trace.launch("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", 1.5, 2.0, 3.0, 20)
    assert "1 alltoall_base" in refused([trace.write(tmp_path)])
    alone = HandMadeTrace(0, 1)
    alone.add("aten::add", 0.0, 1.0)
    assert "has no pipeline in it" in refused([alone.write(tmp_path)])


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    paths = write(tmp_path, HandMadePipeline(range(4), 4).make_traces())
    assert "traces of ranks 1, 3 are missing" in refused([paths[0], paths[2]])


def test_unusable_files_are_refused_in_a_line(tmp_path: Path) -> None:
    paths = write(tmp_path, HandMadePipeline(range(2), 2).make_traces())
    text = paths[1].read_text()
    paths[1].write_bytes(gzip.compress(text.encode())[:-50])
    assert "rank1.json: ends in the middle" in refused(paths)
    content = json.loads(text)
    content["distributedInfo"]["world_size"] = 3
    paths[1].write_text(json.dumps(content))
    assert "of a job of 3 ranks, rank0.json of one of 2" in refused(paths)
    content["distributedInfo"]["rank"] = 7
    paths[1].write_text(json.dumps(content))
    assert "distributedInfo has rank 7 of world_size 3" in refused(paths)
    del content["distributedInfo"]
    paths[1].write_text(json.dumps(content))
    assert "has no distributedInfo" in refused(paths)
    text = json.dumps({"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": 3, "ts": "a"}]})
    file = TraceFile.open_file(paths[1])
    paths[1].write_text(text)
    assert not TorchProfilerReader().recognize_file(TraceFile.open_file(paths[1]))
    assert TorchProfilerReader().recognize_file(file)


def test_times_of_the_wall_clock_are_not_needed(tmp_path: Path) -> None:
    traces = HandMadePipeline(range(2), 2).make_traces()
    paths = write(tmp_path, traces)
    for path in paths:
        content = json.loads(path.read_text())
        assert content.pop("baseTimeNanoseconds") == BASE
        path.write_text(json.dumps(content))
    ops, _ = read(paths)
    assert list_compute(ops) == every_op(2, 2, 3)


def test_the_command_reads_traces_and_refuses_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job"
    job.mkdir()
    write(job, HandMadePipeline(range(4), 4, microbatches=8, slow={2: 2.0}).make_traces())
    assert main(["diagnose", str(job), "--output", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["slowdown"] > 1.2
    assert "stage 2" in found["causes"][0]["where"], found["causes"]
    assert any("true ends of sends" in note for note in found["notes"])
    # Two GPUs with the same model: gradients are reduced, and nothing is sent.
    for rank in range(2):
        trace = HandMadeTrace(rank, 2)
        trace.add("aten::add", 0.0, 1.0, **{"Sequence number": 1})
        trace.add(f"{BACKWARD_NODE}: AddBackward0", 1.0, 1.0, **{"Sequence number": 1})
        trace.add("c10d::allreduce_", 2.0, 1.0)
        trace.launch("ncclKernel_AllReduce_RING_LL_Sum_float", 2.5, 3.0, 4.0, 20)
        trace.write(tmp_path)
    assert main(["diagnose", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pipemorph diagnose: rank0.json: has no pipeline in it")
    assert error.count("\n") == 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_reductions_data_and_pauses_are_found(tmp_path: Path, replicas: int) -> None:
    paths = []
    for dp_rank in range(replicas):
        ranks = [dp_rank, dp_rank + replicas]
        for trace in HandMadePipeline(ranks, 2 * replicas).make_traces():
            trace.groups = [("mesh_pp", ranks)]
            trace.skew = 1e5 * dp_rank
            for event in [e for e in trace.events if "Optimizer" in e["name"]]:
                at = event["ts"] / 1e3
                trace.annotate("gloo:all_reduce", at - 0.9, at - 0.5)
                trace.annotate("gloo:all_reduce", at - 0.6, at - 0.1)
                trace.annotate("gloo:all_gather", at + 2.1, at + 2.3)
                trace.annotate(
                    "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
                    at + 2.4,
                    at + 2.5,
                )
                trace.annotate("gc.collect", at + 2.6, at + 2.8)
            paths.append(trace.write(tmp_path))
    ops, notes = read(paths)
    counts = Counter(op.optype for op in ops)
    reduction = operation.REDUCE_SCATTER if replicas > 1 else operation.CLIP
    for optype, seconds in (
        (reduction, 8e-4), (operation.ALL_GATHER, 2e-4), (operation.DATA, 1e-4),
        (operation.GC, 2e-4), (operation.OPTIMIZER, 2e-3),
    ):  # fmt: skip
        found = [op.duration for op in ops if op.optype == optype]
        assert found == pytest.approx([seconds] * 2 * 2 * replicas, abs=1e-6), optype
    assert counts[operation.REDUCE_SCATTER] + counts[operation.CLIP] == 4 * replicas
    if replicas > 1:
        # No message connects the replicas, but no reduction ends before all have begun.
        assert any("100.000 s apart" in note for note in notes), notes
        firsts = [min(op.start for op in ops if op.dp_rank == dp_rank) for dp_rank in range(2)]
        assert firsts[0] == pytest.approx(firsts[1], abs=1e-3)


def test_a_trace_without_receives_is_read(tmp_path: Path) -> None:
    traces = HandMadePipeline(range(2), 2).make_traces()
    for trace in traces:
        trace.events = [event for event in trace.events if "recv" not in event["name"]]
    ops, _ = read(write(tmp_path, traces))
    assert any(op.optype == "forward-send" for op in ops)
    assert not any(op.optype.endswith("recv") for op in ops)


def test_joint_labels_are_refused_in_a_line(tmp_path: Path) -> None:
    traces = HandMadePipeline(range(2), 2).make_traces()
    traces[1].annotate("PP:[0F1;1B0]OVERLAP_F_B", 1.0, 2.0)
    assert refused(write(tmp_path, traces)).startswith("rank1.json: is of a schedule that runs a")
