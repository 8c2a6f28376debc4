"""The page of a replay: what is in it, and that it is all that it needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipemorph.cli import main
from pipemorph.planning import Link, Problem, StageTimes
from pipemorph.replay.baselines import ReplayedChange, ReplayResult, TrainingRun
from pipemorph.replay.link_trace import LinkTrace, parse_trace
from pipemorph.replay.replay_page import render_replay_page

ENDED = "link 1 is down in iteration 2: no other route"
FOUND = ReplayResult(
    4,
    {
        "1f1b": TrainingRun((0.5, 0.5), ENDED),
        "static": TrainingRun((0.4, 0.4, 0.8, 0.8)),
        "adaptive": TrainingRun((0.4, 0.4, 0.8, 0.5)),
        "oracle": TrainingRun((0.4, 0.4, 0.4, 0.4)),
    },
    [
        ReplayedChange(3, "link 1 is slow; arithmetic", 0.3, None, "link 1 is slow"),
        ReplayedChange(None, "", 0.1, None, "<b>late</b>"),
    ],
)


def data_of(page: str) -> dict[str, Any]:
    text = page.split('type="application/json">')[1].split("</script>", maxsplit=1)[0]
    found: dict[str, Any] = json.loads(text)
    return found


def trace_of(*lines: str, replicas: int = 1) -> LinkTrace:
    return parse_trace("\n".join(lines), 3, replicas=replicas)


FAULT = trace_of(
    '{"at_iteration": 2, "links": {"1": {"down": true, "delay_ms": 20}, "0": {"jitter_ms": 5}}}',
    '{"at_iteration": 3, "links": {"1": {"down": true, "delay_ms": 20}, "2": {"gbps": 2.5}}}',
)


def test_contenders_steps_and_changes() -> None:
    data = data_of(render_replay_page(FOUND, FAULT, "a trace"))
    assert [each["name"] for each in data["contenders"]] == list(FOUND.runs)
    ended, static, adaptive, oracle = data["contenders"]
    assert ended == {
        "name": "1f1b",
        "about": "one forward, one backward; never changed",
        "seconds": None,
        "rate": None,
        "share": None,
        "ended": ENDED,
        "steps": [500, 500],
    }
    assert adaptive["steps"] == [400, 400, 800, 500]
    assert adaptive["seconds"] == pytest.approx(2.1)
    assert adaptive["share"] == pytest.approx(0.3 / 0.8)
    assert oracle["rate"] == pytest.approx(150)
    assert static["share"] == 0
    shown = [(each["iteration"], each["promised"], each["sentence"]) for each in data["changes"]]
    assert shown == [(3, 0.3, "link 1 is slow"), (None, 0.1, "<b>late</b>")]


def test_the_explanation_names_the_fault_the_change_and_its_gain() -> None:
    assert data_of(render_replay_page(FOUND, FAULT, "a trace"))["story"] == [
        "link 0 (stage 0 to 1): jitter 5 ms from iteration 2 to 3.",
        "link 1 (stage 1 to 2): down, +20 ms from iteration 2 to the end.",
        "link 2 (stage 2 to 3): 2.5 Gb/s from iteration 3 to the end.",
        "PipeMorph (adaptive) changed its plan 1 time and took 2.1 s: 13% less than the 2.4 s"
        " without any change (static).",
        "That is 38% of what the oracle saves, which has read the trace.",
    ]


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        ({"static": TrainingRun((0.5,), ENDED)}, "took 2.1 s; without any change (static) it would"
         f" have ended: {ENDED}."),
        ({"adaptive": TrainingRun((0.5,), ENDED)}, f"and ended: {ENDED}"),
        ({"adaptive": TrainingRun((0.6,) * 4)}, "took 2.4 s, as much as the 2.4 s without any"),
        ({"adaptive": TrainingRun((0.9,) * 4)}, "took 3.6 s: 50% more than the 2.4 s without any"),
    ],
)  # fmt: skip
def test_the_explanation_without_a_gain(trained: dict[str, TrainingRun], expected: str) -> None:
    found = ReplayResult(4, FOUND.runs | trained, FOUND.changes)
    story = data_of(render_replay_page(found, FAULT, "a trace"))["story"]
    assert expected in story[3]
    well = data_of(
        render_replay_page(found, trace_of('{"at_iteration": 0, "links": {}}'), "a trace")
    )
    assert well["story"][0] == "All links are healthy all the time."


def test_a_lane_per_link_that_is_not_always_well() -> None:
    data = data_of(render_replay_page(FOUND, FAULT, "a trace"))
    assert data["lanes"] == [
        {
            "name": "link 0 (stage 0 to 1)",
            "spans": [{"begin": 2, "end": 3, "kind": "delayed", "text": "jitter 5 ms"}],
        },
        # Two lines that say the same are one span.
        {
            "name": "link 1 (stage 1 to 2)",
            "spans": [{"begin": 2, "end": 4, "kind": "down", "text": "down, +20 ms"}],
        },
        {
            "name": "link 2 (stage 2 to 3)",
            "spans": [{"begin": 3, "end": 4, "kind": "narrow", "text": "2.5 Gb/s"}],
        },
    ]


def test_seconds_are_placed_by_the_adaptive_contender() -> None:
    trace = trace_of(
        '{"at_seconds": 0.6, "links": {"1": {"delay_ms": 20}}}',
        '{"at_seconds": 1.2, "links": {}}',
        '{"at_seconds": 9, "links": {"1": {"delay_ms": 5}}}',
    )
    (lane,) = data_of(render_replay_page(FOUND, trace, "a trace"))["lanes"]
    assert [(each["begin"], each["end"]) for each in lane["spans"]] == [(1.5, 2.5)]


def test_replicas_stages_and_reductions_have_lanes() -> None:
    line = (
        '{"at_iteration": 1, "links": {"1@1": {"delay_ms": 20}},'
        ' "reductions": {"2": {"delay_ms": 90}},'
        ' "stages": {"1": {"slowdown": 2, "pause_ms": 5}, "0": {}}}'
    )
    lanes = data_of(render_replay_page(FOUND, trace_of(line, replicas=2), "a trace", 2))["lanes"]
    assert [lane["name"] for lane in lanes] == [
        "link 1 (stage 1 to 2, replica 1)", "stage 0", "stage 1", "reduction of stage 2",
    ]  # fmt: skip
    assert [[span["text"] for span in lane["spans"]] for lane in lanes[1:]] == [
        [], ["ops 2 times as long, pauses of 5 ms"], ["+90 ms"],
    ]  # fmt: skip


def test_it_loads_nothing_and_no_text_becomes_markup() -> None:
    page = render_replay_page(FOUND, FAULT, "</script><i>x<!--")
    assert page.count("</script>") == 2
    assert "<i>x" not in page and "<b>late" not in page and "<!--" not in page
    assert data_of(page)["title"] == "</script><i>x<!--"
    assert "innerHTML" not in page
    for reference in ("src=", "href=", "@import", "url(", "fetch("):
        assert reference not in page, reference
    assert "http" not in page
    for needed in ("prefers-color-scheme: dark", "width=device-width", "ArrowLeft", "tabindex"):
        assert needed in page, needed


def test_the_ending_of_the_file_chooses_the_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = StageTimes(forward=10, backward_input=10.5, backward_weight=5.5)
    trace, problem = tmp_path / "<trace>.jsonl", tmp_path / "problem.json"
    trace.write_text('{"at_iteration": 2, "links": {"1": {"delay_ms": 40}}}')
    problem.write_text(
        Problem(microbatches=4, stages=(times,) * 3, links=(Link(delay=1),) * 2).model_dump_json(
            exclude_none=True
        )
    )
    command = ["replay", str(trace), str(problem), "--iterations", "6"]
    page, fields, text, other = (tmp_path / name for name in ("a.HTML", "a.json", "a.txt", "a"))
    for path in (page, fields, text, other):
        assert main([*command, "--out", str(path)]) == 0
    data = data_of(page.read_text())
    assert data["title"] == "<trace>.jsonl, problem.json"
    assert [len(each["steps"]) for each in data["contenders"]] == [6] * 5
    assert set(json.loads(fields.read_text())) == {"contenders", "changes"}
    assert text.read_text() == other.read_text()
    assert text.read_text().startswith("6 iterations, simulated")
    assert main([*command, "--out", str(fields), "--output", "html"]) == 0
    assert fields.read_text() == page.read_text()
    assert main([*command, "--out", str(tmp_path / "a.png")]) == 2
    assert "a.png is no format of this command" in capsys.readouterr().err
