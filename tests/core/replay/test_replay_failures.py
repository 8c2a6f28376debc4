"""Links whose messages jitter, and links whose direct route is down."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from pipemorph.cli import main
from pipemorph.control import initial_plan
from pipemorph.errors import InputError
from pipemorph.planning import Dispatch, Link, Policy, Problem, Route, StageTimes, plan
from pipemorph.planning.problem import load_problem
from pipemorph.planning.simulation.simulator import Message, trace_messages
from pipemorph.replay.adaptive_trainer import AdaptiveTrainer, Telemetry
from pipemorph.replay.baselines import measure_late_share, replay_trace
from pipemorph.replay.link_trace import LinkTrace, parse_trace
from pipemorph.replay.simulated_links import (
    OUTAGE_TIMEOUT,
    NoRouteError,
    SimulatedLinks,
    build_job_spec,
    convert_to_seconds,
)

TRACES = Path(__file__).resolve().parents[3] / "examples" / "traces"
TIMES = StageTimes(forward=10, backward_input=10.5, backward_weight=5.5)
PROBLEM = Problem(microbatches=12, stages=(TIMES,) * 4, links=(Link(delay=1),) * 3)
SECONDS = convert_to_seconds(PROBLEM)
STATIC = plan(SECONDS, Policy.PIPEMORPH).to_plan(0, (Route.DIRECT,) * 3)


def trace_of(*lines: dict[str, object]) -> LinkTrace:
    return parse_trace("\n".join(map(json.dumps, lines)), 3)


def down(link: int, **more: object) -> dict[str, object]:
    return {str(link): {"down": True, **more}}


DEAD = trace_of({"at_iteration": 10, "links": down(1)}, {"at_iteration": 30, "links": {}})


def messages(
    links: SimulatedLinks, iteration: int = 0, began: float = 0.0, **gone: object
) -> list[Message]:
    return trace_messages(links.simulate_iteration(STATIC, iteration, began, **gone)).messages  # type: ignore[arg-type]


# --- jitter ----------------------------------------------------------------------------------


def test_each_message_has_a_delay_of_its_own() -> None:
    state = {"1": {"delay_ms": 20, "jitter_ms": 12}}
    links = SimulatedLinks(SECONDS, trace_of({"at_iteration": 0, "links": state}))
    took = []
    for iteration in range(40):
        for each in messages(links, iteration):
            at = links.compute_departure(each, iteration, 0.0)
            if each.link == 1:
                took.append(each.arrived - at)
            else:
                assert each.arrived - at == pytest.approx(0.001)
    # Uniform: from none to all of the jitter, half of it on average.
    assert min(took) == pytest.approx(0.021, abs=2e-4)
    assert max(took) == pytest.approx(0.033, abs=2e-4)
    assert fmean(took) == pytest.approx(0.027, abs=4e-4)
    assert pstdev(took) == pytest.approx(0.012 / 12**0.5, rel=0.05)
    assert len(set(took)) > 0.9 * len(took)


def test_jitter_is_repeatable_and_another_one_with_another_seed() -> None:
    trace = trace_of({"at_iteration": 4, "links": {"1": {"jitter_ms": 40}}})
    first, again, other = (
        replay_trace(PROBLEM, trace, iterations=20, seed=seed) for seed in (3, 3, 4)
    )
    assert first == again
    assert first.runs["static"].iteration_seconds[:4] == other.runs["static"].iteration_seconds[:4]
    assert first.runs["static"].iteration_seconds[4:] != other.runs["static"].iteration_seconds[4:]


def test_the_oracle_and_the_controller_plan_for_jitter() -> None:
    """Uniform to 80 ms: 40 ms on average."""
    jitter = trace_of({"at_iteration": 6, "links": {"1": {"jitter_ms": 80}}})
    found = replay_trace(PROBLEM, jitter, iterations=60)
    static, adaptive, oracle = (found.seconds[n] for n in ("static", "adaptive", "oracle"))
    assert static is not None and adaptive is not None and oracle is not None
    assert oracle < 0.8 * static
    assert adaptive < 0.85 * static
    assert "link 1 is slow" in found.changes[0].reason


# --- a network that is slow everywhere -----------------------------------------------------------


def test_a_plan_for_wire_times_within_bounds_is_made_anew_once_they_are_exact() -> None:
    """Arrivals on delegated routes are: what is missing then is less than ``minGain``."""
    problem = load_problem(str(TRACES / "problem.yaml"))
    line = {"at_iteration": 0, "links": {str(link): {"delay_ms": 30} for link in range(7)}}
    links = SimulatedLinks(convert_to_seconds(problem), parse_trace(json.dumps(line), 7))
    trainer = AdaptiveTrainer(build_job_spec(problem, "auto"), [links], "device", 0)
    seconds = [trainer.step().seconds for _ in range(14)]
    assert seconds[6] < 0.8 * seconds[0]
    assert seconds[-1] < 0.975 * seconds[6]


# --- stages ----------------------------------------------------------------------------------


def test_a_stage_is_slow_or_pauses() -> None:
    trace = trace_of(
        {"at_iteration": 10, "links": {}, "stages": {"1": {"slowdown": 1.5}}},
        {"at_iteration": 40, "links": {}, "stages": {"2": {"pause_ms": 300}}},
        {"at_iteration": 41, "links": {}},
    )
    found = replay_trace(PROBLEM, trace, iterations=60)
    static, oracle = (found.runs[name].iteration_seconds for name in ("static", "oracle"))
    well = static[0]
    assert set(static[:10]) == {well} == set(static[41:])
    assert static[10] > 1.3 * well
    assert well + 0.27 < static[40] <= well + 0.3, "a part of it is spent waiting anyway"
    assert all(best <= seconds for best, seconds in zip(oracle, static, strict=True))
    assert found.compute_harm("adaptive") <= 0.01
    links = SimulatedLinks(SECONDS, trace)
    slow, usual = (links.simulate_iteration(STATIC, iteration, 0.0).stages for iteration in (10, 0))
    for stage, (ops, others) in enumerate(zip(slow, usual, strict=True)):
        longer = {
            round((op.end - op.start) / (o.end - o.start), 6)
            for op, o in zip(ops, others, strict=True)
        }
        assert longer == {1.5 if stage == 1 else 1.0}


# --- a direct route that is down ---------------------------------------------------------------


def test_a_route_that_stays_down_is_given_up_and_its_messages_are_sent_again() -> None:
    links, gone = SimulatedLinks(SECONDS, DEAD), dict[int, float]()
    well = messages(links, 9, 5.0, gone=gone)
    assert gone == {}
    rows = messages(links, 10, 5.0, gone=gone)
    over = [each for each in rows if each.link == 1]
    noticed = min(each.sent for each in over) + OUTAGE_TIMEOUT
    assert gone == {1: pytest.approx(5.0 + noticed)}
    assert len(over) == 24, "each message arrives once"
    for each in over:
        # The engine has eight queues, the ninth waits for the first.
        assert max(each.sent, noticed) + 0.001 - 1e-9 <= each.arrived
        assert each.arrived <= max(each.sent, noticed) + 0.003
    assert {each.sent < noticed for each in over} == {True, False}
    assert max(m.arrived for m in rows) > max(m.arrived for m in well) + 0.9 * OUTAGE_TIMEOUT
    # The link stays delegated, also when the route is back.
    for iteration in (11, 40):
        assert max(m.arrived for m in messages(links, iteration, 9.0, gone=gone)) < 0.5
    assert gone == {1: pytest.approx(5.0 + noticed)}


def test_a_route_that_is_soon_back_delivers_waiting_messages_late() -> None:
    trace = trace_of({"at_seconds": 2.1, "links": down(1)}, {"at_seconds": 2.7, "links": {}})
    links, gone = SimulatedLinks(SECONDS, trace), dict[int, float]()
    over = [each for each in messages(links, 3, 2.0, gone=gone) if each.link == 1]
    assert gone == {}
    held = [
        each
        for each in over
        if links.compute_departure(each, 3, 2.0) > 0.100001 and each.sent < 0.7
    ]
    assert held and min(each.arrived for each in held) == pytest.approx(0.701)
    # Single queue per direction: they arrive after each other.
    forward = sorted(each.arrived for each in over if each.forward)
    assert all(b - a >= 0.001 - 1e-9 for a, b in pairwise(forward))
    assert messages(links, 3, 2.0) == messages(links, 3, 2.0, gone={}), "no other route is needed"


def test_two_routes_that_fail_together_are_each_noticed_by_a_loss_of_their_own() -> None:
    trace = trace_of({"at_iteration": 0, "links": down(0) | down(2)})
    gone = dict[int, float]()
    messages(SimulatedLinks(SECONDS, trace), gone=gone)
    assert gone[0] == pytest.approx(0.010 + OUTAGE_TIMEOUT)
    # The first message reaches link 2 only after link 0 was given up.
    assert gone[2] == pytest.approx(gone[0] + 0.001 + 0.010 + 0.001 + 0.010 + OUTAGE_TIMEOUT)


def test_however_routes_fail_nothing_leaves_by_one_that_is_down() -> None:
    for seed in range(12):
        rng = random.Random(seed)
        lines, now = [], 0.0
        while now < 3.0:
            now += rng.choice((0.01, 0.1, 1.2)) * rng.uniform(0.5, 1.5)
            links = rng.sample(range(3), rng.randint(0, 3))
            state = {str(link): {"down": True, "jitter_ms": rng.choice((0, 9))} for link in links}
            lines.append({"at_seconds": round(now, 4), "links": state})
        trace, gone = trace_of(*lines), dict[int, float]()
        links_of_it = SimulatedLinks(SECONDS, trace)
        rows = messages(links_of_it, 1, 0.2, gone=gone)
        assert len(rows) == 72
        for each in rows:
            at = 0.2 + links_of_it.compute_departure(each, 1, 0.2) + 1e-6
            if at < gone.get(each.link, math.inf):
                assert trace.find_recovery(each.link, at) is None, (seed, each)


def test_without_another_route_training_ends() -> None:
    links = SimulatedLinks(SECONDS, DEAD)
    with pytest.raises(NoRouteError, match="link 1 is down in iteration 10: no other route"):
        links.simulate_iteration(STATIC, 10, 0.0)
    found = replay_trace(PROBLEM, DEAD)
    fields = found.to_json()["contenders"]
    for name in ("1f1b", "zero-bubble", "static"):
        assert fields[name] == {
            "seconds": None,
            "iterations_per_minute": None,
            "share_of_oracle_gain": None,
            "reason": "link 1 is down in iteration 10: no other route",
        }
        assert len(found.runs[name].iteration_seconds) == 10
    for name in ("adaptive", "oracle"):
        assert set(fields[name]) == {"seconds", "iterations_per_minute", "share_of_oracle_gain"}
        assert fields[name]["share_of_oracle_gain"] is None, "static gives nothing to compare with"
        assert len(found.runs[name].iteration_seconds) == found.iterations == 50
    with pytest.raises(InputError, match="no share of the oracle's gain: link 1 is down"):
        measure_late_share(PROBLEM, DEAD)


def test_the_oracle_goes_aside_before_the_route_fails_and_the_product_after() -> None:
    found = replay_trace(PROBLEM, DEAD)
    adaptive, oracle = (found.runs[name].iteration_seconds for name in ("adaptive", "oracle"))
    assert max(oracle) == pytest.approx(oracle[0], rel=0.01)
    assert adaptive[10] == pytest.approx(oracle[10] + OUTAGE_TIMEOUT, abs=0.05)
    assert max(adaptive[11:]) == pytest.approx(oracle[11], rel=0.01)


def test_a_failure_within_an_iteration_by_seconds() -> None:
    trace = trace_of({"at_seconds": 3.2, "links": down(2)}, {"at_seconds": 9.0, "links": {}})
    found = replay_trace(PROBLEM, trace)
    assert found.runs["static"].end_reason is not None
    adaptive, oracle = found.seconds["adaptive"], found.seconds["oracle"]
    assert adaptive is not None and oracle is not None
    assert oracle + 0.9 * OUTAGE_TIMEOUT < adaptive < oracle + 1.3 * OUTAGE_TIMEOUT


def test_other_delays_remain_on_the_delegated_route() -> None:
    """Known to be slow if another link has shown what is usual there."""
    eight = Problem(microbatches=24, stages=(TIMES,) * 8, links=(Link(delay=1),) * 7)
    states = {10: down(3), 20: down(3) | down(5, delay_ms=30)}
    lines = [json.dumps({"at_iteration": k, "links": links}) for k, links in states.items()]
    found = replay_trace(eight, parse_trace("\n".join(lines), 7), iterations=26)
    (change,) = found.changes
    assert change.iteration == 21 and "link 5 is slow by 3" in change.reason
    oracle = found.runs["oracle"].iteration_seconds
    assert oracle[-1] > 1.03 * oracle[0]
    assert found.runs["adaptive"].iteration_seconds[-1] == pytest.approx(oracle[-1], rel=0.01)
    alone = replay_trace(PROBLEM, trace_of({"at_iteration": 5, "links": down(1)}), iterations=30)
    assert alone.changes == [], "a delegated route that is as quick needs no other plan"


def test_a_delegated_message_has_the_cost_of_the_replay_after_failover() -> None:
    trace = trace_of({"at_iteration": 5, "links": down(1)})
    free, costly = (
        replay_trace(PROBLEM, trace, delegation=d, iterations=20, dispatch=Dispatch.STATIC)
        for d in (0.0, 0.1)
    )
    assert (
        costly.runs["adaptive"].iteration_seconds[:5] == free.runs["adaptive"].iteration_seconds[:5]
    )
    assert (
        costly.runs["adaptive"].iteration_seconds[10]
        > 1.05 * free.runs["adaptive"].iteration_seconds[10]
    )


def test_samples_of_a_failed_route_are_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = AdaptiveTrainer(
        build_job_spec(PROBLEM, Dispatch.STATIC), [SimulatedLinks(SECONDS, DEAD)], "python", 0
    )
    seen: list[tuple[int, str, float]] = []
    observe = trainer._ranks.process_telemetry

    def spy(sent, now):  # type: ignore[no-untyped-def]
        seen.extend(
            (sent.iteration, str(s.route.value), s.wire.p50) for s in sent.links if s.link == 1
        )
        observe(sent, now)

    monkeypatch.setattr(trainer._ranks, "process_telemetry", spy)
    for _ in range(14):
        trainer.step()
    routes = [{route for k, route, _ in seen if k == number} for number in range(14)]
    assert routes == [{"direct"}] * 10 + [{"delegated"}] * 4
    # Time that a message waited for the route is no time on the wire.
    assert max(wire for k, _, wire in seen if k >= 10) < 0.01


EIGHT = Problem(microbatches=24, stages=(TIMES,) * 8, links=(Link(delay=1),) * 7)
SLOW_PORT = "\n".join(
    json.dumps({"at_iteration": k, "links": links})
    for k, links in {20: down(5, delay_ms=30), 50: down(5), 70: {}}.items()
)
"""A direct route breaks, and the one that replaces it is slow from its first message on."""


@pytest.mark.parametrize("telemetry", ["exact", "device"])
def test_a_route_that_replaces_a_broken_one_is_found_slow_and_planned_for(
    telemetry: Telemetry,
) -> None:
    found = replay_trace(EIGHT, parse_trace(SLOW_PORT, 7), telemetry=telemetry, iterations=75)
    adaptive, oracle = (found.runs[name].iteration_seconds for name in ("adaptive", "oracle"))
    assert max(oracle[20:50]) > 1.04 * oracle[0]
    # The iteration in which the route breaks shows it: the next one has the plan for it.
    assert max(adaptive[21:50]) <= 1.005 * max(oracle[21:50])
    assert max(adaptive[56:]) <= 1.005 * oracle[0], "there is no direct route to go back to"
    first, back = found.changes
    assert first.iteration == 21 and "link 5 is slow by 30." in first.reason
    assert "link 5 delegated" in first.reason
    assert "a link recovered" in back.reason


def test_the_iteration_is_predicted_on_the_route_in_force() -> None:
    """The direct route, whose messages go one at a time, would take much longer for 30 ms."""
    job = build_job_spec(EIGHT, Dispatch.STATIC)
    trainer = AdaptiveTrainer(
        job, [SimulatedLinks(convert_to_seconds(EIGHT), parse_trace(SLOW_PORT, 7))], "exact", 0
    )
    steps = [trainer.step().seconds for _ in range(30)]
    (record,) = trainer.controller.records
    assert record.predicted_seconds_after == pytest.approx(steps[-1], rel=0.01)
    static = SimulatedLinks(
        convert_to_seconds(EIGHT), parse_trace(SLOW_PORT, 7)
    ).simulate_iteration(initial_plan(job), 30, 0.0, gone={5: 0.0})
    assert record.predicted_seconds_before == pytest.approx(static.makespan, rel=0.03)


def test_a_failure_in_one_replica_is_planned_for_there() -> None:
    text = SLOW_PORT.replace('"5"', '"5@1"')
    trace = parse_trace(text, 7, replicas=2)
    found = replay_trace(EIGHT, trace, replicas=2, iterations=48)
    adaptive, oracle = (found.runs[name].iteration_seconds for name in ("adaptive", "oracle"))
    assert max(adaptive[22:48]) <= 1.01 * max(oracle[22:48])


# Iterations without a barrier are planned as such when nearly as many as here have had none.
@pytest.mark.parametrize(("objective", "within"), [("makespan", 0.2), ("period", 0.5)])
def test_with_and_without_a_barrier(objective: str, within: float) -> None:
    problem = PROBLEM.model_copy(update={"objective": objective})
    found = replay_trace(problem, DEAD, iterations=25)
    adaptive, oracle = found.seconds["adaptive"], found.seconds["oracle"]
    assert adaptive is not None and oracle is not None
    assert adaptive == pytest.approx(oracle + OUTAGE_TIMEOUT, abs=within)


def test_ranks_with_several_stages_and_replicas_fail_over_too() -> None:
    several = PROBLEM.model_copy(update={"ranks": 2, "placement": "interleaved"})
    found = replay_trace(several, DEAD, iterations=20)
    assert found.runs["adaptive"].end_reason is None
    assert found.runs["static"].end_reason is not None
    text = json.dumps({"at_iteration": 5, "links": {"1@1": {"down": True}}})
    both = replay_trace(PROBLEM, parse_trace(text, 3, replicas=2), replicas=2, iterations=15)
    steps = both.runs["adaptive"].iteration_seconds
    assert steps[5] > steps[4] + 0.9 * OUTAGE_TIMEOUT
    assert steps[6] == pytest.approx(steps[4], rel=0.05)


def test_the_command_names_trainers_that_could_not_finish(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, problem = tmp_path / "trace.jsonl", tmp_path / "problem.json"
    trace.write_text(json.dumps({"at_iteration": 4, "links": down(1)}))
    problem.write_text(PROBLEM.model_dump_json(exclude_none=True))
    command = ["replay", str(trace), str(problem), "--iterations", "8"]
    assert main(command) == 0
    said = capsys.readouterr().out.splitlines()
    (line,) = [each for each in said if each.startswith("1f1b")]
    assert line.endswith("ended: link 1 is down in iteration 4: no other route")
    assert main([*command, "--output", "json", "--seed", str(1 << 70)]) == 0
    assert json.loads(capsys.readouterr().out)["contenders"]["1f1b"]["seconds"] is None
