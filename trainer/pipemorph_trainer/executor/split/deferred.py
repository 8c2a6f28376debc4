"""Weight gradients that wait for W, and ``nn.Linear`` whose backward leaves its own to W.

The backward of ``y = x Wᵀ + b`` consists of three independent products. The stage upstream needs
the one for ``x``; no other op needs those for ``W`` and ``b``. So the function computes the first
in B and keeps ``(x, ∂y)`` for the other two.

For results bitwise equal to autograd's, the formulas follow the operators of ``F.linear``, with the
same operand layouts and the same reduction for the bias.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.grad_form import as_grad, grad_dtype
from pipemorph_trainer.executor.stages.written import written
from pipemorph_trainer.executor.torch_private import saving_is_hooked, version
from pipemorph_trainer.topology.placement import is_dtensor


class Work(ABC):
    """Data that W needs for the gradients of a few parameters, for one call of their layer.

    ``names``: by the id of each parameter, its name in the stage.
    """

    __slots__ = ("names",)

    def __init__(self, names: dict[int, str]) -> None:
        self.names = names

    @property
    @abstractmethod
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that get a gradient, each once."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise :class:`SplitError` if a tensor was overwritten since B."""

    @abstractmethod
    def gradients(self) -> Iterable[tuple[nn.Parameter, Tensor]]:
        """Compute the gradient of each parameter. Called once, without grad mode."""


class Layer:
    """One Linear, or registered module, of the stage that may be deferred, with its name in the
    stage."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.excluded = ""
        """Why it is no longer deferred; empty while it is."""

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Its parameters, by their names in the stage."""
        for name, parameter in self.module.named_parameters(recurse=False):
            yield self.full_name(name), parameter

    def expected(self) -> set[str]:
        """Those whose gradients W computes, as far as the modules tell."""
        return {name for name, _ in self.parameters()}

    def full_name(self, parameter: str) -> str:
        """The name of the layer's ``weight`` or ``bias`` in the stage."""
        return f"{self.name}.{parameter}" if self.name else parameter


class CompiledLayer(Layer):
    """A compiled module of the stage, whose backward itself may leave gradients to W.

    ``names``: of the parameters for which it may, within the module. ``expected``: of those that
    it would leave if it were not compiled, as far as its modules tell.
    """

    def __init__(
        self, name: str, module: nn.Module, names: Collection[str], expected: Collection[str]
    ) -> None:
        super().__init__(name, module)
        self._names = frozenset(names)
        self._expected = {self.full_name(each) for each in expected}

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.module.named_parameters():
            if name in self._names:
                yield self.full_name(name), parameter

    def expected(self) -> set[str]:
        return self._expected


class Sink:
    """Collects the work of backward calls. ``work``: None outside a deferring B; then every
    gradient is computed at once, like in autograd."""

    def __init__(self) -> None:
        self.work: list[Work] | None = None
        self.owned: Mapping[int, tuple[Layer, str]] = {}
        """Layer and name of each parameter, by its id, for code that is not patched."""
        self.whole: dict[int, str] = {}
        """Parameters of such code whose gradients B computed, by id, each with the reason."""
        self.tolerance = 0.0
        """See :attr:`Splitter.tolerance`; of the code that has run."""

    def open(self, owned: Mapping[int, tuple[Layer, str]]) -> None:
        """Collect work from now on."""
        self.work, self.owned, self.whole = [], owned, {}
        if self not in _open:
            _open.append(self)

    def close(self) -> list[Work]:
        """Stop collecting. Returns what came; nothing if it was not open."""
        work, self.work = self.work or [], None
        if self in _open:
            _open.remove(self)
        return work


_open: list[Sink] = []
"""Those of the B's that run; one of each stage at most."""


def deferring() -> bool:
    """Whether a B that defers is running."""
    return bool(_open)


def sink_of(parameter: nn.Parameter) -> Sink | None:
    """The open sink of the stage that has the parameter; None if there is none."""
    return next((sink for sink in _open if id(parameter) in sink.owned), None)


@dataclass(frozen=True)
class LinearCall:
    """The called layer, the sink of its work, and whether autocast has cast ``x``."""

    layer: Layer
    sink: Sink
    autocast: bool


class LinearWork(Work):
    """Data that W needs of one call of one Linear. ``rows``: batch × sequence × …

    ``x``: (rows, in); ``grad``: (rows, out), both in the dtype of the product. ``bias_grad``: ∂y in
    the shape to which the bias was broadcast. ``weight``, ``bias``: None without a gradient.
    """

    __slots__ = ("bias", "bias_grad", "grad", "layer", "versions", "weight", "x")

    def __init__(
        self,
        layer: Layer,
        x: Tensor,
        grad: Tensor,
        bias_grad: Tensor,
        *,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
    ) -> None:
        kinds = {"weight": weight, "bias": bias}
        super().__init__({id(p): layer.full_name(k) for k, p in kinds.items() if p is not None})
        self.layer, self.x, self.grad, self.bias_grad = layer, x, grad, bias_grad
        self.weight, self.bias = weight, bias
        self.versions = (version(x), version(grad))

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return [each for each in (self.weight, self.bias) if each is not None]

    def check_unchanged(self) -> None:
        if self.versions != (version(self.x), version(self.grad)):
            raise SplitError(
                f"the input of {self.layer.name!r} or the gradient of its output was written "
                f"in place between B and W"
            )

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        if self.weight is not None:
            yield self.weight, _weight_grad(self, self.weight)
        if self.bias is not None:
            yield self.bias, _bias_grad(self)


