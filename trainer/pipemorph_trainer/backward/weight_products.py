"""Ops whose weight gradients can wait for W, and the formulas of their gradients.

The backward of ``y = x Wᵀ + b`` consists of three independent products. The stage upstream needs
the one for ``x``; no other op needs those for ``W`` and ``b``. For results bitwise equal to
autograd's, the formulas use torch's operators, with the same operand layouts and the same reduction
for the bias.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Operands = tuple[Tensor, ...]


class ParameterView(NamedTuple):
    """Part of a parameter that is a view of it, such as the expert ``P[e]``: its sizes, strides and
    offset in the parameter's memory."""

    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    def view_of(self, whole: Tensor) -> Tensor:
        """Return the part of ``whole``, as a view."""
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


class ViewGradient(NamedTuple):
    """Gradient of a part; that of the rest of the parameter is 0."""

    grad: Tensor
    view: ParameterView

    def expand_to_parameter(self, parameter: Tensor) -> Tensor:
        """Return the gradient of the whole parameter."""
        found = torch.zeros_like(parameter)
        self.view.view_of(found).copy_(self.grad)
        return found


Grad = Tensor | ViewGradient


class WeightProduct(ABC):
    """Call that is linear in its input and its weights, with its further arguments.

    ``run(x, weight, bias)``: the original function.
    """

    uses_values = False
    """True if W needs the weight in memory."""
    parameter_view: ParameterView | None = None
    """View of the parameter that is the weight; None: the whole parameter."""

    def __init__(self, run: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> None:
        self.run = run

    def select_operands(self, x: Tensor, grad: Tensor) -> Operands:
        """Return the operands of the gradients, made of the input and the output's gradient."""
        return x, grad

    @abstractmethod
    def input_grad(self, x: Tensor, operands: Operands, weight: Tensor) -> Tensor:
        """Compute the gradient of the input, for B."""

    @abstractmethod
    def weight_grads(
        self, operands: Operands, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> Sequence[Grad]:
        """Compute the gradients of weight and bias, if ``needed``."""


class LinearProduct(WeightProduct):
    """``F.linear``. Weight: (out, in). Operands: (rows, in), (rows, out) and ∂y in the shape to
    which the bias was broadcast; rows: batch × sequence × …"""

    def select_operands(self, x: Tensor, grad: Tensor) -> Operands:
        if x.dim() == 2:
            return x, grad, grad
        rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        flattened = x.dim() < 2 or x.is_contiguous()
        return rows, grad_rows, grad_rows if flattened else grad

    def input_grad(self, x: Tensor, operands: Operands, weight: Tensor) -> Tensor:
        rows, grad, _ = operands
        found = weight.t().mm(grad.t()).t() if _is_column_major(rows) else grad.mm(weight)
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


class AddmmProduct(WeightProduct):
    """``torch.addmm(bias, x, weight)``, as in Conv1D of GPT-2. Weight: (in, out)."""

    def input_grad(self, x: Tensor, operands: Operands, weight: Tensor) -> Tensor:
        grad = operands[1]
        return weight.mm(grad.t()).t() if _is_column_major(x) else grad.mm(weight.t())

    def weight_grads(
        self, operands: Operands, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> list[Tensor]:
        x, grad = operands
        found = []
        if needed[0]:
            found.append(grad.t().mm(x).t() if _is_column_major(weight) else x.t().mm(grad))
        if needed[1]:
            found.append(grad.sum(0))
        return found


def _is_column_major(matrix: Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.stride(1) == matrix.size(0)


class ConvolutionProduct(WeightProduct):
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


class EmbeddingProduct(WeightProduct):
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


class BatchedProduct(WeightProduct):
    """``torch.bmm``, for the experts of one layer. Weight: (experts, in, out)."""

    def input_grad(self, x: Tensor, operands: Operands, weight: Tensor) -> Tensor:
        return operands[1].bmm(weight.transpose(1, 2))

    def weight_grads(
        self, operands: Operands, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> list[Tensor]:
        x, grad = operands
        return [x.transpose(1, 2).bmm(grad)]


class GroupedProduct(WeightProduct):
    """``torch._grouped_mm``: rows up to ``ends[e]`` are expert *e*'s. Weight: (experts, in, out).
    ``product``: torch's own."""

    def __init__(self, product: Callable[..., Tensor], ends: Tensor) -> None:
        super().__init__(lambda x, weight, _: product(x, weight, offs=ends))
        self._product, self._ends = product, ends

    def select_operands(self, x: Tensor, grad: Tensor) -> Operands:
        return x, grad, self._ends

    def input_grad(self, x: Tensor, operands: Operands, weight: Tensor) -> Tensor:
        _, grad, ends = operands
        return self._product(grad, weight.transpose(1, 2), offs=ends)

    def weight_grads(
        self, operands: Operands, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> list[Tensor]:
        x, grad, ends = operands
        if weight.stride(1) == 1:
            return [self._product(grad.t(), x, offs=ends).transpose(1, 2)]
        return [self._product(x.t(), grad, offs=ends)]


class ViewProduct(WeightProduct):
    """Product with a part of a parameter."""

    def __init__(self, inner: WeightProduct, part: ParameterView) -> None:
        super().__init__(inner.run)
        self._inner, self.parameter_view = inner, part
        self.uses_values = inner.uses_values

    def select_operands(self, x: Tensor, grad: Tensor) -> Operands:
        return self._inner.select_operands(x, grad)

    def input_grad(self, x: Tensor, operands: Operands, weight: Tensor) -> Tensor:
        return self._inner.input_grad(x, operands, weight)

    def weight_grads(
        self, operands: Operands, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]
    ) -> list[Grad]:
        assert self.parameter_view is not None
        part = self.parameter_view.view_of(weight)
        found: list[Any] = [*self._inner.weight_grads(operands, part, bias, needed)]
        return [ViewGradient(found[0], self.parameter_view), *found[1:]] if needed[0] else found
