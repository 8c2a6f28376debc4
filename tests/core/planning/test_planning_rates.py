"""Narrow links: a message occupies a link for its bytes over the rate, and then travels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planning_reference import shortest_of_all_orders
from schedule_text import schedule_of

from pipemorph.cli import main
from pipemorph.planning import (
    Link,
    Problem,
    StageTimes,
    compute_lower_bound,
    plan,
    predict,
    simulate,
)

NARROW: dict[str, Any] = {"delay": 1, "gbps": 2.5, "message_bytes": 16_000_000}
"""Link with 51.2 ms per message."""
STAGE = {"forward": 11, "backward_input": 10, "backward_weight": 4}


def problem(stages: int = 8, microbatches: int = 24, slow: int = 3, **link: Any) -> Problem:
    links: list[dict[str, Any]] = [{"delay": 1}] * (stages - 1)
    links[slow] = NARROW | link
    return Problem.model_validate(
        {"microbatches": microbatches, "stages": [STAGE] * stages, "links": links}
    )


def test_messages_leave_one_after_another() -> None:
    one = StageTimes(forward=1, backward_input=1, backward_weight=1)
    link = Link(delay=2, transfer=5)
    both = Problem(microbatches=2, stages=(one, one), links=(link,))
    schedule = schedule_of(2, ["F0 F1 B0 W0 B1 W1", "F0 B0 W0 F1 B1 W1"])
    ran = simulate(schedule, both)
    starts = {(op.kind.value, op.microbatch): op.start for op in ran.stages[1]}
    assert starts["F", 0] == 1 + 5 + 2
    assert starts["F", 1] == 1 + 5 + 5 + 2, "the second waits for the first, not for its arrival"
    below = {(op.kind.value, op.microbatch): op.start for op in ran.stages[0]}
    assert below["B", 0] == starts["B", 0] + 1 + 5 + 2, "directions do not wait for each other"
    shared = both.model_copy(
        update={"links": (link.model_copy(update={"queues": 8, "half_duplex": True}),)}
    )
    assert simulate(schedule, shared).makespan > ran.makespan, "half duplex: they do"


@pytest.mark.parametrize("queues", [None, 1, 8])
@pytest.mark.parametrize("slow", [0, 3, 6])
def test_a_plan_for_a_narrow_link_is_near_the_bound(slow: int, queues: int | None) -> None:
    narrow = problem(slow=slow, queues=queues)
    assert narrow.links[slow].wire_time == pytest.approx(52.2)
    found = plan(narrow)
    assert found.makespan <= 1.03 * compute_lower_bound(narrow)
    assert found.makespan > 24 * 51.2, "no message waits for another"
    as_delay = plan(problem(slow=slow, queues=8, delay=52.2, gbps=None, message_bytes=None))
    assert found.makespan <= predict(as_delay.schedule, narrow)


@pytest.mark.parametrize("rate", [2.5, 5.0, 8.0])
def test_the_search_is_near_the_optimum(rate: float) -> None:
    narrow = problem(2, 3, 0, gbps=rate)
    shortest = shortest_of_all_orders(narrow)
    assert compute_lower_bound(narrow) <= shortest * (1 + 1e-9)
    assert shortest <= plan(narrow).makespan * (1 + 1e-9) <= 1.03 * shortest


def test_in_a_problem_file(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "problem.json"
    content = {"microbatches": 4, "stages": [STAGE] * 2, "links": [NARROW]}
    file.write_text(json.dumps(content))
    assert main(["plan", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["makespan"] > 4 * 51.2
    planned = tmp_path / "plan.json"
    planned.write_text(json.dumps(found))
    assert main(["simulate", str(planned), str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == found["makespan"]
    for link, words in (
        ({"gbps": 2.5}, "links[0]: {'gbps': 2.5} has gbps without message_bytes; set both"),
        ({"gbps": 0, "message_bytes": 1}, "links[0].gbps: 0 "),
    ):
        file.write_text(json.dumps(content | {"links": [link]}))
        assert main(["plan", str(file)]) == 2
        assert words in capsys.readouterr().err
