"""Gradients have the dtype and the layout that autograd gives them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gate import same_bits
from torch import Tensor, nn

from pipemorph_trainer.backward.gradient_form import (
    describe_grad_dtype,
    grad_dtype,
    make_zero_grad,
    to_grad_form,
)

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.randn(3, 4),
    "columns": lambda: torch.randn(4, 3).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wider", [False, True])
def test_a_gradient_is_like_autograds(layout: str, wider: bool) -> None:
    parameter = nn.Parameter(LAYOUTS[layout]().bfloat16())
    if wider:
        parameter.grad_dtype = torch.float32
    given = torch.randn(parameter.shape).bfloat16()
    (parameter * given).sum().backward()
    assert parameter.grad is not None
    for made in (to_grad_form(parameter, given), make_zero_grad(parameter)):
        assert (made.dtype, made.stride()) == (parameter.grad.dtype, parameter.grad.stride())
    same_bits(to_grad_form(parameter, given), parameter.grad)
    assert not make_zero_grad(parameter).any()
    parameter.grad = make_zero_grad(parameter)


def test_what_has_the_form_is_no_copy() -> None:
    parameter, given = nn.Parameter(torch.zeros(3, 4)), torch.ones(3, 4)
    assert to_grad_form(parameter, given) is given


def test_other_dtypes_of_gradients_are_reported() -> None:
    parameter = nn.Parameter(torch.zeros(3).bfloat16())
    assert describe_grad_dtype(parameter) == ""
    parameter.grad_dtype = torch.float32
    assert describe_grad_dtype(parameter) == ", gradients in float32"
    parameter.requires_grad_(False)
    assert describe_grad_dtype(parameter) == ""
    parameter.grad_dtype = None
    assert grad_dtype(parameter) is torch.bfloat16
