"""Plans are cut into the parts that each rank runs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from drawn_plans import random_plan

from pipemorph.errors import InputError
from pipemorph.planning import Dispatch, Link, Plan, Problem, Route, Schedule, StageTimes, plan
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer.agent import frames, receive_windows
from pipemorph_trainer.agent.rank_plan import RankPlan, RankStage, split_plan


@pytest.mark.parametrize("dispatch", list(Dispatch))
def test_the_parts_of_a_plan_are_the_plan(dispatch: Dispatch) -> None:
    rng = random.Random(7)
    for _ in range(40):
        whole = random_plan(rng, dispatch)
        schedule, last = whole.schedule, whole.schedule.stage_count - 1
        parts = split_plan(whole, MeshShape(last + 1))
        windows = receive_windows.compute_windows(whole)
        assert len({part.digest for part in parts}) == 1
        for i, part in enumerate(parts):
            (mine,) = part.stages
            assert (part.version, part.dispatch) == (whole.version, whole.dispatch)
            assert part.microbatches == schedule.microbatches
            assert part.stage_count == last + 1
            assert part.orders[i] == schedule.stages[i]
            assert (mine.device_limit, mine.recompute) == (None, False)
            assert (mine.above is None, mine.below is None) == (i == 0, i == last)
            assert [end.link for end in part.links] == [k for k in (i - 1, i) if 0 <= k < last]
            for end in part.links:
                assert end.route is whole.routes[end.link]
                assert end.slack == whole.warmup[end.link] - whole.warmup[end.link + 1]
            if mine.below is not None:
                assert mine.below.window == windows[i]
                assert mine.below.after == receive_windows.count_sends_before_backward(whole, i)
            if mine.above is not None:
                assert mine.above.window == windows[i - 1]
                assert mine.above.after == receive_windows.count_sends_before_forward(whole, i)
            assert frames.decode_message(RankPlan, part.to_json()) == part


def healthy(stages: int, microbatches: int) -> Plan:
    op = StageTimes(forward=1, backward_input=1, backward_weight=1)
    links = (Link(delay=3), *(Link(),) * (stages - 2))
    problem = Problem(microbatches=microbatches, stages=(op,) * stages, links=links)
    return plan(problem).to_plan(1, (Route.DIRECT,) * (stages - 1), Dispatch.STATIC)


def test_the_digest_names_the_whole_plan() -> None:
    """The digest covers what a rank's own part does not contain."""
    mesh, one = MeshShape(4), healthy(4, 6)
    other = replace(one, in_flight_limits=(None, None, None, 6))
    mine, theirs = split_plan(one, mesh)[0], split_plan(other, mesh)[0]
    assert mine.digest != theirs.digest
    assert mine.model_copy(update={"digest": theirs.digest}) == theirs


def test_a_change_of_a_large_job_takes_at_most_20_megabytes() -> None:
    """64 stages of 160 replicas, 128 microbatches: all that leaves the agent's host."""
    sent = sum(
        len(frames.add_length_prefix(part.to_json()))
        for part in split_plan(healthy(64, 128), MeshShape(64, 160))
    )
    assert 160 * sent <= 20e6, f"{160 * sent / 1e6:.1f} MB"


@pytest.mark.parametrize(
    ("ops", "used"),
    [
        ("FFFBBB", (3, 1)),
        ("FFBFBB", (2, 1)),
        # Gradients are needed until W.
        ("FFIFIWIWW", (3, 2)),
        ("FFFIIIWWW", (3, 3)),
        ("FIWFB", (1, 1)),
        ("", (0, 0)),
    ],
)
def test_how_many_microbatches_ops_use_at_one_time(ops: str, used: tuple[int, int]) -> None:
    plan = RankPlan(
        version=0, digest="0" * 8, microbatches=3, stage_count=1, ops=ops,
        stages=(RankStage(stage=0),),
    )  # fmt: skip
    assert plan.count_peak_activations(0) == used


def test_a_plan_that_the_ranks_cannot_run_is_not_cut() -> None:
    one, mesh = healthy(3, 4), MeshShape(3)
    order = one.schedule.stages[1]
    twice = Schedule(4, (one.schedule.stages[0], (*order, order[-1]), one.schedule.stages[2]))
    for wrong, words in (
        (healthy(2, 4), "plan 1 has 2 stages; this job runs 3"),
        (replace(one, routes=(Route.DIRECT,)), "plan 1 has 1 routes; expected 2"),
        (replace(one, recompute=(False,)), "has recompute for 1 stages; expected 3"),
        (replace(one, schedule=twice), "stage 1"),
        (replace(one, in_flight_limits=(1, 1, 1)), "stage 0"),
    ):
        with pytest.raises(InputError, match=words):
            split_plan(wrong, mesh)
    with pytest.raises(InputError, match="plan 1 has dispatch guided"):
        split_plan(replace(one, dispatch=Dispatch.GUIDED), MeshShape(3, tensor=2))
