"""Interleaved stages, several per rank: the rules, the simulation, the CSV, the commands."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from gate import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemorph.cli import main
from pipemorph.errors import InputError
from pipemorph.planning import (
    Dispatch,
    Link,
    Policy,
    Problem,
    Route,
    Schedule,
    StageTimes,
    plan,
    predict_period,
    simulate,
    validate,
)
from pipemorph.planning.analysis.bubbles import explain_idle_time
from pipemorph.planning.formats.torch_csv import dump_csv, parse_csv
from pipemorph.planning.ir import count_in_flight_peak
from pipemorph.planning.offload import compute_device_room, count_device_peak
from pipemorph.planning.search.plan_variants import keep_on_device
from pipemorph.views.pictures import Timeline, draw_steps, render_html, render_text

TEN = StageTimes(forward=10, backward_input=10, backward_weight=10)


def problem(stages: int, microbatches: int, delay: float = 0.0, **more: Any) -> Problem:
    """``delay`` on the first link."""
    links = tuple(Link(delay=0.0 if i else delay) for i in range(stages - 1))
    return Problem(microbatches=microbatches, stages=(TEN,) * stages, links=links, **more)


@given(
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 12),
    source=st.randoms(use_true_random=False),
    policy=st.sampled_from([Policy.ONE_F_ONE_B_INTERLEAVED, Policy.ZERO_BUBBLE_V]),
)
@settings(max_examples=examples(100), deadline=None)
def test_plans_keep_the_rules_and_never_beat_the_bound(
    ranks: int, microbatches: int, source: random.Random, policy: Policy
) -> None:
    def time() -> float:
        return source.randrange(25) / 2

    rounds = max(1, microbatches // ranks)
    stages = 2 * ranks
    found = plan(
        Problem(
            microbatches=microbatches // rounds * rounds,
            stages=tuple(
                StageTimes(forward=time(), backward_input=time(), backward_weight=time())
                for _ in range(stages)
            ),
            links=tuple(Link(delay=time()) for _ in range(stages - 1)),
            policy=policy,
            ranks=ranks,
        )
    )
    validate(found.schedule)
    ran = found.simulation
    assert found.lower_bound <= ran.makespan
    # Ranks run one op at a time, and each op after what it needs; all idle time has a cause.
    for row, idle in zip(ran.ranks, explain_idle_time(ran, found.problem)[0], strict=True):
        pieces = [(op.start, op.end) for op in row if op.end > op.start]
        at = 0.0
        for start, end in sorted(pieces + [(b.start, b.end) for b in idle]):
            assert start == at
            at = end
        assert at == ran.makespan
    placement = found.schedule.placement
    for stage, ops in enumerate(ran.stages[1:], 1):
        above = {op.microbatch: op.end for op in ran.stages[stage - 1] if op.kind == "F"}
        away = placement[stage] != placement[stage - 1]
        delay = found.problem.links[stage - 1].delay if away else 0.0
        for op in ops:
            if op.kind == "F":
                assert op.start >= above[op.microbatch] + delay


@given(
    ranks=st.integers(1, 3),
    microbatches=st.integers(1, 10),
    placement=st.sampled_from(["interleaved", "v"]),
    objective=st.sampled_from(["makespan", "period"]),
    how=st.sampled_from(["offload", "recompute"]),
    source=st.randoms(use_true_random=False),
)
@settings(max_examples=examples(100), deadline=None)
def test_activations_leave_the_device_where_that_pays(
    *,
    ranks: int,
    microbatches: int,
    placement: Any,
    objective: Any,
    how: str,
    source: random.Random,
) -> None:
    """Policy pipemorph keeps the limits of every stage, and takes no longer than without."""

    def stage(_: int) -> StageTimes:
        times = {kind: source.randrange(25) / 2 for kind in ("forward", "backward_input")}
        limit, more = source.randint(1, 3), source.randint(0, 6)
        limits: dict[str, Any] = {"device_limit": limit, "offload_copy": more / 4}
        if how == "recompute":
            limits = {"in_flight_limit": limit, "recompute_limit": limit + more}
        return StageTimes(**times, backward_weight=source.randrange(25) / 2, **limits)

    count = 2 * ranks
    given = Problem(
        microbatches=microbatches, stages=tuple(map(stage, range(count))), ranks=ranks,
        links=tuple(Link(delay=source.choice((0, 3, 60))) for _ in range(count - 1)),
        placement=placement, objective=objective,
    )  # fmt: skip
    found = plan(given)
    made = found.to_plan(1, (Route.DIRECT,) * (count - 1))
    order = made.schedule
    assert order == found.schedule
    validate(order, made.in_flight_limits, made.device_limits)
    for of, ops, most, drops in zip(
        given.stages, made.schedule.stages, made.device_limits, made.recompute, strict=True
    ):
        peak = count_device_peak(ops, most)
        if most is None:
            assert peak <= (of.device_limit or of.in_flight_limit or 0)
        elif how == "offload":
            assert not drops and peak <= most == of.device_limit
        else:
            # Microbatches with inputs only and those with activations.
            assert drops and of.in_flight_limit is not None and of.recompute_limit is not None
            held = count_in_flight_peak(ops)
            assert peak <= most <= compute_device_room(held, of.in_flight_limit, of.recompute_limit)
    ran = simulate(order, given.with_plan_limits(made))
    assert ran.select_objective(given) == found.simulation.select_objective(given)
    assert found.lower_bound <= ran.select_objective(given)
    assert ran.select_objective(given) <= ran.makespan
    stays = keep_on_device(given)
    update = {"recompute_limit": None}
    without = stays.model_copy(
        update={"stages": tuple(each.model_copy(update=update) for each in stays.stages)}
    )
    longest = plan(without).simulation.select_objective(given)
    assert ran.select_objective(given) <= longest * (1 + 1e-9)


def test_a_plan_whose_activations_leave_is_written_and_read(tmp_path: Path, capsys: Any) -> None:
    source, planned = tmp_path / "problem.json", tmp_path / "plan.json"
    stages = (TEN.model_copy(update={"device_limit": 2, "offload_copy": 1.0}),) * 8
    made = problem(8, 8, ranks=4, policy="pipemorph", delay=60.0, objective="period")
    made = made.model_copy(update={"stages": stages})
    source.write_text(made.model_dump_json(exclude_none=True))
    assert main(["plan", str(source), "--out", str(planned)]) == 0
    found = json.loads(planned.read_text())
    assert found["device_limit"][0] == 2 and found["offloaded"][0] > 0
    assert found["lower_bound"] <= found["period"] <= found["makespan"]
    stays = plan(keep_on_device(made)).simulation.period
    assert found["period"] < 0.8 * stays
    assert main(["simulate", str(planned), str(source)]) == 0
    again = json.loads(capsys.readouterr().out)
    same = ("makespan", "period", "device_limit", "offloaded", "recomputed", "stages")
    assert [again[field] for field in same] == [found[field] for field in same]


def test_the_period_of_ranks_includes_work_after_their_last_op() -> None:
    given = problem(4, 4, ranks=2, placement="v", policy="zero-bubble-v", objective="period")
    without = plan(given).simulation
    late = TEN.model_copy(update={"reduction": 1000.0})
    ran = simulate(without.schedule, given.model_copy(update={"stages": (TEN, late, TEN, TEN)}))
    ops = without.ranks[1]
    assert ran.period == ops[-1].end - ops[0].start + 1000.0


def test_the_shortest_period_is_not_that_of_the_shortest_makespan() -> None:
    """Rank 1, which begins later, has most to do."""
    slow = TEN.model_copy(update={"backward_weight": 20.0})
    given = problem(4, 8, ranks=2, policy="pipemorph", delay=40.0, objective="period")
    given = given.model_copy(update={"stages": (TEN, slow, TEN, slow)})
    found = plan(given)
    made = plan(given.model_copy(update={"objective": "makespan"}))
    assert found.lower_bound == found.simulation.period == 640 < made.simulation.period == 670
    assert made.simulation.makespan == 690


@given(
    ranks=st.integers(1, 3),
    microbatches=st.integers(1, 8),
    placement=st.sampled_from(["interleaved", "v"]),
    source=st.randoms(use_true_random=False),
)
@settings(max_examples=examples(60), deadline=None)
def test_iterations_that_follow_each_other(
    ranks: int, microbatches: int, placement: Any, source: random.Random
) -> None:
    """The time is that of one long order of many iterations."""

    def stage(_: int) -> StageTimes:
        forward, backward, weight, after = (source.randrange(25) / 2 for _ in range(4))
        return StageTimes(
            forward=forward, backward_input=backward, backward_weight=weight, reduction=after
        )

    count = 2 * ranks
    given = Problem(
        microbatches=microbatches, stages=tuple(map(stage, range(count))), ranks=ranks,
        links=tuple(Link(delay=source.choice((0, 3, 60))) for _ in range(count - 1)),
        placement=placement, policy="pipemorph", objective="period",
    )  # fmt: skip
    found = plan(given)
    period = predict_period(found.schedule, given)
    assert found.simulation.period >= period or period == pytest.approx(found.simulation.period)
    stages = tuple(each.model_copy(update={"reduction": None}) for each in given.stages)
    without = given.model_copy(update={"stages": stages})
    ended = []
    # Twelve iterations, as they may alternate: a period of 1, 2, 3, 4 or 6 iterations fits.
    for times in (20, 32):
        ops = tuple(
            tuple(
                op._replace(microbatch=op.microbatch + i * microbatches)
                for i in range(times)
                for op in mine
            )
            for mine in found.schedule.ranks
        )
        more = without.model_copy(update={"microbatches": times * microbatches})
        schedule = Schedule(times * microbatches, ops, found.schedule.placement)
        ended.append(simulate(schedule, more).ranks[0][-1].end)
    assert predict_period(found.schedule, without) == pytest.approx((ended[1] - ended[0]) / 12)


def test_a_rank_that_waits_for_itself() -> None:
    with pytest.raises(InputError) as caught:
        validate(parse_csv("1F0,0F0,1B0,0B0"))
    assert str(caught.value) == (
        "rank 0, position 0: F0 of stage 1 waits forever for microbatch 0 of stage 0"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the plan has no ops"),
        (",,\n", "the plan has no ops"),
        ("0F0,0B0\n\n1F0,1B0", "rank 1 has no ops"),
        ("0F0,0SEND_F0,0B0", "rank 0, column 1: found '0SEND_F0'; expected a compute-only"),
        ("0F0,0X0", "rank 0, column 1: found '0X0'; expected a"),
        ("0F0\n1F", "rank 1, column 0: found '1F'; expected a"),
        ("0F-1", "found '0F-1'; expected a stage, F, I, W or B"),
        ("F0", "found 'F0'; expected a stage"),
        ("0F99999999999", "found '0F99999999999'"),
        ('"0F0', "the plan is not CSV"),
        ("0F0,0I0\n0W0", "stage 0 is on rank 0 and on rank 1"),
        ("0F0,2F0,0B0,2B0", "ops of 2 stages but none of stage 1"),
        ("0F0,0I0", "the ops end after 0 of 1 W"),
        ("0F0,0W0,0I0", "found W0; expected B0 before it"),
        ("0F0,0F2,0B0,0B2", "found F2; expected F1"),
    ],
)
def test_bad_csv(text: str, words: str, tmp_path: Path, capsys: Any) -> None:
    file, source = tmp_path / "plan.csv", tmp_path / "problem.json"
    file.write_text(text)
    stages = 1 if "\n" not in text.strip() else 2
    source.write_text(problem(stages, 1).model_dump_json(exclude_none=True))
    if "2F0" in text:
        source.write_text(problem(2, 1).model_dump_json(exclude_none=True))
    if "F2" in text:
        source.write_text(problem(1, 3).model_dump_json(exclude_none=True))
    assert main(["simulate", str(file), str(source)]) == 2
    found = capsys.readouterr()
    assert words in found.err and found.err.count("\n") == 1 and found.out == ""


def test_overlapped_ops_run_one_after_another() -> None:
    read = parse_csv("0F0,0F1,(0B0;0F2)OVERLAP_F_B,,0B1,0B2\r\n")
    assert dump_csv(read) == "0F0,0F1,0B0,0F2,0B1,0B2\r\n"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (problem(8, 8), "ranks is missing; policy 1f1b-interleaved"),
        (problem(7, 8, ranks=4), "stages has 7 entries for 4 ranks"),
        (problem(8, 9, ranks=4), "microbatches is 9; policy 1f1b-interleaved on 4 ranks runs 2"),
        (problem(7, 8, policy="zero-bubble-v"), "stages has 7 entries for 3 ranks"),
        (problem(8, 8, ranks=8, policy="zero-bubble-v"), "stages has 8 entries for 8 ranks"),
        (problem(8, 8, ranks=4, warmup=(1,) * 8), "policy 1f1b-interleaved sets its own"),
        (problem(8, 8, ranks=4, policy="1f1b"), "ranks is 4; policy 1f1b has one stage"),
        (problem(8, 8, ranks=3, policy="pipemorph"), "ranks is 3; expected a number that divides"),
        (
            problem(8, 8, ranks=4).model_copy(
                update={"stages": (TEN.model_copy(update={"in_flight_limit": 2}), *[TEN] * 7)}
            ),
            "in_flight_limit is 2",
        ),
    ],
)
def test_problems_that_are_refused(made: Problem, words: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "problem.json"
    file.write_text(made.model_dump_json(exclude_none=True))
    policy = "1f1b-interleaved" if made.policy is Policy.PIPEMORPH else made.policy.value
    chosen = [] if "divides" in words else ["--policy", policy]
    assert main(["plan", str(file), *chosen]) == 2
    found = capsys.readouterr()
    assert words in found.err and found.err.count("\n") == 1 and found.out == ""


def test_dispatch_is_a_choice_of_the_plan(tmp_path: Path, capsys: Any) -> None:
    mode = "guided"
    source, planned, late = (tmp_path / name for name in ("problem.json", "plan.json", "late.json"))
    made = problem(4, 8, policy="pipemorph", ranks=2)
    source.write_text(made.model_dump_json(exclude_none=True))
    late.write_text(made.with_delays([25, 0, 0]).model_dump_json(exclude_none=True))
    chosen = ["--dispatch", mode, "--warmup", "6,5,3,1"]
    assert main(["plan", str(source), *chosen, "--out", str(planned)]) == 0
    found = json.loads(planned.read_text())
    assert (found["dispatch"], found["warmup"]) == (mode, [6, 5, 3, 1])
    assert len(found["waits"]) == 2, "per rank"
    took = {}
    for each in (mode, "static"):
        assert main(["simulate", str(planned), str(late), "--dispatch", each]) == 0
        took[each] = json.loads(capsys.readouterr().out)
    assert main(["simulate", str(planned), str(late)]) == 0
    assert json.loads(capsys.readouterr().out) == took[mode]
    assert took[mode]["makespan"] < took["static"]["makespan"]


def test_plan_and_simulate_print_the_contracted_fields(tmp_path: Path, capsys: Any) -> None:
    source, planned = tmp_path / "problem.json", tmp_path / "plan.json"
    source.write_text(problem(8, 8, policy="zero-bubble-v").model_dump_json(exclude_none=True))
    assert main(["plan", str(source), "--out", str(planned)]) == 0
    found = json.loads(planned.read_text())
    assert found["makespan"] == found["lower_bound"] == 8 * 2 * 30 + 30
    assert found["ranks"] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert found["order"][0].startswith("0F0,0F1,0F2,0F3,0F4,0F5,0F6,7F0,7I0,7W0")
    assert [len(stage) for stage in found["stages"]] == [24] * 8
    assert len(found["bubbles"]["fill"]) == 4
    idle = sum(map(sum, found["bubbles"].values()))
    assert idle == pytest.approx(found["bubble_fraction"] * 4 * found["makespan"])
    slow = tmp_path / "slow.json"
    made = problem(8, 8).with_delays([20, 0, 0, 50, 0, 0, 0])
    slow.write_text(made.model_dump_json(exclude_none=True))
    assert main(["simulate", str(planned), str(slow)]) == 0
    again = json.loads(capsys.readouterr().out)
    # The fourth link is within rank 3 and takes no time.
    assert again["makespan"] > found["makespan"]
    assert (
        again["makespan"]
        == simulate(
            parse_csv("\n".join(found["order"])), made.with_delays([20, 0, 0, 0, 0, 0, 0])
        ).makespan
    )


def test_pictures_have_a_row_per_rank() -> None:
    found = plan(problem(4, 4, policy="zero-bubble-v", delay=5.0))
    drawn = Timeline.from_simulation(found.simulation, found.problem, title="v")
    text = render_text(drawn)
    assert "rank 0 (0, 3) |" in text and "rank 1 (1, 2) |" in text
    page = render_html(drawn)
    data = json.loads(page.split('type="application/json">')[1].split("</script>")[0])
    assert data["placement"] == [0, 1, 1, 0]
    assert set(data["rows"][0]["stages"]) == {0, 3}
    assert {tuple(each[:2]) for each in data["crossing"]} == {(0, 1), (1, 0)}
    assert draw_steps("", [drawn]).to_png().startswith(b"\x89PNG")


def _several(
    shape: tuple[int, Any, int], times: Any, limits: Any, delays: Any, **more: Any
) -> Problem:
    """``shape``: ranks, placement, microbatches; ``times``: F, B, W of each stage, or of all."""
    ranks, placement, microbatches = shape
    count = len(delays) + 1
    each = times if isinstance(times[0], tuple) else (times,) * count
    return Problem(
        microbatches=microbatches, ranks=ranks, placement=placement, **more,
        stages=tuple(
            StageTimes(forward=f, backward_input=b, backward_weight=w, in_flight_limit=limit)
            for (f, b, w), limit in zip(each, limits or (None,) * count, strict=True)
        ),
        links=tuple(Link(delay=delay) for delay in delays),
    )  # fmt: skip


_LONG = ((10, 10, 10),) * 2 + ((15, 15, 15),) + ((10, 10, 10),) * 5


@pytest.mark.parametrize(
    ("given", "optimum"),
    [
        (
            _several((2, "v", 16), ((15, 15, 15),) + ((10, 10, 10),) * 3, (6,) * 4, (60, 0, 60)),
            1265,
        ),
        (_several((4, "interleaved", 8), _LONG, range(9, 1, -1), (0, 0, 40, 0, 0, 0, 40)), 680),
        (_several((2, "interleaved", 12), (10, 11, 5), None, (40, 40, 40)), 674),
        (_several((4, "v", 8), (10, 10, 10), None, (0,) * 7, rank_memory=6), 530),
        (_several((4, "v", 8), (10, 10, 10), None, (0,) * 7, rank_memory=8), 510),
    ],
)
def test_plans_of_several_stages_are_as_short_as_a_solver_finds(
    given: Problem, optimum: float
) -> None:
    """Optima of a constraint solver."""
    found = plan(given)
    assert found.makespan == optimum and found.lower_bound <= optimum
    ran = simulate(found.schedule, given)
    assert ran.makespan == optimum


def test_memory_is_of_the_rank(tmp_path: Path, capsys: Any) -> None:
    given = _several((4, "v", 8), (10, 10, 10), None, (0,) * 7, rank_memory=6)
    found = plan(given)
    held = found.schedule.count_in_flight_peaks()
    assert any(held[s] + held[7 - s] > 6 for s in range(4)), "stages share it by the moment"
    for dispatch, memory, words in (
        ("guided", 6, "rank 0: its stages may hold"),
        ("static", 5, "expected a W before it, rank_memory is 5"),
    ):
        less = given.model_copy(update={"rank_memory": memory})
        with pytest.raises(InputError, match=words):
            simulate(found.schedule, less, Dispatch(dispatch))
    guided = plan(given.model_copy(update={"dispatch": Dispatch.GUIDED}))
    assert guided.makespan == 550 and max(guided.schedule.count_in_flight_peaks()) == 3
    file = tmp_path / "problem.json"
    for text, words in (
        (given.model_copy(update={"rank_memory": 1}), "rank_memory is 1; rank 0 needs 2"),
        (
            given.model_copy(
                update={
                    "stages": (TEN.model_copy(update={"activation_bytes": 2}), *given.stages[1:])
                }
            ),
            "give activation_bytes of every stage, or of none",
        ),
    ):
        file.write_text(text.model_dump_json(exclude_none=True))
        assert main(["plan", str(file)]) == 2
        assert words in capsys.readouterr().err


def test_a_search_ends_where_no_op_may_begin() -> None:
    made = problem(4, 4, ranks=2, rank_memory=2).model_copy(update={"rank_memory": 1})
    with pytest.raises(InputError, match="rank_memory is 1, too little"):
        plan(made)


@pytest.mark.parametrize("wrong", [-1, 0, 2**31, 2**63, 2**70, 1.5])
@pytest.mark.parametrize(
    "field", ["microbatches", "ranks", "warmup", "in_flight_limit", "device_limit"]
)
def test_numbers_that_are_no_counts(field: str, wrong: float, tmp_path: Path, capsys: Any) -> None:
    stage = {"forward": 1, "backward_input": 1, "backward_weight": 1}
    body: dict[str, Any] = {"microbatches": 2, "stages": [stage]}
    if field in body or field == "ranks":
        body[field] = wrong
    elif field == "warmup":
        body[field] = [wrong]
    else:
        stage[field] = wrong  # type: ignore[assignment]
    file = tmp_path / "problem.json"
    file.write_text(json.dumps(body))
    for command in ("plan", "advise"):
        assert main([command, str(file)]) == 2
        said = capsys.readouterr().err
        assert field in said and said.count("\n") == 1
