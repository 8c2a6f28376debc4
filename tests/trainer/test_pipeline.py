"""The public face: shapes, losses, clipping, and errors a user can act on."""

from __future__ import annotations

import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from gate import same_bits
from launch import Ranks, run_ranks
from served import torchrun
from split_support import Lambda
from torch import Tensor, nn
from trainer_jobs import Job, loss_fn, make_batch, make_stage, reference

from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer import Options, Pipeline, TrainerContext, startup
from pipemorph_trainer.startup import StartupInfo


def clipped(context: TrainerContext, job: Job) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    module = make_stage(context.rank, job.stages, job.dtype)
    with Pipeline(module, context=context, loss_fn=loss_fn, microbatches=job.microbatches) as pipe:
        tokens, target = make_batch(0, job.batch * job.microbatches)
        # Only stage 0 needs the input and only the last stage the target.
        first, last = context.rank == 0, context.rank == job.stages - 1
        loss = pipe.step(*((tokens,) if first else ()), target=target if last else None)
        norm = pipe.clip_grad_norm_(0.5)
    return loss, norm, {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def test_loss_and_norm_are_on_every_rank_and_clipping_is_global() -> None:
    job = Job(3, 4, iterations=1)
    results = run_ranks(3, clipped, job)
    expected = reference(job)
    grads = [g for record in expected for g in record.grads[0].values()]
    whole = torch.nn.utils.get_total_norm(grads)
    assert whole > 0.5, "nothing would be clipped"
    for stage, (loss, norm, mine) in enumerate(results):
        same_bits(loss, expected[stage].losses[0])
        assert loss.shape == () and loss.dtype is torch.float32
        same_bits(norm, results[0][1])
        torch.testing.assert_close(norm, whole)
        for name, grad in mine.items():
            torch.testing.assert_close(grad, expected[stage].grads[0][name] * (0.5 / whole))


def scale() -> nn.Module:
    """Scale any number of float and integer tensors; changes no shape."""

    def forward(m: Any, *tensors: Tensor) -> Any:
        out = tuple(t * m.weight if t.is_floating_point() else t for t in tensors)
        return out if len(out) > 1 else out[0]

    return Lambda(forward, weight=nn.Parameter(torch.tensor(1.5)))


def reshaping(context: TrainerContext, route: str) -> list[float]:
    losses = []
    with Pipeline(
        scale(),
        context=context,
        loss_fn=lambda output, target: (output[0].sum() + output[1].sum() * 0) / target.sum(),
        microbatches=2,
        options=Options(route=route),  # type: ignore[arg-type]
    ) as pipe:
        for size in (3, 3, 5, 70_000, 3):
            x = torch.ones(4, size)
            mask = torch.ones(4, dtype=torch.bool)
            losses.append(float(pipe.step(x, mask, target=torch.ones(4))))
    return losses


@pytest.mark.parametrize("route", [pytest.param("direct", marks=pytest.mark.full), "delegated"])
def test_shapes_may_change_between_steps(route: str) -> None:
    for losses in run_ranks(3, reshaping, route):
        assert losses == pytest.approx([1.5**3 * n for n in (3, 3, 5, 70_000, 3)])


def masked(m: Any, x: Tensor, *, mask: Tensor, factor: float = 1.0) -> Tensor:
    """Takes the inputs of every stage by name, on each rank; the first its own, too."""
    return x * m.weight * mask * factor


def by_name(context: TrainerContext) -> tuple[list[float], float]:
    first, last = context.rank == 0, context.rank == context.world_size - 1
    module: Any = Lambda(masked, weight=nn.Parameter(torch.tensor(2.0)))
    losses = []
    with Pipeline(
        module, context=context, loss_fn=lambda o, t: (o - t).sum(), microbatches=2
    ) as pipe:
        for size in (3, 5):
            mask = torch.tensor([1.0, 0.0, 1.0, 1.0]).reshape(4, 1).expand(4, size)
            named = {"mask": mask} if last else {"mask": mask, "factor": 3.0}
            if first:
                named["x"] = torch.ones(4, size)
            losses.append(float(pipe.step(target=torch.zeros(4, size), **named)))
    assert module.weight.grad is not None
    return losses, float(module.weight.grad)


def test_keyword_arguments_go_to_the_stage_of_their_rank() -> None:
    # 2³ · 3² per element that no mask hides: one of two, then two of two, rows a microbatch.
    expected = [72 * (1 + 2) * size / 2 for size in (3, 5)]
    for losses, grad in run_ranks(3, by_name):
        assert losses == pytest.approx(expected)
        assert grad == pytest.approx(sum(expected) / 2)


def uneven(context: TrainerContext) -> dict[str, list[float] | None]:
    """A stage has a parameter that only replica 1 uses, and one that none uses."""
    second = context.coordinate(2).replica == 1
    names = ("always", "second", "never")
    module = Lambda(
        lambda m, x: x * m.always * (m.second if second else 1),
        **{name: nn.Parameter(torch.ones(2)) for name in names},
    )
    with Pipeline(
        module, context=context, loss_fn=lambda o, t: o.sum(), microbatches=2, stages=2
    ) as pipe:
        pipe.step(torch.ones(4, 2), target=torch.zeros(4))
    return {n: None if p.grad is None else p.grad.tolist() for n, p in module.named_parameters()}


def test_replicas_may_use_different_parameters() -> None:
    for grads in run_ranks(4, uneven):
        # The mean over two replicas, of which one made 2 and the other nothing.
        assert grads == {"always": [2.0, 2.0], "second": [1.0, 1.0], "never": None}


def growing(context: TrainerContext) -> None:
    """Rank 0 breaks the rule that all microbatches have one shape."""
    runs = count(1)
    grows = Lambda(
        lambda m, x: (x * m.weight).repeat(1, 1 + next(runs) // 30),
        weight=nn.Parameter(torch.ones(())),
    )
    module = grows if context.rank == 0 else scale()
    with Pipeline(module, context=context, loss_fn=lambda o, t: o.sum(), microbatches=32) as pipe:
        pipe.step(torch.ones(32, 3), target=torch.ones(32))


def test_shapes_that_differ_between_microbatches_are_named() -> None:
    results = Ranks(2, growing).wait()
    assert "outputs are float32[1, 6]" in results[0].error
    assert "expected float32[1, 3]" in results[0].error
    assert results[1].exitcode == 1


def joined(context: TrainerContext, through: Path) -> bool:
    """True if rank 1, which is slow in the middle of it, is through when this rank is."""
    make_mesh = startup.create_device_mesh

    def slow(*args: Any, **options: Any) -> Any:
        mesh = make_mesh(*args, **options)
        threading.Event().wait(0.3)
        through.touch()
        return mesh

    if context.rank == 1:
        vars(startup)["create_device_mesh"] = slow
    startup.join_job(context, torch.device("cpu"), StartupInfo(mesh=MeshShape(2), microbatches=1))
    return through.exists()


def test_no_rank_joins_before_the_others(tmp_path: Path) -> None:
    """A rank that joined and then fails would take the store along, and others that error."""
    assert run_ranks(2, joined, tmp_path / "through") == [True, True]


SCRIPT = """
import torch
from torch import nn
from pipemorph_trainer import Pipeline, TrainerContext

context = TrainerContext.from_env()
torch.manual_seed(context.rank)
module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
optimizer = torch.optim.AdamW(module.parameters())
with Pipeline(
    module, context=context, loss_fn=nn.functional.mse_loss, microbatches=4, policy="1f1b"
) as pipe:
    for _ in range(2):
        loss = pipe.step(torch.ones(8, 4), target=torch.zeros(8, 4))
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
print(f"rank {context.rank} loss {loss:.6f}")
"""


@pytest.mark.full
@pytest.mark.timeout(240)
def test_under_torchrun(tmp_path: Path) -> None:
    status, output = torchrun(tmp_path, SCRIPT, {})
    assert status == 0, output[-3000:]
    assert "2 ranks: 2 stages × 1 replica" in output
    losses = {line.split("loss ")[1] for line in output.splitlines() if "loss" in line}
    assert len(losses) == 1, output
