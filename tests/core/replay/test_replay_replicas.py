"""The control loop with data-parallel replicas: links and reductions of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipemorph.cli import main
from pipemorph.errors import InputError
from pipemorph.planning import Dispatch, Link, Problem, StageTimes
from pipemorph.replay.adaptive_trainer import AdaptiveTrainer
from pipemorph.replay.baselines import replay_trace
from pipemorph.replay.link_trace import parse_trace
from pipemorph.replay.simulated_links import SimulatedLinks, build_job_spec, convert_to_seconds

TIMES = StageTimes(forward=10, backward_input=10.5, backward_weight=5.5, in_flight_limit=6)
PROBLEM = Problem(microbatches=12, stages=(TIMES,) * 4, links=(Link(delay=1),) * 3)
FAULTS = (
    '{"at_iteration": 12, "links": {"1": {"delay_ms": 40}, "2@1": {"delay_ms": 40}}}\n'
    '{"at_iteration": 40, "links": {}}'
)
LATE = '{"at_iteration": 12, "links": {}, "reductions": {"2": {"delay_ms": 90}}}'


def test_one_plan_is_made_for_the_slow_links_of_all_replicas() -> None:
    found = replay_trace(PROBLEM, parse_trace(FAULTS, 3, replicas=2), replicas=2)
    change = found.changes[0]
    assert change.iteration == 13
    assert "link 1 of replica 0 is slow" in change.reason
    assert "link 2 of replica 1 is slow" in change.reason
    # No pipeline has both of them, as predicted.
    assert change.promised is not None and change.measured is not None
    assert change.measured >= change.promised - 0.02
    share = found.compute_oracle_share("adaptive")
    assert share is not None and share > 0.7
    # The iteration is that of the slowest replica, so that one replica's fault costs no less.
    alone = '{"at_iteration": 12, "links": {"2@1": {"delay_ms": 40}}}\n' + FAULTS.splitlines()[1]
    one = replay_trace(PROBLEM, parse_trace(alone, 3, replicas=2), replicas=2)
    assert one.seconds["static"] <= found.seconds["static"]
    same = replay_trace(PROBLEM, parse_trace(alone.replace("@1", ""), 3))
    for name in ("static", "adaptive", "oracle"):
        assert one.seconds[name] == pytest.approx(same.seconds[name], rel=0.005), name


def test_a_late_reduction_is_measured_and_costs_all_replicas() -> None:
    trace = parse_trace(LATE, 3, replicas=2)
    problem = convert_to_seconds(PROBLEM)
    links = [SimulatedLinks(problem, trace.select_replica(replica)) for replica in range(2)]
    trainer = AdaptiveTrainer(build_job_spec(PROBLEM, Dispatch.STATIC, 2), links, "exact", 0)
    took = [trainer.step().seconds for _ in range(30)]
    assert took[20] > took[5] + 0.06, "most of 90 ms follows the last op of stage 2"
    (group,) = [each for each in trainer.controller.get_job_view(0.0).reductions if each.stage == 2]
    assert group.exposed == pytest.approx(0.09, rel=0.1)


def test_a_trace_names_replicas_and_stages_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, replicas, words in (
        (FAULTS, 1, "there is no replica 1, as of link 2@1; the job has 1, see --replicas"),
        (LATE, 1, "stage 2 reduces no gradients; the problem has 4 stages of 1 replicas"),
        (LATE.replace('"2"', '"4"'), 2, "stage 4 reduces no gradients"),
    ):
        with pytest.raises(InputError, match=words):
            parse_trace(text, 3, replicas=replicas)
    period = PROBLEM.model_copy(update={"objective": "period"})
    with pytest.raises(InputError, match="a replay of replicas"):
        replay_trace(period, parse_trace(FAULTS, 3, replicas=2), replicas=2)
    (tmp_path / "trace").write_text(FAULTS)
    (tmp_path / "problem").write_text(PROBLEM.model_dump_json())
    command = ["replay", str(tmp_path / "trace"), str(tmp_path / "problem")]
    assert main([*command, "--replicas", "2", "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["contenders"]["adaptive"]["seconds"] > 0
