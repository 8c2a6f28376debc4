"""Pictures of a diagnosis: contents of the page and of its Chrome traces."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from op_traces import BACKWARD, FORWARD, WEIGHT, PlayedJob, make_table, write_lines

from pipemorph.cli import main
from pipemorph.diagnose.diagnosis import Diagnosis, diagnose
from pipemorph.diagnose.formats.registry import Recording
from pipemorph.diagnose.operation_table import Worker
from pipemorph.diagnose.pictures import step_timeline
from pipemorph.diagnose.pictures.perfetto_trace import render_perfetto_trace
from pipemorph.diagnose.pictures.picture_files import render_picture_files
from pipemorph.diagnose.pictures.step_timeline import StepTimeline, TimelineOp, TimelineRow
from pipemorph.planning.ir import Policy

MOST_BYTES = 5 << 20
OPTIMIZER = 0.003
"""Seconds of the optimizer in all jobs."""


def slow_from_step_2(step: int, replica: int, stage: int, *_: Any) -> float:
    return float(_[-1] * (1.5 if (replica, stage) == (1, 2) and step >= 2 else 1.0))


def long_stage(step: int, replica: int, stage: int, *_: Any) -> float:
    return float(_[-1] * (1.6 if stage == 3 else 1.0))


def vary(step: int, replica: int, *op: Any) -> float:
    _, _, microbatch, usual = op
    return float(usual * (0.6 + 0.1 * ((microbatch * 7 + replica + step) % 9)))


def pause(step: int, replica: int, stage: int, position: int) -> tuple[str, float] | None:
    return {(0, 0): ("data", 0.02), (1, 3): ("gc", 0.03)}.get((stage, position))


def diagnose_job(job: PlayedJob) -> Diagnosis:
    return diagnose(Recording(make_table(job.operations()), "op tables", []))


class Page(HTMLParser):
    """Elements and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.in_script = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.in_script = tag == "script"
        if self.in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.in_script = False

    def handle_data(self, data: str) -> None:
        if self.in_script:
            self.scripts[-1] += data

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found


Drawn = tuple[Diagnosis, dict[str, Any], dict[str, str]]
"""Diagnosis, data of its page, and all files."""


def read_page(job: PlayedJob) -> Drawn:
    diagnosis = diagnose_job(job)
    files = render_picture_files(diagnosis, [Path("job.csv")])
    return diagnosis, Page(files["diagnosis.html"]).data, files


@pytest.fixture(scope="module")
def slow() -> Drawn:
    """Job with a slow worker since step 2."""
    return read_page(PlayedJob(replicas=2, seconds=slow_from_step_2))


@pytest.fixture(scope="module")
def long() -> Drawn:
    """Job with a long last stage."""
    return read_page(PlayedJob(replicas=2, seconds=long_stage, delay=lambda *_: 0.004, extra=pause))


def test_the_page_has_the_headline_and_the_tables(slow: Drawn) -> None:
    diagnosis, page, _ = slow
    stats = {name: (value, about) for value, name, about in page["stats"]}
    assert stats["slowdown S"][0] == f"{diagnosis.slowdown.total:.3f}"
    assert stats["bubble"] == (f"{diagnosis.bubble_fraction:.1%}", "(p−1)/(m+p−1) = 27.3%")
    assert stats["most costly cause: slow worker"][1] == "stage 2 of dp_rank 1 (rank 5)"
    assert stats["best advice: time per sample"][1].startswith("replace the node of stage 2")
    assert any(line.startswith("do this: replace") for line in page["story"])
    assert page["causes"][0]["ranks"] == "5" and page["causes"][0]["since"] == 2
    assert len(page["advice"]) == len(diagnosis.advice) > 1
    assert [table["name"].split()[0] for table in page["tables"]] == ["op", "stage", "replica"]
    assert page["notes"] == diagnosis.notes


def test_the_step_is_the_median_of_those_with_the_cause(long: Drawn) -> None:
    def slower(step: int, *op: Any) -> float:
        return slow_from_step_2(step, *op) * (1 + step / 100)

    _, page, _ = read_page(PlayedJob(replicas=2, seconds=slower))
    assert page["heading"] == "Step 3: the median of those since step 2"
    assert page["steps"]["drawn"] == 3
    assert page["steps"]["since"][0]["text"] == "slow worker, stage 2 of dp_rank 1 (rank 5)"
    assert "Since step 2: slow worker" in page["steps"]["text"]
    assert re.fullmatch(r"Step \d: the median", long[1]["heading"])


