"""Stages of bfloat16 whose gradients add up in float32: docs/how-to/write-a-training-script.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def in_float32(module: nn.Module) -> None:
    """Make a module's parameters bfloat16, with gradients in float32."""
    module.bfloat16()
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32


def rounding(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Optimizer that takes gradients of its parameters' dtype only, changed to round them when it
    steps, once."""
    optimizer.register_step_pre_hook(round_gradients)
    optimizer.register_step_post_hook(widen_gradients)
    return optimizer


def round_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        grad, p.grad, p.grad_dtype = p.grad, None, p.dtype
        p.grad = grad.to(p.dtype)


def widen_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad, p.grad_dtype = None, torch.float32
