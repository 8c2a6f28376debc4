"""Replicas with unequal numbers of microbatches train as with equal ones, on the same samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from torch import nn
from trainer_jobs import loss_fn, make_batch, make_stage, plan_of, plan_with_shares

from pipemorph.errors import InputError
from pipemorph.planning import Plan
from pipemorph.protocol import PlanMessage
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer import (
    BatchError,
    Checkpoint,
    Microbatch,
    Options,
    Pipeline,
    TrainerContext,
)
from pipemorph_trainer.agent.rank_plan import split_plan
from pipemorph_trainer.schedule.microbatch_source import (
    MicrobatchPosition,
    draw_microbatches,
    explain_no_rebalance,
)
from pipemorph_trainer.sync.fingerprints import describe_tensors

STAGES, REPLICAS, EACH = 2, 2, 4
ROWS = 2
IN_ALL = REPLICAS * EACH
TOLERANCE = 1e-5
"""Largest relative difference of float32 losses and gradients: only the order of sums differs."""


def train(
    context: TrainerContext, folder: str, first: Plan | None, iterations: int, *, switch: bool
) -> dict[str, Any]:
    """Train with a function of the number as the source. ``switch``: to other shares and back, with
    microbatches in the order of the planner, by their costs."""
    place = context.coordinate(STAGES)
    module = make_stage(place.stage, STAGES, torch.float32)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found: dict[str, Any] = {
        "drawn": [], "losses": [], "versions": [], "grads": [], "ordered": False
    }  # fmt: skip

    def source(number: int) -> Microbatch:
        found["drawn"].append((len(found["losses"]), number))
        tokens, target = make_batch(number, ROWS)
        # The last stage returns a sum, and the weight is the number of tokens.
        cost = 1.0 + number % 3 if switch else None
        return Microbatch((tokens,), {}, target, weight=target.numel(), cost=cost)

    def summed_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_fn(output, target) * target.numel()

    with Pipeline(
        module, context=context, loss_fn=summed_loss, microbatches=EACH, stages=STAGES, plan=first,
        optimizer=optimizer,
        options=Options(rebalance=True, reorder="sums" if switch else "bits"),
        checkpoint=Checkpoint(directory=folder, every=1000) if folder else None,
    ) as pipe:  # fmt: skip
        found["start"] = pipe.start_iteration, pipe.microbatches_drawn
        for iteration in range(pipe.start_iteration, pipe.start_iteration + iterations):
            if switch and iteration == 1:
                pipe.install_plan(plan_with_shares(1, 7, version=3))
            if switch and iteration == 5:
                pipe.install_plan(plan_with_shares(6, 2, version=4))
            found["losses"].append(pipe.step(microbatches=source))
            found["versions"].append(pipe.plan.version)
            found["ordered"] |= bool(pipe.microbatch_order)
            found["grads"].append(
                [p.grad.clone() for p in module.parameters() if p.grad is not None]
            )
            optimizer.step()
            optimizer.zero_grad()
        if folder:
            pipe.save()
        found["end"] = pipe.microbatches_drawn
    found["parameters"] = [p.detach().clone() for p in module.parameters()]
    return found


def train_in_parts(context: TrainerContext, folder: str) -> list[dict[str, Any]]:
    """Train with shares that change; go on from the checkpoint; and twice with equal decisions."""
    mine = f"{folder}/checkpoints"
    unequal = plan_with_shares(3, 5)
    return [
        train(context, mine, None, 9, switch=True),
        train(context, mine, None, 2, switch=False),
        train(context, "", unequal, 2, switch=False),
        train(context, "", unequal, 2, switch=False),
    ]


def reference(iterations: int) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Train in one process with the mean over all microbatches. Returns losses and parameters."""
    modules = [make_stage(i, STAGES, torch.float32) for i in range(STAGES)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in modules]
    losses = []
    for iteration in range(iterations):
        total = torch.zeros(())
        for number in range(iteration * IN_ALL, (iteration + 1) * IN_ALL):
            tokens, target = make_batch(number, ROWS)
            loss = loss_fn(modules[1](*modules[0](tokens)), target) / IN_ALL
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        losses.append(total)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses, [[p.detach() for p in m.parameters()] for m in modules]


def test_losses_are_those_of_equal_shares_and_each_microbatch_is_drawn_once(
    tmp_path: Path,
) -> None:
    ranks = run_ranks(STAGES * REPLICAS, train_in_parts, str(tmp_path))
    mesh = MeshShape(STAGES, replicas=REPLICAS)
    expected, parameters = reference(11)
    first = [parts[0] for parts in ranks]
    # All ranks changed the plan in the same iteration.
    assert len({tuple(each["versions"]) for each in first}) == 1
    assert set(first[0]["versions"]) == {0, 3, 4}
    assert all(each["ordered"] for each in first)
    losses = [*first[0]["losses"], *ranks[0][1]["losses"]]
    torch.testing.assert_close(losses, expected, rtol=TOLERANCE, atol=0)
    for rank, parts in enumerate(ranks):
        stage = mesh.find_coordinate(rank).stage
        torch.testing.assert_close(
            parts[1]["parameters"], parameters[stage], rtol=TOLERANCE, atol=TOLERANCE
        )
        # To the bit between runs with the same decisions.
        for name in ("losses", "grads", "parameters"):
            torch.testing.assert_close(parts[2][name], parts[3][name], rtol=0, atol=0)
    # Each microbatch of the run was drawn once per stage, also over the resume.
    drawn: dict[int, list[int]] = {0: [], 1: []}
    for rank, (before, after, *_) in enumerate(ranks):
        place = mesh.find_coordinate(rank)
        numbers = [number for _, number in (*before["drawn"], *after["drawn"])]
        drawn[place.stage] += numbers
        shares = {0: (4, 4), 3: (1, 7), 4: (6, 2)}
        per_iteration = [
            sum(at == iteration for at, _ in before["drawn"]) for iteration in range(9)
        ]
        assert per_iteration == [shares[v][place.replica] for v in before["versions"]]
        assert after["start"] == (9, before["end"])
        assert before["end"] == len(before["drawn"])
    assert sorted(drawn[0]) == sorted(drawn[1]) == list(range(11 * IN_ALL))


