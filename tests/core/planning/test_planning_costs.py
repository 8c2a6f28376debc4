"""Plans of microbatches that differ in cost: optimal, reordered, printed, read and refused."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from planning_reference import optimum

from pipemorph.cli import main
from pipemorph.errors import InputError
from pipemorph.planning import (
    Link,
    Policy,
    Problem,
    Route,
    StageTimes,
    compute_lower_bound,
    parse_problem,
    plan,
    predict,
    simulate,
)
from pipemorph.planning.advice import compare_changes
from pipemorph.planning.formats.plan_json import load_plan
from pipemorph.planning.simulation.execution import RELATIVE_TOLERANCE, compute_tight_lower_bound
from pipemorph.views.pictures import Timeline

COSTS = (0.5, 2.0, 1.0, 0.75, 1.5, 1.0, 0.5, 1.25)
STAGE = "{forward: 10, backward_input: 10, backward_weight: 10, in_flight_limit: 3}"
EXAMPLE = f"""
microbatches: 8
microbatch_costs: {list(COSTS)}
stages: [{", ".join([STAGE] * 3)}]
links: [{{delay: 2}}, {{}}]
"""


def draw_problem(seed: int) -> Problem:
    """Two or three stages and three microbatches."""
    rng = random.Random(seed)
    count = rng.choice([2, 2, 3])
    stages = tuple(
        StageTimes(
            forward=rng.randint(1, 4),
            backward_input=rng.randint(1, 4),
            backward_weight=rng.randint(0, 4),
            in_flight_limit=rng.choice([None, 1, 2]),
        )
        for _ in range(count)
    )
    rows = [[rng.choice([0.25, 0.5, 1.0, 2.0, 3.0]) for _ in range(3)] for _ in range(count)]
    return Problem(
        microbatches=3,
        stages=stages,
        links=tuple(Link(delay=rng.choice([0, 0, 3])) for _ in range(count - 1)),
        microbatch_costs=rows if rng.random() < 0.5 else rows[:1],
    )


@pytest.mark.parametrize("seed", range(16))
def test_plans_against_all_orders_of_ops_and_microbatches(seed: int) -> None:
    """The bound is below the optimum of all orders, and the plan near it."""
    problem = draw_problem(seed)
    exact = {
        order: optimum(problem.with_microbatch_order(order)) for order in permutations(range(3))
    }
    best, rounding = min(exact.values()), 1 + RELATIVE_TOLERANCE
    found = plan(problem)
    assert found.lower_bound <= best * rounding
    assert best <= found.makespan * rounding
    assert found.makespan <= 1.02 * best
    order = found.microbatch_order or (0, 1, 2)
    assert found.makespan == predict(found.schedule, problem.with_microbatch_order(order))
    assert found.makespan * rounding >= exact[order]

    fixed = problem.model_copy(update={"reorder": False})
    held = plan(fixed, tight_bound=True)
    assert not held.microbatch_order
    assert compute_lower_bound(fixed) <= held.lower_bound <= exact[0, 1, 2] * rounding
    assert compute_tight_lower_bound(fixed, held.makespan) <= exact[0, 1, 2] * rounding
    assert exact[0, 1, 2] <= held.makespan * rounding
    assert found.makespan <= held.makespan


def test_reordering_beats_the_order_in_which_microbatches_come() -> None:
    problem = parse_problem(EXAMPLE)
    found, held = plan(problem), plan(problem.model_copy(update={"reorder": False}))
    assert found.makespan < 0.95 * held.makespan < plan(problem, Policy.ONE_F_ONE_B).makespan
    again = plan(problem)
    assert (again.schedule, again.microbatch_order) == (found.schedule, found.microbatch_order)
    assert plan(problem, Policy.ONE_F_ONE_B).microbatch_order == ()
    ranks = found.to_plan(0, [Route.DIRECT] * 2)
    assert ranks.microbatch_order == found.microbatch_order != ()


def test_equal_costs_are_another_time_of_all_stages() -> None:
    problem = parse_problem(EXAMPLE)
    equal = problem.model_copy(update={"microbatch_costs": ((2.0,) * 8,)})
    found, mean = plan(equal), plan(equal.with_mean_costs())
    assert mean.problem.stages[0].forward == 20 and mean.problem.microbatch_costs is None
    assert (found.makespan, found.schedule) == (mean.makespan, mean.schedule)
    assert found.microbatch_order == ()


@pytest.mark.parametrize(
    "extra",
    [
        {"fused_backward": 15.0},
        {"device_limit": 2, "offload_copy": 1.0, "in_flight_limit": None},
        {"recompute_limit": 8},
    ],
    ids=["fused", "offload", "recompute"],
)
def test_variants_with_costs(extra: dict[str, Any]) -> None:
    """Fused backwards, offload and recomputation with the costs of each microbatch."""
    problem = parse_problem(EXAMPLE)
    stages = tuple(stage.model_copy(update=extra) for stage in problem.stages)
    problem = problem.model_copy(update={"stages": stages})
    found = plan(problem)
    assert found.lower_bound <= found.makespan == simulate(found.schedule, found.problem).makespan
    assert found.makespan <= plan(problem.model_copy(update={"reorder": False})).makespan


# --- files and commands ---------------------------------------------------------------------------


@pytest.fixture
def example(tmp_path: Path) -> Path:
    file = tmp_path / "problem.yaml"
    file.write_text(EXAMPLE)
    return file


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(list(map(str, arguments))) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def list_ops(stage: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(op["op"], op["microbatch"]) for op in stage]


def test_a_plan_prints_its_order_and_reads_it_again(
    example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(capsys, "plan", example)
    order = found["microbatch_order"]
    assert sorted(order) == list(range(8)) != order
    for stage in found["stages"]:
        for kind in "FBW":
            assert [op["microbatch"] for op in stage if op["op"] == kind] == order
        for op in stage:
            assert op["end"] - op["start"] == pytest.approx(10 * COSTS[op["microbatch"]])

    file = tmp_path / "plan.json"
    file.write_text(json.dumps(found))
    assert load_plan(str(file)).microbatch_order == tuple(order)
    again = run(capsys, "simulate", file, example)
    for field in ("microbatch_order", "makespan", "lower_bound", "stages", "bubbles"):
        assert again[field] == found[field], field

    assert main(["plan", str(example), "--output", "csv", "--out", str(tmp_path / "p.csv")]) == 0
    assert (tmp_path / "p.csv").read_text().startswith(f"0F{order[0]},0F{order[1]}")
    imported = run(capsys, "simulate", tmp_path / "p.csv", example)
    assert imported["makespan"] == found["makespan"]
    assert imported["microbatch_order"] == order

    plain = tmp_path / "plain.yaml"
    plain.write_text(EXAMPLE.replace("microbatch_costs", "# microbatch_costs"))
    without = run(capsys, "simulate", file, plain)
    assert list_ops(without["stages"][0]) == list_ops(found["stages"][0])
    assert run(capsys, "plan", plain)["microbatch_order"] == list(range(8))


def test_an_order_that_does_not_fit_is_refused(
    example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(capsys, "plan", example)
    file, fixed = tmp_path / "plan.json", tmp_path / "fixed.yaml"
    fixed.write_text(EXAMPLE + "reorder: false\n")

    def refuse(problem: Path, **update: object) -> str:
        file.write_text(json.dumps(found | update))
        assert main(["simulate", str(file), str(problem)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "the problem has reorder: false" in refuse(fixed)
    assert "expected each microbatch from 0 to 7 once" in refuse(example, microbatch_order=[0, 0])
    assert "microbatch order" in refuse(example, microbatch_order=list(range(8)))
    assert "microbatch_order[0]: -1 is less than 0" in refuse(example, microbatch_order=[-1])


def test_several_stages_per_rank_print_and_read_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, planned = tmp_path / "v.yaml", tmp_path / "plan.json"
    four = EXAMPLE.replace("stages: [", f"stages: [{STAGE}, ").replace("{delay: 2}", "{}, {}")
    file.write_text(four + "ranks: 2\nplacement: v\n")
    found = run(capsys, "plan", file)
    assert found["microbatch_order"] != list(range(8))
    planned.write_text(json.dumps(found))
    again = run(capsys, "simulate", planned, file)
    assert (again["makespan"], again["order"]) == (found["makespan"], found["order"])


def test_pictures_name_the_microbatches_that_run() -> None:
    found = plan(parse_problem(EXAMPLE))
    drawn = Timeline.from_simulation(
        found.simulation, found.problem, microbatch_order=found.microbatch_order
    )
    for op in drawn.stages[0]:
        assert 1e3 * (op.end - op.start) == pytest.approx(10 * COSTS[op.microbatch])
    assert {message.microbatch for message in drawn.messages} == set(range(8))


def test_advice_repeats_and_divides_the_costs() -> None:
    problem = parse_problem(EXAMPLE)
    advice = compare_changes(problem)
    options = {option.change: option for option in advice.options}
    assert options["as it is"].makespan == plan(problem).makespan
    assert 1.5 < options["8 → 16, batch 2×"].makespan / options["as it is"].makespan < 2
    assert options["8 → 16 of 1/2 the size"].gain > 0
    rows = (COSTS, COSTS[::-1], COSTS)
    uneven = compare_changes(problem.model_copy(update={"microbatch_costs": rows}))
    assert any("microbatch_costs differ between the stages" in m for m in uneven.missing_options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("microbatch_costs: 3", "microbatch_costs: 3 is not a list of numbers"),
        ("microbatch_costs: [1, 2]", "microbatch_costs has 2 entries; microbatches is 8"),
        ("microbatch_costs: [1, 1, 1, 1, 1, 1, 1, -2]", "has -2 at [7]; expected a number from 0"),
        ("microbatch_costs: [[1], [1]]", "microbatch_costs has 2 rows; expected one for all"),
        ("reorder: 7", "reorder: 7 is invalid"),
        ("objective: period", "objective is period; microbatch_costs support only makespan"),
    ],
)
def test_bad_fields_are_one_line(text: str, message: str) -> None:
    name = text.split(":", maxsplit=1)[0]
    lines = [line for line in EXAMPLE.splitlines() if not line.startswith(name)]
    with pytest.raises(InputError) as caught:
        parse_problem("\n".join([*lines, text]))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_replay_of_uneven_microbatches_is_refused(
    example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"at_iteration": 1, "links": {}}\n')
    assert main(["replay", str(trace), str(example)]) == 2
    assert "replay supports only equal microbatches" in capsys.readouterr().err
