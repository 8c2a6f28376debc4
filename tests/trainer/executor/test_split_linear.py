"""The deferred Linear alone: every gradient has the bits, dtype and layout autograd gives."""

from __future__ import annotations

import pytest
import torch
from float32_gradients import in_float32
from gate import same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipemorph_trainer.executor.split.deferred import Layer, Sink, run_weight_work
from pipemorph_trainer.executor.split.linears import Patch

torch.set_num_threads(1)

IN, OUT = 48, 40


def leaf(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Tensor:
    """An input with values, strides and requires_grad."""
    x = torch.randn(shape)
    if layout == "transposed":
        x = torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    elif layout == "batch transposed":
        x = torch.randn(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    elif layout == "strided":
        x = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    elif layout == "expanded":
        x = torch.randn(1, *shape[1:]).expand(shape)
    return x.to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("grad_layout", ["contiguous", "expanded", "transposed"])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((IN,), "contiguous"),
        ((1, IN), "contiguous"),
        ((300, IN), "contiguous"),
        ((300, IN), "transposed"),
        ((300, IN), "strided"),
        ((7, 50, IN), "contiguous"),
        ((7, 50, IN), "transposed"),
        ((7, 50, IN), "batch transposed"),
        ((7, 50, IN), "strided"),
        ((7, 50, IN), "expanded"),
        ((3, 5, 30, IN), "contiguous"),
        ((3, 5, 30, IN), "transposed"),
        ((0, IN), "contiguous"),
    ],
)
def test_bits_are_autograds(
    shape: tuple[int, ...], layout: str, grad_layout: str, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    linear = nn.Linear(IN, OUT, bias=bias, dtype=dtype)
    x = leaf(shape, layout, dtype)
    want_y = linear(x)
    grad = torch.randn(want_y.shape, dtype=torch.float32).to(dtype)
    if grad_layout == "expanded":
        grad = torch.randn(()).to(dtype).expand(want_y.shape)
    elif grad_layout == "transposed" and grad.dim() > 1:
        grad = grad.transpose(-1, -2).contiguous().transpose(-1, -2)
    want = torch.autograd.grad(want_y, [x, *linear.parameters()], grad)

    sink = Sink()
    with Patch([Layer("linear", linear)], sink)():
        got_y = linear(x)
    sink.work = []
    (got_x,) = torch.autograd.grad(got_y, [x], grad)
    assert all(p.grad is None for p in linear.parameters())
    run_weight_work(sink.work)
    got = [got_x, *(p.grad for p in linear.parameters())]
    same_bits(want_y, got_y)
    for a, b in zip(want, got, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        same_bits(a, b)


def test_outside_a_deferring_b_it_is_a_linear() -> None:
    linear = nn.Linear(IN, OUT)
    x = torch.randn(6, IN, requires_grad=True)
    want = torch.autograd.grad(linear(x).sum(), [x, *linear.parameters()])
    with Patch([Layer("linear", linear)], Sink())():
        got = torch.autograd.grad(linear(x).sum(), [x, *linear.parameters()])
    for a, b in zip(want, got, strict=True):
        same_bits(a, b)


def test_a_weight_in_another_layout_keeps_it() -> None:
    linear = nn.Linear(IN, OUT, bias=False)
    linear.weight = nn.Parameter(torch.randn(IN, OUT).t())
    x = torch.randn(60, IN, requires_grad=True)
    grad = torch.randn(60, OUT)
    linear(x).backward(grad)
    want, linear.weight.grad = linear.weight.grad, None
    sink = Sink()
    with Patch([Layer("linear", linear)], sink)():
        y = linear(x)
    sink.work = []
    y.backward(grad)
    run_weight_work(sink.work)
    same_bits(want, linear.weight.grad)
    assert want.stride() == linear.weight.grad.stride()


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_gradients_in_float32_add_up_as_autograds(layout: str) -> None:
    """Of a weight that is used twice in each of two microbatches."""
    torch.manual_seed(4)
    linear = nn.Linear(IN, IN)
    if layout == "columns":
        linear.weight = nn.Parameter(torch.randn(IN, IN).t())
    in_float32(linear)
    batches = [torch.randn(60, IN).bfloat16().requires_grad_() for _ in range(2)]
    grads = [torch.randn(60, IN).bfloat16() for _ in range(2)]
    for x, grad in zip(batches, grads, strict=True):
        linear(torch.tanh(linear(x))).backward(grad)
    want = [p.grad for p in linear.parameters()]
    linear.zero_grad()
    sink = Sink()
    for x, grad in zip(batches, grads, strict=True):
        with Patch([Layer("linear", linear)], sink)():
            y = linear(torch.tanh(linear(x)))
        sink.work = []
        y.backward(grad)
        run_weight_work(sink.work)
    for parameter, wanted in zip(linear.parameters(), want, strict=True):
        assert wanted is not None and parameter.grad is not None
        assert wanted.dtype is torch.float32
        assert wanted.stride() == parameter.grad.stride()
        same_bits(wanted, parameter.grad)


def test_a_checkpoint_does_not_recompute_its_last_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torch's own linear, which saves its operands before the product."""
    block = nn.Sequential(nn.Linear(IN, OUT), nn.GELU(), nn.Linear(OUT, IN))
    x = torch.randn(3, 2, IN, requires_grad=True)
    grad = torch.randn(3, 2, IN)
    want = torch.autograd.grad(
        checkpoint(block, x, use_reentrant=False), [x, *block.parameters()], grad
    )
    product, rows = nn.functional.linear, []

    def counted(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows.append(len(weight))
        return product(x, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", counted)
    sink = Sink()
    with Patch([Layer("0", block[0]), Layer("2", block[2])], sink)():
        y = checkpoint(block, x, use_reentrant=False)
        sink.work = []
        (got,) = torch.autograd.grad(y, [x], grad)
    assert rows == [OUT, IN, OUT]
    run_weight_work(sink.work)
    for a, b in zip(want, [got, *(p.grad for p in block.parameters())], strict=True):
        same_bits(a, b)