def deferred_linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
    """``F.linear`` whose backward gives the work for weight and bias to the sink."""
    result: Tensor
    if not saving_is_hooked() or is_dtensor(x):
        result = DeferredLinear.apply(x, weight, bias, (call, None))
        return result
    # A function saves its tensors when it ends, torch's own linear before its product. Activation
    # checkpointing recomputes up to the last tensor saved, so not that product. So the operands are
    # saved by a function of their own.
    operands: list[Tensor | None] = []
    place = DeferredLinear.apply(x, weight, bias, (call, operands))
    result = _Product.apply(place, operands)
    return result


class DeferredLinear(torch.autograd.Function):
    """Saves the operands of a linear, and computes its gradients, those of weight and bias in W.

    ``how``: the call, and a list to fill with what :class:`_Product` needs; then the output stands
    for the product, with its shape and without memory. With None the output is the product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        how: tuple[LinearCall, list[Tensor | None] | None],
    ) -> Tensor:
        call, operands = how
        ctx.call = call
        ctx.parameters = (weight, bias)
        if call.autocast:
            # Cast here and not by autocast, whose cache could return a cast without gradients to
            # calls that need them.
            weight = weight.to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
        ctx.save_for_backward(x, weight)
        if operands is None:
            return _owned(torch.nn.functional.linear(x, weight, bias))
        operands += [x, weight, bias]
        return x.new_empty(()).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        flat = x.dim() == 2
        rows = x if flat else x.reshape(-1, x.shape[-1])
        grad_rows = grad if flat else grad.reshape(-1, grad.shape[-1])
        grad_x = None
        if need_x:
            grad_x = _input_grad(grad_rows, rows, weight)
            if not flat:
                grad_x = grad_x.reshape(x.shape)
        parameter, bias = ctx.parameters
        flattened = x.dim() <= 2 or x.is_contiguous()
        work = LinearWork(
            layer=ctx.call.layer,
            x=rows,
            grad=grad_rows,
            bias_grad=grad_rows if flattened else grad,
            weight=parameter if need_weight else None,
            bias=bias if need_bias else None,
        )
        if ctx.call.sink.work is not None:
            ctx.call.sink.work.append(work)
            return grad_x, None, None, None
        return (
            grad_x,
            _weight_grad(work, parameter).to(parameter.dtype) if need_weight else None,
            _bias_grad(work).to(bias.dtype) if need_bias else None,
            None,
        )


class _Product(torch.autograd.Function):
    """The product of a linear; its gradient goes to where the operands were saved."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, operands: list[Tensor | None]) -> Tensor:
        x, weight, bias = operands
        assert x is not None
        assert weight is not None
        return _owned(torch.nn.functional.linear(x, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


def _owned(out: Tensor) -> Tensor:
    """The tensor without being a view, with the same memory.

    Up to torch 2.11 the output of a linear is a view if its input has more than two dimensions, and
    a view that a custom function returns cannot be written in place.
    """
    return out if out._base is None else alone(out)


def alone(out: Tensor) -> Tensor:
    """Another tensor with the same memory, of which autograd knows nothing."""
    other = torch.empty(0, dtype=out.dtype, device=out.device)
    return other.set_(out.untyped_storage(), out.storage_offset(), out.size(), out.stride())


def _input_grad(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """∂x (rows, in) of x @ weightᵀ. A column-major x gets a column-major gradient."""
    if x.stride(0) == 1 and x.stride(1) == x.size(0):
        return weight.t().mm(grad.t()).t()
    return grad.mm(weight)


def _weight_grad(work: LinearWork, weight: Tensor) -> Tensor:
    """∂W (out, in)."""
    if weight.stride(1) == 1 and weight.stride(0) == weight.size(1):
        return work.grad.t().mm(work.x)
    return work.x.t().mm(work.grad).t()


def _bias_grad(work: LinearWork) -> Tensor:
    """∂b (out,)."""
    grad = work.bias_grad
    if grad.dim() == 2:
        return grad.sum(dim=0)
    return grad.sum(dim=list(range(grad.dim() - 1)), keepdim=True).view(grad.shape[-1])


def run_weight_work(work: list[Work]) -> None:
    """Run W: compute the deferred gradients and add them to ``.grad``. Empties ``work``.

    The contributions of a weight that is used several times in a microbatch are summed in B's
    order, and then added to ``.grad`` once, like in autograd: in the dtype of the gradient, but for
    those of a weight that autocast has cast, which autograd sums before it casts them back.

    Raises :class:`SplitError` if an operand was overwritten since B.
    """
    left = Counter(id(parameter) for item in work for parameter in item.parameters)
    sums: dict[int, Tensor] = {}
    work.reverse()
    with torch.no_grad():
        while work:
            item = work.pop()
            item.check_unchanged()
            for parameter, found in item.gradients():
                key = id(parameter)
                left[key] -= 1
                cast = found.dtype != parameter.dtype
                grad = found if cast else found.to(grad_dtype(parameter))
                partial = sums.pop(key, None)
                total = grad if partial is None else partial + grad
                if left[key]:
                    sums[key] = total
                else:
                    accumulate(parameter, total)


def accumulate(parameter: nn.Parameter, grad: Tensor) -> None:
    """Add a gradient to ``parameter.grad``, which gets the form that autograd gives it."""
    if parameter.grad is None:
        parameter.grad = as_grad(parameter, grad)
    else:
        parameter.grad.add_(grad.to(grad_dtype(parameter)))
    written(parameter)
