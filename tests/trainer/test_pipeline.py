"""The public face: shapes, losses, clipping, and errors a user can act on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from gate import same_bits
from launch import Ranks, free_port, run_ranks
from torch import Tensor, nn
from trainer_jobs import Job, loss_fn, make_batch, make_stage, reference

from pipemorph.api.mesh import MeshShape
from pipemorph_trainer import Options, Pipeline, TrainerContext, start
from pipemorph_trainer.start import Start


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


class Scale(nn.Module):
    """Any number of float and integer tensors through; changes no shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, *tensors: Tensor) -> Any:
        out = tuple(t * self.weight if t.is_floating_point() else t for t in tensors)
        return out if len(out) > 1 else out[0]


def reshaping(context: TrainerContext, route: str) -> list[float]:
    losses = []
    with Pipeline(
        Scale(),
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


class Masked(nn.Module):
    """Takes what every stage needs by name, on each rank; the first takes its input so too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, *, mask: Tensor, factor: float = 1.0) -> Tensor:
        return x * self.weight * mask * factor


def by_name(context: TrainerContext) -> tuple[list[float], float]:
    first, last = context.rank == 0, context.rank == context.world_size - 1
    module = Masked()
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


class Sometimes(nn.Module):
    """Has a parameter that only replica 1 uses, and one that nobody does."""

    def __init__(self, replica: int) -> None:
        super().__init__()
        self.replica = replica
        self.always, self.second, self.never = (nn.Parameter(torch.ones(2)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.always
        return y * self.second if self.replica == 1 else y


def uneven(context: TrainerContext) -> dict[str, list[float] | None]:
    module = Sometimes(context.coordinate(2).replica)
    with Pipeline(
        module, context=context, loss_fn=lambda o, t: o.sum(), microbatches=2, stages=2
    ) as pipe:
        pipe.step(torch.ones(4, 2), target=torch.zeros(4))
    return {n: None if p.grad is None else p.grad.tolist() for n, p in module.named_parameters()}


def test_replicas_may_use_different_parameters() -> None:
    for grads in run_ranks(4, uneven):
        # The mean over two replicas, of which one made 2 and the other nothing.
        assert grads == {"always": [2.0, 2.0], "second": [1.0, 1.0], "never": None}


class Growing(nn.Module):
    """Breaks the rule that all microbatches have one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return (x * self.weight).repeat(1, 1 + self.runs // 30)


def growing(context: TrainerContext) -> None:
    module = Growing() if context.rank == 0 else Scale()
    with Pipeline(module, context=context, loss_fn=lambda o, t: o.sum(), microbatches=32) as pipe:
        pipe.step(torch.ones(32, 3), target=torch.ones(32))


def test_shapes_that_differ_between_microbatches_are_named() -> None:
    results = Ranks(2, growing).wait()
    assert "outputs are float32[1, 6]" in results[0].error
    assert "expected float32[1, 3]" in results[0].error
    assert results[1].exitcode == 1


def misuse(context: TrainerContext, what: str) -> None:
    module = make_stage(context.rank, context.world_size, torch.float32)
    arguments: dict[str, Any] = {"microbatches": 3, "loss_fn": loss_fn}
    if what == "microbatches":
        del arguments["microbatches"]
    if what == "stages":
        arguments["stages"] = 3
    tokens, target = make_batch(0, 4 if what == "batch" else 3)
    with Pipeline(module, context=context, **arguments) as pipe:
        inputs = () if what == "input" else (tokens,)
        pipe.step(*inputs, target=None if what == "target" else target)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        pytest.param("microbatches", "microbatches is missing", marks=pytest.mark.full),
        pytest.param(
            "stages", "2 ranks cannot be cut into pipelines of 3 stages", marks=pytest.mark.full
        ),
        ("batch", "input 0 has shape [4, 3]; expected a first dimension that 3 microbatches"),
        pytest.param(
            "input", "step() got no input; stage 0 needs the batch", marks=pytest.mark.full
        ),
        ("target", "step() got no target; loss_fn on this stage needs it"),
    ],
)
def test_misuse_is_told_in_one_line(what: str, told: str) -> None:
    results = Ranks(2, misuse, what).wait()
    assert all(r.exitcode == 1 for r in results)
    last = [r.error.strip().splitlines()[-1] for r in results]
    assert any(told in line for line in last), last


def joined(context: TrainerContext, through: Path) -> bool:
    """Whether rank 1, which is slow in the middle of it, is through when this rank is."""
    make_mesh = start.device_mesh

    def slow(*args: Any, **options: Any) -> Any:
        mesh = make_mesh(*args, **options)
        threading.Event().wait(0.3)
        through.touch()
        return mesh

    if context.rank == 1:
        vars(start)["device_mesh"] = slow
    start.join(context, torch.device("cpu"), Start(mesh=MeshShape(2), microbatches=1))
    return through.exists()


def test_no_rank_joins_before_the_others(tmp_path: Path) -> None:
    """One that then fails would take the store along, and the others told of that."""
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
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run",
            "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}",
            str(script),
        ],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    losses = {line.split("loss ")[1] for line in done.stdout.splitlines() if "loss" in line}
    assert len(losses) == 1, done.stdout
