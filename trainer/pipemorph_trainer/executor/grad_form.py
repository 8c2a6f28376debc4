"""The form of a parameter's gradient, as autograd makes it: its dtype and its memory layout.

The dtype is the parameter's own, unless its ``grad_dtype`` says otherwise: float32 for a bfloat16
parameter whose gradients add up in float32, or the dtype in which FSDP2 reduces. torch refuses to
assign a gradient of another one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype in which a parameter's gradient adds up. Its own, where any is allowed (None)."""
    found = parameter.grad_dtype
    return parameter.dtype if found is None else found


def told(parameter: Tensor) -> str:
    """A gradient's dtype for messages, after that of its parameter; empty if it is the same."""
    dtype = grad_dtype(parameter)
    if not parameter.requires_grad or dtype == parameter.dtype:
        return ""
    return f", gradients in {str(dtype).removeprefix('torch.')}"


def zero_grad(parameter: Tensor) -> Tensor:
    """A gradient of zeros, distributed as the parameter is."""
    return torch.zeros_like(parameter, dtype=grad_dtype(parameter))


def as_grad(parameter: Tensor, grad: Tensor) -> Tensor:
    """``grad`` in the form of a gradient of the parameter; a copy only if it has another one."""
    dtype = grad_dtype(parameter)
    if grad.stride() == parameter.stride():
        return grad.to(dtype)
    return torch.empty_like(parameter, dtype=dtype).copy_(grad)
