"""Traces that ranks write of their ops and actions."""

from __future__ import annotations

import json
from pathlib import Path

from run_records import write_trace

from pipemorph.diagnose.formats.rank_traces import TraceIndex, read_faults
from pipemorph.planning.ir import OpKind
from pipemorph.planning.simulation.simulator import TimedOp


def test_only_iterations_of_all_ranks_count(tmp_path: Path) -> None:
    write_trace(tmp_path, 4)
    with (tmp_path / "ops-rank1.jsonl").open("a") as file:
        file.write('{"rank": 1, "stage": 1, "replica": 0, "iteration": 4, "plan_version": 0, "ori')
    index = TraceIndex.from_folder(tmp_path)
    assert index.list_iterations() == [0, 1, 2, 3]
    stages = index.read_iterations([2])[2]
    assert [stage.stage for stage in stages] == [0, 1]
    assert stages[0].ops[1] == TimedOp(OpKind.F, 1, 1002.1, 1002.15)


def test_the_last_attempt_of_an_iteration_counts(tmp_path: Path) -> None:
    write_trace(tmp_path, 3)
    for path in tmp_path.glob("*.jsonl"):
        line = json.loads(path.read_text().splitlines()[1]) | {"origin": 5000.0}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    assert TraceIndex.from_folder(tmp_path).read_iterations([1])[1][0].ops[0].start == 5000.0


def test_faults_of_all_ranks_are_merged(tmp_path: Path) -> None:
    for rank in (10, 2):
        content = {"rank": rank, "stage": rank, "replica": 0, "faults": [{"link": 2}]}
        (tmp_path / f"faults-rank{rank}.json").write_text(json.dumps(content))
    (tmp_path / "faults-rank3.json").write_text('{"rank": 3, "fau')
    merged = read_faults(tmp_path)
    assert [fault["rank"] for fault in merged] == [2, 10]
    assert merged[0]["link"] == 2
