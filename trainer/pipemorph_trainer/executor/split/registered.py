"""Modules that are linear in their weights but not ``nn.Linear``, whose weight gradient a
registered function computes in W.

Their own forward runs with weights that need no gradient, so that autograd computes the gradient of
the input alone. Behind it stands a function that passes the output on and, in B, keeps the input
and the output's gradient for W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.split.deferred import Layer, Sink, Work, alone
from pipemorph_trainer.executor.torch_private import tensor_hooked, version

WeightGradient = Callable[[Any, Tensor, Tensor], Mapping[str, Tensor]]
"""``weight_gradient(module, input, output_gradient)``: gradients of the module's own parameters, by
their names in it."""

_registered: dict[type | str, WeightGradient] = {}


def register_linear(kind: type[nn.Module] | str, weight_gradient: WeightGradient) -> None:
    """Let W compute the weight gradients of a kind of module, as it does those of ``nn.Linear``.

    ``kind``: the class, or its full name (``"package.module.Class"``) if it may not be importable.
    Subclasses with the same ``forward`` are included. The module takes one tensor, with any number
    of dimensions, and returns one tensor that is linear in each of its own parameters.

    ``weight_gradient(module, input, output_gradient)`` returns the gradient of every own parameter
    that is trained, by its name in the module (``"weight"``, ``"bias"``), in the parameter's shape.
    It is called in W without grad mode, and must not write to its arguments. For results equal to
    the bit it must use the operators that autograd does; the self-test compares, and leaves what
    differs in B.

    Register before the stage is given to the pipeline. Raises ``TypeError`` for ``nn.Linear``,
    which needs no registration, and for what is neither a module class nor a name.
    """
    if not isinstance(kind, str) and not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(
            f"register_linear got {kind!r}; expected a subclass of nn.Module, or a name"
        )
    if kind is nn.Linear:
        raise TypeError("register_linear got nn.Linear, whose weight gradients W computes anyway")
    _registered[kind] = weight_gradient


def weight_gradient_of(module: nn.Module) -> WeightGradient | None:
    """The function registered for a module; None if there is none, or if its class has another
    forward than the registered one."""
    for base in type(module).__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        found = _registered.get(base) or _registered.get(name)
        if found is not None:
            same: Any = base
            return found if type(module).forward is same.forward else None
    return None


class RegisteredForward:
    """The forward of a registered module whose backward leaves its gradients to W."""

    def __init__(self, layer: Layer, sink: Sink, weight_gradient: WeightGradient) -> None:
        self._layer, self._sink, self._weight_gradient = layer, sink, weight_gradient

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._layer.module
        own = {name: p for name, p in module._parameters.items() if p is not None}
        forward: Any = type(module).forward
        if (
            torch.compiler.is_compiling()
            or not torch.is_grad_enabled()
            or self._layer.excluded
            or len(args) != 1
            or kwargs
            or type(args[0]) not in (Tensor, nn.Parameter)
            or not any(parameter.requires_grad for parameter in own.values())
            or any(tensor_hooked(parameter) for parameter in own.values())
        ):
            return forward(module, *args, **kwargs)
        for name, parameter in own.items():
            module._parameters[name] = parameter.detach()  # type: ignore[assignment]
        try:
            out = forward(module, *args)
        finally:
            module._parameters.update(own)
        if type(out) is not Tensor:
            raise SplitError(
                f"{self._layer.name!r} returned a {type(out).__name__}; the weight gradient"
                f" registered for {type(module).__name__} needs one tensor"
            )
        return _Deferred.apply(out, args[0].detach(), self, tuple(own), *own.values())

    def work(self, x: Tensor, grad: Tensor, needed: dict[str, nn.Parameter]) -> RegisteredWork:
        return RegisteredWork(self._layer, self._weight_gradient, x, grad, needed=needed)

    @property
    def sink(self) -> Sink:
        return self._sink

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled module gets its own class's forward."""
        return own_forward, (self._layer.module,)


def own_forward(module: nn.Module) -> MethodType:
    """The forward of a module's class, for the module."""
    return MethodType(type(module).forward, module)


class _Deferred(torch.autograd.Function):
    """Passes an output on, and gives the work for the parameters to the sink."""

    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        x: Tensor,
        call: RegisteredForward,
        names: tuple[str, ...],
        *own: nn.Parameter,
    ) -> Tensor:
        ctx.call, ctx.own = call, dict(zip(names, own, strict=True))
        ctx.save_for_backward(x)
        return alone(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        needed = {
            name: parameter
            for (name, parameter), need in zip(
                ctx.own.items(), ctx.needs_input_grad[4:], strict=True
            )
            if need
        }
        work = ctx.call.work(x, grad, needed)
        if ctx.call.sink.work is not None:
            ctx.call.sink.work.append(work)
            return (grad, None, None, None, *(None for _ in ctx.own))
        found = {id(parameter): g.to(parameter.dtype) for parameter, g in work.gradients()}
        return (grad, None, None, None, *(found.get(id(each)) for each in ctx.own.values()))


class RegisteredWork(Work):
    """Data that W needs of one call: the input and the output's gradient. ``needed``: parameters
    that get a gradient, by their names in the module."""

    __slots__ = ("_grad", "_layer", "_needed", "_versions", "_weight_gradient", "_x")

    def __init__(
        self,
        layer: Layer,
        weight_gradient: WeightGradient,
        x: Tensor,
        grad: Tensor,
        *,
        needed: Mapping[str, nn.Parameter],
    ) -> None:
        super().__init__({id(p): layer.full_name(name) for name, p in needed.items()})
        self._layer, self._weight_gradient = layer, weight_gradient
        self._x, self._grad, self._needed = x, grad, needed
        self._versions = (version(x), version(grad))

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return list(self._needed.values())

    def check_unchanged(self) -> None:
        if self._versions != (version(self._x), version(self._grad)):
            raise SplitError(
                f"the input of {self._layer.name!r} or the gradient of its output was written "
                f"in place between B and W"
            )

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        found = self._weight_gradient(self._layer.module, self._x, self._grad)
        given = {t.untyped_storage().data_ptr() for t in (self._x, self._grad)}
        for name, parameter in self._needed.items():
            grad = found.get(name)
            if grad is None or grad.shape != parameter.shape:
                kind = type(self._layer.module).__name__
                what = "nothing" if grad is None else f"shape {tuple(grad.shape)}"
                raise SplitError(
                    f"the weight gradient registered for {kind} gave {what} for {name!r} of"
                    f" {self._layer.name!r}; expected shape {tuple(parameter.shape)}"
                )
            # `.grad` is written in place.
            shared = grad.untyped_storage().data_ptr() in given
            yield parameter, grad.clone() if shared else grad


def _conv1d(module: Any, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """``weight``: (in, out), as its forward ``addmm(bias, x, weight)`` has it."""
    rows = x.reshape(-1, x.shape[-1]).to(grad.dtype)
    grad_rows = grad.reshape(-1, grad.shape[-1])
    return {"weight": rows.t().mm(grad_rows), "bias": grad_rows.sum(0)}


# Of GPT-2 and its relatives.
register_linear("transformers.pytorch_utils.Conv1D", _conv1d)
