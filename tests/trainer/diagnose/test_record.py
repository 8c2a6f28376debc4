"""The recorder of op tables: rows that the reader takes, whatever ends the process."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipemorph.diagnose.formats.op_table import JsonLinesReader
from pipemorph.diagnose.formats.registry import load_recording
from pipemorph.diagnose.operation import OPTYPES, Operation
from pipemorph.diagnose.trace_file import TraceFile
from pipemorph_trainer import record


def read(*paths: Path) -> list[Operation]:
    files = [TraceFile.open_file(path) for path in paths]
    assert all(map(JsonLinesReader().recognize_file, files))
    return list(JsonLinesReader().read_operations(files, []))


def test_rows_are_those_of_the_format(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rank5.jsonl"
    with record.open_table(path, stage=1, dp_rank=2, rank=5) as table:
        for step in (3, 4):
            table.begin_step(step)
            for microbatch in range(2):
                before = table.now()
                with table.time_op("forward-recv", microbatch=microbatch, posted=before - 1.0):
                    pass
                with table.time_op("forward-compute", microbatch=microbatch, global_chunk=1):
                    pass
                assert table.now() >= before
            table.add_op("optimizer", 10.0, 0.5)
    ops = read(path)
    assert [(op.step, op.optype, op.seq_id, op.microbatch) for op in ops] == [
        (step, optype, number, microbatch)
        for step in (3, 4)
        for optype, number, microbatch in (
            ("forward-recv", 0, 0), ("forward-compute", 0, 0),
            ("forward-recv", 1, 1), ("forward-compute", 1, 1), ("optimizer", 0, -1),
        )
    ]  # fmt: skip
    assert {(op.dp_rank, op.stage, op.rank) for op in ops} == {(2, 1, 5)}
    receive = ops[0]
    assert receive.posted == receive.start and receive.waited is not None
    assert 1.0 <= receive.waited - receive.start <= receive.duration
    assert ops[1].posted is None and ops[1].global_chunk == 1
    assert (ops[4].start, ops[4].duration) == (10.0, 0.5)


def test_a_table_is_diagnosed(tmp_path: Path) -> None:
    for stage in range(2):
        with record.open_table(tmp_path / f"{stage}.jsonl", stage=stage, rank=stage) as table:
            table.begin_step(0)
            for microbatch in range(4):
                at = 1.0 * (microbatch + stage)
                table.add_op("forward-compute", at, 1.0, microbatch=microbatch)
            for microbatch in range(4):
                at = 6.0 + 2.0 * (microbatch + 1 - stage)
                table.add_op("backward-compute", at, 2.0, microbatch=microbatch)
    recording = load_recording([tmp_path])
    assert len(recording.table) == 16


def test_a_block_that_raises_is_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with record.open_table(path, stage=0) as table:
        table.begin_step(0)
        with pytest.raises(RuntimeError), table.time_op("forward-compute"):
            raise RuntimeError
        with table.time_op("backward-compute"):
            pass
    assert [op.optype for op in read(path)] == ["backward-compute"]


def test_misuse_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stage: is -1"):
        record.open_table(tmp_path / "t.jsonl", stage=-1)
    with record.open_table(tmp_path / "t.jsonl", stage=0) as table:
        with pytest.raises(ValueError, match="call begin_step"):
            table.add_op("gc", 0.0, 1.0)
        table.begin_step(0)
        with pytest.raises(ValueError, match="optype: is 'forward'; expected one of"):
            table.add_op("forward", 0.0, 1.0)
        with pytest.raises(ValueError, match="optype: is 'F'"), table.time_op("F"):
            pass
        for start, duration in ((float("nan"), 1.0), (0.0, -1.0)):
            with pytest.raises(ValueError, match="expected seconds"):
                table.add_op("gc", start, duration)
        for optype in OPTYPES:
            table.add_op(optype, 0.0, 1.0)
    table.add_op("gc", 0.0, 1.0)  # After the end, as of a thread that is late.
    assert len(read(tmp_path / "t.jsonl")) == len(OPTYPES)


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    child = os.fork()
    if child == 0:
        table = record.open_table(path, stage=0)
        table.begin_step(0)
        for microbatch in range(3):
            table.add_op("forward-compute", microbatch, 1.0, microbatch=microbatch)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(read(path)) == 3
    # A machine that went down may have left a part of a line.
    with path.open("ab") as file:
        file.write(b'{"step": 0, "optype": "forward-comp')
    with record.open_table(path, stage=0) as table:
        table.begin_step(1)
        table.add_op("forward-compute", 9.0, 1.0)
    assert [op.step for op in read(path)] == [0, 0, 0, 1]
    path.write_bytes(b"x" * 10_000)
    record.open_table(path, stage=0).close()
    assert path.read_bytes() == b""


def test_a_full_disk_ends_the_recording_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.jsonl"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with record.open_table(path, stage=0) as table:
            table.begin_step(0)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
            for number in range(20):
                table.add_op("forward-compute", number, 1.0, microbatch=number)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert 3 <= len(read(path)) < 10
    assert caplog.text.count("recording of ops") == 1


def test_the_recorder_imports_no_torch() -> None:
    code = (
        "import sys; before = set(sys.modules); from pipemorph_trainer import record; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'pipemorph', 'pipemorph_trainer'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_bounded_recording_keeps_the_newest_steps(tmp_path: Path) -> None:
    path, most = tmp_path / "rank0.jsonl", 8192
    with record.open_table(path, stage=0, most_bytes=most) as table:
        for step in range(200):
            table.begin_step(step)
            for microbatch in range(4):
                table.add_op("forward-compute", 0.0, 1.0, microbatch=microbatch)
    files = sorted(tmp_path.iterdir())
    assert [each.name for each in files] == ["rank0.earlier.jsonl", "rank0.jsonl"]
    # A file may end within a step more than its half.
    assert sum(each.stat().st_size for each in files) <= 1.2 * most
    steps = [op.step for op in read(*files)]
    assert steps == [step for step in range(steps[0], 200) for _ in range(4)]
    assert steps[0] > 100
