"""The control loop through traces: what it gains, and that it does nothing without a fault."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import get_args

import pytest

from pipemorph.cli import main
from pipemorph.errors import InputError
from pipemorph.planning import Dispatch, Link, Problem, Route, StageTimes, compute_lower_bound
from pipemorph.planning.problem import load_problem
from pipemorph.replay.adaptive_trainer import Telemetry
from pipemorph.replay.baselines import ReplayResult, TrainingRun, measure_late_share, replay_trace
from pipemorph.replay.link_trace import load_trace, parse_trace
from pipemorph.replay.simulated_links import SimulatedLinks

TRACES = Path(__file__).resolve().parents[3] / "examples" / "traces"
TIMES = StageTimes(forward=10, backward_input=10.5, backward_weight=5.5)
PROBLEM = Problem(microbatches=12, stages=(TIMES,) * 4, links=(Link(delay=1),) * 3)
FAULT = parse_trace(
    '{"at_iteration": 12, "links": {"1": {"delay_ms": 40}}}\n{"at_iteration": 52, "links": {}}', 3
)
WELL = parse_trace('{"at_iteration": 40, "links": {}}', 3)


FULL = pytest.mark.full
PYTHON_FIRST = [
    pytest.param(each, marks=() if each == "python" else FULL) for each in get_args(Telemetry)
]


@pytest.mark.parametrize("telemetry", get_args(Telemetry))
def test_a_fault_is_found_and_planned_for(telemetry: Telemetry) -> None:
    found = replay_trace(PROBLEM, FAULT, telemetry=telemetry)
    assert found.iterations == 72
    assert list(found.seconds) == ["1f1b", "zero-bubble", "static", "adaptive", "oracle"]
    adaptive = found.compute_oracle_share("adaptive")
    assert found.compute_oracle_share("static") == 0
    assert found.compute_oracle_share("oracle") == 1
    # The first of 40 iterations is over before a directive can be in force.
    assert 0.8 < adaptive < 1
    first, last = found.changes[0], found.changes[-1]
    assert "link 1 is slow" in first.reason
    assert 13 <= first.iteration <= 15
    # The end of the job is not known.
    assert re.search(r"it would save [\d.]+ ms per iteration, a change is assumed", first.reason)
    assert not any("remaining iterations" in change.reason for change in found.changes)
    assert "recovered" in last.reason
    assert last.iteration >= 53


@pytest.mark.parametrize("telemetry", get_args(Telemetry))
@pytest.mark.parametrize("begins", [0, 1])
def test_a_link_that_is_slow_from_the_start_is_known_by_its_peers(
    telemetry: Telemetry, begins: int
) -> None:
    trace = f'{{"at_iteration": {begins}, "links": {{"1": {{"delay_ms": 40}}}}}}'
    trace += '\n{"at_iteration": 12, "links": {}}'
    found = replay_trace(PROBLEM, parse_trace(trace, 3), telemetry=telemetry, iterations=28)
    change, last = found.changes
    assert "recovered" in last.reason
    assert "link 1 is slow" in change.reason
    assert change.iteration is not None
    assert change.iteration <= begins + 4
    assert change.measured is not None
    assert change.measured > 0.1


@pytest.mark.parametrize("telemetry", get_args(Telemetry))
def test_a_network_that_is_slow_everywhere_is_delegated_until_it_is_not(
    telemetry: Telemetry,
) -> None:
    links = ", ".join(f'"{link}": {{"delay_ms": 30}}' for link in range(3))
    trace = f'{{"at_iteration": 0, "links": {{{links}}}}}\n{{"at_iteration": 30, "links": {{}}}}'
    found = replay_trace(PROBLEM, parse_trace(trace, 3), telemetry=telemetry, iterations=50)
    first = found.changes[0]
    assert "with warm-up" in first.reason and "links 0, 1, 2 delegated" in first.reason
    assert first.iteration is not None
    assert first.iteration <= 6
    assert first.measured is not None
    assert first.measured > 0.1
    assert found.compute_harm("adaptive") < 0
    assert found.compute_harm("adaptive", 20) < 0.05


@pytest.mark.parametrize(
    ("phase", "link"),
    [(8, 3), (10, 6), pytest.param(8, 6, marks=FULL), pytest.param(10, 3, marks=FULL)],
)
def test_a_slow_link_that_gets_slower_is_answered_in_one_iteration(phase: int, link: int) -> None:
    """Holds also if other decisions fall into the iteration in which it does."""
    lines = [
        json.dumps({"at_iteration": k * phase, "links": {link: {"delay_ms": 30 * k}}})
        for k in (1, 2)
    ]
    problem = load_problem(str(TRACES / "problem.yaml"))
    trace = parse_trace("\n".join(lines), 7)
    found = replay_trace(problem, trace, dispatch=Dispatch.STATIC, iterations=3 * phase)
    assert [change.iteration for change in found.changes] == [phase + 1, 2 * phase + 1]


@pytest.mark.full
def test_recomputation_makes_room_for_slackness_and_ends_when_the_link_has_recovered() -> None:
    tight = TIMES.model_copy(update={"in_flight_limit": 4})
    room = TIMES.model_copy(update={"in_flight_limit": 4, "recompute_limit": 48})
    without, with_it = (
        replay_trace(PROBLEM.model_copy(update={"stages": (stage,) * 4}), FAULT, telemetry="exact")
        for stage in (tight, room)
    )
    assert with_it.seconds["adaptive"] < 0.95 * without.seconds["adaptive"]
    assert any("again and makes the best new plan" in change.reason for change in with_it.changes)
    assert not any("forwards again" in change.reason for change in without.changes)
    share = with_it.compute_oracle_share("adaptive")
    assert share is not None and share > 0.8
    assert "recovered" in with_it.changes[-1].reason


@pytest.mark.full
@pytest.mark.parametrize("telemetry", get_args(Telemetry))
def test_a_narrow_link_is_distinguished_from_a_delayed_one(telemetry: Telemetry) -> None:
    """Messages of 16 MB at 2.5 Gb/s take as long as 51 ms of delay, but not at the same time."""
    sized = Link(delay=1, message_bytes=16_000_000)
    problem = Problem(microbatches=24, stages=(TIMES,) * 6, links=(sized,) * 5)
    trace = parse_trace('{"at_iteration": 10, "links": {"2": {"gbps": 2.5}}}', 5)
    # Guided, stages run other ops meanwhile: too little remains to gain.
    found = replay_trace(
        problem, trace, telemetry=telemetry, iterations=50, dispatch=Dispatch.STATIC
    )
    in_force = [change for change in found.changes if change.iteration is not None]
    narrow = next(change for change in in_force if "narrow: 5" in change.reason)
    share = found.compute_oracle_share("adaptive")
    assert share is not None
    if telemetry == "device":
        # Timestamps take another way, so that the first answer takes it for a delay.
        assert narrow.iteration == 12
        assert share > 0.8
    else:
        assert narrow.iteration == 11, "not distinguished in the first iteration"
        assert found.changes == [narrow]
        assert narrow.promised == pytest.approx(narrow.measured, abs=0.05)
        assert share > 0.95


def test_when_a_narrow_link_is_well_the_plan_returns_in_the_next_iteration() -> None:
    """A plan for a narrow link takes nearly twice as long as needed where none is: waiting for more
    evidence costs more than returning in vain."""
    sized = Link(delay=1, message_bytes=16_000_000)
    problem = Problem(microbatches=24, stages=(TIMES,) * 6, links=(sized,) * 5)
    lines = (
        '{"at_iteration": 10, "links": {"2": {"gbps": 2.5}}}',
        '{"at_iteration": 25, "links": {}}',
    )
    found = replay_trace(
        problem,
        parse_trace("\n".join(lines), 5),
        telemetry="python",
        iterations=32,
        dispatch=Dispatch.STATIC,
    )
    assert [change.iteration for change in found.changes] == [11, 26]


def test_congestion_in_runs_of_a_window_or_two_is_adapted_to() -> None:
    """Congestion makes the link slow in no single run for long enough to be found by it alone."""
    rng = random.Random(2)
    lines, now, slow = [], 3.0, True
    while now < 25:
        links = {"1": {"delay_ms": 60}} if slow else {}
        lines.append(json.dumps({"at_seconds": round(now, 3), "links": links}))
        now += rng.uniform(*((0.05, 0.1) if slow else (0.1, 0.3)))
        slow = not slow
    found = replay_trace(PROBLEM, parse_trace("\n".join(lines), 3), iterations=50)
    share = found.compute_oracle_share("adaptive")
    assert share > 0.7
    assert len(found.changes) <= 3


def test_guided_dispatch_helps_in_the_iteration_in_which_a_fault_begins() -> None:
    """Jobs without in-flight limits use it by default."""
    one = '{"at_iteration": 10, "links": {"2": {"delay_ms": 40}}}'
    problem = PROBLEM.model_copy(update={"microbatches": 24})
    steps = {}
    for dispatch in (Dispatch.STATIC, Dispatch.GUIDED, "auto"):
        found = replay_trace(problem, parse_trace(one, 3), dispatch=dispatch, iterations=16)
        steps[dispatch] = found.runs["adaptive"].iteration_seconds
    assert steps["auto"] == steps[Dispatch.GUIDED]
    assert steps["auto"][:10] == steps[Dispatch.STATIC][:10]
    assert steps["auto"][10] < 0.95 * steps[Dispatch.STATIC][10]
    assert sum(steps["auto"]) < sum(steps[Dispatch.STATIC])


def test_rates_need_the_size_of_messages() -> None:
    trace = parse_trace('{"at_iteration": 10, "links": {"2": {"gbps": 2.5}}}', 3)
    with pytest.raises(InputError, match=r"gbps of link 2; set links\[2\]\.message_bytes"):
        replay_trace(PROBLEM, trace)


def test_the_promise_equals_the_measurement() -> None:
    """The simulated trainer runs what the controller predicts with, and the delay is known."""
    change = replay_trace(PROBLEM, FAULT).changes[0]
    assert change.promised is not None
    assert change.measured is not None
    assert change.promised > 0.1
    assert change.measured == pytest.approx(change.promised, abs=0.05)


@pytest.mark.parametrize("telemetry", PYTHON_FIRST)
def test_nothing_changes_without_a_fault(telemetry: Telemetry) -> None:
    found = replay_trace(PROBLEM, WELL, telemetry=telemetry, iterations=200)
    assert found.changes == []
    assert found.seconds["adaptive"] == found.seconds["static"] == found.seconds["oracle"]
    assert found.compute_oracle_share("adaptive") is None


def test_a_trace_by_seconds_lasts_until_its_end() -> None:
    trace = parse_trace(
        '{"at_seconds": 2.0, "links": {"2": {"delay_ms": 30}}}\n'
        '{"at_seconds": 9.5, "links": {"0": {"delay_ms": 30}}}\n'
        '{"at_seconds": 16.0, "links": {}}',
        3,
    )
    found = replay_trace(PROBLEM, trace)
    assert found.seconds["static"] > 16
    adaptive = found.compute_oracle_share("adaptive")
    # Faults last about 13 iterations, two of which are over before a directive is in force.
    assert adaptive > 0.7
    assert found == replay_trace(PROBLEM, trace), "the same seed, another result"


def test_guided_dispatch_of_the_adaptive_contender() -> None:
    found = replay_trace(PROBLEM, FAULT, dispatch=Dispatch.GUIDED)
    adaptive = found.compute_oracle_share("adaptive")
    assert adaptive > 0.8


def test_problems_that_a_replay_does_not_know() -> None:
    offload = TIMES.model_copy(update={"device_limit": 2, "offload_copy": 1.0})
    with pytest.raises(InputError, match=r"stages\[0\].device_limit is set"):
        replay_trace(PROBLEM.model_copy(update={"stages": (offload, *PROBLEM.stages[1:])}), WELL)
    mixed = (Link(delay=1, queues=1, half_duplex=True), *PROBLEM.links[1:])
    with pytest.raises(InputError, match=r"links\[0\].half_duplex is set"):
        replay_trace(PROBLEM.model_copy(update={"links": mixed}), WELL)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, problem = tmp_path / "trace.jsonl", tmp_path / "problem.json"
    trace.write_text(
        '{"at_iteration": 8, "links": {"1": {"delay_ms": 40}}}\n{"at_iteration": 30, "links": {}}'
    )
    problem.write_text(PROBLEM.model_dump_json(exclude_none=True))
    assert main(["replay", str(trace), str(problem), "--output", "json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert set(fields) == {"contenders", "changes"}
    assert set(fields["contenders"]["adaptive"]) == {
        "seconds",
        "iterations_per_minute",
        "share_of_oracle_gain",
    }
    assert set(fields["changes"][0]) == {"iteration", "reason", "promised", "measured"}
    assert main(["replay", str(trace), str(problem)]) == 0
    said = capsys.readouterr().out
    assert "50 iterations, simulated" in said
    change = (
        r"^  plan 1 from iteration \d+: warm-up [\d-]+ became [\d-]+, link 1 delegated to the"
        r" engine; [\d.]+ s became [\d.]+ s per iteration \(\d+% promised, \d+% measured\);"
        r" why: link 1 is slow by [\d.]+ ms one way \(forward, [\w ]+% sure\)$"
    )
    assert re.search(change, said, re.MULTILINE), said
    assert "predicted per iteration" not in said
    assert "predicted per iteration" in fields["changes"][0]["reason"]
    trace.write_text('{"at_iteration": 8, "links": {"7": {"delay_ms": 40}}}')
    assert main(["replay", str(trace), str(problem)]) == 2
    assert "there is no link 7; the problem has 3" in capsys.readouterr().err


def test_fields_without_time() -> None:
    nothing = ReplayResult(
        1, dict.fromkeys(("static", "adaptive", "oracle"), TrainingRun((0.0,))), []
    )
    assert nothing.to_json()["contenders"]["adaptive"]["iterations_per_minute"] is None


def test_iterations_without_a_barrier_follow_each_other() -> None:
    """The first plan is for the makespan; the oracle's and zero-bubble's are simulated alike."""
    given = Problem(
        microbatches=24, stages=(TIMES,) * 8, links=(Link(delay=1),) * 7, objective="period"
    )
    found = replay_trace(
        given, parse_trace('{"at_iteration": 120, "links": {}}', 7), iterations=120
    )
    (change,) = found.changes
    # Wire times are measured to some percent, and ops wait for messages that come later than that.
    assert change.promised == pytest.approx(change.measured, abs=0.01)
    seconds = found.seconds
    assert seconds["adaptive"] < seconds["zero-bubble"] < seconds["1f1b"]
    # But for the first iterations, until no barrier is expected; the bound is of all schedules.
    assert seconds["adaptive"] < 1.02 * 120 * compute_lower_bound(given) / 1e3
    assert seconds["oracle"] == pytest.approx(seconds["static"])


def test_a_stage_that_falls_behind_sets_the_pace() -> None:
    slow = TIMES.model_copy(update={"backward_weight": 20})
    stages = (TIMES, TIMES, TIMES, slow)
    given = PROBLEM.model_copy(update={"objective": "period", "stages": stages})
    found = replay_trace(given, WELL, iterations=20)
    least = 20 * 12 * (slow.forward + slow.backward_input + slow.backward_weight) / 1e3
    for name, seconds in found.seconds.items():
        # Stage 0 may be ahead by what fits into one iteration.
        assert 0.95 * least < seconds, name


def test_no_telemetry_beats_an_oracle_that_is_an_iteration_late() -> None:
    late = measure_late_share(PROBLEM, FAULT)
    found = replay_trace(PROBLEM, FAULT, telemetry="exact", dispatch=Dispatch.STATIC)
    share = found.compute_oracle_share("adaptive")
    assert share - 0.01 < late < 1


@pytest.mark.full
def test_where_delays_keep_changing_a_guided_plan_is_enough() -> None:
    """The delay of a link is another one every 50-400 ms. The plan of the first slow iteration was
    made for a delay that stays; run as messages come, it need not be replaced."""
    problem = load_problem(str(TRACES / "problem.yaml"))
    trace = load_trace(str(TRACES / "redrawn.jsonl"), len(problem.links))
    same = replay_trace(problem, trace, telemetry="python", dispatch=Dispatch.STATIC, iterations=30)
    free = replay_trace(problem, trace, telemetry="python", iterations=30)
    assert free.seconds["adaptive"] <= 0.995 * same.seconds["adaptive"]
    assert free.seconds["static"] == same.seconds["static"]
    assert len(free.changes) == 1


@pytest.mark.full
def test_a_rate_that_keeps_changing_is_planned_for_as_such() -> None:
    """Plans do not follow the rate every other iteration, nor treat it as a delay."""
    problem = load_problem(str(TRACES / "problem.yaml"))
    trace = load_trace(str(TRACES / "varying-bandwidth.jsonl"), len(problem.links))
    found = replay_trace(problem, trace, telemetry="python", iterations=60)
    assert len(found.changes) <= 6
    last = found.changes[-1]
    assert "narrow" in last.reason
    static, adaptive = (found.runs[name].iteration_seconds for name in ("static", "adaptive"))
    assert last.iteration is not None
    assert sum(adaptive[last.iteration :]) < sum(static[last.iteration :])


def test_delegated_messages_take_time_of_the_ops_at_both_ends() -> None:
    links = SimulatedLinks(PROBLEM, WELL, delegation=0.05)
    away = (Route.DIRECT, Route.DELEGATED, Route.DELEGATED)
    stages = links.build_problem(away).stages
    assert [stage.forward for stage in stages] == pytest.approx([10, 10.5, 11, 10.5])
    assert [stage.backward_input for stage in stages] == pytest.approx(
        [10.5, 11.025, 11.55, 11.025]
    )
    assert {stage.backward_weight for stage in stages} == {5.5}
    assert links.build_problem((Route.DIRECT,) * 3).stages == PROBLEM.stages
    free, costly = (replay_trace(PROBLEM, FAULT, delegation=part) for part in (0.0, 0.05))
    assert costly.seconds["static"] == free.seconds["static"]
    for name in ("adaptive", "oracle"):
        assert costly.seconds[name] > free.seconds[name]


@pytest.mark.parametrize(
    ("placement", "rule", "objective"),
    [
        ("interleaved", "1f1b", "makespan"),
        pytest.param("interleaved", "1f1b", "period", marks=FULL),
        pytest.param("v", "zero-bubble", "makespan", marks=FULL),
        pytest.param("v", "zero-bubble", "period", marks=FULL),
    ],
)
def test_ranks_with_several_stages(placement: str, rule: str, objective: str) -> None:
    problem = PROBLEM.model_copy(
        update={"ranks": 2, "placement": placement, "objective": objective}
    )
    fault = parse_trace(
        '{"at_iteration": 12, "links": {"0": {"delay_ms": 40}}}\n{"at_iteration": 52, "links": {}}',
        3,
    )
    found = replay_trace(problem, fault, telemetry="python")
    assert list(found.seconds) == [rule, "static", "adaptive", "oracle"]
    adaptive = found.compute_oracle_share("adaptive")
    # The search is near the least makespan, but up to 6 % from the least period.
    most = 1.01 if objective == "makespan" else 1.1
    assert adaptive is not None and 0.7 < adaptive <= most
    assert "link 0" in found.changes[0].reason
    # Work of two stages is on one rank.
    least = 72 * 12 * 2 * (TIMES.forward + TIMES.backward_input + TIMES.backward_weight) / 1e3
    assert found.seconds["oracle"] > least
    if objective == "period":
        barriers = problem.model_copy(update={"objective": "makespan"})
        waits = replay_trace(barriers, fault, telemetry="python").seconds
        assert all(found.seconds[name] <= waits[name] * (1 + 1e-9) for name in waits)
        if placement == "v":
            assert found.seconds["adaptive"] < 0.97 * waits["adaptive"]
    for telemetry in get_args(Telemetry):
        changes = replay_trace(problem, WELL, telemetry=telemetry).changes
        if objective == "makespan":
            assert not changes
        for change in changes:
            # Once it is known that there is no barrier.
            assert "another kind of barrier" in change.reason and len(changes) == 1
            assert change.measured == pytest.approx(change.promised, abs=0.01)


@pytest.mark.full
@pytest.mark.parametrize("placement", ["interleaved", "v"])
def test_ranks_with_several_stages_choose_their_dispatch(placement: str) -> None:
    """A job is guided where that costs nothing."""
    problem = PROBLEM.model_copy(update={"ranks": 2, "placement": placement, "microbatches": 24})
    fault = parse_trace('{"at_iteration": 12, "links": {"0": {"delay_ms": 60}}}', 3)
    found = {
        dispatch: replay_trace(problem, fault, telemetry="python", dispatch=dispatch, iterations=40)
        for dispatch in (Dispatch.STATIC, "auto")
    }
    auto, static = found["auto"], found[Dispatch.STATIC]
    (change,) = auto.changes
    assert change.promised is not None and change.measured is not None
    assert change.measured > 0.7 * change.promised > 0.1
    first = (
        auto.runs["adaptive"].iteration_seconds[12],
        static.runs["adaptive"].iteration_seconds[12],
    )
    assert first[0] < 0.7 * first[1], "guided, before anybody knew of the fault"
    assert auto.seconds["adaptive"] <= 1.002 * static.seconds["adaptive"]


def test_a_link_within_a_rank_has_no_faults() -> None:
    problem = PROBLEM.model_copy(update={"ranks": 2, "placement": "v"})
    with pytest.raises(InputError, match="link 1, whose stages are both on rank 1"):
        replay_trace(problem, FAULT)