def test_a_timeline_has_each_op_at_its_time(slow: Drawn) -> None:
    diagnosis, page, _ = slow
    (step,) = [step for step in diagnosis.steps.steps if step.step == page["steps"]["drawn"]]
    ran, without, removed = page["timelines"][:3]
    assert ran["span_us"] == pytest.approx(step.span * 1e6, abs=1)
    assert without["span_us"] == pytest.approx(diagnosis.slowdown.ideal * 1e6, rel=1e-3)
    assert removed["title"].startswith("advice 1: replace the node")
    assert removed["span_us"] == pytest.approx(job_seconds(PlayedJob(replicas=2)) * 1e6, rel=1e-3)
    assert [(row["replica"], row["stage"]) for row in ran["rows"]] == [
        (replica, stage) for replica in range(2) for stage in range(4)
    ]
    row = ran["rows"][6]
    assert row["rank"] == 5
    assert (row["kinds"].count("F"), row["kinds"].count("U")) == (8, 8)
    forwards = [i for i, kind in enumerate(row["kinds"]) if kind == "F"]
    assert [row["microbatches"][i] for i in forwards] == list(range(8))
    assert {row["durations"][i] for i in forwards} == {15_000}
    # Stages 0 and 1 take 10 ms before it.
    ends = list(accumulate(a + b for a, b in zip(row["gaps"], row["durations"], strict=True)))
    assert ends[forwards[0]] == 20_000 + 15_000
    assert max(ends) <= ran["span_us"] + 1
    assert max(e for e, kind in zip(ends, row["kinds"], strict=True) if kind == "U") == 525_000
    busy = 8 * 1.5 * (FORWARD + BACKWARD + WEIGHT) + OPTIMIZER
    assert row["idle_share"] == pytest.approx(1 - busy / step.span, abs=1e-4)


def job_seconds(job: PlayedJob) -> float:
    list(job.operations())
    return job.step_seconds[0]


def test_each_picture_has_a_text(slow: Drawn) -> None:
    _, page, files = slow
    for timeline in page["timelines"]:
        assert timeline["text"].startswith(timeline["title"])
        assert "Idle time of the workers" in timeline["text"]
        assert re.search(r"dp1-stage\d \d+%", timeline["text"])
    code = Page(files["diagnosis.html"]).scripts[1]
    assert '"aria-label": t.text' in code and '"aria-label", s.text' in code


def test_the_map_marks_the_slow_worker(slow: Drawn) -> None:
    _, page, _ = slow
    found = page["map"]
    marked = [
        (replica, stage, rank)
        for replica, row in zip(found["replicas"], found["rows"], strict=True)
        for stage, (_, _, named, rank) in enumerate(row)
        if named
    ]
    assert marked == [(1, 2, 5)]
    assert found["rows"][1][2][0] == found["most"] > 1.1
    assert not any(bound for row in found["rows"] for _, bound, *_ in row)


def test_workers_without_a_figure_of_their_own_have_a_bound() -> None:
    def long_end(step: int, replica: int, stage: int, *op: Any) -> float:
        return float(op[-1] * (1.0 + 0.6 * stage))

    job = PlayedJob(replicas=34, stages=2, microbatches=2, steps=1, seconds=long_end)
    diagnosis, page, _ = read_page(job)
    bounded = [cell[0] for row in page["map"]["rows"] for cell in row if cell[1]]
    assert len(diagnosis.slowdown.by_worker) == 64
    assert bounded == [round(diagnosis.slowdown.by_stage[0], 4)] * 4 and bounded[0] < 1


def test_an_advised_schedule_split_and_balance_are_drawn(long: Drawn) -> None:
    _, page, files = long
    titles = {each["name"]: each for each in page["timelines"]}
    (split,) = [each for each in titles.values() if "another split" in each["title"]]
    (order,) = [each for each in titles.values() if "schedule pipemorph" in each["title"]]
    assert split["span_us"] < titles["as-it-ran"]["span_us"]
    assert [row["stage"] for row in order["rows"]] == [0, 1, 2, 3]
    assert {"F", "B", "W"} <= {*order["rows"][0]["kinds"]}
    assert {f"{name}.json" for name in titles} | {"diagnosis.html"} == files.keys()
    number = int(order["name"].removeprefix("advice-"))
    assert page["advice"][number - 1]["change"] in order["title"]
    _, page, _ = read_page(PlayedJob(replicas=2, seconds=vary))
    assert any("balance the microbatches" in each["title"] for each in page["timelines"])


