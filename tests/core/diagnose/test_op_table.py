"""Op tables as CSV, JSON lines and Parquet, and the study's Chrome form: one content, four."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from op_traces import COLUMNS, PlayedJob, write_csv, write_lines

from pipemorph.diagnose.formats.registry import load_recording
from pipemorph.diagnose.operation import OPTYPES, Operation
from pipemorph.errors import InputError


@pytest.fixture(scope="module")
def operations() -> list[Operation]:
    """Ops that every form can hold: without times of posts and waits."""
    found = PlayedJob(replicas=2, steps=3, delay=lambda *_: 0.002).operations()
    return [op._replace(posted=None, waited=None) for op in found]


def write_parquet(path: Path, operations: list[Operation]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = dict(zip(COLUMNS, map(list, zip(*operations, strict=True)), strict=True))
    parquet.write_table(arrow.table(columns), path)
    return path


def write_study_trace(path: Path, operations: list[Operation]) -> Path:
    """Write the study's Chrome form: names of threads after the ops."""
    events: list[dict[str, Any]] = []
    for op in operations:
        compute = op.optype in OPTYPES[:2]
        arguments = {"step": op.step, "seq_id": op.seq_id, "model_chunk": op.model_chunk}
        arguments["mb_id"] = op.microbatch if compute else -1
        thread = 10 * op.stage + 5 * op.dp_rank
        events.append(
            {"ph": "X", "name": op.optype, "cat": op.optype, "pid": op.dp_rank, "tid": thread,
             "ts": op.start * 1e6, "dur": op.duration * 1e6, "args": arguments}
        )  # fmt: skip
    for stage in range(4):
        for replica in range(2):
            name = f"PP rank {stage}, TP rank 0, compute"
            events.append(
                {"ph": "M", "name": "thread_name", "pid": replica, "tid": 10 * stage + 5 * replica,
                 "args": {"name": name}}
            )  # fmt: skip
    path.write_bytes(gzip.compress(json.dumps(events).encode()))
    return path


FORMS = {
    "t.csv": write_csv,
    "t.jsonl": write_lines,
    "t.parquet": write_parquet,
    "t.json.gz": write_study_trace,
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_read(name: str, tmp_path: Path, operations: list[Operation]) -> None:
    path = FORMS[name](tmp_path / name, operations)  # type: ignore[operator]
    recording = load_recording([path])
    assert not recording.notes and len(recording.table) == len(operations)
    for found, op in zip(recording.table, operations, strict=True):
        assert (found.step, found.dp_rank, found.stage, found.optype) == (*op[:3], op.optype)
        assert found.start == pytest.approx(op.start, abs=1e-9)
        assert found.duration == pytest.approx(op.duration, abs=1e-9)
        if "compute" in op.optype:
            assert (found.global_chunk, found.microbatch) == (op.global_chunk, op.microbatch)
        if name != "t.json.gz":
            assert found == op


def test_forms_are_recognized_by_content(tmp_path: Path, operations: list[Operation]) -> None:
    path = write_csv(tmp_path / "t.csv", operations)
    shutil.copy(path, tmp_path / "wrong.json")
    (tmp_path / "packed").write_bytes(gzip.compress(path.read_bytes()))
    whole = len(load_recording([path]).table)
    for name in ("wrong.json", "packed"):
        assert len(load_recording([tmp_path / name]).table) == whole


def test_times_of_receives_are_read(tmp_path: Path) -> None:
    given = list(PlayedJob(steps=1).operations())
    for form in ("t.csv", "t.jsonl"):
        path = FORMS[form](tmp_path / form, given)  # type: ignore[operator]
        assert list(load_recording([path]).table) == given


def test_files_of_a_folder_are_one_recording(tmp_path: Path, operations: list[Operation]) -> None:
    for stage in range(4):
        write_csv(tmp_path / f"{stage}.csv", [op for op in operations if op.stage == stage])
    (tmp_path / "README").write_text("no trace")
    assert len(load_recording([tmp_path]).table) == len(operations)


HEAD = "step,dp_rank,stage,optype,start_ts,duration\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step,dp_rank,stage,optype\n", "has no start_ts and no duration"),
        ("step,dp_rank,stage,kind\n", "has no optype"),
        (HEAD + "0,0,0,forward-compute,0\n", "line 2 has 5 values; expected 6"),
        (HEAD + "0,0,x,forward-compute,0,1\n", "line 2 stage is 'x'; expected a number"),
        (HEAD + "0,0,,forward-compute,0,1\n", "line 2 has no stage"),
        (HEAD + "0,0,0,Forward,0,1\n", "optype 'Forward' is none of the format"),
        (HEAD + "0,0,0,gc,0,nan\n", "duration is nan"),
        (HEAD + "0,0,0,gc,inf,1\n", "start is inf"),
        (HEAD + "0,0,0,gc,0,-3\n", "duration is -3"),
        (HEAD + "0,0,-1,gc,0,1\n", "stage is -1"),
        (HEAD, "has no ops"),
        (HEAD + "0,0,0,\0,0,1\n", "optype '\\\\x00' is none"),
        ('{"optype": "gc"}\n', "line 1 has no step and no dp_rank"),
        ('{"optype": "gc", "step": 0, "dp_rank": 0, "stage": 0, "start_ts": 0', "is no trace"),
        ('{"optype": "gc", "step": true, "dp_rank": 0, "stage": 0, "start_ts": 0, "duration": 1}\n',
         "step is True"),
        ("PAR1 and no more", "cannot be read as Parquet"),
        ('{"schemaVersion": 1}', "is no trace that can be read"),
        ("PK\x03\x04", "is no trace that can be read"),
        ("", "is empty"),
    ],
)  # fmt: skip
def test_bad_tables_are_refused_in_a_line(text: str, message: str, tmp_path: Path) -> None:
    if text.startswith("PAR1"):
        pytest.importorskip("pyarrow")
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as found:
        load_recording([path])
    assert str(found.value).startswith("t: ") and "\n" not in str(found.value)


def test_a_truncated_line_is_refused(tmp_path: Path, operations: list[Operation]) -> None:
    path = write_lines(tmp_path / "t.jsonl", operations)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match="ends in the middle"):
        load_recording([path])


def test_two_ranks_in_one_place_are_refused(tmp_path: Path, operations: list[Operation]) -> None:
    ops = [*operations, operations[0]._replace(rank=77)]
    with pytest.raises(InputError, match="ranks 0 and 77 are both stage 0 of dp_rank 0"):
        load_recording([write_csv(tmp_path / "t.csv", ops)])


def test_files_of_two_formats_are_refused(tmp_path: Path, operations: list[Operation]) -> None:
    paths = [write_csv(tmp_path / "a", operations), write_lines(tmp_path / "b", operations)]
    with pytest.raises(InputError, match="give files of one format"):
        load_recording(paths)


def test_folders_without_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no trace"):
        load_recording([tmp_path])


def test_without_pyarrow_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1....")
    with pytest.raises(InputError, match=r"t\.parquet: Parquet needs pyarrow, .*pip install"):
        load_recording([tmp_path / "t.parquet"])
