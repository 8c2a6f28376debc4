"""Text, PNG and Chrome traces of timelines, simulated and measured."""

from __future__ import annotations

import json

import pytest

from pipemorph.planning import Link, OpKind, Policy, Problem, StageTimes, TimedOp, plan
from pipemorph.views.pictures import Timeline, render_html, render_png, render_text
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
    assert render_png(timeline(policy, delay=20)).startswith(b"\x89PNG")


def test_the_page_holds_everything_and_loads_nothing() -> None:
    drawn = timeline(delay=20)
    page = render_html(drawn, [("warm-up", "<5>")])
    data = json.loads(page.split('type="application/json">')[1].split("</script>")[0])
    assert [len(stage["ops"]) for stage in data["stages"]] == [12] * 3
    assert data["stages"][0]["ops"][0] == ["F", 0, 0, 10]
    assert data["span"] == pytest.approx((drawn.end - drawn.begin) * 1e3)
    assert len(data["messages"]) == 8 and data["messages"][0][:3] == [0, True, 0]
    assert data["stages"][1]["bubbles"][0] == ["fill", 0, 30]
    assert data["stats"] == [["warm-up", "&lt;5>"]]
    assert data["stages"][0]["flight"][0] == [0, 1]
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
    assert render_png(drawn).startswith(b"\x89PNG")
    assert '"limit":2' in render_html(drawn)
    assert "idle by cause: " in render_text(drawn)
