"""Folders and timelines of `pipemorph run` are diagnosed like any other trace."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from op_traces import PlayedJob

from pipemorph.diagnose.diagnosis import diagnose
from pipemorph.diagnose.formats.registry import load_recording
from pipemorph.errors import InputError
from pipemorph.local.results.timeline import TraceSubject, chrome_trace
from pipemorph.local.results.traces import TraceIndex
from pipemorph.planning.ir import Policy

KINDS = {"forward-compute": "F", "backward-compute": "BW", "backward-weight": "W"}


def slow_link(step: int, replica: int, source: int, target: int) -> float:
    return 0.030 if {source, target} == {1, 2} else 0.001


def write_run(folder: Path, job: PlayedJob) -> Path:
    """Write the ranks' traces of a job, as ranks write them: a file per rank and stage."""
    lines: dict[tuple[int, int, int, int], dict[str, Any]] = {}
    waits: dict[str, list[Any]] = defaultdict(list)
    split = job.policy in (Policy.ZERO_BUBBLE, Policy.ZERO_BUBBLE_V)
    for op in job.operations():
        origin = 1e5 * op.step
        kind = "B" if split and op.optype == "backward-compute" else KINDS.get(op.optype)
        times = [round(op.start - origin, 6), round(op.end - origin, 6)]
        key = (op.rank, op.global_chunk, op.dp_rank, op.step)
        if kind is not None:
            line = lines.setdefault(
                key,
                {"rank": op.rank, "stage": op.global_chunk, "replica": op.dp_rank,
                 "iteration": op.step, "plan_version": 0, "origin": origin, "ops": [], "waits": []},
            )  # fmt: skip
            line["ops"].append([kind, op.microbatch, *times])
            line["waits"] += [[kind, op.microbatch, *each] for each in waits.pop("", [])]
        elif op.optype.endswith("recv") and op.duration > 0:
            waits[""].append(times)
        elif op.optype == "grads-reduce-scatter":
            for line in lines.values():
                if (line["rank"], line["iteration"]) == (op.rank, op.step):
                    line["reduction"] = {
                        "bytes": 1,
                        "buckets": 1,
                        "seconds": 1,
                        "waited": op.duration,
                    }
    trace = folder / "trace"
    trace.mkdir(parents=True)
    for (rank, stage, _, _), line in lines.items():
        more = f"-stage{stage}" if stage >= job.stages // 2 and job.ranks else ""
        with (trace / f"ops-rank{rank}{more}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return folder


@pytest.mark.parametrize(
    ("policy", "stages", "ranks"),
    [(Policy.ONE_F_ONE_B, 4, None), (Policy.ZERO_BUBBLE, 4, None), (Policy.ZERO_BUBBLE_V, 8, 4)],
)
def test_a_folder_of_a_run_is_diagnosed(
    policy: Policy, stages: int, ranks: int | None, tmp_path: Path
) -> None:
    job = PlayedJob(2, stages, policy=policy, ranks=ranks, delay=slow_link)
    job.tail = (("grads-reduce-scatter", 0.005),)
    recording = load_recording([write_run(tmp_path / "out", job)])
    found = diagnose(recording)
    assert recording.format_name == "rank traces of pipemorph run"
    assert found.slowdown.recorded == pytest.approx(job.step_seconds[0], rel=1e-4)
    assert found.slowdown.span == pytest.approx(job.step_seconds[0], rel=1e-4)
    assert found.steps.stages == 4 and len(found.steps.steps) == 6
    assert found.causes[0].cause.startswith("slow link") and found.causes[0].link == 1


@pytest.mark.parametrize("barrier", [True, False])
def test_a_rank_that_begins_late_loads_data(barrier: bool, tmp_path: Path) -> None:
    """Ranks with a barrier after each step begin the next one when the last has ended."""
    folder = write_run(tmp_path / "out", PlayedJob(tail=()))
    spent = [0.3, 0.003, 0.0, 0.012]
    for path in sorted(folder.glob("trace/*.jsonl")):
        lines, shift, ended = [], 0.0, 0.0
        for line in map(json.loads, path.read_text().splitlines()):
            rank = line["rank"]
            times = line["ops"] + line["waits"]
            begin = (0.15 * line["iteration"] if barrier else 0.0) + line["iteration"] * 0.44
            late = spent[rank] if line["iteration"] >= 3 else 0.0
            # The first rank holds up all of them: their ops follow its own.
            shift = 0.3 if line["iteration"] >= 3 else 0.0
            for row in times:
                row[2:] = [row[2] + shift - late, row[3] + shift - late]
            ended += shift
            line["origin"] = 1e6 + begin + ended - shift + late
            lines.append(json.dumps(line) + "\n")
        path.write_text("".join(lines))
    causes = diagnose(load_recording([folder])).causes
    assert (causes[0].cause, causes[0].where, causes[0].since) == ("slow loader", "dp0-stage0", 3)
    assert causes[0].seconds == pytest.approx(0.15, rel=0.05)


def test_a_repeated_iteration_counts_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out", PlayedJob(delay=slow_link))
    for path in folder.glob("trace/*.jsonl"):
        text = path.read_text()
        path.write_text(text + text.splitlines(keepends=True)[2])
    assert diagnose(load_recording([folder])).steps.microbatches == 8


def test_a_timeline_is_diagnosed(tmp_path: Path) -> None:
    job = PlayedJob(delay=slow_link, tail=())
    folder = write_run(tmp_path / "out", job)
    index = TraceIndex.from_folder(folder / "trace")
    traces = index.read_iterations(index.list_iterations())
    subject = TraceSubject("job", emulated=False, columns=[""], changes=[])
    (folder / "timeline.json").write_text(json.dumps(chrome_trace(traces, subject, 6)))
    found = diagnose(load_recording([folder / "timeline.json"]))
    assert found.format_name == "timelines of pipemorph run"
    assert found.slowdown.recorded == pytest.approx(job.step_seconds[0], rel=1e-3)
    assert found.causes[0].link == 1 and any("no sends" in note for note in found.notes)


def test_the_timeline_is_read_where_ranks_wrote_no_traces(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out", PlayedJob(tail=()))
    index = TraceIndex.from_folder(folder / "trace")
    traces = index.read_iterations(index.list_iterations())
    subject = TraceSubject("job", emulated=False, columns=[""], changes=[])
    (folder / "timeline.json").write_text(json.dumps(chrome_trace(traces, subject, 6)))
    (folder / "report.json").write_text("{}")
    for path in folder.glob("trace/*"):
        path.unlink()
    assert load_recording([folder]).format_name == "timelines of pipemorph run"


def test_a_report_without_traces_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(InputError, match=r"no traces of its ranks .* PIPEMORPH_TRACE_DIR"):
        load_recording([tmp_path])


def test_damaged_traces_are_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out", PlayedJob())
    path = folder / "trace/ops-rank0.jsonl"
    path.write_text(path.read_text().replace('"F"', '"X"'))
    with pytest.raises(InputError, match=r"ops-rank0\.jsonl: ends in the middle, or is damaged"):
        load_recording([folder])


def test_traces_of_two_runs_are_refused(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, PlayedJob(steps=1)) for name in "ab"]
    with pytest.raises(InputError, match="files are of 2 runs"):
        load_recording(folders)
