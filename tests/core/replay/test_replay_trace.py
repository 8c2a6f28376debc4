"""Traces of link states: what they say at a moment, and what is wrong with one that is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pipemorph.errors import InputError
from pipemorph.replay.link_trace import LinkTrace, TracedLink, load_trace, parse_trace

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "traces"


def test_each_line_replaces_the_state_before() -> None:
    trace = parse_trace(
        '{"at_iteration": 2, "links": {"0": {"delay_ms": 20}, "1": {"delay_ms": 5}}}\n\n'
        '{"at_iteration": 4, "links": {"1": {"delay_ms": 30.5}}}\n'
        '{"at_iteration": 9, "links": {}}\n',
        2,
    )
    assert trace.unit == "iterations"
    assert [trace.get_links_at(k) for k in (0, 1)] == [{}, {}]
    assert [trace.get_links_at(k) for k in (2, 3)] == [
        {0: TracedLink(0.02), 1: TracedLink(0.005)}
    ] * 2
    assert [trace.get_links_at(k) for k in (4, 8)] == [{1: TracedLink(0.0305)}] * 2
    assert [trace.get_links_at(k) for k in (9, 99)] == [{}, {}]


def test_a_trace_by_seconds() -> None:
    trace = parse_trace('{"at_seconds": 4.2, "links": {"0": {"delay_ms": 1}}}', 1)
    assert trace.unit == "seconds"
    assert trace.get_links_at(4.19) == {}
    assert trace.get_links_at(4.2) == {0: TracedLink(0.001)}


def test_a_trace_with_rates() -> None:
    line = '{"at_iteration": 1, "links": {"0": {"gbps": 2.5}, "1": {"gbps": 10, "delay_ms": 3}}}'
    assert parse_trace(line, 2).get_links_at(1) == {
        0: TracedLink(gbps=2.5),
        1: TracedLink(0.003, 10.0),
    }


def test_a_trace_with_jitter_and_routes_that_are_down() -> None:
    trace = parse_trace(
        '{"at_iteration": 1, "links": {"0": {"jitter_ms": 4, "delay_ms": 3},'
        ' "1": {"down": true}}}\n'
        '{"at_iteration": 5, "links": {"1": {"down": true, "delay_ms": 1}}}\n'
        '{"at_iteration": 9, "links": {"1": {"down": false}}}\n'
        '{"at_iteration": 12, "links": {"1": {"down": true}}}\n',
        2,
    )
    state, route = trace.get_links_at(1)[0], trace.get_links_at(1)[1]
    assert state == TracedLink(0.003, jitter=0.004)
    assert state.mean_delay == pytest.approx(0.005)
    assert route == TracedLink(down=True)
    # Lines that follow each other are one outage.
    assert [trace.find_recovery(1, k) for k in (0, 1, 6, 9, 12)] == [None, 9, 9, None, math.inf]
    assert trace.find_recovery(0, 1) is None


def test_a_trace_of_one_replica_leaves_the_links_of_others_well() -> None:
    states = {1: TracedLink(0.02)}, {}
    trace = LinkTrace("iterations", (0.0, 5.0), states)
    assert trace.select_replica(0).states == states
    assert trace.select_replica(1).states == ({}, {})
    text = '{"at_iteration": 0, "links": {"1": {"delay_ms": 20}, "0@1": {"delay_ms": 5}}}'
    both = parse_trace(text, 2, replicas=3)
    assert [dict(both.select_replica(replica).get_links_at(0)) for replica in range(3)] == [
        {1: TracedLink(0.02)},
        {0: TracedLink(0.005)},
        {},
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "T has no lines"),
        ("nonsense", "T, line 1: is not JSON"),
        ("[]", "T, line 1: the line: "),
        ('{"links": {}}', "T, line 1: expected either at_iteration or at_seconds"),
        ('{"at_iteration": 1, "at_seconds": 1, "links": {}}', "line 1: expected either"),
        ('{"at_iteration": 1}', "line 1: links: Field required"),
        ('{"at_iteration": -1, "links": {}}', "line 1: at_iteration: "),
        ('{"at_iteration": 1, "links": {"2": {"delay_ms": 1}}}', "line 1: there is no link 2; the"),
        ('{"at_iteration": 1, "links": {"x": {"delay_ms": 1}}}', "line 1: links.x"),
        ('{"at_iteration": 1, "links": {"0": {"delay_ms": NaN}}}', "line 1: links.0.delay_ms: "),
        ('{"at_iteration": 1, "links": {"0": {"gbps": 0}}}', "line 1: links.0.gbps: "),
        ('{"at_iteration": 1, "links": {"0": {"jitter_ms": -1}}}', "line 1: links.0.jitter_ms: "),
        ('{"at_iteration": 1, "links": {"0": {"down": 1}}}', "line 1: links.0.down: "),
        ('{"at_iteration": 1, "links": {}, "stages": {"0": {"slowdown": 0.5}}}', "stages.0.slowd"),
        ('{"at_iteration": 1, "links": {}, "stages": {"3": {}}}', "line 1: there is no stage 3; "),
        (
            '{"at_iteration": 1, "links": {}}\n{"at_iteration": 1, "links": {}}',
            "T, line 2: is at 1, the line before it at 1",
        ),
        (
            '{"at_iteration": 1, "links": {}}\n{"at_seconds": 2, "links": {}}',
            "line 2: the lines before it are by iterations; use one unit",
        ),
    ],
)
def test_invalid_traces_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_trace(text, 2, "T")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_examples() -> None:
    traces = sorted(EXAMPLES.glob("*.jsonl"))
    assert len(traces) >= 3
    for path in traces:
        assert load_trace(str(path), 7).last_moment > 0
