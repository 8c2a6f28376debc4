"""Folders and timelines of `pipemorph run` are diagnosed like any other trace."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from op_traces import PlayedJob

from pipemorph.diagnose.diagnosis import diagnose
from pipemorph.diagnose.formats.rank_traces import TraceIndex
from pipemorph.diagnose.formats.registry import load_recording
from pipemorph.errors import InputError
from pipemorph.local.results.timeline import TraceSubject, chrome_trace
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


@pytest.mark.parametrize(
    ("times", "cause", "cost"),
    [
        ({"data": 0.2, "drawn": 0.1}, "slow loader", 0.3),
        ({"gc": 0.3}, "gc", 0.3),
        ({"checkpoint": 0.3}, "checkpoints", 0.3),
        ({"pauses": []}, "gc", 0.009),
    ],
)
def test_what_a_rank_does_outside_its_ops_is_named(
    times: dict[str, Any], cause: str, cost: float, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "out", PlayedJob(tail=()))
    for path in folder.glob("trace/*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line["times"] = {"window": 1.0, "optimizer": 0.001}
            if line["rank"] == 2 and line["iteration"] >= 3:
                line["times"] |= times
            if line["rank"] == 2 and "pauses" in times:
                # Within its first op, which is shorter without.
                line["times"]["pauses"] = [[1e6 * line["ops"][0][2] + 500, 1e6 * cost]]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = diagnose(load_recording([folder])).causes
    if "pauses" in times:
        (pauses,) = [each for each in found if (each.cause, each.where) == (cause, "dp0-stage2")]
        assert pauses.seconds == pytest.approx(cost, rel=0.05)
    else:
        assert (found[0].cause, found[0].where, found[0].since) == (cause, "dp0-stage2", 3)
        # Its first message comes later, so that a part of it is hidden.
        assert cost / 2 - 0.025 < found[0].seconds < cost / 2


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