def test_chunks_and_other_ops_are_drawn() -> None:
    job = PlayedJob(
        stages=8, ranks=4, policy=Policy.ZERO_BUBBLE_V, extra=pause, delay=lambda *_: 0.004
    )
    _, page, _ = read_page(job)
    rows = page["timelines"][0]["rows"]
    drawn = {kind for row in rows for kind in row["kinds"]}
    assert set("FBWDGOTC") == drawn <= page["kinds"].keys()
    assert {0, 7} <= set(rows[0]["stages"])
    assert "G" in rows[1]["kinds"] and rows[0]["kinds"].startswith("D")
    late = rows[1]["kinds"].index("T")
    assert rows[1]["durations"][late] == 4000, "a transfer without the waiting before it"


def slow_ring(slow: set[int], step: int, replica: int, source: int, target: int) -> float:
    return 0.03 if {source, target} == slow and replica == 0 else 0.002


def test_a_slow_link_has_a_band_in_each_timeline() -> None:
    _, page, _ = read_page(PlayedJob(replicas=2, delay=partial(slow_ring, {1, 2})))
    drawn = {each["name"]: (each["links"], each["crossing"]) for each in page["timelines"]}
    assert {len(links) for links, _ in drawn.values()} == {1} and not any(
        c for _, c in drawn.values()
    )
    (band,) = drawn["as-it-ran"][0]
    assert (band["row"], band["name"], band["text"]) == (1, "link 1", "30 ms per message")
    assert sum(forward for forward, *_ in band["messages"]) == 8 == len(band["messages"]) / 2
    # The first forward of stage 1 ends after 2 × 10 ms and a message of 2 ms.
    assert next(each for each in band["messages"] if each[0]) == [True, 22_000, 52_000]
    assert drawn["without-stragglers"][0][0]["text"] == "2 ms per message"
    (adapted,) = [n for n in page["timelines"] if "adapt to the slow link" in n["title"]]
    assert adapted["links"][0]["text"] == "30 ms per message"


def test_a_link_between_the_ends_of_a_pipeline_crosses_the_rows() -> None:
    job = PlayedJob(
        stages=8, ranks=4, policy=Policy.ONE_F_ONE_B_INTERLEAVED,
        delay=partial(slow_ring, {0, 3}),
    )  # fmt: skip
    for timeline in read_page(job)[1]["timelines"]:
        assert timeline["links"] == []
        assert {tuple(each[:2]) for each in timeline["crossing"]} == {(0, 3), (3, 0)}
    _, page, _ = read_page(PlayedJob(delay=lambda *_: 0.002))
    assert not any(each["links"] or each["crossing"] for each in page["timelines"])


def test_text_of_a_trace_is_escaped(slow: Drawn) -> None:
    evil = "</script><img src=x onerror=alert(1)><!--<script>{{DATA}}"
    found = slow[0]
    cause = replace(found.causes[0], where=evil)
    changed = replace(found, format_name=evil, causes=[cause], notes=[evil])
    text = render_picture_files(changed, [Path(evil.replace("/", ""))])["diagnosis.html"]
    page = Page(text)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 2 and "img" not in tags
    assert page.data["notes"] == [evil] and page.data["causes"][0]["where"] == evil
    assert "onerror" in page.data["title"]
    assert "innerHTML" not in page.scripts[1]


def test_the_page_loads_nothing(slow: Drawn) -> None:
    _, _, files = slow
    page = Page(files["diagnosis.html"])
    for _, attributes in page.elements:
        assert not {"src", "href", "srcset"} & attributes.keys()
    assert not re.search(r"https?://|url\(|@import|fetch\(", files["diagnosis.html"])
    assert "prefers-color-scheme: dark" in files["diagnosis.html"]


