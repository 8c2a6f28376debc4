"""Forwards that run again before their backward: the same bits, and activations that are gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from split_support import Job, Lambda, Result, assert_equal, run_order, sequential, split
from test_split_zoo import DELAYED, vectors
from torch import Tensor, nn

from pipemorph_trainer.backward import OpOrderError, SplitError
from pipemorph_trainer.backward.forward_replay import digest_tensor
from pipemorph_trainer.executor.module_runner import ModuleRunner

WIDTH = 8


def odd(m: Any, x: Tensor) -> Tensor:
    """Forward with random numbers, and with a buffer that it changes and reads."""
    m.count += 1
    noise = torch.rand(()) * m.count
    return nn.functional.dropout(m.norm(m.linear(x)) * m.scale, 0.5) * noise


@pytest.mark.parametrize("order", [DELAYED, "F0 F1 B0 W0 F2 B1 W1 B2 W2"])
def test_a_forward_begins_with_what_it_began_with_before(order: str) -> None:
    buffers = {"count": nn.Buffer(torch.zeros(())), "scale": nn.Buffer(torch.ones(WIDTH))}
    stage = Lambda(odd, linear=nn.Linear(WIDTH, WIDTH), norm=nn.BatchNorm1d(5), **buffers)
    job = Job(stage, vectors, 3, recomputes=True)
    got, runner = split(job, order, device_limit=1)
    assert_equal(sequential(job), got)
    assert got.buffers["count"] == 3, "each microbatch counts once"
    names = {name for _, name in runner._rerun._changing or ()}
    assert names == {"count", "running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.parametrize("last", [False, True])
def test_a_stage_that_remembers_elsewhere_is_found_out_before_its_gradient(last: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        return m.linear(x) * m.calls

    loss = (lambda y, _: y.sum()) if last else None
    counts = Lambda(forward, linear=nn.Linear(WIDTH, WIDTH), calls=0)
    runner = Job(counts, vectors, 3, is_last=last, loss_fn=loss, recomputes=True).runner()
    for k in range(2):
        runner.run_forward(k, vectors(k), recompute=True)
    what = "another loss than" if last else "another output 0 than"
    with pytest.raises(SplitError, match=f"microbatch 0 ran again and gave {what}.*: never"):
        runner.recompute_forward(0)
    assert all(p.grad is None for p in runner.module.parameters())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(1.0, 16.0).reshape(3, 5).t(), torch.ones(3, dtype=torch.bool), torch.zeros(()),
        torch.zeros(0), torch.randn(3, dtype=torch.complex64).conj(),
        torch.ones(5).to(torch.float8_e4m3fn), torch.full((7,), torch.nan, dtype=torch.bfloat16),
    ],
)  # fmt: skip
def test_a_digest_tells_tensors_apart(tensor: Tensor) -> None:
    found = digest_tensor(tensor)
    assert torch.equal(found, digest_tensor(tensor.clone()))
    if tensor.numel() > 1:
        other = tensor.clone().contiguous()
        other.view(-1)[-1] = 0
        assert not torch.equal(found, digest_tensor(other))
        swapped = tensor.clone().contiguous()
        swapped.view(-1)[0], swapped.view(-1)[-1] = other.view(-1)[-1], tensor.reshape(-1)[0]
        assert not torch.equal(digest_tensor(other), digest_tensor(swapped))


def test_the_last_stage_keeps_what_its_module_returns_once() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    runner = ModuleRunner(
        module, is_first=False, is_last=True, loss_fn=lambda y, _: y.sum(), microbatches=2
    )
    outputs: list[Any] = []
    runner.begin_iteration(fused={0, 1}, outputs=outputs)
    for k in range(2):
        runner.run_forward(k, vectors(k), recompute=True)
    for k in range(2):
        runner.recompute_forward(k)
        runner.run_fused_backward(k)
    assert len(outputs) == 2


def test_its_backward_needs_the_forward_first() -> None:
    job = Job(nn.Linear(WIDTH, WIDTH), vectors, 2)
    runner, result = job.runner(), Result()
    run_order(job, runner, "F0", result)
    with pytest.raises(OpOrderError, match="F0 was not run with recompute"):
        runner.recompute_forward(0)
    runner.run_forward(1, vectors(1), recompute=True)
    run_order(job, runner, "B0", result)
    with pytest.raises(OpOrderError, match="B1 before its forward ran again"):
        runner.backward_input(1, vectors(1))
    runner.discard_microbatches()
    assert runner.in_flight == 0
