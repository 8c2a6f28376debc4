"""Functions of the user whose weight gradients wait for W, beside those of torch.

Such a function runs with weights that need no gradient, so that autograd computes the gradient of
its input alone. Behind it stands a function that passes the output on and, in B, keeps the
arguments and the output's gradient for W.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.split import calls, sinks
from pipemorph_trainer.executor.split.sinks import Work
from pipemorph_trainer.executor.split.verifying import compare
from pipemorph_trainer.executor.torch_private import ordinary_call, version

WeightGradients = Callable[..., Mapping[str, Tensor]]


def register_function(
    place: Any, name: str, weights: Sequence[str], gradients: WeightGradients
) -> None:
    """Let W compute the weight gradients of a Python function, as it does those of ``F.linear``.

    ``place``, ``name``: a module or class, and its attribute that callers look up at each call.
    ``weights``: the arguments that are weights. The function returns one tensor that is linear in
    each of them.

    ``gradients(grad, **arguments)``, with the output's gradient and all arguments, detached,
    returns the gradient of every weight that is trained, by its argument, in the weight's shape. It
    is called in W without grad mode, and must not write to its arguments. For results equal to the
    bit it must use the operators that autograd does; ``split="verify"`` compares.

    Raises ``TypeError`` if the function is not one of Python, or has no such arguments.
    """
    original = getattr(place, name, None)
    if not inspect.isfunction(original):
        raise TypeError(f"register_function got {name!r} of {place!r}; expected a Python function")
    signature = inspect.signature(original)
    if unknown := set(weights) - set(signature.parameters):
        raise TypeError(f"{name} has no argument {min(unknown)!r}; expected names of its weights")
    made = _Function(original, signature, tuple(weights), gradients)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        return made.call(*args, **kwargs)

    calls.add(place, name, original, call)


class _Function(NamedTuple):
    original: Callable[..., Tensor]
    signature: inspect.Signature
    weights: tuple[str, ...]
    gradients: WeightGradients

    def run(self, arguments: Mapping[str, Any]) -> Tensor:
        """Call the original with all of its arguments by name."""
        bound = inspect.BoundArguments(self.signature, OrderedDict(arguments))
        return self.original(*bound.args, **bound.kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or not sinks.catching or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        own = {name: given[name] for name in self.weights if _trained(given[name])}
        known = {name: sinks.owned(each) if each.is_leaf else None for name, each in own.items()}
        owners = [each for each in known.values() if each is not None]
        if not owners:
            return self.original(*args, **kwargs)
        plain = all(type(each) is nn.Parameter for each in own.values())
        if len(owners) < len(own) or not plain or not ordinary_call() or any(
            each.excluded for each in owners
        ):  # fmt: skip
            for each in own.values():
                calls.exclude(each, f"it is used in {self.original.__name__} in an unusual way")
            return self.original(*args, **kwargs)
        apart = {
            name: each.detach() if isinstance(each, Tensor) else each
            for name, each in given.items()
        }
        out = self.run(given | {name: apart[name] for name in own})
        if type(out) is not Tensor:
            raise SplitError(
                f"{self.original.__name__} returned a {type(out).__name__}; a function whose weight"
                " gradients wait for W returns one tensor"
            )
        result: Tensor = _Passed.apply(out, self, given, apart, tuple(own), *own.values())
        return result


def _trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class _Passed(torch.autograd.Function):
    """Passes an output on, and leaves the work for the weights to W."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, out: Tensor, function: _Function, given: dict[str, Any],
        apart: dict[str, Any], names: tuple[str, ...], *own: nn.Parameter,
    ) -> Tensor:  # fmt: skip
        ctx.function, ctx.names, ctx.own = function, names, own
        tensors = {name: each for name, each in apart.items() if isinstance(each, Tensor)}
        ctx.others = {name: each for name, each in apart.items() if name not in tensors}
        ctx.kinds = tuple(tensors)
        ctx.save_for_backward(*tensors.values())
        # With a graph, for those who differentiate twice.
        ctx.given = dict(given)
        return calls.alone(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        function: _Function = ctx.function
        apart = ctx.others | dict(zip(ctx.kinds, ctx.saved_tensors, strict=True))
        none = (None,) * 4
        if torch.is_grad_enabled():
            for each in ctx.own:
                calls.exclude(each, calls.SECOND_ORDER)
            out = function.run(ctx.given)
            return (grad, *none, *torch.autograd.grad(out, ctx.own, grad, create_graph=True))
        work = FunctionWork(function, apart, grad, ctx.names, ctx.own)
        nodes = [node for node, _ in ctx.next_functions[1:]]
        owners = calls.waiting(zip(nodes, ctx.own, strict=True))
        if owners is None:
            found = [g.to(p.dtype) for g, p in zip(work.gradients(), ctx.own, strict=True)]
            return (grad, *none, *found)
        work.owners = owners
        sink = owners[0].sink
        sink.add(work)
        if sink.verify:

            def run(*weights: Tensor) -> Tensor:
                return function.run(apart | dict(zip(ctx.names, weights, strict=True)))

            needed, got = [True] * len(ctx.own), work.gradients()
            compare(sink, owners[0].name, run, ctx.own, needed, grad, got, ctx.names)
        return (grad, *none, *(None for _ in ctx.own))


calls.nodes.append(cast(Any, _Passed)._backward_cls)


class FunctionWork(Work):
    """What W needs of one call: its arguments and the output's gradient."""

    __slots__ = ("_arguments", "_function", "_grad", "_names", "_versions")

    def __init__(
        self,
        function: _Function,
        arguments: dict[str, Any],
        grad: Tensor,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        super().__init__(parameters, ())
        self._function, self._arguments, self._grad = function, arguments, grad
        self._names = names
        self._versions = self._written()

    def _written(self) -> list[int]:
        return [
            version(each)
            for name, each in {**self._arguments, "": self._grad}.items()
            if isinstance(each, Tensor) and name not in self._names
        ]

    def check_unchanged(self) -> None:
        if self._versions != self._written():
            raise SplitError(
                f"an argument of the call of {self._function.original.__name__} with"
                f" {self.owners[0].name!r}, or the gradient of its output, was written in place"
                " between B and W"
            )

    def gradients(self) -> list[Tensor]:
        with torch.no_grad():
            found = self._function.gradients(self._grad, **self._arguments)
        given = {
            each.untyped_storage().data_ptr()
            for each in (self._grad, *self._arguments.values())
            if isinstance(each, Tensor)
        }
        grads = []
        for name, parameter in zip(self._names, self.parameters, strict=True):
            grad = found.get(name)
            if grad is None or grad.shape != parameter.shape:
                what = "nothing" if grad is None else f"shape {tuple(grad.shape)}"
                raise SplitError(
                    f"the weight gradients registered for {self._function.original.__name__} gave"
                    f" {what} for {name!r}; expected shape {tuple(parameter.shape)}"
                )
            # `.grad` is written in place.
            grads.append(grad.clone() if grad.untyped_storage().data_ptr() in given else grad)
        return grads
