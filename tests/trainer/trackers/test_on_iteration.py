"""``on_iteration`` of a pipeline: its calls, and what an error there does."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from launch import Ranks, run_ranks
from torch.distributed.pipelining import PipelineStage
from trainer_jobs import Job, loss_fn, make_batch, make_plan, make_stage

from pipemorph_trainer import Options, Pipeline, TrainerContext
from pipemorph_trainer.agent.messages import NullControlClient
from pipemorph_trainer.agent.rank_plan import RankPlan, split_plan
from pipemorph_trainer.topology.mesh import join_process_group
from pipemorph_trainer.torch import AdaptiveSchedule
from pipemorph_trainer.trackers import FinishedIteration, PlanChange

JOB = Job(2, 4, iterations=5)


class Agent(NullControlClient):
    """Gives this rank a plan, as an agent does, once two iterations have begun."""

    def __init__(self, plan: RankPlan) -> None:
        self.plan: RankPlan | None = plan
        self.may = False

    def pop_newest_plan(self) -> RankPlan | None:
        plan = self.plan if self.may else None
        if plan is not None:
            self.plan = None
        return plan


def train(context: TrainerContext, fails: bool) -> tuple[list[FinishedIteration], list[float], Any]:
    module = make_stage(context.rank, JOB.stages, JOB.dtype)
    received: list[FinishedIteration] = []
    threads = set()

    def hear(finished: FinishedIteration) -> None:
        threads.add(threading.current_thread().name)
        received.append(finished)
        if fails:
            raise ValueError("no such run")

    plan = make_plan(JOB, 1, "zero-bubble")
    mine = split_plan(plan, context.coordinate().mesh)[context.rank]
    if context.rank == 0:
        mine = mine.model_copy(update={"reason": "link 0 is late", "promised": 0.25})
    agent = Agent(mine)
    losses = []
    with Pipeline(
        module,
        context=context,
        loss_fn=loss_fn,
        microbatches=JOB.microbatches,
        policy="1f1b",
        on_iteration=hear,
        options=Options(control=agent),
    ) as pipe:
        for iteration in range(JOB.iterations):
            agent.may = iteration >= 1
            x, y = make_batch(iteration, JOB.batch * JOB.microbatches)
            losses.append(float(pipe.step(x, target=y)))
        ran = pipe.plan.version
    return received, losses, (threads, ran)


@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.full), True])
def test_rank_0_is_called_for_every_iteration(fails: bool) -> None:
    (received, losses, (threads, ran)), (none, others, (no_threads, _)) = run_ranks(2, train, fails)
    assert (none, no_threads) == ([], set())
    assert threads == {"on_iteration"}
    assert [each.index for each in received] == list(range(JOB.iterations))
    # A float of 32 bits is what step() returns.
    assert [each.loss for each in received] == pytest.approx(losses, rel=1e-6) and losses == others
    assert all(each.seconds > 0 and 0 <= each.bubble_fraction <= 1 for each in received)
    assert {each.total for each in received} == {None}
    assert ran == received[-1].plan_version == 1 and received[0].plan_version == 0
    first = next(each for each in received if each.plan_version == 1)
    assert {each.index: each.change for each in received if each.change is not None} == {
        first.index: PlanChange(0, 1, "link 0 is late", 0.25)
    }


def refused(context: TrainerContext) -> str:
    # Only rank 0 is given it, as scripts do.
    given: Any = 3 if context.rank == 0 else None
    with pytest.raises(Exception, match="on_iteration is 3; expected a function") as raised:
        Pipeline(
            make_stage(context.rank, 2, torch.float32),
            context=context, loss_fn=loss_fn, microbatches=4, on_iteration=given,
        )  # fmt: skip
    return type(raised.value).__name__


def test_what_cannot_be_called_ends_all_ranks_at_the_start() -> None:
    assert run_ranks(2, refused) == ["InputError"] * 2


def adaptive(context: TrainerContext) -> tuple[list[FinishedIteration], list[float]]:
    join_process_group(context, torch.device("cpu"))
    torch.manual_seed(context.rank)
    part = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    stage = PipelineStage(part, context.rank, 2, torch.device("cpu"))
    received: list[FinishedIteration] = []
    means = []
    with AdaptiveSchedule(
        [stage], 2, torch.nn.functional.mse_loss, context=context, on_iteration=received.append
    ) as schedule:
        for step in range(3):
            losses: list[torch.Tensor] = []
            x = torch.full((4, 4), float(step))
            first = (x,) if context.rank == 0 else ()
            schedule.step(*first, target=torch.ones(4, 4), losses=losses)
            if losses:
                means.append(float(torch.stack(losses).mean()))
    return received, means


@pytest.mark.full
def test_an_adaptive_schedule_has_the_same_room() -> None:
    (received, _), (none, means) = run_ranks(2, adaptive)
    assert none == []
    assert [each.index for each in received] == [0, 1, 2]
    assert [each.loss for each in received] == pytest.approx(means, rel=1e-6)


def dies(context: TrainerContext) -> None:
    goes_on = threading.Event()

    def hear(finished: FinishedIteration) -> None:
        # Behind, as one that waits for a server.
        assert finished.index > 0 or goes_on.wait(60)
        print(f"got {finished.index}", flush=True)

    module = make_stage(context.rank, JOB.stages, JOB.dtype)
    with Pipeline(
        module, context=context, loss_fn=loss_fn, microbatches=JOB.microbatches, on_iteration=hear
    ) as pipe:
        x, y = make_batch(0, JOB.batch * JOB.microbatches)
        for _ in range(4):
            pipe.step(x, target=y)
        goes_on.set()
        raise RuntimeError("the script is wrong")


def test_what_was_reported_before_an_error_is_passed_on() -> None:
    zero, _ = Ranks(2, dies).wait()
    assert "the script is wrong" in zero.error
    assert "got 0\ngot 1\n" in zero.output