def refuse(context: TrainerContext) -> list[str]:
    place = context.coordinate(STAGES)
    module = make_stage(place.stage, STAGES, torch.float32)
    found = []
    tokens, target = make_batch(0, ROWS * EACH)
    ends: Iterator[Any] = iter([make_batch(k, ROWS) for k in range(EACH - place.replica)])
    with Pipeline(
        module, context=context, loss_fn=loss_fn, microbatches=EACH, stages=STAGES,
        options=Options(rebalance=True),
    ) as pipe:  # fmt: skip
        for call in (
            lambda: pipe.step(tokens, target=target),
            lambda: pipe.step(microbatches=ends),
            lambda: pipe.step(tokens, microbatches=ends),
            lambda: pipe.step(microbatches=[]),  # type: ignore[arg-type]
        ):
            try:
                call()
            except (BatchError, InputError) as error:
                found.append(str(error))
        pipe.step(microbatches=lambda number: make_batch(number, ROWS))
    return found


def test_a_whole_batch_and_a_source_that_ends_are_refused_on_all_ranks() -> None:
    for whole, ended, both, none in run_ranks(STAGES * REPLICAS, refuse):
        assert "rebalance needs step(microbatches=SOURCE)" in whole
        assert "the iterator of microbatches ended after 3 of 4" in ended
        assert "got microbatches=, and a batch" in both
        assert "microbatches is a list; expected an iterator" in none


def test_a_message_carries_shares_and_ranks_get_the_plan_of_their_replica() -> None:
    plan = plan_with_shares(1, 7, version=5)
    sent = PlanMessage.model_validate_json(PlanMessage.from_plan(plan).to_json())
    assert sent.to_plan() == plan
    assert "shares" not in PlanMessage.from_plan(plan_of("pipemorph", 2, 4)).to_json().decode()
    mesh = MeshShape(STAGES, replicas=REPLICAS)
    few, many = (split_plan(plan, mesh, [1], replica=replica)[0] for replica in range(2))
    assert (few.microbatches, many.microbatches) == (1, 7)
    assert few.digest == many.digest
    assert few.digest != split_plan(plan_with_shares(7, 1, version=5), mesh)[0].digest
    for wrong, why in (
        (
            replace(plan, shares=(1, 6)),
            r"has shares \[1, 6\]; expected 2 numbers above 0 whose sum",
        ),
        (replace(plan, shares=(8, 0)), "expected 2 numbers above 0"),
        (replace(plan, resized=plan.resized[:1]), "gives replica 1 7 microbatches, and has no"),
    ):
        with pytest.raises(InputError, match=why):
            split_plan(wrong, mesh)


@pytest.mark.parametrize(
    ("mesh", "module", "why"),
    [
        (MeshShape(2), nn.Linear(1, 1), "one replica"),
        (MeshShape(2, replicas=2, shard=2), nn.Linear(1, 1), "shard is 2"),
        (MeshShape(2, replicas=2), nn.Sequential(nn.SyncBatchNorm(1)), "'0' is a SyncBatchNorm"),
        (MeshShape(2, replicas=2), nn.Sequential(nn.BatchNorm1d(1)), "running statistics"),
        (MeshShape(2, replicas=2), nn.Linear(1, 1), ""),
    ],
)
def test_where_replicas_need_equal_numbers(mesh: MeshShape, module: nn.Module, why: str) -> None:
    place = mesh.find_coordinate(0)
    found = explain_no_rebalance(place, [module], describe_tensors(module, place))
    assert why in found if why else not found


def test_the_position_of_a_run() -> None:
    position = MicrobatchPosition(2)
    plan = split_plan(plan_with_shares(1, 7), MeshShape(STAGES, replicas=2), [0])[0]
    assert [position.find_first_number(plan, r) for r in range(2)] == [0, 1]
    position.advance(plan)
    assert (position.total, position.drawn) == (8, [1, 7])
    other = MicrobatchPosition(3)
    other.load_state_dict(position.state_dict())
    assert (other.total, other.drawn) == (8, [0, 0, 0])
    with pytest.raises(InputError, match="some microbatches have a weight"):
        draw_microbatches(iter([Microbatch(weight=1), Microbatch()]), [2], 0, 0)
    with pytest.raises(InputError, match="yields a int"):
        draw_microbatches(lambda number: number, [1], 0, 0)
