"""Text, PNG and Chrome traces of timelines, simulated and measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from itertools import accumulate, pairwise
from math import hypot
from xml.etree import ElementTree

import pytest

from pipemorph.planning import Link, OpKind, Policy, Problem, StageTimes, TimedOp, plan
from pipemorph.views.pictures import (
    ChartLine,
    ChartSpan,
    Timeline,
    draw_chart,
    draw_steps,
    render_html,
    render_text,
)
from pipemorph.views.pictures.drawing import list_marks
from pipemorph.views.pictures.timeline import compute_idle_fraction, trace_in_flight

TEN = StageTimes(forward=10, backward_input=10, backward_weight=10)


def timeline(policy: Policy = Policy.ZERO_BUBBLE, delay: float = 0.0) -> Timeline:
    links = (Link(delay=delay), Link())
    planned = plan(Problem(microbatches=4, stages=(TEN,) * 3, links=links), policy)
    return Timeline.from_simulation(planned.simulation, planned.problem, title="three stages")


def test_simulated_times_are_seconds() -> None:
    drawn = timeline()
    assert drawn.begin == 0
    assert drawn.end == pytest.approx(0.140)
    assert drawn.messages == ()


def test_delayed_messages_are_drawn_both_ways() -> None:
    messages = timeline(delay=20).messages
    assert {m.link for m in messages} == {0}
    assert sum(m.forward for m in messages) == sum(not m.forward for m in messages) == 4
    assert messages[0][:3] == (0, True, 0)
    assert (messages[0].sent, messages[0].arrived) == pytest.approx((0.01, 0.03))


def test_in_flight_goes_from_f_start_to_w_end() -> None:
    ops = [
        TimedOp(OpKind.F, 0, 0, 1),
        TimedOp(OpKind.F, 1, 1, 2),
        TimedOp(OpKind.BW, 0, 2, 4),
        TimedOp(OpKind.B, 1, 4, 5),
        TimedOp(OpKind.W, 1, 6, 7),
    ]
    assert trace_in_flight(ops) == [(0, 1), (1, 2), (4, 1), (7, 0)]
    assert compute_idle_fraction(ops, 0, 7) == pytest.approx(1 / 7)
    assert compute_idle_fraction([], 0, 0) == 0


def test_text_shows_each_op_and_each_bubble() -> None:
    lines = render_text(timeline(), width=14).splitlines()
    assert lines[0] == "three stages"
    assert lines[1].startswith("stage 0 |FfFf·")
    assert lines[3].startswith("stage 2 |··FB")
    assert all(len(line.split("|")[1]) == 14 for line in lines[1:4])
    assert lines[4].endswith("140 ms")
    assert "X fused backward" in render_text(timeline(Policy.ONE_F_ONE_B))


def test_text_of_an_empty_timeline() -> None:
    assert "stage 0" in render_text(Timeline([[]]))


def test_a_measured_timeline_starts_anywhere() -> None:
    ops = [TimedOp(OpKind.F, 0, 1000.0, 1000.5), TimedOp(OpKind.BW, 0, 1001.0, 1002.0)]
    measured = Timeline([ops])
    assert (measured.begin, measured.end) == (1000.0, 1002.0)


@pytest.mark.parametrize("policy", [Policy.ZERO_BUBBLE, Policy.ONE_F_ONE_B])
def test_png_is_a_png(policy: Policy) -> None:
    assert draw_steps("", [timeline(policy, delay=20)]).to_png().startswith(b"\x89PNG")


def test_the_page_holds_everything_and_loads_nothing() -> None:
    drawn = timeline(delay=20)
    page = render_html(drawn, [("warm-up", "<5>")])
    data = json.loads(page.split('type="application/json">')[1].split("</script>")[0])
    rows = data["rows"]
    assert [len(row["kinds"]) for row in rows] == [12] * 3
    assert (rows[0]["kinds"][0], rows[0]["microbatches"][0]) == ("F", 0)
    assert (rows[0]["gaps"][0], rows[0]["durations"][0]) == (0, 10_000)
    for row, ops in zip(rows, drawn.stages, strict=True):
        ends = list(accumulate(g + d for g, d in zip(row["gaps"], row["durations"], strict=True)))
        assert ends == pytest.approx([op.end * 1e6 for op in ops])
    assert data["span_us"] == pytest.approx((drawn.end - drawn.begin) * 1e6)
    assert [(link["row"], link["text"], len(link["messages"])) for link in data["links"]] == [
        (0, "20 ms per message", 8)
    ]
    assert data["messages"][0] == [0, True, 0, 10_000, 30_000]
    assert rows[1]["idle"][0] == ["fill", 0, 30_000]
    assert data["stats"] == [["warm-up", "<5>"]]
    assert rows[0]["flight"][0] == [0, 1]
    for reference in ("http", "src=", "href=", "@import", "url(", "fetch("):
        assert reference not in page, reference


def test_a_title_cannot_end_the_page() -> None:
    page = render_html(Timeline([[TimedOp(OpKind.F, 0, 0, 1)]], title="</script><b>x"))
    assert page.count("</script>") == 2
    assert "<b>x" not in page


def test_caps_are_drawn_per_stage() -> None:
    stages = (TEN.model_copy(update={"in_flight_limit": 2}), TEN)
    planned = plan(Problem(microbatches=4, stages=stages, links=(Link(delay=20),)))
    drawn = Timeline.from_simulation(planned.simulation, planned.problem)
    assert drawn.limits == (2, None)
    assert "in flight ≤ 2 of 2<" in draw_steps("", [drawn]).to_svg()
    assert '"limit":2' in render_html(drawn)
    assert "idle by cause: " in render_text(drawn)


def read_svg(text: str) -> tuple[list[str], dict[str, int]]:
    """Texts of a drawing, and the number of its shapes by colour."""
    root = ElementTree.fromstring(text)
    shapes = Counter(str(node.get("class", "")).split()[-1] for node in root if node.get("class"))
    return [str(node.text) for node in root.iter("{http://www.w3.org/2000/svg}text")], shapes


def test_steps_share_a_time_axis_and_name_the_slow_link() -> None:
    quick, slow = timeline(), timeline(delay=20)
    texts, shapes = read_svg(draw_steps("a & b", [quick, slow]).to_svg())
    assert texts[0] == "a & b"
    assert texts.count("three stages") == 2
    assert texts.count("0") >= 2, "each panel has its axis"
    assert [text for text in texts if text.endswith("0 ms")] == ["160 ms"] * 2, "on one scale"
    assert texts.count("link 0") == texts.count("20 ms per message") == 1
    assert shapes["delayed"] == 8 + 1, "messages and the legend"


def test_numbers_are_on_all_ops_of_a_kind_or_on_none() -> None:
    def count_numbers(microbatches: int) -> int:
        problem = Problem(microbatches=microbatches, stages=(TEN,) * 3, links=(Link(),) * 2)
        planned = plan(problem, Policy.ZERO_BUBBLE)
        drawn = Timeline.from_simulation(planned.simulation, planned.problem)
        return read_svg(draw_steps("", [drawn]).to_svg())[1]["on-F"]

    assert count_numbers(24) == 3 * 24
    assert count_numbers(120) == 0, "three digits do not fit"


def test_an_svg_follows_the_reader_and_a_label_cannot_end_it() -> None:
    drawing = draw_steps("</svg>", [timeline()])
    svg = drawing.to_svg()
    assert svg.count("</svg>") == 1
    assert "prefers-color-scheme:dark" in svg
    assert ".back{--c:#ffffff}" in svg and ".back{--c:#14181d}" in svg
    for reference in ("href", "@import", "url(", "<script"):
        assert reference not in svg


def test_a_chart_has_axes_spans_marks_and_lines() -> None:
    line = ChartLine("ours", [(0, 1.0), (1, 2.0)], stepped=True)
    second = ChartLine("base", [(0, 2.0), (1, 2.0)])
    others = [ChartLine(name, [(0, 2.0)], dots=True) for name in ("theirs", "their base")]
    drawing = draw_chart(
        "Time", [line, second, *others], x_name="iteration", y_name="seconds",
        spans=[ChartSpan(0, 1, "slow")], marks=[(1, "v1")],
    )  # fmt: skip
    texts, shapes = read_svg(drawing.to_svg())
    assert {"Time", "ours", "their base", "slow", "v1", "iteration", "seconds", "2"} <= set(texts)
    # Each line, its dots, and a box of the legend for both.
    assert shapes["accent"] == shapes["down"] == 4
    assert drawing.to_png().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no points"):
        draw_chart("Time", [], x_name="", y_name="")


def measure_labels(svg: str, texts: Collection[str]) -> list[tuple[str, int, int]]:
    """Count the points of lines, and the other such texts, in the box of each of some texts:
    texts are 0.6 of their height wide per letter, and lines have a point per half pixel."""
    root = ElementTree.fromstring(svg)
    points = []
    for node in root:
        shape, path = str(node.get("class")).split(), str(node.get("d"))
        if shape[0] == "l" and shape[1] not in ("rule",):
            ends = [[float(each) for each in pair.split()] for pair in path[1:].split("L")]
            for (x0, y0), (x1, y1) in pairwise(ends):
                n = int(2 * hypot(x1 - x0, y1 - y0)) + 1
                points += [(x0 + (x1 - x0) * k / n, y0 + (y1 - y0) * k / n) for k in range(n + 1)]
    boxes = []
    for node in root.iter("{http://www.w3.org/2000/svg}text"):
        name = str(node.text)
        if name in texts:
            size, x = float(node.get("font-size", 0)), float(node.get("x", 0))
            wide = 0.6 * size * len(name)
            x -= {"start": 0.0, "middle": wide / 2, "end": wide}[node.get("text-anchor", "")]
            y = float(node.get("y", 0))
            boxes.append((name, x, y - 0.8 * size, x + wide, y + 0.1 * size))
    return [
        (
            name,
            sum(a < x < c and b < y < d for x, y in points),
            sum(e[1] < c and e[3] > a and e[2] < d and e[4] > b for e in boxes) - 1,
        )
        for name, a, b, c, d in boxes
    ]


def noisy(base: float, late: float, begin: int, end: int) -> list[tuple[float, float]]:
    return [(k, base + 0.05 * (k % 3) + late * (begin <= k < end)) for k in range(40)]


@pytest.mark.parametrize("late", [0.1, 0.6, 3.0])
@pytest.mark.parametrize("at", [1, 11, 12, 20, 35])
def test_labels_of_a_chart_cross_no_line(late: float, at: int) -> None:
    lines = [
        ChartLine("ours", noisy(1.0, late, 10, at + 1)),
        ChartLine("theirs", noisy(1.05, late, 10, 30), stepped=True),
        ChartLine("published", [(at, 1.1), (at + 1, 1.0)], dots=True),
    ]
    drawing = draw_chart(
        "Time", lines, x_name="iteration", y_name="seconds",
        spans=[ChartSpan(10, 30, "link 0 late by 8 forwards")],
        marks=[(at, "plan v1"), (at + 4, "plan v2")],
    )  # fmt: skip
    names = {"link 0 late by 8 forwards", "plan v1", "plan v2"}
    found = measure_labels(drawing.to_svg(), names)
    assert sorted(found) == [(name, 0, 0) for name in sorted(names)]


def test_a_label_without_a_free_place_covers_the_line() -> None:
    def count_grounds(*marks: float) -> int:
        drawing = draw_chart(
            "Time", [ChartLine("ours", noisy(1.0, 0.5, 10, 20))], x_name="iteration",
            y_name="seconds", marks=[(at, f"plan v{at}") for at in marks],
        )  # fmt: skip
        return read_svg(drawing.to_svg())[1]["back"]

    assert count_grounds(1, 5) + 1 == count_grounds(1, 2)


@pytest.mark.parametrize(
    ("begin", "end", "most", "marks"),
    [
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (0.3, 1, 2, [0.5, 1.0]),
        (3, 3, 5, [3]),
        (-1, 1, 2, [-1, 0, 1]),
    ],
)
def test_marks_are_round(begin: float, end: float, most: float, marks: list[float]) -> None:
    assert list_marks(begin, end, most) == pytest.approx(marks)
