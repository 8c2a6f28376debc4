"""`pipemorph diagnose`: what it prints, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from op_traces import PlayedJob, write_csv

from pipemorph.cli import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    def seconds(step: int, replica: int, stage: int, *_: Any) -> float:
        return _[-1] * (1.5 if (replica, stage) == (1, 2) else 1.0)

    return write_csv(tmp_path / "job.csv", PlayedJob(replicas=2, seconds=seconds).operations())


def test_json_has_the_fields_of_the_contract(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(trace), "--output", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["slowdown_by"]) == {"optype", "stage", "dp_rank", "worker"}
    assert set(found["slowdown_by"]["stage"]) == {"0", "1", "2", "3"}
    assert found["slowdown"] > 1.1 and found["m_w"] > 0.5 > found["m_s"]
    assert found["ideal_bubble_fraction"] == pytest.approx(3 / 11)
    assert 0 < found["bubble_fraction"] < 1
    cause = found["causes"][0]
    assert (cause["cause"], cause["where"]) == ("slow worker", "stage 2 of dp_rank 1 (rank 5)")
    assert cause["share"] == pytest.approx(cause["seconds"] / found["seconds"])
    assert {"advice", "notes"} <= set(found)


def test_text_begins_with_ten_lines(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(trace)]) == 0
    lines, advice, *tables = capsys.readouterr().out.split("\n\n")
    assert 4 < len(lines.splitlines()) <= 12
    assert "do this: replace the node of stage 2 of dp_rank 1 (rank 5)" in lines
    assert advice.split()[:3] == ["gain", "step", "change"]
    assert "mostly: slow worker, stage 2 of dp_rank 1 (rank 5): 145 ms of each step" in lines
    assert [table.split()[0] for table in tables[:4]] == ["op", "stage", "dp_rank", "worker"]


def test_out_is_a_folder(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "out"
    assert main(["diagnose", str(trace), "--output", "json", "--out", str(folder)]) == 0
    assert json.loads((folder / "diagnosis.json").read_text()) == json.loads(
        capsys.readouterr().out
    )
    assert main(["diagnose", str(trace), "--out", str(trace)]) == 2
    assert "cannot be used" in capsys.readouterr().err


def test_files_of_an_earlier_diagnosis_go_and_others_stay(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is that of the trace, which is then read again without what was written."""
    folder = trace.parent
    stale, others = ("advice-77.json", "schedule.csv"), ("advice-0.json", "my-advice-1.json")
    for name in (*stale, *others, "advice.json"):
        (folder / name).write_text("[]")
    (folder / "advice-78.json").mkdir()
    assert main(["diagnose", str(trace), "--out", str(folder)]) == 0
    first = capsys.readouterr().out
    assert "[]" not in {(folder / name).read_text() for name in stale if (folder / name).exists()}
    assert not (folder / "advice-77.json").exists() and (folder / "advice-78.json").is_dir()
    for name in (*others, "advice.json"):
        assert (folder / name).read_text() == "[]"
        (folder / name).unlink()
    assert main(["diagnose", str(folder), "--out", str(folder)]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("content", [None, "", "no trace\n", '{"traceEvents": [', "step,optype\n"])
def test_bad_input_is_one_line(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    assert main(["diagnose", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pipemorph diagnose: ") and error.count("\n") == 1
    assert "t.json" in error