def test_a_large_step_is_cut_to_its_slowest_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    job = PlayedJob(replicas=32, stages=2, microbatches=6, steps=1, seconds=vary)
    diagnosis, page, files = read_page(job)
    assert len(page["timelines"][0]["rows"]) == 64 and page["hidden"] == 0
    assert len(files["diagnosis.html"]) < MOST_BYTES / 10
    monkeypatch.setattr(step_timeline, "MOST_OPS", 300)
    found = render_picture_files(diagnosis, [])
    page = Page(found["diagnosis.html"]).data
    rows = page["timelines"][0]["rows"]
    assert page["hidden"] + len(rows) / 2 == 32 and 0 < len(rows) < 32
    by_dp = diagnosis.slowdown.by_dp_rank
    drawn = {row["replica"] for row in rows}
    assert min(by_dp[r] for r in drawn) >= max(by_dp[r] for r in by_dp.keys() - drawn)
    assert page["timelines"][0]["span_us"] == pytest.approx(1e6 * diagnosis_span(diagnosis, page))
    monkeypatch.setattr(step_timeline, "MOST_OPS", 20)
    page = Page(render_picture_files(diagnosis, [])["diagnosis.html"]).data
    assert page["hidden"] == 31 and page["most_ops"] == 10
    assert [len(row["kinds"]) for row in page["timelines"][0]["rows"]] == [10, 10]


def diagnosis_span(diagnosis: Diagnosis, page: dict[str, Any]) -> float:
    (span,) = [s.span for s in diagnosis.steps.steps if s.step == page["steps"]["drawn"]]
    return span


def check_trace(text: str) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Complete events by thread, after checks of the Trace Event Format."""
    events = json.loads(text)["traceEvents"]
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    names: dict[tuple[str, int, int], str] = {}
    pairs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "M":
            if "name" in event["args"]:
                names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            assert event["dur"] >= 0 <= event["ts"]
            threads[event["pid"], event["tid"]].append(event)
        else:
            pairs[event["id"]].append(event)
    for pid, tid in threads:
        assert names["process_name", pid, 0] == f"replica {pid} (dp_rank)"
        assert names["thread_name", pid, tid].startswith(f"stage {tid}")
    for begin, end in pairs.values():
        assert (begin["ph"], end["ph"]) == ("b", "e") and begin["ts"] <= end["ts"]
        assert begin["name"] == end["name"] and begin["cat"] == end["cat"]
    for mine in threads.values():
        # Events of a thread are nested, or follow each other.
        ends: list[float] = []
        for event in mine:
            while ends and ends[-1] <= event["ts"] + 1e-3:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-3
            ends.append(event["ts"] + event["dur"])
    return threads


def test_chrome_traces_have_a_process_per_replica_and_a_thread_per_stage(long: Drawn) -> None:
    _, page, files = long
    for timeline in page["timelines"]:
        threads = check_trace(files[f"{timeline['name']}.json"])
        places = {(row["replica"], row["stage"]) for row in timeline["rows"]}
        assert threads.keys() == places
        for row in timeline["rows"]:
            mine = threads[row["replica"], row["stage"]]
            assert len(mine) == sum(kind not in "TC" for kind in row["kinds"])
    first = check_trace(files["as-it-ran.json"])[0, 3][0]
    assert first["name"] == "forward-compute 0" and first["args"] == {"microbatch": 0, "chunk": 3}
    assert first["dur"] == 16_000


def test_overlapping_ops_are_nested_in_the_chrome_trace() -> None:
    ops = [
        TimelineOp("forward-compute", 0, 0, 0.0, 1.0, True),
        TimelineOp("gc", -1, -1, 0.2, 0.4, True),
        TimelineOp("backward-compute", 0, 0, 0.3, 0.9, True),
        TimelineOp("backward-compute", 0, 1, 0.95, 2.0, True),
    ]
    row = TimelineRow(Worker(0, 0), -1, ops, 2.0)
    (mine,) = check_trace(render_perfetto_trace(StepTimeline("a", "", "", 2.0, [row]))).values()
    assert [(event["ts"], event["dur"]) for event in mine] == [
        (0, 1e6), (2e5, 2e5), (4e5, 5e5), (1e6, 1e6),
    ]  # fmt: skip


def test_out_has_the_page_and_the_traces(tmp_path: Path) -> None:
    trace = tmp_path / "a&<b>.jsonl"
    ops = PlayedJob(replicas=2, seconds=slow_from_step_2, steps=3).operations()
    write_lines(trace, ops)
    out = tmp_path / "out"
    assert main(["diagnose", str(trace), "--out", str(out)]) == 0
    files = {path.name for path in out.iterdir()}
    assert {"diagnosis.html", "diagnosis.json", "as-it-ran.json", "without-stragglers.json"} < files
    page = Page((out / "diagnosis.html").read_text())
    assert page.data["title"] == "a&<b>.jsonl"
    fields = json.loads((out / "diagnosis.json").read_text())
    assert fields["steps"][-1] == 2
    assert {f"{each['name']}.json" for each in page.data["timelines"]} <= files
