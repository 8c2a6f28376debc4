"""Evaluation: the loss and the outputs of one process, and training as if there had been none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from gate import same_bits
from launch import Ranks, run_ranks
from torch import Tensor
from trainer_jobs import Job, Stage, loss_fn, make_batch, make_plan, make_stage

from pipemorph.errors import InputError
from pipemorph.planning import Route
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer import EmulatedStage, Options, Pipeline, TrainerContext
from pipemorph_trainer.agent.messages import NullControlClient, RankTelemetry
from pipemorph_trainer.errors import BatchError

N = 4


class Call(NamedTuple):
    """A call of the loop. ``batch``: samples per microbatch. ``bad``: a rank whose batch does not
    fit; -1: of none."""

    kind: str
    batch: int = 2
    bad: int = -1


STEP = Call("step")
CALLS = (
    Call("evaluate"),
    Call("evaluate", batch=3),
    STEP,
    Call("evaluate"),
    STEP,
    Call("evaluate", batch=1),
    Call("evaluate", bad=0),
    Call("evaluate", bad=2),
    STEP,
    Call("outputs"),
    STEP,
    STEP,
    Call("evaluate", batch=5),
)


class RecordingClient(NullControlClient):
    """Reports of a rank while it evaluates, and the iterations that it finishes."""

    def __init__(self) -> None:
        self.evaluating = False
        self.reports: list[RankTelemetry] = []
        self.finished: list[int] = []

    def publish(self, telemetry: RankTelemetry) -> None:
        report = telemetry.report
        if report is not None and report.finished_iteration is not None:
            self.finished.append(report.finished_iteration.index)
        if self.evaluating and (telemetry.links or telemetry.profile):
            self.reports.append(telemetry)


@dataclass
class Found:
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)


def batch_of(number: int, call: Call, replica: int = 0) -> tuple[Tensor, Tensor]:
    return make_batch(100 * replica + number, call.batch * N)


class Moded(Stage):
    """Module whose output depends on whether it is in training mode."""

    def forward(self, *args: Any) -> Any:
        found = super().forward(*args)
        if self.training:
            return found
        return found * 0.5 if self.last else (found[0] * 2, *found[1:])


def made(stage: int, stages: int) -> Stage:
    module = make_stage(stage, stages, torch.float32)
    module.__class__ = Moded
    return module


def loop(
    context: TrainerContext, stages: int, calls: Sequence[Call], options: Any, switches: bool
) -> Found:
    place = context.coordinate(stages)
    stage, replica = place.stage, place.replica
    module = made(stage, stages)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found, client = Found(), RecordingClient()
    with Pipeline(
        module, context=context, loss_fn=loss_fn, microbatches=N, stages=stages,
        options=Options(control=client, dispatch=options.get("dispatch")), deadline_seconds=30.0,
        policy=options.get("policy"),
    ) as pipe:  # fmt: skip
        for number, call in enumerate(calls):
            if switches and call.kind == "step" and pipe.iteration == 1:
                routes = (Route.DELEGATED,) * (stages - 1)
                pipe.install_plan(make_plan(Job(stages, N), 1, "1f1b", routes=routes))
            tokens, target = batch_of(number, call, replica)
            if call.bad == context.rank:
                tokens, target = tokens.float(), target.float()
            grads = [p.grad for p in module.parameters()]
            if call.kind == "step":
                loss, outputs = pipe.step(tokens, target=target, return_outputs=True)
                optimizer.step()
                optimizer.zero_grad()
            else:
                module.eval()
                client.evaluating = True
                try:
                    if call.kind == "outputs":
                        loss, outputs = pipe.evaluate(tokens, return_outputs=True)
                    else:
                        loss, outputs = pipe.evaluate(tokens, target=target), None
                except BatchError as error:
                    found.refused.append(str(error))
                    loss = outputs = None
                client.evaluating = False
                module.train()
                assert all(p.grad is g for p, g in zip(module.parameters(), grads, strict=True))
            found.losses.append(loss)
            found.outputs.append(outputs)
            found.versions.add(pipe.plan.version)
    assert not client.reports
    found.parameters = {n: p.detach().clone() for n, p in module.named_parameters()}
    found.finished = client.finished
    return found


def one_process(stages: int, calls: Sequence[Call], replicas: int) -> Found:
    """Run the same loop in one process, microbatch by microbatch. Outputs: per replica."""
    torch.set_num_threads(1)
    modules = [made(stage, stages) for stage in range(stages)]
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    found = Found()
    for number, call in enumerate(calls):
        training = call.kind == "step"
        losses, outputs, grads = [], [], []
        for replica in range(replicas):
            total, made_here = 0.0, []
            for x, y in zip(*(t.chunk(N) for t in batch_of(number, call, replica)), strict=True):
                value: Any = (x,)
                with torch.set_grad_enabled(training):
                    for module in modules:
                        module.train(training)
                        value = module(*value)
                    loss = loss_fn(value, y)
                made_here.append(value.detach())
                total += float(loss.detach())
                if training:
                    (loss / N).backward()
            losses.append(total / N)
            outputs.append(torch.cat(made_here))
            grads.append([p.grad for p in parameters])
            optimizer.zero_grad()
        found.losses.append(torch.tensor(sum(losses) / replicas, dtype=torch.float32))
        found.outputs.append(outputs)
        if training:
            for parameter, *given in zip(parameters, *grads, strict=True):
                mine = [g for g in given if g is not None]
                parameter.grad = sum(mine[1:], mine[0]) / replicas if mine else None
            optimizer.step()
            optimizer.zero_grad()
    for stage, module in enumerate(modules):
        found.parameters |= {f"{stage}.{n}": p.detach() for n, p in module.named_parameters()}
    return found


@pytest.mark.parametrize(
    ("world", "options", "switches"),
    [
        pytest.param(3, {"policy": "1f1b", "route": "direct"}, False, marks=pytest.mark.full),
        pytest.param(
            3, {"policy": "pipemorph", "dispatch": "guided"}, True, marks=pytest.mark.needs_engine
        ),
        pytest.param(4, {"policy": "gpipe", "route": "direct"}, False, marks=pytest.mark.full),
    ],
    ids=["direct", "delegated", "replicas"],
)
def test_an_evaluation_is_that_of_one_process(
    world: int, options: dict[str, Any], switches: bool
) -> None:
    stages = 3 if world == 3 else 2
    results = run_ranks(world, loop, stages, CALLS, options, switches)
    expected = one_process(stages, CALLS, world // stages)
    for rank, found in enumerate(results):
        place = MeshShape(stages, world // stages).find_coordinate(rank)
        stage, replica = place.stage, place.replica
        for number, call in enumerate(CALLS):
            where = f"rank {rank}: call {number}"
            if call.bad >= 0:
                assert found.losses[number] is None
                continue
            if call.kind == "outputs":
                assert found.losses[number].isnan()
            else:
                same_bits(found.losses[number], expected.losses[number], where)
            if call.kind != "evaluate" and stage == stages - 1:
                same_bits(found.outputs[number], expected.outputs[number][replica], where)
            else:
                assert found.outputs[number] is None
        first, second = found.refused
        assert "evaluate() before iteration 2 is refused on all ranks: rank 0 " in first
        assert "evaluate() before iteration 2 is refused on all ranks: rank 2 " in second
        for name, value in found.parameters.items():
            same_bits(value, expected.parameters[f"{stage}.{name}"], f"rank {rank}: {name}")
        assert found.versions == ({0, 1} if switches else {0})
        assert found.finished == (list(range(5)) if rank == 0 else [])


def later(context: TrainerContext) -> str:
    """An error in a later microbatch of an evaluation, and calls in another order."""
    if context.rank == 0:
        failing = iter((False, False, True, False, False, False))
    module = made(context.rank, 2)

    def hook(*_: Any) -> None:
        if context.rank == 0 and next(failing, False):
            raise ValueError("one sample is broken")

    module.register_forward_pre_hook(hook)
    tokens, target = make_batch(0, 2 * N)
    with Pipeline(
        module, context=context, loss_fn=loss_fn, microbatches=N, deadline_seconds=30.0
    ) as pipe:
        with pytest.raises(BatchError, match="one sample is broken") as refused:
            pipe.evaluate(tokens, target=target)
        assert "rank 0 (stage 0): the stage raised ValueError" in str(refused.value)
        with torch.no_grad():
            loss = pipe.evaluate(tokens, target=target)
        with pytest.raises(InputError, match="call it outside, or call evaluate"), torch.no_grad():
            pipe.step(tokens, target=target)
        assert loss == pipe.evaluate(tokens, target=target)
        if context.rank == 0:
            pipe.step(tokens, target=target)
        else:
            pipe.evaluate(tokens, target=target)
    return "not reached"


def test_a_sample_may_break_and_calls_in_another_order_are_reported() -> None:
    results = Ranks(2, later).wait()
    error = (
        "PipelineError: rank 1 (stage 1) begins the evaluation before iteration 0, "
        "stage 0 iteration 0; every rank must call step() and evaluate() in the same order"
    )
    assert error in results[1].error


def emulated(context: TrainerContext, evaluations: int) -> list[float]:
    stage = EmulatedStage(0.001, 0.001, 0.001, 1024)
    losses = []
    with Pipeline(stage, context=context, microbatches=N) as pipe:
        for _ in range(3):
            seen = {float(pipe.evaluate()) for _ in range(evaluations)}
            assert len(seen) == bool(evaluations)
            losses.append(float(pipe.step()))
    return losses


@pytest.mark.full
def test_an_emulated_stage_evaluates() -> None:
    assert run_ranks(2, emulated, 2) == run_ranks(2, emulated, 0)
