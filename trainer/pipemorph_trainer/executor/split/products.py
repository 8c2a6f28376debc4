"""The ops whose weight gradients can wait for W, and how each computes its gradients.

The backward of ``y = x Wᵀ + b`` consists of three independent products. The stage upstream needs
the one for ``x``; no other op needs those for ``W`` and ``b``. For results bitwise equal to
autograd's, the formulas follow the operators of torch, with the same operand layouts and the same
reduction for the bias.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

Operands = tuple[Tensor, ...]


class Product(ABC):
    """A call that is linear in its input and its weights, with its further arguments.

    ``run(x, weight, bias)``: the original function.
    """

    uses_values: ClassVar[bool] = False
    """Whether W needs the weight in memory."""

    def __init__(self, run: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> None:
        self.run = run

    def operands(self, x: Tensor, grad: Tensor) -> Operands:
        """What the gradients are computed of, from the input and the output's gradient."""
        return x, grad

    @abstractmethod
    def input_grad(self, x: Tensor, operands: Operands, weight: Tensor) -> Tensor:
        """The gradient of the input, for B."""

    @abstractmethod
    def weight_grads(
        self, operands: Operands, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> list[Tensor]:
        """The gradients of weight and bias, if ``needed``."""


class Linear(Product):
    """``F.linear``. Weight: (out, in). Operands: (rows, in), (rows, out) and ∂y in the shape to
    which the bias was broadcast; rows: batch × sequence × …"""

    def operands(self, x: Tensor, grad: Tensor) -> Operands:
        if x.dim() == 2:
            return x, grad, grad
        rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        flattened = x.dim() < 2 or x.is_contiguous()
        return rows, grad_rows, grad_rows if flattened else grad

    def input_grad(self, x: Tensor, operands: Operands, weight: Tensor) -> Tensor:
        rows, grad, _ = operands
        found = weight.t().mm(grad.t()).t() if _by_columns(rows) else grad.mm(weight)
        return found if x.dim() == 2 else found.reshape(x.shape)

    def weight_grads(
        self, operands: Operands, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> list[Tensor]:
        rows, grad, bias_grad = operands
        found = []
        if needed[0]:
            by_rows = weight.stride(1) == 1 and weight.stride(0) == weight.size(1)
            found.append(grad.t().mm(rows) if by_rows else rows.t().mm(grad).t())
        if needed[1]:
            if bias_grad.dim() == 2:
                found.append(bias_grad.sum(dim=0))
            else:
                over = list(range(bias_grad.dim() - 1))
                found.append(bias_grad.sum(dim=over, keepdim=True).view(bias_grad.shape[-1]))
        return found


class Addmm(Product):
    """``torch.addmm(bias, x, weight)``, as in Conv1D of GPT-2. Weight: (in, out)."""

    def input_grad(self, x: Tensor, operands: Operands, weight: Tensor) -> Tensor:
        grad = operands[1]
        return weight.mm(grad.t()).t() if _by_columns(x) else grad.mm(weight.t())

    def weight_grads(
        self, operands: Operands, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> list[Tensor]:
        x, grad = operands
        found = []
        if needed[0]:
            found.append(grad.t().mm(x).t() if _by_columns(weight) else x.t().mm(grad))
        if needed[1]:
            found.append(grad.sum(0))
        return found


def _by_columns(matrix: Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.stride(1) == matrix.size(0)


class Convolution(Product):
    """``F.conv*`` and ``F.conv_transpose*``. ``settings``: stride, padding, dilation, transposed,
    output padding and groups, as the op of the backward takes them."""

    uses_values = True

    def __init__(
        self, run: Callable[[Tensor, Tensor, Tensor | None], Tensor], settings: tuple[Any, ...]
    ) -> None:
        super().__init__(run)
        self._settings = settings

    def input_grad(self, x: Tensor, operands: Operands, weight: Tensor) -> Tensor:
        mask = (True, False, False)
        found = torch.ops.aten.convolution_backward(
            operands[1], x, weight, None, *self._settings, mask
        )[0]
        assert isinstance(found, Tensor)
        return found

    def weight_grads(
        self, operands: Operands, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> list[Tensor]:
        x, grad = operands
        sizes = None if bias is None else list(bias.shape)
        found = torch.ops.aten.convolution_backward(
            grad, x, weight.to(x.dtype), sizes, *self._settings, (False, *needed)
        )
        return [each for each, need in zip(found[1:], needed, strict=True) if need]


class Embedding(Product):
    """``torch.embedding``, with the indices as its input. ``settings``: padding_idx,
    scale_grad_by_freq, sparse."""

    def __init__(
        self, run: Callable[[Tensor, Tensor, Tensor | None], Tensor], settings: tuple[Any, ...]
    ) -> None:
        super().__init__(run)
        self._settings = settings

    def input_grad(self, x: Tensor, operands: Operands, weight: Tensor) -> Tensor:
        raise AssertionError("indices have no gradient")

    def weight_grads(
        self, operands: Operands, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> list[Tensor]:
        x, grad = operands
        return [torch.ops.aten.embedding_backward(grad, x, weight.shape[0], *self._settings)]
